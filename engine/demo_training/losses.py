"""The training loss of one batch: next token, three MTP depths, the indexer's divergence.

Does not know: optimiser, phases. Everything in nats, means over predicted tokens.

1. MTP depth s predicts token i + 1 + s from row i. Its states come from the main network, which its loss trains as well.
2. The divergences train indexers only (their inputs are detached), so their weight is 1 and sets nothing but the clip's share.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine.demo_training.network import Network, Pass
from engine.demo_training.rows import Batch

__all__ = ["DEPTH_WEIGHTS", "Losses", "losses_of", "token_loss"]

DEPTH_WEIGHTS = (0.3, 0.15, 0.1)
TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Losses:
    """Scalars: next token (answers of facts weighted), each MTP depth, each group's divergence."""

    next_token: Tensor
    drafts: tuple[Tensor, ...]
    divergences: tuple[Tensor, ...]

    def total(self) -> Tensor:
        """What is minimised."""
        total = self.next_token
        for weight, draft in zip(DEPTH_WEIGHTS, self.drafts, strict=True):
            total = total + weight * draft
        for divergence in self.divergences:
            total = total + divergence
        return total


def token_loss(state: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """state [rows, tokens, hidden], head float32 [vocabulary, hidden], target int64 [rows, tokens] -> nats float32 [rows, tokens]."""
    logits = F.linear(state, head.to(state.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


def losses_of(network: Network, batch: Batch, out: Pass, loss: TokenLoss = token_loss) -> Losses:
    """The losses of `out`, a pass over batch.tokens[:, :-1]."""
    head, length = network.lm_head.weight, batch.weight.shape[1]
    nats = loss(out.state, head, batch.tokens[:, 1 : 1 + length])
    next_token = (nats * batch.weight).sum() / batch.weight.sum()
    drafts = [loss(draft, head, batch.tokens[:, 1 + s : 1 + s + length]).mean() for s, draft in enumerate(out.drafts, 1)]
    return Losses(next_token, tuple(drafts), tuple(out.divergences))
