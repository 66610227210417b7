"""Masks of free text and of grammars over the demo's tokens, against their definition token by token."""

import numpy
import pytest
from llguidance import LLMatcher

from engine.errors import FormBroken
from engine.grammar.follower import Follower
from engine.grammar.form import Form
from engine.grammar.vocabulary import Mask, Vocabulary, words_of
from engine.text.tokenizer import Tokenizer
from tests.engine.grammar.random_model import CALL, DEMO, END, THINK_END

SIZE = 2053  # five ids more than the tokenizer has, as checkpoints pad their vocabulary
ENDS = (2027, END, 2036)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(Tokenizer.load(DEMO), SIZE, ENDS)


def tokens_of(mask: Mask) -> list[int]:
    return [token for token in range(SIZE) if mask[token // 32] >> (token % 32) & 1]


def grammar(vocabulary: Vocabulary, text: str) -> LLMatcher:
    return LLMatcher(vocabulary.library, text, log_level=0)


def test_words_hold_a_bit_a_token() -> None:
    """Bits of ids at the edges of words, the sign bit included; ids outside the vocabulary are none."""
    assert words_of([0, 31, 32, 69, 70, -1], 70).tolist() == [1 - 2**31, 1, 1 << 5]


def test_marks_are_text_and_other_special_tokens_are_not(vocabulary: Vocabulary) -> None:
    """Ends, turns' marks and ids without a token are outside of text; marks of reasoning and calls are inside."""
    text = set(tokens_of(vocabulary.text))
    assert {THINK_END, CALL} < text
    assert not text & {2027, 2033, END, 2036, *range(2048, SIZE)}
    assert len(text) > 2000


@pytest.mark.parametrize("before", ["", "a <", "</", "x</thi", "</think", "<tool_cal", "</tool_call"])
@pytest.mark.parametrize("banned", [(), (b"<tool_call>",)])
def test_free_text_ends_where_a_token_ends(vocabulary: Vocabulary, before: str, banned: tuple[bytes, ...]) -> None:
    """Behind any beginning of a mark, exactly the tokens are out that run past `</think>` or complete a banned mark."""
    end = b"</think>"
    tail = vocabulary.tail(before.encode(), (end, *banned))
    allowed = []
    for token in tokens_of(vocabulary.text):
        whole = before.encode() + vocabulary.bytes_of[token]
        at = whole.find(end)
        if (at < 0 or at + len(end) == len(whole)) and not any(mark in whole for mark in banned):
            allowed.append(token)
    assert tokens_of(vocabulary.free(tail, end, banned)) == allowed


def test_a_grammar_takes_over_behind_the_reasoning(vocabulary: Vocabulary) -> None:
    """In the reasoning ends are out; behind its mark only the grammar's tokens may come, then ends beside what may follow, then nothing."""
    form = Form('start: "ab" "c"?', "f", "behind reasoning")
    follower = Follower(vocabulary, grammar(vocabulary, form.grammar), form, ENDS, reasoning=True)
    encode = Tokenizer.load(DEMO).encode
    for token in (*encode("so </thin"), *encode("g <")):
        assert not follower.take(token)
        assert not set(ENDS) & set(tokens_of(follower.mask.numpy()))
    assert not follower.take(THINK_END)
    assert {vocabulary.bytes_of[token] for token in tokens_of(follower.mask.numpy())} <= {b"a", b"ab", b"abc"}
    for token in encode("ab"):
        assert not follower.take(token)
    assert set(tokens_of(follower.mask.numpy())) == {*encode("c"), *ENDS}
    assert follower.take(*encode("c"))


def test_a_mark_spelled_in_pieces_is_one(vocabulary: Vocabulary) -> None:
    """`</think>` of ordinary tokens ends the reasoning too."""
    form = Form('start: "z"', "f", "behind reasoning")
    follower = Follower(vocabulary, grammar(vocabulary, form.grammar), form, ENDS, reasoning=True)
    one = {text: token for token, text in enumerate(vocabulary.bytes_of) if len(text) == 1}
    for byte in b"a</think>":
        assert follower.mask.numpy()[one[bytes([byte])] // 32] >> (one[bytes([byte])] % 32) & 1
        assert not follower.take(one[bytes([byte])])
    assert [vocabulary.bytes_of[token] for token in tokens_of(follower.mask.numpy())] == [b"z"]


def test_text_is_free_again_behind_a_call(vocabulary: Vocabulary) -> None:
    """With strict tools text may end or call; inside a call it is the grammar's; behind it all is as before, twice."""
    form = Form('start: "n</tool_call>"', "f", "at calls", calls=True)
    follower = Follower(vocabulary, grammar(vocabulary, form.grammar), form, ENDS, reasoning=True)
    free = tokens_of(follower.mask.numpy())
    assert set(ENDS) | {CALL, THINK_END} < set(free)
    encode = Tokenizer.load(DEMO).encode
    for _ in range(2):
        assert not follower.take(CALL)
        assert {vocabulary.bytes_of[token][:1] for token in tokens_of(follower.mask.numpy())} == {b"n"}
        for token in encode("n</tool_call>"):
            assert not follower.take(token)
        assert tokens_of(follower.mask.numpy()) == free


def test_ends_of_the_generation_are_what_ends_it(vocabulary: Vocabulary) -> None:
    """An ordinary token that a request stops at may come only where the form is complete; without any end the form itself says so."""
    form = Form('start: "aa"', "f")
    a = Tokenizer.load(DEMO).encode("a")[0]
    follower = Follower(vocabulary, grammar(vocabulary, form.grammar), form, (a,), reasoning=False)
    assert a not in tokens_of(follower.mask.numpy())
    bare = Follower(vocabulary, grammar(vocabulary, form.grammar), form, (), reasoning=False)
    assert [bare.take(a), bare.take(a)] == [False, True]


def test_a_token_outside_the_mask_breaks_the_form(vocabulary: Vocabulary) -> None:
    """What the grammar cannot read is an error that names the field on one line."""
    form = Form('start: "aa"', "guided_grammar")
    follower = Follower(vocabulary, grammar(vocabulary, form.grammar), form, ENDS, reasoning=False)
    with pytest.raises(FormBroken, match="guided_grammar: the output cannot go on") as caught:
        follower.take(Tokenizer.load(DEMO).encode("b")[0])
    assert "\n" not in str(caught.value)


def test_masks_are_new_tensors(vocabulary: Vocabulary) -> None:
    """A mask that was handed out does not change when the form goes on, and nobody changes the form by it."""
    form = Form("start: /a*/", "f")
    follower = Follower(vocabulary, grammar(vocabulary, form.grammar), form, ENDS, reasoning=False)
    first = follower.mask
    kept = first.clone()
    first.zero_()
    assert follower.mask.equal(kept)
    assert numpy.count_nonzero(kept.numpy())
