"""The measuring commands on a card, with a tiny model: times are there, a step's tape comes from its recording."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from streams import Tape
from streams.tape import Completed, Submitted
from tests.engine.bench.arms import line
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint

pytestmark = pytest.mark.gpu

FLAGS = ("--device", "cuda", "--host-memory", "256MiB", "--hot-rows", "64", "--log-format", "json")
# Widths that kernels take: multiples of what a tensor core eats.
WIDTHS: dict[str, Any] = {
    "hidden_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "index_head_dim": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 16,
    "index_n_heads": 16, "index_topk": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint in bfloat16."""
    config = tiny_config(**WIDTHS)
    return write_checkpoint(random_tensors(config, 5), config, tmp_path_factory.mktemp("small"), dtype=torch.bfloat16)


def test_decode_has_times(model: Path, tmp_path: Path) -> None:
    """Equal outputs, microseconds a step, the loop's own work, the idle share and the device in the JSON."""
    target = tmp_path / "out.json"
    words = ("--history", "synthetic:7:3000", "--new-tokens", "64", "--probe-tokens", "32", "--json", str(target))
    assert line("decode", str(model), *FLAGS, *words) == 0
    written = json.loads(target.read_text())
    assert written["outputs_equal"]
    for arm in written["arms"]:
        assert 0 < arm["step_us"]["p50"] <= arm["step_us"]["p90"]
        assert arm["loop_work_us"] > 0
        assert arm["launch_us"] > 0
        assert arm["between_steps_us"] > 0
        assert 0 <= arm["idle_share"] < 1
    assert written["copy_bytes_per_second"] > 1e11
    assert written["machine"]["device"]["devices"]


def test_append_has_times_and_transient_memory(model: Path, tmp_path: Path) -> None:
    """A time to the first token and the memory that reading took, in both placements."""
    target = tmp_path / "out.json"
    words = ("--history", "synthetic:7:2000", "--append", "600", "--new-tokens", "16", "--json", str(target))
    assert line("append", str(model), *FLAGS, *words) == 0
    for arm in json.loads(target.read_text())["arms"]:
        assert arm["first_token_s"] > 0
        assert arm["transient_bytes"] > 0


def test_sessions_have_times_and_blocks_of_their_own(model: Path, tmp_path: Path) -> None:
    """Companies of one, two and three say what each says alone; times, floors, and what allocator and driver count."""
    target = tmp_path / "out.json"
    words = ("--sessions", "1,2,3", "--rows", "3000", "--new-tokens", "256", "--json", str(target))
    assert line("sessions", str(model), *FLAGS, *words) == 0
    written = json.loads(target.read_text())
    assert (written["complete"], written["trouble"], written["blocks"]["apart"]) == (True, None, True)
    for count, company in enumerate(written["companies"], 1):
        assert company["sessions"] == count
        assert 0 < company["step_us"]["p50"] <= company["step_us"]["p99"]
        assert company["step_over_floor"] > 1
        assert company["tokens_per_second"] >= count * company["slowest_tokens_per_second"]
    held = written["held"]["device"]
    owners = sum(owner["allocated_bytes"] for owner in written["held"]["ledger"]["device"].values())
    assert owners <= held["allocated"] <= held["reserved"] <= held["driver_used"] <= held["driver_total"]


def test_a_streams_waits_have_times(model: Path, tmp_path: Path) -> None:
    """Milliseconds before and while a prompt is read, and the prompt's own speed."""
    target = tmp_path / "out.json"
    words = ("--part", "gap", "--rows", "1000", "--append", "2000", "--usual-tokens", "64", "--json", str(target))
    assert line("sessions", str(model), *FLAGS, *words) == 0
    written = json.loads(target.read_text())
    assert written["append_rows"] == 2_000
    assert written["usual_ms"]["p50"] > 0
    assert written["longest_of_usual"] == pytest.approx(written["during_ms"]["max"] / written["usual_ms"]["p50"])
    assert written["append_tokens_per_second"] > 0


def test_a_step_on_tape_is_the_recordings_own(model: Path, tmp_path: Path) -> None:
    """With graphs the tape is one step: every operation completed, on more than one stream, none before what it comes after."""
    path = tmp_path / "step.tape"
    assert line("step", str(model), *FLAGS, "--history", "synthetic:7:3000", "--out", str(path)) == 0
    tape = Tape.read(path)
    submitted = {record.number: record for record in tape.records if isinstance(record, Submitted)}
    completed = {record.number: record for record in tape.records if isinstance(record, Completed)}
    assert submitted.keys() == completed.keys()
    assert [record.label for record in submitted.values()].count("step.begin") == 1
    assert len({record.stream for record in submitted.values()}) > 1
    slack_ns = 2_000  # two events of one moment may differ by the clock's grain
    for number, record in submitted.items():
        assert all(completed[before].at_ns <= completed[number].started_ns + slack_ns for before in record.after)


def test_the_loop_is_woken(tmp_path: Path) -> None:
    """Waking takes more than nothing, and at the median less than a fifth of a millisecond longer than asking without a loop.

    Whoever else uses the card shifts both.
    """
    target = tmp_path / "out.json"
    assert line("host", "--device", "cuda", "--turns", "50", "--json", str(target)) == 0
    found = json.loads(target.read_text())
    assert found["bare_us"]["p50"] > 0
    assert 0 < found["wake_us"]["p50"] < found["bare_us"]["p50"] + 200
    assert found["round_us"] > 0
    assert len(found["launch_us"]) == 4
    assert all(one["p50"] > 0 for one in found["launch_us"].values())
