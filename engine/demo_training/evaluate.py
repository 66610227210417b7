"""What a checkpoint of the demo model can do, in numbers: `python -m engine.demo_training.evaluate --corpus FILE --json OUT DIR...`.

Holds: bits a byte, MTP acceptance, recall of facts, selection mass. Does not know: how the checkpoint came about.

1. The same corpus file and seed give every checkpoint the same rows: numbers of two checkpoints stand side by side.
2. An answer is exact when every one of its tokens is the greedy choice, given the ones before it: what greedy decoding would write.
3. A draft is accepted while it and all before it equal the network's own greedy choice at that row, the row's true text behind it.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.demo_training import corpus as corpora
from engine.demo_training.corpus import Corpus, Stream
from engine.demo_training.export import load
from engine.demo_training.losses import token_loss
from engine.demo_training.needles import weave
from engine.demo_training.network import DEPTHS, Network
from engine.demo_training.shape import Shape

__all__ = ["DEMO", "SHORT", "TOY", "Evaluation", "Sizes", "evaluate", "main"]

SEED = 20_260
CHUNK = 4096  # tokens whose logits exist at once


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Lengths and counts of tokens, rows, facts."""

    lengths: tuple[int, ...] = (2048, 16_384, 50_000)
    windows: int = 12  # rows a length, at most what the stream holds
    recall_lengths: tuple[int, ...] = (2048, 8192, 16_384, 32_768, 50_000)
    recall_rows: int = 12
    facts: int = 8
    prompts: int = 48
    prompt_tokens: int = 256
    new_tokens: int = 192
    sampled: int = 64


DEMO = Sizes()
SHORT = Sizes(lengths=(2048,), recall_lengths=(2048, 16_384), new_tokens=64)
TOY = Sizes(
    lengths=(64,), windows=1, recall_lengths=(160,), recall_rows=1, facts=1, prompts=2, prompt_tokens=24, new_tokens=10, sampled=4
)  # fmt: skip
SIZES = {"demo": DEMO, "short": SHORT, "toy": TOY}


