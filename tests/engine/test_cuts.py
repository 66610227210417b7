"""Cancels at every await: the counting itself, the scenarios that try them all, and that they see what a cancel breaks."""

import asyncio
from typing import Any

import pytest

from engine.search.awaits import Cut, cut_off
from engine.search.cuts import CUTS
from engine.search.reference import Bench
from engine.search.scenario import run_seed
from memory.operations import Operations

BY_NAME = {scenario.name: scenario for scenario in CUTS}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


async def _three(seen: list[str]) -> None:
    """Three awaits, one of them in its clean-up."""
    try:
        seen.append("first")
        await asyncio.sleep(0)
        seen.append("second")
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "arrived")
        await future
        seen.append("arrived")
    finally:
        seen.append("cleaning")
        await asyncio.sleep(0)
        seen.append("clean")


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("where", "says"),
    [
        ({"nth": 1}, "first cleaning clean"),
        ({"nth": 2}, "first second cleaning clean"),
        ({"nth": 2, "late": True}, "first second cleaning clean"),
        ({"nth": 3}, "first second arrived cleaning"),
        ({"nth": 1, "twice": True}, "first cleaning"),
        ({"nth": 4}, "first second arrived cleaning clean"),
    ],
    ids=str,
)
async def test_a_coroutine_is_cancelled_where_asked(where: dict[str, Any], says: str) -> None:
    """The nth await is the one that ends, at its begin or as its result is there; one too many changes nothing and is known."""
    seen: list[str] = []
    cut = Cut(**where)
    await cut_off(_three(seen), cut)
    assert " ".join(seen) == says
    assert cut.struck == (cut.nth < 4)


async def test_what_a_cut_coroutine_raises_is_raised() -> None:
    """An error on the way out of a cancel is not mistaken for the cancel."""

    async def fails() -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise ZeroDivisionError from None

    with pytest.raises(ZeroDivisionError):
        await cut_off(fails(), Cut(1))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_await_may_be_cancelled(bench: Bench, name: str, seed: int) -> None:
    """Whoever waits is cut off at each of its awaits, and nothing is lost, left behind or changed for others."""
    finding = run_seed(bench, BY_NAME[name], seed)
    assert finding is None, str(finding)


def test_a_cancelled_wait_that_lets_go_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With waiters that forget, when cancelled, what is still in flight, cutting barriers off finds it."""
    real = Operations.settle

    async def forgetful(self: Operations) -> None:
        try:
            await real(self)
        except asyncio.CancelledError:
            self._freezing.clear()
            raise

    monkeypatch.setattr(Operations, "settle", forgetful)
    findings = (run_seed(bench, BY_NAME["each await of a barrier"], seed) for seed in range(20))
    assert any(findings)
