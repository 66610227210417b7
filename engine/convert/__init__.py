"""Checkpoints made smaller: `forebay convert`. Round to nearest, tensor by tensor, from bf16 into forms that others read too.

Parts: `recipe.py` (which weights take which form, and how config.json says so), `quantise.py` (the arithmetic), `output.py` (files that
are whole or not there), `checkpoint.py` (tensor by tensor from one directory into another).

Invariants:
1. No more than one output file and one weight are in memory at a time.
2. A file has its last name only once it is whole and on disk; index and config.json come last, so a directory that loads is complete.
3. What was begun goes on where it stopped, with the same recipe and source only; what comes out is the same to the byte.
"""

from engine.convert.checkpoint import convert
from engine.convert.recipe import Recipe

__all__ = ["Recipe", "convert"]
