"""Attentions: where queries, keys and values go in and where the output comes out, with head vectors along the last axis.

To teach rotpass another attention, add a row to :data:`ATTENTIONS`: the call that gives it away, and how to read it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.fx import Node

from rotpass.match.mlp import POINTWISE
from rotpass.match.products import Product, product
from rotpass.match.walk import TRANSPARENT, Position, argument, argument_at, last_dim, users, value

aten = torch.ops.aten

Sink = tuple[Node, Position]

# Between the scores, the softmax and the product with the values everything is allowed that could make the one of the
# other: whether a rotation is right does not depend on it, only whether this is an attention.
SCORES = {
    *POINTWISE, *TRANSPARENT, aten.tanh.default, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor,
    aten.where.ScalarOther, aten.where.ScalarSelf, aten.dropout.default, aten.nan_to_num.default, aten.softmax.int,
    aten.div_.Tensor, aten.sub_.Tensor, aten.mT.default,
}  # fmt: skip

LONGEST_WALK = 64


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention: ``node`` computes what ``output`` holds.

    ``q``, ``k`` and ``v`` are the calls that read them, and at which argument; head dimensions are None where they are not
    static. ``unfit`` says of a kind of site why it cannot be rotated, if so, and ``kinds`` which ones are decided here.
    """

    node: Node
    output: Node
    q: Sink
    k: Sink
    v: Sink
    unfit: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kinds: tuple[str, ...] = ("r3", "v")

    def arg(self, role: str) -> Node:
        """The node that is passed as ``"q"``, ``"k"`` or ``"v"``."""
        return argument_at(*getattr(self, role))

    @property
    def head_dim(self) -> int | None:
        """Length of the query and key vectors."""
        length = last_dim(self.arg("q"))
        return length if length == last_dim(self.arg("k")) else None

    @property
    def v_head_dim(self) -> int | None:
        """Length of the value vectors."""
        return last_dim(self.arg("v"))


def match_attentions(calls: Iterable[Node]) -> list[Attention]:
    """The attentions that these calls give away.

    Several softmaxes can belong to one product with the values (differential attention): V is decided once for it.
    """
    found: dict[tuple[Sink, Sink, Node], Attention] = {}
    outputs = set()
    for node in calls:
        read = ATTENTIONS.get(node.target) if node.op == "call_function" else None
        if read and (attention := read(node)):
            if attention.output in outputs:
                attention = dataclasses.replace(attention, kinds=("r3",))
            outputs.add(attention.output)
            found.setdefault((attention.q, attention.k, attention.output), attention)
    return list(found.values())


def _call(node: Node) -> Attention | None:
    """An operator that takes query, key and value first."""
    if len(node.args) < 3 or not all(isinstance(arg, Node) for arg in node.args[:3]):
        return None
    return Attention(node, node, (node, 0), (node, 1), (node, 2))


def _call_with_statistics(node: Node) -> Attention | None:
    """The same, with the output first in a tuple."""
    output = next((u for u in node.users if u.target is operator.getitem and u.args[1] == 0), None)
    found = _call(node)
    return found and output and dataclasses.replace(found, output=output)


def _fused_away(node: Node) -> Attention | None:
    """An operator that holds the projections too."""
    name = str(node.target).removesuffix(".default")
    why = (
        f"{name} computes more than the attention: call torch.backends.mha.set_fastpath_enabled(False) before compiling"
    )
    return Attention(node, node, *[(node, 0)] * 3, unfit={"r3": why, "v": why})


def _softmax(node: Node) -> Attention | None:
    """The softmax between two products of activations."""
    scores, probabilities = node.args[0], node
    dim = argument(node, "dim")
    if not isinstance(value(node), torch.Tensor) or dim % max(value(node).dim(), 1) != value(node).dim() - 1:
        return None
    above = _products(scores, lambda n: n.all_input_nodes)
    below = _products(probabilities, users)
    if not above or len(below) != 1:
        return None
    (scored, _), (weighted, via) = above[0], below[0]
    values = weighted.a if argument_at(weighted.node, weighted.b.position) is via else weighted.b
    q, k = scored.along_last(scored.a), scored.along_last(scored.b)
    unfit = {}
    if len(above) > 1:
        unfit["r3"] = "its scores are the sum of several products"
    elif q is None or k is None:
        unfit["r3"] = "its queries or keys do not lie along the last axis, or are read with other axes elsewhere too"
    if not values.gives_last:
        unfit["v"] = "its values do not lie along the last axis"
    elif weighted.adds:
        unfit["v"] = "its output is added to something else in the same call"
    return Attention(
        weighted.node,
        weighted.node,
        q or (scored.node, scored.a.position),
        k or (scored.node, scored.b.position),
        (weighted.node, values.position),
        unfit,
    )


def _products(start: Node, step: Callable[[Node], list[Node]]) -> list[tuple[Product, Node]]:
    """The products of two activations that a walk meets first, each with the node before it on the way."""
    found, seen, todo = [], set(), [(start, start)]
    while todo and isinstance(start, Node) and len(seen) < LONGEST_WALK:
        node, via = todo.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if (met := product(node)) is not None:
            found.append((met, via))
        elif node.target in SCORES:
            todo.extend((other, node) for other in step(node))
    return found


ATTENTIONS: dict[Callable, Callable[[Node], Attention | None]] = {
    aten.scaled_dot_product_attention.default: _call,
    torch.ops.higher_order.flex_attention: _call_with_statistics,
    aten._transformer_encoder_layer_fwd.default: _fused_away,
    aten._native_multi_head_attention.default: _fused_away,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _softmax,
}
