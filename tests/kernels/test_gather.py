"""Gathers against direct reads, byte for byte, over memory that is poison wherever nothing should be read or written."""

import pytest
import torch
from torch import Tensor

from kernels.address import store_at
from kernels.gather import Unwritten, gather_blocks, gather_rows
from kernels.layout import BLOCK_ROWS
from kernels.place import NoKernel
from tests.kernels.round_world import LAYOUT, POISON, ROW_BYTES, PlainSession, Step


def session(rows: int = 300, mirrored: int = 256, slots: int = 8, seed: int = 0, positions: int = 512) -> PlainSession:
    made = PlainSession(positions, slots, seed)
    made.grow(rows, mirrored)
    return made


def drifting(generator: torch.Generator, rows: int, picks: int, end: int, at: int) -> Tensor:
    """Ascending selections around a drifting position, with the newest rows and a tail of -1: what an indexer gives."""
    selection = torch.full((rows, picks), -1, dtype=torch.int32)
    for row in range(rows):
        near = (at + torch.randint(-20, 20, (picks,), generator=generator)) % end
        recent = end - 1 - torch.randint(0, 4, (picks,), generator=generator)
        mixed = torch.where(torch.rand(picks, generator=generator) < 0.2, recent, near).clamp(0, end - 1)
        kept = mixed.unique()[: int(torch.randint(0, picks + 1, (1,), generator=generator))]
        selection[row, : kept.numel()] = kept.int()
    return selection


