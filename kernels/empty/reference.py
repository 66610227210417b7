"""The definition of nothing."""

from torch import Tensor

__all__ = ["empty"]


def empty(tensor: Tensor, programs: int) -> None:
    assert programs > 0, f"{programs} programs"
