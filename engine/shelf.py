"""`Shelf`: the directory in which a server keeps archives of its sessions, one below it a session, named for its id.

Knows the engine's face and what archives look like from outside; no HTTP. Files are touched in threads.

Invariants:
1. A name from outside reaches the disk only if it has the form of a session's id: no path comes out of one.
2. One server has the directory at a time. Sessions of a key lie in a folder of that key's.
3. Restoring and removing a session exclude each other; restores take memory one after the other, in the order they came.
4. Nothing is written that would take the archives of the key past their quota, as far as an archive's size is known beforehand.
5. An archive's age counts from the time of its manifest: the last use of what is in it.
"""

import asyncio
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import structlog

from engine.archive.ahead import beside
from engine.archive.directory import MANIFEST, Directory, said
from engine.archive.reader import open_manifest
from engine.errors import ArchiveRefused, BadSetting, ForebayError, NotAdmitted, QuotaExceeded, SessionBusy, UnknownSession, shown
from engine.protocol import EngineFace, SessionId, SessionView
from engine.retention import Retention, forget_age, read_age, write_age

__all__ = ["Archived", "Shelf", "open_shelves"]

_ID: Final = re.compile(r"[0-9a-f]{16}")
_NAMESPACE_DIGITS: Final = 32  # of a key's hash; no session has an id of this length
_WAIT_S: Final = 30.0  # for memory that running requests will give back
_AGAIN_S: Final = 0.1

_log = structlog.get_logger("engine")


@dataclass(frozen=True, slots=True)
class Archived:
    """An archive as a session that is not held: phase `archived`; `damaged` where its manifest cannot be read, which has no tokens."""

    view: SessionView
    disk_bytes: int


@contextmanager
def open_shelves(
    path: str, namespaces: Sequence[str] = ("",), *, quota_bytes: int = 0, retention: Retention | None = None
) -> Iterator[dict[str, "Shelf"]]:  # fmt: skip
    """A server's shelves for the length of the block, by namespace; none where `path` is empty. Made if absent.

    Args: see Shelf. Raises: BadSetting: it cannot be written, or another server has it.
    """
    if not path:
        yield {}
        return
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)  # conversations are in it
        with tempfile.TemporaryFile(dir=path):
            pass  # permissions alone do not say whether one can write
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadSetting(f"--sessions-dir: cannot write {path}: {error.strerror or error}; choose another directory") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BadSetting(f"--sessions-dir: another server uses {path}; choose another directory") from error
        shelves = {each: Shelf(Path(path), each, quota_bytes=quota_bytes, retention=retention) for each in namespaces}
        for shelf in shelves.values():
            shelf.sweep()
        yield shelves
    finally:
        os.close(lock)


