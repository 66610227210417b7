"""Who holds how many physical bytes on which tier.

Holds totals per tier and owner, in payload bytes (what the contents need) and allocated bytes (what was physically taken).
Knows nothing of budgets: `arena.py` and `pool.py` refuse, the ledger only counts.

Invariants:
1. A credit never exceeds what the same owner was charged on the same tier.
2. payload bytes <= allocated bytes, per charge.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Holding", "Ledger", "Tier"]

Tier = Literal["host", "device"]


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of one owner on one tier, or a sum of such."""

    payload_bytes: int = 0
    allocated_bytes: int = 0


class Ledger:
    """Loop thread only."""

    def __init__(self) -> None:
        self._holding_of: dict[tuple[Tier, str], Holding] = {}

    def charge(self, tier: Tier, owner: str, payload_bytes: int, allocated_bytes: int) -> None:
        """Count bytes that were taken. `allocated_bytes` is at least `payload_bytes`."""
        assert 0 <= payload_bytes <= allocated_bytes, f"charge of {payload_bytes} payload, {allocated_bytes} allocated bytes"
        held = self.holding(tier, owner)
        self._holding_of[tier, owner] = Holding(held.payload_bytes + payload_bytes, held.allocated_bytes + allocated_bytes)

    def credit(self, tier: Tier, owner: str, payload_bytes: int, allocated_bytes: int) -> None:
        """Count bytes that were given back, with the numbers they were charged with."""
        assert 0 <= payload_bytes <= allocated_bytes, f"credit of {payload_bytes} payload, {allocated_bytes} allocated bytes"
        held = self.holding(tier, owner)
        left = Holding(held.payload_bytes - payload_bytes, held.allocated_bytes - allocated_bytes)
        assert left.payload_bytes >= 0, f"{owner} on {tier}: {payload_bytes} payload bytes credited of {held.payload_bytes}"
        assert left.allocated_bytes >= 0, f"{owner} on {tier}: {allocated_bytes} allocated bytes credited of {held.allocated_bytes}"
        if left == Holding():
            del self._holding_of[tier, owner]
        else:
            self._holding_of[tier, owner] = left

    def holding(self, tier: Tier, owner: str) -> Holding:
        """What one owner holds on one tier; zeros if nothing."""
        return self._holding_of.get((tier, owner), Holding())

    def total(self, tier: Tier) -> Holding:
        """Sum over the owners of a tier."""
        held = [holding for (of_tier, _), holding in self._holding_of.items() if of_tier == tier]
        return Holding(sum(holding.payload_bytes for holding in held), sum(holding.allocated_bytes for holding in held))

    def statistics(self) -> dict[Tier, dict[str, Holding]]:
        """A copy: tier, then owner, in order of names. Owners that hold nothing are absent."""
        tiers: dict[Tier, dict[str, Holding]] = {"host": {}, "device": {}}
        for (tier, owner), holding in sorted(self._holding_of.items()):
            tiers[tier][owner] = holding
        return tiers
