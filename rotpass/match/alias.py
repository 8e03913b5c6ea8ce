"""Which nodes share storage, and where that storage is written.

Raw ATen lets mutation hide dataflow: a KV cache is a buffer that one node writes and another reads, with no edge between
them. An operator's schema says what it writes and what its outputs alias; this file reads nothing else.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

# Operators that may return their first argument although their schema does not say so.
MAY_RETURN_INPUT = {aten.type_as.default, aten.dropout.default, aten.feature_dropout.default, aten.detach.default}

# Higher-order operators that neither write nor return what they are given.
FUNCTIONAL = {torch.ops.higher_order.flex_attention}


class Aliases:
    """Storage classes of a graph's nodes; a snapshot, so build it again after an edit."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {}
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        writes: list[tuple[Node, Node]] = []
        for node in graph.nodes:
            if node.op == "call_function":
                writes.extend((written, node) for written in self._record(node))
        self._writes: dict[Node, list[Node]] = defaultdict(list)
        for written, by in writes:
            self._writes[self._root(written)].append(by)
        self._members: dict[Node, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            self._members[self._root(node)].append(node)

    def writes(self, node: Node) -> list[Node]:
        """The nodes that write into the storage of ``node``, in graph order."""
        return self._writes.get(self._root(node), [])

    def members(self, node: Node) -> list[Node]:
        """All nodes that share storage with ``node``, itself included, in graph order."""
        return self._members[self._root(node)]

    def settled(self, node: Node) -> bool:
        """Whether nothing writes into ``node`` after it: its value is the same wherever it is read."""
        return all(self.position[write] <= self.position[node] for write in self.writes(node))

    def _root(self, node: Node) -> Node:
        while (parent := self._parent.get(node, node)) is not node:
            self._parent[node] = node = self._parent.get(parent, parent)
        return node

    def _join(self, a: Node, b: Node) -> None:
        self._parent[self._root(a)] = self._root(b)

    def _record(self, node: Node) -> list[Node]:
        """Joins what ``node`` aliases; returns what it writes."""
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            return self._record_opaque(node)
        if node.target in MAY_RETURN_INPUT:
            self._join(node, node.args[0])
        written: list[Node] = []
        returns_alias = any(r.alias_info is not None for r in schema.returns)
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is None:
                continue
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            nodes = [n for n in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(n, Node)]
            if argument.alias_info.is_write:
                written.extend(nodes)
            if returns_alias or argument.alias_info.is_write:
                for n in nodes:
                    self._join(node, n)
        return written

    def _record_opaque(self, node: Node) -> list[Node]:
        """``getitem`` aliases its tuple; a higher-order operator may alias its operands, and write them if its body writes."""
        if node.target is operator.getitem:
            if isinstance(node.args[0], Node):
                self._join(node, node.args[0])
            return []
        if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target in FUNCTIONAL:
            return []
        operands = [n for n in node.all_input_nodes if n.op != "get_attr"]
        for n in operands:
            self._join(node, n)
        return operands if any(_writes_anything(body) for body in bodies(node)) else []


def bodies(node: Node) -> list[GraphModule]:
    """The graphs that a higher-order operator is given."""
    owner = node.graph.owning_module
    named = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    found = [getattr(owner, name, None) for name in named] if owner is not None else []
    return [body for body in found if isinstance(body, GraphModule)]


def _writes_anything(body: GraphModule) -> bool:
    return any(
        getattr(n.target, "_schema", None) is not None
        and n.target._schema.is_mutable
        or bool(bodies(n))
        and any(map(_writes_anything, bodies(n)))
        for n in body.graph.nodes
        if n.op == "call_function"
    )
