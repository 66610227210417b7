"""Rotary positions: order of operations, pairs, accuracy far out, and the same bits in any company."""

import math

import numpy as np
import pytest
import torch

from kernels.rope import rope_frequencies, rope_table, rotate, rotate_first


@pytest.mark.parametrize(("theta", "width"), [(1e4, 16), (1e6, 64), (8e6, 64), (8e6, 32)])
def test_frequencies_round_at_each_operation(theta, width):
    """Exponent, power and reciprocal are each rounded to float32, in this order; theta^-exponent would differ in several places."""
    exponent = np.arange(0, width, 2).astype(np.float32) / np.float32(width)
    power = (np.float64(theta) ** exponent.astype(np.float64)).astype(np.float32)
    wanted = (np.float32(1) / power).astype(np.float32)
    got = rope_frequencies(theta, width)
    assert got.dtype == torch.float32
    assert got.shape == (width // 2,)
    assert got[0] == 1.0
    assert got.tolist() == wanted.tolist()
    assert (float(theta) ** -exponent.astype(np.float64)).astype(np.float32).tolist() != wanted.tolist()


def test_table_rounds_the_angle_to_float32():
    """At position 1,048,575 the angle is the float32 product, and cosine and sine are right to 1e-7 for that angle."""
    positions = torch.tensor([0, 1, 4095, 131_072, 1_048_575])
    frequencies = rope_frequencies(8e6, 64)
    cos, sin = rope_table(positions, frequencies, torch.float32)
    for row, position in enumerate(positions.tolist()):
        for pair, frequency in enumerate(frequencies.tolist()):
            angle = float(np.float32(np.float32(position) * np.float32(frequency)))
            assert abs(cos[row, pair].item() - math.cos(angle)) < 1e-7
            assert abs(sin[row, pair].item() - math.sin(angle)) < 1e-7


def rounded_table(positions: torch.Tensor, frequencies: torch.Tensor) -> list[torch.Tensor]:
    """Cosines and sines of the float32 angles, taken in more than float32 and rounded once."""
    angle = (positions.float()[:, None] * frequencies).numpy().astype(np.longdouble)
    return [torch.from_numpy(function(angle).astype(np.float32)) for function in (np.cos, np.sin)]


FAR = torch.cat([torch.arange(70), torch.arange(7, 2**20, 15_401), torch.tensor([2**20 - 1, 2**20, 2**24 - 1])])


def test_table_is_within_one_rounding():
    """No cosine or sine is further than 1.2e-7 from the exact one of its float32 angle, at short and far positions."""
    frequencies = rope_frequencies(8e6, 64)
    for got, wanted in zip(rope_table(FAR, frequencies, torch.float32), rounded_table(FAR, frequencies), strict=True):
        assert bool(((got - wanted).abs() <= 1.2e-7).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("theta", "width"), [(8e6, 64), (1e6, 8), (1e4, 2)])
def test_a_cards_table_is_correctly_rounded(theta: float, width: int) -> None:
    """Every cosine and sine of a card is the exact one rounded to float32, and the same cast to bfloat16; so decode and append agree."""
    frequencies = rope_frequencies(theta, width)
    table = rope_table(FAR.cuda(), frequencies.cuda(), torch.float32)
    small = rope_table(FAR.cuda(), frequencies.cuda(), torch.bfloat16)
    for got, cast, wanted in zip(table, small, rounded_table(FAR, frequencies), strict=True):
        assert torch.equal(got.cpu(), wanted)
        assert torch.equal(cast, got.bfloat16())


def test_table_casts_last():
    """A bf16 table is the float32 table rounded, not a table of bf16 angles."""
    positions = torch.tensor([131_072])
    frequencies = rope_frequencies(1e6, 64)
    cos, sin = rope_table(positions, frequencies, torch.float32)
    small_cos, small_sin = rope_table(positions, frequencies, torch.bfloat16)
    assert torch.equal(small_cos, cos.bfloat16())
    assert torch.equal(small_sin, sin.bfloat16())


@pytest.mark.parametrize("middle", [(), (3,), (2, 5)])
def test_rotate_turns_pairs_in_place(middle):
    """Pair (x[2j], x[2j+1]) as a complex number is multiplied by e^(i angle) and stays at 2j, 2j+1."""
    torch.manual_seed(1)
    x = torch.randn(4, *middle, 10)
    positions = torch.tensor([0, 3, 17, 1000])
    cos, sin = rope_table(positions, rope_frequencies(1e4, 10), torch.float32)
    turned = torch.view_as_complex(x.double().unflatten(-1, (5, 2)).contiguous())
    turn = torch.complex(cos.double(), sin.double()).view(4, *(1,) * len(middle), 5)
    wanted = torch.view_as_real(turned * turn).flatten(-2)
    got = rotate(x, cos, sin)
    assert got.is_contiguous()
    assert bool(((got - wanted).abs() <= 1e-6).all())
    assert torch.equal(got[0], x[0])  # position 0 turns nothing


def test_rotate_keeps_dots_of_equal_distance():
    """A query at p and a key at q have the dot product of p + 100 and q + 100."""
    torch.manual_seed(2)
    query, key = torch.randn(1, 64).expand(2, 64), torch.randn(1, 64).expand(2, 64)
    frequencies = rope_frequencies(1e4, 64)
    turned_query = rotate(query, *rope_table(torch.tensor([50, 150]), frequencies, torch.float32))
    turned_key = rotate(key, *rope_table(torch.tensor([20, 120]), frequencies, torch.float32))
    dots = (turned_query * turned_key).sum(-1)
    assert abs(dots[0] - dots[1]) < 1e-4


def test_rotate_row_does_not_see_its_company(assert_row_invariant):
    """A rotated row has the same bits alone and in any company, and so has its table."""
    torch.manual_seed(3)
    positions = torch.randint(0, 1_000_000, (13,))
    frequencies = rope_frequencies(8e6, 24)
    x = torch.randn(13, 3, 40)[:, :, 9:33]
    assert_row_invariant(lambda picked: rotate(x[picked], *rope_table(positions[picked], frequencies, torch.float32)), 13)
    assert_row_invariant(lambda picked: torch.cat(rope_table(positions[picked], frequencies, torch.float32), 1), 13)


def test_rotate_of_no_rows():
    """No rows in, no rows out."""
    cos, sin = rope_table(torch.empty(0, dtype=torch.int64), rope_frequencies(1e4, 8), torch.float32)
    assert rotate(torch.empty(0, 2, 8), cos, sin).shape == (0, 2, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_values_turn_and_the_others_stay(dtype: torch.dtype) -> None:
    """The values that the table covers are rotated, the rest of every head is untouched, with and without heads; no rows are fine."""
    table = rope_table(torch.tensor([0, 9, 1_048_575]), rope_frequencies(8e6, 6), dtype)
    for shape in ((3, 13), (3, 9, 13), (3, 5, 6)):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
        before = x.clone()
        got = rotate_first(x, *table)
        assert torch.equal(got[..., 6:], before[..., 6:])
        assert torch.equal(got[..., :6], rotate(before[..., :6], *table))
        assert got.is_contiguous()
    assert rotate_first(torch.empty(0, 4, 8), table[0][:0], table[1][:0]).shape == (0, 4, 8)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width", "rope"), [(32, 128, 64), (12, 16, 8), (1, 3, 2)])
def test_a_card_turns_first_values_in_place(heads: int, width: int, rope: int) -> None:
    """Every value is the reference's to the bit for float32, the first of each head turned and the others untouched."""
    table = rope_table(torch.tensor([0, 9, 77, 1_048_575]), rope_frequencies(8e6, rope), torch.float32)
    x = torch.randn(4, heads, width, generator=torch.Generator().manual_seed(1))
    got = rotate_first(x.cuda(), table[0].cuda(), table[1].cuda())
    assert torch.equal(got.cpu(), rotate_first(x, *table))
