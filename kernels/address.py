"""Dereference real addresses on the CPU, as a Triton kernel dereferences pointers on a device.

Holds views (`tensor_at`), packed rows (`rows_at`, `store_at`) and single values (`values_at`, `store_values_at`), used by the torch
references only. Knows nothing of who owns the memory.

Invariants:
1. A view never outlives the buffer behind it by our doing: callers hold the buffer (an operation's `reads`/`writes`).
2. Address 0 is never dereferenced: it means "nothing here" everywhere in the project. Nor is a negative one: that is poison.
"""

import ctypes

import torch
from torch import Tensor

__all__ = ["rows_at", "store_at", "store_values_at", "tensor_at", "values_at"]

# A memoryview over an address: a ctypes array would make a new Python type for every length (48 us against 1 us a call).
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """View host memory at `address` as a tensor. Shares memory; holds nothing alive.

    Args: address: bytes, not 0. shape, dtype: of the view, contiguous.
    Returns: a CPU tensor over that memory.
    """
    assert address > 0, f"address {address} means nothing here"  # negative: poison
    elements = 1
    for extent in shape:
        elements *= extent
    if elements == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_memory_at(address, elements * dtype.itemsize, _WRITABLE), dtype=dtype, count=elements).view(shape)


def _window(addresses: Tensor, item_bytes: int, unit: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A flat view that spans all `addresses`, and each address's distance from its start in units of `unit` bytes.

    Only addressed items are ever touched; the span between them may be unmapped.
    """
    low = int(addresses.min())
    assert low > 0, "address 0 means nothing here"
    distance = addresses - low
    assert not bool((distance % unit).any()), f"addresses are not congruent modulo {unit}"
    span = int(distance.max()) + item_bytes
    return tensor_at(low, (span // dtype.itemsize,), dtype), distance // unit


def rows_at(addresses: Tensor, row_bytes: int) -> Tensor:
    """Copy rows from their addresses.

    addresses  [n]             int64  CPU  not 0, congruent to one another modulo 16
    returns    [n, row_bytes]  uint8  CPU  a copy; row_bytes is a multiple of 16
    """
    assert row_bytes % 16 == 0, f"row_bytes {row_bytes} is not a multiple of 16"
    if addresses.numel() == 0:
        return torch.empty((0, row_bytes), dtype=torch.uint8)
    words, first = _window(addresses, row_bytes, 16, torch.int64)
    # Every place a row may begin, overlapping: one indexed read then copies whole rows (9 times faster than units of 16 bytes).
    starts = (words.numel() * 8 - row_bytes) // 16 + 1
    return words.as_strided((starts, row_bytes // 8), (2, 1)).index_select(0, first).view(torch.uint8)


def store_at(addresses: Tensor, rows: Tensor) -> None:
    """Store packed rows at their addresses; the inverse of `rows_at`.

    addresses  [n]             int64  CPU  not 0, distinct, congruent to one another modulo 16
    rows       [n, row_bytes]  uint8  CPU  row_bytes is a multiple of 16
    """
    if addresses.numel() == 0:
        return
    row_bytes = rows.shape[-1]
    assert row_bytes % 16 == 0, f"row_bytes {row_bytes} is not a multiple of 16"
    words, first = _window(addresses, row_bytes, 16, torch.int64)
    picks = first[:, None] + torch.arange(row_bytes // 16)
    words.view(-1, 2)[picks] = rows.contiguous().view(torch.int64).view(rows.shape[0], row_bytes // 16, 2)


def values_at(addresses: Tensor, dtype: torch.dtype) -> Tensor:
    """Read one value at each address.

    addresses  [n]  int64  CPU  not 0, aligned to the value's size
    returns    [n]  dtype  CPU  a copy
    """
    if addresses.numel() == 0:
        return torch.empty(0, dtype=dtype)
    values, first = _window(addresses, dtype.itemsize, dtype.itemsize, dtype)
    return values[first]


def store_values_at(addresses: Tensor, values: Tensor) -> None:
    """Write one value at each address; the inverse of `values_at`.

    addresses  [n]  int64      CPU  not 0; where one repeats, so does its value
    values     [n]  any dtype  CPU
    """
    if addresses.numel() == 0:
        return
    window, first = _window(addresses, values.element_size(), values.element_size(), values.dtype)
    window[first] = values
