"""A stage on two devices: the tokens of one device, bits that depend on nothing else, and the same bytes on both after everything."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadSetting, SessionBroken
from engine.protocol import SyntheticHistory
from kernels.quantize import reference as quantize
from memory.replica import PairSession, verify_replica
from streams import Backend, Fault, SeededOrder, VirtualBackend, sealed
from tests.engine.model.parity import Configuration, configurations, make_checkpoint
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import Run, collect, greedy, run, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids

slow, long = pytest.mark.slow, pytest.mark.long


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers and few heads, so that a history of three pages of keys is read in a moment."""
    config = tiny_config(num_hidden_layers=2, indexer_types=["full", "shared"], index_n_heads=4, index_topk=32)
    return write_checkpoint(random_tensors(config, 5), config, tmp_path_factory.mktemp("long") / "model")


def peered(**changes: object) -> EngineConfig:
    """As `small`, with a peer."""
    return small(**{"peer": "cpu", "hot_rows": TOP_K, **changes})


async def check_bytes(engine: Engine) -> int:
    """Compare owner's and peer's bytes of every session that has memory, with nothing in flight. Returns how many there were."""
    checked = 0
    for memory in engine.memories.values():
        await memory.operations.settle()
        assert isinstance(memory, PairSession)
        memory.check_integrity()
        verify_replica(memory, engine.stage.layout)
        checked += 1
    return checked


async def spoken(
    model: Path, config: EngineConfig, turns: Sequence[tuple[Sequence[int], int]], backend: Backend | None = None,
    check: Callable[[Engine], Awaitable[int]] = check_bytes,
) -> Run:  # fmt: skip
    """Turns in one session, bytes compared behind every one. Args: check: compares, and returns how many pairs there were."""
    result = Run()
    async with Engine.open(model, config, backend=backend) as engine:
        session = await engine.create_session()
        for prompt, tokens in turns:
            async for chunk in engine.generate(list(prompt), greedy(tokens), session=session):
                result.tokens.extend(chunk.token_ids)
                result.logits.extend(chunk.logits)
            assert await check(engine) == 1 + len(engine.stage.before)
        result.statistics = engine.statistics()
    return result


def close(one: Run, other: Run) -> bool:
    """Greedy tokens equal and logits within 1e-4."""
    far = max(float((mine - its).abs().max()) for mine, its in zip(one.logits, other.logits, strict=True))
    return one.tokens == other.tokens and far <= 1e-4


OTHERS: tuple[dict[str, object], ...] = ({"placement": "resident"}, {"mirror_replicas": 2}, {"graphs": "on"})


@pytest.mark.parametrize(
    ("depth", "rows"), [(3, 66), *(pytest.param(depth, 130, marks=long if depth == 1 else slow) for depth in (0, 1, 3))]
)
async def test_two_devices_say_what_one_says(checkpoint: Path, depth: int, rows: int) -> None:
    """With drafts and without, over blocks and misses: greedy tokens are those of one device, logits within 1e-4; offload is resident, one
    mirror is two and a replay is a step issued anew, to the bit."""
    turns = [(ids(rows, 3), 5), (ids(3, 4), rows // 30)]
    one = await run(checkpoint, small(draft_depth=depth), turns)
    two = await spoken(checkpoint, peered(draft_depth=depth), turns)
    assert close(one, two)
    assert two.statistics is not None
    assert two.statistics.misses > 0, "nothing was read from RAM"
    assert not depth or sum(two.statistics.drafts_proposed) > 0
    for changes in OTHERS if rows > 100 else OTHERS[:2]:
        assert two.same_bits(await spoken(checkpoint, peered(draft_depth=depth, **changes), turns)), changes


@long
@pytest.mark.parametrize("configuration", configurations(), ids=lambda each: each.name)
@pytest.mark.parametrize("rows", ["f32", "q8g64", "bf16"])
async def test_every_kind_of_model_and_row(configuration: Configuration, rows: str, tmp_path: Path) -> None:
    """Models with and without shared layers, groups of experts and drafts of drafts, every row format: equal tokens at every depth."""
    model = make_checkpoint(tmp_path, configuration.name)
    vocabulary = int(configuration.config["vocab_size"])
    turns = [([token % vocabulary for token in ids(97, 1)], 12)]
    one = await run(model, small(row_format=rows), turns)
    for depth in (0, 1, 3):
        config = peered(row_format=rows, draft_depth=depth, hot_rows=int(configuration.config["index_topk"]))
        assert one.tokens == (await spoken(model, config, turns)).tokens


CHUNKS = (1, TOP_K, TOP_K + 1, 63, 64, 65)


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=slow if rows in (TOP_K + 1, 65) else long) for rows in CHUNKS])
async def test_chunks_of_every_length(checkpoint: Path, rows: int) -> None:
    """Appends of 1, k, k + 1, 63, 64 and 65 rows behind one another, in chunks as long: one device's tokens, and offload is resident."""
    turns = [(ids(rows, 1), 2), (ids(rows, 2), 2), (ids(2 * rows + 1, 3), 2)]
    one = await run(checkpoint, small(append_chunk_rows=max(rows, 8)), turns)
    two = await spoken(checkpoint, peered(append_chunk_rows=max(rows, 8)), turns)
    assert close(one, two)
    assert two.same_bits(await spoken(checkpoint, peered(append_chunk_rows=max(rows, 8), placement="resident"), turns))


