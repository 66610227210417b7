"""Calls to a node and their answers: order, failures of every class, a full line, and the end of a channel."""

import asyncio

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.errors import (
    ArchiveFailed,
    ArchiveRefused,
    BadRequest,
    ForebayError,
    NeverFits,
    NotAdmitted,
    SessionBroken,
    SessionBusy,
    UnknownSession,
)  # fmt: skip
from engine.node.answering import Taker
from engine.node.wire import NodeFailed, error_of, failure_of
from memory.errors import ArenaFull, BarrierFailed, CopybackInFlight, DoesNotFit, PoolExhausted
from streams import Closed, Event, Full, PeerLost, Reason, TransferFailed
from tests.engine.node.node_world import line


class Sum(msgspec.Struct):
    one: int
    other: int


async def test_calls_begin_in_their_order_and_are_answered_when_they_are_done() -> None:
    """What a call begins may end after what a later one begins; each answer reaches its own caller."""
    begun: list[int] = []
    slow: Event[int] = Event("slow")

    def add(asked: Sum) -> int | Event[int]:
        begun.append(asked.one)
        return slow if asked.one == 0 else asked.one + asked.other

    async with line({"add": Taker(Sum, add)}) as held:
        first = held.caller.call("add", Sum(0, 7), int)
        others = [held.caller.call("add", Sum(one, 1), int) for one in range(1, 600)]
        assert [await other for other in others] == list(range(2, 601))
        assert not first.done()
        slow.settle(7, None)
        assert await first == 7
    assert begun == list(range(600))


async def test_awaited_work_does_not_hold_up_other_calls() -> None:
    """A call whose work waits for a later call is answered after that one."""
    gate = asyncio.Event()

    async def wait(_: None) -> str:
        await gate.wait()
        return "open"

    async with line({"wait": Taker(type(None), wait), "open": Taker(type(None), lambda _: gate.set())}) as held:
        waiting = held.caller.call("wait", None, str)
        assert await held.caller.call("open", None, type(None)) is None
        assert await waiting == "open"


FAILURES = [
    DoesNotFit(host_missing_bytes=7, device_missing_bytes=9),
    ArenaFull(5),
    PoolExhausted(6),
    NotAdmitted("no room", retry_after_s=2.5),
    NotAdmitted("never"),
    NeverFits("too long"),
    SessionBroken("a copy failed"),
    BarrierFailed("mirrored 3, logical 4"),
    CopybackInFlight("rows 64 to 128"),
    TransferFailed("no bytes"),
    PeerLost(Reason.SILENT, "nothing was heard"),
    ArchiveRefused("foreign", "place", "another model"),
    ArchiveFailed("the disk is full"),
    BadRequest("no such place", field="place"),
    SessionBusy("it is exporting", field="session"),
    UnknownSession("no session 'x'", field="session"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
async def test_a_failure_comes_out_as_what_went_in(error: Exception) -> None:
    """Class, line and numbers; kinds of `DoesNotFit` come as that, since the numbers say all."""

    def fail(_: None) -> None:
        raise error

    failed: Event[int] = Event("later")
    async with line({"fail": Taker(type(None), fail), "later": Taker(type(None), lambda _: failed)}) as held:
        calls = [held.caller.call("fail", None, type(None)), held.caller.call("later", None, int)]
        failed.settle(None, error)
        for call in calls:
            await call.wait_done()
            got = call.error()
            assert type(got) is (DoesNotFit if isinstance(error, DoesNotFit) else type(error))
            assert str(got) == str(error)
            for name in ("retry_after_s", "field", "reason", "status", "host_missing_bytes", "device_missing_bytes"):
                assert getattr(got, name, None) == getattr(error, name, None)


def test_a_failure_of_no_known_class_keeps_its_name() -> None:
    """It is the node's, and says so in one line."""
    found = error_of(failure_of(ZeroDivisionError("division\nby zero")), "10.0.0.2:7000")
    assert isinstance(found, NodeFailed)
    assert str(found) == "10.0.0.2:7000: ZeroDivisionError: division by zero"


async def test_a_call_nobody_knows_or_that_is_malformed_is_refused_and_the_next_one_served() -> None:
    """The answer says which; the channel goes on."""
    async with line({"add": Taker(Sum, lambda asked: asked.one + asked.other)}) as held:
        with pytest.raises(ForebayError, match="no call 'subtract'"):
            await held.caller.call("subtract", None, int)
        with pytest.raises(NodeFailed, match="ValidationError"):
            await held.caller.call("add", {"one": "x"}, int)
        assert await held.caller.call("add", Sum(1, 2), int) == 3


async def test_an_assertion_on_the_node_is_logged_there() -> None:
    """It is a mistake of ours: the head gets its line, the node's log its trace."""

    def wrong(_: None) -> None:
        raise AssertionError("rows 3, not 4")

    async with line({"wrong": Taker(type(None), wrong)}) as held:
        with capture_logs() as logs, pytest.raises(NodeFailed, match="rows 3, not 4"):
            await held.caller.call("wrong", None, type(None))
        assert [(log["event"], log["call"]) for log in logs] == [("call.failed", "wrong")]


async def test_one_call_too_many_is_full_and_room_comes_back() -> None:
    """The limit is of calls without an answer; an answer makes room."""
    event: Event[None] = Event("held")
    async with line({"hold": Taker(type(None), lambda _: event)}, calls_max=3) as held:
        calls = [held.caller.call("hold", None, type(None)) for _ in range(3)]
        with pytest.raises(Full, match="3 calls"):
            held.caller.call("hold", None, type(None))
        event.settle(None, None)
        for call in calls:
            await call
        await held.caller.call("hold", None, type(None))


async def test_everybody_gets_the_end_of_the_channel() -> None:
    """When the node's end is gone every open call fails with the one PeerLost, and so does every later one."""
    event: Event[None] = Event("held")
    async with line({"hold": Taker(type(None), lambda _: event)}) as held:
        calls = [held.caller.call("hold", None, type(None)) for _ in range(5)]
        await held.node.close()
        for call in calls:
            with pytest.raises(PeerLost):
                await call
        assert len({id(call.error()) for call in calls}) == 1
        with pytest.raises(PeerLost):
            held.caller.call("hold", None, type(None))
        event.settle(None, None)  # its answer goes nowhere, and nothing breaks


async def test_after_our_own_close_calls_fail_as_closed() -> None:
    """Ours, not the node's."""
    event: Event[None] = Event("held")
    async with line({"hold": Taker(type(None), lambda _: event)}) as held:
        call = held.caller.call("hold", None, type(None))
        await held.head.close()
        with pytest.raises(Closed):
            await call


async def test_what_nobody_asked_for_is_told_in_order() -> None:
    """More of it than are asked for ahead, between answers."""
    async with line({"add": Taker(Sum, lambda asked: asked.one + asked.other)}) as held:
        for number in range(400):
            held.answering.tell(number)
        assert await held.caller.call("add", Sum(1, 1), int) == 2
        assert [msgspec.msgpack.decode(each) for each in held.told] == list(range(400))


async def test_an_answer_that_cannot_be_read_ends_that_call_alone() -> None:
    """A node of another version answers with another type."""
    async with line({"add": Taker(Sum, lambda asked: "three"), "one": Taker(type(None), lambda _: 1)}) as held:
        with pytest.raises(PeerLost, match="answered add wrongly"):
            await held.caller.call("add", Sum(1, 2), int)
        assert await held.caller.call("one", None, int) == 1
