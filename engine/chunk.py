"""What a generation yields. Values only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # torch takes seconds to import, and the command line's --help needs none of it
    from torch import Tensor

__all__ = ["Chunk", "FinishReason", "TokenLogprob", "Usage"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token under the model's raw logits (before penalties, temperature and filters)."""

    token_id: int
    token: str
    logprob: float
    top: tuple["TokenLogprob", ...] = ()  # most likely first; only on the outer object


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens whose rows the session already had
    accepted_drafts: int = 0  # completion tokens that had been guessed
    refused_drafts: int = 0  # guesses that did not appear
    drafts_proposed: tuple[int, ...] = ()  # by place in a step's run, the first draft first; as long as the deepest run
    drafts_accepted: tuple[int, ...] = ()  # likewise, as long


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a generation. The last one has `finish_reason`; text may lag behind token_ids (UTF-8, stop strings)."""

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    logits: tuple["Tensor", ...] = ()  # f32 [vocabulary] a token, with Sampling.keep_logits
