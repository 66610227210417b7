"""Forced selections: shape, drift, boundaries, and what an engine's counts say about them."""

import pytest
import torch

from engine.engine import Engine
from engine.forced import ForcedSelection
from engine.protocol import SyntheticHistory
from engine.sampling import Sampling
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import small

POSITIONS = [0, 1, 62, 63, 64, 65, 66, 127, 128, 129, 1_000, 4_095, 4_096, 65_537, 2**20]


def forced(rate: float, picks: int, positions: list[int]) -> torch.Tensor:
    """Picks of rows that selected nothing before (-7 everywhere)."""
    selection = torch.full((len(positions), picks), -7, dtype=torch.int32)
    ForcedSelection(rate, picks).overwrite(torch.tensor(positions), selection)
    return selection


@pytest.mark.parametrize("rate", [1e-9, 0.01, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("picks", [1, 8, 63, 64])
def test_picks_are_a_selection(rate: float, picks: int) -> None:
    """Overwritten rows hold ascending, distinct positions that the row may see; rows no longer than the selection stay untouched."""
    for position, row in zip(POSITIONS, forced(rate, picks, POSITIONS).tolist(), strict=True):
        if row[0] == -7:
            assert set(row) == {-7}
            continue
        assert position + 1 > picks
        assert row == sorted(set(row))
        assert row[0] >= 0
        assert row[-1] <= position
    assert forced(rate, picks, [picks - 1])[0, 0] == -7
    assert forced(rate, picks, [4 * picks + 4])[0, 0] != -7


@pytest.mark.parametrize(("rate", "fresh"), [(0.01, 1), (0.05, 3), (0.5, 32), (1.0, 64)])
def test_so_many_picks_are_new(rate: float, fresh: int) -> None:
    """From one position to the next exactly the asked share is new, and none of them was picked for many positions before."""
    rows = [set(row.tolist()) for row in forced(rate, 64, list(range(9_000, 9_050)))]
    assert ForcedSelection(rate, 64).fresh == fresh
    seen = set(rows[0])
    for row in rows[1:]:
        assert len(row - seen) == fresh
        seen |= row


def test_rows_do_not_depend_on_their_company() -> None:
    """A row's picks are the same alone and among others, free places included."""
    together = forced(0.05, 64, [0, 5_000, 70, 9_999])
    for place, position in enumerate([0, 5_000, 70, 9_999]):
        assert torch.equal(together[place], forced(0.05, 64, [position])[0])


@pytest.mark.parametrize("history", [None, SyntheticHistory(3, 700)])
async def test_the_engine_misses_as_told(tmp_path_factory: pytest.TempPathFactory, history: SyntheticHistory | None) -> None:
    """With 1 pick in 8 forced new and few slots, an eighth of the steady reads miss, and both placements still answer alike."""
    config = tiny_config()
    model = write_checkpoint(random_tensors(config, 5), config, tmp_path_factory.mktemp("tiny"))
    sampling = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompt = [(7 * place) % 90 for place in range(300)]
    answers, rates = [], []
    for settings in (small(hot_rows=16, force_miss_rate=0.125), small(placement="resident", force_miss_rate=0.125)):
        async with Engine.open(model, settings) as engine:
            answers.append((await engine.generate(prompt, sampling, history=history).complete()).token_ids)
            found = engine.statistics()
            rates.append(found.misses / max(1, found.hits + found.misses))
    assert answers[0] == answers[1]
    assert 0.11 < rates[0] < 0.16  # 1 in 8, and the first step's cold picks
    assert rates[1] == 0.0
