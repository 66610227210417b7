"""The head's side of a cluster: finds the nodes, takes them, joins their stages, and does so again for whoever was lost.

Holds a `Far` and a `RemoteFollower` a node. Knows no sessions: whoever does is told when a node is lost and when all are there again.

Invariants:
1. The cluster is whole from the end of a meeting until the first loss, and nobody is asked for anything new in between.
2. A node that is lost is looked for until it is found; the others keep their process, their arena and what they hold.
3. Each meeting joins all stages anew: nothing of an earlier one can arrive late.
4. A node that answers and does not belong (other weights, cut or stage) ends a head that opens, with both sides' words: no time makes it
   right. One that comes in the place of a lost node ends nothing: sessions wait for one that belongs, and the log says what differs.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog
import torch

from engine.config import EngineConfig
from engine.errors import BadSetting, NotAdmitted
from engine.model.config import ModelConfig
from engine.node import calls
from engine.node.address import Address
from engine.node.agreement import fingerprint_of, stage_terms
from engine.node.far import Far
from engine.node.handover import Numbers
from engine.node.passage import Form, Passage
from engine.node.remote import RemoteFollower
from kernels.layout import BlockLayout
from memory.row import key_format, key_layout, row_layout
from streams import ChannelLimits, PeerLost, Reason, Stream, StreamError, TcpChannel, connect

__all__ = ["Head", "HeadSetup", "Locate"]

Locate: TypeAlias = Callable[[], Awaitable[Address]]  # where a node listens now; raises StreamError while it does nowhere

_AGAIN_S = 0.25
_SAY_AGAIN_S = 10.0
_FOREIGN = (Reason.MISMATCH, Reason.UNAUTHENTICATED, Reason.VERSION)
_log = structlog.get_logger("engine")


@dataclass(frozen=True, slots=True)
class HeadSetup:
    """A cluster as its head sees it. `locate`: of each node, in order of their stages; the last stage is the head's."""

    model: ModelConfig
    config: EngineConfig
    stages: tuple[range, ...]
    locate: Sequence[Locate]
    key: bytes = field(repr=False)
    limits: ChannelLimits


