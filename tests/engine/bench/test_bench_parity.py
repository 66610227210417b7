"""`forebay bench parity`: the same weights on both sides, agreement beside every ratio, and one line where it cannot run."""

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engine.bench.arm import Load
from engine.bench.parity import Agreement, Parity, ParityPlan, Theirs, agreement, as_json, run_theirs, table
from engine.errors import BadSetting, ForebayError
from tests.engine.bench.arms import CUDA, FLAGS, arm, line, quiet
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import small

COUNTS = ("--prompt-tokens", "40", "--warmup-tokens", "4", "--new-tokens", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with an MTP block."""
    config = tiny_config()
    return write_checkpoint(random_tensors(config, 3), config, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("weights", ["auto", "random"])
def test_in_float32_both_answer_alike(model: Path, tmp_path: Path, capsys: Any, weights: str) -> None:
    """Stored weights, and weights from a seed, give transformers' tokens in float32; the offloaded cache says that it needs a device."""
    target = tmp_path / "out.json"
    assert line("parity", str(model), *FLAGS, *COUNTS, "--load-format", weights, "--json", str(target)) == 0
    printed = capsys.readouterr().out
    assert "100.0% of tokens, the first 12 all equal" in printed
    assert "needs a device" in printed
    assert "tok/s" not in printed
    written = json.loads(target.read_text())
    [pair] = written["pairs"]
    assert (pair["cache"], pair["placement"], pair["share"], pair["leading"]) == ("default", "offload", 1.0, 12)
    assert pair["speed_over_transformers"] > 0
    assert written["transformers"][1]["error"] == "transformers' offloaded cache needs a device"
    assert written["engine"][0]["tokens_per_second"] is None
    assert {"date", "source"} <= set(written["machine"])


def test_agreement_counts_places() -> None:
    """Leading tokens up to the first difference, and the share of all places; a later agreement counts for the share alone."""
    assert agreement((1, 2, 3, 4), (1, 2, 9, 4)) == Agreement(2, 0.75)
    assert agreement((1,), (1,)) == Agreement(1, 1.0)
    assert agreement((1, 2), (3, 2)) == Agreement(0, 0.5)


def test_a_device_shows_speeds() -> None:
    """Both speeds and the ratio; a run of transformers that failed has a row that says why."""
    theirs = (Theirs("default", (1, 2, 3), 0.2, (0.01, 0.01)), Theirs("offloaded", error="OutOfMemoryError: no room"))
    found = Parity(theirs, (arm("offload", ids=(1, 2, 3), steps=(0.002, 0.003)),), CUDA)
    console = Console(file=io.StringIO(), width=200)
    console.print(table(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("100.00", "400.00", "4.00", "OutOfMemoryError: no room", "100.0% of tokens"):
        assert word in text
    plan = ParityPlan(Load(model=Path("m"), probe_tokens=0), small())
    fields = as_json(plan, found, {})
    assert fields["transformers"][0]["tokens_per_second"] == pytest.approx(100)
    assert fields["transformers"][1] == {
        "cache": "offloaded", "error": "OutOfMemoryError: no room", "tokens": 0, "tokens_per_second": None, "first_token_s": None,
    }  # fmt: skip
    assert len(fields["pairs"]) == 1


def test_without_transformers_one_line_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No transformers: exit code 2 and what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ForebayError, match="parity needs transformers") as caught:
        line("parity", str(model), *FLAGS, *COUNTS)
    assert caught.value.exit_code == 2


def test_a_run_of_theirs_that_fails_is_an_error_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What generate raises is kept as the run's error."""
    from transformers import GlmMoeDsaForCausalLM

    def fails(*given: Any, **named: Any) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(GlmMoeDsaForCausalLM, "generate", fails)
    plan = ParityPlan(Load(model=model, prompt_tokens=4, probe_tokens=0), small(device="cpu"))
    assert [one.error for one in run_theirs(plan, quiet)] == ["RuntimeError: out of memory", "transformers' offloaded cache needs a device"]


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    """Block-FP8 weights are no common ground: one line says which checkpoint is."""
    config = tiny_config()
    stored = write_checkpoint(random_tensors(config, 3), config, tmp_path / "fp8", fp8=True)
    with pytest.raises(BadSetting, match="not quantised"):
        run_theirs(ParityPlan(Load(model=stored, probe_tokens=0), small(device="cpu")), quiet)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no model"),
        (("m", "--placements", "x"), "--placements must be a list"),
        (("m", "--new-tokens", "1"), "--new-tokens must be at least 2"),
        (("m", "--history", "synthetic:1:2"), "--history means nothing"),
    ],
)
def test_bad_lines(words: tuple[str, ...], says: str) -> None:
    """What is wrong with the command line is one line with exit code 2."""
    with pytest.raises(ForebayError, match=says) as caught:
        line("parity", *words)
    assert caught.value.exit_code == 2


def test_plans_and_settings_that_make_no_comparison_are_refused(model: Path) -> None:
    """Made-up rows and another eps have no counterpart in transformers."""
    from engine.protocol import SyntheticHistory

    load = Load(model=model, probe_tokens=0)
    with pytest.raises(BadSetting, match="--history"):
        ParityPlan(dataclasses.replace(load, history=SyntheticHistory(1, 5)), small())
    with pytest.raises(BadSetting, match="--latent-norm-eps"):
        run_theirs(ParityPlan(load, small(device="cpu", latent_norm_eps=1e-5)), quiet)
