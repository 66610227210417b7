"""Steps of a pair as two graphs that run at once: the bits of steps issued anew, whatever happens between them. Run with `-m gpu`.

On two cards where there are two; everything also with both halves on one card, each with its streams, its graph and its scratch.
"""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.device import device_of, streams_of
from engine.engine import Engine
from engine.errors import SessionBroken
from engine.pair_graphs import pair_recorder
from kernels.flag import advance_epoch, await_flag, mark_lost, raise_flag
from streams.event import Event
from streams.graphs import PairRecorder
from streams.stream import Stream
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import collect, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids
from tests.engine.test_pair_graphs import scenario
from tests.engine.test_peer import spoken

# Two graphs on one card have more branches than a driver has queues for, unless it is told so before it starts; two cards have their own.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MANY = 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@pytest.fixture(params=["one card", "two cards"])
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the peer is. That it is the owner's own card is refused, except here."""
    if request.param == "two cards":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two cards of one host that reach one another")
        return torch.device("cuda", 1)
    monkeypatch.setattr("engine.engine.check_peer", lambda owner, config: owner if config.peer else None)
    return torch.device("cuda", 0)


def cards(other: torch.device, **changes: object) -> EngineConfig:
    return small(
        **{"device": "cuda", "peer": str(other), "dtype": "f32", "hot_rows": TOP_K, "decode_batch_limit": 2, "graphs": "on", **changes}
    )


def recorder_of(engine: Engine) -> PairRecorder:
    recorder = engine.stage.recorder
    assert isinstance(recorder, PairRecorder)
    return recorder


def check_epochs(engine: Engine) -> int:
    """Compare both devices' counts of replays, with nothing in flight, and that none was lost. Returns how many there were."""
    crossing = recorder_of(engine).crossing
    assert crossing is not None
    own, its = (int(epoch) for epoch in crossing.epoch_of.values())
    assert own == its, f"the owner replayed {own} times, the peer {its} times"
    assert int(crossing.lost[0]) == 0
    return own


def word(card: torch.device | None = None) -> Tensor:
    return torch.zeros(8, dtype=torch.int64, pin_memory=True) if card is None else torch.ones(1, dtype=torch.int64, device=card)


def test_a_wait_ends_when_another_stream_raises_its_flag() -> None:
    """Launched before what it waits for, on a card's other stream; and without that it gives up, says which epoch, and ends the next."""
    card = torch.device("cuda", 0)
    flag, lost, epoch, rows = word(), word(), word(card), torch.zeros(3, dtype=torch.int64, device=card)
    seen = torch.zeros(1, device=card)
    for work in (advance_epoch, partial(raise_flag, flag), partial(await_flag, flag, lost=lost), partial(mark_lost, rows, lost, mark=5)):
        work(epoch=epoch)  # compiled
    seen.zero_().fill_(0)  # loaded: a driver may load a kernel only when nothing runs, and then what waits would have to end first
    torch.cuda.synchronize()
    flag.zero_()  # by the host, behind the launch that raised it
    waiting, raising = (torch.cuda.Stream(card) for _ in range(2))
    with torch.cuda.stream(waiting):
        await_flag(flag, epoch, lost)
        seen.fill_(1)
    time.sleep(0.05)
    assert not waiting.query(), "the wait did not wait"
    with torch.cuda.stream(raising):
        raise_flag(flag, epoch)
    torch.cuda.synchronize()
    assert (int(flag[0]), int(lost[0]), float(seen)) == (2, 0, 1.0)
    advance_epoch(epoch)
    began = time.monotonic()
    await_flag(flag, epoch, lost, 20_000)
    await_flag(flag, epoch, lost)
    mark_lost(rows, lost, epoch, 7)
    torch.cuda.synchronize()
    print(f"20,000 looks: {time.monotonic() - began:.3f} s")
    assert (int(lost[0]), rows.tolist()) == (3, [7, 7, 7])


