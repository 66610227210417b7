"""Requests to the engine's values."""

import json

import pytest

from engine.api import (
    parse_chat,
    parse_completion,
    parse_tokenize,
    template_arguments,
    to_messages,
    to_prompt,
    to_sampling,
    to_samplings,
    wants_usage,
)
from engine.api.requests import ChatRequest, CompletionRequest
from engine.errors import BadRequest
from engine.sampling import Sampling


def chat(**fields: object) -> ChatRequest:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode())


def completion(**fields: object) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "once"} | fields).encode())


def messages(*given: dict[str, object]) -> list[object]:
    return list(to_messages(chat(messages=list(given))))


SHARED: dict[str, object] = {
    "max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 9, "min_p": 0.125, "seed": -3, "repetition_penalty": 1.5,
    "presence_penalty": -1.0, "frequency_penalty": 2.0, "stop": ["a", "b"], "stop_token_ids": [4, 5], "ignore_eos": True, "draft_depth": 2,
}  # fmt: skip


def test_every_sampling_field_arrives() -> None:
    """Each field of the request is the field of the same meaning of Sampling, on both endpoints."""
    expected = Sampling(
        max_tokens=7, temperature=0.5, top_p=0.25, top_k=9, min_p=0.125, seed=-3, repetition_penalty=1.5, presence_penalty=-1.0,
        frequency_penalty=2.0, stop=("a", "b"), stop_token_ids=(4, 5), ignore_eos=True, draft_depth=2, include_stop=True,
    )  # fmt: skip
    fields = SHARED | {"include_stop_str_in_output": True}
    assert to_sampling(chat(**fields)) == expected
    assert to_sampling(completion(**fields)) == expected


def test_nothing_given_is_the_default() -> None:
    """A bare request samples as Sampling() does, without a maximum of its own."""
    assert to_sampling(chat()) == Sampling() == to_sampling(completion())


def test_a_models_defaults_fill_what_is_left_out() -> None:
    """Values of generation_config.json hold until the request says otherwise, zero included."""
    defaults = Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1)
    assert to_sampling(chat(), defaults) == defaults
    assert to_sampling(chat(temperature=0, top_p=0.5), defaults) == Sampling(temperature=0.0, top_p=0.5, repetition_penalty=1.1)


def test_temperature_zero_goes_with_top_p() -> None:
    """Greedy with filters is a valid request."""
    assert to_sampling(chat(temperature=0, top_p=0.5)).temperature == 0.0


@pytest.mark.parametrize(("given", "expected"), [("x", ("x",)), (["x"], ("x",)), ([], ()), (["x", "y"], ("x", "y"))])
def test_stop_is_one_text_or_many(given: object, expected: tuple[str, ...]) -> None:
    """A single text is a list of one, and an empty list is none."""
    assert to_sampling(chat(stop=given)).stop == expected


@pytest.mark.parametrize(("given", "expected"), [(-1, 0), (0, 0), (1, 1), (2**31 - 1, 2**31 - 1)])
def test_top_k_minus_one_is_off(given: int, expected: int) -> None:
    """-1 and 0 both switch top-k off."""
    assert to_sampling(chat(top_k=given)).top_k == expected


@pytest.mark.parametrize("fields", [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 9, "max_completion_tokens": 9}])
def test_either_maximum_counts(fields: dict[str, object]) -> None:
    """max_tokens and max_completion_tokens mean the same."""
    assert to_sampling(chat(**fields)).max_tokens == 9


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"top_logprobs": 0}, None),
    ],
)
def test_chat_logprobs_are_a_switch_and_a_count(fields: dict[str, object], expected: int | None) -> None:
    """logprobs true alone asks for the chosen token only."""
    assert to_sampling(chat(**fields)).logprobs == expected


