"""Counter-rotations as changes of weights.

Every fold that rotpass makes is a Hadamard along one axis of a weight, the same y = x Rᵀ as everywhere: along the input
columns of a projection it gives W Rᵀ, along its output rows R W, on a bias b Rᵀ. Taking one back is its transpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.fx import Node

from rotpass.hadamard import hadamard_transform
from rotpass.match.edits import FoldPoint, Rotation

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Fold:
    """A Hadamard of order ``size`` along ``axis``, on every block or on those that begin at ``starts``."""

    axis: int
    size: int
    table: str
    seed: int | None
    starts: tuple[int, ...] | None = None
    transpose: bool = False

    @staticmethod
    def at(point: FoldPoint, rotation: Rotation) -> Fold:
        """The fold of a projection's weight (not of its bias: see :meth:`bias`)."""
        return Fold(point.axis, rotation.size, rotation.table, rotation.seed, point.starts)

    @property
    def bias(self) -> Fold:
        """The same fold for the bias that goes with the weight's rows."""
        return dataclasses.replace(self, axis=0)

    @property
    def inverse(self) -> Fold:
        """The fold that takes this one back."""
        return dataclasses.replace(self, transpose=not self.transpose)

    def apply(self, weight: Tensor) -> Tensor:
        """A new tensor like ``weight``, folded in float64 and cast once."""
        with torch.no_grad():
            moved = weight.detach().to(torch.float64).movedim(self.axis, -1)
            if self.starts is None:
                moved = self._rotate(moved)
            else:
                rows = torch.tensor(self.starts, device=weight.device)[:, None] + torch.arange(
                    self.size, device=weight.device
                )
                rows = rows.flatten()
                moved = moved.index_copy(-1, rows, self._rotate(moved[..., rows]))
            folded = torch.empty_like(weight, requires_grad=False)
            return folded.copy_(moved.movedim(-1, self.axis))

    def _rotate(self, x: Tensor) -> Tensor:
        return hadamard_transform(x, self.size, transpose=self.transpose, table=self.table, seed=self.seed)

    def insert(self, call: Callable[..., Node], weight: Node) -> Node:
        """The fold as nodes (made by ``call(target, *args)``), for a weight that needs gradients or is no parameter."""
        last = weight.meta["val"].dim() - 1
        node = weight if self.axis == last else call(aten.transpose.int, weight, self.axis, last)
        if self.starts is None:
            node = self._call(call, node)
        else:
            node = call(aten.cat.default, list(self._pieces(call, node, weight.meta["val"].shape[self.axis])), -1)
        return node if self.axis == last else call(aten.transpose.int, node, self.axis, last)

    def _call(self, call: Callable[..., Node], x: Node) -> Node:
        return call(torch.ops.rotpass.hadamard.default, x, self.size, self.transpose, self.table, self.seed)

    def _pieces(self, call: Callable[..., Node], node: Node, length: int) -> Iterator[Node]:
        """The axis from end to end: runs of blocks rotated, what lies between as it is."""
        at = 0
        for begin, end in _runs(self.starts, self.size):
            if at < begin:
                yield call(aten.slice.Tensor, node, -1, at, begin)
            yield self._call(call, call(aten.slice.Tensor, node, -1, begin, end))
            at = end
        if at < length:
            yield call(aten.slice.Tensor, node, -1, at, length)


def _runs(starts: tuple[int, ...], size: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for start in sorted(starts):
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + size)
        else:
            runs.append((start, start + size))
    return runs
