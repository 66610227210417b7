"""Rounded weights judged: the same text for every form, bf16 agrees with itself, and fewer bits cost more."""

import json
from pathlib import Path

import pytest
import torch

from engine.bench import weights
from engine.commands.line import run_line
from engine.convert import Recipe
from engine.errors import BadSetting

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "engine" / "demo_model"


async def _no_server(*_: object) -> None:
    raise AssertionError("nothing is served")


@pytest.mark.slow
def test_fewer_bits_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a short row bf16 agrees with itself everywhere, eight bits nearly, four less; JSON and table have a row a form."""
    every = {name: weights.RECIPES[name] for name in ("bf16", "int8 everything", "int4 everything")}
    monkeypatch.setattr(weights, "RECIPES", every)
    found = weights.judge(DEMO, 1, 128)
    texts = dict.fromkeys(one.text for one in found)
    assert "held out" in texts
    for text in texts:
        plain, eight, four = (one for one in found if one.text == text)
        assert plain.agreement == 1
        assert plain.tokens == eight.tokens == four.tokens == 127
        assert four.agreement < eight.agreement <= 1
        assert abs(eight.bits_a_byte - plain.bits_a_byte) < abs(four.bits_a_byte - plain.bits_a_byte)
        assert four.file_bytes < eight.file_bytes < plain.file_bytes
    assert len(weights.as_json(found, DEMO, 128, {})["forms"]) == weights.table(found).row_count == 3 * len(texts)


def test_every_recipe_fits_the_packaged_model() -> None:
    """Groups of every recipe divide every width they are for, so that no form fails an hour into a run."""
    widths = json.loads((DEMO / "config.json").read_text())
    for recipe in weights.RECIPES.values():
        if isinstance(recipe, Recipe) and "fp8" not in recipe.forms.values():
            assert all(
                widths[name] % recipe.group == 0 for name in ("hidden_size", "moe_intermediate_size", "intermediate_size", "kv_lora_rank")
            )


def test_weights_are_read_as_the_engine_reads_them() -> None:
    """What is judged of the packaged model is what its file holds, all of it."""
    from safetensors.torch import load_file

    stored = load_file(DEMO / "model.safetensors")
    read = weights._tensors(DEMO)
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name], stored[name].float()) for name in stored)


@pytest.mark.parametrize("words", [("--rows", "0"), ("--tokens", "1"), ("--tokens", "many")])
def test_a_bad_line_is_one_line(words: tuple[str, str]) -> None:
    """Counts that make no sense are refused before anything is read."""
    with pytest.raises(BadSetting, match=words[0]):
        run_line(("bench", "weights", *words), {}, _no_server)  # type: ignore[arg-type]  # not used