@pytest.mark.parametrize("rows", [1056, pytest.param(2100, marks=slow)])
async def test_keys_of_both_devices_are_chosen(long_checkpoint: Path, rows: int) -> None:
    """Histories past one and two pages of keys, so that the peer has some: one device's tokens, appends and steps alike."""
    prompt = [token % 90 for token in ids(rows, 7)]
    turns = [(prompt, 3)]
    settings = {"append_chunk_rows": 512, "host_memory_bytes": 64 << 20, "draft_depth": 1}
    one = await run(long_checkpoint, small(**settings), turns)
    two = await spoken(long_checkpoint, peered(**settings), turns)
    assert close(one, two)
    if rows > 2048:
        assert two.same_bits(await spoken(long_checkpoint, peered(**settings, mirror_replicas=2), turns))


async def test_rows_and_keys_that_nobody_selects_are_not_seen(long_checkpoint: Path) -> None:
    """NaN in every byte of both devices' rings, blocks and pages behind the session's last row changes no bit of what comes next."""
    config = peered(append_chunk_rows=64)
    said: list[tuple[list[int], list[torch.Tensor]]] = []
    for poisons in (False, True):
        async with Engine.open(long_checkpoint, config) as engine:
            session = await engine.create_session()
            tokens, logits = [], []
            for prompt, count in (([token % 90 for token in ids(70, 2)], 2), ([3], 4)):
                async for chunk in engine.generate(prompt, greedy(count), session=session):
                    tokens.extend(chunk.token_ids)
                    logits.extend(chunk.logits)
                if poisons:
                    await _poison(engine)
            said.append((tokens, logits))
    assert said[0][0] == said[1][0]
    assert all(torch.equal(mine, its) for mine, its in zip(said[0][1], said[1][1], strict=True))


