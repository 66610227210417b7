"""The units (blocks, page spans) that one session holds of a store, and those it is still entitled to.

Holds ids in order of position, spare units and a reservation. Knows nothing of addresses or tables.

Invariants:
1. held + spare + reserved == units_max, unless shared units were cut or replaced and the store had none instead (then less).
2. `ensure` within that entitlement never fails: an admitted session does not find its memory gone.
3. Cut units that are this session's alone stay spare until `trim`: steps in flight may still read or write them.
4. A unit that others share is never reused for new rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, Protocol, TypeVar

from memory.errors import DoesNotFit

__all__ = ["Allotment", "Store", "check_replace", "kept_for_cut"]

Id = TypeVar("Id")


class Store(Protocol[Id]):
    """Reference-counted units: `Arena`, `DeviceBlocks`, `KeyPages`."""

    def reserve(self, units: int) -> None:
        """Keep units for later takes. Raises DoesNotFit; nothing is reserved then."""
        ...

    def unreserve(self, units: int) -> None:
        """Give up units kept by `reserve`."""
        ...

    def take(self, *, reserved: bool = False) -> Id:
        """A unit with one reference. Raises DoesNotFit, but never with `reserved`."""
        ...

    def retain(self, unit: Id) -> None:
        """One more reference."""
        ...

    def release(self, unit: Id) -> bool:
        """One reference less; returns whether that freed the unit."""
        ...

    def references(self, unit: Id) -> int:
        """How many hold the unit."""
        ...


class Allotment(Generic[Id]):
    """One session's units of `store`."""

    def __init__(self, store: Store[Id], units_max: int, shared: Sequence[Id] = ()) -> None:
        """Hold `shared`, units of somebody else's, and reserve the rest.

        Args: shared: from `share`; their references are this allotment's from now on, also when it raises.
        Raises: DoesNotFit: the rest cannot be reserved; nothing is held then.
        """
        self.units_max = units_max
        self.ids: list[Id] = list(shared)
        self._store = store
        self._spare: list[Id] = []
        self._reserved = units_max - len(shared)
        assert self._reserved >= 0, f"{len(shared)} units shared with an allotment of {units_max}"
        try:
            store.reserve(self._reserved)
        except DoesNotFit:
            for unit in shared:
                store.release(unit)
            raise

    def ensure(self, units: int) -> int:
        """Hold at least `units` units; returns the index of the first new one (== len(ids) when there is none).

        Raises: DoesNotFit: only after shared units were cut; what was added before stays.
        """
        assert units <= self.units_max, f"{units} units of an allotment of {self.units_max}"
        first = len(self.ids)
        while len(self.ids) < units:
            if self._spare:
                self.ids.append(self._spare.pop())
            else:
                self.ids.append(self._store.take(reserved=self._reserved > 0))
                self._reserved = max(0, self._reserved - 1)
        return first

    def cut(self, units: int) -> None:
        """Keep the first `units` units. Those that are ours alone become spare, shared ones are released."""
        while len(self.ids) > units:
            unit = self.ids.pop()
            if self._store.references(unit) == 1:
                self._spare.append(unit)
            else:
                self._store.release(unit)
                self._replace()

    def _replace(self) -> None:
        """Reserve a unit in place of a shared one that we let go; without room for it the entitlement shrinks."""
        with suppress(DoesNotFit):
            self._store.reserve(1)
            self._reserved += 1

    def trim(self) -> None:
        """Free the spare units and stay entitled to as many. Call once no operation in flight touches them."""
        while self._spare:
            freed = self._store.release(self._spare.pop())
            assert freed, "a spare unit was shared"
            self._store.reserve(1)
            self._reserved += 1

    def replace(self, index: int) -> Id:
        """Hold a fresh unit in place of one that others share; returns the old one, whose reference is the caller's now.

        Raises: DoesNotFit: the store has none and no entitlement is left to take it from; nothing changed.
        """
        unit = self.ids[index]
        assert self.shared(index), f"unit {index} is this session's alone"
        try:
            fresh = self._store.take()
        except DoesNotFit:
            if not self._reserved:
                raise
            fresh = self._store.take(reserved=True)
            self._reserved -= 1
        self.ids[index] = fresh
        return unit

    def rest(self, kept: int | None = None) -> int:
        """Give up what is reserved and not held; `grow` asks for it again. Returns reserved units given up. Nothing may be spare.

        Args: kept: hold only that many of the first units; those that `ensure` brings in place of the others are the caller's to fill.
        """
        assert not self._spare, f"{len(self._spare)} spare units"
        while kept is not None and len(self.ids) > kept:
            self._store.release(self.ids.pop())
        given = self._reserved
        self._store.unreserve(given)
        self._reserved, self.units_max = 0, len(self.ids)
        return given

    @property
    def lacking(self) -> int:
        """Units that were cut or replaced while the store had none instead: a `grow` asks for them again."""
        return self.units_max - len(self.ids) - len(self._spare) - self._reserved

    def grow(self, units_max: int) -> Callable[[], None]:
        """Become entitled to `units_max` units, also to lacking ones; returns what undoes that as long as nothing was taken since.

        Raises: DoesNotFit; nothing changed then.
        """
        before = self.units_max
        assert units_max >= before, f"an allotment of {before} units cannot grow to {units_max}"
        more = units_max - before + self.lacking
        self._store.reserve(more)
        self._reserved += more
        self.units_max = units_max

        def undo() -> None:
            self._store.unreserve(more)
            self._reserved -= more
            self.units_max = before

        return undo

    def shared(self, index: int) -> bool:
        """Whether somebody else holds the unit too; its bytes must then never change."""
        return self._store.references(self.ids[index]) > 1

    def share(self, units: int, first: int = 0) -> list[Id]:
        """Units `first` to `units - 1` with one more reference each, which the caller now holds: the seam for forks and shared prefixes."""
        shared = self.ids[first:units]
        assert len(shared) == units - first, f"units {first} to {units} of {len(self.ids)} shared"
        for unit in shared:
            self._store.retain(unit)
        return shared

    def close(self) -> None:
        """Let go of everything. Call once no operation in flight touches the units."""
        for unit in (*self.ids, *self._spare):
            self._store.release(unit)
        self._store.unreserve(self._reserved)
        self.ids, self._spare, self._reserved, self.units_max = [], [], 0, 0

    def check_integrity(self) -> None:
        """Assert the invariants."""
        held = [*self.ids, *self._spare]
        assert len(set(held)) == len(held), "a unit is held twice"
        assert all(self._store.references(unit) >= 1 for unit in held), "a unit is held without a reference"
        assert all(self._store.references(unit) == 1 for unit in self._spare), "a spare unit is shared"
        assert len(held) + self._reserved <= self.units_max, f"{len(held)} held, {self._reserved} reserved of {self.units_max} units"


def check_replace(allotment: Allotment[Id], index: int) -> None:
    """Raise DoesNotFit where `replace` would; for a unit of one's own there is nothing to replace."""
    if allotment.shared(index) and not allotment._reserved:
        allotment._store.reserve(1)
        allotment._store.unreserve(1)


@contextmanager
def kept_for_cut(allotment: Allotment[Id], units: int, wanted: int) -> Iterator[None]:
    """Keep room for a cut that comes right behind, so that the entitlement to `wanted` units, which a `grow` in here asks for, lasts.

    Args: units: from here on the cut replaces or lets go of what others share, and takes a unit of the store for each.
    Raises: DoesNotFit; nothing changed then.
    """
    parted = sum(allotment.shared(index) for index in range(units, len(allotment.ids)))
    kept = max(0, parted - max(0, allotment.units_max - wanted))
    allotment._store.reserve(kept)
    try:
        yield
    finally:
        allotment._store.unreserve(kept)
