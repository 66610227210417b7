"""What both placements do when a session is opened or grows: whether it fits, its tables, what it shares. Holds nothing."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from kernels.layout import BLOCK_ROWS, PAGE_KEYS, BlockLayout
from memory.allotment import kept_for_cut
from memory.append import blocks_of, pages_of
from memory.arena import Arena
from memory.errors import DoesNotFit
from memory.history import BlockStore
from memory.keys import KeyPages
from memory.needs import Needs
from memory.pool import Pool, allocated
from memory.session import Holdings, SessionMemory, Shared

__all__ = ["check_room", "check_still", "grow_tables", "kept_for_cuts", "let_go", "tables_bytes", "units_bytes", "use_tables"]


@contextmanager
def kept_for_cuts(session: SessionMemory, rows: int | None, tokens_max: int) -> Iterator[None]:
    """`allotment.kept_for_cut` of blocks and pages, on every device, for a cut to `rows` rows behind a `grow` to `tokens_max`.

    Args: rows: None: there is no cut.
    """
    if rows is None:
        yield
        return
    parts = (session,) if session.peered is None else (session.peered.owner, session.peered.peer)
    with ExitStack() as kept:
        for part in parts:
            share = part.pages.store.share
            kept.enter_context(kept_for_cut(part.history.allotment, rows // BLOCK_ROWS, blocks_of(tokens_max)))
            kept.enter_context(kept_for_cut(part.pages.allotment, share.pages(rows // PAGE_KEYS), pages_of(tokens_max, share)))
        yield


def units_bytes(layout: BlockLayout, shared: Shared, block_bytes: int) -> tuple[int, int]:
    """Bytes of shared blocks, and device bytes of shared pages."""
    return len(shared.blocks) * block_bytes, len(shared.pages) * allocated(layout.key_layers * layout.key.page_bytes)


def check_room(needs: Needs, arena: Arena, pool: Pool) -> None:
    """Raise DoesNotFit if either tier is short, naming both."""
    host = arena.statistics()
    host_missing = max(0, needs.host_bytes - arena.available * host.block_bytes)
    device_missing = pool.missing_bytes(needs.device_bytes)
    if host_missing or device_missing:
        raise DoesNotFit(host_missing_bytes=host_missing, device_missing_bytes=device_missing)


def grow_tables(holdings: Holdings, tokens_max: int, undo: ExitStack) -> list[Tensor]:
    """Grow both allotments and take both tables; returns the new tables."""
    pool, pages = holdings.pool, pages_of(tokens_max, holdings.share)
    undo.callback(holdings.history.grow(blocks_of(tokens_max)))
    undo.callback(holdings.pages.grow(pages))
    tables = [pool.take(8 * blocks_of(tokens_max), "tables").view(torch.int64)]
    undo.callback(pool.give, tables[0])
    key_layers = holdings.pages.table.shape[0]
    tables.append(pool.take(8 * key_layers * max(1, pages), "tables").view(torch.int64).view(key_layers, max(1, pages)))
    undo.callback(pool.give, tables[1])
    return tables


def use_tables(holdings: Holdings, tokens_max: int, tables: Sequence[Tensor]) -> None:
    """Make the tables of `grow_tables` the session's, and give the old ones back."""
    holdings.pool.give(holdings.history.move_table(tables[0]))
    holdings.pool.give(holdings.pages.move_table(tables[1]))
    holdings.tokens_max = tokens_max


def let_go(shared: Shared, blocks: BlockStore, keys: KeyPages) -> None:
    """Give back the references of what was to be shared."""
    for block in shared.blocks:
        blocks.release(block)
    for page in shared.pages:
        keys.release(page)


def check_still(holdings: Holdings) -> None:
    """Assert that nothing of the session is in flight."""
    assert not holdings.closed, f"session {holdings.session_id} is closed"
    assert holdings.operations.outstanding == 0, f"session {holdings.session_id}: {holdings.operations.outstanding} operations in flight"
    assert holdings.counts.committed == holdings.counts.logical, f"{holdings.counts!r}: a step is in flight"


def tables_bytes(holdings: Holdings) -> int:
    """Device bytes of a session's present tables, which exist beside the new ones for a moment."""
    return sum(allocated(8 * table.numel()) for table in (holdings.history.table, holdings.pages.table))
