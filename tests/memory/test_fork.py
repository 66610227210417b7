"""Forks: what is shared, what is copied, and what becomes of both sessions afterwards; sessions at rest."""

import asyncio
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.layout import BLOCK_ROWS
from memory import DoesNotFit, barrier
from memory.offload import OffloadSession
from streams import CpuBackend, DependencyFailed, Fault, SeededOrder, TransferFailed, VirtualBackend
from tests.memory.memory_world import LAYOUT, Conversation, Stage, hold, release_all

both = pytest.mark.parametrize("resident", [False, True], ids=["offload", "resident"])


def fork(one: Conversation, rows: int, tokens_max: int = 1000, name: str = "two") -> Conversation:
    """A conversation that begins with the first `rows` rows of another."""
    stage, made = one.stage, object.__new__(Conversation)
    made.stage = stage
    made.session = stage.placement.fork(one.session, name, tokens_max, rows, compute=stage.compute, copyback=stage.copyback)
    made.salts = one.salts[:rows]
    return made


@both
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 192, 199, 200])
async def test_a_fork_has_the_rows_and_goes_its_own_way(backend: CpuBackend, resident: bool, rows: int) -> None:
    """A fork anywhere has the rows before it; then both write on, and neither sees a byte of the other."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(200)
    two = fork(one, rows)
    assert two.session.counts.committed == rows
    await two.session.operations.settle()
    two.check()
    await one.decode(70, each=35)
    await two.append(90)
    await two.decode(70, each=35)
    for each in (one, two):
        await each.session.operations.settle()
        each.check()
        assert await barrier(each.session, stage.copyback) == len(each.salts)
        each.check()
    stage.check()


@both
async def test_a_fork_takes_one_block_and_one_page_a_layer(backend: CpuBackend, resident: bool) -> None:
    """Forked at row 1,100 of 1,200 a session holds two references more to each full block, and one block and one page are new."""
    stage = Stage(backend, resident=resident, blocks=200)
    one = stage.converse(1300)
    for _ in range(6):
        await one.append(200)
    before = stage.ledger.holding("device", "pages").payload_bytes
    two = fork(one, 1100, 1100)
    await two.session.operations.settle()
    assert stage.ledger.holding("device", "pages").payload_bytes - before == LAYOUT.key_layers * LAYOUT.key.page_bytes
    shared = 1100 // BLOCK_ROWS
    assert all(two.session.history.allotment.shared(block) for block in range(shared))
    assert not two.session.history.allotment.shared(shared)
    assert two.session.history.blocks == shared + 1
    assert two.session.pages.allotment.shared(0)
    assert not two.session.pages.allotment.shared(1)
    two.check()


@both
async def test_the_tail_is_copied_whole(backend: CpuBackend, resident: bool) -> None:
    """A fork at row 100 holds rows 100 to 127 of the block too, and their keys: what a later row of the same token needs stays."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(200)
    two = fork(one, 100)
    await two.session.operations.settle()
    two.check_block(two.session.device_block(1), 1, one.salts)
    for layer in range(LAYOUT.key_layers):
        assert torch.equal(two.session.pages.view(layer, 0), one.session.pages.view(layer, 0))


async def test_rows_that_are_not_in_ram_yet_are_copied_from_the_ring(backend: CpuBackend) -> None:
    """With every copyback held, a fork copies four ring blocks; released, both bring their own to RAM."""
    stage = Stage(backend)
    one = stage.converse()
    release = hold(stage.copyback.stream)
    await one.decode(250, each=50)
    assert one.session.counts.mirrored == 0
    two = fork(one, 240)
    assert two.session.counts.mirrored == 0
    release()
    for each in (one, two):
        await each.session.operations.settle()
        assert each.session.counts.mirrored == 192
        each.check()
    assert not two.session.history.allotment.shared(0)


@both
async def test_a_fork_of_a_session_that_decodes(backend: CpuBackend, resident: bool) -> None:
    """Forked with a step in flight, the new session has the committed rows asked for; the other one goes on."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(200)
    release = hold(stage.compute)
    event = one.submit_step(8)
    two = fork(one, 191)
    release()
    await event
    one.session.commit(8, stage.copyback, event)
    await two.decode(80, each=40)
    for each in (one, two):
        await each.session.operations.settle()
        each.check()


@both
async def test_a_source_may_close_or_be_cut_before_the_copy_ran(backend: CpuBackend, resident: bool) -> None:
    """The fork's copies find their bytes although the source is cut, rewritten and closed while they wait."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(200)
    release = hold(stage.compute)
    two = fork(one, 100)
    event = one.session.truncate(70, stage.compute)
    del one.salts[70:]
    one.submit_step(8)
    one.session.close()
    release()
    await event
    await two.session.operations.settle()
    two.check()
    two.session.close()
    await asyncio.gather(*(stream.idle() for stream in (stage.compute, stage.copyback.stream)))
    assert stage.arena.statistics().free == stage.arena.statistics().blocks


