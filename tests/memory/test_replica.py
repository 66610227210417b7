"""Sessions on two devices: owner and peer have the same bytes after whatever happens to a session, one mirror or two."""

import asyncio
import random

import pytest

from memory import BarrierFailed, CopybackInFlight, DoesNotFit, barrier, verify_mirror
from memory.image import Loading, read_out
from memory.replica import verify_replica
from streams import CpuBackend, DependencyFailed, Fault, SeededOrder, VirtualBackend
from tests.memory.memory_world import LAYOUT, live
from tests.memory.pair_world import PairConversation, PairStage

slow, long = pytest.mark.slow, pytest.mark.long
WAYS = [(False, 1), (False, 2), (True, 1), (True, 2)]
ways = pytest.mark.parametrize(
    ("resident", "replicas"), [WAYS[0], *(pytest.param(*way, marks=slow if way == (False, 2) else long) for way in WAYS[1:])]
)


def fork(one: PairConversation, rows: int, tokens_max: int = 3000, name: str = "two") -> PairConversation:
    made = object.__new__(PairConversation)
    made.stage = one.stage
    made.session = one.stage.placement.fork(
        one.session, name, tokens_max, rows, compute=one.stage.compute, copyback=one.stage.copyback
    )  # fmt: skip
    made.salts = one.salts[:rows]
    return made


@ways
async def test_pages_are_split_and_rows_are_on_both(backend: CpuBackend, resident: bool, replicas: int) -> None:
    """Chunks and steps past three pages: rows are on both devices, even pages on the owner and odd ones at the peer, and barriers pass."""
    stage = PairStage(backend, resident=resident, replicas=replicas)
    before = stage.snapshot()
    one = stage.converse(3000)
    for rows in (200, 200, 1, 64, 63, 65):
        await one.append(rows)
    await one.decode(450, each=30)
    for _ in range(6):
        await one.append(200)
    await one.decode(70, each=7)
    await one.session.operations.settle()
    one.check()
    assert (one.session.owner.pages.pages, one.session.peer.pages.pages) == (2, 1)
    assert await barrier(one.session, stage.copyback) == len(one.salts) == 2313
    one.check()
    for each in (one.session.owner, one.session.peer) if replicas == 2 else (one.session.owner,):
        verify_mirror(each, LAYOUT)
    assert stage.peer_arena.statistics().references == stage.arena.statistics().references == 37
    one.session.close()
    await backend.stream("owner.compute").idle()
    assert stage.snapshot() == before


@ways
@pytest.mark.parametrize(
    "rows", [1100, *(pytest.param(rows, marks=slow if rows == 1024 else long) for rows in (1, 64, 100, 1023, 1024, 2048, 2100))]
)
async def test_forks_and_cuts_on_both_devices(backend: CpuBackend, resident: bool, replicas: int, rows: int) -> None:
    """A fork anywhere, of a session whose later copies may be in flight, then a cut of either through what they share: no byte is lost."""
    stage = PairStage(backend, resident=resident, replicas=replicas, blocks=150)
    one = stage.converse(3000)
    for _ in range(11):
        await one.append(199)
    await one.decode(20, each=10)
    two = fork(one, rows)
    await one.decode(40, each=20)
    await two.append(70)
    await two.session.operations.settle()
    for each in (one, two):
        await each.session.operations.settle()
        each.check()
    await two.truncate(max(1, rows - 37))
    await one.truncate(rows // 2 + 3)
    await one.append(130)
    await two.decode(70, each=35)
    for each in (one, two):
        await each.session.operations.settle()
        each.check()
        await barrier(each.session, stage.copyback)
        each.check()
        each.session.close()


@slow
@ways
async def test_idle_sessions_wake_on_both_devices(backend: CpuBackend, resident: bool, replicas: int) -> None:
    """A session that rested, gave up its pages and grew has every row and key where it was on both devices."""
    stage = PairStage(backend, resident=resident, replicas=replicas, blocks=150)
    one = stage.converse(2300)
    for _ in range(11):
        await one.append(200)
    await barrier(one.session, stage.copyback)
    assert stage.placement.shed(one.session, shared=True)
    assert one.session.owner.pages.pages == one.session.peer.pages.pages == 0
    assert stage.placement.grow(one.session, 5000)
    assert not stage.placement.grow(one.session, 4000)
    await one.decode(66, each=33)
    await one.append(190)
    await one.session.operations.settle()
    one.check()
    assert stage.placement.rest(one.session)
    stage.placement.grow(one.session, 5000)
    assert stage.placement.shrink(one.session)
    one.check()


@slow
@ways
async def test_a_loaded_image_is_on_both_devices(backend: CpuBackend, resident: bool, replicas: int) -> None:
    """What was read out of one session and loaded into another is there byte for byte on both devices, mirrors included, and goes on."""
    stage = PairStage(backend, resident=resident, replicas=replicas, blocks=200)
    one = stage.converse(2300)
    for _ in range(11):
        await one.append(197)
    image = await read_out(one.session, stage.copyback)
    two = stage.converse(3000, "two")
    loading = Loading(two.session, LAYOUT, image.rows, tables=stage.compute, copies=stage.copyback.stream, window=4)
    blocks = -(-image.rows // 64)
    for first in range(0, blocks, 4):
        stop = min(first + 4, blocks)
        for block in range(first, stop):
            loading.target(block).copy_(one.session.mirror_block(block))
        await loading.place(first, stop)
    await loading.finish(image.hidden, image.hidden_from)
    two.salts = list(one.salts)
    two.check()
    await two.decode(66, each=11)
    await two.append(150)
    await barrier(two.session, stage.copyback)
    two.check()


@pytest.mark.parametrize(("resident", "replicas"), WAYS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=slow if seed == 1 else long) for seed in range(1, 6))])
async def test_no_order_of_completions_loses_a_row_on_either_device(resident: bool, replicas: int, seed: int) -> None:
    """Lives of two sessions under each seed: rollbacks, cuts, chunks, barriers; bytes agree, and closing leaves nothing held."""
    draw = random.Random(seed)
    backend = VirtualBackend(seed)
    stage = PairStage(backend, resident=resident, replicas=replicas, blocks=24)
    before = stage.snapshot()
    pair = [stage.converse(600, session_id=str(number)) for number in range(2)]
    for _ in range(14):
        await live(draw.choice(pair), stage, draw)
    for conversation in pair:
        await barrier(conversation.session, stage.copyback)
        await conversation.session.operations.settle()
        conversation.check()
        conversation.session.close()
    await backend.close()
    assert stage.snapshot() == before


