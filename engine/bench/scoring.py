"""Cases of index scores: every key of one long history or of many, as bf16 or as e4m3 with a scale."""

from functools import partial

import torch
from torch import Tensor

from engine.bench.cases import Case, Made, Shapes, drawn, relative, rotated
from kernels.index_score import index_scores
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, KeyLayout, TableField, TableLayout
from kernels.quantize import append_keys, stored_keys, unpack_keys

__all__ = ["score_cases"]

_DRAWN_KEYS = 1 << 17  # at once, so that no float32 copy of a store exists
_CHECKED_KEYS = 1 << 16


def _store(shapes: Shapes, layout: KeyLayout, device: torch.device, seed: int) -> Tensor:
    """uint8 [pages, page_bytes]: drawn keys, packed."""
    pages = -(-shapes.keys // PAGE_KEYS)
    store = torch.zeros((pages, layout.page_bytes), dtype=torch.uint8, device=device)
    for start in range(0, pages * PAGE_KEYS, _DRAWN_KEYS):
        count = min(_DRAWN_KEYS, pages * PAGE_KEYS - start)
        key = torch.arange(start, start + count, device=device)
        to = store.data_ptr() + key // BLOCK_ROWS * layout.run_bytes + key % BLOCK_ROWS * layout.step_bytes
        append_keys(drawn(device, count, layout.width, seed=seed + start), to, 0, layout)
    return store


def _addresses(store: Tensor) -> Tensor:
    return store.data_ptr() + torch.arange(store.shape[0], device=store.device) * store.shape[1]


def _error(shapes: Shapes, layout: KeyLayout, store: Tensor, query: Tensor, weights: Tensor, got: Tensor) -> float:
    """Of the first scores, against the formula on what is stored."""
    count = min(shapes.keys, _CHECKED_KEYS)
    keys = unpack_keys(stored_keys(store[: -(-count // PAGE_KEYS)].contiguous(), layout)[:count], layout)
    product = torch.einsum("rhk,jk->rhj", query.float(), keys).relu_()
    return relative(got[:, :count], (product * weights[:, :, None]).sum(1) * shapes.index_heads**-0.5 * shapes.index_width**-0.5)


def _name(shapes: Shapes, layout: KeyLayout, whose: str) -> str:
    return f"score {shapes.keys:,} {'' if layout.encoding == 'bf16' else layout.encoding + ' '}keys, {whose}"


def _rows_case(shapes: Shapes, layout: KeyLayout, rows: int, target_us: float | None) -> Case:
    """Rows of one place over the same keys, so keys need reading once."""

    def make(device: torch.device) -> Made:
        query = drawn(device, rows, shapes.index_heads, shapes.index_width, seed=5, dtype=shapes.dtype)
        weights = drawn(device, rows, shapes.index_heads, seed=6)
        stores = [_store(shapes, layout, device, seed) for seed in rotated(shapes, shapes.keys * layout.key_bytes)]
        pages = [_addresses(store) for store in stores]
        out = torch.empty((rows, pages[0].shape[0] * PAGE_KEYS), device=device)
        calls = tuple(
            partial(_score, query, weights, pages[n % len(pages)], shapes.keys, layout, out, stores) for n in range(shapes.calls // 2)
        )

        def difference() -> float:
            _score(query, weights, pages[0], shapes.keys, layout, out, stores)
            return _error(shapes, layout, stores[0], query, weights, out)

        return Made(calls, difference)

    moved = shapes.keys * (layout.key_bytes + 4 * rows)
    return Case("index", _name(shapes, layout, f"{rows} rows"), moved, 1e-3, make, target_us=target_us)


def _score(
    query: Tensor, weights: Tensor, pages: Tensor, keys: int, layout: KeyLayout, out: Tensor, _: list[Tensor]
) -> None:  # holds the stores
    index_scores(query, weights, pages, keys, layout, out)


def _sessions_case(shapes: Shapes, layout: KeyLayout, sessions: int) -> Case:
    """A row each of many sessions, every one with keys of its own, through a step table."""

    def make(device: torch.device) -> Made:
        query = drawn(device, sessions, shapes.index_heads, shapes.index_width, seed=5, dtype=shapes.dtype)
        weights = drawn(device, sessions, shapes.index_heads, seed=6)
        stores = [_store(shapes, layout, device, seed) for seed in range(sessions)]
        pages = torch.stack([_addresses(store) for store in stores])
        table = torch.zeros((sessions, TableLayout(1).fields), dtype=torch.int64)
        table[:, TableField.ROWS], table[:, TableField.PAGES_MAX] = 1, pages.shape[1]
        table[:, TableField.PAGES] = pages.data_ptr() + 8 * pages.shape[1] * torch.arange(sessions)
        there, place_of = table.to(device), torch.arange(sessions, dtype=torch.int32, device=device)
        positions = torch.full((sessions,), shapes.keys - 1, dtype=torch.int64, device=device)
        out = torch.empty((sessions, pages.shape[1] * PAGE_KEYS), device=device)

        def call() -> None:
            if device.type == "cpu":
                for row in range(sessions):
                    index_scores(query[row : row + 1], weights[row : row + 1], pages[row], shapes.keys, layout, out[row : row + 1])
                return
            from kernels.index_score.kernel import score_places  # needs Triton, which a CPU does without

            score_places(there, 0, place_of, positions, query, weights, layout, out)

        def difference() -> float:
            call()
            worst = [
                _error(shapes, layout, stores[row], query[row : row + 1], weights[row : row + 1], out[row : row + 1])
                for row in (0, sessions - 1)
            ]
            return max(worst)

        return Made((call,) * 4, difference)

    moved = sessions * shapes.keys * (layout.key_bytes + 4)
    return Case("index", _name(shapes, layout, f"{sessions} sessions"), moved, 1e-3, make)


def score_cases(shapes: Shapes) -> list[Case]:
    """One, two and four rows of one history, and a row each of sixteen, in either form."""
    bf16, e4m3 = KeyLayout("bf16", shapes.index_width), KeyLayout("e4m3", shapes.index_width)
    cases = [_rows_case(shapes, bf16, rows, target) for rows, target in ((1, 72.0), (2, None), (4, 80.0))]
    cases += [_rows_case(shapes, e4m3, rows, None) for rows in (1, 2, 4)]
    return cases + [_sessions_case(shapes, layout, 16) for layout in (bf16, e4m3)]
