"""The pool: exact buffers within a budget."""

import pytest
import torch

from memory.errors import PoolExhausted
from memory.ledger import Holding, Ledger
from memory.pool import Pool, allocated

CPU = torch.device("cpu")


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


def test_a_reused_place_is_zero_again() -> None:
    """Bytes of a buffer that was given back never show in the next one."""
    pool = Pool(CPU, None, Ledger())
    for _ in range(20):
        buffer = pool.take(4096, "ring")
        assert not buffer.any()
        buffer.fill_(255)
        pool.give(buffer)


def test_the_budget_is_kept_to_the_byte() -> None:
    """A take that fits exactly succeeds; one byte more raises with the missing bytes and changes nothing."""
    ledger = Ledger()
    pool = Pool(CPU, 256, ledger)
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


def test_what_the_device_lacks_is_exhaustion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that runs out below the budget raises PoolExhausted with the whole buffer's bytes, and nothing is counted."""
    ledger = Ledger()
    pool = Pool(CPU, 4096, ledger)
    pool.reserve(192)

    def exhausted(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "zeros", exhausted)
    for reserved in (False, True):
        with pytest.raises(PoolExhausted) as caught:
            pool.take(129, "ring", reserved=reserved)
        assert caught.value.device_missing_bytes == 192
    monkeypatch.undo()
    assert (pool.statistics().allocated_bytes, pool.statistics().reserved_bytes) == (0, 192)
    assert ledger.statistics() == Ledger().statistics()


def test_reserved_bytes_are_for_reserved_takes_only() -> None:
    """What is reserved others cannot take; its owner can, down to the last byte, and unreserving frees the rest."""
    pool = Pool(CPU, 256, Ledger())
    pool.reserve(192)
    with pytest.raises(PoolExhausted) as caught:
        pool.take(65, "other")
    assert caught.value.missing_bytes == 64
    pool.take(128, "mine", reserved=True)
    assert pool.missing_bytes(65) == 1
    pool.unreserve(64)
    assert pool.missing_bytes(128) == 0
    with pytest.raises(AssertionError):
        pool.take(1, "mine", reserved=True)
    with pytest.raises(PoolExhausted):
        pool.reserve(129)
    pool.check_integrity()


def test_giving_frees_exactly_what_was_taken() -> None:
    """After giving all back, in another order and through a view of another type, nothing is counted."""
    ledger = Ledger()
    pool = Pool(CPU, None, ledger)
    buffers = [pool.take(8 * size, "tables") for size in (1, 7, 8, 9)]
    for buffer in reversed(buffers):
        pool.give(buffer.view(torch.int64))
        pool.check_integrity()
    assert pool.statistics().buffers == 0
    assert pool.statistics().allocated_bytes == 0
    assert ledger.statistics() == Ledger().statistics()


def test_a_buffer_is_given_back_once() -> None:
    """Giving a buffer twice, or one that is not the pool's, is a bug."""
    pool = Pool(CPU, None, Ledger())
    buffer = pool.take(64, "ring")
    pool.give(buffer)
    with pytest.raises(KeyError):
        pool.give(buffer)
    with pytest.raises(KeyError):
        pool.give(torch.zeros(64, dtype=torch.uint8))
