"""The definition of a round, in torch on the CPU.

Reads and writes the maps of the sessions in the step table through real addresses. Knows nothing of what a row holds.

Invariants:
1. Order is row-major over the step's picks: the first pick of a missing position leads, leaders take victims in that order.
2. A place's plan depends on its own rows only; other places and padding between them change nothing.
3. A victim is the next slot after the hand that is not pinned this round; the hand ends one past the last victim taken, and
   stays where it was when none was. Slots taken are pinned too.
4. `slot_of` and `position_of` stay inverse: a victim's old position is unmapped before its slot is mapped anew.
5. Nothing is written before every input was checked.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.address import store_values_at, tensor_at, values_at
from kernels.layout import BLOCK_ROWS, RING_BLOCKS, BlockLayout, GroupField, StateField, TableField, TableLayout
from kernels.place import live_rows, state_values
from kernels.round.plan import RoundPlan

__all__ = ["begin_round", "clear_round", "plan_round", "unmap_from", "unmap_positions"]


@dataclass(frozen=True, slots=True)
class _Picks:
    """Live picks of one step, flat and in row-major order."""

    pick: Tensor  # int64 [n], index into the flat plan
    place: Tensor  # int64 [n]
    position: Tensor  # int64 [n]
    slot_of: Tensor  # int64 [n], address of the pick's slot map

    def where(self, chosen: Tensor) -> "_Picks":
        return _Picks(self.pick[chosen], self.place[chosen], self.position[chosen], self.slot_of[chosen])


def _add_to_state(table: Tensor, fields: tuple[int, ...], added: Tensor) -> None:
    """Add int64 [places, fields] to state fields of each busy place."""
    busy = table[:, TableField.ROWS] > 0
    addresses = (table[busy, TableField.STATE][:, None] + 8 * torch.tensor(fields)).flatten()
    store_values_at(addresses, values_at(addresses, torch.int64) + added[busy].flatten())


def begin_round(table: Tensor) -> None:
    _add_to_state(table, (StateField.ROUND,), torch.ones((table.shape[0], 1), dtype=torch.int64))


def _live_picks(table: Tensor, layout: TableLayout, group: int, place_of: Tensor, selection: Tensor) -> _Picks:
    place, live = live_rows(table, place_of)
    pick = ((selection >= 0) & live[:, None]).flatten().nonzero().flatten()
    owner = place[pick // selection.shape[1]]
    position = selection.flatten()[pick].long()
    end = state_values(table, StateField.LOGICAL) + table[:, TableField.ROWS]
    assert bool((position < end[owner]).all()), "a selected position lies past the rows of its session"
    return _Picks(pick, owner, position, table[owner, layout.group(group, GroupField.SLOT_OF)])


def _leaders(missing: _Picks) -> tuple[Tensor, Tensor]:
    """Indices of the leading picks in row-major order, int64 [d], and each pick's place among them, int64 [n]."""
    order = torch.argsort((missing.place << 32) + missing.position, stable=True)
    place, position = missing.place[order], missing.position[order]
    first = torch.ones_like(order, dtype=torch.bool)
    first[1:] = (place[1:] != place[:-1]) | (position[1:] != position[:-1])
    lead = order[first]  # a stable sort puts the row-major first pick of each position first
    rank = torch.argsort(torch.argsort(lead))
    number = torch.empty_like(order)
    number[order] = rank[first.long().cumsum(0) - 1]
    return lead.sort().values, number


def _take_victims(fields: list[int], round_now: int, positions: Tensor) -> Tensor:
    """Map as many of one place's leading positions, int64 [d], as there are free slots; returns the slots taken, int64 [<= d]."""
    slots = fields[GroupField.SLOTS_MAX]
    if slots == 0:
        return torch.empty(0, dtype=torch.int64)
    pin_round = tensor_at(fields[GroupField.PIN_ROUND], (slots,), torch.int32)
    position_of = tensor_at(fields[GroupField.POSITION_OF], (slots,), torch.int32)
    hand = tensor_at(fields[GroupField.HAND], (1,), torch.int32)
    circle = (torch.arange(slots) + hand.long()) % slots
    taken = circle[pin_round[circle] != round_now][: positions.numel()]
    if taken.numel() == 0:
        return taken
    slot_of = fields[GroupField.SLOT_OF]
    old = position_of[taken].long()
    old = old[old >= 0]
    store_values_at(slot_of + 4 * old, torch.full((old.numel(),), -1, dtype=torch.int32))
    kept = positions[: taken.numel()]
    store_values_at(slot_of + 4 * kept, taken.int())
    position_of[taken] = kept.int()
    pin_round[taken] = round_now
    hand[0] = (int(taken[-1]) + 1) % slots
    return taken


