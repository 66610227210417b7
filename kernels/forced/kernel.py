"""Forced picks on a device: one launch, a program a piece of a row.

Invariant: integer arithmetic only, so the picks are the reference's.

Floor: 8 KiB written a row at k 2,048; a launch.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.forced.reference import POWERS

__all__ = ["force_picks"]

_BLOCK = 1024
_POWERS = tl.constexpr(POWERS)


@triton.jit
def _force_picks(positions, selection, row_stride, FRESH: tl.constexpr, PICKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pick = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stable: tl.constexpr = PICKS - FRESH
    position = tl.load(positions + row).to(tl.int64)
    room = position + 1 - stable
    power = position * 0 + 1
    largest = power
    for _ in tl.static_range(_POWERS):
        largest = tl.where(power <= room, power, largest)
        power = power * 2
    stride = largest // FRESH
    usable = (position + 1 > PICKS) & (stride >= 1)
    turn = position % tl.maximum(stride, 1)
    moving = stable + (pick - stable).to(tl.int64) * stride + turn
    forced = tl.where(pick < stable, pick.to(tl.int64), moving)
    tl.store(selection + row * row_stride + pick, forced.to(tl.int32), mask=usable & (pick < PICKS))


def force_picks(positions: Tensor, fresh: int, selection: Tensor) -> None:
    """See the package page. One launch; capturable."""
    rows, picks = selection.shape
    if rows:
        _force_picks[(rows, triton.cdiv(picks, _BLOCK))](
            positions.contiguous(), selection, selection.stride(0), FRESH=fresh, PICKS=picks, BLOCK=_BLOCK, num_warps=4
        )


COMPILE = [
    (
        _force_picks,
        {"positions": "*i64", "selection": "*i32", "row_stride": 2048, "FRESH": 20, "PICKS": 2048, "BLOCK": _BLOCK, "num_warps": 4},
    ),
]
