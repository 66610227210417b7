"""The longest wait between two tokens of a running stream while another session's prompt is read.

One session decodes behind a made-up history; after some tokens, which say what is usual, another request with a real prompt comes, in a
session of its own or behind made-up rows that one has already: so a prompt that takes too long is measured in parts. Prints and writes
nothing.

1. A wait is between two tokens as a reader on the engine's loop gets them, not as a device makes them: what holds up the loop counts. Steps
   are of one row, so tokens that come together were held up; they are one long wait and short ones.
2. A small prompt is read beside the stream before, behind the same rows and ending in as long a chunk, so that nothing is compiled while it
   is measured; what its rows launch at any later place the warm-up has launched (engine/warm_up.py). Then the session is cut back to these
   rows; with an MTP block the last of them is read again, and not counted.
3. What is measured begins when the request is made, its host work included, and ends with its first token, or when the time is up. What the
   request is made from is there before the stream begins: drawing a million ids holds the loop for tenths of a second.
4. A prompt that the time did not suffice for is left, and what was seen until then counts, also where a failure or a signal ended it; how
   far it came is told.
5. Made-up rows have memory for all that is to be read behind them, as the beginning of one whole prompt has.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import structlog
from rich.table import Table

from engine.bench.arm import Watch, forget_engines, seeded_prompt
from engine.bench.company import STALL_S, Fleet, Lengths, fill, greedy, with_history
from engine.bench.host import percentile
from engine.bench.many import Piece, Work, absolute
from engine.engine import Engine
from engine.errors import ForebayError
from engine.protocol import SessionId

__all__ = ["Gap", "run_gap"]

_APPEND_SEED = 20_240_104
_REHEARSED_CHUNKS = 3
_LOOK_S = 0.1

_log = structlog.get_logger("bench")


@dataclass(slots=True)
class Gap:
    """Waits of the stream, in seconds."""

    work: Work
    complete: bool = False
    usual_s: tuple[float, ...] = ()  # before the prompt came
    during_s: tuple[float, ...] = ()
    read: int = 0  # rows of the prompt that were in place at the end, without those that the session had before
    took_s: float = 0.0  # to the prompt's first token, or to the end of the time
    during_rows: tuple[int, ...] = ()  # of the prompt that were in place at the end of each wait

    @property
    def trouble(self) -> str:
        """See Found."""
        return ""

    @property
    def longest_of_usual(self) -> float | None:
        """The longest wait while the prompt was read over the median one before; None: no token came meanwhile."""
        return max(self.during_s) / percentile(self.usual_s, 50) if self.during_s else None

    @property
    def median_of_usual(self) -> float | None:
        """The median wait while the prompt was read over the median one before; None likewise."""
        return percentile(self.during_s, 50) / percentile(self.usual_s, 50) if self.during_s else None

    def fields(self) -> dict[str, Any]:
        """See Found."""
        found: dict[str, Any] = {
            "stream_rows": self.work.lengths[0].history + self.work.lengths[0].prompt, "append_after": self.work.plan.append_after,
            "append_rows": self.read, "stream_tokens": len(self.during_s), "longest_of_usual": self.longest_of_usual,
            "median_of_usual": self.median_of_usual,
        }  # fmt: skip
        if absolute(self.work.engine) and self.during_s:
            longest = sorted(zip(self.during_s, self.during_rows, strict=True), reverse=True)[:20]
            found |= {
                "usual_ms": _summary(self.usual_s), "during_ms": _summary(self.during_s), "append_s": self.took_s,
                "append_tokens_per_second": self.read / self.took_s, "stalls": sum(wait > STALL_S for wait in self.during_s),
                "longest_waits_ms": [1e3 * wait for wait, _ in longest], "longest_waits_rows": [rows for _, rows in longest],
            }  # fmt: skip
        return found

    def table(self) -> Table:
        """See Found."""
        drawn = Table(title=f"a stream while a prompt of {self.work.append_tokens:,} tokens is read", title_justify="left")
        times = absolute(self.work.engine) and bool(self.during_s)
        titles = ("rows before", "rows read", "tokens of the stream", "median/usual", "longest/usual")
        for title in (*titles, *(("usual ms", "median ms", "p99 ms", "longest ms", "read in s") if times else ())):
            drawn.add_column(title, justify="right")
        cells = [f"{rows:,}" for rows in (self.work.plan.append_after, self.read, len(self.during_s))]
        cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in (self.median_of_usual, self.longest_of_usual)]
        if times:
            usual, during = _summary(self.usual_s), _summary(self.during_s)
            cells += [f"{usual['p50']:.2f}", *(f"{during[name]:.2f}" for name in ("p50", "p99", "max")), f"{self.took_s:.1f}"]
        drawn.add_row(*cells)
        return drawn

    def said(self) -> str:
        """See Found."""
        rows, longest = f"{self.read:,} rows read behind {self.work.plan.append_after:,}", self.longest_of_usual
        return f"{rows}: " + ("no token came meanwhile" if longest is None else f"the longest wait was {longest:.2f} times the usual one")


def _summary(waits: tuple[float, ...]) -> dict[str, float]:
    return {**{f"p{percent}": 1e3 * percentile(waits, percent) for percent in (50, 90, 99)}, "max": 1e3 * max(waits)}


@dataclass(slots=True)
class _Stream:
    """The running stream's tokens."""

    at_s: list[float] = field(default_factory=list)
    rows_at: list[int] = field(default_factory=list)  # of the prompt that were in place when each came
    rows: Callable[[], int] = lambda: 0  # of the prompt, now
    ended: bool = False
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def tokens(self, count: int) -> None:
        """Wait for that many. Raises ForebayError: it ended before."""
        while len(self.at_s) < count:
            if self.ended:
                raise ForebayError(f"the stream ended after {len(self.at_s)} tokens; fewer --rows leave it more room")
            self.came.clear()
            await self.came.wait()

    def take(self, tokens: int) -> None:
        """So many came now."""
        self.at_s.extend([time.perf_counter()] * tokens)
        self.rows_at.extend([self.rows()] * tokens)
        self.came.set()

    def waits(self, first_s: float, last_s: float) -> tuple[tuple[float, int], ...]:
        """Between its tokens, and rows of the prompt at the end; those that lie, also in part, between two moments."""
        found = zip(pairwise(self.at_s), self.rows_at[1:], strict=True)
        return tuple((later - before, rows) for (before, later), rows in found if later > first_s and before < last_s)


