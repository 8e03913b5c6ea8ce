"""Rotations on a GPU, alone and fused, beside a copy of the same bytes: ``python examples/benchmarks/bench_kernels.py``.

Microseconds; in brackets the ratio to the copy of the same bytes in the same run. ``chain`` is Inductor's silu * mul, our
hadamard and Inductor's quantization as the three kernels they are when nothing is fused; ``floor`` is the bytes that the
fused kernel must read and write at 4.3 TB/s, the best that a large copy on an H200 was seen to do.
"""

import argparse
import math
import warnings

import torch
import torch.nn.functional as F
from gpu_timing import microseconds, versions

import rotpass

VECTORS = (
    (131072, 128),
    (32768, 128),
    (131072, 64),
    (131072, 96),
    (131072, 256),
    (32768, 80),
    (32768, 112),
    (32768, 192),
)
WIDE = (4096, 8192, 11008, 14336, 18944, 28672)
ROWS = (4096, 16)
RATE = 4.3e6  # bytes a microsecond


def compiled(function, *inputs):
    """The time of a function compiled by rotpass."""
    torch.compiler.reset()
    fast = torch.compile(function, backend=rotpass.backend(), dynamic=False)
    fast(*inputs)
    return microseconds(lambda: fast(*inputs))


def copy(x: torch.Tensor) -> float:
    y = torch.empty_like(x)
    return microseconds(lambda: y.copy_(x))


def quantize(size: int, dtype: torch.dtype):
    """A rotation and its quantization as one operator."""
    return lambda x: torch.ops.rotpass.hadamard_quantize(x, size, dtype)[:2]


def per_token(y: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic quantization as users write it."""
    top = 448.0 if dtype == torch.float8_e4m3fn else 127.0
    scale = (y.float().abs().amax(-1, keepdim=True) / top).clamp(min=1e-12)
    q = y.float() / scale
    return (q.to(dtype) if dtype == torch.float8_e4m3fn else q.round().to(dtype)), scale


def dense(x: torch.Tensor, size: int) -> float:
    h = (rotpass.hadamard_matrix(size).double() / math.sqrt(size)).to(x.dtype).cuda()
    return microseconds(lambda: x @ h)


def peer(x: torch.Tensor) -> str:
    """Dao's fast-hadamard-transform, which pads sizes that are neither powers of two nor 12, 20, 28, 40 times one."""
    try:
        from fast_hadamard_transform import hadamard_transform
    except ImportError:
        return "-"
    return f"{microseconds(lambda: hadamard_transform(x)):.1f}"


def line(*cells: str) -> None:
    print("  ".join(f"{cell:>14}" for cell in cells), flush=True)


def alone(dtype: torch.dtype) -> None:
    line("rows x size", "copy", "hadamard", "-> fp8", "-> int8", "matmul", "Dao")
    cases = [*VECTORS, *((rows, size) for rows in ROWS for size in WIDE)]
    for rows, size in cases:
        x = torch.randn(rows, size, device="cuda").to(dtype)
        base = copy(x)
        times = [compiled(lambda x, size=size: rotpass.hadamard_transform(x, size), x)]
        times += [compiled(quantize(size, q), x) for q in (torch.float8_e4m3fn, torch.int8)]
        matmul = f"{dense(x, size):.1f}" if size <= 8192 and rows > 16 else "-"
        line(f"{rows}x{size}", f"{base:.1f}", *(f"{t:.1f} ({t / base:.2f})" for t in times), matmul, peer(x))


def fused(dtype: torch.dtype) -> None:
    print("\nfused with silu * mul, 4096 tokens")
    line("size", "what", "floor", "ours", "/ floor", "chain", "chain / ours")
    for size in (8192, 11008, 14336):
        gate, up = (torch.randn(4096, size, device="cuda").to(dtype) for _ in range(2))
        for q in (None, torch.float8_e4m3fn, torch.int8):
            name = "bf16" if q is None else str(q)[6:]

            def one(gate, up, size=size, q=q):
                x = F.silu(gate) * up
                return rotpass.hadamard_transform(x, size) if q is None else quantize(size, q)(x)

            floor = gate.nbytes * (3 if q is None else 2.5) / RATE
            ours = compiled(one, gate, up)
            x = F.silu(gate) * up
            chain = compiled(lambda gate, up: F.silu(gate) * up, gate, up)
            chain += compiled(lambda x, size=size: rotpass.hadamard_transform(x, size), x)
            chain += 0 if q is None else compiled(lambda x, q=q: per_token(x, q), x)
            line(
                f"{size}",
                name,
                f"{floor:.1f}",
                f"{ours:.1f}",
                f"{ours / floor:.2f}",
                f"{chain:.1f}",
                f"{chain / ours:.2f}",
            )


def rope(dtype: torch.dtype) -> None:
    def apply(q, cos, sin):
        q = q.view(1, 4096, 32, 128).transpose(1, 2)
        a, b = q.chunk(2, -1)
        return q * cos + torch.cat([-b, a], -1) * sin

    q = torch.randn(1, 4096, 4096, device="cuda").to(dtype)
    cos, sin = (torch.randn(1, 1, 4096, 128, device="cuda").to(dtype) for _ in range(2))
    plain, with_r3 = (compiled(f, q, cos, sin) for f in (apply, lambda *a: rotpass.hadamard_transform(apply(*a), 128)))
    print(f"\nRoPE of 4096 x 32 x 128: {plain:.1f} alone, {with_r3:.1f} with R3 ({with_r3 / plain:.2f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    dtype = getattr(torch, parser.parse_args().dtype)
    warnings.simplefilter("ignore")
    print(versions())
    with torch.no_grad():
        rope(dtype)
        fused(dtype)
        print()
        alone(dtype)
