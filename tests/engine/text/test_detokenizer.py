"""Detokenizer: the same text as decoding at once, never half a character, linear."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import Detokenizer, Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo_model"
TOKENIZER = Tokenizer.load(DEMO)
BYTE_TOKEN = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(TOKENIZER.vocabulary - 1, -1, -1)}


def of_bytes(text: str | bytes) -> list[int]:
    """One token a byte: the hardest way to spell a text."""
    return [BYTE_TOKEN[bytes([byte])] for byte in (text.encode() if isinstance(text, str) else text)]


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, TOKENIZER.vocabulary + 2), st.sampled_from(of_bytes(bytes(range(128, 256))))), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    skip=st.booleans(),
)
def test_pieces_put_together_equal_decoding_at_once(ids: list[int], cuts: list[int], skip: bool) -> None:
    """Any ids cut anywhere give the text of the whole, broken characters included."""
    detokenizer = Detokenizer(TOKENIZER, skip_special=skip)
    bounds = [0, *sorted(cuts), len(ids)]
    text = "".join(detokenizer.push(ids[start:stop]) for start, stop in itertools.pairwise(bounds))
    text += detokenizer.flush()
    assert text == TOKENIZER.decode(ids, skip_special=skip)
    assert detokenizer.characters == len(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_a_valid_text_never_shows_a_replacement(text: str) -> None:
    """Fed byte by byte, each piece is a run of whole characters of the text, and nothing is left to flush."""
    detokenizer = Detokenizer(TOKENIZER)
    pieces = detokenizer.pieces(of_bytes(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert not detokenizer.held
    assert detokenizer.flush() == ""


def test_a_character_comes_with_the_token_that_completes_it() -> None:
    """Pieces before the last byte are empty, and `held` says so."""
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.pieces(of_bytes("a🏠b")[:4]) == ["a", "", "", ""]
    assert detokenizer.held
    assert detokenizer.characters == 1
    assert detokenizer.pieces(of_bytes("a🏠b")[4:]) == ["🏠", "b"]
    assert not detokenizer.held


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_an_incomplete_end_is_flushed_as_one_replacement(kept: int) -> None:
    """A generation cut inside a four-byte character ends with one U+FFFD, at the end only."""
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(of_bytes("ok🏠")[: 2 + kept]) == "ok"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_cannot_become_a_character_are_replaced_at_once() -> None:
    """A lone continuation byte is U+FFFD without waiting; a started character that breaks off is U+FFFD before what broke it."""
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.pieces(of_bytes(b"\x80\xe8\xaaA")) == ["\ufffd", "", "", "\ufffdA"]


def test_special_tokens_are_kept_or_skipped() -> None:
    """Special tokens are text by default and vanish when skipped, also between the bytes of one character."""
    user = TOKENIZER.encode("<|user|>")
    ids = [*user, *of_bytes("é")[:1], *user, *of_bytes("é")[1:]]
    assert Detokenizer(TOKENIZER, skip_special=True).push(ids) == "é"
    kept = Detokenizer(TOKENIZER)
    assert kept.push(ids) == "<|user|>\ufffd<|user|>\ufffd"


def test_an_absent_tokenizer_gives_no_text() -> None:
    """Without a tokenizer every text is empty and nothing fails."""
    detokenizer = Detokenizer(Tokenizer(None))
    assert detokenizer.push([1, 2, 3]) + detokenizer.flush() == ""


def test_cost_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's bytes are looked up once, however long the output is."""
    looked_up = 0
    real = TOKENIZER.token_bytes

    def counted(token_id: int) -> bytes:
        nonlocal looked_up
        looked_up += 1
        return real(token_id)

    monkeypatch.setattr(TOKENIZER, "token_bytes", counted)
    detokenizer = Detokenizer(TOKENIZER)
    for token_id in of_bytes("é" * 500):
        detokenizer.push([token_id])
    assert looked_up == 1000
