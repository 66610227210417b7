"""Generations whose output has a form: what a random model is made to write is valid, and its company gives what it gives without it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest
from engine.sampling import Sampling
from tests.engine.grammar.random_model import CALL, END, THINK_END, random_model, turn
from tests.engine.runs import small

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "größe": {"type": "integer", "minimum": -20, "maximum": 300},
        "kind": {"enum": ["a", "ß🙂", 3, None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "in": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": 0, "maximum": 1}, "y": {"type": "boolean"}},
            "required": ["y"],
            "additionalProperties": False,
        },
        "r": {"$ref": "#/$defs/code"},
    },
    "$defs": {"code": {"type": "string", "pattern": "^[a-cß]{2,4}$"}},
    "required": ["größe", "kind", "in", "r"],
    "additionalProperties": False,
}
WRITE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mode": {"type": "string", "enum": ["a", "w é</b>"]},
        "path": {"type": "string", "maxLength": 6},
        "line": {"type": "integer", "minimum": 1, "maximum": 99},
        "code": {"type": "string", "pattern": "^[0-9]{2}/[a-z]$"},
        "opts": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"], "additionalProperties": False},
    },
    "required": ["mode", "code", "opts"],
}
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": WRITE}},
    {"type": "function", "function": {"name": "now"}},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with Engine.open(model, small()) as engine:
        yield engine


def checked(calls: list[tuple[str | None, Any]]) -> None:
    """Every call is of a tool that there is, with arguments of its schema."""
    for name, arguments in calls:
        if name == "write":
            jsonschema.validate(arguments, WRITE)
        else:
            assert (name, arguments) == ("now", {})


async def valid_json(engine: Engine, seed: int) -> None:
    got = await turn(engine, seed=seed, response_format=FORMAT)
    assert got.finish_reason in ("stop", "length"), seed
    if got.finish_reason == "stop":
        jsonschema.validate(json.loads(got.parts.content), SCHEMA)
    else:
        assert len(got.token_ids) == 300, seed


async def test_json_is_of_its_schema(engine: Engine) -> None:
    """A whole value of the schema, names and texts outside ASCII included."""
    got = await turn(engine, seed=5, response_format=FORMAT)
    assert got.finish_reason == "stop"
    jsonschema.validate(json.loads(got.parts.content), SCHEMA)


@pytest.mark.slow
async def test_json_of_many_seeds_is_of_its_schema(engine: Engine) -> None:
    """Thirty seeds, six at once: every text that is whole is valid, and what its length cut off says so."""
    for first in range(0, 30, 6):
        await asyncio.gather(*(valid_json(engine, seed) for seed in range(first, first + 6)))


@pytest.mark.parametrize(
    ("fields", "whole"),
    [
        ({"guided_regex": r"[ab]{3}/\d{1,4}\n?(x|ü)"}, r"[ab]{3}/[0-9]{1,4}\n?(x|ü)"),
        ({"structured_outputs": {"choice": ["yes", 'n"ö', "no"]}}, 'yes|n"ö|no'),
        ({"guided_grammar": 'start: "x" y y\ny: /[0-3]/ "-"'}, "x([0-3]-){2}"),
        ({"structured_outputs": {"grammar": 'root ::= "hi " ("there" | "you") "!"'}}, "hi (there|you)!"),
        ({"guided_json": '{"type": "array", "items": {"const": 7}, "minItems": 2, "maxItems": 2}'}, r"\[\s*7\s*,\s*7\s*\]"),
    ],
)
async def test_texts_match_what_was_asked(engine: Engine, fields: dict[str, Any], whole: str) -> None:
    """Expressions, choices and grammars hold for the whole text, and the generation ends by itself where nothing can follow."""
    for seed in range(2):
        got = await turn(engine, seed=seed, **fields)
        assert re.fullmatch(whole, got.text), got.text
        assert got.finish_reason == "stop"


async def test_a_text_that_may_go_on_ends_with_an_end_of_text(engine: Engine) -> None:
    """Where the form is complete and more could follow, the model's own end is allowed: here it is made likely, and ignored."""
    ended = await turn(engine, seed=1, guided_regex="a+", logit_bias={str(END): 60})
    assert re.fullmatch("a+", ended.text)
    assert (ended.finish_reason, ended.token_ids[-1]) == ("stop", END)
    cut = await turn(engine, seed=1, guided_regex="a+", logit_bias={str(END): 60}, ignore_eos=True, max_tokens=9)
    assert re.fullmatch("a+", cut.text)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 9)


async def test_a_form_begins_behind_the_reasoning(engine: Engine) -> None:
    """The reasoning is what the model likes, without an end of text; the form holds from the first token behind `</think>`."""
    more = {"logit_bias": {str(THINK_END): 9, str(END): 12}, "reasoning": True}
    got = await turn(engine, seed=2, guided_choice=["left", "right"], **more)
    assert got.parts.content in ("left", "right")
    assert len(got.token_ids) > got.token_ids.index(THINK_END) > 0
    assert END not in got.token_ids
    cut = await turn(engine, seed=2, guided_choice=["left"], max_tokens=1, reasoning=True)
    assert (cut.finish_reason, cut.parts.content) == ("length", "")


async def test_a_required_call_is_one_with_arguments_of_its_schema(engine: Engine) -> None:
    """`required` gives calls and no text; raw strings, enumerations, patterns and JSON values are of the declared schema."""
    likely = {str(THINK_END): 9, str(CALL): 9, str(END): 12}
    got = await turn(engine, seed=1, tools=TOOLS, tool_choice="required", reasoning=True, logit_bias=likely)
    assert (got.finish_reason, got.parts.content) == ("stop", "")
    assert got.calls
    checked(got.calls)


