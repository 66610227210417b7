"""What the processes of a cluster must agree on, checked by the channels' handshake before anything else is said.

The fingerprint is text that people can compare: a node that is refused names both. It holds everything that decides about the bytes of
rows and of states on the wire, and about the steps that the head asks for; what concerns one machine alone (device, RAM, hot rows) is
not in it.

Invariants:
1. The head is the last of the layer map, with no layers, so that it too has a number of its own.
2. The doctor comes with terms of its own, which every node takes: it must be able to look at nodes that agree on nothing.
"""

from collections.abc import Sequence
from itertools import pairwise

from engine.config import EngineConfig
from engine.errors import BadSetting
from engine.model.config import ModelConfig
from memory.row import key_format
from streams import Terms

__all__ = ["DOCTOR_ASKS", "DOCTOR_TERMS", "fingerprint_of", "head_terms", "layers_of_stages", "stage_terms"]

DOCTOR_TERMS = Terms("forebay doctor 1", ((0, 0), (0, 0)), 0)  # of a node
DOCTOR_ASKS = Terms("forebay doctor 1", ((0, 0), (0, 0)), 1)  # of who looks at it


def layers_of_stages(model: ModelConfig, stages: int, wanted: Sequence[int] = ()) -> tuple[range, ...]:
    """The layers of each stage, one after the other.

    Args: wanted: layers of each; empty: as even as whole selection groups allow, since a cut inside one sends selections along.
    Raises: BadSetting: not so many stages, or not all layers.
    """
    if wanted:
        if len(wanted) != stages or sum(wanted) != model.layers or min(wanted) < 1:
            told = ",".join(map(str, wanted))
            raise BadSetting(f"stage_layers {told}: the model has {model.layers} layers for {stages} stages, each with at least one")
        edges = [sum(wanted[:place]) for place in range(stages + 1)]
    else:
        if not 1 <= stages <= model.layers:
            raise BadSetting(f"{stages} stages of a model of {model.layers} layers: each needs at least one")
        full = [layer for layer in range(model.layers) if model.full_layers[layer]]
        edges = [_edge(place * model.layers / stages, full) for place in range(stages)] + [model.layers]
        if any(one >= other for one, other in pairwise(edges)):  # fewer groups than stages
            edges = [place * model.layers // stages for place in range(stages + 1)]
    return tuple(range(one, other) for one, other in pairwise(edges))


def _edge(wanted: float, full: Sequence[int]) -> int:
    """The start of a selection group nearest to `wanted`."""
    return min(full, key=lambda layer: (abs(layer - wanted), layer))


def fingerprint_of(model: ModelConfig, config: EngineConfig) -> str:
    """At most 256 characters; equal on all processes of a cluster."""
    keys = key_format(config.index_key_format, config.row_format)
    return (
        f"{model.fingerprint()[:16]} rows={config.row_format} keys={keys} dtype={config.dtype} eps={config.latent_norm_eps:g} "
        f"load={config.load_format} placement={config.placement} chunk={config.append_chunk_rows} batch={config.decode_batch_limit} "
        f"context={config.context_max or model.context_max} depth={'auto' if config.draft_depth is None else config.draft_depth}"
    )


def _terms(fingerprint: str, stages: Sequence[range], number: int) -> Terms:
    layers = sum(len(each) for each in stages)
    return Terms(fingerprint, (*((each.start, len(each)) for each in stages), (layers, 0)), number)


def stage_terms(fingerprint: str, stages: Sequence[range], stage: int) -> Terms:
    """Of the node with that stage."""
    assert 0 <= stage < len(stages), f"stage {stage} of {len(stages)}"
    return _terms(fingerprint, stages, stage)


def head_terms(fingerprint: str, stages: Sequence[range]) -> Terms:
    """Of the head."""
    return _terms(fingerprint, stages, len(stages))
