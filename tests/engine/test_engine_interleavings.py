"""Random conversations on the real engine under random interleavings and faults: what a session says never depends on its company.

Each seed draws clients, prompts at block boundaries, cut-off generations, settings, and the order of every completion. A failure prints
its seed, which reproduces it.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import SessionBroken
from engine.sampling import Sampling
from streams import CpuBackend, Fault, SeededOrder, VirtualBackend
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.runs import small

NAME = "shared"
TOP_K = int(named(NAME).config["index_topk"])
PROMPT_ROWS = (1, 31, 63, 64, 65, 129, 150)  # past two blocks, so that selected rows come from RAM
FAULTY = ("layer.*", "group.*", "step.*", "draft.*", "copyback", "mirrored", "append*", "table.rewrite", "tables", "truncate")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@dataclass(frozen=True)
class _Turn:
    prompt: tuple[int, ...]
    tokens: int
    cut: int | None  # leave after so many chunks; 0: cancel while waiting for the first


@dataclass
class _Client:
    """One conversation in a session of its own; only its last turn may be cut."""

    turns: list[_Turn]
    said: list[list[int]] = field(default_factory=list)
    broken: bool = False

    @classmethod
    def draw(cls, rng: random.Random) -> "_Client":
        turns = []
        for _ in range(rng.randint(1, 3)):
            rows = rng.choice(PROMPT_ROWS)
            vocabulary = int(named(NAME).config["vocab_size"])
            prompt = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(rng.randrange(4))).tolist()
            turns.append(_Turn(tuple(prompt), rng.choice((1, 2, 9, 17)), rng.choice((None, None, None, 0, 1, 3))))
            if turns[-1].cut is not None:
                break
        return cls(turns)

    async def talk(self, engine: Engine, rng: random.Random) -> None:
        session = await engine.create_session()
        try:
            for turn in self.turns:
                self.said.append([])
                generation = engine.generate(
                    list(turn.prompt), Sampling(max_tokens=turn.tokens, temperature=0.0, ignore_eos=True), session=session
                )  # fmt: skip
                async with generation:
                    if turn.cut == 0:
                        await _cancelled(generation.__anext__(), rng.randrange(30))
                        continue
                    async for chunk in generation:
                        self.said[-1].extend(chunk.token_ids)
                        if turn.cut is not None and len(self.said[-1]) >= turn.cut:
                            break
        except SessionBroken:
            self.broken = True
        await engine.close_session(session)


async def _cancelled(awaitable: object, rounds: int) -> None:
    """Wait for it some loop rounds, then cancel the wait."""
    task = asyncio.ensure_future(awaitable)  # type: ignore[call-overload]  # an awaitable of this test's own
    for _ in range(rounds):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


def _draw_config(rng: random.Random) -> EngineConfig:
    return small(
        hot_rows=rng.choice((TOP_K, 2 * TOP_K)),
        placement=rng.choice(("offload", "offload", "resident")),
        append_chunk_rows=rng.choice((64, 128)),
        decode_batch_limit=rng.choice((1, 2, 8)),
        draft_depth=rng.choice((0, 0, 1, 3)),
    )


async def _alone(checkpoint: Path, conversations: Sequence[Sequence[_Turn]]) -> list[list[list[int]]]:
    """What each conversation says on a resident engine, one after another and uncut."""
    backend = CpuBackend()
    clients = [_Client([_Turn(turn.prompt, turn.tokens, None) for turn in turns]) for turns in conversations]
    async with Engine.open(checkpoint, small(placement="resident"), backend=backend) as engine:
        for client in clients:
            await client.talk(engine, random.Random(0))
    await backend.close()
    return [client.said for client in clients]


async def _run(checkpoint: Path, seed: int, faults: tuple[Fault, ...]) -> list[_Client]:
    rng = random.Random(seed)
    clients = [_Client.draw(rng) for _ in range(rng.randint(2, 4))]
    backend = VirtualBackend(SeededOrder(seed, faults=faults))
    async with Engine.open(checkpoint, _draw_config(rng), backend=backend) as engine:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.talk(engine, random.Random(rng.randrange(2**32))))
        statistics = engine.statistics()
        assert (statistics.sessions, statistics.running, statistics.waiting) == (0, 0, 0), f"seed {seed}"
    await backend.close()
    assert backend.statistics().in_flight == 0
    for client, wanted in zip(clients, await _alone(checkpoint, [client.turns for client in clients]), strict=True):
        for turn, said, want in zip(client.turns, client.said, wanted, strict=False):
            assert said == want[: len(said)], f"seed {seed}"
            assert client.broken or turn.cut is not None or len(said) == turn.tokens, f"seed {seed}"
    return clients


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow if seed < 15 else pytest.mark.long) for seed in range(3, 40))]
)
async def test_company_order_and_cuts_change_nothing(checkpoint: Path, seed: int) -> None:
    """Every turn says what it says alone, a cut one the beginning of it, and nothing is left running or held."""
    assert not any(client.broken for client in await _run(checkpoint, seed, ()))


@pytest.mark.parametrize(
    "seed",
    [*range(100, 103), *(pytest.param(seed, marks=pytest.mark.slow if seed < 115 else pytest.mark.long) for seed in range(103, 140))],
)
async def test_faults_break_sessions_and_nothing_else(checkpoint: Path, seed: int) -> None:
    """With operations failing or late, a session says what it says alone as far as it gets, and breaks or ends; nothing hangs or stays."""
    rng = random.Random(seed)
    faults = tuple(Fault(rng.choice(FAULTY), rng.randrange(12), rng.choice(("fail", "fail", "delay"))) for _ in range(2))
    await _run(checkpoint, seed, faults)
