"""Row counts: one chain of inequalities, epochs, and completions that come late."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from memory.counts import CountsSnapshot, RowCounts


def counted(logical: int, committed: int, submitted: int, mirrored: int) -> RowCounts:
    """Counts brought to the given values by legal moves."""
    counts = RowCounts()
    counts.advance(logical)
    counts.commit(committed)
    counts.submit(submitted)
    counts.complete(mirrored, 0)
    return counts


def test_each_count_moves_below_the_one_before() -> None:
    """A move past the next count in the chain is a bug."""
    with pytest.raises(AssertionError, match="committed 2 > logical 1"):
        counted(1, 2, 0, 0)
    with pytest.raises(AssertionError, match="submitted 2 > committed 1"):
        counted(2, 1, 2, 0)
    with pytest.raises(AssertionError, match="mirrored 2 > submitted 1"):
        counted(2, 2, 1, 2)
    with pytest.raises(AssertionError, match="would fall"):
        counted(4, 4, 2, 2).submit(1)


def test_completions_out_of_order_never_lower_mirrored() -> None:
    """The completion of a shorter prefix after a longer one changes nothing."""
    counts = counted(256, 256, 192, 0)
    assert counts.complete(192, 0)
    assert counts.complete(64, 0)
    assert counts.mirrored == 192


def test_an_old_epoch_raises_no_count() -> None:
    """A completion submitted before a truncation below submitted rows changes nothing after it."""
    counts = counted(200, 200, 192, 64)
    counts.truncate(100)
    assert counts.snapshot() == CountsSnapshot(100, 100, 64, 64, 1)
    assert not counts.complete(128, 0)
    assert not counts.complete(192, 0)
    assert counts.snapshot() == CountsSnapshot(100, 100, 64, 64, 1)


def test_a_completion_of_an_epoch_to_come_is_a_bug() -> None:
    """No copy can be of a later epoch than the present one."""
    with pytest.raises(AssertionError, match="epoch 1 completed in epoch 0"):
        counted(64, 64, 64, 0).complete(64, 1)


@pytest.mark.parametrize(
    ("rows", "after"),
    [
        (200, CountsSnapshot(200, 190, 128, 128, 0)),  # nothing
        (195, CountsSnapshot(195, 190, 128, 128, 0)),  # a rollback of uncommitted rows
        (150, CountsSnapshot(150, 150, 128, 128, 0)),
        (128, CountsSnapshot(128, 128, 128, 128, 0)),
        (127, CountsSnapshot(127, 127, 127, 127, 1)),  # below mirrored: a new epoch
        (0, CountsSnapshot(0, 0, 0, 0, 1)),
    ],
)
def test_truncation_keeps_the_chain(rows: int, after: CountsSnapshot) -> None:
    """Each count becomes at most `rows`; only a cut into submitted rows begins an epoch."""
    counts = counted(200, 190, 128, 128)
    counts.truncate(rows)
    assert counts.snapshot() == after


def test_refused_rows_are_taken_back() -> None:
    """Only rows that are not committed can be taken back, and nothing but the logical count moves."""
    counts = counted(200, 190, 128, 128)
    counts.retract(7)
    assert counts.snapshot() == CountsSnapshot(193, 190, 128, 128, 0)
    with pytest.raises(AssertionError, match="retract 4 of 3 rows"):
        counts.retract(4)
    counts.retract(3)
    assert counts.snapshot() == CountsSnapshot(190, 190, 128, 128, 0)


def test_truncation_only_cuts() -> None:
    """Truncating to more rows than there are is a bug."""
    with pytest.raises(AssertionError, match="truncate 3 rows to 4"):
        counted(3, 3, 0, 0).truncate(4)


class CountsLife(RuleBasedStateMachine):
    """Steps, copies that complete in any order, and truncations; the model remembers which bytes RAM really holds.

    A row's content is the number of its writing; a copy of an old epoch may still write RAM afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = RowCounts()
        self.written: list[int] = []  # the writing each logical row is of
        self.ram: dict[int, int] = {}
        self.copies: list[tuple[int, int, dict[int, int]]] = []  # (rows, epoch, what it copies), in flight, in order
        self.writings = 0
        self.last_mirrored = 0

    @rule(rows=st.integers(0, 40))
    def advance(self, rows: int) -> None:
        self.counts.advance(rows)
        self.writings += 1
        self.written += [self.writings] * rows

    @rule(part=st.floats(0, 1))
    def commit(self, part: float) -> None:
        self.counts.commit(int(part * (self.counts.logical - self.counts.committed)))

    @precondition(lambda self: self.counts.logical > self.counts.committed)
    @rule(part=st.floats(0, 1))
    def retract(self, part: float) -> None:
        """Drafts were refused: the rows of later steps moved down, so all that is not committed is of another writing."""
        rows = int(part * (self.counts.logical - self.counts.committed))
        self.counts.retract(rows)
        kept = self.written[: self.counts.committed]
        self.writings += 1
        self.written = kept + [self.writings] * (self.counts.logical - len(kept))

    @precondition(lambda self: self.counts.submitted < self.counts.committed)
    @rule(part=st.floats(0, 1))
    def submit(self, part: float) -> None:
        first = self.counts.submitted
        rows = first + int(part * (self.counts.committed - first))
        self.copies.append((rows, self.counts.epoch, dict(enumerate(self.written[:rows]))))
        self.counts.submit(rows)

    @precondition(lambda self: self.copies)
    @rule(told=st.integers(0, 3))
    def complete(self, told: int) -> None:
        """All copies up to one have run, in order; the host hears of them in another order."""
        done = self.copies[: told + 1]
        del self.copies[: told + 1]
        for _, epoch, rows in done:
            if epoch == self.counts.epoch:
                self.ram.update(rows)
        for rows, epoch, _ in reversed(done):
            assert self.counts.complete(rows, epoch) == (epoch == self.counts.epoch)

    @rule(part=st.floats(0, 1))
    def truncate(self, part: float) -> None:
        rows, epoch = int(part * self.counts.logical), self.counts.epoch
        deep = rows < self.counts.submitted
        self.counts.truncate(rows)
        del self.written[rows:]
        assert self.counts.epoch == epoch + deep
        self.last_mirrored = min(self.last_mirrored, rows)

    @invariant()
    def mirrored_rows_are_in_ram(self) -> None:
        self.counts.check_integrity()
        assert self.counts.logical == len(self.written)
        assert self.counts.mirrored >= self.last_mirrored
        self.last_mirrored = self.counts.mirrored
        for row in range(self.counts.mirrored):
            assert self.ram[row] == self.written[row], f"row {row}"


def test_mirrored_never_covers_a_row_that_ram_lacks() -> None:
    """After any life every mirrored row's present content is what RAM holds, and mirrored falls by truncation only."""
    run_state_machine_as_test(CountsLife, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))
