"""Many seeds over several processes: finds the smallest that fails, records its tape, and runs it again from that.

Knows scenarios by name only: names and seeds cross to the workers, findings come back.

Invariants:
1. Seed n runs scenario n of the wheel, so a budget of any size covers all scenarios by weight.
2. After a finding only smaller seeds go on: what is returned is the smallest failing seed of the budget.
3. A worker that dies is a finding too; its seeds are run again one by one, each in a process of its own, to name the one.
4. The tape is recorded in a fresh process, which no failed run has touched, and so is every repetition of it.
5. A tape's header says which scenario and seed it is of, what the seed drew and what was found: a repetition needs nothing else.
"""

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
import torch

from engine.errors import BadSetting
from engine.search.appends import APPENDS
from engine.search.branches import BRANCHES
from engine.search.conversations import CONVERSATIONS
from engine.search.cuts import CUTS
from engine.search.forks import FORKS
from engine.search.images import IMAGES
from engine.search.lives import LIVES
from engine.search.reference import Bench
from engine.search.scenario import Finding, Scenario, run_seed
from engine.settings import nearest
from streams import Tape, TapeFile, TapeMismatch, TapeRecorder
from streams.tape import write_notes

__all__ = ["SCENARIOS", "Outcome", "hunt", "record", "repeat", "single", "wheel"]

SCENARIOS: tuple[Scenario, ...] = (*CONVERSATIONS, *BRANCHES, *LIVES, *APPENDS, *FORKS, *IMAGES, *CUTS)
_BATCH_SEEDS = 8  # of one task: enough to hide its cost, few enough to show progress


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search did. `seeds`: run to their end; `seconds`: of the whole search, workers' start included; `seeds_of`: each scenario."""

    seeds: int
    seconds: float
    finding: Finding | None
    seeds_of: Mapping[str, int] = field(default_factory=dict)


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
    ran: list[range] = []
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
            ran.append(batch if finding is None else range(batch[0], finding.seed + 1))
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
    return Outcome(done, time.perf_counter() - started, found, _seeds_of(tuple(names), ran))


def _seeds_of(names: tuple[str, ...], ran: Sequence[range]) -> dict[str, int]:
    """How often each scenario ran, none left out."""
    turns = _wheel(names)
    counted = Counter(turns[seed % len(turns)].name for batch in ran for seed in batch)
    return {scenario.name: counted[scenario.name] for scenario in SCENARIOS if scenario in turns}


def single(seed: int, names: Sequence[str] = ()) -> Outcome:
    """Run this seed alone, in a process of its own: the scenario that `hunt` with the same names would give it."""
    started = time.perf_counter()
    found = _run_apart(tuple(names), range(seed, seed + 1))
    return Outcome(1, time.perf_counter() - started, found)


def record(finding: Finding, path: Path) -> Finding | None:
    """Run the finding's seed again in a fresh process and write its tape. Returns what it found this time.

    Raises: OSError: the file cannot be written.
    """
    with _pool(1) as pool:
        try:
            return pool.submit(_record, finding.scenario, finding.seed, path).result()
        except BrokenProcessPool:  # what came to the disk before it died may still say where
            _rough(path).replace(path)
            return finding


def repeat(tape: Tape, path: Path | None = None) -> str:
    """Run the seed that a tape of `record` is of, in a fresh process, and compare: order, outcomes and finding.

    Args: path: where the repetition's own tape goes, if anywhere.
    Returns: the finding, in words; "" if there was none then and now.
    Raises: TapeMismatch: the run differs from the tape, and where; BadSetting: the tape does not say what to run; OSError: as `record`.
    """
    notes = tape.header.notes
    scenario, seed, then = (notes.get(name) for name in ("scenario", "seed", "found"))
    known = [one.name for one in SCENARIOS]
    if scenario not in known:
        raise BadSetting(f"the tape is of scenario {scenario!r}, which is not known here{nearest(str(scenario), known)}")
    if seed is None or not seed.isdecimal() or then is None:
        raise BadSetting("the tape's header has no seed or does not say what was found: the run did not come to its end")
    with TemporaryDirectory() as folder:
        mine = path or Path(folder) / "again.tape"
        finding = record(Finding(scenario, int(seed), then), mine)
        difference = tape.diff(Tape.read(mine))
    if difference is not None:
        raise TapeMismatch(str(difference))
    now = "" if finding is None else finding.error
    if now != then:
        raise TapeMismatch(f"the run ends with {now or 'nothing found'}; on the tape with {then or 'nothing found'}")
    return "" if finding is None else str(finding)


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


def _rough(path: Path) -> Path:
    """Where a tape is written until its header can say what was found."""
    return path.with_name(path.name + ".part")


def _record(name: str, seed: int, path: Path) -> Finding | None:
    scenario = next(one for one in SCENARIOS if one.name == name)
    notes = {"scenario": name, "seed": str(seed)}
    rough = _rough(path)
    file = TapeFile(rough, notes)
    recorder = TapeRecorder(file.append)
    finding = run_seed(Bench(), scenario, seed, recorder, notes)
    recorder.flush()
    file.close()
    write_notes(rough, path, {**notes, "found": "" if finding is None else finding.error})
    rough.unlink()
    return finding
