"""The whole model, or one stage of it: weights and the seams a step calls, no state.

Holds `Model` and `load_model`. Knows no rows, streams or sessions.

Invariants:
1. Layer ids outside are global, `layers` is in local order; the MTP block, when loaded, is the stage's last local layer.
2. A stage reads only its own layers' tensors: the first has the embedding, the last the final norm, head and MTP block
   (and the embedding again, which the block needs).
3. The MTP block is there exactly when its `eh_proj` is stored, whatever the config says.
Source: model.md, sections 2.1, 3 and 4.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import BadModel, NotAdmitted
from engine.model.config import ModelConfig
from engine.model.layer import LayerWeights
from engine.model.mtp import MtpWeights
from engine.model.packed import weight_name
from engine.model.source import LoadFormat, ModelSource, check_room, open_source
from engine.model.weights import WeightReader
from kernels.linear import linear
from kernels.norm import rms_norm
from kernels.rope import rope_frequencies, rope_table

__all__ = ["Model", "check_names", "load_model", "stage_of"]

# Copies of the main model's own tensors that some conversions keep under the MTP block.
_MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUTER = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Model:
    """Weights of one stage. T rows; states are [T, H] in `dtype`."""

    config: ModelConfig
    first_layer: int
    layers: list[LayerWeights]  # without the MTP block
    mtp: MtpWeights | None
    embedding: Tensor | None  # [V, H]; first stage, and wherever the MTP block is
    norm: Tensor | None  # [H]; last stage
    head: Tensor | None  # [V, H]; last stage
    frequencies: Tensor  # [Dr / 2] float32
    dtype: torch.dtype
    latent_norm_eps: float

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.frequencies.device

    @property
    def row_layers(self) -> list[LayerWeights]:
        """Every layer that keeps rows, in local order: the stage's layers, then the MTP block's."""
        return self.layers if self.mtp is None else [*self.layers, self.mtp.layer]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Selection groups as LOCAL layers, the MTP block's last."""
        return self.config.local_groups(range(self.first_layer, self.first_layer + len(self.layers)), mtp=self.mtp is not None)

    @property
    def is_last(self) -> bool:
        """Whether the stage has the model's last layer: then it has the output head, and samples."""
        return self.norm is not None

    @property
    def cuts_group(self) -> bool:
        """Whether the stage ends inside a selection group: the next one goes on with its selection."""
        end = self.first_layer + len(self.layers)
        return end < self.config.layers and not self.config.full_layers[end]

    def embed(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Embedding rows [T, H] of token ids, int64 [T], each below the vocabulary; into `out` if given."""
        assert self.embedding is not None, "this stage has no embedding"
        return torch.index_select(self.embedding, 0, ids, out=out)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE table (cos, sin), each [T, Dr / 2] in the model's dtype, of positions, int64 [T]."""
        return rope_table(positions, self.frequencies, self.dtype)

    def final_norm(self, x: Tensor) -> Tensor:
        """Final hidden state [T, H], which logits and the MTP block read, of the last layer's residual state x [T, H]."""
        assert self.norm is not None, "this stage has no final norm"
        return rms_norm(x, self.norm, self.config.norm_eps)

    def norm_after(self, local: int) -> tuple[Tensor, float]:
        """Weight [H] and eps of the norm that reads the residual state behind a local layer: the next layer's first, or the final one.

        Behind the last layer of a stage that hands its state on nobody reads the norm: it is its own first one, for its width.
        """
        if local + 1 < len(self.layers):
            return self.layers[local + 1].input_norm, self.layers[local + 1].norm_eps
        if self.norm is None:
            return self.layers[local].input_norm, self.layers[local].norm_eps
        return self.norm, self.config.norm_eps

    def logits(self, h: Tensor) -> Tensor:
        """Logits [T, V] in the model's dtype of final hidden states h [T, H]."""
        assert self.head is not None, "this stage has no output head"
        return linear(h, self.head)

    def mtp_input(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The MTP block's residual input [T, H]: row (hidden of position p - 1, token at p), ids int64 [T], hidden [T, H]."""
        assert self.mtp is not None, "no MTP block is loaded"
        return self.mtp.join_input(self.embed(ids), hidden)


def stage_of(whole: Model, layers: range) -> Model:
    """Some layers of a model that is loaded whole, as one stage: the same weights, none of them copied."""
    assert whole.first_layer == 0, "not a whole model"
    assert len(whole.layers) == whole.config.layers, "not a whole model"
    last = layers.stop == whole.config.layers
    mtp = whole.mtp if last else None
    return replace(
        whole, first_layer=layers.start, layers=whole.layers[layers.start : layers.stop], mtp=mtp,
        embedding=whole.embedding if layers.start == 0 or mtp is not None else None, norm=whole.norm if last else None,
        head=whole.head if last else None,
    )  # fmt: skip


def load_model(
    model: str | Path,
    *,
    layers: range | None = None,
    load_format: LoadFormat = "auto",
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    latent_norm_eps: float = 1e-6,
    progress: Callable[[int, int], None] | None = None,
    part_of: Callable[[LayerWeights], LayerWeights] | None = None,
) -> Model:
    """Read a model directory in Hugging Face layout, or draw random weights for its config.json or a named configuration.

    Args: layers: the stage's layers (default: all); only their tensors are read. load_format: `random` draws weights from a fixed seed.
    dtype: None: float32 on the CPU; on a device bfloat16, unless the checkpoint stores float32. Block-FP8 weights of products stay so on
    a device. progress: called with (tensors read, tensors to read). part_of: makes of each main layer what stays here, as it is read.
    Raises: BadModel: one line naming the file, tensor or field that is missing, misshapen, unexpected or unsupported. BadSetting: a named
    configuration without `random`. NotAdmitted: the weights do not fit.
    """
    place = torch.device(device)
    source = open_source(model, load_format, dtype, place, first_layer=layers.start if layers is not None else 0)
    held = layers if layers is not None else range(source.config.layers)
    assert held.step == 1, f"a stage is consecutive layers, not {held}"
    assert 0 <= held.start < held.stop <= source.config.layers, f"no stage {held} of {source.config.layers} layers"
    first, last = held.start == 0, held.stop == source.config.layers
    with_mtp = last and check_names(source.tensors.names, source.config.layers)
    outer = {_OUTER[0]: first or with_mtp, _OUTER[1]: last, _OUTER[2]: last}
    read_layers = {*held, source.config.layers} if with_mtp else {*held}
    names = [name for name in source.tensors.names if _is_read(name, read_layers, outer)]
    check_room(model, source.tensors, names, place, share=1.0 if part_of is None else 0.5)
    reader = WeightReader(
        source.tensors, dtype=source.dtype, device=place, quantisation=source.config.quantisation, total=len(names), progress=progress
    )
    ahead = _by_layer(names)
    try:
        return _read(reader, source, held, outer, ahead, part_of, with_mtp=with_mtp, device=place, latent_norm_eps=latent_norm_eps)
    except torch.OutOfMemoryError as error:
        free, whole = torch.cuda.mem_get_info(place)
        raise NotAdmitted(f"the weights of {model} do not fit on {place}: {free:,} of its {whole:,} bytes were left") from error
    finally:
        source.tensors.close()


def _read(
    reader: WeightReader, source: ModelSource, held: range, outer: dict[str, bool], ahead: dict[int, list[str]],
    part_of: Callable[[LayerWeights], LayerWeights] | None, *, with_mtp: bool, device: torch.device, latent_norm_eps: float,
) -> Model:  # fmt: skip
    """Take a stage's weights, and check that nothing of its layers is left. A layer's files are read while the one before is made."""
    config, ask = source.config, source.tensors.read_ahead
    ask(ahead.get(held.start, ()))
    shapes = {_OUTER[0]: (config.vocabulary, config.hidden), _OUTER[1]: (config.hidden,), _OUTER[2]: (config.vocabulary, config.hidden)}
    embedding, norm, head = (reader.take(name, *shapes[name]) if outer[name] else None for name in _OUTER)
    stage = []
    for layer in held:
        ask(ahead.get(layer + 1, ()))
        whole = LayerWeights.read(reader, config, layer, latent_norm_eps=latent_norm_eps)
        stage.append(whole if part_of is None else part_of(whole))
        reader.finish(f"model.layers.{layer}.")
    mtp = None
    if with_mtp:
        mtp = MtpWeights.read(reader, config, latent_norm_eps=latent_norm_eps)
        reader.finish(f"model.layers.{config.layers}.", ignored=_MTP_COPIES)
    return Model(
        config=config,
        first_layer=held.start,
        layers=stage,
        mtp=mtp,
        embedding=embedding,
        norm=norm,
        head=head,
        frequencies=rope_frequencies(config.rope_theta, config.rope).to(device),
        dtype=source.dtype,
        latent_norm_eps=latent_norm_eps,
    )


def _by_layer(names: Iterable[str]) -> dict[int, list[str]]:
    """Stored names by the layer they belong to; what belongs to none is left out."""
    found: dict[int, list[str]] = {}
    for name in names:
        matched = _LAYER.fullmatch(name)
        if matched is not None:
            found.setdefault(int(matched[1]), []).append(name)
    return found


def _is_read(name: str, layers: set[int], outer: dict[str, bool]) -> bool:
    matched = _LAYER.fullmatch(name)
    if matched is None:
        return outer.get(weight_name(name), False)
    return int(matched[1]) in layers and matched[2] not in _MTP_COPIES


def check_names(names: frozenset[str], layers: int) -> bool:
    """Refuse names that no such model has, in any stage. Returns: whether the MTP block is stored."""
    mtp = any(weight_name(name) == f"model.layers.{layers}.eh_proj.weight" for name in names if ".eh_proj." in name)
    for name in sorted(names):
        matched = _LAYER.fullmatch(name)
        if matched is None:
            if weight_name(name) not in _OUTER:
                raise BadModel(f"tensor {name} is unexpected: this model has no such weight")
        elif int(matched[1]) > layers:
            raise BadModel(f"tensor {name} belongs to a second MTP block or a layer the config lacks; num_hidden_layers is {layers}")
        elif int(matched[1]) == layers and not mtp:
            raise BadModel(f"tensor {name} belongs to an MTP block whose eh_proj.weight is missing")
    return mtp
