"""What references over the step table share: live rows, values behind its places, and the device they may run on.

Knows nothing of rows' contents.

Invariants:
1. A row is live when its place is not negative and has ROWS above 0; every other row is padding and reads and writes nothing.
"""

import torch
from torch import Tensor

from kernels.address import values_at
from kernels.layout import TableField

__all__ = ["BULK_ROWS", "NoKernel", "live_rows", "on_cpu", "only_cpu", "state_values"]

# A step has at most this many rows (decode batch x (drafts + 1)) and its kernels promise a row the same bits in any company. More rows are
# an append's, which promises less (architecture, exactness) and may use the library's products and tiles of many rows.
BULK_ROWS = 128


class NoKernel(Exception):
    """An operation was called on a device for which it has no kernel."""


def only_cpu(operation: str, tensor: Tensor) -> None:
    """Raise NoKernel unless `tensor` is in host memory, where the torch reference runs."""
    if tensor.device.type != "cpu":
        raise NoKernel(f"{operation} has no kernel for device {tensor.device}; run with --device cpu")


def on_cpu(operation: str, tensor: Tensor) -> bool:
    """Which of an operation's two forms runs: True for its torch reference (host memory), False for its Triton kernel.

    A "cuda" device is NVIDIA's or AMD's. Raises NoKernel for any other device.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        raise NoKernel(f"{operation} has no kernel for device {tensor.device}; run with --device cpu")
    return tensor.device.type == "cpu"


def live_rows(table: Tensor, place_of: Tensor) -> tuple[Tensor, Tensor]:
    """Place of each query row, and whether it is live.

    table     [places, fields]  int64
    place_of  [T]               int32  place of each row; padding rows name a free place or -1
    returns   [T] int64 places (0 for a negative one), [T] bool live
    """
    place = place_of.long()
    named = place >= 0
    place = torch.where(named, place, 0)
    return place, named & (table[place, TableField.ROWS] > 0)


def state_values(table: Tensor, field: int) -> Tensor:
    """One StateField of every place, read now.

    table    [places, fields]  int64  CPU
    returns  [places]          int64  CPU  a copy; 0 for free places
    """
    values = torch.zeros(table.shape[0], dtype=torch.int64)
    busy = table[:, TableField.ROWS] > 0
    values[busy] = values_at(table[busy, TableField.STATE] + 8 * field, torch.int64)
    return values
