"""Where bytes lie: the numbers that kernels, memory and steps share.

Pure arithmetic. Holds no tensors and no addresses; knows nothing of sessions.

Invariants:
1. Row bytes are multiples of 16, the bytes of 64 keys (a run) and of a block of 64; every row address is congruent to its buffer's start
   modulo 16. Blocks and pages begin at multiples of 64.
2. A block is rows `[layer][64][row_bytes]`, then a run of keys a key layer, contiguous. Layers are local to the stage.
3. A page is 16 runs, 1,024 keys, of one key layer. A run is the same bytes in a block and in a page.
Source: design, sections 4 to 6 and 10; style glossary (656-byte row).
"""

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BLOCK_ROWS", "DRAFTS_MAX", "GROUP_FIELDS", "HIDDEN_ROWS", "PAGE_KEYS", "RING_BLOCKS", "STATE_FIELDS",
    "WHOLE", "BlockLayout", "GroupField", "KeyLayout", "PageShare", "RowLayout", "StateField", "TableField", "TableLayout",
]  # fmt: skip

BLOCK_ROWS = 64
PAGE_KEYS = 1024
RING_BLOCKS = 4
HIDDEN_ROWS = 16  # hidden states a session keeps, row p at p % 16: a rollback of up to 15 rows finds its hidden state again
SCALE_GROUP = 64  # latent values that share one float16 scale in q8g64


