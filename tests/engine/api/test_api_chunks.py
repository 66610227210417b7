"""Answers and stream chunks: the shapes that OpenAI's own client types accept, and what is in them."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.api import AnswerHead, ModelCard, ModelList, TokenizeAnswer, encode
from engine.api.chat_choice import ChatChoiceWriter
from engine.api.chunks import chat_answer, chat_usage_chunk, completion_answer, completion_usage_chunk
from engine.api.completion_choice import CompletionChoiceWriter
from engine.chunk import Chunk, TokenLogprob, Usage
from engine.text.reply import ReplyParser

HEAD = AnswerHead(id="x-1", model="demo", created=1_700_000_000)
FULL = AnswerHead(id="x-1", model="demo", created=1_700_000_000, logprobs=True, return_token_ids=True, include_usage=True)
LOGPROB = TokenLogprob(5, "he", -0.5, (TokenLogprob(5, "he", -0.5), TokenLogprob(6, "\ufffd", -1.5)))
CHAT, COMPLETION = ChatChoiceWriter, CompletionChoiceWriter
BEFORE = Chunk("", (), Usage(3, 0))
CHUNKS = [
    Chunk("he", (5,), Usage(3, 1), (LOGPROB,)),
    Chunk("", (7,), Usage(3, 2), (TokenLogprob(7, "\ufffd", -2.0),)),
    Chunk("llo é", (8, 9), Usage(3, 4, 2), (TokenLogprob(8, "llo", 0.0), TokenLogprob(9, " é", -1.0)), "stop", "###"),
]


def writer_of(kind: type[Any], head: AnswerHead) -> Any:
    return CompletionChoiceWriter(head) if kind is CompletionChoiceWriter else ChatChoiceWriter(head, ReplyParser(reasoning=False), str)


def chunk_of(kind: type[Any], head: AnswerHead, chunk: Chunk, *before: Chunk) -> Any:
    """A stream's chunk behind those before it."""
    writer = writer_of(kind, head)
    for each in before:
        writer.event(each)
    return sent(writer.event(chunk))


def answer_of(kind: type[Any], head: AnswerHead, chunks: list[Chunk]) -> Any:
    writer = writer_of(kind, head)
    for chunk in chunks:
        writer.take(chunk)
    make: Any = completion_answer if kind is CompletionChoiceWriter else chat_answer
    return sent(make(head, [writer.choice()], chunks[-1].usage))


def sent(response: Any) -> Any:
    body = encode(response)
    assert b"\n" not in body
    return json.loads(body)


def test_a_chat_chunk_has_openais_shape() -> None:
    """A first and a last chunk hold exactly the fields of the format, nulls included, and no extension that was not asked for."""
    assert chunk_of(CHAT, HEAD, CHUNKS[0]) == {
        "id": "x-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "demo",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": "he"}, "logprobs": None, "finish_reason": None}],
    }  # fmt: skip
    assert chunk_of(CHAT, HEAD, CHUNKS[2], BEFORE)["choices"] == [
        {"index": 0, "delta": {"content": "llo é"}, "logprobs": None, "finish_reason": "stop", "stop_reason": "###"}
    ]