class Shelf:
    """One server's. Loop only."""

    def __init__(self, path: Path, namespace: str = "", *, quota_bytes: int = 0, retention: Retention | None = None) -> None:
        """Args: quota_bytes: of all files here; 0: none. retention: learns the ages that archives came with."""
        self._quota_bytes = quota_bytes
        self._retention = Retention(0.0) if retention is None else retention
        self._writing: dict[str, int] = {}  # bytes that archives will have that are being written
        self._path = path / namespace[:_NAMESPACE_DIGITS] if namespace else path
        self._namespace = namespace
        self._turn = asyncio.Lock()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def sweep(self) -> None:
        """Remove what exports left that were killed before they ended for the first time. Blocking; before anything else."""
        for place in _places(self._path):
            if _is_there(place):
                self._retention.give(place.name, read_age(place))
            elif not place.is_symlink():
                with suppress(ForebayError):
                    _empty(place)

    def _place(self, session_id: str) -> Path:
        """Where a session's archive is or will be. Raises UnknownSession: this is no session's id."""
        if not _ID.fullmatch(session_id):
            raise UnknownSession(f"no session {shown(session_id)}", field="session")
        return self._path / session_id

    def archive_of(self, session_id: str) -> Path | None:
        """Where a session's archive lies; None: it has none here. Looks at the disk: two looks at a directory."""
        place = self._path / session_id
        return place if _ID.fullmatch(session_id) and _is_there(place) else None

    def _lock(self, session_id: str) -> asyncio.Lock:
        return self._locks.setdefault(session_id, asyncio.Lock())

    async def find(self, session_id: str) -> tuple[Archived, list[int]]:
        """An archive and its token ids. Raises UnknownSession, ArchiveRefused."""
        place = self._place(session_id)
        if not await beside(partial(_is_there, place)):
            raise UnknownSession(f"no session {session_id!r}", field="session")
        with _named(place):
            found = await beside(partial(_look, place, self._namespace))
        return found, list(found.view.token_ids)

    async def disk_bytes(self, session_id: str) -> int | None:
        """What the archive of a session takes here, whether or not it is held; None: it has none."""
        return await beside(partial(_bytes_if_there, self._path / session_id)) if _ID.fullmatch(session_id) else None

    async def archived(self) -> list[Archived]:
        """All that lie here, the damaged ones too, by name."""
        return await beside(partial(_look_at_all, self._path, self._namespace))

    async def export(self, engine: EngineFace, session_id: SessionId) -> int:
        """Write a session that the engine holds; returns the archive's bytes. See Engine.export_session.

        Raises: QuotaExceeded, UnknownSession too.
        """
        place, view = self._place(session_id), engine.sessions.get(session_id)
        if view is None:
            raise UnknownSession(f"no session {session_id!r}", field="session")
        with _named(place):
            await beside(partial(_make_room_for, place))
            try:
                if self._quota_bytes:
                    self._check_quota(place, view.archive_bytes, await beside(partial(_bytes_of_each, self._path)))
                await beside(partial(write_age, place, self._retention.given_s(session_id)))
                await _exported(engine, session_id, place)
            finally:
                self._writing.pop(session_id, None)
            return await beside(partial(_settled, place, self._retention.last_use(session_id, view.used_at)))

    def _check_quota(self, place: Path, archive_bytes: int, held: dict[str, int]) -> None:
        taken = sum({**held, **self._writing, place.name: 0}.values())
        if taken + archive_bytes > self._quota_bytes:
            raise QuotaExceeded(
                f"archiving session {place.name} takes about {archive_bytes} bytes, and {taken} of {self._quota_bytes} are taken; "
                "delete sessions, or raise --sessions-quota"
            )
        self._writing[place.name] = archive_bytes

    async def ages(self) -> dict[str, float]:
        """When what lies here was last used, by id; Unix time."""
        return await beside(partial(_ages, self._path))

    async def restore(self, admitted: Callable[[], EngineFace], session_id: str) -> bool:
        """Bring a session back into the engine; returns whether it did: False where the engine holds it, or nothing of it is here.

        Waits its turn, and for memory while running requests or other transfers will give some back, at most half a minute.
        Args: admitted: the engine as long as it takes requests; raises once it does not.
        Raises: ArchiveRefused, ArchiveFailed, NotAdmitted: nothing of it is held then. Cancel: likewise.
        """
        if not _ID.fullmatch(session_id):
            return False
        place, wanted = self._place(session_id), SessionId(session_id)
        async with self._lock(session_id):
            if wanted in admitted().sessions or not await beside(partial(_is_there, place)):
                return False
            async with self._turn:
                with _named(place):
                    taken = await self._take(admitted, place)
                if taken != wanted:
                    await admitted().close_session(taken)
                    raise ArchiveRefused("damaged", session_id, f"it holds session {taken}")
        return True

    async def _take(self, admitted: Callable[[], EngineFace], place: Path) -> SessionId:
        until = asyncio.get_running_loop().time() + _WAIT_S
        await beside(partial(_touch, place, self._retention.now()))  # before: behind it the session must not be waited for
        while True:
            engine = admitted()
            try:
                return await engine.import_session(place, namespace=self._namespace)
            except NotAdmitted as error:
                counts = engine.statistics()
                others = counts.running + counts.waiting > 0 or engine.departures.unsettled
                waits = error.retry_after_s is not None and others
                if not waits or asyncio.get_running_loop().time() >= until:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def remove(self, engine: EngineFace, session_id: str, *, due: Callable[[float], bool] | None = None) -> bool:
        """Close a session of the server's, if it is held, and remove what is here of it; returns whether there was either.

        Args: due: of its last use; nothing is done where that is False by now.
        """
        async with self._lock(session_id):
            if due is not None and not await self._is_due(engine, session_id, due):
                return False
            view = engine.sessions.get(SessionId(session_id))
            held = view is not None and view.namespace == self._namespace
            if held:
                await engine.close_session(SessionId(session_id))
            if not _ID.fullmatch(session_id):
                return held
            place = self._place(session_id)
            with _named(place):
                return await beside(partial(_remove, place)) or held

    async def _is_due(self, engine: EngineFace, session_id: str, due: Callable[[float], bool]) -> bool:
        """Asked without a pause before the removal, and under its lock: nobody can have come for it since."""
        found = (await self.ages()).get(session_id)
        view = engine.sessions.get(SessionId(session_id))
        return due(view.used_at) if view is not None else found is not None and due(found)

    async def keep(self, engine: EngineFace, timeout_s: float) -> None:
        """Export every session that has tokens, the last used first, for at most `timeout_s` seconds. What fails is logged."""
        views = [view for view in engine.sessions.values() if view.token_ids and view.namespace == self._namespace]
        left = sorted(views, key=lambda view: -view.used_at)
        try:
            async with asyncio.timeout(timeout_s):
                while left:
                    try:
                        await self.export(engine, left[0].id)
                    except ForebayError as error:
                        _log.warning("session.not_archived", session_id=left[0].id, reason=str(error))
                    left.pop(0)
        except TimeoutError:
            _log.warning("sessions.not_archived", sessions=len(left), advice="raise --drain-timeout")


