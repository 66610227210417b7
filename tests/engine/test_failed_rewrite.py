"""Operations that fail: a table that was not written, whose step touches nothing of those it names, and copies of a coming session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from engine.engine import Engine
from engine.errors import SessionBroken
from kernels.layout import GroupField
from memory.rounds import OffloadRounds
from streams import CpuBackend
from streams.cpu import CpuStream
from streams.errors import TransferFailed
from streams.queued import Operation
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import greedy, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids

T = TypeVar("T")


class _Stream(CpuStream):
    """A stream of `_Failing`."""

    def make(self, work: Callable[[], T], label: str, session: str, number: int) -> Operation[T]:
        """See `QueuedStream.make`."""
        assert isinstance(self.backend, _Failing)
        return super().make(self.backend.work(work, label), label, session, number)


class _Failing(CpuBackend):
    """Fails the first operation of a label once it is told which."""

    label = ""

    def open_stream(self, name: str, queue_max: int) -> CpuStream:
        """See `QueuedBackend.open_stream`."""
        return _Stream(self, name, queue_max, self._workers)

    def work(self, work: Callable[[], T], label: str) -> Callable[[], T]:
        """The work, or what fails in its place."""
        if not self.label or not label.startswith(self.label):
            return work
        self.label = ""

        def fail() -> T:
            raise TransferFailed(f"{label} failed on purpose")

        return fail


@pytest.mark.parametrize(("label", "cleared"), [("table.rewrite", False), ("group.1.gather", True)])
async def test_only_a_table_that_was_written_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str, cleared: bool
) -> None:  # fmt: skip
    """The maps of a closed session stay as they are where the rewrite failed; where a later operation did, the step's own are cleared."""
    backend, inner = _Failing(), OffloadRounds.clear
    followed: list[int] = []

    def spied(self: OffloadRounds, table: torch.Tensor, group: int, *rest: Any) -> None:
        followed.append(int(table[0, self._table_layout.group(group, GroupField.SLOT_OF)]))
        inner(self, table, group, *rest)

    monkeypatch.setattr(OffloadRounds, "clear", spied)
    async with Engine.open(make_checkpoint(tmp_path, NAME), small(hot_rows=TOP_K), backend=backend) as engine:
        await engine.generate(ids(90, 1), greedy(4)).complete()  # its session closes with it
        backend.label = label
        with pytest.raises(SessionBroken):
            await engine.generate(ids(90, 2), greedy(4)).complete()
        await engine.stage.streams.idle()
        assert bool(followed) == cleared
        fine = await engine.generate(ids(90, 1), greedy(4)).complete()
    assert len(fine.token_ids) == 4
    await backend.close()


@pytest.mark.parametrize("label", ["tables", "image load", "image finish"])
async def test_a_session_that_cannot_be_brought_back_leaves_nothing(tmp_path: Path, label: str) -> None:
    """One line to the caller whatever copy failed; no memory is held, and the archive brings the session at the next try."""
    backend, archive = _Failing(), tmp_path / "archive"
    (tmp_path / "model").mkdir()
    async with Engine.open(make_checkpoint(tmp_path / "model", NAME), small(hot_rows=TOP_K), backend=backend) as engine:
        session = await engine.create_session()
        await engine.generate(ids(90, 1), greedy(4), session=session).complete()
        whole = list(engine.sessions[session].token_ids)
        await engine.export_session(session, archive)
        await engine.close_session(session)
        free = engine.stage.arena.statistics().free, engine.stage.pool.statistics()
        backend.label = label
        with pytest.raises(SessionBroken, match=r"could not be brought back: .*on purpose; its archive is as it was"):
            await engine.import_session(archive)
        assert not backend.label, "nothing of that name ran"
        assert not engine.sessions
        assert (engine.stage.arena.statistics().free, engine.stage.pool.statistics()) == free
        back = await engine.import_session(archive)
        assert list(engine.sessions[back].token_ids) == whole
    await backend.close()
