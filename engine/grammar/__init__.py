"""Output that must have a form: JSON of a schema, a regular expression, a grammar, or tool calls with arguments of their schemas.

Parts: `form.py` (what a request asks for, as a grammar's text), `lark.py` (pieces of such texts), `vocabulary.py` (the model's tokens as
the library sees them, and free text up to a mark), `compiled.py` (texts to grammars, off the loop, kept for the next request),
`follower.py` (where one generation is in its form, and which tokens may come next). The library is llguidance, the extra
`forebay[grammar]`; only this package imports it, when it is first asked for.

Invariants:
1. A token that the form does not allow is never sampled: the sampler masks it (`kernels/sample`), it is not drawn again until it fits.
2. What the model writes inside its reasoning has no form; it ends at a token that ends with `</think>`, and the form begins behind it.
3. A generation with a form does not run ahead: its next step is submitted when the host has followed the last and computed the mask. Others
   step without it meanwhile, and their tokens are what they are without it.
4. An end-of-text token may come only where the form is complete; where nothing else can, the generation ends by itself.

Chosen: llguidance and not xgrammar. It needs neither torch nor transformers, computes a mask without tables made of the whole grammar
beforehand, refuses what of a schema it cannot keep instead of ignoring it, and bounds the work of every step by counts.
"""

from engine.grammar.form import Form

__all__ = ["Form"]
