"""The model's seams, driven flat, against transformers on the same weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from engine.model import Model, load_model
from kernels.layout import KeyLayout, RowLayout
from kernels.quantize import pack_keys, pack_rows, unpack_keys, unpack_rows
from memory.row import KeyFormat
from tests.engine.model.flat_run import FlatRun
from tests.engine.model.parity import (
    Configuration,
    configurations,
    make_checkpoint,
    named,
    prompt_ids,
    rounded_key,
    rounded_row,
    transformers_logits,
    transformers_model,
)

TOLERANCE = 1e-4  # logits of order 10 in float32; model.md 7.1
GAP_MIN = 5e-5
ROUNDING_GAP_MIN = 1e-6  # twice and more what float32 arithmetic differs by in a row

each_configuration = pytest.mark.parametrize("chosen", configurations(), ids=lambda each: each.name)
each_f32 = pytest.mark.parametrize("chosen", [each for each in configurations() if each.rows == "f32"], ids=lambda each: each.name)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {each.name: make_checkpoint(root, each.name) for each in configurations()}


def _run(model: Model, chosen: Configuration, chunk: int, rows: int = 1000) -> tuple[Tensor, FlatRun]:
    """Logits of the first `rows` tokens of the prompt, `chunk` at a time."""
    run = FlatRun(model, 256, rows=chosen.rows, keys=chosen.keys)
    logits = torch.cat([run.append(ids) for ids in prompt_ids(chosen)[:rows].split(chunk)])
    return logits, run


@each_configuration
def test_logits_equal_transformers(chosen: Configuration, checkpoints: dict[str, Path]) -> None:
    """Logits of a prompt well past top-k differ by at most 1e-4, and every row's best token is the same."""
    expected = transformers_logits(checkpoints[chosen.name], prompt_ids(chosen), chosen.rows, chosen.keys)
    logits, run = _run(load_model(checkpoints[chosen.name]), chosen, 10_000)
    assert run.gap >= GAP_MIN, f"this seed compares a coin toss: {run.gap}"
    assert run.rounding_gap >= ROUNDING_GAP_MIN, f"a stored value lies {run.rounding_gap} from a rounding boundary"
    assert expected.abs().max() > 5.0
    assert (logits - expected).abs().max() <= TOLERANCE
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("chunk", "rows"), [(1, 40), (7, 1000), (64, 1000), (65, 1000)])
@each_configuration
def test_chunks_do_not_change_a_bit(chosen: Configuration, chunk: int, rows: int, checkpoints: dict[str, Path]) -> None:
    """Token by token, or in chunks of any size, a row's logits have the bits that the whole prompt gives."""
    model = load_model(checkpoints[chosen.name])
    assert chosen.config["index_topk"] < 40
    pieces, _ = _run(model, chosen, chunk, rows)
    assert torch.equal(pieces, _run(model, chosen, 10_000)[0][:rows])


@each_f32
def test_greedy_tokens_equal_transformers(chosen: Configuration, checkpoints: dict[str, Path]) -> None:
    """Twelve tokens decoded greedily are those that transformers finds best at the same places."""
    ids = prompt_ids(chosen)
    run = FlatRun(load_model(checkpoints[chosen.name]), 256)
    row = run.append(ids)[-1:]
    decoded = []
    for _ in range(12):
        decoded.append(row.argmax(-1))
        row = run.append(decoded[-1])
    tokens = torch.cat(decoded)
    expected = transformers_logits(checkpoints[chosen.name], torch.cat((ids, tokens)))
    assert torch.equal(expected[len(ids) - 1 : -1].argmax(-1), tokens)


def test_selections_equal_transformers(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each full layer selects, row by row, the set of positions that transformers attends to."""
    chosen = named("shared")
    theirs: list[Tensor] = []
    forward = modeling_glm_moe_dsa.GlmMoeDsaIndexer.forward

    def recorded(*args: object, **kwargs: object) -> Tensor:
        selection = forward(*args, **kwargs)
        theirs.append(selection[0])
        return selection

    monkeypatch.setattr(modeling_glm_moe_dsa.GlmMoeDsaIndexer, "forward", recorded)
    transformers_logits(checkpoints[chosen.name], prompt_ids(chosen))
    ours: list[Tensor] = []
    choose = FlatRun.choose
    monkeypatch.setattr(FlatRun, "choose", lambda *args: ours.append(choose(*args)) or ours[-1])
    _run(load_model(checkpoints[chosen.name]), chosen, 10_000)
    assert len(ours) == len(theirs) == 3
    for own, other in zip(ours, theirs, strict=True):
        for row in range(chosen.prompt_tokens):
            selected = set(own[row].tolist()) - {-1}
            assert selected == {position for position in other[row].tolist() if position <= row}


def test_transformers_reads_our_checkpoints(checkpoints: dict[str, Path]) -> None:
    """The tiny checkpoints have the names transformers loads from disk, so that our loader is tested on real names."""
    directory = checkpoints["odd widths"]
    model, report = GlmMoeDsaForCausalLM.from_pretrained(directory, attn_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"]
    assert all(name.startswith("model.layers.4.") for name in report["unexpected_keys"]), "only the MTP block is unknown to it"
    built = transformers_model(directory).state_dict()
    assert built.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, built[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("rows", ["bf16", "q8g64"])
@pytest.mark.parametrize("latents", [24, 64, 100])
def test_patched_rounding_is_the_stored_rounding(rows: str, latents: int) -> None:
    """What the patched transformers rounds a row to is what packing and unpacking it gives, ragged groups and zeros included."""
    generator = torch.Generator().manual_seed(5)
    latent = torch.randn(40, latents, generator=generator) * torch.logspace(-3, 2, 40)[:, None]
    latent[3] = 0.0
    rope = torch.randn(40, 8, generator=generator)
    layout = RowLayout("bf16" if rows == "bf16" else "q8g64", latents, 8)
    stored_latent, stored_rope = unpack_rows(pack_rows(latent, rope, layout), layout)
    rounded_latent, rounded_rope = rounded_row(latent, rope, layout.encoding)
    assert torch.equal(stored_latent, rounded_latent)
    assert torch.equal(stored_rope, rounded_rope)
    assert not torch.equal(stored_latent, latent)


@pytest.mark.parametrize("keys", ["f32", "bf16", "e4m3"])
def test_patched_rounding_of_keys_is_the_stored_rounding(keys: KeyFormat) -> None:
    """What the patched transformers rounds an index key to is what packing and unpacking it gives, at any magnitude."""
    given = torch.randn(40, 24, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 2, 40)[:, None]
    layout = KeyLayout(keys, 24)
    stored = unpack_keys(pack_keys(given, layout), layout)
    assert torch.equal(stored, rounded_key(given, keys))
    assert torch.equal(stored, given) == (keys == "f32")
