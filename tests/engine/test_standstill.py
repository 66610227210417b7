"""A loop that stands still ends its process, and no other loop does."""

import asyncio
import threading

import pytest
import torch

import engine.commands.terminal
import engine.standstill
from engine.commands.terminal import ended_with_its_device
from engine.config import EngineConfig
from engine.standstill import SAID, Standstill, ended_at_a_standstill


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "standstill"]


def test_looks_in_a_row_count() -> None:
    """One turn between two looks, and they are counted from the beginning; a process that was stopped looks as little as it turns."""
    still = Standstill(looks_max=3)
    still.turned()
    assert [still.look() for _ in range(3)] == [False, False, False]
    still.turned()
    assert [still.look() for _ in range(4)] == [False, False, False, True]


async def test_a_loop_that_stands_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, from another thread, with the line that says why; the watcher is gone then."""
    monkeypatch.setattr(engine.standstill, "_LOOK_S", 0.001)
    ended, said = threading.Event(), list[str]()

    def end(why: str) -> None:
        said.append(why)
        ended.set()

    monkeypatch.setattr(engine.standstill, "LOOKS_MAX", 5)
    with ended_at_a_standstill(end):
        assert ended.wait(30), "nobody noticed"  # on the loop, as a call of a driver
    assert said == [SAID]
    assert not watchers()


async def test_a_loop_that_turns_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often somebody looks; afterwards no thread and no timer is left."""
    monkeypatch.setattr(engine.standstill, "_LOOK_S", 0.001)
    looks, enough, said = 0, asyncio.Event(), list[str]()
    loop, look = asyncio.get_running_loop(), Standstill.look

    def counted(still: Standstill) -> bool:
        nonlocal looks
        looks += 1
        if looks == 200:
            loop.call_soon_threadsafe(enough.set)
        return look(still)

    monkeypatch.setattr(Standstill, "look", counted)
    monkeypatch.setattr(engine.standstill, "LOOKS_MAX", 10_000)
    with ended_at_a_standstill(said.append):
        assert len(watchers()) == 1
        await enough.wait()
    assert not said
    assert not watchers()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_only_a_command_on_a_device_is_watched(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the exit code of a device that failed, and one line."""
    ended, said = threading.Event(), list[object]()

    def leave(code: int) -> None:
        said.append(code)
        ended.set()

    monkeypatch.setattr(engine.standstill, "_LOOK_S", 0.001)
    monkeypatch.setattr(engine.standstill, "LOOKS_MAX", 5)
    monkeypatch.setattr(engine.commands.terminal, "device_of", lambda _: torch.device(device))
    monkeypatch.setattr(engine.commands.terminal, "complain", said.append)
    monkeypatch.setattr(engine.commands.terminal, "leave_at_once", leave)
    with ended_with_its_device(EngineConfig()):
        assert len(watchers()) == int(device == "cuda")
        if device == "cuda":
            assert ended.wait(30), "nobody noticed"
    assert said == ([SAID, 70] if device == "cuda" else [])
