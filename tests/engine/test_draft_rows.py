"""What drafts leave behind: RAM, ring, maps and counts are those of a session that never drafted, byte for byte."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.errors import SessionBroken
from kernels.layout import BLOCK_ROWS, STATE_FIELDS, BlockLayout, StateField
from memory.session import SessionMemory
from streams import Backend, CpuBackend, Event, Fault, SeededOrder, TapeRecorder, VirtualBackend
from tests.engine.guesses import guess_right
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.runs import Run, collect, greedy, small
from tests.engine.test_drafts import ids

NAME = "shared"
VOCABULARY = int(named(NAME).config["vocab_size"])
TOP_K = int(named(NAME).config["index_topk"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@dataclass
class Held:
    """A session after its turns: what it said, the bytes of every row and key it has, and its counts."""

    run: Run
    blocks: list[Tensor]
    logical: int
    mirrored: int
    mapped: int


def _rows(layout: BlockLayout, block: Tensor, rows: int) -> Tensor:
    """The first `rows` rows and keys of a block, all layers, flat."""
    of_rows = block[: layout.keys_offset].view(layout.layers, BLOCK_ROWS, -1)[:, :rows]
    of_keys = block[layout.keys_offset :].view(layout.key_layers, BLOCK_ROWS, -1)[:, :rows]
    return torch.cat([of_rows.flatten(), of_keys.flatten()])


def _bytes(layout: BlockLayout, memory: SessionMemory) -> list[Tensor]:
    """Committed rows by block: from RAM where they are mirrored, else from the ring."""
    counts, found = memory.counts, []
    for block in range(-(-counts.committed // BLOCK_ROWS)):
        rows = min(BLOCK_ROWS, counts.committed - block * BLOCK_ROWS)
        mirrored = (block + 1) * BLOCK_ROWS <= counts.mirrored
        found.append(_rows(layout, memory.mirror_block(block) if mirrored else memory.device_block(block), rows))
    return found


async def converse(
    checkpoint: Path, depth: int, turns: list[tuple[list[int], int]], backend: Backend, after: Callable[[], None] = lambda: None
) -> Held:  # fmt: skip
    async with Engine.open(checkpoint, small(row_format="q8g64", hot_rows=TOP_K, draft_depth=depth), backend=backend) as engine:
        session = await engine.create_session()
        run = Run()
        for prompt, tokens in turns:
            run.context.extend(prompt)
            async for chunk in engine.generate(list(prompt), greedy(tokens), session=session):
                run.tokens.extend(chunk.token_ids)
                run.context.extend(chunk.token_ids)
                run.logits.extend(chunk.logits)
            after()
            await engine._loop.wait_idle()
            memory = engine._sessions[session].memory
            assert memory is not None
            await memory.operations.settle()
            memory.check_integrity()
            assert memory.counts.logical == memory.counts.committed == int(memory.state[StateField.LOGICAL])
        statistics = memory.statistics()
        held = Held(run, _bytes(engine._stage.layout, memory), memory.counts.logical, memory.counts.mirrored, statistics.hot[0].mapped)
        assert len({block.data_ptr() for block in held.blocks}) == len(held.blocks)
    await backend.close()
    return held


class LateCopies(TapeRecorder):
    """Keeps each copy to RAM from completing until so many more steps have begun as `late` draws."""

    def __init__(self, late: Callable[[], int]) -> None:
        super().__init__(lambda _: None)
        self.backend: VirtualBackend | None = None
        self.delays: list[int] = []
        self._late = late
        self._steps = 0
        self._held: list[tuple[int, Event[Any]]] = []

    def submitted(self, event: Event[Any], *rest: Any) -> None:
        super().submitted(event, *rest)
        if event.label == "copyback":
            self.delays.append(self._late())
            self._held.append((self._steps + self.delays[-1], event))
            asyncio.get_running_loop().call_soon(self._hold, event)
        elif event.label == "step.begin":
            self._steps += 1
            asyncio.get_running_loop().call_soon(self.release, self._steps)

    def _hold(self, event: Event[Any]) -> None:
        assert self.backend is not None
        if not event.done():
            self.backend.hold(event)

    def release(self, steps: int = 1 << 30) -> None:
        assert self.backend is not None
        for due, event in self._held:
            if due <= steps:
                self.backend.release(event)
        self._held = [(due, event) for due, event in self._held if due > steps]


TURNS = [(ids(62, 1), 90), (ids(4, 2), 70)]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Held:
    return asyncio.run(converse(checkpoint, 0, TURNS, CpuBackend()))


@pytest.mark.parametrize(
    ("depth", "seed"), [pytest.param(1, 1, marks=pytest.mark.slow), (3, 2), pytest.param(7, 3, marks=pytest.mark.slow)]
)
async def test_rows_are_those_of_a_session_without_drafts(
    checkpoint: Path, plain: Held, depth: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0, 1 or all drafts accepted in random order, copies to RAM up to three steps late: every committed row's bytes, MTP rows and keys
    included, are those of depth 0; RAM holds no other; counts and maps end alike."""
    rng = random.Random(seed)
    made = guess_right(monkeypatch, [plain.run.context], lambda _, drafts: rng.choice((0, 1, drafts)), VOCABULARY)
    late = LateCopies(lambda: rng.randrange(4))
    late.backend = VirtualBackend(SeededOrder(seed), observer=late)
    held = await converse(checkpoint, depth, TURNS, late.backend, late.release)
    assert set(made) >= {0, 1, depth}
    assert len(late.delays) >= 3
    assert held.run.same_bits(plain.run)
    assert (held.logical, held.mirrored, held.mapped) == (plain.logical, plain.mirrored, plain.mapped)
    for number, (got, wanted) in enumerate(zip(held.blocks, plain.blocks, strict=True)):
        assert torch.equal(got, wanted), f"block {number} of {len(plain.blocks)} differs at byte {int((got != wanted).nonzero()[0])}"


