"""New rows and keys: the bytes of norm, rotation and packing one after another, stored where they belong and nowhere else."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.layout import KeyLayout, RowLayout
from kernels.norm import layer_norm, rms_norm
from kernels.place import NoKernel
from kernels.quantize import pack_keys, pack_rows, unpack_keys, unpack_rows
from kernels.rope import rope_frequencies, rope_table, rotate
from kernels.row_write import NewKeys, NewRows, write_keys, write_layer, write_rows

GLM = RowLayout("q8g64", 512, 64)
LAYOUTS = [GLM, RowLayout("q8g64", 77, 6), RowLayout("q8g64", 24, 8), RowLayout("bf16", 24, 8), RowLayout("f32", 33, 6)]
KEYS = [KeyLayout("bf16", 128), KeyLayout("f32", 33), KeyLayout("bf16", 8)]
POSITIONS = torch.tensor([0, 1, 63, 50_023, 1_048_575])
UNTOUCHED = 0xA5


def signs(rows: int, width: int, seed: int) -> Tensor:
    """Rows of ones and minus ones: their root mean square is exactly 1, so that a norm leaves no room for rounding."""
    return torch.randint(0, 2, (rows, width), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def table_of(positions: Tensor, rope: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return rope_table(positions, rope_frequencies(8e6, rope), dtype)


class Shelf:
    """Places for items, every byte marked; items go to the places of `order`, -1: nowhere."""

    def __init__(self, item_bytes: int, order: list[int], places: int = 12, device: str = "cpu") -> None:
        self.stored = torch.full((places, item_bytes), UNTOUCHED, dtype=torch.uint8, device=device)
        self._order = order
        place = torch.tensor(order)
        self.destinations = torch.where(place >= 0, self.stored.data_ptr() + place * item_bytes, 0).to(device)

    def holds(self, packed: Tensor, shifted: int = 0) -> bool:
        """Whether exactly `packed` is stored, `shifted` places behind the destinations, and nothing else."""
        wanted = torch.full_like(self.stored, UNTOUCHED, device="cpu")
        for place, item in zip(self._order, packed, strict=True):
            if place >= 0:
                wanted[place + shifted] = item
        return torch.equal(self.stored.cpu(), wanted)


ORDER = [4, 0, -1, 8, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skipping", [False, True])
def test_rows_are_normed_rotated_packed_and_stored(layout: RowLayout, skipping: bool) -> None:
    """Latents of exact norm: every byte is that of the weight times the sign, of the rotated key, or untouched; row 0 can be left out."""
    latent, rope = signs(5, layout.latent, seed=1), drawn(5, layout.rope, seed=2)
    weight = drawn(layout.latent, seed=3)
    table = table_of(POSITIONS, layout.rope)
    wanted = pack_rows(latent * weight, rotate(rope, *table), layout)
    if skipping:
        wanted[0] = 0
    shelf = Shelf(layout.row_bytes, ORDER)
    projected = torch.cat((torch.ones(5, 3), latent, rope), 1)[:, 3:]  # rows lie further apart than they are wide
    positions = POSITIONS if skipping else None
    write_rows(NewRows(projected, weight, 0.0, shelf.destinations, 3 * layout.row_bytes, layout), table, positions)
    assert shelf.holds(wanted, shifted=3)


@pytest.mark.parametrize("layout", KEYS)
@pytest.mark.parametrize("skipping", [False, True])
def test_keys_are_normed_rotated_packed_and_stored_twice(layout: KeyLayout, skipping: bool) -> None:
    """Keys near float64's norm and rotation of the first values alone; block and page get the same bytes, and nothing beside them."""
    source, weight, bias = drawn(5, layout.width, seed=1) * 3 + 1, drawn(layout.width, seed=2), drawn(layout.width, seed=3)
    table = table_of(POSITIONS, 6)
    exact = (source - source.double().mean(-1, keepdim=True)) / source.double().std(-1, keepdim=True, unbiased=False) * weight + bias
    exact[:, :6] = rotate(exact[:, :6].clone(), table[0].double(), table[1].double())
    block, page = Shelf(layout.key_bytes, ORDER), Shelf(layout.key_bytes, [1, -1, 0, 9, 3])
    positions = POSITIONS if skipping else None
    new = NewKeys(source, weight, bias, 0.0, block.destinations, 2 * layout.key_bytes, page.destinations, layout)
    write_keys(new, table, positions)
    kept = torch.zeros((5, layout.key_bytes), dtype=torch.uint8)
    for key, place in enumerate([1, -1, 0, 9, 3]):
        kept[key] = page.stored[place] if place >= 0 else block.stored[ORDER[key] + 2]
    assert block.holds(kept, shifted=2)
    assert page.holds(kept)
    if skipping:
        assert not bool(kept[0].any())
        exact[0] = 0
    close = 1e-5 if layout.encoding == "f32" else 2**-8
    assert bool(((unpack_keys(kept, layout) - exact).abs() <= close * exact.abs() + 1e-5).all())
    assert not bool(kept[:, layout.width * (4 if layout.encoding == "f32" else 2) :].any())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_row_stays_visible_but_for_one_left_out(value: float) -> None:
    """A value that is not finite spoils its own row, key and no other; at position 0 it is not kept."""
    weight, table = torch.ones(77), table_of(torch.tensor([0, 5, 9]), 6)
    projected = torch.ones(3, 83)
    projected[:2, 80], projected[:2, 7] = value, value
    shelf, layout = Shelf(LAYOUTS[1].row_bytes, [0, 1, 2], 3), LAYOUTS[1]
    write_rows(NewRows(projected, weight, 1e-6, shelf.destinations, 0, layout), table, torch.tensor([0, 5, 9]))
    latent, rope = unpack_rows(shelf.stored, layout)
    assert latent.isfinite().all(-1).tolist() == [True, False, True]
    assert rope.isfinite().all(-1).tolist() == [True, False, True]
    assert not bool(shelf.stored[0].any())
    keys, block, page = KeyLayout("f32", 83), Shelf(336, [0, 1, 2], 3), Shelf(336, [2, 1, 0], 3)
    new = NewKeys(projected, torch.ones(83), torch.zeros(83), 1e-6, block.destinations, 0, page.destinations, keys)
    write_keys(new, table, torch.tensor([0, 5, 9]))
    assert unpack_keys(block.stored, keys).isfinite().all(-1).tolist() == [True, False, True]
    assert torch.equal(page.stored.flip(0), block.stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_operations_one_after_another(dtype: torch.dtype) -> None:
    """Norm, rotation and packing called apart give the same bytes, at the model's widths and in its dtype."""
    projected, weight, table = drawn(5, 576, seed=1).to(dtype), drawn(512, seed=2).to(dtype), table_of(POSITIONS, 64, dtype)
    shelf = Shelf(GLM.row_bytes, [0, 1, 2, 3, 4], 5)
    write_rows(NewRows(projected, weight, 1e-6, shelf.destinations, 0, GLM), table)
    assert shelf.holds(pack_rows(rms_norm(projected[:, :512], weight, 1e-6), rotate(projected[:, 512:], *table), GLM))
    source, scale, bias = (part.to(dtype) for part in (drawn(5, 128, seed=3), drawn(128, seed=4), drawn(128, seed=5)))
    block, page = Shelf(256, [0, 1, 2, 3, 4], 5), Shelf(256, [4, 3, 2, 1, 0], 5)
    write_keys(NewKeys(source, scale, bias, 1e-6, block.destinations, 0, page.destinations, KEYS[0]), table)
    normed = layer_norm(source, scale, bias, 1e-6)
    packed = pack_keys(torch.cat((rotate(normed[:, :64], *table), normed[:, 64:]), 1), KEYS[0])
    assert block.holds(packed)
    assert page.holds(packed)


class Layer:
    """One layer's products side by side, as one product makes them, with shelves for what is written of them."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", sizes: tuple[int, int, int, int] = (2048, 576, 128, 32)) -> None:
        query, row, key, heads = sizes
        self.made = drawn(5, query + row + key + heads, seed=1).to(dtype).to(device).split(sizes, 1)
        self.layout, self.keys = RowLayout("q8g64", row - 64, 64), KeyLayout("bf16", key)
        self.weights = [drawn(size, seed=size).to(dtype).to(device) for size in (query, row - 64, key, key + 1)]
        table = table_of(POSITIONS, 64, dtype)
        self.table = table[0].to(device), table[1].to(device)
        self.shelf = Shelf(self.layout.row_bytes, ORDER, device=device)
        self.block, self.page = (Shelf(self.keys.key_bytes, order, device=device) for order in (ORDER, [1, -1, 0, 9, 3]))

    def rows(self) -> NewRows:
        return NewRows(self.made[1], self.weights[1], 1e-6, self.shelf.destinations, self.layout.row_bytes, self.layout)

    def new_keys(self) -> NewKeys:
        to, pages = self.block.destinations, self.page.destinations
        return NewKeys(self.made[2], self.weights[2], self.weights[3][:-1], 1e-6, to, 2 * self.keys.key_bytes, pages, self.keys)

    def write(self, full: bool, copies: Tensor | None = None, copies_offset: int = 0) -> tuple[Tensor, Tensor | None]:
        rows = replace(self.rows(), copies=copies, copies_offset_bytes=copies_offset)
        return write_layer(
            self.made[0], self.weights[0], 1e-5, rows, self.new_keys() if full else None, self.made[3] if full else None, self.table
        )

    def stored(self) -> list[Tensor]:
        return [each.stored.cpu() for each in (self.shelf, self.block, self.page)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("full", [False, True])
def test_a_layer_is_written_as_its_parts_are(dtype: torch.dtype, full: bool) -> None:
    """Cuts of one wide product: row and key as written apart, the latent normed, head weights widened; a shared layer has no key."""
    together, apart = Layer(dtype), Layer(dtype)
    latent, heads = together.write(full)
    write_rows(apart.rows(), apart.table)
    if full:
        write_keys(apart.new_keys(), apart.table)
        assert heads is not None
        assert heads.dtype == torch.float32
        assert torch.equal(heads, apart.made[3].float())
    else:
        assert heads is None
    for got, wanted in zip(together.stored(), apart.stored(), strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(latent, rms_norm(apart.made[0], apart.weights[0], 1e-5))
    assert latent.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("full", [False, True])
def test_copies_of_a_row_are_the_row(dtype: torch.dtype, full: bool) -> None:
    """Further addresses of each row, none of them for some and all of them for others, get its bytes too, and nothing else is touched."""
    layer = Layer(dtype)
    orders = [[7, -1, 3, 1, -1], [9, -1, -1, 6, 0]]
    shelves = [Shelf(layer.rows().layout.row_bytes, order) for order in orders]
    copies = torch.stack([shelf.destinations for shelf in shelves], 1)
    layer.write(full, copies, 2 * layer.rows().layout.row_bytes)
    plain = Layer(dtype)
    plain.write(full)
    for got, wanted in zip(layer.stored(), plain.stored(), strict=True):
        assert torch.equal(got, wanted)
    whole = replace(plain.rows(), destinations=(everywhere := Shelf(layer.rows().layout.row_bytes, list(range(5)))).destinations)
    write_rows(replace(whole, offset_bytes=0), plain.table)
    for shelf in shelves:
        assert shelf.holds(everywhere.stored[:5], shifted=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("sizes", [(2048, 576, 128, 32), (33, 96, 72, 12)])
def test_a_card_writes_a_layer_near_the_cpu(dtype: torch.dtype, full: bool, sizes: tuple[int, int, int, int]) -> None:
    """Latents, keys and rows agree to their roundings (a row's to a step of its scale), head weights to the bit; the rest is untouched."""
    here, there = Layer(dtype, sizes=sizes), Layer(dtype, "cuda", sizes)
    wanted, got = here.write(full), there.write(full)
    error = (got[0].cpu().float() - wanted[0].float()).abs()
    assert bool((error <= (1e-5 if dtype == torch.float32 else 2**-6) * wanted[0].float().abs() + 1e-6).all())
    if full:
        assert wanted[1] is not None
        assert got[1] is not None
        assert torch.equal(got[1].cpu(), wanted[1])
    for kept, expected in zip(there.stored(), here.stored(), strict=True):
        assert torch.equal((kept != UNTOUCHED).any(1), (expected != UNTOUCHED).any(1))
    live = [place + 1 for place in ORDER if place >= 0]
    rows = [unpack_rows(each.stored()[0][live], each.layout) for each in (there, here)]
    scale = rows[1][0].abs().unflatten(1, (-1, 64 if sizes[1] > 128 else 32)).amax(2).amax(1)[:, None] / 127
    assert bool(((rows[0][0] - rows[1][0]).abs() <= 1.1 * scale + 2**-7 * rows[1][0].abs()).all())
    assert bool(((rows[0][1] - rows[1][1]).abs() <= 2**-6 * (rows[1][1].abs() + 1)).all())
    if full:
        live = [place + 2 for place in ORDER if place >= 0]
        keys = [unpack_keys(each.stored()[1][live], each.keys) for each in (there, here)]
        assert bool(((keys[0] - keys[1]).abs() <= 2**-6 * (keys[1].abs() + 1)).all())


def every_second(device: str) -> None:
    """Assert that rows, keys, addresses, positions and table rows that lie two apart are written as if they lay side by side."""
    layout, key, positions = RowLayout("f32", 32, 8), KeyLayout("f32", 16), torch.arange(9).to(device)
    table = table_of(positions.cpu(), 8)
    table = table[0].to(device), table[1].to(device)
    made, weight = drawn(9, 56, seed=1).to(device), drawn(33, seed=2).to(device)
    stored = []
    for apart in (True, False):

        def picked(values: Tensor, apart: bool = apart) -> Tensor:
            return values[::2] if apart else values[::2].contiguous()

        shelf, block, page = (Shelf(size, list(range(9)), device=device) for size in (layout.row_bytes, key.key_bytes, key.key_bytes))
        turning = picked(table[0]), picked(table[1])
        rows = NewRows(picked(made[:, :40]), weight[:32], 1e-6, picked(shelf.destinations), 0, layout)
        to, pages = picked(block.destinations), page.destinations[::2] if apart else page.destinations[::2].contiguous()
        write_rows(rows, turning, picked(positions))
        write_keys(NewKeys(picked(made[:, 40:]), weight[:16], weight[17:], 1e-6, to, 0, pages, key), turning, positions[::2])
        stored.append(torch.cat([each.stored for each in (shelf, block, page)], 1))
    assert torch.equal(*stored)
    assert (stored[0] != UNTOUCHED).any(1).tolist() == [True, False] * 4 + [True] + [False] * 3


def test_rows_may_lie_apart() -> None:
    """Every second row of larger tensors is written like rows side by side, and none of those between."""
    every_second("cpu")


@pytest.mark.gpu
def test_rows_of_a_card_may_lie_apart() -> None:
    """A card finds every second row, address and position too, also where only some of them lie apart."""
    every_second("cuda")


def test_no_rows_is_fine() -> None:
    """Nothing projected, nothing stored."""
    none, table = torch.zeros(0, dtype=torch.int64), table_of(torch.zeros(0, dtype=torch.int64), 64)
    rows = NewRows(torch.zeros(0, 576), torch.ones(512), 1e-6, none, 0, GLM)
    keys = NewKeys(torch.zeros(0, 128), torch.ones(128), torch.ones(128), 1e-6, none, 0, none, KEYS[0])
    write_rows(rows, table, none)
    write_keys(keys, table, none)
    latent, heads = write_layer(torch.zeros(0, 40), torch.ones(40), 1e-6, rows, keys, torch.zeros(0, 3), table)
    assert latent.shape == (0, 40)
    assert heads is not None
    assert heads.shape == (0, 3)


def test_a_device_without_a_kernel_is_refused() -> None:
    """A tensor that is in no memory raises NoKernel naming operation and device."""
    table = tuple(part.to("meta") for part in table_of(POSITIONS, 64))
    with pytest.raises(NoKernel, match="write_rows has no kernel for device meta"):
        write_rows(NewRows(torch.zeros(5, 576, device="meta"), torch.ones(512), 1e-6, POSITIONS, 0, GLM), table)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "key"), [(GLM, KEYS[0]), (RowLayout("bf16", 512, 64), KEYS[0]), (RowLayout("f32", 32, 8), KeyLayout("f32", 16))]
)
@pytest.mark.parametrize("skipping", [False, True])
def test_a_card_stores_the_same_rows(dtype: torch.dtype, layout: RowLayout, key: KeyLayout, skipping: bool) -> None:
    """Latents of exact norm give the CPU's bytes, drawn keys its values to a rounding; a row has the same bytes alone and among 64."""
    rows, rope = 65, layout.rope
    places, positions = list(range(rows)), torch.arange(rows) * 16_131
    table = table_of(positions, rope, dtype)
    projected = torch.cat((signs(rows, layout.latent, seed=1), drawn(rows, rope, seed=2)), 1).to(dtype)
    weight = drawn(layout.latent, seed=3).to(dtype)
    source, scale, bias = (part.to(dtype) for part in (drawn(rows, key.width, seed=4), drawn(key.width, seed=5), drawn(key.width, seed=6)))
    stored = []
    for device, counts in (("cpu", [rows]), ("cuda", [rows]), ("cuda", [1] * rows)):
        shelf = Shelf(layout.row_bytes, places, rows + 1, device)
        blocks, pages = Shelf(key.key_bytes, places, rows + 1, device), Shelf(key.key_bytes, places, rows + 1, device)
        first = 0
        for count in counts:
            part = slice(first, first + count)
            told = (positions[part].to(device)) if skipping else None
            turning = (table[0][part].to(device), table[1][part].to(device))
            rows_there = NewRows(
                projected[part].to(device), weight.to(device), 0.0, shelf.destinations[part], layout.row_bytes, layout
            )  # fmt: skip
            write_rows(rows_there, turning, told)
            keys_there = NewKeys(
                source[part].to(device), scale.to(device), bias.to(device), 1e-6, blocks.destinations[part], 0,
                pages.destinations[part], key,
            )  # fmt: skip
            write_keys(keys_there, turning, told)
            first += count
        stored.append([part.stored.cpu() for part in (shelf, blocks, pages)])
    assert torch.equal(stored[1][0], stored[0][0])
    assert torch.equal(stored[1][1], stored[1][2])
    for together, alone in zip(stored[1], stored[2], strict=True):
        assert torch.equal(together, alone)
    got, wanted = (unpack_keys(kept[1][:rows], key) for kept in (stored[1], stored[0]))
    assert bool(((got - wanted).abs() <= (1e-5 if dtype == torch.float32 and key.encoding == "f32" else 2**-6) * (wanted.abs() + 1)).all())
