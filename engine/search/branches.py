"""Scenarios of conversations that begin with another one's rows: forks that callers ask for, and prompts that begin like what is stored.

A trunk is a script; a branch says other tokens from some cut of it on, and has a reference of its own. Knows no orders: the seed decides.
"""

import asyncio
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.engine import Engine
from engine.errors import BadRequest, SessionBroken
from engine.search.clients import Client, open_engine, rounds
from engine.search.conversations import EDGE, LATE, SHORT, TALK, settings_of
from engine.search.reference import Bench, Reference, Script, Turn, greedy
from engine.search.scenario import Scenario, Scene
from engine.search.tiny import VOCABULARY, prompt
from engine.search.watch import Expected
from engine.stage import Stage
from memory.session import SessionMemory
from streams import Fault

__all__ = ["BRANCHES", "branch", "branch_scripts"]

# Where a branch leaves: inside a prompt's blocks and at their ends, in what was said, and in the prompt behind that.
_CUTS = {EDGE: (40, 63, 64, 66, 69), LATE: (64, 100, 127, 128, 131)}
_SAID = 5  # tokens that a branch generates


async def branch(bench: Bench, trunk: Script, cut: int) -> Script:
    """A conversation whose first `cut` tokens are those of `trunk`, and the next one is not."""
    whole = trunk.whole(await bench.reference(trunk))
    other = (whole[cut] + 1) % (VOCABULARY - 1) if cut < len(whole) else 1
    given = (*whole[:cut], other, *prompt(4 + cut % 3, cut))
    return Script(f"{trunk.name}, left at {cut}", (Turn(len(given), _SAID, given=given),))


async def _deeper(bench: Bench, script: Script) -> Script:
    """One that leaves a branch before the last token it says."""
    return await branch(bench, script, script.length - 1)


async def branch_scripts(bench: Bench) -> list[Script]:
    """All that the scenarios may draw."""
    first = [await branch(bench, trunk, cut) for trunk, cuts in _CUTS.items() for cut in cuts]
    return [*first, *[await _deeper(bench, script) for script in first]]


@dataclass
class _Tree:
    """Clients of one trunk's sessions: who forks waits until there is something to fork."""

    scene: Scene
    engine: Engine
    stage: Stage
    trunk: Client
    group: asyncio.TaskGroup

    async def fork(self, source: Client, cut: int, script: Script, deeper: Script | None) -> None:
        """Fork `source` at `cut` once it has come that far, and talk on; `deeper` forks from there."""
        rng = self.scene.rng
        while not (self._gone(source) or (source.session_id is not None and len(source.session.tokens) >= cut)):
            await rounds(1)
        await rounds(rng.choice((0, 0, 5, 60)))
        if self._gone(source) or source.session_id is None or len(source.session.tokens) < cut:
            return
        try:
            forked = await self.engine.fork_session(source.session_id, cut)
        except BadRequest:
            assert self.scene.faulty, "a session broke and nothing had failed"
            return
        reference = await self.scene.bench.reference(script)
        self.scene.watch.expect(forked, reference)
        client = Client(self.scene, self.engine, script, reference, forked)
        if deeper is not None:
            self.group.create_task(self.fork(client, script.length - 1, deeper, None))
        await self.talk(client)

    def _gone(self, client: Client) -> bool:
        return client.broken or client.session_id not in (None, *self.engine._sessions)

    async def talk(self, client: Client) -> None:
        """All of its script, perhaps a rest, a cut and what was cut again; then it leaves, whoever began with its rows."""
        await client.talk()
        if self.scene.rng.random() < 0.5:
            await client.still()
            self._rest(client)
            await rounds(self.scene.rng.choice((0, 30)))
            if await self._cut_back(client):
                await client.talk()
        await client.leave()

    def _rest(self, client: Client) -> None:
        """What an engine does to idle sessions when memory runs short; its next turn brings all of it back."""
        memory = client.memory
        if memory is None or client.broken or memory.operations.outstanding or not client.session.idle or client.session.broken:
            return
        if self.scene.rng.random() < 0.5:
            self.stage.placement.rest(memory)
        else:
            self.stage.placement.shed(memory, shared=True)

    async def _cut_back(self, client: Client) -> bool:
        """Truncate as a caller does; returns whether it goes on."""
        if client.broken or client.session.broken or self.scene.rng.random() < 0.3:
            return False
        assert client.session_id is not None, "a client that talked has a session"
        ends = {sum(turn.rows + turn.tokens for turn in client.script.turns[: place + 1]) for place in range(len(client.script.turns))}
        # With all but the last token of a turn there is none left to ask with: its predecessor has a row.
        kept = [tokens for tokens in range(1, len(client.session.tokens) + 1) if tokens + 1 not in ends]
        await self.engine.truncate_session(client.session_id, self.scene.rng.choice(kept))
        return True


async def fork(scene: Scene) -> None:
    """A conversation is forked while its prompt is read, while it decodes, waits or rests; a fork is forked; each side goes its own way."""
    rng, bench = scene.rng, scene.bench
    trunk = rng.choice(tuple(_CUTS))
    leaves = [(cut, await branch(bench, trunk, cut)) for cut in rng.sample(_CUTS[trunk], rng.choice((1, 2, 3)))]
    deeper = await _deeper(bench, leaves[0][1])
    beside = rng.choice((SHORT, TALK))
    for script in (trunk, beside, deeper, *(script for _, script in leaves)):
        await bench.reference(script)
    async with open_engine(scene, **settings_of(rng)) as (engine, stage):
        first, other = await Client.make(scene, engine, trunk), await Client.make(scene, engine, beside)
        async with asyncio.TaskGroup() as group:
            tree = _Tree(scene, engine, stage, first, group)
            group.create_task(tree.talk(first))
            group.create_task(tree.talk(other))
            for place, (cut, script) in enumerate(leaves):
                group.create_task(tree.fork(first, cut, script, None if place else deeper))


