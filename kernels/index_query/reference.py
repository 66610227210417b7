"""The definition of the indexer's query: a product, then the rotation of each head's first values."""

from torch import Tensor

from kernels.linear import BlockFp8, linear
from kernels.rope import rotate_first

__all__ = ["index_query"]


def index_query(latent: Tensor, weight: Tensor | BlockFp8, width: int, cos: Tensor, sin: Tensor, cleared: Tensor | None) -> Tensor:
    """See the package page."""
    if cleared is not None:
        cleared.zero_()
    return rotate_first(linear(latent, weight).view(latent.shape[0], -1, width), cos, sin)
