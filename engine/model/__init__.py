"""The model: GLM-5-family (`glm_moe_dsa`) weights and formulas between the parts that keep state.

Parts: `config` (what config.json says) with `fields` (reading it) and `named` (configurations known by name); `source` (where tensors
come from: `files`, mapped, or `random`, drawn after the shapes of `stored`) and `weights` (checked, dequantised, copied); `mla`, `indexer`,
`moe`, `layer`, `mtp` (frozen weights with the projections as methods); `glm` (the whole, by stage); `bytes` (what a step must
read of it).

A step calls, a layer at a time:

    u = layer.attention_input(x)                              cos, sin = model.rope(positions), once a step
    qr = layer.mla.project_latent(u)
    latent, rope_key = layer.mla.project_row(u, cos, sin)     -> a row, stored before attention reads it
    key = layer.indexer.index_key(u, cos, sin)                full layers only, stored likewise
    query, head_weights = layer.indexer.index_query(u, qr, cos, sin)   -> scores, selection
    query_latent, query_rope = layer.mla.project_query(qr, cos, sin)   -> sparse attention, scale = config.scale
    x = x + layer.mla.project_output(attended)
    x = x + layer.feed_forward(layer.mlp_input(x))

then `h = model.final_norm(x)` and `model.logits(h)`. The MTP block: `x = model.mtp_input(ids, h)`, the same layer calls on
`model.mtp.layer`, `model.mtp.final_norm(x)`.

Invariants:
1. No state, no cache, no Python value that changes from step to step: every function is pure and row-wise, so a row's bits do not
   depend on its company.
2. Arithmetic is `kernels/`' own; here only reshapes, cuts, joins and sums.
3. Everything unsupported is refused while loading, in one line that names the file, tensor or field.
4. States are in the model's dtype, float32 or bfloat16; head weights of the indexer and routing are float32 in both. On a device the
   weights of products are as stored, block-FP8 included.

Kept: absorbed form (UK into the query, UV after attention), because a row is then one latent and one key for all heads.
Refused: merging q_a and kv_a into one product; with ragged scale blocks that loses a row of scales when done on quantised weights,
and it would tie the selection stream's first product to the attention's.
"""

from engine.model.config import ModelConfig
from engine.model.glm import Model, load_model
from engine.model.indexer import IndexerWeights
from engine.model.layer import LayerWeights
from engine.model.mla import MlaWeights
from engine.model.moe import DenseWeights, MoeWeights
from engine.model.mtp import MtpWeights

__all__ = ["DenseWeights", "IndexerWeights", "LayerWeights", "MlaWeights", "Model", "ModelConfig", "MoeWeights", "MtpWeights", "load_model"]