class Head:
    """One cluster. Loop thread only. `followers` are of use inside `met`."""

    def __init__(
        self, setup: HeadSetup, dtype: torch.dtype, device: torch.device, copies: Stream, marks: Mapping[str, str]
    ) -> None:  # fmt: skip
        """Args: dtype, device: of the head's own stage. copies: brings its tensors to and from host memory. marks: see `marks_of`."""
        assert len(setup.locate) == len(setup.stages) - 1, f"{len(setup.locate)} nodes for {len(setup.stages)} stages"
        self._setup = setup
        self._dtype = dtype
        self._marks = marks
        self._terms = stage_terms(fingerprint_of(setup.model, setup.config, setup.limits), setup.stages, len(setup.stages) - 1)
        self._fars = [Far(f"of stage {stage}", Passage(None, copies, device)) for stage in range(len(setup.locate))]
        self._channels: list[TcpChannel | None] = [None] * len(setup.locate)
        self._at: list[Address | None] = [None] * len(setup.locate)
        numbers, last = Numbers(), len(setup.locate) - 1
        self.followers = tuple(
            RemoteFollower(far, setup.model, layers, self._layout(layers), self._form(layers), numbers, last=stage == last)
            for stage, (far, layers) in enumerate(zip(self._fars, setup.stages, strict=False))
        )
        self.on_lost: Callable[[BaseException], None] = lambda error: None  # before anybody else hears of what failed with it
        self.on_whole: Callable[[], Awaitable[None]] = _nothing  # all are there, at first and after each loss
        self._lost = asyncio.Event()
        self._leaving = self._opened = False
        for far in self._fars:
            far.on_end = self._one_lost

    def _layout(self, layers: range) -> BlockLayout:
        facts, config = self._setup.model, self._setup.config
        keys = key_format(config.index_key_format, config.row_format)
        return BlockLayout(
            row_layout(config.row_format, facts.latent, facts.rope), key_layout(keys, facts.index_width),
            facts.local_groups(layers, mtp=False),
        )  # fmt: skip

    def _form(self, layers: range) -> Form:
        facts = self._setup.model
        picks = 0 if facts.full_layers[layers.stop] else facts.top_k
        return Form(facts.hidden, self._dtype, picks, self._setup.config.append_chunk_rows)

    @asynccontextmanager
    async def met(self) -> AsyncIterator[None]:
        """Meet all nodes, and again whoever is lost, for the length of the block. Raises BadSetting: one does not belong."""
        failure: BaseException | None = None
        try:
            await self._meet_all()
            self._opened = True
            await self.on_whole()  # one may have been met, lost and met again
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(), name="nodes")
                try:
                    yield
                # Kept aside so that it leaves as it was, not inside an exception group.
                except BaseException as error:
                    failure = error
                watching.cancel()
        except BaseExceptionGroup as others:
            raise others.exceptions[0] from None
        finally:
            self._leaving = True
            for channel in self._channels:
                if channel is not None:
                    await channel.close()
        if failure is not None:
            raise failure

    async def _watch(self) -> None:
        while True:
            await self._lost.wait()
            await self._meet_all()
            await self.on_whole()

    def _one_lost(self, error: BaseException) -> None:
        """A connection has ended, or a stage cannot reach its neighbour."""
        if self._leaving:
            return
        if not self._lost.is_set():
            self._lost.set()
            _log.warning("node.lost", error=str(error))
        self.on_lost(error)

    async def _meet_all(self) -> None:
        """Until every node is met and all stages are joined."""
        while True:
            self._lost.clear()
            try:
                for stage in range(len(self._fars)):
                    if self._fars[stage].lost is not None:
                        await self._find(stage)
                await self._join_all()
            except StreamError as error:
                _log.warning("cluster.not_joined", error=str(error))
                await asyncio.sleep(_AGAIN_S)
                continue
            if not self._lost.is_set():
                _log.info("cluster.whole", nodes=[str(at) for at in self._at])
                return

    async def _find(self, stage: int) -> None:
        """Meet one node, however long it takes. Raises BadSetting: it does not belong, and the head opens."""
        loop = asyncio.get_running_loop()
        said, told = loop.time(), False
        while True:
            try:
                await self._meet(stage)
                return
            except (StreamError, NotAdmitted, BadSetting) as error:
                foreign = isinstance(error, BadSetting) or (isinstance(error, PeerLost) and error.reason in _FOREIGN)
                if foreign and not self._opened:
                    if isinstance(error, BadSetting):
                        raise
                    raise BadSetting(f"the node of stage {stage} at {self._at[stage]}: {error}") from error
                if foreign and not told:
                    told = True
                    _log.error("node.foreign", stage=stage, address=str(self._at[stage]), error=str(error), advice="start one that belongs")
                if loop.time() - said >= _SAY_AGAIN_S:
                    said = loop.time()
                    _log.warning("node.awaited", stage=stage, address=str(self._at[stage] or "?"), error=str(error))
            await asyncio.sleep(_AGAIN_S)

    async def _meet(self, stage: int) -> None:
        """Raises StreamError, NotAdmitted: not now; BadSetting: never."""
        setup, far, before = self._setup, self._fars[stage], self._channels[stage]
        if before is not None:
            await before.close()  # it may have been given up from here alone: the node must hear of it
        address = self._at[stage] = await setup.locate[stage]()
        channel = await connect(address.host, address.port, key=setup.key, terms=self._terms, limits=setup.limits)
        self._channels[stage] = channel
        try:
            self._check_stage(stage, channel)
            far.met(channel, f"{address} (stage {stage})")
            far.facts = await far.ask("begin", None, calls.Facts)
            self._check(stage, far.facts)
        except BaseException:
            await channel.close()
            raise
        far.held = far.facts.statistics
        _log.info("node.met", stage=stage, address=str(address), process=far.facts.process)

    def _check_stage(self, stage: int, channel: TcpChannel) -> None:
        if channel.peer.stage != stage:
            raise BadSetting(
                f"the node at {self._at[stage]} is that of stage {channel.peer.stage}, and stage {stage} was expected there: name nodes in "
                "the order of their stages, and start each with a --stage of its own"
            )

    def _check(self, stage: int, facts: calls.Facts) -> None:
        block_bytes = self.followers[stage].layout.block_bytes
        if facts.dtype != str(self._dtype):
            raise BadSetting(f"the node of stage {stage} computes in {facts.dtype}, the head in {self._dtype}: give all the same --dtype")
        if facts.block_bytes != block_bytes:
            raise BadSetting(f"the node of stage {stage} has blocks of {facts.block_bytes} bytes, the head counts {block_bytes}")
        other = [part for part, mark in facts.marks.items() if self._marks.get(part, mark) != mark]
        if other:
            raise BadSetting(
                f"the node of stage {stage} at {self._at[stage]} has other weights than the head: {other[0]} is "
                f"{facts.marks[other[0]]} there and {self._marks[other[0]]} here, "
                f"{len(other)} of {len(facts.marks)} parts differ; give all the same checkpoint"
            )
        unseen = sum(f"layer {layer}" not in self._marks for layer in self._setup.stages[stage])
        if unseen and self._setup.config.load_format != "random":
            _log.warning("node.weights_not_compared", stage=stage, address=str(self._at[stage]), layers=unseen)

    async def _join_all(self) -> None:
        """Stages connect to those behind them. Raises StreamError."""
        for far in self._fars:
            await far.ask("part", None, type(None))
        for stage in range(len(self._fars) - 1):
            behind = self._at[stage + 1]
            assert behind is not None, "joined before it was met"
            await self._fars[stage].ask("join", calls.Join(behind.host, behind.port), type(None))
            await self._fars[stage + 1].ask("joined", None, type(None))


async def _nothing() -> None:
    pass
