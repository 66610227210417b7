"""`forebay demo-cluster`: the packaged model over two nodes that Ray keeps alive, one of which is killed in the middle of an answer.

Starts two Ray nodes here, a server whose first layers lie on them, and a session over HTTP. The session is exported, goes on, and
one node is killed; its stream ends with an error, Ray starts the node again, the session's rows come from the export, those behind are made
again, and the next turn's tokens are compared with those of one process to which nothing happened. Exit code: 0 if they are equal, else 1.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from engine import logs
from engine.commands.command import Command, Invocation
from engine.commands.demo import long_prompt
from engine.config import ClusterConfig, EngineConfig
from engine.errors import BadSetting, ForebayError, SessionBroken
from engine.protocol import EngineFace
from engine.sampling import Sampling
from engine.settings import add_flags

__all__ = ["COMMAND"]

_ROOT = str(Path(__file__).resolve().parents[2])
_STAGES = "3,3,2"  # the demo model's eight layers: two nodes, and the head
_PROMPT_TOKENS, _ANSWER, _CUT_OFF, _AFTER = 2500, 48, 12, 64
_HOST_MEMORY_BYTES = 512 << 20
_OBJECTS = str(80 << 20)  # Ray's least; nothing of ours goes there
_RAY_STARTS_S, _BACK_S = 60.0, 120.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Only how it logs."""
    add_flags(parser, ("log_format",))


@asynccontextmanager
async def two_ray_nodes(place: Path, console: Console) -> AsyncIterator[str]:
    """Two Ray nodes of this machine, on loopback, for the length of the block; yields their address. Raises BadSetting: no ray."""
    program = Path(sys.executable).with_name("ray")
    if not program.exists():
        raise BadSetting("demo-cluster needs ray: make demo-cluster installs it, or pip install 'forebay[cluster]'")
    paths = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    common = ["--block", "--node-ip-address=127.0.0.1", "--num-cpus=1", f"--object-store-memory={_OBJECTS}", "--disable-usage-stats"]
    written = place / "ray_current_cluster"
    started: list[asyncio.subprocess.Process] = []

    async def start(*words: str) -> None:
        said = asyncio.subprocess.DEVNULL
        started.append(await asyncio.create_subprocess_exec(program, "start", *words, *common, env=environment, stdout=said, stderr=said))

    try:
        console.print("starting two Ray nodes on this machine ...")
        await start("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={place}")
        address = await _said_in(written, started[0])
        await start(f"--address={address}")
        yield address
    finally:
        for process in reversed(started):
            if process.returncode is None:
                process.terminate()
                await process.wait()


async def _said_in(path: Path, process: asyncio.subprocess.Process) -> str:
    for _ in range(int(_RAY_STARTS_S / 0.2)):
        if text := _text(path):
            return text
        if process.returncode is not None:
            raise BadSetting("ray start --head has ended: see its logs below the directory of temporary files")
        await asyncio.sleep(0.2)
    raise BadSetting(f"Ray has not started within {_RAY_STARTS_S:.0f} seconds")


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


