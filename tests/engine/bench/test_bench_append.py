"""`forebay bench append`: the append alone is timed, behind made-up and behind real rows; outputs before times; bad lines."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engine.bench.append import AppendPlan, Appends, as_json, run_appends, table
from engine.bench.arm import Load
from engine.errors import BadSetting, ForebayError
from engine.protocol import SyntheticHistory
from tests.engine.bench.arms import CUDA, FLAGS, arm, line, load, quiet, spoil
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import small


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with an MTP block."""
    config = tiny_config()
    return write_checkpoint(random_tensors(config, 5), config, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("history", "real"), [(SyntheticHistory(3, 300), 0), (None, 130), (None, 0)])
async def test_both_placements_append_alike(model: Path, history: SyntheticHistory | None, real: int) -> None:
    """Behind made-up rows, real rows and none: equal outputs of rehearsal and run, and a time of the append alone."""
    plan = AppendPlan(load(model, prompt_tokens=70, probe_tokens=0, history=history), small(hot_rows=16), real, ("resident", "offload"))
    found = await run_appends(plan, quiet)
    assert found.equal
    in_front = 300 if history is not None else real + 2 if real else 0  # behind a real turn its answer's two tokens
    for one in found.arms:
        once = len(one.token_ids) // 2
        assert one.token_ids[:once] == one.token_ids[once:]  # the rehearsal and the run
        assert once == 10 + (2 if real else 0)
        assert one.context_rows == in_front + 70 + 3
        assert 0 < one.append_s <= one.first_token_s + 1e-6


async def test_filling_a_history_is_not_in_the_time(model: Path) -> None:
    """Behind many made-up rows and before a short prompt, most of the wait for the first token is not the append's."""
    plan = AppendPlan(load(model, prompt_tokens=2, probe_tokens=0, history=SyntheticHistory(3, 3_000)), small(), 0, ("offload",), 0)
    [one] = (await run_appends(plan, quiet)).arms
    assert one.append_s < 0.5 * one.first_token_s


def test_a_fault_in_one_placement_hides_all_times(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Outputs that differ: exit code 1, and neither a ratio nor a time anywhere."""
    spoil(monkeypatch)
    target = tmp_path / "out.json"
    words = ("--append", "20", "--warmup-tokens", "4", "--new-tokens", "12", "--placements", "resident,offload", "--json", str(target))
    assert line("append", str(model), *FLAGS, *words) == 1
    printed = capsys.readouterr().out
    assert "OUTPUTS DIFFER" in printed
    assert "first token" not in printed
    written = json.loads(target.read_text())
    assert (written["outputs_equal"], written["first_token_ratio"], written["decode_loss"]) == (False, None, None)
    assert not {"first_token_s", "tokens_per_second"} & {key for one in written["arms"] for key in one}


def test_equal_outputs_give_ratios(model: Path, tmp_path: Path, capsys: Any) -> None:
    """On a CPU: both ratios, no seconds, and the settings and the machine in the JSON."""
    target = tmp_path / "out.json"
    words = ("--history", "100", "--append", "20", "--warmup-tokens", "4", "--new-tokens", "4", "--rehearsals", "0", "--json", str(target))
    assert line("append", str(model), *FLAGS, *words, "--placements", "resident,offload") == 0
    assert "all outputs equal; time to the first token" in capsys.readouterr().out
    written = json.loads(target.read_text())
    assert (written["version"], written["kind"]) == (1, "append")
    assert written["first_token_ratio"] > 0
    assert written["decode_loss"] < 1
    assert written["plan"]["history_tokens"] == 100
    assert {"date", "device", "source"} <= set(written["machine"])
    assert "first_token_s" not in written["arms"][0]


def test_a_device_shows_times() -> None:
    """With a device: seconds to the first token, speeds, transient memory; ratios are of means over the arms of a placement."""
    resident, offload = arm("resident"), arm("offload", append_s=0.3, steps=(0.002, 0.003))
    found = Appends((resident, offload, dataclasses.replace(offload, append_s=0.4), resident), CUDA)
    plan = AppendPlan(Load(model=Path("m"), prompt_tokens=80, probe_tokens=0), small())
    assert found.first_token_ratio() == pytest.approx(0.35 / 0.4)
    assert found.decode_loss() == pytest.approx(1 - 2.0 / 2.5)
    fields = as_json(plan, found, {})["arms"][1]
    assert fields["first_token_s"] == pytest.approx(0.3)
    assert fields["append_tokens_per_second"] == pytest.approx(80 / 0.3)
    console = Console(file=io.StringIO(), width=200)
    console.print(table(plan, found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.300" in text
    assert "7 MiB" in text
    only = Appends((resident,), CUDA)
    assert only.first_token_ratio() is only.decode_loss() is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no model"),
        (("m", "--append", "0"), "--append must be at least 1"),
        (("m", "--append", "x"), "--append must be an integer"),
        (("m", "--history", "-3"), "--history must be a number of rows"),
        (("m", "--history", "real:1:2"), "--history must be synthetic:SEED:ROWS"),
        (("m", "--rehearsals", "-1"), "--rehearsals must be at least 0"),
        (("m", "--placements", "both"), "--placements must be a list"),
        (("m", "--warmup-tokens", "0"), "--warmup-tokens must be at least 2"),
        (("m", "--probe-tokens", "5"), "--probe-tokens means nothing"),
    ],
)
def test_bad_lines(words: tuple[str, ...], says: str) -> None:
    """What is wrong with the command line is one line with exit code 2, before anything is loaded."""
    with pytest.raises(ForebayError, match=says) as caught:
        line("append", *words)
    assert caught.value.exit_code == 2


def test_plans_check_themselves() -> None:
    """Impossible plans are refused wherever they come from."""
    with pytest.raises(BadSetting, match="--placements"):
        AppendPlan(Load(model=Path("m")), small(), placements=())
