"""`forebay bench sessions`: companies against sessions alone, blocks of their own, floors, gaps, what it will hold, and bad lines."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from engine.bench import many
from engine.bench.company import Company, Lengths
from engine.bench.floor import StepBytes, step_bytes
from engine.bench.holdings import BlockProof
from engine.bench.many import SessionsPlan, Work, prepared
from engine.bench.parts import as_json, run_part
from engine.bench.sessions import Decoded, differs
from engine.config import EngineConfig
from engine.errors import BadSetting, ForebayError, NotAdmitted
from engine.model.bytes import step_weights
from engine.model.glm import load_model
from kernels.layout import BlockLayout
from memory.rounds import OffloadRounds, Picked, Query
from memory.row import key_layout, row_layout
from tests.engine.bench.arms import FLAGS, line, quiet, spoil, without_drafts
from tests.engine.runs import small

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_drafts(tmp_path_factory.mktemp("tiny"))


def plan(model: Path, **changes: Any) -> SessionsPlan:
    given: dict[str, Any] = {
        "engine": small(hot_rows=16), "sessions": (1, 2), "rows": (200,), "prompt_tokens": 8, "new_tokens": 40, "warmup_tokens": 2,
        "alone_tokens": 3, **changes,
    }  # fmt: skip
    return SessionsPlan(model, **given)


def nothing(found: object) -> None:
    """No JSON is kept meanwhile."""


async def found_of(asked: SessionsPlan, told: Any = nothing) -> tuple[Work, Any]:
    work = prepared(asked)
    return work, await run_part(work, quiet, told)


async def test_companies_say_what_sessions_say_alone(model: Path) -> None:
    """Two histories of their own: equal tokens alone and together, blocks that nobody shares, a window with steps, floors."""
    pieces: list[int] = []
    work, found = await found_of(plan(model), lambda so_far: pieces.append(len(so_far.together)))
    assert (found.trouble, found.complete, pieces) == ("", True, [1, 2])
    assert len({one.token_ids for one in found.alone}) == 2  # seeds differ
    one, two = found.together
    assert two.token_ids[0] == one.token_ids[0]
    assert [len(ids) for ids in two.token_ids] == [40] * 2
    for company in (one, two):
        assert len(company.steps_s) >= 2
        assert min(company.window_tokens) >= 2
        assert sum(company.steps_s) <= company.window_s + 1e-9
        assert company.hits + company.misses > 0
    blocks = -(-(192 + 8 + 40 - 1) // 64)
    assert found.proof == BlockProof((blocks,) * 2, 2 * blocks, 2 * blocks, 0)
    assert one.floor.keys < two.floor.keys < 2 * 1.1 * one.floor.keys
    assert two.floor.rows == 2 * one.floor.rows
    assert found.gain(one) == {"aggregate_over_one": 1.0, "floors": 1.0, "aggregate_of_floors": 1.0}
    assert found.gain(two)["floors"] == pytest.approx(2 * one.floor.total / two.floor.total)
    written = json.loads(json.dumps(as_json(work, found, {})))
    assert written["blocks"]["apart"] is True
    assert written["plan"]["model"] == model.name
    assert written["companies"][1]["step_over_floor"] > 0
    assert "step_us" not in written["companies"][1]  # a CPU has no absolute times
    assert written["held"]["arena"]["references"] == 2 * blocks
    planned, parts = work.session[0], found.parts[0]
    assert (parts.rows, parts.ring, parts.keys) == (planned.hot_rows, planned.ring, planned.keys)
    assert 0 <= planned.maps - parts.maps < 64 * 3  # each buffer is rounded up
    assert 0 <= planned.tables - parts.tables < 64 * 4
    assert work.host_bytes == 2 * planned.host == 2 * blocks * written["held"]["arena"]["block_bytes"]


def spoil_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps of several sessions read rows of zeros: a fault that only company shows."""
    attend = OffloadRounds.attend

    def blind(self: OffloadRounds, of: Picked, compact: Tensor, query: Query) -> Tensor:
        return attend(self, of, compact if compact.shape[0] == 1 else torch.zeros_like(compact), query)

    monkeypatch.setattr(OffloadRounds, "attend", blind)


WORDS = ("--sessions", "2", "--rows", "200", "--prompt-tokens", "8", "--new-tokens", "40", "--warmup-tokens", "2", "--alone-tokens", "16")


