"""Responses that are kept: bounds, ages, and token ids that conversations share."""

import json

import pytest

from engine.api import AnswerHead
from engine.api.response_requests import parse_responses
from engine.api.response_turns import KeptResponses, UnknownResponse, kept_turn, tokens_before
from engine.api.response_writer import ResponseWriter
from engine.chunk import Chunk, Usage


def answered(kept: KeptResponses, name: str, prompt: list[int], token: int, **fields: object) -> None:
    """One response of a token, kept under its name."""
    asked = parse_responses(json.dumps({"input": "x", **fields}).encode())
    head = AnswerHead(id=name, model="m", created=1, prompt_token_ids=prompt)
    writer = ResponseWriter(asked, head, lambda body, prompt_ids, answer_ids: kept_turn(asked, body, prompt_ids, answer_ids, kept))
    writer.take(0, Chunk("a", (token,), Usage(len(prompt), 1), finish_reason="stop"))
    writer.whole(Usage(len(prompt), 1))


def before(kept: KeptResponses, name: str) -> list[int]:
    return list(tokens_before(parse_responses(json.dumps({"input": "x", "previous_response_id": name}).encode()), kept))


def test_conversations_share_their_tokens_and_none_sees_another() -> None:
    """A chain costs its new tokens alone; branches, and one whose prompt was written otherwise, have their own."""
    kept = KeptResponses(10**9, 0)
    long = list(range(100_000))
    answered(kept, "a", long, 1)
    first = kept.bytes
    answered(kept, "b", [*long, 1, 2], 3, previous_response_id="a")
    assert kept.bytes - first < 10_000
    answered(kept, "c", [*long, 1, 4], 5, previous_response_id="a")
    answered(kept, "d", [9, *long, 1], 6, previous_response_id="b", instructions="be brief")
    assert kept.bytes > first + 2 * 4 * 100_000
    assert before(kept, "a") == [*long, 1]
    assert before(kept, "b") == [*long, 1, 2, 3]
    assert before(kept, "c") == [*long, 1, 4, 5]
    assert kept.find("d").token_ids.tolist() == [9, *long, 1, 6]


def test_the_least_recently_used_leave_for_new_ones() -> None:
    """The bound holds after every addition; a use keeps one; what is larger than all the room is not kept."""
    kept = KeptResponses(20_000, 0)
    for index in range(40):
        answered(kept, f"r{index}", [1], 2)
        kept.find("r0")
        assert kept.bytes <= 20_000
    assert 1 < len(kept) < 40
    kept.find("r39")
    with pytest.raises(UnknownResponse):
        kept.find("r1")
    answered(kept, "large", list(range(10_000)), 1)
    with pytest.raises(UnknownResponse):
        kept.find("large")
    kept.find("r39")
    none = KeptResponses(0, 0)
    answered(none, "r", [1], 2)
    assert len(none) == 0


def test_a_response_is_forgotten_at_its_age() -> None:
    """Its age counts from its making; looking at it and sweeping both drop it, and what it took is given back."""
    now = [0.0]
    kept = KeptResponses(10**6, 10.0, lambda: now[0])
    for name in ("a", "b"):
        answered(kept, name, [1], 2)
    now[0] = 9.9
    kept.find("a")
    now[0] = 10.0
    with pytest.raises(UnknownResponse):
        kept.find("a")
    assert len(kept) == 1
    kept.expire()
    assert len(kept) == kept.bytes == 0
