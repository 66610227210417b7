"""Prompts as token ids, above all what is said again in a later turn of a session."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest
from engine.prompts import Prompts
from engine.sampling import Sampling
from engine.text import ChatTemplate, Tokenizer

TOKENIZER = Path(__file__).resolve().parents[2] / "engine" / "demo_model"
TEMPLATE = """\
[gMASK]<sop>
{%- if tools -%}<|system|># Tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}{%- endif -%}
{%- if reasoning_effort is defined -%}<|system|>Reasoning Effort: {{ reasoning_effort }}{%- endif -%}
{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|><think>{%- endif -%}
"""
TOOLS = [{"type": "function", "function": {"name": "read"}}]
OTHERS = [{"type": "function", "function": {"name": "write"}}]
TURN = [{"role": "user", "content": "hi"}]
TOLD = "<|system|># Tools " + json.dumps(TOOLS[0])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


def prompts_of(tokenizer: Tokenizer, template: str = TEMPLATE) -> Prompts:
    return Prompts(tokenizer, ChatTemplate(template), tokenizer.vocabulary)


@pytest.mark.parametrize(
    ("first", "later", "said"),
    [
        ({}, {}, ""),
        ({"tools": TOOLS}, {"tools": TOOLS}, ""),
        ({"tools": TOOLS, "reasoning_effort": "high"}, {"tools": TOOLS, "reasoning_effort": "high"}, ""),
        ({}, {"tools": TOOLS}, TOLD),
        ({"tools": OTHERS}, {"tools": TOOLS}, TOLD),
        ({"tools": TOOLS}, {}, ""),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "max"}, "<|system|>Reasoning Effort: max"),
    ],
)
async def test_a_session_is_told_of_its_tools_once(
    tokenizer: Tokenizer, first: dict[str, object], later: dict[str, object], said: str
) -> None:
    """A later turn leaves out what its session begins with; tools or an effort that it does not begin with are said."""
    prompts = prompts_of(tokenizer)
    held = await prompts.tokens(TURN, first, continues=False)
    again = await prompts.tokens(TURN, later, continues=True, held=held)
    assert tokenizer.decode(again) == f"{said}<|user|>hi<|assistant|><think>"


async def test_tools_are_said_where_the_first_turn_has_not_run(tokenizer: Tokenizer) -> None:
    """As long as nobody knows what a session begins with its next turn says it all but the marks of the beginning."""
    again = await prompts_of(tokenizer).tokens(TURN, {"tools": TOOLS}, continues=True)
    assert tokenizer.decode(again) == f"{TOLD}<|user|>hi<|assistant|><think>"


@pytest.mark.parametrize(
    ("ended", "role", "said"),
    [
        ("ok<|user|>", "user", "hi<|assistant|><think>"),
        ("ok<|observation|>", "observation", "hi<|assistant|><think>"),
        ("ok<|observation|>", "user", "<|user|>hi<|assistant|><think>"),
        ("cut off", "user", "<|user|>hi<|assistant|><think>"),
    ],
)
async def test_the_mark_that_ended_a_turn_begins_the_next_one(tokenizer: Tokenizer, ended: str, role: str, said: str) -> None:
    """A model ends its turn with the mark of the next: it stands there once, and a turn that was cut off has it before it."""
    prompts = prompts_of(tokenizer)
    held = [*await prompts.tokens(TURN, {}, continues=False), *tokenizer.encode(f"hm</think>{ended}")]
    again = await prompts.tokens([{"role": role, "content": "hi"}], {}, continues=True, held=held)
    assert tokenizer.decode(again) == said


async def test_a_word_that_both_turns_share_is_said_twice(tokenizer: Tokenizer) -> None:
    """Only marks are left out: a text may begin as the one before it ended."""
    prompts = prompts_of(tokenizer, "{{ messages[0].content if messages else '' }}")
    held = tokenizer.encode("one")
    assert list(await prompts.tokens([{"role": "user", "content": "one"}], {}, continues=True, held=held)) == held


async def test_a_template_that_renders_no_turn_at_all(tokenizer: Tokenizer) -> None:
    """Where the beginning cannot be told from the turn all of it is said."""
    prompts = prompts_of(tokenizer, "<sop>{{ messages[0].content }}{{ messages[0].role.upper() }}")
    assert tokenizer.decode(await prompts.tokens(TURN, {}, continues=True, held=[1])) == "<sop>hiUSER"


async def test_a_long_list_of_ids_leaves_the_loop_its_turns(tokenizer: Tokenizer) -> None:
    """Others run while it is checked, what is bad at its end is found, and the ids come back as they were."""
    prompts, turns = prompts_of(tokenizer), 0
    ids = [number % tokenizer.vocabulary for number in range(50_000)]

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    found = await prompts.tokens(ids, {}, continues=False)
    beside.cancel()
    assert turns >= 5
    assert list(found) == ids
    for bad in (-1, tokenizer.vocabulary):
        with pytest.raises(BadRequest, match=f"token id {bad} is outside"):
            await prompts.tokens([*ids, bad, 0], {}, continues=False)


@pytest.mark.parametrize("prompt", [[1, "a"], [1, TURN[0]], [TURN[0], 1], ["a"], [1.0], b"ab", 5])
async def test_what_is_no_prompt_is_refused(tokenizer: Tokenizer, prompt: Any) -> None:
    """Ids and messages do not mix, and nothing else is either."""
    with pytest.raises(BadRequest, match="a prompt is a text, token ids, or chat messages"):
        await prompts_of(tokenizer).tokens(prompt, {}, continues=False)


def test_biases_are_of_tokens_that_the_model_has(tokenizer: Tokenizer) -> None:
    """The last id of the vocabulary has a bias, the one past it none."""
    prompts, last = prompts_of(tokenizer), tokenizer.vocabulary - 1
    prompts.check_bias([(0, 1.0), (last, 1.0)])
    with pytest.raises(BadRequest, match="logit_bias"):
        prompts.check_bias([(last + 1, 1.0)])


async def test_a_session_of_chat_turns_is_the_whole_conversation() -> None:
    """Turn by turn a session comes to hold the tokens of the whole conversation's prompt, each mark once."""
    async with Engine.open(TOKENIZER, EngineConfig(hot_rows=256, host_memory_bytes=64 << 20, context_max=1024)) as engine:
        session = await engine.create_session()
        messages: list[dict[str, object]] = []
        for question in ("What does bisect do?", "And heapq?"):
            messages.append({"role": "user", "content": question})
            generation = engine.generate(messages[-1:], Sampling(max_tokens=60, temperature=0.0), session=session)
            held = await generation.prompt()
            await generation.complete()
            assert held == await engine.generate(messages, Sampling(max_tokens=1)).prompt()
            answer = engine.tokenizer.decode(engine.sessions[session].token_ids[len(held) :])
            assert answer.endswith("<|user|>"), "the turn ended by itself"
            reasoning, _, content = answer.removesuffix("<|user|>").partition("</think>")
            messages.append({"role": "assistant", "content": content, "reasoning_content": reasoning})
