"""This engine beside transformers, on the same weights and the same device: what both answer, and how fast.

Transformers runs with its default cache and with its offloaded one. Its weights come from the engine's own source of tensors, so those
drawn from a seed are the same ones. Runs and compares; prints nothing.

1. Two engines in a narrow dtype part at near ties: agreement is stated beside every ratio and gates nothing. In float32 with float32 rows
   they agree.
2. Both sides answer the same ids greedily, never stopping; the first tokens of an answer are not timed, on either side.
3. Transformers' model is gone before the engine is opened.
"""

import dataclasses
import gc
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from engine.bench.arm import Arm, Load, Watch, run_arm, seeded_prompt
from engine.bench.decode import check_placements
from engine.config import EngineConfig
from engine.device import device_of
from engine.errors import BadSetting
from engine.model.named import NAMED
from engine.model.source import DTYPE_OF, ModelSource, open_source

__all__ = ["Agreement", "Parity", "ParityPlan", "Theirs", "agreement", "as_json", "run_ours", "run_theirs", "table", "transformers_model"]

_VERSION = 1
_CACHES = {"default": None, "offloaded": "offloaded"}
_PREFILL_ROWS = 512  # transformers' index scores of a whole long prompt would not fit
_REDRAW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ParityPlan:
    """What to run. Raises BadSetting."""

    load: Load
    engine: EngineConfig  # its placement is set by each arm
    placements: tuple[str, ...] = ("offload",)

    def __post_init__(self) -> None:
        check_placements(self.placements)
        if self.load.history is not None:
            raise BadSetting("--history: transformers has no made-up rows; give --prompt-tokens")


@dataclass(frozen=True, slots=True)
class Theirs:
    """One answer of transformers. A run with an `error` has no other value that means anything."""

    cache: str
    token_ids: tuple[int, ...] = ()
    first_token_s: float = 0.0
    steps_s: tuple[float, ...] = ()  # one a timed token
    error: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Timed tokens over their time."""
        return len(self.steps_s) / sum(self.steps_s)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of two answers of the same length."""

    leading: int  # tokens that are equal before the first that is not
    share: float  # of all places


@dataclass(frozen=True, slots=True)
class Parity:
    """Everything that ran."""

    theirs: tuple[Theirs, ...]
    ours: tuple[Arm, ...]
    device: torch.device


def agreement(one: tuple[int, ...], other: tuple[int, ...]) -> Agreement:
    """How far two answers agree."""
    assert len(one) == len(other) > 0, f"answers of {len(one)} and {len(other)} tokens"
    equal = [mine == theirs for mine, theirs in zip(one, other, strict=True)]
    return Agreement(equal.index(False) if False in equal else len(equal), sum(equal) / len(equal))


def run_theirs(plan: ParityPlan, watch: Watch) -> tuple[Theirs, ...]:
    """Both caches of transformers. Blocks. Raises BadModel; BadSetting: transformers is not installed, or cannot run this model."""
    device = device_of(plan.engine)
    try:
        model = transformers_model(plan.load.model, plan.engine, device)
        prompt = seeded_prompt(model.config.vocab_size, plan.load.prompt_tokens)
        found = []
        for cache, implementation in _CACHES.items():
            if device.type == "cpu" and implementation is not None:
                found.append(Theirs(cache, error="transformers' offloaded cache needs a device"))
                continue
            found.append(_answer(model, prompt, plan.load, cache, implementation, watch))
        return tuple(found)
    finally:
        model = None
        gc.collect()
        if device.type != "cpu":
            torch.cuda.empty_cache()


async def run_ours(plan: ParityPlan, watch: Watch) -> tuple[Arm, ...]:
    """The engine's arms. Raises ForebayError."""
    return tuple([await run_arm(plan.load, dataclasses.replace(plan.engine, placement=name), watch) for name in plan.placements])  # type: ignore[arg-type]  # checked by the plan


