"""The command line: picks the command, parses its flags, resolves settings, runs it.

Knows the list of commands and no command's work.

1. Everything that is wrong with a command line is one `BadSetting` line; argparse's usage dump is never printed for an error.
2. A flag is never guessed from its first letters; an unknown one is answered with the nearest known.
"""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from engine.commands import COMMANDS
from engine.commands.command import Command, Invocation, Serve
from engine.config import EngineConfig
from engine.errors import BadSetting
from engine.protocol import EngineFace, EngineOpener, Progress
from engine.settings import nearest, resolve

__all__ = ["open_engine", "run_line"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadSetting(f"{message[:1].lower()}{message[1:]}; see {self.prog} --help")


def open_engine(
    model: str | Path, config: EngineConfig | None = None, *, progress: Progress | None = None
) -> AbstractAsyncContextManager[EngineFace]:
    """`Engine.open`. Imported here and not above: torch takes seconds to import, and --help needs none of it."""
    from engine.engine import Engine

    return Engine.open(model, config, progress=progress)


def _version() -> str:
    try:
        return version("forebay")
    except PackageNotFoundError:
        return "unknown"


def _overview(commands: Sequence[Command]) -> str:
    width = max(len(command.name) for command in commands)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in commands]
    return "\n".join(
        [
            "usage: forebay COMMAND ...",
            "",
            "Decodes with the whole MLA history in host RAM behind a small hot cache.",
            "",
            "commands:",
            *lines,
            "",
            "Settings (the flags of forebay serve) may also be FOREBAY_* variables or keys of a TOML file (--config).",
            "forebay COMMAND --help says more; forebay --version says which version this is.",
        ]
    )


def _parser(command: Command) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"forebay {command.name}", description=command.summary, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    command.configure(parser)
    return parser


def _parse(command: Command, words: Sequence[str]) -> dict[str, object]:
    parser = _parser(command)
    options, extra = parser.parse_known_args(list(words))
    if extra:
        flags = [option for action in parser._actions for option in action.option_strings]
        word = extra[0].partition("=")[0]
        guess = nearest(word, flags) if word.startswith("-") else ""
        raise BadSetting(f"{word} means nothing to forebay {command.name}{guess or f'; see forebay {command.name} --help'}")
    return vars(options)


def run_line(
    words: Sequence[str],
    environment: Mapping[str, str],
    serve: Serve,
    *,
    opener: EngineOpener = open_engine,
    commands: Sequence[Command] = COMMANDS,
) -> int:
    """Run `forebay WORDS`. Returns the exit code. Raises ForebayError; SystemExit(0) after --help of a command."""
    name = words[0] if words else None
    if name in ("-h", "--help", "help"):
        print(_overview(commands))
        return 0
    if name == "--version":
        print(f"forebay {_version()}")
        return 0
    known = {command.name: command for command in commands}
    if name is None or name not in known:
        asked = "no command given" if name is None else f"no command {name!r}"
        guess = "" if name is None else nearest(name, known)
        raise BadSetting(f"{asked}; there are: {', '.join(known)}{guess}")
    options = _parse(known[name], words[1:])
    settings = resolve(options, environment)
    return known[name].run(Invocation(options=options, settings=settings, serve=serve, open_engine=opener))
