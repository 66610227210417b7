"""A stage on two cards of one host: what one card says, bits that depend on nothing else, equal bytes on both. Run with `-m gpu`."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import Run, greedy, run, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids
from tests.engine.test_peer import check_bytes, spoken
from tests.engine.test_peer_stages import spoken as spoken_in_stages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards of one host that reach one another"),
]
TOLERANCE = 1e-3  # of float32 sums in another order, on logits of size 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def cards(**changes: object) -> EngineConfig:
    return small(**{"device": "cuda", "peer": "cuda:1", "dtype": "f32", "hot_rows": TOP_K, "decode_batch_limit": 2, **changes})


def near(one: Run, other: Run) -> bool:
    far = max(float((mine - its).abs().max()) for mine, its in zip(one.logits, other.logits, strict=True))
    return one.tokens == other.tokens and far <= TOLERANCE


@pytest.mark.parametrize("depth", [0, 3])
async def test_two_cards_say_what_one_says(checkpoint: Path, depth: int) -> None:
    """Over blocks and misses, drafts or none: one card's greedy tokens; offload is resident and one mirror is two, to the bit."""
    turns = [(ids(130, 3), 9), (ids(3, 4), 66)]
    one = await run(checkpoint, cards(peer="", draft_depth=depth), turns)
    two = await spoken(checkpoint, cards(draft_depth=depth), turns)
    assert near(one, two)
    assert two.statistics is not None
    assert two.statistics.misses > 0, "nothing was read from RAM"
    for changes in ({"placement": "resident"}, {"mirror_replicas": 2}, {"row_format": "f32", "graphs": "off"}):
        assert two.same_bits(await spoken(checkpoint, cards(draft_depth=depth, **changes), turns)), changes


@pytest.mark.parametrize("rows", ["q8g64", "bf16"])
async def test_packed_rows_are_the_owners(checkpoint: Path, rows: str) -> None:
    """Rows that are rounded are rounded once: offload is resident to the bit, and `spoken` compares both cards' bytes."""
    turns = [(ids(97, 1), 12), (ids(64, 2), 5)]
    two = await spoken(checkpoint, cards(row_format=rows, draft_depth=1), turns)
    assert two.same_bits(await spoken(checkpoint, cards(row_format=rows, draft_depth=1, placement="resident"), turns))


@pytest.mark.parametrize("stages", ["2", "1,3"])
async def test_stages_on_two_cards(checkpoint: Path, stages: str) -> None:
    """Several stages on the same pair, cut inside a group too: the bits of one."""
    turns = [(ids(70, 1), 9), (ids(3, 2), 5)]
    one = await spoken(checkpoint, cards(draft_depth=1), turns)
    assert one.same_bits(await spoken_in_stages(checkpoint, cards(stages=stages, draft_depth=1), turns))


async def test_sessions_that_fork_are_cut_and_leave(checkpoint: Path, tmp_path: Path) -> None:
    """Forks, cuts, exports and imports: equal bytes after each, and an archive of a pair goes on."""

    async def say(engine: Engine, session: str, prompt: list[int]) -> list[int]:
        return [token async for chunk in engine.generate(prompt, greedy(6), session=session) for token in chunk.token_ids]

    async with Engine.open(checkpoint, cards(draft_depth=3)) as engine:
        session = await engine.create_session()
        await say(engine, session, ids(140, 5))
        fork = await engine.fork_session(session, 100)
        await engine.truncate_session(fork, 70)
        assert await check_bytes(engine) == 2
        await engine.export_session(session, tmp_path / "kept")
        again = await engine.import_session(tmp_path / "kept")
        assert await check_bytes(engine) == 3
        assert await say(engine, session, ids(4, 7)) == await say(engine, again, ids(4, 7))
        assert await check_bytes(engine) == 3
