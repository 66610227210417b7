"""Steps of a pair as two graphs, over a device that is not there: any order the graphs allow gives the bits of steps issued anew.

The same on a card: `test_pair_graphs_on_device.py`.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import SessionBroken
from engine.protocol import SessionId
from streams.capture import Recorder
from streams.crossing import Crossing
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import Run, collect, greedy
from tests.engine.test_engine_exactness import NAME, ids
from tests.engine.test_peer import check_bytes, peered, spoken
from tests.streams.fake_graphs import FakeDevice, FakeRecorder

slow = pytest.mark.slow
TURNS = [(ids(66, 3), 6), (ids(3, 4), 6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def faked(monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> list[FakeRecorder]:
    """Have stages with a peer record their steps as graphs of `fake`; returns the recorders made so far."""
    made: list[FakeRecorder] = []

    def recorder_of(config: EngineConfig, device: torch.device, peer: object) -> Recorder | None:
        if config.graphs != "on" or peer is None:
            return None
        made.append(FakeRecorder(fake, Crossing({"": device, ".peer.": torch.device("cpu", 1)}, fake.flag_work())))
        return made[-1]

    monkeypatch.setattr("engine.stage._recorder", recorder_of)
    fake.install(monkeypatch)
    return made


@pytest.mark.parametrize(
    ("depth", "changes", "queues"),
    [
        (0, {}, False),
        (3, {}, True),
        pytest.param(0, {"placement": "resident"}, True, marks=slow),
        pytest.param(3, {"placement": "resident", "row_format": "q8g64"}, False, marks=slow),
        pytest.param(1, {"mirror_replicas": 2}, True, marks=slow),
    ],
)
async def test_two_graphs_give_the_bits_of_steps_issued_anew(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, depth: int, changes: dict[str, object], queues: bool
) -> None:
    """Whatever a device runs first of what is left open, and with one queue for each graph: tokens, logits, and the bytes on both."""
    usual = await spoken(checkpoint, peered(draft_depth=depth, **changes), TURNS)
    for seed in range(2):
        fake = FakeDevice(seed, queues)
        made = faked(monkeypatch, fake)
        found = await spoken(checkpoint, peered(draft_depth=depth, graphs="on", **changes), TURNS)
        assert usual.same_bits(found), f"seed {seed}"
        (recorder,) = made
        assert recorder.crossing is not None
        assert all(int(epoch) >= 2 for epoch in recorder.crossing.epoch_of.values()), "no step was a replay"
        assert fake.stuck == 0


async def scenario(engine: Engine, tokens: int) -> list[Run]:
    """Company whose members come and go, a fork, a cut, a generation left in the middle, and turns behind all of them.

    Args: tokens: of a turn, about.
    """

    async def say(session: SessionId, prompt: list[int], tokens: int) -> Run:
        result = Run()
        async for chunk in engine.generate(prompt, greedy(tokens), session=session):
            result.tokens.extend(chunk.token_ids)
            result.logits.extend(chunk.logits)
        return result

    guests = [collect(engine, [(ids(60 + 9 * number, number), tokens + 3 * number)]) for number in range(3)]
    together = await asyncio.gather(*guests)
    session = await engine.create_session()
    said = [await say(session, ids(140, 5), tokens)]
    fork = await engine.fork_session(session, 100)
    await engine.truncate_session(fork, 70)
    said += await asyncio.gather(say(session, ids(4, 7), tokens), say(fork, ids(5, 6), tokens))
    async with engine.generate(ids(5, 8), greedy(8 * tokens), session=fork) as left:
        async for _ in left:
            break
    await engine.truncate_session(fork, 70 + tokens)
    said.append(await say(fork, ids(3, 9), tokens))
    assert await check_bytes(engine) == 2
    return [*together, *said]


@slow
async def test_forks_cuts_stops_and_company(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens between steps happens on both devices behind and before the graphs: the bits of steps issued anew."""
    faked(monkeypatch, FakeDevice(5, queues=True))
    runs = []
    for graphs in ("on", "off"):
        async with Engine.open(checkpoint, peered(draft_depth=3, graphs=graphs, decode_batch_limit=2)) as engine:
            runs.append(await scenario(engine, 12))
    assert all(one.same_bits(anew) for one, anew in zip(*runs, strict=True))


@pytest.mark.parametrize("what", ["owner", pytest.param("peer", marks=slow), "flag"])
async def test_a_replay_that_fails_breaks_its_session_only(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A graph that cannot be launched, or a flag that never comes, ends the requests of that step with SessionBroken; another session says
    its usual tokens then, by replays too, on the same bytes."""
    usual = await spoken(checkpoint, peered(), [(ids(70, 3), 5)])
    fake = FakeDevice(1)
    recorders = faked(monkeypatch, fake)
    async with Engine.open(checkpoint, peered(graphs="on", prefix_cache="off")) as engine:
        await collect(engine, [(ids(20, 1), 5)])
        (recorder,) = recorders
        own, its = fake.graphs[2:4]  # behind the first of each device
        crossing = recorder.crossing
        assert crossing is not None
        flag = crossing._flags[3].data_ptr()
        if what == "flag":
            fake.lowered.add(flag)
        else:
            fake.refuse.append(own if what == "owner" else its)
        with pytest.raises(SessionBroken, match="in vain" if what == "flag" else "refuses this launch"):
            await collect(engine, [(ids(80, 1), 8)])
        fake.lowered.discard(flag)
        before = int(crossing.epoch_of[""])
        session = await engine.create_session()
        said = [token async for chunk in engine.generate(ids(70, 3), greedy(5), session=session) for token in chunk.token_ids]
        assert int(crossing.epoch_of[""]) > before, "no step was a replay"
        assert await check_bytes(engine) == 1
    assert said == usual.tokens
