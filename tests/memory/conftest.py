"""A CPU backend for the tests of sessions, closed after each."""

from collections.abc import AsyncIterator

import pytest

from streams import CpuBackend
from tests.memory.memory_world import release_all


@pytest.fixture
async def backend() -> AsyncIterator[CpuBackend]:
    """A backend of this test's own."""
    made = CpuBackend()
    yield made
    release_all()
    await made.close()
