"""What the processes of a cluster must agree on, checked by the channels' handshake before anything else is said.

The fingerprint is text that people can compare: a node that is refused names both. It holds everything that decides about the bytes of
rows and of states on the wire, and about the steps that the head asks for, the time-out of silent peers (who waits for less than the
other's beats would lose it again and again) and Forebay's version too; what concerns one machine alone (device, RAM, hot rows) is not in
it. Weights are compared behind the handshake, by the head (`head.py`).

Invariants:
1. The head has the last stage, and so a number of its own in the layer map like any node.
2. The doctor comes with terms of its own, which every node takes: it must be able to look at nodes that agree on nothing.
"""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from memory.row import key_format
from streams import ChannelLimits, Terms

__all__ = ["DOCTOR_ASKS", "DOCTOR_TERMS", "fingerprint_of", "stage_terms"]

DOCTOR_TERMS = Terms("forebay doctor 1", ((0, 0), (0, 0)), 0)  # of a node
DOCTOR_ASKS = Terms("forebay doctor 1", ((0, 0), (0, 0)), 1)  # of who looks at it


def fingerprint_of(model: ModelConfig, config: EngineConfig, limits: ChannelLimits) -> str:
    """At most 256 characters; equal on all processes of a cluster. Args: limits: of its channels."""
    keys = key_format(config.index_key_format, config.row_format)
    return (
        f"{model.fingerprint()[:16]} rows={config.row_format} keys={keys} dtype={config.dtype} eps={config.latent_norm_eps:g} "
        f"load={config.load_format} placement={config.placement} chunk={config.append_chunk_rows} batch={config.decode_batch_limit} "
        f"context={config.context_max or model.context_max} depth={'auto' if config.draft_depth is None else config.draft_depth} "
        f"timeout={limits.silence_ms_max / 1000:g} forebay={_version()}"
    )


def _version() -> str:
    try:
        return version("forebay")
    except PackageNotFoundError:
        return "unknown"


def stage_terms(fingerprint: str, stages: Sequence[range], stage: int) -> Terms:
    """Of the process with that stage."""
    return Terms(fingerprint, tuple((each.start, len(each)) for each in stages), stage)
