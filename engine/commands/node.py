"""`forebay node`: one stage of a model in a process of its own, for a head on another machine. Runs until a signal.

Everything that decides about rows and steps (formats, dtype, sizes) must be as the head's: the same TOML file on every machine is the
simplest. Exit code: 0 after a signal.
"""

import argparse

import structlog
import uvloop

from engine import logs
from engine.commands.command import Command, Invocation
from engine.commands.display import Bar
from engine.commands.signals import Signals
from engine.commands.terminal import ended_with_its_device
from engine.errors import BadSetting
from engine.node.keys import key_of, limits_of, stages_setting
from engine.remote import Unreachable
from engine.settings import SETTINGS, add_flags
from streams import StreamError

__all__ = ["COMMAND"]

log = structlog.get_logger()

_OWN = ("listen", "stage", "nodes", "key_file", "peer_timeout", "demo", "log_format")


def configure(parser: argparse.ArgumentParser) -> None:
    """The engine's settings, and where the node stands."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=SETTINGS["model"].meaning)
    add_flags(parser, _OWN)
    add_flags(parser, (name for name, setting in SETTINGS.items() if setting.place == "engine" and name != "tape"))


def run(invocation: Invocation) -> int:
    """Returns 0. Raises BadModel, BadSetting, NotAdmitted; Unreachable: the address cannot be had."""
    settings = invocation.settings
    cluster, directory, key = settings.cluster, settings.model_directory(), key_of(settings.cluster)
    if cluster.listen is None:
        raise BadSetting("no address: say where the node listens with --listen host:port")
    address = cluster.listen
    logs.configure(settings.server.log_format)
    from engine.local_stages import cut_layers
    from engine.model.source import config_of
    from engine.node.held_stage import NodeSetup
    from engine.node.process import Node

    facts = config_of(directory, settings.engine.load_format)
    stages = cut_layers(stages_setting(settings.engine.stages, cluster), facts.layers)
    if not 0 <= cluster.stage < len(stages) - 1:
        given = f"--stage {cluster.stage}" if cluster.stage >= 0 else "no stage: say which one the node has with --stage N"
        raise BadSetting(f"{given}: of {len(stages)} stages nodes have 0 to {len(stages) - 2}, the last is the head's")
    setup = NodeSetup(directory, settings.engine, stages, cluster.stage, key, limits_of(cluster))

    def told(port: int) -> None:
        log.info("node.listening", address=str(address._replace(port=port)), stage=cluster.stage, stages=len(stages))

    async def live() -> None:
        signals = Signals()
        loading = Bar(f"loading stage {cluster.stage} of {directory.name}", "model.loading", "tensors")
        with signals.caught(), ended_with_its_device(settings.engine), loading:
            async with signals.until_signal():
                await Node(setup, facts).run(address, told, loading.update)

    try:
        uvloop.run(live())
    except StreamError as error:
        raise Unreachable(f"{error}; choose another --listen") from error
    return 0


COMMAND = Command("node", "one stage of a model, for forebay serve --nodes on another machine", configure, run)
