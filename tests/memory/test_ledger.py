"""The ledger: totals per tier and owner."""

import pytest

from memory.ledger import Holding, Ledger


def test_charges_add_up_per_tier_and_owner() -> None:
    """Each owner's bytes and each tier's totals are the sums of what was charged and not credited."""
    ledger = Ledger()
    ledger.charge("device", "ring", 100, 128)
    ledger.charge("device", "ring", 60, 64)
    ledger.charge("device", "pages", 1, 64)
    ledger.charge("host", "arena", 4096, 4096)
    ledger.credit("device", "ring", 100, 128)
    assert ledger.holding("device", "ring") == Holding(60, 64)
    assert ledger.total("device") == Holding(61, 128)
    assert ledger.total("host") == Holding(4096, 4096)
    assert ledger.statistics() == {"host": {"arena": Holding(4096, 4096)}, "device": {"pages": Holding(1, 64), "ring": Holding(60, 64)}}


def test_an_owner_that_gave_all_back_is_gone() -> None:
    """After equal charges and credits the statistics are those of a new ledger."""
    ledger = Ledger()
    ledger.charge("device", "ring", 10, 64)
    ledger.credit("device", "ring", 10, 64)
    assert ledger.statistics() == Ledger().statistics()


def test_more_cannot_be_given_back_than_was_taken() -> None:
    """A credit past the owner's own charge is a bug, even when the tier holds enough, and changes nothing."""
    ledger = Ledger()
    ledger.charge("device", "ring", 64, 64)
    ledger.charge("device", "pages", 64, 64)
    with pytest.raises(AssertionError, match="ring on device"):
        ledger.credit("device", "ring", 65, 65)
    with pytest.raises(AssertionError, match="ring on host"):
        ledger.credit("host", "ring", 1, 1)
    assert ledger.total("device") == Holding(128, 128)


def test_payload_never_exceeds_what_was_allocated() -> None:
    """A charge whose payload is larger than its allocation is refused."""
    with pytest.raises(AssertionError):
        Ledger().charge("host", "arena", 2, 1)
