"""Who belongs to a cluster: nodes of other stages or weights end the head, and each process may have a second device."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from engine.config import ClusterConfig, EngineConfig
from engine.engine import Engine
from engine.errors import BadSetting
from engine.model.marks import marks_of
from engine.model.random import SEED
from engine.node.address import Address
from engine.node.far import Far
from engine.node.opening import open_cluster
from engine.node.passage import Passage
from streams import CpuBackend, StreamError
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.cluster_world import LIMITS, Cluster, LocalNode
from tests.engine.runs import collect, run, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids
from tests.streams.channel_world import KEY, loopback, turns


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_bytes(KEY)
    return path


@asynccontextmanager
async def nodes_of(checkpoint: Path, config: EngineConfig, cut: str, stages: tuple[int, ...]) -> AsyncIterator[tuple[Address, ...]]:
    """Nodes of such stages; yields where they listen."""
    layers = Cluster(checkpoint, config, cut, LIMITS, config).stages
    nodes = [LocalNode(checkpoint, config, layers, stage, LIMITS) for stage in stages]
    try:
        for node in nodes:
            await node.start()
        yield tuple(node.address for node in nodes if node.address is not None)
    finally:
        for node in nodes:
            await node.stop()


@asynccontextmanager
async def served(checkpoint: Path, config: EngineConfig, addresses: tuple[Address, ...], key: Path) -> AsyncIterator[Engine]:
    """As `forebay serve --nodes` opens it."""
    cluster = ClusterConfig(nodes=addresses, key_file=str(key), peer_timeout_s=2.0)
    async with asyncio.timeout(60), open_cluster(checkpoint, config, cluster) as engine:
        yield engine


@pytest.mark.parametrize(("stages", "place"), [((0, 0), 1), ((1, 0), 0)], ids=["twice", "reversed"])
async def test_a_node_of_another_stage_ends_the_head(checkpoint: Path, key: Path, stages: tuple[int, int], place: int) -> None:
    """Two nodes started as the first, and nodes named in reverse: the head names who is there, its stage and the one it expected."""
    config = small(hot_rows=TOP_K, stages="1,1,2")
    async with nodes_of(checkpoint, config, "1,1,2", stages) as addresses:
        words = rf"the node at {addresses[place]} is that of stage {stages[place]}, and stage {place} was expected there"
        with pytest.raises(BadSetting, match=words):
            async with served(checkpoint, config, addresses, key):
                pass


async def test_head_and_node_may_each_have_a_peer(checkpoint: Path, key: Path) -> None:
    """As the command line opens it: two devices at the node and at the head give the tokens and logits of one pair."""
    config = small(hot_rows=TOP_K, stages="2", peer="cpu")
    said = [(ids(70, 1), 6)]
    whole = await run(checkpoint, small(hot_rows=TOP_K, peer="cpu"), said)
    async with nodes_of(checkpoint, config, "2", (0,)) as addresses, served(checkpoint, config, addresses, key) as engine:
        assert engine.stage.peer is not None
        assert (await collect(engine, said)).same_bits(whole)


async def test_a_channel_that_has_ended_meets_nobody() -> None:
    """The node lets go right behind the handshake: `met` raises, the node counts as lost, and no callback fails later."""
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: failed.append(what))
    async with loopback() as (one, two, _):
        closing = asyncio.ensure_future(two.close())
        while "ended" not in repr(one):  # noqa: ASYNC110  # its `ended` may be done or not yet
            await asyncio.sleep(0)
        backend = CpuBackend()
        far = Far("x", Passage(None, backend.stream("copies"), torch.device("cpu")))
        with pytest.raises(StreamError):
            far.met(one, "x")
        await closing
        await turns(20)
        assert far.lost is not None
        await backend.close()
    assert not failed


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All that is stored, by name."""
    return {name: tensor for file in sorted(checkpoint.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def scaled(checkpoint: Path, into: Path, part: str) -> Path:
    """A copy of the checkpoint in which one layer has other values."""
    shutil.copytree(checkpoint, into)
    for file in into.glob("*.safetensors"):
        held = {name: 1.5 * tensor if part in name else tensor for name, tensor in load_file(file).items()}
        save_file(held, file, metadata={"format": "pt"})
    return into


@pytest.mark.parametrize("layer", [0, 3])
async def test_a_node_with_other_weights_ends_the_head(checkpoint: Path, key: Path, tmp_path: Path, layer: int) -> None:
    """Same architecture, other values in one layer, of the node's or of the head's own: one line with the node and the layer."""
    other = scaled(checkpoint, tmp_path / "other", f"layers.{layer}.")
    config = small(hot_rows=TOP_K, stages="2")
    async with nodes_of(other, config, "2", (0,)) as addresses:
        words = (
            rf"the node of stage 0 at {addresses[0]} has other weights than the head: layer {layer} is \w+ there and \w+ here, 1 of \d+ "
        )
        with pytest.raises(BadSetting, match=words):
            async with served(checkpoint, config, addresses, key):
                pass


async def test_layers_that_the_head_cannot_see_are_said(checkpoint: Path, key: Path, tmp_path: Path) -> None:
    """A head without the file of one of the node's layers takes the node, and a warning counts that layer."""
    part = tmp_path / "part"
    shutil.copytree(checkpoint, part, ignore=shutil.ignore_patterns("*.safetensors*"))
    held = tensors_of(checkpoint)
    file_of = {name: "absent.safetensors" if ".layers.0." in name else "here.safetensors" for name in held}
    save_file({name: tensor for name, tensor in held.items() if file_of[name] == "here.safetensors"}, part / "here.safetensors")
    (part / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    config = small(hot_rows=TOP_K, stages="2")
    async with nodes_of(checkpoint, config, "2", (0,)) as addresses:
        with capture_logs() as logs:
            async with served(part, config, addresses, key):
                pass
    assert [log["layers"] for log in logs if log["event"] == "node.weights_not_compared"] == [1]


def test_marks_are_those_of_the_values_and_of_what_is_here(checkpoint: Path, tmp_path: Path) -> None:
    """They do not depend on how tensors are spread over files; a layer of which a file is absent has none; another seed has another one."""
    marks = marks_of(checkpoint, "auto")
    assert {"layer 0", "layer 3", "model.embed_tokens.weight", "lm_head.weight"} <= set(marks)
    spread = tmp_path / "spread"
    spread.mkdir()
    held = tensors_of(checkpoint)
    file_of = {name: "last.safetensors" if ".layers.3." in name else f"{len(name) % 2}.safetensors" for name in held}
    for file in set(file_of.values()):
        save_file({name: held[name].clone() for name in held if file_of[name] == file}, spread / file)
    (spread / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    assert marks_of(spread, "auto") == marks
    (spread / "last.safetensors").unlink()
    assert marks_of(spread, "auto") == {part: mark for part, mark in marks.items() if part != "layer 3"}
    assert marks_of("glm-5.3", "random") == {"random weights": f"seed {SEED}"}
