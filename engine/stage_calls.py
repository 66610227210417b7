"""What the stage that samples asks of the stages before it: all that passes between stages, in one process or on several machines.

A model whose layers are cut into stages is led by the *last* one: it has the head, the sampler and the MTP block, and beside it are
HTTP, the step loop and the text. The stages before it *follow*: each holds its own arena, pool, rings, hot caches, key pages, streams
and recordings, and does what it is told in the order in which it is told. A step, or a chunk of an append, begins with tokens at the
first stage; each stage hands on what it made of them (`Carried`), and what the last one decided goes back to all (`Standing`).

Arguments are plain: ids, counts, short tuples; tensors are named as such, and are only ever read behind the event that comes with them.
So a stage of another machine is a proxy that sends these calls, in order, over a channel; where a call answers something, its docstring
says what a proxy may answer from what it knows already. `engine/follower.py` is the form of one process.

Invariants:
1. Calls of one follower take effect in the order in which they are made. None waits; what takes time is an event.
2. Nothing is called for a session whose operations are held to be at rest (`Operations.outstanding` of the leading stage is 0) that a
   follower would refuse for being busy: whatever a follower has in flight for a session is held there too (`told`).
3. Counts but `mirrored` and `submitted` are equal on every stage whenever the loop looks: each moves by the same calls.
4. What fails at a follower fails the event that it gave, and so the step or the append; what breaks a session there breaks it
   everywhere, by `told.break_with`.
Source: design, sections 2, 10 and 13.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy
import numpy.typing
from torch import Tensor

from engine.protocol import SyntheticHistory
from engine.unit import Unit
from kernels.layout import BlockLayout
from memory.errors import DoesNotFit
from memory.operations import Operations
from memory.placement import PlacementStatistics
from memory.session import SessionStatistics
from streams import Event

__all__ = [
    "Asked", "Carried", "Follower", "FollowerAppend", "FollowerImage", "FollowerMemory", "MemoryId", "Standing", "StepCall", "StepShape",
]  # fmt: skip

MemoryId = NewType("MemoryId", int)  # of one session's memory on all stages, given by the leading one and never used twice


class Asked(Exception):
    """Whether there is memory was asked of another machine, which has not answered: nothing was taken as far as the caller knows.

    Once `event` is done the same call, with the same arguments, gives or raises what was answered; what was given and is not called for
    again is let go of by the proxy.
    """

    def __init__(self, event: Event[Any]) -> None:
        super().__init__("another machine was asked for memory and has not answered yet")
        self.event = event


@dataclass(frozen=True, slots=True)
class Carried:
    """What a stage hands on to the next. T query rows of a step, padding among them, or the rows of a chunk.

    states     [T, H]         model's dtype  the residual state behind the stage's last layer, before any norm
    bad_layer  [T]            int64          first layer whose output was not finite, else -1
    selection  [T, k] or None int32          of the group that the cut goes through; None where the next stage begins with a full layer

    Read them behind `event` alone. They are written again by the stage's next step of the same shape, or its next chunk, which begins
    behind the last stage's part of this one.
    """

    event: Event[Any]
    states: Tensor
    bad_layer: Tensor
    selection: Tensor | None


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the sessions of a step stand behind it, for the stages before.

    values  [places, STATE_FIELDS]  int64  the last stage's state of each place: LOGICAL, TOKEN, DRAFT_COUNT and DRAFTS are what counts
    """

    event: Event[Any]
    values: Tensor


@dataclass(frozen=True, slots=True)
class StepShape:
    """Names the buffers of a step. `lane`: steps of different lanes may be in flight at once and share no buffers and no session."""

    lane: int
    places: int
    positions_max: int  # no session of such a step has more; 0 on a CPU, where nothing depends on it
    rows: int  # query rows a place, at most


@dataclass(frozen=True, slots=True)
class StepCall:
    """One step.

    members  a session each place, the places behind them are free
    rows     query rows of each
    fresh    who is where, or an address, has changed since the last step of this shape
    follows  it comes behind the last step of its lane, and fails with it; False where that one failed already, or never ran
    label    whose it is, for tapes
    """

    shape: StepShape
    members: tuple[MemoryId, ...]
    rows: tuple[int, ...]
    fresh: bool
    follows: bool
    label: str


class FollowerMemory(Protocol):
    """One session's rows and keys on one stage before the last. Loop thread only. See `SessionMemory` and `Placement` for the calls."""

    @property
    def held(self) -> SessionStatistics:
        """Counts, blocks and slots. A proxy gives what it heard last; `mirrored` may then be less than it is."""
        ...

    @property
    def reads(self) -> tuple[int, int, int]:
        """Hits, misses and ring reads of its steps so far; of a proxy those it heard of last."""
        ...

    @property
    def extra_bytes(self) -> int:
        """Device bytes that a `shrink` would free."""
        ...

    def room(self, upper: int, rows: int) -> bool:
        """Whether a step of `rows` rows may be submitted when at most `upper` rows exist before it. A proxy answers with the mirrored rows
        that it heard of last: never yes where it is no."""
        ...

    def commit(self, rows: int) -> None:
        """The host has followed the step of the next `rows` rows, which is done on this stage too."""
        ...

    def retract(self, rows: int) -> None:
        """The host has followed a step of which `rows` rows do not count."""
        ...

    def check_cut(self, rows: int) -> None:
        """Raise CopybackInFlight or DoesNotFit where `truncate` would: asked of all stages before any is cut. A proxy answers from what
        it heard last."""
        ...

    def truncate(self, rows: int) -> Event[None]:
        """Keep the first `rows` rows."""
        ...

    def grow(self, tokens_max: int, cut: int | None) -> bool:
        """Make room for a longer turn, or bring back what rests. Args: cut: rows that a cut right behind keeps; None: there is none.

        Raises: DoesNotFit; the session is as before. Returns: whether addresses changed.
        """
        ...

    def rest(self) -> bool:
        """Give up hot caches and what is reserved; returns whether that freed anything."""
        ...

    def shed(self, *, shared: bool) -> bool:
        """Rest, and give up pages of index keys; returns whether that gave anything up."""
        ...

    def shrink(self) -> bool:
        """Bring hot caches back to their usual size; False where a chunk is open."""
        ...

    def close(self) -> None:
        """Let go of everything as soon as nothing of it is in flight. The last call."""
        ...


