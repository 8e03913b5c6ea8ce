"""Products of two activations, in every spelling that ATen has: what attentions are made of when nothing fuses them.

To teach rotpass another spelling, add a row to :data:`PRODUCTS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.fx import Node

from rotpass.match.walk import Position, argument, argument_at, users, value

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Operand:
    """One factor: the argument that it is, the axis of it that is summed over (from the end), and whether its last axis is
    the result's last."""

    position: Position
    summed: int
    gives_last: bool = False


@dataclasses.dataclass(frozen=True)
class Product:
    """``node`` multiplies ``a`` by ``b`` and sums over one axis."""

    node: Node
    a: Operand
    b: Operand

    @property
    def adds(self) -> bool:
        """Whether the call adds something else to the product."""
        return self.node.target is aten.baddbmm.default and argument(self.node, "beta") != 0

    def along_last(self, operand: Operand) -> tuple[Node, Position] | None:
        """The call that reads the operand with the summed axis last, and at which argument: this one, or a transpose before
        it that nothing else reads. None if there is none."""
        user, position, axis = self.node, operand.position, operand.summed
        while axis != -1:
            node = argument_at(user, position)
            above = _AXIS_ABOVE.get(node.target) if node.op == "call_function" and len(users(node)) == 1 else None
            axis = above(node, axis) if above else None
            if axis is None:
                return None
            user, position = node, 0
        return user, position


def product(node: Node) -> Product | None:
    """Reads ``node`` as a product of two activations; None if it is none."""
    read = PRODUCTS.get(node.target) if node.op == "call_function" else None
    found = read(node) if read else None
    if found is None:
        return None
    operands = [argument_at(node, operand.position) for operand in found]
    if not all(isinstance(x, Node) and isinstance(value(x), torch.Tensor) and value(x).dim() > 2 for x in operands):
        return None
    return Product(node, *found)


def _matmul(a: int, b: int) -> Callable[[Node], tuple[Operand, Operand]]:
    return lambda node: (Operand(a, -1), Operand(b, -2, gives_last=True))


def _einsum(node: Node) -> tuple[Operand, Operand] | None:
    equation, factors = node.args[0].replace(" ", ""), node.args[1]
    if equation.count(",") != 1 or "->" not in equation or "." in equation or len(factors) != 2:
        return None
    inputs, result = equation.split("->")
    labels = inputs.split(",")
    summed = (set(labels[0]) & set(labels[1])) - set(result)
    lost = (set(labels[0]) ^ set(labels[1])) - set(result)
    if len(summed) != 1 or lost or any(len(set(word)) < len(word) for word in (*labels, result)) or not result:
        return None
    [over] = summed
    return tuple(
        Operand(
            (1, i), word.index(over) - len(word), gives_last=word[-1] == result[-1] and word[-1] not in labels[1 - i]
        )
        for i, word in enumerate(labels)
    )


PRODUCTS: dict[Callable, Callable[[Node], tuple[Operand, Operand] | None]] = {
    aten.matmul.default: _matmul(0, 1),
    aten.bmm.default: _matmul(0, 1),
    aten.baddbmm.default: _matmul(1, 2),
    aten.einsum.default: _einsum,
}


# Which axis of its first argument an axis of an operator's result is, both from the end; None if that cannot be said.


def _transpose(node: Node, axis: int) -> int | None:
    rank = value(node).dim()
    a, b = (d % rank - rank for d in node.args[1:3])
    return {a: b, b: a}.get(axis, axis)


def _matrix_transpose(node: Node, axis: int) -> int | None:
    return {-1: -2, -2: -1}.get(axis, axis)


def _permute(node: Node, axis: int) -> int | None:
    rank = value(node).dim()
    return node.args[1][axis] % rank - rank


def _same(node: Node, axis: int) -> int | None:
    return axis


def _matrices(node: Node, axis: int) -> int | None:
    """A view that merges or splits axes before the last two."""
    before, after = value(node.args[0]).shape[-2:], value(node).shape[-2:]
    return axis if axis >= -2 and len(before) == 2 and tuple(before) == tuple(after) else None


def _by_number(node: Node, axis: int) -> int | None:
    return None if isinstance(argument(node, "other"), Node) else axis


_AXIS_ABOVE: dict[Callable, Callable[[Node, int], int | None]] = {
    aten.transpose.int: _transpose, aten.swapaxes.default: _transpose, aten.mT.default: _matrix_transpose,
    aten.adjoint.default: _matrix_transpose, aten.permute.default: _permute,
    aten.contiguous.default: _same, aten.clone.default: _same, aten.detach.default: _same, aten.alias.default: _same,
    aten.to.dtype: _same, aten.to.dtype_layout: _same, aten._to_copy.default: _same,
    aten.view.default: _matrices, aten.reshape.default: _matrices, aten._unsafe_view.default: _matrices,
    aten.expand.default: _matrices,
    aten.mul.Tensor: _by_number, aten.div.Tensor: _by_number, aten.mul.Scalar: _by_number, aten.div.Scalar: _by_number,
}  # fmt: skip
