"""Does the search see what it is for? Break one invariant at a time and let it look.

Each mutant runs in a child forked from a process that holds clean references, under the seeds that `forebay tape search` runs first, and
stops at the first finding. The number of seeds it took is printed (-s shows it).
"""

import asyncio
import gc
import logging
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import pytest
import structlog

from engine.search.branches import branch_scripts
from engine.search.conversations import SCRIPTS
from engine.search.forks import FORKS
from engine.search.hunt import SCENARIOS, wheel
from engine.search.reference import Bench
from engine.search.scenario import Scenario, run_seed
from tests.mutants import MUTANTS

SEEDS_MAX = 160  # once round the wheel and more
SECONDS_MAX = 1800  # the first test of a fixture waits for all its mutants, on a machine that does other work too

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]


CONTROL = "nothing is broken"


@pytest.fixture(scope="module")
def bench() -> Bench:
    """With every reference computed before anything is broken."""
    made = Bench()

    async def prepare() -> None:
        for script in (*SCRIPTS, *await branch_scripts(made)):
            await made.reference(script)

    asyncio.run(prepare())
    return made


def _look(bench: Bench, mutant: str, scenarios: Sequence[Scenario], answers: Connection) -> None:
    """In the child: break it, then run seeds until one fails. Answers each seed before it runs, then the finding, "" for none."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    if mutant != CONTROL:
        MUTANTS[mutant]()
    turns, finding = wheel(scenarios), None
    for seed in range(SEEDS_MAX):
        answers.send(seed)
        finding = run_seed(bench, turns[seed % len(turns)], seed)
        if finding is not None:
            break
    answers.send(str(finding or ""))


@dataclass
class _Child:
    """A mutant at work."""

    mutant: str
    process: ForkProcess
    answers: Connection
    seeds: int = 0

    @classmethod
    def start(cls, bench: Bench, mutant: str, scenarios: Sequence[Scenario]) -> "_Child":
        context = multiprocessing.get_context("fork")
        # Arenas are not forked (MADV_DONTFORK). One that waits here to be collected would, in the child, unmap whatever the child has
        # mapped at its address by then: a death that is nobody's finding.
        gc.collect()
        gc.freeze()
        answers, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_look, args=(bench, mutant, scenarios, theirs))
        process.start()
        theirs.close()
        return cls(mutant, process, answers)

    def hear(self) -> str | None:
        """Take one answer; the finding once there is one."""
        try:
            answer = self.answers.recv()
        except EOFError:
            self.process.join()
            return f"seed {self.seeds - 1}: the process died with {self.process.exitcode}"
        if isinstance(answer, int):
            self.seeds = answer + 1
            return None
        self.process.join()
        return str(answer)


def look_for(
    bench: Bench, mutants: Sequence[str], scenarios: Sequence[Scenario] = SCENARIOS, at_once: int = 2
) -> dict[str, tuple[int, str]]:
    """Seeds run and the finding ("": none) of each mutant."""
    found: dict[str, tuple[int, str]] = {}
    left, running = list(mutants), dict[Connection, _Child]()
    try:
        while left or running:
            while left and len(running) < at_once:
                child = _Child.start(bench, left.pop(0), scenarios)
                running[child.answers] = child
            for answers in wait(list(running)):
                child = running[answers]  # type: ignore[index]  # only connections are waited for
                finding = child.hear()
                if finding is not None:
                    found[child.mutant] = (child.seeds, finding)
                    print(f"{child.mutant:40} {child.seeds:4} seeds  {finding[:160]}", flush=True)
                    del running[child.answers]
    finally:  # a timeout's failure must not leave them at work beside the tests that follow
        for child in running.values():
            child.process.kill()
            child.process.join()
    return found


@pytest.fixture(scope="module")
def found(bench: Bench) -> dict[str, tuple[int, str]]:
    """What the search says of each mutant."""
    return look_for(bench, [*MUTANTS, CONTROL])


@pytest.mark.timeout(SECONDS_MAX)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_search_catches(mutant: str, found: dict[str, tuple[int, str]]) -> None:
    """With the invariant broken, some seed of the budget fails."""
    seeds, finding = found[mutant]
    assert finding, f"{MUTANTS[mutant].__doc__} Nobody noticed in {seeds} seeds."
    misfit = next((name for name in ("TypeError", "AttributeError", "NameError", "ImportError") if f": {name}: " in finding), None)
    assert misfit is None, f"the mutant does not fit the code any more: {finding}"


@pytest.mark.timeout(SECONDS_MAX)
def test_the_search_catches_nothing_where_nothing_is_broken(found: dict[str, tuple[int, str]]) -> None:
    """The same budget of seeds, in a child forked alike, over the code as it is: no finding, so that a finding means something."""
    seeds, finding = found[CONTROL]
    assert seeds == SEEDS_MAX
    assert not finding, finding


BY_FORKS = (
    "slot_map_not_cleared_on_fork", "block_freed_with_a_copy_in_flight", "source_freed_under_its_fork", "fork_behind_a_fork_that_failed",
    "shared_block_written_again",
)  # fmt: skip


@pytest.fixture(scope="module")
def found_by_forks(bench: Bench) -> dict[str, tuple[int, str]]:
    """What the scenarios of forks say of theirs, with none of the others."""
    return look_for(bench, BY_FORKS, FORKS)


@pytest.mark.timeout(SECONDS_MAX)
@pytest.mark.parametrize("mutant", BY_FORKS)
def test_forks_alone_catch(mutant: str, found_by_forks: dict[str, tuple[int, str]]) -> None:
    """What forks are for is seen by the families of sessions in `engine/search/forks.py` themselves."""
    seeds, finding = found_by_forks[mutant]
    assert finding, f"{MUTANTS[mutant].__doc__} Nobody noticed in {seeds} seeds."
