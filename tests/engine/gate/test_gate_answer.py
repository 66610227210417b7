"""Streams of events as measured answers: times, counts, cuts anywhere, and everything that is no measurement."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gate.answer import AnswerReader, Events, RunFailed


def event(*ids: int, text: str = "x", finish: str | None = None, **fields: Any) -> bytes:
    return json.dumps({"choices": [{"token_ids": ids, "text": text, "finish_reason": finish, **fields}]}).encode()


def usage(tokens: int, prompt: int = 3) -> bytes:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}}).encode()


def read(*events: tuple[float, bytes]) -> AnswerReader:
    reader = AnswerReader(0.0)
    for at_s, payload in events:
        reader.take(at_s, payload)
    return reader


def test_speed_is_from_the_first_event_with_tokens_to_done() -> None:
    """5 tokens, 2 in the first event at 1 s, [DONE] at 4 s after a stall: (5 - 2) / 3 tokens/s, the stall and the usage event included."""
    answer = read(
        (1.0, event(1, 2, text="", prompt_token_ids=[7, 8, 9])), (1.1, event(3)), (1.2, event(4)), (3.9, event(5, finish="length")),
        (3.95, usage(5)), (4.0, b"[DONE]"),
    ).answer(5)  # fmt: skip
    assert answer.tokens_per_second == pytest.approx(1.0)
    assert (answer.first_token_s, answer.decode_s, answer.first_event_tokens) == (1.0, 3.0, 2)
    assert answer.token_ids == (1, 2, 3, 4, 5)
    assert answer.prompt_token_ids == (7, 8, 9)
    assert answer.text == "xxx"


def test_an_event_without_tokens_starts_no_clock() -> None:
    """Text or nothing before the first token does not count as the first event."""
    answer = read((1.0, event()), (2.0, event(1)), (2.5, event(2, finish="length")), (2.6, usage(2)), (3.0, b"[DONE]")).answer(2)
    assert answer.decode_s == 1.0


def test_the_hash_is_of_everything() -> None:
    """One other id, one other letter, or the same ids split elsewhere: the first two change the hash, the third does not."""

    def hashed(*events: bytes) -> str:
        timed = [(float(at), payload) for at, payload in enumerate(events)]
        return read(*timed, (50.0, usage(3)), (60.0, b"[DONE]")).answer(3).sha256

    same = hashed(event(1, text="a"), event(2, 3, text="bc", finish="length"))
    assert same == hashed(event(1, 2, text="ab"), event(3, text="c", finish="length"))
    assert same != hashed(event(1, text="a"), event(2, 4, text="bc", finish="length"))
    assert same != hashed(event(1, text="a"), event(2, 3, text="bd", finish="length"))
    assert same != hashed(event(12, text="a"), event(3, 0, text="bc", finish="length"))


END = (2.0, usage(2)), (3.0, b"[DONE]")


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ((), "without"),
        (((1.0, event(1)), (2.0, event(2, finish="length")), (2.0, usage(2))), "without \\[DONE\\], after 2 tokens"),
        (((1.0, event(1)), (2.0, event(2, finish="length")), (3.0, b"[DONE]")), "no usage"),
        (((1.0, event(1)), (1.0, event(finish="length")), *END), "usage counts 2 and 1 came"),
        (((1.0, event(1)), (1.0, event(2, 3, finish="length")), *END), "usage counts 2 and 3 came"),
        (((1.0, event(1)), (2.0, usage(1)), (3.0, b"[DONE]")), "2 tokens were asked for"),
        (((1.0, event(1)), (1.5, event(2, finish="stop")), *END), "'stop'"),
        (((1.0, event(1)), (1.5, event(2)), *END), "None"),
        (((1.0, event(1, 2, finish="length")), *END), "at once"),
        (((3.0, event(1)), (3.0, event(2, finish="length")), (3.0, usage(2)), (3.0, b"[DONE]")), "at once"),
        (((1.0, event(1)), (1.5, event(finish="length")), (2.0, usage(1)), (3.0, b"[DONE]")), "2 tokens were asked for"),
    ],
)
def test_what_is_no_measurement(events: tuple[tuple[float, bytes], ...], says: str) -> None:
    """An answer cut short, without usage, of another length, or without a duration raises instead of giving a speed."""
    with pytest.raises(RunFailed, match=says):
        read(*events).answer(2)


@pytest.mark.parametrize("payload", [b'{"error": {"message": "device lost"}}', b"{", b"[]", b'{"error": 1}', b""])
def test_an_error_event_ends_the_run(payload: bytes) -> None:
    """An error event or one that is no JSON object raises, with the server's words where there are any."""
    with pytest.raises(RunFailed, match=r"device lost|\{|\[|b''"):
        read((1.0, event(1)), (2.0, payload))


def test_nothing_comes_after_done() -> None:
    """An event after [DONE] raises."""
    with pytest.raises(RunFailed, match="went on"):
        read((1.0, b"[DONE]"), (2.0, event(1)))


@given(
    st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=8).map(str.encode), max_size=6), st.data()
)
def test_events_survive_any_cut(payloads: list[bytes], data: st.DataObject) -> None:
    """However the bytes are cut, the payloads come out whole, in order and once; comments are passed over."""
    whole = b": a comment\n\n" + b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    events, found = Events(), []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found.extend(events.feed(whole[start:end]))
    assert found == payloads
