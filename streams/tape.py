"""Tapes: what a backend did, as versioned JSON lines. Recording, reading, comparing.

The first line is the header, each other line a record: `submit`, `complete`, `await` (a task begins to wait), `resume` (it
waits no more: the operation ended, or the task was cancelled). Times are integer ns since the header's clock began (the first
record). Replay is in `replay.py`, export in `trace.py`.

Invariants:
1. Records stand in the order in which the loop saw things happen; operations are named by their number, from 0 in submission order.
2. A recorder holds at most `BATCH_RECORDS` records; a tape file holds at most `_BATCHES_MAX` batches in memory. When a disk cannot keep
   up the tape ends there, with a log line, and the run goes on.
3. A reader refuses what it does not know: another version, an unknown record, a cut line.
"""

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from queue import Full as QueueFull
from queue import Queue
from typing import Annotated, Any

import msgspec
import structlog

from streams.errors import TapeMismatch
from streams.event import Event
from streams.queued import Operation

__all__ = [
    "Awaited",
    "Completed",
    "Difference",
    "Header",
    "Record",
    "Resumed",
    "Submitted",
    "Tape",
    "TapeFile",
    "TapeRecorder",
    "submission_of",
    "write_notes",
]

TAPE_VERSION = 1
BATCH_RECORDS = 512
_BATCHES_MAX = 256
_ELSEWHERE = -1  # stands for an event that this tape does not hold: another backend's
_log = structlog.get_logger("streams")


class Header(msgspec.Struct, frozen=True, tag="tape", tag_field="record", forbid_unknown_fields=True):
    """First line: the version, and what was recorded, in the recorder's words."""

    version: int = TAPE_VERSION
    notes: dict[str, str] = {}


# Records hold no cycles: gc=False keeps the collector from walking those that are not written yet.
_Count = Annotated[int, msgspec.Meta(ge=0)]  # checked when a tape is read
_Maybe = Annotated[int, msgspec.Meta(ge=-1)]


class Submitted(msgspec.Struct, frozen=True, gc=False, tag="submit", tag_field="record", omit_defaults=True, forbid_unknown_fields=True):
    """An operation was submitted; `after` and `waits` name the operations it was ordered after."""

    number: _Count
    at_ns: _Count
    stream: str
    label: str
    session: str = ""
    after: tuple[_Maybe, ...] = ()
    waits: tuple[_Maybe, ...] = ()
    payload_bytes: _Count = 0

    def __str__(self) -> str:
        return f"operation {self.number} ({self.label} on {self.stream})"


class Completed(msgspec.Struct, frozen=True, gc=False, tag="complete", tag_field="record", omit_defaults=True, forbid_unknown_fields=True):
    """Its work ended; `started_ns` is -1 if it never ran. `error` is the exception's type, `message` its text."""

    number: _Count
    at_ns: _Count
    started_ns: _Maybe = -1
    error: str = ""
    message: str = ""


class Awaited(msgspec.Struct, frozen=True, gc=False, tag="await", tag_field="record", forbid_unknown_fields=True):
    """A task began to wait for it."""

    number: _Count
    at_ns: _Count


class Resumed(msgspec.Struct, frozen=True, gc=False, tag="resume", tag_field="record", forbid_unknown_fields=True):
    """A task waits for it no more: it has ended, or the task was cancelled."""

    number: _Count
    at_ns: _Count


Record = Submitted | Completed | Awaited | Resumed
_encoder = msgspec.json.Encoder()
_header_decoder = msgspec.json.Decoder(Header)
_record_decoder = msgspec.json.Decoder(Record)


