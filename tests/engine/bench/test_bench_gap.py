"""`forebay bench sessions --part gap`: a stream's waits, rows before the prompt, memory for them, times and signals that end it."""

import dataclasses
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engine.append import AppendRun
from engine.bench import gap, many
from engine.bench.company import Lengths
from engine.bench.gap import Gap
from engine.bench.many import Work, prepared
from engine.bench.parts import as_json
from engine.commands import bench_sessions
from engine.config import EngineConfig
from engine.errors import BadSetting, ForebayError, NotAdmitted
from tests.engine.bench.arms import FLAGS, line, without_drafts
from tests.engine.bench.test_bench_sessions import found_of, plan
from tests.engine.runs import small

WORDS = ("--part", "gap", "--rows", "20", "--prompt-tokens", "8", "--usual-tokens", "8", "--warmup-tokens", "2", "--alone-tokens", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_drafts(tmp_path_factory.mktemp("tiny"))


def gap_plan(model: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "part": "gap",
        "sessions": (),
        "rows": (20,),
        "usual_tokens": 8,
        "engine": small(append_chunk_rows=16),
        **changes,
    }
    return plan(model, **given)


def work_of(**changes: Any) -> Work:
    return Work(gap_plan(Path("m"), **changes), small(), (Lengths(192, 8, 56, 3),), 10, (), 1, 2, 3)


async def test_a_stream_goes_on_while_a_prompt_is_read(model: Path) -> None:
    """Waits before and while the prompt is read; all of it was read, and the stream got tokens meanwhile."""
    work, found = await found_of(gap_plan(model, append_rows=40))
    assert (work.append_tokens, found.read, found.complete) == (40, 40, True)
    assert len(found.usual_s) >= 7
    assert len(found.during_s) >= 3  # a step beside each chunk at least
    assert found.fields()["longest_of_usual"] >= found.fields()["median_of_usual"] > 0
    assert len(found.during_rows) == len(found.during_s)
    assert list(found.during_rows) == sorted(found.during_rows)
    assert {16, 32} <= set(found.during_rows) <= {0, 16, 32, 40}


async def test_a_prompt_is_read_behind_made_up_rows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session has the rows before and memory for all of it; chunks like the prompt's, its last one too, are read behind the same rows
    first; what is told counts the prompt's own rows, and says how many there were before."""
    began: list[tuple[int, int]] = []
    room: list[int] = []
    init = AppendRun.__init__

    def watched(run: AppendRun, stage: Any, memory: Any, tokens: Any, *rest: Any) -> None:
        began.append((memory.counts.logical, len(tokens)))
        room.append(memory.holdings.tokens_max)
        init(run, stage, memory, tokens, *rest)

    monkeypatch.setattr(AppendRun, "__init__", watched)
    work, found = await found_of(gap_plan(model, append_after=128, append_rows=72))
    assert began[-2:] == [(128, 2 * 16 + 8), (128, 72)]
    assert [room[-4], *room[-2:]] == [128 + 72 + 3] * 3  # from the made-up rows on; the stream began between
    assert (found.read, found.complete) == (72, True)
    assert {16, 32, 48, 64} <= set(found.during_rows) <= {0, 16, 32, 48, 64, 72}
    written = as_json(work, found, {})
    assert (written["append_after"], written["append_rows"], written["append_tokens"]) == (128, 72, 72)
    assert found.said().startswith("72 rows read behind 128: the longest wait was ")
    console = Console(file=io.StringIO(), width=200)
    console.print(found.table(), work.table())
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "rows before" in printed
    assert "203" in printed  # tokens that the session may hold


async def test_nothing_is_drawn_while_the_stream_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts are there before the stream's first measured token: drawing a million ids would be taken for a wait of the engine's."""
    order: list[str] = []
    drawn, read = gap.seeded_prompt, gap._Stream.take
    monkeypatch.setattr(gap, "seeded_prompt", lambda *asked: order.append("drawn") or drawn(*asked))
    monkeypatch.setattr(gap._Stream, "take", lambda stream, tokens: order.append("token") or read(stream, tokens))
    await found_of(gap_plan(model, append_rows=40))
    assert order.count("drawn") == 3
    assert order[:3] == ["drawn"] * 3


async def test_rows_before_count_as_memory(model: Path) -> None:
    """Planned are the stream and the other session with its made-up rows: an arena of that size holds them, one of a block less is refused
    before anything is loaded, in a line that says what to do."""
    asked = gap_plan(model, append_after=128, append_rows=72)
    whole = prepared(dataclasses.replace(asked, append_after=0, append_rows=200))
    work = prepared(asked)
    assert work.host_bytes == whole.host_bytes > prepared(dataclasses.replace(asked, append_after=0)).host_bytes
    assert work.session[1] == whole.session[1]
    exact = dataclasses.replace(asked, engine=small(append_chunk_rows=16, host_memory_bytes=work.host_bytes))
    _, found = await found_of(exact)
    assert found.complete
    less = dataclasses.replace(exact, engine=small(append_chunk_rows=16, host_memory_bytes=work.host_bytes - 1))
    with pytest.raises(NotAdmitted, match=r"--host-memory gives .*; raise it, or ask for fewer --append, --append-after or --rows$"):
        prepared(less)


def test_ram_that_is_short_names_what_to_lower(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Where the machine has less RAM than the rows take the line names the flags of this part."""
    monkeypatch.setattr(many, "available_bytes", lambda: 1 << 30)
    asked = dataclasses.replace(gap_plan(model, append_rows=40), engine=small(append_chunk_rows=16, host_memory_bytes=0))
    with pytest.raises(NotAdmitted, match="fewer --append, --append-after or --rows"):
        prepared(asked)


def test_the_longest_waits_are_told_with_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits by length, each with the rows of the prompt that were in place when it was over."""
    monkeypatch.setattr("engine.bench.gap.absolute", lambda config: True)
    told = Gap(work_of(), True, (0.002,), (0.004, 0.02, 0.008), 10, 1.0, (0, 4, 10)).fields()
    assert told["longest_waits_ms"] == pytest.approx([20, 8, 4])
    assert told["longest_waits_rows"] == [4, 10, 0]


def test_a_gap_is_told_against_the_usual_one() -> None:
    """The longest wait while the prompt was read over the median before it."""
    found = Gap(work_of(), True, (0.002, 0.004, 0.9), (0.004, 0.004, 0.02), 10, 1.0)
    assert found.longest_of_usual == pytest.approx(5.0)
    assert found.median_of_usual == pytest.approx(1.0)
    assert "append_s" not in found.fields()


def test_no_token_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token of the stream there are no waits: fields, table and sentence say so and do not fail."""
    monkeypatch.setattr("engine.bench.gap.absolute", lambda config: True)
    found = Gap(work_of(append_after=7), False, (0.002,), (), 0, 0.1)
    assert (found.fields()["longest_of_usual"], found.fields()["stream_tokens"]) == (None, 0)
    Console(file=io.StringIO()).print(found.table())
    assert found.said() == "0 rows read behind 7: no token came meanwhile"


@pytest.mark.slow
async def test_a_prompt_that_takes_too_long_is_left(model: Path) -> None:
    """When the time is up the append is left, what was seen until then is told, and how far it came."""
    _, found = await found_of(gap_plan(model, rows=(100,), append_rows=3_900, limit_s=0.05, engine=small(append_chunk_rows=32)))
    assert not found.complete
    assert found.read < 3_900
    assert found.during_s
    assert found.took_s >= 0.05


def test_time_that_is_up_leaves_a_json(model: Path, tmp_path: Path, capsys: Any) -> None:
    """The command ends with exit code 1, a table, and a JSON that says how little was read."""
    target = tmp_path / "out.json"
    words = ("--append", "3000", "--append-after", "200", "--append-chunk-rows", "32", "--limit", "0.000001", "--json", str(target))
    assert line("sessions", str(model), *FLAGS, *WORDS, *words) == 1
    written = json.loads(target.read_text())
    assert (written["complete"], written["append_after"], written["append_tokens"]) == (False, 200, 3000)
    assert written["append_rows"] < 3000
    assert written["stream_tokens"] >= 1
    assert written["machine"]["date"]
    assert "; not all was run" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_leaves_what_was_seen(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, number: signal.Signals
) -> None:
    """In the middle of the append the command ends as when the time is up: a JSON of what was seen, a table, exit code 1."""
    target, take = tmp_path / "out.json", gap._Stream.take

    def stopped(stream: Any, tokens: int) -> None:
        take(stream, tokens)
        if stream.rows() == 32 != stream.rows_at[-2]:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(gap._Stream, "take", stopped)
    words = ("--append", "3000", "--append-chunk-rows", "32", "--json", str(target))
    assert line("sessions", str(model), *FLAGS, *WORDS, *words) == 1
    written = json.loads(target.read_text())
    assert not written["complete"]
    assert 32 <= written["append_rows"] < 3000
    assert written["stream_tokens"] >= 1
    assert written["machine"]["date"]
    assert "; not all was run" in capsys.readouterr().out


def test_a_signal_before_anything_is_measured_says_so(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While histories are written a signal ends the command in one line, with no JSON."""
    target, show = tmp_path / "out.json", bench_sessions.Bars.__call__

    def stopped(bars: Any, title: str, done: int, total: int) -> None:
        show(bars, title, done, total)
        if title == "made-up rows before the prompt" and done == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(bench_sessions.Bars, "__call__", stopped)
    with pytest.raises(ForebayError, match="stopped by a signal before anything was measured; no JSON was written") as caught:
        line("sessions", str(model), *FLAGS, *WORDS, "--append", "40", "--append-after", "200", "--json", str(target))
    assert caught.value.exit_code == 1
    assert not target.exists()


async def test_a_failure_in_the_middle_is_told_with_what_was_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append that fails is the error; what was seen until then is told as incomplete all the same."""
    told: list[Gap] = []
    submit = AppendRun._submit_end

    def broken(run: AppendRun, last: bool) -> Any:
        if run.done_rows == 32 and len(run._tokens) == 72:
            raise RuntimeError("no longer")
        return submit(run, last)

    monkeypatch.setattr(AppendRun, "_submit_end", broken)
    with pytest.raises(ForebayError, match="appending failed: no longer"):
        await found_of(gap_plan(model, append_rows=72, append_after=128), told.append)
    assert [(each.complete, each.read) for each in told] == [(False, 32)]
    assert told[0].during_s


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("m", "--part", "gap", "--append-after", "-1"), "--append-after must be at least 0, not -1"),
        (("m", "--part", "gap", "--append-after", "some"), "--append-after must be "),
        (("m", "--append-after", "5"), "--append-after is for --part gap"),
        (("--demo", "--part", "gap", "--append-after", "131008"), "--append-after may be 131007 at most"),
        (
            ("--demo", "--part", "gap", "--append-after", "131000", "--append", "9"),
            "--append-after 131000, --append 9 and 64 .*may be 8 at most",
        ),
    ],
)
def test_bad_lines(words: tuple[str, ...], says: str) -> None:
    """What is wrong with the rows before is one line with exit code 2, before anything is loaded."""
    with pytest.raises(BadSetting, match=says) as caught:
        line("sessions", *words)
    assert "\n" not in str(caught.value)


def test_all_that_the_context_leaves_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --append the prompt goes to the end of the context, behind the rows before."""
    monkeypatch.setattr(many, "available_bytes", lambda: 1 << 40)
    work = prepared(gap_plan(Path("glm-5.3-slice-8"), append_after=524_288, alone_tokens=30, engine=EngineConfig(device="cpu")))
    assert work.append_tokens == (1 << 20) - 524_288 - 30
