"""Packed rows and keys: bytes, errors bounded by the scale, hostile values, stores by address."""

import math

import pytest
import torch
from torch import Tensor

from kernels.layout import KeyLayout, RowLayout
from kernels.place import NoKernel
from kernels.quantize import append_keys, append_rows, pack_keys, pack_rows, unpack_keys, unpack_rows

GLM = RowLayout("q8g64", 512, 64)
RAGGED = RowLayout("q8g64", 77, 6)  # an odd latent, a last group of 13
LAYOUTS = [GLM, RAGGED, RowLayout("bf16", 24, 8), RowLayout("f32", 24, 8), RowLayout("f32", 33, 5)]


def drawn(rows: int, layout: RowLayout, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, layout.latent, generator=generator), torch.randn(rows, layout.rope, generator=generator)


def row_of(latent: list[float], layout: RowLayout) -> Tensor:
    """One row's unpacked latent, given its leading values; the rest are zero."""
    values = torch.zeros(1, layout.latent)
    values[0, : len(latent)] = torch.tensor(latent)
    return unpack_rows(pack_rows(values, torch.zeros(1, layout.rope), layout), layout)[0][0]


def test_one_row_by_hand() -> None:
    """The bytes of a row whose scale is exact are the ones that paper arithmetic gives."""
    layout = RowLayout("q8g64", 3, 1)
    packed = pack_rows(torch.tensor([[127.0, -64.5, 0.4]]), torch.tensor([[1.0]]), layout)
    # int8 127, -64 (-64.5 rounds to even), 0; one byte to align; float16 1.0; bfloat16 1.0; zero padding
    assert packed[0].tolist() == [127, 256 - 64, 0, 0, 0x00, 0x3C, 0x80, 0x3F] + [0] * 8


def test_values_are_divided_by_the_rounded_scale() -> None:
    """A group's values are nearest multiples of the float16 scale, not of the exact one."""
    latent, rope = drawn(50, GLM, seed=1)
    unpacked, _ = unpack_rows(pack_rows(latent, rope, GLM), GLM)
    scale = (latent.view(50, 8, 64).abs().amax(-1) / 127).half().double()
    nearest = (latent.double().view(50, 8, 64) / scale[..., None]).round().clamp(-127, 127) * scale[..., None]
    assert torch.equal(unpacked.double(), nearest.view(50, 512).float().double())


