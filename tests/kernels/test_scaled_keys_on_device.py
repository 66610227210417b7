"""e4m3 index keys on a card: the reference's bytes, every code in the scores, and the same bits in any company."""

import pytest
import torch
from torch import Tensor

from kernels.index_score import index_scores
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, KeyLayout, TableField, TableLayout
from kernels.quantize import append_keys, pack_keys, stored_keys, unpack_keys

pytestmark = pytest.mark.gpu
GLM = KeyLayout("e4m3", 128)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def paged(keys: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Pages that hold the keys, NaN codes and scales behind them, and their addresses."""
    pages = -(-keys.shape[0] // PAGE_KEYS)
    store = torch.full((pages, GLM.page_bytes), 0xFF, dtype=torch.uint8, device=device)
    key = torch.arange(keys.shape[0], device=device)
    to = store.data_ptr() + key // BLOCK_ROWS * GLM.run_bytes + key % BLOCK_ROWS
    append_keys(keys.to(device), to, 0, GLM)
    return store, store.data_ptr() + torch.arange(pages, device=device) * GLM.page_bytes


@pytest.mark.parametrize("layout", [GLM, KeyLayout("e4m3", 37)])
def test_bytes_are_the_references(layout: KeyLayout) -> None:
    """Any bits of float32, and values of any magnitude: packed, stored and unpacked as on the CPU."""
    keys = torch.randint(-(2**31), 2**31 - 1, (256, layout.width), generator=torch.Generator().manual_seed(1)).int().view(torch.float32)
    keys[:128] = drawn(128, layout.width, seed=2) * torch.logspace(-41, 38, 128)[:, None]
    wanted = pack_keys(keys, layout)
    assert torch.equal(pack_keys(keys.cuda(), layout).cpu(), wanted)
    got, values = unpack_keys(wanted.cuda(), layout).cpu(), unpack_keys(wanted, layout)
    assert torch.equal(got.isnan(), values.isnan())
    assert torch.equal(got.nan_to_num(7.0), values.nan_to_num(7.0))
    run = torch.zeros(4 * layout.run_bytes, dtype=torch.uint8, device="cuda")
    key = torch.arange(256, device="cuda").flip(0)
    append_keys(keys.cuda(), run.data_ptr() + key // 64 * layout.run_bytes + key % 64, 0, layout)
    assert torch.equal(stored_keys(run.cpu(), layout).flip(0), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_every_code_scores_exactly(rows: int, dtype: torch.dtype) -> None:
    """One key a code, asked for by a query of 1 there and heads of both signs: the code's value times its scale, NaN for the NaN codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    store = torch.zeros((16, GLM.run_bytes), dtype=torch.uint8)
    for key, code in enumerate(codes.tolist()):
        store[key // 64, key % 64 * 128 + 77] = code
        store[key // 64, 64 * 128 + 4 * (key % 64) :][:4] = torch.tensor([0.75]).view(torch.uint8)
    card = store.cuda()
    query = torch.zeros((rows, 2, 128), dtype=dtype, device="cuda")
    query[:, 0, 77], query[:, 1, 77] = 16.0, -16.0
    weights = torch.tensor([[2.0**0.5, -(2.0**0.5)]], device="cuda").expand(rows, 2).contiguous()
    out = torch.zeros((rows, PAGE_KEYS), device="cuda")
    index_scores(query, weights, torch.tensor([card.data_ptr()], device="cuda"), 256, GLM, out)
    values = codes.view(torch.float8_e4m3fn).float() * 0.75 * 16 * 128**-0.5
    got = out[:, :256].cpu()
    assert torch.equal(got.isnan(), values.isnan().expand(rows, 256))
    near = (got - values).abs() <= 2**-21 * values.abs()
    assert bool((near | values.isnan()).all())


def test_scores_follow_the_reference_in_any_company() -> None:
    """5,000 keys of any magnitude and NaN behind them: near the CPU; rows alone, in groups and through places have the same bits."""
    keys = drawn(5_000, 128, seed=1) * torch.logspace(-3, 3, 5_000)[:, None]
    query, weights = drawn(8, 32, 128, seed=2).bfloat16(), drawn(8, 32, seed=3)
    (kept, there), (card, pages) = paged(keys, "cpu"), paged(keys, "cuda")
    assert torch.equal(card.cpu(), kept)
    wanted = torch.empty((8, 5 * PAGE_KEYS))
    index_scores(query, weights, there, 5_000, GLM, wanted)
    asked = query.cuda(), weights.cuda()
    alone = torch.empty((8, 5 * PAGE_KEYS), device="cuda")
    for row in range(8):
        index_scores(asked[0][row : row + 1], asked[1][row : row + 1], pages, 5_000, GLM, alone[row : row + 1])
    scale = wanted[:, :5_000].abs().amax(0)
    assert bool(((alone[:, :5_000].cpu() - wanted[:, :5_000]).abs() <= 1e-4 * scale).all())
    for count in (2, 3, 4, 5, 8):
        beside = torch.empty((count, 5 * PAGE_KEYS), device="cuda")
        index_scores(asked[0][:count], asked[1][:count], pages, 5_000, GLM, beside)
        assert torch.equal(beside[:, :5_000], alone[:count, :5_000]), f"{count} rows"
    from kernels.index_score.kernel import score_places

    table = torch.zeros((3, TableLayout(1).fields), dtype=torch.int64)
    table[:, TableField.ROWS], table[:, TableField.PAGES], table[:, TableField.PAGES_MAX] = 4, pages.data_ptr(), 5
    place_of = torch.tensor([2, 0, -1, 2, 1, 0, 2, 2], dtype=torch.int32)
    positions = torch.tensor([4_999, 63, 9, 64, 1_024, 1_023, 0, 4_000])
    placed = torch.full((8, 5 * PAGE_KEYS), 7.0, device="cuda")
    score_places(table.cuda(), 0, place_of.cuda(), positions.cuda(), *asked, GLM, placed)
    for row, (place, position) in enumerate(zip(place_of.tolist(), positions.tolist(), strict=True)):
        seen = position + 1 if place >= 0 else 0
        assert torch.equal(placed[row, :seen], alone[row, :seen])
        assert bool((placed[row, seen:] == 7.0).all())
