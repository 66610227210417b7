"""docs/recipes.md and docs/troubleshooting.md: what they tell users to type works, or is at least what it claims to be."""

import asyncio
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from engine.api_keys import parse_keys
from engine.commands import COMMANDS
from engine.config import ServerConfig
from engine.service import Service
from engine.settings import SETTINGS
from server import listening
from tests.fake_engine import FakeEngine, words

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECIPES = (DOCS / "recipes.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", RECIPES, re.DOTALL)


def test_settings_are_of_their_format() -> None:
    """JSON and TOML parse, the example of keys is one, and every block names the address or the model."""
    assert [json.loads(block)["model"] for block in blocks("json")] == ["forebay/glm-5.3"]
    assert [tomllib.loads(block)["model"] for block in blocks("toml")] == ["glm-5.3"]
    (keys,) = blocks("text")
    assert [key.name for key in parse_keys(keys)] == ["anna", "agent"]
    assert all("127.0.0.1:8000" in block for block in (*blocks("json"), *blocks("toml"), *blocks("yaml")))


@pytest.mark.parametrize("page", ["recipes.md", "troubleshooting.md", "api.md"])
def test_flags_and_commands_exist(page: str) -> None:
    """Each flag is a setting and each `forebay NAME` a command."""
    text = (DOCS / page).read_text()
    assert {name.replace("-", "_") for name in re.findall(r"`--([a-z][a-z-]+)", text)} - set(SETTINGS) == set()
    assert set(re.findall(r"`forebay ([a-z]+)", text)) <= {command.name for command in COMMANDS}


async def said_by(*command: str) -> str:
    """What a process prints, once it ended well."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


@pytest.mark.slow
async def test_what_is_typed_works() -> None:
    """Every curl command and both Python examples run against a server with such a key and model, and print its answer."""
    engine = FakeEngine([words("he", "llo")], model_name="glm-5.3")
    service = Service(ServerConfig(port=0, api_keys=parse_keys("KEY")))
    service.engine = engine
    commands = [block for block in blocks("bash") if block.startswith("curl")]
    assert len(commands) == 4
    async with listening(service) as address:
        for command in commands:
            said = await said_by("bash", "-c", command.replace(ADDRESS, address))
            assert ("not_found_error" if "/cancel" in command else "llo") in said, said
        for block in blocks("python"):  # as processes: they close no client, and sockets would stay in this one
            assert "hello" in await said_by(sys.executable, "-c", block.replace(ADDRESS, address))
