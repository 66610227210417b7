"""`sealed`: inside it, code on this thread that asks the real world for time, waits, files, sockets, threads or processes gets `Escaped`.

A virtual run is reproducible only if nothing outside decides anything; this makes the usual ways out loud instead of lucky.

Caught at the call: `time.time/monotonic/perf_counter` and their `_ns` forms and `time.sleep` called from outside the standard library and
test tools; `open`, `socket.socket`, `threading.Thread.start`, `subprocess.Popen`; and on the loop: timers (so `asyncio.sleep(x > 0)`,
`timeout`, `wait_for`), executors (so `to_thread`), connections, servers, pipes, subprocesses, readers and writers, name look-ups.

Not caught: functions imported by name before the seal (`from time import monotonic`), `os.read/write/open`, unseeded randomness,
C code of others, and other threads.
"""

import asyncio
import builtins
import io
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from streams.errors import Escaped

__all__ = ["sealed"]

_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
_MAY_ASK_TIME = sys.stdlib_module_names | {
    "_pytest",
    "hypothesis",
    "pluggy",
    "pytest",
    "pytest_asyncio",
    "rich",
    "structlog",
    "torch",
    "uvloop",
}
_MAY_OPEN = frozenset(
    {"_pytest", "hypothesis", "importlib", "inspect", "linecache", "pytest", "tokenize", "torch", "traceback", "zipimport"}
)
_LOOP_CALLS = (
    "run_in_executor", "create_connection", "create_server", "create_unix_connection", "create_unix_server", "create_datagram_endpoint",
    "connect_accepted_socket", "connect_read_pipe", "connect_write_pipe", "subprocess_exec", "subprocess_shell", "getaddrinfo",
    "getnameinfo", "add_reader", "add_writer", "sock_recv", "sock_recv_into", "sock_sendall", "sock_connect", "sock_accept", "sendfile",
)  # fmt: skip


@contextmanager
def sealed() -> Iterator[None]:
    """Seal the calling thread, and the loop running on it if one is, until the block ends. Not re-entrant.

    Raises: Escaped, at the call that would leave the virtual world.
    """
    with ExitStack() as undo:
        for name in _CLOCKS:
            _replace(undo, time, name, _guarded(getattr(time, name), f"time.{name}", _MAY_ASK_TIME))
        _replace(undo, time, "sleep", _guarded(time.sleep, "time.sleep", frozenset()))
        opened = _guarded(open, "open", _MAY_OPEN)
        _replace(undo, builtins, "open", opened)
        _replace(undo, io, "open", opened)
        for owner, name, label in (
            (socket.socket, "__init__", "socket.socket"),
            (threading.Thread, "start", "threading.Thread.start"),
            (subprocess.Popen, "__init__", "subprocess.Popen"),
        ):
            _replace(undo, owner, name, _guarded(getattr(owner, name), label, frozenset()))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            _seal_loop(undo, loop)
        yield


def _seal_loop(undo: ExitStack, loop: asyncio.AbstractEventLoop) -> None:
    for name in _LOOP_CALLS:
        if hasattr(loop, name):
            _replace(undo, loop, name, _refuse(f"the loop's {name}"))

    def call_later(delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        if delay > 0:
            raise Escaped(f"a virtual run asked the loop for a timer of {delay} s: wait on the backend's clock instead")
        return loop.call_soon(callback, *args, context=context)

    _replace(undo, loop, "call_later", call_later)
    _replace(undo, loop, "call_at", _refuse("the loop's call_at"))


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the seal ends; what was only inherited is deleted again, not written back."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    undo.callback(lambda: setattr(owner, name, before) if own else delattr(owner, name))


def _guarded(real: Callable[..., Any], name: str, allowed: frozenset[str]) -> Callable[..., Any]:
    """`real`, for other threads and for callers in `allowed`; Escaped for the rest."""
    thread = threading.get_ident()

    def asked(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            caller = str(sys._getframe(1).f_globals.get("__name__", "?"))
            if caller.partition(".")[0] not in allowed:
                raise Escaped(f"{caller} called {name} inside a virtual run")
        return real(*args, **kwargs)

    return asked


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise Escaped(f"a virtual run asked for {name}")

    return refused
