"""Inserts operators into a pre-dispatch ATen graph and keeps its metadata right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node

from rotpass.match.edits import After, Before
from rotpass.match.walk import BYSTANDERS, Position

aten = torch.ops.aten

# What a new node takes over from the node that it stands beside.
INHERITED = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn", "custom", "recompute", "ac_graph_id")
VIEWS = {aten.view.default, aten._unsafe_view.default}


class Inserter:
    """Edits one graph. Call :meth:`finish` after the last edit."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._mode = next((v.fake_mode for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor)), None)
        self._restrided: set[Node] = set()
        self._end: dict[Node, Node] = {}  # the last node that was put after a node

    def put(self, at: After | Before, target: Callable, *args: Any) -> Node:
        """Puts ``target(value, *args)`` after a node for all its readers, or before one reader."""
        if isinstance(at, Before):
            node = at.node
            with self._graph.inserting_before(at.user):
                new = self._call(at.user, target, node, *args)
            _update_argument(at.user, at.position, new)
            self._note_strides(node, new)
            return new
        node = self._end.get(at.node, at.node)
        with self._graph.inserting_before(self._following(node)):
            new = self._call(node, target, node, *args)
        readers = [user for user in node.users if user is not new and user.target not in BYSTANDERS]
        for user in readers:
            user.replace_input_with(node, new)
        self._note_strides(node, new)
        self._end[at.node] = new
        return new

    def moved(self, at: Before, axis: int) -> Before:
        """The place between two transposes before ``at`` where ``axis`` is the last one."""
        self.put(at, aten.transpose.int, axis, -1)
        return Before(self.put(at, aten.transpose.int, axis, -1), 0)

    def calls_before(self, user: Node) -> Callable[..., Node]:
        """Makes calls right before ``user`` that are read by nobody yet."""

        def call(target: Callable, *args: Any) -> Node:
            with self._graph.inserting_before(user):
                return self._call(user, target, *args)

        return call

    def placeholder(self, like: Node) -> Node:
        """A new input at the end of the inputs, with the metadata of ``like``."""
        last = self._graph.find_nodes(op="placeholder")[-1]
        with self._graph.inserting_after(last):
            taken = len(self._graph.find_nodes(op="placeholder"))  # a weight may need several copies
            new = self._graph.placeholder(f"{like.name}_folded_{taken}")
        new.meta.update(like.meta)
        new._dynamo_source = None  # AOTAutograd wants the attribute, and no two inputs with the same source
        return new

    def finish(self) -> None:
        """Recomputes what changed strides change downstream; a view that no longer fits becomes the reshape it stands for.

        A rotation keeps its input's strides where they are dense, so this is for inputs that were cut out of something.
        """
        if not self._restrided:
            return
        for node in list(self._graph.nodes):
            if node.op != "call_function" or self._restrided.isdisjoint(node.all_input_nodes):
                continue
            if not isinstance(node.target, torch._ops.OpOverload) or node.target in BYSTANDERS:
                continue
            before = node.meta.get("val")
            try:
                after = self._run(node.target, node.args, node.kwargs)
            except (RuntimeError, ValueError):
                if node.target not in VIEWS:
                    raise
                node.target = aten.reshape.default
                after = self._run(node.target, node.args, node.kwargs)
            node.meta["val"] = after
            if _strides(before) != _strides(after):
                self._restrided.add(node)

    def _following(self, node: Node) -> Node:
        if node.op == "placeholder":
            return next(n for n in self._graph.nodes if n.op != "placeholder")
        return node.next

    def _call(self, beside: Node, target: Callable, *args: Any) -> Node:
        node = self._graph.call_function(target, args)
        node.meta.update({key: beside.meta[key] for key in INHERITED if key in beside.meta})
        node.meta["val"] = self._run(target, args, {})
        return node

    def _run(self, target: Callable, args: Any, kwargs: Any) -> Any:
        args, kwargs = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad():
            if self._mode is None:
                return target(*args, **kwargs)
            with self._mode:
                return target(*args, **kwargs)

    def _note_strides(self, node: Node, new: Node) -> None:
        if _strides(node.meta["val"]) != _strides(new.meta["val"]):
            self._restrided.add(new)


def _update_argument(user: Node, position: Position, new: Node) -> None:
    if isinstance(position, int):
        user.update_arg(position, new)
    else:
        i, j = position
        user.update_arg(i, [new if n == j else item for n, item in enumerate(user.args[i])])


def _strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.stride()
    return tuple(map(_strides, value)) if isinstance(value, (tuple, list)) else None
