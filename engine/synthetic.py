"""Made-up histories: rows, keys, MTP rows and hidden states written without running the model, for measuring long contexts.

Holds the arithmetic of the values and the append that writes them. They go through the same chunks as real rows, so counts, blocks, pages
and copies are those of a real history. The model's answer to one means nothing; two placements must give the same answer all the same.

Invariants:
1. A value depends on seed, layer, position and column alone: not on the placement, the chunk, or what ran before.
2. Values are uniform with mean 0 and deviation 1, as latents, keys and hidden states are after their norms.
3. The MTP block's row 0 is zero, as in every history.
"""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.append import AppendRun
from engine.chain import Chain
from engine.protocol import SyntheticHistory
from engine.sampling_table import SamplingState
from engine.stage import Stage
from kernels.layout import HIDDEN_ROWS
from kernels.quantize import append_keys, append_rows
from memory.append import AppendChunk
from memory.session import SessionMemory
from streams import Event

__all__ = ["SyntheticRun", "tokens_of", "values"]

_WORD = 0xFFFFFFFF
_STEP = 0x9E3779B9
_ROOT_3 = 3.0**0.5


_Words = TypeVar("_Words", int, Tensor)


def _mix(words: _Words) -> _Words:
    """A permutation of 32-bit words (in int64 when tensors), every bit of the result depending on every bit of the argument."""
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _WORD
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)


def values(seed: int, stream: int, positions: Tensor, columns: int) -> Tensor:
    """What a history holds at some positions.

    stream     which of a position's vectors: one number a layer and kind
    positions  [n]           int64
    returns    [n, columns]  f32    on the device of `positions`
    """
    root = _mix(_mix(_mix((seed & _WORD) ^ _STEP) ^ (seed >> 32)) ^ stream)
    row = _mix(_mix((positions & _WORD) ^ root) ^ (positions >> 32))
    column = (torch.arange(columns, dtype=torch.int64, device=positions.device) * _STEP) & _WORD
    words = _mix(_mix(row[:, None] ^ column[None, :]))
    return (words.to(torch.float32) * 2.0**-31 - 1.0) * _ROOT_3


def tokens_of(history: SyntheticHistory, vocabulary: int) -> list[int]:
    """Token ids that stand for the rows; the model never reads them, penalties do."""
    return random.Random(history.seed).choices(range(vocabulary), k=history.rows)


class SyntheticRun(AppendRun):
    """An append of `tokens` behind a made-up history."""

    def __init__(
        self,
        stage: Stage,
        memory: SessionMemory,
        tokens: list[int],
        sampling: SamplingState | None,
        session: str,
        history: SyntheticHistory,
    ) -> None:
        super().__init__(stage, memory, tokens, sampling, session)
        self._history = history

    def units(self) -> Iterator[Event[Any]]:
        """First the history, a chunk a unit, then the append."""
        rows_max = self._stage.append_rows
        for start in range(0, self._history.rows, rows_max):
            yield self._fill_chunk(min(rows_max, self._history.rows - start))
        yield from super().units()

    def _fill_chunk(self, rows: int) -> Event[Any]:
        stage, streams = self._stage, self._stage.streams
        chunk = self._memory.begin_append(rows, streams.compute)
        self._chunk = chunk
        chain = Chain(self._session, (chunk.ready,))
        done: Event[Any] = chunk.ready
        for layer in range(stage.layout.layers):
            done = chain.submit(streams.compute, partial(self._fill_layer, chunk, layer), label=f"history.{layer}")
        done = chain.submit(streams.compute, partial(self._fill_hidden, chunk), label="history.hidden")
        finished = chunk.finish(streams.compute, stage.copyback, done)
        self._chunk = None
        return finished

    def _fill_layer(self, chunk: AppendChunk, layer: int) -> None:
        """Rows of one layer, and keys where it is a group's full layer."""
        layout, seed = self._stage.layout, self._history.seed
        positions = torch.arange(chunk.first, chunk.first + chunk.rows, device=self._memory.state.device)
        is_mtp = self._stage.model.mtp is not None and layer == self._stage.mtp_layer

        def drawn(kind: int, columns: int) -> Tensor:
            found = values(seed, 3 * layer + kind, positions, columns)
            return torch.where((positions > 0)[:, None], found, 0.0) if is_mtp else found

        row = layout.row
        append_rows(drawn(0, row.latent), drawn(1, row.rope), chunk.row_destinations, layout.row_offset(layer), row)
        for group, layers in enumerate(layout.groups):
            if layers[0] == layer:
                keys = drawn(2, layout.key.width)
                append_keys(keys, chunk.key_destinations, group * layout.key_layer_bytes, layout.key)
                append_keys(keys, chunk.page_destinations[group], 0, layout.key)

    def _fill_hidden(self, chunk: AppendChunk) -> None:
        """States after the final norm, of the last rows."""
        end = chunk.first + chunk.rows
        kept = self._memory.hidden
        positions = torch.arange(max(chunk.first, end - HIDDEN_ROWS), end, device=kept.device)
        kept[positions % HIDDEN_ROWS] = values(self._history.seed, 3 * self._stage.layout.layers, positions, kept.shape[1])
