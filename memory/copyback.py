"""Device-to-mirror copies of whole blocks, and what their completion raises.

Holds the copyback stream of one stage. Does not decide which blocks: `commit`, a finished chunk and the barrier do.

Invariants:
1. `state[MIRRORED]` and then the host's mirrored count rise only behind the copies they speak of and behind the raise before them; so a
   failed copy stops both counts for good, and no raise jumps over it.
2. The host's count rises after the device's write completed: a step submitted on the host's word finds at least that on the device.
3. A failed copy breaks its session and no other; it raises no count.
4. Copies of a stage's sessions share one ordered stream, so the later of two copies to one block wins.

`state[MIRRORED]` is not declared to the stream as written: steps read it whenever they like, and either value is right. The session
holds the state until its operations are done.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import structlog
from torch import Tensor

from kernels.layout import BLOCK_ROWS, StateField
from memory.counts import RowCounts
from memory.operations import Operations
from streams import Event, Stream

__all__ = ["Copied", "Copyback", "copy_bytes", "first_cause", "report_failure", "write_state"]

_log = structlog.get_logger("memory")


class Copied(Protocol):
    """What a copyback asks of a session."""

    session_id: str
    counts: RowCounts
    operations: Operations
    state: Tensor  # int64 [STATE_FIELDS]
    device_block: Callable[[int], Tensor]  # block number -> uint8 [block_bytes] on the device
    mirror_block: Callable[[int], Tensor]  # block number -> uint8 [block_bytes] in RAM


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Work of a copy of equal sizes: one transfer, also between a device and registered host memory, which no thread waits for."""
    target.copy_(source, non_blocking=True)


def write_state(state: Tensor, field: int, value: int) -> None:
    """Work that sets one field of a session's state."""
    state[field : field + 1].fill_(value)


def first_cause(error: BaseException) -> BaseException:
    """The failure behind a `DependencyFailed`, or the failure itself."""
    return error.__cause__ or error


def report_failure(session: Copied, rows: int, error: BaseException) -> None:
    """Break the session whose copy failed, and say so once for each count that will not be reached."""
    cause = first_cause(error)
    session.operations.break_with(cause)
    _log.error("copyback.failed", session_id=session.session_id, rows=rows, error=f"{type(cause).__name__}: {cause}")


class Copyback:
    """Copies and raises on one stream. Loop thread only."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def submit_block(self, session: Copied, block: int, after: Sequence[Event[Any]] = ()) -> Event[None]:
        """Copy one block, all of whose rows are committed, to RAM and raise the mirrored rows to its end behind that.

        Returns: the raise. Raises: Full: nothing is counted as submitted.
        """
        copy = self.submit_copy(session, block, session.device_block(block), after)
        return self.submit_raise(session, BLOCK_ROWS * (block + 1), [copy])

    def submit_copy(
        self, session: Copied, block: int, source: Tensor, after: Sequence[Event[Any]] = (), *, freezes: bool = False
    ) -> Event[None]:
        """The copy alone, a whole block.

        Args: source: uint8 [block_bytes] on the device. freezes: the block may not be full: nothing is written to the session meanwhile.
        """
        target = session.mirror_block(block)
        copy = self.stream.submit(
            partial(copy_bytes, target, source), label="copyback", session=session.session_id, after=after,
            reads=[source], writes=[target], payload_bytes=source.numel(),
        )  # fmt: skip
        session.operations.hold(copy, freezes=freezes)
        return copy

    def submit_raise(self, session: Copied, rows: int, copies: Sequence[Event[Any]]) -> Event[None]:
        """Raise mirrored to `rows`, on the device and then on the host, behind `copies` and every raise before."""
        counts, operations = session.counts, session.operations
        epoch = counts.epoch
        previous = [] if operations.last_raise is None else [operations.last_raise]
        raised = self.stream.submit(
            partial(write_state, session.state, StateField.MIRRORED, rows), label="mirrored", session=session.session_id,
            after=[*copies, *previous],
        )  # fmt: skip
        counts.submit(rows)
        operations.last_raise = raised

        def completed(event: Event[None]) -> None:
            error = event.error()
            if error is None:
                counts.complete(rows, epoch)
                return
            report_failure(session, rows, error)

        raised.on_done(completed)
        operations.hold(raised)
        return raised
