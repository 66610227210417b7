"""A coroutine that is cancelled at its n-th await, so that all of them can be tried in turn.

An await is a suspension: a place where the coroutine really gave way to the loop. Each can be cancelled at two moments: as it begins to
wait, and as what it waits for arrives, when the loop has not yet let it go on.
"""

import asyncio
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any

__all__ = ["Counted", "Cut", "cut_off", "until_cut"]


@dataclass
class Cut:
    """Where to cancel: the `nth` await, from 1; `late`: as it arrives. `twice`: the next one too, which cuts off the cleaning up."""

    nth: int
    late: bool = False
    twice: bool = False
    awaits: int = 0  # seen

    @property
    def struck(self) -> bool:
        """Whether there was an nth await."""
        return self.awaits >= self.nth

    def reached(self, waited_for: object) -> None:
        """An await begins, on `waited_for`: a future, or None for a turn of the loop."""
        self.awaits += 1
        if self.awaits not in ((self.nth, self.nth + 1) if self.twice else (self.nth,)):
            return
        task = asyncio.current_task()
        assert task is not None, "a coroutine is cut in a task of its own"
        if self.late and isinstance(waited_for, asyncio.Future):
            waited_for.add_done_callback(lambda _: task.cancel() and None)  # runs before the task's own, which is added later
        else:
            task.cancel()


class Counted:
    """Awaits a coroutine and tells a `Cut` of each suspension."""

    def __init__(self, work: Coroutine[Any, Any, None], cut: Cut) -> None:
        self._work = work
        self._cut = cut

    def __await__(self) -> Generator[Any, Any, None]:
        thrown: BaseException | None = None
        while True:
            try:
                waited_for = self._work.send(None) if thrown is None else self._work.throw(thrown)
            except StopIteration:
                return
            thrown = None
            self._cut.reached(waited_for)
            try:
                yield waited_for
            except BaseException as error:  # the coroutine's to handle
                thrown = error


async def cut_off(work: Coroutine[Any, Any, None], cut: Cut) -> None:
    """Run `work` in a task of its own, cancelled where `cut` says. Raises what it raised, its cancellation aside."""

    async def counted() -> None:
        await Counted(work, cut)

    await until_cut(counted())


async def until_cut(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, some of which is `Counted`, in a task of its own. Raises what it raised, its cancellation aside."""
    task = asyncio.ensure_future(work)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
