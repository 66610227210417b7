"""Cases of what surrounds the products: the selection, attention over picked rows, sampling, norms."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.bench.cases import Case, Made, Shapes, drawn, relative, rotated
from engine.bench.scoring import score_cases
from kernels.layout import RowLayout
from kernels.norm import layer_norm, rms_norm
from kernels.quantize import pack_rows, unpack_rows
from kernels.residual import add_norm
from kernels.sample import sample
from kernels.select import reference as select_reference
from kernels.select import select
from kernels.sparse_mla import sparse_mla_addresses, sparse_mla_packed

__all__ = ["attention_cases"]

_SCALE = 0.0625


def _select_case(shapes: Shapes, rows: int, target_us: float | None) -> Case:
    def make(device: torch.device) -> Made:
        stores = [
            (drawn(device, rows, shapes.keys, seed=seed) * 64).round() / 64 for seed in rotated(shapes, rows * shapes.keys * 4)
        ]  # ties at the cut
        first = torch.zeros(rows, dtype=torch.int64, device=device)
        last = first + shapes.keys
        out = torch.empty((rows, shapes.picks), dtype=torch.int32, device=device)
        calls = tuple(partial(select, stores[n % len(stores)], first, last, shapes.picks, out) for n in range(shapes.calls))

        def difference() -> float:
            out.fill_(77)
            select(stores[-1], first, last, shapes.picks, out)
            wanted = torch.empty((rows, shapes.picks), dtype=torch.int32)
            select_reference.select(stores[-1].cpu(), first.cpu(), last.cpu(), shapes.picks, wanted)
            return float((out.cpu() != wanted).sum())

        return Made(calls, difference)

    name = f"select {shapes.picks:,} of {shapes.keys:,}, {rows} rows"
    return Case("index", name, 4 * rows * (shapes.keys + shapes.picks), 0.0, make, target_us=target_us)


def _attention_case(shapes: Shapes, rows: int, addressed: bool) -> Case:
    layout = RowLayout("q8g64", shapes.latent, shapes.rope)
    one_bytes = rows * shapes.picks * layout.row_bytes

    def make(device: torch.device) -> Made:
        count = rows * shapes.picks
        stores = [
            pack_rows(drawn(device, count, shapes.latent, seed=2 * n), drawn(device, count, shapes.rope, seed=2 * n + 1), layout)
            for n in rotated(shapes, one_bytes)
        ]
        selection = torch.arange(shapes.picks, dtype=torch.int32, device=device).repeat(rows, 1)
        latent = drawn(device, rows, shapes.heads, shapes.latent, seed=9, dtype=shapes.dtype)
        turned = drawn(device, rows, shapes.heads, shapes.rope, seed=8, dtype=shapes.dtype)
        scattered = torch.randperm(count, generator=torch.Generator().manual_seed(4)).to(device).view(rows, -1)

        def call(store: Tensor) -> Tensor:
            if addressed:
                return sparse_mla_addresses(latent, turned, store.data_ptr() + scattered * layout.row_bytes, layout, _SCALE)
            return sparse_mla_packed(latent, turned, store.view(rows, shapes.picks, -1), selection, layout, _SCALE)

        if addressed:  # addresses are made ahead, as a plan does
            made = [(store.data_ptr() + scattered * layout.row_bytes) for store in stores]
            calls: list[Callable[[], Tensor]] = [
                partial(sparse_mla_addresses, latent, turned, addresses, layout, _SCALE) for addresses in made
            ]
        else:
            calls = [partial(call, store) for store in stores]
        rounds = tuple(calls[n % len(calls)] for n in range(shapes.calls))

        def difference() -> float:
            values, keys = unpack_rows(stores[-1].view(rows, shapes.picks, -1), layout)
            if addressed:
                at = scattered.view(rows, shapes.picks)
                values, keys = values.flatten(0, 1)[at], keys.flatten(0, 1)[at]
            logits = torch.einsum("rhl,rpl->rhp", latent.float(), values) + torch.einsum("rhl,rpl->rhp", turned.float(), keys)
            wanted = torch.einsum("rhp,rpl->rhl", torch.softmax(logits * _SCALE, -1), values)
            return relative(call(stores[-1]).flatten(1), wanted.flatten(1))

        return Made(rounds, difference)

    name = f"attend {shapes.picks:,} rows {'by address' if addressed else 'compact'}, {rows} rows"
    moved = one_bytes + rows * shapes.heads * (2 * shapes.latent + shapes.rope) * shapes.dtype.itemsize
    return Case("attention", name, moved, 2**-7, make)


def _sample_case(shapes: Shapes, rows: int, greedy: bool) -> Case:
    def make(device: torch.device) -> Made:
        stores = [drawn(device, rows, shapes.vocabulary, seed=n, scale=3.0) for n in rotated(shapes, rows * shapes.vocabulary * 4)]
        parameters = torch.zeros((rows, 8), device=device)
        parameters[:, 4] = 1.0
        parameters[:, 1] = 1.0 if greedy else 0.95
        parameters[:, 0] = 0.0 if greedy else 1.0
        seeds = torch.arange(rows, device=device)
        nothing = torch.zeros(rows, dtype=torch.int64, device=device)
        calls = tuple(partial(sample, stores[n % len(stores)], parameters, seeds, seeds + 5, nothing, nothing) for n in range(shapes.calls))

        def difference() -> float:
            got = sample(stores[-1], parameters, seeds, seeds + 5, nothing, nothing).cpu()
            wanted = sample(*(part.cpu() for part in (stores[-1], parameters, seeds, seeds + 5, nothing, nothing)))
            return float((got != wanted).sum())

        return Made(calls, difference)

    kind = "greedy" if greedy else "temperature 1, top-p 0.95"
    return Case("sample", f"sample {kind}, {rows} rows", 4 * rows * shapes.vocabulary, 0.0, make)


def _norm_cases(shapes: Shapes, rows: int) -> list[Case]:
    hidden, size = shapes.hidden, shapes.dtype.itemsize

    def made(device: torch.device, wanted: Callable[..., Tensor], *shape: int) -> Made:
        stores = [drawn(device, *shape, seed=n, dtype=shapes.dtype) for n in range(2, 6)]
        weight = drawn(device, shape[-1], seed=1, dtype=shapes.dtype)
        calls = tuple(partial(wanted, stores[n % len(stores)], weight) for n in range(shapes.calls))

        def difference() -> float:
            return relative(wanted(stores[0], weight), wanted(stores[0].cpu().float(), weight.cpu().float()).to(device))

        return Made(calls, difference)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-5)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return layer_norm(x, weight, weight, 1e-6)

    def residual(x: Tensor, weight: Tensor) -> Tensor:
        return add_norm(x.clone(), x, weight, 1e-5, torch.full((x.shape[0],), -1, device=x.device), 0)

    width = shapes.index_width
    return [
        Case("norm", f"rms {hidden}, {rows} rows", 2 * rows * hidden * size, 2**-6, lambda device: made(device, rms, rows, hidden)),
        Case("norm", f"layer {width}, {rows} rows", 2 * rows * width * size, 2**-6, lambda device: made(device, layer, rows, width)),
        Case(
            "norm", f"add and rms {hidden} (with a copy and a fill), {rows} rows", 4 * rows * hidden * size, 2**-6,
            lambda device: made(device, residual, rows, hidden),
        ),
    ]  # fmt: skip


def attention_cases(shapes: Shapes) -> list[Case]:
    """All of them."""
    cases = score_cases(shapes)
    cases += [_select_case(shapes, rows, target) for rows, target in ((1, 45.0), (4, None))]
    cases += [_attention_case(shapes, rows, addressed) for rows in (1, 4, 16) for addressed in (False, True)]
    cases += [_sample_case(shapes, rows, greedy) for rows in (1, 16) for greedy in (True, False)]
    return cases + [case for rows in (1, 16) for case in _norm_cases(shapes, rows)]
