"""Runs programs in Triton's interpreter and prints their errors as JSON; for test_triton.py, which sets TRITON_INTERPRET."""

import json
import pathlib
import sys
import tempfile
import warnings

import torch
from pretended_gpu import load_kernel, plain_source

from rotpass.lower import tiled
from rotpass.lower.program import Launch, Quantize
from rotpass.lower.tiling import matrices, tiling
from rotpass.quantize import quantize_rows

warnings.simplefilter("ignore")


def run(
    folder: pathlib.Path, size: int, rows: int, dtype: torch.dtype, launch: Launch, q: Quantize | None, table: str
) -> float:
    """How far a program is from a dense float64 product, relative to the result; quantized, in steps."""
    import rotpass

    t = tiling(size, table)
    torch.manual_seed(size)
    x = torch.randn(rows, size) + 0.3
    x[:, :: max(size // 7, 1)] *= 100
    x = x.to(dtype)
    left, right = (
        matrices(t, table=table, transpose=False, dtype=d, device=torch.device("cpu"))[i]
        for i, d in enumerate(tiled.constant_dtypes(t, dtype))
    )
    out = torch.empty(rows, size, dtype=q.dtype if q else dtype)
    scale, zero = torch.full((rows, 1), -1.0), torch.full((rows, 1), 99, dtype=torch.int32)
    kernel = load_kernel(folder, plain_source(t, launch, dtype, q))
    programs = -(-rows // launch.rows)
    kernel[(min(programs, 2) if launch.per_sm else programs,)](x, left, right, scale, zero, out, rows)
    exact = x.double() @ (rotpass.hadamard_matrix(size, table=table).double() / size**0.5).T
    if q is None:
        return ((out.double() - exact).norm() / exact.norm()).item()
    _, expected_scale, expected_zero = quantize_rows(exact, q.dtype, asymmetric=q.asymmetric)
    torch.testing.assert_close(scale, expected_scale, rtol=2e-2, atol=0)
    if q.asymmetric:
        assert (zero - expected_zero).abs().max() <= 3, (zero, expected_zero)
    back = (out.double() - (zero.double() if q.asymmetric else 0)) * scale.double()
    return ((back - exact).abs() / scale.double()).max().item()


if __name__ == "__main__":
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for size, rows, dtype, launch, q, table in json.loads(sys.argv[1]):
            quantize = q and Quantize(getattr(torch, q[0]), q[1])
            results.append(
                run(pathlib.Path(folder), size, rows, getattr(torch, dtype), Launch(*launch), quantize, table)
            )
    print(json.dumps(results))
