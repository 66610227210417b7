"""Drafts of the demo model: real acceptance, equal tokens, and the rates of its training record."""

import itertools
import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

import engine.draft
from engine.config import EngineConfig
from engine.demo_training.corpus import END, held_out, library_files
from engine.demo_training.export import load
from engine.demo_training.network import DEPTHS
from engine.demo_training.shape import Shape
from engine.engine import Engine
from engine.sampling import Sampling

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "engine" / "demo_model"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 48, 256, 192  # as the record was made


def demo(depth: int | None, **changes: Any) -> EngineConfig:
    return EngineConfig(**{"host_memory_bytes": 256 << 20, "hot_rows": 512, "context_max": 4096, "draft_depth": depth, **changes})


def held_out_prompts(count: int) -> list[list[int]]:
    """Evenly spaced pieces of library files that no recipe trains on."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    closing = tokenizer.encode(END).ids
    files = library_files(Path(sysconfig.get_path("stdlib")))
    stream = [token for path, text in files if held_out(path) for token in (*tokenizer.encode(text).ids, *closing)]
    starts = np.linspace(0, len(stream) - PROMPT_TOKENS - 1, count).astype(int)
    return [stream[start : start + PROMPT_TOKENS] for start in starts]


async def said(config: EngineConfig, prompt: list[int], sampling: Sampling) -> tuple[list[int], int]:
    """A text, and how many steps it took."""
    async with Engine.open(DEMO, config) as engine:
        tokens = [token async for chunk in engine.generate(prompt, sampling) for token in chunk.token_ids]
        return tokens, engine.statistics().steps


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_the_demo_says_the_same_in_half_the_steps(temperature: float) -> None:
    """Held-out code goes on with equal tokens at depths 0, 3 and 7, and drafting takes at most six steps in ten."""
    prompt = held_out_prompts(3)[1][-96:]
    sampling = Sampling(max_tokens=40, temperature=temperature, seed=7, ignore_eos=True)
    plain, steps = await said(demo(0), prompt, sampling)
    for depth in (3, 7):
        drafted, fewer = await said(demo(depth), prompt, sampling)
        assert drafted == plain
        assert fewer <= (0.6 if temperature == 0.0 else 0.8) * steps


async def test_a_stop_string_inside_an_accepted_run() -> None:
    """Text, tokens and reason end where they end without drafts, wherever in a run the stop string is complete."""
    prompt = held_out_prompts(3)[1][-96:]
    found = []
    async with Engine.open(DEMO, demo(0)) as engine:
        whole = await engine.generate(prompt, Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)).complete()
    stops = sorted({whole.text[start : start + 3] for start in range(4, len(whole.text) - 3, 5)})[:6]
    for depth in (0, 7):
        async with Engine.open(DEMO, demo(depth)) as engine:
            for stop in stops:
                sampling = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True, stop=(stop,))
                one = await engine.generate(prompt, sampling).complete()
                found.append((depth, (one.text, one.token_ids, one.finish_reason)))
    plain, drafted = ([answer for depth, answer in found if depth == which] for which in (0, 7))
    assert drafted == plain
    assert all(reason == "stop" for _, _, reason in plain)
    assert len({len(tokens) for _, tokens, _ in plain}) > 2


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "seed"), list(itertools.product((0.7, 1.0), range(20))))
async def test_the_demo_says_the_same_for_many_seeds(temperature: float, seed: int) -> None:
    """Drawn text is that of depth 0 for each seed, at a depth that turns with it."""
    prompt = held_out_prompts(20)[seed][-64:]
    sampling = Sampling(max_tokens=32, temperature=temperature, seed=seed, ignore_eos=True)
    plain, _ = await said(demo(0), prompt, sampling)
    drafted, _ = await said(demo(1 + seed % 7), prompt, sampling)
    assert drafted == plain


async def drafted_everywhere(
    config: EngineConfig, prompts: list[list[int]], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[int], list[list[int]]]]:  # fmt: skip
    """Each prompt's greedy text, and the three drafts behind each of its tokens from the second on: every row drafts, none is judged."""
    found: list[list[int]] = []

    def keep(table: Tensor, drafts: Tensor, ends: Tensor) -> None:
        found.append(drafts[0].tolist())  # not kept: the next step has one row

    monkeypatch.setattr(engine.draft, "keep_drafts", keep)
    texts = []
    async with Engine.open(DEMO, config) as opened:
        for prompt in prompts:
            found.clear()
            sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            text = [token async for chunk in opened.generate(prompt, sampling) for token in chunk.token_ids]
            texts.append((text, found[: len(text) - DEPTHS - 1]))
    return texts


def compared(prompts: list[list[int]], texts: list[tuple[list[int], list[list[int]]]]) -> tuple[list[float], list[float], float]:
    """Rates at which the first 1, 2 and 3 drafts are right: the engine's, the training network's on the same rows; and how often their
    first drafts are one."""
    network, same = load(DEMO, Shape(), torch.float32), 0
    mine, theirs, rows = [0] * DEPTHS, [0] * DEPTHS, 0
    for prompt, (text, drafts) in zip(prompts, texts, strict=True):
        ids = torch.tensor([[*prompt, *text]])
        with torch.no_grad():
            states = network(ids, torch.arange(ids.shape[1])[None], sparse=True).drafts
            guessed = [network.logits(state).argmax(-1)[0].tolist() for state in states]
        for i, engines in enumerate(drafts):
            row, coming = len(prompt) + i, text[i + 2 : i + 2 + DEPTHS]
            networks = [guessed[depth][row] for depth in range(DEPTHS)]
            same += engines[0] == networks[0]
            rows += 1
            for depth in range(1, DEPTHS + 1):
                mine[depth - 1] += engines[:depth] == coming[:depth]
                theirs[depth - 1] += networks[:depth] == coming[:depth]
    return [count / rows for count in mine], [count / rows for count in theirs], same / rows


@pytest.mark.slow
async def test_acceptance_is_the_training_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the engine's own greedy text, its drafts are right as often as the trained network's, within 0.02 at each depth."""
    prompts = held_out_prompts(8)
    texts = await drafted_everywhere(demo(DEPTHS), prompts, 96, monkeypatch)
    mine, theirs, same = compared(prompts, texts)
    assert max(abs(one - other) for one, other in zip(mine, theirs, strict=True)) <= 0.02, f"{mine}, the network {theirs}"
    assert same >= 0.97, f"first drafts agree in {same:.3f} of the rows"
    assert mine[0] > mine[1] > mine[2] > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["bf16", "q8g64"])
async def test_acceptance_is_the_records(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over half as many rows as the training record's, the rates lie within 0.02 of the network's on the same text."""
    prompts = held_out_prompts(PROMPTS // 2)
    config = demo(DEPTHS, device="cuda", graphs="off", row_format=rows)
    mine, theirs, same = compared(prompts, await drafted_everywhere(config, prompts, NEW_TOKENS, monkeypatch))
    print(f"own greedy text, {rows} rows: {mine}; the network on it {theirs}; recorded {recorded()}; first drafts agree in {same:.3f}")
    assert max(abs(one - other) for one, other in zip(mine, theirs, strict=True)) <= 0.02


def recorded() -> list[float]:
    """The shipped model's rates on its own greedy text, another engine's."""
    record = json.loads((ROOT / "docs" / "demo_model" / "measured.json").read_text())
    rates_of: list[float] = next(one for one in record if one["checkpoint"] == "shipped")["acceptance"]["own_greedy"]
    return rates_of[:DEPTHS]
