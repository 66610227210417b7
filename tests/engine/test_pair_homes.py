"""No operation of one device of a pair touches the other's memory, but those that are there to: over host memory that is told apart."""

from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.protocol import SyntheticHistory
from memory.host import NoRegistration
from tests.engine.homes import OWNER, PEER, Homes, HomesBackend
from tests.engine.model.parity import make_checkpoint
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import greedy
from tests.engine.test_engine_exactness import NAME, ids
from tests.engine.test_peer import check_bytes, peered


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


async def lived(checkpoint: Path, homes: Homes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **changes: object) -> None:
    """A session over several blocks, its fork and cut, another turn of each, and an archive that is read."""
    with homes.watched(monkeypatch):
        backend = HomesBackend(homes)
        async with Engine.open(checkpoint, peered(peer="cpu:1", **changes), backend=backend) as engine:
            session = await engine.create_session()
            for prompt, tokens in ((ids(140, 3), 3), (ids(3, 4), 5)):
                async for _ in engine.generate(prompt, greedy(tokens), session=session):
                    pass
            fork = await engine.fork_session(session, 100)
            await engine.truncate_session(fork, 70)
            async for _ in engine.generate(ids(5, 6), greedy(3), session=fork):
                pass
            await engine.export_session(session, tmp_path / "kept")
            again = await engine.import_session(tmp_path / "kept")
            async for _ in engine.generate(ids(4, 7), greedy(3), session=again):
                pass
            assert await check_bytes(engine) == 3
        await backend.close()


@pytest.mark.parametrize("changes", [{"draft_depth": 3}, {"placement": "resident"}, {"mirror_replicas": 2, "draft_depth": 1}])
async def test_each_device_touches_its_own_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Steps with drafts and without, appends, forks, cuts and archives, in both placements."""
    homes = Homes()
    await lived(checkpoint, homes, monkeypatch, tmp_path, **changes)
    assert not homes.wrong, "\n".join(sorted(homes.wrong))
    assert min(homes.launches.values()) > 500, f"{homes.launches} launches were seen"
    assert homes.across > 100


async def test_where_the_peer_has_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Behind a page of made-up rows the peer chooses among keys of its own, in appends, steps and drafts; it reads the owner's mirror, and
    that is registered for both."""
    asked: list[tuple[torch.device, ...]] = []
    monkeypatch.setattr("engine.stage.registration_for", lambda *devices: (asked.append(devices), NoRegistration())[1])
    config = tiny_config(num_hidden_layers=2, indexer_types=["full", "shared"], index_n_heads=4, index_topk=32)
    model = write_checkpoint(random_tensors(config, 5), config, tmp_path / "model")
    homes = Homes()
    with homes.watched(monkeypatch):
        backend = HomesBackend(homes)
        changes = {"append_chunk_rows": 512, "host_memory_bytes": 64 << 20, "draft_depth": 1, "row_format": "q8g64"}
        async with Engine.open(model, peered(peer="cpu:1", **changes), backend=backend) as engine:
            session = await engine.create_session()
            history = SyntheticHistory(7, 1056)
            async for _ in engine.generate([3, 4, 5] * 20, greedy(4), session=session, history=history):
                pass
            assert await check_bytes(engine) == 1
        await backend.close()
    assert not homes.wrong, "\n".join(sorted(homes.wrong))
    assert asked == [(OWNER, PEER)]
    assert min(homes.launches.values()) > 100, f"{homes.launches} launches were seen"
