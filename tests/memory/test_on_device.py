"""The memory layer over a device's tensors: by default the CPU's, with `-m gpu` a card's, whose every byte must be the CPU's.

On a card the arena is registered, copies run on streams of their own, and nothing that a step does makes the host wait.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from kernels.gather import gather_rows
from kernels.layout import StateField
from memory import Arena, Ledger, Pool, RegistrationRefused, registration_for
from memory.copyback import copy_bytes
from memory.registration import DeviceRegistration
from memory.staging import Glance, behind_fills, landing, outside_streams
from streams.device import DeviceBackend
from tests.memory.device_world import DeviceLife
from tests.memory.memory_world import LAYOUT

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
BLOCK = LAYOUT.block_bytes
both = pytest.mark.parametrize("resident", [False, True], ids=["offload", "resident"])
everywhere = pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu"), pytest.param(CARD, id="card", marks=pytest.mark.gpu)])


async def lived(device: torch.device, *, resident: bool, seed: int) -> DeviceLife:
    """A whole random life, a grow in its middle; closed."""
    life = DeviceLife(device, resident=resident, tokens_max=600, seed=seed)
    await life.play(12, 600)
    await life.grow(1400)
    await life.play(12, 1400)
    state = life.session.state.tolist()
    assert resident or (state[StateField.HITS] and state[StateField.MISSES] and state[StateField.RING_READS]), "a way to read was not taken"
    await life.close()
    return life


@everywhere
@both
@pytest.mark.parametrize("seed", range(4))
async def test_a_life_reads_the_same_bytes_everywhere(device: torch.device, resident: bool, seed: int) -> None:
    """Appends, steps in flight, rollbacks, cuts, barriers and a grow: every read is what was written, and a card's are the CPU's."""
    life = await lived(device, resident=resident, seed=seed)
    assert life.session.counts.mirrored == life.session.counts.logical == len(life.truth)
    if device.type == "cpu":
        return
    here = await lived(CPU, resident=resident, seed=seed)
    assert len(life.read) == len(here.read)
    assert all(torch.equal(one, other) for one, other in zip(life.read, here.read, strict=True))
    assert life.session.counts.snapshot() == here.session.counts.snapshot()


@everywhere
async def test_a_block_in_ram_is_read_bit_for_bit(device: torch.device) -> None:
    """The gather kernel reads every byte of blocks at the ends of their registered chunks by the arena's addresses."""
    arena = Arena(LAYOUT, 7 * BLOCK, Ledger(), chunk_bytes=3 * BLOCK, registration=registration_for(device))
    blocks = [arena.take() for _ in range(7)]
    generator = torch.Generator().manual_seed(1)
    for block in blocks:
        arena.place(block).bytes.copy_(torch.randint(0, 256, (BLOCK,), dtype=torch.uint8, generator=generator))
    for block in blocks:
        place = arena.place(block)
        addresses = torch.arange(place.address, place.address + BLOCK, 16, device=device)
        out = torch.empty((BLOCK // 16, 16), dtype=torch.uint8, device=device)
        gather_rows(addresses, 16, out)
        assert torch.equal(out.cpu().flatten(), place.bytes), f"block {block}"
        arena.release(block)
    arena.close()


@pytest.mark.gpu
async def test_a_copyback_is_one_transfer_nobody_waits_for() -> None:
    """Behind a long kernel the submission of a block's copy returns at once; the bytes are in RAM when its event is done, and only its."""
    backend = DeviceBackend(CARD)
    compute, copyback = backend.stream("compute"), backend.stream("copyback")
    arena = Arena(LAYOUT, 3 * BLOCK, Ledger(), registration=registration_for(CARD))
    blocks = [arena.take() for _ in range(3)]
    target = arena.place(blocks[1]).bytes
    ring = Pool(CARD, None, Ledger()).take(BLOCK, "ring")
    wanted = torch.randint(0, 256, (BLOCK,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    staged = wanted.pin_memory()
    long, marker = busy()

    def write() -> None:
        behind_fills(CARD)
        long()
        ring.copy_(staged, non_blocking=True)
        marker.record()

    written = compute.submit(write, label="step")
    copied = copyback.submit(lambda: copy_bytes(target, ring), label="copyback", after=[written])
    assert not marker.query(), "the host waited for the step"
    assert not target.any()
    await copied
    assert torch.equal(target, wanted)
    assert not arena.place(blocks[0]).bytes.any()
    assert not arena.place(blocks[2]).bytes.any()
    for block in blocks:
        arena.release(block)
    await backend.close()
    arena.close()


def busy() -> tuple[Callable[[], None], torch.cuda.Event]:
    """Work that keeps a card for some tenths of a second, and a marker to record behind it."""
    side = torch.ones(8192, 8192, device=CARD)
    torch.mm(side, side)  # the library's first call allocates, and waits
    torch.cuda.synchronize()

    def work() -> None:
        for _ in range(20):
            torch.mm(side, side)

    return work, torch.cuda.Event()


@contextmanager
def refusing_to_wait(refusing: bool) -> Iterator[None]:
    """torch raises where it would wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error" if refusing else "default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


async def turn(resident: bool, held: bool) -> None:
    """Steps, new blocks, a rollback and a chunk, submitted while the compute stream is `held`."""
    life = DeviceLife(CARD, resident=resident, tokens_max=1200, seed=3)
    await life.append(130)
    await life.decode(20, 4)
    work, marker = busy()

    def hold() -> None:
        work()
        marker.record()

    with refusing_to_wait(held):
        if held:
            life.compute.submit(hold, label="busy")
        steps = [life.submit_step(50) for _ in range(2)]
        life.session.truncate(len(life.truth) - 7, life.compute)
        del life.truth[-7:]
        life.session.commit(93, life.copyback, steps[-1][0])
        chunk, event, _ = life.submit_chunk(70)
        life.session.statistics()
        finished = chunk.finish(life.compute, life.copyback, event)
    assert not held or not marker.query(), "something waited for the device"
    await finished
    await life.barrier()
    await life.close()


@pytest.mark.gpu
@both
async def test_nothing_of_a_step_waits_for_the_device(resident: bool) -> None:
    """With the compute stream held everything is submitted before the holding work is over; a first turn compiles and allocates."""
    await turn(resident, held=False)
    await turn(resident, held=True)


@pytest.mark.gpu
@both
async def test_late_zeroes_do_not_reach_rows(resident: bool) -> None:
    """Buffers whose zeroing is far behind on the default stream are used at once, and again after a grow: no row is zeroed afterwards."""
    work, _ = busy()
    life = DeviceLife(CARD, resident=resident, tokens_max=300, seed=4, late=work)
    assert outside_streams(CARD)
    for rows in (3, 70):
        work()
        await life.decode(rows, 1)
    work()
    await life.grow(1100)
    await life.decode(150, 16)
    await life.append(200)
    await life.barrier()
    await life.close()


@everywhere
@both
async def test_pages_of_index_keys_given_up_come_back(device: torch.device, resident: bool) -> None:
    """An idle session gives up its pages, its next turn fills them from where its blocks are, and decodes at once behind that."""
    life = DeviceLife(device, resident=resident, tokens_max=1300, seed=5)
    while len(life.truth) < 1200:
        await life.append(200)
    await life.decode(37, 16)
    await life.session.operations.settle()
    held = life.ledger.holding("device", "pages").allocated_bytes
    assert life.placement.shed(life.session, shared=False)
    assert life.ledger.holding("device", "pages").allocated_bytes == 0 < held
    await life.grow(1500)
    await life.decode(20, 4)
    await life.append(100)
    await life.barrier()
    assert life.ledger.holding("device", "pages").allocated_bytes == held
    await life.close()


@pytest.mark.gpu
async def test_a_glance_shows_what_arrived() -> None:
    """Behind a long kernel a glance shows the zeros it began with; later the values, exact when nothing runs."""
    glance = Glance(CARD, 2)
    values = torch.tensor([3, 9], device=CARD)
    work, _ = busy()
    glance.look(lambda: values + 0, still="now")  # the first addition loads its kernel, which may take longer than the work behind
    glance = Glance(CARD, 2)
    for _ in range(5):
        work()
    assert glance.look(lambda: values + 0, still=None) == [0, 0]
    assert glance.look(lambda: values + 0, still=None) == [0, 0]
    torch.cuda.synchronize()
    assert glance.look(lambda: values + 0, still=None) == [3, 9]
    values.add_(1)
    assert glance.look(lambda: values + 0, still="now") == [4, 10]


@pytest.mark.gpu
async def test_the_state_is_read_without_waiting() -> None:
    """A landing is pinned, and a copy into it is right when its event is done."""
    backend = DeviceBackend(CARD)
    life = DeviceLife(CARD, resident=False, tokens_max=100)
    await life.decode(9, 3)
    found = landing(life.session.state)
    assert found.is_pinned()
    await backend.stream("compute").submit(lambda: copy_bytes(found, life.session.state), label="look")
    assert int(found[StateField.LOGICAL]) == 9
    await backend.close()
    await life.close()


@pytest.mark.gpu
async def test_the_runtime_refuses_what_it_must_and_goes_on() -> None:
    """Registering a range twice is refused with the runtime's code, and the next launch does not inherit that error."""
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    start = -(-memory.data_ptr() // 4096) * 4096
    first, second = DeviceRegistration(CARD), DeviceRegistration(CARD)
    first.register(start, 1 << 16)
    with pytest.raises(RegistrationRefused, match=r"refused to register 65536 bytes of host memory after 0 \(error [1-9]"):
        second.register(start, 1 << 16)
    assert int(torch.ones(5, device=CARD).sum()) == 5
    assert second.registered_bytes == 0
    first.unregister(start)
    second.register(start, 1 << 16)
    second.unregister(start)


@pytest.mark.gpu
def test_registering_takes_a_known_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the rate of registering 8 GiB, pages touched, in chunks of 1 GiB; below 0.1 GiB/s a mirror of a terabyte takes hours."""
    size = 8 << 30
    began = time.perf_counter()
    arena = Arena(LAYOUT, size, Ledger(), registration=registration_for(CARD))
    rate = size / 2**30 / (time.perf_counter() - began)
    arena.close()
    with capsys.disabled():
        print(f"\nregistered {size / 2**30:.0f} GiB at {rate:.2f} GiB/s")
    assert rate > 0.1
