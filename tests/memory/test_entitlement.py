"""What a session lost of its entitlement by cutting shared blocks beside a full store, and how it has it again before it goes on."""

import pytest

from memory import DoesNotFit
from streams import CpuBackend
from tests.memory.memory_world import Conversation, Stage
from tests.memory.test_fork import fork


async def _cut_beside_a_full_store(backend: CpuBackend, resident: bool) -> tuple[Stage, Conversation, Conversation]:
    """A session of at most 256 rows, cut to none while a fork has its three full blocks and nothing is free; and who has the rest."""
    stage = Stage(backend, resident=resident, blocks=8)
    one = stage.converse(256)
    await one.append(200)
    two = fork(one, 192, 256)
    await two.session.operations.settle()
    if resident:
        stage.pool._budget_bytes = stage.pool.statistics().allocated_bytes + stage.pool.statistics().reserved_bytes
    filler = stage.converse(192, "filler") if not resident else two
    await one.truncate(0)
    return stage, one, filler


async def test_a_turn_without_room_for_what_was_cut_is_refused(backend: CpuBackend) -> None:
    """A grow to what the session could once hold asks for the lost blocks too: refused with nothing changed, and granted with room."""
    stage, one, filler = await _cut_beside_a_full_store(backend, resident=False)
    assert stage.arena.available == 0
    before = stage.snapshot()
    with pytest.raises(DoesNotFit, match="host memory"):
        stage.placement.grow(one.session, 256)
    assert stage.snapshot() == before
    filler.session.close()
    assert stage.placement.grow(one.session, 256) is False
    await one.append(200)
    await one.session.operations.settle()
    one.check()


async def test_resident_blocks_are_asked_for_again(backend: CpuBackend) -> None:
    """The same for blocks on the device."""
    stage, one, two = await _cut_beside_a_full_store(backend, resident=True)
    before = stage.snapshot()
    with pytest.raises(DoesNotFit):
        stage.placement.grow(one.session, 256)
    assert stage.snapshot() == before
    two.session.close()
    stage.placement.grow(one.session, 256)
    await one.append(200)
    await one.session.operations.settle()
    one.check()