class _Known:
    """What stateless requests must say, and what the sessions they run in must hold: those are named by their prompts."""

    def __init__(self) -> None:
        self.reference_of: dict[tuple[int, ...], tuple[Script, Reference, int]] = {}

    def add(self, script: Script, reference: Reference) -> None:
        """A prompt for each turn: all that was said before, and the turn's own."""
        end, whole = 0, script.whole(reference)
        for number, turn in enumerate(script.turns):
            self.reference_of[tuple(whole[: end + turn.rows])] = (script, reference, number)
            end += turn.rows + turn.tokens

    def expected(self, engine: Engine, memory: SessionMemory) -> Expected | None:
        """Of a session that a request runs in, or that is stored."""
        for request in engine._loop.requests:
            if request.session.memory is memory and request.prompt in self.reference_of:
                return self.reference_of[request.prompt][1]
        for session in engine._loop.stored.sessions:
            if session.memory is memory:
                alike = (
                    reference
                    for script, reference, _ in self.reference_of.values()
                    if script.whole(reference)[: len(session.tokens)] == list(session.tokens)
                )
                return next(alike, None)
        return None

    async def ask(self, scene: Scene, engine: Engine, asked: tuple[int, ...], namespace: str) -> int:
        """One request without a session, heard to its end; returns how many tokens of its prompt had rows."""
        _, reference, number = self.reference_of[asked]
        wanted, cached = reference.tokens[number], 0
        heard: list[int] = []
        logits: list[Tensor] = []
        await rounds(int(scene.rng.expovariate(1 / 60)))
        try:
            async with engine.generate(list(asked), greedy(len(wanted)), namespace=namespace) as generation:
                async for chunk in generation:
                    heard.extend(chunk.token_ids)
                    logits.extend(chunk.logits)
                    cached = chunk.usage.cached_tokens
                    assert heard == list(wanted[: len(heard)]), f"said {heard}, the reference {list(wanted)}"
        except SessionBroken:
            assert scene.faulty, "a session broke and nothing had failed"
            return cached
        assert heard == list(wanted), f"said {heard}, the reference {list(wanted)}"
        for place, (mine, other) in enumerate(zip(logits, reference.logits[number], strict=True)):
            assert torch.equal(mine, other), f"other logits at token {place} with {cached} tokens cached"
        return cached


async def prefixes(scene: Scene) -> None:
    """Prompts begin with rows of histories that others left or still write, in place or forked; what is another's is never used."""
    rng, bench, known = scene.rng, scene.bench, _Known()
    trunk = rng.choice(tuple(_CUTS))
    leaves = [await branch(bench, trunk, cut) for cut in rng.sample(_CUTS[trunk], 2)]
    for script in (trunk, *leaves, await _deeper(bench, leaves[0])):
        known.add(script, await bench.reference(script))
    prompts = list(known.reference_of)
    asked = [*prompts, *rng.sample(prompts, 2)]
    rng.shuffle(asked)
    blocks = rng.choice((None, None, 6))
    settings = settings_of(rng) if blocks is None else {**settings_of(rng), "host_memory_bytes": blocks * scene.bench.block_bytes}
    async with open_engine(scene, prefix_cache="on", **settings) as (engine, _):
        scene.watch.expecting = lambda memory: known.expected(engine, memory)
        held = await Client.make(scene, engine, trunk)
        async with asyncio.TaskGroup() as group:
            apart = group.create_task(known.ask(scene, engine, rng.choice(prompts), "somebody else's"))
            together = rng.random() < 0.5
            if rng.random() < 0.5:
                group.create_task(_talk_and_leave(held))
            for each in asked:
                asking = known.ask(scene, engine, each, "")
                if together:
                    group.create_task(asking)
                else:
                    await asking
        assert apart.result() == 0, f"{apart.result()} tokens were cached for somebody who had none"
        await engine._loop.wait_idle()
        await _check_stored(scene, engine)


async def _talk_and_leave(client: Client) -> None:
    await client.talk()
    await client.leave()


async def _check_stored(scene: Scene, engine: Engine) -> None:
    """Every row of what is kept for later prompts."""
    for session in engine._loop.stored.sessions:
        memory = session.memory
        assert memory is not None, "a stored session has rows"
        await memory.operations.settle()
        if memory.operations.broken is None:
            scene.watch.check_session(memory)


def _breaking(rng: random.Random) -> tuple[Fault, ...]:
    """What a fork or a cut stands on fails, or is late."""
    labels = ("fork", "fork", "truncate", "own page", "keys", "copyback", "mirrored", "tables", "append*", "layer.*")
    return tuple(Fault(rng.choice(labels), rng.randrange(4), rng.choice(("fail", "fail", "delay"))) for _ in range(rng.choice((1, 2))))


def _late(rng: random.Random) -> tuple[Fault, ...]:
    """Forks, cuts and copies are late, nothing fails."""
    return tuple(Fault(rng.choice(("fork", "truncate", "copyback")), nth, "delay") for nth in range(rng.choice((1, 2, 4))))


BRANCHES = (
    Scenario("fork", fork),
    Scenario("fork, late", fork, _late, weight=3),
    Scenario("fork with failures", fork, _breaking),
    Scenario("prefixes", prefixes, weight=3),
    Scenario("prefixes, late", prefixes, _late, weight=2),
    Scenario("prefixes with failures", prefixes, _breaking, weight=2),
)
