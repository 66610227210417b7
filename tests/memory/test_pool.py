"""The pool: exact buffers within a budget."""

from collections.abc import Callable

import pytest
import torch

from memory.backing import Backing, Slabs, Tensors
from memory.errors import PoolExhausted
from memory.ledger import Holding, Ledger
from memory.pool import Pool, allocated

CPU = torch.device("cpu")
backings = pytest.mark.parametrize("backing", [Tensors, Slabs])


@pytest.mark.parametrize("size_bytes", [1, 63, 64, 65, 1000])
def test_a_buffer_is_exact_aligned_and_zero(size_bytes: int) -> None:
    """The tensor has the asked length, an aligned address, zeros, and a storage of the size rounded up to 64, as the ledger says."""
    ledger = Ledger()
    pool = Pool(CPU, None, ledger)
    buffer = pool.take(size_bytes, "ring")
    assert buffer.shape == (size_bytes,)
    assert buffer.dtype == torch.uint8
    assert buffer.data_ptr() % 64 == 0
    assert not buffer.any()
    assert buffer.untyped_storage().nbytes() == -(-size_bytes // 64) * 64 == allocated(size_bytes)
    assert ledger.holding("device", "ring") == Holding(size_bytes, allocated(size_bytes))
    pool.check_integrity()


@backings
def test_a_reused_place_is_zero_again(backing: Callable[[torch.device], Backing]) -> None:
    """Bytes of a buffer that was given back never show in the next one."""
    pool = Pool(CPU, None, Ledger(), backing=backing(CPU))
    pool.reserve(4096, 2)
    for _ in range(20):
        buffer = pool.take(4096, "ring")
        assert not buffer.any()
        buffer.fill_(255)
        pool.give(buffer)


@backings
def test_the_budget_is_kept_to_the_byte(backing: Callable[[torch.device], Backing]) -> None:
    """A take that fits exactly succeeds; one byte more raises with the missing bytes and changes nothing."""
    ledger = Ledger()
    pool = Pool(CPU, 256, ledger, backing=backing(CPU))
    first = pool.take(129, "ring")  # 192 allocated
    with pytest.raises(PoolExhausted) as caught:
        pool.take(65, "ring")
    assert caught.value.missing_bytes == 64
    assert caught.value.device_missing_bytes == 64
    assert ledger.total("device") == Holding(129, 192)
    pool.take(64, "ring")
    with pytest.raises(PoolExhausted):
        pool.take(1, "ring")
    pool.give(first)
    assert pool.statistics().allocated_bytes == 64
    pool.take(192, "ring")


def refuse(*_: object, **__: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("out of memory")


@backings
def test_what_the_device_lacks_is_exhaustion(monkeypatch: pytest.MonkeyPatch, backing: Callable[[torch.device], Backing]) -> None:
    """A device that runs out below the budget raises PoolExhausted with the whole buffer's bytes, and nothing is counted."""
    ledger = Ledger()
    pool = Pool(CPU, 4096, ledger, backing=backing(CPU))
    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(PoolExhausted) as caught:
        pool.take(129, "ring")
    assert caught.value.device_missing_bytes == 192
    monkeypatch.undo()
    assert pool.statistics().allocated_bytes == 0
    assert ledger.statistics() == Ledger().statistics()
    pool.check_integrity()


def test_what_is_reserved_on_a_device_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reservation the device cannot back is refused whole; a backed one is taken to the last buffer though the device has no more."""
    pool = Pool(CPU, None, Ledger(), backing=Slabs(CPU, slab_bytes=1000))
    with monkeypatch.context() as full:
        full.setattr(torch, "empty", refuse)
        with pytest.raises(PoolExhausted) as caught:
            pool.reserve(129, 7)
    assert caught.value.device_missing_bytes == 7 * 192
    assert pool.statistics().reserved_bytes == 0
    pool.reserve(129, 7)
    monkeypatch.setattr(torch, "empty", refuse)
    taken = [pool.take(140, "pages", reserved=True) for _ in range(7)]
    with pytest.raises(PoolExhausted):
        pool.take(140, "pages")
    monkeypatch.undo()
    pool.check_integrity()
    for buffer in taken:
        pool.give(buffer)
        pool.check_integrity()


@backings
def test_reserved_bytes_are_for_reserved_takes_only(backing: Callable[[torch.device], Backing]) -> None:
    """What is reserved others cannot take; its owner can, to the last buffer and of that size only, and unreserving frees the rest."""
    pool = Pool(CPU, 256, Ledger(), backing=backing(CPU))
    pool.reserve(60, 3)
    with pytest.raises(PoolExhausted) as caught:
        pool.take(65, "other")
    assert caught.value.missing_bytes == 64
    with pytest.raises(AssertionError, match="no buffer of that size is reserved"):
        pool.take(65, "mine", reserved=True)
    pool.take(64, "mine", reserved=True)
    pool.take(1, "mine", reserved=True)
    assert pool.missing_bytes(65) == 1
    with pytest.raises(AssertionError, match="2 of 1 reserved buffers"):
        pool.unreserve(64, 2)
    pool.unreserve(64, 1)
    assert pool.missing_bytes(128) == 0
    with pytest.raises(AssertionError):
        pool.take(1, "mine", reserved=True)
    with pytest.raises(PoolExhausted) as caught:
        pool.reserve(10, 3)
    assert caught.value.missing_bytes == 64
    pool.check_integrity()


@backings
def test_giving_frees_exactly_what_was_taken(backing: Callable[[torch.device], Backing]) -> None:
    """After giving all back, in another order and through a view of another type, nothing is counted."""
    ledger = Ledger()
    bytes_of = backing(CPU)
    pool = Pool(CPU, None, ledger, backing=bytes_of)
    buffers = [pool.take(8 * size, "tables") for size in (1, 7, 8, 9)]
    for buffer in reversed(buffers):
        pool.give(buffer.view(torch.int64))
        pool.check_integrity()
    assert bytes_of.physical_bytes() == 0
    assert pool.statistics().buffers == 0
    assert pool.statistics().allocated_bytes == 0
    assert ledger.statistics() == Ledger().statistics()


@backings
def test_a_buffer_is_given_back_once(backing: Callable[[torch.device], Backing]) -> None:
    """Giving a buffer twice, or one that is not the pool's, is a bug."""
    pool = Pool(CPU, None, Ledger(), backing=backing(CPU))
    buffer = pool.take(64, "ring")
    pool.give(buffer)
    with pytest.raises(KeyError):
        pool.give(buffer)
    with pytest.raises(KeyError):
        pool.give(torch.zeros(64, dtype=torch.uint8))