def transformers_model(model: Path, config: EngineConfig, device: torch.device) -> Any:
    """The model as transformers computes it, over the engine's own tensors. Raises BadModel, BadSetting."""
    try:
        from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
    except ImportError as error:
        raise BadSetting(f"parity needs transformers 5.17 or newer (pip install 'transformers>=5.17'): {error}") from error
    source = open_source(model, config.load_format, DTYPE_OF[config.dtype], device)
    raw: Mapping[str, Any] = NAMED.get(str(model)) or json.loads((model / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in raw:
        raise BadSetting("parity needs a checkpoint that is not quantised: transformers refuses some block-FP8 tensors")
    # The engine's latent norms may use another eps than transformers', which is fixed.
    if config.latent_norm_eps != EngineConfig().latent_norm_eps:
        raise BadSetting("--latent-norm-eps must be left out: transformers knows 1e-6 only")
    parsed = GlmMoeDsaConfig(**raw)
    with torch.device("meta"):
        built = GlmMoeDsaForCausalLM(parsed)
    built.load_state_dict(_state(source, device), strict=True, assign=True)
    built.model.rotary_emb = type(built.model.rotary_emb)(parsed).to(device)  # its table is no stored tensor
    return built.eval()


def _state(source: ModelSource, device: torch.device) -> dict[str, Tensor]:
    """Tensors by transformers' names: experts of a layer in two, without the MTP block."""
    tensors, config = source.tensors, source.config

    def read(name: str) -> Tensor:
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else source.dtype
        return tensors.read(name).to(device=device, dtype=dtype)

    state = {}
    for name in tensors.names:
        if not name.startswith(f"model.layers.{config.layers}.") and ".mlp.experts." not in name:
            state[name] = read(name)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        if f"{prefix}.gate_up_proj" in tensors.names:
            state |= {name: read(name) for name in (f"{prefix}.gate_up_proj", f"{prefix}.down_proj")}
        elif f"{prefix}.0.down_proj.weight" in tensors.names:
            kinds = {
                kind: [read(f"{prefix}.{expert}.{kind}_proj.weight") for expert in range(config.experts)] for kind in ("gate", "up", "down")
            }
            state[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(both) for both in zip(kinds["gate"], kinds["up"], strict=True)])
            state[f"{prefix}.down_proj"] = torch.stack(kinds["down"])
    return state


@dataclass(slots=True)
class _Streamer:
    """What `generate` tells of every token; the first call is the prompt's."""

    watch: Any
    at_s: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """Tokens, on the host: they exist."""
        self.at_s.append(time.perf_counter())
        if len(self.at_s) % _REDRAW_TOKENS == 0:
            self.watch(len(self.at_s))

    def end(self) -> None:
        """Nothing is kept back."""


def _answer(model: Any, prompt: tuple[int, ...], load: Load, cache: str, implementation: str | None, watch: Watch) -> Theirs:
    """One answer. What transformers fails with is the run's error."""
    title, tokens = f"transformers, {cache} cache", load.warmup_tokens + load.new_tokens
    streamer = _Streamer(lambda done: watch(title, done, tokens))
    ids = torch.tensor([prompt], device=model.device)
    model.generation_config.eos_token_id = None
    began = time.perf_counter()
    try:
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0, streamer=streamer,
                cache_implementation=implementation, prefill_chunk_size=_PREFILL_ROWS if len(prompt) > _PREFILL_ROWS else None,
            )  # fmt: skip
    except Exception as error:  # theirs: the other cache is measured all the same
        return Theirs(cache, error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    watch(title, tokens, tokens)
    at_s = streamer.at_s[1:]
    steps = tuple(after - before for before, after in zip(at_s[load.warmup_tokens - 1 :], at_s[load.warmup_tokens :], strict=False))
    return Theirs(cache, tuple(out[0, len(prompt) :].tolist()), at_s[0] - began, steps)


def _pairs(found: Parity) -> list[tuple[Theirs, Arm, Agreement, float]]:
    """Every run of theirs that gave an answer with every arm of ours: agreement of the shorter length, and our speed over theirs."""
    pairs = []
    for theirs in found.theirs:
        for ours in found.ours:
            if not theirs.error:
                length = min(len(theirs.token_ids), len(ours.token_ids))
                agreed = agreement(theirs.token_ids[:length], ours.token_ids[:length])
                pairs.append((theirs, ours, agreed, ours.tokens_per_second / theirs.tokens_per_second))
    return pairs


def as_json(plan: ParityPlan, found: Parity, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything; speeds in tokens/s, only from a device."""
    given = dataclasses.asdict(plan)
    given["load"]["model"] = plan.load.model.name
    absolute = found.device.type != "cpu"
    return {
        "version": _VERSION, "kind": "parity",
        "transformers": [
            {
                "cache": one.cache, "error": one.error or None, "tokens": len(one.token_ids),
                "tokens_per_second": one.tokens_per_second if absolute and not one.error else None,
                "first_token_s": one.first_token_s if absolute and not one.error else None,
            }
            for one in found.theirs
        ],
        "engine": [
            {
                "placement": one.placement, "sha256": one.sha256,
                "tokens_per_second": one.tokens_per_second if absolute else None, "first_token_s": one.first_token_s if absolute else None,
            }
            for one in found.ours
        ],
        "pairs": [
            {"cache": theirs.cache, "placement": ours.placement, "speed_over_transformers": ratio, **dataclasses.asdict(agreed)}
            for theirs, ours, agreed, ratio in _pairs(found)
        ],
        "plan": given, "machine": machine,
    }  # fmt: skip


def table(found: Parity) -> Table:
    """A row a pair; a run of theirs that failed has one that says why."""
    drawn = Table(title="beside transformers", title_justify="left")
    absolute = found.device.type != "cpu"
    for title in ("transformers", "engine", *(("their tok/s", "our tok/s") if absolute else ()), "ours/theirs", "agreement"):
        drawn.add_column(title, justify="left" if title in ("transformers", "engine", "agreement") else "right", overflow="fold")
    for theirs, ours, agreed, ratio in _pairs(found):
        speeds = [f"{theirs.tokens_per_second:.2f}", f"{ours.tokens_per_second:.2f}"] if absolute else []
        words = f"{agreed.share:.1%} of tokens, the first {agreed.leading:,} all equal"
        drawn.add_row(f"{theirs.cache} cache", ours.placement, *speeds, f"{ratio:.2f}", words)
    for theirs in found.theirs:
        if theirs.error:
            drawn.add_row(f"{theirs.cache} cache", "", *(("-", "-") if absolute else ()), "-", theirs.error)
    return drawn
