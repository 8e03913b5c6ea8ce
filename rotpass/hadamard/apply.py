"""The product x R^T itself, stage by stage: one form for the CPU's caches and one for any other device."""

import contextlib

import torch
from torch import Tensor

from rotpass.hadamard.stages import sign_vector, stage_matrices

# Elements that a thread works on at a time. From 2^17 (all of a chunk in 2 MiB of L2) to 2^20 (in L3) the speed is the
# same within noise; above, the buffers cost page faults. Threads meet after every stage of every chunk, which on a busy
# machine costs a time slice each, so not the smallest.
_CHUNK = 1 << 19


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Autocast would run the products in bfloat16; it is still on inside a kernel."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _physical_order(x: Tensor) -> list[int]:
    """The axes but the last, by descending stride, then the last: a transposed (B, H, S, D) becomes (B, S, H, D)."""
    leading = range(x.dim() - 1)
    return [*sorted(leading, key=lambda axis: -x.stride(axis)), x.dim() - 1]


def _apply_stage(x: Tensor, matrix: Tensor, inner: int, out: Tensor | None) -> Tensor:
    """Contracts the digit whose lower neighbours have ``inner`` values together; x and out are contiguous."""
    k = len(matrix)
    if inner == 1:
        rows = x.view(-1, k)
        return torch.mm(rows, matrix.mT) if out is None else torch.mm(rows, matrix.mT, out=out.view(-1, k))
    left = x.view(-1, k, inner)
    stack = matrix.expand(len(left), k, k)
    return torch.bmm(stack, left) if out is None else torch.bmm(stack, left, out=out.view(-1, k, inner))


def _apply_rows(source: Tensor, target: Tensor, matrices: tuple[Tensor, ...], signs: Tensor | None, post: bool) -> None:
    """target = (source * s) R^T, or (source R^T) * s if post, for contiguous (rows, size) tensors on the CPU.

    A chunk of rows goes through all stages before the next, alternating between two buffers, so that only its first
    read and its last write leave the cache.
    """
    rows, size = source.shape
    dtype = accumulation_dtype(source.dtype)
    step = min(rows, max(1, _CHUNK * torch.get_num_threads() // size))
    work = source.new_empty((2, step, size), dtype=dtype)
    before = signs is not None and not post or source.dtype != dtype
    after = signs is not None and post or source.dtype != dtype
    for start in range(0, rows, step):
        current, final = source[start : start + step], target[start : start + step]
        buffers, inner, turn = work[:, : len(current)], 1, 0
        if before:
            if signs is not None and not post:
                torch.mul(current, signs, out=buffers[0])
            else:
                buffers[0].copy_(current)
            current, turn = buffers[0], 1
        for left, matrix in zip(range(len(matrices) - 1, -1, -1), reversed(matrices)):
            out = final if left == 0 and not after else buffers[turn]
            _apply_stage(current, matrix, inner, out)
            current, turn, inner = out, 1 - turn, inner * len(matrix)
        if after:
            if signs is not None and post:
                torch.mul(current, signs, out=final)
            else:
                final.copy_(current)


def apply_cpu(x: Tensor, size: int, transpose: bool, table: str, seed: int | None) -> Tensor:
    """The operator on a CPU tensor whose arguments have been checked."""
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    dtype = accumulation_dtype(x.dtype)
    matrices = stage_matrices(size, table=table, transpose=transpose, dtype=dtype, device=x.device)
    signs = None if seed is None else sign_vector(size, seed, dtype=dtype, device=x.device)
    order = _physical_order(x)
    source, target = x.permute(order).contiguous(), out.permute(order)
    direct = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    with _without_autocast(x.device):
        _apply_rows(source.view(-1, size), direct.view(-1, size), matrices, signs, transpose)
    if direct is not target:
        target.copy_(direct)
    return out


def apply_any(x: Tensor, size: int, transpose: bool, table: str, seed: int | None) -> Tensor:
    """The operator on a tensor of any device whose arguments have been checked."""
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    dtype = accumulation_dtype(x.dtype)
    matrices = stage_matrices(size, table=table, transpose=transpose, dtype=dtype, device=x.device)
    signs = None if seed is None else sign_vector(size, seed, dtype=dtype, device=x.device)
    order = _physical_order(x)
    current = x.permute(order).to(dtype).contiguous().view(-1, size)
    with _without_autocast(x.device):
        if signs is not None and not transpose:
            current = current * signs
        inner = 1
        for matrix in reversed(matrices):
            current = _apply_stage(current, matrix, inner, None)
            inner *= len(matrix)
        if signs is not None and transpose:
            current = current.view(-1, size) * signs
    target = out.permute(order)
    target.copy_(current.view(target.shape))
    return out
