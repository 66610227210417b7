"""Tapes: recording, the file, reading what is damaged, comparing, and the Chrome trace."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from streams import Backend, CpuBackend, Event, Observer, Tape, TapeFile, TapeMismatch, TapeRecorder, VirtualBackend, chrome_trace
from streams.tape import BATCH_RECORDS, Awaited, Completed, Header, Record, Resumed, Submitted
from tests.streams.conformance import boom, nothing

pytestmark = pytest.mark.both_loops


async def _scenario(backend: Backend) -> None:
    """Two streams, a session, a failure, a dependent that never runs, a wait, bytes."""
    source, target = torch.ones(4), torch.zeros(4)
    compute, copyback = backend.stream("compute"), backend.stream("copyback")
    step = compute.submit(lambda: source.add_(1), label="step", session="s1", writes=(source,))
    copy = copyback.submit(
        lambda: target.copy_(source), label="copy", session="s1", after=(step,), reads=(source,), writes=(target,), payload_bytes=16
    )  # fmt: skip
    failing = compute.submit(boom, label="failing")
    compute.wait(copy)
    never = compute.submit(nothing, label="never", after=(failing,))
    await copy
    await never.wait_done()
    await backend.close()


async def _record(make: Any) -> Tape:
    records: list[Record] = []
    recorder = TapeRecorder(records.extend)
    await _scenario(make(recorder))
    recorder.flush()
    return Tape(Header(), tuple(records))


def _virtual(observer: Observer) -> Backend:
    return VirtualBackend(3, observer=observer)


async def test_records_say_what_happened() -> None:
    """Each operation has its submission with what it comes after and its completion with its failure; waits are there too."""
    for make in (_virtual, CpuBackend):
        tape = await _record(make)
        submitted = {record.label: record for record in tape.records if isinstance(record, Submitted)}
        completed = {record.number: record for record in tape.records if isinstance(record, Completed)}
        assert [(one.number, one.stream, one.session, one.after, one.waits, one.payload_bytes) for one in submitted.values()] == [
            (0, "compute", "s1", (), (), 0),
            (1, "copyback", "s1", (0,), (), 16),
            (2, "compute", "", (), (), 0),
            (3, "compute", "", (2,), (1,), 0),
        ]
        assert [completed[number].error for number in range(4)] == ["", "", "Boom", "DependencyFailed"]
        assert completed[2].message == "boom"
        assert [completed[number].started_ns >= 0 for number in range(4)] == [True, True, True, False]
        assert completed[1].started_ns >= completed[0].at_ns
        places = {type(record): place for place, record in enumerate(tape.records) if isinstance(record, Awaited | Resumed)}
        assert 1 < places[Awaited] < places[Resumed]


async def test_events_of_elsewhere_have_no_number() -> None:
    """Work ordered after another backend's event, or one that no backend made, says so instead of naming a stranger's number."""
    records: list[Record] = []
    recorder = TapeRecorder(records.extend)
    other, backend = VirtualBackend(0), VirtualBackend(0, observer=recorder)
    foreign = other.stream("x").submit(nothing, label="foreign")
    mine = backend.stream("a").submit(nothing, label="mine")
    backend.stream("a").wait(foreign)
    await backend.stream("a").submit(nothing, label="after", after=(mine, foreign, Event.completed(None)))
    await other.close()
    await backend.close()
    recorder.flush()
    last = [record for record in records if isinstance(record, Submitted)][-1]
    assert (last.after, last.waits) == ((0, -1, -1), (-1,))


async def test_file_holds_the_tape(tmp_path: Path) -> None:
    """What a tape file is given reads back equal, header first, one JSON object a line."""
    tape = await _record(_virtual)
    path = tmp_path / "run.tape"
    file = TapeFile(path, {"model": "demo"})
    file.append(list(tape.records))
    file.close()
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == {"record": "tape", "version": 1, "notes": {"model": "demo"}}
    assert json.loads(lines[1]) == {
        "record": "submit", "number": 0, "at_ns": 0, "stream": "compute", "label": "step", "session": "s1"
    }  # fmt: skip
    back = Tape.read(path)
    assert back.records == tape.records
    assert back.encode() == path.read_bytes()


async def test_long_recording_has_flat_memory(tmp_path: Path) -> None:
    """However long the run, the recorder holds less than a batch, and the file gets everything in order."""
    path = tmp_path / "long.tape"
    file = TapeFile(path)
    most = 0

    def sink(batch: list[Record]) -> None:
        nonlocal most
        most = max(most, len(batch))
        file.append(batch)

    recorder = TapeRecorder(sink)
    backend = VirtualBackend(1, observer=recorder)
    for _ in range(20):
        for _ in range(100):
            backend.stream("a").submit(nothing, label="step")
        await backend.stream("a").idle()
    await backend.close()
    recorder.flush()
    file.close()
    assert most == BATCH_RECORDS
    numbers = [record.number for record in Tape.read(path).records if isinstance(record, Submitted)]
    assert numbers == list(range(2000))


async def test_slow_disk_cuts_the_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the writer falls behind, recording stops with one log line; the run is not held up and the tape is valid up to there."""
    monkeypatch.setattr("streams.tape._BATCHES_MAX", 2)
    path = tmp_path / "cut.tape"
    file = TapeFile(path)
    free = threading.Event()
    real = file._file

    class Slow:
        def write(self, line: bytes) -> int:
            assert free.wait(60)
            return real.write(line)

        def close(self) -> None:
            real.close()

    monkeypatch.setattr(file, "_file", Slow())
    with capture_logs() as logs:
        for number in range(10):
            file.append([Awaited(number, 0)])
    free.set()
    file.close()
    assert [line["event"] for line in logs] == ["tape.cut"]
    kept = [record.number for record in Tape.read(path).records]
    assert kept == list(range(len(kept)))
    assert 2 <= len(kept) <= 3


