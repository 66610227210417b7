"""`forebay bench decode` with drafts: the floor of steps of several rows, steps that bring several tokens, texts of all depths compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.bench.decode import DecodePlan, compare
from engine.bench.floor import expected_experts, step_bytes
from engine.errors import BadSetting
from engine.model.bytes import step_weights
from engine.model.glm import load_model
from kernels.layout import BlockLayout
from memory.row import key_layout, row_layout
from tests.engine.bench.arms import FLAGS, line, load, quiet
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import small


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["shared selection", "each selects"])
def shares(request: pytest.FixtureRequest) -> bool:
    """Whether a round of drafts selects once."""
    return bool(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, shares: bool) -> Path:
    """A tiny checkpoint with an MTP block."""
    config = tiny_config(index_share_for_mtp_iteration=shares)
    return write_checkpoint(random_tensors(config, 5), config, tmp_path_factory.mktemp("tiny"))


def test_expected_experts() -> None:
    """One row chooses its own; two of eight from 64 meet once on average; many choose all; a dense model has none."""
    assert expected_experts(64, 8, 1) == 8
    assert expected_experts(64, 8, 2) == 15
    assert expected_experts(64, 8, 4) == 26  # model of the issue: about 27
    assert expected_experts(64, 8, 1000) == 64
    assert expected_experts(8, 8, 3) == 8
    assert expected_experts(0, 0, 4) == 0


def test_a_step_of_four_rows_reads_keys_once_and_the_block_thrice(model: Path, shares: bool) -> None:
    """Keys and picks do not grow with rows; three drafts read block and head three times, its keys once a selection."""
    loaded = load_model(model)
    layout = BlockLayout(row_layout("q8g64", 32, 8), key_layout("bf16", 16), loaded.groups)
    one, four = (step_bytes(loaded, layout, length=1000, depth=depth) for depth in (0, 3))
    assert (four.keys, four.rows) == (one.keys, one.rows)
    assert one.drafts == 0
    assert four.weights == step_weights(loaded, 4, experts=int(8 * (1 - 0.75**4))).total
    tensors = random_tensors(tiny_config(index_share_for_mtp_iteration=shares), 5)
    absent = tuple(f"model.layers.4.mlp.experts.{number}." for number in range(2, 8))  # two of eight experts are read
    block = [tensors[name].numel() for name in tensors if name.startswith("model.layers.4.") and not name.startswith(absent)]
    passes = 3 * 4 * (sum(block) + tensors["lm_head.weight"].numel() + 48)
    selections = 1 if shares else 3
    assert four.drafts == passes + selections * (1000 * 32 + 8 * layout.row.row_bytes)
    assert four.total == four.weights + four.keys + four.rows + four.drafts


async def test_depths_are_compared(model: Path) -> None:
    """Depths 0 and 3 in both placements say one text; every token is in one timed step, and floors are of their own rows."""
    found = await compare(DecodePlan(load(model, new_tokens=12), small(hot_rows=16), depths=(0, 3)), quiet)
    assert found.equal
    assert [(one.depth, one.placement) for one in found.arms] == [(0, "resident"), (0, "offload"), (3, "resident"), (3, "offload")]
    for one in found.arms:
        assert one.tokens_per_step * len(one.steps_s) == pytest.approx(one.timed_tokens or 0)
        assert (one.timed_tokens or 0) >= 12
        assert found.over_undrafted(one) is not None
    assert len(found.arms[0].steps_s) == 12
    assert len(found.arms[2].steps_s) <= 12
    assert found.arms[2].floor.total > found.arms[0].floor.total


async def test_forced_runs_bring_several_tokens_a_step(model: Path) -> None:
    """With acceptance forced to 0.65 a step of four rows brings some 2.3 tokens, the same in both placements."""
    config = small(hot_rows=16, draft_depth=3, force_accept_rate=0.65)
    found = await compare(DecodePlan(load(model, new_tokens=80), config, depths=(3,)), quiet)
    assert found.equal
    one, other = found.arms
    assert 1.8 < one.tokens_per_step < 2.9
    assert one.tokens_per_step == other.tokens_per_step
    assert found.over_undrafted(one) is None


def test_what_has_no_floor_is_refused(model: Path) -> None:
    """No fixed depth, or depths whose texts differ by force: one line that says what to give."""
    with pytest.raises(BadSetting, match="give --draft-depth 0 to 7"):
        DecodePlan(load(model), small(), depths=(None,))
    with pytest.raises(BadSetting, match="one depth of --draft-depths at a time"):
        DecodePlan(load(model), small(force_accept_rate=0.5), depths=(0, 3))


def test_the_command_reads_a_text(model: Path, tmp_path: Path, capsys: Any) -> None:
    """`--draft-depths` and `--prompt-file` of the demo: a row a depth, a ratio to the undrafted, and no text in the JSON."""
    text, target = tmp_path / "text.py", tmp_path / "out.json"
    text.write_text("import os\n\n\ndef parse(path):\n")
    counts = ("--warmup-tokens", "2", "--new-tokens", "8", "--probe-tokens", "0", "--placements", "offload", "--draft-depths", "0,3")
    assert line("decode", "--demo", *FLAGS, *counts, "--prompt-file", str(text), "--json", str(target)) == 0
    assert "offload, 3 drafts" in capsys.readouterr().out
    written = json.loads(target.read_text())
    assert [one["draft_depth"] for one in written["arms"]] == [0, 3]
    assert written["arms"][0]["rate_over_undrafted"] == pytest.approx(1.0)
    assert written["arms"][1]["tokens_per_step"] > 1
    assert "parse" not in target.read_text()
    with pytest.raises(BadSetting, match="--draft-depths"):
        line("decode", "--demo", *FLAGS, "--draft-depths", "0,9")
