"""The indexer's query: the product of the normed query latent, its heads' first values rotated, in one launch on a device.

`reference.py` is the definition, the two operations one behind the other; `kernel.py` rotates what a product's program holds before it is
stored. A launch of its own for the rotation costs more than what it moves, and every launch in front of a selection counts.

Row-invariant: the tiling is that of `kernels/linear` for the weight's shape, and so are the product's bits.
"""

from torch import Tensor

from kernels.index_query import reference
from kernels.linear import BlockFp8
from kernels.place import BULK_ROWS, on_cpu

__all__ = ["index_query", "one_launch"]


def one_launch(latent: Tensor, weight: Tensor | BlockFp8, width: int) -> bool:
    """Whether a device makes such a query in one launch: few rows, and bf16 both of them.

    Args: latent [T, Rq], weight [I * Di, Rq]. width: Di.
    """
    if latent.device.type == "cpu" or latent.shape[0] > BULK_ROWS:
        return False
    from kernels.index_query import kernel

    return kernel.fits(latent, weight, width)


def index_query(latent: Tensor, weight: Tensor | BlockFp8, width: int, cos: Tensor, sin: Tensor, cleared: Tensor | None = None) -> Tensor:
    """Index queries, rotated.

    latent    [T, Rq]      float  values of a row any distance apart
    weight    [I * Di, Rq]  as in `kernels/linear`
    cos, sin  [T, Dr / 2]  latent's dtype  Dr at most Di
    cleared   [n] or None  int32  device, contiguous: scratch that comes out zero, for the launches behind this one
    returns   [T, I, Di]   latent's dtype, contiguous
    Args: width: Di. On a device only what `one_launch` allows.
    """
    assert weight.shape[0] % width == 0, f"{weight.shape[0]} outputs are no heads of {width}"
    assert 2 * cos.shape[1] <= width, f"a RoPE table of {cos.shape[1]} pairs for heads of {width}"
    if on_cpu("index_query", latent):
        return reference.index_query(latent, weight, width, cos, sin, cleared)
    assert not isinstance(weight, BlockFp8), "block-FP8 weights are multiplied by `kernels/linear`"
    assert one_launch(latent, weight, width), f"{tuple(latent.shape)} by {tuple(weight.shape)} is not made in one launch"
    from kernels.index_query import kernel

    return kernel.index_query(latent, weight, width, cos, sin, cleared)
