"""From logits to tokens: bias, mask, penalties, filters and a seeded choice.

Sampling is a pure function of (logits, parameters, counts, seed, position): the same row gives the same token in any batch, with and
without drafts, and again after a restart. The choice is the largest of log p + Gumbel noise, which draws exactly from p, needs no sum over
the vocabulary, and lets a verifier sample every drafted row by itself and accept while the draft equals the sample. A row that comes after
drafts counts them as generated (`before`): it is only ever used when they were accepted, so all rows are sampled at once.

Parts: `noise.py` (Philox-4x32-10 and what is made of its words), `reference.py` (the definition), `kernel.py` (the same on a device).

Chosen: exactly k tokens pass top-k, equals by id, where others let all equals pass: a count that ties can raise is no limit.
min-p comes last; as it compares with the most likely token only, top-k and top-p do not move its threshold.
"""

from torch import Tensor

from kernels.place import on_cpu
from kernels.sample import reference

__all__ = ["count_token", "log_probabilities", "sample", "top_logprobs"]


def sample(
    logits: Tensor, parameters: Tensor, seeds: Tensor, positions: Tensor, prompt_seen: Tensor, output_counts: Tensor,
    before: Tensor | None = None, biases: Tensor | None = None, masks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Choose one token a row.

    logits         [T, V]  f32    device  raw; read only
    parameters     [T, 8]  f32    device  temperature, top_p, top_k (0: off), min_p, repetition, presence, frequency, unused
    seeds          [T]     int64  device
    positions      [T]     int64  device  position that the token will have
    prompt_seen    [T]     int64  device  address of uint8 [V], nonzero for tokens of the prompt; 0: no repetition penalty
    output_counts  [T]     int64  device  address of int32 [V], times each token was generated; 0: none
    before         [T, B]  int64  device  tokens generated besides, not counted yet: the drafts that a row comes after; -1: none
    biases         [T]     int64  device  address of float32 [V], added to the logits before all else; 0: nothing is
    masks          [T]     int64  device  address of int32 [(V + 31) // 32]: token t may come where bit t % 32 of word t // 32 is set;
                                          0: any may
    returns        [T]     int64  device  token ids
    """
    if on_cpu("sample", logits):
        return reference.sample(logits, parameters, seeds, positions, prompt_seen, output_counts, before, biases, masks)
    from kernels.sample import kernel

    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return kernel.sample(logits, parameters, seeds, positions, prompt_seen, output_counts, before, biases, masks)


def count_token(output_counts: Tensor, tokens: Tensor) -> None:
    """Add one to each row's count of its token.

    output_counts  [T]  int64  device  addresses as for `sample`, distinct; 0: nothing is counted
    tokens         [T]  int64  device  token ids, at least 0 where counted
    """
    if on_cpu("count_token", tokens):
        reference.count_token(output_counts, tokens)
        return
    from kernels.sample import kernel

    kernel.count_token(output_counts, tokens)


def log_probabilities(logits: Tensor) -> Tensor:
    """Natural-log probabilities under the raw logits; a row that holds NaN or +inf gives NaN. torch on every device, a row at a time.

    logits   [T, V]  f32
    returns  [T, V]  f32  new, contiguous
    """
    return reference.log_probabilities(logits)


def top_logprobs(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens of each row, most likely first, equals by token id.

    logprobs  [T, V]  f32
    count     at least 0; at most V are returned
    returns   [T, count]  f32    log probabilities
              [T, count]  int64  token ids
    """
    if on_cpu("top_logprobs", logprobs):
        return reference.top_logprobs(logprobs, count)
    from kernels.sample import kernel

    return kernel.top_logprobs(logprobs, count)
