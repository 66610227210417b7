"""Every Triton kernel on a card against its torch reference on the CPU, at the model's true widths where that is quick.

Copies, maps and selections bit for bit; arithmetic within the bound beside it. Run with `-m gpu`.
"""

import itertools

import pytest
import torch
from torch import Tensor

from kernels import gather, index_query, index_score, linear, moe, norm, quantize, rope, select, sparse_mla
from kernels.layout import KeyLayout, RowLayout, TableField
from kernels.round import RoundPlan, begin_round, clear_round, plan_round, unmap_from
from kernels.round import reference as round_reference
from kernels.selection import Scratch, choose_rows, select_places
from memory.hot import HotCache
from memory.table import StepTable
from tests.kernels.round_world import LAYOUT, ROW_BYTES, TABLE_LAYOUT, PlainSession, Step
from tests.kernels.score_digits import digit_counts

pytestmark = pytest.mark.gpu
COUNTS = (1, 2, 3, 4, 8, 16, 64)


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    """The reference is float32; a card's default tensor-core mode is not."""
    torch.backends.cuda.matmul.allow_tf32 = False


def drawn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def near(got: Tensor, wanted: Tensor, bound: float) -> None:
    """Within `bound` of the largest size in its row."""
    got, wanted = got.double().cpu(), wanted.double().cpu()
    size = wanted.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    error = float(((got - wanted).abs() / size).max())
    assert error <= bound, f"differs by {error:.3g} of its row's size, more than {bound:.3g}"


@pytest.mark.parametrize(
    ("outputs", "width"),
    [(2048, 6144), (576, 6144), (16384, 2048), (4096, 2048), (128, 6144), (32, 6144), (6144, 16384), (256, 6144), (33, 100)],
)
def test_products_are_exact_and_alone(outputs: int, width: int) -> None:
    """bf16 rows and weights: float64's product to bf16 rounding, and the same bits for a row in any company."""
    weight = drawn(outputs, width, seed=1, scale=width**-0.5).bfloat16()
    rows = drawn(64, width, seed=2).bfloat16()
    wanted = rows.double() @ weight.double().T
    whole = linear.linear(rows.cuda(), weight.cuda())
    near(whole, wanted, 2**-7)
    for count in COUNTS:
        assert torch.equal(linear.linear(rows[:count].cuda(), weight.cuda()), whole[:count]), f"{count} rows"


def test_norms_and_rotation_follow_the_reference() -> None:
    """RMS norm, LayerNorm and RoPE of float32 rows agree with the CPU to float32 rounding, at position a million too."""
    x, weight, bias = drawn(17, 6144, seed=1), drawn(6144, seed=2), drawn(6144, seed=3)
    near(norm.rms_norm(x.cuda(), weight.cuda(), 1e-5), norm.rms_norm(x, weight, 1e-5), 1e-6)
    near(norm.layer_norm(x.cuda(), weight.cuda(), bias.cuda(), 1e-6), norm.layer_norm(x, weight, bias, 1e-6), 1e-5)
    positions = torch.tensor([0, 1, 64, 131_071, 1_048_575])
    frequencies = rope.rope_frequencies(8e6, 64)
    cos, sin = rope.rope_table(positions, frequencies, torch.float32)
    card = rope.rope_table(positions.cuda(), frequencies.cuda(), torch.float32)
    near(card[0], cos, 1e-5)
    near(card[1], sin, 1e-5)
    heads = drawn(5, 8, 64, seed=4)
    near(rope.rotate(heads.cuda(), cos.cuda(), sin.cuda()).flatten(1), rope.rotate(heads, cos, sin).flatten(1), 1e-6)


@pytest.mark.parametrize("encoding", ["q8g64", "bf16", "f32"])
def test_packed_rows_are_the_references_bytes(encoding: str) -> None:
    """Packing gives the same bytes as on the CPU, unpacking the same values, at GLM's widths."""
    layout = RowLayout(encoding, 512, 64)  # type: ignore[arg-type]  # one of the three
    latent, turned = drawn(65, 512, seed=1), drawn(65, 64, seed=2)
    latent[3] = 0
    packed = quantize.pack_rows(latent, turned, layout)
    assert torch.equal(quantize.pack_rows(latent.cuda(), turned.cuda(), layout).cpu(), packed)
    for got, wanted in zip(quantize.unpack_rows(packed.cuda(), layout), quantize.unpack_rows(packed, layout), strict=True):
        assert torch.equal(got.cpu(), wanted)