class Evaluation:
    """Measurements of one network on one corpus."""

    def __init__(self, network: Network, corpus: Corpus, tokenizer: Tokenizer, sizes: Sizes, device: torch.device) -> None:
        self.network, self.corpus, self.tokenizer, self.sizes, self.device = network.to(device).eval(), corpus, tokenizer, sizes, device
        names = [tokenizer.id_to_token(token) or "" for token in range(tokenizer.get_vocab_size())]
        self.line_end = np.asarray([name.endswith("Ċ") for name in names])
        self.token_bytes = torch.from_numpy(corpus.token_bytes).to(device)

    def _on_device(self, tokens: Sequence[Stream] | Stream) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(np.stack(list(tokens)).astype(np.int64)).to(self.device)
        return ids, torch.arange(ids.shape[1], device=self.device)[None].expand(ids.shape[0], -1)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def windows(self, stream: Stream, length: int, extra: int) -> list[Stream]:
        """Rows of length + extra tokens, evenly spread over the stream; fewer than asked if they would overlap."""
        count = min(self.sizes.windows, max(1, len(stream) // (length + extra)))
        starts = np.linspace(0, len(stream) - length - extra, count).astype(int)
        return [stream[start : start + length + extra] for start in starts]

    def nats(self, row: Stream, *, sparse: bool) -> Tensor:
        """Cross-entropy of each token of a row after the first: float32 [tokens - 1]."""
        ids, positions = self._on_device([row])
        out = self.network(ids, positions, sparse=sparse, depths=0)
        head, target = self.network.lm_head.weight, ids[:, 1:]
        states = out.state[:, :-1].split(CHUNK, 1)
        parts = [token_loss(state, head, wanted) for state, wanted in zip(states, target.split(CHUNK, 1), strict=True)]
        return torch.cat(parts, 1)[0]

    def bits(self, stream: Stream, length: int) -> dict[str, Any]:
        """Bits a byte over windows of `length`, with selection and without, and with selection by quarter of the row."""
        result: dict[str, Any] = {}
        rows = self.windows(stream, length, 0)
        for name, sparse in (("sparse", True), ("dense", False)):
            nats = torch.stack([self.nats(row, sparse=sparse) for row in rows])
            sizes = torch.stack([self.token_bytes[torch.from_numpy(row.astype(np.int64))[1:].to(self.device)] for row in rows])
            result[name] = round(float(nats.sum() / sizes.sum()) / math.log(2), 4)
            if sparse:
                quarters = zip(nats.tensor_split(4, 1), sizes.tensor_split(4, 1), strict=True)
                result["quarters"] = [round(float(n.sum() / s.sum()) / math.log(2), 4) for n, s in quarters]
        return result | {"rows": len(rows)}

    def _greedy(self, state: Tensor) -> Tensor:
        return torch.cat([self.network.logits(part).argmax(-1) for part in state.split(CHUNK, 1)], 1)

    def _accepted(self, rows: Sequence[Stream], first: int) -> list[float]:
        """Cumulative share of drafts accepted at depths 1, 2, 3, over rows from token `first` on."""
        counts, total = torch.zeros(DEPTHS, device=self.device), 0
        for low in range(0, len(rows), 8):
            ids, positions = self._on_device(rows[low : low + 8])
            out = self.network(ids, positions, sparse=True)
            own = self._greedy(out.state)
            ok = torch.ones_like(own[:, : own.shape[1] - DEPTHS], dtype=torch.bool)
            for depth, state in enumerate(out.drafts, 1):
                end = own.shape[1] - DEPTHS + depth
                ok &= self._greedy(state)[:, : ok.shape[1]] == own[:, depth:end]
                counts[depth - 1] += ok[:, first:].sum()
            total += ok[:, first:].numel()
        return [round(float(count) / total, 4) for count in counts]

    def generated(self) -> list[Stream]:
        """Held-out prompts with the network's own greedy continuation."""
        sizes = self.sizes
        starts = np.linspace(0, len(self.corpus.held_out) - sizes.prompt_tokens - 1, sizes.prompts).astype(int)
        ids, _ = self._on_device([self.corpus.held_out[start : start + sizes.prompt_tokens] for start in starts])
        for _ in range(sizes.new_tokens):
            positions = torch.arange(ids.shape[1], device=self.device)[None].expand(len(ids), -1)
            out = self.network(ids, positions, sparse=True, depths=0)
            ids = torch.cat((ids, self.network.logits(out.state[:, -1:]).argmax(-1)), 1)
        return list(ids.cpu().numpy().astype(np.uint16))

    def acceptance(self) -> dict[str, list[float]]:
        """MTP acceptance on held-out text at the first length, and on the network's own greedy text."""
        rows = self.windows(self.corpus.held_out, self.sizes.lengths[0], DEPTHS)
        return {"held_out": self._accepted(rows, 0), "own_greedy": self._accepted(self.generated(), self.sizes.prompt_tokens)}

    def recall(self, length: int) -> dict[str, float]:
        """Share of exact answers when facts of the first quarter of a row of `length` are asked for at its end."""
        sizes = self.sizes
        exact = {"sparse": 0, "dense": 0}
        for which in range(sizes.recall_rows):
            random = np.random.default_rng([SEED, length, which])
            start = int(random.integers(0, len(self.corpus.held_out) - length))
            row = weave(
                self.corpus.held_out[start : start + length], self.line_end, random, self._encode, length=length, facts=sizes.facts,
                defined_in=(0.0, 0.25), asked_in=(0.98, 1.0), chat_only=True,
            )  # fmt: skip
            ids, positions = self._on_device([row.tokens])
            for name, sparse in (("sparse", True), ("dense", False)):
                right = self._greedy(self.network(ids, positions, sparse=sparse, depths=0).state)[0, :-1] == ids[0, 1:]
                exact[name] += sum(bool(right[first - 1 : end - 1].all()) for first, end in row.asked)
        total = sizes.recall_rows * sizes.facts
        return {name: round(count / total, 4) for name, count in exact.items()} | {"facts": total}

    def covered(self, length: int) -> list[float]:
        """Each group's share of the best picks' attention mass that its selection carries, MTP block last."""
        ids, positions = self._on_device(self.windows(self.corpus.held_out, length, DEPTHS)[:1])
        generator = torch.Generator().manual_seed(SEED)
        low = min(self.network.shape.picks, length // 2)  # rows that see no more than their picks select everything
        sampled = torch.randint(low, length, (1, self.sizes.sampled), generator=generator).to(self.device)
        out = self.network(ids, positions, sparse=True, sampled=sampled, cover=True)
        return [round(float(share.mean()), 4) for share in out.covered]


@torch.no_grad()
def evaluate(checkpoint: Path, corpus: Corpus, sizes: Sizes, shape: Shape, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Every measurement of one checkpoint directory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = load(checkpoint, shape, torch.bfloat16 if device.type == "cuda" else torch.float32)
    judged = Evaluation(network, corpus, Tokenizer.from_file(str(checkpoint / "tokenizer.json")), sizes, device)
    start = time.monotonic()
    result: dict[str, Any] = {"checkpoint": checkpoint.name, "corpus": corpus.digest, "precision": str(network.dtype)}
    measures: list[tuple[str, Callable[[], Any]]] = [
        ("held_out_bits", lambda: {length: judged.bits(corpus.held_out, length) for length in sizes.lengths}),
        (
            "outside_bits",
            lambda: {length: judged.bits(corpus.outside, length) for length in sizes.lengths[:2] if len(corpus.outside) >= length},
        ),
        ("acceptance", judged.acceptance),
        ("covered", lambda: {length: judged.covered(length) for length in sizes.lengths}),
        ("recall", lambda: {length: judged.recall(length) for length in sizes.recall_lengths}),
    ]
    for name, measure in measures:
        result[name] = measure()
        say(f"{checkpoint.name} {name} {result[name]} {time.monotonic() - start:.0f}s")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate checkpoints from the command line."""
    parser = argparse.ArgumentParser(prog="python -m engine.demo_training.evaluate", description="Measure checkpoints of the demo model.")
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--corpus", type=Path, required=True, help="packed corpus")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--sizes", choices=SIZES, default="demo", help="how much is measured; toy: only whether everything runs")
    chosen = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    corpus, results = corpora.load(chosen.corpus), []
    for checkpoint in chosen.checkpoints:
        results.append(evaluate(checkpoint, corpus, SIZES[chosen.sizes], Shape()))
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