def _padded(size: int) -> int:
    return -(-size // 16) * 16


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Bytes of one packed row: latent, then scales (q8g64 only), then RoPE key, then zero padding to 16 bytes."""

    encoding: Literal["q8g64", "bf16", "f32"]
    latent: int  # values
    rope: int  # values

    @property
    def scale_groups(self) -> int:
        """Scales a row holds; the last group may be ragged."""
        return -(-self.latent // SCALE_GROUP) if self.encoding == "q8g64" else 0

    @property
    def latent_bytes(self) -> int:
        return self.latent * {"q8g64": 1, "bf16": 2, "f32": 4}[self.encoding]

    @property
    def scales_offset(self) -> int:
        """Where float16 scales begin: the latent bytes, rounded up to 2 so that scales are aligned."""
        return self.latent_bytes + self.latent_bytes % 2

    @property
    def rope_offset(self) -> int:
        """Where the RoPE key begins; for f32 it stays 4-byte aligned because latents are 4 bytes wide."""
        return self.scales_offset + 2 * self.scale_groups

    @property
    def row_bytes(self) -> int:
        return _padded(self.rope_offset + self.rope * (4 if self.encoding == "f32" else 2))


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """Bytes of index keys, in runs of 64.

    A run is its keys' values, each key's padded to 16 bytes, and for e4m3 behind them its 64 float32 scales: values and scales are both
    read aligned, which keys of 132 bytes side by side would not be. A key's *address* is where its bytes begin; of e4m3 it is its run's
    start plus its number in the run, so that one number finds values and scale (`kernels/quantize`).
    """

    encoding: Literal["bf16", "f32", "e4m3"]
    width: int  # values

    @property
    def value_bytes(self) -> int:
        """Of one value."""
        return {"bf16": 2, "f32": 4, "e4m3": 1}[self.encoding]

    @property
    def values_bytes(self) -> int:
        """Of one key's values, with padding: the distance between neighbouring keys' values."""
        return _padded(self.width * self.value_bytes)

    @property
    def scale_bytes(self) -> int:
        return 4 if self.encoding == "e4m3" else 0

    @property
    def key_bytes(self) -> int:
        """Of one key, its share of its run's scales included."""
        return self.values_bytes + self.scale_bytes

    @property
    def step_bytes(self) -> int:
        """Distance between the addresses of neighbouring keys of a run."""
        return 1 if self.encoding == "e4m3" else self.key_bytes

    @property
    def run_bytes(self) -> int:
        """Of 64 keys."""
        return BLOCK_ROWS * self.key_bytes

    @property
    def page_bytes(self) -> int:
        return PAGE_KEYS * self.key_bytes


@dataclass(frozen=True, slots=True)
class PageShare:
    """Which pages of index keys one device of a stage has: page n where n % devices == device, side by side in its page tables."""

    devices: int = 1
    device: int = 0

    def pages(self, pages: int) -> int:
        """Of the first `pages` pages, how many are here; also where page `pages` stands in the table, if it is here."""
        return max(0, -(-(pages - self.device) // self.devices))

    def has(self, page: int) -> bool:
        """Whether the page is here."""
        return page % self.devices == self.device

    def page(self, place: int) -> int:
        """The page that stands at `place` in the table."""
        return place * self.devices + self.device


WHOLE = PageShare()  # one device has all pages


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One stage's block. `groups`: selection groups as tuples of local layers, each starting with its full layer."""

    row: RowLayout
    key: KeyLayout
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        flat = [layer for group in self.groups for layer in group]
        assert flat == list(range(len(flat))), f"groups must cover local layers in order, got {self.groups}"

    @property
    def layers(self) -> int:
        return sum(len(group) for group in self.groups)

    @property
    def key_layers(self) -> int:
        """One a group: group g's full layer is key layer g."""
        return len(self.groups)

    @property
    def layer_bytes(self) -> int:
        """Distance between the same row of two neighbouring layers."""
        return BLOCK_ROWS * self.row.row_bytes

    @property
    def keys_offset(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def key_layer_bytes(self) -> int:
        """Of one key layer's run."""
        return self.key.run_bytes

    @property
    def block_bytes(self) -> int:
        return self.keys_offset + self.key_layers * self.key_layer_bytes

    def row_offset(self, layer: int, row: int = 0) -> int:
        return layer * self.layer_bytes + row * self.row.row_bytes

    def key_offset(self, key_layer: int, row: int = 0) -> int:
        """From the block's address to a key's address."""
        return self.keys_offset + key_layer * self.key_layer_bytes + row * self.key.step_bytes


class StateField:
    """Fields of a session's device state, int64 `[STATE_FIELDS]`. Steps and copyback write it; a table rewrite never does."""

    LOGICAL = 0  # rows the session has = position of the next row
    MIRRORED = 1  # rows proved to be in RAM
    TOKEN = 2  # token at position LOGICAL, whose row is not written yet
    ROUND = 3  # rounds planned, one count for all groups of a step
    HITS = 4
    MISSES = 5  # leaders and duplicates
    RING_READS = 6
    BAD_LAYER = 7  # first global layer whose output was not finite, else -1
    DRAFT_COUNT = 8  # drafts that the next step may judge
    DRAFTS = 9  # first of DRAFTS_MAX tokens guessed for positions LOGICAL + 1 on


DRAFTS_MAX = 7
STATE_FIELDS = StateField.DRAFTS + DRAFTS_MAX


class TableField:
    """Leading fields of a step table place, int64."""

    ROWS = 0  # query rows; 0: free place
    STATE = 1  # address of int64 [STATE_FIELDS]
    RING = 2  # address of the ring, RING_BLOCKS blocks; 0 when resident
    BLOCKS = 3  # address of int64 [blocks_max], block addresses
    PAGES = 4  # address of int64 [key layers, pages_max], page addresses
    PAGES_MAX = 5
    HIDDEN = 6  # address of f32 [HIDDEN_ROWS, hidden], the states after the final norm of the last rows
    GROUPS = 7  # first group's fields begin here


class GroupField:
    """Fields of one selection group, after TableField.GROUPS + group * GROUP_FIELDS."""

    SLOTS = 0  # address of uint8 [layers of the group, slots, row_bytes]; 0 when resident
    SLOT_OF = 1  # address of int32 [positions_max]
    POSITION_OF = 2  # address of int32 [slots]
    PIN_ROUND = 3  # address of int32 [slots]
    HAND = 4  # address of int32 [1]
    SLOTS_MAX = 5


GROUP_FIELDS = 6


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Field numbers of a step table for `groups` selection groups."""

    groups: int

    @property
    def fields(self) -> int:
        return TableField.GROUPS + self.groups * GROUP_FIELDS

    def group(self, group: int, field: int) -> int:
        assert 0 <= group < self.groups
        return TableField.GROUPS + group * GROUP_FIELDS + field
