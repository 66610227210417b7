"""One generation inside a session: what it asked, what it has produced, and when it ends.

Holds the text side (detokeniser, stop scanner, logprobs) and the queue its reader takes chunks from. Knows no streams and no memory.

Invariants:
1. `take` is called once a token, in order, and never after the request has finished.
2. A finished request has put exactly one last item into its queue: a chunk with a finish reason, or an error.
3. What was generated is in the session's tokens whether or not anybody reads it.
"""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.append import AppendRun
from engine.chunk import Chunk, FinishReason, TokenLogprob, Usage
from engine.depth import DraftCounts
from engine.errors import ForebayError, FormBroken, TooLong
from engine.protocol import SyntheticHistory
from engine.sampling import Sampling
from engine.sampling_table import SamplingState
from engine.session import Session
from engine.text.detokenizer import Detokenizer
from engine.text.stop import StopScanner
from engine.text.tokenizer import Tokenizer
from kernels.sample import log_probabilities, top_logprobs

if TYPE_CHECKING:  # its library is an extra
    from engine.grammar.follower import Follower

__all__ = ["Limits", "Request"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts of tokens that bound every request of an engine."""

    context_max: int
    default_max_tokens: int


class Request:
    """State of one generation. Built by the engine once the prompt is known."""

    def __init__(
        self, request_id: str, session: Session, appended: Sequence[int], sampling: Sampling, *, limits: Limits, seed: int,
        eos: Sequence[int], tokenizer: Tokenizer | None,
    ) -> None:  # fmt: skip
        """Raises TooLong if the context cannot hold it behind the session's present tokens."""
        self.id = request_id
        self.session = session
        self.appended = appended  # tokens this request adds before it generates, an array where there may be many
        self.sampling = sampling
        self.max_tokens = 0
        self.chunks: asyncio.Queue[Chunk | ForebayError] = asyncio.Queue()
        self.aborted = False
        self.finished = False
        self.broken = False  # its session cannot go on
        self.ended = asyncio.Event()  # no operation of it is outstanding and its session is free
        self._held: array[int] | None = None  # once it has begun: its session's tokens, of which the first are the prompt
        self._prompt_tokens = 0
        self.cached = 0
        self.since = 0  # see `scheduler.Claim`
        self.in_flight = 0  # steps submitted and not followed
        self.generated = 0
        self.followed_ns = 0  # when it got tokens last, as `Tally` has it; 0: never
        self._drafts = DraftCounts()
        self._guessed = 0  # tokens of the present step that drafts had said
        self.append: AppendRun | None = None  # while the prompt is read
        self.appended_rows = 0  # of finished chunks, once it was read
        self.history: SyntheticHistory | None = None  # what its session begins with
        self.state: SamplingState | None = None
        self.form: Follower | None = None  # which tokens may come, where a form was asked for
        self._mask_due = False
        self._limits = limits
        self._seed = seed
        self.fit(len(session.tokens))
        self.ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos))
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._scanner = StopScanner(sampling.stop, include_stop=sampling.include_stop)

    @property
    def prompt(self) -> tuple[int, ...]:
        """All tokens it continues, put together at each look; before it has begun what they will be unless its session changes."""
        return tuple(self.session.tokens) + tuple(self.appended) if self._held is None else tuple(self._held[: self._prompt_tokens])

    @property
    def prompt_tokens(self) -> int:
        """How many these are."""
        return len(self.session.tokens) + len(self.appended) if self._held is None else self._prompt_tokens

    def fit(self, held: int) -> None:
        """Settle how many tokens it may generate behind `held` tokens of its session. Raises TooLong: no room."""
        prompt, asked = held + len(self.appended), self.sampling.max_tokens
        room = self._limits.context_max - prompt
        if room < (asked or 1):
            field = "prompt" if asked is None or room < 1 else "max_tokens"
            raise TooLong(
                f"{prompt} prompt tokens and {asked or 1} new ones exceed the context of {self._limits.context_max} tokens", field=field
            )
        self.max_tokens = asked or min(self._limits.default_max_tokens, room)

    def begin(self, vocabulary: int, device: torch.device | str = "cpu") -> None:
        """Its turn has come: the whole context it continues are its session's tokens now. Nothing is copied: others decode meanwhile."""
        self._held, self._prompt_tokens = self.session.tokens, len(self.session.tokens)
        mask = None if self.form is None else self.form.mask
        prompt = self.prompt if self.sampling.penalises else ()
        self.state = SamplingState.of(self.sampling, self._seed, prompt, vocabulary, device, mask)

    @property
    def namespace(self) -> str:
        """Whose it is."""
        return self.session.namespace

    @property
    def priority(self) -> int:
        """Among requests of its namespace; see `scheduler`."""
        return self.sampling.priority

    @property
    def wants_logits(self) -> bool:
        return self.sampling.keep_logits or self.sampling.logprobs is not None

    @property
    def may_step(self) -> bool:
        """Whether one more step can yield a token that is still wanted. With a form only once the host knows what may come."""
        followed = self.form is None or self.in_flight == 0
        return followed and not self.finished and not self.aborted and self.generated + self.in_flight < self.max_tokens

    def depth_within(self, depth: int) -> int:
        """Drafts a step for this request, where the engine makes `depth`."""
        asked = self.sampling.draft_depth if self.form is None else 0  # a draft's follower has a mask that nobody knows yet
        return depth if asked is None else min(depth, asked)

    def due_mask(self) -> Tensor | None:
        """What `state.mask` must be before the next step, int32 on the CPU; None: what it is. The caller brings it there."""
        if not self._mask_due or self.form is None:
            return None
        self._mask_due = False
        return self.form.mask

    @property
    def drafted(self) -> bool:
        """Whether a step of this request judged drafts."""
        return self._drafts.proposed[0] > 0

    def judged(self, drafts: int) -> None:
        """A step of this request judged so many drafts; called before its tokens are taken."""
        self._drafts, self._guessed = self._drafts.plus(drafts, 0), 0

    def drop_unwritten(self) -> None:
        """A made-up history that was not written whole leaves no tokens without rows, which would be read as real ones."""
        if self.history is not None and self.session.rows < self.history.rows:
            self.session.cut(self.session.rows)

    def usage(self) -> Usage:
        drafts = self._drafts
        if not self.drafted:
            return Usage(self.prompt_tokens, self.generated, self.cached)
        judged, accepted = sum(drafts.proposed), sum(drafts.accepted)
        depth = sum(count > 0 for count in drafts.proposed)
        return Usage(
            self.prompt_tokens, self.generated, self.cached, accepted, judged - accepted, drafts.proposed[:depth], drafts.accepted[:depth]
        )  # fmt: skip

    def take(self, token: int, logits: Tensor | None, *, guessed: bool = False) -> bool:
        """Follow one sampled token; returns whether the request is now finished. `guessed`: a draft had said so."""
        assert not self.finished, f"request {self.id} has finished"
        self.generated += 1
        if guessed:
            self._drafts, self._guessed = self._drafts.accepted_one(self._guessed), self._guessed + 1
        self.session.tokens.append(token)
        ends = token in self.ends
        text = "" if self._detokenizer is None or (ends and not self.sampling.include_stop) else self._detokenizer.push([token])
        emit, stopped = self._scanner.push(text)
        complete, broken = (False, None) if ends or stopped is not None else self._follow_form(token)
        reason: FinishReason | None = None
        stop_reason: str | int | None = stopped
        if stopped is not None:
            reason = "stop"
        elif ends:
            reason, stop_reason = "stop", token
        elif complete:
            reason = "stop"
        elif self.generated >= self.max_tokens:
            reason = "length"
        if reason is not None and stopped is None:
            emit += self._rest()
        self._put(emit, token, logits, reason, stop_reason)
        if broken is not None:
            self.fail(broken)
        return self.finished

    def _follow_form(self, token: int) -> tuple[bool, FormBroken | None]:
        """Whether the form is complete now and nothing can follow, or what broke it."""
        if self.form is None:
            return False, None
        self._mask_due = True
        try:
            return self.form.take(token), None
        except FormBroken as error:
            return False, error

    def _rest(self) -> str:
        """Text still held back when nothing more will come; a stop string completed by it still counts."""
        held = "" if self._detokenizer is None else self._detokenizer.flush()
        emit, stopped = self._scanner.push(held)
        return emit if stopped is not None else emit + self._scanner.flush()

    def _put(self, text: str, token: int, logits: Tensor | None, reason: FinishReason | None, stop_reason: str | int | None) -> None:
        logprobs = () if logits is None or self.sampling.logprobs is None else (self._logprob(token, logits, self.sampling.logprobs),)
        kept = (logits,) if logits is not None and self.sampling.keep_logits else ()
        self.finished = reason is not None
        self.chunks.put_nowait(Chunk(text, (token,), self.usage(), logprobs, reason, stop_reason, kept))

    def _logprob(self, token: int, logits: Tensor, top: int) -> TokenLogprob:
        chances = log_probabilities(logits[None])
        best: tuple[TokenLogprob, ...] = ()
        if top > 0:
            values, ids = top_logprobs(chances, top)
            pairs = zip(ids[0].tolist(), values[0].tolist(), strict=True)
            best = tuple(TokenLogprob(one, self._token_text(one), value) for one, value in pairs)
        return TokenLogprob(token, self._token_text(token), float(chances[0, token]), best)

    def _token_text(self, token: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_text(token)

    def end(self, reason: FinishReason) -> None:
        """Finish without a token: an abort."""
        if not self.finished:
            self.finished = True
            self.chunks.put_nowait(Chunk("", (), self.usage(), finish_reason=reason))

    def fail(self, error: ForebayError) -> None:
        """Finish with an error."""
        if not self.finished:
            self.finished = True
            self.chunks.put_nowait(error)
