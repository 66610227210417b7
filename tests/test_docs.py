"""What the README and docs/ say exists: files, commands, flags, variables, settings, routes."""

import re
import tomllib
from pathlib import Path

import pytest

from engine.commands import COMMANDS
from engine.config import ServerConfig
from engine.service import Service
from engine.settings import SETTINGS
from server import build_app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link that is no web address names a file beside its page."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target.partition("#")[0]).exists()]
    assert missing == []


def test_every_page_is_linked_from_the_readme() -> None:
    """A page of docs/ that nobody finds from the README is as good as none."""
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in README] == []


def test_the_commands_of_the_readme_exist() -> None:
    """Each `forebay NAME` is a command, and every command is named."""
    named = set(re.findall(r"bin/forebay ([a-z][a-z-]*)", README))
    assert named == {command.name for command in COMMANDS}


def test_the_settings_of_the_readme_exist() -> None:
    """Each FOREBAY_* variable and each key of the TOML example is a setting, and so is each flag that is no command's own."""
    variables = {name.lower() for name in re.findall(r"FOREBAY_([A-Z_]+)", README)} - {"config"}
    blocks = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    keys = set(tomllib.loads(blocks[0]))
    own = {"config", "help", "prompt_file", "max_tokens", "group"}  # of commands
    flags = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", README)} - own
    assert {"hot_rows"} <= variables & keys & flags
    assert (variables | keys | flags) - set(SETTINGS) == set()


def test_the_routes_of_the_readme_are_the_servers() -> None:
    """The table of routes names exactly what the server answers, the one model's card aside."""
    served = {(route.method, route.resource.canonical) for route in build_app(Service(ServerConfig())).router.routes() if route.resource}
    served = {(method, path) for method, path in served if method != "HEAD" and "{" not in path}
    assert set(re.findall(r"`(GET|POST) (/[\w/.]*)`", README)) == served


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL), ids=["library", "client"])
def test_the_examples_are_python(block: str) -> None:
    """The examples of the README compile."""
    compile(block, "README.md", "exec")
