"""Constructions of Hadamard matrices: square int8 tensors of +1 and -1 with :math:`H H^T = n I`, on the CPU.

Sources: R. Paley, On orthogonal matrices (1933); J. Williamson, Hadamard's determinant theorem and the sum of four
squares (1944); J. Goethals and J. Seidel, Orthogonal matrices with zero diagonal (1967); R. Turyn, Hadamard matrices,
Baumert-Hall units, four-symbol sequences, pulse compression, and surface wave encodings (1974), for T-sequences made of
Golay pairs; N. Sloane, A Library of Hadamard Matrices, whose layouts of rows and columns are followed.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rotpass.hadamard.field import jacobsthal, prime_power


def _eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.int8, device="cpu")


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int8, device="cpu")


def sylvester(n: int) -> Tensor:
    """Sylvester's matrix of order n, a power of two, in natural (Hadamard) order."""
    h = _ones(1, 1)
    while len(h) < n:
        h = double(h)
    return h


def double(h: Tensor) -> Tensor:
    """Sylvester's step: H becomes [[H, H], [H, -H]]."""
    return torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])


def from_bits(numbers: Sequence[int]) -> Tensor:
    """Row i is -1 where bit j of its number is set."""
    entries = [[1 - 2 * (number >> j & 1) for j in range(len(numbers))] for number in numbers]
    return torch.tensor(entries, dtype=torch.int8, device="cpu")


def has_paley1(n: int) -> bool:
    return n % 4 == 0 and prime_power(n - 1) is not None


def has_paley2(n: int) -> bool:
    return n % 4 == 0 and (n // 2 - 1) % 4 == 1 and prime_power(n // 2 - 1) is not None


def paley1(n: int) -> Tensor:
    """Paley's first construction, over GF(n - 1), n - 1 = 3 mod 4: ``I + S`` with S skew, first row -1."""
    h = _ones(n, n)
    h[0, 1:] = -1
    h[1:, 1:] = jacobsthal(n - 1) + _eye(n - 1)
    return h


def paley1_symmetric(n: int) -> Tensor:
    """Paley's first construction for a prime n - 1, its core reversed so that H is symmetric: entry ``chi(i + j)``."""
    q = n - 1
    element = torch.arange(q, device="cpu")
    core = jacobsthal(q)[(-element) % q]  # chi(-i - j) = -chi(i + j)
    h = _ones(n, n)
    h[1:, 1:] = torch.where(core == 0, -_ones(q, q), -core)
    return h


def paley2(n: int) -> Tensor:
    """Paley's second construction, over GF(n/2 - 1), n/2 - 1 = 1 mod 4; symmetric."""
    m = n // 2
    c = _ones(m, m)  # a symmetric conference matrix
    c[0, 0] = 0
    c[1:, 1:] = jacobsthal(m - 1)
    i = _eye(m)
    return torch.cat([torch.cat([c + i, c - i], 1), torch.cat([c - i, -c - i], 1)])


def _circulant(negative: Iterable[int], m: int) -> Tensor:
    """The circulant of order m whose first row is -1 at the given places; each row is the one above moved right."""
    row = _ones(m)
    row[sorted(negative)] = -1
    i = torch.arange(m, device="cpu")
    return row[(i[None, :] - i[:, None]) % m]


def _blocks(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.cat([torch.cat(list(row), 1) for row in rows])


def williamson(m: int, half_rows: Sequence[Sequence[int]], *, right: bool = False) -> Tensor:
    """Williamson's array of order 4m over four symmetric circulants, each given by the places up to m/2 where its first
    row is -1. The array is multiplication by a quaternion from the left, or from the right by its conjugate."""
    a, b, c, d = (_circulant([j for i in half for j in (i, (m - i) % m)], m) for half in half_rows)
    if right:
        return _blocks([[a, -b, -c, -d], [b, a, -d, c], [c, d, a, -b], [d, -c, b, a]])
    return _blocks([[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]])


def goethals_seidel(m: int, rows: Sequence[Iterable[int]]) -> Tensor:
    """Goethals and Seidel's array of order 4m over four circulants whose periodic autocorrelations cancel, each given
    by the places where its first row is -1."""
    a, b, c, d = (_circulant(row, m) for row in rows)
    br, cr, dr = b.flip(1), c.flip(1), d.flip(1)
    btr, ctr, dtr = b.T.flip(1), c.T.flip(1), d.T.flip(1)
    return _blocks([[a, br, cr, dr], [-br, a, -dtr, ctr], [-cr, dtr, a, -btr], [-dr, -ctr, btr, a]])


def golay_rows(g: int) -> list[list[int]]:
    """Four rows of length 2g + 1 for :func:`goethals_seidel`, g a power of two, from a Golay pair (F, G) of length g:
    the T-sequences (1, 0, 0), (0, F, 0) and (0, 0, G), added with four patterns of signs."""
    f, h = [1], [1]
    while len(f) < g:
        f, h = f + h, f + [-v for v in h]
    patterns = ((1, 1, 1), (-1, 1, 1), (-1, -1, 1), (-1, 1, -1))
    rows = ([s] + [t * v for v in f] + [u * v for v in h] for s, t, u in patterns)
    return [[i for i, v in enumerate(row) if v < 0] for row in rows]


def orbit_rows(m: int, multiplier: int, leaders: Sequence[Sequence[int]]) -> list[list[int]]:
    """Four rows for :func:`goethals_seidel`, each a union of the orbits of its leaders under a multiplier of Z_m."""
    rows = []
    for row in leaders:
        places: set[int] = set()
        for leader in row:
            while leader not in places:
                places.add(leader)
                leader = leader * multiplier % m
        rows.append(sorted(places))
    return rows
