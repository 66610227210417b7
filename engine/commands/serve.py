"""`forebay serve`: the HTTP server in the foreground, until a signal."""

import argparse
import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import structlog
import uvloop

from engine import logs
from engine.commands.command import Command, Invocation
from engine.commands.display import Bar
from engine.commands.terminal import ended_with_its_device
from engine.protocol import EngineFace
from engine.settings import SETTINGS, add_flags

__all__ = ["COMMAND"]

log = structlog.get_logger()

_NODES_OWN = ("listen", "stage")


def configure(parser: argparse.ArgumentParser) -> None:
    """Every setting is a flag here."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=SETTINGS["model"].meaning)
    add_flags(parser, (name for name in SETTINGS if name not in ("model", *_NODES_OWN)))


def run(invocation: Invocation) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0 after a drain. Raises BadModel, BadSetting, CannotBind, NotAdmitted."""
    settings = invocation.settings
    directory = settings.model_directory()
    logs.configure(settings.server.log_format)
    config = replace(settings.engine, prefix_cache="on") if settings.engine.prefix_cache == "auto" else settings.engine
    with Bar(f"loading {directory.name}", "model.loading", "tensors") as loading:

        def open_model() -> AbstractAsyncContextManager[EngineFace]:
            if settings.cluster.several:
                from engine.node.opening import open_cluster

                return open_cluster(directory, config, settings.cluster, progress=loading.update)
            return invocation.open_engine(directory, config, progress=loading.update)

        async def announce(address: str, engine: EngineFace) -> None:
            loading.close()
            log.info("server.opened", address=address, model=engine.model_name, context_max=engine.context_max)
            await asyncio.Event().wait()  # a signal ends it from outside

        async def live() -> None:
            with ended_with_its_device(config):
                await invocation.serve(open_model, settings.server, announce)

        uvloop.run(live())
    return 0


COMMAND = Command("serve", "answer OpenAI-shaped requests over HTTP", configure, run)