@pytest.mark.parametrize("layout", [GLM, RAGGED])
def test_error_is_at_most_half_a_step(layout: RowLayout) -> None:
    """A latent value is off by half its group's scale, plus what the scale's own rounding may clip from the largest."""
    latent, rope = drawn(200, layout, seed=2)
    unpacked, _ = unpack_rows(pack_rows(latent, rope, layout), layout)
    for first in range(0, layout.latent, 64):
        part, got = latent[:, first : first + 64], unpacked[:, first : first + 64]
        step = part.abs().amax(-1, keepdim=True) / 127
        assert bool(((part - got).abs() <= step * (0.5 + 127 * 2**-11 + 1e-6)).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_and_wide_formats_are_plain_conversions(layout: RowLayout) -> None:
    """RoPE keys, and latents of bf16 and f32 rows, unpack to their own dtype's nearest value."""
    latent, rope = drawn(5, layout, seed=3)
    got_latent, got_rope = unpack_rows(pack_rows(latent, rope, layout), layout)
    wide = torch.float32 if layout.encoding == "f32" else torch.bfloat16
    assert torch.equal(got_rope, rope.to(wide).float())
    if layout.encoding != "q8g64":
        assert torch.equal(got_latent, latent.to(wide).float())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_what_was_unpacked_gives_the_same_bytes(layout: RowLayout) -> None:
    """Packed, unpacked and packed again is the same row: nothing drifts when a row is rebuilt."""
    packed = pack_rows(*drawn(20, layout, seed=4), layout)
    again = pack_rows(*unpack_rows(packed, layout), layout)
    assert torch.equal(packed, again)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("poisoned_empty")
def test_padding_is_zero(layout: RowLayout) -> None:
    """Bytes that belong to no field are zero, whatever memory held."""
    packed = pack_rows(*drawn(3, layout, seed=5), layout)
    end = layout.rope_offset + layout.rope * (4 if layout.encoding == "f32" else 2)
    assert packed[:, end:].sum() == 0
    assert packed[:, layout.latent_bytes : layout.scales_offset].sum() == 0
    assert packed.shape == (3, layout.row_bytes)


def test_zero_group_has_zero_scale_and_no_nan() -> None:
    """All-zero groups pack to zero bytes, and a zero group beside a full one stays zero."""
    packed = pack_rows(torch.zeros(2, 512), torch.zeros(2, 64), GLM)
    assert int(packed.sum()) == 0
    unpacked = row_of([1.0] * 64, GLM)
    assert torch.equal(unpacked[64:], torch.zeros(448))
    assert bool((unpacked[:64] != 0).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", [GLM, RAGGED])
def test_a_value_that_is_not_finite_stays_visible_in_its_group_only(bad: float, layout: RowLayout) -> None:
    """NaN or infinity anywhere makes its whole group NaN and leaves the other groups' values as they were."""
    latent, rope = drawn(2, layout, seed=6)
    clean, _ = unpack_rows(pack_rows(latent, rope, layout), layout)
    latent[1, layout.latent - 1] = bad
    spoiled, got_rope = unpack_rows(pack_rows(latent, rope, layout), layout)
    last = (layout.latent - 1) // 64 * 64
    assert bool(spoiled[1, last:].isnan().all())
    assert torch.equal(spoiled[1, :last], clean[1, :last])
    assert torch.equal(spoiled[0], clean[0])
    assert bool(got_rope.isfinite().all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_keeps_what_is_not_finite(layout: RowLayout) -> None:
    """NaN and infinities in the RoPE key come back as such in every format."""
    rope = torch.zeros(1, layout.rope)
    rope[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    got = unpack_rows(pack_rows(torch.zeros(1, layout.latent), rope, layout), layout)[1][0]
    assert got[0].isnan()
    assert got[1:3].tolist() == [math.inf, -math.inf]


def test_a_scale_past_float16_saturates() -> None:
    """Values whose scale would exceed 65504 are clamped to 65504 * 127, finite and with their sign."""
    top = 65504.0 * 127
    got = row_of([3e38, -3e38, top, 65504.0], GLM)
    assert got[:4].tolist() == [top, -top, top, 65504.0]
    assert bool(got.isfinite().all())


def test_largest_scales_round_within_float16() -> None:
    """A scale in the last half step below float16's infinity stays finite."""
    got = row_of([65519.0 * 127], GLM)
    assert got[0] == 65504.0 * 127


def test_subnormal_scales_keep_small_values() -> None:
    """Values near 1e-5 are off by at most 127 times the subnormal scale's rounding (2^-25), plus half a step of it; never NaN."""
    small = torch.linspace(-1e-5, 1e-5, 64)
    got = row_of(small.tolist(), GLM)[:64]
    assert bool((got != 0).any())
    assert bool(((got - small).abs() <= 127 * 2**-25 + 2**-25).all())


def test_values_below_the_smallest_scale_become_zero() -> None:
    """A group whose scale rounds to zero is zero in every byte, and finite: no division by zero."""
    small = [1e-6, -1e-7, 5e-45]
    assert torch.equal(row_of(small, GLM), torch.zeros(512))
    latent = torch.zeros(1, 512)
    latent[0, :3] = torch.tensor(small)
    assert not bool(pack_rows(latent, torch.zeros(1, 64), GLM).any())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_does_not_depend_on_its_company(rows: int, layout: RowLayout) -> None:
    """A row packs to the same bytes alone and among others, and unpacks to the same bits."""
    latent, rope = drawn(64, layout, seed=7)
    whole = pack_rows(latent, rope, layout)
    part = pack_rows(latent[:rows], rope[:rows], layout)
    assert torch.equal(part, whole[:rows])
    assert torch.equal(unpack_rows(part, layout)[0], unpack_rows(whole, layout)[0][:rows])


def test_no_rows_is_fine() -> None:
    """Zero rows pack and unpack to nothing."""
    packed = pack_rows(torch.zeros(0, 512), torch.zeros(0, 64), GLM)
    assert packed.shape == (0, 656)
    assert unpack_rows(packed, GLM)[0].shape == (0, 512)
    append_rows(torch.zeros(0, 512), torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64), 0, GLM)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpacking_keeps_leading_shape_and_takes_views(layout: RowLayout) -> None:
    """Rows may be a [places, picks, bytes] view of something larger."""
    packed = pack_rows(*drawn(24, layout, seed=8), layout)
    view = packed.view(4, 6, -1)[1:3, ::2]
    latent, rope = unpack_rows(view, layout)
    assert latent.shape == (2, 3, layout.latent)
    assert rope.shape == (2, 3, layout.rope)
    assert torch.equal(latent[1, 2], unpack_rows(packed, layout)[0][2 * 6 + 4])
    assert latent.is_contiguous()


def test_bf16_input_packs_like_its_f32_values() -> None:
    """The input's dtype changes no byte beyond its own precision."""
    latent, rope = (part.bfloat16() for part in drawn(4, GLM, seed=9))
    assert torch.equal(pack_rows(latent, rope, GLM), pack_rows(latent.float(), rope.float(), GLM))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_append_stores_at_the_destination_and_nowhere_else(layout: RowLayout) -> None:
    """Rows land at destination + offset in any order; destination 0 stores nothing; every other byte is left alone."""
    latent, rope = drawn(4, layout, seed=10)
    packed, size = pack_rows(latent, rope, layout), layout.row_bytes
    place = torch.full((12 * size,), 0xA5, dtype=torch.uint8)
    start = place.data_ptr()
    append_rows(latent, rope, torch.tensor([start + 5 * size, 0, start, start + 2 * size]), 3 * size, layout)
    expected = torch.full((12, size), 0xA5, dtype=torch.uint8)
    expected[8], expected[3], expected[5] = packed[0], packed[2], packed[3]
    assert torch.equal(place.view(12, size), expected)


@pytest.mark.parametrize("layout", [KeyLayout("f32", 33), KeyLayout("bf16", 128), KeyLayout("bf16", 5)])
def test_keys_pack_unpack_and_append(layout: KeyLayout) -> None:
    """Keys are plain conversions with zero padding, and are stored like rows."""
    keys = torch.randn(6, layout.width, generator=torch.Generator().manual_seed(11))
    keys[1, 0] = math.nan
    packed = pack_keys(keys, layout)
    wide = torch.float32 if layout.encoding == "f32" else torch.bfloat16
    expected = keys.to(wide).float()
    assert torch.equal(unpack_keys(packed, layout).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert int(packed[:, layout.width * wide.itemsize :].sum()) == 0
    page = torch.full((8, layout.key_bytes), 0xA5, dtype=torch.uint8)
    destinations = page.data_ptr() + torch.tensor([4, 2, 0, 1, 3, 5]) * layout.key_bytes
    destinations[2] = 0
    append_keys(keys, destinations, layout.key_bytes, layout)
    assert torch.equal(page[[5, 3, 2, 4, 6]], packed[[0, 1, 3, 4, 5]])
    assert bool((page[[0, 1, 7]] == 0xA5).all())


def test_a_device_without_a_kernel_is_refused() -> None:
    """A tensor that is not in host memory raises NoKernel naming operation and device."""
    with pytest.raises(NoKernel, match="pack_rows has no kernel for device meta"):
        pack_rows(torch.zeros(1, 512, device="meta"), torch.zeros(1, 64, device="meta"), GLM)