def _fill_slots(table: Tensor, layout: TableLayout, group: int, leaders: _Picks, rounds: Tensor, plan: RoundPlan) -> None:
    first = layout.group(group, 0)
    fill = plan.fill.view(-1)
    for place in leaders.place.unique().tolist():
        mine = leaders.where(leaders.place == place)
        taken = _take_victims(table[place, first : first + GroupField.SLOTS_MAX + 1].tolist(), int(rounds[place]), mine.position)
        fill[mine.pick[: taken.numel()]] = taken.int()


def _block_rows(table: Tensor, layout: BlockLayout, picks: _Picks) -> Tensor:
    """Address in layer 0 of each pick's row in its history, int64 [n]."""
    blocks = values_at(table[picks.place, TableField.BLOCKS] + 8 * (picks.position // BLOCK_ROWS), torch.int64)
    assert bool((blocks != 0).all()), "a selected position's block is not in the block table"
    return blocks + picks.position % BLOCK_ROWS * layout.row.row_bytes


def _ring_rows(table: Tensor, layout: BlockLayout, picks: _Picks) -> Tensor:
    """Address in layer 0 of each pick's row in its ring, int64 [n]."""
    ring = table[picks.place, TableField.RING]
    assert bool((ring != 0).all()), "a selected position is not in RAM and its session has no ring"
    block = picks.position // BLOCK_ROWS % RING_BLOCKS
    return ring + block * layout.block_bytes + picks.position % BLOCK_ROWS * layout.row.row_bytes


def plan_round(
    table: Tensor, table_layout: TableLayout, block_layout: BlockLayout, group: int, place_of: Tensor, mirrored: Tensor, plan: RoundPlan
) -> None:
    picks = _live_picks(table, table_layout, group, place_of, plan.selection)
    in_ring = picks.position >= mirrored[picks.place]
    recent, old = picks.where(in_ring), picks.where(~in_ring)
    slot = values_at(old.slot_of + 4 * old.position, torch.int32)
    hits, missing = old.where(slot >= 0), old.where(slot < 0)
    slot = slot[slot >= 0]
    recent_source, missing_source = _ring_rows(table, block_layout, recent), _block_rows(table, block_layout, missing)
    rounds = state_values(table, StateField.ROUND)

    plan.forget()
    source, miss = plan.source.view(-1), plan.miss.view(-1)
    source[recent.pick] = recent_source
    source[missing.pick] = missing_source
    plan.slot.view(-1)[hits.pick] = slot
    pins = table[hits.place, table_layout.group(group, GroupField.PIN_ROUND)]
    store_values_at(pins + 4 * slot.long(), rounds[hits.place].int())
    if missing.pick.numel():
        lead, number = _leaders(missing)
        miss[missing.pick] = number.int()
        plan.misses[0] = lead.numel()
        plan.miss_source[: lead.numel()] = missing_source[lead]
        _fill_slots(table, table_layout, group, missing.where(lead), rounds, plan)
    counted = [torch.bincount(kind.place, minlength=table.shape[0]) for kind in (hits, missing, recent)]
    _add_to_state(table, (StateField.HITS, StateField.MISSES, StateField.RING_READS), torch.stack(counted, dim=1))


def clear_round(table: Tensor, table_layout: TableLayout, group: int, place_of: Tensor, plan: RoundPlan) -> None:
    place, live = live_rows(table, place_of)
    # A plan that did not run is an earlier step's, whose places may have had more slots.
    slots_max = table[place.clamp_min(0), table_layout.group(group, GroupField.SLOTS_MAX)]
    chosen = ((plan.fill >= 0) & (plan.fill < slots_max[:, None]) & live[:, None]).flatten().nonzero().flatten()
    owner = place[chosen // plan.picks]
    # The slots' own positions, not the selection: a later step may have overwritten that, and unmapping too much only costs misses.
    slots = table[owner, table_layout.group(group, GroupField.POSITION_OF)] + 4 * plan.fill.flatten()[chosen].long()
    position = values_at(slots, torch.int32).long()
    mapped = position >= 0
    maps = table[owner[mapped], table_layout.group(group, GroupField.SLOT_OF)] + 4 * position[mapped]
    store_values_at(maps, torch.full((maps.numel(),), -1, dtype=torch.int32))
    store_values_at(slots, torch.full((slots.numel(),), -1, dtype=torch.int32))
    plan.fill.fill_(-1)


def unmap_positions(slot_of: Tensor, position_of: Tensor, position: int) -> None:
    gone = position_of >= position
    slot_of[position_of[gone].long()] = -1
    position_of[gone] = -1


def unmap_from(table: Tensor, table_layout: TableLayout, place: int, position: int) -> None:
    for group in range(table_layout.groups):
        first = table_layout.group(group, 0)
        fields = table[place, first : first + GroupField.SLOTS_MAX + 1].tolist()
        if fields[GroupField.SLOTS_MAX] == 0:
            continue
        position_of = tensor_at(fields[GroupField.POSITION_OF], (fields[GroupField.SLOTS_MAX],), torch.int32)
        slot_of = tensor_at(fields[GroupField.SLOT_OF], (int(position_of.max()) + 1,), torch.int32)
        unmap_positions(slot_of, position_of, position)