@pytest.mark.slow
def test_a_fault_of_company_hides_all_speed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Tokens that company changes: exit code 1, the first of them by name, and no ratio in table or JSON."""
    spoil_company(monkeypatch)
    target = tmp_path / "out.json"
    assert line("sessions", str(model), *FLAGS, *WORDS, "--json", str(target)) == 1
    printed = capsys.readouterr().out
    assert "NOTHING IS SAID OF SPEED: token " in printed
    assert "floor" not in printed
    written = json.loads(target.read_text())
    assert "alone" in written["trouble"]
    assert all("step_over_floor" not in company for company in written["companies"])


@pytest.mark.slow
def test_a_fault_of_one_placement_hides_all_speed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Arms that differ: exit code 1 and no ratio; without the fault equal outputs and a ratio."""
    target = tmp_path / "out.json"
    words = ("--part", "resident", *FLAGS, *WORDS, "--placements", "resident,offload", "--json", str(target))
    assert line("sessions", str(model), *words) == 0
    assert "offload over resident" in capsys.readouterr().out
    written = json.loads(target.read_text())
    assert written["offload_over_resident"] > 0
    assert [arm["placement"] for arm in written["arms"]] == ["resident", "offload"]
    assert written["machine"]["date"]
    spoil(monkeypatch)
    assert line("sessions", str(model), *words) == 1
    written = json.loads(target.read_text())
    assert written["offload_over_resident"] is None
    assert written["trouble"].startswith("token ")


def test_rows_on_the_device_are_constant_or_not(model: Path, tmp_path: Path, capsys: Any) -> None:
    """With a hot cache smaller than both histories packed rows take the same bytes at both; with a larger one they do not."""
    target = tmp_path / "out.json"
    words = (
        "--part",
        "footprint",
        "--rows",
        "150,1500",
        "--prompt-tokens",
        "8",
        "--new-tokens",
        "8",
        "--alone-tokens",
        "4",
        "--json",
        str(target),
    )
    assert line("sessions", str(model), *FLAGS, *words) == 0
    assert "at 2 lengths" in capsys.readouterr().out
    short, long = (look["parts"] for look in json.loads(target.read_text())["looks"])
    assert (short["rows"], short["ring"]) == (long["rows"], long["ring"])
    assert short["maps"] < long["maps"]
    assert short["keys"] < long["keys"]
    owners = json.loads(target.read_text())["looks"][1]["owners"]
    assert abs(sum(owners.values()) - sum(long.values())) < 64 * 16  # each buffer is rounded up
    assert line("sessions", str(model), *(word if word != "16" else "1024" for word in FLAGS), *words) == 1
    assert json.loads(target.read_text())["rows_constant"] is False


@pytest.mark.slow
async def test_the_time_limit_leaves_what_was_measured(model: Path) -> None:
    """After the limit nothing more begins; what there is is told as incomplete, with the blocks that are held."""
    _, found = await found_of(plan(model, sessions=(1, 2), limit_s=1e-9, alone_tokens=1))
    assert (found.complete, found.together) == (False, [])
    assert len(found.alone) == 2
    assert found.proof.apart


@pytest.mark.slow
async def test_sessions_that_never_meet_end_the_run_and_not_what_is_known(model: Path) -> None:
    """Where the first session ends before the last has begun that company is told in one line, and those before it stand."""
    work, found = await found_of(plan(model, new_tokens=8, alone_tokens=1))
    assert found.failed == "2 sessions never decoded all at once within 8 tokens; raise --new-tokens"
    assert (found.complete, len(found.together), found.trouble) == (False, 1, "")
    assert found.said().endswith(found.failed)
    assert as_json(work, found, {})["failed"] == found.failed


def company(sessions: int, ids: tuple[tuple[int, ...], ...], step_s: float, floor: StepBytes) -> Company:
    return Company(
        sessions=sessions, token_ids=ids, first_token_s=(0.1,) * sessions, steps_s=(step_s, 3 * step_s), window_s=4 * step_s,
        window_tokens=(2,) * sessions, longest_s=0.3, stalls=1, hits=99, misses=1, floor=floor,
    )  # fmt: skip


