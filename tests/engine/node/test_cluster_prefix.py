"""Stored histories on stages of nodes: what is cut off one for the next prompt, and which cuts are refused."""

from pathlib import Path

import pytest

from engine.engine import Engine
from engine.joint import JointMemory
from memory.errors import CopybackInFlight
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.cluster_world import cluster_of
from tests.engine.runs import greedy, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


async def said(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], int]:
    """What is answered, and how many of the prompt's tokens a stored history gave."""
    chunks = [chunk async for chunk in engine.generate(prompt, greedy(count))]
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].usage.cached_tokens


async def chat(engine: Engine) -> list[tuple[list[int], int]]:
    """Turns without a session. The second and third begin like the history before them, cut off less than a block of it, and grow."""
    asked = [*ids(126, 1), *ids(1, 3)]
    spoken = [await said(engine, asked[:126], 10)]  # 135 rows: a copied block ends between the cut and the end
    spoken.append(await said(engine, asked, 40))
    edited = [*asked[:120], *ids(90, 9)]
    return [*spoken, await said(engine, edited, 8), await said(engine, ids(20, 5), 4)]


@pytest.mark.parametrize("cut", ["2", "1,1,2"])
async def test_a_history_that_is_cut_and_grows_on_nodes_says_what_it_says_in_one_process(checkpoint: Path, cut: str) -> None:
    """An answer asked again and a last turn edited, each of which continues the history before; the head goes on after."""
    config = small(hot_rows=TOP_K, prefix_cache="on")
    async with Engine.open(checkpoint, config) as engine:
        alone = await chat(engine)
    assert [cached for _, cached in alone] == [0, 126, 119, 0]  # one less where the hidden state before the cut is not known
    async with cluster_of(checkpoint, config, cut) as (engine, _):
        assert await chat(engine) == alone


async def test_a_cut_below_copied_blocks_waits_for_copies_and_for_nothing_else(checkpoint: Path) -> None:
    """An unanswered growth hides no copy; a commit that was not answered, or rows submitted and not mirrored, may."""
    async with cluster_of(checkpoint, small(hot_rows=TOP_K), "2") as (engine, _):
        session = await engine.create_session()
        async for _ in engine.generate(ids(150, 1), greedy(4), session=session):
            pass
        memory = engine._held.find(session).memory
        assert isinstance(memory, JointMemory)
        await memory.operations.settle()
        (part,) = memory.parts
        assert part.grow(400, None)
        part.check_cut(50)
        part.commit(0)
        with pytest.raises(CopybackInFlight, match="copies of rows behind 50 are in flight"):
            part.check_cut(50)
        part.check_cut(128)
        await memory.operations.settle()
        part.check_cut(50)
        await engine.close_session(session)
