"""`forebay bench decode`: floors from known tensors, outputs before speed, what is said where, and bad lines."""

import dataclasses
import gc
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from engine import engine as engine_module
from engine.bench.arm import Load, run_arm
from engine.bench.decode import Comparison, DecodePlan, added_us, as_json, compare, first_difference, table
from engine.bench.floor import copy_bandwidth, step_bytes
from engine.bench.probe import Probe, Window, busy_ns, step_times
from engine.engine import Engine
from engine.errors import BadRequest, BadSetting, ForebayError
from engine.model.bytes import step_weights
from engine.model.glm import Model, load_model
from engine.protocol import SyntheticHistory
from kernels.layout import BlockLayout
from memory.row import key_layout, row_layout
from streams.device import DeviceBackend
from tests.engine.bench.arms import CUDA, FLAGS, arm, line, load, quiet, spoil
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import small


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with an MTP block."""
    config = tiny_config()
    return write_checkpoint(random_tensors(config, 5), config, tmp_path_factory.mktemp("tiny"))


def test_weight_bytes_of_a_known_model(model: Path) -> None:
    """One row reads every attention, two of eight experts a layer, one embedding row, the MTP block's projections; many read all."""
    loaded = load_model(model)
    hidden, latent, rope, nope, value, heads, query = 48, 32, 8, 16, 16, 4, 32
    attention = query * hidden + query + heads * (nope + rope) * query + (latent + rope) * hidden + latent
    attention += heads * (nope + value) * latent + hidden * heads * value
    indexer = 12 * 16 * query + 16 * hidden + 16 + 16 + 12 * hidden
    norms, dense, expert = 2 * hidden, 3 * 64 * hidden, 3 * 24 * hidden
    router = 8 * hidden + 8
    outer = hidden + 96 * hidden  # final norm and head
    mtp = 2 * hidden + 2 * hidden * hidden + hidden + (latent + rope) * hidden + latent + 16 * hidden + 16 + 16
    base = 4 * (attention + norms) + 3 * indexer + dense + 3 * (router + expert) + outer + mtp
    assert step_weights(loaded, 1).total == 4 * (base + 3 * 2 * expert + hidden)
    assert step_weights(loaded, 2).total == 4 * (base + 3 * 4 * expert + 2 * hidden)
    assert step_weights(loaded, 100).total == 4 * (base + 3 * 8 * expert + 100 * hidden)


def test_step_bytes_count_keys_of_full_layers_and_picked_rows(model: Path) -> None:
    """Three full layers read every key, four layers the picks, of which a short history has fewer."""
    loaded = load_model(model)
    layout = BlockLayout(row_layout("q8g64", 32, 8), key_layout("bf16", 16), loaded.groups)
    found = step_bytes(loaded, layout, length=1000.5)
    assert found.keys == round(3 * 1000.5 * 32)
    assert found.rows == 4 * 8 * layout.row.row_bytes
    assert step_bytes(loaded, layout, length=5).rows == 4 * 5 * layout.row.row_bytes
    assert found.total == found.weights + found.keys + found.rows


def test_a_copy_has_a_bandwidth() -> None:
    """Copying on the CPU moves more than 10 MB and less than 10 TB a second."""
    assert 1e7 < copy_bandwidth(torch.device("cpu"), 1 << 20) < 1e13


def test_busy_time_is_a_union() -> None:
    """Overlaps count once, what lies outside the window not at all, and order does not matter."""
    assert busy_ns([(50, 70), (0, 10), (5, 20), (60, 65), (90, 200), (-5, 1)], 0, 100) == 20 + 20 + 10
    assert busy_ns([], 0, 100) == 0
    assert busy_ns([(-50, -10), (100, 120)], 0, 100) == 0


def test_the_loops_work_is_its_time_less_asking_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the thread's time between begin and end what the backend asked in vain does not count; what it launched is told beside."""
    device = DeviceBackend("cpu")
    probe, thread_ns = Probe(device), iter((1_000, 9_000))
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(thread_ns))
    device.asking_ns, device.launch_ns = 500, 70
    probe.begin()
    device.asking_ns, device.launch_ns = 3_500, 370
    window = probe.end()
    assert (window.loop_work_ns, window.launch_ns) == (8_000 - 3_000, 300)


