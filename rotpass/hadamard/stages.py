"""How a rotation is carried out: a few dense stages, each contracting one digit of the index.

The canonical factors say what the matrix is; stages say in which products it is applied. Neighbouring factors are
multiplied out (4 x 4 runs no faster than 16 x 16) and a large power of two is split.
"""

import functools
import math

import torch
from torch import Tensor

from rotpass.hadamard.clean import clean
from rotpass.hadamard.signs import signs
from rotpass.hadamard.tables import base_matrix, factors, is_sylvester

# Nanoseconds an element on one core with AVX-512, measured with MKL in torch 2.13. Every stage reads and writes L2.
_STAGE = 0.35


def _last_cost(k: int) -> float:
    """Of the innermost stage, a plain (rows, k) x (k, k). Up to 16 it moves memory, beyond that it multiplies."""
    return _STAGE + max(0.36, k / 64)


def _left_cost(k: int, inner: int) -> float:
    """Of any other stage, a batch of (k, k) x (k, inner). Short rows are slow, and below 400 multiplications a matrix
    aten uses a loop of its own in place of the BLAS."""
    return _STAGE + max(0.25, k / 60) + 6 / inner if k * k * inner >= 400 else 8.0


def atoms(n: int, table: str) -> list[tuple[int, str]]:
    """The factors with their tables, a Sylvester matrix as so many of order 2."""
    atoms: list[tuple[int, str]] = []
    for place, k in enumerate(factors(n, table=table)):
        sylvester = is_sylvester(k, place, table)
        atoms += [(2, "default")] * (k.bit_length() - 1) if sylvester else [(k, table)]
    return atoms


@functools.cache
def stages(n: int, *, table: str = "default") -> tuple[int, ...]:
    """Orders of the dense stages whose product is ``n``, outermost first: the cheapest grouping of the base orders of
    :func:`rotpass.hadamard.factors` and of twos, by the measured cost of a stage."""
    orders = [k for k, _ in atoms(n, table)]
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]  # of the last i atoms
    for i in range(1, len(orders) + 1):
        options = []
        for j in range(i):  # the outermost stage of these i atoms covers i - j of them
            cost, later = best[j]
            k, inner = math.prod(orders[len(orders) - i : len(orders) - j]), math.prod(later)
            options.append((cost + (_left_cost(k, inner) if later else _last_cost(k)), (k, *later)))
        best.append(min(options))
    return best[-1][1] or (1,)


def _multiply_out(n: int, table: str) -> list[Tensor]:
    """The orthonormal matrices of the stages, float64. Never the whole of a large Sylvester matrix."""
    parts, result = iter(atoms(n, table)), []
    for order in stages(n, table=table):
        stage = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        while len(stage) < order:
            stage = torch.kron(stage, base_matrix(*next(parts)).double())
        result.append(stage / order**0.5)
    return result


@functools.cache
def stage_matrices(
    n: int, *, table: str = "default", transpose: bool = False, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """For each of :func:`stages` its orthonormal matrix, or the transpose; shared, so not to be written to."""

    def make() -> tuple[Tensor, ...]:
        made = _multiply_out(n, table)
        return tuple((m.mT if transpose else m).contiguous().to(device=device, dtype=dtype) for m in made)

    return clean(make)


@functools.cache
def sign_vector(n: int, seed: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """:func:`rotpass.hadamard.signs` where and as the kernels want it; shared, so not to be written to."""
    return clean(lambda: signs(n, seed).to(device=device, dtype=dtype))
