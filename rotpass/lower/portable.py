"""The operators as plain aten with constant matrices, for artifacts that must run where rotpass is not installed."""

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import rotpass.ops  # noqa: F401  registers the operators
from rotpass.hadamard.apply import accumulation_dtype
from rotpass.hadamard.stages import sign_vector, stage_matrices
from rotpass.quantize import quantize_dequantize, quantize_rows

# Makes the node that stands for a constant, at the graph's insertion point: (graph, name, tensor) -> node.
MakeConstant = Callable[[Graph, str, Tensor], Node]
# What a rotation becomes: (an input like its own, size, transpose, table, seed) -> constants by name, function of (x, *them).
Expand = Callable[[Tensor, int, bool, str, int | None], tuple[dict[str, Tensor], Callable[..., Tensor]]]


def hadamard(x: Tensor, size: int, transpose: bool = False, table: str = "default", seed: int | None = None) -> Tensor:
    """What ``rotpass::hadamard`` computes, in plain aten; leading dimensions may be dynamic.

    The output has the memory order of the input, as the operator's has.
    """
    constants, rotate = expansion(x, size, transpose, table, seed)
    return rotate(x, *constants.values())


def fake_quantize(x: Tensor, kind: str, group: int = 0) -> Tensor:
    """What ``rotpass::fake_quantize`` computes, in plain aten, without its straight-through gradient."""
    return _in_order_of(x, quantize_dequantize(x, kind, group))


def to_portable(gm: GraphModule, *, make_constant: MakeConstant | None = None) -> GraphModule:
    """Replaces rotpass's operators by plain aten, in place. Without its straight-through gradient, a fake quantization
    is for inference only.

    Args:
        gm: any graph of aten, pre-dispatch or later, whose nodes have ``meta["val"]``.
        make_constant: how the graph is to refer to a matrix; None, as a ``get_attr`` of a buffer that is not saved.
            (An ExportedProgram refuses ``get_attr``: give a function that makes a constant placeholder.)

    Returns:
        ``gm``. The new nodes carry the replaced node's metadata, and values of their own.
    """
    replace_operators(gm.graph, make_constant or make_buffer)
    gm.recompile()
    return gm


def replace_operators(
    graph: Graph,
    make_constant: MakeConstant,
    expand: Expand | None = None,
    expand_quantize: Callable[..., Any] | None = None,
    **trace: Any,
) -> int:
    """Replaces each of rotpass's operators by the aten that ``make_fx(..., **trace)`` makes of it, a rotation by what
    ``expand`` and ``expand_quantize`` say. Returns how many."""
    quantized = graph.find_nodes(op="call_function", target=torch.ops.rotpass.hadamard_quantize.default)
    for node in quantized:
        arguments = bind(node, "size", "dtype", group=0, asymmetric=False, transpose=False, table="default", seed=None)
        constants, rotate = (expand_quantize or expansion_quantize)(_input(node).meta["val"], **arguments)
        _inline(graph, node, rotate, constants, make_constant, trace)
    nodes = graph.find_nodes(op="call_function", target=torch.ops.rotpass.hadamard.default)
    for node in nodes:
        arguments = bind(node, "size", transpose=False, table="default", seed=None)
        constants, rotate = (expand or expansion)(_input(node).meta["val"], **arguments)
        _inline(graph, node, rotate, constants, make_constant, trace)
    quantizations = graph.find_nodes(op="call_function", target=torch.ops.rotpass.fake_quantize.default)
    for node in quantizations:
        arguments = bind(node, "kind", group=0)
        _inline(graph, node, functools.partial(fake_quantize, **arguments), {}, make_constant, trace)
    return len(quantized) + len(nodes) + len(quantizations)


def bind(node: Node, *required: str, **defaults: Any) -> dict[str, Any]:
    """The arguments of a call of one of our operators by name, all but the tensor ``x``."""
    names = (*required, *defaults)
    return defaults | dict(zip(names, node.args[1:])) | {k: v for k, v in node.kwargs.items() if k != "x"}


def make_buffer(graph: Graph, name: str, value: Tensor) -> Node:
    """A constant as a buffer of the graph's module, shared by all nodes that ask for the same name."""
    module = graph.owning_module
    if not hasattr(module, name):
        module.register_buffer(name, value, persistent=False)
    return graph.get_attr(name)


def _input(node: Node) -> Node:
    return node.args[0] if node.args else node.kwargs["x"]


def expansion(
    x: Tensor, size: int, transpose: bool, table: str, seed: int | None
) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """A rotation of tensors like ``x``: its constants, the signs first if there are any, each by a name of its own, and
    a function of a tensor and them."""
    at = {"dtype": accumulation_dtype(x.dtype), "device": x.device}
    matrices = stage_matrices(size, table=table, transpose=transpose, **at)
    prefix = f"{table}_{size}_{'t_' if transpose else ''}{str(at['dtype'])[6:]}"
    named = {constant_name(f"{prefix}_{i}", x.device): m for i, m in enumerate(matrices)}
    if seed is None:
        return named, lambda x, *matrices: _rotate(x, size, transpose, None, *matrices)
    signs = {constant_name(f"signs_{size}_{seed}_{at['dtype']}", x.device): sign_vector(size, seed, **at)}
    return signs | named, lambda x, signs, *matrices: _rotate(x, size, transpose, signs, *matrices)


