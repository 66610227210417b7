"""`forebay tape record | replay | export | diff` over the real engine on a tiny model: equal tokens, edited tapes, bad lines."""

import asyncio
import json
import pkgutil
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import server
from engine.errors import SessionBroken
from engine.recording import RecordedRun, record
from streams import Tape
from streams.tape import Submitted
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import small
from tests.streams.trace_reader import read_trace

Lines = list[dict[str, Any]]
PROMPT, TOKENS = 70, 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "shared")


@pytest.fixture(scope="module")
def tape(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run: an append of two chunks, a copyback, some steps."""
    path = tmp_path_factory.mktemp("tape") / "run.jsonl"
    words = ["--prompt-tokens", str(PROMPT), "--max-tokens", str(TOKENS), "--append-chunk-rows", "64", "--host-memory", "64MiB"]
    assert forebay("record", str(checkpoint), *words, "--out", str(path)) == 0
    return path


def forebay(*words: str) -> int:
    return server.main(["tape", *words])


def lines_of(tape: Path) -> Lines:
    return [json.loads(line) for line in tape.read_text().splitlines()]


def write(path: Path, lines: Lines) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def place_of(lines: Lines, record: str, label: str, nth: int = 0) -> int:
    """Where the `nth` submission, or completion, of an operation of this label stands."""
    numbers = [line["number"] for line in lines if line["record"] == "submit" and line["label"] == label]
    return next(place for place, line in enumerate(lines) if line["record"] == record and line["number"] == numbers[nth])


def test_a_recorded_run_replays_to_the_same_tokens(
    checkpoint: Path, tape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replay of a tape ends with 0, and the tape it makes itself holds the same events."""
    again = tmp_path / "again.jsonl"
    assert forebay("replay", str(tape), "--out", str(again)) == 0
    assert f"{TOKENS} tokens, equal" in capsys.readouterr().out
    assert forebay("diff", str(tape), str(again)) == 0
    header = lines_of(tape)[0]["notes"]
    assert (len(json.loads(header["prompt"])), len(json.loads(header["tokens"]))) == (PROMPT, TOKENS)
    assert list(tape.parent.iterdir()) == [tape]  # nothing is left beside it


def test_a_text_is_recorded_by_its_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt file goes onto the tape as token ids of the model's tokenizer; tokens and operations are printed."""
    prompt, path = tmp_path / "prompt.txt", tmp_path / "demo.jsonl"
    prompt.write_text("import os\n")
    assert forebay("record", "--demo", "--prompt-file", str(prompt), "--max-tokens", "2", "--out", str(path)) == 0
    notes, printed = lines_of(path)[0]["notes"], capsys.readouterr().out
    from engine.text.tokenizer import Tokenizer

    assert Tokenizer.load(Path(notes["model"])).decode(json.loads(notes["prompt"])) == "import os\n"
    operations = sum(line["record"] == "submit" for line in lines_of(path))
    assert f"tokens: {' '.join(map(str, json.loads(notes['tokens'])))}\n" in printed
    assert f"{operations:,} operations" in printed


def _relabelled(lines: Lines) -> str:
    lines[place_of(lines, "submit", "layer.1.attend")]["label"] = "layer.1.pretend"
    return "layer.1.pretend"


def _moved_up(lines: Lines) -> str:
    """A completion before that of the operation it comes after."""
    early = lines.pop(place_of(lines, "complete", "layer.2.attend", 1))
    lines.insert(place_of(lines, "complete", "layer.2.query", 1), early)
    return "layer.2.attend"


def _moved_behind_the_waiting(lines: Lines) -> str:
    """A completion behind the next step but one, which the host submits only when it has seen it: that step's begin never comes."""
    late = lines.pop(place_of(lines, "complete", "step.read", 0))
    lines.insert(place_of(lines, "submit", "step.finish", 3) + 1, late)
    return "step.begin"


def _submission_cut(lines: Lines) -> str:
    del lines[place_of(lines, "submit", "group.0.plan", 1)]
    return "group.0.plan"


def _completion_cut(lines: Lines) -> str:
    del lines[place_of(lines, "complete", "layer.0.query", 1)]
    return "layer.0.query"


def _end_cut(lines: Lines) -> str:
    del lines[place_of(lines, "submit", "step.finish", 2) :]
    return "step.finish"


def _failed(lines: Lines) -> str:
    lines[place_of(lines, "complete", "layer.1.query", 1)] |= {"error": "RuntimeError", "message": "made up"}
    return "layer.1.query"


def _repeated(lines: Lines) -> str:
    lines.append(lines[place_of(lines, "submit", "layer.1.query", 1)])
    return "layer.1.query"


EDITS: list[Callable[[Lines], str]] = [
    _relabelled, _moved_up, _moved_behind_the_waiting, _submission_cut, _completion_cut, _end_cut, _failed, _repeated,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__.strip("_"))
def test_an_edited_tape_fails_naming_the_event(
    tape: Path, tmp_path: Path, edit: Callable[[Lines], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The replay of a tape that somebody edited ends, with 1 and one line that names the operation; `diff` parts there too."""
    lines = lines_of(tape)
    label = edit(lines)
    edited = write(tmp_path / "edited.jsonl", lines)
    assert forebay("replay", edited) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert label in said[0]
    assert forebay("diff", str(tape), edited) == 1
    assert capsys.readouterr().out.startswith("record ")


def test_any_edited_line_ends_the_replay(tape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever lines are swapped or cut, the replay ends: with the same tokens where the order is another possible one, else with 1."""
    draw = random.Random(1)
    codes = []
    for _ in range(6):
        lines = lines_of(tape)
        if draw.random() < 0.5:
            del lines[draw.randrange(1, len(lines))]
        else:
            one, other = draw.sample(range(1, len(lines)), 2)
            lines[one], lines[other] = lines[other], lines[one]
        codes.append(forebay("replay", write(tmp_path / "edited.jsonl", lines)))
        said = capsys.readouterr().err.splitlines()
        assert len(said) == codes[-1]
        assert "operation" in "".join(said) or not said
    assert set(codes) <= {0, 1}
    assert 1 in codes


def test_other_tokens_are_named(tape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tape whose header has another token fails with that token's place."""
    lines = lines_of(tape)
    tokens = json.loads(lines[0]["notes"]["tokens"])
    was = tokens[3]
    tokens[3] = was ^ 1
    lines[0]["notes"]["tokens"] = json.dumps(tokens)
    assert forebay("replay", write(tmp_path / "other.jsonl", lines)) == 1
    assert f"token 3 is {was} in the replay and {was ^ 1} on the tape" in capsys.readouterr().err


def test_a_run_that_never_began_leaves_no_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that cannot be loaded, or a prompt that leaves no room, is one line, and there is no tape."""
    out = ("--out", str(tmp_path / "none.jsonl"))
    assert forebay("record", str(tmp_path), "--prompt-tokens", "3", *out) == 3
    assert forebay("record", str(checkpoint), "--prompt-tokens", "4096", *out) == 2
    assert "leave room for 0" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_keeps_its_tape(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recorded run that ends early has its events on a tape without tokens, which reads but does not replay."""
    path = tmp_path / "failed.jsonl"

    def fail(tokens: int, _: int) -> None:
        if tokens == 2:
            raise SessionBroken("made up")

    with pytest.raises(SessionBroken, match="made up"):
        asyncio.run(record(RecordedRun(checkpoint, small(), (1, 2, 3), 5), path, fail))
    assert list(tmp_path.iterdir()) == [path]
    tape = Tape.read(path)
    assert RecordedRun.of_notes(tape.header.notes).tokens is None
    assert sum(isinstance(one, Submitted) for one in tape.records) > 20
    assert forebay("replay", str(path)) == 2
    assert "has no tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["record", "--demo", "--out", "{dir}/t"], "give either --prompt-file or --prompt-tokens"),
        (["record", "--demo", "--prompt-tokens", "3", "--prompt-file", "x", "--out", "{dir}/t"], "give either"),
        (["record", "--demo", "--prompt-tokens", "none", "--out", "{dir}/t"], "--prompt-tokens must be an integer"),
        (["record", "--demo", "--prompt-tokens", "0", "--out", "{dir}/t"], "--prompt-tokens must be at least 1"),
        (["record", "--demo", "--prompt-tokens", "3", "--max-tokens", "0", "--out", "{dir}/t"], "--max-tokens must be at least 1"),
        (["record", "--demo", "--prompt-file", "{dir}/none", "--out", "{dir}/t"], "--prompt-file: cannot read"),
        (["record", "--demo", "--prompt-tokens", "3", "--out", "{dir}/none/t"], "none is not a directory"),
        (["record", "--demo", "--prompt-tokens", "3", "--out", "{dir}"], "is a directory"),
        (["record", "--prompt-tokens", "3", "--out", "{dir}/t"], "no model"),
        (["replay", "{dir}/none"], "cannot read"),
        (["replay", "{dir}/text"], "line 1: not a record"),
        (["replay", "{dir}/bare"], "has no model and no settings and no prompt and no max_tokens"),
        (["replay", "{dir}/unended"], "has no tokens to compare with"),
        (["replay", "{dir}/unreadable"], "the tape's header cannot be read"),
        (["replay", "{dir}/foreign"], "a setting 'hot_rose', which is not known here; did you mean hot_rows?"),
        (["replay", "{dir}/early"], "line 2: not a record"),
        (["export", "{dir}/early", "--out", "{dir}/t"], "line 2: not a record"),
        (["export", "{dir}/backwards", "--out", "{dir}/t"], "line 3 ends operation 0 at 5 ns, before its start"),
        (["export", "{dir}/twice", "--out", "{dir}/t"], "line 4 completes operation 0 again"),
        (["export", "{dir}/cut", "--out", "{dir}/t"], "line 2"),
        (["export", "{dir}/bare", "--out", "{dir}/t", "--format", "gif"], "--format must be one of chrome, svg"),
        (["export", "{dir}/bare", "--out", "{dir}/t", "--format", "svg"], "nothing lies between"),
        (["export", "{dir}/bare", "--out", "{dir}/t", "--format", "svg", "--to-ms", "x"], "--to-ms must be a number of milliseconds"),
        (["export", "{dir}/bare", "--out", "{dir}/t", "--from-ms", "1"], "are for --format svg"),
        (["diff", "{dir}/bare", "{dir}/none"], "cannot read"),
        (["diff", "{dir}/bare"], "required: B"),
    ],
)
def test_a_bad_line_is_one_line(words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is wrong with what was asked or given: exit code 2 and one line that says so; no file is made."""
    header = {"record": "tape", "version": 1, "notes": {}}
    notes = {"model": "m", "settings": "{}", "prompt": "[1]", "max_tokens": "1"}
    write(tmp_path / "bare", [header])
    write(tmp_path / "unended", [{**header, "notes": notes}])
    write(tmp_path / "unreadable", [{**header, "notes": {**notes, "prompt": "[1"}}])
    write(tmp_path / "foreign", [{**header, "notes": {**notes, "tokens": "[1]", "settings": '{"hot_rose": 8}'}}])
    work = {"record": "submit", "number": 0, "at_ns": 0, "stream": "a", "label": "x"}
    ended = {"record": "complete", "number": 0, "at_ns": 5, "started_ns": 2}
    write(tmp_path / "early", [{**header, "notes": {**notes, "tokens": "[1]"}}, {**work, "at_ns": -1}])
    write(tmp_path / "backwards", [header, work, {**ended, "started_ns": 6}])
    write(tmp_path / "twice", [header, work, ended, ended])
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "cut").write_text(json.dumps(header) + '\n{"record":"complete","num')
    before = set(tmp_path.iterdir())
    assert forebay(*(word.replace("{dir}", str(tmp_path)) for word in words)) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(said) == 1
    assert says in said[0]
    assert set(tmp_path.iterdir()) == before


def test_two_records_of_one_run_part_at_an_event(tape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`diff` names the operation at the first record that differs, and nothing later."""
    lines = lines_of(tape)
    lines[place_of(lines, "submit", "layer.1.attend", 1)]["payload_bytes"] = 7
    lines[place_of(lines, "submit", "layer.2.attend", 1)]["payload_bytes"] = 7
    assert forebay("diff", str(tape), write(tmp_path / "edited.jsonl", lines)) == 1
    printed = capsys.readouterr().out
    assert "layer.1.attend on stage0.compute" in printed
    assert "layer.2.attend" not in printed


def test_the_chrome_trace_is_drawn_whole(tape: Path, tmp_path: Path) -> None:
    """As Perfetto reads it: a row for each stream, session and wait, all work on both its rows, all that it came after as arrows."""
    path = tmp_path / "trace.json"
    assert forebay("export", str(tape), "--out", str(path)) == 0
    submitted = [line for line in lines_of(tape) if line["record"] == "submit"]
    drawn = read_trace(path.read_bytes())
    streams = dict.fromkeys(("streams", line["stream"]) for line in submitted)
    sessions = dict.fromkeys(("sessions", line["session"]) for line in submitted if line.get("session"))
    assert any("copyback" in name for _, name in streams)
    assert len(sessions) == 1
    assert drawn.rows == [*streams, *sessions, ("host", "waits")]
    for process, field in (("streams", "stream"), ("sessions", "session")):
        shown = sorted((one.row, one.args["number"]) for one in drawn.slices if one.process == process)
        assert shown == sorted((line[field], line["number"]) for line in submitted if line.get(field))
    arrows = sorted((one.args["number"], other.args["number"]) for one, other in drawn.arrows)
    assert arrows == sorted((before, line["number"]) for line in submitted for before in set(line.get("after", ())))
    waits = [line for line in lines_of(tape) if line["record"] == "await"]
    assert len(waits) >= TOKENS - 1, "the host waits for each step"
    assert len(drawn.row("waits")) == len(waits)


def test_the_picture_shows_the_asked_part(tape: Path, tmp_path: Path) -> None:
    """The picture of half a tape is XML with a row for each stream and fewer operations and waits than that of the whole."""
    import xml.etree.ElementTree as tree

    length_ms = max(line.get("at_ns", 0) for line in lines_of(tape)) / 1e6
    found = []
    for name, part in (("whole", []), ("half", ["--to-ms", str(length_ms / 2)])):
        path = tmp_path / f"{name}.svg"
        assert forebay("export", str(tape), "--out", str(path), "--format", "svg", *part) == 0
        drawn = tree.fromstring(path.read_bytes())
        texts = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
        assert texts >= {line["stream"] for line in lines_of(tape) if line["record"] == "submit"}
        found.append(len(list(drawn.iter("{http://www.w3.org/2000/svg}title"))))
    assert 0 < found[1] < found[0] == sum(line["record"] in ("submit", "await") for line in lines_of(tape))


def test_a_tape_of_a_model_that_is_not_here(tape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A replay that cannot even load its model says so, and does not blame the tape."""
    moved = tmp_path / "moved.jsonl"
    lines = tape.read_text().splitlines(keepends=True)
    header = json.loads(lines[0])
    header["notes"]["model"] = str(tmp_path / "gone")
    moved.write_text(json.dumps(header) + "\n" + "".join(lines[1:]))
    assert forebay("replay", str(moved)) == 3
    assert "gone" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["engine.loop.decide", "engine.batches.Batches.submit", "kernels.round.begin_round"])
def test_a_replay_is_sealed(tape: Path, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that asks for real time, in its loop or in a stream's work, ends the replay with one line that says who asked."""
    owner, _, name = place.rpartition(".")
    target = pkgutil.resolve_name(owner)
    real = getattr(target, name)

    def hasty(*arguments: Any, **named: Any) -> Any:
        time.monotonic()
        return real(*arguments, **named)

    for module in [module for module in list(sys.modules.values()) if getattr(module, name, None) is real] or [target]:
        monkeypatch.setattr(module, name, hasty)
    assert forebay("replay", str(tape)) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f"{__name__} called time.monotonic inside a virtual run" in said[0]


def test_an_altered_tape_is_not_drawn(tape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tape that speaks of an operation it never submitted is one line naming it, in both formats; a tape is never its own output."""
    cut = tmp_path / "cut.jsonl"
    lines = tape.read_text().splitlines(keepends=True)
    gone = next(place for place, line in enumerate(lines) if '"submit"' in line and '"number":5,' in line)
    cut.write_text("".join(lines[:gone] + lines[gone + 1 :]))
    for form in ("chrome", "svg"):
        assert forebay("export", str(cut), "--format", form, "--out", str(tmp_path / "x")) == 2
        assert "operation 5" in capsys.readouterr().err
    for words in (("export", str(tape), "--out", str(tape)), ("replay", str(tape), "--out", str(tape))):
        assert forebay(*words) == 2
        assert "the tape itself" in capsys.readouterr().err
