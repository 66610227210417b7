"""Addresses of new rows and keys, and of resident rows, at every boundary of block, ring and page."""

import pytest
import torch

from kernels.layout import BLOCK_ROWS, PAGE_KEYS, PageShare, TableField
from kernels.locate import locate_new, locate_resident
from kernels.place import NoKernel
from kernels.round import RoundPlan
from tests.kernels.round_world import LAYOUT, PAGES_MAX, ROW_BYTES, TABLE_LAYOUT, PlainSession, Step

KEY_BYTES = LAYOUT.key.key_bytes
BOUNDARIES = [0, 1, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 2047, 2048]
POSITIONS = 2 * PAGE_KEYS + 64


@pytest.fixture(scope="module")
def long_session() -> PlainSession:
    """Blocks for every position, and pages of which each key layer has its own."""
    made = PlainSession(POSITIONS, 4, seed=1)
    made.grow(POSITIONS, POSITIONS)
    made.pages.copy_(torch.arange(1, LAYOUT.key_layers * PAGES_MAX + 1).view(LAYOUT.key_layers, PAGES_MAX) << 20)
    return made


def table_of(*rows: list[int] | None) -> torch.Tensor:
    step = Step([None] * len(rows), [0], [[-1]])
    step.table.rewrite(rows)()
    return step.table.tensor


@pytest.mark.parametrize("position", BOUNDARIES)
@pytest.mark.parametrize("resident", [False, True])
def test_a_new_row_and_its_keys_share_a_block(position: int, resident: bool, long_session: PlainSession) -> None:
    """Row and key go to the ring's block of that position, or without a ring to the history's; keys also to each layer's page."""
    one = long_session
    table = table_of(one.table_row(1, resident))
    rows, keys, pages = locate_new(table, TABLE_LAYOUT, LAYOUT, torch.zeros(1, dtype=torch.int32), torch.tensor([position]))
    block, row = divmod(position, BLOCK_ROWS)
    start = one.blocks[block].data_ptr() if resident else one.ring.data_ptr() + block % 4 * LAYOUT.block_bytes
    assert rows.tolist() == [start + row * ROW_BYTES]
    assert keys.tolist() == [start + LAYOUT.layers * BLOCK_ROWS * ROW_BYTES + row * KEY_BYTES]
    page, key = divmod(position, PAGE_KEYS)
    assert pages.tolist() == [[(1 + layer * PAGES_MAX + page << 20) + key * KEY_BYTES] for layer in range(LAYOUT.key_layers)]


def test_offsets_lead_to_other_layers_of_the_same_row(long_session: PlainSession) -> None:
    """A row destination plus a layer's offset is that layer's row inside the same block, the last one's too."""
    table = table_of(long_session.table_row(1, resident=True))
    rows, keys, _ = locate_new(table, TABLE_LAYOUT, LAYOUT, torch.zeros(1, dtype=torch.int32), torch.tensor([63]))
    end = long_session.blocks[0].data_ptr() + LAYOUT.block_bytes
    assert int(rows) + LAYOUT.row_offset(2) + ROW_BYTES == long_session.blocks[0].data_ptr() + LAYOUT.keys_offset
    assert int(keys) + (LAYOUT.key_layers - 1) * LAYOUT.key_layer_bytes + KEY_BYTES == end


