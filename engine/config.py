"""Frozen settings of an engine and of the server, built once by the caller (server, command, library user).

Flags, FOREBAY_* variables and the TOML file all feed these fields (`engine/settings.py`); no other module reads the environment.
"""

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Literal

from engine.api_keys import ApiKey
from engine.errors import BadSetting
from engine.node.address import Address

__all__ = ["DRAFT_DEPTH_MAX", "HOT_ROWS", "ClusterConfig", "EngineConfig", "ServerConfig"]

_APPEND_GAP_MIN, _APPEND_GAP_MAX = 1.1, 1000.0  # at 1 nothing would ever be appended beside a step
HOT_ROWS = 32_768  # slots a session and selection group is sure of unless set; it gets no more than it has positions
DRAFT_DEPTH_MAX = 7  # as many drafts as a session's state holds (kernels/layout.py)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Byte sizes are ints; 0 means auto. Raises BadSetting naming the field."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    peer: str = ""  # a second device that takes half of each layer: cpu (tests), cuda:1; "": none
    placement: Literal["offload", "resident"] = "offload"
    hot_rows: int = 0  # hot slots a session and selection group; 0: auto (32,768, and more while device memory is to spare)
    host_memory_bytes: int = 0  # arena; 0: half of what is available
    mirror_replicas: Literal[1, 2] = 1
    draft_depth: int | None = 0  # tokens drafted a step, 0 to 7; None: auto, from acceptance and company. It never changes tokens
    decode_batch_limit: int = 8
    append_chunk_rows: int = 512
    append_gap: float = 2.0  # about how many times as far apart as usual decode steps may be while a prompt is read
    context_max: int = 0  # tokens a session may hold; 0: the model's max_position_embeddings
    sessions_max: int = 64  # sessions held at once
    waiting_max: int = 256  # requests that may queue
    default_max_tokens: int = 32_768
    row_format: Literal["q8g64", "bf16", "f32"] = "q8g64"
    index_key_format: Literal["auto", "bf16", "f32", "e4m3"] = "auto"  # auto: f32 with f32 rows, else bf16
    latent_norm_eps: float = 1e-6  # transformers' value; vLLM and SGLang use 1e-5
    micro_batches: int = 0  # steps in flight at once of several stages; 0: auto, one a device
    stages: str = "1"  # stages of this process: a count, or the layers of each with commas between
    tape: str = ""  # file that every operation is recorded to; "": none
    dtype: Literal["auto", "f32", "bf16"] = "auto"  # auto: f32 on the CPU; on a device bf16, unless the checkpoint stores f32
    load_format: Literal["auto", "random"] = "auto"  # random: seeded weights for a config.json or a named configuration
    graphs: Literal["auto", "on", "off"] = "auto"  # whether decode steps are replays of a recording; auto: on a device
    prefix_cache: Literal["auto", "on", "off"] = "auto"  # keep histories for later prompts that begin alike; auto: a server does
    force_miss_rate: float = 0.0  # for measuring: share of a decode step's picks that is new; 0: the model's own picks
    force_accept_rate: float = 0.0  # for measuring: share of the drafts behind accepted ones that is accepted; 0: those that are right

    def __post_init__(self) -> None:
        at_least = {
            "hot_rows": 0, "host_memory_bytes": 0, "decode_batch_limit": 1, "append_chunk_rows": 1, "context_max": 0,
            "sessions_max": 1, "waiting_max": 0, "default_max_tokens": 1, "micro_batches": 0,
        }  # fmt: skip
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise BadSetting(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not _APPEND_GAP_MIN <= self.append_gap <= _APPEND_GAP_MAX:
            raise BadSetting(f"append_gap must be between {_APPEND_GAP_MIN:g} and {_APPEND_GAP_MAX:g}, not {self.append_gap}")
        for name in ("force_miss_rate", "force_accept_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadSetting(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if self.draft_depth is not None and not 0 <= self.draft_depth <= DRAFT_DEPTH_MAX:
            raise BadSetting(f"draft_depth must be auto or between 0 and {DRAFT_DEPTH_MAX}, not {self.draft_depth}")
        if self.mirror_replicas == 2 and not self.peer:
            raise BadSetting("mirror_replicas 2 needs a second device: give --peer, or use 1")
        if not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", self.stages):
            raise BadSetting(f"stages must be a count like 2, or layers a stage like 20,58, not {self.stages!r}")
        choices = {
            "device": ("auto", "cpu", "cuda"), "placement": ("offload", "resident"), "mirror_replicas": (1, 2),
            "row_format": ("q8g64", "bf16", "f32"), "index_key_format": ("auto", "bf16", "f32", "e4m3"), "load_format": ("auto", "random"),
            "dtype": ("auto", "f32", "bf16"), "graphs": ("auto", "on", "off"),
            "prefix_cache": ("auto", "on", "off"),
        }  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise BadSetting(f"{name} must be one of {', '.join(map(str, allowed))}, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP server. Raises BadSetting naming the field."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_key: str | None = field(default=None, repr=False)  # asked for, without limits; what commands send
    api_keys: tuple[ApiKey, ...] = ()  # of a file; with neither no key is asked for
    body_bytes_max: int = 32 * 2**20  # a million token ids as JSON take about 7 MiB
    drain_timeout_s: float = 30.0  # how long running requests may go on after SIGTERM
    log_format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal
    sessions_dir: str = ""  # directory of archives; "": sessions end with the server
    sessions_quota_bytes: int = 0  # of a key's archives there; 0: none
    session_ttl_s: float = 0.0  # after its last use a session is removed, unless it was made with another age; 0: never
    metrics_open: bool = False  # whether /metrics answers without the key
    keep_alive_s: float = 30.0  # a stream that has no token for so long begins with comments; 0: it waits for its first
    request_timeout_s: float = 0.0  # the longest a request may take; 0: no limit
    origins: tuple[str, ...] = ()  # of pages elsewhere that may ask; "*": any
    responses_bytes: int = 256 * 2**20  # that a key's kept responses take; 0: none are kept
    responses_ttl_s: float = 86_400.0  # how long a response is kept for previous_response_id; 0: for ever
    synthetic_history: bool = False  # whether requests may begin with made-up rows, for measuring

    def __post_init__(self) -> None:
        checks = (
            ("host", bool(self.host), "a name or an address"),
            ("port", 0 <= self.port <= 65535, "between 0 and 65535"),
            ("body_bytes_max", self.body_bytes_max >= 1024, "at least 1024"),
            ("drain_timeout_s", 0 <= self.drain_timeout_s <= 86_400, "between 0 and 86400 seconds"),
            ("sessions_quota_bytes", self.sessions_quota_bytes >= 0, "at least 0"),
            ("session_ttl_s", 0 <= self.session_ttl_s < 2**53, "at least 0 seconds"),
            ("keep_alive_s", 0 <= self.keep_alive_s < 2**53, "at least 0 seconds"),
            ("request_timeout_s", 0 <= self.request_timeout_s < 2**53, "at least 0 seconds"),
            ("responses_bytes", self.responses_bytes >= 0, "at least 0"),
            ("responses_ttl_s", 0 <= self.responses_ttl_s < 2**53, "at least 0 seconds"),
            ("log_format", self.log_format in ("auto", "json", "console"), "one of auto, json, console"),
        )
        for name, holds, wanted in checks:
            if not holds:
                raise BadSetting(f"{name} must be {wanted}, not {getattr(self, name)!r}")
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise BadSetting("api_key must not be empty nor begin or end with white space")

    @property
    def exposed(self) -> bool:
        """Whether other machines may use it without a key."""
        try:
            loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            loopback = self.host == "localhost"
        return not self.keys and not loopback

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys that are taken."""
        return self.api_keys or (() if self.api_key is None else (ApiKey(self.api_key),))


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Settings of a model over several nodes; empty: one process does all. Raises BadSetting naming the field."""

    nodes: tuple[Address, ...] = ()  # where they listen, in order of their stages
    cluster: Literal["", "ray"] = ""  # who places the nodes; "": they are started by somebody else
    stage: int = -1  # of a node; -1: none
    listen: Address | None = None  # of a node
    key_file: str = ""  # of the key that all processes share
    peer_timeout_s: float = 5.0  # a peer of which nothing is heard for so long is lost

    def __post_init__(self) -> None:
        if self.cluster and self.nodes:
            raise BadSetting("cluster and nodes exclude each other: with --cluster ray the nodes are found by Ray; give one")
        if not 0.05 <= self.peer_timeout_s <= 3600:
            raise BadSetting(f"peer_timeout must be between 0.05 and 3600 seconds, not {self.peer_timeout_s:g}")
        if self.stage < -1:
            raise BadSetting(f"stage must be at least 0, not {self.stage}")

    @property
    def several(self) -> bool:
        """Whether the model lies on other processes."""
        return bool(self.nodes or self.cluster)
