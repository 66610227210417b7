"""Dereference real addresses on the CPU, as a Triton kernel dereferences pointers on a device.

Holds `tensor_at` and `rows_at`, used by the torch references only. Knows nothing of who owns the memory.

Invariants:
1. A view never outlives the buffer behind it by our doing: callers hold the buffer (an operation's `reads`/`writes`).
2. Address 0 is never dereferenced: it means "nothing here" everywhere in the project.
"""

import ctypes

import torch
from torch import Tensor

__all__ = ["rows_at", "store_at", "tensor_at"]


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """View host memory at `address` as a tensor. Shares memory; holds nothing alive.

    Args: address: bytes, not 0. shape, dtype: of the view, contiguous.
    Returns: a CPU tensor over that memory.
    """
    assert address != 0, "address 0 means nothing here"
    elements = 1
    for extent in shape:
        elements *= extent
    if elements == 0:
        return torch.empty(shape, dtype=dtype)
    raw = (ctypes.c_uint8 * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype, count=elements).view(shape)


def _window(addresses: Tensor, row_bytes: int) -> tuple[Tensor, Tensor]:
    """A byte view that spans all `addresses`, in 16-byte units, and each address's unit index in it.

    Only addressed rows are ever touched; the span between them may be unmapped.
    """
    low = int(addresses.min())
    span = int(addresses.max()) - low + row_bytes
    units = tensor_at(low, (span // 16, 2), torch.int64)
    return units, (addresses - low) // 16


def rows_at(addresses: Tensor, row_bytes: int) -> Tensor:
    """Copy rows from their addresses.

    addresses  [n]             int64  CPU  not 0, congruent to one another modulo 16
    returns    [n, row_bytes]  uint8  CPU  a copy; row_bytes is a multiple of 16
    """
    assert row_bytes % 16 == 0, f"row_bytes {row_bytes} is not a multiple of 16"
    if addresses.numel() == 0:
        return torch.empty((0, row_bytes), dtype=torch.uint8)
    units, first = _window(addresses, row_bytes)
    picks = first[:, None] + torch.arange(row_bytes // 16)
    return units[picks].view(torch.uint8).view(-1, row_bytes)


def store_at(addresses: Tensor, rows: Tensor) -> None:
    """Store packed rows at their addresses; the inverse of `rows_at`.

    addresses  [n]             int64  CPU  not 0, distinct
    rows       [n, row_bytes]  uint8  CPU  contiguous
    """
    if addresses.numel() == 0:
        return
    row_bytes = rows.shape[-1]
    units, first = _window(addresses, row_bytes)
    picks = first[:, None] + torch.arange(row_bytes // 16)
    units[picks] = rows.contiguous().view(torch.int64).view(rows.shape[0], row_bytes // 16, 2)
