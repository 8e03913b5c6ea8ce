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

from rotpass.match.alias import bodies
from rotpass.match.projection import CONVOLUTIONS, Projection, pointwise_convolution, projection, stacked_projection
from rotpass.match.walk import TRANSPARENT, Position, argument, carriers, columns_in_cat, rotation_above, users, value

aten = torch.ops.aten

# Non-linear functions of one value; one of them makes a chain an MLP's.
ACTIVATIONS = {
    aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default,
    aten.hardswish.default, aten.mish.default, aten.leaky_relu.default, aten.elu.default, aten.relu6.default,
    aten.silu_.default, aten.relu_.default, aten.gelu_.default, aten.hardsigmoid.default, aten.softplus.default,
    aten.erf.default, aten.square.default, aten.selu.default, aten.celu.default, aten.elu_.default, aten.glu.default,
    aten.prelu.default, aten.log_sigmoid.default, aten.softshrink.default, aten.hardshrink.default, aten.threshold.default,
    aten.hardtanh.default, aten.abs.default, aten.sin.default, aten.clamp.default, aten.clamp_min.default,
    aten.maximum.default, aten.expm1.default,
}  # fmt: skip

# What may stand between: pointwise arithmetic that keeps every value in its place.
POINTWISE = {
    aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar,
    aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.pow.Tensor_Scalar, aten.exp.default, aten.clamp.default,
    aten.clamp_min.default, aten.clamp_max.default, aten.minimum.default, aten.maximum.default, aten.where.self,
    aten.min.other, aten.max.other,
    aten.mul_.Tensor, aten.add_.Tensor, aten.hardtanh.default,
}  # fmt: skip

# A norm of the hidden values, and what it is made of where it is spelled out.
NORMS = {
    aten.rms_norm.default, aten.layer_norm.default, aten.mean.dim, aten.var.correction, aten.std.correction,
    aten.var.dim, aten.std.dim,
    aten.rsqrt.default, aten.sqrt.default, aten.reciprocal.default,
}  # fmt: skip

BETWEEN = ACTIVATIONS | POINTWISE | NORMS

LONGEST_WALK = 64


@dataclasses.dataclass(frozen=True)
class Mlp:
    """An MLP's last projection, and where its input (``width`` values from ``offset`` on, along ``axis``) is read."""

    down: Projection
    user: Node
    position: Position
    offset: int
    width: int
    rotated: Node | None  # a Hadamard node that is already on the input
    axis: int = -1

    @property
    def is_whole(self) -> bool:
        """Whether the projection multiplies nothing else."""
        return self.width == self.down.in_features


def match_mlps(node: Node, weights: Container[Node] = ()) -> list[Mlp]:
    """The MLPs that ``node`` ends: none, one, or several side by side in its input; ``weights`` are the graph's parameters."""
    if (down := pointwise_convolution(node)) is not None:
        found = _walk(down.x, weights)
        gated = found is not None and found[1] and found[2]
        return [Mlp(down, node, node.args.index(down.x), 0, down.in_features, None, axis=1)] if gated else []
    down = projection(node) or stacked_projection(node)
    if down is None:
        return []
    if (found := _ends(down, down.x, down.in_features, weights)) is not None:
        return [Mlp(down, node, node.args.index(down.x), 0, down.in_features, found.rotated)]
    joined = _joined(down)
    mlps = []
    for i, part in enumerate(joined.args[0] if joined else ()):
        columns = columns_in_cat(joined, part)
        if (found := _ends(down, part, len(columns), weights)) is not None:
            mlps.append(Mlp(down, joined, (0, i), columns.start, len(columns), found.rotated))
    return mlps


def _joined(down: Projection) -> Node | None:
    """The ``cat`` along the last axis that is a projection's input and nobody else's, as in FLUX's single blocks."""
    node = down.x
    while len(users(node)) == 1:
        if node.target is aten.cat.default:
            return node if all(columns_in_cat(node, part) is not None for part in node.args[0]) else None
        above = carriers(node, down.in_features)
        if above is None or len(above) != 1:
            return None
        [node] = above
    return None


@dataclasses.dataclass(frozen=True)
class _Ends:
    rotated: Node | None


def _ends(down: Projection, x: Node, width: int, weights: Container[Node]) -> _Ends | None:
    """Whether ``x``, ``width`` values of a projection's input, comes out of an MLP."""
    rotated = rotation_above(x, width)
    found = _walk(rotated.args[0] if rotated else x, weights)
    if found is None:
        return None
    sources, activated, gated = found
    embeds = any(_embeds(source, weights) for source in sources)
    is_mlp = gated or (_narrows(set(sources.values()), width, down.out_features) and not embeds)
    return _Ends(rotated) if activated and is_mlp else None


def _embeds(source: Node, weights: Container[Node]) -> bool:
    """Whether a projection reads sines and cosines, or a table: the first of a time or position embedder."""
    found = projection(source) or stacked_projection(source)
    seen, todo = set(), [found.x if found else argument(source, "input")]
    while todo and len(seen) < LONGEST_WALK:
        node = todo.pop()
        if node.target in (aten.cos.default, aten.sin.default) or node in weights or node.op == "get_attr":
            return True
        if any(n.target in (aten.cos.default, aten.sin.default) for body in bodies(node) for n in body.graph.nodes):
            return True
        if node not in seen and node.target in TRANSPARENT:
            todo.extend(node.all_input_nodes)
        seen.add(node)
    return False


def _narrows(widths: set[int], inside: int, outside: int) -> bool:
    """Without a gate only the shape tells an MLP from `act -> linear` heads (AdaLN, time embedders): the width inside is
    larger than both others, or another one than that which it comes from and returns to."""
    return max(widths) < inside > outside or widths == {outside} != {inside}


def _walk(start: Node, weights: Container[Node]) -> tuple[dict[Node, int], bool, bool] | None:
    """(the projections met, with their input widths, whether an activation was, whether two values were multiplied), or None."""
    sources: dict[Node, int] = {}  # and the widths that they come from
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
            sources[node] = source.in_features
            continue
        if node.target in CONVOLUTIONS:
            weight, groups = value(argument(node, "weight")), argument(node, "groups")
            if groups == weight.shape[0] > 1:  # each channel by itself, between an MLP's two projections (SegFormer)
                todo.append(argument(node, "input"))
            else:
                sources[node] = weight.shape[1] * groups
            continue
        if node.target not in BETWEEN and node.target not in TRANSPARENT:
            return None
        todo.extend(node.all_input_nodes)
    if not sources:
        return None
    # Only now, when projections bound what is above: a residual stream would lead through all layers before.
    gated = any(node.target in (aten.mul.Tensor, aten.mul_.Tensor) and _is_gate(node) for node in seen)
    return sources, any(node.target in ACTIVATIONS for node in seen), gated


def _holds_floats(node: Node) -> bool:
    """Whether a node's value can be of the chain: not a number, indices or a mask."""
    v = value(node)
    return isinstance(v, (tuple, list)) or isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 0


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
        if projection(n) is not None or stacked_projection(n) is not None or n.target in CONVOLUTIONS:
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