def test_rows_of_several_places_in_any_order(long_session: PlainSession) -> None:
    """Offloaded, resident and padding rows in one call: each gets its own place's addresses, padding gets 0 whatever it holds."""
    one = long_session
    table = table_of(one.table_row(2), None, one.table_row(1, resident=True))
    place_of = torch.tensor([2, 0, 1, -1, 0], dtype=torch.int32)
    positions = torch.tensor([65, 65, -9, 2**62, 64])
    rows, keys, pages = locate_new(table, TABLE_LAYOUT, LAYOUT, place_of, positions)
    ring = one.ring.data_ptr() + LAYOUT.block_bytes
    assert rows.tolist() == [one.blocks[1].data_ptr() + ROW_BYTES, ring + ROW_BYTES, 0, 0, ring]
    assert (keys == 0).tolist() == [False, False, True, True, False]
    assert (pages == 0).tolist() == [[False, False, True, True, False]] * LAYOUT.key_layers


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("position", [0, 1023, 1024, 2047, 2048])
def test_a_key_goes_to_the_device_that_has_its_page(position: int, device: int, long_session: PlainSession) -> None:
    """Of two devices the even one has even pages, side by side in its table; a key of a page that is not there goes to no page."""
    table = table_of(long_session.table_row(1))
    place, asked = torch.zeros(1, dtype=torch.int32), torch.tensor([position])
    rows, keys, pages = locate_new(table, TABLE_LAYOUT, LAYOUT, place, asked, PageShare(2, device))
    assert [rows.tolist(), keys.tolist()] == [each.tolist() for each in locate_new(table, TABLE_LAYOUT, LAYOUT, place, asked)[:2]]
    page, key = divmod(position, PAGE_KEYS)
    here = [[(1 + layer * PAGES_MAX + page // 2 << 20) + key * KEY_BYTES] for layer in range(LAYOUT.key_layers)]
    assert pages.tolist() == (here if page % 2 == device else [[0]] * LAYOUT.key_layers)


def test_padding_only_reads_nothing() -> None:
    """A table of free places gives zeros without touching memory."""
    rows, keys, pages = locate_new(table_of(None), TABLE_LAYOUT, LAYOUT, torch.zeros(3, dtype=torch.int32), torch.full((3,), 7))
    assert not bool(rows.any() or keys.any() or pages.any())


@pytest.mark.parametrize("field", ["BLOCKS", "PAGES"])
def test_an_absent_block_or_page_is_refused(field: str) -> None:
    """A block or page address of 0 raises: it would make a wild destination."""
    one = PlainSession(128, 4, seed=1)
    one.grow(128, 128)
    one.pages.fill_(4096)
    (one.block_table if field == "BLOCKS" else one.pages).zero_()
    table = table_of(one.table_row(1, resident=True))
    assert int(table[0, getattr(TableField, field)]) != 0
    with pytest.raises(AssertionError, match="is not in the"):
        locate_new(table, TABLE_LAYOUT, LAYOUT, torch.zeros(1, dtype=torch.int32), torch.tensor([64]))


def test_resident_picks_are_read_where_they_lie(long_session: PlainSession) -> None:
    """Sources are block rows, -1 anywhere and padding rows have none, nothing is kept, and bytes come out right."""
    one = long_session
    selection = torch.tensor([[0, -1, 63, 64], [-1, -1, -1, -1], [2048, 5, -1, 2047], [2**31 - 1, 3, 0, -1]], dtype=torch.int32)
    step = Step([one, None], [0, 0, 0, 1], selection)
    step.table.rewrite([one.table_row(3, resident=True)])()
    for given in (selection, step.plan.selection):
        step.plan.fill.fill_(5)
        locate_resident(step.table.tensor, TABLE_LAYOUT, LAYOUT, step.place_of, given, step.plan)
        assert torch.equal(step.plan.selection, selection)
        assert int(step.plan.source[0, 3]) == one.blocks[1].data_ptr()
        assert bool((torch.stack([step.plan.slot, step.plan.fill, step.plan.miss]) == -1).all())
        assert ((step.plan.source != 0) == (selection >= 0))[:3].all()
        assert not bool(step.plan.source[3].any())
        for group, layers in enumerate(LAYOUT.groups):
            for layer_in_group, layer in enumerate(layers):
                assert torch.equal(step.gather(group, layer_in_group), step.direct(layer))


def test_a_resident_block_that_is_absent_is_refused() -> None:
    """A selected position without a block raises and leaves the plan as it was."""
    one = PlainSession(128, 4, seed=1)
    one.grow(64, 64)
    step = Step([one], [0], [[3, 64]])
    step.table.rewrite([one.table_row(1, resident=True)])()
    with pytest.raises(AssertionError, match="not in the block table"):
        locate_resident(step.table.tensor, TABLE_LAYOUT, LAYOUT, step.place_of, step.selection, step.plan)
    assert bool((step.plan.source == 123_456).all())


def test_a_device_without_a_kernel_is_refused() -> None:
    """A table that is not in host memory raises NoKernel."""
    table = torch.zeros((1, TABLE_LAYOUT.fields), dtype=torch.int64, device="meta")
    places = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NoKernel, match="locate_new"):
        locate_new(table, TABLE_LAYOUT, LAYOUT, places, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(NoKernel, match="locate_resident"):
        locate_resident(table, TABLE_LAYOUT, LAYOUT, places, torch.zeros((1, 1), dtype=torch.int32), RoundPlan.empty(1, 1))
