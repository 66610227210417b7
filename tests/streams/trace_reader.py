"""A strict reader of Chrome traces: what Perfetto's importer makes of one, and an error for all that it would drop or lay elsewhere.

Written from the Trace Event Format and from Perfetto's own reader (src/trace_processor/importers/json, importers/common/slice_tracker.cc
and flow_tracker.cc): events are sorted by time and otherwise keep their order, a thread is (pid, tid), a slice is closed by the first
event of its thread that begins at or after its end, and an arrow binds to the slice that is open on its thread when it is read.
"""

import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Picture", "Slice", "read_trace"]

_METADATA = ("process_name", "process_sort_index", "thread_name", "thread_sort_index")


@dataclass
class Slice:
    """Something drawn in a row."""

    process: str
    row: str
    name: str
    starts_ns: int
    length_ns: int
    depth: int
    args: dict[str, Any]

    @property
    def ends_ns(self) -> int:
        return self.starts_ns + self.length_ns


@dataclass
class Picture:
    """All that is drawn: rows as (process, name) from top to bottom, slices in order of their begin, arrows as pairs of slices."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    arrows: list[tuple[Slice, Slice]] = field(default_factory=list)

    def row(self, name: str) -> list[Slice]:
        return [one for one in self.slices if one.row == name]


class _Reader:
    def __init__(self) -> None:
        self.picture = Picture()
        self.process_of: dict[int, str] = {}
        self.row_of: dict[tuple[int, int], str] = {}
        self.sort_of: dict[tuple[str, int, int], int] = {}
        self.open_of: dict[tuple[int, int], list[Slice]] = {}
        self.leaving: dict[int, Slice] = {}

    def metadata(self, event: dict[str, Any]) -> None:
        thread = (event["pid"], event["tid"])
        assert event["name"] in _METADATA, f"{event}: metadata that nobody reads"
        if event["name"].endswith("sort_index"):
            assert isinstance(event["args"]["sort_index"], int)
            self.sort_of[event["name"], *(thread if event["name"].startswith("thread") else (thread[0], 0))] = event["args"]["sort_index"]
            return
        name = event["args"]["name"]
        assert isinstance(name, str), f"{event}: no name"
        assert name, f"{event}: an empty name"
        known = self.process_of if event["name"] == "process_name" else self.row_of
        key: Any = thread[0] if event["name"] == "process_name" else thread
        assert key not in known, f"{event}: named twice"
        known[key] = name

    def draw(self, event: dict[str, Any], at_ns: int, length_ns: int) -> None:
        """Nest in what is open on the thread."""
        thread = (event["pid"], event["tid"])
        stack = self.open_of.setdefault(thread, [])
        while stack and stack[-1].ends_ns <= at_ns and not (stack[-1].ends_ns == at_ns and stack[-1].length_ns == length_ns == 0):
            stack.pop()
        assert not stack or at_ns + length_ns <= stack[-1].ends_ns, f"{event} overlaps {stack[-1]} and would be dropped"
        drawn = Slice(
            self.process_of[thread[0]], self.row_of[thread], event["name"], at_ns, length_ns, len(stack), event.get("args", {})
        )  # fmt: skip
        stack.append(drawn)
        self.picture.slices.append(drawn)

    def arrow(self, event: dict[str, Any]) -> None:
        number, stack = event["id"], self.open_of.get((event["pid"], event["tid"]), [])
        assert isinstance(number, int), f"{event}: the id of an arrow is an integer or a hexadecimal text"
        assert stack, f"{event}: no slice is open there"
        if event["ph"] == "s":
            assert number not in self.leaving, f"{event}: begun twice"
            self.leaving[number] = stack[-1]
        else:
            assert event["bp"] == "e", f"{event}: would bind to the next slice"
            self.picture.arrows.append((self.leaving[number], stack[-1]))


def read_trace(trace: bytes) -> Picture:
    """What Perfetto would draw of a trace. Raises AssertionError or KeyError: an event that it would not."""
    events = json.loads(trace)["traceEvents"]
    reader = _Reader()
    for event in events:
        assert event["ph"] in ("M", "X", "i", "s", "f"), f"{event}: this makes no row of its own"
        assert isinstance(event["name"], str), f"{event}: no name"
        assert event["name"], f"{event}: an empty name"
        for name in ("pid", "tid"):
            assert isinstance(event[name], int), f"{event}: {name} is no number"
            assert 0 < event[name] < 1 << 32, f"{event}: {name} stands for none"
        assert event["pid"] != event["tid"], f"{event}: on a process's main thread"
        if event["ph"] == "M":
            reader.metadata(event)
    drawn = [event for event in events if event["ph"] != "M"]
    for event in sorted(drawn, key=lambda one: round(one["ts"] * 1000)):
        assert event["ts"] >= 0, f"{event}: before the begin"
        if event["ph"] == "X":
            assert event["dur"] >= 0, f"{event}: ends before it begins"
            reader.draw(event, round(event["ts"] * 1000), round(event["dur"] * 1000))
        elif event["ph"] == "i":
            assert event["s"] == "t", f"{event}: not on its row"
            reader.draw(event, round(event["ts"] * 1000), 0)
        else:
            reader.arrow(event)
    order = reader.sort_of
    threads = sorted(reader.row_of, key=lambda one: (order["process_sort_index", one[0], 0], order["thread_sort_index", *one]))
    reader.picture.rows = [(reader.process_of[thread[0]], reader.row_of[thread]) for thread in threads]
    return reader.picture
