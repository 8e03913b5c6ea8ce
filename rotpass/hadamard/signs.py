"""Random signs that are the same on every device, in every version and for every layer: an integer hash."""

import functools

import torch
from torch import Tensor

from rotpass.hadamard.clean import clean

_MASK = 0xFFFFFFFF


def _mix(h: int) -> int:
    """A bijection of 32-bit integers in which every input bit reaches every output bit (C. Wellons' lowbias32)."""
    h ^= h >> 16
    h = h * 0x7FEB352D & _MASK
    h ^= h >> 15
    h = h * 0x846CA68B & _MASK
    return h ^ h >> 16


@functools.cache
def _bits(n: int, seed: int) -> tuple[int, ...]:
    """A 1 where the sign is negative. ``mix(i ^ mix(n ^ mix(high ^ mix(low))))``, its top bit; low and high are the two
    halves of the seed as a 64-bit two's complement number."""
    low, high = seed & _MASK, seed >> 32 & _MASK
    key = _mix((n ^ _mix(high ^ _mix(low))) & _MASK)
    return tuple(_mix(i ^ key) >> 31 for i in range(n))


@functools.cache
def _signs(n: int, seed: int) -> Tensor:
    return clean(lambda: 1 - 2 * torch.tensor(_bits(n, seed), dtype=torch.float64, device="cpu"))


def signs(n: int, seed: int) -> Tensor:
    """The signs by which a rotation in blocks of ``n`` multiplies its input: y = (x * s) R^T.

    Args:
        n: the block; sign i belongs to index i within it.
        seed: any 64-bit integer.

    Returns:
        A float64 tensor of shape ``(n,)`` on the CPU, entries +1 and -1, the caller's own.
    """
    cached = _signs(n, seed)
    return clean(cached.clone)
