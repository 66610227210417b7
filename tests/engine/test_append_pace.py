"""How a prompt that is read shares the device with sessions that decode: counted in costs, order and submissions, never in time."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.append import AppendRun
from engine.append_cost import StepCost
from engine.append_queue import AppendQueue
from engine.batches import Batches
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadSetting
from engine.model.glm import Model
from engine.request import Request
from engine.unit import Unit
from kernels.layout import BlockLayout
from memory.row import KeyFormat, key_layout, row_layout
from streams import Event, SeededOrder, TapeRecorder, VirtualBackend
from tests.engine.launches import slice_model
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.runs import collect, greedy, small

NAME = "shared"
TOP_K = int(named(NAME).config["index_topk"])
MILLION = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def ids(count: int, seed: int) -> list[int]:
    vocabulary = int(named(NAME).config["vocab_size"])
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def whole_slice(monkeypatch: pytest.MonkeyPatch) -> Model:
    return slice_model(monkeypatch)


def _stage(model: Model, chunk_rows: int, keys: KeyFormat = "bf16") -> Any:
    """What costs look at of a stage, on a device."""
    facts, groups = model.config, model.groups
    layout = BlockLayout(row_layout("q8g64", facts.latent, facts.rope), key_layout(keys, facts.index_width), groups)
    return SimpleNamespace(
        model=model, layout=layout, main_groups=groups[:-1], device=SimpleNamespace(type="cuda"), append_rows=chunk_rows, first_layer=0
    )


def _units(stage: Any, history: int, rows: int) -> list[Unit]:
    """Units of one chunk behind a history, none of them submitted."""
    memory: Any = SimpleNamespace(counts=SimpleNamespace(logical=history, hidden_from=0))
    run = AppendRun(stage, memory, [1] * rows, None, "s")
    run._chunk = SimpleNamespace(first=history, rows=rows)  # type: ignore[assignment]  # only its being there is looked at
    return list(run.units())


@pytest.mark.parametrize("chunk", [512, 2048])
@pytest.mark.parametrize("history", [0, 50_000, MILLION - 2048])
def test_no_unit_takes_long_at_true_widths(whole_slice: Model, chunk: int, history: int) -> None:
    """At the slice's widths, on a device, the longest unit of a chunk takes at most 1.25 steps over 50,000 rows at the default number of
    rows, and 3 at four times as many: beside a step goes what it allows or one unit, so tokens come at most four times as far apart."""
    stage = _stage(whole_slice, chunk)
    step = StepCost(stage).step([50_000], 0)
    units = _units(stage, history, chunk)
    longest = max(units, key=lambda unit: unit.cost)
    assert longest.cost <= (1.25 if chunk == 512 else 3) * step, f"{longest} takes {longest.cost / step:.2f} steps"
    assert sum(unit.ends_chunk for unit in units) == 1
    assert units[-1].ends_chunk


def test_narrow_keys_cost_what_scoring_them_was_measured_to_take(whole_slice: Model) -> None:
    """Keys of e4m3 cost as much less than those of bf16 as a million of either took on a card, within a twentieth, in one session and in
    sixteen."""
    raw = json.loads((ROOT / "docs/benchmarks/h200_keys_and_integers.json").read_text())
    took = {case["name"]: case["microseconds"] for case in raw["cases"]}

    def keys_cost(keys: KeyFormat, sessions: int) -> int:
        cost = StepCost(_stage(whole_slice, 512, keys))
        return cost.step([MILLION] * sessions, 0) - cost.step([whole_slice.config.top_k] * sessions, 0)

    for sessions, said in ((1, "1 rows"), (16, "16 sessions")):
        measured = took[f"score 1,048,576 e4m3 keys, {said}"] / took[f"score 1,048,576 keys, {said}"]
        assert keys_cost("e4m3", sessions) / keys_cost("bf16", sessions) == pytest.approx(measured, rel=0.05)


def test_a_long_history_is_scored_in_pieces(whole_slice: Model) -> None:
    """Behind a million rows every 32 rows of a chunk are a unit; behind few, all of a layer's are."""
    stage = _stage(whole_slice, 512)
    counts = {history: len(_units(stage, history, 512)) for history in (0, MILLION - 512)}
    assert counts[MILLION - 512] - counts[0] == 4 * (512 // 32 - 1)


class Watched:
    """Costs of append units and decode steps, in order of submission."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int]] = []
        units, turn, submit = AppendRun.units, AppendQueue.turn, Batches.submit

        def watched_units(run: AppendRun) -> Iterator[Unit]:
            for unit in units(run):
                yield Unit(lambda unit=unit: self._submitted(unit), unit.cost, unit.needs, unit.rests, unit.ends_chunk)  # type: ignore[misc]

        def watched_turn(queue: AppendQueue, chosen: Request | None, allowance: int | None) -> Any:
            self.seen.append(("alone", 0) if allowance is None else ("allowance", allowance))
            return turn(queue, chosen, allowance)

        def watched_step(batches: Batches, *arguments: Any) -> Any:
            self.seen.append(("step", 0))
            return submit(batches, *arguments)

        monkeypatch.setattr(AppendRun, "units", watched_units)
        monkeypatch.setattr(AppendQueue, "turn", watched_turn)
        monkeypatch.setattr(Batches, "submit", watched_step)

    def _submitted(self, unit: Unit) -> Event[Any]:
        self.seen.append(("unit", unit.cost))
        return unit.submit()

    def beside_steps(self) -> list[tuple[int, list[int]]]:
        """What each step allowed, and the units submitted before the next."""
        found: list[tuple[int, list[int]]] = []
        beside = False
        for kind, number in self.seen:
            if kind == "allowance":
                found.append((number, []))
                beside = True
            elif kind != "unit":
                beside = False
            elif beside:
                found[-1][1].append(number)
        return found


@pytest.mark.parametrize("gap", [1.5, 4.0])
async def test_units_beside_a_step_cost_what_it_allows(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, gap: float) -> None:
    """Beside a step go units that cost no more than it allows, or one that does; over all steps no more than allowed, and the decoding
    session's tokens are those it says alone."""
    watched = Watched(monkeypatch)
    config = small(hot_rows=TOP_K, append_gap=gap)
    async with Engine.open(checkpoint, config) as engine_:
        alone = await collect(engine_, [(ids(30, 1), 40)])
        both = [(ids(30, 1), 40)], [(ids(300, 2), 2)]
        first, _ = await asyncio.gather(*(collect(engine_, turns) for turns in both))
    assert first.same_bits(alone)
    found = watched.beside_steps()
    assert len(found) > 4, "the prompt was not read beside steps"
    for allowed, costs in found:
        assert sum(costs) <= allowed or len(costs) == 1, f"{costs} were submitted where {allowed} was allowed"
    spent, allowed = sum(sum(costs) for _, costs in found), sum(number for number, _ in found)
    longest = max(cost for _, costs in found for cost in costs)
    assert spent <= allowed + longest


async def test_a_late_gather_holds_up_nobody(checkpoint: Path) -> None:
    """While the gather of a prompt's older rows does not end, others decode on; then both end as they do alone."""
    gathers: list[Event[Any]] = []

    class Watch(TapeRecorder):
        def submitted(self, event: Event[Any], *rest: Any) -> None:
            super().submitted(event, *rest)
            if event.label == "append.0.fetch" and holding:
                gathers.append(event)
                asyncio.get_running_loop().call_soon(backend.hold, event)

    holding = False
    backend = VirtualBackend(SeededOrder(3), observer=Watch(lambda _: None))
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, graphs="on"), backend=backend) as engine_:
        alone = [await collect(engine_, [(ids(30, 1), 70)]), await collect(engine_, [(ids(200, 2), 3)])]
        heard: list[int] = []
        talking = engine_.generate(ids(30, 1), greedy(70))
        heard.extend((await anext(talking)).token_ids)
        holding = True
        reading = asyncio.ensure_future(collect(engine_, [(ids(200, 2), 3)]))
        while not gathers and len(heard) < 40:
            heard.extend((await anext(talking)).token_ids)
        try:
            for _ in range(20):
                heard.extend((await anext(talking)).token_ids)
            assert gathers, "nothing was gathered"
            assert not gathers[0].done()
        finally:
            holding = False
            for each in gathers:
                backend.release(each)
        async for chunk in talking:
            heard.extend(chunk.token_ids)
        late = await reading
    await backend.close()
    assert heard == alone[0].tokens
    assert late.same_bits(alone[1])


