"""Sessions with made-up histories of their own, filled once, and turns of them together or alone, timed.

A fleet's sessions are cut back to their histories before each turn, so that every turn of a session reads and generates the same; the rows
are written once. Knows which tokens came when; judges nothing.

1. Every session has a seed, so rows and a prompt, of its own.
2. A window is the time in which all sessions of a company decode: from some tokens after the last one's first to the first one's end.
   A step is between two tokens, in the window, of the session that came last, as a reader on the engine's loop gets them.
3. A stall is a longer wait between two tokens of one session, also outside the window, while others read their prompts.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import structlog

from engine.bench.arm import Watch, seeded_prompt
from engine.bench.floor import StepBytes, step_bytes
from engine.engine import Engine
from engine.errors import ForebayError
from engine.protocol import SessionId, SyntheticHistory
from engine.sampling import Sampling

__all__ = ["STALL_S", "Company", "Fleet", "Lengths", "fill", "greedy", "with_history"]

STALL_S = 0.2
_PROMPT_SEED = 20_240_103
_SETTLE = 3  # steps behind the look at the device's counts
_REDRAW_TOKENS = 64
_LOOK_S = 0.1

_log = structlog.get_logger("bench")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of every session, in tokens. Each turn behind the made-up rows reads the prompt and generates."""

    history: int
    prompt: int
    new: int
    warmup: int  # of a session's first tokens, not timed

    @property
    def total(self) -> int:
        """Tokens that a session may hold."""
        return self.history + self.prompt + self.new


@dataclass(frozen=True, slots=True)
class Company:
    """One turn of some sessions that began at the same time. Seconds; `hits` and `misses` of the window and a few steps beside it."""

    sessions: int
    token_ids: tuple[tuple[int, ...], ...]  # by session
    first_token_s: tuple[float, ...]  # by session, from the common begin: prompts are read one after another
    steps_s: tuple[float, ...]
    window_s: float
    window_tokens: tuple[int, ...]  # by session
    longest_s: float  # wait between two tokens of a session
    stalls: int
    hits: int
    misses: int
    floor: StepBytes | None  # of a step in the middle of the window; None without a window

    @property
    def tokens_per_second(self) -> float:
        """Of all sessions together, in the window."""
        return sum(self.window_tokens) / self.window_s

    @property
    def slowest_tokens_per_second(self) -> float:
        """Of the session that got least."""
        return min(self.window_tokens) / self.window_s

    @property
    def step_s(self) -> float:
        """The mean step."""
        return statistics.fmean(self.steps_s)

    @property
    def miss_rate(self) -> float | None:
        """Misses a selected row that was in the mirror; None where nothing was read through a hot cache."""
        reads = self.hits + self.misses
        return self.misses / reads if reads else None


@dataclass(slots=True)
class _Turn:
    """One session's tokens as they came."""

    ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Meeting:
    """Turns that run at the same time: who of them decodes, and what had been read when all did."""

    engine: Engine
    turns: tuple[_Turn, ...]
    warmup: int
    watch: Callable[[int], None]
    counts: list[tuple[int, int]] = field(default_factory=list)  # hits and misses so far, when all decoded and when the first ended
    met: bool = False
    _tokens: int = 0
    _warm: int = 0  # turns with their first tokens behind them

    def taken(self, turn: _Turn) -> None:
        """A token came."""
        self._tokens += 1
        if len(turn.ids) == self.warmup:
            self._warm += 1
            if self._warm == len(self.turns):
                self.met = True
                self._count()
        if self._tokens % _REDRAW_TOKENS == 0:
            self.watch(self._tokens)

    def ended(self) -> None:
        """A turn is over."""
        if len(self.counts) == 1:
            self._count()

    def _count(self) -> None:
        found = self.engine.statistics()
        self.counts.append((found.hits, found.misses))


