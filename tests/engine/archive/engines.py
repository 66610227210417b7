"""Small engines whose sessions are archived, what they say, and every byte that a session of them is."""

import dataclasses
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.glm import Model
from engine.protocol import SessionId
from engine.sampling import Sampling
from engine.search.tiny import TinyModel, prompt
from tests.engine.runs import small

__all__ = ["engine_of", "held", "model", "say", "session_of", "state"]


@functools.cache
def model(seed: int = 5) -> Model:
    """The tiny model, with room for long sessions."""
    tiny = TinyModel(seed).model
    return dataclasses.replace(tiny, config=dataclasses.replace(tiny.config, context_max=2048))


@asynccontextmanager
async def engine_of(weights: Model | None = None, **settings: object) -> AsyncIterator[Engine]:
    """An engine of the tiny model whose parts are checked and empty at the end."""
    config: EngineConfig = small(**{"hot_rows": 24, "host_memory_bytes": 8 << 20, **settings})
    async with Engine.open("tiny", config, weights=weights or model()) as engine:
        yield engine
        engine.stage.arena.check_integrity()
        engine.stage.pool.check_integrity()


def held(engine: Engine) -> tuple[object, ...]:
    """What must be as before when nothing new is held."""
    stage = engine.stage
    return stage.arena.statistics(), stage.pool.statistics(), stage.ledger.statistics(), tuple(engine._sessions)


async def say(engine: Engine, session: SessionId | None, ids: tuple[int, ...], tokens: int, **sampling: Any) -> list[int]:
    """Tokens of one turn, greedy unless told otherwise."""
    asked = Sampling(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
    return [token async for chunk in engine.generate(list(ids), asked, session=session) for token in chunk.token_ids]


async def session_of(engine: Engine, rows: int) -> SessionId:
    """A session between two turns with `rows` rows."""
    session = await engine.create_session()
    turns = [rows] if rows < 40 else [rows - 30, 30]
    for number, length in enumerate(turns):
        tokens = 1 if number == 0 or length == 1 else min(9, length)
        held_before = len(engine._sessions[session].tokens) - engine._sessions[session].rows
        await say(engine, session, prompt(length - held_before - tokens + 1, rows + number), tokens)
    assert engine._sessions[session].rows == rows
    return session


def state(engine: Engine, session: SessionId) -> dict[str, object]:
    """Every byte of a session, wherever it lies."""
    one = engine._sessions[session]
    memory, layout = one.memory, engine.stage.layout
    assert memory is not None
    rows, keys = [], []
    for position in range(memory.counts.logical):
        block, within = divmod(position, 64)
        mirrored = memory.ring is not None and block < memory.counts.mirrored // 64
        held_in = memory.mirror_block(block) if mirrored else memory.device_block(block)
        for layer in range(layout.layers):
            rows.append(held_in[layout.row_offset(layer, within) :][: layout.row.row_bytes])
        for layer in range(layout.key_layers):
            keys.append(memory.pages.view(layer, position // 1024).view(1024, -1)[position % 1024])
            keys.append(held_in[layout.key_offset(layer, within) :][: layout.key.key_bytes])
    return {
        "rows": torch.cat(rows).tolist(), "keys": torch.cat(keys).tolist(), "hidden": memory.hidden.tolist(), "tokens": list(one.tokens),
        "revision": one.revision, "logical": int(memory.state[0]),
    }  # fmt: skip
