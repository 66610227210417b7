"""Acceptance at a chosen rate, for measuring: decided by seed and position alone, alike in both placements."""

from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import BadSetting
from engine.forced import ForcedAcceptance
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import collect, small
from tests.engine.test_drafts import TOP_K, ids, sampled


def overwritten(rate: float, seed: int, positions: torch.Tensor) -> torch.Tensor:
    """Which rows' samples became the draft behind them: two rows a place, drafts 7, samples 7 or 8 by turns."""
    rows = 2 * positions.shape[0]
    tokens = torch.full((rows,), 7)
    samples = torch.where(torch.arange(rows) // 2 % 2 == 0, 7, 8)
    place_of = torch.arange(positions.shape[0], dtype=torch.int32).repeat_interleave(2)
    before = samples.clone()
    forced = ForcedAcceptance(rate, 9)
    forced.overwrite(samples, tokens, place_of, torch.stack([positions, positions + 1], 1).flatten(), torch.full((rows,), seed))
    assert torch.equal(samples[1::2], before[1::2]), "a last row has no draft behind it"
    assert bool(((samples >= 0) & (samples < 9)).all())
    return samples[::2] == 7


def test_the_rate_is_the_rate() -> None:
    """Over many positions the share accepted is the rate, whatever was sampled; seeds and positions decide, and nothing else."""
    positions = torch.arange(20_000) * 3 + 1_000_000
    for rate in (0.1, 0.65, 1.0):
        share = overwritten(rate, 5, positions).double()
        assert abs(float(share.mean()) - rate) < 0.02
        assert abs(float(share[::2].mean() - share[1::2].mean())) < 0.03, "right and wrong drafts are accepted alike"
    one, other = overwritten(0.65, 5, positions), overwritten(0.65, 6, positions)
    assert torch.equal(one, overwritten(0.65, 5, positions))
    assert torch.equal(one[4::2], overwritten(0.65, 5, positions[4:])[::2]), "company changes it"
    assert 0.4 < float((one == other).double().mean()) < 0.7
    assert not torch.equal(one[1:], one[:-1])


def test_padding_and_neighbours_are_left_alone() -> None:
    """Rows without a draft of their own place behind them keep their samples."""
    samples, tokens = torch.tensor([3, 4, 5, 6]), torch.tensor([1, 1, 1, 1])
    ForcedAcceptance(1.0, 9).overwrite(
        samples, tokens, torch.tensor([0, -1, 1, -1], dtype=torch.int32), torch.arange(4), torch.zeros(4, dtype=torch.int64)
    )
    assert samples.tolist() == [3, 4, 5, 6]


async def test_both_placements_accept_alike(tmp_path: Path) -> None:
    """Offload and resident give one text and the same counts at a forced rate, in fewer steps; company and depth 0 change nothing of it."""
    model = make_checkpoint(tmp_path, "shared")
    found = []
    for placement in ("offload", "resident"):
        async with Engine.open(model, small(placement=placement, hot_rows=TOP_K, draft_depth=3, force_accept_rate=0.65)) as engine:
            one = await collect(engine, [(ids(40, 1), 60)], sampled(60, 0.0, 3))
            counts = engine.statistics()
            found.append((one.tokens, counts.drafts_proposed, counts.drafts_accepted, counts.steps))
    assert found[0] == found[1]
    _, proposed, accepted, steps = found[0]
    assert 0.3 < accepted[0] / proposed[0] < 0.95
    assert steps < 45


def test_a_rate_is_a_share() -> None:
    """Other numbers are refused by name."""
    with pytest.raises(BadSetting, match=r"force_accept_rate must be between 0 and 1, not 1\.5"):
        small(force_accept_rate=1.5)
