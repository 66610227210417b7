"""The index of stored histories: longest match, namespaces, growth, cuts, collisions."""

import asyncio
import itertools
import random
from array import array
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import loop_lag, prefix
from engine.prefix import Match, PrefixIndex


def index(identity: bytes = b"model") -> PrefixIndex[str]:
    return PrefixIndex(identity)


@pytest.mark.parametrize("common", [1, 63, 64, 65, 127, 128, 150])
@pytest.mark.parametrize("more", [0, 1, 64, 200])
def test_the_common_tokens_are_counted_to_the_token(common: int, more: int) -> None:
    """A stored history of 150 tokens that agrees with a prompt up to any place is found with exactly that many."""
    histories = index()
    stored = list(range(150))
    histories.put("one", stored, "")
    prompt = [*stored[:common], *(9000 + place for place in range(more))]
    assert histories.match(prompt, "") == [Match("one", common)]


def test_nothing_in_common_is_no_match() -> None:
    """A prompt that differs in its first token, and an empty one, match nothing; nor does an empty history."""
    histories = index()
    histories.put("one", list(range(100)), "")
    histories.put("none", [], "")
    assert histories.match([1, *range(1, 100)], "") == []
    assert histories.match([], "") == []


def test_blocks_are_chained() -> None:
    """A prompt whose second block equals the history's second block, behind another first block, has nothing of it."""
    histories = index()
    histories.put("one", list(range(256)), "")
    assert histories.match([7, *range(1, 256)], "") == []
    assert histories.match([*range(64, 128), *range(64, 128)], "") == []


def test_the_longest_comes_first_and_of_equals_the_newest() -> None:
    """Histories that share the prompt's first blocks come by the length they share; a renewed one keeps its age among equals."""
    histories = index()
    shared = list(range(130))
    histories.put("short", [*shared, 1], "")
    histories.put("long", [*shared, 200, 201, 202], "")
    histories.put("other", [*shared[:64], 5], "")
    histories.put("new", [*shared, 200, 201, 203], "")
    found = histories.match([*shared, 200, 201, 202, 203], "")
    assert found == [Match("long", 133), Match("new", 132), Match("short", 130)]


def test_namespaces_never_meet() -> None:
    """The same tokens under another key, or another model, match nothing; names that run into one another are different ones."""
    histories = index(b"ab")
    tokens = list(range(200))
    histories.put("mine", tokens, "key one")
    assert histories.match(tokens, "key two") == []
    assert histories.match(tokens, "") == []
    assert histories.match(tokens, "key one") == [Match("mine", 200)]
    assert index(b"ab")._root("c") != index(b"a")._root("bc")
    assert index(b"")._root("ab") != index(b"ab")._root("")


def test_a_history_grows_and_is_cut() -> None:
    """Put again with more or fewer tokens, a history is found by what it has now; dropped, by nothing, twice without harm."""
    histories = index()
    tokens = list(range(300))
    for length in (10, 64, 200, 300, 130, 129, 0, 250):
        histories.put("one", tokens[:length], "")
        histories.check_integrity()
        found = histories.match(tokens, "")
        assert found == ([Match("one", length)] if length else [])
    histories.drop("one")
    histories.drop("one")
    histories.check_integrity()
    assert histories.match(tokens, "") == []
    assert histories._keys_at == {}


def test_other_tokens_under_a_key_are_our_bug() -> None:
    """A history whose tokens changed below what was put before is refused, and so is a changed namespace."""
    histories = index()
    histories.put("one", list(range(100)), "")
    with pytest.raises(AssertionError, match="token 99 is not the one"):
        histories.put("one", [*range(99), 5, 6], "")
    with pytest.raises(AssertionError, match="namespace"):
        histories.put("one", list(range(100)), "other")


def test_a_collision_gives_nobody_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """When every block has one hash, what is common is still what the tokens say."""
    monkeypatch.setattr(prefix, "_chained", lambda before, piece: bytes(15) + bytes([before[-1] + 1 if before[:15] == bytes(15) else 0]))
    histories = index()
    histories.put("one", list(range(200)), "")
    histories.put("two", [*range(100), *range(500, 600)], "")
    assert histories.match([*range(100), *range(500, 560)], "") == [Match("two", 160), Match("one", 100)]
    assert histories.match([9] * 200, "") == []


