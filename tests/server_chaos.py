"""Clients that leave, lie and dawdle: thousands of requests on a server over a tiny model, and what is left of them afterwards.

    python tests/server_chaos.py --requests 10000 --json chaos.json

What is asked and done follows from the seed; how it interleaves is the machine's. Exit code 1 where something leaked or was answered with
an unexplained 5xx.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, the folder of this file comes first

import structlog
import uvloop

from engine.config import ServerConfig
from engine.engine import Engine
from engine.gate import write_json
from engine.gate.machine import machine
from engine.service import Service
from server import listening
from tests.engine.grammar.random_model import random_model
from tests.engine.runs import small

__all__ = ["Chaos", "Left", "run_chaos"]

_LIMIT_S = 120.0  # for one request
_WORDS = ("def parse(", "\u00fc\U0001f642", "a " * 40, "<|user|>", "</think>", "{", "\u0000")


@dataclass(frozen=True)
class Left:
    """What a process and its engine hold."""

    tasks: int
    descriptors: int
    blocks: int  # of the arena that are taken or reserved
    pool_buffers: int
    pool_bytes: int
    sessions: int
    running: int
    resident_bytes: int


@dataclass
class Chaos:
    """What was asked, what came back, and what was held before, in the middle and after."""

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def leaks(self) -> list[str]:
        """What is more at the end than at the beginning; memory, where the second half grew by more than the allocator wavers."""
        before, middle, after = self.left
        found = [
            f"{name}: {getattr(before, name)} before, {getattr(after, name)} after"
            for name in ("tasks", "descriptors", "blocks", "pool_buffers", "pool_bytes", "sessions", "running")
            if getattr(after, name) > getattr(before, name)
        ]
        grown = after.resident_bytes - middle.resident_bytes
        return found + ([f"memory: {grown} bytes more in the second half"] if grown > _WAVER_BYTES else [])

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": sum(self.kinds.values()), "kinds": dict(sorted(self.kinds.items())), "seconds": self.seconds,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())}, "unexplained": self.unexplained[:20],
            "leaks": self.leaks, "left": [vars(left) for left in self.left],
        }  # fmt: skip


_WAVER_BYTES = 24 << 20


class _Client:
    """One request after another over plain sockets, each of a kind that the seed chooses."""

    def __init__(self, port: int, draw: random.Random, chaos: Chaos) -> None:
        self._port, self._draw, self._chaos = port, draw, chaos
        self._kinds: tuple[tuple[str, Callable[[], Awaitable[None]]], ...] = (
            ("whole", self._whole), ("whole", self._whole), ("stream", self._stream), ("abort", self._abort), ("abort", self._abort),
            ("slow reader", self._slow), ("garbage", self._garbage), ("garbage", self._garbage), ("half a body", self._half),
            ("form", self._form), ("session", self._session), ("silent", self._silent),
        )  # fmt: skip

    async def one(self) -> None:
        kind, act = self._draw.choice(self._kinds)
        self._chaos.kinds[kind] += 1
        async with asyncio.timeout(_LIMIT_S):
            await act()

    def _body(self, **more: object) -> dict[str, object]:
        draw = self._draw
        fields: dict[str, object] = {
            "max_tokens": draw.randint(1, 6), "temperature": draw.choice((0, 1.0)), "seed": draw.randrange(100), "ignore_eos": True,
            "n": draw.choice((1, 1, 1, 2)), **more,
        }  # fmt: skip
        return {name: value for name, value in fields.items() if value is not None}

    def _asked(self, **more: object) -> tuple[str, dict[str, object]]:
        text = "".join(self._draw.choices(_WORDS, k=self._draw.randint(1, 5)))
        if self._draw.random() < 0.5:
            return "/v1/completions", self._body(prompt=text, **more)
        return "/v1/chat/completions", self._body(messages=[{"role": "user", "content": text}], **more)

    async def _open(self, path: str, body: bytes, *, method: str = "POST", length: int | None = None, kind: str = "application/json"):  # type: ignore[no-untyped-def]
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body)
        return reader, writer

    async def _close(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort() if self._draw.random() < 0.5 else writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _status(self, reader: asyncio.StreamReader, asked: object) -> int:
        line = await reader.readline()
        status = int(line.split()[1]) if line.startswith(b"HTTP/") else 0
        self._chaos.statuses[status] += 1
        if status >= 500:
            self._chaos.unexplained.append(f"{status} for {str(asked)[:300]}: {(await reader.read())[-300:]!r}")
        return status

    async def _answered(self, path: str, body: bytes, **how: Any) -> tuple[int, bytes]:
        """The status and the body of a whole answer."""
        reader, writer = await self._open(path, body, **how)
        try:
            status = await self._status(reader, (path, body))
            rest = await reader.read()
        except ConnectionError:
            status, rest = 0, b""
        await self._close(writer)
        return status, rest.partition(b"\r\n\r\n")[2]

    async def _whole(self) -> None:
        path, body = self._asked()
        await self._answered(path, json.dumps(body).encode())

    async def _form(self) -> None:
        path, body = self._asked(
            **self._draw.choice(({"guided_choice": ["yes", "no"]}, {"guided_regex": "[a-f]{2,4}"}, {"guided_regex": "(("}))
        )
        await self._answered(path, json.dumps(body).encode())

    async def _stream(self) -> None:
        path, body = self._asked(stream=True, stream_options={"include_usage": True})
        status, rest = await self._answered(path, json.dumps(body).encode())
        if status == 200 and b"data: [DONE]" not in rest:
            self._chaos.unexplained.append(f"a stream without an end: {rest[-200:]!r}")

    async def _abort(self) -> None:
        """Leave a stream, or a whole answer, at any time."""
        path, body = self._asked(stream=self._draw.random() < 0.7)
        body["max_tokens"] = 200
        reader, writer = await self._open(path, json.dumps(body).encode())
        for _ in range(self._draw.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)
        for _ in range(self._draw.choice((0, 1, 3, 8))):
            if not body["stream"] or not await reader.read(200):
                break
        await self._close(writer)

    async def _slow(self) -> None:
        """Read a few bytes a turn, then leave or read on."""
        path, body = self._asked(stream=True)
        body["max_tokens"] = 40
        reader, writer = await self._open(path, json.dumps(body).encode())
        await self._status(reader, body)
        for _ in range(30):
            if not await reader.read(16):
                break
            await asyncio.sleep(0)
        await self._close(writer)

    async def _garbage(self) -> None:
        """Bytes, JSON of the wrong kinds, wrong types, paths and methods."""
        draw = self._draw
        path, body = self._asked()
        name = draw.choice(list(body))
        body[name] = draw.choice((None, -1, 1e400, "x", [], {}, [[[]]], True, "\ud800", 2**70, {"type": "json_schema"}))
        payload = draw.choice((json.dumps(body).encode(), draw.randbytes(draw.randrange(60)), b"{" * 2_000, b"null", b"", b"\xff\xfe"))
        path = draw.choice((path, path, path, "/v1/nothing", "/v1/sessions/x", "/tokenize", "/v1/responses", "/v1/messages"))
        how = {
            "method": draw.choice(("POST", "POST", "POST", "DELETE", "GET")),
            "kind": draw.choice(("application/json",) * 4 + ("text/plain",)),
        }
        await self._answered(path, payload, **how)

    async def _half(self) -> None:
        """Promise more than is sent, and leave."""
        path, body = self._asked()
        payload = json.dumps(body).encode()
        _, writer = await self._open(path, payload[: self._draw.randrange(len(payload))], length=len(payload) + 5)
        await writer.drain()
        await self._close(writer)

    async def _silent(self) -> None:
        """Connect, and leave without a word, or in the middle of one."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"POST /v1/comp"[: self._draw.randrange(14)])
        await self._close(writer)

    async def _session(self) -> None:
        """Make one, take a turn or leave it in the middle, delete it."""
        status, made = await self._answered("/v1/sessions", b"{}")
        if status not in (200, 201):
            return
        session = json.loads(made)["id"]
        path, body = self._asked(session={"id": session}, n=1, stream=self._draw.random() < 0.5)
        if self._draw.random() < 0.5:
            await self._answered(path, json.dumps(body).encode())
        else:
            _, writer = await self._open(path, json.dumps(body).encode())
            await asyncio.sleep(0)
            await self._close(writer)
        await self._answered(f"/v1/sessions/{session}", b"", method="DELETE")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _settled(engine: Engine) -> Left:
    """What is held once nothing runs."""
    async with asyncio.timeout(_LIMIT_S):
        while (found := engine.statistics()).running or found.waiting:  # noqa: ASYNC110 - the engine tells nobody when it is idle
            await asyncio.sleep(0.01)
    await engine.stage.streams.idle()
    await asyncio.sleep(0.2)  # handlers of those who left end in their own turns
    gc.collect()
    memory = engine.stage.placement.statistics()
    return Left(
        tasks=len(asyncio.all_tasks()), descriptors=len(os.listdir("/proc/self/fd")),
        blocks=memory.arena.blocks - memory.arena.free + memory.arena.reserved, pool_buffers=memory.pool.buffers,
        pool_bytes=memory.pool.allocated_bytes, sessions=engine.statistics().sessions, running=found.running,
        resident_bytes=_resident_bytes(),
    )  # fmt: skip


