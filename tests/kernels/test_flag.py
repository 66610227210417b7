"""Flags between graphs: what a wait sees, what it says when it gives up, and what is marked then. Nothing runs beside these."""

import torch
from torch import Tensor

from kernels.flag import advance_epoch, await_flag, mark_lost, raise_flag


def words(*values: int) -> list[Tensor]:
    """A word each, with one behind it that nobody may touch."""
    return [torch.tensor([value, 77]) for value in values]


def test_a_flag_is_up_for_its_own_epoch_alone() -> None:
    """Raised in an epoch it lets that one's wait through; one raised before or after does not, and the wait gives its epoch up."""
    flag, lost = words(0, 0)
    epoch = torch.tensor([6])
    advance_epoch(epoch)
    assert epoch.tolist() == [7]
    raise_flag(flag, epoch)
    await_flag(flag, epoch, lost, 3)
    assert (flag.tolist(), epoch.tolist(), lost.tolist()) == ([7, 77], [7], [0, 77])
    for other in (6, 8):
        await_flag(flag, torch.tensor([other]), lost, 3)
        assert (flag.tolist(), lost.tolist()) == ([7, 77], [other, 77])


def test_what_was_given_up_is_not_waited_for() -> None:
    """A wait of a lost epoch, or of one before, ends at once and says nothing new; one of a later epoch waits for itself."""
    flag, lost = words(0, 5)
    for epoch, said in ((5, 5), (4, 5), (6, 6)):
        await_flag(flag, torch.tensor([epoch]), lost, 2 if epoch == 6 else 1 << 30)
        assert (flag.tolist(), lost.tolist()) == ([0, 77], [said, 77])


def test_rows_are_marked_where_an_epoch_was_lost() -> None:
    """All of them, also more than a program has, if this epoch or a later one is lost; none behind them; else none at all."""
    for count in (1, 127, 128, 300):
        for lost, marks in ((3, False), (4, True), (9, True)):
            rows = torch.arange(count + 1)
            mark_lost(rows[:count], *words(lost), torch.tensor([4]), 1 << 30)
            wanted = torch.full((count,), 1 << 30) if marks else torch.arange(count)
            assert torch.equal(rows[:count], wanted)
            assert int(rows[count]) == count
