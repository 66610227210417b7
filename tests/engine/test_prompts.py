"""Prompts as token ids, above all what is said again in a later turn of a session."""

import json
from pathlib import Path

import pytest

from engine.errors import BadRequest
from engine.prompts import Prompts
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


async def test_a_template_that_renders_no_turn_at_all(tokenizer: Tokenizer) -> None:
    """Where the beginning cannot be told from the turn all of it is said."""
    prompts = prompts_of(tokenizer, "<sop>{{ messages[0].content }}{{ messages[0].role.upper() }}")
    assert tokenizer.decode(await prompts.tokens(TURN, {}, continues=True, held=[1])) == "<sop>hiUSER"


def test_biases_are_of_tokens_that_the_model_has(tokenizer: Tokenizer) -> None:
    """The last id of the vocabulary has a bias, the one past it none."""
    prompts, last = prompts_of(tokenizer), tokenizer.vocabulary - 1
    prompts.check_bias([(0, 1.0), (last, 1.0)])
    with pytest.raises(BadRequest, match="logit_bias"):
        prompts.check_bias([(last + 1, 1.0)])
