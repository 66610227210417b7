"""Flags on a device: one program of one warp each.

The word itself says nothing of other words: the release and the acquire do, at the scope of the whole machine, on atomics that every card
has. The acquire is on the epoch, which lies in the waiting device's own memory.
A look at host memory is a volatile load on NVIDIA, whose atomics there are not atomic for other devices. AMD's compiler makes a load that
is the same for a whole warp a scalar one and takes it out of the loop, volatile or not; there an atomic that adds nothing looks, which the
compiler makes a load of the whole system's scope.
Bytes: two words of host memory a look; nothing to speak of.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["advance_epoch", "await_flag", "mark_lost", "raise_flag"]

_BLOCK = 128
LOADS = torch.version.hip is None


@triton.jit
def _advance_epoch(epoch):
    tl.store(epoch, tl.load(epoch) + 1)


@triton.jit
def _raise_flag(flag, epoch):
    tl.atomic_xchg(flag, tl.load(epoch), sem="release", scope="sys")


@triton.jit
def _look(word, own, LOADS: tl.constexpr):
    if LOADS:
        return tl.load(word, volatile=True)
    else:
        return tl.atomic_add(word, tl.zeros_like(own), sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["looks_max"])
def _await_flag(flag, epoch, lost, looks_max, LOADS: tl.constexpr):
    own = tl.load(epoch)
    seen = _look(flag, own, LOADS)
    given_up = _look(lost, own, LOADS)
    looks = 1
    while (seen != own) & (given_up < own) & (looks < looks_max):
        seen = _look(flag, own, LOADS)
        given_up = _look(lost, own, LOADS)
        looks += 1
    if (seen != own) & (given_up < own):
        tl.atomic_xchg(lost, own, sem="release", scope="sys")
    tl.atomic_add(epoch, tl.zeros_like(own), sem="acq_rel", scope="sys")  # behind it, what was written before the flag was raised is read


@triton.jit(do_not_specialize=["count", "mark"], do_not_specialize_on_alignment=["marked"])
def _mark_lost(marked, lost, epoch, count, mark, LOADS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.zeros([BLOCK], tl.int64) + mark
    own = tl.load(epoch)
    gone = _look(lost, own, LOADS) >= own
    tl.store(marked + place, value, mask=(place < count) & gone)


def advance_epoch(epoch: Tensor) -> None:
    """See kernels/flag. One launch; capturable."""
    _advance_epoch[(1,)](epoch, num_warps=1)


def raise_flag(flag: Tensor, epoch: Tensor) -> None:
    """See kernels/flag. One launch; capturable."""
    _raise_flag[(1,)](flag, epoch, num_warps=1)


def await_flag(flag: Tensor, epoch: Tensor, lost: Tensor, looks_max: int) -> None:
    """See kernels/flag. One launch; capturable."""
    _await_flag[(1,)](flag, epoch, lost, looks_max, LOADS, num_warps=1)


def mark_lost(marked: Tensor, lost: Tensor, epoch: Tensor, mark: int) -> None:
    """See kernels/flag. One launch; capturable."""
    assert marked.is_contiguous(), "what is marked is not contiguous"
    count = marked.numel()
    _mark_lost[(triton.cdiv(count, _BLOCK),)](marked, lost, epoch, count, mark, LOADS, _BLOCK, num_warps=1)


_LOADS = {"cuda": True, "hip": False}
_WORDS = {"flag": "*i64", "epoch": "*i64", "num_warps": 1}
_MARK = {"marked": "*i64", "lost": "*i64", "epoch": "*i64", "count": "i32", "mark": "i32", "LOADS": _LOADS, "BLOCK": _BLOCK, "num_warps": 1}
COMPILE = [
    (_advance_epoch, {"epoch": "*i64", "num_warps": 1}),
    (_raise_flag, _WORDS),
    (_await_flag, {**_WORDS, "lost": "*i64", "looks_max": "i32", "LOADS": _LOADS}),
    (_mark_lost, _MARK),
]
