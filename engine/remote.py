"""A running server as its clients see it: where it listens, and why it cannot be reached. Knows no route."""

import errno
import os

from engine.config import ServerConfig
from engine.errors import ForebayError

__all__ = ["Unreachable", "address_of", "reason_of"]


class Unreachable(ForebayError):
    """Nobody answers at the address, or not as a server of ours."""

    exit_code = 5

    @classmethod
    def at(cls, config: ServerConfig, error: BaseException) -> "Unreachable":
        """For what a client library raised."""
        return cls(f"no server answers at {address_of(config)}: {reason_of(error)}; start one, or name it with --host and --port")


def address_of(config: ServerConfig) -> str:
    """Where a server with these settings listens."""
    return f"http://[{config.host}]:{config.port}" if ":" in config.host else f"http://{config.host}:{config.port}"


def reason_of(error: BaseException) -> str:
    """Why somebody could not be reached, on one line."""
    number = getattr(error, "errno", None) or 0  # failed look-ups of names have numbers of their own
    return os.strerror(number) if number in errno.errorcode else (str(error).splitlines() or [type(error).__name__])[0]