def test_extensions_are_sent_when_asked_for() -> None:
    """Token ids are on every choice, the prompt's on the first chunk only, and usage is null until its own chunk."""
    head = replace(FULL, prompt_token_ids=(1, 2, 3))
    first = chunk_of(CHAT, head, CHUNKS[0])
    assert (first["prompt_token_ids"], first["choices"][0]["token_ids"], first["usage"]) == ([1, 2, 3], [5], None)
    assert "prompt_token_ids" not in chunk_of(CHAT, head, CHUNKS[1], BEFORE)
    choice = chunk_of(COMPLETION, head, CHUNKS[0])["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [5])
    assert "prompt_token_ids" not in chunk_of(COMPLETION, head, CHUNKS[1], BEFORE)["choices"][0]


@pytest.mark.parametrize("make", [chat_usage_chunk, completion_usage_chunk])
def test_the_usage_chunk_has_no_choice(make: Any) -> None:
    """The last chunk of a stream with include_usage holds counts alone."""
    chunk = sent(make(FULL, Usage(3, 4, 2)))
    assert chunk["choices"] == []
    assert chunk["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}
    }  # fmt: skip


@pytest.mark.parametrize("head", [HEAD, FULL])
def test_openais_own_types_accept_all_of_it(head: AnswerHead) -> None:
    """Every response validates against the openai package's models, extensions on and off."""
    writer = writer_of(CHAT, head)
    for chunk in CHUNKS:
        ChatCompletionChunk.model_validate(sent(writer.event(chunk)))
    # The package types a completion's finish reason as never null, though OpenAI's own streams hold null before the last chunk.
    Completion.model_validate(chunk_of(COMPLETION, head, CHUNKS[-1]))
    ChatCompletionChunk.model_validate(sent(chat_usage_chunk(head, Usage(1, 1))))
    ChatCompletion.model_validate(answer_of(CHAT, head, CHUNKS))
    Completion.model_validate(answer_of(COMPLETION, head, CHUNKS))
    Model.model_validate(sent(ModelCard(id="demo", created=1, max_model_len=5)))


@pytest.mark.parametrize("head", [HEAD, FULL])
def test_a_whole_answer_is_the_stream_put_together(head: AnswerHead) -> None:
    """Text, ids, logprobs, finish and usage of an answer are those of its chunks."""
    head = replace(head, prompt_token_ids=[1])
    chat, whole = answer_of(CHAT, head, CHUNKS), answer_of(COMPLETION, head, CHUNKS)
    chats, completions = writer_of(CHAT, head), writer_of(COMPLETION, head)
    texts, logprobs, offsets = [], [], []
    for chunk in CHUNKS:
        part, of_chat = sent(completions.event(chunk))["choices"][0], sent(chats.event(chunk))["choices"][0]
        texts.append(part["text"])
        if head.logprobs:
            offsets += part["logprobs"]["text_offset"]
            logprobs += of_chat["logprobs"]["content"]
    assert chat["choices"][0]["message"]["content"] == whole["choices"][0]["text"] == "".join(texts) == "hello é"
    assert chat["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
    assert chat["choices"][0]["stop_reason"] == "###"
    assert chat["usage"] == whole["usage"] == sent(chat_usage_chunk(head, Usage(3, 4, 2)))["usage"]
    if head.logprobs:
        assert chat["choices"][0]["logprobs"]["content"] == logprobs
        assert whole["choices"][0]["logprobs"]["text_offset"] == offsets == [0, 2, 3, 6]
        assert chat["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"] == [5, 7, 8, 9]
        assert chat["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"] == [1]
    else:
        assert "token_ids" not in chat["choices"][0]
        assert "prompt_token_ids" not in chat


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_finish_reasons_pass_through(reason: Any) -> None:
    """The engine's finish reason is the wire's, and a token id may be the reason of a stop."""
    chunk = Chunk("", (), Usage(1, 0), finish_reason=reason, stop_reason=2034)
    choice = chunk_of(CHAT, HEAD, chunk)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, 2034)
    assert chunk_of(COMPLETION, HEAD, chunk)["choices"][0]["finish_reason"] == reason


def test_chat_logprobs_show_bytes_and_tops() -> None:
    """Each token has its text, its own bytes (also of half a character) and its tops in order."""
    pieces = {5: b"he", 6: b"\xc3"}
    head = AnswerHead(id="x", model="m", created=1, logprobs=True, token_bytes=lambda token_id: pieces[token_id])
    (token,) = chunk_of(CHAT, head, CHUNKS[0])["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("he", -0.5, [104, 101])
    assert [(top["token"], top["logprob"], top["bytes"]) for top in token["top_logprobs"]] == [
        ("he", -0.5, [104, 101]),
        ("\ufffd", -1.5, [0xC3]),
    ]


def test_without_token_bytes_they_are_the_texts() -> None:
    """Bytes fall back to the text's UTF-8."""
    assert chunk_of(CHAT, FULL, CHUNKS[2])["choices"][0]["logprobs"]["content"][1]["bytes"] == list(" é".encode())


def test_completion_logprobs_hold_the_chosen_token_too() -> None:
    """top_logprobs has the asked-for tokens and the chosen one; of two ids with one text the likelier counts."""
    before = Chunk("elevenchars", (8,), Usage(1, 1), (TokenLogprob(8, "elevenchars", -1.0),))
    chosen = TokenLogprob(9, "z", -4.0, (TokenLogprob(1, "\ufffd", -0.5), TokenLogprob(2, "\ufffd", -1.5)))
    logprobs = chunk_of(COMPLETION, FULL, Chunk("z", (9,), Usage(1, 2), (chosen,)), before)["choices"][0]["logprobs"]
    assert logprobs == {"tokens": ["z"], "token_logprobs": [-4.0], "top_logprobs": [{"\ufffd": -0.5, "z": -4.0}], "text_offset": [11]}


def test_a_chunk_without_tokens_has_empty_logprobs() -> None:
    """Text that was held back comes without logprobs of its own; not asked for is null."""
    chunk = Chunk("rest", (), Usage(1, 3), finish_reason="length")
    assert chunk_of(CHAT, FULL, chunk)["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    assert chunk_of(COMPLETION, HEAD, chunk)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("bad", [-math.inf, math.nan, -1e30])
def test_logprobs_are_finite_on_the_wire(bad: float) -> None:
    """A probability of zero, and NaN, are -9999: JSON has no such numbers."""
    chunk = Chunk("a", (1,), Usage(1, 1), (TokenLogprob(1, "a", bad, (TokenLogprob(1, "a", bad),)),))
    token = chunk_of(CHAT, FULL, chunk)["choices"][0]["logprobs"]["content"][0]
    assert (token["logprob"], token["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    assert chunk_of(COMPLETION, FULL, chunk)["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_events_are_one_line() -> None:
    """Line ends inside text are escaped, so that an SSE event is one line; other characters stay UTF-8."""
    body = encode(writer_of(CHAT, HEAD).event(Chunk("a\n\r\u2028é", (1,), Usage(1, 1))))
    assert b"\n" not in body
    assert b"\r" not in body
    assert json.loads(body)["choices"][0]["delta"]["content"] == "a\n\r\u2028é"


def test_an_answer_has_at_least_one_chunk() -> None:
    """An answer from no chunks is our mistake."""
    with pytest.raises(AssertionError, match="at least one chunk"):
        writer_of(CHAT, HEAD).choice()


def test_lists_and_tokens() -> None:
    """Models and tokens have the shapes clients read."""
    listed = sent(ModelList(data=(ModelCard(id="demo", created=1, max_model_len=5),)))
    assert listed == {
        "object": "list", "data": [{"id": "demo", "object": "model", "created": 1, "owned_by": "forebay", "max_model_len": 5}]
    }  # fmt: skip
    assert sent(TokenizeAnswer(count=2, max_model_len=5, tokens=[1, 2])) == {"count": 2, "max_model_len": 5, "tokens": [1, 2]}
    assert sent(TokenizeAnswer(count=1, max_model_len=5, tokens=[1], token_strs=["a"]))["token_strs"] == ["a"]


def test_drafts_are_counted_where_there_were_any() -> None:
    """Usage names accepted and refused guesses as OpenAI names predictions, in both shapes, and says nothing where nothing was drafted."""
    for make in (chat_usage_chunk, completion_usage_chunk):
        counts = sent(make(FULL, Usage(3, 9, 0, 5, 2, (4, 3), (3, 2))))["usage"]
        assert counts["completion_tokens"] == 9
        assert counts["completion_tokens_details"] == {
            "accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2, "drafts_proposed": [4, 3], "drafts_accepted": [3, 2],
        }  # fmt: skip
        assert sent(make(FULL, Usage(3, 9, 0, 0, 1)))["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 1
        assert "completion_tokens_details" not in sent(make(FULL, Usage(3, 9)))["usage"]
