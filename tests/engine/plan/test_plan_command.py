"""`forebay plan` as people type it: JSON, tables, exit codes, and one line for what is wrong."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from engine.commands import WhileReady
from engine.commands.line import run_line
from engine.commands.plan import tokens_of
from engine.config import ServerConfig
from engine.errors import BadModel, BadSetting
from engine.protocol import EngineFace
from tests.engine.model.tiny_models import packable_config, tiny_config


async def unserved(
    open_engine: Callable[[], AbstractAsyncContextManager[EngineFace]], config: ServerConfig, while_ready: WhileReady | None = None
) -> None:
    raise AssertionError("a plan serves nothing")


def line(*words: str) -> int:
    return run_line(("plan", *words), {}, unserved)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config(dtype="bfloat16")))
    return path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    line(*words, "--json")
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


SMALL = ("--nodes", "1", "--cards", "1", "--context", "2048", "--sessions", "3", "--vram", "4GiB", "--ram", "32GiB")


def test_json_has_what_the_tables_say(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object: what was asked, each stage and node in bytes, what fits and what binds first; 0 when it fits."""
    assert line(str(config_file), *SMALL, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["kind"], found["fits"]) == (1, "plan", True)
    assert found["asked"] | {"tokens": 2048, "sessions": 3, "weights": "bf16", "mtp": True} == found["asked"]
    [stage], [node] = found["stages"], found["nodes"]
    session = dict(stage["session"])
    assert session.pop("card_bytes") == sum(size for name, size in session.items() if name != "host_bytes")
    assert session["host_bytes"] == node["session_row_bytes"] + node["session_key_bytes"]
    room = found["boxes"]["usable_card_bytes"] - stage["weight_bytes"] - stage["append_ring_bytes"]
    assert found["sessions_max"] == min(room // stage["session"]["card_bytes"], node["arena_bytes"] // session["host_bytes"])


def test_tables_and_a_verdict(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json: cards, parts of a session, nodes; then sentences that say what fits and what binds first."""
    assert line(str(config_file), *SMALL) == 0
    out = capsys.readouterr().out
    assert "3 sessions of 2,048 tokens fit" in out
    assert "binds first: VRAM of a card of stage 0" in out
    assert "index keys" in out
    assert "each node's RAM: 32.00 GiB" in out


def test_what_does_not_fit_exits_with_4(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too many sessions: the tables are printed all the same, the verdict says NOT, and the exit code is that of what does not fit."""
    assert line(str(config_file), *SMALL, "--sessions", "1000000") == 4
    assert "do NOT fit" in capsys.readouterr().out


def test_weights_alone_are_said_not_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole model in FP8 on one small card: one sentence with what is missing."""
    assert line("glm-5.3", "--weights", "fp8", "--nodes", "1", "--cards", "1", "--context", "64K", "--sessions", "1") == 4
    assert "the weights alone do not fit: a card of stage 0 has 45.12 GiB for them" in capsys.readouterr().out


def test_the_form_of_weights_is_the_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block-FP8 config is planned in fp8, a packed one by its own schemes, unless --weights is given; an unknown form is refused."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})))
    assert planned(capsys, str(tmp_path), *SMALL)["asked"]["weights"] == "fp8"  # type: ignore[index]
    packed = {"quant_method": "awq", "bits": 4, "group_size": 32}
    path.write_text(json.dumps(packable_config(quantization_config=packed)))
    found = planned(capsys, str(path), *SMALL)
    assert found["asked"]["weights"] == "awq"  # type: ignore[index]
    path.write_text(json.dumps(packable_config()))
    assert found["checkpoint_bytes"] < planned(capsys, str(path), *SMALL)["checkpoint_bytes"] / 2  # type: ignore[operator]
    path.write_text(json.dumps(tiny_config(quantization_config={"quant_method": "gptq"})))
    with pytest.raises(BadModel, match="'gptq' is not supported"):
        line(str(path), *SMALL)
    assert planned(capsys, str(path), *SMALL, "--weights", "int4")["asked"]["weights"] == "int4"  # type: ignore[index]


def test_settings_count(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Placement, row format, hot rows, host memory and the MTP block change what a session takes and what a node has."""
    usual = planned(capsys, str(config_file), *SMALL)

    def changed(*words: str) -> dict[str, int]:
        found = planned(capsys, str(config_file), *SMALL, *words)
        stage = found["stages"][0]["session"]  # type: ignore[index]
        return {**stage, "arena_bytes": found["nodes"][0]["arena_bytes"]}  # type: ignore[index]

    before = usual["stages"][0]["session"]  # type: ignore[index]
    assert changed("--placement", "resident")["host_bytes"] == 0
    assert changed("--placement", "resident")["resident_row_bytes"] > 0
    assert changed("--row-format", "bf16")["host_bytes"] > before["host_bytes"]
    assert changed("--hot-rows", "64")["hot_row_bytes"] == before["hot_row_bytes"] * 64 // 2048
    assert changed("--host-memory", "1GiB")["arena_bytes"] == 1 << 30
    assert changed("--without-mtp")["host_bytes"] < before["host_bytes"]
    assert changed("--mirror-replicas", "2")["host_bytes"] == 2 * before["host_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--context", "1T"), "--context must be a count like"), (("--sessions", "many"), "--sessions must be an integer"),
        (("--vram", "big"), "--vram must be a size"), (("--weights", "int3"), "--weights must be one of"),
        (("--index-key-format", "fp4"), "--index-key-format must be one of"), (("--weight-group", "32"), "belongs to --weights int4"),
        (("--mirror-replicas", "x"), "--mirror-replicas must be 1 or 2"),
        (("--ram", "1TiB", "--host-memory", "1100GiB"), r"--host-memory is 1,100\.00 GiB and a node's --ram 1,024\.00; ask for less"),
        (("--cards", "3", "--cards-per-stage", "2"), "--cards-per-stage 2 does not divide"), (("--card", "3"), "did you mean --cards"),
    ],
)  # fmt: skip
def test_bad_words_are_one_line(words: tuple[str, ...], said: str) -> None:
    """Each is refused by its flag."""
    with pytest.raises(BadSetting, match=said) as refused:
        line("glm-5.3-slice", *words)
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """What is neither a name nor a file."""
    with pytest.raises(BadModel, match="nowhere does not exist"):
        line(str(tmp_path / "nowhere"))


def test_counts_of_tokens() -> None:
    """K and M are binary; a plain count is itself."""
    assert (tokens_of("50000"), tokens_of("128K"), tokens_of("1m")) == (50_000, 131_072, 1_048_576)
