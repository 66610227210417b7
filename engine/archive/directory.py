"""An archive's directory: its lock, its names, renames that survive a power cut, and what a killed export left.

Blocking: used from threads. Knows names, not what files say.

Invariants:
1. One export, or any number of imports, has the directory at a time, in whatever processes; a killed process lets go.
2. Files are opened by plain names inside the directory, never through a link.
3. A name exists only for a whole file that is on disk; before that it ends in `.part`.
"""

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

from engine.archive.manifest import MANIFEST_BYTES_MAX
from engine.errors import ArchiveFailed, ArchiveRefused, BadRequest, NotAdmitted, shown

__all__ = ["MANIFEST", "Directory", "place_of", "said"]

MANIFEST = "manifest.json"
_OURS = re.compile(r"(rows|keys)-[0-9a-f]{32}\.bin\Z")
_PART = re.compile(r"(rows|keys|manifest)-[0-9a-f]{16}\.part\Z")
_BESIDE = re.compile(r"retention\.json(\.part)?\Z")  # how long a server keeps the session; it comes before the first export
_RETRY_S = 1.0
_ADVICE = {
    errno.ENOSPC: "make room or choose another directory", errno.EDQUOT: "make room or choose another directory",
    errno.EACCES: "its owner must allow it", errno.EPERM: "its owner must allow it", errno.EROFS: "choose another directory",
}  # fmt: skip


def place_of(directory: str | Path) -> Path:
    """An archive's directory as a caller names it. Raises BadRequest: it is no name, and would be the directory one happens to be in."""
    if not str(directory):
        raise BadRequest("the name of the archive's directory is empty; name one, like ./session", field="directory")
    if "\0" in str(directory):
        raise BadRequest("the name of the archive's directory has a zero byte", field="directory")
    return Path(directory)


@contextmanager
def said(where: str, doing: str) -> Iterator[None]:
    """Turn what the operating system refuses into ArchiveFailed, one line."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "")
        raise ArchiveFailed(f"cannot {doing} archive {where!r}: {error.strerror or error}{advice and '; '}{advice}") from error


def _make(path: Path, where: str) -> None:
    """The directory, if it is not there. Raises OSError, ArchiveFailed."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)  # conversations are in it
    except FileExistsError as error:
        raise ArchiveFailed(f"cannot write archive {where!r}: a file or link has that name; choose another one") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArchiveFailed(f"cannot write archive {where!r}: there is no directory {str(path.parent)!r}; make it first") from error


class Directory:
    """An open and locked directory. Close it."""

    def __init__(self, path: Path, *, writes: bool, locked: bool = True) -> None:
        """Args: writes: for an export; the directory is made, its parent must exist. locked: False to read the manifest alone.

        Raises: ArchiveFailed, ArchiveRefused (missing), NotAdmitted: somebody else has it now.
        """
        self.where = str(path)
        with said(self.where, "write" if writes else "read"):
            if writes:
                _make(path, self.where)
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise ArchiveRefused("missing", self.where, "there is no such directory") from error
            except NotADirectoryError as error:
                raise ArchiveRefused("missing", self.where, "it is no directory; name the one that has its manifest.json") from error
            try:
                if locked:
                    fcntl.flock(self._fd, (fcntl.LOCK_EX if writes else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._fd)
                raise NotAdmitted(f"archive {self.where!r} is being exported or imported; try later", retry_after_s=_RETRY_S) from error
            except BaseException:
                os.close(self._fd)
                raise

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._fd)

    def open_file(self, name: str) -> int:
        """A file to read. Raises FileNotFoundError; ArchiveRefused: it is not a plain file."""
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ArchiveRefused("damaged", self.where, f"{name} is a link") from error
            raise
        if not S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise ArchiveRefused("damaged", self.where, f"{name} is not a file")
        return file

    def check_ours(self) -> None:
        """Raise ArchiveFailed if a directory without an archive has anything that no export has left: it is somebody's."""
        strange = next(
            (name for name in sorted(os.listdir(self._fd)) if not any(ours.match(name) for ours in (_PART, _OURS, _BESIDE))), None
        )
        if strange is not None:
            raise ArchiveFailed(f"{self.where!r} is no archive and has {shown(strange)} in it; choose an empty or a new directory")

    def manifest(self) -> bytes | None:
        """The bytes of manifest.json; None: there is none. Raises ArchiveRefused."""
        try:
            file = self.open_file(MANIFEST)
        except FileNotFoundError:
            return None
        with os.fdopen(file, "rb") as opened:
            if os.fstat(file).st_size > MANIFEST_BYTES_MAX:
                raise ArchiveRefused("damaged", self.where, f"its {MANIFEST} is larger than {MANIFEST_BYTES_MAX} bytes")
            return opened.read()

    def part(self, kind: str) -> tuple[str, int]:
        """A new file to write, which has no name of its own yet: its temporary name and descriptor."""
        name = f"{kind}-{secrets.token_hex(8)}.part"
        return name, os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)

    def settle(self, part: str, name: str) -> None:
        """Give a part, synced and closed, its name."""
        os.rename(part, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def link(self, name: str, target: "Directory") -> None:
        """Give a file a second name, the same, in another directory."""
        os.link(name, name, src_dir_fd=self._fd, dst_dir_fd=target._fd, follow_symlinks=False)

    def commit(self, name: str, contents: bytes) -> None:
        """Bring the names that exist to disk, and then, as one step, a file that speaks of them."""
        part, file = self.part("manifest")
        with os.fdopen(file, "wb") as opened:
            opened.write(contents)
            opened.flush()
            os.fsync(file)
        os.fsync(self._fd)
        self.settle(part, name)
        os.fsync(self._fd)

    def remove(self) -> None:
        """Remove the archive, its manifest first: what a kill leaves of it is no archive."""
        with suppress(FileNotFoundError):
            os.unlink(MANIFEST, dir_fd=self._fd)
        os.fsync(self._fd)
        self.clean(frozenset())

    def clean(self, kept: Collection[str] | None) -> None:
        """Remove parts, and segments that are not `kept` (None: all are). What cannot be removed stays; nobody reads it."""
        for name in os.listdir(self._fd):
            stale = _PART.match(name) or (kept is not None and name not in kept and _OURS.match(name))
            if stale:
                try:
                    os.unlink(name, dir_fd=self._fd)
                except OSError:
                    continue
