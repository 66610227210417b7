"""Tapes: recording, the file, reading what is damaged, comparing, and the Chrome trace."""

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from streams import Backend, CpuBackend, Event, Observer, Tape, TapeFile, TapeMismatch, TapeRecorder, VirtualBackend, chrome_trace
from streams.tape import BATCH_RECORDS, Awaited, Completed, Header, Record, Resumed, Submitted
from tests.streams.conformance import boom, nothing
from tests.streams.trace_reader import read_trace

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
        (b'{"record":"tape","version":1}\n{"record":"await","number":0,"at_ns":-1}\n', "line 2"),
        (b'{"record":"tape","version":1}\n{"record":"complete","number":0,"at_ns":5,"started_ns":-2}\n', "line 2"),
        (b'{"record":"tape","version":1}\n{"record":"submit","number":-1,"at_ns":0,"stream":"a","label":"x"}\n', "line 2"),
    ],
)
async def test_damaged_tapes_are_refused(tmp_path: Path, text: bytes, says: str) -> None:
    """A tape that is empty, foreign, newer, cut or altered is refused with the line that shows it."""
    path = tmp_path / "bad.tape"
    path.write_bytes(text)
    with pytest.raises(TapeMismatch, match=says):
        Tape.read(path)


async def test_diff_names_the_first_event_that_differs() -> None:
    """Equal runs differ nowhere, whatever their times, notes, waits and session names; otherwise the first record that differs is named."""
    tape = await _record(_virtual)
    later = tuple(
        type(one)(**{**_fields(one), "at_ns": one.at_ns + 5, **({"session": "renamed"} if getattr(one, "session", "") else {})})
        for one in tape.records
    )
    assert tape.diff(Tape(Header(notes={"other": "notes"}), later)) is None
    assert tape.diff(Tape(Header(), tuple(one for one in tape.records if not isinstance(one, Awaited | Resumed)))) is None
    edited = [*tape.records]
    place = next(place for place, one in enumerate(edited) if isinstance(one, Completed) and one.number == 1)
    edited[place] = Completed(1, 7, 7, "TransferFailed", "gone")
    difference = tape.diff(Tape(Header(), tuple(edited)))
    assert difference is not None
    assert (difference.place, difference.left, difference.right) == (place, tape.records[place], edited[place])
    assert "copy on copyback" in str(difference)
    last = max(place for place, one in enumerate(tape.records) if isinstance(one, Completed))
    shorter = tape.diff(Tape(Header(), tape.records[:last]))
    assert shorter is not None
    assert (shorter.place, shorter.right) == (last, None)
    longer = Tape(Header(), tape.records[:last]).diff(tape)
    assert longer is not None
    assert (longer.place, longer.left, longer.right) == (last, None, tape.records[last])
    assert "the end of the tape" in str(shorter)


def _fields(record: Record) -> dict[str, Any]:
    return {field: getattr(record, field) for field in record.__struct_fields__}


async def test_seeds_differ_on_tape_and_repeat() -> None:
    """One seed records one tape, times included."""
    assert (await _record(_virtual)).encode() == (await _record(_virtual)).encode()


async def test_chrome_trace_has_a_row_for_each_stream_and_session() -> None:
    """Streams, sessions and the host's waits are named rows; work lies on its stream's and its session's; what never ran is a mark."""
    drawn = read_trace(chrome_trace(await _record(_virtual)))
    assert drawn.rows == [("streams", "compute"), ("streams", "copyback"), ("sessions", "s1"), ("host", "waits")]
    assert [(one.name, one.args["number"]) for one in drawn.row("compute")] == [("step", 0), ("failing", 2), ("never", 3)]
    assert [(one.name, one.args["payload_bytes"]) for one in drawn.row("copyback")] == [("copy", 16)]
    assert [(one.name, one.args["stream"]) for one in drawn.row("s1")] == [("step", "compute"), ("copy", "copyback")]
    assert drawn.row("compute")[1].args["error"] == "Boom: boom"
    assert drawn.row("compute")[2].length_ns == 0
    assert [(one.name, other.name) for one, other in drawn.arrows] == [("step", "copy")]
    assert [one.name for one in drawn.row("waits")] == ["waits for copy", "waits for never"]


def _tape(*operations: tuple[str, str, int, int], after: dict[int, tuple[int, ...]] | None = None) -> Tape:
    """Operations by stream, session, start and end."""
    begun = [
        Submitted(number, 0, stream, f"work {number}", session, (after or {}).get(number, ()))
        for number, (stream, session, _, _) in enumerate(operations)
    ]
    ended = [Completed(number, end, start) for number, (_, _, start, end) in enumerate(operations)]
    return Tape(Header(), (*begun, *sorted(ended, key=lambda one: one.at_ns)))


