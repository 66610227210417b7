"""One arm of a comparison: a fresh engine in this process, one greedy generation, and what was seen of it.

The generation has a few tokens that warm up, then the measured ones, then those that the probe watches: all of them are compared, only the
measured ones are timed. Judges nothing.

1. Arms of one comparison differ in the settings that the caller changes and in nothing else: same ids, same history, same lengths.
2. A step's time is between the last tokens of two steps as a reader on the engine's loop gets them; drafts bring several tokens a step.
3. The engine is gone, and its device memory given back, when the arm is returned; weights stay where the caller keeps them.
"""

import asyncio
import bisect
import functools
import gc
import hashlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.bench.floor import StepBytes, step_bytes
from engine.bench.probe import Probe, Window
from engine.chunk import Chunk
from engine.config import EngineConfig
from engine.device import device_of, streams_of, was_left
from engine.engine import Engine
from engine.errors import BadSetting, ForebayError
from engine.generation import Generation
from engine.model.glm import Model
from engine.peer_opening import check_peer
from engine.protocol import Progress, Prompt, SessionId, SyntheticHistory
from engine.sampling import Sampling
from streams import Backend
from streams.device import DeviceBackend

__all__ = ["Arm", "Kept", "Load", "Watch", "forget_engines", "run_arm", "seeded_prompt", "watched_engine"]

_SEED = 20_240_101
_IDS = 1_000  # ids below this are in every real vocabulary; a smaller one gives all it has
_LOOK_S = 0.001
_REDRAW_S, _REDRAW_TOKENS = 0.2, 32  # a bar that is drawn at every token would be measured too
_SETTLE = 3  # steps

Watch = Callable[[str, int, int], None]  # (what, done, in all)


