"""The real engine on the virtual backend: the same bits under any interleaving, and from a tape of real threads."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.errors import SessionBroken
from streams import (
    Backend,
    CpuBackend,
    Event,
    Fault,
    ReplayOrder,
    SeededOrder,
    Tape,
    TapeRecorder,
    VirtualBackend,
    sealed,
)
from streams.tape import Header, Record
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.runs import Run, collect, greedy, small

NAME = "shared"
TOP_K = int(named(NAME).config["index_topk"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def _ids(count: int, seed: int) -> list[int]:
    vocabulary = int(named(NAME).config["vocab_size"])
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


async def _two_sessions(checkpoint: Path, backend: Backend, *, seal: bool = True) -> tuple[Run, Run]:
    """One session of two turns, crossing a block, beside one whose chunks are appended while the first decodes."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=backend) as engine:
        with sealed() if seal else contextlib.nullcontext():
            async with asyncio.TaskGroup() as group:
                one = group.create_task(collect(engine, [(_ids(60, 1), 8), (_ids(3, 2), 2)]))
                two = group.create_task(collect(engine, [(_ids(150, 3), 12)]))  # selects rows that are in RAM only
    await backend.close()
    return one.result(), two.result()


def _same(runs: tuple[Run, Run], others: tuple[Run, Run]) -> bool:
    return all(mine.same_bits(other) for mine, other in zip(runs, others, strict=True))


@pytest.mark.both_loops
async def test_any_interleaving_gives_the_same_bits(checkpoint: Path) -> None:
    """Under each seed, sealed from the world, tokens and logits are the same, no buffer is raced for, and the orders differ."""
    runs, tapes = [], []
    for seed in range(2):
        records: list[Record] = []
        recorder = TapeRecorder(records.extend)
        runs.append(await _two_sessions(checkpoint, VirtualBackend(seed, observer=recorder)))
        recorder.flush()
        tapes.append(Tape(Header(), tuple(records)))
    assert (len(runs[0][0].tokens), len(runs[0][1].tokens)) == (10, 12)
    assert _same(runs[0], runs[1])
    assert tapes[0].diff(tapes[1]) is not None


async def test_tape_of_real_threads_replays_to_the_same_bits(checkpoint: Path) -> None:
    """A recorded run on worker threads replays on the virtual backend to the same tokens and logits."""
    records: list[Record] = []
    recorder = TapeRecorder(records.extend)
    threads = await _two_sessions(checkpoint, CpuBackend(recorder), seal=False)
    recorder.flush()
    assert _same(await _two_sessions(checkpoint, VirtualBackend(ReplayOrder(Tape(Header(), tuple(records))))), threads)


@pytest.mark.parametrize("label", ["layer.1.attend", "group.0.plan"])
async def test_failed_operation_breaks_its_step_only(checkpoint: Path, label: str) -> None:
    """An operation of a decode step that fails ends the sessions of that step with SessionBroken; a later session gets its usual tokens."""
    alone = VirtualBackend(0)
    async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=alone) as engine:
        usual = await collect(engine, [(_ids(70, 3), 3)])
    await alone.close()

    backend = VirtualBackend(SeededOrder(1, faults=(Fault(label, nth=2),)))
    async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=backend) as engine:
        with pytest.raises(SessionBroken, match="failed"):
            await collect(engine, [(_ids(60, 1), 8)])
        again = await collect(engine, [(_ids(70, 3), 3)])
    await backend.close()
    assert again.same_bits(usual)


async def test_memory_outlives_the_clearing_after_a_failed_step(checkpoint: Path) -> None:
    """The maps of a session whose step failed are given back only when the operation that clears them is done."""

    class HoldsClearing(TapeRecorder):
        clearing: Event[object] | None = None

        def submitted(self, event: Event[Any], *rest: Any) -> None:
            super().submitted(event, *rest)
            if event.label == "step.abort" and self.clearing is None:
                self.clearing = event
                asyncio.get_running_loop().call_soon(backend.hold, event)

    watch = HoldsClearing(lambda _: None)
    backend = VirtualBackend(SeededOrder(3, faults=(Fault("step.finish", nth=4),)), observer=watch)
    held = []
    async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=backend) as engine:
        async for _ in engine.generate(_ids(60, 1), greedy(2)):
            pass  # afterwards the stage has all the buffers of its own
        await _rounds(200)
        held.append(engine.statistics().device_bytes)
        with pytest.raises(SessionBroken):
            async for _ in engine.generate(_ids(60, 1), greedy(8)):
                pass
        await _rounds(200)
        assert watch.clearing is not None
        held.append(0 if watch.clearing.done() else engine.statistics().device_bytes)
        backend.release(watch.clearing)
        await _rounds(200)
        held.append(engine.statistics().device_bytes)
    await backend.close()
    assert held[0] == held[2] < held[1]


async def _rounds(count: int) -> None:
    """Let the loop run until everything that can happen has."""
    for _ in range(count):
        await asyncio.sleep(0)
