"""A load driven over HTTP, open or closed, and what came of it.

Knows `/v1/completions` and no engine. Everything runs on one loop, whose own delay is in the times: keep the client off the server's cores.

1. An open loop sends when a conversation is due, whoever still waits; times count from then, not from when the client got to it.
2. A failed request ends its conversation; it is counted, and its times are in no percentile.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import msgspec
from rich.table import Table

from engine.bench.heard import Heard, HeardReader, StreamFailed
from engine.bench.load import Conversation, Load, conversations
from engine.bench.spread import spread_of
from engine.config import ServerConfig
from engine.errors import BadSetting
from engine.gate.answer import Events
from engine.gate.prompt import said_of
from engine.remote import Unreachable, address_of, reason_of

__all__ = ["GOALS", "Served", "as_json", "drive", "table"]

_VERSION = 1
_MS = 1_000.0
_ERRORS_SHOWN = 10
_JSON = {"Content-Type": "application/json"}
GOALS: dict[str, Callable[[Heard], float]] = {  # milliseconds that a request may take to count as good
    "ttft": lambda one: one.first_s * _MS, "tpot": lambda one: one.token_s * _MS, "e2e": lambda one: one.total_s * _MS,
}  # fmt: skip

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Served:
    """A run. `wall_s`: from the first request to the last answer."""

    load: Load
    model: str
    wall_s: float
    requests: tuple[Heard, ...]
    goals_ms: dict[str, float]

    @property
    def answered(self) -> list[Heard]:
        return [one for one in self.requests if one.error is None]

    @property
    def failed(self) -> int:
        return len(self.requests) - len(self.answered)

    @property
    def good(self) -> int:
        """Requests within every goal."""
        return sum(all(GOALS[name](one) <= limit for name, limit in self.goals_ms.items()) for one in self.answered)


async def drive(load: Load, config: ServerConfig, goals_ms: dict[str, float], progress: Progress) -> Served:
    """Send the load to a running server. Args: progress: (title, tokens answered, tokens in all).

    Raises: Unreachable; BadSetting: it does not take our key.
    """
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(
        address_of(config), headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20
    ) as client:
        model = await _model(client, config)
        driver = _Driver(load, client, model, progress)
        await driver.run()
    return Served(load, model, driver.wall_s, tuple(driver.heard), dict(goals_ms))


async def _model(client: aiohttp.ClientSession, config: ServerConfig) -> str:
    """The name of the server's model."""
    try:
        async with client.get("/v1/models") as response:
            if response.status != 200:
                raise BadSetting(f"{address_of(config)} answered {response.status}: {await said_of(response)}")
            return str((await response.json())["data"][0]["id"])
    except (OSError, aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        raise Unreachable.at(config, error) from error


class _Driver:
    def __init__(self, load: Load, client: aiohttp.ClientSession, model: str, progress: Progress) -> None:
        self.heard: list[Heard] = []
        self.wall_s = 0.0
        self._load, self._client, self._model, self._progress = load, client, model, progress
        self._plan = tuple(conversations(load))
        self._total = sum(each.new_tokens for each in self._plan)
        self._tokens = 0
        self._started_s = 0.0

    async def run(self) -> None:
        self._started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            if self._load.rate is None:
                waiting = iter(self._plan)
                for _ in range(min(self._load.concurrency, len(self._plan))):
                    group.create_task(self._client_of(waiting))
            else:
                for each in self._plan:
                    await asyncio.sleep(max(0.0, each.begins_s - self._now_s()))
                    group.create_task(self._talk(each, each.begins_s))
        self.wall_s = self._now_s()

    def _now_s(self) -> float:
        return time.perf_counter() - self._started_s

    async def _client_of(self, waiting: Iterator[Conversation]) -> None:
        for each in waiting:  # shared by all clients: each takes the next
            await self._talk(each, self._now_s())

    async def _talk(self, conversation: Conversation, due_s: float) -> None:
        """All turns of one conversation, each behind everything that was said."""
        said: tuple[int, ...] = ()
        for turn in conversation.turns:
            said += turn.prompt
            heard = await self._ask(said, turn.new_tokens, conversation.number, due_s)
            self.heard.append(heard)
            self._tokens += heard.new_tokens
            self._progress("answers", self._tokens, self._total)
            if heard.error is not None:
                return
            said += heard.token_ids
            if self._load.think_s and turn is not conversation.turns[-1]:
                await asyncio.sleep(self._load.think_s)
            due_s = self._now_s()

    async def _ask(self, prompt: tuple[int, ...], new_tokens: int, number: int, due_s: float) -> Heard:
        body: dict[str, Any] = {
            "model": self._model, "prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, "temperature": self._load.temperature, "seed": self._load.seed + number,
        }  # fmt: skip
        if self._load.turns > 1:
            body["return_token_ids"] = True
        reader, events = HeardReader(due_s), Events()
        try:
            async with self._client.post("/v1/completions", data=msgspec.json.encode(body), headers=_JSON) as response:
                if response.status != 200:
                    return Heard(due_s, error=f"status {response.status}: {await said_of(response)}")
                async for piece in response.content.iter_any():
                    at_s = self._now_s()
                    for payload in events.feed(piece):
                        reader.take(at_s, payload)
            return reader.heard()
        except StreamFailed as failed:
            return Heard(due_s, error=str(failed))
        except (OSError, aiohttp.ClientError) as error:
            return Heard(due_s, error=f"the connection broke: {reason_of(error)}")


def _spreads(answered: Sequence[Heard]) -> dict[str, dict[str, float] | None]:
    """Milliseconds."""
    return {
        "ttft_ms": spread_of([GOALS["ttft"](one) for one in answered]),
        "itl_ms": spread_of([gap * _MS for one in answered for gap in one.gaps_s]),
        "tpot_ms": spread_of([GOALS["tpot"](one) for one in answered if one.new_tokens > 1]),
        "e2e_ms": spread_of([GOALS["e2e"](one) for one in answered]),
    }


def as_json(found: Served, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but single requests' times."""
    answered, load = found.answered, found.load
    prompt, new = sum(one.prompt_tokens for one in answered), sum(one.new_tokens for one in answered)
    errors = Counter(one.error for one in found.requests if one.error is not None)
    return {
        "version": _VERSION, "kind": "serve", "model": found.model,
        "load": asdict(load) | {"prompt_tokens": str(load.prompt_tokens), "new_tokens": str(load.new_tokens)},
        "wall_s": found.wall_s, "requests": len(found.requests), "failed": found.failed, "errors": dict(errors.most_common(_ERRORS_SHOWN)),
        "prompt_tokens": prompt, "cached_tokens": sum(one.cached_tokens for one in answered), "new_tokens": new,
        "requests_per_second": len(answered) / found.wall_s, "new_tokens_per_second": new / found.wall_s,
        "tokens_per_second": (prompt + new) / found.wall_s, **_spreads(answered),
        "goals_ms": found.goals_ms, "good": found.good if found.goals_ms else None,
        "good_per_second": found.good / found.wall_s if found.goals_ms else None, "client": machine,
    }  # fmt: skip


def table(found: Served) -> Table:
    """Counts, rates, and a line a kind of time."""
    answered = found.answered
    new = sum(one.new_tokens for one in answered)
    made = Table(
        title=f"{found.model}: {len(answered)} of {len(found.requests)} requests answered in {found.wall_s:.1f} s", title_justify="left"
    )
    for name in ("", "mean", "p50", "p90", "p99", "max"):
        made.add_column(name, justify="right" if name else "left")
    for name, spread in _spreads(answered).items():
        made.add_row(
            name.replace("_", " "),
            *("-" if spread is None else f"{value:,.1f}" for value in (spread or dict.fromkeys("abcde", 0.0)).values()),
        )
    made.add_section()
    made.add_row("answered tokens/s", f"{new / found.wall_s:,.1f}")
    made.add_row("requests/s", f"{len(answered) / found.wall_s:,.2f}")
    prompt = sum(one.prompt_tokens for one in answered)
    made.add_row("prompt tokens", f"{prompt:,}", f"{sum(one.cached_tokens for one in answered):,} cached")
    if found.goals_ms:
        made.add_row("within goals", f"{found.good}", f"{found.good / found.wall_s:.2f}/s")
    return made
