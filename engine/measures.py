"""What an engine says of itself to those who watch it: counts for metrics, its sessions by tier, and what its streams do.

Values alone, and the protocol of who gives them; part of the engine's face (`protocol.py`). Knows no tensors and no implementation.

1. Counts only grow while an engine is open; everything else is as it is now.
2. Nothing of this is gathered by itself: a snapshot costs its asker a pass over the sessions, and streams are observed only inside `watch`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["ActivityFace", "Arena", "InstrumentsFace", "LaneActivity", "Measures", "SessionTiers", "StreamCounts", "Tokens", "Waits"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of requests: read in prompts (cached ones among them), found cached, generated."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def plus(self, other: "Tokens") -> "Tokens":
        """The sum."""
        return Tokens(self.prompt + other.prompt, self.cached + other.cached, self.generated + other.generated)


@dataclass(frozen=True, slots=True)
class Waits:
    """A histogram of seconds. `counts` has one more than `bounds_s`: those above the last. A count is of waits up to its bound."""

    bounds_s: Sequence[float] = ()
    counts: Sequence[int] = (0,)
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arena:
    """Host memory for histories, in bytes of whole blocks."""

    total_bytes: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0  # promised to sessions, not used yet


@dataclass(frozen=True, slots=True)
class StreamCounts:
    """One stream since the engine was opened."""

    name: str
    operations: int  # completed
    failed: int
    payload_bytes: int
    busy_s: float
    in_flight: int  # now


@dataclass(frozen=True, slots=True)
class SessionTiers:
    """Where the rows of one session are. Rows are counted in positions, bytes are physical; shared ones count for each."""

    id: str
    namespace: str
    kind: str  # held: a caller's; request: of one request; stored: idle, for prompts that begin like it
    phase: str
    tokens: int
    rows: int  # committed
    block_rows: int
    mirrored_rows: int = 0  # in RAM
    ring_rows: int = 0  # only on the device, in the ring
    ring_rows_max: int = 0  # 0: the placement has no ring
    hot_rows: int = 0  # in the hot cache, of the fullest selection group
    hot_rows_max: int = 0
    blocks: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    prompt_rows: int = 0  # of a prompt that is being read: rows in place, of
    prompt_rows_total: int = 0
    generated: int = 0  # tokens of the request that runs


@dataclass(frozen=True, slots=True)
class Measures:
    """Counts and sizes now. `held_bytes`: physical bytes by tier and owner."""

    waiting: int = 0
    appending: int = 0
    decoding: int = 0
    sessions: Mapping[str, int] = field(default_factory=dict)  # by kind
    steps: int = 0
    tokens: Tokens = Tokens()
    waits: Waits = Waits()
    stalls: int = 0  # waits over 200 ms
    hits: int = 0
    misses: int = 0
    ring_reads: int = 0
    drafts_proposed: Sequence[int] = ()  # by place in their run
    drafts_accepted: Sequence[int] = ()
    mirrored_rows: int = 0
    hot_rows: int = 0
    ring_rows: int = 0
    lag_rows: int = 0  # committed and not in RAM, of all sessions; 0 where RAM is no part of the placement
    lag_rows_most: int = 0  # of one session
    held_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    arena: Arena = Arena()
    device_budget_bytes: int | None = None  # that sessions may take; None: no limit
    streams: Sequence[StreamCounts] = ()


@dataclass(frozen=True, slots=True)
class LaneActivity:
    """What one stream did in a stretch of time."""

    stream: str
    busy: Sequence[int]  # percent of each bin, the oldest first
    kinds: Mapping[str, float]  # seconds of work by kind of operation


class ActivityFace(Protocol):
    """What streams do, seen from the beginning of a `watch`. Loop thread only."""

    @property
    def bin_ms(self) -> float:
        """Length of a bin in milliseconds."""
        ...

    def take(self) -> Sequence[LaneActivity]:
        """Since the last `take`, or the beginning; at most some seconds of it."""
        ...


class InstrumentsFace(Protocol):
    """What can be read off an open engine. Loop thread only."""

    @property
    def open(self) -> bool:
        """Whether there still is something to read; False once the engine has given back its memory."""
        ...

    def measures(self) -> Measures:
        """Counts and sizes now."""
        ...

    def tiers(self, namespace: str, most: int) -> Sequence[SessionTiers]:
        """Sessions of a namespace: who is at work first, then by last use; at most `most` of them."""
        ...

    def watch(self) -> AbstractContextManager[ActivityFace]:
        """Observe the streams for the length of the block."""
        ...
