"""StopScanner: stops across any cut of the text, the first to be complete, and nothing held that cannot become one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import StopScanner


def scan(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """All text that comes out, and the stop."""
    scanner = StopScanner(stops, include_stop=include)
    shown = ""
    for piece in pieces:
        text, stopped = scanner.push(piece)
        shown += text
        if stopped is not None:
            return shown, stopped
    return shown + scanner.flush(), None


def defined(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The definition, by brute force: the first end at which a stop is complete, the longest of those."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("abc", max_size=6), max_size=8),
    include=st.booleans(),
)
def test_any_cut_gives_the_defined_result(stops: list[str], pieces: list[str], include: bool) -> None:
    """The result is the definition's for any pieces, over an alphabet small enough for overlaps everywhere."""
    assert scan(stops, pieces, include=include) == defined(stops, "".join(pieces), include)


@settings(max_examples=200, deadline=None)
@given(stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), text=st.text("abc", max_size=12))
def test_nothing_is_held_that_cannot_become_a_stop(stops: list[str], text: str) -> None:
    """After every character, what is held back is exactly the longest end that begins a stop."""
    scanner = StopScanner(stops)
    shown = ""
    for place, character in enumerate(text):
        piece, stopped = scanner.push(character)
        if stopped is not None:
            return
        shown += piece
        whole = text[: place + 1]
        ends = [size for size in range(len(whole) + 1) if any(stop.startswith(whole[len(whole) - size :]) for stop in stops)]
        assert len(whole) - len(shown) == max(ends)


def test_a_stop_across_tokens_is_cut_out() -> None:
    """A stop in three pieces is found, its beginning is never shown, and what follows is dropped."""
    scanner = StopScanner(["</end>"])
    assert scanner.push("text<") == ("text", None)
    assert scanner.push("/en") == ("", None)
    assert scanner.push("d> more") == ("", "</end>")
    assert scanner.stopped == "</end>"
    assert scanner.flush() == ""


def test_what_was_held_comes_out_when_it_is_no_stop() -> None:
    """Held text is shown as soon as it cannot become a stop, in order."""
    scanner = StopScanner(["stop!"])
    assert scanner.push("sto") == ("", None)
    assert scanner.push("ve") == ("stove", None)
    assert scanner.push("a st") == ("a ", None)
    assert scanner.flush() == "st"
    assert scanner.flush() == ""


def test_the_first_complete_stop_wins_and_then_the_longest() -> None:
    """A stop inside a longer one that is not complete yet wins; of two that end together the longer."""
    assert scan(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert scan(["c", "abc", "bc"], ["xabc"]) == ("x", "abc")
    assert scan(["\n", "\n\n"], ["a\n\nb"]) == ("a", "\n")


def test_include_stop_shows_it_once() -> None:
    """With include_stop the text ends with the stop, held pieces included."""
    assert scan(["##"], ["a#", "#b"], include=True) == ("a##", "##")


def test_overlapping_beginnings_are_followed() -> None:
    """A stop that begins inside a failed match is found."""
    assert scan(["aab"], list("aaab")) == ("a", "aab")
    assert scan(["abac"], list("ababac")) == ("ab", "abac")


def test_without_stops_text_passes_at_once() -> None:
    """No stops hold nothing back."""
    scanner = StopScanner([])
    assert scanner.push("anything\n") == ("anything\n", None)
    assert scanner.push("") == ("", None)
    assert scanner.flush() == ""


def test_a_stop_at_the_very_beginning_gives_no_text() -> None:
    """The text may be nothing but the stop, and stops may hold any character."""
    assert scan(["é\U0001f600"], ["é", "\U0001f600"]) == ("", "é\U0001f600")


def test_a_scanner_is_not_fed_after_a_stop() -> None:
    """Text after a stop is our own mistake."""
    scanner = StopScanner(["x"])
    scanner.push("x")
    with pytest.raises(AssertionError, match="after a stop"):
        scanner.push("y")


def test_an_empty_stop_is_our_mistake() -> None:
    """An empty stop string never reaches the scanner."""
    with pytest.raises(AssertionError, match="empty"):
        StopScanner([""])
