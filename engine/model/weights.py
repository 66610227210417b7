"""Stored tensors made into weights: checked, dequantised, copied out of the mapping, each taken once.

Holds `WeightReader`. Knows shapes as its callers state them; knows no layer formula.

Invariants:
1. A tensor is block-FP8 exactly when its name + `_scale_inv` is stored, and the config's method must then be fp8; its list of exceptions
   is not believed. Packed integers are `engine/model/packed.py`'s.
2. On a device the weight of a product stays block-FP8 or packed; else it is multiplied out before anything is cut or cast: block-FP8 in
   float32, integers as their format defines.
3. Whatever was not taken under a prefix and is not one of the known leftovers is an error: a silent extra is a misread model.
4. A weight is contiguous and the model's own: no page of a file is read while decoding.
Source: model.md, sections 4.1 and 4.2.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from engine.errors import BadModel
from engine.model.packed import PackedForm, PackedReader
from engine.model.quantisation import Quantisation
from engine.model.source import TensorSource
from kernels.linear.block_fp8 import FP8_BLOCK, BlockFp8
from kernels.linear.group_int import GroupInt

__all__ = ["Weight", "WeightReader"]

Weight: TypeAlias = Tensor | BlockFp8 | GroupInt  # of a product

_SCALE = "_scale_inv"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAN = 0x7F  # of e4m3 without its sign; there is no infinity
_CHECKED_VALUES = 1 << 26  # at once: what is made to look at values is no larger


@dataclass(frozen=True, slots=True)
class _Kind:
    dtype: torch.dtype
    device: torch.device


class WeightReader:
    """Takes named weights out of `source` as `dtype` on `device`.

    progress: called with (stored tensors read, stored tensors to read).
    Raises BadModel naming the tensor: missing, misshapen, of an unsupported dtype, or (from `finish`) unexpected.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantisation: Quantisation,
        total: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._files = source
        self._names = source.names
        self._kind = _Kind(dtype, device)
        self._method, self._block = quantisation.method, quantisation.block
        self._packed = PackedReader(source, quantisation, device, self._took)
        self._total = total
        self._progress = progress
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether a tensor of this name is stored, packed or not."""
        return name in self._names or self._packed.has(name)

    def take(self, name: str, *shape: int) -> Tensor:
        """The weight of this name and shape, in the model's dtype."""
        return self._own(self._plain(name, shape), self._kind.dtype)

    def take_f32(self, name: str, *shape: int) -> Tensor:
        """The weight of this name and shape, in float32 whatever the model's dtype."""
        return self._own(self._plain(name, shape), torch.float32)

    def take_exact(self, name: str, *shape: int) -> Tensor:
        """As `take_f32`, of a tensor that must be stored in float32: rounded values cannot be repaired."""
        if name in self._names and (stored := self._files.read(name).dtype) != torch.float32:
            raise BadModel(f"tensor {name} is stored as {_said(stored)}; it must be float32, lower precision breaks routing")
        return self.take_f32(name, *shape)

    def take_weight(self, name: str, *shape: int) -> Weight:
        """The weight of a product of this name and shape: in the model's dtype, or as it is stored where products take that form."""
        kept = self._kept(name)
        if kept is None:
            return self.take(name, *shape)
        if isinstance(kept, PackedForm):
            return self._packed.read(name, shape)
        return BlockFp8(*self._kept_fp8(name, shape))

    def take_alike(self, names: Sequence[str], *shape: int) -> list[Weight]:
        """Weights that one launch reads together: as `take_weight` where all of them stay in one form, else none does."""
        take = self.take_weight if self._kept_alike(names) is not None else self.take
        return [take(name, *shape) for name in names]

    def take_experts(self, prefix: str, experts: int, width: int, hidden: int) -> tuple[Weight, Weight]:
        """Routed experts, stored one by one or merged.

        Returns: gate_up [experts, 2 * width, hidden] (gate rows first) and down [experts, hidden, width].
        """
        whole_blocks = width % FP8_BLOCK == 0  # else an FP8 scale's block would straddle gate and up
        if self.has(f"{prefix}gate_up_proj") or self.has(f"{prefix}down_proj"):
            take = self.take_weight if whole_blocks else self.take
            return (
                take(f"{prefix}gate_up_proj", experts, 2 * width, hidden),
                self.take_weight(f"{prefix}down_proj", experts, hidden, width),
            )
        names = [[f"{prefix}{expert}.{part}_proj.weight" for part in ("gate", "up")] for expert in range(experts)]
        downs = [[f"{prefix}{expert}.down_proj.weight"] for expert in range(experts)]
        return self._joined(names, width, hidden, may_stay=whole_blocks), self._joined(downs, hidden, width, may_stay=True)

    def _joined(self, names: list[list[str]], outputs: int, width: int, *, may_stay: bool) -> Weight:
        """One weight an expert of tensors [outputs, width] one below the other: [experts, parts * outputs, width]."""
        parts, device = len(names[0]), self._kind.device
        kept = self._kept_alike([name for each in names for name in each])
        if isinstance(kept, PackedForm):
            return self._joined_packed(names, outputs, width)
        stays = may_stay and kept is not None
        dtype = torch.float8_e4m3fn if stays else self._kind.dtype
        values = torch.empty((len(names), parts * outputs, width), dtype=dtype, device=device)
        if not stays:
            for expert, each in enumerate(names):
                for part, name in enumerate(each):
                    values[expert, part * outputs : (part + 1) * outputs] = self._plain(name, (outputs, width))
            return values
        rows = -(-outputs // FP8_BLOCK)
        scales = torch.empty((len(names), parts * rows, -(-width // FP8_BLOCK)), device=device)
        for expert, each in enumerate(names):
            for part, name in enumerate(each):
                tensor, scale = self._kept_fp8(name, (outputs, width))
                values[expert, part * outputs : (part + 1) * outputs] = tensor
                scales[expert, part * rows : (part + 1) * rows] = scale
        return BlockFp8(values, scales)

    def _joined_packed(self, names: list[list[str]], outputs: int, width: int) -> GroupInt:
        """As `_joined`, of packed weights of one form."""
        whole: GroupInt | None = None
        for expert, each in enumerate(names):
            for part, name in enumerate(each):
                one = self._packed.read(name, (outputs, width))
                if whole is None:
                    whole = one.empty_like(len(names), len(each) * outputs)
                assert one.alike(whole), f"{name} has another form than its neighbours"
                whole[expert][part * outputs : (part + 1) * outputs].copy_(one)
        assert whole is not None, "no expert is named"
        return whole

    def finish(self, prefix: str, *, ignored: Collection[str] = ()) -> None:
        """Check that every stored tensor under `prefix` was taken, but those in `ignored` (names after the prefix)."""
        for name in sorted(self._names - self._taken):
            if name.startswith(prefix) and name.removeprefix(prefix) not in ignored:
                raise BadModel(f"tensor {name} is unexpected: this model has no such weight")

    def _own(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(self._kind.device, dtype, copy=self._files.borrowed).contiguous()

    def _keeps_stored(self) -> bool:
        """Whether products read narrow weights: on a device."""
        return self._kind.device.type != "cpu"

    def _kept(self, name: str) -> PackedForm | str | None:
        """How a product reads this tensor as it is stored, or None: kernels do; the CPU's references would dequantise it at each call."""
        if not self._keeps_stored():
            return None
        if self._packed.has(name):
            return self._packed.form(name)
        return "fp8" if self._block == (FP8_BLOCK, FP8_BLOCK) and name + _SCALE in self._names else None

    def _kept_alike(self, names: Sequence[str]) -> PackedForm | str | None:
        """The one way in which products read all of these as they are stored, or None."""
        kept = {self._kept(name) for name in names}
        return kept.pop() if len(kept) == 1 else None

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this name, its shape checked."""
        found = self._files.shape(name)
        if found != shape:
            raise BadModel(f"tensor {name} has shape {list(found)}; the config asks for {list(shape)}")
        tensor = self._files.read(name)
        self._took(name)
        return tensor

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this name, checked and dequantised, in its stored dtype or float32."""
        if self._packed.has(name):
            return self._packed.dequantised(name, shape)
        scale_name = name + _SCALE
        if scale_name in self._names:
            return self._dequantised(self._stored_fp8(name, shape), scale_name)
        if name not in self._names:
            raise BadModel(self._packed.missing(name))
        tensor = self._stored(name, shape)
        if tensor.dtype not in _FLOATS:
            missing = f" and {scale_name} is missing" if tensor.dtype == torch.float8_e4m3fn else ""
            raise BadModel(f"tensor {name} is stored as {_said(tensor.dtype)}{missing}; expected a float32, bfloat16 or float16 weight")
        return tensor

    def _kept_fp8(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        tensor = self._stored_fp8(name, shape)
        return tensor, self._scale(tensor, name + _SCALE)

    def _stored_fp8(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The model's own copy of a tensor's values, checked, where the weight will be."""
        tensor = self._stored(name, shape)
        if tensor.dtype != torch.float8_e4m3fn:
            raise BadModel(f"tensor {name} is stored as {_said(tensor.dtype)} but {name}{_SCALE} exists; expected float8_e4m3fn")
        if self._method != "fp8":
            raise BadModel(f"tensor {name} is stored in block-FP8 ({name}{_SCALE} exists); quantization_config says {self._method}")
        own = self._own(tensor, tensor.dtype)
        parts = own.view(torch.uint8).flatten().split(_CHECKED_VALUES)
        if any(bool(((part & _NAN) == _NAN).any()) for part in parts):
            raise BadModel(f"tensor {name} holds values that are not finite")
        return own

    def _scale(self, tensor: Tensor, scale_name: str) -> Tensor:
        """Scales of a tensor's blocks, float32, finite, where the weight will be; the last block row and column may be ragged."""
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
        if not bool(torch.isfinite(scale).all()):
            raise BadModel(f"tensor {scale_name} holds values that are not finite")
        return self._own(scale, torch.float32)

    def _dequantised(self, tensor: Tensor, scale_name: str) -> Tensor:
        """Multiply block by block, in float32, where the weight will be."""
        rows, columns = self._block
        out, into = tensor.shape[-2:]
        scale = self._scale(tensor, scale_name)
        spread = scale.repeat_interleave(rows, -2)[..., :out, :].repeat_interleave(columns, -1)[..., :into]
        return tensor.to(torch.float32) * spread

    def _took(self, name: str) -> None:
        assert name not in self._taken, f"{name} taken twice"
        self._taken.add(name)
        if self._progress is not None:
            self._progress(len(self._taken), self._total)


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
