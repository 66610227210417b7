"""What recording costs: the process's memory over many steps under a tape, and the time of a step with and without one.

    python tests/engine/tape_cost.py memory --steps 10000
    python tests/engine/tape_cost.py time --pairs 200

Generations follow one another in sessions of their own, so that histories do not grow and what grows is the recording's. Times are
of blocks of steps of one engine, with recording switched on and off in turns, and compared pair by pair: by the wall clock, which on a
machine that others use too says little, and by the processor time of the whole process, threads and all, which says more. The last lines
bound the cost from below the noise: what the recording calls take, timed one by one.
"""

import argparse
import asyncio
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a program, the folder of this file comes first

import msgspec

from engine.chunk import Chunk
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling import Sampling
from streams import CpuBackend, Tape, TapeFile, TapeRecorder
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import small

__all__ = ["Block", "Times", "resident_sizes", "step_times"]

_PROMPT, _TURN = 70, 250  # tokens of a generation
_WARM, _BLOCK, _BETWEEN = 12, 10, 3  # steps: a generation's first, those of a block, and those after a change that belong to neither


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
    """An observer that records or does not, so that both arms run in one engine, a moment apart; or that times each recording call."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self.recorder, self.on, self.timing = recorder, True, False
        self.calls = 0  # timed
        self.seconds = 0.0  # of processor time in them, on the loop

    def submitted(self, *call: Any) -> None:
        self._pass(self.recorder.submitted, call)

    def started(self, *call: Any) -> None:
        self._pass(self.recorder.started, call)

    def completed(self, *call: Any) -> None:
        self._pass(self.recorder.completed, call)

    def awaited(self, *call: Any) -> None:
        self._pass(self.recorder.awaited, call)

    def _pass(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.timing:
            began = time.thread_time()
            call(*arguments)
            self.seconds += time.thread_time() - began
            self.calls += 1
        elif self.on:
            call(*arguments)


@dataclass(frozen=True)
class Block:
    """`_BLOCK` steps in a row: seconds a step, median on the wall and mean of processor time of all the process's threads."""

    wall: float
    processor: float


@dataclass(frozen=True)
class Times:
    """Blocks without and with a tape, of the same length; seconds a step that recording takes on the loop, and writing; records a step."""

    without: list[Block]
    recorded: list[Block]
    loop: float
    writing: float
    records: float


def _clock_cost() -> float:
    """Seconds that asking for the processor time adds to what is measured with it."""
    asked = [time.thread_time() for _ in range(20_000)]
    return (asked[-1] - asked[0]) / (len(asked) - 1)


async def step_times(model: Path, config: EngineConfig, tape: Path, pairs: int) -> Times:
    """Time blocks of steps at batch 1, recording switched in the order off, on, on, off, and then recording itself, call by call."""
    file = TapeFile(tape)
    switch = _Switch(TapeRecorder(file.append))
    backend = CpuBackend(switch)
    blocks: dict[bool, list[Block]] = {False: [], True: []}
    order = itertools.cycle((False, True, True, False))
    async with Engine.open(model, config, backend=backend) as engine:
        while len(blocks[False]) < pairs or len(blocks[True]) < pairs:
            stream = engine.generate([place % 90 for place in range(_PROMPT)], _sampling(_TURN))
            await _pass_steps(stream, _WARM)
            for _ in range((_TURN - _WARM) // (_BETWEEN + _BLOCK) - 1):
                switch.on = next(order)
                await _pass_steps(stream, _BETWEEN)
                blocks[switch.on].append(await _block(stream))
            await stream.aclose()
        switch.timing, before = True, engine.statistics().steps
        async for _ in engine.generate([place % 90 for place in range(_PROMPT)], _sampling(_TURN)):
            pass
        steps = engine.statistics().steps - before
    await backend.close()
    switch.recorder.flush()
    file.close()
    records = (await asyncio.to_thread(Tape.read, tape)).records[-switch.calls :]
    began = time.thread_time()
    msgspec.json.Encoder().encode_lines(records)
    writing = time.thread_time() - began
    loop = switch.seconds - switch.calls * _clock_cost()
    return Times(blocks[False][:pairs], blocks[True][:pairs], loop / steps, writing / steps, len(records) / steps)


async def _pass_steps(stream: AsyncIterator[Chunk], steps: int) -> None:
    for _ in range(steps):
        await anext(stream)


async def _block(stream: AsyncIterator[Chunk]) -> Block:
    began, last, gaps = time.process_time(), time.perf_counter(), []
    for _ in range(_BLOCK):
        await anext(stream)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return Block(statistics.median(gaps), (time.process_time() - began) / _BLOCK)


def _ratio(name: str, without: list[float], recorded: list[float]) -> str:
    """The median of the pairs' ratios with its interval of 95%, from the order of the pairs alone."""
    ratios = sorted(one / bare for bare, one in zip(without, recorded, strict=True))
    reach = 0.98 * len(ratios) ** 0.5  # half of 1.96 standard deviations of a fair coin's count
    low, high = (ratios[min(max(round(len(ratios) / 2 + sign * reach), 0), len(ratios) - 1)] for sign in (-1, 1))
    return f"{name}: {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "time"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--tape", type=Path, help="file to keep the tape in (default: none is kept)")
    parser.add_argument("--model", type=Path, help="default: a tiny one with random weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_checkpoint(Path(folder), "shared")
        tape = options.tape or Path(folder) / "cost.jsonl"
        if options.what == "memory":
            marks = [options.steps * part // 10 for part in (1, 2, 4, 6, 8, 10)]
            sizes = asyncio.run(resident_sizes(model, tape, marks))
            for steps, held in sizes.items():
                print(f"{steps:>7,} steps: {held / 1e6:.1f} MB")
            print(f"tape: {tape.stat().st_size / 1e6:.1f} MB")
            return
        config = small() if options.model is None else EngineConfig(host_memory_bytes=1 << 30)
        times = asyncio.run(step_times(model, config, tape, options.pairs))
        for name in ("wall", "processor"):
            without, recorded = ([getattr(block, name) for block in blocks] for blocks in (times.without, times.recorded))
            print(
                f"{name:9}: {statistics.median(without) * 1e3:.3f} ms a step, {statistics.median(recorded) * 1e3:.3f} ms with a tape; ",
                end="",
            )
            print(_ratio(f"ratio over {options.pairs} pairs", without, recorded))
        step = statistics.median(block.processor for block in times.without)  # unlike the wall, not longer for the company
        print(f"recording: {times.records:.0f} records a step take {times.loop * 1e6:.0f} us of processor time on the loop", end="")
        print(f" ({times.loop / step:.2%} of a step's),")
        print(f"and writing them {times.writing * 1e6:.0f} us on a thread of its own ({times.writing / step:.2%})")


if __name__ == "__main__":
    main()
