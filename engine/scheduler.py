"""What runs next: plain functions from what waits and runs to a decision. No tensors, no clock, no awaits.

Requests take turns at three things: to be admitted, to have a chunk of their prompt read, to be in a step when more decode than a step
holds. The rules are the same for each.

Invariants:
1. Namespaces (API keys) come first: the one that was served longest ago is next, whatever its requests' priorities. One that comes is
   last, so none is passed over more often than there are others.
2. Within a namespace a request's place is where it came, or was served last, and `PATIENCE` services of its namespace earlier or later a
   step of priority. A place never changes while a request waits and later ones come behind it, so nobody waits for ever: the most that
   can pass a request are 2 x PRIORITY_MAX x PATIENCE + 2 later ones, and those that were there.
3. Requests of one session keep their order.
4. Waiting requests are offered memory in that order; one whose session is busy does not hold up those behind it. The loop stops at the
   first that does not fit, so that small requests never starve a large one.
5. Every decoding session that may step is in the next step, at most `decode_batch_limit`; when there are more they take turns.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

__all__ = ["PATIENCE", "Claim", "Decision", "Turns", "decide", "in_turn"]

PATIENCE = 8  # services of its namespace that a step of priority is worth


class Claim(Protocol):
    """What a decision looks at of a request."""

    since: int  # services of its namespace when it came, or when it was served last; `Turns` writes it

    @property
    def namespace(self) -> str:
        """Whose it is."""
        ...

    @property
    def session(self) -> object:
        """What its order is kept in."""
        ...

    @property
    def priority(self) -> int:
        """See `Sampling.priority`: the lower, the sooner."""
        ...


R = TypeVar("R", bound=Claim)


@dataclass(slots=True)
class _Account:
    """One namespace: how many of its requests are there, when it was served last, and how often."""

    members: int
    served_at: int
    services: int = 0


class Turns:
    """Who was served when, of one thing that requests take turns at. Costs nothing while nobody has to wait."""

    def __init__(self) -> None:
        self._services = 0
        self._accounts: dict[str, _Account] = {}

    def join(self, request: Claim) -> None:
        """The request has come: last but for the one served last, and its namespace last if it was not there."""
        account = self._accounts.get(request.namespace)
        if account is None:
            account = self._accounts[request.namespace] = _Account(0, self._services)
        account.members += 1
        request.since = account.services - 1  # before the one served last, who may go on for long

    def leave(self, request: Claim) -> None:
        """The request has gone, served or not; nothing is kept of a namespace without any."""
        account = self._accounts[request.namespace]
        account.members -= 1
        if not account.members:
            del self._accounts[request.namespace]

    def serve(self, requests: Iterable[Claim]) -> None:
        """These were served, while others had to wait."""
        for request in requests:
            account = self._accounts[request.namespace]
            self._services += 1
            account.services += 1
            account.served_at = self._services
            request.since = account.services

    def served_at(self, namespace: str) -> int:
        """How many services of anybody there were when the namespace was served last, or came."""
        return self._accounts[namespace].served_at


@dataclass(frozen=True, slots=True)
class Decision(Generic[R]):
    """What to do in one turn of the loop.

    admit: offer these memory, in order, up to the first that does not fit. decode: members of the next step. chosen: the same, in the order
    of the choice, if there was one: others may step too. append: whose chunk is read next, if none is open.
    """

    admit: tuple[R, ...]
    decode: tuple[R, ...]
    chosen: tuple[R, ...] = ()
    append: R | None = None


def in_turn(requests: Sequence[R], turns: Turns) -> list[R]:
    """All of `requests`, which are given in order of arrival, in the order in which they are served.

    Args: turns: of what they wait for; every one of them has joined.
    """
    if len(requests) < 2:
        return list(requests)
    lines: dict[str, list[R]] = {}
    for request in requests:
        lines.setdefault(request.namespace, []).append(request)
    places = {namespace: _placed(line) for namespace, line in lines.items()}
    if len(places) == 1:
        return next(iter(places.values()))
    # The one served longest ago, then the others; who was taken from is the last to be taken from again.
    heap = [(0, turns.served_at(namespace), number, namespace, 0) for number, namespace in enumerate(places)]
    heapq.heapify(heap)
    order: list[R] = []
    while heap:
        taken, served_at, number, namespace, place = heap[0]
        order.append(places[namespace][place])
        if place + 1 < len(places[namespace]):
            heapq.heapreplace(heap, (taken + 1, served_at, number, namespace, place + 1))
        else:
            heapq.heappop(heap)
    return order


def _placed(line: Sequence[R]) -> list[R]:
    """Requests of one namespace by their places; of one session, none before an earlier one of it."""
    least: dict[object, int] = {}
    placed: list[tuple[int, int]] = []
    for number, request in enumerate(line):
        place = max(request.since + PATIENCE * request.priority, least.get(request.session, -(1 << 60)))
        least[request.session] = place
        placed.append((place, number))
    return [line[number] for _, number in sorted(placed)]


def decide(
    waiting: Sequence[R],
    decoding: Sequence[R],
    *,
    session_idle: Callable[[R], bool],
    may_step: Callable[[R], bool],
    decode_batch_limit: int,
    steps: Turns,
    appending: Sequence[R] = (),
    chunks: Turns | None = None,
) -> Decision[R]:
    """Decide one turn of the loop.

    Args:
        waiting: in the order in which they are to be admitted (`in_turn`).
        decoding: in order of arrival.
        session_idle: whether the request's session can take it now.
        may_step: whether the request's session can take one more row now (ring room, length not yet reached).
        steps: whose turn it is when more decode than fit a step; to be told of those that were `chosen`.
        appending: whose prompt is being read, if no chunk is open, in order of arrival; `chunks`: whose turn it is then.
    """
    admit = [request for request in waiting if session_idle(request)]
    able = [request for request in decoding if may_step(request)]
    chosen: list[R] = []
    if len(able) > decode_batch_limit:
        chosen = in_turn(able, steps)[:decode_batch_limit]
        members = set(map(id, chosen))
        able = [request for request in able if id(request) in members]  # in an order that does not change: tables keep their places
    assert chunks is not None or not appending, "whose chunk is next needs turns"
    append = None if chunks is None or not appending else in_turn(appending, chunks)[0]
    return Decision(tuple(admit), tuple(able), tuple(chosen), append)
