"""The bodies of calls to a node and of its answers: what `Follower` asks (engine/stage_calls.py), as plain values. Knows no channel.

A session's memory, an append and an image are named by the number of the memory. Tensors do not travel in calls
(`passage.py`), but blocks of rows do.
"""

from typing import Any

import msgspec

from engine.append_cost import LayerSizes
from engine.stage_calls import StepCall, StepShape
from memory.placement import PlacementStatistics
from memory.session import SessionStatistics

__all__ = [
    "AppendBegin", "AppendEnd", "AppendFill", "AppendStand", "AppendUnits", "Blocks", "Facts", "Filled", "Fork", "Grow", "Held",
    "Join", "Load", "Memory", "Open", "Rows", "Shed", "Step",
]  # fmt: skip


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """Fields by their order."""


class Join(_Body, frozen=True):
    """Where the stage behind listens."""

    host: str
    port: int


class Facts(_Body, frozen=True):
    """What the node has. `sizes`: of `AppendCost`; `weights`: a checksum a layer of its own; `marks`: see `marks_of`."""

    process: int
    device: str
    dtype: str
    block_bytes: int
    append_rows: int
    hot_rows: int
    statistics: PlacementStatistics
    sizes: tuple[LayerSizes, ...]
    weights: tuple[str, ...]
    marks: dict[str, str]


class Open(_Body, frozen=True):
    memory: int
    session: str
    tokens_max: int


class Fork(_Body, frozen=True):
    source: int
    memory: int
    session: str
    tokens_max: int
    rows: int


class Held(_Body, frozen=True):
    """What a session, and the whole stage, hold now."""

    session: SessionStatistics
    reads: tuple[int, int, int]
    extra_bytes: int
    stage: PlacementStatistics
    changed: bool = False  # what the call itself returned, where it returns whether something changed


class Memory(_Body, frozen=True):
    memory: int


class Rows(_Body, frozen=True):
    """`commit`, `retract`, and the other calls of a session that take a count."""

    memory: int
    rows: int


class Grow(_Body, frozen=True):
    memory: int
    tokens_max: int
    cut: int | None


class Shed(_Body, frozen=True):
    memory: int
    shared: bool


class Step(_Body, frozen=True):
    """A step, also to `stand` behind it and to abort it. `number`: of what is handed on, equal on all stages."""

    number: int
    lane: int
    places: int
    positions_max: int
    shape_rows: int
    members: tuple[int, ...]
    rows: tuple[int, ...]
    fresh: bool
    follows: bool
    label: str

    @classmethod
    def of(cls, number: int, call: StepCall) -> "Step":
        shape = call.shape
        return cls(
            number, shape.lane, shape.places, shape.positions_max, shape.rows, call.members, call.rows, call.fresh, call.follows, call.label
        )  # fmt: skip

    def call(self) -> StepCall:
        """As the stage takes it."""
        shape = StepShape(self.lane, self.places, self.positions_max, self.shape_rows)
        members: tuple[Any, ...] = self.members
        return StepCall(shape, members, self.rows, self.fresh, self.follows, self.label)


class AppendBegin(_Body, frozen=True):
    """An append of `rows` rows in all."""

    memory: int
    session: str
    rows: int


class AppendUnits(_Body, frozen=True):
    """The next chunk; only the first stage gets its tokens, the others their number."""

    memory: int
    number: int
    rows: int
    tokens: tuple[int, ...]


class AppendEnd(_Body, frozen=True):
    """All stages have done their part of the open chunk."""

    memory: int
    last: bool


class AppendFill(_Body, frozen=True):
    memory: int
    rows: int
    seed: int
    history_rows: int


class AppendStand(_Body, frozen=True):
    """The token that follows comes as `number`."""

    memory: int
    number: int


class Load(_Body, frozen=True):
    memory: int
    rows: int
    window: int


class Blocks(_Body, frozen=True):
    """Blocks [first, stop) of a session."""

    memory: int
    first: int
    stop: int


class Filled(_Body, frozen=True):
    """Blocks from `first` on, as they are to lie in RAM."""

    memory: int
    first: int
    blocks: list[bytes]
