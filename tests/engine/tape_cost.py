"""What recording costs: the process's memory over many steps under a tape, and the time of a step with and without one.

    python tests/engine/tape_cost.py memory --steps 10000
    python tests/engine/tape_cost.py time --pairs 60

Generations follow one another in sessions of their own, so that histories do not grow and what grows is the recording's. Times are
of blocks of steps of one engine, with recording switched on and off in turns; the ratio is the only number worth keeping from a machine
that others use too.
"""

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a program, the folder of this file comes first

import msgspec

from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling import Sampling
from streams import CpuBackend, Tape, TapeFile, TapeRecorder
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import small

__all__ = ["Times", "resident_sizes", "step_times"]

_PROMPT, _TURN = 70, 250  # tokens of a generation
_BLOCK = 12  # steps


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _sampling(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


async def resident_sizes(model: Path, tape: Path, marks: list[int]) -> dict[int, int]:
    """Decode under a tape. Returns bytes the process holds by steps so far, measured when `marks`, ascending, are reached."""
    by_steps = {}
    file = TapeFile(tape)
    recorder = TapeRecorder(file.append)
    backend = CpuBackend(recorder)
    async with Engine.open(model, small(), backend=backend) as engine:
        for mark in marks:
            while engine.statistics().steps < mark:
                async for _ in engine.generate([place % 90 for place in range(_PROMPT)], _sampling(_TURN)):
                    pass
            by_steps[engine.statistics().steps] = _resident_bytes()
    await backend.close()
    recorder.flush()
    file.close()
    return by_steps


class _Switch:
    """An observer that records or does not, so that both halves of a pair run in the same engine, a moment apart."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self.recorder, self.on = recorder, True
        self.seconds = 0.0  # of processor time spent recording on the loop
        self.steps = 0  # while recording

    def submitted(self, *call: Any) -> None:
        self._count(self.recorder.submitted, call)

    def started(self, *call: Any) -> None:
        self._count(self.recorder.started, call)

    def completed(self, *call: Any) -> None:
        self._count(self.recorder.completed, call)

    def awaited(self, *call: Any) -> None:
        self._count(self.recorder.awaited, call)

    def _count(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.on:
            began = time.thread_time()
            call(*arguments)
            self.seconds += time.thread_time() - began


@dataclass(frozen=True)
class Times:
    """Seconds of a step, the median of each block, without a tape and with one; and of a step's recording: on the loop, and writing."""

    without: list[float]
    recorded: list[float]
    loop: float
    writing: float


async def step_times(model: Path, config: EngineConfig, tape: Path, pairs: int) -> Times:
    """Time blocks of `_BLOCK` steps, recording switched off and on in turns, `pairs` of each."""
    file = TapeFile(tape)
    switch = _Switch(TapeRecorder(file.append))
    backend, times = CpuBackend(switch), {True: [], False: []}
    async with Engine.open(model, config, backend=backend) as engine:
        while len(times[False]) < pairs:
            gaps: list[float] = []
            last, steps = 0.0, 0
            async for _ in engine.generate([place % 90 for place in range(_PROMPT)], _sampling(_TURN)):
                now = time.perf_counter()
                gaps.append(now - last)
                last, steps = now, steps + 1
                switch.steps += switch.on
                if len(gaps) == _BLOCK:
                    if steps > 2 * _BLOCK:  # before, a generation's first steps
                        times[switch.on].append(statistics.median(gaps[2:]))  # the step in flight at the change belongs to neither
                    switch.on, gaps = not switch.on, []
    await backend.close()
    switch.recorder.flush()
    file.close()
    records = (await asyncio.to_thread(Tape.read, tape)).records
    began = time.thread_time()
    msgspec.json.Encoder().encode_lines(records)
    writing = time.thread_time() - began
    return Times(times[False][:pairs], times[True][:pairs], switch.seconds / switch.steps, writing / switch.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "time"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--model", type=Path, help="default: a tiny one with random weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, tape = options.model or make_checkpoint(Path(folder), "shared"), Path(folder) / "cost.jsonl"
        if options.what == "memory":
            marks = [options.steps * part // 10 for part in (1, 2, 4, 6, 8, 10)]
            sizes = asyncio.run(resident_sizes(model, tape, marks))
            for steps, held in sizes.items():
                print(f"{steps:>7,} steps: {held / 1e6:.1f} MB")
            print(f"tape: {tape.stat().st_size / 1e6:.1f} MB")
            return
        config = small() if options.model is None else EngineConfig(host_memory_bytes=1 << 30)
        times = asyncio.run(step_times(model, config, tape, options.pairs))
        step = statistics.median(times.without)
        ratios = [with_tape / bare for bare, with_tape in zip(times.without, times.recorded, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"a step takes {step * 1e3:.3f} ms, {statistics.median(times.recorded) * 1e3:.3f} ms with a tape")
        print(f"ratio over {options.pairs} pairs: median {middle:.4f}, half of them from {low:.4f} to {high:.4f}")
        print(f"recording a step takes {times.loop * 1e6:.0f} us of processor time on the loop ({times.loop / step:.2%}),")
        print(f"writing it {times.writing * 1e6:.0f} us on a thread of its own ({times.writing / step:.2%})")


if __name__ == "__main__":
    main()