async def test_overlapping_work_of_a_session_keeps_its_row() -> None:
    """Work of one session on four streams at once is one row where nothing overlaps and nothing is lost; each stream's row has it whole."""
    operations = (
        ("a", "s", 0, 100),
        ("b", "s", 50, 150),
        ("c", "s", 60, 70),
        ("d", "s", 65, 160),
        ("a", "s", 100, 100),
        ("b", "s", 160, 170),
    )
    drawn = read_trace(chrome_trace(_tape(*operations)))
    shown = {one.args["number"]: (one.starts_ns, one.ends_ns, one.depth) for one in drawn.row("s")}
    assert shown == {0: (0, 100, 0), 2: (60, 70, 1), 3: (100, 160, 0), 1: (100, 150, 1), 4: (100, 100, 0), 5: (160, 170, 0)}
    for one in drawn.row("s"):
        start, end = operations[one.args["number"]][2:]
        assert (one.args["from_us"], one.args["to_us"]) == (start / 1000, end / 1000)
    for stream in "abcd":
        whole = [(start, end) for name, _, start, end in operations if name == stream]
        assert [(one.starts_ns, one.ends_ns) for one in drawn.row(stream)] == whole


@pytest.mark.parametrize("seed", range(20))
async def test_any_tape_is_drawn_whole(seed: int) -> None:
    """Random work, of no length too, on streams and a channel, of some sessions: every operation is on both its rows, arrows bind."""
    draw = random.Random(seed)
    names = ("stage0.compute", "stage0.copyback", "stage0.channel")
    clock = dict.fromkeys(names, 0)
    operations, after = [], {}
    for number in range(60):
        stream, session = draw.choice(names), draw.choice(("", "one", "two", "stage0.compute"))
        starts = clock[stream] + draw.choice((0, 0, 1, 999, 1_000_001))
        clock[stream] = starts + draw.choice((0, 1, 7, 350, 1_234_567))
        operations.append((stream, session, starts, clock[stream]))
        earlier = [one for one in range(number) if operations[one][3] <= starts]
        after[number] = tuple(draw.sample(earlier, min(len(earlier), draw.randrange(4))))
    drawn = read_trace(chrome_trace(_tape(*operations, after=after)))
    for process, place in (("streams", 0), ("sessions", 1)):
        shown = sorted((one.row, one.args["number"]) for one in drawn.slices if one.process == process)
        assert shown == sorted((one[place], number) for number, one in enumerate(operations) if one[place])
    arrows = {(one.args["number"], other.args["number"]) for one, other in drawn.arrows}
    assert arrows == {(before, number) for number, those in after.items() for before in those}
    assert len(arrows) == len(drawn.arrows)


async def test_waits_at_once_lie_on_rows_of_their_own() -> None:
    """Two tasks that wait at the same time have a row each; a third that waits later uses the first again."""
    records = (
        Submitted(0, 0, "a", "x"), Submitted(1, 0, "a", "y"), Awaited(0, 1), Awaited(1, 2), Completed(0, 5, 0), Resumed(0, 6),
        Awaited(1, 7), Completed(1, 9, 5), Resumed(1, 10), Resumed(1, 11),
    )  # fmt: skip
    drawn = read_trace(chrome_trace(Tape(Header(), records)))
    assert drawn.rows == [("streams", "a"), ("host", "waits"), ("host", "waits")]
    assert [(one.name, one.starts_ns, one.ends_ns) for one in drawn.row("waits")] == [
        ("waits for x", 1, 6), ("waits for y", 2, 10), ("waits for y", 7, 11),
    ]  # fmt: skip


async def test_unfinished_work_is_marked() -> None:
    """An operation still in flight when the tape ends is a mark on its stream's row."""
    drawn = read_trace(chrome_trace(Tape(Header(), (Submitted(0, 10, "a", "hangs"),))))
    assert [(one.row, one.name, one.starts_ns, one.length_ns) for one in drawn.slices] == [("a", "unfinished hangs", 10, 0)]


async def test_waits_are_recorded_until_they_end() -> None:
    """Waiting for an outcome, whatever it is, is on the tape, and so is a wait that is cancelled; one for what is done already is not."""
    records: list[Record] = []
    recorder = TapeRecorder(records.extend)
    backend = VirtualBackend(1, observer=recorder)
    event = backend.stream("a").submit(boom, label="failing")
    backend.hold(event)
    waits = [asyncio.ensure_future(event.wait_done()) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.wait(waits[:1])
    backend.release(event)
    await waits[1]
    await event.wait_done()
    with pytest.raises(Exception, match="boom"):
        await event
    await backend.close()
    recorder.flush()
    assert [type(one) for one in records] == [Submitted, Awaited, Awaited, Resumed, Completed, Resumed]


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
