"""Grammars of an engine: compiled once, off the loop, kept within bounds, and refused in a line where the library is not there."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy
import pytest

from engine.api.call_grammar import calls_form
from engine.errors import BadRequest, NotAdmitted
from engine.grammar import compiled
from engine.grammar.compiled import Grammars
from engine.grammar.form import GRAMMAR_BYTES_MAX, Form
from engine.text.tokenizer import Tokenizer
from tests.engine.grammar.random_model import DEMO


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    made = Grammars(Tokenizer.load(DEMO), 2048, (2027,))
    yield made
    await made.close()


def held_up(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Compiling waits for the event; what was compiled is listed."""
    go, seen, real = threading.Event(), list[str](), grammars._compile

    def compile_when_told(form: Form) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert go.wait(60)
        seen.append(form.grammar)
        return real(form)

    monkeypatch.setattr(grammars, "_compile", compile_when_told)
    return go, seen


async def test_equal_grammars_are_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for one grammar share it, whatever field asked; one that leaves takes nothing from the others."""
    go, seen = held_up(grammars, monkeypatch)
    asked = [asyncio.ensure_future(grammars.compiled(Form("start: /a/", field))) for field in "xyz"]
    await asyncio.sleep(0)
    asked[0].cancel()
    await asyncio.wait(asked[:1])
    go.set()
    found = [await one for one in asked[1:]]
    assert found[0] is found[1] is await grammars.compiled(Form("start: /a/", "w"))
    assert seen == ["start: /a/"]


async def test_what_is_kept_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many the one that was asked for longest ago is forgotten and compiled again when it is asked for."""
    monkeypatch.setattr(compiled, "_KEPT_MAX", 3)
    go, seen = held_up(grammars, monkeypatch)
    go.set()
    for letter in "abcadb":
        await grammars.compiled(Form(f"start: /{letter}/", "f"))
    assert [text[-2] for text in seen] == ["a", "b", "c", "d", "b"]


async def test_who_waits_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """More grammars than may wait are refused for now, with a time to come again; those that wait are served."""
    monkeypatch.setattr(compiled, "_WAITING_MAX", 2)
    go, _ = held_up(grammars, monkeypatch)
    waiting = [asyncio.ensure_future(grammars.compiled(Form(f"start: /{letter}/", "f"))) for letter in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(NotAdmitted, match="wait to be compiled") as caught:
        await grammars.compiled(Form("start: /c/", "f"))
    assert caught.value.status == 429
    go.set()
    await asyncio.gather(*waiting)
    await grammars.compiled(Form("start: /c/", "f"))


async def test_without_the_library_a_form_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what to install."""
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match=r"response_format needs .* pip install 'forebay\[grammar\]'") as caught:
        await grammars.compiled(Form("start: /a/", "response_format"))
    assert (caught.value.status, caught.value.field) == (400, "response_format")


async def test_forms_need_a_tokenizer_and_a_size() -> None:
    """A model without a tokenizer has no forms, and a grammar of megabytes is not even tried."""
    with pytest.raises(BadRequest, match="needs the model's tokenizer"):
        await Grammars(Tokenizer(None), 96, ()).compiled(Form("start: /a/", "f"))
    with pytest.raises(BadRequest, match=f"longer than {GRAMMAR_BYTES_MAX} bytes"):
        await Grammars(Tokenizer.load(DEMO), 2048, ()).compiled(Form("start: /" + "a" * GRAMMAR_BYTES_MAX + "/", "f"))


@pytest.mark.parametrize(
    "text", ["start: " + "(" * 5_000 + '"a"' + ")" * 5_000, "start: /" + "(" * 5_000 + "a" + ")" * 5_000 + "/", 'start: start "a"']
)
async def test_grammars_made_to_cost_are_refused(grammars: Grammars, text: str) -> None:
    """What is nested without end or never begins is refused in a short line, and the next grammar compiles."""
    with pytest.raises(BadRequest, match="guided_grammar") as caught:
        await grammars.compiled(Form(text, "guided_grammar"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    await grammars.compiled(Form("start: /a/", "f"))


@pytest.mark.parametrize(
    "schema",
    [
        *({"minLength": low, "maxLength": high} for low in (1, 16, 32, 64) for high in (32, 33, 64, 255, 4_096) if low <= high),
        {"maxLength": 64}, {"maxLength": 4_096}, {"minLength": 55}, {"minLength": 4_096}, {"pattern": "^.{1,100}$"},
        {"pattern": "^a.{0,99}b$"}, {"pattern": "^.{1,30}-.{1,30}$"}, {"pattern": "^.{1,16}-.{1,16}$"}, {"pattern": "^(.{1,9}){9}$"},
        {"pattern": "x{2,50}"}, {"pattern": ".{1,8}x.{1,8}"}, {"pattern": "^<.*[a-z]{1,8}.{1,8}>$"},
        {"pattern": "^.{1,16}$", "minLength": 1, "maxLength": 16}, {"pattern": "^[a-z_]{1,64}$", "minLength": 1, "maxLength": 4_096},
        {"pattern": r"^\S+$", "minLength": 1, "maxLength": 64}, {"pattern": "^[^\\n]{1,100}$"}, {"pattern": "^[ -~]{1,100}$"},
    ],
)  # fmt: skip
async def test_strings_of_calls_can_be_written(grammars: Grammars, schema: dict[str, Any]) -> None:
    """Usual lengths and patterns do not cost more than a step may: random values, and ones full of beginnings of the mark, go on."""
    parameters = {"type": "object", "properties": {"s": {"type": "string", **schema}}, "required": ["s"]}
    form = calls_form([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required", parallel=False)
    assert form is not None
    begun = await grammars.compiled(form)
    tokenizer = grammars._tokenizer
    for seed in range(3):
        chance, matcher, words = random.Random(seed), begun.deep_copy(), numpy.zeros(2048 // 32 + 1, dtype=numpy.int32)
        for token in tokenizer.encode("<tool_call>f<arg_key>s</arg_key><arg_value>"):
            assert matcher.consume_token(token)
        for _ in range(60):
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            assert not matcher.is_error(), matcher.get_error()
            allowed = numpy.unpackbits(words.view(numpy.uint8), bitorder="little")[:2027].nonzero()[0].tolist()
            marks = [token for token in tokenizer.encode("</arg_value") if token in allowed]
            if not allowed:
                break
            assert matcher.consume_token(chance.choice(marks if marks and seed else allowed))


async def test_a_value_that_costs_too_much_is_refused_before_a_request_begins(grammars: Grammars) -> None:
    """What a step could not pay for inside a call is found when the grammar is compiled."""
    text = r'start: "x" V\nV: (/.{1,999}/ & ~/(?s:.*)<\/arg_value>(?s:.*)/) "</arg_value>"'.replace("\\n", "\n")
    with pytest.raises(BadRequest, match=r"^tool_choice: [a-z: ]*too many[a-z ]*$"):
        await grammars.compiled(Form(text, "tool_choice", calls=True))
