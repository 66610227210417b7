"""What a conversation says and which rows it leaves, from an undisturbed run: resident, alone, operations in order of submission.

Holds scripts (conversations written down in advance) and their references. Knows the engine, no faults and no seeds.

Invariant: a row depends on the tokens up to it and nothing else, so one reference serves every run of its script, cut short or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling import Sampling
from engine.search.tiny import CONTEXT_MAX, TinyModel, prompt
from engine.search.watch import Watch, WatchedPlacement
from engine.search.watched_rounds import WatchedRounds
from engine.stage import Stage, open_stage
from kernels.layout import BLOCK_ROWS, BlockLayout
from memory.append import blocks_of
from memory.session import SessionMemory
from streams import VirtualBackend
from streams.queued import Operation

__all__ = ["Bench", "InOrder", "Reference", "Script", "Turn", "greedy"]


@dataclass(frozen=True, slots=True)
class Turn:
    """`rows` prompt tokens drawn from `seed`, or `given`, then `tokens` generated ones."""

    rows: int
    tokens: int
    seed: int = 0
    given: tuple[int, ...] = ()

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its token ids."""
        return self.given or prompt(self.rows, 1000 * self.seed + self.rows)


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def length(self) -> int:
        """Tokens in all."""
        return sum(turn.rows + turn.tokens for turn in self.turns)

    def whole(self, reference: "Reference") -> list[int]:
        """Every token of it: prompts, and what the reference says."""
        return [token for turn, said in zip(self.turns, reference.tokens, strict=True) for token in (*turn.prompt, *said)]


@dataclass(frozen=True, slots=True)
class Reference:
    """A script's tokens and logits, a turn each, and its rows: uint8 [layers or key layers, positions, bytes]. An `Expected`."""

    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[tuple[Tensor, ...], ...]
    row_bytes: Tensor
    key_bytes: Tensor

    @property
    def length(self) -> int:
        """See Expected."""
        return self.row_bytes.shape[1]

    def rows(self, layer: int, positions: Tensor) -> Tensor:
        """See Expected."""
        return self.row_bytes[layer, positions]

    def keys(self, key_layer: int, positions: Tensor) -> Tensor:
        """See Expected."""
        return self.key_bytes[key_layer, positions]


class InOrder:
    """An order (see `streams.Order`) without surprises: operations complete as they were submitted, at once."""

    def submitted(self, operation: Operation[Any]) -> None:
        """Nothing to do."""

    def ready(self) -> bool:
        """Always."""
        return True

    def choose(self, runnable: Sequence[Operation[Any]]) -> Operation[Any]:
        """The oldest."""
        return min(runnable, key=lambda operation: operation.number)

    def failure(self, operation: Operation[Any]) -> None:
        """Nothing fails."""

    def completed(self, operation: Operation[Any], error: BaseException | None) -> None:
        """Nothing to do."""

    def duration_ns(self, operation: Operation[Any]) -> int:
        """Any will do."""
        return 1

    def finish(self) -> None:
        """Nothing is missed."""


def greedy(tokens: int, *stops: int) -> Sampling:
    """At most `tokens` tokens, or to one of `stops`, with logits."""
    return Sampling(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True, keep_logits=True, stop_token_ids=stops)


class Bench:
    """What the scenarios of a process share: the model and the references computed so far."""

    def __init__(self) -> None:
        self.tiny = TinyModel()
        self._reference_of: dict[Script, Reference] = {}

    @property
    def block_bytes(self) -> int:
        """Of the tiny model in float32: 16 latent and 8 RoPE values a row, 8 values a key."""
        layers, groups = len(self.tiny.model.row_layers), len(self.tiny.model.groups)
        return BLOCK_ROWS * (layers * 4 * (16 + 8) + groups * 4 * 8)

    def config(self, **changes: object) -> EngineConfig:
        """Settings of a small engine: rows in float32, so that bits can be compared across placements."""
        settings: dict[str, object] = {"host_memory_bytes": 1 << 20, "row_format": "f32", "append_chunk_rows": 64, **changes}
        return EngineConfig(**settings)  # type: ignore[arg-type]  # field names are checked by the dataclass itself

    def stage(self, config: EngineConfig, backend: VirtualBackend, watch: Watch, **makers: Any) -> tuple[Stage, WatchedRounds]:
        """A stage whose sessions, plans and gathers are watched."""
        stage = open_stage(self.tiny.model, config, backend, context_max=CONTEXT_MAX, **makers)
        watch.layout = stage.layout
        rounds = WatchedRounds(stage.rounds, watch, stage.layout)
        return replace(stage, placement=WatchedPlacement(stage.placement, watch), rounds=rounds), rounds

    def engine(self, config: EngineConfig, stage: Stage) -> Engine:
        """An engine over a stage; run it with `engine.running()`."""
        return Engine(
            config, stage, name="tiny", tokenizer=self.tiny.tokenizer, template=self.tiny.template, context_max=CONTEXT_MAX
        )  # fmt: skip

    async def reference(self, script: Script) -> Reference:
        """The script's reference, computed once."""
        found = self._reference_of.get(script)
        if found is None:
            found = self._reference_of[script] = await self._run(script)
        return found

    async def _run(self, script: Script) -> Reference:
        backend, watch = VirtualBackend(InOrder()), Watch()
        config = self.config(placement="resident")
        stage, _ = self.stage(config, backend, watch)
        engine = self.engine(config, stage)
        tokens: list[tuple[int, ...]] = []
        logits: list[tuple[Tensor, ...]] = []
        async with engine.running():
            session = await engine.create_session()
            for turn in script.turns:
                chunks = [chunk async for chunk in engine.generate(list(turn.prompt), greedy(turn.tokens), session=session)]
                tokens.append(tuple(token for chunk in chunks for token in chunk.token_ids))
                logits.append(tuple(one for chunk in chunks for one in chunk.logits))
            memory = watch.memory_of(session)
            assert memory is not None, "the session is open"
            await memory.operations.settle()
            reference = Reference(tuple(tokens), tuple(logits), *_rows_of(memory, stage.layout))
        await backend.close()
        return reference


def _rows_of(memory: SessionMemory, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """All rows and keys of a resident session."""
    rows = memory.counts.committed
    blocks = [memory.device_block(block) for block in range(blocks_of(rows))]
    cut = [block[: layout.keys_offset].view(layout.layers, BLOCK_ROWS, -1) for block in blocks]
    keys = [block[layout.keys_offset :].view(layout.key_layers, BLOCK_ROWS, -1) for block in blocks]
    return torch.cat(cut, 1)[:, :rows].clone(), torch.cat(keys, 1)[:, :rows].clone()
