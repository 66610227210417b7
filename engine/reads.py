"""Counts of where decode steps read their rows from. Sums of what the device keeps in each session's state; knows no steps."""

from collections.abc import Iterable
from dataclasses import dataclass

from memory.session import SessionMemory

__all__ = ["Reads"]


@dataclass(frozen=True, slots=True)
class Reads:
    """Where selected rows of decode steps were read from, summed over places, rows and selection groups."""

    hits: int = 0
    misses: int = 0
    ring: int = 0

    def plus(self, memories: Iterable[SessionMemory]) -> "Reads":
        """These and what the sessions' own state has counted so far."""
        hits, misses, ring = self.hits, self.misses, self.ring
        for memory in memories:
            found = memory.reads
            hits, misses, ring = hits + found[0], misses + found[1], ring + found[2]
        return Reads(hits, misses, ring)
