"""Drafts of the demo model: real acceptance, equal tokens, and the rates of its training record."""

import pytest

from engine.config import EngineConfig
from engine.demo_training.network import DEPTHS
from engine.engine import Engine
from engine.sampling import Sampling
from tests.engine.acceptance import DEMO, NEW_TOKENS, PROMPTS, compared, demo, drafted_everywhere, held_out_prompts, recorded

__all__ = ["said"]


async def said(config: EngineConfig, prompt: list[int], sampling: Sampling) -> tuple[list[int], int]:
    """A text, and how many steps it took."""
    async with Engine.open(DEMO, config) as engine:
        tokens = [token async for chunk in engine.generate(prompt, sampling) for token in chunk.token_ids]
        return tokens, engine.statistics().steps


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.slow)])
async def test_the_demo_says_the_same_in_half_the_steps(temperature: float) -> None:
    """Held-out code goes on with equal tokens at depths 0, 3 and 7, and drafting takes at most six steps in ten."""
    prompt = held_out_prompts(3)[1][-96:]
    sampling = Sampling(max_tokens=40, temperature=temperature, seed=7, ignore_eos=True)
    plain, steps = await said(demo(0), prompt, sampling)
    for depth in (3, 7):
        drafted, fewer = await said(demo(depth), prompt, sampling)
        assert drafted == plain
        assert fewer <= (0.6 if temperature == 0.0 else 0.8) * steps


@pytest.mark.slow
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
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 20))])
async def test_the_demo_says_the_same_for_many_seeds(temperature: float, seed: int) -> None:
    """Drawn text is that of depth 0 for each seed, at a depth that turns with it."""
    prompt = held_out_prompts(20)[seed][-64:]
    sampling = Sampling(max_tokens=32, temperature=temperature, seed=seed, ignore_eos=True)
    plain, _ = await said(demo(0), prompt, sampling)
    drafted, _ = await said(demo(1 + seed % 7), prompt, sampling)
    assert drafted == plain


@pytest.mark.slow
async def test_acceptance_is_the_training_networks() -> None:
    """On the engine's own greedy text, its drafts are right as often as the trained network's, within 0.02 at each depth."""
    prompts = held_out_prompts(8)
    texts = await drafted_everywhere(demo(DEPTHS), prompts, 96)
    mine, theirs, same = compared(prompts, texts)
    assert max(abs(one - other) for one, other in zip(mine, theirs, strict=True)) <= 0.02, f"{mine}, the network {theirs}"
    assert same >= 0.97, f"first drafts agree in {same:.3f} of the rows"
    assert mine[0] > mine[1] > mine[2] > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["bf16", "q8g64"])
async def test_acceptance_on_a_card(rows: str) -> None:
    """Over half as many rows as the training record's, the rates lie within 0.02 of the network's on the same text."""
    prompts = held_out_prompts(PROMPTS // 2)
    config = demo(DEPTHS, device="cuda", graphs="off", row_format=rows)
    mine, theirs, same = compared(prompts, await drafted_everywhere(config, prompts, NEW_TOKENS))
    print(f"own greedy text, {rows} rows: {mine}; the network on it {theirs}; recorded {recorded()}; first drafts agree in {same:.3f}")
    assert max(abs(one - other) for one, other in zip(mine, theirs, strict=True)) <= 0.02
