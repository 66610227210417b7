"""`forebay bench step`, `bench host` and one step of a tape as a picture."""

import re
import xml.etree.ElementTree as tree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from engine.bench.host import HostTimes, as_json, percentile, table
from engine.bench.steps import tape_of_marks
from engine.commands.line import run_line
from engine.config import EngineConfig
from engine.errors import ForebayError
from server import serve
from streams import Tape, picture
from streams.capture import Mark
from streams.tape import Completed, Header, Submitted
from tests.engine.bench.arms import FLAGS, line
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with an MTP block."""
    config = tiny_config()
    return write_checkpoint(random_tensors(config, 5), config, tmp_path_factory.mktemp("tiny"))


def export(*words: str) -> int:
    return run_line(("tape", "export", *words), {}, serve)


def test_the_last_steps_are_on_the_tape_and_one_is_drawn(model: Path, tmp_path: Path, capsys: Any) -> None:
    """The tape has whole steps after the warm-up and nothing of the append; --step draws one, from its begin to the next one's."""
    tape, drawing = tmp_path / "steps.tape", tmp_path / "step.svg"
    words = ("--warmup-tokens", "4", "--prompt-tokens", "70", "--history", "synthetic:1:100", "--out", str(tape))
    assert line("step", str(model), *FLAGS, *words) == 0
    read = Tape.read(tape)
    read.check_numbers()
    labels = [record.label for record in read.records if isinstance(record, Submitted)]
    begins = labels.count("step.begin")
    assert begins >= 4
    assert not [label for label in labels if label.startswith(("append", "history"))]
    assert export(str(tape), "--format", "svg", "--step", "2", "--out", str(drawing)) == 0
    titles = [title.text or "" for title in tree.fromstring(drawing.read_bytes()).iter("{http://www.w3.org/2000/svg}title")]
    assert sum(title.startswith("step.begin") for title in titles) in (1, 2)  # the next one's begin lies on the edge
    assert sum(title.startswith("step.finish") for title in titles) <= 2
    for wrong, says in (("0", "from 1 to"), ("99", "from 1 to"), ("x", "--step must be an integer")):
        with pytest.raises(ForebayError, match=says):
            export(str(tape), "--format", "svg", "--step", wrong, "--out", str(drawing))
    for extra in (("--from-ms", "1"), ("--to-ms", "1")):
        with pytest.raises(ForebayError, match="exclude each other"):
            export(str(tape), "--format", "svg", "--step", "1", *extra, "--out", str(drawing))
    with pytest.raises(ForebayError, match="are for --format svg"):
        export(str(tape), "--step", "1", "--out", str(drawing))


@dataclass
class _Time:
    """Stands for a device's event: milliseconds on its clock."""

    at_ms: float

    def elapsed_time(self, later: "_Time") -> float:
        return later.at_ms - self.at_ms


def test_marks_become_a_tape_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times count from the first work's begin, completions stand in the order of their ends, and what came after what is kept."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = [("step.begin", "c", (), 5.0, 5.5), ("group.0.plan", "s", (0,), 5.5, 5.7), ("layer.0.attend", "c", (0, 1), 5.6, 5.65)]
    marks: Any = [Mark(label, stream, after, _Time(begin), _Time(end)) for label, stream, after, begin, end in times]  # type: ignore[arg-type]
    tape = tape_of_marks(marks, {"model": "m"})
    tape.check_numbers()
    submitted = [record for record in tape.records if isinstance(record, Submitted)]
    completed = [record for record in tape.records if isinstance(record, Completed)]
    assert [(record.label, record.after) for record in submitted] == [(label, after) for label, _, after, _, _ in times]
    assert [record.number for record in completed] == [0, 2, 1]
    assert [(record.started_ns, record.at_ns) for record in completed] == [(0, 500_000), (600_000, 650_000), (500_000, 700_000)]
    assert Tape.parse(tape.encode().splitlines(keepends=True), "again") == tape


def test_bars_are_named_where_there_is_room() -> None:
    """A wide bar has its label, a narrower one the part that tells it from its kind, a thin one nothing."""
    labels = {0: ("layer.7.attend", 0, 500_000), 1: ("layer.8.attend", 500_000, 530_000), 2: ("layer.9.attend", 530_000, 533_000)}
    submitted = [Submitted(number, 0, "c", label) for number, (label, _, _) in labels.items()]
    completed = [Completed(number, end, start) for number, (_, start, end) in labels.items()]
    drawn = picture(Tape(Header(), (*submitted, *completed)), 0, 1_000_000).decode()
    named = re.findall(r'font-size="10"[^>]*>([^<]+)<', drawn)
    assert named == ["layer.7.attend", "8"]


def test_the_host_needs_a_device() -> None:
    """Without a device there is one line that says so, with exit code 2; so has a bad count."""
    for words, says in ((("--device", "cpu"), "needs a device"), (("--turns", "0"), "--turns must be at least 1")):
        with pytest.raises(ForebayError, match=says) as caught:
            line("host", *words)
        assert caught.value.exit_code == 2


def test_host_times_are_summed_up() -> None:
    """Percentiles are values that were measured; the table and the JSON show them."""
    assert percentile((5.0, 1.0, 3.0, 2.0), 50) == 2.0
    assert percentile((5.0, 1.0, 3.0, 2.0), 90) == 5.0
    found = HostTimes(tuple(map(float, range(1, 101))), (7.0,) * 100, (3.0,) * 100, 0.5, {"nothing": (11.0, 13.0)}, 4.2e12, "a card")
    fields = as_json(EngineConfig(), found, {})
    assert (fields["wake_us"]["p50"], fields["wake_us"]["p90"], fields["record_us"]["mean"]) == (50.0, 90.0, 3.0)
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table(found))
    assert fields["launch_us"]["nothing"]["p50"] == 11.0
    for shown in ("4.20", "50.0", "7.0", "launching nothing", "12.0"):
        assert shown in captured.get()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("m",), "required: --out"),
        (("--out", "x"), "no model"),
        (("m", "--out", "/nowhere/at/all"), "--out: /nowhere/at is not a directory"),
        (("m", "--out", "x", "--warmup-tokens", "1"), "--warmup-tokens must be at least 2"),
        (("m", "--out", "x", "--history", "1"), "--history must be synthetic"),
    ],
)
def test_bad_lines(words: tuple[str, ...], says: str) -> None:
    """What is wrong with the command line is one line with exit code 2."""
    with pytest.raises(ForebayError, match=says) as caught:
        line("step", *words)
    assert caught.value.exit_code == 2
