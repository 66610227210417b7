"""A tape as a Chrome trace, which Perfetto and chrome://tracing open.

Rows: one for each stream under "streams" (copyback and channels are streams), one for each session under "sessions", and under "host"
what the host waited for, on as many rows as there were waits at once. Arrows follow `after`. An operation that never ran is a mark; one
still in flight at the tape's end is a mark "unfinished".

What Perfetto does with the format decides the form:
1. It keys asynchronous events by name and id, not by thread: only complete events ("X") on a thread of their own make a row.
2. Complete events of a thread nest or lie apart; where two overlap, one is dropped or laid elsewhere. A session's operations do overlap, on
   different streams: the one that ends later is shown from the end of the other one, its whole time said in its arguments.
3. A thread whose number is its process's is that process's main thread, so rows are numbered apart from processes. 0 stands for none.
4. An arrow starts and ends at the slice that began last on its row, so it is written right behind that one. Its id must be a number.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec

from streams.tape import Awaited, Completed, Resumed, Submitted, Tape

__all__ = ["chrome_trace"]

_PROCESSES = ("streams", "sessions", "host")  # numbered from 1
_FIRST_ROW = 10


def chrome_trace(tape: Tape) -> bytes:
    """The tape in Chrome's trace event format, JSON bytes; times in microseconds with ns kept as decimals."""
    runs, waits = _runs(tape), _lanes(_waits(tape))
    rows = _Rows(tape, len(waits))
    events = [*rows.named(), *_stream_events(tape, runs, rows), *_session_events(runs, rows)]
    for lane, spans in enumerate(waits):
        events += (_complete(f"waits for {span.name}", span, rows.of["host", f"{lane}"], {"number": span.number}) for span in spans)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ns", "otherData": tape.header.notes})


