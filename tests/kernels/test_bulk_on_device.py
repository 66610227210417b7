"""What an append's rows run on a card, at the model's true widths: near the reference, the same bits again, and never a wait of the host.

Run with `-m gpu`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kernels import gather, index_score, linear, moe, quantize, select, sparse_mla
from kernels.layout import BLOCK_ROWS, KeyLayout, RowLayout
from kernels.place import BULK_ROWS

pytestmark = pytest.mark.gpu
ROWS = (BULK_ROWS + 1, 255, 257, 2048)


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    """As an engine sets them when it opens a device."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def drawn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def near(got: Tensor, wanted: Tensor, bound: float) -> None:
    """Within `bound` of the largest size in its row."""
    got, wanted = got.double().cpu(), wanted.double().cpu()
    size = wanted.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    error = float(((got - wanted).abs() / size).max())
    assert error <= bound, f"differs by {error:.3g} of its row's size, more than {bound:.3g}"


@contextmanager
def no_host_wait() -> Iterator[None]:
    """Fail when the host waits for the device; kernels must be compiled before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def again(compute: Callable[[], Tensor]) -> Tensor:
    """The result, after asserting that a repetition gives its bits and does not wait."""
    first = compute()
    with no_host_wait():
        second = compute()
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), "a repetition gives other bits"
    return first


@pytest.mark.parametrize(("outputs", "width"), [(2048, 6144), (576, 6144), (33, 100)])
def test_products_of_many_rows(outputs: int, width: int) -> None:
    """bf16, float32 and block-FP8 weights: float64's product of the exact values to the rounding of the rows' dtype."""
    weight, x = drawn(outputs, width, seed=1, scale=width**-0.5).cuda(), drawn(ROWS[-1], width, seed=2).cuda()
    scales = torch.rand(-(-outputs // 128), -(-width // 128), generator=torch.Generator().manual_seed(3)).cuda()
    fp8 = linear.BlockFp8(drawn(outputs, width, seed=4).cuda().to(torch.float8_e4m3fn), scales)
    for rows in ROWS:
        some, narrow = x[:rows], weight.bfloat16()
        near(again(lambda some=some: linear.linear(some, weight)), some.double() @ weight.double().t(), 1e-5)
        near(linear.linear(some, narrow), some.double() @ narrow.double().t(), 1e-5)
        short = some.bfloat16()
        near(again(lambda short=short, narrow=narrow: linear.linear(short, narrow)), short.double() @ narrow.double().t(), 2**-7)
        near(again(lambda short=short: linear.linear(short, fp8)), short.double() @ fp8.dequantised(torch.float64).t(), 2**-6)


def test_products_of_heads_of_many_rows() -> None:
    """A weight a head over strided rows, as the absorbed query has them."""
    query, weight = drawn(ROWS[-1], 64, 256, seed=1).cuda().bfloat16(), drawn(64, 512, 192, seed=2, scale=1 / 14).cuda().bfloat16()
    for rows in ROWS:
        x = query[:rows, :, :192]
        got = again(lambda x=x: linear.heads_linear(x, weight))
        assert got.is_contiguous()
        near(got[:200], torch.einsum("tnk,nmk->tnm", x[:200].double(), weight.double()), 2**-7)


@pytest.mark.parametrize("crowded", [False, True])
def test_experts_of_many_rows(crowded: bool) -> None:
    """Near the float32 reference, the same bits in other company, with all rows on the same experts too; unused experts are NaN."""
    hidden, width, count, slots = 1024, 512, 64, 8
    gate_up, down = drawn(count, 2 * width, hidden, seed=1, scale=hidden**-0.5), drawn(count, hidden, width, seed=2, scale=width**-0.5)
    gate_up, down = gate_up.bfloat16(), down.bfloat16()
    y, weight_of = drawn(300, hidden, seed=3).bfloat16(), drawn(300, slots, seed=4).abs()
    generator = torch.Generator().manual_seed(5)
    expert_of = torch.stack([torch.randperm(count - 1, generator=generator)[:slots] for _ in range(300)])
    if crowded:
        expert_of[:] = expert_of[0]
    idle = [expert for expert in range(count) if expert not in expert_of]
    gate_up[idle], down[idle] = float("nan"), float("nan")
    wanted = moe.experts(y.float(), expert_of, weight_of, gate_up.float(), down.float())
    card = [part.cuda() for part in (y, expert_of, weight_of, gate_up, down)]
    got = again(lambda: moe.experts(*card))
    near(got, wanted, 3e-2)
    for rows in (BULK_ROWS + 1, 255, 256, 257):
        assert torch.equal(moe.experts(*(part[:rows] for part in card[:3]), *card[3:]), got[:rows]), f"{rows} rows"
    exact = moe.experts(card[0][:140].float(), card[1][:140], card[2][:140], card[3].float(), card[4].float())
    near(exact, wanted[:140], 1e-4)


def test_dense_mlp_and_router_of_many_rows() -> None:
    """A dense MLP near the reference in float32 and bf16; the router chooses the reference's experts where no tie is near."""
    gate, up, down = drawn(512, 1024, seed=1, scale=1 / 32), drawn(512, 1024, seed=2, scale=1 / 32), drawn(1024, 512, seed=3, scale=1 / 22)
    y = drawn(257, 1024, seed=4)
    wanted = moe.gated_mlp(y, gate, up, down)
    card = [part.cuda() for part in (y, gate, up, down)]
    near(again(lambda: moe.gated_mlp(*card)), wanted, 1e-5)
    near(moe.gated_mlp(*(part.cuda().bfloat16() for part in (y, gate, up, down))), wanted, 4e-2)
    how = {"experts_per_token": 8, "groups": 1, "groups_kept": 1, "normalise": True, "factor": 2.5}
    router, bias = drawn(64, 1024, seed=5, scale=1 / 32), drawn(64, seed=6, scale=0.1)
    ids, weights = moe.route(y, router, bias, **how)  # type: ignore[arg-type]  # the keywords of `route`
    card_ids, card_weights = moe.route(y.cuda(), router.cuda(), bias.cuda(), **how)  # type: ignore[arg-type]
    same = (card_ids.cpu() == ids).all(1)
    assert float(same.float().mean()) > 0.99
    near(card_weights.cpu()[same], weights[same], 1e-5)


