"""The prompt of a gate run, as token ids: from a file, from the standard library's source, or drawn from a seed.

Asks a server for its tokenizer once; every run then sends the same ids. Knows no measurement.
"""

import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from engine.errors import BadSetting
from engine.gate.answer import RunFailed
from engine.gate.plan import Plan

__all__ = ["PromptIds", "library_text", "prompt_ids", "read_prompt_file", "said_of", "seeded_ids"]

_SEED = 20_240_101
_IDS = range(1_000)  # every vocabulary in use has these
_CHARACTERS_A_TOKEN = 3


@dataclass(frozen=True, slots=True)
class PromptIds:
    """Token ids and where they came from."""

    ids: tuple[int, ...]
    source: str


def library_text(characters: int) -> str:
    """At least so many characters of Python source: the standard library's modules in order of name, again and again."""
    texts: list[str] = []
    size = 0
    while size < characters:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(texts[-1]) + 1
            if size >= characters:
                break
        assert texts, "a Python has a standard library"
    return "\n".join(texts)


def seeded_ids(count: int) -> tuple[int, ...]:
    """Ids for a model without a tokenizer, the same every time."""
    return tuple(random.Random(_SEED).choices(_IDS, k=count))


def read_prompt_file(path: Path) -> str | list[int]:
    """A JSON list of token ids, or a text. Raises BadSetting."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"--prompt-file: cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    if not text:
        raise BadSetting(f"--prompt-file: {path} is empty")
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids):
        return ids
    return text


async def said_of(response: aiohttp.ClientResponse) -> str:
    """What a refusal says for people: the message of its error, else the beginning of its body."""
    text = await response.text()
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return text[:300]


async def _tokenize(client: aiohttp.ClientSession, text: str) -> list[int] | None:
    """Ids of a text; None where the model has no tokenizer."""
    async with client.post("/tokenize", json={"prompt": text}) as response:
        if response.status == 400:
            return None
        if response.status != 200:
            raise RunFailed(f"/tokenize answered {response.status}: {await said_of(response)}")
        found: list[int] = (await response.json())["tokens"]
        return found


async def prompt_ids(client: aiohttp.ClientSession, plan: Plan) -> PromptIds:
    """The ids that every run sends. Raises BadSetting, RunFailed."""
    if plan.prompt_file is not None:
        given = read_prompt_file(plan.prompt_file)
        ids = given if isinstance(given, list) else await _tokenize(client, given)
        if ids is None:
            raise BadSetting("--prompt-file: this model has no tokenizer; give a JSON list of token ids")
        return PromptIds(tuple(ids), f"file {plan.prompt_file.name}")
    characters = _CHARACTERS_A_TOKEN * plan.prompt_tokens
    while True:
        ids = await _tokenize(client, library_text(characters))
        if ids is None:
            return PromptIds(seeded_ids(plan.prompt_tokens), f"ids drawn from seed {_SEED}")
        if len(ids) >= plan.prompt_tokens:
            return PromptIds(tuple(ids[: plan.prompt_tokens]), "source of the standard library")
        characters *= 2
