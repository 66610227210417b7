"""Rows of a step that a layer has not written yet. Holds a tensor and a number."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Unwritten"]


@dataclass(frozen=True, slots=True)
class Unwritten:
    """The new rows of a step: `each` a place, side by side, at consecutive positions; none of a later position has ever been written.

    positions  [T]  int64  device  T a multiple of `each`
    """

    positions: Tensor
    each: int

    def __post_init__(self) -> None:
        assert self.positions.shape[0] % self.each == 0, f"{self.positions.shape[0]} rows, {self.each} a place"
