"""Products of few rows with `GroupInt` weights, whose codes are widened in registers.

A program multiplies INTEGER_ROWS rows by a tile of outputs; outputs are the matrix units' rows, so that eight rows waste none of them. A
step takes `Tiling.parts` chunks of the width, one a warp: a chunk's pieces (`group_int.py`) are widened one after the other, multiplied by
as many consecutive values of the rows, and each piece's sums get the scale of its group. Scales of the next step are under way meanwhile.

Invariants:
1. As in `kernel.py`: tilings follow from the weight's shape, bits and group; a row takes one of 8 places in a tile that is always whole.
2. A code less its zero is at most 8 bits and exact in bf16, products are exact (a float32 row is three bf16 terms), sums are float32,
   scales are applied to a piece's sum. Pieces are added in the order of their values within a part, parts in one sum of a fixed shape.

Floor: the codes and scales once. At 4.2 TB/s a multiprocessor sees 38 four-bit codes a clock, so instructions count (2.2 to 2.6 a code and
lane): two codes at a time take one mask and one subtraction, three of four a shift. PACKED: in NVIDIA's own instructions, since compilers
take them one by one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.group_int import GroupInt, chunk_units_of, padded_width
from kernels.linear.kernel import _add_splits, _dot_bf16, launch_options, split_width_of
from kernels.linear.tiling import Tiling, integer_tiling

__all__ = ["INTEGER_ROWS", "PACKED", "accumulate_integers", "chunk_of", "linear", "widened", "zero_of"]

INTEGER_ROWS = 8  # of a tile
PACKED = torch.version.hip is None and not triton.knobs.runtime.interpret
_BAND_ROWS = 256
_SUM_BLOCK = 1024

# Codes of two units, 0..15, become the bf16 numbers 128..143 in place: their last four bits are the code. The zero is 128 more, too.
_PIECE_0 = tl.constexpr("{ .reg .b32 t; lop3.b32 t, $1, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 $0, t, $2; }")
_PIECE_1 = tl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 4; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 $0, t, $2; }")
_PIECE_2 = tl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 $0, t, $2; }")
_PIECE_3 = tl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 12; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 $0, t, $2; }")
# A byte becomes the last of a float32 number of 2^23 and on; less the zero and 2^23 it fits bf16.
_LOW_BYTE = tl.constexpr(
    "{ .reg .b32 a, b; .reg .f32 c, d; prmt.b32 a, $1, 0x4B000000, 0x7650; prmt.b32 b, $1, 0x4B000000, 0x7652;"
    " mov.b32 c, a; mov.b32 d, b; sub.rn.f32 c, c, $2; sub.rn.f32 d, d, $3; cvt.rn.bf16x2.f32 $0, d, c; }"
)
_HIGH_BYTE = tl.constexpr(
    "{ .reg .b32 a, b; .reg .f32 c, d; prmt.b32 a, $1, 0x4B000000, 0x7651; prmt.b32 b, $1, 0x4B000000, 0x7653;"
    " mov.b32 c, a; mov.b32 d, b; sub.rn.f32 c, c, $2; sub.rn.f32 d, d, $3; cvt.rn.bf16x2.f32 $0, d, c; }"
)


@triton.jit
def zero_of(code, BITS: tl.constexpr, PACKED: tl.constexpr):
    """What `widened` subtracts, for zeros given as codes in float32."""
    if not PACKED:
        return code
    elif BITS == 4:
        return (code + 128.0).to(tl.bfloat16)
    else:
        return code + 8388608.0


@triton.jit
def widened(units, zero, PIECE: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr):
    """Piece PIECE of units, less its zero: bf16, exact. `zero`: of `zero_of`, in the units' shape."""
    if not PACKED:
        code = (units.to(tl.int32) >> (PIECE * BITS)) & ((1 << BITS) - 1)
        return (code.to(tl.float32) - zero).to(tl.bfloat16)
    elif BITS == 8:
        if PIECE == 0:
            return tl.inline_asm_elementwise(_LOW_BYTE, "=r,r,f,f", [units, zero], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(_HIGH_BYTE, "=r,r,f,f", [units, zero], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif PIECE == 0:
        return tl.inline_asm_elementwise(_PIECE_0, "=r,r,r", [units, zero], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif PIECE == 1:
        return tl.inline_asm_elementwise(_PIECE_1, "=r,r,r", [units, zero], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif PIECE == 2:
        return tl.inline_asm_elementwise(_PIECE_2, "=r,r,r", [units, zero], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(_PIECE_3, "=r,r,r", [units, zero], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _dot_rows(weight, x):
    """weight [parts, N, K] bf16 · x [parts, K, M] bf16 or f32: [parts, N, M] f32, every product exact."""
    acc = tl.zeros([weight.shape[0], weight.shape[1], x.shape[2]], tl.float32)
    if x.dtype == tl.float32:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return _dot_bf16(weight, high, _dot_bf16(weight, middle, _dot_bf16(weight, low, acc)))
    else:
        return _dot_bf16(weight, x, acc)


@triton.jit
def _scales_of_chunks(from_scales, known, value, GROUP: tl.constexpr, SPAN: tl.constexpr):
    """All SPAN scales of the chunks that begin at `value` [parts], one word an output: [parts, N]. Scales have 16 bits."""
    at = from_scales[None, :] + (value // GROUP)[:, None]
    if SPAN == 4:
        return tl.load(at.to(tl.pointer_type(tl.int64), bitcast=True), mask=known, other=0)
    elif SPAN == 2:
        return tl.load(at.to(tl.pointer_type(tl.int32), bitcast=True), mask=known, other=0)
    else:
        return tl.load(at.to(tl.pointer_type(tl.int16), bitcast=True), mask=known, other=0)


@triton.jit
def _piece_sum(x, units, words, from_scales, from_zeros, known, value, PIECE: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr,
               GROUP: tl.constexpr, ZEROS: tl.constexpr, PACKED: tl.constexpr, JOINED: tl.constexpr):  # fmt: skip
    """[parts, N, M] f32: rows x [parts, M, UNITS] by one piece of units [parts, N, UNITS], scaled. Chunks begin at `value` [parts]."""
    KIND: tl.constexpr = from_scales.dtype.element_ty
    group = ((value + PIECE * UNITS) // GROUP)[:, None]
    if ZEROS:
        code = tl.load(from_zeros[None, :] + group, mask=known, other=0).to(tl.float32)
        zero = tl.broadcast_to(zero_of(code, BITS, PACKED)[:, :, None], units.shape)
    else:
        zero = zero_of(tl.full(units.shape, 1 << (BITS - 1), tl.float32), BITS, PACKED)
    if JOINED:
        scale = (words >> (16 * (PIECE * UNITS // GROUP))).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    else:
        scale = tl.load(from_scales[None, :] + group, mask=known, other=0.0).to(tl.float32)
    return _dot_rows(widened(units, zero, PIECE, BITS, PACKED), tl.trans(x, 0, 2, 1)) * scale[:, :, None]


@triton.jit
def accumulate_integers(from_x, x_value, x_mask, from_units, w_mask, from_scales, from_zeros, more_units, more_scales, more_zeros, first,
                        TWO: tl.constexpr, WIDTH: tl.constexpr, SPLIT_WIDTH: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr,
                        GROUP: tl.constexpr, ZEROS: tl.constexpr, PACKED: tl.constexpr, TILE_M: tl.constexpr,
                        TILE_N: tl.constexpr):  # fmt: skip
    """Sum over `first .. first + SPLIT_WIDTH` (whole steps) of rows at `from_x` [M] by outputs at `from_units` [N] (scales, zeros at [N]).

    TWO: and by as many outputs at `more_units` (scales, zeros) [N]; tiles of their own, since scales of 32 outputs at a time would pass
    through shared memory. Returns two [N, M] f32, the second for TWO. Chunks behind the padded width are not read.
    """
    UNITS: tl.constexpr = 32 if GROUP == 32 else 64
    PIECES: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = UNITS * PIECES
    PADDED: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK * CHUNK
    WHOLE: tl.constexpr = PADDED % (CHUNK * PARTS) == 0 and WIDTH == PADDED
    SPAN: tl.constexpr = CHUNK // GROUP if GROUP < CHUNK else 1
    EACH: tl.constexpr = GROUP % CHUNK == 0 or (CHUNK % GROUP == 0 and (SPAN == 2 or SPAN == 4))
    JOINED: tl.constexpr = from_scales.dtype.element_ty.primitive_bitwidth == 16 and EACH
    unit = tl.arange(0, UNITS)
    offset = tl.arange(0, PARTS) * CHUNK
    acc = tl.zeros([PARTS, TILE_N, TILE_M], tl.float32)
    other = tl.zeros([PARTS, TILE_N, TILE_M], tl.float32)
    before = w_mask[None, :] & (first + offset < PADDED)[:, None]
    words, more_words = before, before  # scales of the next step, on their way while this one is computed
    if JOINED:
        words = _scales_of_chunks(from_scales, before, first + offset, GROUP, SPAN)
        more_words = _scales_of_chunks(more_scales, before, first + offset, GROUP, SPAN) if TWO else words
    for start in range(0, SPLIT_WIDTH, CHUNK * PARTS):
        at = first + start + offset
        known = tl.broadcast_to(w_mask[None, :], [PARTS, TILE_N])
        if not WHOLE:
            known = known & (at < PADDED)[:, None]
        place = (at // PIECES)[:, None, None] + unit[None, None, :]
        units = tl.load(from_units[None, :, None] + place, mask=known[:, :, None], other=0)
        more = tl.load(more_units[None, :, None] + place, mask=known[:, :, None], other=0) if TWO else units
        these, more_these = words, more_words
        if JOINED:
            then = first + tl.minimum(start + CHUNK * PARTS, SPLIT_WIDTH - CHUNK * PARTS) + offset  # the last step's again at the end
            there = w_mask[None, :]
            if not WHOLE:
                there = there & (then < PADDED)[:, None]
            words = _scales_of_chunks(from_scales, there, then, GROUP, SPAN)
            more_words = _scales_of_chunks(more_scales, there, then, GROUP, SPAN) if TWO else words
        for piece in tl.static_range(PIECES):
            value = at[:, None] + (piece * UNITS + unit)[None, :]
            x_known = x_mask[None, :, None]
            if not WHOLE:
                x_known = x_known & (value < WIDTH)[:, None, :]
            x = tl.load(from_x[None, :, None] + (value * x_value)[:, None, :], mask=x_known, other=0.0)
            acc += _piece_sum(x, units, these, from_scales, from_zeros, known, at, piece, UNITS, BITS, GROUP, ZEROS, PACKED, JOINED)
            if TWO:
                other += _piece_sum(
                    x, more, more_these, more_scales, more_zeros, known, at, piece, UNITS, BITS, GROUP, ZEROS, PACKED, JOINED
                )
    return tl.sum(acc, 0), tl.sum(other, 0)


@triton.jit
def _integer_product(x, units, scales, zeros, out, rows, x_row, x_value, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
                     SPLIT_WIDTH: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
                     PACKED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """out [splits, rows, OUTPUTS]: a split of each row's product."""
    CHUNK: tl.constexpr = (32 if GROUP == 32 else 64) * (16 // BITS)
    PADDED: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK * CHUNK
    GROUPS: tl.constexpr = (PADDED + GROUP - 1) // GROUP
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    output = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    split = tl.program_id(2)
    x_mask, w_mask = row < rows, output < OUTPUTS
    from_units = units + output.to(tl.int64) * (PADDED * BITS // 16)
    from_scales, from_zeros = scales + output * GROUPS, zeros + output * GROUPS
    acc, _ = accumulate_integers(x + row.to(tl.int64) * x_row, x_value, x_mask, from_units, w_mask, from_scales, from_zeros, from_units,
                                 from_scales, from_zeros, split * SPLIT_WIDTH, False, WIDTH, SPLIT_WIDTH, PARTS, BITS, GROUP, ZEROS,
                                 PACKED, TILE_M, TILE_N)  # fmt: skip
    to_out = out + (split.to(tl.int64) * rows + row[None, :]) * OUTPUTS + output[:, None]
    tl.store(to_out, acc.to(out.dtype.element_ty), mask=x_mask[None, :] & w_mask[:, None])


def chunk_of(bits: int, group: int) -> int:
    """Values of a chunk."""
    return chunk_units_of(group) * (16 // bits)


def integer_constants(weight: GroupInt, tiling: Tiling) -> dict[str, int | bool]:
    """Launch constants that every kernel over such a weight takes."""
    padded = padded_width(weight.width, weight.bits, weight.group)
    return {
        "SPLIT_WIDTH": split_width_of(tiling, padded), "PARTS": tiling.parts, "BITS": weight.bits, "GROUP": weight.group,
        "ZEROS": weight.zeros is not None, "PACKED": PACKED, "TILE_M": INTEGER_ROWS, "TILE_N": tiling.outputs, **launch_options(tiling),
    }  # fmt: skip


def linear(x: Tensor, weight: GroupInt, dtype: torch.dtype | None = None, tiling: Tiling | None = None) -> Tensor:
    """See the package page; the result is `dtype`, or x's. A given `tiling` is for measuring: it may change bits."""
    rows, width = x.shape
    outputs = weight.shape[0]
    how = tiling or integer_tiling(outputs, width, weight.bits, weight.group, wide=x.dtype == torch.float32)
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    zeros = weight.scales if weight.zeros is None else weight.zeros
    for start in range(0, rows, _BAND_ROWS):
        band, to = x[start : start + _BAND_ROWS], out[start : start + _BAND_ROWS]
        count = band.shape[0]
        parts = to if how.splits == 1 else torch.empty((how.splits, *to.shape), dtype=torch.float32, device=x.device)
        _integer_product[(triton.cdiv(count, INTEGER_ROWS), triton.cdiv(outputs, how.outputs), how.splits)](
            band, weight.units, weight.scales, zeros, parts, count, *band.stride(), OUTPUTS=outputs, WIDTH=width,
            **integer_constants(weight, how),
        )  # fmt: skip
        if how.splits > 1:
            values = to.numel()
            _add_splits[(triton.cdiv(values, _SUM_BLOCK),)](parts, to, values, SPLITS=how.splits, BLOCK=_SUM_BLOCK, num_warps=4)
    return out


def _case(outputs: int, width: int, bits: int, group: int, zeros: bool, x: str = "*bf16", scales: str = "*bf16") -> dict[str, object]:
    how = integer_tiling(outputs, width, bits, group, wide=x == "*fp32")
    return {
        "x": x, "units": "*i16", "scales": scales, "zeros": "*u8" if zeros else scales, "out": x if how.splits == 1 else "*fp32",
        "rows": "i32", "x_row": width, "x_value": 1, "OUTPUTS": outputs, "WIDTH": width,
        "SPLIT_WIDTH": split_width_of(how, padded_width(width, bits, group)), "PARTS": how.parts, "BITS": bits, "GROUP": group,
        "ZEROS": zeros, "PACKED": {"cuda": True, "hip": False}, "TILE_M": INTEGER_ROWS, "TILE_N": how.outputs, "num_warps": how.warps,
        "num_stages": {"cuda": how.stages, "hip": 2},
    }  # fmt: skip


COMPILE = [
    (_integer_product, _case(6144, 16384, 4, 64, False)),
    (_integer_product, _case(16384, 2048, 8, 64, False)),
    (_integer_product, _case(2048, 6144, 4, 128, True, scales="*fp16")),
    (_integer_product, _case(2048, 6144, 8, 32, True)),
    (_integer_product, _case(4096, 2048, 4, 64, False, x="*fp32")),
]
