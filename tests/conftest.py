"""What every test shares: one torch thread, logging as it was, both event loops, poisoned memory on request.

Async tests run on asyncio's loop in debug mode. A module that wants both loops says `pytestmark = pytest.mark.both_loops`: its async
tests then run once there and once on uvloop.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
import torch
import uvloop

torch.set_num_threads(1)


class _DebugLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop in debug mode: calls from the wrong thread and coroutines nobody awaited become errors."""

    def set_debug(self, enabled: bool) -> None:
        """Stays on: the runner that pytest-asyncio makes would switch it off."""
        super().set_debug(True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "both_loops: async tests run on asyncio in debug mode and on uvloop")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Which loops an async test runs on."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": _DebugLoop}
    if item.get_closest_marker("both_loops"):
        loops["uvloop"] = uvloop.new_event_loop
    return loops


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """A test that configures logging leaves the next one none of it."""
    kept, handlers, level = structlog.get_config(), logging.root.handlers[:], logging.root.level
    yield
    structlog.configure(**kept)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch.empty, empty_like and Tensor.new_empty return NaN (integers: a large negative value), so that unwritten output shows."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(torch.iinfo(tensor.dtype).max if tensor.dtype == torch.uint8 else torch.iinfo(tensor.dtype).min + 1)

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        real = getattr(owner, name)

        def poisoned(*args: Any, _real: Any = real, **kwargs: Any) -> torch.Tensor:
            return poison(_real(*args, **kwargs))

        monkeypatch.setattr(owner, name, poisoned)
