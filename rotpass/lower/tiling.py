"""How one Triton program holds a row: H as left (x) Sylvester(tiles) (x) right, one register tile for each of ``tiles``.

A tile is (left, right) of the row's digits; the left matrix multiplies it from the left, the right one from the right,
and between the tiles there are butterflies. Nothing is transposed, and what the matrix units do grows with the orders of
left and right only.
"""

import dataclasses
import functools
import itertools
import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from rotpass.hadamard.clean import clean
from rotpass.hadamard.stages import atoms
from rotpass.hadamard.tables import base_matrix

LARGEST_VECTOR = 256  # up to this order a program holds many vectors, each as a row of its tiles
MOST_VALUES = 32768  # of a row, as float32 in the registers of one program
FOUR_WARPS = 16384  # beyond, a program has eight
MOST_LEFT = 256
RIGHT = 64  # enough for the matrix units, and the least work for them


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Attributes:
    left: order of the left matrix; 1 if there is none.
    tiles: order of the Sylvester matrix between them, carried out as butterflies.
    right: order of the right matrix.
    """

    left: int
    tiles: int
    right: int

    @property
    def size(self) -> int:
        """The order of the whole."""
        return self.left * self.tiles * self.right

    @property
    def values(self) -> int:
        """How many a program holds of one row, padding included."""
        left = sum(c.padded for c in chunks(self.left)) if self.left > 1 else 1
        return left * self.tiles * sum(c.padded for c in chunks(self.right))


class Chunk(NamedTuple):
    """A part of an axis: where it starts, how long it is, and padded to a block of Triton's."""

    start: int
    length: int
    padded: int


def chunks(order: int) -> list[Chunk]:
    """An axis in parts: Triton's blocks are powers of two, and its products want 16 or more. Beyond 128, padding to the next
    power of two costs more than several products; a short rest is cheapest in sixteens (measured)."""
    parts, start = [], 0
    while start < order:
        length = min(128, order - start)
        length = min(length, 16) if start and length <= 32 else length
        parts.append(Chunk(start, length, max(16, _power_of_two(length))))
        start += length
    return parts


@functools.cache
def tiling(size: int, table: str) -> Tiling | None:
    """The tiling of an order, or None where a row does not fit the registers of one program."""
    orders = [order for order, _ in atoms(size, table)]
    twos = next((i for i, order in enumerate(reversed(orders)) if order != 2), len(orders))
    if size <= LARGEST_VECTOR or (twos == len(orders) and size <= 4 * LARGEST_VECTOR):
        butterflies = twos == len(orders) and size > RIGHT
        found = Tiling(1, size // RIGHT, RIGHT) if butterflies else Tiling(1, 1, size)
        return found if size >= 16 else None
    if twos >= 4:
        right = min(RIGHT, 1 << twos)
        options = [
            Tiling(size // (right * tiles), tiles, right) for tiles in (1, 2, 4, 8) if right * tiles <= 1 << twos
        ]
    else:
        inner = list(itertools.accumulate(reversed(orders), operator.mul))
        options = [Tiling(size // right, 1, right) for right in inner if 16 <= right <= 128]
    options = [t for t in options if 1 < t.left <= MOST_LEFT and t.values <= MOST_VALUES]
    return min(options, key=_work, default=None)


def _work(t: Tiling) -> int:
    """Multiplications of the matrix units for one row: each group of four warps has at least 64 rows of a tile."""
    left = max(64 if t.values <= FOUR_WARPS else 128, sum(c.padded for c in chunks(t.left)))
    return t.tiles * t.right * left * (left + t.right)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.cache
def matrices(
    t: Tiling, *, table: str, transpose: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The left and the right matrix of a tiling, entries ±1; shared, so not to be written to."""

    def make() -> tuple[Tensor, Tensor]:
        parts = iter(atoms(t.size, table))
        made = []
        for order in (t.left, t.tiles, t.right):
            m = torch.ones(1, 1, dtype=torch.int8, device="cpu")
            while len(m) < order:
                m = torch.kron(m, base_matrix(*next(parts)))
            assert len(m) == order, (t, table)
            made.append((m.mT if transpose else m).contiguous().to(device=device, dtype=dtype))
        return made[0], made[2]

    return clean(make)


def multiply(x: Tensor, left: Tensor, right: Tensor, tiles: int) -> Tensor:
    """What a program computes, in plain aten: rows times the orthonormal matrix; accumulated in float32 or better."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    a, b = len(left), len(right)
    y = x.to(dtype).reshape(-1, a, tiles, b) @ right.to(dtype).mT
    y = torch.einsum("ij,mjkb->mikb", left.to(dtype), y)
    stride = tiles
    while stride > 1:
        stride //= 2
        u, v = y.unflatten(2, (-1, 2, stride)).unbind(3)
        y = torch.stack((u + v, u - v), 3).flatten(2, 4)
    return (y / math.sqrt(a * tiles * b)).to(x.dtype).reshape(x.shape)
