"""Times of one round: plan and gather against empty launches, and attention by a plan against attention over resident rows.

A graph holds several rounds, each with a selection of its own that drifts: a fixed share of every selection was selected by no round
before and is in no slot, the rest was selected in the round before. The slots are full from the start. Before every replay the maps go back
to the beginning, so that every replay misses the same.

Invariants:
1. Plans and gathered rows of the first rounds are compared with the reference before anything is timed, the attention by a plan with the
   attention over gathered rows, bit for bit.
2. History and ring are registered host memory, hot slots and maps device memory, as in an engine.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from engine.bench.cases import drawn
from engine.bench.timing import Call, Timer
from kernels.empty import empty
from kernels.gather import fetch_misses, gather_round
from kernels.layout import (
    BLOCK_ROWS,
    GROUP_FIELDS,
    RING_BLOCKS,
    STATE_FIELDS,
    BlockLayout,
    GroupField,
    KeyLayout,
    RowLayout,
    StateField,
    TableField,
    TableLayout,
)
from kernels.locate import locate_resident
from kernels.quantize import pack_rows
from kernels.round import RoundPlan, begin_round, plan_round
from kernels.sparse_mla import sparse_mla_addresses, sparse_mla_packed, sparse_mla_round

__all__ = ["RoundShapes", "RoundTime", "Sessions", "as_json", "drawn_history", "measure", "selections", "table"]

Queries = tuple[Tensor, Tensor]
_TABLE = TableLayout(1)
_SCALE = 0.0625
_CHECKED = 3  # rounds compared with the reference


@dataclass(frozen=True, slots=True)
class RoundShapes:
    """Sizes of a measured round."""

    positions: int = 131_072
    slots: int = 32_768
    picks: int = 2_048
    rounds: int = 20
    heads: int = 64
    latent: int = 512
    rope: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def layout(self) -> BlockLayout:
        """One layer of the default rows."""
        return BlockLayout(RowLayout("q8g64", self.latent, self.rope), KeyLayout("bf16", 128), ((0,),))


def selections(shapes: RoundShapes, share: float, places: int, seed: int) -> tuple[Tensor, Tensor]:
    """What is selected, and what the slots hold before the first round.

    returns  [rounds, places, picks]  int32  ascending
             [places, slots]          int32  positions in the slots
    """
    generator = torch.Generator().manual_seed(seed)
    fresh = round(share * shapes.picks)
    assert shapes.slots + shapes.rounds * fresh <= shapes.positions, "not enough positions that no slot holds"
    chosen = torch.empty((shapes.rounds, places, shapes.picks), dtype=torch.int32)
    held = torch.empty((places, shapes.slots), dtype=torch.int32)
    for place in range(places):
        order = torch.randperm(shapes.positions, generator=generator).int()
        held[place] = order[: shapes.slots]
        current = held[place][torch.randperm(shapes.slots, generator=generator)[: shapes.picks]]
        after = shapes.slots
        for number in range(shapes.rounds):
            kept = current[torch.randperm(shapes.picks, generator=generator)[: shapes.picks - fresh]]
            current = torch.cat([kept, order[after : after + fresh]])
            after += fresh
            chosen[number, place] = current.sort().values
    return chosen, held


class Sessions:
    """`places` sessions over one registered history, each with maps and slots of its own, on one device."""

    def __init__(self, shapes: RoundShapes, device: torch.device, history: Tensor, held: Tensor) -> None:
        """Args: history [blocks + ring blocks, block bytes] uint8, that `device` can read; held [places, slots] int32."""
        self.shapes, self.layout, self.history = shapes, shapes.layout, history
        places, slots = held.shape
        positions, blocks = shapes.positions, shapes.positions // BLOCK_ROWS
        self.state = torch.zeros((places, STATE_FIELDS), dtype=torch.int64, device=device)
        self.state[:, StateField.LOGICAL] = positions
        self.maps = torch.full((places, positions + 2 * slots + 4), -1, dtype=torch.int32, device=device)
        self.slots = torch.zeros((places, slots, self.layout.row.row_bytes), dtype=torch.uint8, device=device)
        table = torch.zeros((places, _TABLE.fields), dtype=torch.int64)
        self.blocks = (history.data_ptr() + torch.arange(blocks) * self.layout.block_bytes).to(device)
        rows = history[:blocks, : self.layout.keys_offset].reshape(positions, -1)
        for place in range(places):
            self.maps[place, held[place].long().to(device)] = torch.arange(slots, dtype=torch.int32, device=device)
            self.maps[place, positions : positions + slots] = held[place].to(device)
            self.maps[place, -4:] = 0  # the hand
            self.slots[place] = rows[held[place].long()].to(device)
            maps = self.maps[place].data_ptr()
            table[place, TableField.ROWS] = 1
            table[place, TableField.STATE] = self.state[place].data_ptr()
            table[place, TableField.RING] = history[blocks].data_ptr()
            table[place, TableField.BLOCKS] = self.blocks.data_ptr()
            group = [0] * GROUP_FIELDS
            group[GroupField.SLOTS], group[GroupField.SLOTS_MAX] = self.slots[place].data_ptr(), slots
            group[GroupField.SLOT_OF], group[GroupField.POSITION_OF] = maps, maps + 4 * positions
            group[GroupField.PIN_ROUND], group[GroupField.HAND] = maps + 4 * (positions + slots), maps + 4 * (positions + 2 * slots)
            table[place, TableField.GROUPS :] = torch.tensor(group)
        self.table = table.to(device)
        self.mirrored = torch.full((places,), positions, dtype=torch.int64, device=device)
        self.place_of = torch.arange(places, dtype=torch.int32, device=device)
        self.plan = RoundPlan.empty(places, shapes.picks, device)
        self.rows = torch.zeros((places, shapes.picks, self.layout.row.row_bytes), dtype=torch.uint8, device=device)
        self.scratch = torch.zeros((places * shapes.picks, self.layout.row.row_bytes), dtype=torch.uint8, device=device)
        self._first = self.maps.clone(), self.state.clone()

    def restore(self) -> None:
        """Maps and counters as they were at first; slots then hold what nobody looks for there, as a replay fills them alike."""
        self.maps.copy_(self._first[0])
        self.state.copy_(self._first[1])

    def plan_of(self, selection: Tensor) -> None:
        """Begin a round and plan it; the selection [places, picks] is the plan's own buffer, as a step has it."""
        begin_round(self.table)
        plan_round(self.table, _TABLE, self.layout, 0, self.place_of, self.mirrored, self.planned(selection))

    def planned(self, selection: Tensor) -> RoundPlan:
        """The one plan over another selection buffer."""
        plan = self.plan
        return RoundPlan(selection, plan.slot, plan.fill, plan.miss, plan.source, plan.misses, plan.miss_source, plan.scratch)

    def gather(self, selection: Tensor) -> None:
        """Every row of the plan to one buffer."""
        gather_round(self.planned(selection), self.table, _TABLE, self.place_of, 0, 0, 0, self.layout.row.row_bytes, self.rows, None)

    def resident(self, selection: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        """Attention over rows where a resident history has them: this one's, by its blocks."""
        plan = self.planned(selection)
        locate_resident(self.table, _TABLE, self.layout, self.place_of, selection, plan)
        return sparse_mla_addresses(latent, rope, plan.source, self.layout.row, _SCALE)

    def attend(self, selection: Tensor, latent: Tensor, rope: Tensor, fetched: bool) -> Tensor:
        """Attention by the plan; `fetched`: misses come over the bus once, ahead."""
        plan = self.planned(selection)
        if fetched:
            fetch_misses(plan, 0, self.layout.row.row_bytes, self.scratch)
        scratch = self.scratch if fetched else None
        return sparse_mla_round(latent, rope, plan, self.table, _TABLE, self.place_of, 0, 0, 0, self.layout.row, _SCALE, scratch)


def drawn_history(shapes: RoundShapes, device: torch.device) -> Tensor:
    """Valid rows in blocks, a ring behind them: [blocks + ring blocks, block bytes] uint8 in host memory that `device` can read."""
    layout = shapes.layout
    rows = pack_rows(
        drawn(device, shapes.positions, shapes.latent, seed=1), drawn(device, shapes.positions, shapes.rope, seed=2), layout.row
    ).cpu()
    blocks = shapes.positions // BLOCK_ROWS
    history = torch.zeros((blocks + RING_BLOCKS, layout.block_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    history[:blocks, : layout.keys_offset] = rows.view(blocks, layout.keys_offset)
    return history


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Microseconds a round at one share of misses. Whole graphs, and what is asked of them."""

    places: int
    share: float
    wrong: str  # what differed from the reference; then there are no times
    plan_gather: float  # begin, plan, gather
    plan_gather_empty: float  # begin, and empty launches in place of plan and gather
    plan: float  # begin, plan
    plan_empty: float
    resident_attention: float  # addresses looked up, attention over resident rows
    gathered_attention: float  # begin, plan, gather, attention over the compact copy
    planned_attention: float  # begin, plan, attention by the plan
    fetched_attention: float  # begin, plan, misses fetched, attention by the plan
    begin: float

    @property
    def round_us(self) -> float:
        """Plan and gather less the same graph of empty launches."""
        return self.plan_gather - self.plan_gather_empty

    @property
    def fused_us(self) -> float:
        """What the better attention by a plan, with its plan, takes longer than attention over resident rows."""
        return min(self.planned_attention, self.fetched_attention) - self.begin - self.resident_attention

    @property
    def gathered_us(self) -> float:
        """The same of attention over gathered rows."""
        return self.gathered_attention - self.begin - self.resident_attention


_TARGETS = {(1, 0.01): 6.0, (1, 0.05): 9.0, (16, 0.01): 12.0}


def _compared(
    shapes: RoundShapes, device: torch.device, history: Tensor, chosen: Tensor, held: Tensor, queries: tuple[Tensor, Tensor]
) -> str:
    """The first thing that differs from the reference in the first rounds; empty: none."""
    worlds = [Sessions(shapes, torch.device("cpu"), history, held), Sessions(shapes, device, history, held)]
    for number, selection in enumerate(chosen[:_CHECKED]):
        there = selection.to(device)
        for world, one in zip(worlds, (selection, there), strict=True):
            world.plan_of(one)
            world.gather(one)
        mine, its = worlds
        named = {name: (getattr(mine.plan, name), getattr(its.plan, name)) for name in ("slot", "fill", "miss", "source", "misses")}
        named |= {
            "maps": (mine.maps, its.maps),
            "counts": (mine.state, its.state),
            "rows": (mine.rows, its.rows),
            "slots": (mine.slots, its.slots),
        }
        for name, (wanted, got) in named.items():
            if not torch.equal(wanted, got.cpu()):
                return f"{name} of round {number}"
        gathered = sparse_mla_packed(*queries, its.rows, there, shapes.layout.row, _SCALE)
        for fetched in (False, True):
            if not torch.equal(its.attend(there, *queries, fetched), gathered):
                return f"attention by the plan{', misses fetched,' if fetched else ''} of round {number}"
        if not torch.equal(mine.slots, its.slots.cpu()):
            return f"slots filled by the attention of round {number}"
    return ""


def measure(
    shapes: RoundShapes, device: torch.device, timer: Timer, places_of: Sequence[int], shares: Sequence[float],
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[RoundTime]:  # fmt: skip
    """Check, then time every number of places at every share of misses."""
    history = drawn_history(shapes, device)
    resident_history = history.to(device)
    for index, (places, share) in enumerate([(places, share) for places in places_of for share in shares]):
        chosen, held = selections(shapes, share, places, seed=places)
        latent = drawn(device, places, shapes.heads, shapes.latent, seed=3, dtype=shapes.dtype)
        rope = drawn(device, places, shapes.heads, shapes.rope, seed=4, dtype=shapes.dtype)
        wrong = _compared(shapes, device, history, chosen, held, (latent, rope))
        if wrong:
            yield RoundTime(places, share, wrong, *[math.nan] * 9)
            continue
        sessions, resident = Sessions(shapes, device, history, held), Sessions(shapes, device, resident_history, held)
        asked = list(chosen.to(device))
        programs = places * 16  # as many as the look-up has

        def timed(*parts: Callable[[Tensor], Any], restore: Call = sessions.restore, asked: list[Tensor] = asked) -> float:
            return timer.microseconds([partial(_in_turn, parts, selection) for selection in asked], restore)

        def begin(_: Tensor, sessions: Sessions = sessions) -> None:
            begin_round(sessions.table)

        def nothing(_: Tensor, sessions: Sessions = sessions, programs: int = programs) -> None:
            empty(sessions.table, programs)

        def by_plan(selection: Tensor, sessions: Sessions = sessions, fetched: bool = False, q: Queries = (latent, rope)) -> None:
            sessions.attend(selection, *q, fetched)

        def compact(selection: Tensor, sessions: Sessions = sessions, q: Queries = (latent, rope)) -> None:
            sparse_mla_packed(*q, sessions.rows, selection, shapes.layout.row, _SCALE)

        yield RoundTime(
            places, share, "",
            plan_gather=timed(sessions.plan_of, sessions.gather),
            plan_gather_empty=timed(begin, nothing, nothing, nothing),
            plan=timed(sessions.plan_of),
            plan_empty=timed(begin, nothing, nothing),
            resident_attention=timed(partial(resident.resident, latent=latent, rope=rope)),
            gathered_attention=timed(sessions.plan_of, sessions.gather, compact),
            planned_attention=timed(sessions.plan_of, by_plan),
            fetched_attention=timed(sessions.plan_of, partial(by_plan, fetched=True)),
            begin=timed(begin),
        )  # fmt: skip
        on_done(index + 1, len(places_of) * len(shares))


def _in_turn(parts: Sequence[Callable[[Tensor], Any]], selection: Tensor) -> None:
    for part in parts:
        part(selection)


def table(found: Sequence[RoundTime]) -> Table:
    """For people."""
    shown = Table(title="one round, microseconds", title_justify="left")
    names = ("places", "misses", "plan + gather, less empty", "plan, less empty", "fused difference", "gathered difference",
             "resident attention", "by plan", "by plan, fetched", "target", "")  # fmt: skip
    for name in names:
        shown.add_column(name, justify="right")
    for one in found:
        target = _TARGETS.get((one.places, one.share))
        verdict = f"[bold red]WRONG: {one.wrong}[/]" if one.wrong else ""
        if target is not None and not one.wrong:
            verdict = "[green]yes[/]" if min(one.round_us, one.fused_us) <= target else "[yellow]no[/]"
        times = (one.round_us, one.plan - one.plan_empty, one.fused_us, one.gathered_us, one.resident_attention, one.planned_attention,
                 one.fetched_attention)  # fmt: skip
        shown.add_row(
            str(one.places), f"{one.share:.0%}", *(f"{time:.2f}" for time in times), "" if target is None else f"{target:.0f}", verdict
        )
    return shown


def as_json(found: Sequence[RoundTime], shapes: RoundShapes, machine: dict[str, Any]) -> dict[str, Any]:
    """For programs."""
    rows = []
    for one in found:
        row = asdict(one) | {"round_us": one.round_us, "fused_us": one.fused_us, "gathered_us": one.gathered_us}
        rows.append({name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()})
    return {
        "version": 1,
        "kind": "round",
        "machine": machine,
        "shapes": {"slots": shapes.slots, "positions": shapes.positions, "picks": shapes.picks, "rounds": shapes.rounds},
        "rounds": rows,
    }
