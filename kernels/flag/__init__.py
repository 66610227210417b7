"""Flags between graphs that run at once, each on a device of its own: who waits spins until the other's work is done.

Events order nothing between two graphs, so an edge between them is a word of host memory that both devices reach. Its value is an
*epoch*: each graph counts its replays in its own device's memory, and both are always replayed together, so a flag is up when it has the
reader's own epoch, and nobody ever lowers one. Flags and `lost` lie in page-locked host memory: what one card caches of another's is not
told of a write within a kernel.

1. A flag is set by one device and looked at by the other in ways that cannot lose it (kernel.py), on NVIDIA never by an atomic that adds
   nothing: it may write back a stale word.
2. A wait ends: past its limit of looks it says in `lost` which epoch was given up, and every other wait of that epoch ends at once.
"""

from torch import Tensor

from kernels.flag import reference
from kernels.place import on_cpu

__all__ = ["LOOKS_MAX", "advance_epoch", "await_flag", "mark_lost", "raise_flag"]

LOOKS_MAX = 1 << 23  # of one wait; a look crosses the bus, a microsecond or two: about ten seconds


def advance_epoch(epoch: Tensor) -> None:
    """Begin a replay.

    epoch  [1]  int64  device  one more
    """
    if on_cpu("advance_epoch", epoch):
        reference.advance_epoch(epoch)
        return
    from kernels.flag import kernel

    kernel.advance_epoch(epoch)


def raise_flag(flag: Tensor, epoch: Tensor) -> None:
    """Show that all work before this launch is done, and what it wrote is to be seen from everywhere.

    flag   [>= 1]  int64  host, page-locked  its first word becomes the epoch
    epoch  [1]     int64  device
    """
    if on_cpu("raise_flag", epoch):
        reference.raise_flag(flag, epoch)
        return
    from kernels.flag import kernel

    kernel.raise_flag(flag, epoch)


def await_flag(flag: Tensor, epoch: Tensor, lost: Tensor, looks_max: int = LOOKS_MAX) -> None:
    """Wait until the flag has this epoch, or an epoch as late is lost, or for `looks_max` looks; then this epoch is lost.

    flag   [>= 1]  int64  host, page-locked
    epoch  [1]     int64  device
    lost   [>= 1]  int64  host, page-locked  its first word: the last epoch that was given up
    """
    if on_cpu("await_flag", epoch):
        reference.await_flag(flag, epoch, lost, looks_max)
        return
    from kernels.flag import kernel

    kernel.await_flag(flag, epoch, lost, looks_max)


def mark_lost(marked: Tensor, lost: Tensor, epoch: Tensor, mark: int) -> None:
    """Behind the last wait of a replay: say on the device whether one was given up.

    marked  [n]     int64  device            becomes `mark` where this epoch, or a later one, is lost; else as it was
    lost    [>= 1]  int64  host, page-locked
    epoch   [1]     int64  device
    """
    if on_cpu("mark_lost", epoch):
        reference.mark_lost(marked, lost, epoch, mark)
        return
    from kernels.flag import kernel

    kernel.mark_lost(marked, lost, epoch, mark)
