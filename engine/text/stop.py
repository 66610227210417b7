"""Stop strings in a stream of text.

Knows no tokens: it is fed what the detokenizer completed. Cost is linear in the text, whatever the stop strings are
(each is followed by its Knuth-Morris-Pratt automaton).

1. The stop that is complete first wins; of several complete at the same character, the longest. So the result does not depend on how
   the text was cut into pieces, and no stop waits for text after it.
2. Only text that may still become a stop is held back: the longest end of the text that is a beginning of some stop.
3. After a stop nothing more comes out.
"""

from collections.abc import Sequence

__all__ = ["StopScanner"]


class StopScanner:
    """One generation's stop strings; with none, text passes through."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Args: stops: not empty strings. include_stop: the stop itself is part of the text."""
        assert all(stops), "a stop string is never empty"
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))  # longest first: it wins a tie
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._include_stop = include_stop
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._stopped

    def push(self, text: str) -> tuple[str, str | None]:
        """Scan more text.

        Returns: text that can be shown, and the stop string if one is complete now (what follows it is dropped).
        """
        assert self._stopped is None, "text after a stop"
        for place, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None:
                whole = self._held + text[: place + 1]
                self._held, self._stopped = "", stop
                return whole if self._include_stop else whole[: -len(stop)], stop
        whole = self._held + text
        shown = len(whole) - max(self._matched, default=0)
        self._held = whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """What was held back, when the text ends without a stop; "" after one."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Move every automaton by one character; the longest stop that is complete."""
        found = None
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._borders[index][matched]
            if stop[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop) and found is None:
                found = stop
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix length, the length of its longest proper prefix that is also its end."""
    borders = [0, 0]
    border = 0
    for character in stop[1:]:
        while border and stop[border] != character:
            border = borders[border]
        border += stop[border] == character
        borders.append(border)
    return borders
