"""A model as pre-dispatch ATen, the one IR of all doors: the graph that ``torch.export`` gives.

The graph is kept as it was traced, with its mutation and its views: what a rewrite does not touch stays exactly the user's,
strides, aliasing and random numbers included. Where mutation hides dataflow, ``match/alias.py`` finds it.
"""

from __future__ import annotations

import dataclasses
import re

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta, set_current_meta
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from rotpass import _torch
from rotpass.match.alias import Aliases

WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclasses.dataclass
class Capture:
    """A graph that is ours to edit, and what its placeholders stand for.

    Attributes:
        gm: pre-dispatch ATen.
        values: placeholder -> the real tensor of a parameter, a buffer or a constant.
        names: placeholder -> its name in the state dict, as far as known.
        internal: mutated buffers that nobody but the program can see.
        internal_outputs: outputs that are nothing but the new contents of such a buffer -> its placeholder.
        folded: placeholders whose weights were folded before (``fold_``), so that their other half must be there too.
        already: (kind, where) of the sites that an earlier pass rotated.
        root: what module paths in ``nn_module_stack`` begin with.
        sources: placeholder -> how Dynamo spells where it comes from.
    """

    gm: GraphModule
    values: dict[Node, torch.Tensor]
    names: dict[Node, str]
    internal: set[Node] = dataclasses.field(default_factory=set)
    internal_outputs: dict[Node, Node] = dataclasses.field(default_factory=dict)
    folded: set[Node] = dataclasses.field(default_factory=set)
    already: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    root: str = ""
    sources: dict[Node, str] = dataclasses.field(default_factory=dict)

    def where(self, node: Node) -> str:
        """Path of the module that a node was called in, as the state dict spells it; "" for the root."""
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()), ("", None))[0]
        return _below(self.root, _spell(path))

    def label(self, node: Node) -> str:
        """A placeholder, or another node, as a user would call it."""
        if node in self.names:
            return self.names[node]
        return re.sub(r"[LG]\['(\w+)'\]", r"\1", self.sources.get(node, node.name))


def from_program(ep: ExportedProgram) -> Capture:
    """An ExportedProgram's own graph, copied; the program stays as it is."""
    gm = GraphModule(ep.graph_module, _copy(ep.graph_module))
    gm.meta.update(ep.graph_module.meta)
    placeholders = gm.graph.find_nodes(op="placeholder")
    values, names, buffers = {}, {}, set()
    for node, spec in zip(placeholders, ep.graph_signature.input_specs):
        if spec.kind not in WEIGHTS:
            continue
        tensor = ep.state_dict.get(spec.target, ep.constants.get(spec.target))
        if tensor is not None:
            values[node], names[node] = tensor, spec.target
        if spec.kind == InputKind.BUFFER:
            buffers.add(node)
    by_target = {names[node]: node for node in buffers if node in names}
    outputs = list(next(iter(gm.graph.find_nodes(op="output"))).args[0])
    internal_outputs = {
        node: by_target[spec.target]
        for node, spec in zip(outputs, ep.graph_signature.output_specs)
        if spec.kind == OutputKind.BUFFER_MUTATION and outputs.count(node) == 1
    }
    aliases = Aliases(gm.graph)
    internal = {node for node in buffers if aliases.writes(node)} | set(internal_outputs.values())
    return Capture(gm, values, names, internal, internal_outputs)


def from_dynamo(gm: GraphModule, example_inputs: list) -> Capture:
    """Dynamo's graph, traced again to pre-dispatch ATen inside its own fake mode.

    Parameters and buffers are read from the real example inputs. All that Inductor reads of the graph and its placeholders
    (static inputs, sources) is put back, so that the result can be compiled in place of ``gm``.

    Raises:
        NotImplementedError: the graph holds what has no form in ATen, or none that a rotation could stand in.
    """
    if any(_torch.is_functorch(node.target) for node in gm.graph.nodes if node.op == "call_function"):
        raise NotImplementedError(
            "torch.func transforms (vmap, grad, jvp; flex_attention makes its block mask by vmap if it is given none) in it"
        )
    before = gm.graph.find_nodes(op="placeholder")
    inputs, mode = _fake_inputs(before, example_inputs)
    with mode, preserve_node_meta(), _torch.no_saved_tensor_hooks():
        traced = make_fx(_Retracer(gm).run, pre_dispatch=True)(*inputs)
    if torch.is_grad_enabled() and (lost := _operators(gm) - _operators(traced) - {_CHECKPOINT}):
        raise NotImplementedError(f"{', '.join(sorted(op.name() for op in lost))} in it, whose gradient is its own")
    traced.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        # What make_fx lifts out of `torch.tensor(2.0)` is a buffer of the new graph.
        constants = {name: _torch.constant_source(name) for name, _ in traced.named_buffers()}
        traced._param_name_to_source = {**constants, **gm._param_name_to_source}
    sources = {}
    after = traced.graph.find_nodes(op="placeholder")
    for old, new in zip(before, after):
        new._dynamo_source = source = getattr(
            old, "_dynamo_source", None
        )  # AOTAutograd wants the attribute, if but None
        if source is not None:
            sources[new] = source.name if isinstance(source.name, str) else source.name()  # a method on torch 2.11
        if "tensor_dict" in old.meta:
            new.meta["tensor_dict"] = old.meta["tensor_dict"]
    values = {
        node: tensor
        for node, tensor in zip(after, example_inputs)
        if isinstance(tensor, torch.Tensor)
        and not isinstance(tensor, FakeTensor)
        and ("_dynamo_static_input_type" in node.meta.get("tensor_dict", {}) or isinstance(tensor, torch.nn.Parameter))
    }
    roots = {_root(sources[node]) for node in values if node in sources}
    root = "L['self']" if "L['self']" in roots else roots.pop() if len(roots) == 1 else ""
    names = {node: _below(root, _spell(sources[node])) for node in values if node in sources}
    return Capture(traced, values, names, root=root, sources=sources)


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def _operators(gm: GraphModule) -> set[torch._ops.HigherOrderOperator]:
    """The higher-order operators in a graph and those below it. One that is gone after tracing again was run instead, such as
    a torch.autograd.Function or a tensor hook, and its gradient is lost."""
    nodes = (node for module in gm.modules() if isinstance(module, GraphModule) for node in module.graph.nodes)
    return {node.target for node in nodes if isinstance(node.target, torch._ops.HigherOrderOperator)}


