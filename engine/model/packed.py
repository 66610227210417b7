"""Weights stored as packed integers, read into the layout that products take, or multiplied out as their format defines.

Holds `PackedReader`, `PackedForm` and the names such weights are stored under. Knows the formats' bit orders; knows no layer.

Invariants:
1. A weight is packed exactly when its words are stored; its scheme must then be the config's, and every part have that scheme's shape.
2. Multiplied out, a value is (code - zero) in the scales' dtype, times its scale, rounded to that dtype: what the formats define.
3. Words are moved to the model's device first and unpacked there, one weight at a time.
Source: model.md, section 4.3.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import BadModel
from engine.model.quantisation import Quantisation, Scheme
from kernels.linear.group_int import GroupInt

__all__ = ["PackedForm", "PackedReader", "pack_words", "unpack_words", "weight_name"]

_COMPRESSED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
_AWQ = ("qweight", "scales", "qzeros")  # words, scales, zeros, as above
_PARTS = re.compile(rf"\.({'|'.join((*_COMPRESSED, *_AWQ))})$")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each four bits of a word, from the lowest
_SCALES = (torch.bfloat16, torch.float16, torch.float32)


class _Source(Protocol):
    @property
    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedForm:
    """What weights have in common that one launch reads together."""

    scheme: Scheme
    scales: torch.dtype


def weight_name(stored: str) -> str:
    """The weight that a stored tensor is of, or is a part of."""
    return _PARTS.sub(".weight", stored)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Codes [rows, words * 32 / bits] uint8 of int32 words [rows, words], low bits first."""
    parts = words.contiguous().view(torch.uint8)
    return parts if bits == 8 else torch.stack((parts & 15, parts >> 4), -1).flatten(-2)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Int32 words [rows, ceil(values * bits / 32)] of codes [rows, values] uint8, low bits first, 0 behind the last."""
    values = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -values % (32 // bits)))
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.contiguous().view(torch.int32)


class PackedReader:
    """Reads packed weights of `source` by the name their plain form would have. Raises BadModel naming the tensor.

    Args: took: called with each stored tensor's name when it is used.
    """

    def __init__(self, source: _Source, quantisation: Quantisation, device: torch.device, took: Callable[[str], None]) -> None:
        self._files = source
        self._quantisation = quantisation
        self._device = device
        self._took = took

    def has(self, name: str) -> bool:
        """Whether the weight `name` (ends in `.weight`) is stored packed."""
        module = name.removesuffix(".weight")
        return f"{module}.weight_packed" in self._files.names or f"{module}.qweight" in self._files.names

    def scheme(self, name: str) -> Scheme:
        """What a packed weight is, by the config."""
        module = name.removesuffix(".weight")
        compressed = f"{module}.weight_packed" in self._files.names
        part, method = (_COMPRESSED[0], "compressed-tensors") if compressed else (_AWQ[0], "awq")
        scheme = self._quantisation.scheme_of(module)
        if self._quantisation.method != method:
            raise BadModel(f"tensor {module}.{part} is packed as {method} does; quantization_config says {self._quantisation.method}")
        if scheme is None:
            raise BadModel(f"tensor {module}.{part} is packed, and quantization_config has no scheme for {module}")
        return scheme

    def form(self, name: str) -> PackedForm:
        """What a packed weight is, by the config and its scales."""
        scheme = self.scheme(name)
        return PackedForm(scheme, self._files.read(f"{name.removesuffix('.weight')}.{self._parts_named[1]}").dtype)

    def missing(self, name: str) -> str:
        """Says that a weight is not there, by the name that the config's method would store it under."""
        module = name.removesuffix(".weight")
        if module == name or self._quantisation.scheme_of(module) is None:
            return f"tensor {name} is missing"
        return f"tensor {module}.{self._parts_named[0]} is missing, and so is a plain {name}"

    def read(self, name: str, shape: tuple[int, ...]) -> GroupInt:
        """The weight [outputs, width], packed as products take it."""
        codes, scales, zeros, bits, group = self._parts(name, shape)
        return GroupInt.pack(codes, scales, zeros, bits, group or -(-shape[1] // 64) * 64)

    def dequantised(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The weight [outputs, width], multiplied out in the dtype of its scales."""
        codes, scales, zeros, bits, group = self._parts(name, shape)
        group = group or shape[1]
        values = codes.to(scales.dtype)
        if zeros is None:
            values -= 1 << (bits - 1)
        else:
            values -= zeros.to(scales.dtype).repeat_interleave(group, 1)
        return values * scales.repeat_interleave(group, 1)

    @property
    def _parts_named(self) -> tuple[str, ...]:
        """Last parts of the names of words, scales and zeros, as the config's method has them."""
        return _AWQ if self._quantisation.method == "awq" else _COMPRESSED

    def _parts(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
        """Codes [outputs, width], scales and zeros [outputs, groups], on the model's device; bits and group of the scheme."""
        scheme, module = self.scheme(name), name.removesuffix(".weight")
        if len(shape) != 2:
            raise BadModel(f"tensor {module} is packed; only weights of one module, {len(shape) - 1} dimensions fewer, are read so")
        outputs, width = shape
        group = scheme.group or width
        if width % group:
            raise BadModel(f"tensor {module}: groups of {group} do not divide the width {width}")
        read = self._awq if self._quantisation.method == "awq" else self._compressed
        codes, scales, zeros = read(module, outputs, width, group, scheme)
        zeros_name = f"{module}.{self._parts_named[2]}"
        if scheme.symmetric and zeros_name in self._files.names:
            field = "zero_point is false" if self._quantisation.method == "awq" else "symmetric is true"
            raise BadModel(f"tensor {zeros_name} holds zeros, and quantization_config says that there are none: {field}")
        return codes, scales, zeros, scheme.bits, scheme.group

    def _compressed(self, module: str, outputs: int, width: int, group: int, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
        bits, groups = scheme.bits, width // group
        if f"{module}.weight_shape" in self._files.names:
            said = self._taken(f"{module}.weight_shape", (2,), torch.int64, torch.int32).tolist()
            if said != [outputs, width]:
                raise BadModel(f"tensor {module}.weight_shape says {said}; the config asks for {[outputs, width]}")
        words = self._taken(f"{module}.weight_packed", (outputs, -(-width * bits // 32)), torch.int32)
        scales = self._scales(f"{module}.weight_scale", (outputs, groups))
        zeros = None
        if not scheme.symmetric:
            stored = self._taken(f"{module}.weight_zero_point", (-(-outputs * bits // 32), groups), torch.int32)
            zeros = unpack_words(stored.to(self._device).t(), bits)[:, :outputs].t().contiguous()
        return unpack_words(words.to(self._device), bits)[:, :width], scales, zeros

    def _awq(self, module: str, outputs: int, width: int, group: int, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
        if outputs % 8:
            raise BadModel(f"tensor {module}.qweight: {outputs} outputs are no multiple of 8")
        words = self._taken(f"{module}.qweight", (width, outputs // 8), torch.int32)
        scales = self._scales(f"{module}.scales", (width // group, outputs)).t().contiguous()
        zeros = None
        if not scheme.symmetric:
            zeros = self._awq_codes(self._taken(f"{module}.qzeros", (width // group, outputs // 8), torch.int32))
        return self._awq_codes(words), scales, zeros

    def _awq_codes(self, words: Tensor) -> Tensor:
        """[outputs, rows] of words [rows, outputs / 8]."""
        mixed = unpack_words(words.to(self._device), 4).unflatten(1, (-1, 8))
        ordered = torch.empty_like(mixed)
        ordered[..., list(_AWQ_ORDER)] = mixed
        return ordered.flatten(1).t().contiguous()

    def _scales(self, name: str, shape: tuple[int, int]) -> Tensor:
        stored = self._taken(name, shape, *_SCALES)
        if not bool(torch.isfinite(stored).all()):
            raise BadModel(f"tensor {name} holds values that are not finite")
        return stored.to(self._device)

    def _taken(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """A stored tensor, its shape and dtype checked."""
        found = self._files.shape(name)
        if found != shape:
            raise BadModel(f"tensor {name} has shape {list(found)}; the config asks for {list(shape)}")
        stored = self._files.read(name)
        if stored.dtype not in dtypes:
            said = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise BadModel(f"tensor {name} is stored as {str(stored.dtype).removeprefix('torch.')}; expected {said}")
        self._took(name)
        return stored
