"""Conversations of every kind at once on stages of nodes, beside the same ones in one process: the same tokens everywhere."""

import asyncio
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import UnknownSession
from engine.sampling import Sampling
from tests.engine.node.cluster_world import cluster_of

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo_model"
pytestmark = pytest.mark.timeout(240)


def config(**changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "device": "cpu", "host_memory_bytes": 128 << 20, "hot_rows": 512, "append_chunk_rows": 128, "prefix_cache": "on", **changes,
    }  # fmt: skip
    return EngineConfig(**settings)  # type: ignore[arg-type]  # field names are checked by the dataclass itself


async def said(engine: Engine, prompt: list[int], count: int, **asked: object) -> list[int]:
    sampling = Sampling(max_tokens=count, temperature=0.8, seed=7, ignore_eos=True)
    return [token async for chunk in engine.generate(prompt, sampling, **asked) for token in chunk.token_ids]  # type: ignore[arg-type]


async def story(engine: Engine, directory: Path, name: str) -> list[list[int]]:
    """Turns, forks, cuts, an export and an import, three at a time, with stored histories and one that is left in its middle."""
    one, two = await engine.create_session(), await engine.create_session()
    prompts = [list(range(300 + 40 * number, 500 + 40 * number)) for number in range(3)]
    spoken = list(
        await asyncio.gather(
            said(engine, prompts[0], 10, session=one), said(engine, prompts[1], 16, session=two), said(engine, prompts[2], 6)
        )
    )  # fmt: skip
    fork = await engine.fork_session(one, 170)
    spoken += await asyncio.gather(said(engine, [5, 6, 7], 6, session=fork), said(engine, [5, 6, 7], 6, session=one))
    async with engine.generate(prompts[0], Sampling(max_tokens=500, ignore_eos=True)) as left:
        await anext(left)
    await engine.truncate_session(two, 205)
    spoken.append(await said(engine, [9], 6, session=two))
    await engine.export_session(two, directory / name)
    await engine.close_session(two)
    spoken.append(await said(engine, [*prompts[1][:150], 11], 6))  # begins with a history of somebody else's turn
    back = await engine.import_session(directory / name)
    spoken.append(await said(engine, [12, 13], 6, session=back))
    for session in (one, fork, back):
        await engine.close_session(session)
    with pytest.raises(UnknownSession):
        await engine.close_session(one)
    return spoken


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="offload", marks=pytest.mark.long),
        pytest.param({"draft_depth": 3}, id="drafts", marks=pytest.mark.slow),
        pytest.param({"placement": "resident"}, id="resident", marks=pytest.mark.long),
    ],
)
async def test_conversations_on_nodes_say_what_they_say_in_one_process(tmp_path: Path, changes: dict[str, object]) -> None:
    """Two nodes, cuts inside selection groups; nothing is left on any stage but stored histories, and nothing at all at the end."""
    async with Engine.open(DEMO, config(**changes)) as engine:
        alone = await story(engine, tmp_path, "alone")
    async with cluster_of(DEMO, config(**changes), "3,3,2") as (engine, _):
        assert await story(engine, tmp_path, "nodes") == alone
