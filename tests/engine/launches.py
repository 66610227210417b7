"""Which specialisations of Triton kernels an append asks for, at true widths and without a device: a stand-in for the launcher.

Tensors are on torch's meta device, where shapes, strides and offsets are as on a card and nothing is computed. Every launch is turned into
what Triton itself makes its cache key of for an H200: a launch with a new key waits for a compiler.
"""

import importlib
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.append
import engine.model.glm
import kernels
import kernels.linear.bulk
from engine.append import AppendRun
from engine.model.config import ModelConfig
from engine.model.glm import Model, load_model
from engine.model.named import NAMED
from engine.model.source import ModelSource
from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS, PAGE_KEYS, BlockLayout
from memory.append import AppendChunk
from memory.row import key_layout, row_layout
from streams import Event
from tests.engine.model.test_step_bytes import _Shapes

__all__ = ["Key", "Launches", "meta_stage", "slice_model"]

Key = tuple[str, tuple[tuple[str, str], ...]]  # of a kernel: its name, and what each argument and option is to the compiler

_STATE_FIELDS = 64
_META = torch.device("meta")


class Launches:
    """Keys of the launches of appends while the patch lasts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.keys: set[Key] = set()
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import JITFunction, create_function_from_signature

        backend = make_backend(GPUTarget("cuda", 90, 32))
        binders: dict[Any, Callable[..., Any]] = {}

        def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            del grid, warmup
            binder = binders.get(kernel)
            if binder is None:
                binder = binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
            bound, special, rest = binder(*arguments, **options)
            given = [(name, str(each)) for name, each in zip(bound, special, strict=True)]
            self.keys.add((kernel.fn.__qualname__, (*given, *((name, str(value)) for name, value in sorted(rest.items())))))

        patch.setattr(JITFunction, "run", run)
        for found in pkgutil.walk_packages(kernels.__path__, "kernels."):
            module = importlib.import_module(found.name)
            if hasattr(module, "on_cpu"):
                patch.setattr(module, "on_cpu", lambda operation, tensor: False)
        patch.setattr(engine.append, "landing", torch.empty_like)
        patch.setattr(engine.append, "pinned", lambda values, device: values.to(device))
        patch.setattr(kernels.linear.bulk, "_check_exact", lambda x: None)  # switches of a process that has a card

    def of(self, work: Callable[[], None]) -> set[Key]:
        """Keys of what `work` launches."""
        before, self.keys = self.keys, set()
        work()
        asked, self.keys = self.keys, before | self.keys
        return asked


class _Stream:
    """Runs its work at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, work: Callable[[], Any], *, label: str, **rest: Any) -> Event[Any]:
        del label, rest
        return Event.completed(work())


class _Memory:
    """A session with `first` rows, without any memory."""

    def __init__(self, stage: Any, first: int, tokens_max: int) -> None:
        self._layout = stage.layout
        self.counts = SimpleNamespace(logical=first, hidden_from=first)
        pages = -(-tokens_max // PAGE_KEYS)
        self.pages = SimpleNamespace(table=torch.empty((self._layout.key_layers, pages), dtype=torch.int64, device=_META))
        self.hidden = torch.empty((HIDDEN_ROWS, stage.model.config.hidden), device=_META)
        self.state = torch.empty(_STATE_FIELDS, dtype=torch.int64, device=_META)
        self.operations = SimpleNamespace(hold=lambda event: None)

    def begin_append(self, rows: int, compute: Any) -> AppendChunk:
        """See SessionMemory."""
        del compute
        first, layers = self.counts.logical, self._layout.key_layers
        shapes = ((-(-(first + rows) // BLOCK_ROWS),), (rows,), (rows,), (layers, rows))
        return AppendChunk(
            first, rows, *(_numbers(shape) for shape in shapes), Event.completed(None), self._finish(rows), lambda after: None
        )

    def _finish(self, rows: int) -> Callable[..., Event[None]]:
        def finish(*given: Any) -> Event[None]:
            del given
            self.counts.logical += rows
            return Event.completed(None)

        return finish


def _numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=_META)


def meta_stage(model: Model, chunk_rows: int, keys: str = "bf16") -> Any:
    """What an append touches of a stage, without memory."""
    facts, groups = model.config, model.groups
    layout = BlockLayout(row_layout("q8g64", facts.latent, facts.rope), key_layout(keys, facts.index_width), groups)  # type: ignore[arg-type]
    streams = SimpleNamespace(compute=_Stream("compute"), prefetch=_Stream("prefetch"))
    return SimpleNamespace(
        model=model, layout=layout, main_groups=groups if model.mtp is None else groups[:-1], device=_META, append_rows=chunk_rows,
        first_layer=0, streams=streams, copyback=None, mtp_layer=layout.layers - 1,
    )  # fmt: skip


def append(stage: Any, first: int, rows: int, tokens_max: int) -> None:
    """Launch what one turn of `rows` tokens behind `first` rows launches."""
    run = AppendRun(stage, _Memory(stage, first, tokens_max), [1] * rows, None, "s")  # type: ignore[arg-type]
    for unit in run.units():
        unit.submit()


def slice_model(patch: pytest.MonkeyPatch, **changes: object) -> Model:
    """The slice at its true widths, without memory. Args: changes: of its config; five layers are dense and not, full and shared."""
    config = ModelConfig.read({**NAMED["glm-5.3-slice"], **changes})
    source = ModelSource(config, _Shapes(config), torch.bfloat16)
    patch.setattr(engine.model.glm, "open_source", lambda *asked, **options: source)
    return load_model("glm-5.3-slice", device="meta")
