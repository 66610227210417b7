"""The soak in short, and what it says when something is wrong."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine.search.soak
from engine.engine import Engine
from engine.errors import BadRequest, SessionBusy
from engine.protocol import SessionId
from engine.search.soak import SoakPlan, SoakResult, _Client, run_soak
from server import main


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_soak_leaves_nothing_and_loses_nothing() -> None:
    """For five minutes clients come, leave, abort, fork, cut, archive and restore, and operations fail: all they hear is what is said
    alone, and nothing is held at the end."""
    found = asyncio.run(run_soak(SoakPlan(300.0, seed=1, fault_every=20_000)))
    assert found.wrong == []
    for kind in ("conversations", "turns", "aborts", "forks", "cuts", "restores"):
        assert found.counts[kind] > 0, f"no {kind}: {found.counts}"


@pytest.mark.parametrize(
    ("error", "phase", "faults", "expected"),
    [
        (BadRequest("is closed; create another"), "closed", 3, True),
        (BadRequest("is broken; create another"), "broken", 3, True),
        (BadRequest("is closed; create another"), "closed", 4, False),
        (BadRequest("the prompt has no tokens"), "ready", 3, False),
        (BadRequest("the archive has no name"), None, 3, False),
        (SessionBusy("export it between its turns"), "closed", 3, False),
    ],
)
def test_only_a_fault_since_its_last_whole_turn_excuses_a_session(
    error: BadRequest, phase: str | None, faults: int, expected: bool
) -> None:  # fmt: skip
    """Refused with its session gone and a fault since: broken unseen. No fault since, a session that is there, or busy: wrong."""
    session = SessionId("one")
    views = {} if phase is None else {session: SimpleNamespace(phase=phase)}
    client: Any = SimpleNamespace(_engine=SimpleNamespace(sessions=views), _soak=SimpleNamespace(backend=SimpleNamespace(faults=4)))
    assert _Client._broke_unseen(client, error, session, faults) is expected


@pytest.mark.slow
def test_a_soak_notices_other_tokens_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut sessions that keep their rows would go on with other tokens, and a session that is never closed is still there: both are said."""
    close, forgotten = Engine.close_session, []

    async def forgetful(self: Engine, session_id: Any) -> None:
        if not forgotten and self.config.prefix_cache == "on":
            forgotten.append(self._sessions.pop(session_id))
            return
        await close(self, session_id)

    monkeypatch.setattr(Engine, "close_session", forgetful)
    found = asyncio.run(run_soak(SoakPlan(1.0, clients=2, fault_every=0)))
    assert len(found.wrong) >= 1, "a session that nobody closed was not noticed"
    assert any("still holds" in line or "still have memory" in line for line in found.wrong), found.wrong


def _told(monkeypatch: pytest.MonkeyPatch, *wrong: str) -> None:
    async def soak(plan: SoakPlan, progress: Any) -> SoakResult:
        result = SoakResult(plan, 1.5)
        result.counts["turns"] = 3
        result.wrong.extend(wrong)
        progress(1.0, result)
        return result

    monkeypatch.setattr(engine.search.soak, "run_soak", soak)


def test_the_command_says_what_happened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing wrong: exit code 0, the counts, and the same as JSON."""
    _told(monkeypatch)
    assert main(["soak", "--minutes", "0.5", "--seed", "7", "--json", str(tmp_path / "soak.json")]) == 0
    assert "turns" in capsys.readouterr().out
    written = json.loads((tmp_path / "soak.json").read_text())
    assert (written["ok"], written["plan"]["seconds"], written["plan"]["seed"], written["counts"]) == (True, 30.0, 7, {"turns": 3})
    assert {"date", "cpu", "source"} <= set(written["machine"])  # a record that names no machine and no commit is none


def test_the_command_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Something wrong: exit code 1, and a line of it."""
    _told(monkeypatch, "3 sessions still have memory")
    assert main(["soak", "--minutes", "1"]) == 1
    assert "wrong: 3 sessions still have memory" in capsys.readouterr().out


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "a while", "1441"])
def test_a_time_that_makes_no_sense_is_refused(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the flag and what it takes."""
    assert main(["soak", f"--minutes={minutes}"]) == 2
    assert "--minutes must be a number above 0 and at most 1440" in capsys.readouterr().err
