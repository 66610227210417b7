"""The process of one node: loads its layers, listens, and does what the head that comes asks of its stage.

Holds the stage, the channels to the head and to the stages beside, and at most one head. Knows no requests and no HTTP.

Invariants:
1. The node listens from the start; a head that comes early waits for the weights, the doctor does not.
2. One head at a time. Another one is refused while the present one is heard; its sessions are let go of when it is gone, and the arena,
   the weights and the process stay.
3. A stage beside this one that is lost ends the step under way with its reason, and nothing else; the head says when to meet again.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from engine.device import check_device
from engine.errors import NotAdmitted
from engine.model.config import ModelConfig
from engine.node import calls
from engine.node.address import Address
from engine.node.agreement import DOCTOR_TERMS, fingerprint_of, stage_terms
from engine.node.answering import Answering, Taker
from engine.node.held_stage import HeldStage, NodeSetup, held_stage
from engine.node.hosting import Apart, Hosting, Neighbours
from engine.node.passage import Passage
from engine.node.visit import answer_doctor
from engine.node.waiting_room import Tasks
from engine.node.wire import failure_of
from engine.protocol import Progress
from streams import Closed, PeerLost, Reason, TcpChannel, connect, listen

__all__ = ["Node"]

_log = structlog.get_logger("engine")


@dataclass(slots=True)
class _Head:
    """A head. `hosting`, and all calls but `begin`: once it has the node."""

    channel: TcpChannel
    takers: dict[str, Taker]
    answering: Answering
    hosting: Hosting | None = None


class Node:
    """One node. `run` is its life."""

    def __init__(self, setup: NodeSetup, facts: ModelConfig) -> None:
        self._setup = setup
        self._fingerprint = fingerprint_of(facts, setup.config, setup.limits)
        self._terms = stage_terms(self._fingerprint, setup.stages, setup.stage)
        self._stage: asyncio.Future[HeldStage] = asyncio.get_running_loop().create_future()
        self._head: _Head | None = None
        self._before: TcpChannel | None = None
        self._behind: TcpChannel | None = None
        self._met = asyncio.Event()  # the stage before has come
        self._releasing = asyncio.Lock()
        self._ending = False

    @property
    def held(self) -> HeldStage | None:
        """Its stage, once that is open: for those who measure."""
        return self._stage.result() if self._stage.done() and not self._stage.exception() else None

    async def run(self, address: Address, told: Callable[[int], None], progress: Progress | None = None) -> None:
        """Until cancelled. Args: told: called with the port it listens on.

        Raises: BadModel, NotAdmitted; StreamError: the address; DeviceFailed: nothing goes on in this process.
        """
        setup = self._setup
        listener = await listen(
            address.host, address.port, key=setup.key, terms=self._terms, others=(DOCTOR_TERMS,), limits=setup.limits
        )  # fmt: skip
        try:
            told(listener.port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_stage(progress), name="stage")
                tasks = Tasks(group)
                try:
                    while True:
                        self._meet(await listener.accept(), tasks)
                finally:
                    await self._end()
        except BaseExceptionGroup as failure:
            raise failure.exceptions[0] from None  # of the stage: the other tasks raise nothing
        finally:
            await listener.close()

    async def _keep_stage(self, progress: Progress | None) -> None:
        """Have a stage as long as the node lives."""
        try:
            async with held_stage(self._setup, progress) as stage:
                self._stage.set_result(stage)
                _log.info("node.ready", stage=self._setup.stage, layers=str(self._setup.stages[self._setup.stage]))
                await stage.lost.wait_done()
                check_device(stage.lost)
        except BaseException as error:
            if not self._stage.done():
                self._stage.set_exception(error)
                self._stage.exception()  # whoever waits for it hears of it; that nobody does is no mistake
            raise

    def _meet(self, channel: TcpChannel, tasks: Tasks) -> None:
        peer = channel.peer
        if peer.fingerprint == DOCTOR_TERMS.fingerprint:
            answer_doctor(channel, self._setup.key, self._fingerprint, tasks.run)
        elif peer.stage == len(self._setup.stages) - 1:
            self._meet_head(channel, tasks)
        elif peer.stage == self._setup.stage - 1:
            if self._before is not None:
                tasks.run(self._before.close(), "close")
            self._before = channel
            channel.ended.on_done(lambda event: self._apart(channel, event.error()))
            self._met.set()
        else:
            _log.warning("channel.refused", peer=channel.name, reason="unexpected", error=f"stage {peer.stage} has nothing to say here")
            tasks.run(channel.close(), "close")

    # The head.

    def _meet_head(self, channel: TcpChannel, tasks: Tasks) -> None:
        takers: dict[str, Taker] = {}
        head = _Head(channel, takers, Answering(channel, takers, tasks.run))
        takers["begin"] = Taker(type(None), lambda _: self._begin(head, tasks))

    async def _begin(self, head: _Head, tasks: Tasks) -> calls.Facts:
        """The head takes the node, once its weights are there. Raises NotAdmitted: another one has it; what opening raised."""
        present = self._head
        if present is not None and not present.channel.ended.done():
            raise NotAdmitted(f"node {self._setup.stage} is driven by the head at {present.channel.name}; stop that one", retry_after_s=5.0)
        self._head = head
        head.channel.ended.on_done(lambda _: self._gone(head, tasks))
        stage = await asyncio.shield(self._stage)
        async with self._releasing:  # an earlier head's sessions have gone
            pass
        if head.channel.ended.done():
            raise Closed("the head is gone")
        passage = Passage(head.channel, stage.copies, stage.device)
        neighbours = Neighbours(head=passage, control=head.channel)
        if self._setup.stage == len(self._setup.stages) - 2:
            neighbours.behind = passage
        head.hosting = hosting = Hosting(stage.follower, stage.form, stage.arrives, neighbours, head.answering.tell)
        head.takers |= {
            "part": Taker(type(None), lambda _: self._part()),
            "join": Taker(calls.Join, lambda asked: self._join(hosting, asked)),
            "joined": Taker(type(None), lambda _: self._joined(hosting)),
            "idle": Taker(type(None), lambda _: stage.follower.idle()),
            **hosting.takers(),
        }
        _log.info("head.met", head=head.channel.name, stage=self._setup.stage)
        return await asyncio.to_thread(stage.facts)

    def _gone(self, head: _Head, tasks: Tasks) -> None:
        if not self._ending:
            tasks.run(self._release(head), "release")

    async def _release(self, head: _Head) -> None:
        """The head is gone."""
        async with self._releasing:
            if self._head is head:
                self._head = None
            await self._part()
            if head.hosting is not None:
                sessions = head.hosting.sessions
                head.hosting.release()
                await self._stage.result().follower.idle()
                _log.info("head.left", head=head.channel.name, sessions=sessions)

    # The stages beside.

    async def _part(self) -> None:
        """Let go of the channels to the stages beside this one."""
        before, behind, self._before, self._behind = self._before, self._behind, None, None
        self._met.clear()
        for channel in (before, behind):
            if channel is not None:
                await channel.close()

    def _apart(self, channel: TcpChannel, error: BaseException | None) -> None:
        """A channel to a stage beside this one has ended; unless one of the two let go of it, the head must join them anew.

        Who lets go does so because the head said so, or ends, which the head hears from there: told of it as of a loss, it would have the
        stages part again, and hear of that.
        """
        if isinstance(error, PeerLost) and error.reason is Reason.CLOSED:
            return
        if channel in (self._before, self._behind) and self._head is not None and error is not None:
            self._head.answering.tell(Apart(failure_of(error)))

    async def _join(self, hosting: Hosting, asked: calls.Join) -> None:
        """Connect to the stage behind. Raises PeerLost."""
        setup, stage = self._setup, self._stage.result()
        self._behind = await connect(asked.host, asked.port, key=setup.key, terms=self._terms, limits=setup.limits)
        behind = self._behind
        behind.ended.on_done(lambda event: self._apart(behind, event.error()))
        hosting.neighbours.behind = Passage(behind, stage.copies, stage.device)

    async def _joined(self, hosting: Hosting) -> None:
        """Wait until the stage before has connected. Raises PeerLost."""
        try:
            async with asyncio.timeout(self._setup.limits.silence_ms_max / 1000):
                await self._met.wait()
        except TimeoutError as error:
            raise PeerLost(Reason.UNREACHABLE, f"the stage before stage {self._setup.stage} has not connected") from error
        assert self._before is not None, "met and not there"
        arrivals = self._stage.result().arrivals  # one for the life of the stage: recorded steps know its buffers
        arrivals.rebind(self._before, partial(self._apart, self._before))
        hosting.neighbours.before = arrivals

    async def _end(self) -> None:
        """The process ends."""
        head, self._ending = self._head, True
        await self._part()
        if head is not None:
            if head.hosting is not None:
                head.hosting.release()
            await head.channel.close()
        if self._stage.done() and not self._stage.cancelled() and self._stage.exception() is None:
            await self._stage.result().follower.idle()
