"""What the gate says about its runs: losses, the spread of null pairs, and whether each pair passes.

Pure functions of runs. Knows no server.

Invariants:
1. Outputs are compared before speed: a pair whose outputs differ, or that did not accept the same drafts, fails whatever its speed.
2. Every pair is judged by itself; none is dropped and none is averaged.
3. Nothing that is not a number passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Arm", "Pair", "Run", "Verdict", "added_us_a_step", "all_equal", "judge", "loss", "miss_rate", "null_spread", "order", "tokens_a_step",
]  # fmt: skip

Arm = Literal["resident", "offload"]
_MISS_RATES_THAT_COUNT = (0.005, 0.05)


@dataclass(frozen=True, slots=True)
class Run:
    """One server, one answer. A run with an `error` has no other value that means anything."""

    arm: Arm
    sha256: str = ""  # of the whole output
    tokens_per_second: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_event_tokens: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    hits: int = 0  # of the measured request alone
    misses: int = 0
    ring_reads: int = 0
    drafts_proposed: tuple[int, ...] = ()  # by place in their run, the first draft of a step first
    drafts_accepted: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs in the order they were made. `null`: both resident, to see what the machine does by itself."""

    number: int  # from 1, null pairs counted apart
    null: bool
    runs: tuple[Run, Run]

    @property
    def failed(self) -> str:
        """What went wrong in a run; "" when both were measured."""
        return "; ".join(f"{run.arm}: {run.error}" for run in self.runs if run.error)

    @property
    def equal(self) -> bool:
        """Whether both runs gave the same output, and gave one."""
        return not self.failed and self.runs[0].sha256 == self.runs[1].sha256

    @property
    def reference(self) -> Run:
        """The resident run; of a null pair the first."""
        return self.runs[0] if self.null or self.runs[0].arm == "resident" else self.runs[1]

    @property
    def measured(self) -> Run:
        """The other one."""
        return self.runs[1] if self.reference is self.runs[0] else self.runs[0]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one pair that is not null. `loss`: share of the resident speed that is lost; negative: it is faster."""

    pair: Pair
    passes: bool
    reason: str
    loss: float | None = None
    added_us_a_step: float | None = None
    miss_rate: float | None = None
    counts: bool = False  # whether the misses are within what a measurement must have


def order(pairs: int, null_pairs: int) -> list[tuple[bool, tuple[Arm, Arm]]]:
    """(null, arms) of every pair in the order they run: A B, null, B A, null, A B; null pairs beyond the gaps come last."""
    found: list[tuple[bool, tuple[Arm, Arm]]] = []
    null: tuple[bool, tuple[Arm, Arm]] = (True, ("resident", "resident"))
    for number in range(pairs):
        found.append((False, ("resident", "offload") if number % 2 == 0 else ("offload", "resident")))
        if number < null_pairs:
            found.append(null)
    found.extend([null] * max(0, null_pairs - pairs))
    return found


def loss(reference: float, measured: float) -> float:
    """Share of `reference` tokens/s that `measured` lacks."""
    return 1.0 - measured / reference


def added_us_a_step(reference: float, measured: float, tokens_a_step: float = 1.0) -> float:
    """Microseconds a step that `measured` takes longer; both in tokens/s."""
    return 1e6 * (1.0 / measured - 1.0 / reference) * tokens_a_step


def tokens_a_step(run: Run) -> float:
    """1 and the drafts that were accepted."""
    accepted = sum(run.drafts_accepted)
    return run.completion_tokens / (run.completion_tokens - accepted) if accepted < run.completion_tokens else 1.0


def miss_rate(run: Run) -> float | None:
    """Misses a selected row that was in the mirror; None where nothing was read through the hot cache."""
    reads = run.hits + run.misses
    return run.misses / reads if reads else None


def null_spread(nulls: Sequence[Pair]) -> float:
    """The largest difference between two resident runs, as a share of the faster; 0 when no null pair was measured."""
    speeds = [[run.tokens_per_second for run in pair.runs] for pair in nulls if not pair.failed]
    return max((1.0 - min(both) / max(both) for both in speeds), default=0.0)


def judge(pair: Pair, limit: float, spread: float) -> Verdict:
    """One pair against max(limit, spread), all shares of the resident speed."""
    assert not pair.null, "a null pair has no verdict"
    if pair.failed:
        return Verdict(pair, False, pair.failed)
    reference, measured = pair.reference.tokens_per_second, pair.measured.tokens_per_second
    lost, misses = loss(reference, measured), miss_rate(pair.measured)
    least, most = _MISS_RATES_THAT_COUNT
    counts = misses is not None and least <= misses <= most
    allowed = max(limit, spread)
    drafts = [(run.drafts_proposed, run.drafts_accepted) for run in pair.runs]
    if not pair.equal:
        passes, reason = False, "the outputs differ"
    elif drafts[0] != drafts[1]:
        passes, reason = False, "the drafts differ"
    elif lost <= allowed:
        passes, reason = True, f"loss {lost:.3%} <= {allowed:.3%}"
    else:
        passes, reason = False, f"loss {lost:.3%} > {allowed:.3%}"
    added = added_us_a_step(reference, measured, tokens_a_step(pair.measured))
    return Verdict(pair, passes, reason, lost, added, misses, counts)


def all_equal(pairs: Sequence[Pair]) -> bool:
    """Whether every run of every pair gave the same output."""
    return all(pair.equal for pair in pairs) and len({run.sha256 for pair in pairs for run in pair.runs}) <= 1