@pytest.mark.parametrize("count", [None, 0, 1, 20])
def test_completion_logprobs_are_a_count(count: int | None) -> None:
    """logprobs 0 is on, with the chosen token only; null is off."""
    assert to_sampling(completion(logprobs=count)).logprobs == count


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": 101}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"), ({"min_p": -0.1}, "min_p"), ({"min_p": 1.1}, "min_p"), ({"seed": 2**63}, "seed"),
        ({"seed": 10**40}, "seed"), ({"repetition_penalty": 0}, "repetition_penalty"), ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"), ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop"),
    ],
)  # fmt: skip
def test_values_out_of_range_name_the_field(fields: dict[str, object], field: str) -> None:
    """What no generation can use is a bad request with the field's name, on both endpoints."""
    for request in (chat(**fields), completion(**fields)):
        with pytest.raises(BadRequest) as caught:
            to_sampling(request)
        assert caught.value.field == field


@pytest.mark.parametrize("count", [-1, 21])
def test_completion_logprobs_out_of_range(count: int) -> None:
    """Completions allow 0 to 20 logprobs."""
    with pytest.raises(BadRequest, match="logprobs must be between 0 and 20"):
        to_sampling(completion(logprobs=count))


def test_usage_is_wanted_only_when_asked_for() -> None:
    """stream_options without include_usage asks for nothing."""
    assert not wants_usage(chat())
    assert not wants_usage(chat(stream=True, stream_options={}))
    assert wants_usage(completion(stream=True, stream_options={"include_usage": True}))


@pytest.mark.parametrize(("prompt", "expected"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([0], [0]), ([[0]], [0])])
def test_one_prompt_in_any_form(prompt: object, expected: object) -> None:
    """A text, a list of one text, ids, and a list of one list of ids are one prompt."""
    assert to_prompt(completion(prompt=prompt)) == expected


def test_content_is_always_text() -> None:
    """Parts are put together as they stand, null is empty, and developer is system."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert messages({"role": "developer", "content": parts}, {"role": "assistant", "content": None}, {"role": "user", "content": []}) == [
        {"role": "system", "content": "a b"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_extra_fields_of_messages_reach_the_template_when_given() -> None:
    """Reasoning, name and call id are passed on, and only when they were sent."""
    assert messages(
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
    ) == [
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": "é", "b": [1]}', {"a": "é", "b": [1]}), ({"a": 1}, {"a": 1}), ("", {}), ("{}", {}), (None, {})],
)
def test_arguments_of_earlier_calls_become_objects(arguments: object, expected: dict[str, object]) -> None:
    """JSON text is decoded, objects stay, nothing is an empty object."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = messages({"role": "assistant", "content": None, "tool_calls": [call]})
    function = {"name": "f", "arguments": expected}
    assert message == {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


@pytest.mark.parametrize("arguments", ['{"a": "rm -rf', "{", "NaN", '{"a": 1} x', '{"a":' * 3000, "plain"])
def test_arguments_that_are_no_whole_json_are_shown_as_they_are(arguments: str) -> None:
    """A call that broke off comes back in the next turn: it must not end the conversation, and the model sees what there was."""
    (message,) = messages({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"arguments": arguments}}  # type: ignore[index]


@pytest.mark.parametrize("arguments", ["[]", "3", "null", '"a"'])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    """Arguments of an earlier call must be a JSON object."""
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(BadRequest) as caught:
        messages({"role": "user"}, {"role": "assistant", "tool_calls": [call]})
    assert caught.value.field == "messages[1].tool_calls[0].function.arguments"


def test_template_arguments_come_from_all_fields() -> None:
    """chat_template_kwargs win over the fields, and nothing given is nothing passed."""
    assert template_arguments(chat()) == {}
    assert template_arguments(chat(reasoning_effort="high")) == {"reasoning_effort": "high"}
    both = chat(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "max", "enable_thinking": False})
    assert template_arguments(both) == {"reasoning_effort": "max", "enable_thinking": False}
    assert template_arguments(parse_tokenize(b'{"messages": [{"role": "user"}], "chat_template_kwargs": {"a": 1}}')) == {"a": 1}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "minimal"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "medium"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "xhigh"}, {"reasoning_effort": "max"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "max"}, {"enable_thinking": True, "reasoning_effort": "max"}),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, {"enable_thinking": True, "clear_thinking": False}),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
