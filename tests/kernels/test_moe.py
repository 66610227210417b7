"""Gated MLPs and routing: the formulas, ties, groups, and the same bits in any company."""

import pytest
import torch

from kernels.moe import experts, gated_mlp, route


def _plain_mlp(y, gate, up, down):
    gated = y.double() @ gate.double().t()
    return (gated * torch.sigmoid(gated) * (y.double() @ up.double().t())) @ down.double().t()


def _plain_choice(choice, experts_per_token, groups, groups_kept):
    """One row's experts by Python's sort: more first, then the lower id."""
    width = len(choice) // groups
    best = sorted(range(groups), key=lambda g: (-sum(sorted(choice[g * width : (g + 1) * width])[-2:]), g))[:groups_kept]
    allowed = [expert for expert in range(len(choice)) if expert // width in best]
    return sorted(allowed, key=lambda expert: (-choice[expert], expert))[:experts_per_token]


@pytest.mark.parametrize(("hidden", "width"), [(256, 96), (7, 5), (33, 1), (64, 130)])
def test_gated_mlp_agrees_with_float64(hidden, width, poisoned_empty):
    """silu on the gate half only, product with the up half, then down, to 1e-5 of the result's scale."""
    torch.manual_seed(hidden)
    gate, up, down = torch.randn(width, hidden), torch.randn(width, hidden), torch.randn(hidden, width)
    for rows in (0, 1, 9, 65):
        y = torch.randn(rows, hidden) / hidden**0.5
        wanted = _plain_mlp(y, gate, up, down)
        got = gated_mlp(y, gate, up, down)
        assert got.shape == (rows, hidden)
        assert bool(((got - wanted).abs() <= 1e-5 * max(1.0, width**0.5)).all())


@pytest.mark.parametrize(("hidden", "width"), [(64, 96), (7, 5), (33, 1)])
def test_gated_mlp_row_does_not_see_its_company(hidden, width, assert_row_invariant):
    """A row has the same bits alone and in any company, also where rows do not fill whole vectors."""
    torch.manual_seed(width)
    y = torch.randn(13, hidden)
    gate, up, down = torch.randn(width, hidden), torch.randn(width, hidden), torch.randn(hidden, width)
    assert_row_invariant(lambda picked: gated_mlp(y[picked], gate, up, down), 13)


@pytest.mark.parametrize(
    ("count", "slots", "groups", "kept"), [(8, 2, 1, 1), (16, 4, 4, 2), (6, 3, 3, 3), (12, 2, 6, 1), (5, 5, 1, 1), (4, 2, 4, 2)]
)
def test_route_agrees_with_plain_python(count, slots, groups, kept):
    """Experts are the best by biased sigmoid in the best groups; weights are the unbiased sigmoids, normalised, times the factor."""
    torch.manual_seed(count)
    y, gate, bias = torch.randn(20, 32), torch.randn(count, 32) / 4, torch.randn(count) * 0.2 - 1.0
    settings = {"experts_per_token": slots, "groups": groups, "groups_kept": kept, "factor": 2.5}
    expert_of, weight_of = route(y, gate, bias, normalise=True, **settings)
    plain_of, plain_weight = route(y, gate, bias, normalise=False, **settings)
    assert torch.equal(expert_of, plain_of)
    assert expert_of.dtype == torch.int64
    assert weight_of.dtype == torch.float32
    score = torch.sigmoid(y.double() @ gate.double().t())
    choice = (score + bias.double()).tolist()
    for row in range(20):
        wanted = _plain_choice(choice[row], slots, groups, kept)
        assert expert_of[row].tolist() == wanted
        picked = score[row, wanted]
        assert torch.allclose(plain_weight[row].double(), picked * 2.5, rtol=1e-5, atol=0)
        assert torch.allclose(weight_of[row].double(), picked / picked.sum() * 2.5, rtol=1e-5, atol=0)


def test_route_negative_bias_never_reaches_dropped_groups():
    """With all choices negative, dropped groups are still never chosen (they rank as -inf, not as 0)."""
    torch.manual_seed(5)
    y, gate, bias = torch.randn(40, 16), torch.randn(8, 16), torch.full((8,), -7.0)
    expert_of, _ = route(y, gate, bias, experts_per_token=2, groups=4, groups_kept=1, normalise=True, factor=1.0)
    assert torch.equal(expert_of[:, 0] // 2, expert_of[:, 1] // 2)


def test_route_keeps_the_bias_in_float32():
    """Two biases that bf16 cannot tell apart decide the choice."""
    y, gate = torch.zeros(1, 8), torch.zeros(3, 8)
    bias = torch.tensor([6.900, 6.901, 6.902])
    assert bias.bfloat16().unique().numel() == 1
    expert_of, _ = route(y, gate, bias, experts_per_token=1, groups=1, groups_kept=1, normalise=False, factor=1.0)
    assert expert_of.tolist() == [[2]]


def test_route_ties_go_to_the_lower_expert():
    """Equal scores, and equal groups, are taken from the lowest id up."""
    y, gate, bias = torch.zeros(3, 8), torch.randn(64, 8), torch.zeros(64)
    one, _ = route(y, gate, bias, experts_per_token=5, groups=1, groups_kept=1, normalise=True, factor=1.0)
    assert one.tolist() == [[0, 1, 2, 3, 4]] * 3
    bias[40] = 1.0
    grouped, _ = route(y, gate, bias, experts_per_token=10, groups=8, groups_kept=2, normalise=True, factor=1.0)
    assert grouped.tolist() == [[40, 0, 1, 2, 3, 4, 5, 6, 7, 41]] * 3


def test_route_of_a_nan_row_gives_valid_experts():
    """A row of NaN gets distinct experts that exist, and its neighbours' choice does not change."""
    torch.manual_seed(6)
    y, gate, bias = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(8)
    settings = {"experts_per_token": 3, "groups": 4, "groups_kept": 2, "normalise": True, "factor": 1.0}
    clean, _ = route(y, gate, bias, **settings)
    y[2] = float("nan")
    got, weight_of = route(y, gate, bias, **settings)
    assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])
    assert len(set(got[2].tolist())) == 3
    assert all(0 <= expert < 8 for expert in got[2].tolist())
    assert bool(weight_of[2].isnan().all())


