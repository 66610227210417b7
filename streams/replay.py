"""An order read from a tape: a virtual run that completes operations as a recorded run did.

Submissions are compared one by one: number, stream, label, session, `after`, what the stream waited for, payload; sessions may have other
names, one for one. A completion is held until every submission that the tape has before it has been made, and then published before the
host does anything else, so that the host sees at each submission what it saw then: a submission that comes before anything the tape has
before it is a mismatch. Failures on the tape that the device caused are repeated; the work's own failures must happen again by themselves.
"""

from collections.abc import Sequence
from typing import Any

from streams import errors
from streams.errors import DependencyFailed, StreamError, TapeMismatch
from streams.queued import Operation
from streams.tape import Completed, Submitted, Tape, submission_of

__all__ = ["ReplayOrder"]

_STALL_ROUNDS = 10_000  # loop rounds without progress after which the host is believed to wait for something that will not come


class ReplayOrder:
    """Replays `tape`. With `whole`, a run that closes before the tape's end is a mismatch too."""

    def __init__(self, tape: Tape, *, whole: bool = True) -> None:
        self._steps = [record for record in tape.records if isinstance(record, Submitted | Completed)]
        self._submissions = {record.number: record for record in self._steps if isinstance(record, Submitted)}
        self._completions = {record.number: record for record in self._steps if isinstance(record, Completed)}
        self._whole = whole
        self._place = 0
        self._made = 0
        self._stalled = 0
        self._run_name: dict[str, str] = {"": ""}  # of a session on the tape
        self._tape_name: dict[str, str] = {"": ""}  # of a session of the run
        if len(self._submissions) + len(self._completions) < len(self._steps):
            raise TapeMismatch(f"the tape has {self._name(_twice(self._steps))} submitted or completed twice; it was altered")
        if self._submissions and 0 not in self._submissions:
            raise TapeMismatch(f"the tape begins in the middle of a run, with operation {min(self._submissions)}; it cannot be replayed")

    def submitted(self, operation: Operation[Any]) -> None:
        """Compare with the tape's submission of that number."""
        asked = submission_of(operation, operation.after, operation.waits, operation.payload_bytes, 0)
        taped = self._submissions.get(operation.number)
        if taped is None:
            raise TapeMismatch(f"the run submits {asked}, which is not on the tape")
        if self._run_name.setdefault(taped.session, asked.session) != asked.session or (
            self._tape_name.setdefault(asked.session, taped.session) != taped.session
        ):
            raise TapeMismatch(f"the run submits {asked} for session {asked.session!r}; the tape has it for another, {taped.session!r}")
        for field in ("label", "stream", "after", "waits", "payload_bytes"):
            has, wants = getattr(taped, field), getattr(asked, field)
            if has != wants:
                raise TapeMismatch(f"the run submits {asked}; the tape has {taped} there: {field} {wants!r} against {has!r}")
        self._check_place(asked)
        self._made = operation.number + 1
        self._stalled = 0

    def _check_place(self, asked: Submitted) -> None:
        """Raise TapeMismatch if the tape has another submission, or a completion, that has not happened before this submission."""
        step: Submitted | Completed = self._steps[self._place]
        while isinstance(step, Submitted) and step.number < self._made:
            self._place += 1
            step = self._steps[self._place]  # there is one: what is submitted now was found on the tape and is not passed yet
        if isinstance(step, Completed):
            raise TapeMismatch(f"the run submits {asked} before {self._name(step.number)} is done; on the tape it comes after")
        if step.number != asked.number:
            raise TapeMismatch(f"the run submits {asked}; the tape has {step} submitted before it")

    def ready(self) -> bool:
        """Every round: the tape says when to wait."""
        return True

    def choose(self, runnable: Sequence[Operation[Any]]) -> Operation[Any] | None:
        """The tape's next completion, once the host has submitted all that stands before it."""
        while self._place < len(self._steps):
            step = self._steps[self._place]
            if isinstance(step, Submitted):
                if step.number >= self._made:
                    self._stall(f"the tape has {step} submitted next, and the run does not submit it")
                    return None
            else:
                chosen = next((one for one in runnable if one.number == step.number), None)
                if chosen is None:
                    able = ", ".join(f"{one.label} on {one.stream}" for one in runnable)
                    self._stall(f"the tape has {self._name(step.number)} complete next; in the run only {able} can")
                    return None
                self._place += 1
                self._stalled = 0
                return chosen
            self._place += 1
        self._stall(f"the tape has ended, and {runnable[0].label} on {runnable[0].stream} is still in flight")
        return None

    def failure(self, operation: Operation[Any]) -> BaseException | None:
        """The device's failure on the tape, again."""
        taped = self._completions[operation.number]
        kind = getattr(errors, taped.error, None) if taped.error in errors.__all__ else None
        if kind is None or issubclass(kind, DependencyFailed):
            return None
        failure: StreamError = kind(taped.message)
        return failure

    def completed(self, operation: Operation[Any], error: BaseException | None) -> None:
        """Compare the outcome's kind with the tape's."""
        taped = self._completions.get(operation.number)
        happened = "" if error is None else type(error).__name__
        if taped is not None and taped.error != happened:
            was, now = taped.error or "success", f"{happened}: {error}" if happened else "success"
            raise TapeMismatch(f"{self._name(operation.number)} ends in {now}; on the tape it ends in {was}")

    def duration_ns(self, operation: Operation[Any]) -> int:
        """So that it completes at the tape's time."""
        return max(self._completions[operation.number].at_ns - operation.started_ns, 0)

    def finish(self) -> None:
        """The run is over: so must the tape be."""
        while self._place < len(self._steps):
            step = self._steps[self._place]
            if isinstance(step, Completed) or step.number >= self._made:
                if self._whole:
                    raise TapeMismatch(f"the run ended before the tape did: {self._name(step.number)} never came to its end")
                return
            self._place += 1

    def _stall(self, why: str) -> None:
        self._stalled += 1
        if self._stalled > _STALL_ROUNDS:
            raise TapeMismatch(why)

    def _name(self, number: int) -> str:
        return str(self._submissions.get(number, f"operation {number}"))


def _twice(steps: Sequence[Submitted | Completed]) -> int:
    """The number of the first record that repeats one before it."""
    seen: set[tuple[type, int]] = set()
    for step in steps:
        if (type(step), step.number) in seen:
            return step.number
        seen.add((type(step), step.number))
    raise AssertionError("no record repeats another")
