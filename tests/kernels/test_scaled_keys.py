"""Index keys in e4m3 with a scale: every code, every rounding, where a key's bytes lie, and scores that see them exactly."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.index_score import index_scores
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, KeyLayout
from kernels.locate import locate_new
from kernels.quantize import append_keys, pack_keys, stored_keys, unpack_keys
from kernels.rope import rope_frequencies, rope_table, rotate
from kernels.row_write import NewKeys, write_keys
from tests.kernels.round_world import LAYOUT, PAGES_MAX, TABLE_LAYOUT, PlainSession, Step

GLM = KeyLayout("e4m3", 128)
ODD = KeyLayout("e4m3", 37)  # values padded to 48 bytes
UNTOUCHED = 0xA5


def value_of(code: int) -> float:
    """What an e4m3fn code means: sign, 4 bits of exponent of bias 7, 3 of mantissa; 0x7F and 0xFF are NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9))


VALUES = torch.tensor([value_of(code) for code in range(127)], dtype=torch.float64)  # of the codes without a sign, ascending


def runs_of(layout: KeyLayout, runs: int) -> Tensor:
    """uint8 [runs * run_bytes] at a multiple of 64, every byte marked."""
    memory = torch.full((runs * layout.run_bytes + 64,), UNTOUCHED, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + runs * layout.run_bytes]


def address_of(memory: Tensor, key: Tensor, layout: KeyLayout) -> Tensor:
    return memory.data_ptr() + key // BLOCK_ROWS * layout.run_bytes + key % BLOCK_ROWS


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_code_has_its_value() -> None:
    """All 256 codes unpack to what the format says, times the scale; both NaN codes to NaN."""
    packed = torch.empty((3, GLM.key_bytes), dtype=torch.uint8)
    packed[0, :128], packed[1, :128] = torch.arange(128), torch.arange(128, 256)
    packed[2] = packed[0]
    packed[:, 128:] = torch.tensor([[1.0], [1.0], [2.0**-130]]).view(torch.uint8)
    wanted = torch.tensor([[value_of(code) for code in range(first, first + 128)] for first in (0, 128, 0)])
    wanted[2] *= 2.0**-130
    got = unpack_keys(packed, GLM)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert bool(got[1, 0].signbit())


def test_values_go_to_the_nearest_code_ties_to_even() -> None:
    """Beside an amax of 448 the scale is 1: each midpoint between codes goes to the even one, its neighbours to the nearer one."""
    halves = ((VALUES[1:] + VALUES[:-1]) / 2).float()
    below, above = torch.nextafter(halves, torch.tensor(0.0)), torch.nextafter(halves, torch.tensor(1e9))
    code = torch.arange(126)
    even = code + code % 2
    keys = torch.stack((torch.cat((halves, -below[:1], torch.tensor([448.0]))), torch.cat((below, halves[:1], torch.tensor([-448.0]))),
                        torch.cat((-above, above[:1], torch.tensor([448.0])))))  # fmt: skip
    packed = pack_keys(keys, GLM)
    assert packed[:, 128:].contiguous().view(torch.float32).flatten().tolist() == [1.0, 1.0, 1.0]
    assert packed[0, :126].tolist() == even.tolist()
    assert packed[1, :126].tolist() == code.tolist()
    assert packed[2, :126].tolist() == (128 + code + 1).tolist()
    assert packed[:, 127].tolist() == [0x7E, 0xFE, 0x7E]


def test_the_scale_is_amax_over_448() -> None:
    """Keys of any magnitude: the largest value has the largest code, and every value lies within half a step of its own."""
    keys = drawn(60, 128, seed=1) * torch.logspace(-34, 37, 60)[:, None]
    packed = pack_keys(keys, GLM)
    scales = packed[:, 128:].contiguous().view(torch.float32)[:, 0]
    assert torch.equal(scales, keys.abs().amax(1) / 448)
    assert bool(((packed[:, :128] & 0x7F).amax(1) == 0x7E).all())
    exact = keys.double() / scales.double()[:, None]
    got = unpack_keys(packed, GLM).double() / scales.double()[:, None]
    step = torch.where(exact.abs() < 2**-6, 2.0**-9, torch.exp2(exact.abs().clamp(min=2**-6).log2().floor() - 3))
    assert bool(((got - exact).abs() <= step / 2 * (1 + 2**-20)).all())


