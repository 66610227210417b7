"""Interpreted e4m3 keys: the reference's own tests, the same bytes for hostile values, every code in every form of scoring."""

import math
import time

import company
import interpreted
import torch

from kernels.index_score import bulk, index_scores, kernel, reference
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, KeyLayout, TableField, TableLayout
from kernels.quantize import kernel as packing
from kernels.quantize import reference as packed_by

GLM, ODD = KeyLayout("e4m3", 128), KeyLayout("e4m3", 37)


def hostile(rows: int, width: int) -> torch.Tensor:
    """Values of any bits, of any magnitude, halves between two codes, zeros of both signs, and what is not finite."""
    generator = torch.Generator().manual_seed(width)
    values = torch.randint(-(2**31), 2**31 - 1, (rows, width), generator=generator).int().view(torch.float32).clone()
    values[: rows // 2] = torch.randn(rows // 2, width, generator=generator) * torch.logspace(-41, 38, rows // 2)[:, None]
    values[0] = torch.arange(width) * (448 / (width - 1))
    values[1] = torch.arange(width) * (2.0**-10 * 0.5)
    values[1, 0] = -448.0
    values[2, ::3] = -0.0
    values[3, 1], values[4, width - 1], values[5] = math.nan, -math.inf, 3.4e38
    return values


def bytes_are_the_references() -> None:
    """Keys pack to equal bytes, and are stored as they are packed; what they unpack to is equal too."""
    for layout in interpreted.some((ODD, GLM, KeyLayout("e4m3", 1)), 2):
        keys = hostile(24, max(layout.width, 2))[:, : layout.width]
        packed = packed_by.pack_keys(keys, layout)
        interpreted.same(f"{layout}", packing.pack_keys(keys, layout), packed)
        interpreted.same(f"{layout}, bf16", packing.pack_keys(keys.bfloat16(), layout), packed_by.pack_keys(keys.bfloat16(), layout))
        got, wanted = packing.unpack_keys(packed, layout), packed_by.unpack_keys(packed, layout)
        interpreted.same(f"{layout}, unpacked", got.nan_to_num(7.0), wanted.nan_to_num(7.0))


def page_of(codes: torch.Tensor, scales: torch.Tensor, layout: KeyLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """A page with these keys of codes [n, width], NaN codes and scales after them, and its address."""
    page = torch.full((16, layout.run_bytes), 0xFF, dtype=torch.uint8)
    for key, code in enumerate(codes):
        run, number = page[key // BLOCK_ROWS], key % BLOCK_ROWS
        run[number * layout.values_bytes :][: layout.values_bytes] = 0
        run[number * layout.values_bytes :][: layout.width] = code
        run[BLOCK_ROWS * layout.values_bytes + 4 * number :][:4] = scales[key : key + 1].view(torch.uint8)
    return page, torch.tensor([page.data_ptr()])


def every_code_scores_exactly() -> None:
    """One key a code, asked for by bf16 and float32 queries of 1 there and by heads of both signs: the value, in all three forms.

    Not the two codes of NaN, which no key has: the interpreter's own conversion takes them for 480.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    keys = torch.zeros((256, 16), dtype=torch.uint8)
    keys[:, 3] = codes
    layout = KeyLayout("e4m3", 16)
    page, pages = page_of(keys, torch.full((256,), 0.5), layout)
    values = codes.view(torch.float8_e4m3fn).float()
    wanted = values * 0.5 * (2 * 16) ** -0.5
    for dtype in interpreted.some((torch.bfloat16, torch.float32), 2):
        query = torch.zeros((20, 2, 16), dtype=dtype)
        query[:, 0, 3], query[:, 1, 3] = 1.0, -1.0
        weights = torch.tensor([[1.0, -1.0]]).expand(20, 2).contiguous()
        for rows in (1, 4, 20):
            out = torch.zeros((rows, PAGE_KEYS))
            index_scores(query[:rows], weights[:rows], pages, 256, layout, out)
            ratio = torch.where(wanted == 0, 1.0 + out[:, :256], out[:, :256] / wanted)
            assert bool(((ratio - 1.0).abs() <= 2**-22).all()), f"{dtype}, {rows} rows: {ratio}"
    del page


def forms_agree() -> None:
    """Random keys: rows in groups and of an append near the reference, and through a step table's places to the bit of rows in groups."""
    torch.manual_seed(4)
    keys = torch.randint(0, 256, (200, 37)).to(torch.uint8)
    keys[(keys & 0x7F) == 0x7F] = 0
    page, pages = page_of(keys, torch.rand(200) * torch.logspace(-6, 6, 200), ODD)
    query, weights = torch.randn(18, 4, 37).bfloat16(), torch.randn(18, 4)
    told = [torch.full((18, PAGE_KEYS), 7.0) for _ in range(4)]
    reference.index_scores(query, weights, pages, 200, ODD, told[0])
    kernel.index_scores(query, weights, pages, 200, ODD, told[1])
    with interpreted.programs_backwards():
        bulk.index_scores(query, weights, pages, 200, ODD, told[2])
    for name, form in (("by rows", told[1]), ("of an append", told[2])):
        scale = told[0][:, :200].abs().amax(0, keepdim=True)
        company.near(name, form[:, :200] / scale, told[0][:, :200] / scale, 2e-6)
    table = torch.zeros((2, TableLayout(1).fields), dtype=torch.int64)
    table[:, TableField.ROWS], table[:, TableField.PAGES], table[:, TableField.PAGES_MAX] = 4, pages.data_ptr(), 1
    place_of, positions = torch.tensor([1, 0, -1, 1, 1], dtype=torch.int32), torch.tensor([199, 63, 5, 64, 0])
    kernel.score_places(table, 0, place_of, positions, query[:5], weights[:5], ODD, told[3])
    for row, (place, position) in enumerate(zip(place_of.tolist(), positions.tolist(), strict=True)):
        seen = position + 1 if place >= 0 else 0
        interpreted.same(f"row {row} by place", told[3][row, :seen], told[1][row, :seen])
        assert bool((told[3][row, seen:] == 7.0).all()), "scores were written past a row's last key"
    del page


def main() -> None:
    begun = time.monotonic()
    kernel.SCALED_PROGRAMS = 2  # an interpreted program takes milliseconds
    bytes_are_the_references()
    every_code_scores_exactly()
    forms_agree()
    interpreted.run_reference_tests("test_scaled_keys.py", without=("company", "those_of_the_stored", "1023", "2047"))
    print(f"scaled keys: {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
