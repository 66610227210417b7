"""`forebay demo`: a long prompt over real HTTP with the history in RAM, then the same prompt with a resident cache, compared.

Starts the server with the model that comes with the package, streams its answer, draws where the rows are, and says whether both placements
gave the same tokens. On a terminal it then keeps serving; without one, or with CI set, it exits: 0 only if the tokens were equal.
"""

import argparse
import asyncio
import dataclasses
import json
import sys
import sysconfig
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from engine import logs
from engine.commands.command import Command, Invocation
from engine.commands.display import Bar, bytes_text
from engine.config import EngineConfig, ServerConfig
from engine.errors import BadSetting, SessionBroken
from engine.protocol import EngineFace, EngineStatistics, GenerationFace
from engine.sampling import Sampling
from engine.settings import SETTINGS, add_flags, parse_integer

__all__ = ["COMMAND", "long_prompt"]

_HOT_ROWS = 1024
_PROMPT_TOKENS = 20_000
_NEW_TOKENS = 128
_REDRAW_S = 0.1
_HOST_MEMORY_BYTES = 2 << 30  # the demo's history takes some 50 MB; pages that are not written cost nothing
# Modules every CPython 3.11 and later has, long and plain; the last is cut in the middle, so that there is something to go on with.
_MODULES = ("argparse", "ast", "inspect", "dataclasses", "textwrap", "heapq", "shutil")
_FLAGS = ("host", "port", "hot_rows", "row_format", "log_format")


@dataclass
class _Answer:
    """What came over HTTP, and what the engine held meanwhile."""

    text: list[str] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    first_at: float = 0.0
    first_tokens: int = 0
    last_at: float = 0.0
    statistics: EngineStatistics | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first chunk over the time they took."""
        return (len(self.tokens) - self.first_tokens) / max(self.last_at - self.first_at, 1e-9)


def long_prompt() -> str:
    """Source of the standard library: about 20,000 tokens of the demo model and some more, ending inside a module."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [(library / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES]
    texts[-1] = texts[-1][: len(texts[-1]) // 2]
    return "\n".join(texts)


async def _cut_prompt(engine: EngineFace, tokens: int) -> str:
    """The end of `long_prompt`, from a line's start, as long as it takes to be at least `tokens` tokens."""
    text = long_prompt()
    total = len(await engine.tokenizer.encode_async(text))
    if tokens > total:
        raise BadSetting(f"--prompt-tokens must be at most {total}, the demo's whole text, not {tokens}")
    characters = len(text) * tokens // total
    while True:
        start = text.rfind("\n", 0, max(0, len(text) - characters)) + 1
        found = len(await engine.tokenizer.encode_async(text[start:]))
        if found >= tokens or start == 0:
            return text[start:]
        characters += 4 * (tokens - found) + 40  # some four characters a token


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, object]]:
    """The JSON of each server-sent event, up to [DONE]."""
    async for line in response.content:
        text = line.decode().strip()
        if text == "data: [DONE]":
            return
        if text.startswith("data: "):
            event = json.loads(text.removeprefix("data: "))
            if "error" in event:
                raise SessionBroken(event["error"]["message"])
            yield event


async def _draw_prompt(engine: EngineFace, total: int, bar: Bar) -> None:
    while True:
        bar.update(min(engine.statistics().mirrored_rows, total), total)
        await asyncio.sleep(_REDRAW_S)