def test_keys_of_nothing_of_nearly_nothing_and_broken_ones() -> None:
    """Zeros stay zeros; a scale below float32's normal numbers is 0, one at it is kept; NaN and infinities give a NaN scale."""
    edge = 448 * 2.0**-126
    keys = torch.zeros(6, 128)
    keys[1, 3], keys[2, 3] = -edge * (1 - 2**-20), edge
    keys[3, 127], keys[4, 0], keys[5, 64] = math.nan, math.inf, -math.inf
    keys[3:, 5] = 1.0
    packed = pack_keys(keys, GLM)
    scales = packed[:, 128:].contiguous().view(torch.int32)[:, 0].tolist()
    assert scales == [0, 0, 0x00800000, 0x7FC00000, 0x7FC00000, 0x7FC00000]
    assert not bool((packed[[0, 3, 4, 5], :128] & 0x7F).any())
    assert packed[1, :128].unique().tolist() in ([0, 0x80], [0])
    assert int(packed[2, 3]) == 0x7E
    assert unpack_keys(packed, GLM).isnan().all(1).tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("layout", [GLM, ODD])
def test_a_run_is_values_and_then_scales(layout: KeyLayout) -> None:
    """64 keys: the values 16-byte aligned one after the other, then 64 scales; keys of no address and all other bytes are left alone."""
    assert layout.values_bytes % 16 == 0
    assert layout.run_bytes == BLOCK_ROWS * (layout.values_bytes + 4)
    keys, place = drawn(5, layout.width, seed=2), torch.tensor([63, 0, 64, 128 + 17, 1])
    memory = runs_of(layout, 4)
    destinations = address_of(memory, place, layout)
    destinations[4] = 0
    append_keys(keys, destinations, layout.run_bytes, layout)
    packed, wanted = pack_keys(keys, layout), torch.full_like(memory, UNTOUCHED)
    for key, at in enumerate(place[:4].tolist()):
        run = wanted[(at // 64 + 1) * layout.run_bytes :]
        run[at % 64 * layout.values_bytes :][: layout.values_bytes] = packed[key, : layout.values_bytes]
        run[64 * layout.values_bytes + 4 * (at % 64) :][:4] = packed[key, layout.values_bytes :]
    assert torch.equal(memory, wanted)
    assert torch.equal(stored_keys(memory, layout)[place[:4] + 64], packed[:4])
    assert not bool(packed[:, layout.width : layout.values_bytes].any())


@pytest.mark.parametrize("position", [0, 1, 63, 64, 1023, 1024, 2047])
@pytest.mark.parametrize("resident", [False, True])
def test_a_new_key_goes_to_its_run(position: int, resident: bool) -> None:
    """The address in block and page is the run's start plus the number in the run, at every boundary of block, ring and page."""
    layout = replace(LAYOUT, key=GLM)
    one = PlainSession(2 * PAGE_KEYS, 4, seed=1)
    one.grow(2 * PAGE_KEYS, 2 * PAGE_KEYS)
    one.pages.copy_(torch.arange(1, layout.key_layers * PAGES_MAX + 1).view(layout.key_layers, PAGES_MAX) << 20)
    step = Step([None], [0], [[-1]])
    step.table.rewrite([one.table_row(1, resident)])()
    asked = torch.zeros(1, dtype=torch.int32), torch.tensor([position])
    rows, keys, pages = locate_new(step.table.tensor, TABLE_LAYOUT, layout, *asked)
    block, row = divmod(position, BLOCK_ROWS)
    start = one.blocks[block].data_ptr() if resident else one.ring.data_ptr() + block % 4 * layout.block_bytes
    assert rows.tolist() == [start + row * layout.row.row_bytes]
    assert keys.tolist() == [start + layout.keys_offset + row]
    page, key = divmod(position, PAGE_KEYS)
    within = key // 64 * 8448 + key % 64
    assert pages.tolist() == [[(1 + layer * PAGES_MAX + page << 20) + within] for layer in range(layout.key_layers)]


@pytest.mark.parametrize("layout", [GLM, ODD])
def test_keys_are_normed_rotated_packed_and_stored_twice(layout: KeyLayout) -> None:
    """float64's norm and rotation to within a rounding of e4m3, block and page alike; a broken key is NaN, a left out one zeros."""
    source, weight, bias = drawn(5, layout.width, seed=1) * 3 + 1, drawn(layout.width, seed=2), drawn(layout.width, seed=3)
    source[3, layout.width - 1] = math.nan
    positions = torch.tensor([0, 1, 63, 50_023, 1_048_575])
    table = rope_table(positions, rope_frequencies(8e6, 6), torch.float32)
    block, page, place = runs_of(layout, 3), runs_of(layout, 2), torch.tensor([5, 63, 64, 9, 0])
    to, pages = address_of(block, place, layout), address_of(page, place.flip(0), layout)
    to[1], pages[2] = 0, 0
    write_keys(NewKeys(source, weight, bias, 1e-6, to, layout.run_bytes, pages, layout), table, positions)
    exact = (source - source.double().mean(-1, keepdim=True)) / source.double().std(-1, keepdim=True, unbiased=False) * weight + bias
    exact[:, :6] = rotate(exact[:, :6].clone(), table[0].double(), table[1].double())
    in_block, in_page = stored_keys(block, layout)[place + 64], stored_keys(page, layout)[place.flip(0)]
    assert torch.equal(in_block[[0, 3, 4]], in_page[[0, 3, 4]])
    assert int((stored_keys(block, layout) != UNTOUCHED).any(1).sum()) == 4
    assert int((stored_keys(page, layout) != UNTOUCHED).any(1).sum()) == 4
    kept = torch.stack((in_block[0], in_page[1], in_block[2], in_block[3], in_block[4]))
    assert not bool(kept[0].any())
    got = unpack_keys(kept, layout)
    assert got.isnan().all(1).tolist() == [False, False, False, True, False]
    largest = exact[[1, 2, 4]].abs().amax(1, keepdim=True)
    assert bool(((got[[1, 2, 4]] - exact[[1, 2, 4]]).abs() <= exact[[1, 2, 4]].abs() / 16 + largest * 2**-17).all())


def scores_of(query: Tensor, weights: Tensor, keys: Tensor, layout: KeyLayout) -> Tensor:
    """Scores of keys in pages whose other bytes are NaN codes and NaN scales, the pages backwards in memory."""
    count = -(-keys.shape[0] // PAGE_KEYS)
    memory = runs_of(layout, 16 * count)
    memory.fill_(0xFF)
    starts = memory.data_ptr() + torch.arange(count).flip(0) * layout.page_bytes
    number = torch.arange(keys.shape[0])
    within = number % PAGE_KEYS
    to = starts[number // PAGE_KEYS] + within // BLOCK_ROWS * layout.run_bytes + within % BLOCK_ROWS * layout.step_bytes
    append_keys(keys, to, 0, layout)
    out = torch.full((query.shape[0], count * PAGE_KEYS), 7.0)
    index_scores(query, weights, starts, keys.shape[0], layout, out)
    return out[:, : keys.shape[0]]


@pytest.mark.parametrize(("heads", "layout"), [(4, GLM), (3, ODD), (1, KeyLayout("e4m3", 1))])
@pytest.mark.parametrize("count", [1, 64, 65, 1025])
def test_scores_are_those_of_the_stored_keys(heads: int, layout: KeyLayout, count: int) -> None:
    """float64's formula on what is stored, to 1e-5 of its terms, for queries in float32 and bf16; NaN beyond the last key harms nobody."""
    query, weights = drawn(5, heads, layout.width, seed=count), drawn(5, heads, seed=2)
    keys = drawn(count, layout.width, seed=3) * torch.logspace(-3, 3, count)[:, None]
    stored = unpack_keys(pack_keys(keys, layout), layout).double()
    for asked in (query, query.bfloat16()):
        product = torch.einsum("thd,jd->thj", asked.double(), stored).relu() * weights.double()[:, :, None]
        product *= (heads * layout.width) ** -0.5
        got = scores_of(asked, weights, keys, layout)
        bound = 1e-5 * torch.einsum("thd,jd->thj", asked.double().abs(), stored.abs()).mul(weights.abs()[:, :, None]).sum(1)
        assert bool(((got - product.sum(1)).abs() <= bound).all())


def test_scales_multiply_last_and_alone() -> None:
    """Keys 2, 1/4 and 2^40 times as large score exactly so many times as much, to the bit; a NaN key spoils its own column only."""
    query, weights, keys = drawn(3, 4, 128, seed=1), drawn(3, 4, seed=2), drawn(80, 128, seed=3)
    plain = scores_of(query, weights, keys, GLM)
    for factor in (2.0, 0.25, 2.0**40):
        assert torch.equal(scores_of(query, weights, keys * factor, GLM), plain * factor)
    keys[70, 5] = math.nan
    broken = scores_of(query, weights, keys, GLM)
    assert broken.isnan().any(0).nonzero().flatten().tolist() == [70]
    assert torch.equal(broken[:, :70], plain[:, :70])


def test_a_row_of_scores_does_not_see_its_company(assert_row_invariant) -> None:
    """A row's scores have the same bits alone, among 1 to 65 rows, and at any place."""
    query, weights, keys = drawn(7, 3, 37, seed=1), drawn(7, 3, seed=2), drawn(70, 37, seed=3)
    assert_row_invariant(lambda picked: scores_of(query[picked], weights[picked], keys, ODD).contiguous(), 7)
