"""Index keys in e4m3 through the whole engine: bits that must be equal, archives, forks, idle sessions and made-up histories."""

import asyncio
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ArchiveRefused
from engine.protocol import SessionId, SyntheticHistory
from memory import BarrierFailed, barrier, verify_mirror
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.runs import Run, collect, greedy, run, small

NAME = "shared"
TOP_K = int(named(NAME).config["index_topk"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def ids(count: int, seed: int) -> list[int]:
    vocabulary = int(named(NAME).config["vocab_size"])
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


TURNS = [(ids(60, 1), 5), (ids(1, 2), 30), (ids(100, 3), 12), (ids(7, 4), 3)]


def configured(placement: str, **settings: object) -> EngineConfig:
    return small(**{"placement": placement, "row_format": "q8g64", "index_key_format": "e4m3", "hot_rows": TOP_K, **settings})


async def turn(engine: Engine, session: SessionId, prompt: list[int], tokens: int) -> Run:
    """One turn of a session, to its very end."""
    result = Run()
    async for chunk in engine.generate(prompt, greedy(tokens), session=session):
        result.tokens.extend(chunk.token_ids)
        result.logits.extend(chunk.logits)
    await engine._held.settle(engine._sessions[session])
    return result


async def ran(checkpoint: Path, placement: str, rows: str = "q8g64", **settings: object) -> Run:
    return await run(checkpoint, configured(placement, row_format=rows, **settings), TURNS)


@pytest.mark.parametrize("rows", [pytest.param("f32", marks=pytest.mark.slow), "q8g64"])
async def test_offload_is_resident_to_the_bit(checkpoint: Path, rows: str) -> None:
    """Four turns across blocks and top-k give equal tokens and logits, replayed or not, and rows were read from RAM; the keys do round."""
    offload, resident = await ran(checkpoint, "offload", rows), await ran(checkpoint, "resident", rows)
    assert offload.same_bits(resident)
    assert offload.statistics is not None
    assert offload.statistics.misses > 0
    replayed = await ran(checkpoint, "offload", rows, graphs="on")
    assert replayed.same_bits(offload), "a replay is not the step it was recorded from"
    exact = await run(checkpoint, small(row_format=rows, index_key_format="f32", hot_rows=TOP_K), TURNS)
    assert not offload.same_bits(exact), "keys of one byte a value chose as keys of four did: nothing was tested"


@pytest.mark.slow
async def test_chunks_and_company_change_no_bit(checkpoint: Path) -> None:
    """A prompt in one chunk or in odd ones, alone or beside three others that come and go, gives the same bits."""
    alone = await ran(checkpoint, "offload")
    assert (await ran(checkpoint, "offload", append_chunk_rows=33)).same_bits(alone)
    async with Engine.open(checkpoint, configured("offload")) as engine:
        others = [[(ids(20 * number, number), 9 * number)] for number in (4, 9, 2)]
        found, *_ = await asyncio.gather(collect(engine, TURNS), *(collect(engine, turns) for turns in others))
    assert found.same_bits(alone)


@pytest.mark.parametrize("first", ["offload", pytest.param("resident", marks=pytest.mark.slow)])
async def test_an_archive_goes_on_to_the_bit(checkpoint: Path, tmp_path: Path, first: str) -> None:
    """Exported with a partial block and imported into the other placement, turn by turn, a session goes on as one that never left."""
    whole = await ran(checkpoint, "offload")
    found, places = Run(), (first, "resident" if first == "offload" else "offload")
    for number, (prompt, tokens) in enumerate(TURNS):
        async with Engine.open(checkpoint, configured(places[number % 2])) as engine:
            session = await engine.import_session(tmp_path / "it") if number else await engine.create_session()
            part = await turn(engine, session, prompt, tokens)
            await engine.export_session(session, tmp_path / "it")
        found.tokens += part.tokens
        found.logits += part.logits
    assert found.same_bits(whole)


async def test_an_archive_of_other_keys_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Keys of one byte a value are not read as keys of two, nor the other way round; the line names both formats."""
    for written, read in (("e4m3", "bf16"), ("bf16", "e4m3")):
        async with Engine.open(checkpoint, configured("offload", index_key_format=written)) as engine:
            session = await engine.create_session()
            await turn(engine, session, ids(70, 1), 2)
            await engine.export_session(session, tmp_path / written)
        async with Engine.open(checkpoint, configured("offload", index_key_format=read)) as engine:
            with pytest.raises(ArchiveRefused, match=f"index keys are {written}"):
                await engine.import_session(tmp_path / written)


@pytest.mark.parametrize("placement", ["offload", pytest.param("resident", marks=pytest.mark.slow)])
async def test_keys_given_up_are_filled_from_the_blocks(checkpoint: Path, placement: str) -> None:
    """A session at rest gives up its pages, a fork goes on from a shared block, a cut from inside one: tokens as without any of it."""
    async with Engine.open(checkpoint, configured(placement)) as engine:
        plain, rested = await engine.create_session(), await engine.create_session()
        for session in (plain, rested):
            await turn(engine, session, ids(150, 1), 20)
        memory = engine._sessions[rested].memory
        assert memory is not None
        await barrier(memory, engine.stage.copyback)
        assert engine.stage.placement.shed(memory, shared=False)
        assert memory.pages.pages == 0
        wanted = await turn(engine, plain, ids(9, 2), 12)
        got = await turn(engine, rested, ids(9, 2), 12)
        assert got.same_bits(wanted)
        fork = await engine.fork_session(rested, 130)
        await engine.truncate_session(plain, 130)
        one, other = await turn(engine, fork, ids(5, 3), 8), await turn(engine, plain, ids(5, 3), 8)
        assert one.same_bits(other)
        for session in (plain, rested, fork):
            memory = engine._sessions[session].memory
            assert memory is not None
            await memory.operations.settle()
            await barrier(memory, engine.stage.copyback)
            verify_mirror(memory, engine.stage.layout)


async def test_a_broken_mirror_of_keys_is_found(checkpoint: Path) -> None:
    """A changed value or scale of a counted key is named by its position; one of a key not counted is nobody's."""
    async with Engine.open(checkpoint, configured("resident")) as engine:
        session = await engine.create_session()
        await turn(engine, session, ids(70, 1), 2)
        memory, layout = engine._sessions[session].memory, engine.stage.layout
        assert memory is not None
        rows = await barrier(memory, engine.stage.copyback)
        within = rows - 64
        verify_mirror(memory, layout)
        run = memory.mirror_block(1)[layout.key_offset(0) :][: layout.key_layer_bytes]
        values, scales = within * layout.key.values_bytes, 64 * layout.key.values_bytes + 4 * within
        run[values] ^= 1
        run[scales] ^= 1
        verify_mirror(memory, layout)
        for byte in (values - 1, scales - 1):
            run[byte] ^= 1
            with pytest.raises(BarrierFailed, match=f"key 0 in, position {rows - 1}, "):
                verify_mirror(memory, layout)
            run[byte] ^= 1


@pytest.mark.parametrize("rows", [150])
async def test_made_up_histories_answer_alike(checkpoint: Path, rows: int) -> None:
    """Behind the same made-up history both placements give the same tokens, whatever the chunks, and not those of another seed."""
    found = []
    for placement, chunk, seed in (("offload", 64, 7), ("resident", 64, 7), ("offload", 17, 7), ("offload", 64, 8)):
        async with Engine.open(checkpoint, configured(placement, append_chunk_rows=chunk)) as engine:
            generation = engine.generate([3, 14, 15], greedy(12), history=SyntheticHistory(seed, rows))
            found.append([token async for chunk_ in generation for token in chunk_.token_ids])
    assert found[0] == found[1] == found[2] != found[3]
