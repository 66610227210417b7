"""Cases of the products: every weight of a layer at 1 to 4 rows, dense, shared and routed MLPs. A weight read once is the floor.

With a tiling given, a case measures that tiling instead of the constant of its shape.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.bench.cases import Case, Made, Shapes, drawn, relative, rotated
from kernels.linear import heads_linear, linear
from kernels.moe import experts, gated_mlp, route

if TYPE_CHECKING:
    from kernels.linear.tiling import Tiling

__all__ = ["LINEAR_NAMES", "linear_case", "linear_shape", "mlp_case", "product_cases", "routed_case"]

_BOUND = 2**-7  # one rounding to bfloat16
_SHARE = 0.85


def _weights(s: Shapes) -> dict[str, tuple[int, int, int]]:
    """Heads, outputs and width of each weight by what it makes."""
    return {
        "layer input": (1, s.query_latent + s.latent + s.rope, s.hidden),
        "full layer input": (1, s.query_latent + s.latent + s.rope + s.index_width + s.index_heads, s.hidden),
        "query": (1, s.heads * (s.nope + s.rope), s.query_latent),
        "absorbed key": (s.heads, s.latent, s.nope),
        "absorbed value": (s.heads, s.value, s.latent),
        "attention output": (1, s.hidden, s.heads * s.value),
        "index query": (1, s.index_heads * s.index_width, s.query_latent),
        "mtp join": (1, s.hidden, 2 * s.hidden),
        "logits": (1, s.vocabulary, s.hidden),
    }


LINEAR_NAMES = tuple(_weights(Shapes()))


def linear_shape(shapes: Shapes, name: str) -> tuple[int, int, int]:
    """Heads, outputs and width of the weight of this name."""
    return _weights(shapes)[name]


def linear_case(shapes: Shapes, name: str, rows: int, tiling: "Tiling | None" = None) -> Case:
    """One weight at so many rows."""
    heads, outputs, width = _weights(shapes)[name]
    size = shapes.dtype.itemsize
    weight_bytes = heads * outputs * width * size
    given: dict[str, Any] = {} if tiling is None else {"tiling": tiling}

    def make(device: torch.device) -> Made:
        x = drawn(device, rows, heads, width, seed=7, dtype=shapes.dtype)
        weights = [
            drawn(device, heads, outputs, width, seed=seed, scale=width**-0.5, dtype=shapes.dtype) for seed in rotated(shapes, weight_bytes)
        ]
        multiply = _heads if heads > 1 else _single
        calls = tuple(partial(multiply, x, weights[number % len(weights)], given) for number in range(shapes.calls_of(weight_bytes)))

        def difference() -> float:
            got = multiply(x, weights[-1], given)
            wanted = torch.einsum("rhk,hok->rho", x.float(), weights[-1].float())
            return relative(got.flatten(1), wanted.flatten(1))

        return Made(calls, difference)

    moved = weight_bytes + rows * heads * (width + outputs) * size
    return Case("linear", f"{name} {heads}x{outputs}x{width}, {rows} rows", moved, _BOUND, make, target_share=_SHARE)


def _single(x: Tensor, weight: Tensor, given: dict[str, Any]) -> Tensor:
    if given:
        from kernels.linear import kernel

        return kernel.linear(x[:, 0], weight[0], **given)[:, None]
    return linear(x[:, 0], weight[0])[:, None]


def _heads(x: Tensor, weight: Tensor, given: dict[str, Any]) -> Tensor:
    if given:
        from kernels.linear import kernel

        return kernel.heads_linear(x, weight, **given)
    return heads_linear(x, weight)


def mlp_case(shapes: Shapes, name: str, width: int, rows: int, tilings: "tuple[Tiling | None, Tiling | None]" = (None, None)) -> Case:
    """A dense MLP of this width."""
    hidden, size = shapes.hidden, shapes.dtype.itemsize
    weight_bytes = 3 * hidden * width * size

    def make(device: torch.device) -> Made:
        y = drawn(device, rows, hidden, seed=7, dtype=shapes.dtype)
        sets = []
        for seed in rotated(shapes, weight_bytes):
            gate, up = (drawn(device, width, hidden, seed=3 * seed + n, scale=hidden**-0.5, dtype=shapes.dtype) for n in (0, 1))
            sets.append((gate, up, drawn(device, hidden, width, seed=3 * seed + 2, scale=width**-0.5, dtype=shapes.dtype)))
        calls = tuple(partial(_mlp, y, *sets[number % len(sets)], tilings) for number in range(shapes.calls_of(weight_bytes)))

        def difference() -> float:
            gate, up, down = (weight.float() for weight in sets[-1])
            activated = torch.nn.functional.silu(y.float() @ gate.T) * (y.float() @ up.T)
            return relative(_mlp(y, *sets[-1], tilings), activated.to(y.dtype).float() @ down.T)

        return Made(calls, difference)

    moved = weight_bytes + 2 * rows * hidden * size
    return Case("mlp", f"{name} {width}, {rows} rows", moved, 2 * _BOUND, make, target_share=_SHARE)


def _mlp(y: Tensor, gate: Tensor, up: Tensor, down: Tensor, tilings: "tuple[Tiling | None, Tiling | None]") -> Tensor:
    if any(tilings):
        from kernels.moe import kernel

        return kernel.gated_mlp(y, gate, up, down, tilings)
    return gated_mlp(y, gate, up, down)


def routed_case(shapes: Shapes, rows: int, tilings: "tuple[Tiling | None, Tiling | None]" = (None, None)) -> Case:
    """Routed experts, every pair another expert as long as there are enough."""
    count, chosen, hidden, width = shapes.experts, shapes.experts_per_token, shapes.hidden, shapes.expert_width
    size = shapes.dtype.itemsize
    distinct = min(count, rows * chosen)
    moved = 3 * distinct * hidden * width * size + 2 * rows * hidden * size

    def make(device: torch.device) -> Made:
        y = drawn(device, rows, hidden, seed=7, dtype=shapes.dtype)
        gate_up = drawn(device, count, 2 * width, hidden, seed=1, scale=hidden**-0.5, dtype=shapes.dtype)
        down = drawn(device, count, hidden, width, seed=2, scale=width**-0.5, dtype=shapes.dtype)
        generator = torch.Generator().manual_seed(3)
        picks = [
            torch.randperm(count, generator=generator)[: rows * chosen].view(rows, chosen).to(device) for _ in range(shapes.calls_of(moved))
        ]
        weights = torch.rand((rows, chosen), generator=generator).to(device)
        calls = tuple(partial(_experts, y, pick, weights, gate_up, down, tilings) for pick in picks)

        def difference() -> float:
            wanted = torch.zeros((rows, hidden), device=device)
            for row in range(rows):
                for slot, expert in enumerate(picks[0][row].tolist()):
                    gate, up = (gate_up[expert].float() @ y[row].float()).split(width)
                    activated = (torch.nn.functional.silu(gate) * up).to(y.dtype).float()
                    wanted[row] += weights[row, slot] * (down[expert].float() @ activated)
            return relative(_experts(y, picks[0], weights, gate_up, down, tilings), wanted)

        return Made(calls, difference)

    return Case("moe", f"{distinct} of {count} experts, {rows} rows", moved, 2 * _BOUND, make, target_share=_SHARE)


def _experts(
    y: Tensor, pick: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, tilings: "tuple[Tiling | None, Tiling | None]"
) -> Tensor:
    if any(tilings):
        from kernels.moe import kernel

        return kernel.experts(y, pick, weights, gate_up, down, tilings)
    return experts(y, pick, weights, gate_up, down)


def _route_case(shapes: Shapes, rows: int) -> Case:
    how: dict[str, Any] = {
        "experts_per_token": shapes.experts_per_token, "groups": 1, "groups_kept": 1, "normalise": True, "factor": 2.5,
    }  # fmt: skip

    def make(device: torch.device) -> Made:
        y = drawn(device, rows, shapes.hidden, seed=7, dtype=shapes.dtype)
        gates = [
            drawn(device, shapes.experts, shapes.hidden, seed=seed, scale=shapes.hidden**-0.5)
            for seed in rotated(shapes, shapes.experts * shapes.hidden * 4)
        ]
        bias = drawn(device, shapes.experts, seed=5, scale=0.1)
        calls = tuple(partial(route, y, gates[number % len(gates)], bias, **how) for number in range(shapes.calls))

        def difference() -> float:
            ids, weights = route(y, gates[0], bias, **how)
            logits = y.double() @ gates[0].double().T
            chosen = (logits.sigmoid() + bias.double()).topk(shapes.experts_per_token).indices
            weight = logits.sigmoid().gather(1, ids)
            assert torch.equal(ids.sort().values, chosen.sort().values), "other experts than in float64"
            return relative(weights, 2.5 * weight / weight.sum(1, keepdim=True))

        return Made(calls, difference)

    moved = shapes.experts * shapes.hidden * 4
    return Case("moe", f"route {shapes.experts}, {rows} rows", moved, 1e-4, make)


def product_cases(shapes: Shapes) -> list[Case]:
    """All of them, at the constants."""
    cases = [linear_case(shapes, name, rows) for name in LINEAR_NAMES for rows in (1, 2, 4)]
    cases += [mlp_case(shapes, "dense", shapes.dense_width, rows) for rows in (1, 4)]
    cases += [mlp_case(shapes, "shared expert", shapes.expert_width, rows) for rows in (1, 4)]
    cases += [routed_case(shapes, rows) for rows in (1, 2, 4)]
    return cases + [_route_case(shapes, rows) for rows in (1, 4)]
