"""Which weights of a checkpoint take which form, and the `quantization_config` that says so.

Knows names (`engine/model/stored.py`) and no contents.
1. Routed experts take the form asked for; every other kind stays as it is unless it is asked for by name. Norms, biases, embedding and
   head always stay.
2. The MTP block stays as it is, or takes the forms of the main layers.
3. Block-FP8 and integers are two methods of config.json: a checkpoint has one.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from engine.errors import BadSetting
from engine.model.quantisation import GROUPS, Quantisation, Scheme, described

__all__ = ["KINDS", "Form", "Recipe"]

Form: TypeAlias = Literal["int4", "int8", "fp8", "bf16"]  # bf16: as it is
KINDS: Mapping[str, str] = {
    "experts": r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    "mlp": r".*\.mlp\.(shared_experts\.)?(gate|up|down)_proj$",
    "attention": r".*\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)$",
    "indexer": r".*\.self_attn\.indexer\.(wq_b|wk|weights_proj)$",
    "router": r".*\.mlp\.gate$",
}
_BITS = {"int4": 4, "int8": 8}


@dataclass(frozen=True, slots=True)
class Recipe:
    """`forms` by kind; a kind that is not in it stays as it is. Raises BadSetting."""

    forms: Mapping[str, Form] = field(default_factory=lambda: {"experts": "int4"})
    group: int = 64  # values that share a scale, in integers
    mtp: bool = False

    def __post_init__(self) -> None:
        for kind, form in self.forms.items():
            assert kind in KINDS, f"no weights are called {kind}"
            if form not in get_args(Form):
                raise BadSetting(f"--{'weights' if kind == 'experts' else kind} must be one of {', '.join(get_args(Form))}, not {form!r}")
        if self.group not in GROUPS:
            raise BadSetting(f"--group must be one of {', '.join(map(str, GROUPS))}, not {self.group}")
        if not self._used:
            raise BadSetting("nothing would be converted: give --weights int4, int8 or fp8")
        if "fp8" in self._used and len(self._used) > 1:
            raise BadSetting(f"fp8 and integers do not go into one checkpoint: asked for {', '.join(sorted(self._used))}")

    @property
    def _used(self) -> frozenset[Form]:
        return frozenset(form for form in self.forms.values() if form != "bf16")

    def form_of(self, module: str, layers: int) -> Form:
        """The form of a module's weight. Args: layers: the model's, without the MTP block."""
        if not self.mtp and module.startswith(f"model.layers.{layers}."):
            return "bf16"
        for kind, pattern in KINDS.items():
            if re.match(pattern, module):
                return self.forms.get(kind, "bf16")
        return "bf16"

    def quantisation(self, layers: int) -> Quantisation:
        """How weights are then stored."""
        if "fp8" in self._used:
            return Quantisation("fp8")
        return Quantisation("compressed-tensors", schemes=self._schemes(), ignored=self._ignored(layers))

    def described(self, layers: int, plain: Iterable[str]) -> dict[str, Any]:
        """The `quantization_config`. Args: plain: modules with weights that stay as they are."""
        if "fp8" in self._used:
            return {
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                "modules_to_not_convert": sorted(plain),
            }  # fmt: skip
        return described(self._schemes(), self._ignored(layers))

    def _schemes(self) -> tuple[Scheme, ...]:
        targets: dict[int, list[str]] = {}
        for kind, form in self.forms.items():
            if form in _BITS:
                targets.setdefault(_BITS[form], []).append(f"re:{KINDS[kind]}")
        return tuple(Scheme(bits, self.group, True, tuple(found)) for bits, found in sorted(targets.items()))

    def _ignored(self, layers: int) -> tuple[str, ...]:
        return ("lm_head",) if self.mtp else ("lm_head", rf"re:model\.layers\.{layers}\..*")
