"""Single kernels measured: what is wrong has no time, targets are judged, every case runs and agrees at tiny shapes."""

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from engine.bench import constants, kernels, sweep
from engine.bench.cases import TRUE, Case, Made, Shapes, rotated
from engine.bench.timing import Call
from engine.commands.line import run_line
from engine.errors import BadSetting
from kernels.linear import linear
from kernels.linear.tiling import Tiling
from kernels.select import select

CPU = torch.device("cpu")
TINY = Shapes(
    hidden=96, query_latent=40, latent=70, rope=16, heads=4, nope=24, value=20, index_heads=12, index_width=32, picks=33, experts=16,
    experts_per_token=2, expert_width=48, dense_width=80, vocabulary=300, keys=3000, dtype=torch.float32, rotated_bytes=1, calls=2,
)  # fmt: skip


class Counted:
    """A timer that runs what it is given and says what it was told to say."""

    def __init__(self, microseconds: float = 2.0) -> None:
        self.microseconds_told, self.calls = microseconds, 0

    def microseconds(self, calls: Sequence[Call], before: Call | None = None) -> float:
        if before is not None:
            before()
        for call in calls:
            call()
        self.calls += len(calls)
        return self.microseconds_told

    def launches(self, call: Call) -> int | None:
        call()
        return 3


def case_of(difference: float, **given: Any) -> Case:
    return Case("group", "name", 1000, 0.5, lambda device: Made((lambda: None,), lambda: difference), **given)


def measured(case: Case, microseconds: float = 2.0) -> kernels.Measured:
    (found,) = kernels.measure([case], CPU, Counted(microseconds))
    return found


@pytest.mark.parametrize("difference", [0.6, math.inf, math.nan])
def test_a_wrong_case_has_no_time(difference: float) -> None:
    """A difference past the bound, or NaN, gives no time, no share and no verdict, and says so in table and JSON."""
    found = measured(case_of(difference, target_us=1e9))
    assert not found.equal
    assert found.microseconds is None
    assert found.share(1e9) is None
    assert found.reached(1e9) is None
    console = Console(file=io.StringIO(), width=200)
    console.print(kernels.table([found], 1e12, 1.0))
    assert "WRONG" in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    written = json.loads(json.dumps(kernels.as_json([found], 1e12, 1.0, {}), allow_nan=math.isinf(difference)))
    assert written["cases"][0]["equal"] is False


@pytest.mark.parametrize(
    ("given", "microseconds", "wanted"),
    [
        ({"target_us": 2.0}, 2.0, True),
        ({"target_us": 2.0}, 2.1, False),
        ({"target_share": 0.5}, 2.0, True),
        ({"target_share": 0.51}, 2.0, False),
        ({}, 2.0, None),
    ],
)
def test_targets_are_judged(given: dict[str, float], microseconds: float, wanted: bool | None) -> None:
    """1,000 bytes in 2 us are half of a bandwidth of 1 GB/s; a target in microseconds is a limit."""
    assert measured(case_of(0.5, **given), microseconds).reached(1e9) is wanted


def test_every_case_agrees_at_tiny_shapes() -> None:
    """Every case of the true list, made tiny on the CPU, runs as often as its graph would and is within its bound."""
    timer = Counted()
    cases = kernels.all_cases(TINY)
    done: list[tuple[int, int]] = []
    found = list(kernels.measure(cases, CPU, timer, lambda *step: done.append(step)))
    assert [one.name for one in found if not one.equal] == []
    assert done[-1] == (len(cases), len(cases))
    assert len({(case.group, case.name) for case in cases}) == len(cases)
    assert timer.calls >= 2 * len(cases) - 3
    json.dumps(kernels.as_json(found, 1e12, 1.0, {}), allow_nan=False)


def test_a_broken_kernel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that lose a value, and a selection one place off, are found wrong."""
    from engine.bench import attention, products

    whole, chosen = linear, select

    def lossy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = whole(x, weight)
        out[-1, -1] = 0
        return out

    def shifted(scores: torch.Tensor, first: torch.Tensor, last: torch.Tensor, k: int, out: torch.Tensor) -> None:
        chosen(scores, first, last, k, out)
        out[-1, 0] += 1

    monkeypatch.setattr(products, "linear", lossy)
    monkeypatch.setattr(attention, "select", shifted)
    cases = kernels.chosen(kernels.all_cases(TINY), "linear query,select")
    assert not any(one.equal for one in kernels.measure(cases, CPU, Counted()))


def test_only_names_cases() -> None:
    """Words pick by group or name; a word nothing has is refused with the groups there are."""
    cases = kernels.all_cases(TINY)
    assert {case.group for case in kernels.chosen(cases, "moe, norm")} == {"moe", "norm"}
    assert kernels.chosen(cases, None) == cases
    with pytest.raises(BadSetting, match="attention, chain, index, integers, linear"):
        kernels.chosen(cases, "nothing")


def test_buffers_rotate() -> None:
    """Small buffers are many, at most one a call; large ones two; a graph's calls follow its bytes."""
    shapes = Shapes()
    assert len(list(rotated(shapes, 64 << 20))) == 3
    assert len(list(rotated(shapes, 1))) == shapes.calls
    assert len(list(rotated(shapes, 1 << 40))) == 2
    assert len(list(rotated(replace(shapes, calls=1), 1))) == 1
    assert shapes.calls_of(1 << 30) == 4
    assert shapes.calls_of(1 << 29) == 8
    assert shapes.calls_of(0) == shapes.calls


