"""The engine's face as the server and the commands see it: what they may call, and nothing else.

Holds typing protocols and the ids and counts that cross them. Knows no tensors and no implementation; `engine.Engine` satisfies
`EngineFace`, and so does a scripted engine in a test.

1. `generate` never waits; the generation starts when it is first awaited, iterated or entered.
2. Errors that make a request impossible come before the first chunk; `SessionBroken` may come after any chunk.
3. A generation that was left (`aclose`, leaving its block) runs at most one more step.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NewType, Protocol, Self, TypeAlias

from engine.chunk import Chunk
from engine.config import EngineConfig
from engine.measures import InstrumentsFace
from engine.sampling import Sampling

__all__ = [
    "DeparturesFace", "EngineFace", "EngineOpener", "EngineStatistics", "GenerationFace", "Message", "Progress", "Prompt",
    "PromptProgress", "SessionId", "SessionView", "SyntheticHistory", "TemplateFace", "TokenizerFace",
]  # fmt: skip

SessionId = NewType("SessionId", str)
Message: TypeAlias = Mapping[str, object]  # one chat message
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
Progress: TypeAlias = Callable[[int, int], None]  # (tensors read, tensors in all); called from a worker thread


@dataclass(frozen=True, slots=True)
class SyntheticHistory:
    """A made-up history before a prompt, for measuring: `rows` rows of values drawn from `seed`."""

    seed: int  # 0 to 2^63 - 1
    rows: int  # at least 1


@dataclass(frozen=True, slots=True)
class SessionView:
    """What a session is now. Bytes are allocated ones; what several sessions share counts for each of them."""

    id: SessionId
    namespace: str  # whose it is
    phase: str
    revision: int
    token_ids: Sequence[int]  # the session's own: read it before the next await, and change nothing
    rows: int  # tokens whose rows are there; the last token sampled has none yet
    host_bytes: int
    device_bytes: int
    used_at: float  # Unix time of its last turn's beginning, cut or making
    archive_bytes: int = 0  # what an archive of it takes, about


class PromptProgress(Protocol):
    """How far a prompt has been read; both are counts of tokens, `rows_total` 0 until the prompt is known."""

    @property
    def rows_done(self) -> int: ...
    @property
    def rows_total(self) -> int: ...


class GenerationFace(Protocol):
    """One generation: an async iterator and an async context manager of chunks."""

    @property
    def session_id(self) -> SessionId | None:
        """The session it runs in; None until it has started."""
        ...

    @property
    def revision(self) -> int:
        """The session's revision once this turn is over; 0 until it has started."""
        ...

    @property
    def progress(self) -> PromptProgress:
        """May be read at any time; costs nothing."""
        ...

    async def prompt(self) -> tuple[int, ...]:
        """Prompt token ids. Raises BadRequest, NotAdmitted."""
        ...

    def __aiter__(self) -> AsyncIterator[Chunk]: ...
    async def __anext__(self) -> Chunk: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    async def aclose(self) -> None:
        """Abort within one step and wait for that; nothing if it has ended."""
        ...


