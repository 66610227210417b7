"""Weights kept as integers of 4 or 8 bits, with one scale, and maybe one zero, a group of the width.

Knows no product and no file. A value is `(code - zero) * scale` of its group; a code is unsigned, and without `zeros` the zero is the
middle code, 2^(bits - 1).

Layout: the one that products read, whatever form a checkpoint had. A unit is 16 bits: 4 codes of 4 bits or 2 of 8. Units of one output lie
in chunks of `chunk_units` (32 where a group has 32 values, else 64), and code j of unit u of a chunk belongs to the chunk's value
`j * chunk_units + u`. So the j-th codes of a chunk are one piece of consecutive values within one group: a piece is widened by one shift
and one mask, two codes at a time, and meets consecutive values of a row. The width is padded to whole chunks with the middle code.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CODE_BITS", "GroupInt", "chunk_units_of", "padded_width"]

CODE_BITS = (4, 8)  # bits of a code
_UNIT_BITS = 16
_SCALES = (torch.bfloat16, torch.float16, torch.float32)


def chunk_units_of(group: int) -> int:
    """Units of a chunk, which are also the values of a piece."""
    return min(group, 64)


def padded_width(width: int, bits: int, group: int) -> int:
    """`width` in whole chunks."""
    chunk = chunk_units_of(group) * (_UNIT_BITS // bits)
    return -(-width // chunk) * chunk


@dataclass(frozen=True, slots=True)
class GroupInt:
    """One weight [outputs, width], or one an expert in front.

    units   [..., outputs, padded width * bits / 16]       int16                       contiguous, see the module's page
    scales  [..., outputs, ceil(padded width / group)]     bfloat16, float16, float32  contiguous; 0 in the padding
    zeros   as scales                                      uint8                       codes; None: the middle code everywhere
    bits    4 or 8
    group   values that share a scale: 32 or a multiple of 64
    width   without padding
    """

    units: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    width: int

    def __post_init__(self) -> None:
        assert self.bits in CODE_BITS, f"{self.bits} bits"
        assert self.group == 32 or (self.group > 0 and self.group % 64 == 0), f"groups of {self.group}"
        padded = padded_width(self.width, self.bits, self.group)
        wanted = (*self.units.shape[:-1], -(-padded // self.group))
        assert self.units.dtype == torch.int16, f"units are {self.units.dtype}"
        assert self.units.shape[-1] == padded * self.bits // _UNIT_BITS, f"{self.units.shape[-1]} units for a width of {self.width}"
        assert self.scales.dtype in _SCALES, f"scales are {self.scales.dtype}"
        assert self.scales.shape == wanted, f"scales are {tuple(self.scales.shape)}, not {wanted}"
        assert self.units.is_contiguous(), "units are not contiguous"
        assert self.scales.is_contiguous(), "scales are not contiguous"
        if self.zeros is not None:
            assert self.zeros.dtype == torch.uint8, f"zeros are {self.zeros.dtype}"
            assert self.zeros.shape == wanted, f"zeros are {tuple(self.zeros.shape)}, not {wanted}"
            assert self.zeros.is_contiguous(), "zeros are not contiguous"

    @classmethod
    def pack(cls, codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int) -> "GroupInt":
        """From codes [..., outputs, width] uint8, each below 2^bits, and scales and zeros [..., outputs, ceil(width / group)]."""
        *leading, width = codes.shape
        pieces, units = _UNIT_BITS // bits, chunk_units_of(group)
        padded = padded_width(width, bits, group)
        if padded != width:
            codes = torch.nn.functional.pad(codes, (0, padded - width), value=1 << (bits - 1))
        parts = codes.view(*leading, padded // (units * pieces), pieces, units).to(torch.int32)
        packed = parts[..., 0, :].clone()
        for piece in range(1, pieces):
            packed |= parts[..., piece, :] << piece * bits
        groups = -(-padded // group)
        return cls(
            units=packed.to(torch.int16).view(*leading, -1),
            scales=_widened(scales, groups, 0),
            zeros=None if zeros is None else _widened(zeros, groups, 1 << (bits - 1)),
            bits=bits,
            group=group,
            width=width,
        )

    @property
    def shape(self) -> torch.Size:
        """Of the weight, without padding."""
        return torch.Size((*self.units.shape[:-1], self.width))

    @property
    def device(self) -> torch.device:
        """Where the weight is."""
        return self.units.device

    def __getitem__(self, part: int | slice) -> "GroupInt":
        """One expert, or consecutive outputs or experts: a view."""
        zeros = None if self.zeros is None else self.zeros[part]
        return GroupInt(self.units[part], self.scales[part], zeros, self.bits, self.group, self.width)

    def empty_like(self, *leading: int) -> "GroupInt":
        """A weight of other leading dimensions (experts, outputs) that is yet to be written."""
        zeros = None if self.zeros is None else self.zeros.new_empty((*leading, self.zeros.shape[-1]))
        units = self.units.new_empty((*leading, self.units.shape[-1]))
        return GroupInt(units, self.scales.new_empty((*leading, self.scales.shape[-1])), zeros, self.bits, self.group, self.width)

    def copy_(self, other: "GroupInt") -> None:
        """Become an `alike` weight of the same shape."""
        assert self.alike(other), "another form"
        self.units.copy_(other.units)
        self.scales.copy_(other.scales)
        if self.zeros is not None and other.zeros is not None:
            self.zeros.copy_(other.zeros)

    def alike(self, other: "GroupInt") -> bool:
        """Whether one launch can read both: the same bits, groups, width, dtype of scales, and both with zeros or neither."""
        mine, its = ((one.bits, one.group, one.width, one.scales.dtype, one.zeros is None) for one in (self, other))
        return mine == its

    def codes(self) -> Tensor:
        """uint8 [..., outputs, width]."""
        pieces, units = _UNIT_BITS // self.bits, chunk_units_of(self.group)
        chunks = self.units.view(*self.units.shape[:-1], -1, 1, units).to(torch.int32)
        shifts = torch.arange(pieces, device=self.device, dtype=torch.int32)[:, None] * self.bits
        codes = (chunks >> shifts) & ((1 << self.bits) - 1)
        return codes.flatten(-3)[..., : self.width].to(torch.uint8)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight as `dtype`, multiplied out in float32: what the references compute with."""
        values = self.codes().to(torch.float32)
        spread = self.scales.to(torch.float32).repeat_interleave(self.group, -1)[..., : self.width]
        if self.zeros is None:
            return ((values - (1 << (self.bits - 1))) * spread).to(dtype)
        return ((values - self.zeros.to(torch.float32).repeat_interleave(self.group, -1)[..., : self.width]) * spread).to(dtype)


def _widened(each: Tensor, groups: int, fill: int) -> Tensor:
    """One a group of the padded width."""
    return torch.nn.functional.pad(each, (0, groups - each.shape[-1]), value=fill).contiguous()
