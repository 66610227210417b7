"""Made-up histories: rows, keys, MTP rows and hidden states written without running the model, for measuring long contexts.

Holds the arithmetic of the values, the append that writes them, and how a session gets their tokens. They go through the same chunks as
real rows, so counts, blocks, pages and copies are those of a real history. The model's answer to one means nothing; two placements must
give the same answer all the same.

Invariants:
1. A value depends on seed, layer, position and column alone: not on the placement, the chunk, or what ran before.
2. Values are uniform with mean 0 and deviation 1, as latents, keys and hidden states are after their norms.
3. The MTP block's row 0 is zero, as in every history.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.append import AppendRun
from engine.append_scratch import Scratch
from engine.chain import Chain
from engine.errors import BadRequest
from engine.protocol import SyntheticHistory
from engine.sampling_table import SamplingState
from engine.session import Session
from engine.stage import Stage
from engine.stage_calls import FollowerAppend
from engine.unit import Unit
from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS
from kernels.quantize import append_keys, append_rows
from memory.append import AppendChunk
from memory.session import SessionMemory
from streams import Event

__all__ = ["HistoryFill", "SyntheticRun", "begun_with", "tokens_of", "values"]

_DRAWS = 64  # times that a row's bytes are read and written while its values are drawn: two dozen passes over words eight times as wide
_WORD = 0xFFFFFFFF
_STEP = 0x9E3779B9
_ROOT_3 = 3.0**0.5


_Words = TypeVar("_Words", int, Tensor)


def _mix(words: _Words) -> _Words:
    """A permutation of 32-bit words (in int64 when tensors), every bit depending on every bit of the argument. A tensor is overwritten."""
    words ^= words >> 16
    words *= 0x85EBCA6B
    words &= _WORD
    words ^= words >> 13
    words *= 0xC2B2AE35
    words &= _WORD
    words ^= words >> 16
    return words


def values(seed: int, streams: int | Tensor, positions: Tensor, columns: int) -> Tensor:
    """What a history holds at some positions. A few dozen launches on a device, however much is drawn.

    streams    which of a position's vectors: one number a layer and kind, or [streams] int64
    positions  [n]                      int64  on the same device
    returns    [streams, n, columns]    f32    without the first dimension for one stream that is a number
    """
    root = _mix(_mix((seed & _WORD) ^ _STEP) ^ (seed >> 32))
    vector: int | Tensor = _mix(streams ^ root)[:, None] if isinstance(streams, Tensor) else _mix(streams ^ root)
    row = _mix(_mix((positions & _WORD) ^ vector) ^ (positions >> 32))
    column = (torch.arange(columns, dtype=torch.int64, device=positions.device) * _STEP) & _WORD
    words = _mix(_mix(row[..., None] ^ column))
    return words.to(torch.float32).mul_(2.0**-31).sub_(1.0).mul_(_ROOT_3)


def tokens_of(history: SyntheticHistory, vocabulary: int) -> list[int]:
    """Token ids that stand for the rows; the model never reads them, penalties do."""
    return random.Random(history.seed).choices(range(vocabulary), k=history.rows)


@contextmanager
def begun_with(
    history: SyntheticHistory | None, session: Session, *, continues: bool, context_max: int, vocabulary: int
) -> Iterator[None]:  # fmt: skip
    """Give a session the tokens of a made-up history, if there is one, not to be kept if the block fails; its first append writes the rows.

    Args: continues: whether it has tokens, or is about to. Raises: BadRequest: it does, or the history cannot begin a session of at most
        `context_max` tokens.
    """
    if history is None:
        return (yield)
    if continues:
        raise BadRequest("a synthetic history begins a session that has no tokens; create another", field="synthetic_history")
    if not (0 <= history.seed < 2**63 and 1 <= history.rows < context_max):
        raise BadRequest(f"a synthetic history has a seed of 0 to 2^63 - 1 and 1 to {context_max - 1} rows", field="synthetic_history")
    session.made_up = True
    session.tokens.extend(tokens_of(history, vocabulary))
    try:
        yield
    except BaseException:
        session.cut(0)
        raise


class SyntheticRun(AppendRun):
    """An append of `tokens` behind a made-up history."""

    def __init__(
        self, stage: Stage, memory: SessionMemory, tokens: Sequence[int], sampling: SamplingState | None, session: str,
        history: SyntheticHistory, scratch: Scratch | None = None, before: Sequence[FollowerAppend] = (),
    ) -> None:  # fmt: skip
        super().__init__(stage, memory, tokens, sampling, session, scratch, before)
        self._history = history
        self._fill = HistoryFill(stage, history, self.everywhere)
        self.done_rows = -history.rows  # these count as rows that the session had

    def units(self) -> Iterator[Unit]:
        """First the history, a chunk a unit, then the append."""
        rows_max = self._stage.append_rows
        for start in range(0, self._history.rows, rows_max):
            self.done_rows = start - self._history.rows
            rows = min(rows_max, self._history.rows - start)
            yield Unit(partial(self._fill_chunk, rows), _DRAWS * rows * self._stage.layout.block_bytes // BLOCK_ROWS, ends_chunk=True)
        self.done_rows = 0
        yield from super().units()

    def _fill_chunk(self, rows: int) -> Event[Any]:
        ends = [part.fill(rows, self._history) for part in self._before]
        ends.append(self._fill.chunk(self._memory, rows, self._session))
        return ends[0] if len(ends) == 1 else self._stage.joined(ends, label="history.ends", session=self._session)


class HistoryFill:
    """The part of a made-up history that one stage has."""

    def __init__(self, stage: Stage, history: SyntheticHistory, everywhere: Callable[[Chain, AppendChunk, Event[Any]], Event[Any]]) -> None:
        """Args: everywhere: `AppendRun.everywhere`."""
        self._stage, self._history, self._brought = stage, history, everywhere
        self._layers: Tensor | None = None  # [layers] int64, on the device, the model's numbers; made on the stream that uses it
        self._full_layers: Tensor | None = None  # [groups], likewise

    def chunk(self, memory: SessionMemory, rows: int, session: str) -> Event[Any]:
        """A whole chunk, opened and finished; returns its end."""
        stage, streams = self._stage, self._stage.streams
        chunk = memory.begin_append(rows, streams.compute)
        chain, events = Chain(session, (chunk.ready,)), list[Event[Any]]()
        try:
            for label, work in (("rows", self._fill_rows), ("keys", self._fill_keys), ("hidden", partial(self._fill_hidden, memory))):
                events.append(chain.submit(streams.compute, partial(work, chunk), label=f"history.{label}"))
            done = self._brought(chain, chunk, events[-1])
        except BaseException:
            chunk.abandon(events)
            raise
        return chunk.finish(streams.compute, stage.copyback, done)

    def _drawn(self, layers: Tensor, kind: int, positions: Tensor, columns: int) -> Tensor:
        """Values of one kind for several layers at once, [layers, n, columns]: one draw a chunk, not one a layer."""
        found = values(self._history.seed, 3 * layers + kind, positions, columns)
        if self._stage.model.mtp is not None:
            mtp = self._stage.first_layer + self._stage.mtp_layer
            found *= ((positions > 0)[None, :] | (layers != mtp)[:, None])[..., None]
        return found

    def _positions(self, chunk: AppendChunk) -> Tensor:
        return torch.arange(chunk.first, chunk.first + chunk.rows, device=self._stage.device)

    def _fill_rows(self, chunk: AppendChunk) -> None:
        """Rows of every layer."""
        layout, first = self._stage.layout, self._stage.first_layer
        if self._layers is None:
            self._layers = torch.arange(first, first + layout.layers, device=self._stage.device)
        latents = self._drawn(self._layers, 0, self._positions(chunk), layout.row.latent)
        ropes = self._drawn(self._layers, 1, self._positions(chunk), layout.row.rope)
        for layer in range(layout.layers):
            append_rows(latents[layer], ropes[layer], chunk.row_destinations, layout.row_offset(layer), layout.row)

    def _fill_keys(self, chunk: AppendChunk) -> None:
        """Keys of each group's full layer, in the blocks and in the pages. A first group without its full layer has keys nobody reads."""
        layout, first = self._stage.layout, self._stage.first_layer
        if self._full_layers is None:
            self._full_layers = torch.tensor([first + layers[0] for layers in layout.groups], device=self._stage.device)
        keys = self._drawn(self._full_layers, 2, self._positions(chunk), layout.key.width)
        for group in range(len(layout.groups)):
            append_keys(keys[group], chunk.key_destinations, group * layout.key_layer_bytes, layout.key)
            append_keys(keys[group], chunk.page_destinations[group], 0, layout.key)

    def _fill_hidden(self, memory: SessionMemory, chunk: AppendChunk) -> None:
        """States after the final norm, of the last rows; the stages before the last keep none."""
        if not self._stage.model.is_last:
            return
        end, kept = chunk.first + chunk.rows, memory.hidden
        positions = torch.arange(max(chunk.first, end - HIDDEN_ROWS), end, device=kept.device)
        number = 3 * (self._stage.first_layer + self._stage.layout.layers)
        kept[positions % HIDDEN_ROWS] = values(self._history.seed, number, positions, kept.shape[1])
