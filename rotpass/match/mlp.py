"""The linears that end an MLP: ``act(gate) * up -> down`` and ``act(up) -> down``.

Which value is the gate, how the activation is spelled and how gate and up were cut out of one projection do not matter to
R4: it needs to know that everything between the projections before and the one after is pointwise. So a match walks back
from a projection through pointwise and layout operators until it meets projections, and asks for an activation on the way.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Container

import torch
from torch.fx import Node

from rotpass.match.projection import Projection, projection, stacked_projection
from rotpass.match.walk import TRANSPARENT, last_dim, rotation_above, value

aten = torch.ops.aten

# Non-linear functions of one value; one of them makes a chain an MLP's.
ACTIVATIONS = {
    aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default,
    aten.hardswish.default, aten.mish.default, aten.leaky_relu.default, aten.elu.default, aten.relu6.default,
    aten.silu_.default, aten.relu_.default, aten.gelu_.default, aten.hardsigmoid.default, aten.softplus.default,
    aten.erf.default, aten.square.default,
}  # fmt: skip

# What may stand between: pointwise arithmetic that keeps every value in its place.
POINTWISE = {
    aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar,
    aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.pow.Tensor_Scalar, aten.exp.default, aten.clamp.default,
    aten.clamp_min.default, aten.clamp_max.default, aten.minimum.default, aten.maximum.default, aten.where.self,
    aten.mul_.Tensor, aten.add_.Tensor, aten.hardtanh.default,
}  # fmt: skip

LONGEST_WALK = 64


@dataclasses.dataclass(frozen=True)
class Mlp:
    """An MLP's last projection and what was found before it."""

    down: Projection
    gated: bool
    sources: tuple[Projection, ...]
    rotated: Node | None  # a Hadamard node that is already on the input


def match_mlp(node: Node, weights: Container[Node] = ()) -> Mlp | None:
    """Reads ``node`` as the projection that ends an MLP, or None; ``weights`` are the graph's parameters and buffers."""
    down = projection(node) or stacked_projection(node)
    if down is None:
        return None
    rotated = rotation_above(down.x, last_dim(down.x))
    found = _walk(rotated.args[0] if rotated else down.x, weights)
    if found is None:
        return None
    sources, activated, gated = found
    # Without a gate only the shape tells an MLP from `act -> linear` heads (AdaLN, time embedders): it contracts.
    if not activated or not (
        gated or all(s.in_features < down.in_features for s in sources) and down.out_features < down.in_features
    ):
        return None
    return Mlp(down, gated, tuple(sources), rotated)


def _walk(start: Node, weights: Container[Node]) -> tuple[list[Projection], bool, bool] | None:
    """(projections met, whether an activation was, whether two values were multiplied); None for anything else."""
    sources: dict[Node, Projection] = {}
    seen, todo = set(), [start]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > LONGEST_WALK:
            return None
        if node.op == "get_attr" or node in weights or not _holds_floats(node):
            continue
        if (source := projection(node) or stacked_projection(node)) is not None:
            sources[node] = source
            continue
        if (
            node.target not in ACTIVATIONS | POINTWISE
            and node.target not in TRANSPARENT
            and node.target is not operator.getitem
        ):
            return None
        todo.extend(node.all_input_nodes)
    if not sources:
        return None
    # Only now, when projections bound what is above: a residual stream would lead through all layers before.
    gated = any(node.target in (aten.mul.Tensor, aten.mul_.Tensor) and _is_gate(node) for node in seen)
    return list(sources.values()), any(node.target in ACTIVATIONS for node in seen), gated


def _holds_floats(node: Node) -> bool:
    """Whether a node's value can be of the chain: not a number, indices or a mask."""
    v = value(node)
    return isinstance(v, (tuple, list)) or isinstance(v, torch.Tensor) and v.is_floating_point()


def _is_gate(node: Node) -> bool:
    """Two values multiplied, with neither made of the other: x * sigmoid(1.702 x) is an activation, no gate."""
    a, b = node.args[:2]
    if not all(isinstance(n, Node) and isinstance(value(n), torch.Tensor) and value(n).dim() > 0 for n in (a, b)):
        return False  # a number, symbolic ones included
    return not _cone(a) & _cone(b)


def _cone(node: Node) -> set[Node]:
    """Everything down to the first split or projection that ``node`` is made of."""
    found, todo = set(), [node]
    while todo:
        n = todo.pop()
        if n in found or n.op != "call_function":
            continue
        if projection(n) is not None or stacked_projection(n) is not None:
            found.add(n)
            continue
        if _selects(n):
            found.add(n)  # gate and up cut out of one projection are two values
            continue
        found.add(n)
        todo.extend(n.all_input_nodes)
    return found


def _selects(node: Node) -> bool:
    return node.target in (operator.getitem, aten.slice.Tensor, aten.select.int, aten.narrow.default)
