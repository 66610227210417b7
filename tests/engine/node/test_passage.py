"""What stages hand on: its buffers, however many lengths it has, and who reads them."""

from pathlib import Path

import pytest
import torch

from engine.node.passage import AnyRows, Form, Passage
from engine.stage_calls import Carried
from streams import CpuBackend, Event
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.cluster_world import cluster_of
from tests.engine.runs import greedy, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids
from tests.streams.channel_world import loopback, turns

FORM = Form(hidden=4, dtype=torch.float32, picks=2, chunk_rows=16)
CHUNK = AnyRows(FORM.chunk_rows)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def bytes_of(passage: Passage) -> int:
    """Of all buffers in host memory."""
    return sum(host.nbytes for host, _ in passage._held.values())


async def test_prompts_of_many_lengths_leave_one_chunk_of_buffers(checkpoint: Path) -> None:
    """At a node and at the head: what prompts of other lengths leave behind is what one full chunk does, step buffers apart."""
    config = small(hot_rows=TOP_K, prefix_cache="off")
    async with cluster_of(checkpoint, config, "1,1,2") as (engine, cluster):
        node = cluster.nodes[1].node
        assert node is not None
        assert node.held is not None
        held = []
        for rows in (70, *range(20, 40)):
            assert len([chunk async for chunk in engine.generate(ids(rows, 1), greedy(2))]) > 0
            held.append(bytes_of(node.held.arrivals))
        assert held[0] > 0
        assert set(held) == {held[0]}


async def test_a_shorter_chunk_waits_for_the_reader_of_a_longer_one() -> None:
    """They lie in one buffer: it is written only once it is free, and the rows behind the shorter one stay as they were."""
    backend = CpuBackend()
    async with loopback() as (one, two, _):
        sender, receiver = (Passage(channel, backend.stream(name), torch.device("cpu")) for channel, name in ((one, "out"), (two, "in")))
        read: Event[None] = Event("read")
        taken: list[Carried] = []
        for number, (rows, free) in enumerate(((16, ()), (5, (read,)))):
            taken.append(receiver.arrive(CHUNK, rows, FORM, "c.", number, free))
            states, picks = torch.full((rows, 4), number + 1.0), torch.full((rows, 2), number, dtype=torch.int32)
            handed = Carried(Event.completed(None), states, torch.zeros(rows, dtype=torch.int64), picks)
            sender.hand_on(handed, CHUNK, "c.", number)
        await taken[0].event
        await turns(100)
        assert not taken[1].event.done()
        assert torch.equal(taken[0].states, torch.full((16, 4), 1.0))
        read.settle(None, None)
        await taken[1].event
        assert torch.equal(taken[1].states, torch.full((5, 4), 2.0))
        assert torch.equal(taken[0].states[5:], torch.full((11, 4), 1.0))
        assert taken[0].states.data_ptr() == taken[1].states.data_ptr()
        assert len(receiver._held) == 3
    await backend.close()