@dataclass(frozen=True, slots=True)
class _Span:
    """Something with a begin and an end; `number` is an operation's, `place` the one among those that ended."""

    number: int
    name: str
    starts_ns: int
    ends_ns: int
    place: int

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Of what begins at once, what took no time comes first, as it ended: others come after it. Then outer before inner."""
        return (self.starts_ns, self.ends_ns > self.starts_ns, -self.ends_ns, self.place)


class _Rows:
    """Numbers of process and thread of each row, in order of appearance."""

    def __init__(self, tape: Tape, lanes: int) -> None:
        submitted = [record for record in tape.records if isinstance(record, Submitted)]
        names = [("streams", record.stream) for record in submitted]
        names += [("sessions", record.session) for record in submitted if record.session]
        names += [("host", f"{lane}") for lane in range(lanes)]
        self.of = {
            name: {"pid": _PROCESSES.index(name[0]) + 1, "tid": number} for number, name in enumerate(dict.fromkeys(names), _FIRST_ROW)
        }

    def named(self) -> Iterator[dict[str, object]]:
        """The metadata that names and orders them."""
        seen: set[str] = set()
        for (process, name), row in self.of.items():
            if process not in seen:
                seen.add(process)
                yield {"ph": "M", "name": "process_name", **row, "args": {"name": process}}
                yield {"ph": "M", "name": "process_sort_index", **row, "args": {"sort_index": row["pid"]}}
            shown = "waits" if process == "host" else name
            yield {"ph": "M", "name": "thread_name", **row, "args": {"name": shown}}
            yield {"ph": "M", "name": "thread_sort_index", **row, "args": {"sort_index": row["tid"]}}


@dataclass(frozen=True, slots=True)
class _Run:
    """An operation whose work ran."""

    submitted: Submitted
    completed: Completed
    place: int

    def span(self) -> _Span:
        one, ended = self.submitted, self.completed
        return _Span(one.number, one.label, ended.started_ns, ended.at_ns, self.place)


def _runs(tape: Tape) -> dict[int, _Run]:
    """By number, as they ended."""
    submitted = {record.number: record for record in tape.records if isinstance(record, Submitted)}
    ended = [record for record in tape.records if isinstance(record, Completed) and record.started_ns >= 0]
    return {one.number: _Run(submitted[one.number], one, place) for place, one in enumerate(ended)}


def _stream_events(tape: Tape, runs: dict[int, _Run], rows: _Rows) -> Iterator[dict[str, object]]:
    """All streams together in order of time: an arrow must have left before it arrives."""
    leaving, arriving = _arrows(runs)
    of_stream: dict[str, list[_Span]] = {}
    for run in runs.values():
        of_stream.setdefault(run.submitted.stream, []).append(run.span())
    spans = [span for theirs in of_stream.values() for span in _nested(theirs)]
    for span in sorted(spans, key=lambda one: one.order):
        run = runs[span.number]
        row = rows.of["streams", run.submitted.stream]
        yield _complete(span.name, span, row, _arguments(run.submitted, run.completed))
        arrow = {"name": "after", "cat": "after", **row, "ts": span.starts_ns / 1000}
        yield from ({"ph": "s", **arrow, "id": number} for number in leaving.get(span.number, ()))
        yield from ({"ph": "f", "bp": "e", **arrow, "id": number} for number in arriving.get(span.number, ()))
    yield from _marks(tape, rows)


def _arrows(runs: dict[int, _Run]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Numbers of the arrows that leave and that reach each operation; one for each `after` that ran."""
    leaving: dict[int, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    pairs = [(before, run.submitted.number) for run in runs.values() for before in dict.fromkeys(run.submitted.after) if before in runs]
    for arrow, (before, behind) in enumerate(pairs, 1):
        leaving.setdefault(before, []).append(arrow)
        arriving.setdefault(behind, []).append(arrow)
    return leaving, arriving


def _session_events(runs: dict[int, _Run], rows: _Rows) -> Iterator[dict[str, object]]:
    of_session: dict[str, list[_Span]] = {}
    for run in runs.values():
        if run.submitted.session:
            of_session.setdefault(run.submitted.session, []).append(run.span())
    for session, spans in of_session.items():
        for span in _nested(spans):
            one, ended = runs[span.number].submitted, runs[span.number].completed
            args = {"number": one.number, "stream": one.stream, "from_us": ended.started_ns / 1000, "to_us": ended.at_ns / 1000}
            yield _complete(span.name, span, rows.of["sessions", session], args)


def _marks(tape: Tape, rows: _Rows) -> Iterator[dict[str, object]]:
    """Operations that never ran, and those the tape does not see the end of."""
    open_of: dict[int, Submitted] = {}
    for record in tape.records:
        if isinstance(record, Submitted):
            open_of[record.number] = record
        elif isinstance(record, Completed):
            one = open_of.pop(record.number)
            if record.started_ns < 0:
                yield {"ph": "i", "s": "t", "name": one.label, **rows.of["streams", one.stream], "ts": record.at_ns / 1000,
                       "args": _arguments(one, record)}  # fmt: skip
    for one in open_of.values():
        yield {"ph": "i", "s": "t", "name": f"unfinished {one.label}", **rows.of["streams", one.stream], "ts": one.at_ns / 1000,
               "args": {"number": one.number}}  # fmt: skip


def _waits(tape: Tape) -> Iterator[_Span]:
    """Waits of the host. Of two for one event the first to begin is shown as the first to end."""
    labels = {record.number: record.label for record in tape.records if isinstance(record, Submitted)}
    begun: dict[int, list[int]] = {}
    for record in tape.records:
        if isinstance(record, Awaited):
            begun.setdefault(record.number, []).append(record.at_ns)
        elif isinstance(record, Resumed) and begun.get(record.number):
            yield _Span(record.number, labels[record.number], begun[record.number].pop(0), record.at_ns, record.number)


def _lanes(spans: Iterable[_Span]) -> list[list[_Span]]:
    """Spread over as few rows as will do without overlaps."""
    lanes: list[list[_Span]] = []
    for span in sorted(spans, key=lambda one: one.starts_ns):
        free = next((lane for lane in lanes if lane[-1].ends_ns <= span.starts_ns), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _nested(spans: Iterable[_Span]) -> Iterator[_Span]:
    """In order of their begin, an outer one first; one that begins inside another and ends after it is cut to what comes after."""
    queue = [(span.order, span) for span in spans]
    heapq.heapify(queue)
    around: list[int] = []  # ends of those that the next one may lie in, innermost last
    while queue:
        _, span = heapq.heappop(queue)
        while around and around[-1] <= span.starts_ns:
            around.pop()
        if around and span.ends_ns > around[-1]:
            cut = replace(span, starts_ns=around[-1])
            heapq.heappush(queue, (cut.order, cut))
            continue
        around.append(span.ends_ns)
        yield span


def _complete(name: str, span: _Span, row: dict[str, int], args: dict[str, object]) -> dict[str, object]:
    return {"ph": "X", "name": name, **row, "ts": span.starts_ns / 1000, "dur": (span.ends_ns - span.starts_ns) / 1000, "args": args}


def _arguments(operation: Submitted, record: Completed) -> dict[str, object]:
    args: dict[str, object] = {"number": operation.number, "submitted_us": operation.at_ns / 1000}
    if operation.session:
        args["session"] = operation.session
    if operation.payload_bytes:
        args["payload_bytes"] = operation.payload_bytes
    if record.error:
        args["error"] = f"{record.error}: {record.message}"
    return args
