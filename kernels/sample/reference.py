"""Sampling, defined in torch over real addresses (CPU): a pure function of logits, parameters, counts, seed and position.

Invariants:
1. Order: bias, mask, penalties (repetition, then frequency, then presence), temperature, top-k, top-p over what top-k left, min-p against
   the most likely token, then the largest of log p + Gumbel noise. Temperature 0 takes the largest logit after penalties.
2. Equal values are ordered by token id, the lower first: at every cut, in greedy choice and in the final choice.
3. The most likely token passes every filter, so one always stays.
4. A row is computed by itself, in shapes that its own values decide: its token does not depend on its company.
5. A row whose largest logit is not finite (a NaN, +inf, or nothing but -inf) gives token 0. Who runs the model reports such rows.
"""

import numpy
import torch
from torch import Tensor

from kernels.address import tensor_at
from kernels.sample.noise import gumbel

__all__ = ["count_token", "log_probabilities", "sample", "top_logprobs"]

_CHUNK = 512


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
    before         [T, B]  int64  device  tokens generated besides, not counted yet; -1: none
    biases         [T]     int64  device  address of float32 [V], added to the logits; 0: nothing is
    masks          [T]     int64  device  address of int32 [(V + 31) // 32]: token t may come where bit t % 32 of word t // 32 is set;
                                          0: any may
    returns        [T]     int64  device  token ids
    """
    uncounted = [[]] * logits.shape[0] if before is None else before.tolist()
    if biases is not None:
        logits = _biased(logits, biases)
    if masks is not None:
        logits = _masked(logits, masks)
    rows = zip(
        logits.unbind(0), parameters.tolist(), seeds.tolist(), positions.tolist(), prompt_seen.tolist(), output_counts.tolist(),
        uncounted, strict=True,
    )  # fmt: skip
    return torch.tensor([_choose(*row) for row in rows], dtype=torch.int64, device=logits.device)


def _choose(logits: Tensor, parameters: list[float], seed: int, position: int, seen: int, counts: int, before: list[int]) -> int:
    temperature, top_p, top_k, min_p, repetition, presence, frequency, _ = parameters
    logits = _penalised(logits, repetition, presence, frequency, seen, counts, before)
    top = logits.max()  # NaN if any is
    if not bool(torch.isfinite(top)):
        return 0
    if temperature == 0.0:
        return int(logits.argmax())  # the first of equals
    # Relative to the largest, so that a small temperature overflows to -inf only, and noise keeps its resolution.
    values = (logits - top) / temperature
    token_ids = torch.arange(values.shape[0])
    if 0 < top_k < values.shape[0]:
        values, token_ids = _largest(values, int(top_k))
    if top_p < 1.0:
        values, token_ids = _nucleus(values, token_ids, top_p)
    if min_p > 0.0:
        kept = torch.exp(values) >= min_p
        values, token_ids = values[kept], token_ids[kept]
    scores = values + gumbel(seed, position, token_ids)
    return int(token_ids[scores == scores.max()].min())


def _biased(logits: Tensor, biases: Tensor) -> Tensor:
    shape = (logits.shape[1],)
    rows = zip(logits.unbind(0), biases.tolist(), strict=True)
    return torch.stack([row + tensor_at(address, shape, torch.float32) if address else row for row, address in rows])


def _masked(logits: Tensor, masks: Tensor) -> Tensor:
    token = torch.arange(logits.shape[1])
    word, bit = token // 32, (token % 32).to(torch.int32)

    def left(row: Tensor, address: int) -> Tensor:
        if not address:
            return row
        words = tensor_at(address, (-(-row.shape[0] // 32),), torch.int32)
        return torch.where((words[word] >> bit) & 1 > 0, row, -torch.inf)

    return torch.stack([left(row, address) for row, address in zip(logits.unbind(0), masks.tolist(), strict=True)])


def _penalised(
    logits: Tensor, repetition: float, presence: float, frequency: float, seen: int, counts: int, before: list[int]
) -> Tensor:  # fmt: skip
    if seen == 0 and counts == 0:
        return logits
    vocabulary = logits.shape[0]
    times = tensor_at(counts, (vocabulary,), torch.int32) if counts else torch.zeros(vocabulary, dtype=torch.int32)
    if counts and any(token >= 0 for token in before):
        times = times.clone()
        for token in before:
            if token >= 0:
                times[token] += 1
    if repetition != 1.0:
        met = times > 0
        if seen:
            met = met | (tensor_at(seen, (vocabulary,), torch.uint8) > 0)
        logits = torch.where(met, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * times - presence * (times > 0)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of `values`, largest first, equals by index; and their indices. NaN counts as the smallest."""
    keys = torch.where(values.isnan(), -torch.inf, values)
    # topk orders equals as it likes, so it gives the cut only; candidates come in index order, and the sort keeps that.
    candidates = torch.nonzero(keys >= torch.topk(keys, count).values[-1]).flatten()
    order = torch.sort(keys[candidates], descending=True, stable=True).indices[:count]
    return values[candidates[order]], candidates[order]


def _most(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `_largest`, but few values are sorted: the engine's loop waits for this, once a token of every request that wants logprobs.

    Each of the `count` largest is at least the `count`-th largest of the chunks' largest.
    """
    array = values.numpy()
    whole = len(array) // _CHUNK * _CHUNK
    tops = array[:whole].reshape(-1, _CHUNK).max(axis=1)  # NaN where any is
    if len(tops) <= count or numpy.isnan(tops).any() or numpy.isnan(array[whole:]).any():
        return _largest(values, count)
    near = torch.from_numpy(numpy.flatnonzero(array >= numpy.partition(tops, -count)[-count]))
    found, order = _largest(values[near], count)
    return found, near[order]


def _nucleus(values: Tensor, token_ids: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Keep the most likely tokens up to the one at which their probability reaches `top_p`.

    `token_ids` of equal values are ascending. The running sum is float64, so that the cut is where exact arithmetic puts it.
    """
    values, order = torch.sort(values, descending=True, stable=True)
    reached = torch.cumsum(torch.softmax(values.double(), dim=0), dim=0)
    kept = 1 + int((reached[:-1] < top_p).sum())
    return values[:kept], token_ids[order[:kept]]


def count_token(output_counts: Tensor, tokens: Tensor) -> None:
    """Add one to each row's count of its token.

    output_counts  [T]  int64  device  addresses as for `sample`; 0: nothing is counted
    tokens         [T]  int64  device  token ids, at least 0 where counted
    """
    for address, token in zip(output_counts.tolist(), tokens.tolist(), strict=True):
        if address:
            assert token >= 0, f"token {token} cannot be counted"
            tensor_at(address + token * torch.int32.itemsize, (1,), torch.int32).add_(1)


def log_probabilities(logits: Tensor) -> Tensor:
    """Natural-log probabilities under the raw logits; a row that holds NaN or +inf gives NaN.

    logits   [T, V]  f32
    returns  [T, V]  f32  new, contiguous
    """
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for row in range(logits.shape[0]):  # a row at a time: its bits do not depend on its company
        out[row] = torch.log_softmax(logits[row], dim=0)
    return out


def top_logprobs(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens of each row, most likely first, equals by token id.

    logprobs  [T, V]  f32
    count     at least 0; at most V are returned
    returns   [T, count]  f32    log probabilities
              [T, count]  int64  token ids
    """
    count = min(count, logprobs.shape[1])
    if count == 0 or logprobs.shape[0] == 0:
        shape = (logprobs.shape[0], count)
        return torch.empty(shape), torch.empty(shape, dtype=torch.int64)
    found = [_most(row, count) for row in logprobs.unbind(0)]
    return torch.stack([values for values, _ in found]), torch.stack([token_ids for _, token_ids in found])
