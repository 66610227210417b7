"""Invariants broken on purpose, one a mutant: what `test_mutations.py` lets the search look for.

Each is a function that changes the real code in this process; it is called in a child process that ends afterwards, so nothing is undone.
Its docstring says which rule it breaks.

Not here: a peer that quantises a row again instead of taking the owner's bytes. The search has no peer; tests/engine/test_peer.py counts.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import engine.stored
import kernels.round.reference
import kernels.row_write.reference
import kernels.verify.reference
import memory.image
from engine.chain import Chain
from engine.prefix import PrefixIndex
from kernels.layout import BLOCK_ROWS, BlockLayout, StateField
from kernels.place import state_values
from kernels.row_write import NewKeys
from memory.allotment import Allotment
from memory.copyback import Copyback, copy_bytes
from memory.counts import RowCounts
from memory.host import HostBuffer
from memory.hot import HotCache
from memory.offload import OffloadSession
from memory.operations import Operations
from memory.ring import RING_ROWS, AppendRing
from memory.session import Holdings
from streams.queued import QueuedStream

__all__ = ["MUTANTS"]


def mirrored_on_submit() -> None:
    """The host's mirrored count rises when a copy is submitted."""
    real = Copyback.submit_raise

    def eager(self: Copyback, session: Any, rows: int, copies: Sequence[Any]) -> Any:
        raised = real(self, session, rows, copies)
        session.counts.complete(rows, session.counts.epoch)
        return raised

    Copyback.submit_raise = eager  # type: ignore[method-assign]


def mirrored_before_the_last_layer() -> None:
    """The MTP layer's rows and the keys go by a copy of their own, and the raise does not wait for that one."""

    def split(self: Copyback, session: Any, block: int, source: Tensor, after: Sequence[Any] = (), *, freezes: bool = False) -> Any:
        layout = session._layout
        cut = layout.row_offset(layout.layers - 1)
        target = session.mirror_block(block)
        streams = (self.stream, self.stream.backend.stream("late copyback"))  # type: ignore[attr-defined]
        events = []
        for stream, part in zip(streams, (slice(None, cut), slice(cut, None)), strict=True):
            events.append(
                stream.submit(
                    partial(copy_bytes, target[part], source[part]), label="copyback", session=session.session_id, after=after,
                    reads=[source[part]], writes=[target[part]],
                )
            )  # fmt: skip
            session.operations.hold(events[-1], freezes=freezes)
        return events[0]

    Copyback.submit_copy = split  # type: ignore[method-assign, assignment]