@pytest.mark.parametrize("encoding", ["q8g64", "bf16", "f32"])
def test_attention_of_many_rows(encoding: str) -> None:
    """64 heads, k 2,048, over a history by position whose unselected rows are NaN: the reference's, and the decode kernel's closely."""
    from kernels.sparse_mla import kernel

    layout = RowLayout(encoding, 512, 64)  # type: ignore[arg-type]  # one of the three
    positions, rows, checked = 6000, 300, [0, 1, 2, 3, 130, 299]
    history = quantize.pack_rows(drawn(positions, 512, seed=1), drawn(positions, 64, seed=2), layout)
    generator = torch.Generator().manual_seed(3)
    selection = torch.full((rows, 2048), -1, dtype=torch.int32)
    for row in range(rows):
        used = (0, 1, 2048, 65, 2047)[row] if row < 5 else 2048
        selection[row, :used] = torch.randperm(positions // 2, generator=generator)[:used].sort().values.int() * 2
    history[1::2] = 0xFF
    latent, turned = drawn(rows, 64, 512, seed=4, scale=0.3), drawn(rows, 64, 64, seed=5)
    wanted = sparse_mla.sparse_mla_packed(latent[checked], turned[checked], history, selection[checked], layout, 0.0625)
    card = history.cuda(), selection.cuda()
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 2**-6)):
        query = latent.cuda().to(dtype), turned.cuda().to(dtype)
        got = again(lambda query=query: sparse_mla.sparse_mla_packed(*query, *card, layout, 0.0625))
        near(got[checked].flatten(1), wanted.flatten(1), bound)
        assert bool((got[0] == 0).all())
        few = kernel.sparse_mla_packed(query[0][:100], query[1][:100], card[0], card[1][:100], layout, 0.0625)
        near(got[1:100].flatten(1), few[1:].flatten(1), 1e-5 if dtype == torch.float32 else 2**-6)


