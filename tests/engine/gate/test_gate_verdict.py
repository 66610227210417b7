"""The gate's arithmetic: order, losses, null spread, verdicts, JSON. Pure functions, hostile inputs."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from engine.config import EngineConfig
from engine.errors import BadSetting
from engine.gate import Outcome, Plan, all_pass, as_json, modes_as_json, outcome, parse_history, table, write_json
from engine.gate.prompt import PromptIds
from engine.gate.verdict import Arm, Pair, Run, added_us_a_step, judge, loss, miss_rate, null_spread, order, tokens_a_step
from engine.protocol import SyntheticHistory

NAN = float("nan")
PLAN = Plan(engine=EngineConfig(), model="m", limit=0.01)


def run(arm: Arm, speed: float, sha256: str = "same", *, hits: int = 99, misses: int = 1, error: str = "") -> Run:
    return Run(arm, sha256, speed, hits=hits, misses=misses, error=error)


def pair(resident: float, offload: float, *, number: int = 1, swapped: bool = False, sha256: str = "same", **fields: int) -> Pair:
    runs = (run("resident", resident), run("offload", offload, sha256, **fields))
    return Pair(number, False, (runs[1], runs[0]) if swapped else runs)


def null(first: float, second: float, number: int = 1, sha256: str = "same") -> Pair:
    return Pair(number, True, (run("resident", first), run("resident", second, sha256)))


def test_the_order_alternates_with_null_pairs_between() -> None:
    """Three pairs run A B, null, B A, null, A B; one pair has no null pair between, and what is too many comes last."""
    a, b = ("resident", "offload"), ("offload", "resident")
    none = (True, ("resident", "resident"))
    assert order(3, 2) == [(False, a), none, (False, b), none, (False, a)]
    assert order(1, 0) == [(False, a)]
    assert order(1, 2) == [(False, a), none, none]
    assert order(2, 1) == [(False, a), none, (False, b)]


def test_loss_and_added_time() -> None:
    """50 tokens/s of 100 is half lost and 10 ms a step more; faster is negative; equal is zero."""
    assert loss(100.0, 50.0) == 0.5
    assert added_us_a_step(100.0, 50.0) == pytest.approx(10_000.0)
    assert loss(100.0, 125.0) == pytest.approx(-0.25)
    assert added_us_a_step(100.0, 125.0) == pytest.approx(-2_000.0)
    assert loss(7.0, 7.0) == added_us_a_step(7.0, 7.0) == 0.0


@pytest.mark.parametrize("swapped", [False, True])
def test_a_pair_knows_its_arms_in_either_order(swapped: bool) -> None:
    """The resident run is the reference whichever ran first."""
    verdict = judge(pair(100.0, 98.0, swapped=swapped), 0.01, 0.0)
    assert verdict.loss == pytest.approx(0.02)
    assert not verdict.passes


@pytest.mark.parametrize(
    ("offload", "limit", "spread", "passes"),
    [
        (100.0, 0.0, 0.0, True), (101.0, 0.0, 0.0, True), (75.0, 0.25, 0.0, True), (75.0, 0.0, 0.25, True), (74.9, 0.25, 0.1, False),
        (99.9, 0.0, 0.0, False), (NAN, 0.5, 0.5, False), (100.0, NAN, NAN, False),
    ],
)  # fmt: skip
def test_the_limit_or_the_null_spread(offload: float, limit: float, spread: float, passes: bool) -> None:
    """A loss up to the larger of limit and spread passes, that value included; what is not a number never passes."""
    assert judge(pair(100.0, offload), limit, spread).passes is passes


def test_other_outputs_fail_whatever_the_speed() -> None:
    """A pair ten times as fast fails when its outputs differ, and says so; the speed is reported all the same."""
    verdict = judge(pair(100.0, 1_000.0, sha256="other"), 0.5, 0.5)
    assert not verdict.passes
    assert verdict.reason == "the outputs differ"
    assert verdict.loss == pytest.approx(-9.0)


def test_a_failed_run_fails_its_pair() -> None:
    """A run without a measurement fails its pair with its reason, also when both failed alike and so have equal hashes."""
    broken = Pair(1, False, (run("resident", 0.0, "", error="gone"), run("offload", 0.0, "", error="gone too")))
    verdict = judge(broken, 1.0, 1.0)
    assert not verdict.passes
    assert verdict.reason == "resident: gone; offload: gone too"
    assert not outcome(PLAN, [broken]).passes


@pytest.mark.parametrize(
    ("pairs", "spread"),
    [
        ([], 0.0),
        ([null(50.0, 50.0)], 0.0),
        ([null(50.0, 49.0)], 0.02),
        ([null(49.0, 50.0)], 0.02),
        ([null(9.0, 10.0), null(10.0, 8.0)], 0.2),
    ],
)
def test_the_null_spread_is_the_largest(pairs: list[Pair], spread: float) -> None:
    """The largest difference of a null pair as a share of its faster run, in either order; none gives 0."""
    assert null_spread(pairs) == pytest.approx(spread)


def test_a_failed_null_pair_gives_no_spread() -> None:
    """A null pair with a failed run (speed 0) must not open the limit to everything; it fails the gate."""
    failed = Pair(1, True, (run("resident", 100.0), run("resident", 0.0, "", error="gone")))
    assert null_spread([failed]) == 0.0
    found = outcome(PLAN, [pair(100.0, 60.0), failed])
    assert found.null_spread is None
    assert not found.verdicts[0].passes
    assert not found.passes


@pytest.mark.parametrize(
    ("hits", "misses", "rate", "counts"),
    [(0, 0, None, False), (996, 4, 0.004, False), (995, 5, 0.005, True), (95, 5, 0.05, True), (94, 6, 0.06, False), (0, 3, 1.0, False)],
)
def test_misses_that_count(hits: int, misses: int, rate: float | None, counts: bool) -> None:
    """A pair counts as a measurement with 0.5% to 5% misses of the offloaded run, both included; whether it passes is another matter."""
    verdict = judge(pair(100.0, 100.0, hits=hits, misses=misses), 0.0, 0.0)
    assert verdict.miss_rate == rate == miss_rate(verdict.pair.measured)
    assert verdict.counts is counts
    assert verdict.passes


def test_outputs_are_compared_across_pairs() -> None:
    """Pairs that agree within themselves and not with one another fail the gate; so does a null pair that differs."""
    assert outcome(PLAN, [pair(100.0, 100.0), pair(100.0, 100.0, number=2)]).passes
    other = Pair(2, False, (run("offload", 100.0, "b"), run("resident", 100.0, "b")))
    assert not outcome(PLAN, [pair(100.0, 100.0), other]).passes
    assert all(verdict.passes for verdict in outcome(PLAN, [pair(100.0, 100.0), other]).verdicts)
    assert not outcome(PLAN, [pair(100.0, 100.0), null(100.0, 100.0, sha256="b")]).passes


def test_one_bad_pair_fails_the_gate_and_all_are_reported(tmp_path: Path) -> None:
    """A gate with one pair over its limit fails; JSON and table hold every pair, null pairs too, and JSON has no NaN."""
    pairs = [pair(100.0, 100.0), null(100.0, 99.5), pair(100.0, 90.0, number=2, swapped=True)]
    found = outcome(PLAN, pairs)
    assert [verdict.passes for verdict in found.verdicts] == [True, False]
    assert not found.passes
    target = tmp_path / "out.json"
    target.write_text("old")
    write_json(target, as_json(PLAN, PromptIds((1, 2), "test"), found, {"device": None}))
    written = json.loads(target.read_text())
    assert [one["passes"] for one in written["pairs"]] == [True, False]
    assert [run["arm"] for run in written["pairs"][1]["runs"]] == ["offload", "resident"]
    assert written["null_spread"] == pytest.approx(0.005)
    assert written["plan"]["engine"]["row_format"] == "q8g64"
    assert written["prompt"]["tokens"] == 2
    assert list(tmp_path.iterdir()) == [target]
    console = Console(record=True, width=160)
    console.print(table(found, PLAN))
    drawn = console.export_text()
    assert "1 (A B)" in drawn
    assert "2 (B A)" in drawn
    assert "FAIL: loss 10.000% > 1.000%" in drawn
    assert "null 1" in drawn


def test_no_pairs_do_not_pass() -> None:
    """Nothing measured is no pass."""
    assert not outcome(PLAN, []).passes


@pytest.mark.parametrize(
    "text", ["", "synthetic", "synthetic:1", "synthetic:1:0", "synthetic:-1:5", "synthetic:1:5:6", "real:1:5", "synthetic:x:5"]
)
def test_bad_histories(text: str) -> None:
    """--history is synthetic:SEED:ROWS with at least one row."""
    with pytest.raises(BadSetting, match="--history"):
        parse_history(text)
    assert parse_history("synthetic:7:1047552") == SyntheticHistory(7, 1_047_552)


@pytest.mark.parametrize(
    ("name", "value"),
    [("pairs", 0), ("new_tokens", 1), ("prompt_tokens", 0), ("null_pairs", -1), ("warmup_tokens", -1), ("limit", 1.0), ("limit", NAN)],
)
def test_bad_plans(name: str, value: float) -> None:
    """A plan that could measure nothing names its flag."""
    with pytest.raises(BadSetting, match=f"--{name.replace('_', '-')}"):
        Plan(engine=EngineConfig(), model="m", **{name: value})  # type: ignore[arg-type]


def drafted(arm: Arm, accepted: tuple[int, ...], sha256: str = "a") -> Run:
    return Run(arm, sha256, 100.0, completion_tokens=101, drafts_proposed=(40, 30), drafts_accepted=accepted)


def test_a_pair_must_have_accepted_the_same_drafts() -> None:
    """Equal outputs at equal speed fail where one run accepted other drafts than the other."""
    assert judge(Pair(1, False, (drafted("resident", (30, 20)), drafted("offload", (30, 20)))), 0.1, 0.0).passes
    found = judge(Pair(1, False, (drafted("resident", (30, 20)), drafted("offload", (31, 19)))), 0.1, 0.0)
    assert not found.passes
    assert found.reason == "the drafts differ"


def test_microseconds_a_step_count_steps_not_tokens() -> None:
    """With as many accepted drafts as steps, a step's addition is twice a token's."""
    run = Run("offload", "a", 50.0, completion_tokens=100, drafts_accepted=(30, 20))
    assert tokens_a_step(run) == pytest.approx(2.0)
    assert added_us_a_step(100.0, 50.0, tokens_a_step(run)) == pytest.approx(20_000.0)
    assert tokens_a_step(Run("offload")) == 1.0


def test_depths_must_say_the_same_unless_acceptance_is_forced() -> None:
    """Two depths whose texts differ fail together though each passes alone; with forced acceptance each stands for itself."""

    def mode(depth: int, sha256: str, forced: float = 0.0) -> tuple[Plan, Outcome]:
        plan = Plan(engine=EngineConfig(draft_depth=depth, force_accept_rate=forced), model="m", null_pairs=0)
        return plan, outcome(plan, [Pair(1, False, (drafted("resident", (1, 0), sha256), drafted("offload", (1, 0), sha256)))])

    assert all_pass([mode(0, "a"), mode(3, "a")])
    assert mode(3, "b")[1].passes
    assert not all_pass([mode(0, "a"), mode(3, "b")])
    assert all_pass([mode(0, "a"), mode(3, "b", 0.65)])
    written = modes_as_json([(plan, None, found) for plan, found in (mode(0, "a"), mode(3, "b"))], {})
    assert [one["draft_depth"] for one in written["modes"]] == [0, 3]
    assert not written["passes"]
    assert "modes" not in modes_as_json([(mode(0, "a")[0], None, mode(0, "a")[1])], {})
