"""Many seeds over several processes: finds the smallest that fails, and records its tape.

Knows scenarios by name only: names and seeds cross to the workers, findings come back.

Invariants:
1. Seed n runs scenario n of the wheel, so a budget of any size covers all scenarios by weight.
2. After a finding only smaller seeds go on: what is returned is the smallest failing seed of the budget.
3. A worker that dies is a finding too; its seeds are run again one by one, each in a process of its own, to name the one.
4. The tape is recorded in a fresh process, which no failed run has touched.
"""

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import structlog
import torch

from engine.search.conversations import CONVERSATIONS
from engine.search.lives import LIVES
from engine.search.reference import Bench
from engine.search.scenario import Finding, Scenario, run_seed
from streams import TapeFile, TapeRecorder

__all__ = ["SCENARIOS", "Outcome", "hunt", "record", "wheel"]

SCENARIOS: tuple[Scenario, ...] = (*CONVERSATIONS, *LIVES)
_BATCH_SEEDS = 8  # of one task: enough to hide its cost, few enough to show progress


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search did. `seeds`: run to their end; `seconds`: of the whole search, workers' start included."""

    seeds: int
    seconds: float
    finding: Finding | None


def wheel(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """The scenarios in turn, each as often as its weight says and spread evenly."""
    turns = [((place + 0.5) / one.weight, number) for number, one in enumerate(scenarios) for place in range(one.weight)]
    return [scenarios[number] for _, number in sorted(turns)]


def hunt(
    seeds: int, names: Sequence[str] = (), *, processes: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Outcome:
    """Run seeds 0 to `seeds - 1`.

    Args: names: of scenarios; none: all. processes: default: one a core. progress: called with (seeds done, seeds).
    """
    started = time.perf_counter()
    batches = [range(first, min(first + _BATCH_SEEDS, seeds)) for first in range(0, seeds, _BATCH_SEEDS)]
    found: Finding | None = None
    done = 0
    lost: list[range] = []
    with _pool(processes or len(os.sched_getaffinity(0))) as pool:
        batch_of: dict[Future[Finding | None], range] = {pool.submit(_run_batch, tuple(names), batch): batch for batch in batches}
        for future in as_completed(batch_of):
            batch = batch_of[future]
            if future.cancelled():
                continue
            try:
                finding = future.result()
            except BrokenProcessPool:
                lost.append(batch)
                continue
            done += len(batch)
            if progress is not None:
                progress(done, seeds)
            if finding is not None and (found is None or finding.seed < found.seed):
                found = finding
                for other, theirs in batch_of.items():
                    if theirs[0] > finding.seed:
                        other.cancel()
    for batch in sorted(lost, key=lambda one: one[0]):
        if found is None or batch[0] < found.seed:
            found = _run_apart(tuple(names), batch) or found
    return Outcome(done, time.perf_counter() - started, found)


def record(finding: Finding, path: Path) -> Finding | None:
    """Run the finding's seed again in a fresh process and write its tape. Returns what it found this time.

    Raises: OSError: the file cannot be written.
    """
    with _pool(1) as pool:
        try:
            return pool.submit(_record, finding.scenario, finding.seed, str(path)).result()
        except BrokenProcessPool:
            return finding


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_prepare_worker)


def _prepare_worker() -> None:
    """One thread a worker, and only what is worse than the failures that scenarios cause on purpose is logged."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


@functools.cache
def _bench() -> Bench:
    """The worker's own."""
    return Bench()


@functools.cache
def _wheel(names: tuple[str, ...]) -> list[Scenario]:
    return wheel([one for one in SCENARIOS if not names or one.name in names])


def _run_batch(names: tuple[str, ...], seeds: range) -> Finding | None:
    """The first finding of the batch."""
    turns = _wheel(names)
    for seed in seeds:
        finding = run_seed(_bench(), turns[seed % len(turns)], seed)
        if finding is not None:
            return finding
    return None


def _run_apart(names: tuple[str, ...], seeds: range) -> Finding | None:
    """As `_run_batch`, a process a seed, so that one that kills its process is known."""
    for seed in seeds:
        with _pool(1) as pool:
            try:
                finding = pool.submit(_run_batch, names, range(seed, seed + 1)).result()
            except BrokenProcessPool:
                turns = _wheel(names)
                return Finding(turns[seed % len(turns)].name, seed, "the process died: memory was written that nobody holds any more")
        if finding is not None:
            return finding
    return None


def _record(name: str, seed: int, path: str) -> Finding | None:
    scenario = next(one for one in SCENARIOS if one.name == name)
    bench = Bench()
    file = TapeFile(Path(path), {"scenario": name, "seed": str(seed)})
    recorder = TapeRecorder(file.append)
    finding = run_seed(bench, scenario, seed, recorder)
    recorder.flush()
    file.close()
    return finding
