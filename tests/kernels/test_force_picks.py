"""Forced picks against plain Python, where there is room and where there is none."""

import pytest
import torch

from kernels.forced import force_picks

POSITIONS = [0, 1, 62, 63, 64, 65, 66, 127, 128, 129, 1_000, 4_095, 4_096, 65_537, 2**20, 2**31 - 2]
UNTOUCHED = -7


def plain(position: int, fresh: int, picks: int) -> list[int]:
    """One row: the picks that stay, then one in each of `fresh` equal spans of the largest power of two that fits behind them."""
    stable = picks - fresh
    room = position + 1 - stable
    stride = (1 << room.bit_length() - 1) // fresh if room >= 1 else 0
    if position < picks or stride == 0:
        return [UNTOUCHED] * picks
    return [*range(stable), *(stable + number * stride + position % stride for number in range(fresh))]


@pytest.mark.parametrize("picks", [1, 8, 63, 64, 65])
def test_picks_are_plain_arithmetic(picks: int) -> None:
    """Every row has exactly the picks of its position, in a selection with room behind each row that stays as it was."""
    for fresh in {1, picks // 2 or 1, picks}:
        wide = torch.full((len(POSITIONS), picks + 3), UNTOUCHED, dtype=torch.int32)
        force_picks(torch.tensor(POSITIONS), fresh, wide[:, :picks])
        assert wide[:, :picks].tolist() == [plain(position, fresh, picks) for position in POSITIONS]
        assert bool((wide[:, picks:] == UNTOUCHED).all())


def test_no_rows() -> None:
    """A selection without rows is left alone."""
    force_picks(torch.empty(0, dtype=torch.int64), 1, torch.empty((0, 4), dtype=torch.int32))


@pytest.mark.gpu
def test_a_card_gives_the_same_picks() -> None:
    """One launch over rows of 2,048 picks gives the reference's picks, and leaves short contexts as they were."""
    positions = torch.tensor([*POSITIONS, 2_047, 2_048, 50_023])
    told = torch.full((len(positions), 2048), UNTOUCHED, dtype=torch.int32)
    there = told.cuda()
    force_picks(positions, 20, told)
    force_picks(positions.cuda(), 20, there)
    assert torch.equal(there.cpu(), told)
