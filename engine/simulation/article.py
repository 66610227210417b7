"""The throughputs that were published of two nodes, and which of them a simulation may use.

Written down before anything was simulated:
1. Fitted to: the two single-session rows, 14.03 and 27.9 tokens/s, which give `layer_us` and `row_us`. Nothing else is fitted.
2. Held out: 98.56, 125.26 and 145.67 tokens/s of ten sessions, and 26.85 of one session behind an append.
3. A second fit, said to be one: the three rows of ten sessions count appends and the requests' ends in their time, and how long those took
   is not published. One number, seconds of the whole group in which nobody decodes, is fitted to 98.56; 125.26 and 145.67 are held out.

4. A lower bound for long histories, made after the check: the row behind an append is slower by 3.8% at a history longer by a fifth. If
   all of that were scoring keys (and not other text, acceptance or version), scoring would run at `slowest_keys_share` of a copy.

What is not published and taken as given here: every request writes 1,024 tokens, as the single ones did; drafts are accepted with one
probability at every place, the one that gives the published 665 accepted of 1,024 tokens at three drafts; stages are cut as
`forebay plan` cuts them for four-bit experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.simulation.costs import Machine, StageShape

__all__ = ["ACCEPTED", "MEASURED", "NEW_TOKENS", "Measured", "acceptance", "fitted", "slowest_keys_share", "tokens_a_step"]

NEW_TOKENS = 1024
ACCEPTED = 665  # drafts accepted among NEW_TOKENS tokens at three drafts a step, resident and offloaded alike


@dataclass(frozen=True, slots=True)
class Measured:
    """One published row. `role`: what a simulation may use it for."""

    name: str
    tokens_per_second: float
    sessions: int
    depth: int
    limit: int  # sessions that a stage decodes together
    history: int
    role: Literal["fit", "held out", "fit or held out"]


MEASURED = (
    Measured("one session, no drafts", 14.03, 1, 0, 4, 50_023, "fit"),
    Measured("one session, 3 drafts", 27.9, 1, 3, 4, 50_023, "fit"),
    Measured("one session behind an append, 3 drafts", 26.85, 1, 3, 4, 59_939, "held out"),
    Measured("ten sessions, 3 drafts, 4 a stage", 98.56, 10, 3, 4, 50_023, "fit or held out"),
    Measured("ten sessions, 1 draft, 4 a stage", 125.26, 10, 1, 4, 50_023, "held out"),
    Measured("ten sessions, 1 draft, 1 a stage", 145.67, 10, 1, 1, 50_023, "held out"),
)


def tokens_a_step(probability: float, depth: int) -> float:
    """Mean tokens of a step when each draft behind accepted ones is accepted with `probability`."""
    return float(sum(probability**place for place in range(depth + 1)))


def acceptance() -> float:
    """The probability that gives the published count: 665 of 1,024 tokens were accepted drafts of runs of three."""
    wanted = NEW_TOKENS / (NEW_TOKENS - ACCEPTED)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_a_step(middle, 3) < wanted else (low, middle)
    return (low + high) / 2


def fitted(machine: Machine, stages: Sequence[StageShape]) -> Machine:
    """`machine` with the two times that make one session alone as fast as the two fitted rows say.

    A step's time is linear in both, so this solves two equations.
    """
    plain, drafting = (row for row in MEASURED if row.role == "fit")
    wanted = [1e6 * tokens_a_step(acceptance(), row.depth) / row.tokens_per_second for row in (plain, drafting)]
    found = replace(machine, layer_us=0.0, row_us=0.0)

    def step(layer_us: float, row_us: float, row: Measured) -> float:
        return replace(found, layer_us=layer_us, row_us=row_us).step_us(stages, row.depth, row.history)

    fixed = [step(0, 0, row) for row in (plain, drafting)]
    by_layer = [step(1, 0, row) - base for row, base in zip((plain, drafting), fixed, strict=True)]
    by_row = [step(0, 1, row) - base for row, base in zip((plain, drafting), fixed, strict=True)]
    determinant = by_layer[0] * by_row[1] - by_row[0] * by_layer[1]
    left = [want - base for want, base in zip(wanted, fixed, strict=True)]
    layer_us = (left[0] * by_row[1] - by_row[0] * left[1]) / determinant
    row_us = (by_layer[0] * left[1] - left[0] * by_layer[1]) / determinant
    assert layer_us > 0, f"a layer of {layer_us} us"
    assert row_us >= 0, f"a row of {row_us} us"
    return replace(found, layer_us=layer_us, row_us=row_us)


def slowest_keys_share(machine: Machine, stages: Sequence[StageShape]) -> float:
    """The share of the copy rate at which scoring alone would make the row behind an append as much slower as it is."""
    _, drafting, behind = MEASURED[:3]
    wanted = drafting.tokens_per_second / behind.tokens_per_second
    low, high = 1e-3, machine.keys_share
    for _ in range(60):
        middle = float((low * high) ** 0.5)
        slower = fitted(replace(machine, keys_share=middle), stages)
        longer = slower.step_us(stages, behind.depth, behind.history) / slower.step_us(stages, drafting.depth, drafting.history)
        low, high = (middle, high) if longer > wanted else (low, middle)
    return float((low * high) ** 0.5)
