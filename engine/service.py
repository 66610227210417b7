"""What serving shares: the engine once it is open, whether it drains, how many requests run. Knows no HTTP.

1. A request is admitted only while the engine is open, ready and not draining.
2. A drain ends when nothing runs any more, or after its limits; what is left then is cut, never forgotten.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog

from engine.config import ServerConfig
from engine.errors import ForebayError
from engine.protocol import EngineFace
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
        self.shelf: Shelf | None = None  # where sessions are kept on disk
        self.created = int(time.time())
        # Whose sessions and stored histories are met: everybody's with the key. The key itself is kept nowhere else.
        self.namespace = "" if config.api_key is None else hashlib.sha256(config.api_key.encode()).hexdigest()
        self._draining = False
        self._running: list[asyncio.Task[object]] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> str:
        if self._draining:
            return "draining"
        return "ready" if self.engine is not None and self.engine.ready else "loading"

    def admitted(self) -> EngineFace:
        """The engine, for a new request. Raises NotServing."""
        if self.engine is None or self.state != "ready":
            raise NotServing(f"the server is {self.state}; try again later")
        return self.engine

    async def restored(self, session_id: str) -> EngineFace:
        """The engine, holding the session if that lies on disk. Raises NotServing, ArchiveRefused, ArchiveFailed, NotAdmitted."""
        if self.shelf is not None:
            with self.running():
                await self.shelf.restore(self.admitted, session_id)
        return self.admitted()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The current task as a request that a drain waits for."""
        task = asyncio.current_task()
        assert task is not None, "requests run in tasks"
        assert task not in self._running, "a task is one request at a time"
        self._running.append(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.remove(task)
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
        if self.engine is not None and self.shelf is not None:
            await self.shelf.keep(self.engine, self.config.drain_timeout_s)

    async def cut(self) -> None:
        """Cancel every request that still runs and wait until each has let go of its generation."""
        self._draining = True
        if self._running:
            log.warning("drain.cut", running=len(self._running))
        for task in self._running:
            task.cancel()
        await self._idle.wait()
