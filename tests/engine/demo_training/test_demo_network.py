"""The training network: it agrees with transformers, learns, and its checkpoint comes back."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GlmMoeDsaForCausalLM

from engine.demo_training import attend, evaluate, train
from engine.demo_training.corpus import Corpus
from engine.demo_training.corpus import build as build_corpus
from engine.demo_training.export import checkpoint_tensors, load, save
from engine.demo_training.losses import losses_of
from engine.demo_training.network import Network, Pass
from engine.demo_training.recipe import TOY, Phase
from engine.demo_training.rows import Batch, Mix, Rows
from engine.demo_training.shape import Shape, config_of

MODEL = Path(train.TOKENIZER)
TINY = Shape(
    hidden=32, layers=4, heads=2, query_latent=24, latent=16, nope=8, rope=8, value=8, dense_width=48, experts=4, expert_width=16,
    index_heads=12, index_width=16, picks=16, full_layers=(0, 2), positions_max=4096,
)  # fmt: skip


def network_of(seed: int, shape: Shape = TINY) -> Network:
    """A network whose norms, biases and router bias are no neutral values, so that leaving one out shows."""
    torch.manual_seed(seed)
    network = Network(shape)
    with torch.no_grad():
        for name, value in network.named_parameters():
            if "norm" in name:
                value += 0.25 * torch.randn_like(value)
            value.copy_(value.bfloat16())
        for name, buffer in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.15 * torch.randn_like(buffer))
    return network


def corpus_of(tmp_path: Path) -> Corpus:
    """A corpus of a few hundred short files."""
    root = tmp_path / "library"
    root.mkdir()
    for number in range(160):
        lines = [f"value_{number}_{line} = [{line * number}, '{line}']\n" for line in range(12)]
        function = f'def call_{number}(a):\n    """Return a times {number}."""\n    return a * {number}\n'
        (root / f"module_{number}.py").write_text("".join(lines) + function)
    return build_corpus(train.Tokenizer.from_file(str(MODEL / "tokenizer.json")), root, root / "none")


def test_shipped_config_is_the_recipes() -> None:
    """config.json of the shipped checkpoint is what the recipe's shape writes."""
    assert json.loads((MODEL / "config.json").read_text()) == config_of(Shape())


