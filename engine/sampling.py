"""What a caller may ask of one generation. Values only; the arithmetic is `kernels/sample`.

Sampling is a pure function of (logits, seed, position): see the package page of `kernels/sample`.
"""

from dataclasses import dataclass

from engine.errors import BadRequest

__all__ = ["Sampling"]

_LOGPROBS_MAX = 20
_STOPS_MAX = 16


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
    logprobs: int | None = None  # None: off; 0: the chosen token's only; n: and the n most likely
    include_stop: bool = False
    keep_logits: bool = False  # chunks carry the raw logits of each token; for tests and tools

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "an integer of at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("stop", len(self.stop) <= _STOPS_MAX and all(self.stop), f"at most {_STOPS_MAX} non-empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= _LOGPROBS_MAX, f"between 0 and {_LOGPROBS_MAX}"),
        )
        for field, holds, wanted in checks:
            if not holds:
                raise BadRequest(f"{field} must be {wanted}, not {getattr(self, field)!r}", field=field)

    @property
    def penalises(self) -> bool:
        """Whether token counts are needed."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
