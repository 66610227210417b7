"""Where settings come from: flags, FOREBAY_* variables and a TOML file, one table for all three.

Holds the table, the parsing of values and the merging of sources. Does not know which command wants which setting, nor what a value does.

1. Flags win over the environment, the environment over the file.
2. A name that is not in the table is refused, with the nearest one that is.
3. The same text means the same value whichever source it came from.
4. A message names the source it is about (`--port`, `FOREBAY_PORT`, `port in forebay.toml`), never the value of a key.
"""

import argparse
import difflib
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.api_keys import ApiKey, parse_keys
from engine.config import ClusterConfig, EngineConfig, ServerConfig
from engine.errors import BadSetting
from engine.node.address import parse_address, parse_addresses

__all__ = ["SETTINGS", "Setting", "Settings", "add_flags", "nearest", "resolve"]

_PREFIX = "FOREBAY_"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(i?)B?|B)?", re.IGNORECASE)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s,]+")
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_integer(text: str) -> int:
    """An integer; underscores as in Python and TOML."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("an integer") from None


def parse_auto_integer(text: str) -> int:
    """An integer, or `auto` as 0."""
    if text == "auto":
        return 0
    try:
        return int(text)
    except ValueError:
        raise ValueError("auto or an integer") from None


def parse_depth(text: str) -> int | None:
    """A depth of drafts: an integer, or `auto` as None."""
    return None if text == "auto" else parse_auto_integer(text)


def parse_size(text: str) -> int:
    """Bytes: `auto` as 0, a plain count, or 512MiB, 4G, 4GiB (binary), 4GB (decimal)."""
    if text == "auto":
        return 0
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("auto or a size like 4GiB")
    number, letter, binary = found.group(1), (found.group(2) or "").upper(), found.group(3)
    decimal = bool(letter) and not binary and text.strip()[-1] in "bB"
    if "." in number and not letter:
        raise ValueError("a whole number of bytes, or a size like 4GiB")
    unit = (1000 if decimal else 1024) ** _POWER[letter]
    return int(float(number) * unit) if "." in number else int(number) * unit


def parse_seconds(text: str) -> float:
    """Seconds, a finite number."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number of seconds") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("a finite number of seconds")
    return value


