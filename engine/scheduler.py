"""What runs next: a plain function from what is waiting and running to a decision. No tensors, no clock, no awaits.

Invariants:
1. Waiting requests are offered memory in order of arrival; one whose session is busy does not hold up those behind it. The loop stops
   at the first that does not fit, so that small requests never starve a large one.
2. Every decoding session that may step is in the next step, at most `decode_batch_limit`; when there are more, turns rotate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Decision", "decide"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Decision(Generic[R]):
    """What to do in one turn.

    admit: offer these memory, in order, up to the first that does not fit. decode: members of the next step.
    """

    admit: tuple[R, ...]
    decode: tuple[R, ...]


def decide(
    waiting: Sequence[R],
    decoding: Sequence[R],
    *,
    session_idle: Callable[[R], bool],
    may_step: Callable[[R], bool],
    steps_taken: int,
    decode_batch_limit: int,
) -> Decision[R]:
    """Decide one turn of the loop.

    Args:
        waiting, decoding: requests in order of arrival.
        session_idle: whether the request's session can take it now.
        may_step: whether the request's session can take one more row now (ring room, length not yet reached).
        steps_taken: turns so far; rotates who steps when more decode than fit a step.
    """
    admit = [request for request in waiting if session_idle(request)]
    able = [request for request in decoding if may_step(request)]
    if len(able) > decode_batch_limit:
        first = (steps_taken * decode_batch_limit) % len(able)
        able = (able[first:] + able[:first])[:decode_batch_limit]
    return Decision(tuple(admit), tuple(able))