def ring_place_reused_early() -> None:
    """A ring place is written again before its block is in RAM."""
    sys.modules["memory.offload"].room = lambda upper, rows, mirrored: (  # type: ignore[attr-defined]
        upper + rows - BLOCK_ROWS * (mirrored // BLOCK_ROWS) <= RING_ROWS + BLOCK_ROWS
    )


def slot_hit_in_the_round_that_fills_it() -> None:
    """A leader reads its own slot, which only this round fills."""
    real = kernels.round.reference.plan_round

    def plan(*arguments: Any) -> None:
        real(*arguments)
        made = arguments[-1]
        filled = made.fill >= 0
        made.slot[filled] = made.fill[filled]

    kernels.round.reference.plan_round = plan


def forgotten_pin() -> None:
    """Hits are not pinned for the round."""
    real = kernels.round.reference.store_values_at

    def store(addresses: Tensor, values: Tensor) -> None:
        if sys._getframe(1).f_code.co_name != "plan_round":  # the plan itself stores pins and nothing else
            real(addresses, values)

    kernels.round.reference.store_values_at = store  # type: ignore[attr-defined]


def duplicate_leaders() -> None:
    """Every pick of a missing position leads."""

    def leaders(missing: Any) -> tuple[Tensor, Tensor]:
        every = torch.arange(missing.pick.numel())
        return every, every

    kernels.round.reference._leaders = leaders


def aborted_step_keeps_its_slots() -> None:
    """Slots that a failed step assigned stay mapped."""
    kernels.round.reference.clear_round = lambda *arguments: None


def prefetch_read_without_its_event() -> None:
    """Rows gathered ahead are read without waiting for their gather."""
    real = Chain.submit

    def submit(self: Chain, stream: Any, work: Any, *, after: Sequence[Any] = (), **options: Any) -> Any:
        return real(self, stream, work, after=[event for event in after if not event.label.endswith(".gather")], **options)

    Chain.submit = submit  # type: ignore[method-assign, assignment]


def partial_block_skipped_at_the_barrier() -> None:
    """The barrier copies whole blocks only."""
    # By its name: the package's attribute is the function of that name.
    sys.modules["memory.barrier"].blocks_of = lambda rows: rows // BLOCK_ROWS  # type: ignore[attr-defined]


def partial_flush_frees_ring_rows() -> None:
    """Room counts mirrored rows where it must count whole mirrored blocks."""
    sys.modules["memory.offload"].room = lambda upper, rows, mirrored: upper + rows - mirrored <= RING_ROWS  # type: ignore[attr-defined]


def block_freed_with_a_copy_in_flight() -> None:
    """What a session lets go of is freed at once."""
    Operations.when_idle = lambda self, callback: callback()  # type: ignore[method-assign]


def cancelled_wait_frees() -> None:
    """Cancelling who waits for a session's operations counts as if they were done."""
    real = Operations.settle

    async def settle(self: Operations) -> None:
        try:
            await real(self)
        except asyncio.CancelledError:
            callbacks, self._idle_callbacks = self._idle_callbacks, []
            for callback in callbacks:
                callback()
            raise

    Operations.settle = settle  # type: ignore[method-assign]


def two_layers_at_one_address() -> None:
    """Layer 1's rows lie where layer 0's do."""
    real = BlockLayout.row_offset
    BlockLayout.row_offset = lambda self, layer, row=0: real(self, 0 if layer == 1 else layer, row)  # type: ignore[method-assign]


def truncation_without_a_new_epoch() -> None:
    """Completions of copies submitted before a cut count after it."""
    real = RowCounts.truncate

    def truncate(self: RowCounts, rows: int, mirrored: int | None = None) -> None:
        epoch = self.epoch
        real(self, rows, mirrored)
        self.epoch = epoch

    RowCounts.truncate = truncate  # type: ignore[method-assign]


def slot_map_not_cleared() -> None:
    """A new session's slot maps are what its memory happens to hold."""
    HotCache.clear = lambda self: None  # type: ignore[method-assign]


def slot_map_not_cleared_on_fork() -> None:
    """A fork's slot maps are what its memory happens to hold."""
    real = HotCache.clear

    def clear(self: HotCache) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "fork":
            frame = frame.f_back
        if frame is None:
            real(self)

    HotCache.clear = clear  # type: ignore[method-assign]


def source_freed_under_its_fork() -> None:
    """A fork's copy does not count as in flight in the session it reads."""
    real = Operations.hold

    def hold(self: Operations, event: Any, **options: Any) -> None:
        if sys._getframe(1).f_code.co_name != "begin":  # the target's own hold comes from `Holdings.submit`
            real(self, event, **options)

    Operations.hold = hold  # type: ignore[method-assign]


def fork_behind_a_fork_that_failed() -> None:
    """A fork is ordered behind what put its source's rows there, and does not fail with it."""
    Operations.placing = ()  # type: ignore[method-assign, assignment]


def chunk_looks_for_rows_in_flight_in_ram() -> None:
    """A prompt takes rows whose copies were submitted from RAM."""
    real = OffloadSession._chunk_addresses

    def addresses(self: OffloadSession, first: int, end: int) -> Any:
        found = real(self, first, end)
        blocks = self.counts.submitted // BLOCK_ROWS
        found[:blocks] = self.history.addresses[:blocks]
        return found

    OffloadSession._chunk_addresses = addresses  # type: ignore[method-assign]


def rows_of_another_name_reused() -> None:
    """A prompt begins with stored rows whoever they are of."""
    real = PrefixIndex._root
    PrefixIndex._root = lambda self, namespace: real(self, "")  # type: ignore[method-assign]


def reused_past_the_known_hidden_states() -> None:
    """A prompt goes on from a row whose hidden state is not known."""
    engine.stored.step_back = lambda rows, held: rows


def index_keys_late() -> None:
    """A decode step's keys reach their page one step after its rows reach the ring."""
    real = kernels.row_write.reference.write_keys
    calls: list[tuple[NewKeys, tuple[Tensor, Tensor], Tensor | None]] = []

    def write(new: NewKeys, rope_table: tuple[Tensor, Tensor], positions: Tensor | None) -> None:
        real(replace(new, pages=torch.zeros_like(new.pages)), rope_table, positions)
        nowhere, kept = torch.zeros_like(new.destinations), None if positions is None else positions.clone()
        calls.append((replace(new, projected=new.projected.clone(), destinations=nowhere, pages=new.pages.clone()), rope_table, kept))
        if len(calls) > 2:
            real(*calls.pop(0))

    kernels.row_write.reference.write_keys = write


def table_rewritten_out_of_order() -> None:
    """The step table changes when the host says so, under the step that is running."""
    real = QueuedStream.submit

    def submit(self: QueuedStream, work: Callable[[], Any], *, label: str, **options: Any) -> Any:
        if label == "table.rewrite":
            work()
            return real(self, lambda: None, label=label, **options)
        return real(self, work, label=label, **options)

    QueuedStream.submit = submit  # type: ignore[method-assign, assignment]


def append_ring_reused_early() -> None:
    """A chunk is written into the append ring while the copies of the chunk before are in flight."""
    real = AppendRing.open

    def opened(self: AppendRing, *arguments: Any) -> None:
        self._last = []
        real(self, *arguments)

    AppendRing.open = opened  # type: ignore[method-assign]


def copyback_hook_skipped() -> None:
    """Steps are followed and nobody submits the copies of full blocks."""
    OffloadSession.commit = lambda self, rows, copyback, after: self.counts.commit(rows)  # type: ignore[method-assign]


def raise_jumps_over_a_lost_copy() -> None:
    """The raise of a later block does not wait for the raise of the block before."""
    real = Copyback.submit_raise

    def unchained(self: Copyback, session: Any, rows: int, copies: Sequence[Any]) -> Any:
        session.operations.last_raise = None
        return real(self, session, rows, copies)

    Copyback.submit_raise = unchained  # type: ignore[method-assign]


def snapshot_inside_a_block() -> None:
    """A step takes rows of a half-flushed block from RAM, where a later copy may be writing them."""
    real = kernels.verify.reference.spread_rows

    def spread_rows(table: Tensor, place_of: Tensor, positions: Tensor, tokens: Tensor, mirrored: Tensor, *rest: Tensor) -> None:
        real(table, place_of, positions, tokens, mirrored, *rest)
        mirrored.copy_(state_values(table, StateField.MIRRORED))

    kernels.verify.reference.spread_rows = spread_rows


def deep_cut_keeps_the_maps() -> None:
    """Slots go on claiming positions that were cut."""
    HotCache.unmap_from = lambda self, position: None  # type: ignore[method-assign]


def shared_block_written_again() -> None:
    """A cut block that others hold too is kept for new rows."""

    def cut(self: Allotment[Any], units: int) -> None:
        while len(self.ids) > units:
            self._spare.append(self.ids.pop())

    Allotment.cut = cut  # type: ignore[method-assign]


def failed_registration_keeps_memory() -> None:
    """Chunks registered before the one that failed stay registered."""
    HostBuffer.close = lambda self: None  # type: ignore[method-assign]


def cut_not_told_to_the_device() -> None:
    """A rollback moves the host's counts and not the device's."""
    module = sys.modules["memory.offload"]
    real = module.write_state  # type: ignore[attr-defined]

    def write(state: Tensor, field: int, value: int) -> None:
        if field != StateField.LOGICAL or sys._getframe(1).f_code.co_name != "apply":  # the name of a cut's work
            real(state, field, value)

    module.write_state = write  # type: ignore[attr-defined]


def exported_before_the_barrier() -> None:
    """What is read out is what is committed, whether or not it is in RAM."""

    async def committed(session: Any, copyback: Copyback) -> int:
        return int(session.counts.committed)

    memory.image.barrier = committed  # type: ignore[assignment]


def restored_without_its_keys() -> None:
    """A loaded session has its rows and not the pages of its index keys."""
    memory.image.key_moves = lambda table, first, blocks: []  # type: ignore[attr-defined]


def woken_without_its_keys() -> None:
    """A session that gave up pages of keys gets them back empty."""

    def skipped(self: Holdings, first: int, stream: Any) -> None:
        self.keys_shed = False

    Holdings._fill_pages = skipped  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant
    for mutant in (
        mirrored_on_submit, mirrored_before_the_last_layer, ring_place_reused_early, slot_hit_in_the_round_that_fills_it, forgotten_pin,
        duplicate_leaders, aborted_step_keeps_its_slots, prefetch_read_without_its_event, partial_block_skipped_at_the_barrier,
        partial_flush_frees_ring_rows, block_freed_with_a_copy_in_flight, cancelled_wait_frees, two_layers_at_one_address,
        truncation_without_a_new_epoch, slot_map_not_cleared, index_keys_late, table_rewritten_out_of_order, append_ring_reused_early,
        copyback_hook_skipped, raise_jumps_over_a_lost_copy, snapshot_inside_a_block, deep_cut_keeps_the_maps, shared_block_written_again,
        failed_registration_keeps_memory, cut_not_told_to_the_device, exported_before_the_barrier, restored_without_its_keys,
        slot_map_not_cleared_on_fork, source_freed_under_its_fork, fork_behind_a_fork_that_failed, chunk_looks_for_rows_in_flight_in_ram,
        rows_of_another_name_reused, reused_past_the_known_hidden_states, woken_without_its_keys,
    )
}  # fmt: skip
