"""The runs of a gate: a fresh server each, a short answer to warm it up, then the measured one.

A pair's servers may be started together, which takes half the time; the one that is not asked has nothing to do then.

Drives HTTP and the clock. Does not start processes itself (`Start` does) and judges nothing.

Invariants:
1. Runs follow one another; nothing of ours runs beside the measured request.
2. Every run sends the same ids with the same settings, greedy, to the same length.
3. What a run reads of the server's counts is of its measured request alone.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

import aiohttp
import structlog

from engine.errors import BadSetting
from engine.gate.answer import AnswerReader, Events, RunFailed
from engine.gate.plan import Plan
from engine.gate.prompt import PromptIds, prompt_ids, said_of
from engine.gate.verdict import Arm, Pair, Run, order

__all__ = ["Runs", "Start", "Watch"]

log = structlog.get_logger()

_WARMUP_PROMPT_TOKENS = 64
_SEED = 1  # of every request
_SILENCE_S = 3_600.0  # longest time without a byte: a million rows may be appended before the first token
_ENDING_S, _ENDING_CHECKS = 0.05, 600  # an answer that was left ends within a step or a chunk of its prompt

Start = Callable[[Arm], AbstractAsyncContextManager[str]]  # a fresh server; yields its address


class Watch(Protocol):
    """Told how far a run is, in tokens."""

    def __call__(self, title: str, done: int, total: int) -> None: ...


def _body(ids: tuple[int, ...], new_tokens: int, plan: Plan, *, warm: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": list(ids), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True,
        "seed": _SEED,  # forced acceptance decides by it: without one each run would draw its own
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if plan.history is not None and not warm:
        body["synthetic_history"] = {"seed": plan.history.seed, "rows": plan.history.rows}
    return body


async def _ask(client: aiohttp.ClientSession, body: dict[str, Any], watch: Callable[[int], None], enough: int = 0) -> AnswerReader:
    """Stream one completion to its end. Raises RunFailed; BadSetting when the server says that it can never be served.

    Args: enough: leave once so many tokens have come; 0: never.
    """
    reader, events = AnswerReader(time.perf_counter()), Events()
    async with client.post("/v1/completions", json=body) as response:
        if response.status != 200:
            said = await said_of(response)
            if response.status in (400, 413):
                raise BadSetting(f"the server refuses these settings: {said}")
            raise RunFailed(f"the server answered {response.status}: {said}")
        async for piece in response.content.iter_any():
            at_s = time.perf_counter()
            for payload in events.feed(piece):
                reader.take(at_s, payload)
            watch(reader.tokens)
            if 0 < enough <= reader.tokens:
                break
    return reader


async def _statistics(client: aiohttp.ClientSession) -> dict[str, Any]:
    async with client.get("/statistics") as response:
        if response.status != 200:
            raise RunFailed(f"/statistics answered {response.status}: {await said_of(response)}")
        found: dict[str, Any] = await response.json()
        return found


async def _warm_up(client: aiohttp.ClientSession, ids: tuple[int, ...], plan: Plan) -> None:
    """A short answer in a session as long as the measured one's, left once its tokens have come.

    Kernels are compiled and steps recorded for the room that a session has, not for the rows it holds: a short one would warm up others.
    """
    prompt = ids[:_WARMUP_PROMPT_TOKENS]
    room = (0 if plan.history is None else plan.history.rows) + len(ids) + plan.new_tokens - len(prompt)
    await _ask(client, _body(prompt, max(plan.warmup_tokens, room), plan, warm=True), _ignore, enough=plan.warmup_tokens)
    for _ in range(_ENDING_CHECKS):
        if not (await _statistics(client))["running"]:
            return
        await asyncio.sleep(_ENDING_S)
    raise RunFailed("the answer that warms up was left and did not end")


def _ignore(tokens: int) -> None:
    del tokens


class Runs:
    """Makes the runs of one plan in order."""

    def __init__(self, plan: Plan, start: Start, watch: Watch) -> None:
        self._plan = plan
        self._start = start
        self._watch = watch
        self.prompt: PromptIds | None = None  # known from the first run on

    async def all(self) -> list[Pair]:
        """Every pair, also those with a run that failed. Raises what starting a server raises, and BadSetting."""
        found: list[Pair] = []
        for null, arms in order(self._plan.pairs, self._plan.null_pairs):
            number = 1 + sum(pair.null == null for pair in found)
            titles = [f"{'null ' if null else ''}pair {number}, {arm}" for arm in arms]
            first, second = await (self._together if self._plan.together else self._in_turn)(arms, titles)
            found.append(Pair(number, null, (first, second)))
        return found

    async def _in_turn(self, arms: tuple[Arm, Arm], titles: list[str]) -> list[Run]:
        found = []
        for arm, title in zip(arms, titles, strict=True):
            async with self._start(arm) as address:
                found.append(await self._run(address, arm, title))
        return found

    async def _together(self, arms: tuple[Arm, Arm], titles: list[str]) -> list[Run]:
        """Both servers come up before the first run. One that does not takes the other with it."""
        async with AsyncExitStack() as stack:
            started = await asyncio.gather(*(stack.enter_async_context(self._start(arm)) for arm in arms), return_exceptions=True)
            addresses = []
            for one in started:
                if isinstance(one, BaseException):
                    raise one
                addresses.append(one)
            return [await self._run(*run) for run in zip(addresses, arms, titles, strict=True)]

    async def _run(self, address: str, arm: Arm, title: str) -> Run:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
        async with aiohttp.ClientSession(address, timeout=timeout, trust_env=False) as client:
            try:
                run = await self._measure(client, arm, title)
            except (RunFailed, aiohttp.ClientError, TimeoutError) as error:
                run = Run(arm, error=f"{error}" or type(error).__name__)
        if run.error:
            log.error("gate.run_failed", run=title, error=run.error)
        else:
            log.info("gate.run_finished", run=title, tokens_per_second=round(run.tokens_per_second, 3), sha256=run.sha256[:16])
        return run

    async def _measure(self, client: aiohttp.ClientSession, arm: Arm, title: str) -> Run:
        plan = self._plan
        if self.prompt is None:
            self.prompt = await prompt_ids(client, plan)
        ids = self.prompt.ids
        if plan.warmup_tokens:  # whatever it fails with, the measured request would too
            await _warm_up(client, ids, plan)
        before = await _statistics(client)
        read = await _ask(client, _body(ids, plan.new_tokens, plan, warm=False), lambda done: self._watch(title, done, plan.new_tokens))
        after = await _statistics(client)
        answer = read.answer(plan.new_tokens)
        if answer.prompt_token_ids[-len(ids) :] != ids:
            raise RunFailed("the server answered another prompt than the one it was sent")
        return Run(
            arm=arm, sha256=answer.sha256, tokens_per_second=answer.tokens_per_second, prompt_tokens=answer.prompt_tokens,
            completion_tokens=len(answer.token_ids), first_event_tokens=answer.first_event_tokens, first_token_s=answer.first_token_s,
            decode_s=answer.decode_s, hits=after["hits"] - before["hits"], misses=after["misses"] - before["misses"],
            ring_reads=after["ring_reads"] - before["ring_reads"], drafts_proposed=_more(before, after, "drafts_proposed"),
            drafts_accepted=_more(before, after, "drafts_accepted"),
        )  # fmt: skip


def _more(before: dict[str, Any], after: dict[str, Any], name: str) -> tuple[int, ...]:
    """How much each count of a list has grown."""
    return tuple(now - then for then, now in zip(before[name], after[name], strict=True))
