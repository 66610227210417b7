"""Interpreted products with weights of 4 and 8 bits: every code, zeros at both ends, ragged shapes, splits, and company."""

import itertools
from dataclasses import replace

import company
import interpreted
import torch
from torch import Tensor

from kernels.linear import GroupInt, integers, linear, tiling, widen
from kernels.linear.group_int import padded_width
from kernels.place import BULK_ROWS


def made(*shape: int, bits: int, group: int, zeros: bool, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> tuple[GroupInt, Tensor]:
    """A weight that has every code, and zeros at the lowest and highest code; and the float64 values it stands for, from the definition."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    every = torch.arange(1 << bits)[: codes.numel()]
    codes.view(-1)[: every.numel()] = every
    groups = -(-shape[-1] // group)
    scales = (torch.randn((*shape[:-1], groups), generator=generator) / 2**bits / shape[-1] ** 0.5).to(dtype)
    zero = torch.randint(0, 1 << bits, scales.shape, generator=generator)
    zero.view(-1)[:2] = torch.tensor([0, (1 << bits) - 1])[: zero.numel()]
    at = torch.arange(shape[-1]) // group
    offset = zero[..., at] if zeros else 1 << (bits - 1)
    weight = GroupInt.pack(codes.byte(), scales, zero.byte() if zeros else None, bits, group)
    return weight, (codes - offset).double() * scales.double()[..., at]


FORMS = list(itertools.product((4, 8), (32, 64, 128, 192), (False, True)))


def packing_is_lossless() -> None:
    """What is packed comes out again, code by code, behind any width; padding is the middle code and no scale."""
    for (bits, group, zeros), width in itertools.product(FORMS, (1, 31, 64, 200, 512)):
        weight, wanted = made(3, 5, width, bits=bits, group=group, zeros=zeros)
        assert weight.shape == (3, 5, width)
        assert weight.units.shape[-1] * 16 // bits == padded_width(width, bits, group) >= width
        interpreted.same("multiplied out", weight.dequantised(torch.float64), wanted.float().double())
        interpreted.same("an expert", weight[1].dequantised(torch.float64), wanted[1].float().double())


def products_are_exact() -> None:
    """Every form at ragged widths and outputs, one step or several: the float64 product of the values to float32 rounding."""
    for number, (bits, group, zeros) in interpreted.some(enumerate(FORMS), 5):
        outputs, width = ((17, 130), (3, 64), (2, 1100), (16, 257))[number % 4]
        dtype = (torch.bfloat16, torch.float16, torch.float32)[number % 3]
        weight, values = made(outputs, width, bits=bits, group=group, zeros=zeros, dtype=dtype, seed=number)
        x = torch.randn((2, 2 * width), generator=torch.Generator().manual_seed(number))[:, ::2]
        name = f"{bits} bits, groups of {group}, {zeros}, {outputs} x {width}"
        if number % 2:
            company.near(name, linear(x, weight), x.double() @ values.t(), 2e-6)
        else:
            narrow = x.bfloat16()
            company.near(f"bf16, {name}", integers.linear(narrow, weight, torch.float32), narrow.double() @ values.t(), 2e-6)


def _run(assembly: str, units: Tensor) -> Tensor:
    """What instructions that shift, mask and put in bits make of pairs of units, int64 words of 32 bits."""
    done = {"$1": units}
    for line in assembly.strip("{} ").split(";"):
        words = line.replace(",", "").split()
        if not words or words[0] in (".reg", "sub.rn.bf16x2"):
            continue
        if words[0] == "shr.u32":
            done[words[1]] = done[words[2]] >> int(words[3])
        else:
            assert (words[0], words[5]) == ("lop3.b32", "0xEA"), f"no instruction of these: {line}"  # (first and second) or third
            done[words[1]] = (done[words[2]] & int(words[3], 16)) | int(words[4], 16)
    return done["$0"] if "$0" in done else done["t"]


def instructions_make_what_is_said_of_them() -> None:
    """NVIDIA's instructions, which the interpreter does not run: of every unit, beside any other, 128 more than its code."""
    low = torch.arange(1 << 16)
    high = low[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))]
    pairs = low | high << 16
    for name, piece, more in (
        ("_PIECE_0", 0, 128), ("_PIECE_1", 1, 128), ("_PIECE_2", 2, 128), ("_PIECE_3", 3, 128),
    ):  # fmt: skip
        made = _run(getattr(widen, name).value, pairs)
        for half, units in ((made & 0xFFFF, low), (made >> 16, high)):
            numbers = half.to(torch.int32).to(torch.int16).view(torch.bfloat16).long()
            assert torch.equal(numbers, (units >> 4 * piece & 15) + more), name


