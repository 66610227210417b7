"""Cases of products with weights of 4 and 8 bits in groups of 64: the largest of attention, a shared expert, routed experts.

Bytes are the packed ones: codes and scales. The check multiplies the weights out.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.bench.cases import Case, Made, Shapes, drawn, relative, rotated
from engine.bench.products import linear_shape
from engine.model.bytes import held_bytes
from kernels.linear import GroupInt, linear
from kernels.linear.group_int import padded_width
from kernels.moe import experts, gated_mlp

if TYPE_CHECKING:
    from kernels.linear.tiling import Tiling

__all__ = ["INTEGER_LINEAR", "integer_cases", "integer_linear_case", "integer_mlp_case", "integer_routed_case", "integer_tilings"]

INTEGER_LINEAR = ("query", "attention output")
# outputs, parts, warps, stages, twin that are tried: of gate and up, twins anyway, and of single weights
_GATED = (
    (16, 4, 4, 3, False), (16, 2, 2, 3, False), (16, 2, 2, 4, False), (32, 1, 2, 3, False), (64, 1, 4, 3, False), (16, 4, 4, 4, False),
    (16, 1, 1, 4, False), (16, 2, 2, 5, False),
)  # fmt: skip
_SINGLE = (
    (16, 4, 4, 3, False), (16, 2, 2, 3, True), (32, 1, 2, 3, True), (16, 4, 4, 4, False), (64, 1, 4, 3, False), (16, 4, 4, 5, False),
    (16, 2, 2, 4, True), (16, 2, 2, 6, False), (64, 1, 4, 3, True),
)  # fmt: skip
_OF_BYTES = 6  # tried of eight bits
_PROGRAMS = 264  # two a multiprocessor of the largest card in mind; what splits of one-part tilings aim at
_GROUP = 64
_BOUND = 2**-7
_SHARE = 0.8


def _drawn(device: torch.device, *shape: int, bits: int, seed: int) -> GroupInt:
    """Any codes, scales that give products the size of the rows'."""
    *leading, width = shape
    padded = padded_width(width, bits, _GROUP)
    generator = torch.Generator(device).manual_seed(seed)
    units = torch.empty((*leading, padded * bits // 8), dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
    scales = torch.rand((*leading, -(-padded // _GROUP)), generator=generator, device=device) + 0.5
    scales = (scales * 2 ** (1 - bits) * width**-0.5).to(torch.bfloat16)
    return GroupInt(units.view(torch.int16), scales, None, bits, _GROUP, width)


def integer_linear_case(shapes: Shapes, name: str, bits: int, rows: int, tiling: "Tiling | None" = None) -> Case:
    """One weight at so many rows."""
    _, outputs, width = linear_shape(shapes, name)
    weight_bytes = outputs * width * bits // 8 + 2 * outputs * -(-width // _GROUP)

    def multiply(x: Tensor, weight: GroupInt) -> Tensor:
        if tiling is None:
            return linear(x, weight)
        from kernels.linear import integers

        return integers.linear(x, weight, tiling=tiling)

    def make(device: torch.device) -> Made:
        x = drawn(device, rows, width, seed=7, dtype=shapes.dtype)
        weights = [_drawn(device, outputs, width, bits=bits, seed=seed) for seed in rotated(shapes, weight_bytes)]
        calls = tuple(partial(multiply, x, weights[number % len(weights)]) for number in range(shapes.calls_of(weight_bytes)))
        return Made(calls, lambda: relative(multiply(x, weights[-1]), x.float() @ weights[-1].dequantised(torch.float32).T))

    moved = weight_bytes + rows * (width + outputs) * shapes.dtype.itemsize
    return Case("integers", f"int{bits} {name} {outputs}x{width}, {rows} rows", moved, _BOUND, make, target_share=_SHARE)


def integer_mlp_case(
    shapes: Shapes, name: str, width: int, bits: int, rows: int, tilings: "tuple[Tiling | None, Tiling | None]" = (None, None)
) -> Case:
    """A dense MLP of this width."""
    hidden = shapes.hidden
    weight_bytes = 3 * hidden * width * bits // 8 + 4 * width * -(-hidden // _GROUP) + 2 * hidden * -(-width // _GROUP)

    def multiply(y: Tensor, gate: GroupInt, up: GroupInt, down: GroupInt) -> Tensor:
        if not any(tilings):
            return gated_mlp(y, gate, up, down)
        from kernels.moe import kernel

        return kernel.gated_mlp(y, gate, up, down, tilings)

    def make(device: torch.device) -> Made:
        y = drawn(device, rows, hidden, seed=7, dtype=shapes.dtype)
        sets = []
        for seed in rotated(shapes, weight_bytes):
            gate, up = (_drawn(device, width, hidden, bits=bits, seed=3 * seed + n) for n in (0, 1))
            sets.append((gate, up, _drawn(device, hidden, width, bits=bits, seed=3 * seed + 2)))
        calls = tuple(partial(multiply, y, *sets[number % len(sets)]) for number in range(shapes.calls_of(weight_bytes)))

        def difference() -> float:
            gate, up, down = (weight.dequantised(torch.float32) for weight in sets[-1])
            activated = torch.nn.functional.silu(y.float() @ gate.T) * (y.float() @ up.T)
            return relative(multiply(y, *sets[-1]), activated.to(y.dtype).float() @ down.T)

        return Made(calls, difference)

    moved = weight_bytes + 2 * rows * hidden * shapes.dtype.itemsize
    return Case("integers", f"int{bits} {name} {width}, {rows} rows", moved, 2 * _BOUND, make, target_share=_SHARE)


def integer_routed_case(shapes: Shapes, bits: int, rows: int, tilings: "tuple[Tiling | None, Tiling | None]" = (None, None)) -> Case:
    """Routed experts, every pair another expert as long as there are enough."""
    count, slots, hidden, width = shapes.experts, shapes.experts_per_token, shapes.hidden, shapes.expert_width
    distinct = min(count, rows * slots)
    one = 3 * hidden * width * bits // 8 + 4 * width * -(-hidden // _GROUP) + 2 * hidden * -(-width // _GROUP)
    moved = distinct * one + 2 * rows * hidden * shapes.dtype.itemsize

    def multiply(y: Tensor, pick: Tensor, weights: Tensor, gate_up: GroupInt, down: GroupInt) -> Tensor:
        if not any(tilings):
            return experts(y, pick, weights, gate_up, down)
        from kernels.moe import kernel

        return kernel.experts(y, pick, weights, gate_up, down, tilings)

    def make(device: torch.device) -> Made:
        y = drawn(device, rows, hidden, seed=7, dtype=shapes.dtype)
        gate_up, down = _drawn(device, count, 2 * width, hidden, bits=bits, seed=1), _drawn(device, count, hidden, width, bits=bits, seed=2)
        assert held_bytes([gate_up, down]) >= count * one, "fewer bytes than are counted"
        generator = torch.Generator().manual_seed(3)
        calls_made = shapes.calls_of(moved)
        picks = [torch.randperm(count, generator=generator)[: rows * slots].view(rows, slots).to(device) for _ in range(calls_made)]
        weights = torch.rand((rows, slots), generator=generator).to(device)
        calls = tuple(partial(multiply, y, pick, weights, gate_up, down) for pick in picks)

        def difference() -> float:
            wanted = torch.zeros((rows, hidden), device=device)
            for row in range(rows):
                for slot, expert in enumerate(picks[0][row].tolist()):
                    gate, up = (gate_up[expert].dequantised(torch.float32) @ y[row].float()).split(width)
                    activated = (torch.nn.functional.silu(gate) * up).to(y.dtype).float()
                    wanted[row] += weights[row, slot] * (down[expert].dequantised(torch.float32) @ activated)
            return relative(multiply(y, picks[0], weights, gate_up, down), wanted)

        return Made(calls, difference)

    return Case("integers", f"int{bits} {distinct} of {count} experts, {rows} rows", moved, 2 * _BOUND, make, target_share=_SHARE)


def integer_tilings(outputs: int, width: int, bits: int, *, gated: bool, experts_read: int = 1) -> "Iterator[Tiling]":
    """What is tried for a weight [outputs, width] of which so many are read at a time. Args: gated: gate and up together."""
    from kernels.linear.tiling import Tiling

    chunk = 64 * 16 // bits
    tried = _GATED if gated else _SINGLE
    for tile, parts, warps, stages, twin in tried if bits == 4 else tried[:_OF_BYTES]:
        one = Tiling(tile, chunk, parts, warps, stages, 1, twin)
        steps, programs = -(-width // one.step), -(-outputs // one.tile_outputs) * experts_read
        if parts == 1 and not gated and programs < _PROGRAMS:
            one = replace(one, splits=min((n for n in range(1, steps) if steps % n == 0 and n * programs >= _PROGRAMS), default=1))
        if one.step <= max(width, chunk):
            yield one


def integer_cases(shapes: Shapes) -> list[Case]:
    """All of them, at the constants."""
    cases = [integer_linear_case(shapes, name, bits, rows) for name in INTEGER_LINEAR for bits in (4, 8) for rows in (1, 4)]
    cases += [integer_mlp_case(shapes, "shared expert", shapes.expert_width, bits, rows) for bits in (4, 8) for rows in (1, 4)]
    cases += [integer_mlp_case(shapes, "dense", shapes.dense_width, 8, rows) for rows in (1, 4)]
    return cases + [integer_routed_case(shapes, bits, rows) for bits in (4, 8) for rows in (1, 2, 4)]
