"""Reading ahead: the pages asked for are those of the next layer's tensors, and a broken file is for its reader to report."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.model import load_model
from engine.model.ahead import ReadAhead, ranges
from engine.model.files import TensorFiles
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint


def test_ranges_join_neighbours() -> None:
    """Places near one another are one range, in order; far ones stay apart; nothing gives nothing."""
    mib = 1 << 20
    assert ranges([(5 * mib, 6 * mib), (0, 10), (10, mib), (6 * mib + 3, 7 * mib)]) == [(0, mib), (5 * mib, 7 * mib)]
    assert ranges([(0, 9), (2, 4)]) == [(0, 9)]
    assert ranges([]) == []


def test_the_bytes_asked_for_are_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system is told begins and ends with the tensors' own bytes in the file."""
    tensors = {"a": torch.arange(6.0), "b": torch.arange(600_000.0), "c": torch.full((4,), 7.0)}
    save_file(tensors, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda opened, first, size, how: asked.append((first, size)))
    ahead = ReadAhead()
    ahead.ask(tmp_path / "x.safetensors", ["a", "c", "absent"])
    ahead._pool.shutdown(wait=True)  # closing forgets what is not begun
    ahead.close()
    assert sorted(content[first : first + size] for first, size in asked) == sorted(tensors[name].numpy().tobytes() for name in "ac")


def test_a_stage_asks_for_each_layer_before_it_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a layer is read the next one's tensors, and no other stage's, were asked for."""
    config = tiny_config()
    directory = write_checkpoint(random_tensors(config, 1), config, tmp_path, shards=3)
    told: list[str] = []
    read = TensorFiles.read

    def seen(self: TensorFiles, name: str) -> torch.Tensor:
        told.append(f"read {name}")
        return read(self, name)

    monkeypatch.setattr(TensorFiles, "read", seen)
    monkeypatch.setattr(TensorFiles, "read_ahead", lambda self, names: told.extend(f"ask {name}" for name in names))
    load_model(directory, layers=range(1, 3))
    for layer in (1, 2):
        name = f"model.layers.{layer}.input_layernorm.weight"
        assert told.index(f"ask {name}") < max(place for place, each in enumerate(told) if each == f"read {name}")
    second = told.index("ask model.layers.2.self_attn.o_proj.weight")
    assert second < told.index("read model.layers.1.self_attn.o_proj.weight")
    assert not [each for each in told if ".layers.0." in each or ".layers.4." in each]


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, b"\x02\x00\x00\x00\x00\x00\x00\x00[]", b'\x0a\x00\x00\x00\x00\x00\x00\x00{"a": 1}  ']
)
def test_a_broken_file_is_not_its_business(content: bytes, tmp_path: Path) -> None:
    """Without a readable header, or without the file, nothing is asked for and nothing raised."""
    (tmp_path / "x.safetensors").write_bytes(content)
    ahead = ReadAhead()
    ahead.ask(tmp_path / "x.safetensors", ["a"])
    ahead.ask(tmp_path / "absent.safetensors", ["a"])
    ahead.close()
