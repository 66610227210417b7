"""An engine that plays scripts: the engine's face without a model, for tests of the server and the commands.

A script is a list of items: a chunk is yielded, an exception raised, an event waited for. It imitates the order of calls and what a
caller sees; it has no rows, no steps and no sampling.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.chunk import Chunk, FinishReason, Usage
from engine.config import EngineConfig
from engine.errors import BadModel
from engine.measures import Arena, LaneActivity, Measures, SessionTiers, StreamCounts, Tokens, Waits
from engine.protocol import Message, Progress, Prompt, SessionId, SessionView, SyntheticHistory
from engine.sampling import Sampling

Item = Chunk | BaseException | asyncio.Event


def words(*texts: str, prompt_tokens: int = 3, finish: FinishReason = "stop") -> list[Chunk]:
    """One chunk and one token a text; token ids count from 100; the last one finishes."""
    return [
        Chunk(
            text=text,
            token_ids=(100 + index,),
            usage=Usage(prompt_tokens, index + 1),
            finish_reason=finish if index == len(texts) - 1 else None,
        )
        for index, text in enumerate(texts)
    ]


@dataclass
class FakeTokenizer:
    """Token ids are the bytes of the text."""

    available: bool = True

    async def encode_async(self, text: str) -> list[int]:
        if not self.available:
            raise BadModel("the model directory has no tokenizer.json: send token ids instead of text")
        return list(text.encode())

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class FakeTemplate:
    """`<role>content` for each message, `<assistant>` at the end."""

    variables: frozenset[str] | None = frozenset({"messages", "enable_thinking"})

    def render(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + "<assistant>" if add_generation_prompt else text


@dataclass(frozen=True)
class Progressed:
    rows_done: int
    rows_total: int


@dataclass(frozen=True)
class FakeStatistics:
    sessions: int = 1
    running: int = 0
    waiting: int = 0
    mirrored_rows: int = 20_000
    hot_rows: int = 1_024
    ring_rows: int = 17
    hits: int = 750
    misses: int = 250
    ring_reads: int = 40
    steps: int = 12
    drafts_proposed: tuple[int, ...] = (9, 6, 0, 0, 0, 0, 0)
    drafts_accepted: tuple[int, ...] = (6, 2, 0, 0, 0, 0, 0)
    stored: int = 2
    host_bytes: int = 3 * 2**20
    device_bytes: int = 512
    resident_bytes: int = 5 * 2**30


MEASURES = Measures(
    waiting=2, appending=1, decoding=3, sessions={"held": 4, "request": 1, "stored": 5}, steps=12, tokens=Tokens(900, 700, 60),
    waits=Waits((0.1, 0.2), (5, 3, 1), 1.5), stalls=1, hits=750, misses=250, ring_reads=40, drafts_proposed=(9, 6),
    drafts_accepted=(6, 2), mirrored_rows=20_000, hot_rows=1_024, ring_rows=17, lag_rows=19, lag_rows_most=11,
    held_bytes={"host": {"arena": 8192}, "device": {"hot": 4096, "ring": 512}}, arena=Arena(8192, 2048, 1024), device_budget_bytes=10_000,
    streams=(StreamCounts("stage0.compute", 100, 1, 0, 1.25, 2), StreamCounts("stage0.copyback", 7, 0, 4096, 0.5, 0)),
)  # fmt: skip


class FakeActivity:
    bin_ms = 20.0

    def take(self) -> list[LaneActivity]:
        return [LaneActivity("stage0.compute", [0, 50, 100], {"step": 0.03})]


@dataclass
class FakeInstruments:
    open: bool = True
    watching: int = 0
    unwatched: asyncio.Event = field(default_factory=asyncio.Event)  # somebody has stopped to watch
    found: Measures = MEASURES
    listed: tuple[SessionTiers, ...] = (
        SessionTiers(
            "mine", "", "held", "ready", 200, 199, 64, 128, 71, 256, 40, 64, 2, 8192, 4096
        ),
        SessionTiers("theirs", "other", "request", "decoding", 10, 9, 64),
    )  # fmt: skip

    def measures(self) -> Measures:
        assert self.open
        return self.found

    def tiers(self, namespace: str, most: int) -> list[SessionTiers]:
        return [one for one in self.listed if one.namespace == namespace][:most]

    @contextmanager
    def watch(self) -> Iterator[FakeActivity]:
        self.watching += 1
        try:
            yield FakeActivity()
        finally:
            self.watching -= 1
            self.unwatched.set()


class FakeGeneration:
    def __init__(self, engine: "FakeEngine", script: Iterable[Item], session: SessionId | None) -> None:
        self._engine, self._script = engine, iter(script)
        self.session_id: SessionId | None = None
        self._session = session
        self._held: asyncio.Event | None = None
        self.produced = 0
        self.paused = asyncio.Event()  # it has come to an event of its script that was not set
        self.closed = asyncio.Event()
        self.ended = False

    @property
    def revision(self) -> int:
        return 4

    @property
    def progress(self) -> Progressed:
        return Progressed(2, 3)

    async def prompt(self) -> tuple[int, ...]:
        self.session_id = self._session or SessionId("fresh")
        return self._engine.prompt_ids

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while (item := self._held or next(self._script, None)) is not None:
            if isinstance(item, asyncio.Event):
                self._held = item  # a cancelled wait loses nothing
                if not item.is_set():
                    self.paused.set()
                if await self._left_before(item):
                    self.ended = True
                    return Chunk("", (), Usage(3, self.produced), finish_reason="abort")
                self._held = None
            elif isinstance(item, BaseException):
                self.ended = True
                raise item
            else:
                self.produced += 1
                self.ended = item.finish_reason is not None
                return item
        raise StopAsyncIteration

    async def _left_before(self, event: asyncio.Event) -> bool:
        """Wait for an event, or until somebody beside the reader leaves; returns whether that was first."""
        waits = [asyncio.ensure_future(each.wait()) for each in (event, self.closed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        return not event.is_set()

    async def __aenter__(self) -> Self:
        await self.prompt()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if not self.ended and not self.closed.is_set():
            self._engine.aborted += 1
        self.closed.set()


@dataclass(frozen=True)
class Call:
    prompt: Prompt
    sampling: Sampling
    session: SessionId | None
    request_id: str | None
    arguments: Mapping[str, object] | None
    history: SyntheticHistory | None = None
    revision: int | None = None
    namespace: str = ""
    after: tuple[int, ...] = ()


@dataclass
class FakeEngine:
    """Plays `scripts` in order, one a generation; the last one again and again."""

    scripts: list[Iterable[Item] | Callable[[], Iterable[Item]]]
    model_name: str = "fake"
    context_max: int = 4096
    config: EngineConfig = field(default_factory=EngineConfig)
    ready: bool = True
    default_sampling: Sampling = field(default_factory=Sampling)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    template: FakeTemplate = field(default_factory=FakeTemplate)
    calls: list[Call] = field(default_factory=list)
    generations: list[FakeGeneration] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)  # generate was called
    prompt_ids: tuple[int, ...] = (7, 8, 9)
    aborted: int = 0
    instruments: FakeInstruments = field(default_factory=FakeInstruments)
    sessions: dict[SessionId, SessionView] = field(default_factory=dict)
    made_sessions: list[SessionId] = field(default_factory=list)
    closed_sessions: list[SessionId] = field(default_factory=list)
    forks: list[tuple[SessionId, int | None, int | None]] = field(default_factory=list)
    truncations: list[tuple[SessionId, int, int | None]] = field(default_factory=list)
    exports: list[SessionId] = field(default_factory=list)
    drains: list[float] = field(default_factory=list)
    archiver: Callable[[SessionId], Awaitable[object]] | None = None
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    may_drain: asyncio.Event | None = None  # a drain waits for it

    @property
    def departures(self) -> "FakeEngine":
        return self

    @property
    def unsettled(self) -> bool:
        return False

    def archive_with(
        self, archive: Callable[[SessionId], Awaitable[object]], namespace: str, find: Callable[[SessionId], Path | None] | None = None
    ) -> None:
        self.archiver = archive

    async def archive(self, session_id: SessionId) -> bool:
        assert self.archiver is not None
        await self.archiver(session_id)
        return self.sessions.pop(session_id, None) is not None

    async def create_session(self, namespace: str = "") -> SessionId:
        made = SessionId(f"s{len(self.made_sessions)}")
        self.made_sessions.append(made)
        self.sessions[made] = SessionView(made, namespace, "ready", 3, [1, 2, 3], 2, 4096, 512, 1e9)
        return made

    async def close_session(self, session_id: SessionId) -> None:
        self.closed_sessions.append(session_id)
        self.sessions.pop(session_id, None)

    async def fork_session(self, session_id: SessionId, tokens: int | None = None, *, revision: int | None = None) -> SessionId:
        self.forks.append((session_id, tokens, revision))
        return await self.create_session(self.sessions[session_id].namespace)

    async def truncate_session(self, session_id: SessionId, tokens: int, *, revision: int | None = None) -> None:
        self.truncations.append((session_id, tokens, revision))

    async def export_session(self, session_id: SessionId, directory: str | Path) -> None:
        self.exports.append(session_id)

    async def import_session(self, directory: str | Path, *, namespace: str = "") -> SessionId:
        return await self.create_session(namespace)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        *,
        session: SessionId | None = None,
        request_id: str | None = None,
        revision: int | None = None,
        namespace: str = "",
        template_arguments: Mapping[str, object] | None = None,
        history: SyntheticHistory | None = None,
        after: Sequence[int] = (),
    ) -> FakeGeneration:
        self.calls.append(Call(prompt, sampling, session, request_id, template_arguments, history, revision, namespace, tuple(after)))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        generation = FakeGeneration(self, script() if callable(script) else script, session)
        self.generations.append(generation)
        self.started.set()
        return generation

    def statistics(self) -> FakeStatistics:
        return FakeStatistics()

    async def drain(self, timeout_s: float) -> None:
        self.drains.append(timeout_s)
        self.draining.set()
        if self.may_drain is not None:
            await self.may_drain.wait()


class Opener:
    """Stands for `Engine.open`; `gate` holds the loading, `error` fails it."""

    def __init__(self, engine: FakeEngine, *, gate: asyncio.Event | None = None, error: Exception | None = None) -> None:
        self.engine, self.gate, self.error = engine, gate, error
        self.opened: list[tuple[str | Path, EngineConfig | None]] = []
        self.loading = asyncio.Event()
        self.closed = 0

    @asynccontextmanager
    async def __call__(
        self, model: str | Path = "fake", config: EngineConfig | None = None, *, progress: Progress | None = None
    ) -> AsyncIterator[FakeEngine]:
        self.opened.append((model, config))
        self.loading.set()
        if progress is not None:
            progress(1, 2)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        try:
            yield self.engine
        finally:
            self.closed += 1
