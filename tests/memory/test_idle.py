"""Sessions at rest: pages of index keys given up, forked without, cut without, and filled again from the blocks."""

import pytest

from kernels.layout import TableField
from memory import DoesNotFit, barrier, verify_mirror
from streams import CpuBackend
from tests.memory.memory_world import LAYOUT, Conversation, Stage
from tests.memory.test_fork import both, fork


async def filled(one: Conversation) -> None:
    """Grown and decoded on: every page is held again, and has its keys."""
    assert one.stage.placement.grow(one.session, len(one.salts) + 100)
    await one.decode(7)
    await one.session.operations.settle()
    assert one.session.pages.pages == -(-len(one.salts) // 1024)
    one.check()


@both
@pytest.mark.parametrize("rows", [1, 100, 1024, 1030, 1399])
async def test_pages_given_up_are_filled_from_the_blocks(backend: CpuBackend, resident: bool, rows: int) -> None:
    """A session gives up all its pages, is archived from its blocks as before, and goes on with the keys it had."""
    stage = Stage(backend, resident=resident, blocks=200)
    one = stage.converse(2000)
    while len(one.salts) < rows:
        await one.append(min(200, rows - len(one.salts)))
    await one.session.operations.settle()
    assert stage.placement.shed(one.session, shared=False)
    assert not stage.placement.shed(one.session, shared=True)
    assert stage.ledger.holding("device", "pages").payload_bytes == 0
    assert await barrier(one.session, stage.copyback) == rows
    verify_mirror(one.session, LAYOUT)
    one.check()
    await filled(one)
    stage.check()


@both
async def test_shared_pages_go_last(backend: CpuBackend, resident: bool) -> None:
    """Its own pages a session gives up first; the shared ones are free when both have given them up, and each gets its own again."""
    stage = Stage(backend, resident=resident, blocks=200)
    one = stage.converse(1300)
    for _ in range(6):
        await one.append(200)
    two = fork(one, 1100, 1200)
    for each in (one, two):
        await each.session.operations.settle()
        assert stage.placement.shed(each.session, shared=False)
        assert each.session.pages.pages == 1
    for number, each in enumerate((one, two)):
        assert stage.placement.shed(each.session, shared=True)
        assert stage.ledger.holding("device", "pages").payload_bytes == (1 - number) * LAYOUT.key_layers * LAYOUT.key.page_bytes
    for each in (one, two):
        await filled(each)
    stage.check()


@both
@pytest.mark.parametrize("rows", [1, 64, 1024, 1100, 1200])
@pytest.mark.parametrize("kept", [0, 1])
async def test_a_fork_of_a_session_without_pages(backend: CpuBackend, resident: bool, rows: int, kept: int) -> None:
    """The fork has its keys from the blocks, whichever pages the source still has; the source stays without, and goes on later."""
    stage = Stage(backend, resident=resident, blocks=200)
    one = stage.converse(1300)
    for _ in range(6):
        await one.append(200)
    holder = fork(one, 1024, 1100, "holder") if kept else None
    await one.session.operations.settle()
    stage.placement.shed(one.session, shared=False)
    assert one.session.pages.pages == kept
    two = fork(one, rows, 1300)
    await one.session.operations.settle()
    assert one.session.pages.pages == kept
    two.check()
    await two.decode(20)
    await filled(one)
    for each in filter(None, (two, holder)):
        await each.session.operations.settle()
        each.check()
    stage.check()


@both
async def test_a_session_without_pages_is_cut_and_grown_back(backend: CpuBackend, resident: bool) -> None:
    """Cut after it gave up its pages, and woken for a turn shorter than what it was, a session has its keys where its tables say."""
    stage = Stage(backend, resident=resident, blocks=200)
    one = stage.converse(3000)
    for _ in range(6):
        await one.append(200)
    await one.session.operations.settle()
    stage.placement.shed(one.session, shared=False)
    await one.truncate(1050)
    assert stage.placement.grow(one.session, 1060)
    assert not stage.placement.grow(one.session, 1060)
    row = one.session.table_row(1)
    assert row[TableField.PAGES_MAX] == one.session.pages.table.shape[1]
    await one.decode(7)
    await one.session.operations.settle()
    one.check()


@both
async def test_pages_that_do_not_fit_again(backend: CpuBackend, resident: bool) -> None:
    """A grow that lacks room for the pages is refused with the bytes, and changes nothing."""
    stage = Stage(backend, resident=resident, blocks=200, budget_bytes=10 << 20)
    one = stage.converse(1300)
    for _ in range(6):
        await one.append(200)
    await one.session.operations.settle()
    stage.placement.shed(one.session, shared=False)
    held = stage.pool.statistics()
    assert held.budget_bytes is not None
    filler = stage.pool.take(held.budget_bytes - held.allocated_bytes - 64, "filler")
    before = stage.snapshot()
    for tokens_max in (1200, 1300):
        with pytest.raises(DoesNotFit) as caught:
            stage.placement.grow(one.session, tokens_max)
        assert caught.value.device_missing_bytes >= 2 * stage.placement._keys.span_bytes - 64  # type: ignore[attr-defined]  # both have it
        assert stage.snapshot() == before
    stage.pool.give(filler)
    await filled(one)
