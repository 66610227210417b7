"""The requests that generate, by the names that somebody may end them by.

Knows no HTTP. A client may give several requests one name; those of another key are nobody's.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from engine.choices import Choices
from engine.errors import UnknownRequest, shown

__all__ = ["RunningRequests"]


class RunningRequests:
    """Of all namespaces. Loop only."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], list[Choices]] = {}  # by namespace and name

    @contextmanager
    def named(self, namespace: str, names: Iterable[str], choices: Choices) -> Iterator[None]:
        """For the length of the block the request may be ended by any of these names."""
        keys = [(namespace, name) for name in names]
        for key in keys:
            self._named.setdefault(key, []).append(choices)
        try:
            yield
        finally:
            for key in keys:
                self._named[key].remove(choices)
                if not self._named[key]:
                    del self._named[key]

    async def end(self, namespace: str, name: str) -> None:
        """End what runs under a name and wait until it has. Raises UnknownRequest."""
        found = list(self._named.get((namespace, name), ()))
        if not found:
            raise UnknownRequest(f"no request {shown(name)} is running")
        for choices in found:
            await choices.cancel()
