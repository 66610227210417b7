"""The walk-through of docs/sessions.md: every command is run, in order, against server processes on the demo model."""

import asyncio
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "sessions.md").read_text()
BLOCKS = re.findall(r"```(bash|json|python)\n(.*?)```", PAGE, re.DOTALL)
_MARK = "--- end of a block"


def agrees(found: object, wanted: object) -> bool:
    """Whether an answer has everything that is printed; "some" stands for anything that is not empty, 0 or absent."""
    if wanted == "some":
        return bool(found)
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(name in found and agrees(found[name], value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(agrees, found, wanted))
    return found == wanted


@asynccontextmanager
async def server(words: list[str]) -> AsyncIterator[str]:
    """`forebay` with these words on a free port, in a process of its own; yields its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "server.py"), *words, "--log-format", "json", cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        said: dict[str, str] = {}
        while said.get("event") != "server.opened":
            line = await process.stderr.readline()
            assert line, f"the server ended before it listened; it said {said}"
            said = json.loads(line) if line.startswith(b"{") else {}
        yield said["address"]
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


async def answers_of(shell: list[str], before: str) -> tuple[list[str], str]:
    """What each command printed, and a line that gives the next shell the session's id. `before` runs first."""
    script = before + "".join(f"{text}\nprintf '\\n{_MARK}\\n'\n" for text in shell) + "declare -p ID\n"
    process = await asyncio.create_subprocess_exec("bash", "-euo", "pipefail", "-c", script, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    *answers, known = output.decode().split(_MARK)
    assert len(answers) == len(shell)
    return [answer.strip() for answer in answers], known.strip() + "\n"


@pytest.mark.slow
# The page speaks to people with a shell and curl; a machine that has none cannot run its commands, and no other test needs it.
@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands are curl's")
async def test_the_commands_answer_what_the_page_says(tmp_path: Path) -> None:
    """Each command's answer has every field that is printed behind it; the page shows reuse, a fork, a cut, an export and a restart."""
    shell = [text for kind, text in BLOCKS if kind == "bash"]
    begins = [number for number, text in enumerate(shell) if text.startswith("forebay ")]
    assert len(begins) == 2
    assert begins[0] == 0
    answers: list[str] = []
    opening, known = shell[1], ""
    for first, stop in zip(begins, [begins[1], len(shell)], strict=True):
        assert shell[first].split() == ["forebay", "serve", "--demo", "--port", "8000", "--sessions-dir", "sessions"]
        words = ["serve", "--demo", "--port", "0", "--sessions-dir", str(tmp_path / "sessions"), "--host-memory", "128MiB"]
        async with server(words) as address:
            at = "http://127.0.0.1:8000"
            assert at in opening
            commands = [text.replace(at, address) for text in shell[first + 1 : stop]]
            found, known = await answers_of(commands, known and opening.replace(at, address) + known)
        answers += ["", *found]
    checked, last = 0, 0
    for kind, text in BLOCKS[1:]:
        if kind == "bash":
            last += 1
        elif kind == "json":
            wanted = json.loads(text)
            assert agrees(json.loads(answers[last]), wanted), f"the page says {text}, the server {answers[last]}"
            checked += 1
    assert checked >= 15
    assert all(word in PAGE for word in ("/fork", "/truncate", "/export", "/import", "cached_tokens", "DELETE"))


@pytest.mark.slow
async def test_the_library_example_runs() -> None:
    """The page's program ends well and prints both sessions."""
    (example,) = [text for kind, text in BLOCKS if kind == "python"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", example, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    lines = [line.split() for line in output.decode().splitlines()]
    assert [(revision, tokens) for _, revision, tokens, *_ in lines] == [("2", "2"), ("0", "3")]


def test_the_comparison_can_fail() -> None:
    """An absent field, another value, an empty one where there should be some, and a list of another length are differences."""
    assert agrees({"a": 1, "b": [2]}, {"b": ["some"]})
    for found, wanted in (({}, {"a": 1}), ({"a": 2}, {"a": 1}), ({"a": 0}, {"a": "some"}), ([1], [1, 1]), (1, {"a": 1})):
        assert not agrees(found, wanted)