async def test_failing_disk_shows_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses raises OSError when the file is closed, not in the middle of the run."""
    file = TapeFile(tmp_path / "full.tape")
    real = file._file

    class Refusing:
        def write(self, line: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            real.close()

    monkeypatch.setattr(file, "_file", Refusing())
    file.append([Awaited(0, 0)])
    with pytest.raises(OSError, match="No space"):
        file.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "empty"),
        (b"hello\n", "line 1"),
        (b'{"record":"tape","version":2}\n', "version 2"),
        (b'{"record":"submit","number":0,"at_ns":0,"stream":"a","label":"x"}\n', "line 1"),
        (b'{"record":"tape","version":1}\n{"record":"complete","number":0,"at_ns":', "line 2"),
        (b'{"record":"tape","version":1}\n{"record":"vanish","number":0,"at_ns":0}\n', "line 2"),
        (b'{"record":"tape","version":1}\n{"record":"await","number":"0","at_ns":0}\n', "line 2"),
        (b'{"record":"tape","version":1}\n{"record":"await","number":0,"at_ns":0,"extra":1}\n', "line 2"),
    ],
)
async def test_damaged_tapes_are_refused(tmp_path: Path, text: bytes, says: str) -> None:
    """A tape that is empty, foreign, newer, cut or altered is refused with the line that shows it."""
    path = tmp_path / "bad.tape"
    path.write_bytes(text)
    with pytest.raises(TapeMismatch, match=says):
        Tape.read(path)


async def test_diff_names_the_first_event_that_differs() -> None:
    """Equal runs differ nowhere, whatever their times, notes and session names; otherwise the first record that differs is named."""
    tape = await _record(_virtual)
    later = tuple(
        type(one)(**{**_fields(one), "at_ns": one.at_ns + 5, **({"session": "renamed"} if getattr(one, "session", "") else {})})
        for one in tape.records
    )
    assert tape.diff(Tape(Header(notes={"other": "notes"}), later)) is None
    edited = [*tape.records]
    place = next(place for place, one in enumerate(edited) if isinstance(one, Completed) and one.number == 1)
    edited[place] = Completed(1, 7, 7, "TransferFailed", "gone")
    difference = tape.diff(Tape(Header(), tuple(edited)))
    assert difference is not None
    assert (difference.place, difference.left, difference.right) == (place, tape.records[place], edited[place])
    assert "copy on copyback" in str(difference)
    shorter = tape.diff(Tape(Header(), tape.records[:-1]))
    assert shorter is not None
    assert (shorter.place, shorter.right) == (len(tape.records) - 1, None)
    assert "the end of the tape" in str(shorter)


def _fields(record: Record) -> dict[str, Any]:
    return {field: getattr(record, field) for field in record.__struct_fields__}


async def test_seeds_differ_on_tape_and_repeat() -> None:
    """One seed records one tape, times included."""
    assert (await _record(_virtual)).encode() == (await _record(_virtual)).encode()


async def test_chrome_trace_has_a_row_for_each_stream_and_session() -> None:
    """Streams and sessions are named rows, work lies on its stream's row with its duration, arrows go forward, unrun work is a mark."""
    tape = await _record(CpuBackend)
    events = json.loads(chrome_trace(tape))["traceEvents"]
    rows = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert list(rows.values()) == ["compute", "copyback", "s1", "waits"]
    work = {one["name"]: one for one in events if one["ph"] == "X"}
    assert {name: rows[(one["pid"], one["tid"])] for name, one in work.items()} == {
        "step": "compute", "copy": "copyback", "failing": "compute",
    }  # fmt: skip
    assert all(one["dur"] >= 0 for one in work.values())
    assert work["copy"]["args"]["payload_bytes"] == 16
    assert work["failing"]["args"]["error"] == "Boom: boom"
    assert [one["name"] for one in events if one["ph"] == "i"] == ["never"]
    spans = [one for one in events if one["ph"] in "be" and rows[(one["pid"], one["tid"])] == "s1"]
    assert [(one["name"], one["ph"]) for one in spans] == [("step", "b"), ("step", "e"), ("copy", "b"), ("copy", "e")]
    starts = {one["id"]: one["ts"] for one in events if one["ph"] == "s"}
    ends = {one["id"]: one["ts"] for one in events if one["ph"] == "f"}
    assert starts.keys() == ends.keys() == {"1.0"}
    assert starts["1.0"] <= ends["1.0"]
    assert [one["name"] for one in events if one.get("cat") == "wait"] == ["copy", "copy"]


async def test_unfinished_work_is_marked() -> None:
    """An operation still in flight when the tape ends is a mark on its stream's row."""
    tape = Tape(Header(), (Submitted(0, 10, "a", "hangs"),))
    events = json.loads(chrome_trace(tape))["traceEvents"]
    assert [one["name"] for one in events if one["ph"] == "i"] == ["unfinished hangs"]


async def test_recording_changes_nothing() -> None:
    """A seed gives the same effects with a recorder and without."""
    effects = []
    for recorder in (None, TapeRecorder(lambda _: None)):
        backend = VirtualBackend(9, observer=recorder)
        order: list[str] = []
        for name in "abcabc":
            backend.stream(name).submit(lambda name=name, order=order: order.append(name), label=name)
        await asyncio.sleep(0)
        await backend.close()
        effects.append(order)
    assert effects[0] == effects[1]