async def _exported(engine: EngineFace, session_id: SessionId, place: Path) -> None:
    """Export, once an export that goes on has ended: another caller's, or of a session that leaves to make room."""
    while True:
        try:
            await engine.export_session(session_id, place)
            return
        except SessionBusy:
            view = engine.sessions.get(session_id)
            if view is None or view.phase != "exporting":
                raise
        await asyncio.sleep(_AGAIN_S)


@contextmanager
def _named(place: Path) -> Iterator[None]:
    """Messages name the session, not where the server keeps it."""
    try:
        yield
    except ForebayError as error:
        text = str(error)
        for said_as in (repr(str(place)), shown(str(place))):
            text = text.replace(said_as, repr(place.name))
        error.args = (text,)
        raise


# Work: these touch files.


def _is_there(place: Path) -> bool:
    return not place.is_symlink() and os.path.lexists(place / MANIFEST)


def _make_room_for(place: Path) -> None:
    if place.is_symlink():
        raise ArchiveRefused("damaged", str(place), "it is a link")
    with said(str(place), "write"):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


def _settled(place: Path, used_at: float) -> int:
    """Work: date an archive; returns its bytes."""
    _touch(place, used_at)
    return _disk_bytes(place)


def _touch(place: Path, used_at: float) -> None:
    with suppress(OSError):  # it lives a little longer, or shorter
        os.utime(place / MANIFEST, (used_at, used_at), follow_symlinks=False)


def _bytes_of_each(path: Path) -> dict[str, int]:
    found = {}
    for place in _places(path):
        with suppress(ForebayError):  # removed meanwhile
            found[place.name] = _disk_bytes(place)
    return found


def _ages(path: Path) -> dict[str, float]:
    found = {}
    for place in _places(path):
        if _is_there(place):
            with suppress(OSError):
                found[place.name] = (place / MANIFEST).lstat().st_mtime
    return found


def _disk_bytes(place: Path) -> int:
    with said(str(place), "read"), os.scandir(place) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)


def _bytes_if_there(place: Path) -> int | None:
    with suppress(ForebayError):  # removed meanwhile
        return _disk_bytes(place) if _is_there(place) else None
    return None


def _look(place: Path, namespace: str) -> Archived:
    """Raises ArchiveRefused, ArchiveFailed."""
    directory = Directory(place, writes=False, locked=False)  # the manifest changes as a whole, and an export need not wait for a look
    try:
        manifest = open_manifest(directory)
    finally:
        directory.close()
    if manifest.session != place.name:
        raise ArchiveRefused("damaged", str(place), f"it holds session {shown(manifest.session)}")
    return _archived(place, namespace, "archived", manifest.revision, manifest.tokens, manifest.rows)


def _archived(place: Path, namespace: str, phase: str, revision: int, tokens: tuple[int, ...], rows: int) -> Archived:
    with said(str(place), "read"):
        used_at = (place / MANIFEST).lstat().st_mtime
    return Archived(SessionView(SessionId(place.name), namespace, phase, revision, tokens, rows, 0, 0, used_at), _disk_bytes(place))


def _places(path: Path) -> list[Path]:
    """Where archives may lie, by name."""
    return sorted(path / name for name in os.listdir(path) if _ID.fullmatch(name)) if path.is_dir() else []


def _look_at_all(path: Path, namespace: str) -> list[Archived]:
    found = []
    for place in _places(path):
        try:
            if _is_there(place):
                found.append(_look(place, namespace))
        except ForebayError:
            try:
                found.append(_archived(place, namespace, "damaged", 0, (), 0))
            except ForebayError:
                continue  # removed meanwhile
    return found


def _remove(place: Path) -> bool:
    if not _is_there(place):
        return False
    _empty(place)
    return True


def _empty(place: Path) -> None:
    """Remove the archive in a directory, and the directory if nothing else lies there. Raises ArchiveFailed."""
    directory = Directory(place, writes=True)
    try:
        with said(str(place), "remove"):
            directory.remove()
            forget_age(place)
    finally:
        directory.close()
    with suppress(OSError):  # something that is not ours lies there, and stays
        place.rmdir()
