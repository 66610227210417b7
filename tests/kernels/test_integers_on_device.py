"""Products with weights of 4 and 8 bits on a card: near the definition in float64, and a row alone, at the model's true widths.

Run with `-m gpu`.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import linear, moe
from kernels.linear import GroupInt
from kernels.place import BULK_ROWS

pytestmark = pytest.mark.gpu
COUNTS = (1, 2, 3, 4, 8, 16, 64)


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    """As an engine sets them when it opens a device."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def drawn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * scale


def made(*shape: int, bits: int, group: int, zeros: bool, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> tuple[GroupInt, Tensor]:
    """A weight, every code and the ends of the zeros in it, and the float64 values that it stands for."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    codes.view(-1)[: 1 << bits] = torch.arange(1 << bits)
    scales = ((torch.rand((*shape[:-1], -(-shape[-1] // group)), generator=generator) + 0.5) / 2**bits / shape[-1] ** 0.5).to(dtype)
    zero = torch.randint(0, 1 << bits, scales.shape, generator=generator)
    zero.view(-1)[:2] = torch.tensor([0, (1 << bits) - 1])
    at = torch.arange(shape[-1]) // group
    offset = zero[..., at] if zeros else 1 << (bits - 1)
    weight = GroupInt.pack(codes.byte().cuda(), scales.cuda(), zero.byte().cuda() if zeros else None, bits, group)
    return weight, ((codes - offset).double() * scales.double()[..., at]).cuda()


def near(got: Tensor, wanted: Tensor, bound: float) -> None:
    """Within `bound` of the largest size in its row."""
    size = wanted.double().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    error = float(((got.double() - wanted.double()).abs() / size).max())
    assert error <= bound, f"differs by {error:.3g} of its row's size, more than {bound:.3g}"


FORMS = [(bits, group, zeros) for bits in (4, 8) for group in (32, 64, 128) for zeros in (False, True)]


@pytest.mark.parametrize(("bits", "group", "zeros"), FORMS)
def test_products_are_exact_and_alone(bits: int, group: int, zeros: bool) -> None:
    """True widths and ragged ones, bf16 and float32 rows: the float64 product to rounding; the same bits for a row in any company."""
    for number, (outputs, width) in enumerate(((2048, 6144), (6144, 2048), (33, 6144), (40, 96))):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[number % 3]
        weight, values = made(outputs, width, bits=bits, group=group, zeros=zeros, dtype=dtype)
        rows = drawn(64, width, seed=2).bfloat16()
        whole = linear.linear(rows, weight)
        near(whole, rows.double() @ values.t(), 2**-7)
        for count in COUNTS:
            assert torch.equal(linear.linear(rows[:count], weight), whole[:count]), f"{count} rows"
        wide = drawn(5, width, seed=3)
        near(linear.linear(wide, weight), wide.double() @ values.t(), 1e-5)
        many = drawn(BULK_ROWS + 31, width, seed=4)
        near(linear.linear(many, weight), many.double() @ values.t(), 1e-5)
        near(linear.linear(many.bfloat16(), weight), many.bfloat16().double() @ values.t(), 2**-6)


@pytest.mark.parametrize("zeros", [False, True])
def test_every_form_of_four_bits(zeros: bool) -> None:
    """Every form that a tiling may name, at a true width and ragged outputs: the float64 product, a row's bits the same in any company."""
    from kernels.linear import integers
    from kernels.moe import kernel as moe_kernel

    weight, values = made(2040, 6144, bits=4, group=64, zeros=zeros)
    rows = drawn(64, 6144, seed=2).bfloat16()
    gate_up, wide_up = made(4, 1024, 2048, bits=4, group=64, zeros=zeros, seed=3)
    down, wide_down = made(4, 2048, 512, bits=4, group=64, zeros=zeros, seed=4)
    y, expert_of = drawn(12, 2048, seed=5).bfloat16(), torch.arange(24, device="cuda").view(12, 2) % 4
    weight_of = torch.rand(12, 2, device="cuda")
    wanted = moe.experts(y.float().cpu(), expert_of.cpu(), weight_of.cpu(), wide_up.float().cpu(), wide_down.float().cpu()).cuda()
    for how in integers.FORMS:
        whole = integers.linear(rows, weight, torch.float32, how)
        near(whole, rows.double() @ values.t(), 1e-5)
        for count in COUNTS:
            assert torch.equal(integers.linear(rows[:count], weight, torch.float32, how), whole[:count]), f"{count} rows, {how}"
        both = replace(how, splits=1), replace(how, splits=1)
        got = moe_kernel.experts(y, expert_of, weight_of, gate_up, down, both)
        near(got, wanted, 3e-2)
        assert torch.equal(moe_kernel.experts(y[:1], expert_of[:1], weight_of[:1], gate_up, down, both), got[:1]), f"alone, {how}"


@pytest.mark.parametrize(("bits", "group", "zeros"), FORMS)
def test_experts_follow_the_reference(bits: int, group: int, zeros: bool) -> None:
    """Eight of 16 experts a row: near the float32 reference on the same values; the same bits alone, without grouping, and among others."""
    hidden, width, count = 1024, 512, 16
    gate_up, wide_up = made(count, 2 * width, hidden, bits=bits, group=group, zeros=zeros, seed=1)
    down, wide_down = made(count, hidden, width, bits=bits, group=group, zeros=zeros, seed=2)
    generator = torch.Generator().manual_seed(3)
    rows = BULK_ROWS + 33
    expert_of = torch.stack([torch.randperm(count, generator=generator)[:8] for _ in range(rows)])
    weight_of, y = torch.rand((rows, 8), generator=generator), drawn(rows, hidden, seed=4).bfloat16()
    wanted = moe.experts(y.float().cpu(), expert_of, weight_of, wide_up.float().cpu(), wide_down.float().cpu()).cuda()
    card_of, card_weights = expert_of.cuda(), weight_of.cuda()
    near(moe.experts(y, card_of, card_weights, gate_up, down), wanted, 3e-2)
    got = moe.experts(y[:64], card_of[:64], card_weights[:64], gate_up, down)
    near(got, wanted[:64], 3e-2)
    for some in COUNTS:
        assert torch.equal(moe.experts(y[:some], card_of[:some], card_weights[:some], gate_up, down), got[:some]), f"{some} rows"
    exact = moe.experts(y[:9].float(), card_of[:9], card_weights[:9], gate_up, down)
    near(exact, wanted[:9], 1e-5)
    dense = moe.gated_mlp(y[:9].float(), gate_up[0][:width], gate_up[0][width:], down[0])
    near(
        dense,
        moe.gated_mlp(y[:9].float().cpu(), *(each.float().cpu() for each in (wide_up[0, :width], wide_up[0, width:], wide_down[0]))).cuda(),
        1e-5,
    )
