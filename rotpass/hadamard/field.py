"""Finite fields, as far as Paley's constructions need them: differences and squares of GF(p^k)."""

import functools

import torch
from torch import Tensor


def prime_power(q: int) -> tuple[int, int] | None:
    """``(p, k)`` with ``q == p**k`` and ``p`` prime, or None."""
    if q < 2:
        return None
    p = next((d for d in range(2, int(q**0.5) + 1) if q % d == 0), q)
    k = 0
    while q % p == 0:
        q, k = q // p, k + 1
    return (p, k) if q == 1 else None


def _powers_of_x(p: int, k: int, polynomial: tuple[int, ...]) -> list[tuple[int, ...]]:
    """1, x, x^2, ... modulo the monic polynomial with these lower coefficients, until 1 comes back (or never can)."""
    one = (1,) + (0,) * (k - 1)
    powers = [one]
    while len(powers) < p**k:
        *low, lead = powers[-1]
        following = tuple((c - lead * m) % p for c, m in zip((0, *low), polynomial))
        if following == one or not any(following):
            break
        powers.append(following)
    return powers


@functools.cache
def squares(q: int) -> frozenset[int]:
    """The nonzero squares of GF(q), each numbered by its coefficients as digits in base p, lowest first.

    The modulus is the first monic polynomial, by its lower coefficients read the same way, of which x is a primitive
    root; the squares are then the even powers of x.
    """
    p, k = prime_power(q)
    if k == 1:
        return frozenset(x * x % q for x in range(1, q))
    for number in range(q):
        powers = _powers_of_x(p, k, tuple(number // p**i % p for i in range(k)))
        if len(powers) == q - 1:
            return frozenset(sum(c * p**i for i, c in enumerate(power)) for power in powers[::2])
    raise AssertionError(f"no primitive polynomial for GF({q})")


def jacobsthal(q: int) -> Tensor:
    r"""The Jacobsthal matrix of GF(q): entry :math:`(i, j)` is :math:`\chi(i - j)`, with :math:`\chi` 0 at zero,
    1 at nonzero squares and -1 elsewhere. int8, on the CPU."""
    p, k = prime_power(q)
    character = torch.full((q,), -1, dtype=torch.int8, device="cpu")
    character[sorted(squares(q))] = 1
    character[0] = 0
    element = torch.arange(q, device="cpu")
    index = torch.zeros(q, q, dtype=torch.int64, device="cpu")
    for i in range(k):  # elements are subtracted digit by digit
        digit = element // p**i % p
        index += (digit[:, None] - digit[None, :]) % p * p**i
    return character[index]
