"""`forebay bench serve`: a load on a running server, and how long its clients waited.

The table goes to standard output. Exit code: 0 every request was answered, 1 some failed, 2 a bad command line or key, 5 no server answers.
"""

import argparse
import sys
from typing import Any

import uvloop
from rich.console import Console

from engine.bench.load import Length, Load
from engine.commands.command import Command, Invocation
from engine.commands.measuring import add_json, count_of, json_target, measured, results
from engine.errors import BadSetting
from engine.settings import add_flags, parse_decimal, parse_integer, parse_seconds

__all__ = ["COMMAND"]

_COUNTS = {"sessions": 1, "turns": 1, "concurrency": 1, "shared_tokens": 0, "seed": 0}  # and the least of each
_LENGTHS = ("prompt_tokens", "new_tokens")
_GOALS = ("ttft", "tpot", "e2e")


def configure(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and the load."""
    default = Load()
    parser.add_argument("--sessions", metavar="N", help=f"conversations in all ({default.sessions})")
    parser.add_argument("--turns", metavar="N", help=f"turns of each, behind what was said before ({default.turns})")
    parser.add_argument(
        "--prompt-tokens", metavar="N[:M]", help=f"new tokens of each prompt, or drawn from N to M ({default.prompt_tokens})"
    )
    parser.add_argument("--new-tokens", metavar="N[:M]", help=f"tokens of each answer, or drawn from N to M ({default.new_tokens})")
    parser.add_argument("--shared-tokens", metavar="N", help="tokens that every conversation begins with (0)")
    parser.add_argument(
        "--concurrency", metavar="N", help=f"closed loop: clients, each with one conversation at a time ({default.concurrency})"
    )
    parser.add_argument("--rate", metavar="R", help="open loop: conversations that begin a second, at random, whoever still waits")
    parser.add_argument("--think", metavar="SECONDS", help="between an answer and the next turn (0)")
    parser.add_argument("--temperature", metavar="T", help="of the answers (0)")
    parser.add_argument("--seed", metavar="N", help="of lengths, ids, arrivals and answers (1)")
    parser.add_argument(
        "--goal", metavar="NAME:MS[,..]", help="what a good request may take: ttft, tpot (a token), e2e; as in ttft:500,tpot:50"
    )
    add_json(parser)
    add_flags(parser, ("host", "port", "api_key", "api_key_file", "log_format"))


def _length(flag: str, text: str) -> Length:
    least, _, most = text.partition(":")
    try:
        found = Length(parse_integer(least), parse_integer(most or least))
    except ValueError:
        raise BadSetting(f"{flag} must be a count or two, like 512 or 100:2000, not {text!r}") from None
    if not 1 <= found.least <= found.most:
        raise BadSetting(f"{flag} must be at least 1, the smaller one first, not {text!r}")
    return found


def _load(options: dict[str, object]) -> Load:
    given: dict[str, Any] = {}
    for name, least in _COUNTS.items():
        if (count := count_of(options, name)) is not None:
            if count < least:
                raise BadSetting(f"--{name.replace('_', '-')} must be at least {least}, not {count}")
            given[name] = count
    for name in _LENGTHS:
        if (text := options.get(name)) is not None:
            given[name] = _length(f"--{name.replace('_', '-')}", str(text))
    if options.get("rate") is not None:
        if options.get("concurrency") is not None:
            raise BadSetting("--rate and --concurrency exclude each other: an open loop has as many at once as come")
        given["rate"] = _number("--rate", options["rate"], positive=True)
    for flag, field in (("think", "think_s"), ("temperature", "temperature")):
        if options.get(flag) is not None:
            given[field] = _number(f"--{flag}", options[flag], positive=False)
    return Load(**given)


def _number(flag: str, text: object, *, positive: bool) -> float:
    try:
        value = parse_decimal(str(text)) if positive else parse_seconds(str(text))
        if value < 0:
            raise ValueError("at least 0")
    except ValueError as error:
        raise BadSetting(f"{flag} must be {error}, not {text!r}") from None
    return value


def _goals(text: object) -> dict[str, float]:
    """Milliseconds by name."""
    goals: dict[str, float] = {}
    for part in str(text).split(",") if text is not None else ():
        name, _, limit = part.strip().partition(":")
        if name not in _GOALS or name in goals:
            raise BadSetting(f"--goal names each of {', '.join(_GOALS)} at most once, as in ttft:500,tpot:50, not {part!r}")
        goals[name] = _number("--goal", limit, positive=True)
    return goals


def run(invocation: Invocation) -> int:
    """Returns 0, or 1 when a request failed. Raises BadSetting, Unreachable."""
    options = dict(invocation.options)
    load, goals, target = _load(options), _goals(options.get("goal")), json_target(options)
    from engine.bench.serving import as_json, drive, table

    config = invocation.settings.server
    found = uvloop.run(measured(lambda bars: drive(load, config, goals, bars), as_json, target, probe=False))
    results().print(table(found))
    if found.failed:
        errors = as_json(found, {})["errors"]
        Console(file=sys.stderr, highlight=False).print("\n".join(f"{count} x {error}" for error, count in errors.items()), markup=False)
    return 1 if found.failed else 0


COMMAND = Command("serve", "a load on a running server: waits, gaps, rates and goodput as its clients see them", configure, run)
