"""Projections: operators that multiply the last axis by a weight, in every spelling that ATen has for a linear layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.fx import Node

from rotpass.match.walk import argument, value

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Projection:
    """``node`` computes ``x @ W + b`` along the last axis of ``x``.

    ``weight`` is the node that the call takes, ``source`` the one it is a view of (often a placeholder; ``flipped`` if
    transposed), and ``in_axis`` the axis of ``source`` that is summed over; the other one is the output's.
    """

    node: Node
    x: Node
    weight: Node
    source: Node
    in_axis: int
    bias: Node | None
    flipped: bool

    @property
    def out_axis(self) -> int:
        """The axis of ``source`` that becomes the output's last."""
        return 1 - self.in_axis

    @property
    def in_features(self) -> int:
        """Length of the axis that is summed over."""
        return value(self.source).shape[self.in_axis]

    @property
    def out_features(self) -> int:
        """Length of the output's last axis."""
        return value(self.source).shape[self.out_axis]


def projection(node: Node) -> Projection | None:
    """Reads ``node`` as a projection; None if it is none (a product of two activations has no 2-D weight)."""
    spelling = SPELLINGS.get(node.target) if node.op == "call_function" else None
    if spelling is None:
        return None
    x, weight, bias, in_axis = spelling(node)
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    v = value(weight)
    if not isinstance(v, torch.Tensor) or v.dim() != 2 or not all(isinstance(n, int) for n in v.shape):
        return None
    source, flipped = weight, False
    while (inner := _transposed(source)) is not None:
        source, in_axis, flipped = inner, 1 - in_axis, not flipped
    return Projection(node, x, weight, source, in_axis, bias if isinstance(bias, Node) else None, flipped)


def _transposed(node: Node) -> Node | None:
    """What a 2-D node is the transpose of."""
    if node.op != "call_function":
        return None
    if node.target in (aten.t.default, aten.numpy_T.default, aten.mT.default):
        return node.args[0]
    if node.target is aten.transpose.int and {d % 2 for d in node.args[1:3]} == {0, 1}:
        return node.args[0]
    if node.target is aten.permute.default and [d % 2 for d in node.args[1]] == [1, 0]:
        return node.args[0]
    return None


def _linear(node: Node):
    return argument(node, "input"), argument(node, "weight"), argument(node, "bias"), 1


def _torch_linear(node: Node):
    """A call that was kept as Dynamo wrote it, since its weight is a tensor subclass."""
    named = dict(zip(("input", "weight", "bias"), node.args)) | node.kwargs
    return named["input"], named["weight"], named.get("bias"), 1


def _matmul(node: Node):
    return node.args[0], node.args[1], None, 0


def _addmm(node: Node):
    if argument(node, "beta") != 1 or argument(node, "alpha") != 1:
        return None, None, None, 0
    return node.args[1], node.args[2], node.args[0], 0


SPELLINGS: dict[Callable, Callable] = {
    aten.linear.default: _linear,
    torch._C._nn.linear: _torch_linear,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.addmm.default: _addmm,
}