class _Retracer(Interpreter):
    """Runs Dynamo's graph for ``make_fx``, all but two kinds of call.

    A call on a tensor subclass (a quantized weight) stays as Dynamo wrote it: traced into, it would become what the
    subclass does, with its inner tensors as constants. AOTAutograd, which comes later, can take the subclass apart.

    The body of an activation checkpoint is traced in place, marked for recomputation as AOTAutograd would mark it.
    """

    def run_node(self, node: Node) -> object:
        """As the base class does, but for these."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.target is _CHECKPOINT:
            return self._run_checkpoint(*args)
        if not node.op.startswith("call") or not any(map(_torch.is_wrapper, pytree.tree_leaves((args, kwargs)))):
            return super().run_node(node)
        with set_current_meta(node):
            return _torch.record_call(node.op, node.target, args, kwargs, node.meta["example_value"])

    def _run_checkpoint(self, body: GraphModule, *args: object) -> object:
        if "_checkpoint_context_fn" in body.meta:
            raise NotImplementedError("selective activation checkpointing (context_fn)")
        for node in body.graph.nodes if torch.is_grad_enabled() else ():
            node.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=id(body))
        return _Retracer(body).run(*args)


def _fake_inputs(placeholders: list[Node], example_inputs: list) -> tuple[list, FakeTensorMode]:
    values = [n.meta.get("example_value", n.meta.get("val")) for n in placeholders]
    mode = (
        next((v.fake_mode for v in [*values, *example_inputs] if isinstance(v, FakeTensor)), None) or FakeTensorMode()
    )
    for i, (v, example) in enumerate(zip(values, example_inputs)):
        if v is None:
            real = isinstance(example, torch.Tensor) and not isinstance(example, FakeTensor)
            values[i] = mode.from_tensor(example) if real else example
    return values, mode


def _copy(gm: GraphModule) -> torch.fx.Graph:
    graph = torch.fx.Graph(tracer_cls=gm.graph._tracer_cls)
    graph._codegen = gm.graph._codegen
    graph.output(graph.graph_copy(gm.graph, copied := {}))
    # graph_copy returns the output's arguments, and leaves its meta behind.
    next(iter(graph.find_nodes(op="output"))).meta.update(next(iter(gm.graph.find_nodes(op="output"))).meta)
    assert len(copied) == len(gm.graph.nodes) - 1
    for old, new in copied.items():
        new.name = old.name  # the new namespace would not give an input the name of a builtin, such as `input`
    return graph


def _spell(path: str) -> str:
    """Dynamo's spelling of a path in that of a state dict: ``._modules['layers']._modules['0']`` is ``.layers.0``."""
    path = re.sub(r"\.(?:__dict__\[')?_(?:modules|parameters|buffers)(?:'\])?\['([^']*)'\]", r".\1", path)
    head, bracket, tail = re.match(r"((?:[LG]\['[^']*'\](?:\[\d+\])?)?)([^\[]*)(.*)", path).groups()
    return head + bracket + re.sub(r"\['?([^'\]]*)'?\]", r".\1", tail)


def _root(source: str) -> str:
    return _spell(re.split(r"\.(?:__dict__\[')?_(?:modules|parameters|buffers)(?:'\])?\[", source)[0])


def _below(root: str, path: str) -> str:
    if path == root:
        return ""
    return path[len(root) + 1 :] if root and path.startswith(root + ".") else path