class TapeRecorder:
    """An observer that hands records, in batches, to a sink: `TapeFile.append`, or a list's `extend`."""

    def __init__(self, sink: Callable[[list[Record]], None]) -> None:
        self._sink = sink
        self._pending: list[Record] = []
        self._began_ns: int | None = None
        self._started_ns = -1

    def submitted(
        self, event: Event[Any], after: Sequence[Event[Any]], waits: Sequence[Event[Any]], payload_bytes: int, at_ns: int
    ) -> None:
        """See `Observer.submitted`."""
        if self._began_ns is None:
            self._began_ns = at_ns
        self._add(submission_of(event, after, waits, payload_bytes, at_ns - self._began_ns))

    def started(self, event: Event[Any], at_ns: int) -> None:
        """See `Observer.started`; goes into the completion's record, which follows at once."""
        self._started_ns = at_ns

    def completed(self, event: Event[Any], error: BaseException | None, at_ns: int) -> None:
        """See `Observer.completed`."""
        began_ns, started_ns, self._started_ns = self._began_ns, self._started_ns, -1
        assert began_ns is not None, f"{event!r} completed before anything was submitted"
        at_ns = max(at_ns - began_ns, 0)  # work that never ran has no time on every backend
        if started_ns >= 0:
            started_ns = max(started_ns - began_ns, 0)
        if error is None:
            self._add(Completed(event.number, at_ns, started_ns))
        else:
            self._add(Completed(event.number, at_ns, started_ns, type(error).__name__, str(error)))

    def awaited(self, event: Event[Any], ended: bool, at_ns: int) -> None:
        """See `Observer.awaited`."""
        assert self._began_ns is not None
        self._add((Resumed if ended else Awaited)(event.number, at_ns - self._began_ns))

    def flush(self) -> None:
        """Hand what is pending to the sink; call once the backend is closed."""
        pending, self._pending = self._pending, []
        if pending:
            self._sink(pending)

    def _add(self, record: Record) -> None:
        self._pending.append(record)
        if len(self._pending) >= BATCH_RECORDS:
            self.flush()


def submission_of(event: Event[Any], after: Sequence[Event[Any]], waits: Sequence[Event[Any]], payload_bytes: int, at_ns: int) -> Submitted:
    """The record of a submission."""
    return Submitted(
        event.number, at_ns, event.stream, event.label, event.session,
        _numbers(after, event) if after else (), _numbers(waits, event) if waits else (), payload_bytes,
    )  # fmt: skip


def _numbers(events: Sequence[Event[Any]], of: Event[Any]) -> tuple[int, ...]:
    """Of events; `_ELSEWHERE` for those of another backend than `of`'s."""
    backend = of.queue.backend if isinstance(of, Operation) else None
    return tuple([one.number if isinstance(one, Operation) and one.queue.backend is backend else _ELSEWHERE for one in events])


