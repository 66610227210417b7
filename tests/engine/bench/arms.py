"""Loads and arms for tests of the measuring commands, made up or run, and a fault in one placement."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.bench.arm import Arm, Load
from engine.bench.floor import StepBytes
from engine.bench.probe import Window
from engine.commands.line import run_line
from memory.rounds import ResidentRounds
from server import serve
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint

__all__ = ["CUDA", "FLAGS", "arm", "line", "load", "quiet", "spoil", "without_drafts"]

FLAGS = ("--device", "cpu", "--host-memory", "64MiB", "--row-format", "f32", "--hot-rows", "16", "--log-format", "json")
CUDA = torch.device("cuda")


def line(*words: str) -> int:
    return run_line(("bench", *words), {}, serve)


def load(model: Path, **changes: Any) -> Load:
    given: dict[str, Any] = {"prompt_tokens": 8, "warmup_tokens": 4, "new_tokens": 6, "probe_tokens": 6, **changes}
    return Load(model=model, **given)


def quiet(title: str, done: int, total: int) -> None:
    """Nobody looks."""


def arm(placement: str, *, ids: tuple[int, ...] = (1, 2, 3, 4), steps: tuple[float, ...] = (0.001, 0.003), **changes: Any) -> Arm:
    given = Arm(
        placement=placement, token_ids=ids, context_rows=100, first_token_s=0.5, append_s=0.4, steps_s=steps,
        loop_cpu_s=0.0002, hits=99, misses=1, ring_reads=4, device_bytes=5, transient_bytes=7 << 20, floor=StepBytes(600, 300, 100),
        window=Window(4_000_000, 3_000_000, 100_000, 50),
    )  # fmt: skip
    return dataclasses.replace(given, **changes)


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the resident arm read rows of zeros: a fault in one placement alone."""
    gather = ResidentRounds.gather

    def zeroed(self: ResidentRounds, *given: Any, **named: Any) -> None:
        gather(self, *given, **named)
        compact: Tensor = given[-1]
        compact.zero_()

    monkeypatch.setattr(ResidentRounds, "gather", zeroed)


def without_drafts(directory: Path) -> Path:
    """A tiny checkpoint without an MTP block: a cut then leaves every made-up row as it was."""
    config = tiny_config(num_nextn_predict_layers=0)
    return write_checkpoint(random_tensors(config, 5, mtp=False), config, directory)
