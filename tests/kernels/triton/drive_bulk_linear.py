"""Products of an append's rows: the library's, with interpreted dequantising, around the number of rows where they begin."""

import company
import interpreted  # noqa: F401
import torch

from kernels.linear import BlockFp8, bulk, heads_linear, linear
from kernels.place import BULK_ROWS


def one_weight_of_any_kind() -> None:
    """float32, bf16 and block-FP8 weights give the float64 product of their exact values, also when cut to small scratch."""
    torch.manual_seed(1)
    for rows, outputs, width in ((BULK_ROWS + 1, 65, 300), (255, 70, 128), (256, 130, 129), (257, 300, 40)):
        x = torch.randn(rows, 2 * width)[:, ::2]
        weight = torch.randn(outputs, width)
        narrow = weight.bfloat16()
        scales = torch.rand(-(-outputs // 128), -(-width // 128)) + 0.1
        fp8 = BlockFp8(weight.to(torch.float8_e4m3fn), scales)
        wide = fp8.dequantised(torch.float64)
        company.near("float32", linear(x, weight), x.double() @ weight.double().t(), 1e-5)
        for scratch in (1, bulk.SCRATCH_BYTES):
            bulk.SCRATCH_BYTES, kept = scratch, bulk.SCRATCH_BYTES
            company.near("bf16", linear(x, narrow), x.double() @ narrow.double().t(), 1e-5)
            company.near("FP8", linear(x, fp8), x.double() @ wide.t(), 1e-5)
            company.near("FP8 bf16", linear(x.bfloat16(), fp8), x.bfloat16().double() @ wide.t(), 2**-5)
            bulk.SCRATCH_BYTES = kept
        company.near("bf16 rows", linear(x.bfloat16(), narrow), x.bfloat16().double() @ narrow.double().t(), 2**-7)
        float32 = bulk.linear(x.bfloat16(), weight, torch.float32)
        assert float32.dtype == torch.float32
        company.near("float32 of bf16 rows", float32, x.bfloat16().double() @ weight.double().t(), 1e-5)


def a_weight_a_head() -> None:
    """Heads of strided rows each meet their own weight; the result is contiguous."""
    torch.manual_seed(2)
    for rows in (BULK_ROWS + 1, 257):
        x, weight = torch.randn(rows, 5, 50)[..., 3:43], torch.randn(5, 40, 9).transpose(1, 2)
        got = heads_linear(x, weight)
        assert got.is_contiguous()
        company.near("heads", got, torch.einsum("tnk,nmk->tnm", x.double(), weight.double()), 1e-5)
        got = heads_linear(x.bfloat16(), weight.bfloat16())
        company.near("bf16", got, torch.einsum("tnk,nmk->tnm", x.bfloat16().double(), weight.bfloat16().double()), 2**-7)


def a_nan_row_stays_alone() -> None:
    """A row of NaN makes only its own result NaN."""
    torch.manual_seed(3)
    x, weight = torch.randn(200, 20), torch.randn(7, 20)
    clean = linear(x, weight)
    x[150] = float("nan")
    got = linear(x, weight)
    assert bool(got[150].isnan().all())
    got[150] = clean[150]
    company.near("others", got, clean, 1e-6)


def main() -> None:
    one_weight_of_any_kind()
    a_weight_a_head()
    a_nan_row_stays_alone()


if __name__ == "__main__":
    main()