def test_rows_are_gathered_from_registered_memory() -> None:
    """Rows in pinned host memory, read by address from the card, arrive byte for byte; address 0 gives a zero row."""
    row_bytes = 656
    mirror = torch.randint(0, 256, (70_000, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)).pin_memory()
    picks = torch.randint(0, 70_000, (2048,), generator=torch.Generator().manual_seed(4))
    addresses = mirror.data_ptr() + picks * row_bytes
    addresses[7] = 0
    out = torch.full((2048, row_bytes), 0xEE, dtype=torch.uint8, device="cuda")
    gather.gather_rows(addresses.cuda(), row_bytes, out)
    wanted = mirror[picks].clone()
    wanted[7] = 0
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize(
    ("rows", "keys", "k"), [(1, 1_048_576, 2048), (4, 131_072, 2048), (3, 2049, 2048), (2, 2048, 2048), (2, 100, 2048)]
)
def test_selections_are_exact(rows: int, keys: int, k: int) -> None:
    """The k largest, ties to the lower position, ascending: the CPU's selection, with thousands of ties at the cut."""
    scores = (drawn(rows, keys, seed=keys) * 8).round() / 8
    first, last = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), keys)
    last[-1] = max(1, keys - 5)
    wanted, got = torch.empty((rows, k), dtype=torch.int32), torch.full((rows, k), 77, dtype=torch.int32, device="cuda")
    select.select(scores, first, last, k, wanted)
    select.select(scores.cuda(), first.cuda(), last.cuda(), k, got)
    assert torch.equal(got.cpu(), wanted)


