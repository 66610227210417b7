"""The search for bad interleavings: its first seeds find nothing, it repeats itself, and it sees what it should."""

import asyncio
import errno
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import server
from engine.commands.line import run_line
from engine.errors import BadSetting
from engine.search import hunt as hunting
from engine.search.clients import Client, open_engine
from engine.search.conversations import SHORT
from engine.search.ground import Ground, Life
from engine.search.hunt import SCENARIOS, Outcome, hunt, record, repeat, wheel
from engine.search.reference import Bench
from engine.search.scenario import Finding, Scenario, Scene, run_seed
from streams import Fault, Tape, TapeRecorder
from streams.tape import Header, Record

THEMES = {  # what the search is for, and which scenarios look for it
    "decode, copyback and truncation": ("decode", "stop", "late copies", "life", "company", "life with late copies"),
    "a prompt is read while others decode": ("append", "chunks", "a chunk beside its own copies"),
    "sessions that share blocks": ("sharing", "prefixes", "prefixes, late", "prefixes with failures"),
    "forks": ("fork", "fork, late", "fork with failures", "forks", "forks with late copies", "forks with failures", "lost fork"),
    "cancellation anywhere": ("cancel", "failures and cancels", "waiters"),
    "cancellation at each await": (
        "each await of a client",
        "each await of a barrier",
        "each await of an engine",
        "each await of a closing",
    ),
    "a barrier against copies in flight": ("flush", "each await of a barrier", "image", "image with failures"),
    "failed and late copies": ("late copies", "lost copies", "lost copy", "life with late copies", "broken cut"),
    "failed registration": ("registration",),
    "a full ring": ("ring full", "full ring"),
    "a full arena": ("scarce", "scarce blocks"),
    "an aborted step": ("aborted steps", "failed operations", "life with failures"),
}
SHORT_SEEDS = 48  # what the default tests run
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
TURNS = wheel(SCENARIOS)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    "first",
    [
        *range(0, SHORT_SEEDS, 8),
        *(pytest.param(first, marks=pytest.mark.slow) for first in range(SHORT_SEEDS, 128, 8)),
        *(pytest.param(first, marks=pytest.mark.long) for first in range(128, 232, 8)),
    ],
)
def test_seeds_find_nothing(bench: Bench, first: int) -> None:
    """Eight seeds round the wheel of scenarios."""
    for seed in range(first, first + 8):
        finding = run_seed(bench, TURNS[seed % len(TURNS)], seed)
        assert finding is None, str(finding)


def _tape(bench: Bench, scenario: Scenario, seed: int) -> Tape:
    records: list[Record] = []
    recorder = TapeRecorder(records.extend)
    assert run_seed(bench, scenario, seed, recorder) is None
    recorder.flush()
    return Tape(Header(), tuple(records))


@pytest.mark.parametrize("name", ["life", "stop"])
def test_a_seed_is_the_whole_reproduction(bench: Bench, name: str) -> None:
    """The same seed twice gives the same tape, another seed another one."""
    first, again, other = (_tape(bench, BY_NAME[name], seed) for seed in (3, 3, 4))
    assert first.diff(again) is None
    assert first.diff(other) is not None


def test_a_run_that_stands_still_is_found(bench: Bench) -> None:
    """A scenario that waits for what will not come ends with a finding instead of waiting for ever."""

    async def stuck(scene: Scene) -> None:
        await asyncio.get_running_loop().create_future()

    finding = run_seed(bench, Scenario("stuck", stuck), 0)
    assert finding is not None
    assert "nobody goes on" in finding.error


def test_what_is_left_behind_is_found(bench: Bench) -> None:
    """A scenario that forgets to close a session ends with a finding."""

    async def forgets(scene: Scene) -> None:
        await Life(Ground(scene), "one", 100).decode(3)

    finding = run_seed(bench, Scenario("forgets", forgets), 0)
    assert finding is not None
    assert "still holds" in finding.error


def test_a_changed_byte_in_ram_is_found(bench: Bench) -> None:
    """One byte of a mirrored row changed behind everybody's back is named by its position."""

    async def changes(scene: Scene) -> None:
        one = Life(Ground(scene), "one", 100)
        await one.decode(64, each=32)
        await one.session.operations.settle()
        one.session.mirror_block(0)[5] ^= 1
        one.check()

    finding = run_seed(bench, Scenario("changes", changes), 0)
    assert finding is not None
    assert "RAM of one" in finding.error
    assert "[0] have other bytes" in finding.error


