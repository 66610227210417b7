"""Tokenizer: ids and bytes of the shipped demo tokenizer, agreement with the library's own decoding, absent and bad files."""

import asyncio
import hashlib
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadModel, BadRequest
from engine.text import Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo_model"
SOURCE = (DEMO / "tokenizer.json").read_bytes()
LIBRARY = tokenizers.Tokenizer.from_str(SOURCE.decode())
TOKENIZER = Tokenizer(SOURCE)


def test_encoding_round_trips_text() -> None:
    """Any text comes back from its ids, multi-byte characters and line ends included."""
    for text in ("", "a", "def f(x):\r\n\treturn x\n", "naïve 日本語 🏳️‍🌈 \x00\x7f", " " * 65):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_special_tokens_in_text_become_their_ids() -> None:
    """A format mark is one id, none is added around it, and decoding keeps it unless told to skip."""
    ids = TOKENIZER.encode("[gMASK]<sop><|user|>hi")
    assert ids[:3] == [LIBRARY.token_to_id(mark) for mark in ("[gMASK]", "<sop>", "<|user|>")]
    assert TOKENIZER.encode("hi") == ids[3:]
    assert all(map(TOKENIZER.is_special, ids[:3]))
    assert not any(map(TOKENIZER.is_special, ids[3:]))
    assert TOKENIZER.decode(ids) == "[gMASK]<sop><|user|>hi"
    assert TOKENIZER.decode(ids, skip_special=True) == "hi"


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, LIBRARY.get_vocab_size() + 3), max_size=40), skip=st.booleans())
def test_decoding_agrees_with_the_library(ids: list[int], skip: bool) -> None:
    """Bytes put together give what the library decodes at once, for any ids, broken characters and unknown ids included."""
    assert TOKENIZER.decode(ids, skip_special=skip) == LIBRARY.decode(ids, skip_special_tokens=skip)


def test_every_byte_has_a_token() -> None:
    """The 256 single-byte tokens stand for the 256 bytes."""
    found = {TOKENIZER.token_bytes(token_id) for token_id in range(TOKENIZER.vocabulary)}
    assert {bytes([byte]) for byte in range(256)} <= found


def test_added_tokens_outside_the_byte_table_stand_for_their_text() -> None:
    """An added token with a space or a wide character is its own text, as in the library."""
    library = tokenizers.Tokenizer.from_str(SOURCE.decode())
    library.add_tokens(["two words", "日本"])
    added = Tokenizer(library.to_str().encode())
    for text in ("two words", "日本"):
        token_id = library.token_to_id(text)
        assert added.token_text(token_id) == text == library.decode([token_id])
        assert not added.is_special(token_id)


def test_token_text_shows_part_of_a_character_as_replacement() -> None:
    """One byte of a three-byte character is U+FFFD as text and itself as bytes."""
    of_bytes = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(TOKENIZER.vocabulary)}
    first = of_bytes["語".encode()[:1]]
    assert TOKENIZER.token_text(first) == "\ufffd"
    assert TOKENIZER.token_bytes(first) == "語".encode()[:1]


@pytest.mark.parametrize("token_id", [-1, 2**31, 10**30])
def test_ids_without_a_token_have_no_bytes(token_id: int) -> None:
    """Ids that the tokenizer does not know add nothing."""
    assert TOKENIZER.token_bytes(token_id) == b""
    assert TOKENIZER.decode([token_id, *TOKENIZER.encode("a")]) == "a"


def test_hash_is_of_the_file(tmp_path: Path) -> None:
    """The hash names the file's contents, and another file has another."""
    (tmp_path / "tokenizer.json").write_bytes(SOURCE + b"\n")
    assert TOKENIZER.hash() == hashlib.sha256(SOURCE).hexdigest()
    assert Tokenizer.load(DEMO).hash() == TOKENIZER.hash() != Tokenizer.load(tmp_path).hash()


def test_lone_surrogates_are_a_bad_request() -> None:
    """Text that is not Unicode is refused in one line."""
    with pytest.raises(BadRequest, match="surrogate"):
        TOKENIZER.encode("a\ud800b")


def test_settings_in_the_file_do_not_cut_or_pad() -> None:
    """Truncation and padding that a file asks for are switched off."""
    library = tokenizers.Tokenizer.from_str(SOURCE.decode())
    library.enable_truncation(4)
    library.enable_padding(length=50)
    text = "one two three four five six seven"
    assert Tokenizer(library.to_str().encode()).encode(text) == TOKENIZER.encode(text)


def test_an_absent_tokenizer_refuses_text_only(tmp_path: Path) -> None:
    """Without tokenizer.json ids have no bytes and encoding names the file."""
    absent = Tokenizer.load(tmp_path)
    assert not absent.available
    assert (absent.vocabulary, absent.token_text(5), absent.decode([1, 2])) == (0, "", "")
    with pytest.raises(BadModel, match=r"tokenizer\.json"):
        absent.encode("a")


@pytest.mark.parametrize("source", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"version": "1.0"}', b'{"model": 3}'])
def test_a_broken_file_is_named(tmp_path: Path, source: bytes) -> None:
    """A file that is no tokenizer gives one line that names it."""
    (tmp_path / "tokenizer.json").write_bytes(source)
    with pytest.raises(BadModel, match=r"^tokenizer\.json.*") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    """A decoder other than ByteLevel is named."""
    content = json.loads(SOURCE)
    for decoder, name in (({"type": "Fuse"}, "Fuse"), (None, "None")):
        with pytest.raises(BadModel, match=name):
            Tokenizer(json.dumps(content | {"decoder": decoder}).encode())


async def test_long_texts_do_not_hold_the_loop() -> None:
    """While a long text is encoded the loop goes on turning, and the ids are those of the plain call."""
    tokenizer = Tokenizer(SOURCE)
    text = "def name(argument): return argument + 1\n" * 4000
    running = asyncio.ensure_future(tokenizer.encode_async(text))
    turns = 0
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    assert await running == tokenizer.encode(text)
    await tokenizer.aclose()


@pytest.mark.parametrize("size", [0, 1, 32_767, 32_768, 32_769])
async def test_both_ways_of_encoding_agree(size: int) -> None:
    """The ids do not depend on which side of the limit a text's length is."""
    tokenizer = Tokenizer(SOURCE)
    text = ("x = [1, 2]\n" * 3000)[:size]
    assert await tokenizer.encode_async(text) == LIBRARY.encode(text, add_special_tokens=False).ids
    await tokenizer.aclose()


async def test_a_cancelled_encoding_leaves_the_tokenizer_usable() -> None:
    """Cancelling the wait drops the result only."""
    tokenizer = Tokenizer(SOURCE)
    text = "value = other\n" * 5000
    waiting = asyncio.ensure_future(tokenizer.encode_async(text))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await tokenizer.encode_async(text) == tokenizer.encode(text)
    await tokenizer.aclose()


async def test_errors_come_back_from_the_worker() -> None:
    """A long text that is not Unicode is refused as a short one is, and closing twice is harmless."""
    tokenizer = Tokenizer(SOURCE)
    with pytest.raises(BadRequest, match="surrogate"):
        await tokenizer.encode_async("a" * 40_000 + "\udfff")
    await tokenizer.aclose()
    await tokenizer.aclose()