@both
async def test_a_cut_into_shared_units_leaves_the_other_session_alone(backend: CpuBackend, resident: bool) -> None:
    """Both sessions of a fork may be cut into what they share and write on; a barrier after the cut brings the kept rows to RAM again."""
    stage = Stage(backend, resident=resident, blocks=120)
    one = stage.converse(1400)
    for _ in range(6):
        await one.append(200)
    two = fork(one, 1200, 1400)
    await two.session.operations.settle()
    for each, rows in ((one, 700), (two, 1000), (two, 650)):
        await each.truncate(rows)
        assert await barrier(each.session, stage.copyback) == rows
        each.check()
        await each.decode(40)
    for each in (one, two):
        await each.session.operations.settle()
        each.check()


async def test_a_cut_into_a_shared_block_without_room_changes_nothing(backend: CpuBackend) -> None:
    """With an arena that is full a cut into a shared block is refused with the missing bytes, and passes once there is room."""
    stage = Stage(backend, blocks=8)
    one = stage.converse(256)
    await one.append(150)
    two = fork(one, 150, 384)
    await two.session.operations.settle()
    await two.append(200)
    assert stage.arena.available == 0
    one.session.history.allotment.rest()
    filler = stage.converse(64, "four")
    with pytest.raises(DoesNotFit, match="host memory"):
        one.session.truncate(100, stage.compute)
    assert one.session.counts.logical == 150
    one.check()
    filler.session.close()
    await one.truncate(100)
    one.check()
    two.check()


@both
@pytest.mark.parametrize("budget", range(1, 40))
async def test_a_fork_that_does_not_fit_holds_nothing(backend: CpuBackend, resident: bool, budget: int) -> None:
    """At any budget a fork either fits or leaves arena, pool, ledger and every reference as before."""
    stage = Stage(backend, resident=resident, blocks=9)
    one = stage.converse(320)
    await one.append(200)
    await one.session.operations.settle()
    needs = stage.placement.needs(320).device_bytes
    stage.pool._budget_bytes = stage.pool.statistics().allocated_bytes + stage.pool.statistics().reserved_bytes + needs * budget // 40
    before = stage.snapshot()
    try:
        two = fork(one, 200, 320)
    except DoesNotFit:
        assert stage.snapshot() == before
    else:
        await two.session.operations.settle()
        two.check()
    one.check()


@both
async def test_hidden_states_are_known_of_the_last_rows_only(backend: CpuBackend, resident: bool) -> None:
    """A fork within sixteen rows of the end knows the state before its next row; further back it does not, nor after a cut there."""
    stage = Stage(backend, resident=resident, blocks=128)
    one = stage.converse()
    await one.append(200)
    one.session.hidden[:] = torch.arange(16.0)[:, None]
    for rows, known in ((200, True), (186, True), (185, True), (184, False), (64, False)):
        two = fork(one, rows, name=f"fork {rows}")
        await two.session.operations.settle()
        assert (two.session.counts.hidden_from < rows) is known
        assert torch.equal(two.session.hidden, one.session.hidden)
    await one.truncate(190)
    assert one.session.counts.hidden_from == 184
    await one.truncate(150)
    assert one.session.counts.hidden_from == 150
    await one.append(5)
    assert one.session.counts.hidden_from == 150
    await one.append(20)
    assert one.session.counts.hidden_from == 159


@both
async def test_a_session_at_rest_holds_its_rows_and_nothing_else(backend: CpuBackend, resident: bool) -> None:
    """Rest frees reservation and hot caches; grown again the session goes on; and a second rest frees nothing."""
    stage = Stage(backend, resident=resident)
    one = stage.converse(1000)
    await one.append(150)
    await one.session.operations.settle()
    assert stage.placement.rest(one.session)
    assert not stage.placement.rest(one.session)
    one.check()
    assert one.session.statistics().hot == ()
    arena = stage.arena.statistics()
    assert (arena.reserved, arena.blocks - arena.free) == (0, 0 if resident else 3)
    assert not one.session.room(150, 1)
    two = fork(one, 140)
    await one.session.operations.settle()
    assert stage.placement.grow(one.session, 400)
    await one.decode(100, each=50)
    await one.append(60)
    for each in (one, two):
        await each.session.operations.settle()
        each.check()
    assert isinstance(one.session, OffloadSession) is not resident


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["append", "decode", "fork", "truncate", "barrier", "rest", "shed", "close"]), st.integers(0, 5), st.floats(0, 1)
    ),
    max_size=25,
)  # fmt: skip