@pytest.mark.slow
async def test_a_named_function_is_called_once_where_calls_do_not_come_together(engine: Engine) -> None:
    """The named function is called, whatever else there is, and one call ends the turn."""
    choice = {"type": "function", "function": {"name": "write"}}
    got = await turn(engine, seed=1, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert got.finish_reason == "stop"
    assert [name for name, _ in got.calls] == ["write"]
    checked(got.calls)


@pytest.mark.slow
async def test_a_strict_tool_is_kept_where_the_model_calls_it(engine: Engine) -> None:
    """With `auto` text is free; behind `<tool_call>` a strict tool's arguments are of its schema, another's are what the model writes."""
    tools = [{"type": "function", "function": {"name": "write", "parameters": WRITE, "strict": True}}, TOOLS[1]]
    written = await turn(engine, seed=3, tools=tools[:1], logit_bias={str(CALL): 6}, max_tokens=120)
    text, _, rest = written.text.partition("<tool_call>")
    assert text
    assert rest.startswith("write<arg_key>mode</arg_key><arg_value>")
    name, arguments = written.parts.calls[0].name, json.loads(written.parts.calls[0].arguments)
    checked([(name, arguments)])
    free = await turn(engine, seed=0, tools=tools[1:], logit_bias={str(CALL): 60}, max_tokens=4)
    assert not free.text.startswith("<tool_call>now")
    other = await turn(engine, seed=0, tools=tools, logit_bias={str(CALL): 60}, max_tokens=12)
    assert other.text.startswith(("<tool_call>now", "<tool_call>write<arg_key>mode"))


async def test_an_answer_is_calls_or_the_form_where_the_model_may_choose(engine: Engine) -> None:
    """With tools and a format the turn begins with a call or is the format, nothing else; a bias shows both."""
    asked: dict[str, Any] = {"tools": TOOLS[1:], "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}}
    calls = await turn(engine, seed=0, logit_bias={str(CALL): 60}, parallel_tool_calls=False, **asked)
    assert (calls.calls, calls.parts.content) == ([("now", {})], "")
    plain = await turn(engine, seed=0, logit_bias={str(CALL): -100}, **asked)
    assert (plain.calls, plain.parts.content) == ([], "5")


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_depth": 3},
        pytest.param({"graphs": "on"}, marks=pytest.mark.slow),
        pytest.param({"placement": "resident", "decode_batch_limit": 2}, marks=pytest.mark.slow),
    ],
)
async def test_company_is_not_touched(model: Path, changes: dict[str, Any]) -> None:
    """Requests beside ones with a form give the tokens that they give alone, and so do those with a form, drafts and replays included."""
    prompt = [5, 17, 900, 44, 3, 61, 1200]
    plain = [Sampling(max_tokens=12, temperature=0.9, seed=seed, ignore_eos=True) for seed in (1, 2)]
    config: EngineConfig = small(**changes)
    async with Engine.open(model, config) as engine:

        async def free(sampling: Sampling) -> tuple[int, ...]:
            return (await engine.generate(prompt, sampling).complete()).token_ids

        async def formed() -> tuple[int, ...]:
            return (await turn(engine, seed=4, guided_regex="[a-z]{20,24}", presence_penalty=0.5)).token_ids

        alone = [await free(plain[0]), await formed(), await free(plain[1])]
        together = await asyncio.gather(free(plain[0]), formed(), free(plain[1]))
    assert list(together) == alone


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "auto"])
async def test_a_card_keeps_forms(model: Path, graphs: str) -> None:
    """On a card, with drafts and replays, JSON is of its schema, calls are of theirs, and requests beside them are not touched."""
    prompt = [5, 17, 900, 44, 3, 61, 1200]
    plain = Sampling(max_tokens=60, temperature=0.9, seed=1, ignore_eos=True)
    config = small(device="cuda", dtype="f32", row_format="q8g64", graphs=graphs, draft_depth=3, decode_batch_limit=4)
    async with Engine.open(model, config) as engine:
        alone = (await engine.generate(prompt, plain).complete()).token_ids
        beside, *turns = await asyncio.gather(
            engine.generate(prompt, plain).complete(),
            turn(engine, seed=5, response_format=FORMAT),
            turn(engine, seed=6, response_format=FORMAT),
            turn(engine, seed=1, tools=TOOLS, tool_choice="required", logit_bias={str(END): 12}),
        )
    assert beside.token_ids == alone
    for got in turns[:2]:
        assert got.finish_reason == "length" or jsonschema.validate(json.loads(got.parts.content), SCHEMA) is None
    if turns[2].finish_reason == "stop":
        checked(turns[2].calls)


async def test_what_is_no_form_is_refused_before_anything_begins(engine: Engine) -> None:
    """Expressions, grammars and schemas that cannot be kept are refused by name, with the library's reason."""
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"guided_regex": "(("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "nope"}, "guided_grammar", "Expected"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "not a grammar"),
        ({"guided_json": {"type": "zzz"}}, "guided_json", "Invalid type"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ]
    for fields, field, reason in cases:
        with pytest.raises(BadRequest, match=reason) as caught:
            await turn(engine, **fields)
        assert caught.value.field == field
        assert "\n" not in str(caught.value)
    assert engine.statistics().running == 0


async def test_a_grammar_that_leads_nowhere_ends_its_request_alone(engine: Engine) -> None:
    """A form that no token can begin is an error of its request."""
    with pytest.raises(BadRequest, match="guided_regex: no text is of this form"):
        await turn(engine, guided_regex="[^\\s\\S]x")
    assert (await turn(engine, guided_choice=["ok"])).text == "ok"
