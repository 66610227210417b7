"""Tensors of a checkpoint that nobody stored: drawn from a seed, on the device that will hold them.

Holds `RandomTensors`. For measuring and for tests: speed and exactness need true shapes and weights that matter, not trained ones.

Invariants:
1. A tensor's values follow from the seed, its name and shape, the dtype and the kind of device; never from what else was read, so that
   a stage holds what the whole model holds of its layers.
2. A tensor is drawn in the dtype it is kept in, in its place: no wider copy exists.
3. What the config says is packed is drawn as packed: codes lie evenly around the middle, scales give the width a plain weight has.
4. Widths are such that attention is far from uniform, routing uses every expert and states stay of order 1 through the layers.
Source: model.md, section 7.3, whose recipe this is.
"""

import hashlib
import math
from collections.abc import Collection

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.packed import pack_words
from engine.model.quantisation import Scheme
from engine.model.stored import packed_shapes, stored_shapes

__all__ = ["SEED", "RandomTensors"]

SEED = 1
_BIAS = "e_score_correction_bias"
# Gain over N(0, 1) / sqrt(width), by the end of the name. Small before a latent norm, so that its eps shows.
_GAIN = {"lm_head.weight": 2.0, "q_b_proj.weight": 1.6, "mlp.gate.weight": 1.6, "q_a_proj.weight": 0.03}
_LATENT_GAIN = 0.03


class RandomTensors:
    """Every tensor of a checkpoint of `config`, drawn when it is read.

    Args: mtp: with the MTP block. dtype: of all tensors but the router's bias, which is float32, and packed words.
    Raises: BadModel: groups of a packed weight do not divide its width.
    """

    borrowed = False

    def __init__(self, config: ModelConfig, *, mtp: bool, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._plain = stored_shapes(config, mtp=mtp)
        self._shapes = packed_shapes(self._plain, config.quantisation)
        self._dtype = dtype
        self._generator = torch.Generator(device)

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        assert name in self._shapes, f"no such model has a tensor {name}"
        return self._shapes[name]

    def bytes_of(self, name: str) -> int:
        """Bytes that the weight takes: routers are kept in float32."""
        wide = ".mlp.gate." in name or name.endswith((".weight_packed", ".weight_zero_point"))
        return math.prod(self._shapes[name]) * (4 if wide else self._dtype.itemsize)

    def read(self, name: str) -> Tensor:
        """The tensor, the caller's to keep."""
        shape = self.shape(name)
        digest = hashlib.blake2b(f"{SEED} {name}".encode(), digest_size=8).digest()
        self._generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        module, _, part = name.rpartition(".")
        scheme = self._config.quantisation.scheme_of(module) if part.startswith("weight_") else None
        if scheme is not None:
            return self._packed(f"{module}.weight", part, scheme)
        mean, deviation = self._spread(name, shape)
        dtype = torch.float32 if name.endswith(_BIAS) else self._dtype
        tensor = torch.empty(shape, dtype=dtype, device=self._generator.device).normal_(mean, deviation, generator=self._generator)
        if name.endswith("kv_a_proj_with_mqa.weight"):
            tensor[: self._config.latent] *= _LATENT_GAIN
        return tensor

    def read_ahead(self, names: Collection[str]) -> None:
        """Nothing to do: a tensor is made when it is read."""

    def close(self) -> None:
        """Nothing to do."""

    def _packed(self, name: str, part: str, scheme: Scheme) -> Tensor:
        """A part of the packed weight `name`."""
        (outputs, width), device = self._plain[name], self._generator.device
        middle = 1 << (scheme.bits - 1)
        if part == "weight_shape":
            return torch.tensor([outputs, width])
        if part == "weight_packed":
            codes = torch.empty((outputs, width), dtype=torch.uint8, device=device).random_(1, 2 * middle, generator=self._generator)
            return pack_words(codes, scheme.bits)
        shape = (outputs, width // (scheme.group or width))
        if part == "weight_zero_point":
            zeros = torch.empty(shape, dtype=torch.uint8, device=device).random_(middle - 1, middle + 2, generator=self._generator)
            return pack_words(zeros.t(), scheme.bits).t().contiguous()
        deviation = self._spread(name, (outputs, width))[1] / (((2 * middle - 1) ** 2 - 1) / 12) ** 0.5
        return torch.empty(shape, dtype=self._dtype, device=device).uniform_(0.75 * deviation, 1.25 * deviation, generator=self._generator)

    def _spread(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Mean and standard deviation of a tensor's values."""
        if name.endswith(_BIAS):
            # The band of real models; below zero in a grouped one, where leaving a group out must not depend on the sign.
            return (6.9 if self._config.expert_groups == 1 else -1.0), 0.15
        if name.endswith(".bias"):
            return 0.0, 0.5
        if len(shape) == 1:
            return 1.0, 0.25
        if name == "model.embed_tokens.weight":
            return 0.0, 1.0
        gain = next((gain for end, gain in _GAIN.items() if name.endswith(end)), 1.0)
        return 0.0, gain / shape[1] ** 0.5
