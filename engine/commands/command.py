"""What a subcommand is, and what it is given when it runs. Knows no command and no HTTP."""

import argparse
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from engine.config import ServerConfig
from engine.protocol import EngineFace, EngineOpener
from engine.settings import Settings

__all__ = ["Command", "Invocation", "Serve", "WhileReady"]

WhileReady: TypeAlias = Callable[[str, EngineFace], Awaitable[None]]  # (address of the server, engine)


class Serve(Protocol):
    """`server.serve`, handed down because imports never point up."""

    async def __call__(
        self,
        open_engine: Callable[[], AbstractAsyncContextManager[EngineFace]],
        config: ServerConfig,
        while_ready: WhileReady | None = None,
    ) -> None:
        """Listen, open the engine, run `while_ready` (for ever when None), drain. A signal ends any of these early."""
        ...


@dataclass(frozen=True, slots=True)
class Invocation:
    """One run of a command. `options` are its own flags by name; flags that are settings have gone into `settings`."""

    options: Mapping[str, object]
    settings: Settings
    serve: Serve
    open_engine: EngineOpener


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand. `run` returns the exit code and may raise ForebayError."""

    name: str
    summary: str  # one line
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Invocation], int]
