"""`forebay run`: one generation on the terminal. The text goes to standard output, all else to standard error."""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import structlog
import uvloop
from rich.console import Console

from engine import logs
from engine.chunk import Chunk
from engine.commands.command import Command, Invocation
from engine.commands.display import Bar, memory_table
from engine.errors import BadSetting, ForebayError, SessionBroken
from engine.protocol import EngineFace, GenerationFace, SessionId
from engine.sampling import Sampling
from engine.settings import SETTINGS, add_flags, parse_integer, parse_seconds

__all__ = ["COMMAND", "read_prompt"]

log = structlog.get_logger()

_REDRAW_S = 0.1
_SERVER_ONLY = (
    "host", "port", "api_key", "api_key_file", "body_max", "drain_timeout", "sessions_dir", "waiting_max", "sessions_max",
    "decode_batch_limit",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """The engine's settings, and what to generate."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=SETTINGS["model"].meaning)
    parser.add_argument("--prompt-file", dest="prompt_file", metavar="FILE", required=True, help="text to continue; - reads standard input")
    parser.add_argument("--max-tokens", dest="max_tokens", metavar="N", help="new tokens at most")
    parser.add_argument("--temperature", metavar="X", help="0 (the default): the most likely token each time")
    parser.add_argument("--seed", metavar="N", help="seed of the sampler")
    add_flags(parser, (name for name, each in SETTINGS.items() if name not in ("model", *_SERVER_ONLY) and each.place != "cluster"))


def _number(invocation: Invocation, name: str) -> int | None:
    text = invocation.options.get(name)
    try:
        return None if text is None else parse_integer(str(text))
    except ValueError as error:
        raise BadSetting(f"--{name.replace('_', '-')} must be {error}, not {text!r}") from None


def _sampling(invocation: Invocation) -> Sampling:
    text = invocation.options.get("temperature")
    try:
        temperature = 0.0 if text is None else parse_seconds(str(text))
    except ValueError:
        raise BadSetting(f"--temperature must be a number, not {text!r}") from None
    return Sampling(max_tokens=_number(invocation, "max_tokens"), temperature=temperature, seed=_number(invocation, "seed"))


def read_prompt(name: str) -> str:
    """The text of a file, or of standard input where `name` is -. Raises BadSetting naming --prompt-file."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise BadSetting(f"--prompt-file: cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadSetting(f"--prompt-file: {name} is not UTF-8: byte {error.start}") from error
    if not text:
        raise BadSetting(f"--prompt-file: {name} is empty")
    return text


async def _redraw(generation: GenerationFace, bar: Bar) -> None:
    while True:
        bar.update(generation.progress.rows_done, generation.progress.rows_total)
        await asyncio.sleep(_REDRAW_S)


async def _first_chunk(generation: GenerationFace, bar: Bar) -> Chunk:
    """The first chunk, with the bar redrawn while the prompt is read."""
    outcome: Chunk | ForebayError
    async with asyncio.TaskGroup() as group:
        drawing = group.create_task(_redraw(generation, bar))
        try:
            outcome = await anext(generation)
        except ForebayError as error:  # kept out of the group, which would wrap it
            outcome = error
        finally:
            drawing.cancel()
    if isinstance(outcome, ForebayError):
        raise outcome
    return outcome


async def _print_generation(engine: EngineFace, prompt: str, sampling: Sampling, session: SessionId, console: Console) -> None:
    started = time.perf_counter()
    async with engine.generate(prompt, sampling, session=session) as generation:
        with Bar("reading the prompt", "prompt.reading", "rows", console) as bar:
            chunk = await _first_chunk(generation, bar)
        first = time.perf_counter()
        log.info("prompt.read", prompt_tokens=chunk.usage.prompt_tokens, first_token_ms=round(1000 * (first - started)))
        early = chunk.usage.completion_tokens
        sys.stdout.write(chunk.text)
        async for chunk in generation:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    tokens, seconds = chunk.usage.completion_tokens, time.perf_counter() - first
    speed = f", {(tokens - early) / seconds:.1f} tokens/s" if tokens > early and seconds > 0 else ""
    console.print(f"{chunk.usage.prompt_tokens:,} prompt tokens, {tokens:,} new ({chunk.finish_reason}){speed}", highlight=False)
    if chunk.finish_reason == "error":
        raise SessionBroken("the generation ended with an error")


async def _generate(invocation: Invocation, prompt: str, sampling: Sampling) -> None:
    settings, console = invocation.settings, Console(file=sys.stderr)
    directory = settings.model_directory()
    with Bar(f"loading {directory.name}", "model.loading", "tensors", console) as loading:
        opening = invocation.open_engine(directory, settings.engine, progress=loading.update)
        async with opening as engine:
            loading.close()
            session = await engine.create_session()  # its own, so that its rows are still there to be counted at the end
            try:
                await _print_generation(engine, prompt, sampling, session, console)
                console.print(memory_table(engine.statistics()))
            finally:
                await engine.close_session(session)


def run(invocation: Invocation) -> int:
    """Generate once. Returns 0. Raises ForebayError."""
    settings = invocation.settings
    logs.configure(settings.server.log_format)
    sampling = _sampling(invocation)
    settings.model_directory()  # refused before the prompt is read from a pipe
    prompt = read_prompt(str(invocation.options["prompt_file"]))
    uvloop.run(_generate(invocation, prompt, sampling))
    return 0


COMMAND = Command("run", "one generation on the terminal, with a memory table at the end", configure, run)
