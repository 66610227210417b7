"""Attention over a selection, the selection itself, and the indexer's loss, for whole training rows.

Does not know: parameters, data. Works in blocks of query rows so that 50,000-token rows fit.

1. A selection is a list of blocks, each a bias [rows, 1, queries, end] of 0 (picked) and -inf, causal. None means plain causal attention.
2. The causal mask comes before the choice of picks. Keys that tie at the cut are all kept: training needs no exact count.
3. The indexer's target is the attention over ALL causal keys, also while attention itself is sparse: what lies outside the selection
   can still be learnt.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BLOCK", "Block", "Scorer", "Target", "attend"]

BLOCK = 2048  # query rows a block: a selection's bias stays under a few GiB, and later keys are skipped
SCORED = 1024  # query rows whose scores exist at once


@dataclass(frozen=True, slots=True)
class Block:
    """Query rows start..end of a row, which see keys 0..end. bias [rows, 1, end - start, end]."""

    start: int
    end: int
    bias: Tensor


def combined(dots: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """Causal scores float32 [rows, queries, keys], -inf after the query, of dots float32 [rows, heads, queries, keys].

    weight float32 [rows, heads, queries]; position int64 [rows or 1, queries]: each query's place among the keys.
    """
    score = torch.relu(dots[:, 0]) * weight[:, 0, :, None]
    for head in range(1, dots.shape[1]):  # written out: a pointwise kernel, twice as fast as a reduction over so few heads
        score = score + torch.relu(dots[:, head]) * weight[:, head, :, None]
    causal = torch.arange(dots.shape[-1], device=dots.device) <= position[..., None]
    return torch.where(causal, score, -torch.inf)


def bias_of(score: Tensor, cut: Tensor) -> Tensor:
    """score [rows, queries, keys], cut [rows, queries, 1] -> 0 where a key is picked, else -inf. float32."""
    return torch.where((score >= cut) & (score > -torch.inf), 0.0, -torch.inf)


class Scorer:
    """Scores of the indexer and the selection they make; its two pointwise parts can be compiled."""

    def __init__(self) -> None:
        self.combined = combined
        self.bias_of = bias_of

    def compile(self, wrap: Callable[..., Callable[..., Tensor]]) -> None:
        """Replace the pointwise parts by `wrap(part)`."""
        self.combined, self.bias_of = wrap(combined), wrap(bias_of)

    def scores(self, query: Tensor, key: Tensor, weight: Tensor, position: Tensor) -> Tensor:
        """query [rows, heads, queries, width], key [rows, keys, width] -> causal scores float32 [rows, queries, keys].

        The products are taken in float32 of bfloat16 inputs, so that scores do not tie by rounding.
        """
        dots = query.float() @ key.float().transpose(1, 2)[:, None]
        return self.combined(dots, weight, position)

    @torch.no_grad()
    def select(self, query: Tensor, key: Tensor, weight: Tensor, picks: int) -> list[Block]:
        """The selection of every query row; as many queries as keys."""
        tokens = key.shape[1]
        blocks = []
        for start in range(0, tokens, BLOCK):
            end = min(tokens, start + BLOCK)
            biases = []
            for low in range(start, end, SCORED):
                rows = slice(low, min(end, low + SCORED))
                position = torch.arange(rows.start, rows.stop, device=key.device)[None]
                score = self.scores(query[:, :, rows], key[:, :end], weight[:, :, rows], position)
                cut = score.topk(min(picks, end), sorted=False).values.amin(-1, keepdim=True)
                biases.append(self.bias_of(score, cut).to(query.dtype))
            blocks.append(Block(start, end, torch.cat(biases, 1)[:, None]))
        return blocks


def attend(query: Tensor, key: Tensor, value: Tensor, selection: list[Block] | None, scale: float) -> Tensor:
    """query, key, value [rows, heads, tokens, width] -> the same shape; query i sees keys up to i, picked ones if a selection is given."""
    if selection is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    parts = []
    for block in selection:
        bias = block.bias.expand(-1, query.shape[1], -1, -1)
        queries = query[:, :, block.start : block.end]
        seen_key, seen_value = key[:, :, : block.end], value[:, :, : block.end]
        parts.append(F.scaled_dot_product_attention(queries, seen_key, seen_value, attn_mask=bias, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class Target:
    """Gathers the head-summed attention of the layers that one selection serves, on sampled query rows.

    `sampled` int64 [rows, queries]: token indices. `mass` float32 [rows, queries, tokens], sums to heads x layers seen.
    """

    def __init__(self, sampled: Tensor, tokens: int) -> None:
        self.sampled = sampled
        self.causal = torch.arange(tokens, device=sampled.device) <= sampled[..., None]
        self.mass = torch.zeros(*sampled.shape, tokens, device=sampled.device)

    def rows_of(self, x: Tensor) -> Tensor:
        """The sampled tokens of x [rows, heads, tokens, width] or [rows, heads, tokens]."""
        index = self.sampled[:, None].expand(-1, x.shape[1], -1)
        return x.gather(2, index if x.dim() == 3 else index[..., None].expand(-1, -1, -1, x.shape[3]))

    @torch.no_grad()
    def add(self, query: Tensor, key: Tensor, scale: float) -> None:
        """Add one layer: query, key [rows, heads, tokens, width]."""
        logit = (self.rows_of(query) @ key.transpose(2, 3)).float() * scale
        self.mass += torch.softmax(logit.masked_fill(~self.causal[:, None], -torch.inf), -1).sum(1)

    def divergence(self, scorer: Scorer, query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
        """KL from the gathered attention to the softmax of the indexer's scores: mean over sampled rows, in nats. A scalar."""
        score = scorer.scores(self.rows_of(query), key, self.rows_of(weight), self.sampled)
        target = self.mass / self.mass.sum(-1, keepdim=True)
        log_index = torch.log_softmax(score, -1).masked_fill(~self.causal, 0.0)
        entropy: Tensor = torch.special.entr(target)
        return (-(target * log_index) - entropy).sum(-1).mean()

    @torch.no_grad()
    def covered(self, scorer: Scorer, query: Tensor, key: Tensor, weight: Tensor, picks: int) -> Tensor:
        """Share of the best `picks` positions' mass that the indexer's own `picks` carry. [rows, queries] float32."""
        score = scorer.scores(self.rows_of(query), key, self.rows_of(weight), self.sampled)
        count = min(picks, key.shape[1])
        own = self.mass.gather(2, score.topk(count).indices).sum(-1)
        best = self.mass.topk(count).values.sum(-1)
        return own / best