class FollowerAppend(Protocol):
    """One append on one stage before the last: its chunks, one open at a time."""

    @property
    def carried(self) -> Carried:
        """What the open chunk hands on, once all its units were submitted."""
        ...

    @property
    def fetching(self) -> Event[Any] | None:
        """Work of the append beside its units that is in flight; who stops or leaves the append waits for it."""
        ...

    def units(self, tokens: Sequence[int], arrived: Carried | None) -> Iterator[Unit]:
        """The units of the next chunk, the first of which opens it. The costs are arithmetic: a proxy makes its own (`AppendCost`).

        Args: tokens: of the chunk; only the first stage reads what they are. arrived: from the stage before; None: this is the first.
        """
        ...

    def finish(self, after: Event[Any], *, last: bool) -> Event[Any]:
        """All stages have done their part of the open chunk: its rows count. Args: after: the last of the chunk's work on all stages, so
        that no stage counts what another failed at. last: the append's last chunk. Returns: done when the chunk is over here."""
        ...

    def fill(self, rows: int, history: SyntheticHistory) -> Event[Any]:
        """A whole chunk of made-up rows instead, opened and finished; see `engine/synthetic.py`."""
        ...

    def stand(self, token: Tensor, event: Event[Any]) -> Event[None]:
        """Behind the last chunk: the token that follows. Args: token: int64 [1], to be read behind `event`."""
        ...

    def abandon(self) -> None:
        """Forget the open chunk, if there is one; what of it is in flight the session's memory holds. The last call."""
        ...


Block = numpy.typing.NDArray[numpy.uint8]


class FollowerImage(Protocol):
    """A stage's blocks of one session on their way to an archive, or in from one. Threads fill and read what it gives."""

    async def read_out(self) -> int:
        """Pass the stage's barrier; returns its rows, all of which are in RAM. Raises BarrierFailed, ArenaFull."""
        ...

    async def begin(self, rows: int, window: int) -> None:
        """The session, which has no rows, will be loaded with `rows` of them; `window`: blocks between `blocks` and the end of `place`."""
        ...

    async def blocks(self, first: int, stop: int) -> list[Block]:
        """Blocks [first, stop), uint8 [block_bytes] each, in RAM of this process: behind `read_out` as they are, behind `begin` to be
        filled."""
        ...

    async def place(self, first: int, stop: int) -> None:
        """Blocks [first, stop) are filled: bring them to where steps read them."""
        ...

    async def finish(self, hidden_from: int) -> None:
        """All blocks were placed: the session has its rows."""
        ...


class Follower(Protocol):
    """One stage before the last. Loop thread only."""

    layout: BlockLayout
    first_layer: int
    apart: bool  # whether its device is its own: then several steps in flight keep it and the others busy

    @property
    def held(self) -> PlacementStatistics:
        """What the stage holds; of a proxy what it heard last."""
        ...

    def open(self, memory: MemoryId, session: str, tokens_max: int, told: Operations) -> FollowerMemory:
        """A session without rows.

        Args: session: its name on tapes and in logs. told: holds whatever is in flight for it, and hears of what breaks it.
        Raises: DoesNotFit; nothing is held then. A proxy raises `Asked` instead where it cannot know, see there.
        """
        ...

    def fork(self, source: MemoryId, memory: MemoryId, session: str, tokens_max: int, rows: int, told: Operations) -> FollowerMemory:
        """A session that begins with the first `rows` rows of another one. Raises as `open`."""
        ...

    def never_fits(self, tokens_max: int) -> DoesNotFit | None:
        """What all memory of the stage, with nobody else in it, lacks for a session of `tokens_max` tokens. Arithmetic."""
        ...

    def step(self, call: StepCall, arrived: Carried | None) -> Carried:
        """Submit the stage's part of a step: tables and room for its rows first, and its rows count as logical behind it.

        Args: arrived: from the stage before, the same tensors at every step of one shape; None: this is the first stage.
        """
        ...

    def stand(self, call: StepCall, standing: Standing) -> Event[None]:
        """Where the sessions of that step stand now; the next step of any of them comes behind the event."""
        ...

    def abort(self, call: StepCall) -> tuple[Event[Any], ...]:
        """Behind a failed step: unmap every slot that its plans assigned, where its table still names its members. Returns: what has to be
        done before memory of its members is given back."""
        ...

    def append(self, memory: MemoryId, session: str, rows: int) -> FollowerAppend:
        """An append of `rows` rows in all to a session begins."""
        ...

    def image(self, memory: MemoryId) -> FollowerImage:
        """The session's blocks, going out or coming in."""
        ...

    def weights(self) -> tuple[str, ...]:
        """Checksums of a sample of each of its layers' weights, as `Identity` has them. Takes a while: call it beside the loop."""
        ...

    async def idle(self) -> None:
        """Wait until everything submitted so far is done. Then, with every session closed, what holds the stage may close it."""
        ...