def greedy(tokens: int) -> Sampling:
    """So many tokens, whatever they are."""
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Fleet:
    """Sessions of an open engine whose made-up rows are in place."""

    engine: Engine
    lengths: Lengths
    ids: tuple[SessionId, ...]
    fill_s: tuple[float, ...]  # seconds that writing each history took, to the first token behind it

    async def turn(self, numbers: Sequence[int], tokens: int, title: str, watch: Watch, *, rehearsal: bool = False) -> Company:
        """A turn of these sessions, all begun at once and read to the end; then they stay as they are until the next.

        Args: numbers: which. tokens: that each generates. rehearsal: ends as soon as all decode, so that every batch size has stepped.
        Raises: ForebayError, as generating does, and where they were to decode together and never did.
        """
        for number in numbers:
            await self.engine.truncate_session(self.ids[number], self.lengths.history)
        turns = tuple(_Turn() for _ in numbers)
        total = tokens * len(numbers)
        meeting = _Meeting(self.engine, turns, min(self.lengths.warmup, tokens), lambda done: watch(title, done, total))
        asked_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for turn, number in zip(turns, numbers, strict=True):
                    group.create_task(self._read(number, tokens, turn, meeting, rehearsal))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the first one's; the others were left because of it
        watch(title, total, total)
        found = self._company(turns, meeting, asked_s)
        if len(numbers) > 1 and not rehearsal and len(found.steps_s) < 2:
            raise ForebayError(f"{len(numbers)} sessions never decoded all at once within {tokens} tokens; raise --new-tokens")
        return found

    async def close(self) -> None:
        """Close every session."""
        for session in self.ids:
            await self.engine.close_session(session)

    async def _read(self, number: int, tokens: int, turn: _Turn, meeting: _Meeting, rehearsal: bool) -> None:
        prompt = _prompt(self.engine, self.lengths, number)
        async with self.engine.generate(prompt, greedy(tokens), session=self.ids[number]) as generation:
            async for chunk in generation:
                for token in chunk.token_ids:
                    turn.ids.append(token)
                    turn.at_s.append(time.perf_counter())
                    meeting.taken(turn)
                if rehearsal and meeting.met:
                    return
        meeting.ended()

    def _company(self, turns: tuple[_Turn, ...], meeting: _Meeting, asked_s: float) -> Company:
        """What the turns were."""
        last = max(turns, key=lambda turn: turn.at_s[0])
        first_s = last.at_s[min(meeting.warmup + _SETTLE, len(last.at_s)) - 1]
        end_s = min(turn.at_s[-1] for turn in turns)
        inside = [[at for at in turn.at_s if first_s < at <= end_s] for turn in turns]
        waits = [later - before for turn in turns for before, later in pairwise(turn.at_s)]
        steps = tuple(later - before for before, later in pairwise(last.at_s) if first_s <= before and later <= end_s)
        middle = statistics.fmean(sum(at <= first_s for at in turn.at_s) + len(own) / 2 for turn, own in zip(turns, inside, strict=True))
        stage, lengths = self.engine.stage, self.lengths
        floor = step_bytes(stage.model, stage.layout, length=lengths.history + lengths.prompt + middle, sessions=len(turns))
        before, after = meeting.counts if len(meeting.counts) == 2 else ((0, 0), (0, 0))
        return Company(
            sessions=len(turns), token_ids=tuple(tuple(turn.ids) for turn in turns),
            first_token_s=tuple(turn.at_s[0] - asked_s for turn in turns), steps_s=steps, window_s=max(0.0, end_s - first_s),
            window_tokens=tuple(map(len, inside)), longest_s=max(waits, default=0.0), stalls=sum(wait > STALL_S for wait in waits),
            hits=after[0] - before[0], misses=after[1] - before[1], floor=floor if steps else None,
        )  # fmt: skip


async def fill(engine: Engine, lengths: Lengths, sessions: int, watch: Watch) -> Fleet:
    """Write the histories of so many sessions, one after another, each with all the memory that its turns will need.

    Raises: ForebayError, as creating sessions and generating do.
    """
    ids, took, total = [], [], sessions * lengths.history
    for number in range(sessions):
        began_s, before = time.perf_counter(), number * lengths.history
        ids.append(await with_history(engine, lengths, number, lambda done: watch("made-up histories", before + done, total)))  # noqa: B023
        took.append(time.perf_counter() - began_s)
    watch("made-up histories", total, total)
    return Fleet(engine, lengths, tuple(ids), tuple(took))


async def with_history(engine: Engine, lengths: Lengths, number: int, watch: Callable[[int], None]) -> SessionId:
    """A session of its own whose made-up history is in place, with its prompt and a token behind it, and with memory for all of `lengths`.

    Args: number: its history and prompt are those of this number. watch: told how many rows of the history are there.
    Raises: ForebayError, as creating sessions and generating do.
    """
    began_s, session = time.perf_counter(), await engine.create_session()
    history, prompt = SyntheticHistory(number + 1, lengths.history), _prompt(engine, lengths, number)
    async with engine.generate(prompt, greedy(lengths.new), session=session, history=history) as generation:
        first = asyncio.ensure_future(anext(generation))
        while not first.done():
            watch(min(lengths.history, generation.progress.rows_done))
            await asyncio.wait((first,), timeout=_LOOK_S)
        await first
    _log.info("history.filled", session=number, rows=lengths.history, seconds=round(time.perf_counter() - began_s, 2))
    return session


def _prompt(engine: Engine, lengths: Lengths, number: int) -> tuple[int, ...]:
    return seeded_prompt(engine.stage.model.config.vocabulary, lengths.prompt, _PROMPT_SEED + number)
