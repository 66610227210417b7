"""What is read off a real engine: its counts against what its requests say, its sessions by tier, and its streams while watched."""

import asyncio
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.measures import Tokens
from engine.sampling import Sampling
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import small

PROMPT = [place % 90 for place in range(150)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "shared")


def _greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("placement", ["offload", "resident"])
async def test_counts_are_those_of_the_requests(checkpoint: Path, placement: str) -> None:
    """Tokens are what the requests' own usage says, at the end and midway; a generation waits once a token behind its first."""
    config = small(placement=placement, hot_rows=32, prefix_cache="on")
    async with Engine.open(checkpoint, config) as engine:
        held = await engine.create_session()
        assert engine.instruments.measures().tokens == Tokens()
        async with engine.generate(PROMPT, _greedy(16), session=held) as generation:
            for _ in range(8):
                chunk = await anext(generation)
            midway = engine.instruments.measures()
            assert midway.tokens.prompt == 150
            assert chunk.usage.completion_tokens <= midway.tokens.generated <= 16
            assert (midway.decoding, midway.waiting, midway.appending) == (1, 0, 0)
            assert midway.sessions == {"held": 1, "request": 0, "stored": 0}
            tiers = engine.instruments.tiers("", 10)[0]
            assert (tiers.id, tiers.kind, tiers.phase, tiers.generated) == (held, "held", "decoding", midway.tokens.generated)
            assert 150 <= tiers.rows < 166
            async for _ in generation:
                pass
        again = await asyncio.gather(*(engine.generate(PROMPT, _greedy(5)).complete() for _ in range(2)))
        found = engine.instruments.measures()
        usages = [one.usage for one in again]
        assert found.tokens.generated == 16 + 10
        assert found.tokens.prompt == 150 + sum(usage.prompt_tokens for usage in usages)
        assert found.tokens.cached == sum(usage.cached_tokens for usage in usages) > 0
        assert sum(found.waits.counts) == 15 + 2 * 4
        assert found.waits.sum_s > 0
        assert found.sessions["request"] == 0
        assert found.sessions["held"] == 1
        assert len(engine.instruments.tiers("", 10)) == 1 + found.sessions["stored"]
        assert engine.instruments.tiers("other", 10) == []
        assert len(engine.instruments.tiers("", 1)) == 1
        if placement == "offload":
            assert found.hits + found.misses + found.ring_reads > 0
            assert 0 <= found.lag_rows_most <= found.lag_rows < 64 * (1 + found.sessions["stored"])
        else:
            assert (found.hits, found.misses, found.lag_rows) == (0, 0, 0)
    assert not engine.instruments.open


async def test_bytes_are_those_of_ledger_and_arena(checkpoint: Path) -> None:
    """The arena's bytes add up, blocks of a history are used ones, and sessions' bytes are among what their tiers hold."""
    async with Engine.open(checkpoint, small(hot_rows=32)) as engine:
        before = engine.instruments.measures()
        assert before.arena.used_bytes == 0
        session = await engine.create_session()
        await engine.generate(PROMPT, _greedy(4), session=session).complete()
        found, tiers = engine.instruments.measures(), engine.instruments.tiers("", 10)[0]
        layout = engine.stage.layout
        assert found.arena.used_bytes == tiers.blocks * layout.block_bytes == tiers.host_bytes
        assert tiers.blocks == 3
        assert found.arena.used_bytes + found.arena.reserved_bytes <= found.arena.total_bytes
        assert found.held_bytes["host"]["arena"] >= found.arena.total_bytes
        assert sum(found.held_bytes["device"].values()) >= tiers.device_bytes > 0
        assert found.held_bytes["device"]["hot"] > 0
        assert tiers.mirrored_rows + tiers.ring_rows >= tiers.rows
        assert (tiers.ring_rows_max, tiers.hot_rows_max) == (256, 32)
        assert 0 < tiers.hot_rows <= 32
        await engine.close_session(session)
        assert engine.instruments.measures().arena.used_bytes == 0


async def test_streams_are_seen_while_watched_and_not_otherwise(checkpoint: Path) -> None:
    """Inside a watch the work of compute is there by kind; outside nobody observes the backend."""
    async with Engine.open(checkpoint, small(hot_rows=32)) as engine:
        backend = engine.stage.backend
        assert backend.observer is None
        with engine.instruments.watch() as activity, engine.instruments.watch() as other:
            await engine.generate(PROMPT, _greedy(8)).complete()
            lanes = {lane.stream: lane for lane in activity.take()}
            assert {lane.stream for lane in other.take()} == set(lanes)
        assert backend.observer is None
        assert {"stage0.compute", "stage0.selection", "stage0.prefetch", "stage0.copyback"} == set(lanes)
        assert all(spent > 0 for spent in lanes["stage0.compute"].kinds.values())
        assert "append.attend" in lanes["stage0.compute"].kinds
        counts = {one.name: one for one in engine.instruments.measures().streams}
        seen = sum(lanes["stage0.compute"].kinds.values())
        assert counts["stage0.compute"].busy_s >= seen * (1 - 1e-9) > 0  # sums of seconds round
        assert counts["stage0.copyback"].payload_bytes > 0
        with engine.instruments.watch() as later:
            assert later.take() == []


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["offload", "resident"])
async def test_a_card_can_be_read_while_it_decodes(checkpoint: Path, placement: str) -> None:
    """Counts, tiers and streams are read between replayed steps, whose tokens stay what they are unread; a warm-up counts nothing."""
    config = small(device="cuda", dtype="f32", placement=placement, hot_rows=64, decode_batch_limit=1)
    async with Engine.open(checkpoint, config) as engine:
        instruments = engine.instruments
        assert instruments.measures().tokens == Tokens()
        assert sum(instruments.measures().waits.counts) == 0
        unread = await engine.generate(PROMPT, _greedy(200)).complete()
        read: list[int] = []
        with instruments.watch() as activity:
            async for chunk in engine.generate(PROMPT, _greedy(200)):
                read += chunk.token_ids
                found, tiers = instruments.measures(), instruments.tiers("", 10)
                assert found.tokens.generated >= 200 + len(read)
                assert all(one.rows <= one.tokens for one in tiers)
            lanes = {lane.stream: lane for lane in activity.take()}
        assert tuple(read) == unread.token_ids
        assert lanes["stage0.compute"].kinds["step"] > 0
        assert sum(instruments.measures().waits.counts) == 2 * 199
        assert engine.stage.backend.observer is None
