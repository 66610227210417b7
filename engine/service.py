"""What serving shares: the engine once it is open, whether it drains, how many requests run, what is kept how long. Knows no HTTP.

1. A request is admitted only while the engine is open, ready and not draining.
2. A drain ends when nothing runs any more, or after its limits; what is left then is cut, never forgotten.
3. A session is removed for its age only where nothing of it runs.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import structlog

from engine.api.response_turns import KeptResponses
from engine.api_keys import Account
from engine.config import ServerConfig
from engine.errors import ForebayError
from engine.metrics import Metrics
from engine.protocol import EngineFace, SessionId
from engine.retention import Retention
from engine.running_requests import RunningRequests
from engine.shelf import Shelf

__all__ = ["NotServing", "Service"]

log = structlog.get_logger()

_LAST_WRITES_S = 2.0  # what a drained stream gets to reach its reader
_RETRY_S = 5.0


class NotServing(ForebayError):
    """Loading or draining."""

    status = 503
    kind = "unavailable_error"
    retry_after_s = _RETRY_S


class Service:
    """What the routes share: the engine once it is open, whether it drains, how many requests run."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine: EngineFace | None = None
        self.accounts = [Account(key) for key in config.keys] or [Account(None)]
        self.shelves: dict[str, Shelf] = {}  # where sessions are kept on disk, by namespace; empty: nowhere
        self.retention = Retention(config.session_ttl_s)
        self.metrics = Metrics()
        self.responses = {each.namespace: KeptResponses(config.responses_bytes, config.responses_ttl_s) for each in self.accounts}
        self.requests = RunningRequests()
        self.created = int(time.time())
        self._draining = False
        self._running: list[asyncio.Task[object]] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> str:
        if self._draining:
            return "draining"
        if self.engine is None:
            return "loading"
        return "ready" if self.engine.ready else "recovering"  # a node that has some of the layers is away

    def admitted(self) -> EngineFace:
        """The engine, for a new request. Raises NotServing."""
        if self.engine is None or self.state != "ready":
            raise NotServing(f"the server is {self.state}; try again later")
        return self.engine

    async def restored(self, session_id: str, namespace: str) -> EngineFace:
        """The engine, holding the session if that lies on disk. Raises NotServing, ArchiveRefused, ArchiveFailed, NotAdmitted."""
        shelf = self.shelves.get(namespace)
        if shelf is not None:
            with self.running():
                await shelf.restore(self.admitted, session_id)
        return self.admitted()

    def opened(self, engine: EngineFace) -> None:
        """The engine is open: idle sessions have a place to leave for, if the server has one."""
        self.engine = engine
        self.metrics.opened(engine.instruments, {"model": engine.model_name, "placement": engine.config.placement})
        for namespace, shelf in self.shelves.items():
            engine.departures.archive_with(partial(shelf.export, engine), namespace, shelf.archive_of)

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        """Sessions whose time has come are removed for the length of the block."""
        failure: BaseException | None = None
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._expire_for_ever(), name="ages of sessions")
            try:
                yield
            # Kept aside so that it leaves as it was, not inside an exception group.
            except BaseException as error:
                failure = error
            looking.cancel()
        if failure is not None:
            raise failure

    async def _expire_for_ever(self) -> None:
        while True:
            try:
                await self.expire()
            except ForebayError as error:
                log.warning("session.not_removed", reason=str(error))
            except Exception:  # the edge of this task: the server goes on
                log.exception("session.not_removed")
            await asyncio.sleep(self.retention.look_again_s)

    async def expire(self) -> None:
        """Remove every session and kept response whose time has come. Raises ArchiveFailed."""
        for responses in self.responses.values():
            responses.expire()
        for account in self.accounts:
            engine = self.engine
            if engine is None or self.state != "ready" or not self.retention.any_age:
                return
            await self._expire_of(engine, account.namespace)

    async def _expire_of(self, engine: EngineFace, namespace: str) -> None:
        due = [view.id for view in engine.sessions.values() if view.namespace == namespace and self.retention.due(view)]
        if namespace in self.shelves:
            archived = await self.shelves[namespace].ages()
            due += [SessionId(name) for name, used_at in archived.items() if self._is_due(name, used_at)]
        for session_id in dict.fromkeys(due):
            if await self.remove(session_id, namespace, due=partial(self._is_due, session_id)):
                log.info("session.expired", session_id=session_id)

    def _is_due(self, session_id: str, used_at: float) -> bool:
        assert self.engine is not None, "ages are looked at while the engine is open"
        view = self.engine.sessions.get(SessionId(session_id))
        return self.retention.due_at(session_id, used_at) if view is None else self.retention.due(view)

    async def remove(self, session_id: str, namespace: str, *, due: Callable[[float], bool] | None = None) -> bool:
        """Close a session and remove its archive; returns whether there was either. Args: due: as `Shelf.remove`'s."""
        engine = self.admitted()
        if namespace in self.shelves:
            found = await self.shelves[namespace].remove(engine, session_id, due=due)
        else:
            view = engine.sessions.get(SessionId(session_id))
            found = view is not None and view.namespace == namespace and (due is None or due(view.used_at))
            if found:
                await engine.close_session(SessionId(session_id))
        if found:
            self.retention.forget(session_id)
        return found

    @contextmanager
    def running(self, session_id: str | None = None) -> Iterator[None]:
        """The current task as a request that a drain waits for. Args: session_id: of the session whose turn it is."""
        task = asyncio.current_task()
        assert task is not None, "requests run in tasks"
        assert task not in self._running, "a task is one request at a time"
        self._running.append(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.remove(task)
            if session_id is not None and self.retention.any_age and self.engine is not None and session_id in self.engine.sessions:
                self.retention.used(session_id)
            if not self._running:
                self._idle.set()

    async def drain(self) -> None:
        """Admit nothing more and let what runs end; the engine aborts what does not in time."""
        self._draining = True
        log.info("drain.started", running=len(self._running))
        if self.engine is not None:
            await self.engine.drain(self.config.drain_timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WRITES_S):
                await self._idle.wait()

    async def keep(self) -> None:
        """Bring the sessions to disk, where there is a place for them."""
        if self.engine is not None:
            async with asyncio.TaskGroup() as group:
                for shelf in self.shelves.values():
                    group.create_task(shelf.keep(self.engine, self.config.drain_timeout_s), name="sessions to disk")

    async def cut(self) -> None:
        """Cancel every request that still runs and wait until each has let go of its generation."""
        self._draining = True
        if self._running:
            log.warning("drain.cut", running=len(self._running))
        for task in self._running:
            task.cancel()
        await self._idle.wait()
