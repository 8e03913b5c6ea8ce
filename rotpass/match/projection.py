"""Projections: operators that multiply the last axis by a weight, in every spelling that ATen has for a linear layer.

To teach rotpass another spelling, add a row to :data:`SPELLINGS` (one matrix) or :data:`STACKED` (one for each expert); to
let it look through another operator between a parameter and the call that takes it, a row to :data:`WEIGHT_VIEWS`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from rotpass.match.walk import argument, value

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Projection:
    """``node`` computes ``x @ W + b`` along the last axis of ``x``, with one W or with one for each expert.

    ``weight`` is the node that the call takes, ``source`` the one it is made of by the operators of ``path`` (often a
    placeholder, and a path of nothing or of one transpose). ``in_axis`` is the axis of ``source`` that is summed over, in
    runs of ``in_features``; ``out_axis`` the output's.
    """

    node: Node
    x: Node
    weight: Node
    source: Node
    in_axis: int
    out_axis: int
    bias: Node | None
    path: tuple[Node, ...]
    in_features: int
    out_features: int


def projection(node: Node) -> Projection | None:
    """Reads ``node`` as a projection by one matrix; None if it is none (a product of two activations has no 2-D weight)."""
    return _read(node, SPELLINGS, 2)


def stacked_projection(node: Node) -> Projection | None:
    """Reads ``node`` as a projection by the matrices of several experts at once; None if it is none."""
    found = _read(node, stacked_spellings(), 3)
    return found if found is not None and found.source.op in ("placeholder", "get_attr") else None


def pointwise_convolution(node: Node) -> Projection | None:
    """Reads ``node`` as a convolution of kernel size 1, a projection of the channels; None if it is none.

    Its ``x`` has them along axis 1, not along the last.
    """
    if node.op != "call_function" or node.target not in CONVOLUTIONS:
        return None
    weight, x = argument(node, "weight"), argument(node, "input")
    if not isinstance(weight, Node) or not isinstance(x, Node) or value(x).dim() != value(weight).dim():
        return None
    shape = value(weight).shape
    plain = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    if set(shape[2:]) != {1} or any(set(_listed(argument(node, name))) != {n} for name, n in plain.items()):
        return None
    bias = argument(node, "bias")
    bias = bias if isinstance(bias, Node) else None
    return Projection(node, x, weight, weight, 1, 0, bias, (), shape[1], shape[0])


def _listed(argument: int | list[int]) -> list[int]:
    return [argument] if isinstance(argument, int) else argument


def _read(node: Node, spellings: dict, rank: int) -> Projection | None:
    spelling = spellings.get(node.target) if node.op == "call_function" else None
    if spelling is None:
        return None
    x, weight, bias, in_axis = spelling(node)
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    v = value(weight)
    if not isinstance(v, torch.Tensor) or v.dim() != rank or not all(isinstance(n, int) for n in v.shape[-2:]):
        return None
    in_axis %= rank
    axes = (in_axis, 2 * rank - 3 - in_axis)  # of the last two, the other one
    features = tuple(v.shape[axis] for axis in axes)
    source, path = weight, []
    while (step := _above(source, axes)) is not None:
        path.append(source)
        source, axes = step
    bias = bias if isinstance(bias, Node) else None
    return Projection(node, x, weight, source, *axes, bias, tuple(reversed(path)), *features)


def _linear(node: Node):
    return argument(node, "input"), argument(node, "weight"), argument(node, "bias"), 1


def _torch_linear(node: Node):
    """A call that was kept as Dynamo wrote it, since its weight is a tensor subclass."""
    named = dict(zip(("input", "weight", "bias"), node.args)) | node.kwargs
    return named["input"], named["weight"], named.get("bias"), 1


def _matmul(node: Node):
    return node.args[0], node.args[1], None, -2


def _addmm(node: Node):
    if argument(node, "beta") != 1 or argument(node, "alpha") != 1:
        return None, None, None, 0
    return node.args[1], node.args[2], node.args[0], -2


def _grouped(node: Node):
    return node.args[0], node.args[1], None, -2


SPELLINGS: dict[Callable, Callable] = {
    aten.linear.default: _linear,
    torch._C._nn.linear: _torch_linear,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.addmm.default: _addmm,
}

CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}

STACKED: dict[Callable, Callable] = {
    aten.bmm.default: _matmul,
    aten.baddbmm.default: _addmm,
    aten.matmul.default: _matmul,
    aten._grouped_mm.default: _grouped,
}

# The same, for operators that other packages register.
STACKED_ELSEWHERE: dict[tuple[str, str], Callable] = {
    ("transformers", "grouped_mm_fallback"): _grouped,
}


def stacked_spellings() -> dict[Callable, Callable]:
    """:data:`STACKED` and what of :data:`STACKED_ELSEWHERE` is there."""
    found = dict(STACKED)
    for (namespace, name), spelling in STACKED_ELSEWHERE.items():
        operators = getattr(torch.ops, namespace)
        if hasattr(operators, name):
            found[getattr(operators, name).default] = spelling
    return found


# Operators between a parameter and the call that takes it. Each row gives the input, and which of its axes the two axes of a
# projection are; None where an axis is cut.

Axes = tuple[int, int]


def _above(node: Node, axes: Axes) -> tuple[Node, Axes] | None:
    view = WEIGHT_VIEWS.get(node.target) if node.op == "call_function" else None
    step = view(node, axes) if view else None
    return step if step is not None and isinstance(step[0], Node) else None


def _permuted(node: Node, axes: Axes) -> tuple[Node, Axes]:
    rank = value(node).dim()
    if node.target is aten.permute.default:
        order = [d % rank for d in node.args[1]]
    else:
        a, b = (d % rank for d in node.args[1:3]) if len(node.args) > 1 else (rank - 2, rank - 1)
        order = list(range(rank))
        order[a], order[b] = b, a
    return node.args[0], tuple(order[axis] for axis in axes)


def _selected(node: Node, axes: Axes) -> tuple[Node, Axes]:
    """One expert: an axis less."""
    rank = value(node.args[0]).dim()
    if isinstance(value(node), torch.Tensor) and value(node).dim() == rank:
        return node.args[0], axes  # nothing was squeezed
    dim = argument(node, "dim") % rank
    return node.args[0], tuple(axis + (axis >= dim) for axis in axes)


def _gathered(node: Node, axes: Axes) -> tuple[Node, Axes] | None:
    """The experts of some tokens: the first axis by others."""
    source, indices = node.args[:2]
    if len(indices) != 1 or not isinstance(indices[0], Node):
        return None
    more = value(node).dim() - value(source).dim()
    return (source, tuple(axis - more for axis in axes)) if min(axes) > more else None


def _piece(node: Node, axes: Axes) -> tuple[Node, Axes] | None:
    cut = node.args[0]
    whole = isinstance(cut, Node) and cut.target in (_CUTS | {aten.unbind.int}) and _above(cut, axes) is not None
    return (cut, axes) if whole else None


def _cut(node: Node, axes: Axes) -> tuple[Node, Axes] | None:
    """Along another axis than the two."""
    return None if argument(node, "dim") % value(node)[0].dim() in axes else (node.args[0], axes)


def _experts_apart(node: Node, axes: Axes) -> tuple[Node, Axes] | None:
    """A view that splits the first axis into experts and one of the two axes, whose runs are whole then."""
    before, after = value(node.args[0]).shape, value(node).shape
    apart = len(after) == len(before) + 1 and tuple(after[2:]) == tuple(before[1:]) and 0 not in axes
    return (node.args[0], tuple(axis - 1 for axis in axes)) if apart else None


_CUTS = {aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default}

WEIGHT_VIEWS: dict[Callable, Callable[[Node, Axes], tuple[Node, Axes] | None]] = {
    aten.t.default: _permuted,
    aten.numpy_T.default: _permuted,
    aten.mT.default: _permuted,
    aten.transpose.int: _permuted,
    aten.permute.default: _permuted,
    aten.select.int: _selected,
    aten.squeeze.dim: _selected,
    aten.index.Tensor: _gathered,
    operator.getitem: _piece,
    aten.unbind.int: _selected,
    **dict.fromkeys(_CUTS, _cut),
    aten.view.default: _experts_apart,
    aten.reshape.default: _experts_apart,
}
