"""A scenario, one run of it, and what a failing run leaves: a finding.

Runs one scenario under one seed on the virtual backend, sealed from the world, with a watch on every loop round.

Invariants:
1. A seed says everything: the same scenario and seed give the same run, and so the same finding.
2. Whatever goes wrong is a finding: an assertion, an exception nobody expected, a raced buffer, rows that differ, something still held,
   and a run in which nothing is in flight and nobody goes on.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from engine.search.reference import Bench
from engine.search.watch import Watch
from streams import Fault, Observer, SeededOrder, VirtualBackend, sealed

__all__ = ["Finding", "Scenario", "Scene", "run_seed"]

_STILL_ROUNDS = 4096  # loop rounds without work in flight or submitted after which the run is stuck; a seed idles 40 at most
_CANCELS_MAX = 100


@dataclass
class Scene:
    """One run: what a scenario plays with."""

    bench: Bench
    seed: int
    rng: random.Random
    backend: VirtualBackend
    faulty: bool  # whether anything was made to fail: sessions may then break
    watch: Watch = field(default_factory=Watch)
    at_end: list[Callable[[], None]] = field(default_factory=list)  # checks once the backend is closed
    notes: dict[str, str] = field(default_factory=dict)  # what was drawn, for who reads the tape


@dataclass(frozen=True, slots=True)
class Scenario:
    """`play` runs it and asserts; `faults` draws what goes wrong. `weight`: its share of the seeds."""

    name: str
    play: Callable[[Scene], Awaitable[None]]
    faults: Callable[[random.Random], tuple[Fault, ...]] = lambda rng: ()
    weight: int = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """A seed that fails, and how, in one line."""

    scenario: str
    seed: int
    error: str

    def __str__(self) -> str:
        return f"{self.scenario}, seed {self.seed}: {self.error}"


def run_seed(
    bench: Bench, scenario: Scenario, seed: int, observer: Observer | None = None, notes: dict[str, str] | None = None
) -> Finding | None:
    """Run a scenario under a seed in a loop of its own. Returns what went wrong, or None.

    Args: notes: filled with what the seed drew: faults, and an engine's settings, as JSON texts.
    """
    try:
        asyncio.run(_run(bench, scenario, seed, observer, {} if notes is None else notes))
    except Exception as error:
        return Finding(scenario.name, seed, _words(error))
    return None


async def _run(bench: Bench, scenario: Scenario, seed: int, observer: Observer | None, notes: dict[str, str]) -> None:
    rng = random.Random(f"{scenario.name} {seed}")
    faults = scenario.faults(rng)
    notes["faults"] = msgspec.json.encode(faults).decode()
    backend = VirtualBackend(SeededOrder(seed, faults=faults), observer=observer)
    scene = Scene(bench, seed, rng, backend, faulty=any(fault.kind == "fail" for fault in faults), notes=notes)
    with sealed():
        await _watched(scene, asyncio.ensure_future(scenario.play(scene)))
    await backend.close()
    assert backend.statistics().in_flight == 0, "operations outlived their backend"
    for check in scene.at_end:
        check()


async def _watched(scene: Scene, playing: "asyncio.Future[None]") -> None:
    """Poll the watch every loop round until the play is over; end it when the watch objects or nothing moves any more."""
    still, seen = 0, 0
    try:
        while not playing.done():
            scene.watch.poll()
            still += 1
            if still % 64 == 0:
                statistics = scene.backend.statistics()
                if statistics.in_flight or statistics.submitted != seen:
                    still, seen = 0, statistics.submitted
            assert still < _STILL_ROUNDS, "nothing is in flight and nobody goes on"
            await asyncio.sleep(0)
    except BaseException:
        await _end(playing)
        raise
    playing.result()


async def _end(playing: "asyncio.Future[None]") -> None:
    """Cancel until it gives in: a run that is stuck may be stuck in its clean-up too."""
    for _ in range(_CANCELS_MAX):
        if playing.done():
            break
        playing.cancel()
        await asyncio.wait([playing, asyncio.ensure_future(_rounds(50))], return_when=asyncio.FIRST_COMPLETED)
    if playing.done() and not playing.cancelled():
        playing.exception()  # asked for, so that asyncio does not report it as lost


async def _rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _words(error: BaseException) -> str:
    """The first failure inside groups, as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