def test_a_history_of_another_pieces_hash_is_found_by_what_it_shares() -> None:
    """Where two histories meet in one hash, the second is found up to there by its tokens, grows, is cut, and leaves without a trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "_chained", lambda before, piece: bytes(15) + bytes([before[-1] + 1 if before[:15] == bytes(15) else 0]))
        histories = index()
        histories.put("one", list(range(300)), "")
        other = [*range(100), *range(500, 700)]
        for length in (200, 300, 64, 250):
            histories.put("two", other[:length], "")
            histories.check_integrity()
            assert Match("two", length) in histories.match([*other, 1], "")
        histories.drop("one")
        assert histories.match([*other, 1], "") == [Match("two", 250)]
        histories.drop("two")
        assert histories._keys_at == {}


def test_pieces_follow_one_another() -> None:
    """Pieces begin where the ones before end, from a block to many, and a million tokens have two hundred."""
    ends = [prefix._bounds(number) for number in range(200)]
    assert ends[0] == (0, 64)
    assert all(before[1] == first for before, (first, _) in itertools.pairwise(ends))
    for number, (first, end) in enumerate(ends):
        assert (prefix._pieces_of(first), prefix._pieces_of(end - 1), prefix._pieces_of(end)) == (number, number, number + 1)
    assert prefix._pieces_of(1 << 20) < 200


class Read(array):  # type: ignore[type-arg]  # of ints
    """Counts the tokens that are asked for."""

    asked = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.asked += 1 if isinstance(place, int) else len(found)
        return found


def test_a_million_tokens_hold_the_loop_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long history is hashed two hundred times, once; a token more costs a look at two; of many that begin alike a prompt is compared
    with one, and with the others from the last common piece on."""
    hashed, compared = list[int](), list[int]()
    chained, common = prefix._chained, prefix.common_length
    monkeypatch.setattr(prefix, "_chained", lambda before, piece: (hashed.append(len(piece)), chained(before, piece))[1])
    monkeypatch.setattr(prefix, "common_length", lambda one, other, start: (compared.append(start), common(one, other, start))[1])
    million = 1 << 20
    tokens = Read("i", range(million))
    histories = index()
    for name in range(8):
        tokens[-5] = name
        histories.put(str(name), tokens, "", million - 1)
        assert len(hashed) < 200
        assert sum(hashed) < million
        hashed.clear()
    tokens.asked = 0
    histories.put("7", tokens, "", million)
    assert (tokens.asked, len(hashed)) == (2, 1)
    hashed.clear()
    found = histories.match(tokens[:-1], "")
    assert [match.tokens for match in found] == [million - 1, *[million - 5] * 7]
    assert len(hashed) < 200
    assert min(compared) >= million - 16_384


@pytest.mark.slow
@pytest.mark.alone
async def test_the_loop_is_hardly_late_for_long_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million tokens are put, matched and dropped in less than a hash a block takes to put and to match alone, by the loop's own
    instrument. Where memory is slow beside the processor it is about one such pass."""
    monkeypatch.setattr(loop_lag, "EVERY_S", 0.001)
    tokens = array("i", range(1 << 20))
    histories = index()
    ours, blocks = list[float](), list[float]()
    for _ in range(5):
        for late, work in (
            (ours, lambda: (histories.put("one", tokens, ""), histories.match(tokens, ""), histories.drop("one"))),
            (blocks, lambda: [xxhash.xxh3_128_digest(bytes(16) + tokens[start : start + 64].tobytes()) for start in range(0, 1 << 20, 64)]),
        ):
            lag = loop_lag.LoopLag()
            lag.start()
            work()
            while not sum(lag.waits().counts):  # noqa: ASYNC110
                await asyncio.sleep(0)
            late.append(lag.recent_s)
            lag.stop()
    assert min(ours) < 2 * min(blocks), f"{min(ours):.3f} s, and {min(blocks):.3f} s for blocks"


@pytest.mark.parametrize("token", [0, 2**31, 2**32 - 1])
def test_any_token_id_is_one_of_its_own(token: int) -> None:
    """Ids at the edges of 32 bits are told from their neighbours."""
    histories = index()
    histories.put("one", [token] * 128, "")
    assert histories.match([token] * 200, "") == [Match("one", 128)]
    assert histories.match([token ^ 1] * 200, "") == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), pieces=st.sampled_from([prefix._PIECES, ((4, 16), (8, 64), (32, 1 << 62))]))
def test_the_best_match_is_that_of_comparing_every_history(seed: int, pieces: tuple[tuple[int, int], ...]) -> None:
    """Among many histories with common beginnings the first match shares as many tokens as any does, and no cut or drop is forgotten;
    with pieces as they are, and with ones that such histories have of every size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "_PIECES", pieces)
        _compare_with_every_history(seed)


def _compare_with_every_history(seed: int) -> None:
    draw = random.Random(seed)
    histories, truth = index(), dict[str, list[int]]()
    for number in range(20):
        base = draw.choice(list(truth.values())) if truth and draw.random() < 0.8 else []
        kept = base[: draw.randrange(len(base) + 1)]
        tokens = kept + [draw.randrange(3) for _ in range(draw.choice([0, 1, 63, 64, 65, 150]))]
        name = draw.choice([f"history {number}", *truth])
        if name in truth:
            histories.drop(name)
            del truth[name]
        if draw.random() < 0.9:
            histories.put(name, tokens, "")
            truth[name] = tokens
        histories.check_integrity()
        prompt = tokens + [draw.randrange(3) for _ in range(draw.randrange(3))]
        found = histories.match(prompt, "")
        best = max((_common(each, prompt) for each in truth.values()), default=0)
        assert (found[0].tokens if found else 0) == best
        assert all(match.tokens == _common(truth[match.key], prompt) for match in found)


def _common(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length
