"""The short form of the long runs: clients that leave, lie and dawdle, and what a token costs the server."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.grammar.random_model import random_model
from tests.server_chaos import Chaos, Left, run_chaos
from tests.server_numbers import idle_bytes, token_us

HELD = Left(3, 17, 0, 1, 4_096, 0, 0, 300 << 20)


def test_what_counts_as_a_leak() -> None:
    """Anything more at the end than at the beginning is one, and memory that the second half took; less is none."""
    assert Chaos(left=[HELD, HELD, HELD]).leaks == []
    assert Chaos(left=[HELD, HELD, replace(HELD, tasks=2, resident_bytes=1)]).leaks == []
    for name in ("tasks", "descriptors", "blocks", "pool_buffers", "pool_bytes", "sessions", "running"):
        (leak,) = Chaos(left=[HELD, HELD, replace(HELD, **{name: getattr(HELD, name) + 1})]).leaks
        assert leak.startswith(name)
    (leak,) = Chaos(left=[HELD, HELD, replace(HELD, resident_bytes=400 << 20)]).leaks
    assert leak.startswith("memory")
    assert Chaos(left=[HELD, replace(HELD, resident_bytes=400 << 20), replace(HELD, resident_bytes=400 << 20)]).leaks == []


@pytest.mark.slow
async def test_hundreds_of_bad_clients_leave_nothing_behind(tmp_path: Path) -> None:
    """Aborts, garbage, half bodies, slow readers and forms beside plain requests: no task, descriptor, block or byte stays, and no 5xx."""
    chaos = await run_chaos(random_model(tmp_path / "model"), 240, seed=7, clients=12)
    assert not chaos.unexplained
    assert not chaos.leaks
    assert len(chaos.kinds) == 9
    assert chaos.statuses[200] > 50
    assert Counter(status // 100 for status in chaos.statuses)[4] >= 3  # several kinds of refusals


@pytest.mark.slow
@pytest.mark.alone
def test_a_streamed_token_costs_at_most_three_bare_ones() -> None:
    """Processor time a token at 64 streams, beside a bare writer of the same events, in turns: each has its least of up to six, since a
    machine that others use adds up to half of it, and takes nothing away. The clients' loop does not debug, which would slow them down."""
    found: dict[str, list[float]] = {"bare": [], "forebay": []}
    for turn in range(6):
        for kind, costs in found.items():
            costs.append(asyncio.run(token_us(kind, 1_000)))
        if turn and min(found["forebay"]) <= 3 * min(found["bare"]):
            break
    assert min(found["forebay"]) <= 3 * min(found["bare"]), found


@pytest.mark.slow
async def test_waiting_streams_are_small() -> None:
    """300 streams that wait take less than their share of 100 MB a thousand."""
    assert await idle_bytes(300) < 300 * 100_000
