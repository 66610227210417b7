"""What the server costs beside an engine that costs nothing: ratios of one run, on this machine.

    python tests/server_numbers.py --json docs/benchmarks/cpu_server.json

1. Processor time a streamed token at 64 streams, over that of a bare aiohttp writer of the same events (goal: at most 3).
2. Tokens a second through HTTP, of an engine's that steps 64 streams every 20 ms, over those of its readers without HTTP (goal: 0.95).
3. Memory of 1,000 streams that have had one token and wait (goal: below 100 MB).
4. The 99th percentile of the loop's lag while a prompt of a million tokens is tokenised, over that of the loop at rest (goal: at most 3).
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, the folder of this file comes first

import uvloop

from engine.bench.spread import percentile
from engine.gate.machine import machine
from engine.gate.prompt import library_text
from engine.gate.report import write_json
from engine.prompts import Prompts
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.stub_server import Stepper

__all__ = ["idle_bytes", "lag_ratio", "rate_share", "token_us"]

_ROOT = Path(__file__).resolve().parents[1]
_STREAMS = 64
_DONE = b"data: [DONE]\n\n"
_LIMIT_S = 60.0  # for one measurement


@asynccontextmanager
async def _server(kind: str, mode: str) -> AsyncIterator[tuple[int, int]]:
    """A stub server's process; yields its port and process id."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(_ROOT / "tests" / "stub_server.py"), kind, mode, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())["port"], process.pid
    finally:
        process.stdin.close()
        await process.wait()


def _cpu_s(pid: int) -> float:
    """Processor time of a process, to the clock's tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _ask(port: int, tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that has been asked for, read by as little code as can be: the client shares the cores."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: stub\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def _read(port: int, tokens: int) -> None:
    """A whole stream."""
    reader, writer = await _ask(port, tokens)
    last = b""
    while _DONE not in last:
        piece = await reader.read(2**18)
        assert piece, "the stream broke off"
        last = last[-len(_DONE) :] + piece
    writer.close()
    await writer.wait_closed()


async def _read_all(port: int, streams: int, tokens: int) -> float:
    """Seconds for so many streams at once."""
    started = time.perf_counter()
    async with asyncio.timeout(_LIMIT_S):
        await asyncio.gather(*(_read(port, tokens) for _ in range(streams)))
    return time.perf_counter() - started


async def token_us(kind: str, tokens: int, streams: int = _STREAMS) -> float:
    """Microseconds of a server's processor time for one token of one of so many streams."""
    async with _server(kind, "step") as (port, pid):
        await _read_all(port, streams, 50)
        before = _cpu_s(pid)
        await _read_all(port, streams, tokens)
        return (_cpu_s(pid) - before) * 1e6 / (streams * tokens)


async def rate_share(tokens: int, step_ms: int = 20, streams: int = _STREAMS) -> tuple[float, float]:
    """Tokens a second of all streams, without HTTP and through it."""
    stepper = Stepper(str(step_ms))
    running = asyncio.ensure_future(stepper.run())

    async def take() -> None:
        queue = stepper.open(tokens)
        for _ in range(tokens):
            await stepper.take(queue)

    started = time.perf_counter()
    await asyncio.gather(*(take() for _ in range(streams)))
    without = streams * tokens / (time.perf_counter() - started)
    running.cancel()
    async with _server("forebay", str(step_ms)) as (port, _):
        await _read_all(port, 4, 5)
        return without, streams * tokens / await _read_all(port, streams, tokens)


async def idle_bytes(streams: int) -> int:
    """What so many streams that wait add to a server's resident memory."""
    async with _server("forebay", "idle") as (port, pid):
        held = []
        for count in (20, streams):
            before = _resident_bytes(pid)
            for _ in range(count):
                held.append(await _ask(port, 100))
                await held[-1][0].readuntil(b"data: ")
        grown = _resident_bytes(pid) - before
        for _, writer in held:
            writer.close()
        return grown


async def _lags(seconds: float, until: "asyncio.Future[Any] | None" = None) -> list[float]:
    """How much later than a millisecond each millisecond's sleep ended."""
    lags = []
    end = time.perf_counter() + seconds
    while not until.done() if until is not None else time.perf_counter() < end:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - before - 0.001)
    return lags


async def lag_ratio(tokens: int) -> dict[str, float]:
    """Milliseconds of lag at rest, and while a text of at least so many tokens becomes ids by the way of a request's prompt."""
    tokenizer = Tokenizer.load(_ROOT / "engine" / "demo_model")
    prompts = Prompts(tokenizer, ChatTemplate.load(_ROOT / "engine" / "demo_model"), 2048)
    sample = library_text(200_000)
    text = library_text(int(len(sample) / len(tokenizer.encode(sample)) * tokens * 1.05))
    await prompts.tokens(sample, {}, continues=False)
    rest = await _lags(3.0)
    reading = asyncio.ensure_future(prompts.tokens(text, {}, continues=False))
    started = time.perf_counter()
    during = await _lags(0.0, reading)
    seconds = time.perf_counter() - started
    made = len(await reading)
    await tokenizer.aclose()
    assert made >= tokens, f"only {made} tokens"
    return {
        "tokens": made, "seconds": seconds, "rest_p99_ms": 1e3 * percentile(rest, 99), "during_p99_ms": 1e3 * percentile(during, 99),
        "during_max_ms": 1e3 * max(during), "ratio": percentile(during, 99) / percentile(rest, 99),
    }  # fmt: skip


async def _measure(rounds: int) -> dict[str, Any]:
    costs: dict[str, list[float]] = {"bare": [], "forebay": []}
    for turn in range(rounds):
        for kind in sorted(costs, reverse=turn % 2 == 1):
            costs[kind].append(await token_us(kind, 1_500))
    without, through = await rate_share(300)
    return {
        "token_us": {**costs, "ratio": min(costs["forebay"]) / min(costs["bare"])},
        "rate": {"without_http": without, "through_http": through, "share": through / without},
        "idle_streams": {"streams": 1_000, "bytes": await idle_bytes(1_000)},
        "lag": await lag_ratio(2**20),
    }


def main() -> None:
    """Print the numbers, and write them where asked to."""
    parser = argparse.ArgumentParser(description="what the server costs beside an engine that costs nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    load = os.getloadavg()
    found = uvloop.run(_measure(asked.rounds))
    print(json.dumps(found, indent=1))
    if asked.json is not None:
        write_json(asked.json, {"version": 1, "kind": "server", "load_average": load, **found, "machine": machine(probe=False)})


if __name__ == "__main__":
    main()
