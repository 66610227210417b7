"""Training of the demo model: a small `glm_moe_dsa` network, MTP block included, on the Python standard library's own source.

shape.py    the model's numbers and config.json
parts.py    layers' modules · attend.py selection, attention, indexer's loss · network.py the whole network in one pass
corpus.py   source files to token streams, packed with a hash · needles.py facts and dialogues · rows.py batches
recipe.py   the phases · losses.py · train.py the loop and the command · evaluate.py measurements · export.py the checkpoint

Nothing here is used when serving; nothing outside imports it. Needs torch, numpy, tokenizers and safetensors alone.

Choices: all experts are computed and weighted (8 of width 96: one large product is quicker than a grouped one of this size);
document boundaries are not masked (the demo reads many files in one row, so files that see one another are what it meets);
selection is a mask under fused attention, not a gather (256 scattered picks a row cost more to gather than to mask at 16K tokens).
"""
