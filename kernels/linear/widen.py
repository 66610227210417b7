"""Codes of `GroupInt` units become bf16 numbers in registers. Knows no product.

PACKED: in NVIDIA's own instructions, two codes at a time, since compilers take them one by one; else in Triton's arithmetic, same bits.
"""

import torch
import triton
import triton.language as tl

__all__ = ["PACKED", "widened", "zero_of"]

PACKED = torch.version.hip is None and not triton.knobs.runtime.interpret

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