def test_shipped_checkpoint_comes_back_to_the_bit() -> None:
    """Reading the shipped checkpoint into the training network and taking it apart again gives the same tensors."""
    shipped, ours = load_file(MODEL / "model.safetensors"), checkpoint_tensors(load(MODEL, Shape()))
    assert shipped.keys() == ours.keys()
    for name, tensor in shipped.items():
        assert tensor.dtype == ours[name].dtype, name
        assert torch.equal(tensor, ours[name]), name


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 90])
def test_exported_checkpoint_agrees_with_transformers(tmp_path: Path, tokens: int) -> None:
    """The saved checkpoint, run by transformers in float32, gives the training network's logits within 1e-4, past top-k as before it."""
    network = network_of(3)
    save(network, tmp_path, MODEL)
    theirs = GlmMoeDsaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(0, 2000, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    positions = torch.arange(tokens)[None].expand(2, -1)
    with torch.no_grad():
        ours = load(tmp_path, TINY)(ids, positions, sparse=True, depths=0)
        difference = (network.logits(ours.state) - theirs(ids).logits).abs().max()
    assert float(difference) < 1e-4
    assert AutoTokenizer.from_pretrained(tmp_path).encode("import os\n")


def test_selection_in_blocks_is_the_selection_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting query rows into ragged blocks changes no pass."""
    network, ids = network_of(4), torch.randint(0, 2000, (1, 83), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(82)[None]
    with torch.no_grad():
        whole = network(ids, positions, sparse=True)
        monkeypatch.setattr(attend, "BLOCK", 33)
        monkeypatch.setattr(attend, "SCORED", 10)
        parts = network(ids, positions, sparse=True)
    for one, other in zip([whole.state, *whole.drafts], [parts.state, *parts.drafts], strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_selection_is_causal_and_of_its_size() -> None:
    """Every row picks min(k, rows so far) keys, none after itself, also when scores are negative."""
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(1, 3, 70, 8, generator=generator), torch.randn(1, 70, 8, generator=generator)
    weight = -torch.rand(1, 3, 70, generator=generator) - 0.1
    (block,) = attend.Scorer().select(query, key + 0.5, weight, 16)
    picked = block.bias[0, 0] == 0
    assert not picked.triu(1).any()
    score = attend.Scorer().scores(query, key + 0.5, weight, torch.arange(70)[None])[0]
    for row in range(70):
        cut = score[row, : row + 1].topk(min(16, row + 1)).values.amin()
        assert torch.equal(picked[row, : row + 1], score[row, : row + 1] >= cut)
        assert int(picked[row].sum()) >= min(16, row + 1)


def test_draft_rows_see_no_later_token() -> None:
    """Changing token j leaves every state before j, and every draft of depth s before row j - s, as it was."""
    network, place = network_of(5), 40
    ids = torch.randint(0, 2000, (1, 63), generator=torch.Generator().manual_seed(2))
    changed = ids.clone()
    changed[0, place] = (changed[0, place] + 7) % 2000
    positions = torch.arange(62)[None]
    with torch.no_grad():
        one, other = (network(row, positions, sparse=True) for row in (ids, changed))
    assert torch.equal(one.state[:, :place], other.state[:, :place])
    assert not torch.equal(one.state[:, place:], other.state[:, place:])
    for depth, (draft, moved) in enumerate(zip(one.drafts, other.drafts, strict=True), 1):
        assert torch.equal(draft[:, : place - depth], moved[:, : place - depth])
        assert not torch.equal(draft[:, place - depth], moved[:, place - depth])


def test_indexer_loss_trains_indexers_alone() -> None:
    """The divergences give a gradient to every indexer parameter and to nothing else."""
    network = network_of(6)
    ids = torch.randint(0, 2000, (1, 43), generator=torch.Generator().manual_seed(3))
    out = network(ids, torch.arange(42)[None], sparse=True, sampled=torch.tensor([[20, 39, 5]]))
    assert len(out.divergences) == 3
    torch.stack(out.divergences).sum().backward()
    for name, value in network.named_parameters():
        touched = value.grad is not None and bool(value.grad.any())
        assert touched == (".indexer." in name), name


@pytest.mark.parametrize("sparse", [False, True])
def test_steps_lower_the_loss_and_move_the_router_bias(tmp_path: Path, sparse: bool) -> None:
    """A few steps on one batch lower every loss on it, and the router's bias leans towards experts that took less."""
    phase = Phase("toy", Mix(2, 160, needles=0.5, facts=(1, 1), sampled=8), sparse, 1, 3e-3, 1e-3, warm_steps=1, steps=5)
    encoder = train.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    batch = Rows(corpus_of(tmp_path), encoder, phase.mix, seed=1, phase="toy", positions_max=4096).batch(0)
    trainer = train.Trainer(network_of(7), tmp_path / "out", torch.device("cpu"), compiled=False, say=lambda line: None)
    before = trainer.routers[0].gate.e_score_correction_bias.clone()
    losses = [trainer.step(batch, phase, 3e-3) for _ in range(5)]
    assert float(losses[-1].next_token.detach()) < 0.9 * float(losses[0].next_token.detach())
    for first, last in zip(losses[0].drafts, losses[-1].drafts, strict=True):
        assert float(last.detach()) < float(first.detach())
    assert not torch.equal(trainer.routers[0].gate.e_score_correction_bias, before)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    """NaN weights end the run with FloatingPointError, not with a checkpoint."""
    network = network_of(8)
    with torch.no_grad():
        network.model.norm.weight.fill_(float("nan"))
    trainer = train.Trainer(network, tmp_path / "out", torch.device("cpu"), compiled=False, say=lambda line: None)
    encoder = train.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    rows = Rows(corpus_of(tmp_path), encoder, TOY[0].mix, seed=1, phase="toy", positions_max=4096)
    with pytest.raises(FloatingPointError, match="dense"):
        trainer.run(TOY[0], (rows.batch(step) for step in range(9)), 1.0)


def test_learning_rate_warms_up_and_falls() -> None:
    """The rate starts at a fraction, reaches `rate` when warm, and ends at `rate_end`."""
    phase = dataclasses.replace(TOY[0], rate=1.0, rate_end=0.1, warm_steps=10)
    assert train.share_rate(phase, 0.0, 0) == pytest.approx(0.1)
    assert train.share_rate(phase, 0.0, 9) == pytest.approx(1.0)
    assert train.share_rate(phase, 1.0, 500) == pytest.approx(0.1)
    assert train.share_rate(phase, 0.5, 500) == pytest.approx(0.55)


def test_a_toy_run_ends_in_a_checkpoint_that_can_be_judged_and_gone_on_from(tmp_path: Path) -> None:
    """All phases run, the record counts their steps, the checkpoint is measured, and a second run starts from it."""
    corpus = corpus_of(tmp_path)
    checkpoint = train.train(train.Run(corpus, MODEL, TOY, TINY), tmp_path / "first")
    record = json.loads((tmp_path / "first" / "record.json").read_text())
    assert [phase["steps"] for phase in record["phases"]] == [phase.steps for phase in TOY]
    assert record["corpus"] == corpus.digest
    result = evaluate.evaluate(checkpoint, corpus, evaluate.TOY, TINY, say=lambda line: None)
    assert 1.0 < result["held_out_bits"][64]["sparse"] < 8.0
    assert all(0.0 <= share <= 1.0 for shares in result["acceptance"].values() for share in shares)
    more = train.Run(corpus, MODEL, train.phases_of(True, "sparse", "sparse=1"), TINY, start=checkpoint)
    again = load(train.train(more, tmp_path / "second"), TINY)
    moved = (again.lm_head.weight - load(checkpoint, TINY).lm_head.weight).detach().abs().max()
    assert 0 < moved.item() < 0.05


def test_an_unknown_phase_is_named() -> None:
    """A phase nobody knows ends the command with its name."""
    with pytest.raises(SystemExit, match="nearby"):
        train.phases_of(False, "sparse,nearby", None)


def test_losses_read_the_tokens_they_predict() -> None:
    """With states that name token i + 1 (and i + 1 + s at depth s) the losses are near zero, and not when shifted by one."""
    shape = dataclasses.replace(TINY, hidden=2048)
    network = Network(dataclasses.replace(TINY, layers=2, full_layers=(0,)))
    network.shape = shape
    network.lm_head.weight = torch.nn.Parameter(torch.eye(2048) * 50)
    tokens = torch.randint(0, 2000, (1, 24), generator=torch.Generator().manual_seed(9))
    states = [torch.nn.functional.one_hot(tokens[:, s : s + 20], 2048).float() for s in range(1, 5)]
    batch = Batch(tokens, torch.arange(22)[None], torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 20))
    right = losses_of(network, batch, train_pass(states))
    wrong = losses_of(network, batch, train_pass([states[1], states[1], states[2], states[3]]))
    assert float(right.total().detach()) < 1e-3
    assert float(wrong.next_token.detach()) > 10


def train_pass(states: list[torch.Tensor]) -> Pass:
    """A pass that holds these states: the main one, then each depth's."""
    return Pass(state=states[0], drafts=states[1:])
