"""How many drafts a step judges: fixed, or chosen from what was accepted lately and how many sessions step together.

Holds counts of drafts by position. Plain numbers; whatever it chooses, tokens stay the same.

Expected tokens a session and step of depth d: 1 + r1 + r1 r2 + ... + r1..rd, r the rate at which a draft is accepted once those before it
were. What a step takes, in steps of one row: 1 + 0.11 a further row + 0.033 a draft made. Both numbers come from one published run of
the real model (depth 3 took 1.43 times as long as depth 0 for one session); by them one session wants 3 and more, ten want 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.layout import DRAFTS_MAX

__all__ = ["DEPTHS", "DraftCounts", "DraftDepth"]

DEPTHS = (0, 1, 2, 3, 5, 7)  # what auto chooses from: each is a set of buffers
_STEP_ROWS_MAX = 128  # of all sessions: kernels give rows the same bits in any company up to that many
_ROW_COST = 0.11
_DRAFT_COST = 0.033
_MEMORY = 0.95  # weight of a rate's past at each new draft
_FIRST_RATE = 0.7  # before anything was seen
_BETTER = 1.05  # a change must promise so much more: buffers and tables are not changed for less
_LOOK_EVERY = 64  # steps of one depth between looks whether deeper drafts have become better
_LOOK_STEPS = 4


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts judged and accepted, by place in their run: the first draft of a step first."""

    proposed: tuple[int, ...] = (0,) * DRAFTS_MAX
    accepted: tuple[int, ...] = (0,) * DRAFTS_MAX

    def plus(self, judged: int, accepted: int) -> "DraftCounts":
        """With one more step of one session, that judged so many drafts and accepted so many of them."""
        assert 0 <= accepted <= judged <= DRAFTS_MAX, f"{accepted} of {judged} drafts"
        proposed = tuple(count + (place < judged) for place, count in enumerate(self.proposed))
        return DraftCounts(proposed, tuple(count + (place < accepted) for place, count in enumerate(self.accepted)))

    def accepted_one(self, place: int) -> "DraftCounts":
        """With one more draft accepted of those counted as judged, at this place of its run."""
        return DraftCounts(self.proposed, (*self.accepted[:place], self.accepted[place] + 1, *self.accepted[place + 1 :]))


class DraftDepth:
    """Chooses the depth of each step. Loop thread only."""

    def __init__(self, depth: int | None, *, drafts: bool) -> None:
        """Args: depth: the fixed depth; None: auto. drafts: whether the model can draft at all."""
        assert depth is None or 0 <= depth <= DRAFTS_MAX, f"a depth of {depth}"
        assert drafts or not depth, "a model without an MTP block drafts nothing"
        self._fixed = 0 if not drafts else depth
        self.restart()

    def restart(self) -> None:
        """Forget what was seen: behind requests nobody asked for."""
        self.counts = DraftCounts()
        self._rates = [_FIRST_RATE] * DRAFTS_MAX
        self._chosen = 0
        self._steps = 0  # of this choice

    @property
    def most(self) -> int:
        """The deepest that any step will be."""
        return DEPTHS[-1] if self._fixed is None else self._fixed

    def choose(self, sessions: int) -> int:
        """Depth of the next step, of `sessions` sessions."""
        places = 1 << (sessions - 1).bit_length()
        fitting = _STEP_ROWS_MAX // places - 1
        if self._fixed is not None:
            return max(0, min(self._fixed, fitting))
        worth = {depth: self._tokens(depth) / _cost(sessions, depth) for depth in DEPTHS if depth <= max(0, fitting)}
        best = max(worth, key=lambda depth: (worth[depth], -depth))
        if self._chosen not in worth or worth[best] > _BETTER * worth[self._chosen]:
            self._chosen, self._steps = best, 0
        self._steps += 1
        # What lies deeper than the chosen depth is judged by nobody: its rate would stay what one bad stretch made of it.
        deeper = next((depth for depth in worth if depth > self._chosen), self._chosen)
        return deeper if self._steps % _LOOK_EVERY >= _LOOK_EVERY - _LOOK_STEPS else self._chosen

    def note(self, judged: int, accepted: int) -> None:
        """One session's part of a step that was followed."""
        if judged == 0:
            return  # the usual step without drafts counts nothing
        self.counts = self.counts.plus(judged, accepted)
        for place in range(min(judged, accepted + 1)):
            self._rates[place] = _MEMORY * self._rates[place] + (1.0 - _MEMORY) * (place < accepted)

    def _tokens(self, depth: int) -> float:
        rates, seen = [], _FIRST_RATE
        for place in range(depth):
            seen = self._rates[place] if self.counts.proposed[place] else seen  # what was never judged is as good as what is before it
            rates.append(seen)
        return expected_tokens(rates)


def expected_tokens(rates: Sequence[float]) -> float:
    """Tokens a session gains in a step, given each draft's rate of acceptance behind accepted ones."""
    tokens, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        tokens += reached
    return tokens


def _cost(sessions: int, depth: int) -> float:
    """What a step takes, in steps of one row."""
    return 1.0 + _ROW_COST * (sessions * (depth + 1) - 1) + _DRAFT_COST * depth