class _Time:
    """Stands for a device's event: milliseconds on its clock."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, later: "_Time") -> float:
        return later.at_ms - self.at_ms


def test_time_between_steps_is_from_an_end_to_a_begin() -> None:
    """A step lies between its two events, a gap between one step's last and the next one's first."""
    marks = [(1.0, 5.0), (6.0, 10.0), (10.5, 14.5)]
    steps, gaps = step_times([(_Time(front), _Time(behind)) for front, behind in marks])
    assert steps == pytest.approx((4000, 4000, 4000))
    assert gaps == pytest.approx((1000, 500))
    window = Window(1, 1, 0, 0, steps, gaps)
    assert window.between_steps == pytest.approx(1500 / 13500)
    assert Window(1, 1, 0, 0).between_steps is None


@pytest.mark.parametrize("history", [None, SyntheticHistory(3, 200)])
async def test_both_placements_are_compared(model: Path, history: SyntheticHistory | None) -> None:
    """Real engines give equal outputs, the asked number of timed steps, counts of the timed part, and a floor at its middle."""
    plan = DecodePlan(load(model, history=history), small(hot_rows=16), ("resident", "offload", "resident"))
    found = await compare(plan, quiet)
    assert found.equal
    assert [one.placement for one in found.arms] == ["resident", "offload", "resident"]
    for one in found.arms:
        assert len(one.token_ids) == 16
        assert len(one.steps_s) == 6
        assert min(one.steps_s) > 0
        assert one.context_rows == 8 + 3 + (0 if history is None else 200)
        assert one.floor.keys == 3 * (one.context_rows + 3) * 64
        assert one.window is not None
        assert 0 <= one.window.idle_share < 1
    resident, offload, _ = found.arms
    assert resident.hits + resident.misses + resident.ring_reads == 0
    # Each round reads eight picks, three rounds a step; a step may be under way when the counts are taken.
    assert (offload.hits + offload.misses + offload.ring_reads) % 8 == 0
    assert offload.hits + offload.misses + offload.ring_reads >= 6 * 24


async def test_arms_share_their_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison reads its weights once, whatever the number of its arms; each arm has an engine of its own."""
    loads, opened = [], []
    real = engine_module.load_model
    monkeypatch.setattr(engine_module, "load_model", lambda *given, **named: (loads.append(1), real(*given, **named))[1])
    first = Engine.__init__

    def counted(self: Engine, *given: Any, **named: Any) -> None:
        opened.append(1)
        first(self, *given, **named)

    monkeypatch.setattr(Engine, "__init__", counted)
    found = await compare(DecodePlan(load(model), small(), ("resident", "offload", "resident")), quiet)
    assert found.equal
    assert (len(loads), len(opened)) == (1, 3)


async def test_an_arm_leaves_no_weights(model: Path) -> None:
    """When an arm is over, nothing holds its model: the next one has the device to itself."""
    gc.collect()
    before = sum(type(one) is Model for one in gc.get_objects())
    await run_arm(load(model), small(), quiet)
    assert sum(type(one) is Model for one in gc.get_objects()) == before


async def test_without_probe_tokens_nothing_observes(model: Path) -> None:
    """No probe tokens: no window, and just the asked tokens."""
    found = await compare(DecodePlan(load(model, probe_tokens=0), small(), ("offload",)), quiet)
    assert found.arms[0].window is None
    assert len(found.arms[0].token_ids) == 10


async def test_both_devices_of_a_pair_are_counted(model: Path) -> None:
    """A mirror a device takes twice the RAM of one that both read, to the byte, and each device's buffers are said."""
    long = load(model, history=SyntheticHistory(1, 150))
    one, two = [await run_arm(long, small(peer="cpu", mirror_replicas=replicas), quiet) for replicas in (1, 2)]
    assert one.host_bytes > 0
    assert two.host_bytes == 2 * one.host_bytes
    assert one.peer_device_bytes is not None
    assert one.peer_device_bytes > 0
    alone = await run_arm(long, small(), quiet)
    assert (alone.host_bytes, alone.peer_device_bytes) == (one.host_bytes, None)


async def test_a_history_may_fill_the_context_to_the_last_row(model: Path) -> None:
    """History, prompt and answer together may be as long as the context, and not one token longer."""
    config = small(context_max=256)
    fits = load(model, history=SyntheticHistory(1, 256 - 1 - 16), prompt_tokens=1)
    assert (await compare(DecodePlan(fits, config), quiet)).equal
    with pytest.raises(BadRequest, match="exceed the context of 256"):
        await compare(DecodePlan(dataclasses.replace(fits, prompt_tokens=2), config), quiet)


COUNTS = ("--prompt-tokens", "8", "--warmup-tokens", "4", "--new-tokens", "12", "--probe-tokens", "6")