def parse_age(text: str) -> float:
    """Seconds: `off` as 0, a plain count, or 90m, 12h, 7d."""
    if text == "off":
        return 0.0
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(text[-1:], 0)
    try:
        seconds = parse_seconds(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise ValueError("off, or an age like 90m, 12h or 7d")
    return seconds


def parse_decimal(text: str) -> float:
    """A positive finite number."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number") from None
    if not 0 < value < float("inf"):
        raise ValueError("a positive number")
    return value


def parse_origins(text: str) -> tuple[str, ...]:
    """Origins as browsers send them, with commas between, or `*`."""
    origins = tuple(origin.strip() for origin in text.split(","))
    if not all(_ORIGIN.fullmatch(origin) for origin in origins):
        raise ValueError("* or origins like https://chat.example.org, without a path")
    return origins


def parse_share(text: str) -> float:
    """A share, from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a share from 0 to 1") from None
    if not 0 <= value <= 1:
        raise ValueError("a share from 0 to 1")
    return value


def parse_switch(text: str) -> bool:
    """true or false, 1 or 0."""
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0"):
        return False
    raise ValueError("true or false")


def parse_text(text: str) -> str:
    """Anything but nothing."""
    if not text:
        raise ValueError("some text")
    return text


def parse_peer(text: str) -> str:
    """A device, or none."""
    return "" if text == "none" else parse_text(text)


def choice(*allowed: str, read: Callable[[str], object] = str) -> Callable[[str], object]:
    """A parser of one of `allowed`."""

    def parse(text: str) -> object:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return read(text)

    return parse


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `place` is `engine`, `server`, `cluster` or empty; `field` the name there."""

    name: str
    place: str
    field: str
    parse: Callable[[str], object]
    metavar: str
    meaning: str

    @property
    def flag(self) -> str:
        """`--hot-rows` for hot_rows."""
        return "--" + self.name.replace("_", "-")


def _table(rows: Iterable[tuple[str, str, Callable[[str], object], str, str]]) -> dict[str, Setting]:
    table = {}
    for name, target, parse, metavar, meaning in rows:
        place, _, field = target.rpartition(".")
        table[name] = Setting(name, place, field, parse, metavar, meaning)
    return table


_KEY_FORMAT = choice("auto", "bf16", "f32", "e4m3")

SETTINGS: dict[str, Setting] = _table(
    (
        ("model", "model", parse_text, "DIR", "model directory, Hugging Face layout; with random weights glm-5.3, glm-5.3-slice(-8)"),
        ("demo", "demo", parse_switch, "", "use the model that comes with the package"),
        ("device", "engine.device", choice("auto", "cpu", "cuda"), "auto|cpu|cuda", "where the model runs"),
        ("placement", "engine.placement", choice("offload", "resident"), "offload|resident", "rows in RAM with a hot cache, or device"),
        ("hot_rows", "engine.hot_rows", parse_auto_integer, "auto|N", "hot rows of a session and group; auto: 32,768 and what is to spare"),
        ("host_memory", "engine.host_memory_bytes", parse_size, "auto|SIZE", "RAM for histories, like 4GiB; auto: half of what is free"),
        ("peer", "engine.peer", parse_peer, "none|DEVICE", "a second device that takes half of each layer, like cuda:1"),
        ("micro_batches", "engine.micro_batches", parse_auto_integer, "auto|N", "steps at once of several stages; auto: one a device"),
        ("stages", "engine.stages", parse_text, "N|N,N,...", "stages of this process, as a count or as layers of each"),
        ("mirror_replicas", "engine.mirror_replicas", choice("1", "2", read=int), "1|2", "copies of a history in RAM"),
        ("draft_depth", "engine.draft_depth", parse_depth, "auto|0..7", "tokens drafted a step; auto: by acceptance and load"),
        ("decode_batch_limit", "engine.decode_batch_limit", parse_integer, "N", "sessions that decode together"),
        ("append_chunk_rows", "engine.append_chunk_rows", parse_integer, "N", "rows of a prompt read at once"),
        ("append_gap", "engine.append_gap", parse_decimal, "X", "times as far apart as usual that tokens may come while a prompt is read"),
        ("context_max", "engine.context_max", parse_auto_integer, "auto|N", "tokens a session may hold; auto: the model's own limit"),
        ("sessions_max", "engine.sessions_max", parse_integer, "N", "sessions held at once"),
        ("waiting_max", "engine.waiting_max", parse_integer, "N", "requests that may queue; more get 429"),
        ("default_max_tokens", "engine.default_max_tokens", parse_integer, "N", "new tokens where a request names no limit"),
        ("row_format", "engine.row_format", choice("q8g64", "bf16", "f32"), "q8g64|bf16|f32", "how rows are stored"),
        ("index_key_format", "engine.index_key_format", _KEY_FORMAT, "auto|bf16|f32|e4m3", "how index keys are stored"),
        ("latent_norm_eps", "engine.latent_norm_eps", parse_decimal, "X", "epsilon of the latent norms; some servers use 1e-5"),
        ("dtype", "engine.dtype", choice("auto", "f32", "bf16"), "auto|f32|bf16", "what the model computes in; auto: f32 on the CPU"),
        ("load_format", "engine.load_format", choice("auto", "random"), "auto|random", "random: seeded weights in real shapes"),
        ("graphs", "engine.graphs", choice("auto", "on", "off"), "auto|on|off", "replay decode steps from a recording; auto: on a device"),
        ("prefix_cache", "engine.prefix_cache", choice("auto", "on", "off"), "on|off", "keep histories for prompts that begin like them"),
        ("force_miss_rate", "engine.force_miss_rate", parse_share, "SHARE", "for measuring: made-up selections, this share of them new"),
        ("force_accept_rate", "engine.force_accept_rate", parse_share, "SHARE", "for measuring: drafts accepted, right or not"),
        ("tape", "engine.tape", parse_text, "FILE", "record every operation to this file; see forebay tape"),
        ("host", "server.host", parse_text, "ADDRESS", "address to listen on"),
        ("port", "server.port", parse_integer, "N", "port to listen on; 0: any free one"),
        ("api_key", "server.api_key", parse_text, "KEY", "key that requests must carry; a file does not show in a list of processes"),
        ("api_key_file", "server.api_keys", parse_text, "FILE", "file of keys, one a line: [name:]key [requests=N] [tokens_per_minute=N]"),
        ("metrics_open", "server.metrics_open", parse_switch, "", "answer /metrics without the key"),
        ("body_max", "server.body_bytes_max", parse_size, "SIZE", "largest request body"),
        ("drain_timeout", "server.drain_timeout_s", parse_seconds, "SECONDS", "how long running requests may go on after SIGTERM"),
        ("sessions_dir", "server.sessions_dir", parse_text, "DIR", "keep archives of sessions here, also over a restart"),
        ("sessions_quota", "server.sessions_quota_bytes", parse_size, "SIZE", "most that a key's archives may take of it; auto: no limit"),
        ("session_ttl", "server.session_ttl_s", parse_age, "AGE", "remove a session this long after its last use, like 90m or 7d"),
        ("keep_alive", "server.keep_alive_s", parse_age, "AGE", "a stream without a token yet says so this often, like 30s; off: never"),
        ("request_timeout", "server.request_timeout_s", parse_age, "AGE", "end a request that takes longer, like 10m; off: none"),
        ("cors_origin", "server.origins", parse_origins, "ORIGIN", "pages of these origins may ask, with commas between; *: all"),
        ("responses_memory", "server.responses_bytes", parse_size, "SIZE", "what a key's kept /v1/responses may take; 0: none are kept"),
        ("responses_ttl", "server.responses_ttl_s", parse_age, "AGE", "forget a kept response after this long, like 12h; off: never"),
        ("synthetic_history", "server.synthetic_history", parse_switch, "", "let requests begin with made-up rows, for measuring"),
        ("nodes", "cluster.nodes", parse_addresses, "HOST:PORT,...", "the model lies on these nodes, a stage each in this order"),
        ("cluster", "cluster.cluster", choice("ray"), "ray", "who starts the nodes and keeps them alive (extra forebay[cluster])"),
        ("stage", "cluster.stage", parse_integer, "K", "which of the stages a node has, from 0"),
        ("listen", "cluster.listen", parse_address, "HOST:PORT", "where a node listens; port 0: any free one"),
        ("key_file", "cluster.key_file", parse_text, "FILE", "file of the key that head and nodes share: openssl rand -hex 32"),
        ("peer_timeout", "cluster.peer_timeout_s", parse_seconds, "SECONDS", "a head or node that is silent for so long is lost"),
        ("log_format", "server.log_format", choice("auto", "json", "console"), "auto|json|console", "auto: console on a terminal"),
    )
)  # fmt: skip

_EXCLUSIVE = (("model", "demo"), ("api_key", "api_key_file"))


@dataclass(frozen=True, slots=True)
class Settings:
    """What one command runs with."""

    engine: EngineConfig
    server: ServerConfig
    model: str | None
    demo: bool
    interactive: bool = False  # a person is at the terminal
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def model_directory(self) -> Path:
        """The directory to load. Raises BadSetting when none was named."""
        if self.demo:
            return Path(__file__).resolve().parent / "demo_model"
        if self.model is None:
            raise BadSetting("no model: name a model directory, or use --demo")
        return Path(self.model)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as text, where it came from, and how far down in precedence (0 is highest)."""

    text: str
    source: str
    rank: int


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing when no known name is near."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Give `parser` the flags of these settings. All are stored as text, None where not given."""
    for name in names:
        setting = SETTINGS[name]
        if setting.parse is parse_switch:
            parser.add_argument(setting.flag, dest=name, action="store_const", const="true", help=setting.meaning)
        else:
            parser.add_argument(setting.flag, dest=name, metavar=setting.metavar, help=setting.meaning)


def _check_name(name: str, source: str, spelled: Callable[[str], str]) -> None:
    if name not in SETTINGS:
        raise BadSetting(f"{source} is not a setting{nearest(spelled(name), map(spelled, SETTINGS))}")


def _from_flags(options: Mapping[str, object]) -> dict[str, _Given]:
    given = {name: text for name, text in options.items() if name in SETTINGS and isinstance(text, str)}
    return {name: _Given(text, "MODEL" if name == "model" else SETTINGS[name].flag, 0) for name, text in given.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Given]:
    found = {}
    for variable in sorted(environment):
        if not variable.startswith(_PREFIX) or variable == _PREFIX + "CONFIG":
            continue
        name = variable.removeprefix(_PREFIX).lower()
        _check_name(name, variable, lambda known: _PREFIX + known.upper())
        found[name] = _Given(environment[variable], variable, 1)
    return found


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        with path.open("rb") as file:
            tree: dict[str, object] = tomllib.load(file)
    except OSError as error:
        raise BadSetting(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path} is not TOML: {error}") from error
    found = {}
    for name, value in tree.items():
        source = f"{name} in {path}"
        _check_name(name, source, str)
        if not isinstance(value, str | int | float):
            raise BadSetting(f"{source} must be a plain value, not {type(value).__name__}")
        found[name] = _Given(str(value), source, 2)
    return found


def _settle_rivals(given: dict[str, _Given]) -> None:
    if "demo" in given and given["demo"].text.lower() in ("false", "0"):
        del given["demo"]
    for one, other in _EXCLUSIVE:
        if one not in given or other not in given:
            continue
        if given[one].rank == given[other].rank:
            raise BadSetting(f"{given[one].source} and {given[other].source} exclude each other; give one")
        del given[one if given[one].rank > given[other].rank else other]


def _read_keys(path: str, source: str) -> tuple[ApiKey, ...]:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{source}: cannot read {path}: {getattr(error, 'strerror', None) or 'not text'}") from error
    try:
        return parse_keys(text)
    except ValueError as error:
        raise BadSetting(f"{source}: {path}: {error}") from None


def resolve(options: Mapping[str, object], environment: Mapping[str, str]) -> Settings:
    """Merge the three sources.

    Args: options: by setting name, text or None; `config` names the file, as FOREBAY_CONFIG does. Other keys are the command's own.
    Raises: BadSetting, one line that names the source.
    """
    file = options.get("config") or environment.get(_PREFIX + "CONFIG")
    given = _from_file(Path(str(file))) if file else {}
    given |= _from_environment(environment)
    given |= _from_flags(options)
    _settle_rivals(given)
    values: dict[str, dict[str, Any]] = {"engine": {}, "server": {}, "cluster": {}, "": {}}
    for name, item in given.items():
        setting = SETTINGS[name]
        try:
            values[setting.place][setting.field] = setting.parse(item.text)
        except ValueError as error:
            raise BadSetting(f"{item.source} must be {error}, not {item.text!r}") from None
    own = values[""]
    if "api_keys" in values["server"]:
        keys = _read_keys(values["server"]["api_keys"], given["api_key_file"].source)
        values["server"] |= {"api_keys": keys, "api_key": keys[0].secret}
    return Settings(
        engine=EngineConfig(**values["engine"]), server=ServerConfig(**values["server"]), cluster=ClusterConfig(**values["cluster"]),
        model=own.get("model"), demo=own.get("demo", False), interactive=_interactive(environment),
    )  # fmt: skip


def _interactive(environment: Mapping[str, str]) -> bool:
    """Whether standard output is a terminal and nobody said otherwise by CI."""
    return sys.stdout.isatty() and not environment.get("CI")
