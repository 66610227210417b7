"""Stored tensors made into weights: checked, dequantised, copied out of the mapping, each taken once.

Holds `WeightReader`. Knows shapes as its callers state them; knows no layer formula.

Invariants:
1. A tensor is block-FP8 exactly when its name + `_scale_inv` is stored; the config's list of exceptions is not believed.
2. Scales are applied in float32 before anything is cut or cast.
3. Whatever was not taken under a prefix and is not one of the known leftovers is an error: a silent extra is a misread model.
4. A weight is a contiguous copy: no page of a file is read while decoding.
Source: model.md, sections 4.1 and 4.2.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import BadModel
from engine.model.files import TensorFiles

__all__ = ["WeightReader"]

_SCALE = "_scale_inv"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Kind:
    dtype: torch.dtype
    device: torch.device


class WeightReader:
    """Takes named weights out of `files` as `dtype` on `device`.

    progress: called with (stored tensors read, stored tensors to read).
    Raises BadModel naming the tensor: missing, misshapen, of an unsupported dtype, or (from `finish`) unexpected.
    """

    def __init__(
        self,
        files: TensorFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block: tuple[int, int],
        total: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._files = files
        self._names = files.names
        self._kind = _Kind(dtype, device)
        self._block = block
        self._total = total
        self._progress = progress
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether a tensor of this name is stored."""
        return name in self._names

    def take(self, name: str, *shape: int) -> Tensor:
        """The weight of this name and shape, in the model's dtype."""
        return self._stored(name, shape).to(self._kind.device, self._kind.dtype, copy=True).contiguous()

    def take_f32(self, name: str, *shape: int) -> Tensor:
        """The weight of this name and shape, in float32 whatever the model's dtype."""
        return self._stored(name, shape).to(self._kind.device, torch.float32, copy=True).contiguous()

    def take_exact(self, name: str, *shape: int) -> Tensor:
        """As `take_f32`, of a tensor that must be stored in float32: rounded values cannot be repaired."""
        if self.has(name) and (stored := self._files.read(name).dtype) != torch.float32:
            raise BadModel(f"tensor {name} is stored as {_said(stored)}; it must be float32, lower precision breaks routing")
        return self.take_f32(name, *shape)

    def take_experts(self, prefix: str, experts: int, width: int, hidden: int) -> tuple[Tensor, Tensor]:
        """Routed experts, stored one by one or merged.

        Returns: gate_up [experts, 2 * width, hidden] (gate rows first) and down [experts, hidden, width].
        """
        if self.has(f"{prefix}gate_up_proj") or self.has(f"{prefix}down_proj"):
            return (
                self.take(f"{prefix}gate_up_proj", experts, 2 * width, hidden),
                self.take(f"{prefix}down_proj", experts, hidden, width),
            )
        gate_up = torch.empty((experts, 2 * width, hidden), dtype=self._kind.dtype, device=self._kind.device)
        down = torch.empty((experts, hidden, width), dtype=self._kind.dtype, device=self._kind.device)
        for expert in range(experts):
            gate_up[expert, :width] = self._stored(f"{prefix}{expert}.gate_proj.weight", (width, hidden))
            gate_up[expert, width:] = self._stored(f"{prefix}{expert}.up_proj.weight", (width, hidden))
            down[expert] = self._stored(f"{prefix}{expert}.down_proj.weight", (hidden, width))
        return gate_up, down

    def finish(self, prefix: str, *, ignored: Collection[str] = ()) -> None:
        """Check that every stored tensor under `prefix` was taken, but those in `ignored` (names after the prefix)."""
        for name in sorted(self._names - self._taken):
            if name.startswith(prefix) and name.removeprefix(prefix) not in ignored:
                raise BadModel(f"tensor {name} is unexpected: this model has no such weight")

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this name, checked and dequantised, in its stored dtype or float32."""
        found = self._files.shape(name)
        if found != shape:
            raise BadModel(f"tensor {name} has shape {list(found)}; the config asks for {list(shape)}")
        tensor = self._files.read(name)
        self._took(name)
        scale_name = name + _SCALE
        if self.has(scale_name):
            if tensor.dtype != torch.float8_e4m3fn:
                raise BadModel(f"tensor {name} is stored as {_said(tensor.dtype)} but {scale_name} exists; expected float8_e4m3fn")
            return self._dequantised(tensor, scale_name)
        if tensor.dtype not in _FLOATS:
            missing = f" and {scale_name} is missing" if tensor.dtype == torch.float8_e4m3fn else ""
            raise BadModel(f"tensor {name} is stored as {_said(tensor.dtype)}{missing}; expected a float32, bfloat16 or float16 weight")
        return tensor

    def _dequantised(self, tensor: Tensor, scale_name: str) -> Tensor:
        """Multiply block by block; the last block row and column may be ragged."""
        rows, columns = self._block
        *leading, out, into = tensor.shape
        shape = (*leading, -(-out // rows), -(-into // columns))
        found = self._files.shape(scale_name)
        if found != shape:
            raise BadModel(f"tensor {scale_name} has shape {list(found)}; blocks of {rows} x {columns} need {list(shape)}")
        scale = self._files.read(scale_name)
        if scale.dtype != torch.float32:
            raise BadModel(f"tensor {scale_name} is stored as {_said(scale.dtype)}; expected float32")
        self._took(scale_name)
        spread = scale.repeat_interleave(rows, -2)[..., :out, :].repeat_interleave(columns, -1)[..., :into]
        return tensor.to(torch.float32) * spread

    def _took(self, name: str) -> None:
        assert name not in self._taken, f"{name} taken twice"
        self._taken.add(name)
        if self._progress is not None:
            self._progress(len(self._taken), self._total)


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