def test_a_thousand_drifting_rounds_equal_direct_reads() -> None:
    """300 steps of two growing sessions and two groups (1,200 rounds), padding rows and varying prefetch room: every pick's bytes are
    its row's, and maps stay whole."""
    generator = torch.Generator().manual_seed(1)
    sessions: list[PlainSession | None] = [session(70, 64, 9, 1), session(65, 0, 6, 2, positions=700), None]
    for index in range(300):
        if index % 2 == 0:
            for item in sessions[:2]:
                assert item is not None
                logical = min(item.logical + 1, item.truth.shape[1])
                item.grow(logical, max(item.mirrored, (logical - 1) // 64 * 64 - 64 * (index % 3 == 0)))
        place_of = [0, 1, 2, 1] if index % 2 else [1, -1, 0, 0]
        ends = [1 if place in (2, -1) else sessions[place].logical for place in place_of]  # type: ignore[union-attr]
        selection = torch.cat([drifting(generator, 1, 6, end, index * 5) for end in ends])
        Step(sessions, place_of, selection).run(scratch_rows=(None, 0, 2, 24)[index % 4])
    for item in sessions[:2]:
        assert item is not None
        hits, misses, ring = item.counters()
        assert min(hits, misses, ring) > 300  # each kind of read was really exercised


@pytest.mark.parametrize("scratch_rows", [None, 0, 1, 5, 64])
@pytest.mark.parametrize("picks", [7, 8, 9, 20])
def test_hot_rows_around_top_k(picks: int, scratch_rows: int | None) -> None:
    """With fewer, as many and more slots than picks, from k-1 to far past, repeated and disjoint selections read right."""
    one = session(slots=8)
    for start in (0, 0, 100, 50, 0, 230):
        Step([one], [0, 0], [list(range(start, start + picks))] * 2).run(scratch_rows)


def test_unused_picks_are_zero_wherever_they_stand() -> None:
    """-1 at the front, between and at the end gives zero rows in an output that was poison, and an all -1 row too."""
    one = session()
    step = Step([one, None], [0, 0, 1, -1], [[-1, 3, -1], [-1, -1, -1], [3, 3, 3], [2**31 - 1, 0, -1]]).begin()
    step.plan_group(0)
    out = step.gather(0, 1)
    assert torch.equal(out[0, 1], one.truth[1, 3])
    out[0, 1] = 0
    assert not bool(out.any())


def test_the_selection_has_the_last_word() -> None:
    """A pick that the selection does not name reads nothing and fills nothing, whatever stands in the plan's other fields."""
    one = session()
    step = Step([one], [0], [[3, 4]]).begin()
    step.plan_group(0)
    step.plan.selection[0, 0] = -1
    out = step.gather(0, 0)
    assert not bool(out[0, 0].any())
    assert torch.equal(out[0, 1], one.truth[0, 4])
    assert bool((one.hot[0].slots[0, 0] == POISON).all())


def test_duplicates_of_one_miss_are_the_same_bytes() -> None:
    """A position that two rows and one row twice miss is read alike by all and fetched once."""
    one = session()
    step = Step([one], [0, 0], [[9, 4, 9], [4, -1, 9]]).begin()
    step.plan_group(0)
    scratch = step.fetch(1, 4)
    assert torch.equal(scratch[:2], one.truth[1][[9, 4]])
    assert bool((scratch[2:] == POISON).all())
    assert torch.equal(step.gather(0, 1, scratch), step.direct(1))


def test_a_gather_reads_misses_from_the_scratch() -> None:
    """With a scratch, prefetched misses come from it and only those: hits, ring rows and misses it has no room for do not."""
    one = session()
    Step([one], [0], [[1, 2]]).run()
    step = Step([one], [0], [[2, 260, 7, 8]]).begin()
    step.plan_group(0)
    marked = torch.full((1, ROW_BYTES), 0xAB, dtype=torch.uint8)
    out = step.gather(0, 1, marked)
    assert torch.equal(out[0, 2], marked[0])
    assert torch.equal(out[0, [0, 1, 3]], one.truth[1][[2, 260, 8]])


def test_fills_write_their_slot_of_their_layer_only() -> None:
    """After one layer's gather, the assigned slots of that layer hold their rows; every other slot and layer is untouched."""
    one = session(slots=4)
    step = Step([one], [0, 0], [[9, -1, 260], [9, 5, -1]]).begin()
    step.plan_group(0)
    step.gather(0, 1)
    slots = one.hot[0].slots
    assert torch.equal(slots[1, :2], one.truth[1][[9, 5]])
    assert bool((slots[1, 2:] == POISON).all())
    assert bool((slots[0] == POISON).all())
    assert bool((one.hot[1].slots == POISON).all())


def test_fills_come_after_every_read() -> None:
    """A slot whose old row another pick could have read is overwritten only once all picks were read: two sessions, one call."""
    one, two = session(slots=2, seed=1), session(slots=2, seed=2)
    Step([one, two], [0, 1], [[1, 2], [3, 4]]).run()
    Step([one, two], [1, 0], [[5, 3], [6, 2]]).run()
    Step([one, two], [1, 0], [[3, 5], [2, 6]]).run()
    assert one.counters()[0] == two.counters()[0] == 2 * 3  # groups times (one hit, then two)


def test_every_slot_hit_and_more_missing_reads_through() -> None:
    """A full cache of hits beside misses: the misses are right, with and without prefetch, and the slots keep their rows."""
    one = session(slots=3)
    Step([one], [0], [[1, 2, 3, -1, -1]]).run()
    for scratch_rows in (None, 8):
        Step([one], [0, 0], [[1, 2, 3, 60, 61], [61, 60, 3, 2, 1]]).run(scratch_rows)
    assert one.hot[0].position_of.tolist() == [1, 2, 3]


def test_stale_and_poisoned_slots_are_never_read_for_a_miss() -> None:
    """Rows of unmapped slots and unselected rows, poisoned under a live session, reach no output."""
    one = session(slots=4)
    Step([one], [0], [[1, 2, 3, 4]]).run()
    one.hot[0].unmap_from(3)
    one.hot[1].unmap_from(3)
    for hot in one.hot:
        hot.slots[:, 2:] = 0xFF
    for block in one.blocks:
        rows = one._rows(block)
        keep = rows[:, [1, 2, 3, 4]].clone()
        rows.fill_(0xFF)
        rows[:, [1, 2, 3, 4]] = keep
    Step([one], [0], [[1, 2, 3, 4]]).run()


def store_new(step: Step, positions: list[int], addresses: Tensor, copies: Tensor) -> None:
    """What the layers of group 0 behind the first do once they have made their rows."""
    for layer in range(1, len(LAYOUT.groups[0])):
        for row, place in enumerate(step.place_of.tolist()):
            session = None if place < 0 else step.sessions[place]
            there = addresses[row][addresses[row] != 0] + (layer - 1) * copies[0].numel()
            assert session is not None or not len(there), "padding was picked"
            if session is not None:
                store_at(there, session.truth[LAYOUT.groups[0][layer], positions[row]].expand(len(there), -1))


def test_rows_not_written_yet_are_left_alone_and_then_added() -> None:
    """Of three new rows only picks are missing from the copy; each is found in the picks of every row that has it, in any place of them."""
    one = session(rows=300, mirrored=256)
    picks = [[3, 297, -1, -1], [297, 298, 260, 5], [-1, 299, 298, 296], [-1] * 4]
    positions = [297, 298, 299, 0]
    step = Step([one, None], [0, 0, 0, -1], picks).begin()
    step.plan_group(0)
    copies, addresses = step.gather_group(0, Unwritten(torch.tensor(positions), 4))
    missing = torch.tensor([[pick >= 297 for pick in row] for row in picks])
    assert torch.equal(copies[0], step.direct(0))
    assert bool((copies[1][missing] == POISON).all())
    assert torch.equal(copies[1][~missing], step.direct(1)[~missing])
    found = [[int(address - copies[1].data_ptr()) // ROW_BYTES if address else None for address in row] for row in addresses]
    assert found == [[1, 4, None, None], [None, 5, 10, None], [None, None, 9, None], [None] * 4]
    store_new(step, positions, addresses, copies)
    assert torch.equal(copies[1], step.direct(1))


@pytest.mark.parametrize("each", [1, 2, 5])
def test_a_group_at_once_gives_what_its_layers_do(each: int) -> None:
    """Twenty steps of two sessions and a free place: copies, slots and maps end as those of gathers that waited for each layer's rows."""
    generator = torch.Generator().manual_seed(each)
    lives = [session(200, 192, 6, 1), session(200, 128, 6, 2)]
    for index in range(20):
        positions, rows = [], []
        live = 1 + index % each
        for place in range(3):
            if place < 2:
                lives[place].grow(lives[place].logical + live, lives[place].mirrored)
            for j in range(each):
                used = place < 2 and j < live
                positions.append(lives[place].logical - live + j if used else 0)
                rows.append(place if used else -1)
        selection = torch.cat([drifting(generator, 1, 7, position + 1, 9 * index) for position in positions])
        selection[torch.tensor(rows) < 0] = -1
        step = Step([*lives, None], rows, selection).begin()
        for group, layers in enumerate(LAYOUT.groups):
            step.plan_group(group)
            copies, addresses = step.gather_group(group, Unwritten(torch.tensor(positions), each))
            if len(layers) > 1:
                store_new(step, positions, addresses, copies)
            for copy, layer in zip(copies, layers, strict=True):
                assert torch.equal(copy, step.direct(layer))
        for live_session in lives:
            live_session.check()
    hits, misses, ring = lives[0].counters()
    assert min(hits, misses, ring) > 0


def test_gather_rows_reads_addresses_in_any_order() -> None:
    """Rows of unrelated buffers, repeated and absent (0), land in their places; no rows at all is fine."""
    generator = torch.Generator().manual_seed(3)
    buffers = [torch.randint(0, 256, (5, 656), dtype=torch.uint8, generator=generator) for _ in range(3)]
    picks = [(2, 4), None, (0, 0), (2, 4), (1, 3), None]
    addresses = torch.tensor([0 if pick is None else buffers[pick[0]].data_ptr() + 656 * pick[1] for pick in picks])
    out = torch.full((6, 656), POISON, dtype=torch.uint8)
    gather_rows(addresses, 656, out)
    for row, pick in enumerate(picks):
        assert torch.equal(out[row], torch.zeros(656, dtype=torch.uint8) if pick is None else buffers[pick[0]][pick[1]])
    gather_rows(torch.zeros(6, dtype=torch.int64), 656, out)
    assert not bool(out.any())
    gather_rows(torch.zeros(0, dtype=torch.int64), 656, out[:0])


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("layer", [0, 2])
def test_gather_blocks_brings_a_layers_first_rows(rows: int, layer: int) -> None:
    """Exactly `rows` rows of the layer in order, whatever the blocks' places in memory; the rest of the output is left alone."""
    one = session(320, 320)
    out = torch.full((310, ROW_BYTES), POISON, dtype=torch.uint8)
    used = -(-rows // BLOCK_ROWS)
    table = one.block_table.clone()
    table[used:] = 0  # what is not read may be absent
    gather_blocks(table, LAYOUT.row_offset(layer), rows, ROW_BYTES, out)
    assert torch.equal(out[:rows], one.truth[layer, :rows])
    assert bool((out[rows:] == POISON).all())


def test_gather_blocks_refuses_an_absent_block() -> None:
    """A block address of 0 among those that are read raises and leaves the output alone."""
    one = session(320, 320)
    one.block_table[1] = 0
    out = torch.full((320, ROW_BYTES), POISON, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="missing"):
        gather_blocks(one.block_table, 0, 65, ROW_BYTES, out)
    assert bool((out == POISON).all())


def test_outputs_that_do_not_fit_are_refused() -> None:
    """A wrong row size, a strided output or too few rows is our bug, not a silent partial write."""
    out = torch.zeros((4, 32), dtype=torch.uint8)
    with pytest.raises(AssertionError, match="32 bytes, not 16"):
        gather_rows(torch.zeros(4, dtype=torch.int64), 16, out)
    with pytest.raises(AssertionError, match="not contiguous"):
        gather_rows(torch.zeros(4, dtype=torch.int64), 16, out[:, :16])
    with pytest.raises(AssertionError, match="5 rows do not fit 4"):
        gather_blocks(torch.zeros(1, dtype=torch.int64), 0, 5, 32, out)


def test_a_device_without_a_kernel_is_refused() -> None:
    """An output that is not in host memory raises NoKernel."""
    with pytest.raises(NoKernel, match="gather_rows"):
        gather_rows(torch.zeros(1, dtype=torch.int64), 16, torch.zeros((1, 16), dtype=torch.uint8, device="meta"))