def test_selections_are_exact_in_every_digit() -> None:
    """Scores that are tiny, huge, negative, alike, not numbers or of any bits, in rows of a part of the buffer: the CPU's selection."""
    rows, keys, k = 4, 50_000, 2048
    normal = drawn(rows, keys, seed=5)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (rows, keys), generator=torch.Generator().manual_seed(6)).int().view(torch.float32)
    mostly_nan = torch.where(torch.arange(keys) % 32 == 0, normal, torch.nan)
    alike, zero = torch.full((rows, keys), 1.5), normal.clamp_max(0.0)
    first, last = torch.tensor([0, 1, 5_000, keys - 9]), torch.tensor([keys, keys - 3, 40_000, keys])
    for scores in (normal + 10, normal * 1e-9, normal * 1e30, -normal.abs() - 1e-3, any_bits, mostly_nan, alike, -zero):
        wanted, got = torch.empty((rows, k), dtype=torch.int32), torch.full((rows, k), 77, dtype=torch.int32, device="cuda")
        select.select(scores, first, last, k, wanted)
        select.select(scores.cuda(), first.cuda(), last.cuda(), k, got)
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize(("sessions", "rows"), [(1, 1), (1, 4), (3, 2)])
def test_step_selections_are_those_of_their_scores(sessions: int, rows: int) -> None:
    """Scored and selected through the step table, twice in a scratch of each form: the reference's choice among the scores left there."""
    layout, count, keys = KeyLayout("bf16", 128), sessions * rows, 5_000
    table = torch.zeros((sessions, TABLE_LAYOUT.fields), dtype=torch.int64)
    pages = drawn(sessions, 5, 1024, 128, seed=1).bfloat16().cuda()
    addresses = pages.data_ptr() + torch.arange(5 * sessions, device="cuda") * layout.page_bytes
    table[:, TableField.ROWS], table[:, TableField.PAGES_MAX] = rows, 5
    table[:, TableField.PAGES] = addresses.data_ptr() + torch.arange(sessions) * 5 * 8
    place_of = torch.arange(count, dtype=torch.int32) % sessions
    positions = keys - 1 - torch.arange(count) * 300
    scratches = [Scratch.of(count, 8192, torch.device("cuda"), form) for form in ("counted", "chunks")]
    for scratch, seed in itertools.product(scratches, (3, 4)):
        query, weights = drawn(count, 32, 128, seed=seed).bfloat16(), drawn(count, 32, seed=seed + 2)
        got = torch.full((count, 2048), 77, dtype=torch.int32, device="cuda")
        asked = place_of.cuda(), positions.cuda(), query.cuda(), weights.cuda()
        select_places(table.cuda(), 0, *asked, layout, 1, got, scratch)
        wanted = torch.empty((count, 2048), dtype=torch.int32)
        select.select(scratch.scores.cpu(), torch.ones(count, dtype=torch.int64), positions + 1, 2048, wanted)
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("keys", [2_047, 2_049, 50_003, 131_072])
def test_counted_choices_are_the_reference(keys: int) -> None:
    """Scores whose digits are given: ties at the cut, values of one digit and of either end's, and NaN, over whole and short rows."""
    rows, k, first = 4, 2048, 1
    normal = drawn(rows, keys, seed=keys)
    any_bits = torch.randint(-(2**31), 2**31 - 1, normal.shape, generator=torch.Generator().manual_seed(6)).int().view(torch.float32)
    table = torch.zeros((1, TABLE_LAYOUT.fields), dtype=torch.int64)
    table[0, TableField.ROWS] = rows
    last = torch.tensor([keys, keys - 7, keys // 2, 1])
    scratch = Scratch.of(rows, 131_072, torch.device("cuda"), "counted")
    assert scratch.counts is not None
    ties, mostly_nan = (normal * 8).round() / 8, torch.where(torch.arange(keys) % 32 == 0, normal, torch.nan)
    for scores in (normal, ties, normal + 100, -normal.abs() - 1e-3, normal * 1e30, any_bits, mostly_nan, torch.full_like(normal, 1.5)):
        scratch.scores[:, :keys].copy_(scores)
        scratch.counts.zero_()
        scratch.counts[:, :512].copy_(torch.stack([digit_counts(scores[row, first : last[row]]) for row in range(rows)]))
        got, wanted = torch.full((rows, k), 77, dtype=torch.int32, device="cuda"), torch.empty((rows, k), dtype=torch.int32)
        choose_rows(table.cuda(), torch.zeros(rows, dtype=torch.int32).cuda(), last.cuda() - 1, first, got, scratch)
        select.select(scores, torch.full_like(last, first), last, k, wanted)
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("rows", COUNTS)
def test_index_queries_in_one_launch_have_the_bits_of_two(rows: int) -> None:
    """At the model's shapes a product with the rotation in it is the product, rotated; scratch that is to be zero is."""
    latent, weight = drawn(rows, 2048, seed=1).bfloat16().cuda(), drawn(4096, 2048, seed=2, scale=0.02).bfloat16().cuda()
    table = rope.rope_table(torch.arange(rows).cuda() * 9973, rope.rope_frequencies(8e6, 64).cuda(), torch.bfloat16)
    cleared = torch.full((rows, 544), 77, dtype=torch.int32, device="cuda")
    assert index_query.one_launch(latent, weight, 128)
    got = index_query.index_query(latent, weight, 128, *table, cleared)
    wanted = rope.rotate_first(linear.linear(latent, weight).view(rows, -1, 128), *table)
    assert torch.equal(got, wanted)
    assert not bool(cleared.any())


@pytest.mark.parametrize("rows", [1, 4])
def test_index_scores_follow_the_reference(rows: int) -> None:
    """Scores over paged bf16 keys agree with the CPU; NaN in unused keys of the last page harms nobody."""
    keys, layout = 5000, KeyLayout("bf16", 128)
    pages = drawn(5, 1024, 128, seed=1).bfloat16()
    pages[-1, 5000 - 4096 :] = float("nan")
    query, weights = drawn(rows, 32, 128, seed=2), drawn(rows, 32, seed=3)
    wanted = torch.empty((rows, 5 * 1024))
    addresses = torch.tensor([page.data_ptr() for page in pages])
    index_score.index_scores(query, weights, addresses, keys, layout, wanted)
    card = pages.cuda()
    got = torch.empty((rows, 5 * 1024), device="cuda")
    there = torch.tensor([page.data_ptr() for page in card], device="cuda")
    index_score.index_scores(query.cuda(), weights.cuda(), there, keys, layout, got)
    near(got[:, :keys], wanted[:, :keys], 1e-4)


def test_a_row_has_the_same_scores_beside_any_number_of_rows() -> None:
    """Groups of one, two and four rows share a product and no bit of a row's scores follows, by pages or through a step table's places."""
    layout, keys = KeyLayout("bf16", 128), 3 * 1024
    page = drawn(keys, 128, seed=1).bfloat16().cuda()
    pages = page.data_ptr() + torch.arange(3, device="cuda") * layout.page_bytes
    query, weights = drawn(8, 32, 128, seed=2).bfloat16().cuda(), drawn(8, 32, seed=3).cuda()
    alone = torch.empty((8, keys), device="cuda")
    for row in range(8):
        index_score.index_scores(query[row : row + 1], weights[row : row + 1], pages, keys, layout, alone[row : row + 1])
    for count in (2, 3, 4, 5, 8):
        beside = torch.empty((count, keys), device="cuda")
        index_score.index_scores(query[:count], weights[:count], pages, keys, layout, beside)
        assert torch.equal(beside, alone[:count]), f"{count} rows"


def test_a_router_chooses_alike_in_any_company() -> None:
    """bf16 rows by a float32 gate: float64's experts, and the same bits of the weights alone and among 1 to 64 rows."""
    y, gate, bias = drawn(64, 6144, seed=1).bfloat16().cuda(), drawn(64, 6144, seed=2, scale=6144**-0.5).cuda(), drawn(64, seed=3).cuda()
    how = {"experts_per_token": 8, "groups": 1, "groups_kept": 1, "normalise": True, "factor": 2.5}
    ids, weights = moe.route(y, gate, bias, **how)  # type: ignore[arg-type]  # the keywords of `route`
    wanted = ((y.double() @ gate.double().T).sigmoid() + bias.double()).topk(8).indices
    assert torch.equal(ids.sort().values, wanted.sort().values)
    for count in COUNTS:
        some_ids, some_weights = moe.route(y[:count], gate, bias, **how)  # type: ignore[arg-type]  # the keywords of `route`
        assert torch.equal(some_ids, ids[:count]), f"{count} rows"
        assert torch.equal(some_weights, weights[:count]), f"{count} rows"


@pytest.mark.parametrize("width", [2048, 12288])
def test_a_dense_mlp_is_near_and_alone(width: int) -> None:
    """Gate, up and activation in one launch, bf16: near float32, and the same bits for a row in any company."""
    gate, up = (drawn(width, 6144, seed=seed, scale=6144**-0.5).bfloat16().cuda() for seed in (1, 2))
    down, y = drawn(6144, width, seed=3, scale=width**-0.5).bfloat16().cuda(), drawn(64, 6144, seed=4).bfloat16().cuda()
    whole = moe.gated_mlp(y, gate, up, down)
    activated = torch.nn.functional.silu(y.float() @ gate.float().T) * (y.float() @ up.float().T)
    near(whole, activated @ down.float().T, 2e-2)
    for count in COUNTS:
        assert torch.equal(moe.gated_mlp(y[:count], gate, up, down), whole[:count]), f"{count} rows"


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_attention_of_bf16_queries_is_alone(rows: int) -> None:
    """bf16 queries over q8g64 rows: float32 torch on the card to bf16 rounding, and a row's bits in any company."""
    layout = RowLayout("q8g64", 512, 64)
    packed = quantize.pack_rows(drawn(rows * 2048, 512, seed=1), drawn(rows * 2048, 64, seed=2), layout).view(rows, 2048, -1).cuda()
    selection = torch.arange(2048, dtype=torch.int32, device="cuda").repeat(rows, 1)
    selection[-1, 1000:] = -1
    latent, turned = drawn(rows, 64, 512, seed=3).bfloat16().cuda(), drawn(rows, 64, 64, seed=4).bfloat16().cuda()
    got = sparse_mla.sparse_mla_packed(latent, turned, packed, selection, layout, 0.0625)
    values, keys = quantize.unpack_rows(packed, layout)
    logits = torch.einsum("rhl,rpl->rhp", latent.float(), values) + torch.einsum("rhl,rpl->rhp", turned.float(), keys)
    logits = torch.where(selection[:, None] >= 0, logits * 0.0625, -torch.inf)
    near(got.flatten(1), torch.einsum("rhp,rpl->rhl", torch.softmax(logits, -1), values).flatten(1), 2**-7)
    for row in range(rows):
        alone = sparse_mla.sparse_mla_packed(
            latent[row : row + 1], turned[row : row + 1], packed[row : row + 1].contiguous(), selection[row : row + 1], layout, 0.0625
        )
        assert torch.equal(alone[0], got[row]), f"row {row}"


@pytest.mark.parametrize("encoding", ["q8g64", "bf16"])
def test_attention_over_packed_rows(encoding: str) -> None:
    """64 heads over 2,048 packed picks: the CPU's result to 1e-3, the same bits for a row alone and in company, unused picks nothing."""
    layout = RowLayout(encoding, 512, 64)  # type: ignore[arg-type]
    rows = quantize.pack_rows(drawn(4 * 2048, 512, seed=1), drawn(4 * 2048, 64, seed=2), layout).view(4, 2048, -1)
    selection = torch.arange(2048, dtype=torch.int32).repeat(4, 1)
    selection[1, 100:] = -1
    rows[1, 100:] = 0xFF
    latent, turned = drawn(4, 64, 512, seed=3), drawn(4, 64, 64, seed=4)
    wanted = sparse_mla.sparse_mla_packed(latent, turned, rows, selection, layout, 0.0625)
    card = [part.cuda() for part in (latent, turned, rows, selection)]
    got = sparse_mla.sparse_mla_packed(*card, layout, 0.0625)
    near(got.flatten(1), wanted.flatten(1), 1e-3)
    for row in range(4):
        alone = sparse_mla.sparse_mla_packed(*(part[row : row + 1].contiguous() for part in card), layout, 0.0625)
        assert torch.equal(alone[0], got[row]), f"row {row}"


def test_experts_follow_the_reference() -> None:
    """Eight of 64 experts a row, bf16: near float32 on the CPU, and the same bits in any company."""
    hidden, width, count = 1024, 512, 64
    gate_up, down = drawn(count, 2 * width, hidden, seed=1, scale=hidden**-0.5), drawn(count, hidden, width, seed=2, scale=width**-0.5)
    gate_up, down = gate_up.bfloat16(), down.bfloat16()
    y, router, bias = (
        drawn(16, hidden, seed=3).bfloat16(),
        drawn(count, hidden, seed=4, scale=hidden**-0.5),
        drawn(count, seed=5, scale=0.1),
    )
    how = {"experts_per_token": 8, "groups": 1, "groups_kept": 1, "normalise": True, "factor": 2.5}
    ids, weights = moe.route(y.float(), router, bias, **how)  # type: ignore[arg-type]  # the keywords of `route`
    card_ids, card_weights = moe.route(y.float().cuda(), router.cuda(), bias.cuda(), **how)  # type: ignore[arg-type]
    assert torch.equal(card_ids.cpu(), ids)
    near(card_weights, weights, 1e-5)
    wanted = moe.experts(y.float(), ids, weights, gate_up.float(), down.float())
    got = moe.experts(y.cuda(), card_ids, card_weights, gate_up.cuda(), down.cuda())
    near(got, wanted, 3e-2)
    for rows in (1, 2, 4, 8):
        some = moe.experts(y[:rows].cuda(), card_ids[:rows], card_weights[:rows], gate_up.cuda(), down.cuda())
        assert torch.equal(some, got[:rows]), f"{rows} rows"


def _card_take(size: int, owner: str) -> Tensor:
    return torch.full((size,), 0xEE, dtype=torch.uint8, device="cuda")


class _CardSession(PlainSession):
    """The same session with blocks in pinned host memory and all else on the card."""

    def __init__(self, positions: int, slots: int, seed: int) -> None:
        super().__init__(positions, slots, seed)
        self.blocks = [block.pin_memory() for block in self.blocks]
        for name in ("block_table", "ring", "pages", "state"):
            setattr(self, name, getattr(self, name).cuda())
        self.hot = [HotCache(len(group), slots, positions, ROW_BYTES, take=_card_take) for group in LAYOUT.groups]


class _CardStep(Step):
    """A step whose table, plan and rows are on the card."""

    def __init__(self, sessions: list[PlainSession | None], place_of: list[int], selection: Tensor) -> None:
        super().__init__(sessions, place_of, selection)
        table = StepTable(len(sessions), TABLE_LAYOUT, "cuda")
        table.tensor.copy_(self.table.tensor)
        self.table, self.place_of, self.mirrored = table, self.place_of.cuda(), self.mirrored.cuda()
        self.plan = RoundPlan.empty(*selection.shape, device="cuda")
        for unwritten in self.plan.buffers:
            unwritten.fill_(123_456)
        self.plan.selection.copy_(self.selection)

    def gather(self, group: int, layer_in_group: int, scratch: Tensor | None = None) -> Tensor:
        out = torch.full((*self.selection.shape, ROW_BYTES), 0xEE, dtype=torch.uint8, device="cuda")
        offset = LAYOUT.row_offset(LAYOUT.groups[group][layer_in_group])
        gather.gather_round(
            self.plan, self.table.tensor, TABLE_LAYOUT, self.place_of, group, layer_in_group, offset, ROW_BYTES, out, scratch
        )
        return out


def _world(kind: type[PlainSession]) -> list[PlainSession | None]:
    sessions: list[PlainSession | None] = []
    for seed, (slots, logical, mirrored) in enumerate([(40, 300, 256), (33, 200, 128), (64, 600, 576)]):
        one = kind(640, slots, seed)
        one.grow(logical, mirrored)
        sessions.append(one)
    return [*sessions, None]


def test_rounds_on_the_card_are_the_references() -> None:
    """60 random steps over three sessions: slots, fills, maps, hands and counters equal the CPU's, and gathered rows are the truth."""
    generator = torch.Generator().manual_seed(9)
    plain, card = _world(PlainSession), _world(_CardSession)
    ends = torch.tensor([300, 200, 600, 640])
    for index in range(60):
        place_of = torch.randint(-1, 4, (6,), generator=generator)
        limits = ends[place_of]
        selection = ((torch.rand(6, 32, generator=generator) * limits[:, None]).int() // 3 * 3).int()
        selection[torch.rand(6, 32, generator=generator) < 0.15] = -1
        here, there = Step(plain, place_of.tolist(), selection), _CardStep(card, place_of.tolist(), selection)
        round_reference.begin_round(here.table.tensor)
        begin_round(there.table.tensor)
        for group, layers in enumerate(LAYOUT.groups):
            round_reference.plan_round(here.table.tensor, TABLE_LAYOUT, LAYOUT, group, here.place_of, here.mirrored, here.plan)
            plan_round(there.table.tensor, TABLE_LAYOUT, LAYOUT, group, there.place_of, there.mirrored, there.plan)
            for name in ("slot", "fill", "miss", "misses"):
                assert torch.equal(getattr(there.plan, name).cpu(), getattr(here.plan, name)), f"step {index}, group {group}: {name}"
            for layer_in_group, layer in enumerate(layers):
                here.gather(group, layer_in_group)
                assert torch.equal(there.gather(group, layer_in_group).cpu(), there.direct(layer)), f"step {index}: layer {layer}"
        if index % 7 == 6:
            round_reference.clear_round(here.table.tensor, TABLE_LAYOUT, 1, here.place_of, here.plan)
            clear_round(there.table.tensor, TABLE_LAYOUT, 1, there.place_of, there.plan)
        if index % 11 == 10:
            round_reference.unmap_from(here.table.tensor, TABLE_LAYOUT, index % 3, 100)
            unmap_from(there.table.tensor, TABLE_LAYOUT, index % 3, 100)
        for one, other in zip(plain[:-1], card[:-1], strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(other.state.cpu(), one.state), f"step {index}"
            for mine, its in zip(one.hot, other.hot, strict=True):
                for name in ("slot_of", "position_of", "pin_round", "hand"):
                    assert torch.equal(getattr(its, name).cpu(), getattr(mine, name)), f"step {index}: {name}"
