"""The walk-through of docs/sessions.md: every command is run, in order, against a server process on the demo model."""

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


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands are curl's")
async def test_the_commands_answer_what_the_page_says() -> None:
    """Each command's answer has every field that is printed behind it; the page shows both kinds of reuse, a fork and a cut."""
    shell = [text for kind, text in BLOCKS if kind == "bash"]
    assert shell[0].split() == ["forebay", "serve", "--demo", "--port", "8000"]
    words = [*shell[0].split()[1:-1], "0", "--host-memory", "128MiB"]
    script = "".join(f"{text}\nprintf '\\n{_MARK}\\n'\n" for text in shell[1:])
    async with server(words) as address:
        assert "http://127.0.0.1:8000" in script
        process = await asyncio.create_subprocess_exec(
            "bash", "-euo", "pipefail", "-c", script.replace("http://127.0.0.1:8000", address), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    answers = [piece.strip() for piece in output.decode().split(_MARK)[:-1]]
    assert len(answers) == len(shell) - 1
    checked, last = 0, 0
    for kind, text in BLOCKS[1:]:
        if kind == "bash":
            last += 1
        elif kind == "json":
            found = json.loads(answers[last - 1])
            assert agrees(found, json.loads(text)), f"the page says {text}, the server {answers[last - 1]}"
            checked += 1
    assert checked >= 10
    assert all(word in PAGE for word in ("/fork", "/truncate", "cached_tokens", "DELETE"))


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
