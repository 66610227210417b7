"""The two kinds of MLP: dense, and routed experts beside a shared one.

Holds `DenseWeights` and `MoeWeights`, alike in one method. Knows no norm and no residual.

Invariants:
1. Router weight and correction bias are float32 in every model dtype; the bias chooses experts and never weights them.
2. The shared expert has neither gate nor factor.
3. Where experts lie on two devices a part has consecutive ones, and the router of all; the others add nothing to its sum.
Source: model.md, sections 2.7 and 2.8.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.weights import Weight, WeightReader
from kernels.moe import experts, gated_mlp, route

__all__ = ["DenseWeights", "MoeWeights", "chosen_here"]


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A gated MLP of width F."""

    gate: Weight  # [F, H]
    up: Weight  # [F, H]
    down: Weight  # [H, F]

    @classmethod
    def read(cls, reader: WeightReader, prefix: str, hidden: int, width: int) -> Self:
        """Take the weights under `prefix` (ends in `.`). Raises BadModel naming the tensor."""
        gate, up = reader.take_alike([f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"], width, hidden)
        return cls(
            gate=gate,
            up=up,
            down=reader.take_weight(f"{prefix}down_proj.weight", hidden, width),
        )

    def feed(self, y: Tensor) -> Tensor:
        """The MLP's output [T, H] of the normed state y [T, H]."""
        return gated_mlp(y, self.gate, self.up, self.down)

    def feed_routed(self, y: Tensor) -> Tensor:
        """What is left of `feed` beside a shared expert: all, since there is none."""
        return self.feed(y)


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen and weighted."""

    experts_per_token: int
    groups: int
    groups_kept: int
    normalise: bool
    factor: float


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """E routed experts of width F and the shared expert; of a part of them `gate_up` and `down` have fewer."""

    router: Tensor  # [E, H] float32
    bias: Tensor  # [E] float32
    gate_up: Weight  # [E, 2F, H]: gate rows first
    down: Weight  # [E, H, F]
    shared: DenseWeights
    routing: Routing
    first: int = 0  # expert of the first weight here

    @classmethod
    def read(cls, reader: WeightReader, prefix: str, config: ModelConfig) -> Self:
        """Take the weights under `prefix` (ends in `mlp.`). Raises BadModel naming the tensor."""
        gate_up, down = reader.take_experts(f"{prefix}experts.", config.experts, config.expert_width, config.hidden)
        return cls(
            router=reader.take_f32(f"{prefix}gate.weight", config.experts, config.hidden),
            bias=reader.take_exact(f"{prefix}gate.e_score_correction_bias", config.experts),
            gate_up=gate_up,
            down=down,
            shared=DenseWeights.read(reader, f"{prefix}shared_experts.", config.hidden, config.shared_width),
            routing=Routing(
                experts_per_token=config.experts_per_token,
                groups=config.expert_groups,
                groups_kept=config.expert_groups_kept,
                normalise=config.normalise_experts,
                factor=config.expert_factor,
            ),
        )

    def feed(self, y: Tensor) -> Tensor:
        """Routed plus shared output [T, H] of the normed state y [T, H]."""
        return self.feed_routed(y) + self.shared.feed(y)

    def feed_routed(self, y: Tensor) -> Tensor:
        """The routed experts' output alone, [T, H] in y's dtype; the shared expert's may be made beside it."""
        return self.feed_chosen(y, *self.route(y))

    def route(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's experts, int64 [T, slots], and their weights, float32 [T, slots]."""
        return route(
            y,
            self.router,
            self.bias,
            experts_per_token=self.routing.experts_per_token,
            groups=self.routing.groups,
            groups_kept=self.routing.groups_kept,
            normalise=self.routing.normalise,
            factor=self.routing.factor,
        )

    def feed_chosen(self, y: Tensor, expert_of: Tensor, weight_of: Tensor) -> Tensor:
        """The output [T, H] of those of the chosen experts that are here."""
        if self.gate_up.shape[0] < self.router.shape[0]:
            expert_of, weight_of = chosen_here(expert_of, weight_of, self.first, self.gate_up.shape[0])
        return experts(y, expert_of, weight_of, self.gate_up, self.down).to(y.dtype)


def chosen_here(expert_of: Tensor, weight_of: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor]:
    """Choices among all experts as choices among `experts` of them from `first` on: -1 and no weight for the others."""
    local = expert_of - first
    here = (local >= 0) & (local < experts)
    return torch.where(here, local, -1), torch.where(here, weight_of, 0.0)
