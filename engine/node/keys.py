"""What head, nodes and doctor read of their settings alike: the key from its file, the time-out, the cut into stages."""

from pathlib import Path

from engine.config import ClusterConfig
from engine.errors import BadSetting
from streams import BadKey, ChannelLimits, read_key

__all__ = ["key_of", "limits_of", "stages_setting"]


def key_of(config: ClusterConfig) -> bytes:
    """Raises BadSetting: no file is named, or it holds no key."""
    if not config.key_file:
        raise BadSetting("no key: name the file that all nodes share with --key-file (openssl rand -hex 32 > key)")
    try:
        return read_key(Path(config.key_file))
    except BadKey as error:
        raise BadSetting(f"--key-file: {error}") from error


def limits_of(config: ClusterConfig) -> ChannelLimits:
    """Limits of every channel between processes of a cluster."""
    silence_ms = max(10, int(1000 * config.peer_timeout_s))
    return ChannelLimits(silence_ms_max=silence_ms, beat_ms=max(1, min(1000, silence_ms // 5)))


def stages_setting(stages: str, config: ClusterConfig) -> str:
    """The setting that cuts the model, where it was left out: one stage a node, and the head's."""
    return str(len(config.nodes) + 1) if config.nodes and stages == "1" else stages
