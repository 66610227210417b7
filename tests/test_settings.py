"""Settings: one table, three sources, refused unknown names."""

from dataclasses import fields
from pathlib import Path

import pytest

from engine.config import ClusterConfig, EngineConfig, ServerConfig
from engine.errors import BadSetting
from engine.settings import SETTINGS, parse_age, parse_size, resolve


def test_nothing_given_means_the_defaults() -> None:
    """With no source at all the frozen defaults come out."""
    settings = resolve({}, {"HOME": "/nowhere"})
    assert settings.engine == EngineConfig()
    assert settings.server == ServerConfig()
    assert (settings.model, settings.demo) == (None, False)


def test_every_field_of_the_configs_can_be_set() -> None:
    """No field of a config is out of reach of the table, and no row of the table points at a field that is not there."""
    reached = {(setting.place, setting.field) for setting in SETTINGS.values() if setting.place}
    configs = {"engine": EngineConfig, "server": ServerConfig, "cluster": ClusterConfig}
    wanted = {(place, item.name) for place, config in configs.items() for item in fields(config)}
    assert reached == wanted


@pytest.mark.parametrize(
    ("file", "environment", "flags", "port"),
    [
        ("port = 1001", {}, {}, 1001),
        ("port = 1001", {"FOREBAY_PORT": "1002"}, {}, 1002),
        ("port = 1001", {"FOREBAY_PORT": "1002"}, {"port": "1003"}, 1003),
        ("port = 1001", {}, {"port": "1003"}, 1003),
        ("port = 1001", {}, {"port": None}, 1001),
    ],
)
def test_flags_win_over_environment_over_file(
    tmp_path: Path, file: str, environment: dict[str, str], flags: dict[str, str | None], port: int
) -> None:
    """The highest source that names a setting decides."""
    path = tmp_path / "forebay.toml"
    path.write_text(file)
    assert resolve({"config": str(path), **flags}, environment).server.port == port


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    """FOREBAY_CONFIG does what --config does, and --config wins."""
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text('host_memory = "1GiB"\ndemo = true\nlatent_norm_eps = 1e-5')
    other.write_text("port = 7")
    settings = resolve({}, {"FOREBAY_CONFIG": str(one)})
    assert settings.engine.host_memory_bytes == 2**30
    assert settings.engine.latent_norm_eps == 1e-5
    assert settings.demo is True
    assert resolve({"config": str(other)}, {"FOREBAY_CONFIG": str(one)}).engine.host_memory_bytes == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("auto", 0), ("0", 0), ("12345", 12345), ("12345B", 12345), ("4GiB", 4 * 2**30), ("4gib", 4 * 2**30), ("4G", 4 * 2**30),
        ("4GB", 4 * 10**9), ("1.5KiB", 1536), ("2 MiB", 2 * 2**20), ("1T", 2**40), ("9007199254740993K", 9007199254740993 * 1024),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, size: int) -> None:
    """Binary and decimal units, plain counts and auto mean what they say, exactly."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("off", 0), ("0", 0), ("45", 45), ("1.5h", 5400), ("90m", 5400), ("7d", 604_800), ("30s", 30)]
)
def test_ages_are_read(text: str, seconds: float) -> None:
    """A count of seconds, minutes, hours or days, or off."""
    assert parse_age(text) == seconds
    assert resolve({"session_ttl": text}, {}).server.session_ttl_s == seconds


@pytest.mark.parametrize("text", ["", "m", "7w", "for ever", "nan", "infd", "-1h"])
def test_what_is_no_age_is_refused(text: str) -> None:
    """One line that names the flag."""
    with pytest.raises(BadSetting, match="--session-ttl must be off"):
        resolve({"session_ttl": text}, {})


@pytest.mark.parametrize("text", ["", "-1", "4X", "4GiBs", "GiB", "1.5", "4 4", "nan", "1e9", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """A malformed size is refused and not guessed at."""
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("options", "environment", "file", "words"),
    [
        ({}, {"FOREBAY_PROT": "1"}, "", ["FOREBAY_PROT", "did you mean FOREBAY_PORT?"]),
        ({}, {"FOREBAY_ZZZZZZ": "1"}, "", ["FOREBAY_ZZZZZZ is not a setting"]),
        ({}, {}, "hot-rows = 1024", ["hot-rows in ", "did you mean hot_rows?"]),
        ({}, {}, "[server]\nport = 1", ["server in ", "is not a setting"]),
        ({}, {}, "port = [1]", ["port in ", "plain value"]),
        ({}, {}, "port = ", ["is not TOML"]),
        ({}, {}, "port = true", ["port in ", "an integer"]),
        ({}, {}, "port = 80.0", ["port in ", "an integer"]),
        ({"port": "http"}, {}, "", ["--port must be an integer, not 'http'"]),
        ({"port": "70000"}, {}, "", ["port must be between 0 and 65535"]),
        ({"hot_rows": "-1"}, {}, "", ["hot_rows must be at least 0"]),
        ({"draft_depth": "many"}, {}, "", ["--draft-depth", "auto or an integer"]),
        ({"index_key_format": "e5m2"}, {}, "", ["--index-key-format must be one of auto, bf16, f32, e4m3"]),
        ({"placement": "gpu"}, {}, "", ["--placement must be one of offload, resident"]),
        ({}, {"FOREBAY_CLUSTER": "slurm"}, "", ["FOREBAY_CLUSTER must be one of ray"]),
        ({"nodes": "one:7000,two"}, {}, "", ["--nodes must be host:port, like 10.0.0.2:7000"]),
        ({"nodes": "one:1,one:1"}, {}, "", ["--nodes must be addresses that differ"]),
        ({"nodes": "one:0"}, {}, "", ["--nodes must be addresses with a port"]),
        ({"nodes": "a:1", "cluster": "ray"}, {}, "", ["cluster and nodes exclude each other"]),
        ({"peer_timeout": "0"}, {}, "", ["peer_timeout must be between"]),
        ({}, {"FOREBAY_DEMO": "maybe"}, "", ["FOREBAY_DEMO must be true or false"]),
        ({}, {"FOREBAY_MODEL": ""}, "", ["FOREBAY_MODEL"]),
        ({"drain_timeout": "nan"}, {}, "", ["--drain-timeout", "finite"]),
        ({"model": "x", "demo": "true"}, {}, "", ["MODEL and --demo exclude each other"]),
        ({"api_key": "x", "api_key_file": "y"}, {}, "", ["--api-key and --api-key-file exclude each other"]),
        ({"api_key": " padded"}, {}, "", ["api_key must not"]),
        ({"config": "/nowhere/at/all.toml"}, {}, None, ["cannot read /nowhere/at/all.toml"]),
    ],
)
def test_bad_settings_are_one_line_that_names_the_source(
    tmp_path: Path, options: dict[str, str], environment: dict[str, str], file: str | None, words: list[str]
) -> None:
    """A setting that is unknown, malformed or contradictory is refused in one line that says which and where."""
    path = tmp_path / "forebay.toml"
    if file is not None:
        path.write_text(file)
        options = {"config": str(path), **options}
    with pytest.raises(BadSetting) as caught:
        resolve(options, environment)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert caught.value.exit_code == 2


def test_a_higher_source_replaces_its_rival() -> None:
    """--demo wins over FOREBAY_MODEL and a model named on the command line over FOREBAY_DEMO; demo=false rivals nothing."""
    assert resolve({"demo": "true"}, {"FOREBAY_MODEL": "x"}).model is None
    assert resolve({"model": "x"}, {"FOREBAY_DEMO": "1"}).demo is False
    assert resolve({}, {"FOREBAY_MODEL": "x", "FOREBAY_DEMO": "0"}).model == "x"


def test_a_file_of_several_keys(tmp_path: Path) -> None:
    """All of them are taken, the first is what commands send, and a bad line is named without its key."""
    path = tmp_path / "keys"
    path.write_text("anna:k1 requests=2\nk2\n")
    server = resolve({"api_key_file": str(path)}, {}).server
    assert ([key.name for key in server.keys], server.api_key, server.exposed) == (["anna", ""], "k1", False)
    path.write_text("k1\ns3cret requests=none\n")
    with pytest.raises(BadSetting, match=r"--api-key-file: .*keys: line 2: requests must be") as caught:
        resolve({"api_key_file": str(path)}, {})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "origins"),
    [("*", ("*",)), ("https://a.example, http://b:3000", ("https://a.example", "http://b:3000")), ("null", ("null",)),
     ("https://a.example/", None), ("a.example", None), ("https://a,", None)],
)  # fmt: skip
def test_origins(text: str, origins: tuple[str, ...] | None) -> None:
    """Origins are what browsers send; a path or a missing scheme is refused, since it would never match."""
    if origins is None:
        with pytest.raises(BadSetting, match="--cors-origin must be"):
            resolve({"cors_origin": text}, {})
    else:
        assert resolve({"cors_origin": text}, {}).server.origins == origins


def test_the_key_file_is_read_and_the_key_is_never_shown(tmp_path: Path) -> None:
    """The key's last newline goes, an empty file is refused, and no repr shows a key."""
    path = tmp_path / "key"
    path.write_text("s3cret-key\n")
    settings = resolve({"api_key_file": str(path)}, {})
    assert settings.server.api_key == "s3cret-key"
    assert "s3cret" not in repr(settings)
    path.write_text("\n")
    with pytest.raises(BadSetting, match="holds no key"):
        resolve({"api_key_file": str(path)}, {})
    with pytest.raises(BadSetting, match="cannot read"):
        resolve({"api_key_file": str(tmp_path / "none")}, {})


def test_the_model_directory() -> None:
    """--demo means the packaged model, nothing means an error that says what to do."""
    assert (resolve({"demo": "true"}, {}).model_directory() / "config.json").is_file()
    assert resolve({"model": "there"}, {}).model_directory() == Path("there")
    with pytest.raises(BadSetting, match="use --demo"):
        resolve({}, {}).model_directory()