def test_the_wheel_has_every_scenario_by_weight() -> None:
    """One turn holds each scenario as often as its weight says, and the first dozen seeds are not all alike."""
    assert len(TURNS) == sum(scenario.weight for scenario in SCENARIOS)
    assert all(TURNS.count(scenario) == scenario.weight for scenario in SCENARIOS)
    assert len(TURNS[:12]) == 12
    assert len({scenario.name for scenario in TURNS[:12]}) >= 6


@pytest.mark.parametrize("theme", THEMES)
def test_every_theme_has_its_share(theme: str) -> None:
    """Of 2,000 seeds each theme gets 50 and more, of the first 160 three, and of the few that the default tests run at least one."""
    names = THEMES[theme]
    assert set(names) <= BY_NAME.keys()
    for seeds, least in ((2000, 50), (160, 3), (SHORT_SEEDS, 1)):
        mine = sum(TURNS[seed % len(TURNS)].name in names for seed in range(seeds))
        assert mine >= least, f"{mine} of {seeds} seeds"


def test_every_scenario_has_a_theme() -> None:
    """No scenario runs for nothing that is looked for."""
    assert {name for names in THEMES.values() for name in names} == BY_NAME.keys()


@pytest.mark.slow
def test_many_processes_find_the_smallest_seed_and_its_tape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Worker processes run a clean scenario to its end; a seed's tape is recorded by a process of its own."""
    seen: list[tuple[int, int]] = []
    outcome = hunt(16, ["registration"], processes=1, progress=lambda done, total: seen.append((done, total)))
    assert (outcome.seeds, outcome.finding, outcome.seeds_of) == (16, None, {"registration": 16})
    assert seen == [(8, 16), (16, 16)]
    path = tmp_path / "seed.tape"
    assert record(Finding("registration", 3, "as if"), path) is None
    assert Tape.read(path).header.notes == {"scenario": "registration", "seed": "3", "faults": "[]", "found": ""}
    assert list(tmp_path.iterdir()) == [path]
    assert repeat(Tape.read(path)) == ""


class _Here:
    """A pool of this very process, so that a scenario of a test's own can be looked for."""

    def __enter__(self) -> "_Here":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Any:
        made: Future[Any] = Future()
        made.set_result(work(*arguments))
        return made


async def _forgets_at_times(scene: Scene) -> None:
    """Every third seed leaves a session open."""
    async with open_engine(scene) as (engine, _):
        client = await Client.make(scene, engine, SHORT)
        await client.talk()
        await client.leave()
    life = Life(Ground(scene), "one", 100)
    await life.decode(3)
    await life.session.operations.settle()
    if scene.seed % 3 != 2:
        life.session.close()


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The search, with that scenario alone, in this process."""
    monkeypatch.setattr(hunting, "_pool", lambda processes: _Here())
    monkeypatch.setattr(hunting, "as_completed", list)
    monkeypatch.setattr(hunting, "SCENARIOS", (Scenario("forgets", _forgets_at_times, lambda rng: (Fault("copyback", 9, "delay"),)),))
    hunting._wheel.cache_clear()
    yield "forgets"
    hunting._wheel.cache_clear()


def _forebay(*words: str) -> int:
    return server.main(["tape", *words])


def test_a_finding_is_found_again(forgetful: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The search ends with 1 and a tape; that seed alone fails alike, a sound one does not; the tape's replay ends as the tape does."""
    assert _forebay("search", "--seeds", "7", "--out", str(tmp_path)) == 1
    said = capsys.readouterr().err
    tape = tmp_path / "forgets-2.tape"
    assert "forgets, seed 2: AssertionError" in said
    assert "forgets      3" in said
    assert "--scenario 'forgets' --seed 2" in said
    notes = Tape.read(tape).header.notes
    assert (notes["scenario"], notes["seed"], json.loads(notes["faults"])[0]["label"]) == ("forgets", "2", "copyback")
    assert json.loads(notes["settings"])["row_format"] == "f32"
    assert "still holds" in notes["found"]
    assert _forebay("search", "--scenario", "forgets", "--seed", "2", "--out", str(tmp_path)) == 1
    assert notes["found"].split("(")[0] in capsys.readouterr().err.replace("\n", " ")
    assert _forebay("search", "--seed", "1", "--out", str(tmp_path)) == 0
    assert "nothing found" in capsys.readouterr().err
    again = tmp_path / "again.tape"
    assert _forebay("replay", str(tape), "--out", str(again)) == 0
    assert "forgets, seed 2: AssertionError" in capsys.readouterr().out
    assert Tape.read(tape).diff(Tape.read(again)) is None