def expansion_quantize(
    x: Tensor,
    size: int,
    dtype: torch.dtype,
    group: int,
    asymmetric: bool,
    transpose: bool,
    table: str,
    seed: int | None,
) -> tuple[dict[str, Tensor], Callable[..., tuple[Tensor, ...]]]:
    """As :func:`expansion`, for ``rotpass::hadamard_quantize``."""
    exact = accumulation_dtype(x.dtype)
    constants, rotate = expansion(x.to(exact), size, transpose, table, seed)

    def quantize(x: Tensor, *constants: Tensor) -> tuple[Tensor, ...]:
        return quantize_rows(rotate(x.to(exact), *constants).contiguous(), dtype, group, asymmetric)

    return constants, quantize


def constant_name(text: str, device: torch.device) -> str:
    """The name of a buffer; equal for equal constants, so that a graph holds each once."""
    return re.sub(r"\W", "_", f"rotpass_{text}_{device}")


def _rotate(x: Tensor, size: int, transpose: bool, signs: Tensor | None, *matrices: Tensor) -> Tensor:
    return along_rows(x, size, lambda rows: _rotate_rows(rows, size, transpose, signs, *matrices))


def along_rows(x: Tensor, size: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of (rows, size) of the blocks along the last axis, in memory's order: a transposed (B, H, S, D) need
    not be copied, and the output lies as the operator's does."""
    order = [axis for axis in _physical_order(x) if axis != x.dim() - 1] + [x.dim() - 1]
    rows = _permute(x, order)
    y = _permute(function(rows.reshape(-1, size)).reshape(rows.shape), _inverse(order))
    return y if order == _physical_order(x) else _in_order_of(x, y)


def _rotate_rows(x: Tensor, size: int, transpose: bool, signs: Tensor | None, *matrices: Tensor) -> Tensor:
    y = x.to(accumulation_dtype(x.dtype))
    if signs is not None and not transpose:
        y = y * signs
    inner = 1
    for matrix in reversed(matrices):
        k = matrix.shape[0]
        if inner == 1:
            y = torch.mm(y.reshape(-1, k), matrix.mT)
        else:
            y = y.reshape(-1, k, inner)
            y = torch.bmm(matrix.expand(y.shape[0], k, k), y)
        inner *= k
    if signs is not None and transpose:
        y = y.reshape(-1, size) * signs
    return y.reshape(-1, size).to(x.dtype)


def _physical_order(x: Tensor) -> list[int]:
    """The axes by descending stride; where strides are equal, or nothing is permuted, in their own order."""
    return list(range(x.dim())) if x.is_contiguous() else sorted(range(x.dim()), key=lambda axis: -x.stride(axis))


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _permute(x: Tensor, order: list[int]) -> Tensor:
    return x if order == list(range(x.dim())) else x.permute(order)


def _in_order_of(x: Tensor, y: Tensor) -> Tensor:
    """``y`` in the order of memory that ``torch.empty_like(x)`` has."""
    order = _physical_order(x)
    return _permute(_permute(y, order).contiguous(), _inverse(order))


def _inline(
    graph: Graph,
    node: Node,
    function: Callable[..., Tensor],
    constants: dict[str, Tensor],
    make_constant: MakeConstant,
    trace: dict[str, Any],
) -> None:
    """Replaces a node by the trace of ``function(x, *constants)``."""
    x = _input(node)
    value = x.meta["val"]
    kept = {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta", "example_value", "eager_input_vals")}
    fakes = [value.fake_mode.from_tensor(c, static_shapes=True) for c in constants.values()]
    with value.fake_mode:  # for what the trace or its decompositions make from nothing
        traced = make_fx(function, **trace)(value, *fakes)
    with graph.inserting_before(node):
        inputs = [x, *(make_constant(graph, name, c) for name, c in constants.items())]
        for made, fake in zip(inputs[1:], fakes):
            made.meta.setdefault("val", fake)
        replaced = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs))
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                copy = replaced[inner] = graph.node_copy(inner, replaced.__getitem__)
                copy.meta = {**kept, "val": inner.meta["val"]}
    (result,) = traced.graph.find_nodes(op="output")[0].args
    if isinstance(result, Node):
        node.replace_all_uses_with(replaced[result])
    else:
        for user in list(node.users):
            assert user.target is operator.getitem, user
            user.replace_all_uses_with(replaced[result[user.args[1]]])
            graph.erase_node(user)
    graph.erase_node(node)
