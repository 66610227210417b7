"""The four counts of a session's rows and the epoch. They move here and nowhere else.

Holds plain numbers of the host. Knows nothing of where rows are; the device's own counts follow in the session state.

Invariants:
1. mirrored <= submitted <= committed <= logical, after every move.
2. Hidden states are known of positions hidden_from to logical - 1, and of no others: a session keeps those of the last rows it wrote.
3. Within an epoch mirrored never falls. A truncation that takes rows away from a submitted copy starts a new epoch,
   and completions of an older epoch raise nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kernels.layout import HIDDEN_ROWS

__all__ = ["CountsSnapshot", "RowCounts"]


@dataclass(frozen=True, slots=True)
class CountsSnapshot:
    """The counts at one moment."""

    logical: int
    committed: int
    submitted: int
    mirrored: int
    epoch: int


class RowCounts:
    """Counts of rows, each of all layers, keys included. Loop thread only."""

    __slots__ = ("committed", "epoch", "follower", "hidden_from", "logical", "mirrored", "retracted", "submitted")

    def __init__(self) -> None:
        self.logical = 0  # rows the session has; with drafts in flight, the most it can have
        self.committed = 0  # rows whose step the host has followed
        self.submitted = 0  # rows in some copyback batch
        self.mirrored = 0  # rows proved to be in RAM
        self.epoch = 0
        self.hidden_from = 0
        self.follower: RowCounts | None = None  # of the same rows on another device: what is retracted here is retracted there
        self.retracted: Callable[[int], None] | None = None  # told of every `retract`: what other stages count goes along

    def begin(self, rows: int, mirrored: int, hidden_from: int) -> None:
        """A session without rows gets the first `rows` rows of another one, `mirrored` of which it shares in RAM."""
        assert self.logical == 0, f"{self!r}: only a session without rows begins with some"
        self.logical = self.committed = rows
        self.submitted = self.mirrored = mirrored
        self.hidden_from = min(hidden_from, rows)
        self.check_integrity()

    def advance(self, rows: int) -> None:
        """A step or chunk that writes `rows` more rows was submitted."""
        assert rows >= 0, f"advance by {rows} rows"
        self.logical += rows
        self.hidden_from = max(self.hidden_from, self.logical - HIDDEN_ROWS)
        self.check_integrity()

    def commit(self, rows: int) -> None:
        """The host has followed the step of the next `rows` rows."""
        assert rows >= 0, f"commit of {rows} rows"
        self.committed += rows
        self.check_integrity()

    def retract(self, rows: int) -> None:
        """The host has followed a step of which `rows` rows do not count: refused drafts, or a step that never ran.

        They were at the end of their step; a later step in flight has begun that much earlier, so its rows count on from there.
        """
        assert 0 <= rows <= self.logical - self.committed, f"retract {rows} of {self.logical - self.committed} rows"
        self.logical -= rows
        self.hidden_from = min(self.hidden_from, self.logical)
        self.check_integrity()
        if self.follower is not None:
            self.follower.retract(rows)
        if self.retracted is not None:
            self.retracted(rows)

    def submit(self, rows: int) -> None:
        """Copies that cover the first `rows` rows in all were submitted."""
        assert rows >= self.submitted, f"submitted would fall from {self.submitted} to {rows}"
        self.submitted = rows
        self.check_integrity()

    def complete(self, rows: int, epoch: int) -> bool:
        """The copies that cover the first `rows` rows in all have completed.

        Args: rows: a count, proved by the caller for all rows below it. epoch: the epoch the copy was submitted in.
        Returns: whether the epoch is the current one; if not, nothing changed.
        """
        assert epoch <= self.epoch, f"a copy of epoch {epoch} completed in epoch {self.epoch}"
        if epoch < self.epoch:
            return False
        # Callbacks of a proved prefix may come in any order: a shorter one then says nothing new.
        self.mirrored = max(self.mirrored, rows)
        self.check_integrity()
        return True

    def truncate(self, rows: int, mirrored: int | None = None) -> None:
        """Keep the first `rows` rows. Below submitted a new epoch begins, in which only rows proved by now count as submitted.

        Args: mirrored: how many of them are still in RAM, if a block of RAM was given up with the rest.
        """
        assert 0 <= rows <= self.logical, f"truncate {self.logical} rows to {rows}"
        if rows < self.submitted:
            self.epoch += 1
            self.mirrored = min(self.mirrored, rows if mirrored is None else mirrored)
            self.submitted = self.mirrored
        self.committed = min(self.committed, rows)
        self.logical = rows
        self.hidden_from = min(self.hidden_from, rows)
        self.check_integrity()

    def snapshot(self) -> CountsSnapshot:
        """The counts now."""
        return CountsSnapshot(self.logical, self.committed, self.submitted, self.mirrored, self.epoch)

    def check_integrity(self) -> None:
        """Assert invariant 1."""
        assert self.mirrored >= 0, f"mirrored {self.mirrored}"
        assert self.mirrored <= self.submitted, f"mirrored {self.mirrored} > submitted {self.submitted}"
        assert self.submitted <= self.committed, f"submitted {self.submitted} > committed {self.committed}"
        assert self.committed <= self.logical, f"committed {self.committed} > logical {self.logical}"
        assert self.hidden_from <= self.logical, f"hidden states from {self.hidden_from} on of {self.logical} rows"

    def __repr__(self) -> str:
        return (
            f"RowCounts(logical={self.logical}, committed={self.committed}, submitted={self.submitted}, "
            f"mirrored={self.mirrored}, epoch={self.epoch})"
        )