@pytest.mark.parametrize(("count", "slots", "groups", "kept"), [(8, 2, 1, 1), (15, 8, 3, 2), (256, 8, 1, 1)])
def test_route_row_does_not_see_its_company(count, slots, groups, kept, assert_row_invariant):
    """A row's experts and the bits of its weights are the same alone and in any company."""
    torch.manual_seed(count)
    y, gate, bias = torch.randn(13, 33), torch.randn(count, 33), torch.randn(count)

    def compute(picked):
        expert_of, weight_of = route(
            y[picked], gate, bias, experts_per_token=slots, groups=groups, groups_kept=kept, normalise=True, factor=2.5
        )
        return torch.cat([expert_of.float(), weight_of], 1)

    assert_row_invariant(compute, 13)


@pytest.mark.parametrize(("count", "slots", "hidden", "width"), [(8, 2, 64, 96), (5, 3, 7, 5), (1, 1, 33, 1)])
def test_experts_agree_with_float64(count, slots, hidden, width, poisoned_empty):
    """Each row is the weighted sum of its own experts' MLPs, whatever others chose, experts nobody chose NaN."""
    torch.manual_seed(hidden)
    gate_up, down = torch.randn(count, 2 * width, hidden), torch.randn(count, hidden, width)
    for rows in (0, 1, 9, 40):
        y = torch.randn(rows, hidden) / hidden**0.5
        expert_of = torch.stack([torch.randperm(count)[:slots] for _ in range(rows)]) if rows else torch.empty(0, slots, dtype=torch.int64)
        weight_of = torch.rand(rows, slots)
        idle = [expert for expert in range(count) if expert not in expert_of]
        poisoned_up, poisoned_down = gate_up.clone(), down.clone()
        poisoned_up[idle], poisoned_down[idle] = float("nan"), float("nan")
        got = experts(y, expert_of, weight_of, poisoned_up, poisoned_down)
        assert got.shape == (rows, hidden)
        for row in range(rows):
            wanted = sum(
                weight * _plain_mlp(y[row : row + 1], gate_up[expert, :width], gate_up[expert, width:], down[expert])
                for expert, weight in zip(expert_of[row].tolist(), weight_of[row].double(), strict=True)
            )
            assert bool(((got[row] - wanted).abs() <= 2e-5 * width**0.5).all())


def test_experts_are_summed_in_slot_order(assert_same_bits):
    """The result has the bits of ((a + b) + c) over slots, each product rounded to float32."""
    torch.manual_seed(8)
    y, gate_up, down = torch.randn(1, 16), torch.randn(3, 20, 16), torch.randn(3, 16, 10)
    expert_of, weight_of = torch.tensor([[2, 0, 1]]), torch.tensor([[0.3, 1e-4, 7.0]])
    one = torch.ones(1, 1)
    parts = [experts(y, expert_of[:, a : a + 1], one, gate_up, down) * weight_of[:, a : a + 1] for a in range(3)]
    assert_same_bits(experts(y, expert_of, weight_of, gate_up, down), parts[0] + parts[1] + parts[2])


@pytest.mark.parametrize("rows", [1, 9])
def test_an_expert_that_is_not_here_adds_nothing(rows, poisoned_empty):
    """Experts of -1 and weight 0 leave the bits of the sum over the others, in every place among the slots, for one row and for several."""
    torch.manual_seed(rows)
    y, gate_up, down = torch.randn(rows, 16), torch.randn(4, 20, 16), torch.randn(4, 16, 10)
    expert_of = torch.tensor([[3, 1, 0], [-1, 2, 1], [0, -1, -1], [-1, -1, -1]])[torch.arange(rows) % 4 if rows > 1 else [1]]
    weight_of = torch.where(expert_of >= 0, torch.rand(rows, 3), 0.0)
    got = experts(y, expert_of, weight_of, gate_up, down)
    for row in range(rows):
        here = expert_of[row] >= 0
        if not bool(here.any()):
            assert not bool(got[row].any())
            continue
        wanted = experts(y[row : row + 1], expert_of[row : row + 1, here], weight_of[row : row + 1, here], gate_up, down)
        assert torch.equal(got[row], wanted[0])


@pytest.mark.parametrize(("count", "slots", "hidden", "width"), [(8, 2, 64, 96), (5, 3, 7, 5)])
def test_experts_row_does_not_see_its_company(count, slots, hidden, width, assert_row_invariant):
    """A row has the same bits alone, beside rows that share its experts, and beside rows that do not."""
    torch.manual_seed(width)
    y, weight_of = torch.randn(13, hidden), torch.rand(13, slots)
    expert_of = torch.stack([torch.randperm(count)[:slots] for _ in range(13)])
    gate_up, down = torch.randn(count, 2 * width, hidden), torch.randn(count, hidden, width)
    assert_row_invariant(lambda picked: experts(y[picked], expert_of[picked], weight_of[picked], gate_up, down), 13)
