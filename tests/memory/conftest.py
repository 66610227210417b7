"""A CPU backend for the tests of sessions, closed after each."""

from collections.abc import AsyncIterator

import pytest

from streams import CpuBackend


@pytest.fixture
async def backend() -> AsyncIterator[CpuBackend]:
    """A backend of this test's own."""
    made = CpuBackend()
    yield made
    await made.close()
