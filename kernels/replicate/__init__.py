"""Bytes that go from one device of a stage to the other, as they are: rows and keys between addresses, and whole tensors.

On devices that reach one another's memory a launch reads or writes there directly, so all of these are plain launches of the stream that
runs them: no copy engine and no host, and they can be captured on one card. On the CPU both devices are host memory.
"""

from torch import Tensor

from kernels.layout import KeyLayout
from kernels.place import on_cpu
from kernels.replicate import reference

__all__ = ["copy_across", "copy_keys", "copy_rows"]


def copy_rows(sources: Tensor, targets: Tensor, row_bytes: int, source_offset: int = 0, target_offset: int = 0) -> None:
    """Copy the packed row at each source to its target.

    sources  [n]  int64  here  addresses; 0: nothing is copied
    targets  [n]  int64  here  addresses, distinct; 0: nowhere
    Args: row_bytes: a multiple of 16. source_offset, target_offset: bytes from every address that is not 0.
    """
    assert targets.shape == sources.shape, f"{tuple(sources.shape)} sources for {tuple(targets.shape)} targets"
    assert row_bytes % 16 == 0, f"rows of {row_bytes} bytes are no whole pieces of 16"
    if on_cpu("copy_rows", sources):
        reference.copy_rows(sources, targets, row_bytes, source_offset, target_offset)
        return
    from kernels.replicate import kernel

    kernel.copy_rows(sources, targets, row_bytes, source_offset, target_offset)


def copy_keys(sources: Tensor, targets: Tensor, layout: KeyLayout, source_offset: int = 0, target_offset: int = 0) -> None:
    """Copy the stored index key at each source, its scale included, to its target. Addresses as `KeyLayout`'s, all else as `copy_rows`."""
    assert targets.shape == sources.shape, f"{tuple(sources.shape)} sources for {tuple(targets.shape)} targets"
    if on_cpu("copy_keys", sources):
        reference.copy_keys(sources, targets, layout, source_offset, target_offset)
        return
    from kernels.replicate import kernel

    kernel.copy_keys(sources, targets, layout, source_offset, target_offset)


def copy_across(target: Tensor, source: Tensor) -> None:
    """Make `target` equal to `source`, of the same shape and dtype on the other device; both contiguous."""
    assert target.shape == source.shape, f"{tuple(source.shape)} values for {tuple(target.shape)}"
    assert target.dtype == source.dtype, f"{source.dtype} values for {target.dtype}"
    assert target.is_contiguous(), "the target is not contiguous"
    assert source.is_contiguous(), "the source is not contiguous"
    if on_cpu("copy_across", target):
        target.copy_(source)
        return
    from kernels.replicate import kernel

    kernel.copy_across(target, source)
