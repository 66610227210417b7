"""Copies by address on a device, and of tensors from another one's memory. No byte is interpreted.

A program moves a tile of rows or keys, or a stretch of a tensor; addresses may be of either device, as long as the one that runs the launch
may reach the other's memory. Bytes: what is moved, once over the link.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import BLOCK_ROWS, KeyLayout

__all__ = ["copy_across", "copy_keys", "copy_rows"]

RUN = tl.constexpr(BLOCK_ROWS)
INT32 = tl.constexpr(tl.pointer_type(tl.int32))
_TILE_WORDS = 2048
_STRETCH = 1024


@triton.jit(do_not_specialize=["count", "source_offset", "target_offset"])
def _copy_items(
    sources, targets, count, source_offset, target_offset, SCALED: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Items of WORDS 32-bit words; SCALED: keys whose values lie by their number in the run, with a scale behind the run's values."""
    item = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = tl.load(sources + item, mask=item < count, other=0)
    to = tl.load(targets + item, mask=item < count, other=0)
    used = (at != 0) & (to != 0)
    at += source_offset
    to += target_offset
    if SCALED:
        from_number, to_number = at % RUN, to % RUN
        from_run, to_run = at - from_number, to - to_number
        scale = tl.load((from_run + RUN * WORDS * 4).to(INT32) + from_number, mask=used, other=0)
        tl.store((to_run + RUN * WORDS * 4).to(INT32) + to_number, scale, mask=used)
        at, to = from_run + from_number * WORDS * 4, to_run + to_number * WORDS * 4
    word = tl.arange(0, PADDED)
    wanted = used[:, None] & (word < WORDS)[None, :]
    moved = tl.load(tl.multiple_of(at.to(INT32), 16)[:, None] + word[None, :], mask=wanted, other=0)
    tl.store(tl.multiple_of(to.to(INT32), 16)[:, None] + word[None, :], moved, mask=wanted)


@triton.jit(do_not_specialize=["count"])
def _copy_words(source, target, count, BLOCK: tl.constexpr):
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + word, tl.load(source + word, mask=word < count), mask=word < count)


def _copy(sources: Tensor, targets: Tensor, source_offset: int, target_offset: int, words: int, *, scaled: bool) -> None:
    count = sources.shape[0]
    if count == 0:
        return
    padded = int(triton.next_power_of_2(words))
    tile = max(1, _TILE_WORDS // padded)
    grid = (triton.cdiv(count, tile),)
    _copy_items[grid](sources.contiguous(), targets.contiguous(), count, source_offset, target_offset, scaled, words, padded, tile)


def copy_rows(sources: Tensor, targets: Tensor, row_bytes: int, source_offset: int, target_offset: int) -> None:
    """See kernels/replicate. One launch; capturable."""
    _copy(sources, targets, source_offset, target_offset, row_bytes // 4, scaled=False)


def copy_keys(sources: Tensor, targets: Tensor, layout: KeyLayout, source_offset: int, target_offset: int) -> None:
    """See kernels/replicate. One launch; capturable."""
    _copy(sources, targets, source_offset, target_offset, layout.values_bytes // 4, scaled=layout.scale_bytes > 0)


def copy_across(target: Tensor, source: Tensor) -> None:
    """See kernels/replicate. One launch of the device that is current, and that alone; capturable."""
    size_bytes = target.numel() * target.element_size()
    dtype = torch.int32 if size_bytes % 4 == 0 and target.data_ptr() % 4 == 0 and source.data_ptr() % 4 == 0 else torch.uint8
    to, words = target.view(-1).view(dtype), source.view(-1).view(dtype)
    if words.numel():
        _copy_words[(triton.cdiv(words.numel(), _STRETCH),)](words, to, words.numel(), _STRETCH)


_ITEMS = {"sources": "*i64", "targets": "*i64", "count": "i32", "source_offset": "i64", "target_offset": "i64"}
COMPILE = [
    (_copy_items, {**_ITEMS, "SCALED": False, "WORDS": 164, "PADDED": 256, "TILE": 8}),
    (_copy_items, {**_ITEMS, "SCALED": True, "WORDS": 32, "PADDED": 32, "TILE": 64}),
    (_copy_words, {"source": "*i32", "target": "*i32", "count": "i32", "BLOCK": _STRETCH}),
    (_copy_words, {"source": "*u8", "target": "*u8", "count": "i32", "BLOCK": _STRETCH}),
]
