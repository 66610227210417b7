"""docs/benchmarks and the pages that quote it: what is quoted is there, what is there is quoted, and each file says where it is from."""

import json
import re
import shlex
import subprocess
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.commands import COMMANDS
from engine.commands.line import _parse
from engine.settings import resolve

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "docs" / "benchmarks").iterdir())
RECORDS = [path for path in FILES if path.suffix == ".json"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Written before their commands recorded it; what each lacks, its page says.
LACKING = {
    "cpu_channel.json": {"commit"},
    "cpu_channel_namespaces.json": {"commit"},
    "cpu_chaos.json": {"date", "machine", "commit"},
    "cpu_soak_30_minutes.json": {"date", "machine", "commit"},
    "h200_decode_first.json": {"commit"},
}
REBASED = {"e0cd594"}  # ran on a card before it was rebased; the pages say so
KNOWN = {command.name: command for command in COMMANDS}
HASH = re.compile(r"[0-9a-f]{40}")


def _record(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def _commit(record: dict[str, Any]) -> str:
    return ((record.get("machine") or {}).get("source") or {}).get("commit") or ""


def _lacks(record: dict[str, Any]) -> set[str]:
    """What of date, machine and commit a record does not name."""
    machine = record.get("machine") or {}
    date = machine.get("date") or record.get("date")
    named = {"date": bool(date) and bool(datetime.fromisoformat(date).tzinfo), "commit": HASH.fullmatch(_commit(record)) is not None}
    named["machine"] = bool((machine.get("device") or {}).get("devices") or machine.get("cpu"))
    return {name for name, there in named.items() if not there}


def _linked(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)\s#]*benchmarks/[^)\s#]+)", page.read_text())
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


@cache
def _history() -> frozenset[str]:
    """Short names of all commits before this one; none where it is no clone, or one whose history is cut off."""
    said = [_git("rev-parse", "--is-shallow-repository"), _git("rev-list", "HEAD")]
    return frozenset(line[:7] for line in said[1].split()) if said[0].strip() == "false" else frozenset()


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=False).stdout
    except OSError:
        return ""


def test_every_benchmark_is_linked() -> None:
    """A raw file that no page links has nobody who says what it shows; and a link leads to a file."""
    linked = set().union(*map(_linked, PAGES))
    assert {path.name for path in FILES} ^ {path.name for path in linked} == set()


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_benchmark_says_where_it_is_from(path: Path) -> None:
    """Date, device or processor, and commit; a file that has come to name them is struck from the list of those that do not."""
    assert _lacks(_record(path)) == LACKING.get(path.name, set())


def test_what_is_listed_is_there() -> None:
    """No file of the list has gone."""
    assert set(LACKING) - {path.name for path in RECORDS} == set()


def test_outputs_of_what_is_quoted_were_equal() -> None:
    """A record that compared outputs found them equal: speed of others is not reported."""
    assert [path.name for path in RECORDS if _record(path).get("outputs_equal", True) is not True] == []


def test_commits_are_in_the_history() -> None:
    """Each commit that a page or a record names can be looked at, but for those that the pages say were rebased."""
    named = {_commit(_record(path))[:7]: path.name for path in RECORDS if _commit(_record(path))}
    for page in PAGES:
        named |= dict.fromkeys(re.findall(r"`([0-9a-f]{7})`", page.read_text()), page.name)
    if not set(named) & _history():
        pytest.skip("this copy of the tree has no whole history")
    assert {commit: where for commit, where in named.items() if commit not in _history()}.keys() == REBASED


@pytest.mark.parametrize("page", ["performance.md", "capacity.md"])
def test_the_commands_of_a_page_parse(page: str) -> None:
    """Each indented `forebay ...` line is a command line of today: no option was renamed or taken away since."""
    text = (ROOT / "docs" / page).read_text()
    parts: dict[str, str] = {}
    lines = 0
    for name, value, line in re.findall(r'^ {4}(?:([A-Z])="(.*)"|(?:\w+=\S+ )?(forebay .*))$', text, re.MULTILINE):
        if name:
            parts[name] = value
            continue
        words = shlex.split(re.sub(r"\$([A-Z])\b", lambda found: parts[found[1]], line), comments=True)[1:]
        resolve(_parse(KNOWN[words[0]], words[1:]), {})
        lines += 1
    assert lines > 5
