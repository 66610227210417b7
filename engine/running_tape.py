"""A tape of an engine that serves: what it submitted and when it completed, for as long as it is open.

For looking at and comparing (`forebay tape export`, `diff`). It has no prompts, so it cannot be replayed: `forebay tape record` makes
tapes that can. Knows no sessions.
"""

from pathlib import Path

from streams import TapeFile, TapeRecorder

__all__ = ["RunningTape"]


class RunningTape:
    """An observer and the file behind it. Raises OSError when the file cannot be made."""

    def __init__(self, path: Path) -> None:
        self._file = TapeFile(path)
        self.recorder = TapeRecorder(self._file.append)

    def close(self) -> None:
        """Write what is left. Call it once the backend is closed. Raises: OSError: the disk refused."""
        self.recorder.flush()
        self._file.close()