class TapeFile:
    """Writes a tape on a thread of its own; the loop only hands over batches."""

    def __init__(self, path: Path, notes: dict[str, str] | None = None) -> None:
        self._path = path
        self._file = path.open("wb")
        self._file.write(_encoder.encode(Header(notes=notes or {})) + b"\n")
        self._batches: Queue[list[Record] | None] = Queue(_BATCHES_MAX)
        self._cut = False
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._write, name="tape", daemon=True)
        self._thread.start()

    def append(self, batch: list[Record]) -> None:
        """Hand over a batch; never waits. A file that has fallen behind or failed takes no more."""
        if self._cut:
            return
        try:
            self._batches.put_nowait(batch)
        except QueueFull:
            self._cut = True
            _log.warning("tape.cut", path=str(self._path), first_lost=batch[0].number)

    def close(self) -> None:
        """Write what was handed over and close the file. Raises: OSError: the disk refused."""
        self._batches.put(None)
        self._thread.join()
        self._file.close()
        if self._failure is not None:
            raise self._failure

    def _write(self) -> None:
        while (batch := self._batches.get()) is not None:
            if self._failure is None:
                try:
                    self._file.write(_encoder.encode_lines(batch))
                except OSError as failure:
                    self._failure = failure
                    self._cut = True


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two tapes part: the place among the records, and what each has there (None: it has ended)."""

    place: int
    left: Record | None
    right: Record | None
    name: str  # the operation, in words

    def __str__(self) -> str:
        return f"record {self.place}, {self.name}: {_words(self.left)} against {_words(self.right)}"


@dataclass(frozen=True, slots=True)
class Tape:
    """A whole tape in memory."""

    header: Header
    records: tuple[Record, ...]

    @classmethod
    def read(cls, path: Path) -> "Tape":
        """Read a tape file. Raises: TapeMismatch: not a tape, another version, or damaged; names the line."""
        with path.open("rb") as lines:
            return cls.parse(lines, str(path))

    @classmethod
    def parse(cls, lines: Iterable[bytes], name: str) -> "Tape":
        """As `read`, from lines."""
        records: list[Record] = []
        header: Header | None = None
        for place, line in enumerate(lines, 1):
            try:
                if header is None:
                    header = _header_decoder.decode(line)
                    if header.version != TAPE_VERSION:
                        raise TapeMismatch(f"{name} is a tape of version {header.version}; this reads version {TAPE_VERSION}")
                else:
                    records.append(_record_decoder.decode(line))
            except msgspec.DecodeError as error:
                raise TapeMismatch(f"{name}, line {place}: not a record of a version {TAPE_VERSION} tape ({error})") from error
        if header is None:
            raise TapeMismatch(f"{name} is empty: not even a header")
        return cls(header, tuple(records))

    @property
    def length_ns(self) -> int:
        """Time of the last thing on it."""
        return max((record.at_ns for record in self.records), default=0)

    def check_numbers(self) -> None:
        """Raise TapeMismatch at the first record that repeats another, or whose operation was never submitted or ends before it starts."""
        flying: set[int] = set()
        ended: set[int] = set()
        for place, record in enumerate(self.records, 2):
            if isinstance(record, Submitted):
                if record.number in flying or record.number in ended:
                    raise TapeMismatch(f"line {place} submits operation {record.number} again")
                flying.add(record.number)
            elif record.number not in flying and record.number not in ended:
                raise TapeMismatch(f"line {place} speaks of operation {record.number}, which no line before it submits")
            elif isinstance(record, Completed):
                if record.number in ended:
                    raise TapeMismatch(f"line {place} completes operation {record.number} again")
                if record.started_ns > record.at_ns:
                    raise TapeMismatch(f"line {place} ends operation {record.number} at {record.at_ns} ns, before its start")
                flying.discard(record.number)
                ended.add(record.number)

    def encode(self) -> bytes:
        """The tape as the bytes of its file."""
        return _encoder.encode(self.header) + b"\n" + _encoder.encode_lines(self.records)

    def diff(self, other: "Tape") -> Difference | None:
        """The first submission or completion where the tapes part, times and notes aside; None if nowhere.

        Sessions may have other names, one for one. Waits are not compared: when a task goes on is the host's affair, no stream's.
        """
        mine, theirs = _Anonymous(), _Anonymous()
        names = {record.number: str(record) for tape in (other, self) for record in tape.records if isinstance(record, Submitted)}
        for (place, left), (other_place, right) in zip_longest(self._events(), other._events(), fillvalue=(-1, None)):
            if mine.essence(left) != theirs.essence(right):
                number = next(record.number for record in (left, right) if record is not None)
                return Difference(other_place if left is None else place, left, right, names.get(number, f"operation {number}"))
        return None

    def _events(self) -> Iterator[tuple[int, Record | None]]:
        """Submissions and completions with their places among the records."""
        return ((place, record) for place, record in enumerate(self.records) if isinstance(record, Submitted | Completed))


class _Anonymous:
    """Strips records of what differs between equal runs: times, and the names of sessions (numbered as they appear)."""

    def __init__(self) -> None:
        self._sessions = {"": 0}

    def essence(self, record: Record | None) -> tuple[object, ...] | None:
        if record is None:
            return None
        kept = [getattr(record, field) for field in record.__struct_fields__ if field not in ("at_ns", "started_ns", "session")]
        if isinstance(record, Submitted):
            kept.append(self._sessions.setdefault(record.session, len(self._sessions)))
        return (type(record), *kept)


def _words(record: Record | None) -> str:
    if record is None:
        return "the end of the tape"
    return _encoder.encode(record).decode()


def write_notes(source: Path, target: Path, notes: dict[str, str]) -> None:
    """Copy a tape file, whatever its length, with other notes in its header. Raises: OSError."""
    with source.open("rb") as old, target.open("wb") as new:
        old.readline()
        new.write(_encoder.encode(Header(notes=notes)) + b"\n")
        shutil.copyfileobj(old, new)
