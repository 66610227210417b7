"""Rounds whose every plan and every gathered byte is checked: `memory.rounds.Rounds` around a real one.

Checks after the real work, on the same buffers, inside the step's own operation; an assertion fails that operation and is kept in `wrong`,
so that a run whose step merely failed does not hide it.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.search.watch import Watch, same
from kernels.gather import Unwritten
from kernels.layout import BlockLayout, StateField, TableField
from kernels.round import RoundPlan
from memory.hot import HotCache
from memory.offload import OffloadSession
from memory.rounds import Picked, Query, Rounds, attend_gathered
from memory.session import SessionMemory

__all__ = ["WatchedRounds"]


class WatchedRounds:
    """See `memory.rounds.Rounds`."""

    def __init__(self, inner: Rounds, watch: Watch, layout: BlockLayout) -> None:
        self._inner = inner
        self._layout = layout
        self._watch = watch
        self.copies = inner.copies
        self.wrong: list[AssertionError] = []

    def plan(self, table: Tensor, group: int, place_of: Tensor, mirrored: Tensor, plan: RoundPlan) -> None:
        """See Rounds."""
        self._inner.plan(table, group, place_of, mirrored, plan)
        self._check(lambda: self._check_plan(table, group, place_of, mirrored, plan))

    def gather(self, of: Picked, out: Tensor) -> None:
        """See Rounds."""
        self._inner.gather(of, out)
        self.check_copy(of, out)

    def gather_group(self, of: Picked, out: Tensor, new: Unwritten, addresses: Tensor) -> None:
        """See Rounds. Copies that lack rows yet are checked when they are attended to."""
        self._inner.gather_group(of, out, new, addresses)

    def attend(self, of: Picked, compact: Tensor, query: Query) -> Tensor:
        """See Rounds. By way of a compact copy, so that what is read is checked."""
        if not self.copies:
            return attend_gathered(self, self._layout, of, compact, query)
        self.check_copy(of, compact)
        return self._inner.attend(of, compact, query)

    def check_copy(self, of: Picked, compact: Tensor) -> None:
        """Every row of a layer's compact copy is the one that was picked."""
        self._check(lambda: self._check_gather(of.table, of.layer, of.place_of, of.plan, compact))

    def clear(self, table: Tensor, group: int, place_of: Tensor, plan: RoundPlan) -> None:
        """See Rounds."""
        self._inner.clear(table, group, place_of, plan)

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            self.wrong.append(error)
            raise

    def _live(self, table: Tensor, place_of: Tensor) -> Iterator[tuple[int, Tensor, SessionMemory]]:
        """Each busy place whose session is known, with the step's rows that are its own."""
        for place in sorted(set(place_of.tolist())):
            if place >= 0 and int(table[place, TableField.ROWS]) > 0:
                memory = self._watch.memory_at(int(table[place, TableField.STATE]))
                if memory is not None:
                    yield place, (place_of == place).nonzero().flatten(), memory

    def _check_gather(self, table: Tensor, layer: int, place_of: Tensor, plan: RoundPlan, out: Tensor) -> None:
        for place, rows, memory in self._live(table, place_of):
            expected = self._watch.expected_of(memory)
            if expected is None:
                continue
            self._watch.gathers += 1
            selection, gathered = plan.selection[rows].flatten().long(), out[rows].flatten(0, 1)
            # Rows of drafts are of tokens that may yet be refused, and an accepted run may go past the end of its turn.
            drafts = int(table[place, TableField.ROWS]) > 1
            known = (selection >= 0) & (selection < (min(expected.length, memory.counts.committed) if drafts else expected.length))
            positions = selection[known]
            same(gathered[known], expected.rows(layer, positions), positions, f"gathered rows of {memory.session_id}, layer {layer}")
            assert not gathered[selection < 0].any(), "an unused pick was gathered as something"

    def _check_plan(self, table: Tensor, group: int, place_of: Tensor, mirrored: Tensor, plan: RoundPlan) -> None:
        for place, rows, memory in self._live(table, place_of):
            if isinstance(memory, OffloadSession):
                parts = (plan.selection, plan.slot, plan.fill, plan.miss, plan.source)
                picks = torch.stack([part[rows].flatten().long() for part in parts])
                round_now = int(memory.state[StateField.ROUND])
                _check_picks(picks, memory.hot[group], int(mirrored[place]), round_now)


def _check_picks(picks: Tensor, cache: HotCache, mirrored: int, round_now: int) -> None:
    """One session's picks, int64 [selection slot fill miss source, picks], against its maps."""
    selection, slot, fill, miss, source = picks
    unused = selection < 0
    assert bool((picks[1:4, unused] == -1).all()), "an unused pick has a slot, a fill or a miss"
    assert not source[unused].any(), "an unused pick has a source"
    hit, missing, filled = slot >= 0, miss >= 0, fill >= 0
    assert bool(((slot >= 0) ^ (source != 0))[~unused].all()), "a pick has no source, or two"
    assert bool((selection[hit | missing] < mirrored).all()), "a row that is not in RAM for this step counts as hit or miss"
    assert bool((selection[~unused & ~hit & ~missing] >= mirrored).all()), "a row that is in RAM is neither hit nor missed"
    assert bool(missing[filled].all()), "a pick that is no miss fills a slot"
    hits, fills = set(slot[hit].tolist()), fill[filled].tolist()
    assert len(set(fills)) == len(fills), f"slots {fills} are filled twice in a round"
    assert not hits & set(fills), f"slots {sorted(hits & set(fills))} are hit and filled in one round"
    led = selection[filled].tolist()
    assert len(set(led)) == len(led), f"positions {led} have two leaders"
    pairs = set(zip(selection[missing].tolist(), miss[missing].tolist(), strict=True))
    assert len(pairs) == len({position for position, _ in pairs}) == len({number for _, number in pairs}), "misses are numbered wrongly"
    used = torch.tensor([*sorted(hits), *fills], dtype=torch.int64)
    assert bool((cache.pin_round[used] == round_now).all()), f"slots {used.tolist()} are used in round {round_now} and not all pinned"
    assert torch.equal(cache.position_of[slot[hit]].long(), selection[hit]), "a hit's slot holds another position"
    assert torch.equal(cache.position_of[fill[filled]].long(), selection[filled]), "a filled slot is mapped to another position"
    cache.check_integrity(round_now=round_now)