@dataclass(frozen=True, slots=True)
class _Appended:
    """What is read beside the stream, and where."""

    session: SessionId | None  # its made-up rows are in place; None: one of its own each time
    rows: int  # of them
    small: tuple[int, ...]  # the prompt that is read before
    prompt: tuple[int, ...]

    def progress(self, done: int) -> int:
        """Rows of the prompt that are in place, where `done` of the whole context are; the context is not known at once."""
        return min(max(0, done - self.rows), len(self.prompt))


async def run_gap(work: Work, watch: Watch, piece: Piece) -> Gap:
    """All of it in one engine. Raises ForebayError; once it is measured `piece` is told what was seen, whatever ends it."""
    found = Gap(work)
    try:
        async with Engine.open(work.plan.model, work.engine, progress=lambda done, total: watch("loading", done, total)) as engine:
            fleet, stream = await fill(engine, work.lengths[0], 1, watch), _Stream()
            await engine.truncate_session(fleet.ids[0], work.lengths[0].history)
            appended = await _appended(engine, work, watch)
            running = asyncio.create_task(_read(fleet, stream))
            try:
                await _measure(engine, appended, stream, found, watch)
            except ForebayError:
                if running.done():
                    await running  # if it failed, that is why
                raise
            finally:
                if found.took_s:
                    piece(found)
                running.cancel()
                await asyncio.wait((running,))
    finally:
        await forget_engines(work.engine)
    return found


async def _read(fleet: Fleet, stream: _Stream) -> None:
    engine, lengths = fleet.engine, fleet.lengths
    prompt = seeded_prompt(engine.stage.model.config.vocabulary, lengths.prompt)
    try:
        async with engine.generate(prompt, greedy(lengths.new), session=fleet.ids[0]) as generation:
            async for chunk in generation:
                stream.take(len(chunk.token_ids))
    finally:
        stream.ended = True
        stream.came.set()


async def _appended(engine: Engine, work: Work, watch: Watch) -> _Appended:
    """Nobody decodes meanwhile."""
    before, tokens, chunk = work.plan.append_after, work.append_tokens, work.engine.append_chunk_rows
    small = (_REHEARSED_CHUNKS - 1) * chunk + (tokens % chunk or chunk)
    vocabulary, session = engine.stage.model.config.vocabulary, None
    if before:
        lengths = Lengths(before, 1, tokens + work.plan.alone_tokens - 1, 0)
        session = await with_history(engine, lengths, 1, lambda done: watch("made-up rows before the prompt", done, before))
        await engine.truncate_session(session, before)
    return _Appended(
        session, before, seeded_prompt(vocabulary, min(tokens, small), _APPEND_SEED + 1), seeded_prompt(vocabulary, tokens, _APPEND_SEED)
    )


async def _measure(engine: Engine, appended: _Appended, stream: _Stream, found: Gap, watch: Watch) -> None:
    plan = found.work.plan
    await stream.tokens(plan.warmup_tokens)
    await engine.generate(appended.small, greedy(plan.alone_tokens), session=appended.session).complete()
    if appended.session is not None:
        await engine.truncate_session(appended.session, appended.rows)
    first = len(stream.at_s) + 1
    await stream.tokens(first + plan.usual_tokens)
    found.usual_s = tuple(wait for wait, _ in stream.waits(stream.at_s[first], stream.at_s[-1]))
    asked_s = time.perf_counter()
    try:
        async with engine.generate(appended.prompt, greedy(plan.alone_tokens), session=appended.session) as generation:
            stream.rows = lambda: appended.progress(generation.progress.rows_done)
            token = asyncio.ensure_future(anext(generation))
            try:
                while not token.done() and time.perf_counter() - asked_s < plan.limit_s and not stream.ended:
                    await asyncio.wait((token,), timeout=_LOOK_S)
                    watch("reading the prompt", stream.rows(), len(appended.prompt))
            finally:
                found.took_s, found.read = time.perf_counter() - asked_s, stream.rows()
                token.cancel()  # nothing, if it is done
            if token.done():
                await token
                found.complete = not stream.ended
            if not found.complete:
                _log.warning("append.cut_short", rows=found.read, stream_ended=stream.ended, seconds=round(found.took_s, 1))
            if not stream.ended:
                await stream.tokens(len(stream.at_s) + 1)  # the wait that the end lies in
    finally:
        during = stream.waits(asked_s, asked_s + found.took_s)
        found.during_s, found.during_rows = tuple(wait for wait, _ in during), tuple(rows for _, rows in during)