def test_figures_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Microseconds, tokens a second, ratios to floors and to one session; waits over 200 ms; hidden once an output differs."""
    monkeypatch.setattr("engine.bench.sessions.absolute", lambda config: True)
    asked = plan(Path("m"), sessions=(1, 2))
    work = Work(asked, small(), (Lengths(192, 8, 56, 3),), 0, (), 1, 2, 3)
    found = Decoded(work, True, bandwidths=(1e6, 9e5))
    found.alone = [company(1, ((1, 2),), 1.0, StepBytes(1, 1, 1)), company(1, ((3, 4),), 1.0, StepBytes(1, 1, 1))]
    one = company(1, ((1, 2, 5),), 0.001, StepBytes(600, 300, 100))
    two = company(2, ((1, 2, 5), (3, 4, 6)), 0.0015, StepBytes(700, 600, 200))
    found.together = [one, two]
    first, second = found.fields()["companies"]
    assert first["step_us"] == {
        name: pytest.approx(value) for name, value in {"mean": 2000, "p50": 1000, "p90": 3000, "p99": 3000, "max": 3000}.items()
    }
    assert first["step_over_floor"] == pytest.approx(2.0)
    assert first["tokens_per_second"] == pytest.approx(500.0)
    assert second["gain"]["aggregate_over_one"] == pytest.approx(2 / 1.5)
    assert second["gain"]["floors"] == pytest.approx(2 * 1000 / 1500)
    assert second["gain"]["aggregate_of_floors"] == pytest.approx(1.0)
    assert (second["stalls"], second["longest_wait_ms"], second["miss_rate"]) == (1, 300.0, 0.01)
    console = Console(file=io.StringIO(), width=200)
    console.print(found.table())
    assert "3000" in console.file.getvalue()  # type: ignore[attr-defined]
    found.together[1] = dataclasses.replace(two, token_ids=((1, 2, 9), (3, 4, 6)))
    assert found.trouble == "token 2 of session 0 is 5 among 1 and 9 among 2"
    assert "step_us" not in found.fields()["companies"][0]
    found.together = [dataclasses.replace(two, token_ids=((1, 2, 5), (3, 7, 6)))]
    assert found.trouble == "token 1 of session 1 is 4 alone and 7 among 2"
    found.together, found.proof = [one], BlockProof((2, 2), 4, 3, 2)
    assert "2 blocks are shared" in found.trouble


def test_differences_are_found_as_far_as_both_go() -> None:
    """Sessions or tokens that only one has are no difference."""
    assert differs([(1, 2)], [(1, 2, 3), (9,)], ("a", "b")) == ""
    assert differs([(1, 2), (4,)], [(1, 2), (5,)], ("a", "b")) == "token 0 of session 1 is 4 a and 5 b"


def test_floors_of_companies(model: Path) -> None:
    """Weights with the experts that so many rows choose on average, keys and picked rows of every session."""
    loaded = load_model(model)
    layout = BlockLayout(row_layout("q8g64", 32, 8), key_layout("bf16", 16), loaded.groups)
    one, four = (step_bytes(loaded, layout, length=1000.25, sessions=sessions) for sessions in (1, 4))
    assert four == StepBytes(step_weights(loaded, 4, experts=5).total, round(4 * 3 * 1000.25 * 32), 4 * one.rows)


def test_sixteen_million_rows_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slice of eight layers: 82 GiB of rows and 16 of keys in RAM to the byte, 30.2 GiB of weights; refused where RAM is short and
    nobody gave a size."""
    monkeypatch.setattr(many, "available_bytes", lambda: 110 * GIB)
    asked = SessionsPlan(Path("glm-5.3-slice-8"), EngineConfig(device="cpu", load_format="random"))
    work = prepared(asked)
    assert work.lengths == (Lengths(1_047_552 - 64, 64, 1_024, 16),)
    assert work.session[0].host_rows == 8 * 656 * 2**20
    assert work.session[0].host_keys == 4 * 256 * 2**20
    assert work.host_bytes == work.engine.host_memory_bytes == 98 * GIB
    assert work.session[0].keys == GIB
    assert work.engine.decode_batch_limit == 16
    monkeypatch.setattr(many, "available_bytes", lambda: 101 * GIB)
    with pytest.raises(NotAdmitted, match=r"arena of 98\.00 GiB.*fewer --sessions or --rows"):
        prepared(asked)
    given = dataclasses.replace(asked, engine=dataclasses.replace(asked.engine, host_memory_bytes=99 * GIB))
    assert prepared(given).engine.host_memory_bytes == 99 * GIB, "who gives a size knows better: RAM may grow as it is taken"
    half = prepared(dataclasses.replace(asked, sessions=(1, 8)))
    assert half.engine.host_memory_bytes == 49 * GIB


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no model"),
        (("m", "--part", "all"), "--part must be one of decode, resident, footprint, gap"),
        (("m", "--sessions", "1,x"), "--sessions must be a number, or several"),
        (("m", "--sessions", "0"), "--sessions must be counts of at least 1"),
        (("m", "--part", "resident", "--sessions", "1,2"), "--part resident runs one number of them"),
        (("m", "--part", "gap", "--sessions", "2"), "--part gap runs one at a time"),
        (("m", "--rows", "5,6"), "--part decode takes one number"),
        (("m", "--new-tokens", "7"), "--new-tokens must be at least 8"),
        (("m", "--alone-tokens", "2000"), "--alone-tokens 2000 is more than --new-tokens 1024"),
        (("m", "--append", "0"), "--append must be at least 1"),
        (("m", "--limit", "soon"), "--limit must be a number of seconds"),
        (("m", "--limit", "-1"), "--limit must be more than 0"),
        (("m", "--placements", "both"), "--placements must be a list"),
        (("m", "--placement", "offload"), "--placement means nothing"),
        (("m", "--draft-depth", "3"), "leave --draft-depth at 0"),
        (("--demo", "--rows", "64"), "--rows 64 must be more than --prompt-tokens 64"),
        (("--demo", "--rows", "131072"), "131072 and 1024 new tokens are more than the context of 131072"),
        (("--demo", "--part", "gap", "--append", "131072"), "--append 131072 and 64 tokens behind it are more than the context"),
    ],
)
def test_bad_lines(words: tuple[str, ...], says: str) -> None:
    """What is wrong with the command line is one line with exit code 2, before anything is loaded."""
    with pytest.raises(ForebayError, match=says) as caught:
        line("sessions", *words)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_plans_check_themselves() -> None:
    """Impossible plans are refused wherever they come from."""
    with pytest.raises(BadSetting, match="--usual-tokens"):
        plan(Path("m"), usual_tokens=1)
