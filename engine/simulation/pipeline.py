"""Sessions that decode through a pipeline of stages, on the virtual backend.

A stage is a stream; a pass over a batch is one operation of the length that `costs.py` says, and what carries states from stage to stage is
one more stream each. Holds `simulate`. Knows no published number.

1. A stage that is free takes the sessions that wait for it, in order of arrival, at most its decode batch limit: as they come, without
   waiting for more. Who was served together stays together only as long as they arrive together.
2. A step's tokens are drawn when it ends: each draft behind accepted ones is accepted with the same probability, by a generator of the
   session's own, so that a session's tokens do not depend on its company.
3. Everything is submitted from completions: virtual time passes only while stages work or states travel.
"""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.simulation.costs import Machine, StageShape
from streams.queued import Operation
from streams.virtual import VirtualBackend

__all__ = ["Load", "Outcome", "simulate"]

_NS_A_US = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """What decodes: equal sessions that all begin at once with `history` rows and end after `new_tokens` tokens."""

    sessions: int
    depth: int  # drafts a step
    limit: int  # sessions that a stage decodes together
    history: int
    new_tokens: int
    acceptance: float
    seed: int = 0

    def __post_init__(self) -> None:
        assert min(self.sessions, self.limit, self.new_tokens) >= 1, f"nothing to simulate: {self}"
        assert 0 <= self.acceptance <= 1, f"acceptance of {self.acceptance}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`seconds`: until the last session ended. `steady`: tokens a second while all were decoding. `busy`: share of time, a stage."""

    tokens: int
    seconds: float
    steady: float
    step_ms: float  # mean, of one session
    batch: float  # mean members of a pass
    busy: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        """Of the whole group, its end included."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class _Work:
    """Work that takes virtual time and does nothing."""

    duration_ns: int

    def __call__(self) -> None:
        """Nothing: what it costs is all there is to it."""


class _InTime:
    """An order in which whatever ends first ends first; of equals, what was submitted first."""

    def submitted(self, operation: Operation[Any]) -> None:
        """Any submission will do."""

    def ready(self) -> bool:
        """The host has nothing to do but what completions make it do."""
        return True

    def choose(self, runnable: Sequence[Operation[Any]]) -> Operation[Any]:
        """The one that ends first."""
        return min(runnable, key=lambda operation: (operation.started_ns + self.duration_ns(operation), operation.number))

    def failure(self, operation: Operation[Any]) -> None:
        """Nothing fails."""

    def completed(self, operation: Operation[Any], error: BaseException | None) -> None:
        """Any outcome will do."""

    def duration_ns(self, operation: Operation[Any]) -> int:
        """What the work says of itself."""
        assert isinstance(operation.work, _Work), f"{operation.label} is not timed"
        return operation.work.duration_ns

    def finish(self) -> None:
        """The run is over."""


@dataclass(slots=True)
class _Session:
    """One conversation."""

    number: int
    dice: random.Random
    tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class _Pipeline:
    """What waits where. Loop thread only."""

    machine: Machine
    stages: Sequence[StageShape]
    load: Load
    backend: VirtualBackend
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: list[deque[_Session]] = field(init=False)
    free: list[bool] = field(init=False)
    busy_ns: list[int] = field(init=False)
    left: int = field(init=False)
    tokens: int = 0
    steps: int = 0
    passes: int = 0
    members: int = 0
    full: tuple[int, int] = (0, 0)  # tokens so far and when, at the last moment at which all sessions decoded

    def __post_init__(self) -> None:
        self.waiting = [deque() for _ in self.stages]
        self.free = [True] * len(self.stages)
        self.busy_ns = [0] * len(self.stages)
        self.left = self.load.sessions

    def arrive(self, place: int, members: Sequence[_Session]) -> None:
        """Members reach a stage."""
        self.waiting[place].extend(members)
        self._begin(place)

    def _begin(self, place: int) -> None:
        """Start a pass if the stage is free and somebody waits for it."""
        queue = self.waiting[place]
        if not self.free[place] or not queue:
            return
        batch = [queue.popleft() for _ in range(min(self.load.limit, len(queue)))]
        rows = [self.load.depth + 1] * len(batch)
        histories = [self.load.history + member.tokens for member in batch]
        duration_ns = round(_NS_A_US * self.machine.pass_us(self.stages[place], rows, histories))
        self.free[place] = False
        self.busy_ns[place] += duration_ns
        self.passes += 1
        self.members += len(batch)
        event = self.backend.stream(f"stage{place}").submit(_Work(duration_ns), label="pass")
        event.on_done(lambda _: self._end(place, batch))

    def _end(self, place: int, batch: list[_Session]) -> None:
        """A pass is over: its members travel on, and the stage takes the next."""
        self.free[place] = True
        after = (place + 1) % len(self.stages)
        if after == 0:
            batch = [member for member in batch if self._step_ended(member)]
        if batch:
            duration_ns = round(_NS_A_US * self.machine.between_us(self.stages[place], self.stages[after]))
            event = self.backend.stream(f"way{place}").submit(_Work(duration_ns), label="states")
            event.on_done(lambda _: self.arrive(after, batch))
        self._begin(place)

    def _step_ended(self, member: _Session) -> bool:
        """Count a step's tokens; returns whether the session goes on."""
        made = 1
        while made <= self.load.depth and member.dice.random() < self.load.acceptance:
            made += 1
        made = min(made, self.load.new_tokens - member.tokens)
        member.tokens += made
        member.steps += 1
        self.tokens += made
        self.steps += 1
        if self.left == self.load.sessions:
            self.full = (self.tokens, self.backend.clock.now_ns())
        if member.tokens < self.load.new_tokens:
            return True
        self.left -= 1
        if self.left == 0:
            self.ended.set()
        return False


async def _run(machine: Machine, stages: Sequence[StageShape], load: Load) -> Outcome:
    backend = VirtualBackend(_InTime())
    pipeline = _Pipeline(machine, stages, load, backend)
    sessions = [_Session(number, random.Random(f"{load.seed} {number}")) for number in range(load.sessions)]
    pipeline.arrive(0, sessions)
    await pipeline.ended.wait()
    ended_ns = backend.clock.now_ns()
    await backend.close()
    tokens, until_ns = pipeline.full
    return Outcome(
        tokens=pipeline.tokens,
        seconds=ended_ns / 1e9,
        steady=tokens / until_ns * 1e9,
        step_ms=load.sessions * until_ns / 1e6 * pipeline.tokens / (tokens * pipeline.steps),
        batch=pipeline.members / pipeline.passes,
        busy=tuple(busy_ns / ended_ns for busy_ns in pipeline.busy_ns),
    )


def simulate(machine: Machine, stages: Sequence[StageShape], load: Load) -> Outcome:
    """Run `load` to its end. No loop may be running in this thread."""
    return asyncio.run(_run(machine, stages, load))