def every_kind_of_tiling() -> None:
    """More or fewer parts, outputs of a tile, splits, twins: the exact product at ragged outputs and widths."""
    weight, values = made(20, 1500, bits=4, group=64, zeros=True)
    x = torch.randn(2, 1500).bfloat16()
    for how in (
        tiling.Tiling(16, 256, 1, 1, 2), tiling.Tiling(32, 256, 2, 2, 2, 3), tiling.Tiling(32, 256, 8, 8, 2),
        tiling.Tiling(64, 256, 1, 4, 2, 6),        tiling.Tiling(16, 256, 2, 2, 2, 1, True), tiling.Tiling(16, 256, 1, 2, 2, 3, True),
    ):  # fmt: skip
        company.near(f"{how}", integers.linear(x, weight, torch.float32, how), x.double() @ values.t(), 2e-6)
    bytes_, values = made(20, 1000, bits=8, group=128, zeros=False)
    for how in (tiling.Tiling(32, 128, 1, 2, 2, 2), tiling.Tiling(16, 128, 1, 1, 2, twin=True), tiling.Tiling(16, 128, 4, 4, 2, twin=True)):
        company.near(f"{how}", integers.linear(x[:, :1000], bytes_, torch.float32, how), x[:, :1000].double() @ values.t(), 2e-6)


def every_form_of_four_bits() -> None:
    """Each form, with and without zeros, groups of all sizes, values of a row that differ by 2^20: the exact product.

    A row has the same bits in any company, one that is not finite stays alone.
    """
    x = torch.randn(3, 500).bfloat16()
    x[1, ::97] *= 2**20
    x[2, 5] = float("inf")
    for number, (how, zeros) in interpreted.some(enumerate(itertools.product(integers.FORMS, (False, True))), 7):
        group = (32, 64, 128)[number % 3]
        how = replace(how, width=min(64, group) * 4, splits=1 if how.parts > 1 else 2)
        weight, values = made(20, 500, bits=4, group=group, zeros=zeros, seed=number)
        got = integers.linear(x, weight, torch.float32, how)
        company.near(f"{how}, groups of {group}, {zeros}", got[:2], x[:2].double() @ values.t(), 2e-6)
        assert not bool(got[2].isfinite().any())
        among = integers.linear(x[torch.tensor([2, 1, 0, 0, 2])], weight, torch.float32, how)
        interpreted.same(f"{how}, among others", among[torch.tensor([3, 1])], got[:2])


def company_changes_no_bit() -> None:
    """A row has the same bits alone and among 1 to 64 others; a row of NaN stays alone."""
    for bits, group, zeros, counts in interpreted.some(((8, 32, True, (2, 9)), (4, 64, False, (1, 2, 3, 4, 8, 16, 64))), 2):
        weight, _ = made(16, 300, bits=bits, group=group, zeros=zeros)
        x = torch.randn(5, 300)
        company.row_invariant(lambda p, x=x, w=weight: linear(x[p].bfloat16(), w).float(), 5, counts)  # type: ignore[misc]
        company.row_invariant(lambda p, x=x, w=weight: linear(x[p], w), 5, (9,))  # type: ignore[misc]
        clean = linear(x, weight)
        x[3] = float("nan")
        got = linear(x, weight)
        assert bool(got[3].isnan().all())
        got[3] = clean[3]
        interpreted.same("others", got, clean)


def many_rows() -> None:
    """Beyond BULK_ROWS rows, also cut to small scratch: the float64 product of the values."""
    from kernels.linear import bulk

    for bits, group, zeros in interpreted.some(((4, 128, True), (4, 64, False), (8, 32, True)), 3):
        weight, values = made(135, 300, bits=bits, group=group, zeros=zeros)
        x = torch.randn(BULK_ROWS + 1, 300)
        for scratch in (1, bulk.SCRATCH_BYTES):
            bulk.SCRATCH_BYTES, kept = scratch, bulk.SCRATCH_BYTES
            company.near("float32", linear(x, weight), x.double() @ values.t(), 1e-5)
            company.near("bf16", linear(x.bfloat16(), weight), x.bfloat16().double() @ values.t(), 2**-5)
            bulk.SCRATCH_BYTES = kept


def main() -> None:
    torch.manual_seed(1)
    packing_is_lossless()
    instructions_make_what_is_said_of_them()
    products_are_exact()
    every_kind_of_tiling()
    every_form_of_four_bits()
    company_changes_no_bit()
    many_rows()


if __name__ == "__main__":
    main()
