"""Run the real engine over a checkpoint and keep what it produced: tokens and raw logits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine, Statistics
from engine.sampling import Sampling

__all__ = ["Run", "collect", "run", "small"]


@dataclass
class Run:
    """Tokens and logits of every turn, and the engine's last statistics."""

    tokens: list[int] = field(default_factory=list)  # generated, all turns
    logits: list[Tensor] = field(default_factory=list)
    context: list[int] = field(default_factory=list)  # prompts and generated tokens, in order
    statistics: Statistics | None = None

    def same_bits(self, other: "Run") -> bool:
        """Whether tokens and logits are equal to the bit."""
        return self.tokens == other.tokens and all(torch.equal(a, b) for a, b in zip(self.logits, other.logits, strict=True))


def small(**changes: object) -> EngineConfig:
    """Settings for tiny models: a small arena, f32 rows, the CPU whatever the machine has."""
    settings: dict[str, object] = {"device": "cpu", "host_memory_bytes": 64 << 20, "row_format": "f32", "append_chunk_rows": 64, **changes}
    return EngineConfig(**settings)  # type: ignore[arg-type]  # field names are checked by the dataclass itself


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, keep_logits=True)


async def collect(engine: Engine, turns: Sequence[tuple[Sequence[int], int]], sampling: Sampling | None = None) -> Run:
    """One session: for each (prompt ids, new tokens), a turn."""
    result = Run()
    session = await engine.create_session()
    for prompt, tokens in turns:
        result.context.extend(prompt)
        async for chunk in engine.generate(list(prompt), sampling or greedy(tokens), session=session):
            result.tokens.extend(chunk.token_ids)
            result.context.extend(chunk.token_ids)
            result.logits.extend(chunk.logits)
    result.statistics = engine.statistics()
    await engine.close_session(session)
    return result


async def run(model: Path, config: EngineConfig, turns: Sequence[tuple[Sequence[int], int]], sampling: Sampling | None = None) -> Run:
    """Open an engine for these turns alone."""
    async with Engine.open(model, config) as engine:
        return await collect(engine, turns, sampling)
