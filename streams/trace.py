"""A tape as a Chrome trace, which Perfetto and chrome://tracing open.

Rows: one for each stream under "streams" (copyback and channels are streams), one for each session under "sessions", and what the host
waited for under "host". Arrows follow `after`. An operation that never ran is a mark; one still in flight at the tape's end is a mark
"unfinished".
"""

from collections.abc import Iterator

import msgspec

from streams.tape import Awaited, Completed, Resumed, Submitted, Tape

__all__ = ["chrome_trace"]

_STREAMS, _SESSIONS, _HOST = 1, 2, 3


def chrome_trace(tape: Tape) -> bytes:
    """The tape in Chrome's trace event format, JSON bytes; times in microseconds with ns kept as decimals."""
    events = [*_rows(tape), *_operations(tape), *_waits(tape)]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ns", "otherData": tape.header.notes})


def _rows(tape: Tape) -> Iterator[dict[str, object]]:
    for process, name in ((_STREAMS, "streams"), (_SESSIONS, "sessions"), (_HOST, "host")):
        yield _meta("process_name", process, 0, {"name": name})
        yield _meta("process_sort_index", process, 0, {"sort_index": process})
    for process, places in ((_STREAMS, _places(tape, "stream")), (_SESSIONS, _places(tape, "session"))):
        for name, place in places.items():
            yield _meta("thread_name", process, place, {"name": name})
    yield _meta("thread_name", _HOST, 1, {"name": "waits"})


def _meta(name: str, process: int, thread: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


def _places(tape: Tape, field: str) -> dict[str, int]:
    """Row of each stream or session, in order of appearance; "" has none."""
    names = dict.fromkeys(getattr(record, field) for record in tape.records if isinstance(record, Submitted))
    return {name: place for place, name in enumerate((name for name in names if name), 1)}


def _operations(tape: Tape) -> Iterator[dict[str, object]]:
    streams, sessions = _places(tape, "stream"), _places(tape, "session")
    submitted: dict[int, Submitted] = {}
    ended: dict[int, Completed] = {}
    for record in tape.records:
        if isinstance(record, Submitted):
            submitted[record.number] = record
        elif isinstance(record, Completed):
            operation, ended[record.number] = submitted[record.number], record
            row = {"name": operation.label, "pid": _STREAMS, "tid": streams[operation.stream]}
            args = _arguments(operation, record)
            if record.started_ns < 0:
                yield {**row, "ph": "i", "s": "t", "ts": record.at_ns / 1000, "args": args}
                continue
            yield {**row, "ph": "X", "ts": record.started_ns / 1000, "dur": (record.at_ns - record.started_ns) / 1000, "args": args}
            if operation.session:
                yield from _session_span(operation, record, sessions[operation.session])
            yield from _arrows(operation, record, submitted, ended, streams)
    for number in submitted.keys() - ended.keys():
        operation = submitted[number]
        row = {"name": f"unfinished {operation.label}", "pid": _STREAMS, "tid": streams[operation.stream]}
        yield {**row, "ph": "i", "s": "t", "ts": operation.at_ns / 1000, "args": {"number": number}}


def _arguments(operation: Submitted, record: Completed) -> dict[str, object]:
    args: dict[str, object] = {"number": operation.number, "submitted_us": operation.at_ns / 1000}
    if operation.session:
        args["session"] = operation.session
    if operation.payload_bytes:
        args["payload_bytes"] = operation.payload_bytes
    if record.error:
        args["error"] = f"{record.error}: {record.message}"
    return args


def _session_span(operation: Submitted, record: Completed, place: int) -> Iterator[dict[str, object]]:
    """Operations of one session overlap, so their row holds asynchronous spans, one an operation."""
    span = {"name": operation.label, "cat": "session", "id": operation.number, "pid": _SESSIONS, "tid": place}
    yield {**span, "ph": "b", "ts": record.started_ns / 1000, "args": {"stream": operation.stream}}
    yield {**span, "ph": "e", "ts": record.at_ns / 1000}


def _arrows(
    operation: Submitted, record: Completed, submitted: dict[int, Submitted], ended: dict[int, Completed], streams: dict[str, int]
) -> Iterator[dict[str, object]]:
    for place, number in enumerate(operation.after):
        before = ended.get(number)
        if before is None or before.started_ns < 0:
            continue
        arrow = {"name": "after", "cat": "after", "id": f"{operation.number}.{place}", "pid": _STREAMS}
        yield {**arrow, "ph": "s", "tid": streams[submitted[number].stream], "ts": before.started_ns / 1000}
        yield {**arrow, "ph": "f", "bp": "e", "tid": streams[operation.stream], "ts": record.started_ns / 1000}


def _waits(tape: Tape) -> Iterator[dict[str, object]]:
    labels = {record.number: record.label for record in tape.records if isinstance(record, Submitted)}
    begun: dict[int, list[tuple[int, int]]] = {}
    waits = 0
    for record in tape.records:
        if isinstance(record, Awaited):
            begun.setdefault(record.number, []).append((waits, record.at_ns))
            waits += 1
        elif isinstance(record, Resumed) and begun.get(record.number):
            place, since_ns = begun[record.number].pop(0)
            span = {"name": labels[record.number], "cat": "wait", "id": place, "pid": _HOST, "tid": 1}
            yield {**span, "ph": "b", "ts": since_ns / 1000, "args": {"number": record.number}}
            yield {**span, "ph": "e", "ts": record.at_ns / 1000}
