"""The MTP block against a transformers decoder layer built as one more layer, full and sparse."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model import Model, MtpWeights, load_model
from engine.model.mtp import rms_norm
from tests.engine.model.flat_run import FlatRun
from tests.engine.model.parity import make_checkpoint, named, prompt_ids, transformers_model

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mtp"), "shared")


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return load_model(directory)


@pytest.fixture(scope="module")
def expected(directory: Path, model: Model) -> Tensor:
    """Draft logits of every row but the last, by transformers' own layer, row i at RoPE position i."""
    assert model.mtp is not None
    ids = prompt_ids(named("shared"))
    whole = transformers_model(directory, with_mtp_layer=True)
    plain = transformers_model(directory)
    with torch.no_grad():
        hidden = plain.model(input_ids=ids[None]).last_hidden_state[:, :-1]
        embedded = whole.model.embed_tokens(ids[None, 1:])
        joined = torch.cat((_rms(embedded, model.mtp.embedding_norm), _rms(hidden, model.mtp.hidden_norm)), dim=-1) @ model.mtp.join.T
        rows = joined.shape[1]
        mask = torch.full((rows, rows), torch.finfo(torch.float32).min).triu(1)[None, None]
        positions = torch.arange(rows)[None]
        y, _ = whole.model.layers[-1](joined, attention_mask=mask, position_embeddings=whole.model.rotary_emb(joined, positions))
        logits: Tensor = whole.lm_head(_rms(y, model.mtp.head_norm))[0]
    return logits


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def _draft(run: FlatRun, *, chunk: int = 10_000) -> Tensor:
    """Draft logits of rows 1.. in slot form: row p joins the hidden state of p - 1 with the token at p, at RoPE position p."""
    ids = prompt_ids(named("shared"))
    run.append(ids)
    hidden = run.hidden[:-1]
    pieces = zip(ids[1:].split(chunk), hidden.split(chunk), strict=True)
    return torch.cat([run.append_mtp(tokens, states, 1 + i * chunk) for i, (tokens, states) in enumerate(pieces)])


@pytest.mark.parametrize("chunk", [1, 64, 10_000])
def test_draft_logits_equal_a_transformers_layer(model: Model, expected: Tensor, chunk: int) -> None:
    """Rows kept one slot later, with slot 0 empty, give the logits of rows at positions from 0: only differences of positions count."""
    run = FlatRun(model, 256)
    logits = _draft(run, chunk=chunk)
    assert run.gap >= 5e-5
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= TOLERANCE
    assert torch.isnan(run.latent[-1, 0]).all(), "slot 0 of the block stays empty"


def _swapped(block: MtpWeights, embedded: Tensor, hidden: Tensor) -> Tensor:
    first = rms_norm(embedded, block.embedding_norm, block.norm_eps)
    second = rms_norm(hidden, block.hidden_norm, block.norm_eps)
    return torch.cat((second, first), dim=-1) @ block.join.T


def _zeroed(block: MtpWeights, embedded: Tensor, hidden: Tensor) -> Tensor:
    first = rms_norm(embedded, block.embedding_norm, block.norm_eps)
    first[0] = 0.0
    return torch.cat((first, rms_norm(hidden, block.hidden_norm, block.norm_eps)), dim=-1) @ block.join.T


def _no_hidden_norm(block: MtpWeights, embedded: Tensor, hidden: Tensor) -> Tensor:
    return torch.cat((rms_norm(embedded, block.embedding_norm, block.norm_eps), hidden), dim=-1) @ block.join.T


@pytest.mark.parametrize("mistake", [_swapped, _zeroed, _no_hidden_norm], ids=["halves swapped", "row 0 zeroed", "hidden not normed"])
def test_wrong_join_shows(mistake: object, model: Model, expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining the halves in another way moves draft logits far beyond the tolerance."""
    monkeypatch.setattr(MtpWeights, "join_input", mistake)
    assert (_draft(FlatRun(model, 256)) - expected).abs().max() > 0.1


def test_state_before_the_final_norm_shows(model: Model, expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeding the residual state instead of the final hidden state moves draft logits far beyond the tolerance."""
    before: list[Tensor] = []
    final_norm = Model.final_norm
    monkeypatch.setattr(Model, "final_norm", lambda self, x: before.append(x) or final_norm(self, x))
    monkeypatch.setattr(FlatRun, "mtp_input", lambda self, ids, hidden: self.model.mtp_input(ids, before[0][:-1]))
    assert (_draft(FlatRun(model, 256)) - expected).abs().max() > 0.1


def test_norm_of_the_draft_head_is_its_own(model: Model, expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Using the main model's final norm for drafts moves their logits."""
    monkeypatch.setattr(MtpWeights, "final_norm", lambda self, y: model.final_norm(y))
    assert (_draft(FlatRun(model, 256)) - expected).abs().max() > 0.1


def test_targets_selection_in_the_block_shows(model: Model, expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that attends over the last main layer's selection, not its own, gives other drafts."""
    chosen: list[Tensor] = []
    choose = FlatRun.choose
    monkeypatch.setattr(FlatRun, "choose", lambda *args: chosen.append(choose(*args)) or chosen[-1])

    def borrowed(self: FlatRun, layer: object, selection: Tensor, positions: Tensor, lowest: int) -> Tensor:
        if lowest == 0:
            return selection
        last = chosen[-2][1:]
        return torch.where(last == 0, -1, last)

    monkeypatch.setattr(FlatRun, "selection_used", borrowed)
    assert (_draft(FlatRun(model, 256)) - expected).abs().max() > 0.1
