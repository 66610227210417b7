"""What a session between two turns gives up, and what it needs to have it again.

Holds nothing. Reservations come back with a `grow`. Index keys lie in the session's blocks too, so their pages are given up without a copy,
and `Holdings.ensure_rows` fills them again from there when the next turn begins.

Invariants:
1. Nothing is given up while an operation of the session is in flight.
2. A session keeps its first pages and gives up the rest: what is shared comes first, so pages of its own go before shared ones.
"""

from itertools import takewhile

from memory.append import pages_of
from memory.pool import allocated
from memory.session import Holdings

__all__ = ["bytes_shed", "is_shed", "rest", "shed", "wake_pages"]


def rest(holdings: Holdings) -> bool:
    """Give up everything reserved beyond the present rows; returns whether that was anything. Nothing of the session may be in flight."""
    given = (holdings.history.allotment.rest(), holdings.pages.allotment.rest())
    holdings.tokens_max = holdings.counts.logical
    return any(given)


def shed(holdings: Holdings, *, shared: bool) -> bool:
    """Give up pages of index keys of a session at rest: its own, or with `shared` also those that others hold.

    Returns: whether any page was given up.
    """
    pages = holdings.pages
    kept = 0 if shared else sum(1 for _ in takewhile(pages.allotment.shared, range(pages.pages)))
    if kept == pages.pages:
        return False
    pages.allotment.rest(kept)
    pages.addresses[:, kept:] = 0
    holdings.keys_shed = True
    return True


def is_shed(holdings: Holdings) -> bool:
    """Whether the session lacks pages that it could take without a grow before it gave them up."""
    return holdings.pages.pages_max < pages_of(holdings.tokens_max, holdings.share)


def bytes_shed(holdings: Holdings) -> int:
    """Allocated device bytes of the pages that the session would hold or have reserved if it had not given them up."""
    lacking = max(0, pages_of(holdings.tokens_max, holdings.share) - holdings.pages.pages_max)
    return lacking * allocated(holdings.pages.store.span_bytes)


def wake_pages(holdings: Holdings) -> bool:
    """Reserve the pages that were given up, and those lacking. Raises DoesNotFit; returns whether any had been given up."""
    asleep = is_shed(holdings)
    holdings.pages.grow(max(holdings.pages.pages_max, pages_of(holdings.tokens_max, holdings.share)))
    return asleep