def test_a_fault_in_one_placement_hides_all_speed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Outputs that differ: exit code 1, the first token that differs, and no time in table or JSON."""
    spoil(monkeypatch)
    target = tmp_path / "out.json"
    assert line("decode", str(model), *FLAGS, *COUNTS, "--json", str(target)) == 1
    printed = capsys.readouterr().out
    assert "DIFFERS" in printed
    assert "OUTPUTS DIFFER" in printed
    for word in ("step", "floor", "tok/s", "idle"):
        assert word not in printed.replace("decode steps, one session", "")
    written = json.loads(target.read_text())
    assert written["outputs_equal"] is False
    assert written["first_difference"].startswith("token ")
    assert written["added_us_a_step"] is written["copy_bytes_per_second"] is None
    assert not {"step_us", "tokens_per_second", "step_over_floor", "first_token_s"} & {key for one in written["arms"] for key in one}


def test_equal_outputs_give_ratios_on_a_cpu(model: Path, tmp_path: Path, capsys: Any) -> None:
    """On a CPU the table and the JSON have ratios and no microseconds; the JSON says on what and with which settings."""
    target = tmp_path / "out.json"
    assert line("decode", str(model), *FLAGS, *COUNTS, "--history", "synthetic:3:100", "--json", str(target)) == 0
    printed = capsys.readouterr().out
    assert "all outputs equal; ratios only" in printed
    assert "tok/s" not in printed
    written = json.loads(target.read_text())
    assert (written["version"], written["kind"], written["outputs_equal"]) == (1, "decode", True)
    assert {"machine", "plan"} <= set(written)
    assert {"date", "device", "driver", "versions", "source", "host_settings"} <= set(written["machine"])
    assert written["plan"]["load"]["history"] == {"seed": 3, "rows": 100}
    assert written["plan"]["load"]["model"] == model.name  # no path of this machine
    first = written["arms"][0]
    assert first["step_over_resident"] == 1.0
    assert first["step_over_floor"] > 1
    assert "step_us" not in first


def test_a_device_shows_times() -> None:
    """With a device: microseconds, tokens a second, floor and ratio, loop time, idle share, and what offload adds to a mean step."""
    found = Comparison((arm("resident"), arm("offload", steps=(0.002, 0.004))), 1e6, CUDA)
    fields = as_json(DecodePlan(Load(model=Path("m")), small()), found, {})
    resident, offload = fields["arms"]
    assert fields["added_us_a_step"] == pytest.approx(1000.0)
    assert resident["step_us"] == {
        "mean": pytest.approx(2000),
        "p50": pytest.approx(1000),
        "p90": pytest.approx(3000),
        "max": pytest.approx(3000),
    }
    assert resident["tokens_per_second"] == pytest.approx(500.0)
    assert resident["floor_us"] == pytest.approx(1000.0)
    assert resident["step_over_floor"] == pytest.approx(2.0)
    assert offload["step_over_resident"] == pytest.approx(1.5)
    assert resident["loop_thread_us"] == pytest.approx(100.0)
    assert resident["loop_work_us"] == pytest.approx(100e3 / 1e3 / 2)  # the window holds two steps
    assert resident["idle_share"] == pytest.approx(0.25)
    assert resident["miss_rate"] == pytest.approx(0.01)
    console = Console(file=io.StringIO(), width=200)
    console.print(table(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2000.0" in text
    assert "1.00%" in text
    assert "25.00%" in text


def test_differences_are_named() -> None:
    """The first token that differs, or the lengths; nothing where all agree."""
    one = arm("resident")
    assert first_difference((one, one)) == ""
    assert first_difference((one, arm("offload", ids=(1, 2, 9, 4)))) == "token 2 is 3 with resident and 9 with offload"
    assert first_difference((one, arm("offload", ids=(1, 2, 3)))) == "resident gave 4 tokens and offload 3"
    assert added_us((one, one)) is None
    assert not Comparison((one, arm("offload", ids=(1,))), 1.0, CUDA).equal


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "required: ACTION"),
        (("decod",), "decod"),
        (("decode",), "no model"),
        (("decode", "m", "--new-tokens", "x"), "--new-tokens must be an integer"),
        (("decode", "m", "--new-tokens", "1"), "--new-tokens must be at least 2"),
        (("decode", "m", "--probe-tokens", "2"), "--probe-tokens must be 0 or more than 3"),
        (("decode", "m", "--placements", "resident,ofload"), "not 'ofload'"),
        (("decode", "m", "--placements", ","), "--placements must be a list"),
        (("decode", "m", "--history", "real:1:2"), "--history must be synthetic:SEED:ROWS"),
        (("decode", "m", "--json", "/nowhere/at/all.json"), "cannot write"),
        (("decode", "m", "--placement", "offload"), "--placement means nothing"),
        (("decode", "m", "--draft-depth", "auto"), "give --draft-depth 0 to 7, not auto"),
        (("decode", "m", "--draft-depths", "0,8"), "--draft-depths must be a list of numbers"),
        (("decode", "m", "--draft-depths", "0,3,00"), "--draft-depths 0,3,00 names a depth twice"),
        (("decode", "m", "--prompt-file", "/nowhere/at/all"), "--prompt-file: cannot read"),
        (("decode", "m", "--prompt-file", "x", "--prompt-tokens", "3"), "exclude each other"),
        (("decode", "m", "--hot-rows", "-5"), "hot_rows must be at least 0"),
    ],
)
def test_bad_lines(words: tuple[str, ...], says: str) -> None:
    """What is wrong with the command line is one line with exit code 2, before anything is loaded."""
    with pytest.raises(ForebayError, match=says) as caught:
        line(*words)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_plans_check_themselves() -> None:
    """Impossible counts are refused wherever a plan comes from."""
    with pytest.raises(BadSetting, match="--warmup-tokens"):
        Load(model=Path("m"), warmup_tokens=1)
