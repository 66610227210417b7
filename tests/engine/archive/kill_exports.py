"""Kills exporting and importing processes at random moments, and looks each time at what is left. Run by test_archive_kills.py.

usage: kill_exports.py DIRECTORY KILLS SEED
"""

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy

from engine.archive.reader import Reader
from engine.errors import NotAdmitted
from tests.engine.archive.archive_world import Picture, export, identity, read

ROWS = 640


def picture(turn: int) -> Picture:
    """What the session is after a turn: it grows, and is cut every fourth time."""
    of = identity()
    made = Picture.drawn(of, ROWS, 1).cut(70 + 31 * (turn % 4))
    made = made.then(Picture.drawn(of, 150 + 40 * (turn % 3), turn))
    made.revision = turn
    return made


def work(path: Path, turn: int) -> None:
    """Export turn after turn, with a look at the archive between two, for ever."""
    while True:
        turn += 1
        export(path, identity(), picture(turn), segment_blocks=1 + turn % 3)
        with contextlib.suppress(NotAdmitted):
            read(path, identity())


def main(path: Path, kills: int, seed: int) -> None:
    """Raises AssertionError when an archive is not one turn's, whole."""
    draw, turn = random.Random(seed), 0
    started = time.monotonic()
    export(path, identity(), picture(0))
    most_s = 3 * (time.monotonic() - started)  # some kills come before an export ended, some after, also on a busy machine
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            try:
                work(path, turn)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0, most_s))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"an export failed by itself: {status}"
        reader = Reader(path, identity())  # the lock is free at once
        turn_now = reader.manifest.revision
        reader.close()
        assert turn_now >= turn, f"turn {turn_now} after turn {turn}"
        turn = turn_now
        wanted = picture(turn)
        manifest, parts = read(path, identity())
        assert list(manifest.tokens) == wanted.tokens
        assert numpy.array_equal(parts["rows"], wanted.rows), f"rows of turn {turn}"
        assert numpy.array_equal(parts["keys"], wanted.keys), f"keys of turn {turn}"
    assert turn > 0, "no export ever ended: the kills prove nothing"
    export(path, identity(), picture(turn + 1))
    names = {segment.name for segment in read(path, identity())[0].segments}
    assert set(os.listdir(path)) == {"manifest.json", *names}, "leftovers of killed exports stayed"
    print(f"{kills} kills, {turn} turns")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
