"""`Archives`: sessions of an engine out to directories and in from them.

Holds what is under way. Decides phases of the sessions it moves; knows no requests. Loop thread only; files are touched in threads.

Invariants:
1. A session is read out behind its barrier, in phase `exporting`, in which nobody else touches it; afterwards it is what it was.
2. A session that comes in is in nobody's sight until its last byte was checked and placed; refused, nothing of it is left.
3. Memory is let go of only when no thread reads or writes it: whoever is cancelled waits for the thread.
"""

import asyncio
import secrets
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Callable, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import structlog
import torch

from engine.archive.ahead import AHEAD, beside, held, in_order
from engine.archive.identity import Identity
from engine.archive.manifest import Manifest
from engine.archive.parts import Block
from engine.archive.places import Places
from engine.archive.reader import Reader
from engine.archive.writer import SEGMENT_BYTES, Writer
from engine.device import named_failure
from engine.errors import ArchiveFailed, ForebayError, NodeLost, NotAdmitted, SessionBroken, SessionBusy, UnknownSession
from engine.protocol import SessionId
from engine.session import Phase, Session
from engine.stage import Stage
from engine.stage_calls import Asked
from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS
from memory.append import blocks_of
from memory.errors import BarrierFailed, DoesNotFit
from memory.image import Image
from memory.session import SessionMemory
from streams import Closed, PeerLost, StreamError

__all__ = ["Archives", "Exported", "TransferProgress"]

TransferProgress: TypeAlias = Callable[[int, int], None]  # (bytes done, bytes in all); called on the loop

_BATCH_BYTES: Final = 1 << 24  # that a thread reads or writes at a time: a change of threads may take milliseconds on a busy machine
_BATCH_BLOCKS: Final = 512

