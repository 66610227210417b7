"""What a caller may ask of one generation. Values only; the arithmetic is `kernels/sample`.

Sampling is a pure function of (logits, seed, position): see the package page of `kernels/sample`.
"""

from dataclasses import dataclass

from engine.config import DRAFT_DEPTH_MAX
from engine.errors import BadRequest, shown
from engine.grammar.form import Form

__all__ = ["PRIORITY_MAX", "STOPS_MAX", "STOP_TOKENS_MAX", "Sampling"]

_LOGPROBS_MAX = 20
STOPS_MAX = 16
_STOP_CHARACTERS_MAX = 1_024
STOP_TOKENS_MAX = 64
_BIAS_MAX = 100.0
PRIORITY_MAX = 4  # and at least its negative
_REPETITION_MIN = 1e-3  # logits are divided by it: less makes infinities of them


@dataclass(frozen=True, slots=True)
class Sampling:
    """Frozen and checked when built; raises BadRequest naming the field."""

    max_tokens: int | None = None  # None: the engine's default_max_tokens, cut to what fits
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None  # None: drawn once for the request
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit): before penalties
    logprobs: int | None = None  # None: off; 0: the chosen token's only; n: and the n most likely
    include_stop: bool = False
    draft_depth: int | None = None  # most tokens drafted a step for this request; None: as many as the engine drafts. Changes no token
    form: Form | None = None  # what the text must be; such a generation does not run ahead
    priority: int = 0  # -4, the soonest, to 4: among requests of the same key. Changes no token
    keep_logits: bool = False  # chunks carry the raw logits of each token; for tests and tools

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens is None or 1 <= self.max_tokens < 2**31, "an integer of at least 1, below 2^31"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or more, below 2^31"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("repetition_penalty", _REPETITION_MIN <= self.repetition_penalty <= 100.0, f"between {_REPETITION_MIN} and 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("stop", len(self.stop) <= STOPS_MAX and all(0 < len(text) <= _STOP_CHARACTERS_MAX for text in self.stop),
             f"at most {STOPS_MAX} strings of 1 to {_STOP_CHARACTERS_MAX} characters"),
            ("stop_token_ids", len(self.stop_token_ids) <= STOP_TOKENS_MAX, f"at most {STOP_TOKENS_MAX} token ids"),
            ("draft_depth", self.draft_depth is None or 0 <= self.draft_depth <= DRAFT_DEPTH_MAX, f"between 0 and {DRAFT_DEPTH_MAX}"),
            ("priority", -PRIORITY_MAX <= self.priority <= PRIORITY_MAX, f"between -{PRIORITY_MAX} (the soonest) and {PRIORITY_MAX}"),
            ("logit_bias", all(token >= 0 and abs(bias) <= _BIAS_MAX for token, bias in self.logit_bias),
             f"token ids and numbers between -{_BIAS_MAX:g} and {_BIAS_MAX:g}"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= _LOGPROBS_MAX, f"between 0 and {_LOGPROBS_MAX}"),
        )  # fmt: skip
        for field, holds, wanted in checks:
            if not holds:
                raise BadRequest(f"{field} must be {wanted}, not {shown(getattr(self, field))}", field=field)

    @property
    def penalises(self) -> bool:
        """Whether token counts are needed."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