async def run_chaos(model: Path, requests: int, seed: int, clients: int = 24, progress: Callable[[int], None] = lambda done: None) -> Chaos:
    """Send so many requests by so many clients at once. `model`: a directory of a tiny model."""
    chaos, started, done = Chaos(), time.perf_counter(), 0
    config = small(context_max=1_024, prefix_cache="off", sessions_max=16, waiting_max=64)
    async with Engine.open(model, config) as engine:
        service = Service(ServerConfig(port=0, body_bytes_max=1 << 20))
        service.opened(engine)

        async def client(port: int, number: int, share: int) -> None:
            nonlocal done
            one = _Client(port, random.Random(f"{seed} {number}"), chaos)
            for _ in range(share):
                await one.one()
                done += 1
                progress(done)

        async def send(port: int, share: int, first: int) -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(client(port, first + number, share))

        async with listening(service) as address:
            port = int(address.rpartition(":")[2])
            await send(port, 2, 0)  # what is made once: threads, caches, the compiled forms
            for first in (clients, 2 * clients):
                chaos.left.append(await _settled(engine))
                await send(port, max(1, requests // clients // 2), first)
            chaos.left.append(await _settled(engine))
    chaos.seconds = time.perf_counter() - started
    return chaos


def main() -> int:
    """Print what happened; 1 where something leaked or was not explained."""
    parser = argparse.ArgumentParser(description="clients that leave, lie and dawdle")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))

    def progress(done: int) -> None:
        if done % max(1, asked.requests // 10) == 0:
            print(f"{done} of about {asked.requests} requests", file=sys.stderr)

    with tempfile.TemporaryDirectory() as directory:
        chaos = uvloop.run(run_chaos(random_model(Path(directory) / "model"), asked.requests, asked.seed, progress=progress))
    found = chaos.as_json()
    print(json.dumps(found, indent=1))
    if asked.json is not None:
        write_json(asked.json, {"version": 1, "kind": "chaos", **found, "machine": machine(probe=False)})
    return 1 if chaos.leaks or chaos.unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
