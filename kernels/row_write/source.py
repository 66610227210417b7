"""What new rows and keys are made of, and where they go. Holds tensors and no arithmetic."""

from dataclasses import dataclass

from torch import Tensor

from kernels.layout import KeyLayout, RowLayout

__all__ = ["NewKeys", "NewRows"]


def _check(projected: Tensor, weight: Tensor, rope_table: tuple[Tensor, Tensor], addresses: Tensor, positions: Tensor | None) -> None:
    rows = projected.shape[:1]
    assert addresses.shape == rows, f"{tuple(addresses.shape)} addresses for {rows[0]} rows"
    assert positions is None or positions.shape == rows, f"positions of {tuple(positions.shape)} for {rows[0]} rows"
    assert rope_table[0].shape[:1] == rows, f"a RoPE table of {rope_table[0].shape[0]} rows for {rows[0]}"
    assert projected.dtype == weight.dtype == rope_table[0].dtype, f"{projected.dtype}, {weight.dtype} and {rope_table[0].dtype} mixed"


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows of one layer.

    projected     [T, R + Dr]  float  device  the row product's output, rows any distance apart
    weight        [R]          projected's dtype  of the latent's norm
    destinations  [T]          int64  device  address of the row in layer 0; 0: padding, nothing is stored; others distinct
    offset_bytes               distance from layer 0 to this layer
    copies        [T, n] or None  int64  device  n further addresses of each row, contiguous; 0: none. What `write_layer` alone stores
    copies_offset_bytes        distance from those addresses to this layer's
    """

    projected: Tensor
    weight: Tensor
    eps: float
    destinations: Tensor
    offset_bytes: int
    layout: RowLayout
    copies: Tensor | None = None
    copies_offset_bytes: int = 0

    def check(self, rope_table: tuple[Tensor, Tensor], positions: Tensor | None) -> None:
        """Assert that everything fits."""
        _check(self.projected, self.weight, rope_table, self.destinations, positions)
        assert self.projected.shape[1] == self.layout.latent + self.layout.rope, f"{self.projected.shape[1]} values for {self.layout}"
        assert self.copies is None or self.copies.shape[0] == self.projected.shape[0], "copies of other rows"
        assert 2 * rope_table[0].shape[1] == self.layout.rope, f"a RoPE table of {rope_table[0].shape[1]} pairs for {self.layout}"


@dataclass(frozen=True, slots=True)
class NewKeys:
    """Index keys of one full layer.

    projected     [T, Di]  float  device  the key product's output, keys any distance apart
    weight, bias  [Di]     projected's dtype  of the keys' norm
    destinations  [T]      int64  device  address of the key in key layer 0 of its block; 0: padding, nothing is stored there
    offset_bytes           distance from key layer 0 to this one, in the block alone
    pages         [T]      int64  device  address of the key in its page; 0: likewise. Addresses other than 0 are distinct
    """

    projected: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    destinations: Tensor
    offset_bytes: int
    pages: Tensor
    layout: KeyLayout

    def check(self, rope_table: tuple[Tensor, Tensor], positions: Tensor | None) -> None:
        """Assert that everything fits."""
        _check(self.projected, self.weight, rope_table, self.destinations, positions)
        assert self.projected.shape[1] == self.layout.width, f"{self.projected.shape[1]} values for {self.layout}"
        assert 2 * rope_table[0].shape[1] <= self.layout.width, f"a RoPE table of {rope_table[0].shape[1]} pairs for {self.layout}"
        assert self.pages.shape == self.destinations.shape, f"{tuple(self.pages.shape)} pages for {tuple(self.destinations.shape)} keys"