class _Client:
    """One session over HTTP."""

    def __init__(self, http: aiohttp.ClientSession, address: str, model: str) -> None:
        self._http, self._address, self._model = http, address, model
        self.session = ""

    async def open(self) -> None:
        """Make the session."""
        async with self._http.post(f"{self._address}/v1/sessions", json={}) as response:
            self.session = (await response.json())["id"]

    async def export(self) -> None:
        """Bring the session to disk; it stays in memory."""
        async with self._http.post(f"{self._address}/v1/sessions/{self.session}/export", json={}) as response:
            if response.status != 200:
                raise SessionBroken(f"the export was answered with {response.status}: {await response.text()}")

    async def turn(self, prompt: list[int], tokens: int) -> AsyncIterator[list[int]]:
        """Token ids as they come. Raises SessionBroken with the error that ended the stream."""
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"return_token_ids": True, "ignore_eos": True, "session": {"id": self.session}}
        async with self._http.post(f"{self._address}/v1/completions", json=body) as response:
            if response.status != 200:
                raise SessionBroken(f"the server answered {response.status}: {await response.text()}")
            async for line in response.content:
                text = line.decode().strip()
                if not text.startswith("data: ") or text == "data: [DONE]":
                    continue
                event = json.loads(text.removeprefix("data: "))
                if "error" in event:
                    raise SessionBroken(event["error"]["message"])
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        yield choice["token_ids"]

    async def refused(self) -> str:
        """How a request is answered while a node is away."""
        body = {"model": self._model, "prompt": [1], "max_tokens": 1}
        async with self._http.post(f"{self._address}/v1/completions", json=body) as response:
            return f"{response.status}, Retry-After: {response.headers.get('Retry-After')}"

    async def ready_again(self) -> None:
        """Wait until the server is ready. Raises SessionBroken."""
        until = time.monotonic() + _BACK_S
        while time.monotonic() < until:
            async with self._http.get(f"{self._address}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)
        raise SessionBroken(f"the server is not ready again within {_BACK_S:.0f} seconds")


@dataclasses.dataclass
class _Story:
    """What happened. `prompts` and `answers` turn by turn; the second answer was cut off."""

    prompts: list[list[int]]
    answers: list[list[int]] = dataclasses.field(default_factory=list)
    rows: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def tell(self, console: Console, what: str, how: str) -> None:
        self.rows.append((what, how))
        console.print(f"{what}: {how}", highlight=False, soft_wrap=True)


async def _processes() -> list[int]:
    """Of the nodes, in order of their stages, as Ray knows them."""
    import ray

    from engine.node.ray_nodes import actor_name

    return [(await ray.get_actor(actor_name(stage)).address.remote())[2] for stage in range(2)]


async def _live(address: str, engine: EngineFace, story: _Story, console: Console) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        client = _Client(http, address, engine.model_name)
        await client.open()
        before = await _processes()
        story.tell(console, "processes", f"head {os.getpid()}, nodes {before[0]} and {before[1]}")
        story.answers.append([token async for tokens in client.turn(story.prompts[0], _ANSWER) for token in tokens])
        story.tell(console, "first turn", f"{len(story.prompts[0]):,} tokens read, {len(story.answers[0])} said by three stages")
        await client.export()
        story.tell(console, "export", "the session's rows of all three stages are on disk")
        await _be_cut_off(client, story, before[0], console)
        began = time.monotonic()
        story.tell(console, "meanwhile", f"a new request is answered with {await client.refused()}")
        await client.ready_again()
        after = await _processes()
        story.tell(console, "restart", f"{time.monotonic() - began:.1f} s later: nodes {after[0]} and {after[1]}, head {os.getpid()}")
        if after[1] != before[1] or after[0] == before[0]:
            raise SessionBroken(f"nodes {before} became {after}: one was to be started again, the other was not")
        story.answers.append([token async for tokens in client.turn(story.prompts[2], _AFTER) for token in tokens])
        story.tell(console, "resumed session", f"{len(story.answers[2])} tokens")


async def _be_cut_off(client: _Client, story: _Story, victim: int, console: Console) -> None:
    """A turn in whose middle a node is killed."""
    said: list[int] = []
    story.answers.append(said)
    try:
        async for tokens in client.turn(story.prompts[1], 4096):
            said += tokens
            if len(said) >= _CUT_OFF and victim:
                os.kill(victim, signal.SIGKILL)
                story.tell(console, "kill", f"node process {victim}, after {len(said)} tokens of the second turn")
                victim = 0
    except ForebayError as error:
        story.tell(console, "the stream's end", str(error))
        return
    raise SessionBroken("a node was killed, and the stream ended as if nothing had happened")


async def _undisturbed(invocation: Invocation, config: EngineConfig, story: _Story) -> list[int]:
    """The last turn's tokens in one process, behind the same history."""
    tokens: list[int] = []
    async with invocation.open_engine(invocation.settings.model_directory(), config) as engine:
        session = await engine.create_session()
        for prompt, answer in zip(story.prompts, story.answers, strict=True):
            tokens = []
            sampling = Sampling(max_tokens=len(answer), temperature=0.0, ignore_eos=True)
            async with engine.generate(prompt, sampling, session=session) as generation:
                async for chunk in generation:
                    tokens.extend(chunk.token_ids)
            if tokens != answer:
                break
    return tokens


async def _run(invocation: Invocation, config: EngineConfig, place: Path, console: Console) -> bool:
    from engine.node.opening import open_cluster

    settings, directory = invocation.settings, invocation.settings.model_directory()
    story = _Story([])
    cluster = ClusterConfig(cluster="ray", peer_timeout_s=settings.cluster.peer_timeout_s)
    server = dataclasses.replace(settings.server, port=0, sessions_dir=str(place / "sessions"), drain_timeout_s=5.0)

    async def show(address: str, engine: EngineFace) -> None:
        text = await engine.tokenizer.encode_async(long_prompt())
        story.prompts = [
            text[:_PROMPT_TOKENS],
            text[_PROMPT_TOKENS : _PROMPT_TOKENS + 200],
            text[_PROMPT_TOKENS + 200 : _PROMPT_TOKENS + 300],
        ]
        await _live(address, engine, story, console)

    async with two_ray_nodes(place / "ray", console) as ray_address:

        def open_model() -> AbstractAsyncContextManager[EngineFace]:
            staged = dataclasses.replace(config, stages=_STAGES, prefix_cache="on")
            return open_cluster(directory, staged, cluster, ray_address=ray_address)

        await invocation.serve(open_model, server, show)
    console.print("the same turns in one process ...")
    equal = await _undisturbed(invocation, config, story) == story.answers[-1]
    table = Table(title="two nodes under Ray, one of them killed", title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for row in story.rows:
        table.add_row(*row)
    table.add_row("same tokens as one process", "[green]yes[/]" if equal else "[red]NO[/]")
    console.print(table)
    return equal


def run(invocation: Invocation) -> int:
    """Returns 0 if the resumed session's tokens are those of one process, else 1. Raises BadSetting: ray is not there."""
    invocation = dataclasses.replace(invocation, settings=dataclasses.replace(invocation.settings, demo=True))
    settings = invocation.settings
    logs.configure(settings.server.log_format)
    config = dataclasses.replace(settings.engine, device="cpu", hot_rows=1024, host_memory_bytes=_HOST_MEMORY_BYTES, row_format="q8g64")
    console = Console(file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as place:
        return 0 if uvloop.run(_run(invocation, config, Path(place), console)) else 1


COMMAND = Command("demo-cluster", "two nodes under Ray on this machine, one of them killed; needs forebay[cluster]", configure, run)
