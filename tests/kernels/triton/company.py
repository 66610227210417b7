"""What the drivers of arithmetic kernels share: row invariance at few rows, bounds, and loops whose end a kernel loads.

Import after `interpreted`.
"""

from collections.abc import Callable

import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor

COUNTS = (1, 2, 3, 4, 8, 16, 17)

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: type, scope: object) -> None:
    """The interpreter keeps scalars as arrays of one value, which numpy no longer takes for a range's end."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]


interpreter._patch_lang_tensor = _patch_tensor_and_index


def row_invariant(compute: Callable[[Tensor], Tensor], rows: int, counts: tuple[int, ...] = COUNTS) -> None:
    """Assert that `compute(picked rows)` gives each row the bits it has alone, in any company and at any place."""
    alone = torch.cat([compute(torch.tensor([row])) for row in range(rows)])
    generator = torch.Generator().manual_seed(rows)
    for count in counts:
        picked = torch.randint(0, rows, (count,), generator=generator)
        got = compute(picked)
        assert torch.equal(got.view(torch.uint8), alone[picked].view(torch.uint8)), f"a row differs among {count}: {picked.tolist()}"


def near(name: str, got: Tensor, wanted: Tensor, bound: float, terms: Tensor | None = None) -> None:
    """Assert that every value differs by at most `bound` times the largest size in its row (last dimension).

    Args: terms: like `wanted`, the sizes of what was summed, where a whole row's terms may cancel; a sum's error follows from those.
    """
    assert got.shape == wanted.shape, f"{name} is {tuple(got.shape)}, not {tuple(wanted.shape)}"
    size = (wanted if terms is None else terms).double().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    error = float(((got.double() - wanted.double()).abs() / size).max()) if got.numel() else 0.0
    assert error <= bound, f"{name} differs by {error:.3g} of its row's size, more than {bound:.3g}"
