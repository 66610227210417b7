"""Stages in one process: the same tokens and logits to the bit as one stage, however the layers are cut."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.errors import BadSetting
from engine.local_stages import cut_layers
from engine.model.glm import load_model, stage_of
from tests.engine.company import check_company, guests
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import Run, collect, greedy, run, small

NAME = "shared"  # four layers: full, full, shared, full; and an MTP block
TOP_K = int(named(NAME).config["index_topk"])


def ids(count: int, seed: int, name: str = NAME) -> list[int]:
    vocabulary = int(named(name).config["vocab_size"])
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


TURNS = [(ids(70, 1), 6), (ids(3, 2), 5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> dict[str, Run]:
    """What one stage gives, made when it is first asked for."""
    return {}


async def one_stage(checkpoint: Path, whole: dict[str, Run]) -> Run:
    if "run" not in whole:
        whole["run"] = await run(checkpoint, small(hot_rows=TOP_K), TURNS)
    return whole["run"]


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        ("2", {"draft_depth": 1}),  # cut inside a group
        ("1,3", {"placement": "resident", "append_chunk_rows": 17}),
        pytest.param("3,1", {"draft_depth": 3, "graphs": "on"}, marks=pytest.mark.slow),
        pytest.param("4", {"append_chunk_rows": 17}, marks=pytest.mark.slow),
    ],
)
async def test_any_cut_gives_the_bits_of_one_stage(
    checkpoint: Path, whole: dict[str, Run], stages: str, settings: dict[str, object]
) -> None:
    """Even and uneven cuts, inside a group too, with drafts, recorded steps, resident rows and short chunks: equal to the bit."""
    cut = await run(checkpoint, small(**{"hot_rows": TOP_K, "stages": stages, **settings}), TURNS)
    assert cut.same_bits(await one_stage(checkpoint, whole))


@pytest.mark.parametrize(
    "stages", [pytest.param(each, marks=pytest.mark.slow if each == "2" else pytest.mark.long) for each in ("2", "1,3", "3,1", "4")]
)
@pytest.mark.parametrize(("placement", "depth", "graphs"), [("offload", 3, "off"), ("resident", 1, "on")])
async def test_every_cut_in_every_way(checkpoint: Path, stages: str, placement: str, depth: int, graphs: str) -> None:
    """With packed rows, past several blocks, each cut gives the bits of one stage in both placements, at any depth, recorded or not."""
    turns = [(ids(70, 1), 12), (ids(130, 3), 6)]
    settings = {"placement": placement, "draft_depth": depth, "graphs": graphs, "hot_rows": TOP_K, "row_format": "q8g64"}
    cut, one = [await run(checkpoint, small(**{**settings, "stages": each}), turns) for each in (stages, "1")]
    assert cut.same_bits(one)


async def test_a_stage_may_begin_at_layer_47(tmp_path: Path) -> None:
    """Ids of layers, of rows and of keys are a stage's own: fifty layers cut at 47, inside a group, give the bits of one stage."""
    fifty = tiny_config(indexer_types=None, index_topk_freq=4, index_skip_topk_offset=3, num_hidden_layers=50, first_k_dense_replace=3)
    model = write_checkpoint(random_tensors(fifty, 5), fifty, tmp_path / "fifty")
    turns = [(ids(70, 1), 3)]
    cut, one = [await run(model, small(hot_rows=TOP_K, stages=each, draft_depth=1), turns) for each in ("47,3", "1")]
    assert cut.same_bits(one)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stages"),
    [("frequency and offset", "2,1,2"), ("odd widths", "2"), ("every layer full", "1,1,1"), ("q8g64 rows, e4m3 keys", "2")],
)
async def test_other_models_are_cut(tmp_path: Path, name: str, stages: str) -> None:
    """Widths, groups, formats and MTP blocks of all kinds."""
    model = make_checkpoint(tmp_path, name)
    row, key = named(name).rows, named(name).keys
    turns = [(ids(90, 1, name), 12), (ids(3, 2, name), 4)]
    settings = {"row_format": row, "index_key_format": key, "hot_rows": int(named(name).config["index_topk"])}
    cut, one = [await run(model, small(**{**settings, "stages": each}), turns) for each in (stages, "1")]
    assert cut.same_bits(one)


async def test_forks_cuts_and_rests_on_all_stages(checkpoint: Path) -> None:
    """A session is forked, cut, put to rest without keys and gone on with; tokens and logits stay those of a fresh session in one stage."""
    prompt, more = ids(150, 5), ids(9, 6)
    fresh = [(prompt[:100] + more, 6)]
    async with Engine.open(checkpoint, small(hot_rows=TOP_K)) as engine:
        wanted = await collect(engine, fresh)
    for placement in ("offload", "resident"):
        async with Engine.open(checkpoint, small(hot_rows=TOP_K, stages="2", placement=placement)) as engine:
            session = await engine.create_session()
            async for _ in engine.generate(prompt, greedy(4), session=session):
                pass
            fork = await engine.fork_session(session, 100)
            await engine.truncate_session(session, 100)
            for each in (session, fork):
                memory = engine.memories[each]
                await memory.operations.settle()
                assert engine.stage.placement.shed(memory, shared=True)
                assert not engine.stage.placement.rest(memory), "it rests already"
                found = Run()
                async for chunk in engine.generate(more, greedy(6), session=each):
                    found.tokens.extend(chunk.token_ids)
                    found.logits.extend(chunk.logits)
                assert found.same_bits(wanted), placement


