"""A checkpoint directory in each form, made here, loads and answers over HTTP; offload equals resident there too."""

import zlib
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import pytest
import torch

from engine.config import ServerConfig
from engine.convert import Recipe, convert
from engine.engine import Engine
from engine.protocol import EngineFace
from server import serve
from tests.engine.model.packed_models import Packed, awq, awq_config, compressed, compressed_config, write_packed
from tests.engine.model.tiny_models import packable_config, random_tensors, write_checkpoint
from tests.engine.runs import run, small

CONFIG = packable_config(n_routed_experts=2, num_experts_per_tok=1)
TENSORS = random_tensors(CONFIG, 5)
PROMPT = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 4, 7]


def _converted(form: str, directory: Path) -> Path:
    source = write_checkpoint(TENSORS, CONFIG, directory / "source", dtype=torch.bfloat16)
    mixed = Recipe({"experts": "int4", "attention": "int8", "mlp": "int8", "indexer": "int8"}, 32, mtp=True)
    recipe = mixed if form == "mixed" else Recipe({"experts": form, "attention": form})  # type: ignore[dict-item]  # a form
    convert(source, directory / "out", recipe)
    return directory / "out"


def _packed(form: str, directory: Path) -> Path:
    def pack(module: str, outputs: int, width: int) -> Packed | None:
        if ".experts." not in module:
            return None
        seed = zlib.crc32(module.encode())
        if form == "awq":
            return awq(outputs, width, group=64, dtype=torch.float16, seed=seed)
        return compressed(outputs, width, bits=4, group=32, symmetric=False, dtype=torch.bfloat16, seed=seed)

    scheme = {"num_bits": 4, "group_size": 32, "symmetric": False, "targets": ["Linear"]}
    described = awq_config(64) if form == "awq" else compressed_config({"group_0": scheme})
    write_packed(TENSORS, CONFIG, described, directory, pack)
    return directory


@pytest.mark.parametrize("form", ["int4", "int8", "fp8", "mixed", "awq", "asymmetric"])
async def test_every_form_is_served(form: str, tmp_path: Path) -> None:
    """`forebay serve` of the directory answers token ids with token ids, and the engine's tokens are the same in both placements."""
    directory = (_converted if form in ("int4", "int8", "fp8", "mixed") else _packed)(form, tmp_path)
    offload = await run(directory, small(hot_rows=24), [(PROMPT * 3, 6)])
    resident = await run(directory, small(placement="resident"), [(PROMPT * 3, 6)])
    assert offload.same_bits(resident)

    def open_engine() -> AbstractAsyncContextManager[EngineFace]:
        return Engine.open(directory, small())

    async def visit(address: str, engine: EngineFace) -> None:
        body = {"prompt": PROMPT * 3, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        async with aiohttp.ClientSession(address, trust_env=False) as client, client.post("/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert answer["choices"][0]["token_ids"] == offload.tokens

    await serve(open_engine, ServerConfig(port=0), visit)
