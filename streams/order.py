"""Who decides which operation of a virtual run completes next, and what fails: an `Order`.

Holds the protocol, the cost model, faults, and the order drawn from a seed. The order read from a tape is in `replay.py`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from streams.errors import TransferFailed
from streams.queued import Operation

__all__ = ["Cost", "Fault", "Order", "SeededOrder"]

# Rounds of the loop left to the host before the next completion. Weighted towards an eager device; the long ones let the host
# run until it has nothing more to do, which a loop cannot be asked about.
_HOST_ROUNDS = (0, 0, 0, 0, 1, 1, 2, 3, 8, 40)


@dataclass(frozen=True, slots=True)
class Cost:
    """How long an operation takes in virtual time. The defaults resemble a launch and a PCIe 5 copy."""

    launch_ns: int = 5_000
    bytes_per_us: int = 50_000

    def duration_ns(self, operation: Operation[Any]) -> int:
        """Launch plus payload, ns."""
        return self.launch_ns + operation.payload_bytes * 1000 // self.bytes_per_us


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong with one operation: the `nth` (from 0) whose label is `label`, or starts with it if it ends in `*`.

    `fail`: it never runs, its destination keeps the poison, and the event carries TransferFailed.
    `delay`: it completes only when nothing else can.
    """

    label: str
    nth: int = 0
    kind: Literal["fail", "delay"] = "fail"

    def matches(self, label: str) -> bool:
        """Whether operations labelled `label` count."""
        return label.startswith(self.label[:-1]) if self.label.endswith("*") else label == self.label


class Order(Protocol):
    """Decides a virtual run. Asked on the loop's thread, in an order that depends on earlier answers only."""

    def submitted(self, operation: Operation[Any]) -> None:
        """Told of each submission; may raise TapeMismatch."""
        ...

    def ready(self) -> bool:
        """Asked at the start of a loop round and after each completion in it: False leaves the rest of the round to the host."""
        ...

    def choose(self, runnable: Sequence[Operation[Any]]) -> Operation[Any] | None:
        """The operation to complete next, of at least one that can; None to wait for the host."""
        ...

    def failure(self, operation: Operation[Any]) -> BaseException | None:
        """What `operation`, about to complete, fails with instead of running."""
        ...

    def completed(self, operation: Operation[Any], error: BaseException | None) -> None:
        """Told of each outcome just before it is published; may raise TapeMismatch."""
        ...

    def duration_ns(self, operation: Operation[Any]) -> int:
        """How long it takes from start to completion, at least."""
        ...

    def finish(self) -> None:
        """The run is over; may raise TapeMismatch."""
        ...


@dataclass(slots=True)
class SeededOrder:
    """Draws the next completion, and how far the host gets before it, from a seed."""

    seed: int
    cost: Cost = field(default_factory=Cost)
    faults: tuple[Fault, ...] = ()
    _random: random.Random = field(init=False, repr=False)
    _rounds: int = field(init=False, default=0)
    _seen: list[int] = field(init=False)
    _struck: dict[int, Fault] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._seen = [0] * len(self.faults)

    def submitted(self, operation: Operation[Any]) -> None:
        """Find out whether a fault strikes it."""
        for place, fault in enumerate(self.faults):
            if fault.matches(operation.label):
                if self._seen[place] == fault.nth:
                    self._struck[operation.number] = fault
                self._seen[place] += 1

    def ready(self) -> bool:
        """Count down the rounds left to the host."""
        if self._rounds > 0:
            self._rounds -= 1
            return False
        self._rounds = self._random.choice(_HOST_ROUNDS)
        return True

    def choose(self, runnable: Sequence[Operation[Any]]) -> Operation[Any] | None:
        """Any of them, evenly; a delayed one only if there is no other."""
        prompt = [one for one in runnable if one.number not in self._struck or self._struck[one.number].kind != "delay"]
        return self._random.choice(prompt or list(runnable))

    def failure(self, operation: Operation[Any]) -> BaseException | None:
        """TransferFailed where a fault says so."""
        fault = self._struck.pop(operation.number, None)
        return TransferFailed(f"{operation.label} failed by order of a fault") if fault is not None and fault.kind == "fail" else None

    def completed(self, operation: Operation[Any], error: BaseException | None) -> None:
        """Any outcome will do."""

    def duration_ns(self, operation: Operation[Any]) -> int:
        """As the cost model says."""
        return self.cost.duration_ns(operation)

    def finish(self) -> None:
        """Nothing is missed: a seed runs as long as it is asked to."""
