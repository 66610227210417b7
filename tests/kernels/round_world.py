"""A stage in miniature for tests of rounds: sessions with real blocks, rings, maps and states behind a real step table.

Every row's bytes are known (`truth`); memory that holds no row of use is poison, so that a wrong read shows.
"""

import torch
from torch import Tensor

from kernels.gather import Unwritten, fetch_misses, gather_group, gather_round
from kernels.layout import BLOCK_ROWS, RING_BLOCKS, STATE_FIELDS, BlockLayout, KeyLayout, RowLayout, StateField, TableLayout
from kernels.round import RoundPlan, begin_round, plan_round
from memory.hot import HotCache
from memory.table import StepTable

POISON = 0xEE
LAYOUT = BlockLayout(RowLayout("bf16", 4, 4), KeyLayout("bf16", 4), ((0, 1), (2,)))
TABLE_LAYOUT = TableLayout(2)
ROW_BYTES = LAYOUT.row.row_bytes
PAGES_MAX = 3


def take(size: int, owner: str) -> Tensor:
    return torch.full((size,), POISON, dtype=torch.uint8)


class PlainSession:
    """One offloaded session of `positions` positions at most, `slots` hot slots a group."""

    def __init__(self, positions: int, slots: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.truth = torch.randint(1, 200, (LAYOUT.layers, positions, ROW_BYTES), dtype=torch.uint8, generator=generator)
        self.blocks = [take(LAYOUT.block_bytes, "") for _ in range(-(-positions // BLOCK_ROWS))]
        self.block_table = torch.zeros(len(self.blocks), dtype=torch.int64)
        self.ring = take(RING_BLOCKS * LAYOUT.block_bytes, "")
        self.hot = [HotCache(len(group), slots, positions, ROW_BYTES, take=take) for group in LAYOUT.groups]
        self.pages = torch.zeros((LAYOUT.key_layers, PAGES_MAX), dtype=torch.int64)
        self.state = torch.zeros(STATE_FIELDS, dtype=torch.int64)

    @property
    def logical(self) -> int:
        return int(self.state[StateField.LOGICAL])

    @property
    def mirrored(self) -> int:
        return int(self.state[StateField.MIRRORED])

    @staticmethod
    def _rows(block: Tensor) -> Tensor:
        return block[: LAYOUT.keys_offset].view(LAYOUT.layers, BLOCK_ROWS, ROW_BYTES)

    def grow(self, logical: int, mirrored: int) -> None:
        """Write rows up to `logical` to the ring, copy rows up to `mirrored` to their blocks, as steps and copyback would."""
        for position in range(self.logical, logical):
            block = self.ring.view(RING_BLOCKS, -1)[position // BLOCK_ROWS % RING_BLOCKS]
            self._rows(block)[:, position % BLOCK_ROWS] = self.truth[:, position]
        for position in range(self.mirrored, mirrored):
            block = position // BLOCK_ROWS
            self.block_table[block] = self.blocks[block].data_ptr()
            self._rows(self.blocks[block])[:, position % BLOCK_ROWS] = self.truth[:, position]
        self.state[StateField.LOGICAL], self.state[StateField.MIRRORED] = logical, mirrored

    def table_row(self, rows: int, resident: bool = False) -> list[int]:
        fields = [rows, self.state.data_ptr(), 0 if resident else self.ring.data_ptr(), self.block_table.data_ptr()]
        fields += [self.pages.data_ptr(), PAGES_MAX, 0]
        for hot in self.hot:
            fields += [0] * 6 if resident else hot.table_fields()
        return fields

    def counters(self) -> tuple[int, int, int]:
        """Hits, misses, ring reads."""
        return tuple(self.state[[StateField.HITS, StateField.MISSES, StateField.RING_READS]].tolist())

    def check_maps(self) -> None:
        for hot in self.hot:
            hot.check_integrity(mirrored=self.mirrored, round_now=int(self.state[StateField.ROUND]))

    def check(self) -> None:
        """Maps, and that every mapped slot holds its position's row in every layer. For use once all layers were gathered."""
        self.check_maps()
        for hot, group in zip(self.hot, LAYOUT.groups, strict=True):
            held = (hot.position_of >= 0).nonzero().flatten()
            truth = self.truth[group[0] : group[-1] + 1][:, hot.position_of[held].long()]
            assert torch.equal(hot.slots[:, held], truth), "a slot holds another row than it is mapped for"


class Step:
    """The places of one step: `place_of` of its query rows, its table, a plan, and what a step does with them."""

    def __init__(self, sessions: list[PlainSession | None], place_of: list[int], selection: list[list[int]] | Tensor) -> None:
        self.sessions = sessions
        self.place_of = torch.tensor(place_of, dtype=torch.int32)
        self.table = StepTable(len(sessions), TABLE_LAYOUT)
        rows_of = [place_of.count(place) for place in range(len(sessions))]
        busy = [None if not rows or session is None else session.table_row(rows) for session, rows in zip(sessions, rows_of, strict=True)]
        self.table.rewrite(busy)()
        self.mirrored = torch.tensor([0 if session is None else session.mirrored for session in sessions])
        self.selection = torch.as_tensor(selection, dtype=torch.int32)
        self.plan = RoundPlan.empty(*self.selection.shape)
        for unwritten in self.plan.buffers:
            unwritten.fill_(123_456)  # poison: the plan must write all of it
        self.plan.selection.copy_(self.selection)

    def begin(self) -> "Step":
        begin_round(self.table.tensor)
        return self

    def plan_group(self, group: int = 0) -> RoundPlan:
        plan_round(self.table.tensor, TABLE_LAYOUT, LAYOUT, group, self.place_of, self.mirrored, self.plan)
        return self.plan

    def gather(self, group: int, layer_in_group: int, scratch: Tensor | None = None) -> Tensor:
        """[T, k, row_bytes] of one layer, by the plan."""
        out = torch.full((*self.selection.shape, ROW_BYTES), POISON, dtype=torch.uint8)
        offset = LAYOUT.row_offset(LAYOUT.groups[group][layer_in_group])
        gather_round(self.plan, self.table.tensor, TABLE_LAYOUT, self.place_of, group, layer_in_group, offset, ROW_BYTES, out, scratch)
        return out

    def gather_group(self, group: int, new: Unwritten) -> tuple[Tensor, Tensor]:
        """[layers, T, k, row_bytes] of a whole group, poison where nothing was gathered; and where the new rows belong."""
        layers = LAYOUT.groups[group]
        out = torch.full((len(layers), *self.selection.shape, ROW_BYTES), POISON, dtype=torch.uint8)
        addresses = torch.full((len(self.place_of), new.each), -7)
        offset = LAYOUT.row_offset(layers[0])
        gather_group(self.plan, self.table.tensor, TABLE_LAYOUT, self.place_of, group, offset, LAYOUT.layer_bytes, out, new, addresses)
        return out, addresses

    def fetch(self, layer: int, places: int) -> Tensor:
        """The prefetched misses of one layer, in a scratch of `places` rows."""
        scratch = torch.full((places, ROW_BYTES), POISON, dtype=torch.uint8)
        fetch_misses(self.plan, LAYOUT.row_offset(layer), ROW_BYTES, scratch)
        return scratch

    def direct(self, layer: int) -> Tensor:
        """What every pick of one layer must be: the session's row, or zero."""
        out = torch.zeros((*self.selection.shape, ROW_BYTES), dtype=torch.uint8)
        for row, place in enumerate(self.place_of.tolist()):
            session = None if place < 0 else self.sessions[place]
            if session is not None:
                used = self.selection[row] >= 0
                out[row, used] = session.truth[layer][self.selection[row, used].long()]
        return out

    def run(self, scratch_rows: int | None = None) -> None:
        """One whole step: every group planned, every layer gathered and compared with direct reads, maps checked."""
        self.begin()
        for group, layers in enumerate(LAYOUT.groups):
            self.plan_group(group)
            for layer_in_group, layer in enumerate(layers):
                prefetched = None if scratch_rows is None or layer_in_group == 0 else self.fetch(layer, scratch_rows)
                assert torch.equal(self.gather(group, layer_in_group, prefetched), self.direct(layer)), f"layer {layer} differs"
        for session in self.sessions:
            if session is not None:
                session.check()