def test_scores_and_selections_of_a_tile() -> None:
    """64 query rows over paged bf16 keys and NaN past the last: scores near the reference; each row's choice ends at its own position."""
    rows, keys, k, layout = 64, 50_023, 2048, KeyLayout("bf16", 128)
    count = -(-keys // 1024)
    pages = drawn(count, 1024, 128, seed=1).bfloat16()
    pages.view(-1, 128)[keys:] = float("nan")
    query, weights = drawn(rows, 32, 128, seed=2).bfloat16(), drawn(rows, 32, seed=3)
    card = pages.cuda()
    there = torch.tensor([page.data_ptr() for page in card]).cuda()
    got = torch.empty((rows, count * 1024), device="cuda")
    index_score.index_scores(query.cuda(), weights.cuda(), there, keys, layout, got)
    wanted = torch.empty((8, count * 1024))
    index_score.index_scores(query[:8], weights[:8], torch.tensor([page.data_ptr() for page in pages]), keys, layout, wanted)
    near(got[:8, :keys], wanted[:, :keys], 1e-4)
    first, last = torch.zeros(rows, dtype=torch.int64), keys - rows + 1 + torch.arange(rows)
    chosen, expected = torch.empty((rows, k), dtype=torch.int32, device="cuda"), torch.empty((rows, k), dtype=torch.int32)
    select.select(got, first.cuda(), last.cuda(), k, chosen)
    select.select(got.cpu(), first, last, k, expected)
    assert torch.equal(chosen.cpu(), expected)


def test_rows_are_stored_gathered_and_unpacked_by_the_thousand() -> None:
    """70,000 rows, more than a launch's second or third extent may be: the reference's bytes in their places, and their values again."""
    layout, rows = RowLayout("q8g64", 512, 64), 70_000
    latent, turned = drawn(rows, 512, seed=1), drawn(rows, 64, seed=2)
    wanted = quantize.pack_rows(latent, turned, layout)
    blocks = -(-rows // BLOCK_ROWS)
    memory = torch.full((blocks, 2, BLOCK_ROWS, layout.row_bytes), 0xEE, dtype=torch.uint8, device="cuda")
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).cuda()
    addresses = memory.data_ptr() + order * (2 * BLOCK_ROWS * layout.row_bytes)
    position, offset = torch.arange(rows, device="cuda"), BLOCK_ROWS * layout.row_bytes
    destinations = addresses[position // BLOCK_ROWS] + position % BLOCK_ROWS * layout.row_bytes
    quantize.append_rows(latent.cuda(), turned.cuda(), destinations, offset, layout)
    out = torch.empty((rows, layout.row_bytes), dtype=torch.uint8, device="cuda")
    gather.gather_blocks(addresses, offset, rows, layout.row_bytes, out)
    assert torch.equal(out.cpu(), wanted)
    assert bool((memory[:, 0] == 0xEE).all())
    for got, expected in zip(quantize.unpack_rows(out, layout), quantize.unpack_rows(wanted, layout), strict=True):
        assert torch.equal(got.cpu(), expected)
    keys, key = drawn(rows, 128, seed=4), KeyLayout("bf16", 128)
    stored = torch.zeros((rows, key.key_bytes), dtype=torch.uint8, device="cuda")
    quantize.append_keys(keys.cuda(), stored.data_ptr() + position.flip(0) * key.key_bytes, 0, key)
    assert torch.equal(stored.cpu().flip(0), quantize.pack_keys(keys, key))