async def _refused(checkpoint: Path, steps: int) -> None:
    """Every draft refused for `steps` steps: nothing grows but the text."""
    async with Engine.open(checkpoint, small(row_format="q8g64", hot_rows=TOP_K, draft_depth=3)) as engine:
        session = await engine.create_session()
        seen = 0
        async for _ in engine.generate(ids(70, 3), greedy(steps), session=session):
            memory = engine._sessions[session].memory
            assert memory is not None
            counts = memory.counts
            seen += 1
            # Of a step in flight and one not followed: their rows and no more, however many were refused before.
            assert counts.logical - counts.committed <= 2 * 4, f"{counts!r} after {seen} tokens"
            assert memory.history.blocks <= -(-(counts.logical + 7) // BLOCK_ROWS)
            assert counts.logical - counts.mirrored // BLOCK_ROWS * BLOCK_ROWS <= 256
        await engine._loop.wait_idle()
        await memory.operations.settle()
        memory.check_integrity()
        assert memory.counts.logical == 70 + steps - 1
        drafts = engine._loop.depth.counts
        assert drafts.accepted == (0,) * 7
        assert drafts.proposed[2] >= 0.8 * steps  # a wrong guess may be an end of text


async def test_refused_drafts_leave_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, blocks and ring stay within what steps in flight need while no draft is ever accepted."""
    guess_right(monkeypatch, [await _text(checkpoint, 100)], lambda _, drafts: 0, VOCABULARY)
    await _refused(checkpoint, 100)


@pytest.mark.parametrize("steps", [pytest.param(300, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.long)])
async def test_many_refused_steps_leave_nothing(checkpoint: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same over laps of the ring, two and nine."""
    guess_right(monkeypatch, [await _text(checkpoint, steps)], lambda _, drafts: 0, VOCABULARY)
    await _refused(checkpoint, steps)


async def _text(checkpoint: Path, tokens: int) -> list[int]:
    async with Engine.open(checkpoint, small(row_format="q8g64", hot_rows=TOP_K)) as engine:
        return (await collect(engine, [(ids(70, 3), tokens)])).context


@pytest.mark.parametrize("label", ["draft.extend", "draft.0", "draft.1", "step.finish"])
async def test_a_failure_while_drafting_breaks_its_step_only(checkpoint: Path, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose drafting fails ends its session; another one afterwards says what it always says."""
    backend = VirtualBackend(0)
    async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=backend) as engine:
        usual = await collect(engine, [(ids(70, 3), 4)])
    await backend.close()
    guess_right(monkeypatch, [usual.context], lambda position, drafts: position % 2, VOCABULARY)
    backend = VirtualBackend(SeededOrder(1, faults=(Fault(label, nth=2),)))
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, draft_depth=2), backend=backend) as engine:
        with pytest.raises(SessionBroken, match="failed"):
            await collect(engine, [(ids(60, 1), 12)])
        again = await collect(engine, [(ids(70, 3), 4)])
    await backend.close()
    assert again.same_bits(usual)


@pytest.mark.parametrize("seed", range(3))
async def test_sessions_under_any_order(checkpoint: Path, plain: Held, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions that draft and one that is cut off, under random completions, say what they say alone without drafts."""
    other = [(ids(129, 5), 20)]
    backend = CpuBackend()
    async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=backend) as engine:
        alone = await collect(engine, other)
        first = await collect(engine, [(ids(30, 6), 30)])
    await backend.close()
    rng = random.Random(seed)
    guess_right(monkeypatch, [alone.context, first.context], lambda _, drafts: rng.randint(0, drafts), VOCABULARY)
    virtual = VirtualBackend(SeededOrder(seed))
    config = small(hot_rows=TOP_K, draft_depth=3, decode_batch_limit=2)
    async with Engine.open(checkpoint, config, backend=virtual) as engine, asyncio.TaskGroup() as group:
        one = group.create_task(collect(engine, other))
        two = group.create_task(collect(engine, [(ids(30, 6), 30)]))
        group.create_task(_cut_off(engine, rng.randrange(1, 9)))
    await virtual.close()
    assert one.result().same_bits(alone)
    assert two.result().same_bits(first)


async def _cut_off(engine: Engine, tokens: int) -> None:
    got = 0
    async with engine.generate(ids(65, 7), greedy(40)) as generation:
        async for _ in generation:
            got += 1
            if got == tokens:
                break


def test_the_state_has_room_for_every_draft() -> None:
    """The deepest setting fits the fields."""
    assert STATE_FIELDS - StateField.DRAFTS == 7


@pytest.mark.parametrize("cut", [9, 17, 25, 33])
async def test_a_text_left_with_two_deep_steps_in_flight(checkpoint: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps taken back whole leave the state before them: rows of the next turn are those of one undisturbed prompt."""
    prompt, more = ids(90, 8), ids(5, 9)
    async with Engine.open(checkpoint, small(row_format="q8g64", hot_rows=TOP_K)) as engine:
        text = (await collect(engine, [(prompt, 60)])).context
    guess_right(monkeypatch, [text], lambda _, drafts: drafts, VOCABULARY)
    async with Engine.open(checkpoint, small(row_format="q8g64", hot_rows=TOP_K, draft_depth=7)) as engine:
        session = await engine.create_session()
        async with engine.generate(prompt, greedy(60), session=session) as generation:
            request = generation._request
            assert request is not None
            for _ in range(1_000_000):
                if request.generated >= cut and request.in_flight == 2:
                    break
                await asyncio.sleep(0)
            assert request.in_flight == 2
        left = list(engine._sessions[session].tokens)
        assert left == text[: len(left)]
        async for _ in engine.generate(more, greedy(1), session=session):
            pass
        await engine._loop.wait_idle()
        memory = engine._sessions[session].memory
        assert memory is not None
        await memory.operations.settle()
        whole = await engine.create_session()
        async for _ in engine.generate([*left, *more], greedy(1), session=whole):
            pass
        await engine._loop.wait_idle()
        other = engine._sessions[whole].memory
        assert other is not None
        await other.operations.settle()
        blocks = zip(_bytes(engine._stage.layout, memory), _bytes(engine._stage.layout, other), strict=True)
        for number, (one, wanted) in enumerate(blocks):
            assert torch.equal(one, wanted), f"block {number}, {len(left)} tokens left"
