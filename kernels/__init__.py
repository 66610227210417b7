"""Pure functions on tensors, a folder an operation.

An operation is a folder: `reference.py` is its definition in torch, which is also what runs on the CPU; a device kernel stands beside it
when there is one; `__init__.py` is the one public function, which picks by the device of its arguments. Nothing here keeps state, knows
a session, a step or a row's owner, or imports from the packages above.

Parts: `address` (real addresses on the CPU), `layout` (where bytes lie), `tile` (the shapes the CPU computes in); `linear`, `norm`, `rope`,
`moe`, `index_score`, `select`, `sparse_mla` (the model's arithmetic).

Invariants:
1. Row invariance. The bits of a row's result depend on that row and on the weights only: not on how many rows are computed beside it,
   where it stands among them, how long the score buffer is, or what unread memory holds (NaN included).
2. Outputs named `out` are written in full over the extent their docstring gives; nothing relies on what was in them.
3. An operation allocates its own scratch and holds nothing after it returns.
4. The CPU's arithmetic is float32; a threaded caller gives each worker one torch thread, and then no result depends on the thread count.

How the CPU keeps invariant 1, each measured on torch 2.13 with MKL, one thread:
- Products run in tiles of exactly 8 rows; the last tile is padded with zeros. One big product differs in bits from the same row alone.
- A tile starts on a 64-byte boundary and its rows are a multiple of 64 bytes apart. Without that, products with 8 or fewer outputs gave a
  row other bits at 12 of 15 float offsets, and with odd widths (7, 33) at other places of the same tile.
- The weight's and the output's alignment changed no bit in any shape tried.
- `silu` and `sigmoid` use another exponential in the scalar tail of an array than in its vector body, so they run over buffers padded to
  64 values. `exp`, `sin`, `cos`, `rsqrt` and a softmax over the last dimension showed no such difference.
- A mean over the last dimension is the same for 1 to 64 rows if contiguous, another if not: norms make their input contiguous first.

How a device keeps it (`kernel.py` of each operation): tiles, splits and instructions follow from the weight's shape or from k, a tile of
rows is always 16 and whole, partial sums are added in a fixed order, in the program or by another launch, and atomics are integer only.
Launches follow from shapes and bounds known when they are captured; lengths, counts and addresses are read on the device. Products there
are exact with float32 sums (bf16 and FP8 weights in the matrix units, float32 rows as three bf16 terms), so a device agrees with the
reference to float32 rounding; attention's probabilities under bf16 queries are two terms, 16 bits. More than BULK_ROWS rows are an append's
(`bulk.py`): there products are the library's and a row's bits may follow their number.

Refused: one product over all rows (twice as fast at 512 rows, other bits); tiles of more rows (a single decoded row pays for all of them);
`addcmul` and `add(alpha=)` (their vector body and scalar tail may round differently).
"""
