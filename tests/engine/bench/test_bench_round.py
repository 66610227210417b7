"""Rounds measured: selections that miss as asked, replays from the same state, and faults that are found before times."""

import io
import json
from collections.abc import Sequence

import pytest
import torch
from rich.console import Console

from engine.bench import round as rounds
from engine.bench.timing import Call
from kernels.gather import gather_round
from kernels.layout import StateField
from kernels.sparse_mla import sparse_mla_round

CPU = torch.device("cpu")
TINY = rounds.RoundShapes(positions=640, slots=256, picks=32, rounds=4, heads=3, latent=70, rope=16, dtype=torch.float32)


class Runs:
    """A timer that runs everything and counts up."""

    def __init__(self) -> None:
        self.told = 0.0

    def microseconds(self, calls: Sequence[Call], before: Call | None = None) -> float:
        assert before is not None
        before()
        for call in calls:
            call()
        self.told += 1.0
        return self.told

    def launches(self, call: Call) -> int | None:
        return None


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_every_round_misses_its_share(share: float) -> None:
    """Over full slots each round of each place has exactly the misses asked for, and a replay has them again."""
    chosen, held = rounds.selections(TINY, share, 2, seed=5)
    assert bool((chosen[:, :, 1:] > chosen[:, :, :-1]).all())
    sessions = rounds.Sessions(TINY, CPU, rounds.drawn_history(TINY, CPU), held)
    for _ in range(2):
        sessions.restore()
        for number, selection in enumerate(chosen, 1):
            sessions.plan_of(selection)
            sessions.gather(selection)
            counts = sessions.state[:, [StateField.HITS, StateField.MISSES, StateField.RING_READS]]
            misses = round(share * TINY.picks) * number
            assert counts.tolist() == [[TINY.picks * number - misses, misses, 0]] * 2


def test_times_are_of_what_they_say() -> None:
    """Nine graphs are timed a case, and differences are taken of the right ones."""
    found = list(rounds.measure(TINY, CPU, Runs(), [1, 3], [0.0, 0.1]))
    assert [(one.places, one.share, one.wrong) for one in found] == [(1, 0.0, ""), (1, 0.1, ""), (3, 0.0, ""), (3, 0.1, "")]
    one = found[0]
    assert one.round_us == one.plan_gather - one.plan_gather_empty == -1.0
    assert one.fused_us == one.planned_attention - one.begin - one.resident_attention
    console = Console(file=io.StringIO(), width=240)
    console.print(rounds.table(found))
    assert "10%" in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    json.dumps(rounds.as_json(found, TINY, {}), allow_nan=False)


def test_a_wrong_round_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that loses a byte on the measured side is named, and nothing is timed."""
    whole, calls = gather_round, []

    def lossy(*given: object) -> None:
        whole(*given)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) % 2 == 0:
            given[8][0, 3, 5] ^= 1  # type: ignore[index]  # the gathered rows

    monkeypatch.setattr(rounds, "gather_round", lossy)
    timer = Runs()
    (found,) = rounds.measure(TINY, CPU, timer, [1], [0.1])
    assert found.wrong == "rows of round 0"
    assert timer.told == 0.0
    assert json.loads(json.dumps(rounds.as_json([found], TINY, {}), allow_nan=False))["rounds"][0]["plan"] is None


def test_an_attention_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by the plan must have the bits of attention over gathered rows."""
    whole = sparse_mla_round
    monkeypatch.setattr(rounds, "sparse_mla_round", lambda *given: whole(*given) * 1.0000001)
    (found,) = rounds.measure(TINY, CPU, Runs(), [2], [0.1])
    assert found.wrong.startswith("attention by the plan")