async def _ask(address: str, api_key: str | None, engine: EngineFace, prompt: str, new_tokens: int, bar: Bar) -> _Answer:
    """Stream one completion over HTTP to standard output."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    answer = _Answer()
    body = {"model": engine.model_name, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
    body |= {"return_token_ids": True, "ignore_eos": True}
    drawing = asyncio.ensure_future(_draw_prompt(engine, len(await engine.tokenizer.encode_async(prompt)), bar))
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
            client.post(f"{address}/v1/completions", json=body, headers=headers) as response,
        ):
            if response.status != 200:
                raise SessionBroken(f"the server answered {response.status}: {await response.text()}")
            async for event in _events(response):
                drawing.cancel()
                bar.close()
                _take(answer, event, engine)
    finally:
        drawing.cancel()
    sys.stdout.write("\n")
    return answer


def _take(answer: _Answer, event: dict[str, object], engine: EngineFace) -> None:
    choices = event["choices"]
    assert isinstance(choices, list), "a completion chunk has choices"
    for choice in choices:
        answer.prompt = choice.get("prompt_token_ids") or answer.prompt
        answer.tokens.extend(choice.get("token_ids") or [])
        answer.text.append(choice["text"])
        sys.stdout.write(choice["text"])
        sys.stdout.flush()
    answer.last_at = time.perf_counter()
    if answer.first_at == 0.0 and answer.tokens:
        answer.first_at, answer.first_tokens = answer.last_at, len(answer.tokens)
    statistics = engine.statistics()
    if statistics.mirrored_rows:
        answer.statistics = statistics


@dataclass(frozen=True)
class _Resident:
    tokens: list[int]
    device_bytes: int
    tokens_per_second: float


async def _run_resident(invocation: Invocation, config: EngineConfig, answer: _Answer, console: Console) -> _Resident:
    """The same prompt, token for token, with every row on the device."""
    directory = invocation.settings.model_directory()
    resident = dataclasses.replace(config, placement="resident")
    tokens: list[int] = []
    device_bytes, first_at = 0, 0.0
    async with invocation.open_engine(directory, resident) as engine:
        generation = engine.generate(answer.prompt, Sampling(max_tokens=len(answer.tokens), temperature=0.0, ignore_eos=True))
        with Bar("the same prompt, resident", "demo.resident", "rows", console) as bar:
            async with generation, asyncio.TaskGroup() as group:
                drawing = group.create_task(_draw_generation(generation, bar))
                async for chunk in generation:
                    drawing.cancel()
                    first_at = first_at or time.perf_counter()
                    tokens.extend(chunk.token_ids)
                    device_bytes = max(device_bytes, engine.statistics().device_bytes)
    return _Resident(tokens, device_bytes, (len(tokens) - 1) / max(time.perf_counter() - first_at, 1e-9))


async def _draw_generation(generation: GenerationFace, bar: Bar) -> None:
    while True:
        progress = generation.progress
        bar.update(progress.rows_done, progress.rows_total)
        await asyncio.sleep(_REDRAW_S)


def _table(answer: _Answer, resident: _Resident) -> Table:
    held = answer.statistics
    assert held is not None, "the engine held rows while it answered"
    reads = held.hits + held.misses
    equal = answer.tokens == resident.tokens
    table = Table(title="history in RAM against a resident run", title_justify="left")
    table.add_column()
    table.add_column("offload", justify="right")
    table.add_column("resident", justify="right")
    table.add_row("prompt tokens", f"{len(answer.prompt):,}", f"{len(answer.prompt):,}")
    table.add_row("new tokens", str(len(answer.tokens)), str(len(resident.tokens)))
    table.add_row("tokens/s", f"{answer.tokens_per_second:.1f}", f"{resident.tokens_per_second:.1f}")
    table.add_row("rows in RAM", f"{held.mirrored_rows:,}", "0")
    table.add_row("rows in the hot cache", f"{held.hot_rows:,}", "-")
    table.add_row("rows in the ring", f"{held.ring_rows:,}", "-")
    table.add_row("hit rate", f"{held.hits / reads:.2%} of {reads:,} reads" if reads else "no reads", "-")
    table.add_row("rows and keys in RAM", bytes_text(held.host_bytes), bytes_text(0))
    table.add_row("device memory, all of it", bytes_text(held.device_bytes), bytes_text(resident.device_bytes))
    table.add_row("same tokens", "[green]yes[/]" if equal else "[red]NO[/]", "")
    return table


def _number(invocation: Invocation, name: str, default: int) -> int:
    """A count of at least 1. Raises BadSetting."""
    text = invocation.options.get(name)
    try:
        value = default if text is None else parse_integer(str(text))
    except ValueError as error:
        raise BadSetting(f"--{name.replace('_', '-')} must be {error}, not {text!r}") from None
    if value < 1:
        raise BadSetting(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    return value


async def _show(invocation: Invocation, config: EngineConfig, address: str, engine: EngineFace, console: Console) -> bool:
    """Run both, print the table; returns whether the tokens were equal."""
    prompt = await _cut_prompt(engine, _number(invocation, "prompt_tokens", _PROMPT_TOKENS))
    key = invocation.settings.server.api_key
    with Bar("reading the prompt", "demo.prompt", "rows", console) as bar:
        answer = await _ask(address, key, engine, prompt, _number(invocation, "max_tokens", _NEW_TOKENS), bar)
    resident = await _run_resident(invocation, config, answer, console)
    console.print(_table(answer, resident))
    return answer.tokens == resident.tokens


def configure(parser: argparse.ArgumentParser) -> None:
    """A few settings, and how long the demo is."""
    parser.add_argument("--prompt-tokens", dest="prompt_tokens", metavar="N", help=f"prompt tokens, at least (default {_PROMPT_TOKENS})")
    parser.add_argument("--max-tokens", dest="max_tokens", metavar="N", help=f"new tokens (default {_NEW_TOKENS})")
    parser.add_argument("--exit", action="store_true", help="exit after the comparison, on a terminal too")
    add_flags(parser, (name for name in SETTINGS if name in _FLAGS))


def run(invocation: Invocation) -> int:
    """Returns 0 if both placements gave the same tokens, else 1."""
    settings = dataclasses.replace(invocation.settings, demo=True)
    invocation = dataclasses.replace(invocation, settings=settings)
    logs.configure(settings.server.log_format)
    for name in ("prompt_tokens", "max_tokens"):
        _number(invocation, name, 1)  # refused before anything is loaded
    config = dataclasses.replace(
        settings.engine,
        placement="offload",
        hot_rows=settings.engine.hot_rows or _HOT_ROWS,
        host_memory_bytes=settings.engine.host_memory_bytes or _HOST_MEMORY_BYTES,
    )
    # Any free port unless one was named: the demo must not fail because a server runs already.
    server = settings.server if settings.server.port != ServerConfig().port else dataclasses.replace(settings.server, port=0)
    console = Console(file=sys.stderr)
    stays = settings.interactive and not invocation.options.get("exit")
    equal = False

    def open_model() -> AbstractAsyncContextManager[EngineFace]:
        return invocation.open_engine(settings.model_directory(), config)

    async def show(address: str, engine: EngineFace) -> None:
        nonlocal equal
        equal = await _show(invocation, config, address, engine, console)
        if stays:
            console.print(f"Serving at {address} (Ctrl-C stops). Talk to it:", highlight=False)
            body = json.dumps({"model": engine.model_name, "prompt": "import os\n", "max_tokens": 64, "stream": True})
            console.print(
                f"  curl -N {address}/v1/completions -H 'content-type: application/json' -d '{body}'", highlight=False, soft_wrap=True
            )
            await asyncio.Event().wait()

    uvloop.run(invocation.serve(open_model, server, show))
    return 0 if equal else 1


COMMAND = Command("demo", "a long prompt with its history in RAM, compared with a resident run", configure, run)
