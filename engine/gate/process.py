"""A `forebay serve` process of its own: started, waited for, stopped.

Knows the server by its command line and by the one log line that says where it listens.

1. A run sees a process that served nobody before it and is gone before the next one starts, also when the gate is interrupted.
2. A server that does not come up raises with the line it left and its exit code.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import structlog

from engine.errors import ForebayError
from engine.gate.plan import Plan
from engine.gate.verdict import Arm
from engine.settings import SETTINGS

__all__ = ["ServerFailed", "serve_words", "server_process"]

log = structlog.get_logger()

_STOP_S = 120.0  # a drain, and giving back a large arena's registered memory
_LINE_BYTES_MAX = 2**20
_TAIL = 20


class ServerFailed(ForebayError):
    """A server process ended before it listened. `exit_code` is its own."""

    kind = "server_failed"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def serve_words(plan: Plan, arm: Arm) -> list[str]:
    """The command line of one arm's server: every engine setting by its flag, so that nothing else can decide it. Never on tape."""
    config = replace(plan.engine, placement=arm, prefix_cache="off")  # every run pays for its prompt
    words = ["serve", *(["--demo"] if plan.model is None else [plan.model]), "--port", "0", "--log-format", "json"]
    for setting in SETTINGS.values():
        if setting.place == "engine" and setting.name != "tape":
            value = getattr(config, setting.field)
            words += [setting.flag, "auto" if value is None else str(value) or "none"]
    return [*words, "--synthetic-history"] if plan.history is not None else words


def _environment() -> dict[str, str]:
    """Ours without our settings, and with the place this code was loaded from ahead of every other."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    root = str(Path(__file__).resolve().parent.parent.parent)
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH", ""))))
    return kept


async def _read_log(stream: asyncio.StreamReader, address: "asyncio.Future[str]", tail: deque[str]) -> None:
    """Keep the last lines of a server's standard error; the address comes with `server.opened`."""
    async for raw in stream:
        line = raw.decode(errors="replace").strip()
        tail.append(line)
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == "server.opened" and not address.done():
                address.set_result(event["address"])


def _last_words(tail: Sequence[str]) -> str:
    """The line a failed server left for people, else its last one."""
    said = [line.removeprefix("forebay: ") for line in tail if line.startswith("forebay: ")]
    return said[-1] if said else tail[-1] if tail else "it said nothing"


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@asynccontextmanager
async def server_process(words: Sequence[str]) -> AsyncIterator[str]:
    """Run `forebay WORDS` for the length of the block; yields the address it listens at once it is ready.

    Raises: ServerFailed: it ended before that.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "server", *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE, env=_environment(), limit=_LINE_BYTES_MAX,
    )  # fmt: skip
    assert process.stderr is not None, "it was piped"
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    tail: deque[str] = deque(maxlen=_TAIL)
    reading = asyncio.create_task(_read_log(process.stderr, address, tail))
    try:
        await asyncio.wait((address, reading), return_when=asyncio.FIRST_COMPLETED)
        if not address.done():
            code = await process.wait()
            raise ServerFailed(f"the server did not come up: {_last_words(tail)}", code if code > 0 else 1)
        yield address.result()
        if process.returncode is not None:
            log.error("gate.server_ended", exit_code=process.returncode, said=_last_words(tail))
    finally:
        address.cancel()
        await _stop(process)
        reading.cancel()
        await asyncio.wait((reading,))
