"""Several stages in one process: how a setting cuts a model's layers, and how its stages are opened and closed. Knows no requests.

Invariants:
1. Weights are shared: a stage has views of the model that was loaded whole.
2. Host and device memory are shared out by the layers of each stage, so that all stages hold about as many rows.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

from engine.config import EngineConfig
from engine.errors import BadSetting
from engine.follower import LocalFollower
from engine.joint import JointPlacement
from engine.model.glm import Model, stage_of
from engine.model.split import PeerModel
from engine.stage import Stage, open_stage
from engine.stage_calls import Follower
from memory.ledger import Ledger
from streams import Backend

__all__ = ["close_stages", "cut_layers", "led", "open_stages"]


def cut_layers(setting: str, layers: int) -> tuple[range, ...]:
    """The stages that a setting names: a count of them, or the layers of each with commas between.

    Raises: BadSetting: a model of so many layers cannot be cut so.
    """
    numbers = [int(number) for number in setting.split(",")]
    if len(numbers) == 1:
        stages = numbers[0]
        if stages > layers:
            raise BadSetting(f"stages {setting}: the model has {layers} layers, and a stage has at least one; use {layers} or fewer")
        numbers = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    if sum(numbers) != layers:
        raise BadSetting(f"stages {setting}: these are {sum(numbers)} layers, and the model has {layers}; make them add up to {layers}")
    starts = [sum(numbers[:stage]) for stage in range(len(numbers) + 1)]
    return tuple(range(start, end) for start, end in pairwise(starts))


def open_stages(
    whole: Model, config: EngineConfig, backend: Backend, *, context_max: int, peer: PeerModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Stage:  # fmt: skip
    """The last stage of those that `config.stages` names, with the others before it. Raises as `open_stage`, BadSetting."""
    cuts = cut_layers(config.stages, whole.config.layers)
    if len(cuts) == 1:
        return open_stage(whole, config, backend, context_max=context_max, peer=peer, progress=progress)
    models, ledger = [stage_of(whole, layers) for layers in cuts], Ledger()
    rows_of = [len(model.row_layers) for model in models]
    with ExitStack() as undo:
        stages = []
        for number, model in enumerate(models):
            opened = open_stage(
                model, config, backend, name=f"stage{number}", context_max=context_max, progress=progress, ledger=ledger,
                share=rows_of[number] / sum(rows_of), alone=False, peer=None if peer is None else peer.of(cuts[number]),
            )  # fmt: skip
            undo.callback(opened.close)
            stages.append(opened)
        undo.pop_all()
    return led(stages[-1], [LocalFollower(stage) for stage in stages[:-1]], config)


def led(last: Stage, before: Sequence[Follower], config: EngineConfig) -> Stage:
    """The last stage, with those before it and as many lanes of steps as there are devices, unless `config` says how many."""
    lanes = config.micro_batches or 1 + sum(stage.apart for stage in before)
    return replace(last, before=tuple(before), placement=JointPlacement(last.placement, before), lanes=lanes)


def close_stages(stage: Stage) -> None:
    """Give back what the stages of this process hold; nothing of them is in flight, and every session is closed."""
    for each in (*(one.stage for one in stage.before if isinstance(one, LocalFollower)), stage):
        each.close()
