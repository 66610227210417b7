"""Frozen settings of an engine, built once by the caller (server, command, library user).

Flags, FOREBAY_* variables and the TOML file all feed these fields (`engine/settings.py`); no other module reads the environment.
"""

from dataclasses import dataclass
from typing import Literal

from engine.errors import BadSetting

__all__ = ["EngineConfig"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Byte sizes are ints; 0 means auto. Raises BadSetting naming the field."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    placement: Literal["offload", "resident"] = "offload"
    hot_rows: int = 0  # hot slots a session and selection group; 0: auto (32,768, at most what the context needs)
    host_memory_bytes: int = 0  # arena; 0: half of what is available
    mirror_replicas: Literal[1, 2] = 1
    draft_depth: int = 0
    decode_batch_limit: int = 8
    append_chunk_rows: int = 512
    context_max: int = 0  # tokens a session may hold; 0: the model's max_position_embeddings
    sessions_max: int = 64  # sessions held at once
    waiting_max: int = 256  # requests that may queue
    default_max_tokens: int = 32_768
    row_format: Literal["q8g64", "bf16", "f32"] = "q8g64"
    index_key_format: Literal["auto", "bf16", "f32"] = "auto"  # auto: f32 with f32 rows, else bf16
    latent_norm_eps: float = 1e-6  # transformers' value; vLLM and SGLang use 1e-5
    load_format: Literal["auto", "random"] = "auto"

    def __post_init__(self) -> None:
        at_least = {
            "hot_rows": 0, "host_memory_bytes": 0, "decode_batch_limit": 1, "append_chunk_rows": 1, "context_max": 0,
            "sessions_max": 1, "waiting_max": 0, "default_max_tokens": 1,
        }  # fmt: skip
        for field, least in at_least.items():
            if getattr(self, field) < least:
                raise BadSetting(f"{field} must be at least {least}, not {getattr(self, field)}")
        if self.draft_depth != 0:
            raise BadSetting("draft_depth must be 0: drafting is not built yet; MTP rows are kept all the same")
        choices = {
            "device": ("auto", "cpu", "cuda"), "placement": ("offload", "resident"), "mirror_replicas": (1, 2),
            "row_format": ("q8g64", "bf16", "f32"), "index_key_format": ("auto", "bf16", "f32"), "load_format": ("auto", "random"),
        }  # fmt: skip
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise BadSetting(f"{field} must be one of {', '.join(map(str, allowed))}, not {getattr(self, field)!r}")
