"""Interpreted row writes: the reference's own tests, bfloat16 roundings, and company."""

import company
import interpreted
import numpy
import torch

from kernels.layout import KeyLayout, RowLayout
from kernels.row_write import NewKeys, NewRows, kernel, reference

LAYOUT, KEY = RowLayout("f32", 48, 16), KeyLayout("f32", 34)


def arguments(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Projections, weights and a RoPE table of seven rows."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"projected": (7, 64), "weight": (48,), "source": (7, 34), "scale": (34,), "bias": (34,), "cos": (7, 8), "sin": (7, 8)}
    return {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def written(form: object, given: dict[str, torch.Tensor], picked: torch.Tensor, together: bool = False) -> torch.Tensor:
    """What `form` stores of the picked rows: row, key in block, key in page, as float32 values side by side."""
    table = given["cos"][picked], given["sin"][picked]
    shelves = [torch.zeros((len(picked), size), dtype=torch.uint8) for size in (LAYOUT.row_bytes, KEY.key_bytes, KEY.key_bytes)]
    to = [shelf.data_ptr() + torch.arange(len(picked)) * shelf.shape[1] for shelf in shelves]
    rows = NewRows(given["projected"][picked], given["weight"], 1e-6, to[0], 0, LAYOUT)
    keys = NewKeys(given["source"][picked], given["scale"], given["bias"], 1e-6, to[1], 0, to[2], KEY)
    if together:
        form.write_layer(given["scale"].expand(len(picked), 34), given["bias"], 1e-6, rows, keys, given["cos"][picked], table)  # type: ignore[attr-defined]
    else:
        form.write_rows(rows, table, None)  # type: ignore[attr-defined]
        form.write_keys(keys, table, None)  # type: ignore[attr-defined]
    return torch.cat(shelves, 1).view(torch.float32)


def values_follow_the_reference() -> None:
    """Drawn rows agree to float32 rounding; in bfloat16 to two of its roundings (the interpreter cuts where a device rounds)."""
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2**-6)):
        given = arguments(dtype)
        company.near(str(dtype), written(kernel, given, torch.arange(7)), written(reference, given, torch.arange(7)), bound)


def broken_rows_stay_visible() -> None:
    """Values that are not finite spoil their row and key and no other (NumPy, which interprets, warns of them)."""
    for value in interpreted.some((float("inf"), float("-inf"), float("nan")), 3):
        given = arguments(torch.float32)
        given["projected"][2, 5], given["source"][2, 33] = value, value
        with numpy.errstate(all="ignore"):
            got = written(kernel, given, torch.arange(7))
        wanted = written(reference, given, torch.arange(7))
        interpreted.same(f"finite beside {value}", got.isfinite(), wanted.isfinite())
        assert not bool(wanted[2].isfinite().all())


def company_changes_no_bit() -> None:
    """A row has the same bytes alone and among others."""
    given = arguments(torch.float32)
    if interpreted.WHOLE:
        company.row_invariant(lambda picked: written(kernel, given, picked), 7)
    company.row_invariant(lambda picked: written(kernel, given, picked, together=True), 7)
    apart = written(kernel, given, torch.arange(7))
    interpreted.same("written together", written(kernel, given, torch.arange(7), together=True), apart)


def main() -> None:
    values_follow_the_reference()
    broken_rows_stay_visible()
    company_changes_no_bit()
    with interpreted.programs_backwards():
        # What norms round differs in the last bit, and a bf16 is cut here where a device rounds it.
        interpreted.run_reference_tests("test_row_write.py", without=("one_after_another", "stays_visible"))


if __name__ == "__main__":
    main()