def test_two_graphs_hand_a_value_to_and_fro(other: torch.device) -> None:
    """Fifty times a replay, each part adds one to what it copies from the other's; 200 replays, one behind another, lose none."""
    if other.index == 1:
        torch.zeros(1, device=other).to("cuda:0")
        torch.zeros(1, device="cuda:0").to(other)
    card = torch.device("cuda", 0)
    mine, its = torch.zeros(1, device=card), torch.zeros(1, device=other)

    def pass_on(target: Tensor, source: Tensor) -> None:
        from kernels.replicate import copy_across

        copy_across(target, source)
        target.add_(1)

    with torch.cuda.device(other):
        pass_on(its, mine)
    pass_on(mine, its)
    mine.zero_()
    for each in {card, other}:
        torch.cuda.synchronize(each)
    recorder = pair_recorder(card, other)

    def issue(stream_of: object) -> None:
        assert callable(stream_of)
        here, there = stream_of("s.compute"), stream_of("s.peer.compute")
        assert isinstance(here, Stream)
        event: Event[None] = here.submit(lambda: None, label="begin")
        for _ in range(50):
            event = there.submit(partial(pass_on, its, mine), label="there", after=(event,))
            event = here.submit(partial(pass_on, mine, its), label="here", after=(event,))

    replay = recorder.record(issue, "s.compute")
    stream = torch.cuda.Stream(card)
    began = time.monotonic()
    with torch.cuda.stream(stream):
        for _ in range(200):
            replay()
    torch.cuda.synchronize(card)
    print(f"20,000 edges between graphs: {(time.monotonic() - began) / 20_000 * 1e6:.1f} us each")
    assert float(mine) == 20_000
    assert recorder.crossing is not None
    assert [int(epoch) for epoch in recorder.crossing.epoch_of.values()] == [200, 200]
    assert int(recorder.crossing.lost[0]) == 0


@pytest.mark.parametrize("depth", [0, 3])
async def test_replays_give_the_bits_of_steps_issued_anew(checkpoint: Path, other: torch.device, depth: int) -> None:
    """300 tokens over blocks and misses, drafts or none: graphs or not, offloaded or resident, tokens and logits are equal, and both
    devices' bytes after each turn."""
    turns = [(ids(130, 3), 9), (ids(3, 4), MANY)]
    found = {}
    for placement, graphs in (("offload", "on"), ("offload", "off"), ("resident", "on")):
        began = time.monotonic()
        found[placement, graphs] = await spoken(checkpoint, cards(other, draft_depth=depth, placement=placement, graphs=graphs), turns)
        print(f"depth {depth}, {placement}, graphs {graphs}: {time.monotonic() - began:.1f} s")
    replayed = found["offload", "on"]
    assert replayed.statistics is not None
    assert replayed.statistics.misses > 0, "nothing was read from RAM"
    for (placement, graphs), run in found.items():
        assert replayed.same_bits(run), f"{placement}, graphs {graphs}"


@pytest.mark.parametrize("depth", [0, 3])
async def test_forks_cuts_stops_and_company(checkpoint: Path, other: torch.device, depth: int) -> None:
    """What happens between steps happens on both devices behind and before the graphs: the bits of steps issued anew."""
    runs = []
    for graphs in ("on", "off"):
        async with Engine.open(checkpoint, cards(other, draft_depth=depth, graphs=graphs, row_format="q8g64")) as engine:
            runs.append(await scenario(engine, 30))
            if graphs == "on":
                assert check_epochs(engine) > 100
    for number, (one, anew) in enumerate(zip(*runs, strict=True)):
        assert one.same_bits(anew), f"run {number}"


async def test_a_graph_that_is_not_launched_breaks_its_session_only(
    checkpoint: Path, other: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's graph, launched alone, ends without the peer's; then other sessions say their usual tokens by replays."""
    async with Engine.open(checkpoint, cards(other, prefix_cache="off")) as engine:
        usual = await collect(engine, [(ids(70, 3), 20)])
        launch, launches = torch.cuda.CUDAGraph.replay, []

        def refusing(graph: torch.cuda.CUDAGraph) -> None:
            launches.append(graph)
            if len(launches) == 20:  # the tenth step's second, the peer's
                raise RuntimeError("the driver refuses this launch")
            launch(graph)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", refusing)
        began = time.monotonic()
        with pytest.raises(SessionBroken, match="refuses this launch"):
            await collect(engine, [(ids(80, 1), 60)])
        assert time.monotonic() - began < 5, "the owner's graph was not told that nobody comes"
        for _ in range(2):
            assert usual.same_bits(await collect(engine, [(ids(70, 3), 20)]))
        assert len(launches) > 60
    assert launches[0] is not launches[1]


async def test_a_flag_that_never_comes_breaks_its_session(checkpoint: Path, other: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait has an end, and its step says so; what the engine does then is as after any other failure."""
    raised = []

    def forgetful(flag: Tensor, epoch: Tensor) -> None:
        raised.append(flag)
        if torch.cuda.is_current_stream_capturing() and len(raised) % 7 == 0:
            return
        raise_flag(flag, epoch)

    monkeypatch.setattr("engine.pair_graphs.raise_flag", forgetful)
    monkeypatch.setattr("engine.pair_graphs.await_flag", partial(await_flag, looks_max=20_000))
    config = cards(other, prefix_cache="off")
    device = device_of(config)
    backend = streams_of(device, None, peer=other)  # a backend of one's own is not warmed up
    try:
        async with Engine.open(checkpoint, config, backend=backend) as engine:
            for _ in range(2):
                with pytest.raises(SessionBroken, match="waited for one another in vain"):
                    await collect(engine, [(ids(80, 1), 8)])
    finally:
        await backend.close()