@dataclass(frozen=True, slots=True)
class Load:
    """What every arm runs. Counts of tokens; the first `warmup_tokens` of the answer are not timed. Raises BadSetting naming the flag."""

    model: Path
    history: SyntheticHistory | None = None
    prompt_tokens: int = 64  # seeded ids
    prompt_text: str | None = None  # in place of seeded ids
    warmup_tokens: int = 16
    new_tokens: int = 256
    probe_tokens: int = 64  # behind the measured ones, watched; 0: none, and nothing observes the streams

    def __post_init__(self) -> None:
        at_least = {"prompt_tokens": 1, "warmup_tokens": 2, "new_tokens": 2, "probe_tokens": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise BadSetting(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if 0 < self.probe_tokens <= _SETTLE:
            raise BadSetting(f"--probe-tokens must be 0 or more than {_SETTLE}, not {self.probe_tokens}")

    @property
    def answer_tokens(self) -> int:
        """Tokens of the whole answer."""
        return self.warmup_tokens + self.new_tokens + self.probe_tokens


@dataclass(frozen=True, slots=True)
class Arm:
    """What one engine did. Bytes of the ledger are of the whole engine while the session was open."""

    placement: str
    token_ids: tuple[int, ...]  # of every answer, in order
    context_rows: int  # in front of the first measured token
    first_token_s: float  # from the request to its first token
    append_s: float  # from the last made-up row to the first token; with no such rows from the request
    steps_s: tuple[float, ...]  # of the measured tokens
    loop_cpu_s: float  # processor time of the loop's thread over the measured tokens, asking for events included
    hits: int
    misses: int
    ring_reads: int
    device_bytes: int  # of a pair the owner's, as what follows
    transient_bytes: int | None  # device memory beyond long-lived buffers while the prompt was read; None without a device
    floor: StepBytes
    window: Window | None
    depth: int = 0  # drafts a step
    timed_tokens: int | None = None  # None: one a step
    host_bytes: int = 0  # of RAM that rows lie in, in all mirrors, at the first token
    peer_device_bytes: int | None = None  # None: there is no peer

    @property
    def sha256(self) -> str:
        """Of all ids."""
        return hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest()

    @property
    def tokens_per_second(self) -> float:
        """Measured tokens over the time of their steps."""
        return self.tokens_per_step * len(self.steps_s) / sum(self.steps_s)

    @property
    def tokens_per_step(self) -> float:
        """Measured tokens a step, on average."""
        return 1.0 if self.timed_tokens is None else self.timed_tokens / len(self.steps_s)

    @property
    def miss_rate(self) -> float | None:
        """Misses a selected row that was in the mirror; None where nothing was read through a hot cache."""
        reads = self.hits + self.misses
        return self.misses / reads if reads else None


@dataclass(slots=True)
class Kept:
    """Weights that arms of one comparison share: reading or drawing tens of gigabytes anew would measure nothing."""

    model: Model | None = None


@dataclass(slots=True)
class _Taken:
    """Tokens as they came, and of each step its time, the loop thread's, and how many tokens there were behind it."""

    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    accepted: int = 0

    def take(self, chunk: Chunk) -> None:
        """A token that came now. One that no draft had said ends its step."""
        self.ids.extend(chunk.token_ids)
        guessed, self.accepted = chunk.usage.accepted_drafts > self.accepted, chunk.usage.accepted_drafts
        if chunk.token_ids and (not guessed or chunk.finish_reason is not None):
            self.ends.append(len(self.ids))
            self.at_s.append(time.perf_counter())
            self.cpu_s.append(time.thread_time())

    def step_at(self, tokens: int) -> int:
        """The first step behind which there were `tokens` tokens."""
        return bisect.bisect_left(self.ends, tokens)


def seeded_prompt(vocabulary: int, tokens: int, seed: int = _SEED) -> tuple[int, ...]:
    """Ids that are the same every time."""
    return tuple(random.Random(seed).choices(range(min(_IDS, vocabulary)), k=tokens))


@asynccontextmanager
async def watched_engine(
    load: Load, config: EngineConfig, watch: Watch, kept: Kept | None = None
) -> AsyncIterator[tuple[Engine, Probe | None]]:  # fmt: skip
    """An engine for the length of the block, on streams that a probe observes unless the load has no probe tokens."""
    kept, progress = kept or Kept(), functools.partial(watch, f"{config.placement}: loading")
    device = device_of(config)
    probe: Probe | None = None
    backend: Backend | None = None
    if load.probe_tokens:
        probe = Probe()
        backend = streams_of(device, probe, timed=True, peer=check_peer(device, config))
        probe.device = backend if isinstance(backend, DeviceBackend) else None
    try:
        async with Engine.open(load.model, config, progress=progress, backend=backend, weights=kept.model) as engine:
            kept.model = engine.stage.model if engine.stage.peer is None else None  # else it is a part, and the whole is not there
            yield engine, probe
    finally:
        if backend is not None:
            await backend.close()


async def run_arm(load: Load, config: EngineConfig, watch: Watch, kept: Kept | None = None) -> Arm:
    """One generation. Raises ForebayError, as opening an engine and generating do. `kept`: weights of the arms before, if any."""
    try:
        return await _run_alone(load, config, watch, kept)
    finally:
        await forget_engines(config)


async def forget_engines(config: EngineConfig) -> None:
    """Give back what a closed engine held, once no frame holds it: the next one counts what the device has free."""
    await asyncio.sleep(0)  # what ended with the engine has its last callbacks
    gc.collect()
    if device_of(config).type != "cpu" and not was_left():  # a device that failed would fail this too, or never end it
        torch.cuda.empty_cache()


async def _run_alone(load: Load, config: EngineConfig, watch: Watch, kept: Kept | None) -> Arm:
    async with watched_engine(load, config, watch, kept) as (engine, probe):
        prompt = load.prompt_text or seeded_prompt(engine.stage.model.config.vocabulary, load.prompt_tokens)
        return await measure(engine, load, prompt, probe, watch)


async def measure(engine: Engine, load: Load, prompt: Prompt, probe: Probe | None, watch: Watch, session: SessionId | None = None) -> Arm:
    """One generation of an open engine. `session`: continue it; the load's history is for a session of its own."""
    sampling = Sampling(max_tokens=load.answer_tokens, temperature=0.0, seed=_SEED, ignore_eos=True)  # forced acceptance asks the seed
    stage, placement = engine.stage, engine.config.placement
    timed_to = load.warmup_tokens + load.new_tokens
    # Asking for counts waits for the device: some steps before the first that is timed, and before the probe begins.
    ahead, watched_from = max(1, load.warmup_tokens - 1 - _SETTLE), timed_to + _SETTLE
    history = load.history if session is None else None
    taken, memory, window = _Taken(), _Memory(engine), None
    before = after = engine.statistics()
    asked_s = time.perf_counter()
    async with engine.generate(prompt, sampling, session=session, history=history) as generation:
        chunk, appending_s = await _first_chunk(
            generation, history, memory, lambda done, total: watch(f"{placement}: reading", done, total)
        )
        while True:
            had = len(taken.ids)
            taken.take(chunk)
            if had < ahead <= len(taken.ids):
                before = engine.statistics()
            elif had < timed_to <= len(taken.ids):
                after = engine.statistics()
            elif had < watched_from <= len(taken.ids) and probe is not None:
                probe.begin()
            if len(taken.ids) // _REDRAW_TOKENS > had // _REDRAW_TOKENS or chunk.finish_reason is not None:
                watch(f"{placement}: decoding", len(taken.ids), load.answer_tokens)
            if chunk.finish_reason is not None:
                break
            chunk = await anext(generation)
    if probe is not None:
        window = probe.end()
    if len(taken.ids) != load.answer_tokens:
        raise ForebayError(f"{load.answer_tokens} tokens were asked for and {len(taken.ids)} came")
    first, last = taken.step_at(load.warmup_tokens), taken.step_at(timed_to)
    rows, timed = chunk.usage.prompt_tokens + taken.ends[first] - 1, taken.ends[last] - taken.ends[first]
    depth = engine.config.draft_depth or 0
    return Arm(
        placement=placement, token_ids=tuple(taken.ids), context_rows=rows, first_token_s=taken.at_s[0] - asked_s,
        append_s=taken.at_s[0] - appending_s,
        steps_s=tuple(taken.at_s[place] - taken.at_s[place - 1] for place in range(first + 1, last + 1)),
        loop_cpu_s=taken.cpu_s[last] - taken.cpu_s[first],
        hits=after.hits - before.hits, misses=after.misses - before.misses, ring_reads=after.ring_reads - before.ring_reads,
        device_bytes=memory.at_first_token_bytes, transient_bytes=memory.transient_bytes,
        floor=step_bytes(stage.model, stage.layout, length=rows + timed / 2, depth=depth), window=window, depth=depth, timed_tokens=timed,
        host_bytes=memory.host_bytes, peer_device_bytes=memory.peer_bytes,
    )  # fmt: skip


async def _first_chunk(
    generation: Generation, history: SyntheticHistory | None, memory: "_Memory", watch: Progress
) -> tuple[Chunk, float]:  # fmt: skip
    """The first chunk, and when its prompt began to be read, to a millisecond. Until it comes, tells how far the prompt is."""
    began_s = time.perf_counter()

    async def draw() -> None:
        nonlocal began_s
        while history is not None and generation.progress.rows_done < history.rows:
            watch(generation.progress.rows_done, generation.progress.rows_total)
            await asyncio.sleep(_LOOK_S)
        began_s = time.perf_counter()
        memory.prompt_is_read()
        while True:
            watch(generation.progress.rows_done, generation.progress.rows_total)
            await asyncio.sleep(_REDRAW_S)

    outcome: Chunk | ForebayError
    async with asyncio.TaskGroup() as group:
        drawing = group.create_task(draw())
        try:
            outcome = await anext(generation)
        except ForebayError as error:  # kept out of the group, which would wrap it
            outcome = error
        finally:
            drawing.cancel()
    if isinstance(outcome, ForebayError):
        raise outcome
    memory.prompt_was_read()
    return outcome, began_s


class _Memory:
    """Device memory that reading a prompt takes beyond the buffers that stay."""

    def __init__(self, engine: Engine) -> None:
        self._stage, self._ledger, self._device = engine.stage, engine.stage.ledger, engine.stage.device
        self.transient_bytes: int | None = None
        self.host_bytes, self.peer_bytes = 0, None if engine.stage.peer is None else 0
        self.prompt_is_read()

    @property
    def long_lived_bytes(self) -> int:
        """Bytes of the buffers that stay, now."""
        return self._ledger.total("device").allocated_bytes

    def prompt_is_read(self) -> None:
        """From now on."""
        self._held = self.long_lived_bytes
        if self._device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._allocated = torch.cuda.memory_allocated(self._device)

    def prompt_was_read(self) -> None:
        """The first token is there: its session holds what it will hold."""
        self.at_first_token_bytes, peer = self.long_lived_bytes, self._stage.peer
        mirrors = [self._stage.arena, *([] if peer is None or peer.arena is None else [peer.arena])]
        self.host_bytes = sum((held.blocks - held.free) * held.block_bytes for held in (mirror.statistics() for mirror in mirrors))
        if peer is not None:
            self.peer_bytes = peer.pool.statistics().allocated_bytes
        if self._device.type != "cpu":
            peak = torch.cuda.max_memory_allocated(self._device) - self._allocated
            self.transient_bytes = max(0, peak - (self.at_first_token_bytes - self._held))