async def test_archives_go_from_any_cut_to_any_other(checkpoint: Path, tmp_path: Path) -> None:
    """A session written by two stages comes in to one and to three and goes on with the same bits; what was there is not written again."""
    turns = [(ids(150, 1), 6), (ids(5, 2), 6)]
    async with Engine.open(checkpoint, small(hot_rows=TOP_K)) as engine:
        wanted = await collect(engine, turns)
    moves = [("2", "a", "1"), ("1", "b", "2,1,1"), ("2,1,1", "c", "2")]
    where: Path | None = None
    for stages, name, _ in moves[:1]:
        async with Engine.open(checkpoint, small(hot_rows=TOP_K, stages=stages)) as engine:
            session = await engine.create_session()
            async for _ in engine.generate(turns[0][0], greedy(6), session=session):
                pass
            where = tmp_path / name
            first = await engine.export_session(session, where)
            again = await engine.export_session(session, where)
            assert again.written_bytes < first.written_bytes / 2
    for _, name, stages in moves:
        assert where is not None
        async with Engine.open(checkpoint, small(hot_rows=TOP_K, stages=stages)) as engine:
            session = await engine.import_session(where)
            where = tmp_path / f"{name}-next"
            await engine.export_session(session, where)
            found = Run(tokens=wanted.tokens[:6], logits=wanted.logits[:6])
            async for chunk in engine.generate(turns[1][0], greedy(6), session=session):
                found.tokens.extend(chunk.token_ids)
                found.logits.extend(chunk.logits)
            assert found.same_bits(wanted), stages


def test_a_bad_cut_is_one_line() -> None:
    """Layers that do not add up, more stages than layers, and what is no cut at all are refused with what would do."""
    assert [list(each) for each in cut_layers("3", 7)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert cut_layers("5,2", 7) == (range(5), range(5, 7))
    for setting, said in (("5,3", "these are 8 layers, and the model has 7"), ("9", "use 7 or fewer")):
        with pytest.raises(BadSetting, match=said):
            cut_layers(setting, 7)
    for setting in ("", "0", "2,", "a", "1,-1"):
        with pytest.raises(BadSetting, match="stages must be a count like 2"):
            small(stages=setting)


def test_weights_are_shared(checkpoint: Path) -> None:
    """A stage of a loaded model has its own layers' weights and no copies; a node that loads its layers alone reads the same."""
    model = load_model(checkpoint)
    first, last = stage_of(model, range(2)), stage_of(model, range(2, 4))
    assert first.layers[1] is model.layers[1]
    assert last.layers[0] is model.layers[2]
    assert last.embedding is first.embedding is model.embedding
    assert (first.norm, first.head, first.mtp) == (None, None, None)
    assert (first.cuts_group, last.cuts_group) == (True, False)
    alone = load_model(checkpoint, layers=range(2, 4))
    assert alone.groups == last.groups == ((0,), (1,), (2,))
    assert torch.equal(alone.layers[0].mla.query_norm, last.layers[0].mla.query_norm)


@pytest.mark.parametrize("stages", [pytest.param("2", marks=pytest.mark.slow), pytest.param("4", marks=pytest.mark.long)])
async def test_micro_batches_change_no_bit(checkpoint: Path, stages: str) -> None:
    """Sessions that join and leave are spread over as many lanes as there are stages; steps of several are in flight at once, none of one
    session, and each gives what it gives alone in one stage."""
    made = guests(3, 7, int(named(NAME).config["vocab_size"]), rows_max=80, tokens_max=40)
    settings = {"row_format": "q8g64", "hot_rows": TOP_K, "append_chunk_rows": 64, "prefix_cache": "off", "append_gap": 1000.0}
    async with Engine.open(checkpoint, small(**{**settings, "stages": stages, "micro_batches": int(stages)})) as engine:
        await check_company(engine, made)
        shapes = engine._loop._batches._buckets
        assert len({shape.lane for shape in shapes}) > 1, "all stepped in one lane"


@pytest.mark.slow
async def test_lanes_are_even_and_nobody_is_in_two(checkpoint: Path) -> None:
    """Six sessions decode in three lanes of two; as they leave, who is left is spread again, with no step of it in flight."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, stages="3", micro_batches=3, append_gap=1000.0)) as engine:
        decode, seen, most = engine._loop._decode, set(), 0
        submit = decode._batches.submit

        def watched(members: tuple[Any, ...], depth: int, previous: Any, lane: int = 0) -> Any:
            nonlocal most
            for request in members:
                others = [flight for flight in decode._flights if flight is not None and request in flight.members]
                assert not others, "a session is in two steps at once"
            flight = submit(members, depth, previous, lane)
            most = max(most, 1 + sum(each is not None for each in decode._flights))
            seen.add(tuple(len(each) for each in decode.lanes._members))
            return flight

        decode._batches.submit = watched  # type: ignore[method-assign]
        lengths = [40, 40, 20, 20, 40, 20]
        runs = await asyncio.gather(*(collect(engine, [(ids(1 + number, number), length)]) for number, length in enumerate(lengths)))
        assert [len(each.tokens) for each in runs] == lengths
        assert (2, 2, 2) in seen
        assert (1, 1, 1) in seen
        assert most == 3, f"{most} steps were in flight at once"
