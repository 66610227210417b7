"""What a model directory's config.json says, in the project's own names.

Holds `ModelConfig` and its reading rules. Knows no tensors and no other file.

Invariants:
1. Layer 0 has an indexer; every shared layer reuses the nearest full layer before it.
2. Fields that this engine would have to compute differently for are refused by name, never ignored.
3. `head_dim` has no influence: the RoPE width is `qk_rope_head_dim`.
Source: model.md, section 1.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from engine.errors import BadModel
from engine.model.fields import Fields, read_json
from engine.model.quantisation import NOT_QUANTISED, Quantisation

__all__ = ["ModelConfig"]

# Fields with one supported value; an absent field means that value.
_ONLY: dict[str, tuple[object, ...]] = {
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "attention_bias": (False,), "rope_interleave": (True,),
    "indexer_rope_interleave": (True,), "hidden_act": ("silu",), "moe_layer_freq": (1,), "tie_word_embeddings": (False,),
}  # fmt: skip

# Not part of the architecture: two directories that differ only here hold rows of the same kind.
_OUTSIDE_FINGERPRINT = frozenset({"eos_token_ids", "pad_token_id", "context_max", "quantisation", "extra"})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model's shape. Widths and counts are ints; `full_layers[i]` says whether layer i has an indexer of its own."""

    vocabulary: int
    hidden: int
    layers: int  # without the MTP block
    heads: int
    query_latent: int
    latent: int
    nope: int  # query and key width a head without position
    rope: int  # RoPE width, of a head and of the shared key; even
    value: int
    index_heads: int
    index_width: int  # at least `rope`, which is rotated first
    top_k: int  # picks a query row
    dense_width: int
    expert_width: int
    experts: int
    shared_experts: int
    experts_per_token: int
    expert_groups: int
    expert_groups_kept: int
    normalise_experts: bool
    expert_factor: float
    norm_eps: float  # main norms; the latent norms' eps is a setting of the engine
    rope_theta: float
    full_layers: tuple[bool, ...]
    dense_layers: tuple[bool, ...]
    share_mtp_selection: bool  # draft steps after the first keep the selection of the last verified row
    context_max: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantisation: Quantisation = NOT_QUANTISED  # of the stored weights
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)  # fields nobody here reads

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any]) -> Self:
        """Read a model directory's config.json, that file itself, or its parsed contents.

        Raises: BadModel: the file is missing or not JSON, or a field is missing, malformed or unsupported; the line names it.
        """
        raw = dict(source) if isinstance(source, Mapping) else _parsed(Path(source))
        model_type = raw.get("model_type")
        if model_type != "glm_moe_dsa":
            raise BadModel(f"config.json: model_type {model_type!r} is not supported; this engine runs glm_moe_dsa")
        for name, allowed in _ONLY.items():
            if name in raw and raw[name] not in allowed:
                raise BadModel(f"config.json: {name} {raw[name]!r} is not supported, only {allowed[0]!r}")
        reading = Fields(raw)
        layers = reading.count("num_hidden_layers")
        heads = reading.count("num_attention_heads")
        config = cls(
            vocabulary=reading.count("vocab_size"),
            hidden=reading.count("hidden_size"),
            layers=layers,
            heads=heads,
            query_latent=reading.count("q_lora_rank"),
            latent=reading.count("kv_lora_rank"),
            nope=reading.count("qk_nope_head_dim"),
            rope=reading.count("qk_rope_head_dim"),
            value=reading.count("v_head_dim"),
            index_heads=reading.count("index_n_heads"),
            index_width=reading.count("index_head_dim"),
            top_k=reading.count("index_topk"),
            dense_width=reading.count("intermediate_size"),
            expert_width=reading.count("moe_intermediate_size"),
            experts=reading.count("n_routed_experts", "num_local_experts", "num_experts"),
            shared_experts=reading.count("n_shared_experts", default=1),
            experts_per_token=reading.count("num_experts_per_tok"),
            expert_groups=reading.count("n_group", default=1),
            expert_groups_kept=reading.count("topk_group", default=1),
            normalise_experts=reading.flag("norm_topk_prob", default=True),
            expert_factor=reading.number("routed_scaling_factor", default=2.5),
            norm_eps=reading.number("rms_norm_eps", default=1e-5),
            rope_theta=reading.rope_theta(),
            full_layers=reading.full_layers(layers),
            dense_layers=reading.dense_layers(layers),
            share_mtp_selection=reading.flag("index_share_for_mtp_iteration", default=False),
            context_max=reading.count("max_position_embeddings"),
            eos_token_ids=reading.token_ids("eos_token_id"),
            pad_token_id=next(iter(reading.token_ids("pad_token_id")), None),
            quantisation=reading.quantisation(),
            extra=reading.rest(also_read=("model_type", *_ONLY)),
        )
        config._check(raw)
        return config

    def _check(self, raw: Mapping[str, Any]) -> None:
        """Refuse relations between fields that no such model has."""
        group = self.experts // self.expert_groups
        wrong = (
            ("qk_rope_head_dim", self.rope % 2 == 1, f"{self.rope} is odd; rotated pairs need an even width"),
            ("index_head_dim", self.index_width < self.rope, f"{self.index_width} is less than qk_rope_head_dim {self.rope}"),
            ("n_group", self.experts % self.expert_groups != 0, f"{self.expert_groups} does not divide {self.experts} experts"),
            ("n_group", self.expert_groups > 1 and group < 2, f"{self.expert_groups} leaves groups of fewer than two experts"),
            ("topk_group", self.expert_groups_kept > self.expert_groups, f"{self.expert_groups_kept} exceeds n_group {self.expert_groups}"),
            ("num_experts_per_tok", self.experts_per_token > group * self.expert_groups_kept,
             f"{self.experts_per_token} exceeds the {group * self.expert_groups_kept} experts of topk_group groups"),
            ("num_key_value_heads", raw.get("num_key_value_heads", self.heads) != self.heads,
             f"{raw.get('num_key_value_heads')!r} differs from num_attention_heads {self.heads}"),
            ("indexer_types", not self.full_layers[0], "layer 0 must be full: it has no earlier selection to share"),
        )  # fmt: skip
        for name, is_wrong, why in wrong:
            if is_wrong:
                raise BadModel(f"config.json: {name}: {why}")

    @property
    def scale(self) -> float:
        """Softmax scale: the query width counts RoPE dims."""
        return float((self.nope + self.rope) ** -0.5)

    @property
    def shared_width(self) -> int:
        """Width of the shared expert's MLP."""
        return self.expert_width * self.shared_experts

    def groups(self, layers: range | None = None) -> tuple[tuple[int, ...], ...]:
        """Selection groups among `layers` (default: all), in order, as global layer ids; the MTP block is not among them.

        A stage that starts inside a group has a first group without its full layer.
        """
        grouped: list[list[int]] = []
        for layer in layers if layers is not None else range(self.layers):
            if self.full_layers[layer] or not grouped:
                grouped.append([])
            grouped[-1].append(layer)
        return tuple(tuple(group) for group in grouped)

    def local_groups(self, layers: range, *, mtp: bool) -> tuple[tuple[int, ...], ...]:
        """Selection groups of a stage as LOCAL layers; `mtp`: with the MTP block as its last layer and group."""
        local = tuple(tuple(layer - layers.start for layer in group) for group in self.groups(layers))
        return (*local, (len(layers),)) if mtp else local

    def fingerprint(self) -> str:
        """A stable name of the architecture: 32 hex digits, equal for equal fields, whatever wrote the config."""
        architecture = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OUTSIDE_FINGERPRINT}
        return hashlib.sha256(json.dumps(architecture, sort_keys=True).encode()).hexdigest()[:32]


def _parsed(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise BadModel(f"model directory {path} does not exist")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise BadModel(f"{file} is missing")
    return read_json(file)
