"""Batches of training rows: windows of the streams, dialogue rows, needle rows, stretched positions, and the rows the indexer learns on.

Holds: `Mix` (what share of rows is what), `Batch`, `Rows`. Does not know: the network, phases' times.

1. Batch `step` of a phase depends on the seed, the phase's name and `step` alone: no generator is carried from batch to batch.
2. Positions rise strictly by at least 1, start at 0 or above and stay below `positions_max`.
3. Sampled query rows include every row that must recall a fact's first answer tokens, as far as there is room; the rest are uniform.
"""

import queue
import threading
import zlib
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.demo_training.corpus import Corpus
from engine.demo_training.needles import Woven, weave

__all__ = ["EXTRA", "Batch", "Mix", "Rows"]

EXTRA = 3  # tokens past the row that MTP depths see as input, plus one that only its last depth predicts
SPREAD = 1 + EXTRA


@dataclass(frozen=True, slots=True)
class Mix:
    """Shape and contents of a phase's rows. Shares are fractions of the batch's rows; `facts` the fewest and most a needle row has."""

    rows: int
    tokens: int
    dialogues: float = 0.0
    needles: float = 0.0
    stretched: float = 0.0
    facts: tuple[int, int] = (4, 12)
    sampled: int = 32  # query rows a row on which the indexer learns
    answer_weight: float = 8.0  # weight of a fact's answer in the next-token loss: rare tokens that only recall can predict


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens int64 [rows, tokens + 4]; positions int64 [rows, tokens + 2]; sampled int64 [rows, queries];
    weight float32 [rows, tokens]: of the prediction of token i + 1."""

    tokens: Tensor
    positions: Tensor
    sampled: Tensor
    weight: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        parts = (self.tokens, self.positions, self.sampled, self.weight)
        return Batch(*(part.to(device, non_blocking=True) for part in parts))


class Rows:
    """Makes batches of one mix out of one corpus."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, mix: Mix, *, seed: int, phase: str, positions_max: int) -> None:
        self.corpus, self.mix, self.positions_max = corpus, mix, positions_max
        self.key = (seed, zlib.crc32(phase.encode()))
        self.tokenizer = tokenizer
        names = [tokenizer.id_to_token(token) or "" for token in range(tokenizer.get_vocab_size())]
        self.line_end = np.asarray([name.endswith("Ċ") for name in names])

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def batch(self, step: int) -> Batch:
        """Batch `step` of the phase."""
        mix, random = self.mix, np.random.default_rng([*self.key, step])
        kinds = random.random(mix.rows)
        rows = [self._row(kind, random) for kind in kinds]
        weight = np.ones((mix.rows, mix.tokens), np.float32)
        sampled = np.empty((mix.rows, mix.sampled), np.int64)
        for row, woven in enumerate(rows):
            recall = [token - 1 for first, end in woven.asked for token in range(first, end) if 0 < token <= mix.tokens]
            weight[row, recall] = mix.answer_weight
            kept = random.permutation(np.asarray(recall, np.int64))[: mix.sampled // 2]
            sampled[row] = np.concatenate([kept, random.integers(0, mix.tokens, mix.sampled - len(kept))])
        tokens = np.stack([woven.tokens for woven in rows]).astype(np.int64)
        positions = np.stack([self._positions(random) for _ in rows])
        return Batch(*(torch.from_numpy(part) for part in (tokens, positions, sampled, weight)))

    def _window(self, stream: npt.NDArray[np.uint16], length: int, random: np.random.Generator) -> npt.NDArray[np.uint16]:
        assert len(stream) > length, f"a stream of {len(stream)} tokens has no window of {length}"
        start = int(random.integers(0, len(stream) - length))
        return stream[start : start + length]

    def _row(self, kind: float, random: np.random.Generator) -> Woven:
        """One row of tokens + 4 tokens; `kind` in [0, 1) chooses what it is."""
        mix, length = self.mix, self.mix.tokens + SPREAD
        if kind < mix.dialogues:
            return Woven(self._window(self.corpus.dialogues, length, random), ())
        text = self._window(self.corpus.train, length, random)
        if kind >= mix.dialogues + mix.needles:
            return Woven(text, ())
        facts = int(random.integers(mix.facts[0], mix.facts[1] + 1))
        # Uses spread over the whole row beside uses far behind: near recall is learnt first and pulls far recall along.
        far = bool(random.random() < 0.5)
        defined_in, asked_in = ((0.0, 0.4), (0.6, 1.0)) if far else ((0.0, 0.9), (0.05, 1.0))
        return weave(text, self.line_end, random, self.encode, length=length, facts=facts, defined_in=defined_in, asked_in=asked_in)

    def _positions(self, random: np.random.Generator) -> npt.NDArray[np.int64]:
        length = self.mix.tokens + SPREAD - 2
        steps = np.ones(length, np.int64)
        steps[0] = 0
        room = self.positions_max - length
        if random.random() < self.mix.stretched and room > 0:
            places = random.integers(1, length, int(random.integers(1, 9)))
            total = random.integers(0, room) * random.random()
            shares = random.dirichlet(np.ones(len(places)))
            np.add.at(steps, places, (shares * total).astype(np.int64))
        return np.cumsum(steps)

    def ahead(self, first: int, depth: int = 6) -> Generator[Batch, None, None]:
        """Batches from `first` on, made by a thread up to `depth` ahead; the thread ends when the iterator is closed."""
        ready: queue.Queue[Batch] = queue.Queue(depth)
        stop = threading.Event()

        def fill() -> None:
            step = first
            while not stop.is_set():
                batch = self.batch(step)
                while not stop.is_set():
                    try:
                        ready.put(batch, timeout=0.2)
                        break
                    except queue.Full:
                        continue
                step += 1

        worker = threading.Thread(target=fill, name="rows", daemon=True)
        worker.start()
        try:
            while True:
                yield ready.get()
        finally:
            stop.set()
            worker.join()
