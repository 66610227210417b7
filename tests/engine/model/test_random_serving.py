"""A directory that holds only a config.json, served with random weights: token ids work end to end, text is refused by name."""

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch

from engine.commands.line import run_line
from engine.config import ServerConfig
from engine.engine import Engine
from engine.errors import BadSetting, ForebayError, NotAdmitted
from engine.gate.process import ServerFailed, server_process
from engine.protocol import EngineFace
from engine.sampling import Sampling
from server import serve
from tests.engine.model.tiny_models import tiny_config
from tests.engine.runs import run, small

PROMPT = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 4, 7]
RANDOM = ["--load-format", "random"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config.json and nothing else."""
    directory = tmp_path_factory.mktemp("bare")
    (directory / "config.json").write_text(json.dumps(tiny_config(vocab_size=1024)))
    return directory


async def test_the_engine_runs_on_random_weights(bare: Path) -> None:
    """Two engines over the same config give the same tokens and logits to the bit; offload and resident too; tokens are not all one."""
    turns = [(PROMPT * 8, 12), (PROMPT, 12)]
    config = small(load_format="random", hot_rows=24)
    first, again = await run(bare, config, turns), await run(bare, config, turns)
    resident = await run(bare, small(load_format="random", placement="resident"), turns)
    assert first.same_bits(again)
    assert first.same_bits(resident)
    assert len(set(first.tokens)) > 4


async def test_the_engine_runs_in_bfloat16(bare: Path) -> None:
    """In bfloat16 on the CPU: offload and resident equal to the bit, in one chunk and in many, and unlike float32."""
    turns = [(PROMPT * 8, 8), (PROMPT, 8)]
    config = {"load_format": "random", "dtype": "bf16", "row_format": "q8g64"}
    offload = await run(bare, small(hot_rows=24, **config), turns)
    resident = await run(bare, small(placement="resident", append_chunk_rows=33, **config), turns)
    assert offload.same_bits(resident)
    assert all(torch.equal(row, row.bfloat16().float()) for row in offload.logits)
    wide = await run(bare, small(**config | {"dtype": "f32"}), turns)
    assert not offload.same_bits(wide)


async def test_a_name_needs_random_weights_and_room() -> None:
    """The engine passes on in one line what a name lacks."""
    with pytest.raises(BadSetting, match="add --load-format random"):
        async with Engine.open("glm-5.3-slice", small()):
            pass
    with pytest.raises(NotAdmitted, match=r"random weights of glm-5.3 need 2,806.4 GiB"):
        async with Engine.open("glm-5.3", small(load_format="random", device="cpu")):
            pass


@asynccontextmanager
async def _post(client: aiohttp.ClientSession, path: str, **body: object) -> AsyncIterator[tuple[int, dict[str, object]]]:
    async with client.post(path, json=body) as response:
        yield response.status, await response.json()


async def _converse(address: str, model: str) -> None:
    async with aiohttp.ClientSession(address, trust_env=False) as client:
        async with _post(client, "/v1/completions", prompt=PROMPT, max_tokens=5, temperature=0, ignore_eos=True, return_token_ids=True) as (
            status, answer,
        ):  # fmt: skip
            assert status == 200, answer
            assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"] == 5  # type: ignore[index]
            assert answer["model"] == model
        for path, body in (
            ("/v1/completions", {"prompt": "a text", "max_tokens": 5}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}),
            ("/tokenize", {"prompt": "a text"}),
        ):
            async with _post(client, path, **body) as (status, answer):
                assert status == 400, answer
                message = str(answer["error"]["message"])  # type: ignore[index]
                assert "tokenizer.json" in message or "chat_template" in message, message


async def test_a_bare_directory_answers_token_ids_over_http(bare: Path) -> None:
    """Ids in, ids out; a text, messages and tokenising are refused with the name of the missing file; the server lives on."""

    def open_engine() -> AbstractAsyncContextManager[EngineFace]:
        return Engine.open(bare, small(load_format="random"))

    async def visit(address: str, engine: EngineFace) -> None:
        await _converse(address, engine.model_name)
        session = await engine.create_session()
        async for chunk in engine.generate(PROMPT, Sampling(max_tokens=2, temperature=0.0, ignore_eos=True), session=session):
            assert chunk.text == ""

    await serve(open_engine, ServerConfig(port=0), visit)


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["serve", "glm-5.3", "--port", "0"], BadSetting, "glm-5.3 is a configuration without weights: add --load-format random"),
        (["serve", "glm-5.3", "--port", "0", "--device", "cpu", *RANDOM], NotAdmitted, "need 2,806.4 GiB"),
        (["run", "glm-5.3-slice", "--prompt-file", "{prompt}"], BadSetting, "glm-5.3-slice is a configuration without weights"),
        (["serve", "x", "--load-format", "dummy"], BadSetting, "--load-format must be one of auto, random, not 'dummy'"),
        (["serve", "x", "--dtype", "f16"], BadSetting, "--dtype must be one of auto, f32, bf16, not 'f16'"),
    ],
)  # fmt: skip
def test_bad_lines_say_what_to_do(words: list[str], error: type[ForebayError], said: str, tmp_path: Path) -> None:
    """A name without weights or without room, and values nobody knows, end the command with one line."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("text")
    with pytest.raises(error) as refused:
        run_line([word.format(prompt=prompt) for word in words], {}, serve)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
async def test_the_command_serves_a_bare_directory(bare: Path) -> None:
    """`forebay serve DIR --load-format random` comes up and answers; without the flag it ends with the line that names what is missing."""
    words = ["serve", str(bare), "--port", "0", "--log-format", "json", "--device", "cpu", "--host-memory", "64MiB"]
    async with server_process([*words, *RANDOM]) as address:
        await _converse(address, bare.name)
    with pytest.raises(ServerFailed, match=r"holds neither model.safetensors nor") as refused:
        async with server_process(words):
            pass
    assert refused.value.exit_code == 3


@pytest.mark.slow
def test_the_gate_takes_a_bare_directory(bare: Path, tmp_path: Path) -> None:
    """The gate passes `random` on to its servers and measures a model without a tokenizer on seeded ids, with equal outputs."""
    found = tmp_path / "gate.json"
    line = [
        "gate", str(bare), "--device", "cpu", "--host-memory", "64MiB", "--hot-rows", "64", "--prompt-tokens", "80", "--new-tokens", "8",
        "--pairs", "1", "--null-pairs", "0", "--warmup-tokens", "0", "--limit", "99", "--json", str(found), *RANDOM,
    ]  # fmt: skip
    run_line(line, {}, serve)
    assert json.loads(found.read_text())["outputs_equal"] is True
