"""A second session from the first rows of one: whole blocks and pages are shared, the tail is copied.

Also the other side of sharing: `own_page`. Holds nothing. Knows both placements through what they have in common; `placement.py` opens
the new session over the shared units.

Invariants:
1. Shared units never change: a block is shared once it is full and, offloaded, in RAM; a page once it is full. Whoever cuts into a shared
   one gets one of its own first.
2. Nobody waits: copies run on the stream that steps begin on, behind the steps that wrote what they read and before those that replace it.
3. The tail block and the tail page are copied whole: what lies in them past the last row comes along.
4. A fork of a session whose own fork or cut fails while it waits is broken too.
5. Pages that an idle source has given up are filled from its blocks; the source itself stays without.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from torch import Tensor

from kernels.layout import BLOCK_ROWS, PAGE_KEYS, StateField
from memory.allotment import check_replace
from memory.append import blocks_of
from memory.arena import BlockId
from memory.copyback import Copyback, copy_bytes, first_cause, write_state
from memory.history import BlockStore
from memory.keys import PAGE_BLOCKS, key_moves, span_of
from memory.session import Holdings, SessionMemory, Shared, check_copies
from streams import Event, Full, Stream

__all__ = ["begin", "check_cut", "own_page", "shared_rows", "shared_units"]


def shared_rows(source: SessionMemory, rows: int) -> int:
    """Rows below `rows` whose blocks a fork shares: of full blocks, which offloaded must be in RAM."""
    kept = rows if source.ring is None else min(rows, source.counts.mirrored)
    return kept // BLOCK_ROWS * BLOCK_ROWS


def shared_units(source: SessionMemory, rows: int) -> Shared:
    """References to the blocks and pages that a fork of the first `rows` rows shares; the caller holds them now."""
    pages = min(source.pages.store.share.pages(rows // PAGE_KEYS), source.pages.pages)
    return Shared(source.history.share(shared_rows(source, rows) // BLOCK_ROWS), source.pages.share(pages))


def begin(
    source: SessionMemory, target: SessionMemory, rows: int, compute: Stream, copyback: Copyback, *, held_by: Holdings, chunk_open: bool
) -> Event[None]:
    """Give `target`, just opened over `shared_units`, the first `rows` rows of `source`; its counts say so at once.

    Args: held_by: the target's holdings. chunk_open: whether a chunk of the source is. compute: the stream that steps begin on.
        copyback: for full blocks that are not in RAM yet (offload).
    Returns: the device's part, held by both sessions; work on `compute` comes after it.
    """
    counts, shared = source.counts, shared_rows(source, rows)
    assert source.operations.broken is None, f"a fork of {source.session_id}, which is broken: {source.operations.broken}"
    assert 1 <= rows <= counts.committed, f"a fork of {rows} rows of {counts!r}"
    mirrored = 0 if source.ring is None else shared
    target.ensure_rows(rows, compute)
    moves, ends, sources = [], [], {}
    for block in range(shared // BLOCK_ROWS, blocks_of(rows)):
        if source.ring is not None and block < counts.mirrored // BLOCK_ROWS:
            # Only RAM is sure to hold it; the reference keeps the source from writing there, should it be cut meanwhile.
            sources[block] = source.mirror_block(block)
            ends.append(partial(_release, source.history.store, source.history.share(block + 1, block)))
        else:
            sources[block] = source.device_block(block)
        moves.append((target.device_block(block), sources[block]))
    share = source.pages.store.share
    page = share.pages(rows // PAGE_KEYS)
    if rows % PAGE_KEYS and share.has(rows // PAGE_KEYS) and page < source.pages.pages:
        moves.append((span_of(target.pages, page), span_of(source.pages, page)))
    first = PAGE_BLOCKS * share.page(source.pages.pages)
    kept = [sources[block] if block in sources else target.history.view(block) for block in range(first, blocks_of(rows))]
    moves += key_moves(target.pages, first, kept)
    moves.append((target.hidden, source.hidden))
    work = partial(_copy, moves, target.state, rows, mirrored)
    reads, writes = [each for _, each in moves], [each for each, _ in moves]
    # Order alone is not enough: behind a fork or cut of the source that failed lies what nobody may have.
    event = held_by.submit(compute, "fork", work, after=source.operations.placing, reads=reads, writes=writes, places=True)
    source.operations.hold(event)
    for end in ends:
        event.on_done(partial(_ended, end))
    event.on_done(partial(_broken_by, target))
    # A chunk writes hidden states before its rows count: what the copy brings may be of rows that the source does not have yet.
    target.counts.begin(rows, mirrored, rows if chunk_open else counts.hidden_from)
    if source.ring is not None:
        with suppress(Full):  # a later commit submits what did not fit
            for block in range(shared // BLOCK_ROWS, rows // BLOCK_ROWS):
                copyback.submit_block(target, block, [event])
    return event


def check_cut(session: SessionMemory, rows: int) -> None:
    """Raise CopybackInFlight or DoesNotFit where a truncation to `rows` rows would, before anything has changed."""
    check_copies(session, rows)
    pages, share = session.pages, session.pages.store.share
    page = share.pages(rows // PAGE_KEYS)
    if rows % PAGE_KEYS and share.has(rows // PAGE_KEYS) and page < pages.pages:
        check_replace(pages.allotment, page)
    block = rows // BLOCK_ROWS
    loads = session.ring is None or block < session.counts.mirrored // BLOCK_ROWS
    if rows % BLOCK_ROWS and loads:
        check_replace(session.history.allotment, block)


def own_page(holdings: Holdings, rows: int, stream: Stream) -> None:
    """Before a cut to `rows` rows: hold a copy of the page it goes through if others share it. Raises DoesNotFit; nothing changed."""
    pages, page = holdings.pages, holdings.share.pages(rows // PAGE_KEYS)
    if rows % PAGE_KEYS == 0 or not holdings.share.has(rows // PAGE_KEYS) or page >= pages.pages or not pages.allotment.shared(page):
        return
    source = span_of(pages, page)
    write, release = pages.replace(page)
    target = span_of(pages, page)

    def own() -> None:
        copy_bytes(target, source)
        write()

    event = holdings.submit(stream, "own page", own, reads=[source], writes=[target, write.entries], places=True)
    event.on_done(partial(_broken_by, holdings))
    holdings.operations.when_idle(release)


def _release(store: BlockStore, blocks: Sequence[BlockId]) -> None:
    for block in blocks:
        store.release(block)


def _copy(moves: list[tuple[Tensor, Tensor]], state: Tensor, rows: int, mirrored: int) -> None:
    for target, source in moves:
        copy_bytes(target, source)
    write_state(state, StateField.LOGICAL, rows)
    write_state(state, StateField.MIRRORED, mirrored)


def _ended(end: Callable[[], None], event: Event[None]) -> None:
    del event
    end()


def _broken_by(target: SessionMemory | Holdings, event: Event[None]) -> None:
    error = event.error()
    if error is not None:
        target.operations.break_with(first_cause(error))
