"""Products of few rows with `GroupInt` weights, whose codes are widened in registers.

A program multiplies INTEGER_ROWS rows by a tile of outputs; outputs are the matrix units' rows, so that eight rows waste none of them. A
chunk of the width is widened piece by piece (`group_int.py`), each multiplied by as many consecutive values of the rows, and each piece's
sums get the scale of its group. Scales of the next step are under way meanwhile. A weight's `Tiling` picks among these forms:

- several parts: a step takes as many chunks, one a warp, and the warps' sums are added. One part: a step takes one chunk, and a warp 16
  outputs; the rows are in shared memory once for all warps, so three times as many warps fit, but few outputs need `splits`.
- twin: a second tile of outputs is multiplied by the same rows, which leave shared memory once for both. Gate and up are twins anyway.

Invariants:
1. As in `kernel.py`: tilings follow from the weight's shape, bits and group; a row takes one of 8 places in a tile that is always whole.
2. A code less its zero is at most 8 bits and exact in bf16; products are exact (a float32 row is three bf16 terms), sums are float32,
   scales are applied to a piece's sum.
3. Pieces are added in the order of their values within a part, parts in one sum of a fixed shape, splits in ascending order.

Floor: the codes and scales once, 18 bytes a clock and multiprocessor at 4.2 TB/s, so instructions a packed byte and lane count (128 a
clock; masks and shifts 64). Of sm_90's loop over an attention's output, 4 bits: parts 5.2, twin 4.5; one part 5.0, twin 4.4; masks and
shifts are 2.0 of each. Eight bits: 4.3 (`tests/kernels/triton/instructions.py`). They are not what binds: an H200 gains by rows read less
often and by more bytes under way, and codes multiplied as they lie, 4.0 a byte, were no faster (docs/performance.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.group_int import GroupInt, chunk_units_of, padded_width
from kernels.linear.kernel import _add_splits, _dot_bf16, launch_options, split_width_of
from kernels.linear.tiling import Tiling, integer_tiling
from kernels.linear.widen import PACKED, widened, zero_of

__all__ = ["FORMS", "INTEGER_ROWS", "accumulate_integers", "chunk_of", "compiled", "integer_constants", "linear"]

INTEGER_ROWS = 8  # of a tile
# every form of the sums of four-bit weights, for what compiles and checks all of them
FORMS = tuple(
    Tiling(16 if parts > 1 else 64, 256, parts, 4, 3, splits, twin) for parts, splits in ((4, 1), (1, 4)) for twin in (False, True)
)  # fmt: skip
_BAND_ROWS = 256
_SUM_BLOCK = 1024


@triton.jit
def _dot_rows(weight, x, acc):
    """acc + weight [(parts,) N, K] bf16 · x [(parts,) K, M] bf16 or f32: [(parts,) N, M] f32, every product exact."""
    if x.dtype == tl.float32:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return _dot_bf16(weight, high, _dot_bf16(weight, middle, _dot_bf16(weight, low, acc)))
    else:
        return _dot_bf16(weight, x, acc)


@triton.jit
def _zeros(PARTS: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr):
    if PARTS == 1:
        return tl.zeros([TILE_N, TILE_M], tl.float32)
    else:
        return tl.zeros([PARTS, TILE_N, TILE_M], tl.float32)


@triton.jit
def _by_output(from_each, number, PARTS: tl.constexpr):
    """Addresses `number` (one a part) behind those of outputs, `from_each` [N]: [(parts,) N]. Or two masks: both."""
    if PARTS == 1:
        return from_each + number
    else:
        return from_each[None, :] + number[:, None]


@triton.jit
def _load(from_each, stride, mask, first, within, END: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr):
    """Values `first` (one a part) + `within` [K] behind `from_each` [N]: [(parts,) N, K]; 0 where the mask [N] is off, or from END on."""
    if PARTS == 1:
        value = first + within
        at, known = from_each[:, None] + (value * stride)[None, :], mask[:, None]
        if not WHOLE:
            known = known & (value < END)[None, :]
    else:
        value = first[:, None] + within[None, :]
        at, known = from_each[None, :, None] + (value * stride)[:, None, :], mask[None, :, None]
        if not WHOLE:
            known = known & (value < END)[:, None, :]
    return tl.load(at, mask=known, other=0)


@triton.jit
def _known(mask, at, END: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr):
    """Of `mask` [N], chunks that begin at `at` (one a part) before END: [(parts,) N]. WHOLE: all do."""
    known = mask if PARTS == 1 else tl.broadcast_to(mask[None, :], [PARTS, mask.shape[0]])
    if WHOLE:
        return known
    elif PARTS == 1:
        return known & (at < END)
    else:
        return known & (at < END)[:, None]


@triton.jit
def _scales_of_chunks(from_scales, known, value, GROUP: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """All SPAN scales of the chunks that begin at `value` (one a part), one word an output: [(parts,) N]. Scales have 16 bits."""
    at = _by_output(from_scales, value // GROUP, PARTS)
    if SPAN == 4:
        return tl.load(at.to(tl.pointer_type(tl.int64), bitcast=True), mask=known, other=0)
    elif SPAN == 2:
        return tl.load(at.to(tl.pointer_type(tl.int32), bitcast=True), mask=known, other=0)
    else:
        return tl.load(at.to(tl.pointer_type(tl.int16), bitcast=True), mask=known, other=0)


@triton.jit
def _piece_sum(x, nothing, units, words, from_scales, from_zeros, known, value, PIECE: tl.constexpr, UNITS: tl.constexpr,
               BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, PACKED: tl.constexpr, JOINED: tl.constexpr,
               PARTS: tl.constexpr):  # fmt: skip
    """Rows x [(parts,) UNITS, M] by one piece of units [(parts,) N, UNITS], scaled: `nothing`'s shape, [(parts,) N, M] f32 zeros.

    Chunks begin at `value`.
    """
    KIND: tl.constexpr = from_scales.dtype.element_ty
    group = (value + PIECE * UNITS) // GROUP
    zero = tl.full(units.shape, 1 << (BITS - 1), tl.float32)
    if ZEROS:
        code = tl.load(_by_output(from_zeros, group, PARTS), mask=known, other=0).to(tl.float32)
    if JOINED:
        scale = (words >> (16 * (PIECE * UNITS // GROUP))).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    else:
        scale = tl.load(_by_output(from_scales, group, PARTS), mask=known, other=0.0).to(tl.float32)
    if ZEROS:
        less = tl.broadcast_to(tl.expand_dims(zero_of(code, BITS, PACKED), -1), units.shape)
        got = _dot_rows(widened(units, less, PIECE, BITS, PACKED), x, nothing)
    else:
        got = _dot_rows(widened(units, zero_of(zero, BITS, PACKED), PIECE, BITS, PACKED), x, nothing)
    return got * tl.expand_dims(scale, -1)


@triton.jit
def accumulate_integers(from_x, x_value, x_mask, from_units, w_mask, from_scales, from_zeros, more_units, more_mask, more_scales,
                        more_zeros, first, TWO: tl.constexpr, WIDTH: tl.constexpr, SPLIT_WIDTH: tl.constexpr, PARTS: tl.constexpr,
                        BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, PACKED: tl.constexpr,
                        TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """Sum over `first .. first + SPLIT_WIDTH` (whole steps) of rows at `from_x` [M] by outputs at `from_units` [N] (scales, zeros at [N]).

    TWO: and by as many outputs at `more_units` (scales, zeros) [N]; tiles of their own, since scales of 32 outputs at a time would pass
    through shared memory. Returns two [N, M] f32, the second for TWO. Chunks behind the padded width are not read.
    """
    UNITS: tl.constexpr = 32 if GROUP == 32 else 64
    PIECES: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = UNITS * PIECES
    PADDED: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK * CHUNK
    STEP: tl.constexpr = CHUNK * PARTS
    WHOLE: tl.constexpr = PADDED % STEP == 0 and WIDTH == PADDED
    SPAN: tl.constexpr = CHUNK // GROUP if GROUP < CHUNK else 1
    EACH: tl.constexpr = GROUP % CHUNK == 0 or (CHUNK % GROUP == 0 and (SPAN == 2 or SPAN == 4))
    JOINED: tl.constexpr = from_scales.dtype.element_ty.primitive_bitwidth == 16 and EACH
    unit = tl.arange(0, UNITS)
    begin = first + (0 if PARTS == 1 else tl.arange(0, PARTS) * CHUNK)
    acc = _zeros(PARTS, TILE_N, TILE_M)
    other, nothing = acc, acc
    known, more_known = _known(w_mask, begin, PADDED, WHOLE, PARTS), _known(more_mask, begin, PADDED, WHOLE, PARTS)
    words, more_words = known, known  # scales of the next step, on their way while this one is computed
    if JOINED:
        words = _scales_of_chunks(from_scales, known, begin, GROUP, SPAN, PARTS)
        more_words = _scales_of_chunks(more_scales, more_known, begin, GROUP, SPAN, PARTS) if TWO else words
    for start in range(0, SPLIT_WIDTH, STEP):
        at = begin + start
        known, more_known = _known(w_mask, at, PADDED, WHOLE, PARTS), _known(more_mask, at, PADDED, WHOLE, PARTS)
        units = _load(from_units, 1, w_mask, at // PIECES, unit, PADDED // PIECES, WHOLE, PARTS)
        more = _load(more_units, 1, more_mask, at // PIECES, unit, PADDED // PIECES, WHOLE, PARTS) if TWO else units
        these, more_these = words, more_words
        if JOINED:
            then = begin + tl.minimum(start + STEP, SPLIT_WIDTH - STEP)  # the last step's again at the end
            words = _scales_of_chunks(from_scales, _known(w_mask, then, PADDED, WHOLE, PARTS), then, GROUP, SPAN, PARTS)
            if TWO:
                more_words = _scales_of_chunks(more_scales, _known(more_mask, then, PADDED, WHOLE, PARTS), then, GROUP, SPAN, PARTS)
        for piece in tl.static_range(PIECES):
            x = _load(from_x, x_value, x_mask, at + piece * UNITS, unit, WIDTH, WHOLE, PARTS)
            x = tl.trans(x) if PARTS == 1 else tl.trans(x, 0, 2, 1)
            acc += _piece_sum(x, nothing, units, these, from_scales, from_zeros, known, at, piece, UNITS, BITS, GROUP, ZEROS, PACKED,
                              JOINED, PARTS)  # fmt: skip
            if TWO:
                other += _piece_sum(x, nothing, more, more_these, more_scales, more_zeros, more_known, at, piece, UNITS, BITS, GROUP, ZEROS,
                                    PACKED, JOINED, PARTS)  # fmt: skip
    if PARTS == 1:
        return acc, other
    else:
        return tl.sum(acc, 0), tl.sum(other, 0)


@triton.jit
def _integer_product(x, units, scales, zeros, out, rows, x_row, x_value, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
                     SPLIT_WIDTH: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
                     TWIN: tl.constexpr, PACKED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """out [splits, rows, OUTPUTS]: a split of each row's product. TWIN: a program takes two tiles of outputs."""
    CHUNK: tl.constexpr = (32 if GROUP == 32 else 64) * (16 // BITS)
    PADDED: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK * CHUNK
    GROUPS: tl.constexpr = (PADDED + GROUP - 1) // GROUP
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    output = tl.program_id(1) * (2 * TILE_N if TWIN else TILE_N) + tl.arange(0, TILE_N)
    split = tl.program_id(2)
    further: tl.constexpr = TILE_N if TWIN else 0
    x_mask, w_mask, more_mask = row < rows, output < OUTPUTS, output + further < OUTPUTS
    from_units = units + output.to(tl.int64) * (PADDED * BITS // 16)
    from_scales, from_zeros = scales + output * GROUPS, zeros + output * GROUPS
    acc, other = accumulate_integers(x + row.to(tl.int64) * x_row, x_value, x_mask, from_units, w_mask, from_scales, from_zeros,
                                     from_units + further * (PADDED * BITS // 16), more_mask, from_scales + further * GROUPS,
                                     from_zeros + further * GROUPS, split * SPLIT_WIDTH, TWIN, WIDTH, SPLIT_WIDTH, PARTS, BITS, GROUP,
                                     ZEROS, PACKED, TILE_M, TILE_N)  # fmt: skip
    to_out = out + (split.to(tl.int64) * rows + row[None, :]) * OUTPUTS + output[:, None]
    tl.store(to_out, acc.to(out.dtype.element_ty), mask=x_mask[None, :] & w_mask[:, None])
    if TWIN:
        tl.store(to_out + TILE_N, other.to(out.dtype.element_ty), mask=x_mask[None, :] & more_mask[:, None])


def chunk_of(bits: int, group: int) -> int:
    """Values of a chunk."""
    return chunk_units_of(group) * (16 // bits)


def integer_constants(weight: GroupInt, tiling: Tiling) -> dict[str, int | bool]:
    """Launch constants that every kernel over such a weight takes."""
    padded = padded_width(weight.width, weight.bits, weight.group)
    return {
        "SPLIT_WIDTH": split_width_of(tiling, padded), "PARTS": tiling.parts, "BITS": weight.bits, "GROUP": weight.group,
        "ZEROS": weight.zeros is not None, "PACKED": PACKED, "TILE_M": INTEGER_ROWS, "TILE_N": tiling.outputs,
        **launch_options(tiling),
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
        _integer_product[(triton.cdiv(count, INTEGER_ROWS), triton.cdiv(outputs, how.tile_outputs), how.splits)](
            band, weight.units, weight.scales, zeros, parts, count, *band.stride(), OUTPUTS=outputs, WIDTH=width,
            TWIN=how.twin, **integer_constants(weight, how),
        )  # fmt: skip
        if how.splits > 1:
            values = to.numel()
            _add_splits[(triton.cdiv(values, _SUM_BLOCK),)](parts, to, values, SPLITS=how.splits, BLOCK=_SUM_BLOCK, num_warps=4)
    return out


def compiled(weight: tuple[int, int, int, int, bool], how: Tiling, scales: str) -> dict[str, object]:
    """Launch constants of a weight (outputs, width, bits, group, zeros), for COMPILE."""
    outputs, width, bits, group, zeros = weight
    return {
        "scales": scales, "zeros": "*u8" if zeros else scales, "OUTPUTS": outputs, "WIDTH": width,
        "SPLIT_WIDTH": split_width_of(how, padded_width(width, bits, group)), "PARTS": how.parts, "BITS": bits, "GROUP": group,
        "ZEROS": zeros, "PACKED": {"cuda": True, "hip": False}, "TILE_M": INTEGER_ROWS, "TILE_N": how.outputs,
        "num_warps": how.warps, "num_stages": {"cuda": how.stages, "hip": 2},
    }  # fmt: skip


def _case(
    outputs: int, width: int, bits: int, group: int, zeros: bool, x: str = "*bf16", scales: str = "*bf16", tiling: Tiling | None = None
) -> dict[str, object]:
    how = tiling or integer_tiling(outputs, width, bits, group, wide=x == "*fp32")
    return compiled((outputs, width, bits, group, zeros), how, scales) | {
        "x": x, "units": "*i16", "out": x if how.splits == 1 else "*fp32", "rows": "i32", "x_row": width, "x_value": 1, "TWIN": how.twin,
    }  # fmt: skip


COMPILE = [
    (_integer_product, _case(6144, 16384, 4, 64, False)),
    (_integer_product, _case(16384, 2048, 8, 64, False)),
    (_integer_product, _case(2048, 6144, 4, 128, True, scales="*fp16")),
    (_integer_product, _case(2048, 6144, 8, 32, True)),
    (_integer_product, _case(4096, 2048, 4, 64, False, x="*fp32")),
    (_integer_product, _case(16384, 2048, 4, 64, False)),
    (_integer_product, _case(6144, 2048, 4, 64, False)),
    (_integer_product, _case(6144, 16384, 4, 64, True, tiling=Tiling(64, 256, 1, 4, 3, twin=True))),
]
