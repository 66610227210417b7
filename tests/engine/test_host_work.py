"""What a decode step costs the loop, counted and not timed: operations submitted and calls of torch."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode

from engine.engine import Engine
from engine.generation import Generation
from engine.sampling import Sampling
from streams import CpuBackend, Event
from tests.engine.host_cost import step_us
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import small

STEPS = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "shared")


class _Submissions:
    """An observer that counts labels."""

    def __init__(self) -> None:
        self.labels: Counter[str] = Counter()

    def submitted(self, event: Event[Any], after: Sequence[Any], waits: Sequence[Any], payload_bytes: int, at_ns: int) -> None:
        self.labels[event.label] += 1

    def started(self, event: Event[Any], at_ns: int) -> None:
        """Not counted."""

    def completed(self, event: Event[Any], error: BaseException | None, at_ns: int) -> None:
        """Not counted."""

    def awaited(self, event: Event[Any], ended: bool, at_ns: int) -> None:
        """Not counted."""


class _TorchCalls(TorchFunctionMode):
    """Counts calls of torch on this thread, which is the loop's: work runs on others."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


@asynccontextmanager
async def _decoding(checkpoint: Path, backend: CpuBackend, sessions: int) -> AsyncIterator[tuple[Engine, list[Generation]]]:
    """Generations that step together, replays of one recording, with no block filled for the next `STEPS` steps."""
    sampling = Sampling(max_tokens=52, temperature=0.0, ignore_eos=True)
    async with Engine.open(checkpoint, small(graphs="on", hot_rows=32), backend=backend) as engine:
        generations = [engine.generate([place % 90 for place in range(10)], sampling) for _ in range(sessions)]
        for _ in range(10):
            for generation in generations:
                await anext(generation)
        yield engine, generations
        for generation in generations:
            await generation.aclose()


@pytest.mark.parametrize("sessions", [1, 2])
async def test_a_replayed_step_is_one_operation_and_one_call_of_torch(checkpoint: Path, sessions: int) -> None:
    """However many sessions step together, a step is submitted once and what came of it is read by one call."""
    seen = _Submissions()
    backend = CpuBackend(seen)
    async with _decoding(checkpoint, backend, sessions) as (engine, generations):
        seen.labels.clear()
        before = engine._loop.steps
        with _TorchCalls() as calls:
            for _ in range(STEPS):
                for generation in generations:
                    await anext(generation)
            labels, steps = dict(seen.labels), engine._loop.steps - before
    await backend.close()
    assert labels == {"step": steps}
    assert set(calls.names) == {"tolist"}
    assert abs(calls.names["tolist"] - steps) <= 1  # a step is submitted before the one in front of it is followed
    assert steps >= STEPS - 1


async def test_the_cost_of_a_step_can_be_measured(checkpoint: Path) -> None:
    """The program beside this file times steps of an engine whose device takes no time: more than nothing, less than a millisecond each."""
    times = [await step_us(checkpoint, sessions=2, steps=100) for _ in range(3)]  # what else runs on these cores adds to some of them
    assert 0 < min(times) < 1_000
