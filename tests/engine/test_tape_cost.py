"""Recording holds no memory: many decode steps under a tape leave the process as large as it was."""

from pathlib import Path

import pytest

from streams.tape import BATCH_RECORDS
from tests.engine.model.parity import make_checkpoint
from tests.engine.tape_cost import resident_sizes

ALLOWED_BYTES = 2 << 20  # the allocator's own wavering; 0.1 MB was measured


@pytest.mark.slow
@pytest.mark.alone
async def test_memory_is_flat_under_a_tape(tmp_path: Path) -> None:
    """Over 500 steps the process grows by less than half of what their records would take if somebody kept them."""
    tape = tmp_path / "long.jsonl"
    sizes = await resident_sizes(make_checkpoint(tmp_path, "shared"), tape, [100, 700])
    first, last = sizes.values()
    lines = tape.read_bytes().count(b"\n")
    assert lines > 40 * BATCH_RECORDS
    assert last - first < ALLOWED_BYTES, f"{sizes}, {lines} records"
