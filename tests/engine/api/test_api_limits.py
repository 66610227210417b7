"""Sizes: what is refused by its length alone, and what a refusal repeats."""

import json

import pytest

from engine.api import check_prompt_size, check_text_size, check_tools_size, encode, error_body, parse_chat, parse_completion, to_sampling
from engine.errors import BadRequest, shown
from engine.sampling import Sampling


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([1] * 7, None), ([1] * 8, "prompt"), ([], None),
        ("x" * 128, None), ("x" * 129, "prompt"), ("", None),
        ([{"role": "user", "content": "x" * 64}, {"role": "user", "content": "x" * 64}], None),
        ([{"role": "user", "content": "x" * 64}, {"role": "user", "content": "x" * 65}], "messages"),
        ([{"role": "assistant", "content": "", "reasoning_content": "x" * 900}], None),
    ],
)  # fmt: skip
def test_a_prompt_is_refused_by_its_length(prompt: object, field: str | None) -> None:
    """With a context of 8 tokens 7 ids or 128 characters are the most, and the refusal says both numbers."""
    if field is None:
        check_prompt_size(prompt, 8)  # type: ignore[arg-type]  # prompts of every kind
        return
    with pytest.raises(BadRequest, match=r"\b(8|129)\b") as caught:
        check_prompt_size(prompt, 8)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_rendered_text_is_refused_under_its_own_name() -> None:
    """The text of messages is refused as messages."""
    check_text_size(16, 1, "messages")
    with pytest.raises(BadRequest, match="17 characters") as caught:
        check_text_size(17, 1, "messages")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stop": ["a"] * 16}, None), ({"stop": ["a"] * 17}, "stop"), ({"stop": "a" * 1_024}, None), ({"stop": "a" * 1_025}, "stop"),
        ({"stop": ["a", "b" * 1_025]}, "stop"), ({"stop": ["a", ""]}, "stop"),
        ({"stop_token_ids": [1] * 64}, None), ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "a"}] * 4_096}, None),
        ({"messages": [{"role": "user", "content": "a"}] * 4_097}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4_097}]}, "messages[0].content"),
        ({"repetition_penalty": 1e-3}, None), ({"repetition_penalty": 9.9e-4}, "repetition_penalty"),
        ({"top_k": 2**31 - 1}, None), ({"top_k": 2**31}, "top_k"), ({"max_tokens": 2**31}, "max_tokens"),
    ],
)  # fmt: skip
def test_lists_have_an_end(fields: dict[str, object], named: str | None) -> None:
    """The longest list or text that is served is, and one more is refused by name."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]} | fields).encode()
    if named is None:
        to_sampling(parse_chat(body))
        return
    with pytest.raises(BadRequest) as caught:
        to_sampling(parse_chat(body))
    assert caught.value.field == named
    assert len(str(caught.value)) < 200


LONG = "y" * 5_000
DIGITS = int("9" * 4_000)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": LONG}, {"stop": [LONG] * 3}, {"top_k": DIGITS}, {"n": DIGITS}, {"seed": DIGITS}, {"max_tokens": DIGITS},
        {"max_tokens": -DIGITS}, {"stream": LONG}, {"suffix": LONG}, {"top_p": 10**300}, {"best_of": DIGITS}, {"stop_token_ids": [LONG]},
    ],
    ids=map(str, range(12)),
)  # fmt: skip
def test_a_refusal_repeats_little(fields: dict[str, object]) -> None:
    """However long the thing that is wrong, at most 100 characters of it come back."""
    with pytest.raises(BadRequest) as caught:
        to_sampling(parse_completion(json.dumps({"prompt": "a"} | fields).encode()))
    message = str(caught.value)
    assert message.count("y") + message.count("9") <= 110
    assert len(message) < 220


def test_an_enum_value_is_cut_too() -> None:
    """A role of thousands of characters is refused in one short line."""
    with pytest.raises(BadRequest, match="invalid enum value") as caught:
        parse_chat(json.dumps({"messages": [{"role": LONG}]}).encode())
    assert len(str(caught.value)) < 200


VALUES = [LONG, [LONG] * 9, [[LONG]], {"a": LONG}, DIGITS, 10**5_000, tuple(range(9_000)), "a\nb", 1.5, None, "ü" * 300]


@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_shown_is_one_short_line(value: object) -> None:
    """Any value is shown in at most 100 characters without a line end."""
    assert 0 < len(shown(value)) <= 100
    assert "\n" not in shown(value)


def test_shown_leaves_short_values_alone() -> None:
    """What is short is shown as Python writes it."""
    assert [shown(value) for value in ("ab", 3, -1.5, ("a", "b"), None)] == ["'ab'", "3", "-1.5", "('a', 'b')", "None"]


def test_a_sampling_of_the_library_is_checked_too() -> None:
    """The limits are those of Sampling, whoever builds it."""
    for field, value in (("stop", ("a" * 1_025,)), ("stop_token_ids", tuple(range(65))), ("repetition_penalty", 1e-9), ("top_k", DIGITS)):
        with pytest.raises(BadRequest) as caught:
            Sampling(**{field: value})  # type: ignore[arg-type]  # one field at a time
        assert caught.value.field == field


def test_the_body_of_any_failure_is_short() -> None:
    """A template that repeats the whole prompt in its error does not send it back."""
    _, body = error_body(BadRequest("messages: " + LONG * 100))
    assert len(encode(body)) < 700


def test_tools_are_bounded_as_texts_are() -> None:
    """Tools that would be written out as more than the context can hold are refused by their length; fewer, and none, pass."""
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 100}}
    check_tools_size(None, 1)
    check_tools_size([tool], 100)
    with pytest.raises(BadRequest, match=r"tools has .* characters") as caught:
        check_tools_size([tool] * 20, 100)
    assert caught.value.field == "tools"