def test_a_tape_that_the_seed_does_not_make_is_refused(forgetful: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A replay of the search's tape with another event, end, scenario or seed says so in one line; so does one that names a model."""
    tape = tmp_path / "seed.tape"
    assert record(Finding("forgets", 2, ""), tape) is not None
    lines = tape.read_text().splitlines(keepends=True)

    def refused(code: int, says: str, *words: str, **notes: str | None) -> None:
        header = json.loads(lines[0])
        header["notes"] = {name: value for name, value in {**header["notes"], **notes}.items() if value is not None}
        edited = tmp_path / "edited.tape"
        edited.write_text(json.dumps(header) + "\n" + "".join(body))
        assert _forebay("replay", str(edited), *words) == code
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1
        assert says in told[0]

    body = lines[1:]
    refused(1, "on the tape with AssertionError: other", found="AssertionError: other")
    refused(1, "on the tape with nothing found", found="")
    refused(2, "not known here; did you mean forgets?", scenario="forget")
    refused(2, "has no seed", seed="-2")
    refused(2, "did not come to its end", found=None)
    refused(2, "leave MODEL out", "somewhere")
    place = next(place for place, line in enumerate(body) if "step.begin" in line)
    body[place] = body[place].replace("step.begin", "step.began")
    refused(1, "step.beg")


@pytest.mark.slow
def test_a_seed_that_kills_its_process_leaves_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding stands when its process dies again, and the begin of its tape is where the tape would be."""
    monkeypatch.setattr(hunting, "_record", _die)
    finding = Finding("life", 3, "the process died")
    assert record(finding, tmp_path / "seed.tape") == finding
    assert (tmp_path / "seed.tape").read_text() == "begun"
    assert list(tmp_path.iterdir()) == [tmp_path / "seed.tape"]


def _die(name: str, seed: int, path: Path) -> None:
    path.with_name(path.name + ".part").write_text("begun")
    os._exit(1)


def _search(*words: str) -> int:
    return run_line(["tape", "search", *words], {}, serve=None)  # type: ignore[arg-type]  # not a server's command


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--list prints the names; unknown names, bad counts and missing folders are one line each."""
    assert _search("--list") == 0
    assert capsys.readouterr().out.splitlines() == [scenario.name for scenario in SCENARIOS]
    with pytest.raises(BadSetting, match="did you mean waiters"):
        _search("--scenario", "waiter")
    with pytest.raises(BadSetting, match="--seeds must be"):
        _search("--seeds", "none")
    with pytest.raises(BadSetting, match="at least 1"):
        _search("--seeds", "0")
    with pytest.raises(BadSetting, match="--seed must be at least 0"):
        _search("--seed", "-1")
    with pytest.raises(BadSetting, match="give one of them"):
        _search("--seed", "1", "--seeds", "2")
    with pytest.raises(BadSetting, match="not a directory"):
        _search("--out", str(tmp_path / "absent"))


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With nothing found it exits 0 and says how fast it was; with a finding 1, naming seed, error and tape."""
    finding = Finding("life", 17, "AssertionError: rows differ")
    monkeypatch.setattr(hunting, "hunt", lambda seeds, names, progress: Outcome(seeds, 2.0, None, {"life": 9, "decode": 1}))
    assert _search("--seeds", "10") == 0
    said = capsys.readouterr().err
    assert "10 seeds in 2 s, 5.0 seeds/s: nothing found" in said
    assert [line.split() for line in said.splitlines() if line.startswith(("life", "decode"))] == [["life", "9"], ["decode", "1"]]
    monkeypatch.setattr(hunting, "hunt", lambda seeds, names, progress: Outcome(18, 2.0, finding))
    monkeypatch.setattr(hunting, "record", lambda one, path: one)
    assert _search("--out", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert "life, seed 17: AssertionError: rows differ" in said
    assert "life-17.tape" in said.replace("\n", "")


def test_a_tape_that_cannot_be_written_costs_no_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Minutes of search end with the finding and how to see it again, each on one line, also where no tape can be written."""

    def full(finding: Finding, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    finding = Finding("life", 17, "AssertionError: " + "rows differ " * 20 + "at last")
    monkeypatch.setattr(hunting, "hunt", lambda seeds, names, progress: Outcome(18, 2.0, finding))
    monkeypatch.setattr(hunting, "record", full)
    assert _search("--out", str(tmp_path)) == 1
    said = capsys.readouterr().err.splitlines()
    assert str(finding) in said
    assert f"no tape: cannot write {tmp_path / 'life-17.tape'}: No space left on device" in said
    assert said[-1] == "again: forebay tape search --scenario 'life' --seed 17"
