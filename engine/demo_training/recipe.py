"""The phases of the demo model's training, as values.

Holds: `Phase`, `RECIPE`, `TOY`. Knows no tensors.

1. A phase lasts `seconds` of its own clock (started after its first steps, so that compilation costs nothing), or exactly `steps` steps
   when steps are given; learning rates follow the share that has passed. A run records its steps, so it can be repeated by steps.
"""

from dataclasses import dataclass

from engine.demo_training.rows import Mix

__all__ = ["RECIPE", "TOY", "Phase"]


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase. Rates are AdamW's; the indexer's parameters use `indexer_factor` times the rate."""

    name: str
    mix: Mix
    sparse: bool
    seconds: float
    rate: float
    rate_end: float
    warm_steps: int = 50
    indexer_factor: float = 1.0
    bias_step: float = 1e-3
    steps: int | None = None

    def __post_init__(self) -> None:
        assert self.rate >= self.rate_end >= 0, f"phase {self.name}: the rate falls"


RECIPE = (
    Phase(
        "dense", Mix(32, 2048, dialogues=0.05, needles=0.15, stretched=0.1, facts=(4, 16), sampled=32),
        sparse=False, seconds=275, rate=2.5e-3, rate_end=5e-4, warm_steps=300,
    ),
    # Early layers of a group share the selection of an indexer that sees little context, so recall has to settle in layers whose own
    # indexer can find the fact: it is taught under selection, in short rows first, where steps are cheap.
    Phase(
        "sparse", Mix(32, 2048, dialogues=0.05, needles=0.3, stretched=0.2, facts=(4, 16), sampled=64),
        sparse=True, seconds=133, rate=1e-3, rate_end=5e-4, indexer_factor=2.5, bias_step=5e-4,
    ),
    Phase(
        "far", Mix(4, 16_384, dialogues=0.05, needles=0.5, stretched=0.5, facts=(16, 64), sampled=192),
        sparse=True, seconds=495, rate=5e-4, rate_end=1e-5, indexer_factor=4.0, bias_step=2e-4,
    ),
)  # fmt: skip

TOY = (
    Phase("dense", Mix(2, 96, dialogues=0.2, needles=0.5, facts=(1, 1), sampled=4), False, 5, 2e-3, 1e-3, warm_steps=2, steps=4),
    Phase("sparse", Mix(1, 96, needles=1.0, stretched=1.0, facts=(1, 1), sampled=8), True, 5, 1e-3, 1e-4, warm_steps=1, steps=2),
)