_log = structlog.get_logger("engine")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did."""

    rows: int
    payload_bytes: int  # of all rows and keys in the archive
    written_bytes: int  # by this export, the manifest included
    seconds: float


class Archives:
    """Exports and imports of one engine."""

    def __init__(
        self, stage: Stage, sessions: MutableMapping[SessionId, Session], sessions_max: int, identify: Callable[[], Identity],
        wake: Callable[[], None], reclaim: Callable[[DoesNotFit], bool],
    ) -> None:  # fmt: skip
        """One a stage.

        Args: sessions: the engine's own, by id; imported ones are added. identify: makes the stage's identity, beside the loop.
            wake: called whenever requests that wait for a session or for memory may go on. reclaim: frees some memory that is missing;
            returns False when nothing more is to be had.
        """
        assert sys.byteorder == "little", "archives are little-endian, and rows go there as they are"
        self._stage = stage
        self._sessions = sessions
        self._sessions_max = sessions_max
        self._identify = identify
        self._wake = wake
        self._reclaim = reclaim
        self._identity: Identity | None = None
        self._exports: dict[Session, asyncio.Event] = {}
        self._arriving: list[_Arrival] = []
        self._closing = False

    async def known(self) -> Identity:
        """The stage's identity, made at the first call: while the device works, for it is asked."""
        if self._identity is None:
            self._identity = await beside(self._identify)
        return self._identity

    def _batch(self) -> int:
        return max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // self._stage.block_bytes))

    # Out.

    async def export(self, session: Session, path: Path, progress: TransferProgress | None) -> Exported:
        """See Engine.export_session."""
        lost = self._stage.backend.lost.done()
        if session.closing or session.phase is Phase.CLOSED or not lost:
            session.check_open()
        if session in self._exports or not (session.idle or lost):
            raise SessionBusy(f"session {session.id} is {session.phase.value}; export it between its turns", field="session")
        started, ended = time.monotonic(), asyncio.Event()
        self._exports[session] = ended
        cut_off = session.phase in (Phase.APPENDING, Phase.DECODING, Phase.BROKEN)  # by the device
        if session.memory is not None and not lost:
            session.move(Phase.EXPORTING)
        write = partial(self._write, session, session.memory, tuple(session.tokens), session.revision + cut_off)
        try:
            if lost and (self._identity is None or session.memory is None):
                raise ArchiveFailed(f"nothing of session {session.id} is there to be archived; what was archived before is as it was")
            with nullcontext() if lost else named_failure(self._stage.backend.lost):
                identity = await self.known()
                async with held(partial(Writer, path, identity, session.id)) as writer:
                    manifest = await write(identity, writer, progress)
        except BarrierFailed as error:
            if isinstance(session.broken, (PeerLost, Closed)):  # it gets its rows again when the node is back
                raise NodeLost(
                    f"session {session.id} could not be archived: a node with some of its rows is away ({session.broken})"
                ) from error
            session.move(Phase.BROKEN)
            raise SessionBroken(str(error)) from error
        except DoesNotFit as error:
            raise NotAdmitted(f"session {session.id} cannot be brought to host memory: {error}") from error
        finally:
            if session.phase is Phase.EXPORTING:
                session.move(Phase.READY)
            del self._exports[session]
            ended.set()
            self._wake()
        done = Exported(manifest.rows, manifest.payload_bytes, writer.written_bytes, time.monotonic() - started)
        _log.info(
            "session.exported", session_id=session.id, rows=done.rows, payload_bytes=done.payload_bytes, written_bytes=done.written_bytes,
            seconds=round(done.seconds, 3),
        )  # fmt: skip
        return done

    async def _write(
        self, session: Session, memory: SessionMemory | None, tokens: tuple[int, ...], revision: int, identity: Identity, writer: Writer,
        progress: TransferProgress | None,
    ) -> Manifest:  # fmt: skip
        image = Image(0, torch.zeros((HIDDEN_ROWS, identity.hidden_width)), 0)
        if writer.there is not None and self._stage.backend.lost.done():  # it has the rows behind the last whole block too
            there = writer.there
            if (there.revision, there.tokens) == (revision, tokens):
                return there
        if memory is not None:
            places = Places(self._stage, memory)
            image = await places.read_out(len(tokens))
            await self._write_rows(session, places, writer, image.rows, progress)
        kept = identity.keeps_hidden and image.rows
        manifest = Manifest(
            session=session.id, revision=revision, architecture=identity.architecture, model=identity.model[:1000],
            main_layers=identity.main_layers, indexer_layers=identity.indexer_layers, first_layer=identity.first_layer,
            layers=identity.layers, mtp_rows=identity.with_mtp, weights=identity.weights, tokenizer=identity.tokenizer,
            template=identity.template, rows_as=identity.rows_as, keys_as=identity.keys_as, tokens=tokens, rows=image.rows,
            hidden_width=identity.hidden_width, hidden_from=image.hidden_from, hidden=image.hidden.numpy().tobytes() if kept else b"",
            segments=writer.segments,
        )  # fmt: skip
        await beside(partial(writer.commit, manifest))
        return manifest

    async def _write_rows(self, session: Session, places: Places, writer: Writer, rows: int, progress: TransferProgress | None) -> None:
        block_bytes, batch = self._stage.block_bytes, self._batch()
        total, done = rows * block_bytes // BLOCK_ROWS, 0
        same = await self._same(session, places, writer, rows)
        writer.keep(min(rows, BLOCK_ROWS * same))

        async def follow(written: int) -> None:
            nonlocal done
            done += written
            self._told(session, progress, done, total)

        await follow(min(rows, BLOCK_ROWS * same) * block_bytes // BLOCK_ROWS)
        blocks = max(1, SEGMENT_BYTES // block_bytes)
        for first in range(same, blocks_of(rows), blocks):
            stop = min(first + blocks, blocks_of(rows))
            await beside(partial(writer.begin_segment, first, min(rows, BLOCK_ROWS * stop) - BLOCK_ROWS * first))
            await in_order(_writes(writer, places.batches(first, stop, batch)), follow)
            await beside(writer.end_segment)

    async def _same(self, session: Session, places: Places, writer: Writer, rows: int) -> int:
        """Blocks at the start that the archive has as they are."""
        same, differs = 0, False

        async def follow(found: tuple[int, int]) -> None:
            nonlocal same, differs
            self._told(session, None, 0, 0)
            if not differs:
                same += found[0]
                differs = found[0] < found[1]

        async def works() -> AsyncGenerator[Callable[[], tuple[int, int]], None]:
            async for first, blocks in places.batches(0, min(writer.may_have, blocks_of(rows)), self._batch()):
                if differs:
                    return
                yield partial(_compare, writer, first, blocks, rows)

        await in_order(works(), follow)
        return same

    def _told(self, session: Session, progress: TransferProgress | None, done: int, total: int) -> None:
        if session.closing or self._closing:
            raise UnknownSession(f"session {session.id} was closed while it was archived", field="session")
        if progress is not None:
            progress(done, total)

    async def left(self, session: Session) -> None:
        """Wait until no export of a session that is closing goes on."""
        while (export := self._exports.get(session)) is not None:
            await export.wait()

    # In.

    async def take(self, path: Path, namespace: str, progress: TransferProgress | None) -> SessionId:
        """See Engine.import_session."""
        if len(self._sessions) + len(self._arriving) >= self._sessions_max:
            raise NotAdmitted(f"{len(self._sessions)} sessions are held, the most allowed; close one", retry_after_s=5.0)
        started, arrival = time.monotonic(), _Arrival(asyncio.Event())
        self._arriving.append(arrival)
        session: Session | None = None
        try:
            with named_failure(self._stage.backend.lost):
                async with held(partial(Reader, path, await self.known())) as reader:
                    session = await self._enter(arrival, namespace, reader, progress)
        except BaseException:
            if session is not None and session.memory is not None:
                session.memory.close()
            raise
        finally:
            self._arriving.remove(arrival)
            arrival.ended.set()
            self._wake()
        session.move(Phase.READY)
        self._sessions[session.id] = session
        _log.info(
            "restore.completed", session_id=session.id, rows=session.rows, payload_bytes=reader.manifest.payload_bytes,
            seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip
        return session.id

    async def _enter(self, arrival: "_Arrival", namespace: str, reader: Reader, progress: TransferProgress | None) -> Session:
        """A session, whole, that nobody knows yet."""
        manifest, identity = reader.manifest, await self.known()
        arrival.id = self._free_id(SessionId(manifest.session))
        session = Session(arrival.id, temporary=False, namespace=namespace)
        session.move(Phase.ARCHIVED)
        session.tokens, session.revision = array("i", manifest.tokens), manifest.revision
        if manifest.template != identity.template:
            _log.warning("restore.template_differs", session_id=session.id)
        if manifest.rows == 0:
            return session
        session.memory = await self._filled(session, reader, progress)
        return session

    async def _filled(self, session: Session, reader: Reader, progress: TransferProgress | None) -> SessionMemory:
        """Memory for a session's tokens, with the archive's rows in it; nothing of it is held after a failure."""
        memory = await self._opened(session)
        try:
            await self._fill(memory, reader, progress)
        except BaseException as error:
            try:
                await memory.operations.settle()
            finally:
                broken = memory.operations.broken
                memory.close()
            cause = error if isinstance(error, (StreamError, RuntimeError)) else broken  # what an operation of a device ends with
            if cause is None or isinstance(error, ForebayError) or not isinstance(error, Exception):
                raise
            raise SessionBroken(f"session {session.id} could not be brought back: {cause}; its archive is as it was, try again") from error
        return memory

    async def refill(self, session: Session, path: Path) -> int:
        """Give a session without memory the rows that an archive of its tokens has; returns how many, 0 where it has others.

        Raises: ArchiveRefused, ArchiveFailed, NotAdmitted: the session is as before.
        """
        async with held(partial(Reader, path, await self.known())) as reader:
            rows = reader.manifest.rows
            if not rows or rows > len(session.tokens) or session.tokens[:rows] != array("i", reader.manifest.tokens[:rows]):
                return 0
            session.memory = await self._filled(session, reader, None)
        return rows

    async def _opened(self, session: Session) -> SessionMemory:
        while True:
            try:
                return self._open(session)
            except Asked as asked:
                await asked.event.wait_done()

    def _open(self, session: Session) -> SessionMemory:
        """Memory for its tokens, with what idle sessions give back for it. Raises NotAdmitted, NeverFits."""
        self._stage.check_size(len(session.tokens))
        while True:
            try:
                return self._stage.placement.open(session.id, len(session.tokens))
            except DoesNotFit as error:
                if not self._reclaim(error):
                    raise NotAdmitted(
                        f"a session of {len(session.tokens)} tokens does not fit: {error}; close one or try later", retry_after_s=5.0
                    ) from error

    def _free_id(self, wanted: SessionId) -> SessionId:
        """The id it had, unless somebody here has it."""
        taken = wanted in self._sessions or any(arrival.id == wanted for arrival in self._arriving)
        return SessionId(secrets.token_hex(8)) if taken else wanted

    async def _fill(self, memory: SessionMemory, reader: Reader, progress: TransferProgress | None) -> None:
        stage, manifest, batch = self._stage, reader.manifest, self._batch()
        blocks, total, done = blocks_of(manifest.rows), manifest.rows * self._stage.block_bytes // BLOCK_ROWS, 0
        places = Places(stage, memory)
        await places.begin(manifest.rows, AHEAD * batch)

        async def follow(found: tuple[int, int]) -> None:
            nonlocal done
            await places.place(*found)
            if self._closing:
                raise NotAdmitted("the engine is draining; ask another one or try later", retry_after_s=5.0)
            done = min(BLOCK_ROWS * found[1], manifest.rows) * self._stage.block_bytes // BLOCK_ROWS
            if progress is not None:
                progress(done, total)

        async def works() -> AsyncGenerator[Callable[[], tuple[int, int]], None]:
            for first in range(0, blocks, batch):
                yield partial(_read, reader, first, await places.targets(first, min(first + batch, blocks)))

        await in_order(works(), follow)
        hidden = torch.zeros_like(memory.hidden, device="cpu")
        if manifest.hidden:
            hidden = torch.frombuffer(bytearray(manifest.hidden), dtype=torch.float32).view(hidden.shape)
        await places.finish(hidden, manifest.hidden_from)

    async def close(self) -> None:
        """Stop what is under way, and wait for it; what was going out stays as it was on disk, what was coming in is gone."""
        self._closing = True
        while waits := [*self._exports.values(), *(arrival.ended for arrival in self._arriving)]:
            await waits[0].wait()


@dataclass(slots=True, eq=False)
class _Arrival:
    """A session that is coming in."""

    ended: asyncio.Event
    id: SessionId | None = None


async def _writes(
    writer: Writer, batches: AsyncGenerator[tuple[int, list[Block]], None]
) -> AsyncGenerator[Callable[[], int], None]:  # fmt: skip
    async for first, blocks in batches:
        yield partial(writer.write, first, blocks)


def _compare(writer: Writer, first: int, blocks: list[Block], rows: int) -> tuple[int, int]:
    """Work: how many blocks of a batch the archive has, and how many they are."""
    return writer.same(first, blocks, rows), len(blocks)


def _read(reader: Reader, first: int, targets: list[Block]) -> tuple[int, int]:
    """Work: fill a batch; returns its blocks' numbers, first and behind the last."""
    reader.read(first, targets)
    return first, first + len(targets)