def test_trials_keep_to_the_shape() -> None:
    """Every tiling that is tried splits its weight's steps evenly, and each weight is tried several ways, none twice."""
    tried = sweep.trials(Shapes())
    for trial in tried:
        assert -(-trial.width // trial.tiling.step) % trial.tiling.splits == 0
    ways: dict[str, list[object]] = {}
    for trial in tried:
        ways.setdefault(trial.weight, []).append(trial.tiling)
    assert all(len(set(several)) == len(several) > 5 for several in ways.values())
    assert {"logits", "routed down", "routed gate, up", "dense gate, up"} <= ways.keys()


def _trial(difference: float | Exception, weight: str = "w") -> sweep.Trial:
    def difference_or_error() -> float:
        if isinstance(difference, Exception):
            raise difference
        return difference

    made = Made((lambda: None,), difference_or_error)
    return sweep.Trial(weight, 1, 1, Tiling(16, 64, 1, 4, 3), lambda rows: Case("g", f"{rows}", 1, 0.5, lambda device: made))


def test_a_sweep_orders_what_is_right() -> None:
    """A wrong tiling and one that a card refuses have no time and come last."""
    times = iter([5.0, 3.0])

    class Told(Counted):
        def microseconds(self, calls: Sequence[Call], before: Call | None = None) -> float:
            return next(times)

    tried = [_trial(0.9), _trial(0.1), _trial(RuntimeError("out of resource: shared memory")), _trial(0.2)]
    found = list(sweep.sweep(tried, CPU, Told()))
    assert [one.microseconds for one in sweep.best(found, 9)["w"]] == [(3.0,), (5.0,), (), ()]
    assert "shared memory" in found[2].failure
    json.dumps(sweep.as_json(found), allow_nan=False)


def test_winners_are_lines_to_paste() -> None:
    """The fastest tiling of each weight comes as the entry that `tiling.py` takes; a weight with none is left out."""
    times = iter([9.0, 5.0])

    class Told(Counted):
        def microseconds(self, calls: Sequence[Call], before: Call | None = None) -> float:
            return next(times)

    tried = [_trial(0.1, "int4 routed down"), _trial(0.1, "int4 routed down"), _trial(0.9, "query")]
    tried[1] = replace(tried[1], tiling=Tiling(32, 256, 1, 2, 3, 4, twin=True))
    (line,) = sweep.constants(list(sweep.sweep(tried, CPU, Told())))
    entry = eval("{" + line + "\n}", {"Tiling": Tiling})
    assert entry == {(1, 1, 4, True): tried[1].tiling}
    assert line.endswith("# int4 routed down: 5.0 us, the first tried 9.0")


def test_integer_tilings_fit_their_weights() -> None:
    """What is tried of integers has no step wider than the weight; a card has time for all of it."""
    for trial in sweep.named(sweep.trials(TRUE), ("int4", "int8")):
        assert trial.tiling.step <= trial.width
    words = ("int4 routed", "int4 attention", "int4 query", "int4 shared", "int8 attention", "int8 dense")
    assert len(sweep.named(sweep.trials(TRUE), words)) < 90


def test_settings_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting holds while its cases are made and called, and is gone after a failure too."""
    import engine.bench.cases as place

    seen: list[int] = []

    def make(fails: bool) -> Callable[[torch.device], Made]:
        def made(device: torch.device) -> Made:
            seen.append(place.ROTATED_BYTES)
            if fails:
                raise RuntimeError("no")
            return Made((lambda: None,), lambda: 0.0)

        return made

    before = place.ROTATED_BYTES
    setting = constants.Setting("engine.bench.cases", {"ROTATED_BYTES": 7}, ("one",))
    cases = [Case("g", "one", 1, 0.0, make(False)), Case("g", "other", 1, 0.0, make(False)), Case("g", "one bad", 1, 0.0, make(True))]
    (tried,) = constants.try_settings([setting], cases, CPU, Counted())
    assert seen == [7, 7]
    assert before == place.ROTATED_BYTES
    assert tried.microseconds["one"] == 2.0
    assert math.isnan(tried.microseconds["one bad"])
    assert tried.failure == "no"


def test_a_machine_without_a_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a card the command says in one line what it needs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadSetting, match="on a device"):
        kernels.needs_device()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("kernels",), "on a device"),
        (("kernels", "--processes", "-1"), "--processes"),
        (("round",), "on a device"),
        (("round", "--misses", "0,2"), "between 0 and 1"),
        (("round", "--misses", "few"), "numbers separated by commas"),
        (("round", "--places", "0"), "between 1 and 64"),
    ],
)
def test_a_bad_line_is_one_line(words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be measured, or was not said well, is refused with exit code 2 before anything is built."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    async def served(*_: object) -> None:
        raise AssertionError("nothing is served")

    with pytest.raises(BadSetting, match=said) as refused:
        run_line(("bench", *words), {}, served, opener=None)  # type: ignore[arg-type]  # neither is used
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