def test_effort_reaches_the_template_in_its_own_words(fields: dict[str, object], expected: dict[str, object]) -> None:
    """Levels that only others have become the nearest ones, and none switches the reasoning off."""
    assert template_arguments(chat(**fields), {"enable_thinking", "reasoning_effort"}) == expected


@pytest.mark.parametrize(
    "field", [{"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_reasoning_that_cannot_be_switched_off(field: dict[str, object]) -> None:
    """A template that has no such switch refuses it by name, one that is not known is not asked, and switching on is nothing."""
    with pytest.raises(BadRequest, match="cannot be switched off") as caught:
        template_arguments(chat(**field), {"reasoning_effort"})
    assert caught.value.field == next(iter(field))
    assert template_arguments(chat(**field), None) == {"enable_thinking": False}
    assert template_arguments(chat(thinking={"type": "enabled"}), {"messages"}) == {"enable_thinking": True}


def test_an_unknown_effort_is_refused() -> None:
    """A level that no template has would be taken for the most."""
    with pytest.raises(BadRequest, match="reasoning_effort must be one of none, minimal, low") as caught:
        template_arguments(chat(reasoning_effort="huge"))
    assert caught.value.field == "reasoning_effort"


F, G = ({"type": "function", "function": {"name": name, "parameters": {"type": "object"}, "strict": True}} for name in "fg")


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        (None, [F, G]), ("auto", [F, G]), ("none", None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}, [G]),
    ],
)  # fmt: skip
def test_tools_reach_the_template_as_they_were_sent(choice: object, shown: object) -> None:
    """The template gets the tools that may be called, every field of them, and none at all where there are none."""
    assert template_arguments(chat(tools=[F, G], tool_choice=choice)).get("tools") == shown
    assert "tools" not in template_arguments(chat(tools=[]))
    body = json.dumps({"messages": [{"role": "user"}], "tools": [F]}).encode()
    assert template_arguments(parse_tokenize(body)) == {"tools": [F]}


def test_every_choice_has_a_seed_of_its_own() -> None:
    """Seeds count up from choice to choice, and past the largest; without a seed each choice draws its own."""
    assert [sampling.seed for sampling in to_samplings(completion(n=3, seed=7))] == [7, 8, 9]
    assert [sampling.seed for sampling in to_samplings(chat(n=2, seed=2**63 - 1))] == [2**63 - 1, -(2**63)]
    assert to_samplings(chat(n=2, top_p=0.5)) == [Sampling(top_p=0.5)] * 2
    assert to_samplings(chat()) == [Sampling()]


def test_biases_are_by_token_id() -> None:
    """Keys are token ids in decimal, in order; none is no bias."""
    assert to_sampling(chat(logit_bias={"10": -100, "9": 1.5})).logit_bias == ((9, 1.5), (10, -100.0))
    assert to_sampling(completion(logit_bias={})).logit_bias == ()


@pytest.mark.parametrize(
    "bias", [{"a": 1}, {"-1": 1}, {"1.5": 1}, {" 1": 1}, {"": 1}, {"²": 1}, {"1" * 5000: 1}, {"1": 101}, {"1": -100.5}]
)
def test_biases_that_are_none_name_the_field(bias: object) -> None:
    """What is no token id, or too much of a bias, is refused in a line that repeats little of it."""
    with pytest.raises(BadRequest) as caught:
        to_sampling(chat(logit_bias=bias))
    assert caught.value.field == "logit_bias"
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_arguments_cannot_replace_ours(name: str) -> None:
    """Names that the rendering call itself has are refused."""
    with pytest.raises(BadRequest, match=name):
        template_arguments(chat(chat_template_kwargs={name: 1}))


def test_translation_leaves_the_request_alone() -> None:
    """Template arguments are a copy."""
    request = chat(reasoning_effort="high", chat_template_kwargs={"a": 1})
    template_arguments(request)
    assert request.chat_template_kwargs == {"a": 1}
