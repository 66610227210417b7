"""The model driven the plainest way: every row and key in flat tensors, no ring, no cache, no streams.

Holds `FlatRun`. What a step must compute, without where anything lives; the comparison between the model's seams and transformers.
Each overridable method is one place where a mistake can be made on purpose.
"""

import torch
from torch import Tensor

from engine.model import LayerWeights, Model
from kernels.index_score import index_scores
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, KeyLayout
from kernels.quantize import append_keys, stored_keys, unpack_keys
from kernels.select import select
from kernels.sparse_mla import sparse_mla_indexed
from tests.engine.model.parity import Rows, key_gap, rounded_row, rounding_gap

__all__ = ["FlatRun"]


class FlatRun:
    """One conversation on a whole model; `append` may be called with any number of ids at a time.

    gap: the smallest distance so far between a choice made and the next one, at selection edges and in routing.
    rounding_gap: the smallest distance so far from a stored value to where its rounding flips.
    """

    def __init__(self, model: Model, positions_max: int, *, rows: Rows = "f32", keys: str = "f32") -> None:
        self.model = model
        self.rows = rows
        self.config = model.config
        self.top_k = model.config.top_k
        self.scale = model.config.scale
        self.logical = 0
        self.gap = float("inf")
        self.rounding_gap = float("inf")
        layers, self.device = len(model.row_layers), model.device
        self.latent = torch.full((layers, positions_max, self.config.latent), float("nan"), device=self.device)
        self.rope_key = torch.full((layers, positions_max, self.config.rope), float("nan"), device=self.device)
        self.layout = KeyLayout(keys, self.config.index_width)  # type: ignore[arg-type]  # one of them
        self._pages = -(-positions_max // PAGE_KEYS)
        # 0xFF: NaN in every format, and as a scale
        self._keys = torch.full((layers, self._pages * self.layout.page_bytes), 0xFF, dtype=torch.uint8, device=self.device)
        self.hidden = torch.empty(0, self.config.hidden)

    def append(self, ids: Tensor) -> Tensor:
        """Run ids [T] as the next positions. Returns: logits [T, V]; `hidden` [T, H] is what the MTP block would read."""
        positions = torch.arange(self.logical, self.logical + ids.shape[0], device=self.device)
        cos, sin = self.model.rope(positions)
        x = self.model.embed(ids)
        selection = torch.empty(0)
        for local, layer in enumerate(self.model.layers):
            x, selection = self.layer(local, layer, x, positions, cos, sin, selection)
        self.logical += ids.shape[0]
        self.hidden = self.model.final_norm(x)
        return self.model.logits(self.hidden)

    def append_mtp(self, ids: Tensor, hidden: Tensor, first: int) -> Tensor:
        """Run MTP rows (hidden [T, H] of positions first - 1.., ids [T] at positions first..). Returns: draft logits [T, V]."""
        mtp = self.model.mtp
        assert mtp is not None
        positions = torch.arange(first, first + ids.shape[0], device=self.device)
        cos, sin = self.model.rope(positions)
        x = self.mtp_input(ids, hidden)
        local = len(self.model.layers)
        x, _ = self.layer(local, mtp.layer, x, positions, cos, sin, torch.empty(0), lowest=1)
        return self.model.logits(mtp.final_norm(x))

    def mtp_input(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return self.model.mtp_input(ids, hidden)

    def layer(
        self, local: int, layer: LayerWeights, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, selection: Tensor, *, lowest: int = 0
    ) -> tuple[Tensor, Tensor]:
        """One decoder layer over rows `positions`; slots below `lowest` are empty and never selectable."""
        u = layer.attention_input(x)
        qr = layer.mla.project_latent(u)
        latent, rope_key = layer.mla.project_row(u, cos, sin)
        self.rounding_gap = min(self.rounding_gap, rounding_gap(latent, rope_key, self.rows))
        self.latent[local, positions], self.rope_key[local, positions] = rounded_row(latent.float(), rope_key.float(), self.rows)
        if layer.indexer is not None:
            key = layer.indexer.index_key(u, cos, sin)
            self.rounding_gap = min(self.rounding_gap, key_gap(key, self.layout.encoding))
            run, number = positions // BLOCK_ROWS, positions % BLOCK_ROWS
            to = self._keys[local].data_ptr() + run * self.layout.run_bytes + number * self.layout.step_bytes
            append_keys(key, to, 0, self.layout)
            query, head_weights = layer.indexer.index_query(u, self.index_latent(layer, u, qr), cos, sin)
            selection = self.choose(self.scores(local, query, head_weights, int(positions[-1]) + 1), positions, lowest)
        picked = self.selection_used(layer, selection, positions, lowest)
        query_latent, query_rope = layer.mla.project_query(qr, cos, sin)
        end = int(positions[-1]) + 1
        attended = sparse_mla_indexed(query_latent, query_rope, self.latent[local, :end], self.rope_key[local, :end], picked, self.scale)
        x = x + layer.mla.project_output(attended)
        self._note_routing(layer, x)
        return x + layer.feed_forward(layer.mlp_input(x)), selection

    def index_latent(self, layer: LayerWeights, u: Tensor, qr: Tensor) -> Tensor:
        """What the indexer's query is made of."""
        return qr

    def scores(self, local: int, query: Tensor, head_weights: Tensor, keys: int) -> Tensor:
        """Index scores [T, whole pages] of the first `keys` keys."""
        out = torch.full((query.shape[0], self._pages * PAGE_KEYS), float("nan"), device=self.device)
        pages = self._keys[local].data_ptr() + torch.arange(self._pages, device=self.device) * self.layout.page_bytes
        index_scores(query, head_weights, pages[: -(-keys // PAGE_KEYS)], keys, self.layout, out)
        return out

    def keys_of(self, local: int, keys: int) -> Tensor:
        """float32 [keys, width]: the first keys of a layer, as stored."""
        return unpack_keys(stored_keys(self._keys[local], self.layout)[:keys], self.layout)

    def choose(self, scores: Tensor, positions: Tensor, lowest: int) -> Tensor:
        """The selection, int32 [T, k], of rows at `positions`."""
        out = torch.full((positions.shape[0], self.top_k), -7, dtype=torch.int32, device=self.device)
        first = torch.full_like(positions, lowest)
        select(scores, first, positions + 1, self.top_k, out)
        self._note_edges(scores, positions, lowest)
        return out

    def selection_used(self, layer: LayerWeights, selection: Tensor, positions: Tensor, lowest: int) -> Tensor:
        """The selection that a layer attends over."""
        return selection

    def _note_edges(self, scores: Tensor, positions: Tensor, lowest: int) -> None:
        for row, position in enumerate(positions.tolist()):
            ranked = scores[row, lowest : position + 1].sort(descending=True).values
            if len(ranked) > self.top_k:
                self.gap = min(self.gap, float(ranked[self.top_k - 1] - ranked[self.top_k]))

    def _note_routing(self, layer: LayerWeights, x: Tensor) -> None:
        router = getattr(layer.mlp, "router", None)
        if router is None:
            return
        x = x.float()
        y32 = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps) * layer.output_norm
        choice = torch.sigmoid(y32 @ router.T) + layer.mlp.bias
        kept = self.config.expert_groups_kept
        if self.config.expert_groups > 1:
            grouped = choice.view(choice.shape[0], self.config.expert_groups, -1)
            ranked, order = grouped.topk(2).values.sum(-1).sort(descending=True)
            self.gap = min(self.gap, float((ranked[:, kept - 1] - ranked[:, kept]).min()))
            dropped = torch.ones(ranked.shape, dtype=torch.bool, device=self.device).scatter(1, order[:, :kept], False)
            choice = grouped.masked_fill(dropped[..., None], float("-inf")).flatten(1)
        ranked = choice.sort(descending=True).values
        per_token = self.config.experts_per_token
        self.gap = min(self.gap, float((ranked[:, per_token - 1] - ranked[:, per_token]).min()))
