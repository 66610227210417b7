"""The definition of flags, on the CPU. Nothing runs beside it: a flag that is not up when it is awaited never will be."""

from torch import Tensor

__all__ = ["advance_epoch", "await_flag", "mark_lost", "raise_flag"]


def advance_epoch(epoch: Tensor) -> None:
    epoch.add_(1)


def raise_flag(flag: Tensor, epoch: Tensor) -> None:
    flag[:1].copy_(epoch)


def await_flag(flag: Tensor, epoch: Tensor, lost: Tensor, looks_max: int) -> None:
    assert looks_max > 0, f"a wait of {looks_max} looks"
    if int(flag[0]) != int(epoch) and int(lost[0]) < int(epoch):
        lost[:1].copy_(epoch)


def mark_lost(marked: Tensor, lost: Tensor, epoch: Tensor, mark: int) -> None:
    if int(lost[0]) >= int(epoch):
        marked.fill_(mark)