@pytest.mark.parametrize("resident", [False, True], ids=["offload", "resident"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves=MOVES)
def test_any_order_of_forks_cuts_and_ends(resident: bool, moves: list[tuple[str, int, float]]) -> None:
    """Forked, diverged, truncated, at rest and deleted in any order, every session has its bytes and references equal holders."""
    asyncio.run(_live(resident, moves))


async def _live(resident: bool, moves: list[tuple[str, int, float]]) -> None:
    backend = CpuBackend()
    stage = Stage(backend, resident=resident, blocks=400)
    alive = [stage.converse(1500, "first")]
    await alive[0].append(150)
    draw = random.Random(len(moves))
    try:
        for number, (move, which, part) in enumerate(moves):
            await _move(stage, alive, move, which, part, f"fork {number}", draw)
            await _check_all(stage, alive)
        for each in alive:
            each.session.close()
        await stage.compute.idle()
        await stage.copyback.stream.idle()
        assert stage.arena.statistics().free == 400
        assert stage.pool.statistics().reserved_bytes == 0
        stage.check()
    finally:
        release_all()
        await backend.close()


async def _move(stage: Stage, alive: list[Conversation], move: str, which: int, part: float, name: str, draw: random.Random) -> None:
    if not alive:
        alive.append(stage.converse(1500, name))
        return
    one = alive[which % len(alive)]
    rows, left = len(one.salts), 1400 - len(one.salts)
    if move in ("append", "decode") and left > 0:
        await one.session.operations.settle()
        stage.placement.grow(one.session, 1500)
        if move == "append":
            await one.append(min(left, 1 + int(part * 199)))
        else:
            await one.decode(min(left, 1 + int(part * 130)), each=draw.choice([1, 7, 32]))
    elif move == "fork" and rows and len(alive) < 6:
        alive.append(fork(one, max(1, round(part * rows)), 1500, name))
    elif move == "truncate":
        await one.session.operations.settle()
        await one.truncate(round(part * rows))
    elif move == "barrier" and rows:
        await barrier(one.session, stage.copyback)
    elif move == "rest":
        await one.session.operations.settle()
        stage.placement.rest(one.session)
    elif move == "shed":
        await one.session.operations.settle()
        stage.placement.shed(one.session, shared=part < 0.5)
    elif move == "close":
        alive.remove(one)
        one.session.close()


async def _check_all(stage: Stage, alive: list[Conversation]) -> None:
    held: dict[int, int] = {}
    pages: dict[int, int] = {}
    for each in alive:
        await each.session.operations.settle()
        each.check()
        for address in each.session.history.addresses[: each.session.history.blocks].tolist():
            held[address] = held.get(address, 0) + 1
        for address in each.session.pages.addresses[0, : each.session.pages.pages].tolist():
            pages[address] = pages.get(address, 0) + 1
    await stage.compute.idle()
    for each in alive:
        history, table = each.session.history, each.session.pages
        assert all(history.allotment.shared(block) is (held[int(history.addresses[block])] > 1) for block in range(history.blocks))
        assert all(table.allotment.shared(page) is (pages[int(table.addresses[0, page])] > 1) for page in range(table.pages))
    if stage.placement.statistics().placement == "offload":
        taken = stage.arena.statistics()
        assert (taken.blocks - taken.free, taken.references) == (len(held), sum(held.values()))
    assert stage.ledger.holding("device", "pages").payload_bytes == len(pages) * LAYOUT.key_layers * LAYOUT.key.page_bytes


@both
@pytest.mark.parametrize("what", ["fork", "truncate"])
async def test_a_fork_behind_a_fork_or_cut_that_fails_is_broken_too(resident: bool, what: str) -> None:
    """Whoever forks a session before its own fork or cut has failed gets rows of nobody: the fork is broken, its source's source is not."""
    stage = Stage(VirtualBackend(SeededOrder(1, faults=(Fault(what),))), resident=resident)
    one = stage.converse()
    await one.append(200)
    two = fork(one, 190)
    if what == "truncate":
        await two.session.operations.settle()
        two.session.truncate(100, stage.compute)
        del two.salts[100:]
    three = fork(two, 90, name="three")
    await three.session.operations.settle()
    assert two.session.operations.broken is not None
    assert isinstance(three.session.operations.broken, TransferFailed)
    assert one.session.operations.broken is None
    one.check()
    with pytest.raises(AssertionError, match="which is broken"):
        fork(two, 90, name="four")


async def test_a_fork_lives_when_a_copy_of_its_source_is_lost() -> None:
    """A lost copyback of the source says nothing of rows that a fork copies from its ring."""
    backend = VirtualBackend(SeededOrder(1, faults=(Fault("copyback"),)))
    stage = Stage(backend)
    one = stage.converse()
    copies = backend.stream("copyback").submit(lambda: None, label="before")
    backend.hold(copies)
    await one.decode(100, each=50)
    two = fork(one, 60)
    backend.release(copies)
    await one.session.operations.settle()
    await two.session.operations.settle()
    assert isinstance(one.session.operations.broken, TransferFailed)
    assert two.session.operations.broken is None
    two.check()


@both
async def test_a_chunk_behind_a_fork_that_fails_is_never_counted(resident: bool) -> None:
    """A prompt read on top of rows that did not come fails with them: no row of it is counted, on host or device."""
    stage = Stage(VirtualBackend(SeededOrder(1, faults=(Fault("fork"),))), resident=resident)
    one = stage.converse()
    await one.append(100)
    two = fork(one, 70)
    with pytest.raises(DependencyFailed, match="TransferFailed"):
        await two.append(90)
    assert two.session.counts.logical == 70
    two.session.close()
    await one.append(20)
    one.check()