async def _poison(engine: Engine) -> None:
    """Bytes of 255, which are NaN in float32, wherever no row or key of the session is."""
    layout = engine.stage.layout
    for memory in engine.memories.values():
        await memory.operations.settle()
        assert isinstance(memory, PairSession)
        rows = memory.counts.logical
        for one in (memory.owner, memory.peer):
            block = one.device_block(rows // 64)
            for layer in range(layout.layers):
                block[layout.row_offset(layer, rows % 64) : layout.row_offset(layer + 1)] = 255
            for place in range(one.pages.pages):
                here = max(0, min(1024, rows - 1024 * one.holdings.share.page(place)))
                for layer in range(layout.key_layers):
                    one.pages.view(layer, place)[here * layout.key.key_bytes :] = 255


async def _two_sessions(checkpoint: Path, backend: Backend, config: EngineConfig) -> tuple[Run, Run]:
    """A session of two turns beside one whose chunks are appended while the first decodes; bytes compared at the end."""
    async with Engine.open(checkpoint, config, backend=backend) as engine:
        with sealed():
            async with asyncio.TaskGroup() as group:
                one = group.create_task(collect(engine, [(ids(60, 1), 8), (ids(3, 2), 2)]))
                two = group.create_task(collect(engine, [(ids(150, 3), 8)]))
    await backend.close()
    return one.result(), two.result()


@pytest.mark.parametrize(
    ("depth", "replicas"), [pytest.param(*each, marks=slow if each == (3, 2) else long) for each in ((0, 1), (3, 2), (1, 1), (0, 2))]
)
async def test_any_interleaving_of_owner_and_peer_gives_the_same_bits(checkpoint: Path, depth: int, replicas: int) -> None:
    """Under each seed tokens and logits are the same: nothing of one device is read before the other has written it."""
    config = peered(draft_depth=depth, mirror_replicas=replicas)
    wanted = await _two_sessions(checkpoint, VirtualBackend(0), config)
    for seed in (1, 2):
        found = await _two_sessions(checkpoint, VirtualBackend(seed), config)
        assert all(mine.same_bits(its) for mine, its in zip(found, wanted, strict=True)), f"seed {seed}"


async def test_one_interleaving(checkpoint: Path) -> None:
    """The shortest form of the above, in every run of the tests."""
    runs = []
    for seed in (0, 5):
        backend = VirtualBackend(seed)
        runs.append(await spoken(checkpoint, peered(draft_depth=1), [(ids(65, 3), 3)], backend))
        await backend.close()
    assert runs[0].same_bits(runs[1])


@long
@pytest.mark.parametrize("seed", range(10, 18))
async def test_more_interleavings(checkpoint: Path, seed: int) -> None:
    """As above, a seed each."""
    config = peered(draft_depth=seed % 4, mirror_replicas=1 + seed % 2, placement="resident" if seed % 5 == 0 else "offload")
    wanted = await _two_sessions(checkpoint, VirtualBackend(0), config)
    found = await _two_sessions(checkpoint, VirtualBackend(seed), config)
    assert all(mine.same_bits(its) for mine, its in zip(found, wanted, strict=True))


async def test_the_peer_never_quantises(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends, steps, drafts and their rollbacks pack as many rows and keys with a peer as without: what the peer has is copied."""
    packed: list[int] = []
    for name in ("pack_rows", "pack_keys"):
        real = getattr(quantize, name)
        monkeypatch.setattr(quantize, name, lambda *values, real=real: (packed.append(values[0].shape[0]), real(*values))[1])
    turns, counts = [(ids(70, 3), 4)], []
    for config in (small(draft_depth=3, hot_rows=TOP_K), peered(draft_depth=3)):
        packed.clear()
        await run(checkpoint, config, turns)
        counts.append((len(packed), sum(packed)))
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


@contextlib.asynccontextmanager
async def _opened(checkpoint: Path, config: EngineConfig, backend: Backend) -> AsyncIterator[Engine]:
    async with Engine.open(checkpoint, config, backend=backend) as engine:
        yield engine
    await backend.close()


FAULTY = ["group.0.replica", "layer.1.peer.attend", "group.1.peer.plan", "append.1.replica", "append.2.peer.forward", "peer.table.rewrite"]


@pytest.mark.parametrize("label", [pytest.param(label, marks=slow if place % 2 else long) for place, label in enumerate(FAULTY)])
async def test_a_failed_operation_of_the_peer_breaks_its_session_only(checkpoint: Path, label: str) -> None:
    """Whatever fails at the peer ends the requests of its step or append with SessionBroken; another session says its usual tokens, on the
    same bytes, and nothing is left in flight."""
    usual = await spoken(checkpoint, peered(), [(ids(70, 3), 3)], VirtualBackend(0))
    backend = VirtualBackend(SeededOrder(1, faults=(Fault(label, nth=1),)))
    async with _opened(checkpoint, peered(prefix_cache="off"), backend) as engine:
        broken = False
        for _ in range(2):
            try:
                await collect(engine, [(ids(80, 1), 8)])
            except SessionBroken:
                broken = True
        assert broken, f"{label} never failed"
        session = await engine.create_session()
        said: list[int] = []
        async for chunk in engine.generate(ids(70, 3), greedy(3), session=session):
            said.extend(chunk.token_ids)
        assert await check_bytes(engine) == 1
    assert said == usual.tokens


@slow
@pytest.mark.parametrize("replicas", [1, 2])
async def test_forks_cuts_stops_and_archives(checkpoint: Path, replicas: int, tmp_path: Path) -> None:
    """Forks, cuts into blocks, generations left in the middle, and a session that went to disk and came back: bytes agree after each, and
    what the session says then is what one that never left says."""
    config = peered(draft_depth=3, mirror_replicas=replicas)
    async with Engine.open(checkpoint, config) as engine:
        session = await engine.create_session()
        first = [token async for chunk in engine.generate(ids(140, 5), greedy(9), session=session) for token in chunk.token_ids]
        fork = await engine.fork_session(session, 100)
        assert await check_bytes(engine) == 2
        await engine.truncate_session(fork, 70)
        assert await check_bytes(engine) == 2
        async with engine.generate(ids(5, 6), greedy(20), session=fork) as left:
            async for _ in left:
                break
        assert await check_bytes(engine) == 2
        await engine.export_session(session, tmp_path / "kept")
        again = await engine.import_session(tmp_path / "kept")
        assert await check_bytes(engine) == 3
        said = [
            [token async for chunk in engine.generate(ids(4, 7), greedy(6), session=each) for token in chunk.token_ids]
            for each in (session, again)
        ]  # fmt: skip
        assert said[0] == said[1]
        assert await check_bytes(engine) == 3
    async with Engine.open(checkpoint, small(draft_depth=3)) as alone:
        taken = await alone.import_session(tmp_path / "kept")
        one = [token async for chunk in alone.generate(ids(4, 7), greedy(6), session=taken) for token in chunk.token_ids]
    assert (len(first), one) == (9, said[0]), "an archive of a pair goes on on one device"


@slow
@pytest.mark.parametrize("replicas", [1, 2])
async def test_made_up_histories_are_on_both_devices(checkpoint: Path, replicas: int) -> None:
    """A synthetic history of several chunks, over a page of keys, and what is said behind it: one device's tokens, equal bytes on both."""
    said = []
    for config in (small(append_chunk_rows=256), peered(append_chunk_rows=256, mirror_replicas=replicas)):
        async with Engine.open(checkpoint, config) as engine:
            session = await engine.create_session()
            made_up = SyntheticHistory(seed=7, rows=1100)
            chunks = engine.generate(ids(20, 2), greedy(5), session=session, history=made_up)
            said.append([token async for chunk in chunks for token in chunk.token_ids])
            if config.peer:
                assert await check_bytes(engine) == 1
    assert said[0] == said[1]


@slow
@pytest.mark.parametrize("depth", [0, 3])
async def test_company_and_stored_histories(checkpoint: Path, depth: int) -> None:
    """Requests that share a step, and later ones that begin like them (forked, cut or continued): each says what it says alone."""
    prompts = [ids(90, 1), ids(90, 1)[:70] + ids(9, 2), ids(66, 3), ids(90, 1) + ids(4, 5)]

    async def say(engine: Engine, prompt: list[int]) -> list[int]:
        return [token async for chunk in engine.generate(prompt, greedy(7)) for token in chunk.token_ids]

    async with Engine.open(checkpoint, peered(draft_depth=depth, prefix_cache="off")) as engine:
        alone = [await say(engine, prompt) for prompt in prompts]
        together = await asyncio.gather(*(say(engine, prompt) for prompt in prompts))
    async with Engine.open(checkpoint, peered(draft_depth=depth, prefix_cache="on", decode_batch_limit=2)) as engine:
        stored = [await say(engine, prompt) for prompt in (*prompts, *prompts)]
        later = await asyncio.gather(*(say(engine, prompt) for prompt in prompts))
    assert alone == list(together) == stored[:4] == stored[4:] == list(later)


async def test_what_cannot_be_is_refused(checkpoint: Path) -> None:
    """Two mirrors without a peer, a device that is none, and a card beside the CPU are one clear line."""
    with pytest.raises(BadSetting, match="needs a second device: give --peer"):
        small(mirror_replicas=2)
    for peer, said in (("nowhere", "is no device"), ("cuda:1", "both devices of a pair are of one kind")):
        with pytest.raises(BadSetting, match=said):
            async with Engine.open(checkpoint, small(peer=peer)):
                pass