class TokenizerFace(Protocol):
    """Text to token ids. Raises BadModel where the model directory has no tokenizer."""

    @property
    def available(self) -> bool: ...

    async def encode_async(self, text: str) -> list[int]:
        """Token ids; long texts do not hold the loop."""
        ...

    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class TemplateFace(Protocol):
    """Chat messages to text."""

    @property
    def variables(self) -> frozenset[str] | None:
        """What the template reads besides its own names; None where there is no template."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        """The prompt as text. Raises BadRequest; BadModel where there is no template."""
        ...


class EngineStatistics(Protocol):
    """A frozen snapshot. Rows are counted in positions; bytes are physical."""

    @property
    def sessions(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def mirrored_rows(self) -> int: ...
    @property
    def hot_rows(self) -> int: ...
    @property
    def ring_rows(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def ring_reads(self) -> int: ...
    @property
    def steps(self) -> int:
        """Decode steps submitted so far."""
        ...

    @property
    def drafts_proposed(self) -> Sequence[int]:
        """Drafts that were judged, by place in their run."""
        ...

    @property
    def drafts_accepted(self) -> Sequence[int]: ...
    @property
    def stored(self) -> int:
        """Idle histories that are kept for prompts that begin like them."""
        ...

    @property
    def host_bytes(self) -> int: ...
    @property
    def device_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int:
        """Device bytes that the same sessions would hold with the resident placement."""
        ...


class DeparturesFace(Protocol):
    """Sessions that leave memory for the disk."""

    @property
    def unsettled(self) -> bool:
        """Whether sessions go to archives or come from them, and may leave afterwards."""
        ...

    def archive_with(
        self, archive: Callable[[SessionId], Awaitable[object]], namespace: str, find: Callable[[SessionId], Path | None] | None = None
    ) -> None:
        """From now on idle sessions of a namespace leave where somebody needs their memory.

        Args: archive: exports one to where it will be found again; raises ForebayError. find: where the archive of one lies, if there is
            one: rows that a node lost come from there.
        """
        ...

    async def archive(self, session_id: SessionId) -> bool:
        """Bring one to disk and let go of its memory; False: somebody came for it meanwhile. Raises UnknownSession, SessionBusy."""
        ...


class EngineFace(Protocol):
    """An open engine."""

    @property
    def model_name(self) -> str: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def context_max(self) -> int:
        """Tokens a session may hold."""
        ...

    @property
    def ready(self) -> bool: ...
    @property
    def default_sampling(self) -> Sampling:
        """What a request that says nothing gets: the model's generation_config.json."""
        ...

    @property
    def tokenizer(self) -> TokenizerFace: ...
    @property
    def template(self) -> TemplateFace: ...

    @property
    def sessions(self) -> Mapping[SessionId, SessionView]:
        """The sessions that callers hold, as they are now, in order of their making."""
        ...

    @property
    def departures(self) -> DeparturesFace:
        """How idle sessions leave memory."""
        ...

    @property
    def instruments(self) -> InstrumentsFace:
        """What can be read off it: counts, sessions by tier, what its streams do."""
        ...

    async def create_session(self, namespace: str = "") -> SessionId:
        """A new, empty session. Raises NotAdmitted."""
        ...

    async def close_session(self, session_id: SessionId) -> None:
        """Abort its turn and forget it. Raises UnknownSession."""
        ...

    async def fork_session(self, session_id: SessionId, tokens: int | None = None, *, revision: int | None = None) -> SessionId:
        """A new session with the first `tokens` tokens of another. Raises UnknownSession, StaleRevision, BadRequest, NotAdmitted."""
        ...

    async def truncate_session(self, session_id: SessionId, tokens: int, *, revision: int | None = None) -> None:
        """Keep the first tokens. Raises UnknownSession, StaleRevision, SessionBusy, BadRequest, NotAdmitted."""
        ...

    async def export_session(self, session_id: SessionId, directory: str | Path) -> object:
        """Write a session to a directory. Raises UnknownSession, SessionBusy, SessionBroken, ArchiveFailed, ArchiveRefused, NotAdmitted."""
        ...

    async def import_session(self, directory: str | Path, *, namespace: str = "") -> SessionId:
        """Take a session from a directory. Raises ArchiveRefused, ArchiveFailed, NotAdmitted."""
        ...

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = ...,
        *,
        session: SessionId | None = None,
        revision: int | None = None,
        namespace: str = "",
        request_id: str | None = None,
        template_arguments: Mapping[str, object] | None = None,
        history: SyntheticHistory | None = None,
        after: Sequence[int] = (),
    ) -> GenerationFace:
        """One generation; without a session it gets a fresh one that is closed or stored afterwards.

        Args: history: what a fresh one begins with. after: token ids that a fresh one begins with, and that the prompt goes on from as a
            later turn of a session does. revision: refused with StaleRevision if the session is at another. namespace: whose stored
            histories it may begin with.
        """
        ...

    def statistics(self) -> EngineStatistics: ...

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing more and wait for what runs, at most `timeout_s` seconds; what still runs then is aborted."""
        ...


class EngineOpener(Protocol):
    """`Engine.open`."""

    def __call__(
        self, model: str | Path, config: EngineConfig | None = None, *, progress: Progress | None = None
    ) -> AbstractAsyncContextManager[EngineFace]: ...
