"""How a product of few rows is cut into programs: constants by the weight's shape, and a rule for shapes nobody measured.

Knows no tensors. Nothing here may follow the number of rows: tiles, parts and splits decide in which order a row's products are summed.

The constants were measured with `forebay bench kernels --sweep` (docs/performance.md); stages and warps move time only.
"""

from dataclasses import dataclass, replace

__all__ = ["Tiling", "gated_tiling", "integer_tiling", "mixed_tiling", "tiling_of"]

WIDE_TILE_WIDTH = 64  # float32 rows or weights: more registers and shared memory a value
PROGRAMS = 528  # four a multiprocessor of the largest card in mind; what splits of float32 products aim at


@dataclass(frozen=True, slots=True)
class Tiling:
    """One program's share of a weight: `outputs` rows of it, read `parts` x `width` values at a time."""

    outputs: int
    width: int  # values of one part of a step
    parts: int  # parts of a step, summed by themselves and added at the end: as many independent chains of products
    warps: int
    stages: int  # steps under way at once, on NVIDIA; AMD's 64 KiB of shared memory hold two
    splits: int = 1  # programs that share one tile's width; a second launch adds them
    twin: bool = False  # two tiles of `outputs` a program (integers)

    @property
    def step(self) -> int:
        return self.width * self.parts

    @property
    def tile_outputs(self) -> int:
        """Outputs of a program."""
        return self.outputs * (2 if self.twin else 1)


# (outputs, width) of one head's weight, bf16 rows and bf16 or FP8 weights
_LINEAR: dict[tuple[int, int], Tiling] = {
    (256, 512): Tiling(32, 64, 1, 2, 6),
    (512, 192): Tiling(128, 64, 1, 4, 3),
    (2624, 6144): Tiling(32, 128, 1, 4, 4, 3),
    (2784, 6144): Tiling(32, 128, 1, 4, 4, 3),
    (4096, 2048): Tiling(16, 64, 2, 2, 8),
    (6144, 2048): Tiling(16, 64, 2, 2, 8),
    (6144, 12288): Tiling(16, 64, 4, 4, 4),
    (6144, 16384): Tiling(16, 64, 4, 4, 4),
    (16384, 2048): Tiling(64, 128, 1, 4, 4),
    (154880, 6144): Tiling(64, 128, 1, 4, 4),
}
# (outputs, width) of gate and up together: a program takes `outputs` of each
_GATED: dict[tuple[int, int], Tiling] = {
    (2048, 6144): Tiling(16, 64, 4, 4, 5),
    (12288, 6144): Tiling(32, 128, 1, 4, 4),
}


# (outputs, width, bits, routed) of `GroupInt` weights under bf16 rows; `Tiling.width` is replaced by the chunk of the weight's group
_INTEGER: dict[tuple[int, int, int, bool], Tiling] = {
    (16384, 2048, 4, False): Tiling(16, 256, 2, 2, 3, twin=True),
    (6144, 2048, 4, False): Tiling(16, 256, 2, 2, 3, twin=True),
    (6144, 2048, 4, True): Tiling(32, 256, 1, 2, 3, twin=True),
}
_INTEGER_GATED: dict[tuple[int, int, int, bool], Tiling] = {
    (2048, 6144, 4, True): Tiling(16, 256, 2, 2, 3),  # 32 outputs are as fast alone and cost a whole step 1%
}  # gate and up together: `Tiling.outputs` of each a program


def _cdiv(value: int, by: int) -> int:
    return -(-value // by)


def _wide(tiles_heads: int, outputs: int, width: int) -> Tiling:
    """float32 rows or weights: small tiles, and splits enough to fill a card."""
    tiles = tiles_heads * _cdiv(outputs, 32)
    steps = _cdiv(width, WIDE_TILE_WIDTH)
    most = min(max(1, PROGRAMS // tiles), max(1, steps // 2))
    splits = max(splits for splits in range(1, most + 1) if steps % splits == 0)
    return Tiling(32, WIDE_TILE_WIDTH, 1, 4, 3, splits)


def tiling_of(heads: int, outputs: int, width: int, *, wide: bool) -> Tiling:
    """The tiling of `heads` products with weights [outputs, width]. Args: wide: rows or weights are float32."""
    if wide:
        return _wide(heads, outputs, width)
    chosen = _LINEAR.get((outputs, width))
    if chosen is not None:
        return chosen
    programs = heads * outputs
    tile = 64 if programs >= 64 * PROGRAMS else 32 if programs >= 32 * PROGRAMS else 16
    return Tiling(tile, 64, 2 if tile == 64 else 4, 4, 6 if tile == 16 else 5)


def mixed_tiling(outputs: int, width: int) -> Tiling:
    """The tiling of a float32 weight [outputs, width] under bf16 rows, a router's: few outputs, so the width is split."""
    tiles, steps = _cdiv(outputs, 16), _cdiv(width, 256)
    most = max(1, min(PROGRAMS // 4 // tiles, steps))
    return Tiling(16, 64, 4, 4, 4, max(splits for splits in range(1, most + 1) if steps % splits == 0))


def gated_tiling(outputs: int, width: int, *, wide: bool) -> Tiling:
    """The tiling of gate and up, [outputs, width] each: twice `Tiling.outputs` rows a program."""
    if wide:
        return Tiling(16, WIDE_TILE_WIDTH, 1, 4, 3)
    return _GATED.get((outputs, width), Tiling(32, 64, 2, 4, 5) if outputs > 4096 else Tiling(16, 64, 4, 4, 5))


def integer_tiling(outputs: int, width: int, bits: int, group: int, *, wide: bool, gated: bool = False, routed: bool = False) -> Tiling:
    """The tiling of a `GroupInt` weight [outputs, width]: a part is a chunk (`group_int.py`).

    With several parts a warp takes one part by 16 outputs, with one part a warp takes 16 outputs: with fewer outputs than threads, scales
    do not pass through shared memory.

    Args: wide: rows are float32. gated: gate and up in one launch, [outputs, width] each. routed: one of many experts.
    """
    chunk = min(group, 64) * (16 // bits)
    if wide:
        return Tiling(16, chunk, 2, 2, 2)
    chosen = (_INTEGER_GATED if gated else _INTEGER).get((outputs, width, bits, routed), Tiling(16, chunk, 4, 4, 3))
    return replace(chosen, width=chunk)
