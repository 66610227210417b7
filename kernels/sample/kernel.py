"""Sampling on a device: the reference's choice, programs over chunks of the vocabulary, nothing sorted and nothing read by the host.

Launches: penalise, scale, four for the top-k cut (`kernels/select`), eight for the top-p cut, tally, choose, finish. A row that does not
filter leaves the cuts' launches at once. The top-p cut is a radix search like the top-k cut, 4 bits a launch, over probability mass.

Invariants:
1. The reference's order: bias, mask, penalties, temperature, top-k, top-p, min-p, then the largest of value + noise; equals: lower id.
2. Philox words are integer arithmetic, the reference's bits. Logarithms and exponentials are the device's, so a choice may differ from the
   reference's where two scores, or a cut, differ by float32 rounding. Mass is summed in float64, in a fixed order, no float atomics.
3. A row's launches see that row only, in chunks given by the vocabulary: its token does not depend on its company.

Bytes: 605 KiB a row of 154,880 logits, read some sixteen times from L2: microseconds; launches are what it costs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.select.kernel import cut_of, find_cuts, rank_of, select

__all__ = ["count_token", "sample", "top_logprobs"]

CHUNK = 4096
_WARPS = 8
_MASS_PASSES = 8
TEMPERATURE, TOP_P, TOP_K, MIN_P, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(column) for column in range(7))
COLUMNS = tl.constexpr(8)
COUNTS = tl.constexpr(tl.pointer_type(tl.int32))
SEEN = tl.constexpr(tl.pointer_type(tl.uint8))
BIAS = tl.constexpr(tl.pointer_type(tl.float32))
MASK = tl.constexpr(tl.pointer_type(tl.int32))


@triton.jit
def _penalise(logits, stride, parameters, prompt_seen, output_counts, before, biases, masks, values, tops, BEFORE: tl.constexpr,
              BIASED: tl.constexpr, MASKED: tl.constexpr, VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr,
              CHUNK: tl.constexpr):  # fmt: skip
    """Biased, masked and penalised logits, and each chunk's largest: NaN where any is."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    value = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
    if BIASED:
        bias = tl.load(biases + row)
        if bias != 0:
            value += tl.load(bias.to(BIAS) + token, mask=inside, other=0.0)
    if MASKED:
        mask = tl.load(masks + row)
        if mask != 0:
            words = tl.load(mask.to(MASK) + token // 32, mask=inside, other=0)
            value = tl.where((words >> (token % 32)) & 1 != 0, value, float("-inf"))
    seen, counts = tl.load(prompt_seen + row), tl.load(output_counts + row)
    if (seen != 0) | (counts != 0):
        times = tl.load(counts.to(COUNTS) + token, mask=inside & (counts != 0), other=0)
        for number in range(BEFORE):
            times += ((token == tl.load(before + row * BEFORE + number)) & (counts != 0)).to(tl.int32)
        met = (times > 0) | (tl.load(seen.to(SEEN) + token, mask=inside & (seen != 0), other=0) > 0)
        repetition = tl.load(parameters + row * COLUMNS + REPETITION) + tl.zeros([CHUNK], tl.float32)
        value = tl.where(met, tl.where(value > 0, tl.div_rn(value, repetition), value * repetition), value)
        value -= tl.load(parameters + row * COLUMNS + FREQUENCY) * times.to(tl.float32)
        value -= tl.load(parameters + row * COLUMNS + PRESENCE) * (times > 0).to(tl.float32)
    tl.store(values + row * VOCABULARY + token, value, mask=inside)
    broken = tl.max((inside & (value != value)).to(tl.int32)) > 0
    top = tl.max(tl.where(inside, value, float("-inf")))
    tl.store(tops + row * CHUNKS + chunk, tl.where(broken, float("nan"), top))


@triton.jit
def _top(tops, row, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """A row's largest value; NaN if any is."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    top = tl.load(tops + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    return tl.where(tl.max((top != top).to(tl.int32)) > 0, float("nan"), tl.max(top))


@triton.jit
def _scale(parameters, values, tops, ends, limits, VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
           CHUNK: tl.constexpr):  # fmt: skip
    """Values relative to the largest, by temperature (not for a greedy row); how far and for how many top-k looks."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(parameters + row * COLUMNS + TEMPERATURE)
    if chunk == 0:
        wanted = tl.load(parameters + row * COLUMNS + TOP_K).to(tl.int32)
        cuts = (temperature != 0.0) & (wanted > 0) & (wanted < VOCABULARY)
        tl.store(ends + row, tl.where(cuts, VOCABULARY, 0).to(tl.int64))
        tl.store(limits + row, tl.where(cuts, wanted, VOCABULARY).to(tl.int64))
    if temperature != 0.0:
        top = _top(tops, row, CHUNKS, CHUNKS_BLOCK)
        at = values + row * VOCABULARY + chunk * CHUNK + tl.arange(0, CHUNK)
        inside = chunk * CHUNK + tl.arange(0, CHUNK) < VOCABULARY
        moved = tl.load(at, mask=inside, other=0.0) - top
        tl.store(at, tl.div_rn(moved, temperature + tl.zeros([CHUNK], tl.float32)), mask=inside)


@triton.jit
def _value_of(rank):
    """The float32 that has this rank."""
    return tl.where(rank >> 31 != 0, rank ^ 0x80000000, rank ^ 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _mass_narrowed(masses, row, prefix, wanted, cut, equals, top_p, NUMBER: tl.constexpr, CHUNKS: tl.constexpr,
                   CHUNKS_BLOCK: tl.constexpr):  # fmt: skip
    """Add pass NUMBER's digit to the top-p cut: the largest that leaves at least the wanted mass at or above it, else 0."""
    shift: tl.constexpr = 28 - 4 * NUMBER
    chunk = tl.arange(0, CHUNKS_BLOCK)[:, None]
    digit = tl.arange(0, 16)
    part = tl.load(masses + ((row * 8 + NUMBER) * CHUNKS + chunk) * 16 + digit[None, :], mask=chunk < CHUNKS, other=0.0)
    mass = tl.sum(part, 0)
    if cut != 0:  # ties at the top-k cut count as many times as they are taken
        tied = equals.to(tl.float64) * tl.exp(_value_of(cut)).to(tl.float64)
        if NUMBER > 0:
            tied = tl.where(cut >> (shift + 4) == prefix >> (shift + 4), tied, 0.0)
        mass += tl.where(digit == ((cut >> shift) & 15).to(tl.int32), tied, 0.0)
    if NUMBER == 0:
        wanted = top_p.to(tl.float64) * tl.sum(mass)
    at_least = tl.sum(mass) - tl.cumsum(mass) + mass
    chosen = tl.max(tl.where((at_least >= wanted) & (at_least > 0.0), digit, 0))
    above = tl.sum(tl.where(digit > chosen, mass, 0.0))
    return prefix | (chosen.to(tl.uint32) << shift), wanted - above


@triton.jit
def _mass(parameters, values, states, counts, prefixes, wanteds, masses, PASS: tl.constexpr, VOCABULARY: tl.constexpr,
          CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """A chunk's probability mass by the next digit, among tokens above the top-k cut whose ranks share the digits so far."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    shift: tl.constexpr = 28 - 4 * PASS
    top_p = tl.load(parameters + row * COLUMNS + TOP_P)
    if (top_p < 1.0) & (tl.load(parameters + row * COLUMNS + TEMPERATURE) != 0.0):
        cut, equals = cut_of(states, counts, row)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(values + row * VOCABULARY + token, mask=token < VOCABULARY, other=float("-inf"))
        rank = rank_of(value)
        counted = (token < VOCABULARY) & (rank > cut)
        if PASS > 0:
            prefix = tl.load(prefixes + row * 8 + PASS - 1).to(tl.uint32, bitcast=True)
            wanted = tl.load(wanteds + row * 8 + PASS - 1)
            prefix, wanted = _mass_narrowed(masses, row, prefix, wanted, cut, equals, top_p, PASS - 1, CHUNKS, CHUNKS_BLOCK)
            if chunk == 0:
                tl.store(prefixes + row * 8 + PASS, prefix.to(tl.int32, bitcast=True))
                tl.store(wanteds + row * 8 + PASS, wanted)
            counted = counted & (rank >> (shift + 4) == prefix >> (shift + 4))
        elif chunk == 0:
            tl.store(prefixes + row * 8, 0)
            tl.store(wanteds + row * 8, tl.zeros([], tl.float64))
        likely = tl.where(counted, tl.exp(value), 0.0).to(tl.float64)
        digit = ((rank >> shift) & 15).to(tl.int32)
        to_mass = masses + ((row * 8 + PASS) * CHUNKS + chunk) * 16
        for number in range(16):
            tl.store(to_mass + number, tl.sum(tl.where(digit == number, likely, 0.0)))


@triton.jit
def _tally(parameters, values, states, counts, prefixes, wanteds, masses, cuts, tallies, VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr,
           CHUNKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The last cut of both, how many equal to it are kept, and how many each chunk has."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    top_p = tl.load(parameters + row * COLUMNS + TOP_P)
    cut, equals = cut_of(states, counts, row)
    if (top_p < 1.0) & (tl.load(parameters + row * COLUMNS + TEMPERATURE) != 0.0):
        prefix = tl.load(prefixes + row * 8 + 7).to(tl.uint32, bitcast=True)
        found, wanted = _mass_narrowed(masses, row, prefix, tl.load(wanteds + row * 8 + 7), cut, equals, top_p, 7, CHUNKS, CHUNKS_BLOCK)
        each = tl.exp(_value_of(found)).to(tl.float64)
        kept = tl.where(each > 0.0, tl.ceil(wanted / tl.where(each > 0.0, each, 1.0)), VOCABULARY)
        kept = tl.minimum(tl.maximum(kept, 1.0), VOCABULARY).to(tl.int32)
        if found > cut:
            cut, equals = found, kept
        else:
            equals = tl.minimum(equals, kept)
    if chunk == 0:
        tl.store(cuts + row * 2, cut.to(tl.int32, bitcast=True))
        tl.store(cuts + row * 2 + 1, equals)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    rank = rank_of(tl.load(values + row * VOCABULARY + token, mask=token < VOCABULARY, other=0.0))
    tl.store(tallies + row * CHUNKS + chunk, tl.sum(((token < VOCABULARY) & (rank == cut)).to(tl.int32)))


@triton.jit
def _gumbel(seed, position, token):
    """Standard Gumbel noise; -log(1 - u) for u near 0 keeps u's digits."""
    zero = token * 0
    low = (zero + (position & 0xFFFFFFFF)).to(tl.uint32)
    high = (zero + (position >> 32)).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, token.to(tl.uint32), low, high, zero.to(tl.uint32))
    uniform = tl.minimum((word.to(tl.uint64) * 2 + 1).to(tl.float32) * 1.1641532182693481e-10, 0.9999999403953552)
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * tl.div_rn(uniform, lost))
    return -tl.log(exponential)


@triton.jit
def _choose(parameters, values, cuts, tallies, seeds, positions, scores, tokens, VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr,
            CHUNKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """A chunk's best kept token and its score."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    kept = token < VOCABULARY
    score = tl.load(values + row * VOCABULARY + token, mask=kept, other=float("-inf"))
    if tl.load(parameters + row * COLUMNS + TEMPERATURE) != 0.0:
        cut = tl.load(cuts + row * 2).to(tl.uint32, bitcast=True)
        rank = rank_of(score)
        earlier = tl.arange(0, CHUNKS_BLOCK)
        before = tl.sum(tl.load(tallies + row * CHUNKS + earlier, mask=earlier < chunk, other=0))
        equal = (kept & (rank == cut)).to(tl.int32)
        order = before + tl.cumsum(equal) - equal
        kept = kept & ((rank > cut) | ((equal > 0) & (order < tl.load(cuts + row * 2 + 1))))
        min_p = tl.load(parameters + row * COLUMNS + MIN_P)
        kept = kept & (tl.exp(score) >= min_p)
        score += _gumbel(tl.load(seeds + row), tl.load(positions + row), token)
    score = tl.where(kept, score, float("-inf"))
    best = tl.max(score)
    tl.store(scores + row * CHUNKS + chunk, best)
    tl.store(tokens + row * CHUNKS + chunk, tl.min(tl.where(kept & (score == best), token, 2147483647)))


@triton.jit
def _finish(tops, scores, tokens, out, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    top = _top(tops, row, CHUNKS, CHUNKS_BLOCK)
    score = tl.load(scores + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    token = tl.load(tokens + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=2147483647)
    best = tl.min(tl.where(score == tl.max(score), token, 2147483647))
    finite = (top == top) & (tl.abs(top) != float("inf"))
    tl.store(out + row, tl.where(finite, best, 0).to(tl.int64))


@triton.jit
def _count_token(output_counts, tokens):
    address = tl.load(output_counts + tl.program_id(0))
    if address != 0:
        at = address.to(COUNTS) + tl.load(tokens + tl.program_id(0))
        tl.store(at, tl.load(at) + 1)


def sample(
    logits: Tensor, parameters: Tensor, seeds: Tensor, positions: Tensor, prompt_seen: Tensor, output_counts: Tensor,
    before: Tensor | None, biases: Tensor | None, masks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See the reference; values of a row of `logits` lie side by side."""
    rows, vocabulary = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    chunks = triton.cdiv(vocabulary, CHUNK)
    grid = (chunks, rows)
    shapes = {"VOCABULARY": vocabulary, "CHUNKS": chunks, "CHUNK": CHUNK, "num_warps": _WARPS}
    blocks = shapes | {"CHUNKS_BLOCK": triton.next_power_of_2(chunks)}
    values = torch.empty((rows, vocabulary), dtype=torch.float32, device=device)
    tops, scores = torch.empty((2, rows, chunks), dtype=torch.float32, device=device)
    tallies, tokens = torch.empty((2, rows, chunks), dtype=torch.int32, device=device)
    ranges = torch.zeros((3, rows), dtype=torch.int64, device=device)  # first, last and limit of top-k
    # Contraction into fused multiply-adds would round penalties once instead of twice.
    uncounted = 0 if before is None else before.shape[1]
    _penalise[grid](
        logits, logits.stride(0), parameters, prompt_seen, output_counts, seeds if before is None else before.contiguous(),
        seeds if biases is None else biases, seeds if masks is None else masks, values, tops, BEFORE=uncounted, BIASED=biases is not None,
        MASKED=masks is not None, **shapes, enable_fp_fusion=False,
    )  # fmt: skip
    _scale[grid](parameters, values, tops, ranges[1], ranges[2], **blocks)
    states, counts = find_cuts(values, ranges[0], ranges[1], 0, ranges[2])
    prefixes = torch.empty((rows, _MASS_PASSES), dtype=torch.int32, device=device)
    wanteds = torch.empty((rows, _MASS_PASSES), dtype=torch.float64, device=device)
    masses = torch.empty((rows, _MASS_PASSES, chunks, 16), dtype=torch.float64, device=device)
    for number in range(_MASS_PASSES):
        _mass[grid](parameters, values, states, counts, prefixes, wanteds, masses, PASS=number, **blocks)
    cuts = torch.empty((rows, 2), dtype=torch.int32, device=device)
    _tally[grid](parameters, values, states, counts, prefixes, wanteds, masses, cuts, tallies, **blocks)
    _choose[grid](parameters, values, cuts, tallies, seeds, positions, scores, tokens, **blocks)
    _finish[(rows,)](tops, scores, tokens, out, CHUNKS=chunks, CHUNKS_BLOCK=blocks["CHUNKS_BLOCK"], num_warps=1)
    return out


def count_token(output_counts: Tensor, tokens: Tensor) -> None:
    """See the reference."""
    if tokens.shape[0]:
        _count_token[(tokens.shape[0],)](output_counts, tokens, num_warps=1)


def top_logprobs(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See the reference: the exact choice in order of id, then a stable sort of those few."""
    rows, vocabulary = logprobs.shape
    count = min(count, vocabulary)
    if count == 0 or rows == 0:
        shape = (rows, count)
        return torch.empty(shape, device=logprobs.device), torch.empty(shape, dtype=torch.int64, device=logprobs.device)
    keys = torch.where(logprobs.isnan(), -torch.inf, logprobs).contiguous()
    chosen = torch.empty((rows, count), dtype=torch.int32, device=logprobs.device)
    first = torch.zeros(rows, dtype=torch.int64, device=logprobs.device)
    select(keys, first, first + vocabulary, count, chosen)
    token_ids = chosen.long()
    order = torch.sort(keys.gather(1, token_ids), dim=1, descending=True, stable=True).indices
    token_ids = token_ids.gather(1, order)
    return logprobs.gather(1, token_ids), token_ids


_VOCABULARY = {"VOCABULARY": 154880, "CHUNKS": 38, "CHUNK": CHUNK, "num_warps": _WARPS}
_ROWS = _VOCABULARY | {"parameters": "*fp32", "values": "*fp32", "CHUNKS_BLOCK": 64}
_CUTS = _ROWS | {"states": "*i32", "counts": "*i32", "prefixes": "*i32", "wanteds": "*fp64", "masses": "*fp64"}
_PENALISE = _VOCABULARY | {
    "logits": "*fp32", "stride": 154880, "parameters": "*fp32", "prompt_seen": "*i64", "output_counts": "*i64", "before": "*i64",
    "biases": "*i64", "masks": "*i64", "values": "*fp32", "tops": "*fp32",
}  # fmt: skip
COMPILE = [
    (_penalise, _PENALISE | {"BEFORE": 0, "BIASED": False, "MASKED": False}),
    (_penalise, _PENALISE | {"BEFORE": 7, "BIASED": True, "MASKED": True}),
    (_scale, _ROWS | {"tops": "*fp32", "ends": "*i64", "limits": "*i64"}),
    (_mass, _CUTS | {"PASS": 0}),
    (_mass, _CUTS | {"PASS": 3}),
    (_tally, _CUTS | {"cuts": "*i32", "tallies": "*i32"}),
    (_choose, _ROWS | {"cuts": "*i32", "tallies": "*i32", "seeds": "*i64", "positions": "*i64", "scores": "*fp32", "tokens": "*i32"}),
    (_finish, {"tops": "*fp32", "scores": "*fp32", "tokens": "*i32", "out": "*i64", "CHUNKS": 38, "CHUNKS_BLOCK": 64, "num_warps": 1}),
    (_count_token, {"output_counts": "*i64", "tokens": "*i64", "num_warps": 1}),
]  # fmt: skip
