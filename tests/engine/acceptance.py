"""How often the demo model's drafts are right, the engine's and the training network's on the same rows of held-out code's greedy text.

    OMP_NUM_THREADS=1 python -m tests.engine.acceptance --json acceptance.json     # as many rows as the training record has; --device cuda

Every step is one of one row: drafts are made behind each and none is judged.
"""

import argparse
import asyncio
import json
import sysconfig
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

import engine.draft
from engine.config import EngineConfig
from engine.demo_training.corpus import END, held_out, library_files
from engine.demo_training.export import load
from engine.demo_training.network import DEPTHS
from engine.demo_training.shape import Shape
from engine.engine import Engine
from engine.gate.machine import machine
from engine.sampling import Sampling

__all__ = ["DEMO", "NEW_TOKENS", "PROMPTS", "compared", "demo", "drafted_everywhere", "held_out_prompts", "recorded"]

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "engine" / "demo_model"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 48, 256, 192  # as the record was made


def demo(depth: int | None, **changes: Any) -> EngineConfig:
    return EngineConfig(**{"host_memory_bytes": 256 << 20, "hot_rows": 512, "context_max": 4096, "draft_depth": depth, **changes})


def held_out_prompts(count: int) -> list[list[int]]:
    """Evenly spaced pieces of library files that no recipe trains on."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    closing = tokenizer.encode(END).ids
    files = library_files(Path(sysconfig.get_path("stdlib")))
    stream = [token for path, text in files if held_out(path) for token in (*tokenizer.encode(text).ids, *closing)]
    starts = np.linspace(0, len(stream) - PROMPT_TOKENS - 1, count).astype(int)
    return [stream[start : start + PROMPT_TOKENS] for start in starts]


async def drafted_everywhere(
    config: EngineConfig, prompts: list[list[int]], tokens: int
) -> list[tuple[list[int], list[list[int]]]]:  # fmt: skip
    """Each prompt's greedy text, and the three drafts behind each of its tokens from the second on: every row drafts, none is judged."""
    found: list[list[int]] = []

    def keep(table: Tensor, drafts: Tensor, ends: Tensor) -> None:
        found.append(drafts[0].tolist())  # not kept: the next step has one row

    texts = []
    with patch.object(engine.draft, "keep_drafts", keep):
        async with Engine.open(DEMO, config) as opened:
            for prompt in prompts:
                found.clear()
                sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
                text = [token async for chunk in opened.generate(prompt, sampling) for token in chunk.token_ids]
                texts.append((text, found[: len(text) - DEPTHS - 1]))
    return texts


def compared(prompts: list[list[int]], texts: list[tuple[list[int], list[list[int]]]]) -> tuple[list[float], list[float], float]:
    """Rates at which the first 1, 2 and 3 drafts are right: the engine's, the training network's on the same rows; and how often their
    first drafts are one."""
    network, same = load(DEMO, Shape(), torch.float32), 0
    mine, theirs, rows = [0] * DEPTHS, [0] * DEPTHS, 0
    for prompt, (text, drafts) in zip(prompts, texts, strict=True):
        ids = torch.tensor([[*prompt, *text]])
        with torch.no_grad():
            states = network(ids, torch.arange(ids.shape[1])[None], sparse=True).drafts
            guessed = [network.logits(state).argmax(-1)[0].tolist() for state in states]
        for i, engines in enumerate(drafts):
            row, coming = len(prompt) + i, text[i + 2 : i + 2 + DEPTHS]
            networks = [guessed[depth][row] for depth in range(DEPTHS)]
            same += engines[0] == networks[0]
            rows += 1
            for depth in range(1, DEPTHS + 1):
                mine[depth - 1] += engines[:depth] == coming[:depth]
                theirs[depth - 1] += networks[:depth] == coming[:depth]
    return [count / rows for count in mine], [count / rows for count in theirs], same / rows


def recorded() -> list[float]:
    """The shipped model's rates on its own greedy text, another engine's."""
    record = json.loads((ROOT / "docs" / "demo_model" / "measured.json").read_text())
    rates_of: list[float] = next(one for one in record if one["checkpoint"] == "shipped")["acceptance"]["own_greedy"]
    return rates_of[:DEPTHS]


async def main() -> None:
    """Rates at which the first 1, 2 and 3 drafts are right: the engine's, the network's on the same rows, the training record's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--row-format", dest="rows", default="q8g64")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--json", dest="target", type=Path, default=None)
    options = parser.parse_args()
    prompts = held_out_prompts(options.prompts)
    config = demo(DEPTHS, device=options.device, graphs="off", row_format=options.rows)
    mine, theirs, same = compared(prompts, await drafted_everywhere(config, prompts, NEW_TOKENS))
    found = {
        "engine": mine, "network": theirs, "record": recorded(), "first_drafts_agree": same, "prompts": options.prompts,
        "new_tokens": NEW_TOKENS, "row_format": options.rows, "machine": machine(probe=options.device != "cpu"),
    }  # fmt: skip
    print(json.dumps({name: found[name] for name in ("engine", "network", "record", "first_drafts_agree")}))
    if options.target is not None:
        options.target.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
