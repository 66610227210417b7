"""Requests that join and leave at random, and what each says alone: for the CPU and for a card."""

import asyncio
import random
from dataclasses import dataclass, replace

from engine.engine import Engine
from engine.sampling import PRIORITY_MAX, Sampling
from tests.engine.runs import Run, greedy

__all__ = ["Guest", "alone", "check_company", "guests", "together"]


@dataclass(frozen=True)
class Guest:
    """One request: comes at step `joins`, leaves after `leaves` tokens, or stays to its end."""

    prompt: tuple[int, ...]
    sampling: Sampling
    joins: int
    leaves: int
    key: str


def guests(seed: int, count: int, vocabulary: int, *, rows_max: int, tokens_max: int) -> list[Guest]:
    """Drawn from a seed: short and long prompts, greedy and not, urgent and not, of two keys; a third of them leave early."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        rows, tokens = rng.choice((1, 20, 65, rows_max)), rng.randint(2, tokens_max)
        sampling = greedy(tokens) if rng.random() < 0.5 else replace(greedy(tokens), temperature=0.8, seed=number)
        sampling = replace(sampling, priority=rng.randint(-PRIORITY_MAX, PRIORITY_MAX), draft_depth=rng.choice((None, 0)))
        leaves = rng.randint(1, tokens) if rng.random() < 0.3 else tokens
        prompt = tuple(rng.randrange(vocabulary) for _ in range(rows))
        made.append(Guest(prompt, sampling, rng.randrange(tokens_max), leaves, rng.choice("ab")))
    return made


async def _said(engine: Engine, guest: Guest, leaves: int) -> Run:
    found = Run()
    async with engine.generate(list(guest.prompt), guest.sampling, namespace=guest.key) as generation:
        async for chunk in generation:
            found.tokens.extend(chunk.token_ids)
            found.logits.extend(chunk.logits)
            if len(found.tokens) >= leaves:
                break
    return found


async def together(engine: Engine, made: list[Guest]) -> list[Run]:
    """All of them, each coming when the engine has made so many steps, or when nobody else is there to make them."""
    before = engine.statistics().steps

    async def come(guest: Guest) -> Run:
        while (now := engine.statistics()).steps - before < guest.joins and now.running + now.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return await _said(engine, guest, guest.leaves)

    return await asyncio.gather(*(come(guest) for guest in made))


async def alone(engine: Engine, guest: Guest) -> Run:
    """The request with nobody beside it, to its end."""
    return await _said(engine, guest, guest.sampling.max_tokens or 0)


async def check_company(engine: Engine, made: list[Guest]) -> None:
    """Tokens and logits of each are to the bit those it gives alone, as far as it stayed; and there was company."""
    before = engine.statistics().steps
    found = await together(engine, made)
    steps = engine.statistics().steps - before
    assert steps < sum(len(run.tokens) for run in found), "no two ever shared a step"
    for number, (run, guest) in enumerate(zip(found, made, strict=True)):
        assert len(run.tokens) >= guest.leaves, f"guest {number} heard {len(run.tokens)} tokens"
        whole = await alone(engine, guest)
        cut = Run(whole.tokens[: len(run.tokens)], whole.logits[: len(run.logits)])
        assert run.same_bits(cut), f"guest {number} of {len(made)}: {guest}"
