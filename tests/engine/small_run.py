"""One small run with everything in it, for tools that watch every launch: appends, steps, drafts, misses, copyback.

    python -m tests.engine.small_run                     # once before, so that kernels are compiled
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 python -m tests.engine.small_run

Without the allocator's cache every buffer is an allocation of the driver's, so that a read past it is seen.
"""

import asyncio
import tempfile
from pathlib import Path

from engine.engine import Engine
from tests.engine.model.parity import named
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import collect, small
from tests.engine.test_drafts import NAME, TOP_K, ids, sampled


async def main() -> None:
    """Prints what ran; the exit code is the watching tool's."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_checkpoint(random_tensors(tiny_config(), named(NAME).seed), tiny_config(), Path(directory) / "model")
        config = small(device="cuda", dtype="f32", row_format="q8g64", hot_rows=TOP_K, decode_batch_limit=1, draft_depth=3, graphs="off")
        async with Engine.open(model, config) as engine:
            for sampling in (sampled(12, 0.0, 0), sampled(12, 0.9, 1)):
                result = await collect(engine, [(ids(150, 1), 12), (ids(3, 2), 12)], sampling)
                print(len(result.tokens), "tokens")
            statistics = engine.statistics()
            print(statistics.steps, "steps,", statistics.misses, "misses,", sum(statistics.drafts_proposed), "drafts")
            assert statistics.misses > 0
            assert sum(statistics.drafts_proposed) > 0


if __name__ == "__main__":
    asyncio.run(main())
