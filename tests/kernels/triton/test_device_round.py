"""Rounds and gathers on a card at the model's true sizes against the reference on the host: plans, maps and bytes, eager and captured.

Blocks and rings are registered host memory, so that both forms read the same addresses. `compare` runs on the CPU too (two references, or
an interpreted kernel), which is how it is tested itself.
"""

import pytest
import torch
from torch import Tensor

from kernels.gather import gather_round
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
from kernels.round import RoundPlan, begin_round, plan_round

LAYOUT = BlockLayout(RowLayout("q8g64", 512, 64), KeyLayout("bf16", 128), ((0,),))
TABLE = TableLayout(1)
ROW_BYTES = LAYOUT.row.row_bytes


class Sessions:
    """`places` sessions over the same blocks and ring, each with maps and slots of its own, on one device."""

    def __init__(self, device: str, blocks: Tensor, ring: Tensor, logical: int, places: int, rows: int, picks: int, slots: int) -> None:
        positions = blocks.shape[0] * BLOCK_ROWS
        self.state = torch.zeros((places, STATE_FIELDS), dtype=torch.int64, device=device)
        self.state[:, StateField.LOGICAL] = logical
        self.maps = torch.full((places, positions + 2 * slots + 4), -1, dtype=torch.int32, device=device)
        self.maps[:, -4:] = 0  # hands
        self.slots = torch.full((places, slots, ROW_BYTES), 0xEE, dtype=torch.uint8, device=device)
        self.block_table = (blocks.data_ptr() + torch.arange(blocks.shape[0]) * LAYOUT.block_bytes).to(device)
        self.mirrored = torch.full((places,), logical // BLOCK_ROWS * BLOCK_ROWS, dtype=torch.int64, device=device)
        self.place_of = torch.arange(places, dtype=torch.int32).repeat_interleave(rows).to(device)
        table = torch.zeros((places, TABLE.fields), dtype=torch.int64)
        for place in range(places):
            maps = self.maps[place].data_ptr()
            table[place, TableField.ROWS] = rows
            table[place, TableField.STATE] = self.state[place].data_ptr()
            table[place, TableField.RING] = ring.data_ptr()
            table[place, TableField.BLOCKS] = self.block_table.data_ptr()
            group = [0] * GROUP_FIELDS
            group[GroupField.SLOTS] = self.slots[place].data_ptr()
            group[GroupField.SLOT_OF], group[GroupField.POSITION_OF] = maps, maps + 4 * positions
            group[GroupField.PIN_ROUND], group[GroupField.HAND] = maps + 4 * (positions + slots), maps + 4 * (positions + 2 * slots)
            group[GroupField.SLOTS_MAX] = slots
            table[place, TableField.GROUPS :] = torch.tensor(group)
        self.table = table.to(device)
        self.plan = RoundPlan.empty(places * rows, picks, device)
        self.out = torch.zeros((places * rows, picks, ROW_BYTES), dtype=torch.uint8, device=device)

    def run(self) -> None:
        """One round of what `plan.selection` holds."""
        begin_round(self.table)
        plan_round(self.table, TABLE, LAYOUT, 0, self.place_of, self.mirrored, self.plan)
        gather_round(self.plan, self.table, TABLE, self.place_of, 0, 0, 0, ROW_BYTES, self.out, None)

    def everything(self) -> dict[str, Tensor]:
        names = ("slot", "fill", "miss", "source", "misses", "miss_source")
        plan = {name: getattr(self.plan, name).cpu() for name in names}
        return {**plan, "state": self.state.cpu(), "maps": self.maps.cpu(), "slots": self.slots.cpu(), "out": self.out.cpu()}


def drifting(generator: torch.Generator, rows: int, picks: int, logical: int, at: int, spread: int) -> Tensor:
    """Ascending distinct positions a row, near one another from row to row and from round to round, with a tail of -1."""
    selection = torch.full((rows, picks), -1, dtype=torch.int32)
    for row in range(rows):
        chosen = (at + torch.randperm(spread, generator=generator)[: picks - row]) % logical
        selection[row, : chosen.numel()] = chosen.sort().values.int()
    selection[:, 0] = logical - 1  # a ring row
    return selection


def compare(device: str, captured: bool, blocks: int, places: int, rows: int, picks: int, slots: int, rounds: int) -> None:
    """The same rounds on `device` and by the reference: equal plans, maps, counters, slots and rows after each."""
    generator = torch.Generator().manual_seed(places)
    memory = torch.randint(0, 256, (blocks + RING_BLOCKS, LAYOUT.block_bytes), dtype=torch.uint8, generator=generator)
    memory = memory.pin_memory() if device != "cpu" else memory
    logical = blocks * BLOCK_ROWS - 10
    worlds = [Sessions(where, memory[:blocks], memory[blocks:], logical, places, rows, picks, slots) for where in ("cpu", device)]
    graph = None
    for index in range(rounds):
        selection = drifting(generator, places * rows, picks, logical, index * picks // 50, picks + picks // 20)
        if index == rounds - 2:
            selection = drifting(generator, places * rows, picks, logical, logical // 2, logical // 3)  # nearly all missing
        for sessions in worlds:
            sessions.plan.selection.copy_(selection)
        worlds[0].run()
        if captured and index == 2:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                worlds[1].run()
        graph.replay() if graph is not None else worlds[1].run()
        wanted, got = worlds[0].everything(), worlds[1].everything()
        for name in wanted:
            assert torch.equal(got[name], wanted[name]), f"round {index}: {name} differs"
    counted = worlds[0].state[:, [StateField.HITS, StateField.MISSES, StateField.RING_READS]]
    assert bool((counted > 0).all()), f"a kind of read never happened: {counted.tolist()}"


def test_the_comparison_holds_for_two_references() -> None:
    """The world itself is sound: the reference agrees with itself, and hits, misses and ring reads all occur."""
    compare("cpu", captured=False, blocks=40, places=2, rows=2, picks=32, slots=64, rounds=5)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("places", "rows"), [(1, 1), (3, 1), (2, 4), (16, 1)])
def test_rounds_on_a_card_equal_the_reference(places: int, rows: int, captured: bool) -> None:
    """2,048 of 131,072 positions over 32,768 slots: plans, maps, slots and gathered bytes are the reference's, replayed or not."""
    compare("cuda", captured, blocks=2048, places=places, rows=rows, picks=2048, slots=32_768, rounds=8)


@pytest.mark.gpu
def test_a_full_cache_on_a_card_equals_the_reference() -> None:
    """With exactly top-k slots and four rows that disagree, rows are read through as the reference does."""
    compare("cuda", captured=True, blocks=512, places=2, rows=4, picks=2048, slots=2048, rounds=8)
