"""From sampled tokens to a chat choice: stop texts, stop ids, the length cap and half characters, wherever in a turn they fall."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import AnswerHead, encode, parse_chat, to_messages
from engine.api.chunks import chat_answer
from engine.api.dialects import chat_choice_writer
from engine.chunk import Chunk
from engine.protocol import SessionId
from engine.request import Limits, Request
from engine.sampling import Sampling
from engine.session import Session
from engine.text import ChatTemplate, Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).resolve().parents[3] / "engine" / "demo_model")
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"properties": {"path": {"type": "string"}}}}}
READ = "<tool_call>read<arg_key>path</arg_key><arg_value>dir/é🙂/naïve.py</arg_value></tool_call>"
TURN = f"Let me think: naïve 🙂.</think>I look.{READ}{READ}"
(USER,) = TOKENIZER.encode("<|user|>")


def chunks_of(token_ids: list[int], **sampling: Any) -> list[Chunk]:
    """What a request puts out for these tokens: as far as it takes them."""
    limits = Limits(context_max=10_000, default_max_tokens=1_000)
    request = Request(
        "r", Session(SessionId("s"), temporary=True), [1], Sampling(**sampling), limits=limits, seed=0, eos=[USER], tokenizer=TOKENIZER
    )  # fmt: skip
    for token in token_ids:
        if request.take(token, None):
            break
    assert request.finished, "the tokens end with a stop id"
    return [chunk for _ in range(request.chunks.qsize()) if isinstance(chunk := request.chunks.get_nowait(), Chunk)]


def choice_of(chunks: list[Chunk]) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}).encode()
    prompt = TOKENIZER.encode("<|user|>hi<|assistant|><think>")
    head = AnswerHead(id="x", model="m", created=1, token_bytes=TOKENIZER.token_bytes, prompt_token_ids=prompt)
    writer = chat_choice_writer(parse_chat(body), head, 0)
    for chunk in chunks:
        writer.take(chunk)
    return json.loads(encode(chat_answer(head, [writer.choice()], chunks[-1].usage)))["choices"][0]


def turn(text: str, **sampling: Any) -> Any:
    """The choice, with what is in it by name."""
    choice = choice_of(chunks_of([*TOKENIZER.encode(text), USER], **sampling))
    message = choice["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"], calls, choice["finish_reason"], choice["stop_reason"]


def test_a_whole_turn_of_tokens() -> None:
    """Characters and marks that lie across tokens arrive whole, and the stop id ends the turn without being seen."""
    assert any(TOKENIZER.token_bytes(token)[:1] == b"\xf0" and len(TOKENIZER.token_bytes(token)) < 4 for token in TOKENIZER.encode("🙂"))
    arguments = '{"path": "dir/é🙂/naïve.py"}'
    assert turn(TURN) == ("Let me think: naïve 🙂.", "I look.", [arguments] * 2, "tool_calls", USER)


def test_a_stop_text_inside_the_reasoning() -> None:
    """It ends the turn where it stands, with reasoning alone."""
    assert turn(TURN, stop=("think: na",)) == ("Let me ", "", [], "stop", "think: na")


def test_a_stop_text_that_a_mark_completes() -> None:
    """A stop text may be a mark, or end in one: it is cut out with all that follows."""
    assert turn(TURN, stop=("</think>",)) == ("Let me think: naïve 🙂.", "", [], "stop", "</think>")
    assert turn(TURN, stop=("look.<tool",)) == ("Let me think: naïve 🙂.", "I ", [], "stop", "look.<tool")


def test_a_stop_text_inside_a_call() -> None:
    """Before its first value the call is text; inside a value it stays a part, and is no reason to call."""
    assert turn(TURN, stop=("arg_key>pa",)) == ("Let me think: naïve 🙂.", "I look.<tool_call>read<", [], "stop", "arg_key>pa")
    assert turn(TURN, stop=("/naïve",)) == ("Let me think: naïve 🙂.", "I look.", ['{"path": "dir/é🙂'], "stop", "/naïve")


def test_a_stop_text_exactly_at_the_length_cap() -> None:
    """A stop text that the last allowed token completes is the reason, not the length; one token less is the length."""
    text = "one two three"
    count = len(TOKENIZER.encode(text))
    assert turn(f"{text} four", stop=("three",), max_tokens=count)[0] == "one two "
    assert turn(f"{text} four", stop=("three",), max_tokens=count)[3:] == ("stop", "three")
    assert turn(f"{text} four", stop=("three",), max_tokens=count - 1)[3:] == ("length", None)


def test_a_stop_id_inside_unfinished_reasoning() -> None:
    """The turn has reasoning alone."""
    assert turn("Let me th") == ("Let me th", "", [], "stop", USER)


TEMPLATE = """\
[gMASK]<sop>
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|><think>{{ m.reasoning_content }}</think>{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}<|observation|><tool_response>{{ m.content }}</tool_response>
{%- else -%}<|{{ m.role }}|>{{ m.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|><think>{%- endif -%}
"""


@pytest.mark.parametrize(
    "text",
    [
        TURN,
        "hm</think>done",
        f"</think>{READ}",
        '</think><tool_call>read<arg_key>path</arg_key><arg_value> 1\n</arg_value><arg_key>more</arg_key><arg_value>[1, {"a": null}]'
        "</arg_value></tool_call>",
        "<</think>a < b\n",
    ],
)
def test_a_turn_sent_back_is_the_text_that_it_was(text: str) -> None:
    """A client that sends the answer back as it got it makes the prompt that the model wrote on, so that its rows are found again."""
    message = choice_of(chunks_of([*TOKENIZER.encode(text), USER]))["message"]
    messages = [{"role": "user", "content": "hi"}, message, {"role": "tool", "content": "x", "tool_call_id": "c"}]
    template, asked = ChatTemplate(TEMPLATE), parse_chat(json.dumps({"messages": messages}).encode())
    before = template.render([{"role": "user", "content": "hi"}])
    again = template.render(to_messages(asked))
    assert again == f"{before}{text}<|observation|><tool_response>x</tool_response><|assistant|><think>"


def test_half_a_character_at_the_end() -> None:
    """What the cap cuts in half is shown as such at the end of whatever it was in."""
    token_ids = TOKENIZER.encode("hm 🙂")
    while TOKENIZER.decode(token_ids).endswith("🙂"):
        token_ids.pop()
    choice = choice_of(chunks_of([*token_ids, USER], max_tokens=len(token_ids)))
    assert choice["message"]["reasoning_content"] == "hm \ufffd"
    assert choice["finish_reason"] == "length"


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 200), st.sampled_from([None, "think", "look.", "</th", "</arg_value>", "🙂", "call>r"]))
def test_any_cap_and_stop_text_lose_nothing(cap: int, stop: str | None) -> None:
    """Wherever a turn ends, what came before it is there: the reasoning and the content up to that place, and calls that begin alike."""
    token_ids = [*TOKENIZER.encode(TURN), USER]
    chunks = chunks_of(token_ids, max_tokens=cap, stop=() if stop is None else (stop,))
    text = "".join(chunk.text for chunk in chunks)
    message = choice_of(chunks)["message"]
    reasoning, content = message.get("reasoning_content", ""), message["content"] or ""
    calls = message.get("tool_calls", [])
    whole = text.rstrip("\ufffd")
    assert whole.startswith(reasoning.rstrip("\ufffd"))
    if "</think>" in whole:
        assert reasoning == "Let me think: naïve 🙂."
        behind = whole.partition("</think>")[2]
        assert behind.startswith("I look."[: len(behind)])
        assert content.startswith("I look."[: len(behind)])
        assert len(calls) == behind.count("<arg_value>")
        for call in calls:
            assert '{"path": "dir/é🙂/naïve.py"}'.startswith(call["function"]["arguments"].rstrip("\ufffd"))
    else:
        assert (content, calls) == ("", [])