@pytest.mark.parametrize("label", ["replica", "chunk.replica", "copyback", "mirrored"])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_lost_copy_breaks_its_session_and_nothing_else(label: str, replicas: int) -> None:
    """Whichever copy fails on whichever device, no count claims its rows, the barrier refuses, and the other session goes on."""
    backend = VirtualBackend(SeededOrder(3, faults=(Fault(label, nth=1),)))
    stage = PairStage(backend, replicas=replicas)
    one, two = stage.converse(session_id="one"), stage.converse(session_id="two")
    failed = False
    try:
        for _ in range(3):
            await one.append(100)
            await one.decode(100, each=50)
    except (DependencyFailed, AssertionError):
        failed = True
    await one.session.operations.settle()
    if label in ("copyback", "mirrored"):
        assert one.session.operations.broken is not None
        with pytest.raises(BarrierFailed):
            await barrier(one.session, stage.copyback)
    else:
        assert failed, "the replica never failed"
    await two.append(150)
    await two.decode(64)
    await barrier(two.session, stage.copyback)
    two.check()
    await backend.close()


async def test_a_replica_that_differs_is_found(backend: CpuBackend) -> None:
    """One byte changed in the peer's ring, or in the second mirror, is named; a cut into copies in flight is refused on both devices."""
    stage = PairStage(backend, replicas=2)
    one = stage.converse()
    await one.append(150)
    await one.decode(5)
    verify_replica(one.session, LAYOUT)
    block = one.session.peer.device_block(2)
    block[LAYOUT.row_offset(1, 3)] += 1
    with pytest.raises(BarrierFailed, match="rows of layer 1 in block 2"):
        verify_replica(one.session, LAYOUT)
    block[LAYOUT.row_offset(1, 3)] -= 1
    one.session.peer.mirror_block(0)[LAYOUT.key_offset(0, 5)] += 1
    with pytest.raises(BarrierFailed, match="RAM: keys 0 of block 0"):
        verify_replica(one.session, LAYOUT)


async def test_what_one_device_refuses_neither_holds(backend: CpuBackend) -> None:
    """A session that fits the owner and not the peer is refused with the peer's missing bytes, and nothing of it is held."""
    stage = PairStage(backend)
    before = stage.snapshot()
    needs = stage.placement.peer.needs(1000)
    stage.placement.peer.pool._budget_bytes = stage.peer_pool.statistics().allocated_bytes + needs.device_bytes - 1
    with pytest.raises(DoesNotFit, match="1 "):
        stage.converse(1000)
    after = stage.snapshot()
    assert after[:5] == before[:5]
    assert stage.peer_ledger.statistics() == before[3]


async def test_a_cut_into_copies_in_flight_is_refused_by_both() -> None:
    """While the peer's copy is in flight a cut below it changes nothing on either device."""
    backend = VirtualBackend(1)
    stage = PairStage(backend, replicas=2)
    one = stage.converse()
    held = []
    real = stage.peer_copyback.stream.submit

    def submit(*args, **kwargs):  # type: ignore[no-untyped-def]
        event = real(*args, **kwargs)
        if kwargs["label"] == "copyback":
            backend.hold(event)
            held.append(event)
        return event

    stage.peer_copyback.stream.submit = submit  # type: ignore[method-assign]
    await one.decode(64)
    for _ in range(50):
        await asyncio.sleep(0)
    with pytest.raises(CopybackInFlight):
        one.session.truncate(10, stage.compute)
    assert one.session.owner.counts.logical == one.session.peer.counts.logical == 64
    for event in held:
        backend.release(event)
    await one.session.operations.settle()
    await one.truncate(10)
    one.check()
    await backend.close()
