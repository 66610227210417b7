"""From logits to tokens: penalties, filters and a seeded choice.

Sampling is a pure function of (logits, parameters, counts, seed, position): the same row gives the same token in any batch, with and
without drafts, and again after a restart. The choice is the largest of log p + Gumbel noise, which draws exactly from p, needs no sum over
the vocabulary, and lets a verifier sample every drafted row by itself and accept while the draft equals the sample.

Parts: `noise.py` (Philox-4x32-10 and what is made of its words), `reference.py` (the definition).

Chosen: exactly k tokens pass top-k, equals by id, where others let all equals pass: a count that ties can raise is no limit.
min-p comes last; as it compares with the most likely token only, top-k and top-p do not move its threshold.
"""

from kernels.sample.reference import count_token, log_probabilities, sample, top_logprobs

__all__ = ["count_token", "log_probabilities", "sample", "top_logprobs"]