@pytest.mark.parametrize("seed", range(4))
async def test_no_gather_stands_behind_another_while_others_decode(checkpoint: Path, seed: int) -> None:
    """Each is submitted when the one before is over: streams share a device's queues, and what stands in one holds up steps."""
    gathers: list[Event[Any]] = []
    behind: list[tuple[str, str]] = []

    class Watch(TapeRecorder):
        def submitted(self, event: Event[Any], *rest: Any) -> None:
            super().submitted(event, *rest)
            if event.label.startswith("append.") and event.label.endswith(".fetch") and talking.progress.rows_done:
                behind.extend((before.label, event.label) for before in gathers if not before.done())
                gathers.append(event)

    backend = VirtualBackend(SeededOrder(seed), observer=Watch(lambda _: None))
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, append_chunk_rows=32), backend=backend) as engine_:
        talking = engine_.generate(ids(30, 1), greedy(1000))
        await anext(talking)
        await collect(engine_, [(ids(300, 2), 3)])
        await talking.aclose()
    await backend.close()
    assert len({event.label for event in gathers}) > 2, "too few gathers to stand behind one another"
    assert not behind


async def test_the_bus_does_not_rest_for_want_of_units(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next layer's gather is submitted once this one's is over, also in turns that have no room for a unit."""
    seen: list[str] = []
    turn = AppendQueue.turn

    class Watch(TapeRecorder):
        def submitted(self, event: Event[Any], *rest: Any) -> None:
            super().submitted(event, *rest)
            if event.label.startswith("append."):
                seen.append(event.label)
                if event.label == "append.0.fetch" and armed and not gathers:
                    gathers.append(event)
                    asyncio.get_running_loop().call_soon(backend.hold, event)

    def poor(queue: AppendQueue, chosen: Request | None, allowance: int | None) -> Any:
        if gathers:
            queue._credit = -(1 << 60)
        return turn(queue, chosen, allowance)

    armed, gathers = False, list[Event[Any]]()
    backend = VirtualBackend(SeededOrder(3), observer=Watch(lambda _: None))
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, append_chunk_rows=64), backend=backend) as engine_:
        alone = await collect(engine_, [(ids(30, 1), 60)])
        monkeypatch.setattr(AppendQueue, "turn", poor)
        talking = engine_.generate(ids(30, 1), greedy(60))
        heard = [*(await anext(talking)).token_ids]
        armed = True
        reading = asyncio.ensure_future(collect(engine_, [(ids(200, 2), 3)]))
        while not gathers:
            heard.extend((await anext(talking)).token_ids)
        try:
            heard.extend((await anext(talking)).token_ids)
            before = len(seen)
            heard.extend((await anext(talking)).token_ids)
            assert len(seen) == before, "something of the prompt was submitted while its gather was not over, and without credit"
            backend.release(gathers[0])
            for _ in range(4):
                heard.extend((await anext(talking)).token_ids)
            assert seen[before:] == ["append.1.fetch"]
        finally:
            backend.release(gathers[0])
            monkeypatch.setattr(AppendQueue, "turn", turn)
            engine_._loop._appends._credit = 0
        async for chunk in talking:
            heard.extend(chunk.token_ids)
        await reading
    await backend.close()
    assert heard == alone.tokens


async def test_a_short_prompt_waits_for_a_chunk_of_a_long_one_at_most(checkpoint: Path) -> None:
    """A prompt that comes while a long one is read has its first token when one more chunk of that was read, and both say what they say
    alone."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, append_chunk_rows=32)) as engine_:
        alone = [await collect(engine_, [(ids(400, 1), 3)]), await collect(engine_, [(ids(20, 2), 3)])]
        long = engine_.generate(ids(400, 1), greedy(3))
        await long.prompt()
        while long.progress.rows_done < 64:  # noqa: ASYNC110
            await asyncio.sleep(0)
        short = engine_.generate(ids(20, 2), greedy(3))
        heard = [*(await anext(short)).token_ids]
        assert long.progress.rows_done <= 64 + 2 * 32, f"{long.progress.rows_done} rows of the long prompt were read before"
        found = [await generation.complete() for generation in (short, long)]
    assert [*heard, *found[0].token_ids] == alone[1].tokens
    assert list(found[1].token_ids) == alone[0].tokens


async def test_chunks_go_round_the_keys(checkpoint: Path) -> None:
    """Of three long prompts of one key and one of another, the single one is read twice as fast as it would be with four equals."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, append_chunk_rows=16)) as engine_:
        prompts = [engine_.generate(ids(320, seed), greedy(1), namespace=key) for seed, key in enumerate(("a", "a", "a", "b"))]
        for prompt in prompts:
            await prompt.prompt()
        while (done := prompts[3].progress.rows_done) < 160:  # noqa: ASYNC110
            await asyncio.sleep(0)
        others = [prompt.progress.rows_done for prompt in prompts[:3]]
        assert done - 32 <= sum(others) <= done + 32, f"{others} rows of one key beside {done} of the other"
        for prompt in prompts:
            await prompt.complete()


def test_a_gap_of_one_is_refused() -> None:
    """Nothing would ever be appended beside a step."""
    with pytest.raises(BadSetting, match=r"append_gap must be between 1\.1 and 1000, not 1"):
        EngineConfig(append_gap=1.0)
