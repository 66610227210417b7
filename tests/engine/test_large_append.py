"""A large append: 9,854 tokens onto 50,085 rows at its true sizes on a tiny model, and a fifth of it for every day."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from tests.engine.model.parity import named
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import Run, run, small

SIZES = [pytest.param(10_021, 1_970, marks=pytest.mark.slow), pytest.param(50_085, 9_854, marks=pytest.mark.long)]
NEW = 12
TOP_K = 16  # few of many: selections are real, and miss
SHAPE = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "index_n_heads": 2}  # one of two layers selects, and the MTP block


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_position_embeddings=1 << 16, index_topk=TOP_K, **SHAPE)
    return write_checkpoint(random_tensors(config, named("shared").seed), config, tmp_path_factory.mktemp("model"))


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("rows", "appended"), SIZES)
async def test_it_gives_the_tokens_of_one_prompt(checkpoint: Path, rows: int, appended: int) -> None:
    """In two turns or as one prompt, offloaded or resident, with drafts or without: the same tokens, and logits to float32's rounding."""
    begun, rest = ids(rows - 1, 1), ids(appended, 2)
    found: list[Run] = []
    for placement, depth in (("offload", 0), ("resident", 0), ("offload", 3), ("resident", 3)):
        found.append(await run(checkpoint, settings(placement, depth), [(begun, 1), (rest, NEW)]))
    for other in found[1:]:
        assert other.same_bits(found[0])
    assert (statistics := found[0].statistics) is not None
    assert statistics.mirrored_rows > rows + appended - 64
    assert statistics.misses > 0
    whole = await run(checkpoint, settings("offload", 0), [([*begun, found[0].tokens[0], *rest], NEW)])
    assert len(whole.context) == rows + appended + NEW
    assert whole.tokens == found[0].tokens[1:]
    for one, two in zip(whole.logits, found[0].logits[1:], strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-4)


def settings(placement: str, depth: int) -> EngineConfig:
    return small(placement=placement, draft_depth=depth, hot_rows=2 * TOP_K, append_chunk_rows=2048, host_memory_bytes=256 << 20)
