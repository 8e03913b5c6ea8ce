"""The operators as plain aten with constant matrices, for artifacts that must run where rotpass is not installed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import rotpass.ops  # noqa: F401  registers the operators
from rotpass.hadamard.apply import accumulation_dtype
from rotpass.hadamard.stages import sign_vector, stage_matrices
from rotpass.quantize import quantize_dequantize

# Makes the node that stands for a constant, at the graph's insertion point: (graph, name, tensor) -> node.
MakeConstant = Callable[[Graph, str, Tensor], Node]


def hadamard(x: Tensor, size: int, transpose: bool = False, table: str = "default", seed: int | None = None) -> Tensor:
    """What ``rotpass::hadamard`` computes, in plain aten; leading dimensions may be dynamic.

    The output has the memory order of the input, as the operator's has.
    """
    matrices, signs = _constants(x, size, transpose, table, seed)
    return _rotate(x, size, transpose, signs, *matrices.values())


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


def replace_operators(graph: Graph, make_constant: MakeConstant, **trace: Any) -> int:
    """Replaces each of rotpass's operators by the aten that ``make_fx(..., **trace)`` makes of it. Returns how many."""
    nodes = graph.find_nodes(op="call_function", target=torch.ops.rotpass.hadamard.default)
    for node in nodes:
        arguments = dict(zip(("size", "transpose", "table", "seed"), (None, False, "default", None)))
        arguments.update(zip(arguments, node.args[1:]), **{k: v for k, v in node.kwargs.items() if k != "x"})
        matrices, signs = _constants(_input(node).meta["val"], **arguments)
        named = (
            matrices if signs is None else {f"rotpass_signs_{arguments['size']}_{arguments['seed']}": signs} | matrices
        )

        def rotate(x: Tensor, *constants: Tensor, signs=signs, **kwargs: Any) -> Tensor:
            first, rest = (None, constants) if signs is None else (constants[0], constants[1:])
            return _rotate(x, kwargs["size"], kwargs["transpose"], first, *rest)

        _inline(graph, node, rotate, arguments, named, make_constant, trace)
    quantizations = graph.find_nodes(op="call_function", target=torch.ops.rotpass.fake_quantize.default)
    for node in quantizations:
        arguments = dict(zip(("kind", "group"), node.args[1:])) | {k: v for k, v in node.kwargs.items() if k != "x"}
        _inline(graph, node, fake_quantize, arguments, {}, make_constant, trace)
    return len(nodes) + len(quantizations)


def make_buffer(graph: Graph, name: str, value: Tensor) -> Node:
    """A constant as a buffer of the graph's module, shared by all nodes that ask for the same name."""
    module = graph.owning_module
    if not hasattr(module, name):
        module.register_buffer(name, value, persistent=False)
    return graph.get_attr(name)


def _input(node: Node) -> Node:
    return node.args[0] if node.args else node.kwargs["x"]


def _constants(
    x: Tensor, size: int, transpose: bool, table: str, seed: int | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The matrices of the stages by a name of their own, and the signs."""
    at = {"dtype": accumulation_dtype(x.dtype), "device": x.device}
    matrices = stage_matrices(size, table=table, transpose=transpose, **at)
    suffix = f"{table}_{size}_{'t_' if transpose else ''}{str(at['dtype'])[6:]}_{x.device}"
    named = {f"rotpass_{suffix}_{i}".replace("-", "_").replace(":", "_"): m for i, m in enumerate(matrices)}
    return named, None if seed is None else sign_vector(size, seed, **at)


def _rotate(x: Tensor, size: int, transpose: bool, signs: Tensor | None, *matrices: Tensor) -> Tensor:
    # Rows in memory's order: a transposed (B, H, S, D) need not be copied, and the output lies as the input does.
    order = [axis for axis in _physical_order(x) if axis != x.dim() - 1] + [x.dim() - 1]
    rows = _permute(x, order)
    y = rows.to(accumulation_dtype(x.dtype)).reshape(-1, size)
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
    y = _permute(y.to(x.dtype).reshape(rows.shape), _inverse(order))
    return y if order == _physical_order(x) else _in_order_of(x, y)


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
    arguments: dict[str, Any],
    constants: dict[str, Tensor],
    make_constant: MakeConstant,
    trace: dict[str, Any],
) -> None:
    """Replaces a node by the trace of ``function(x, *constants, **arguments)``."""
    x = _input(node)
    value = x.meta["val"]
    kept = {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta", "example_value", "eager_input_vals")}
    fakes = [value.fake_mode.from_tensor(c, static_shapes=True) for c in constants.values()]
    with value.fake_mode:  # for what the trace or its decompositions make from nothing
        traced = make_fx(lambda x, *constants: function(x, *constants, **arguments), **trace)(value, *fakes)
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
    node.replace_all_uses_with(replaced[result])
    graph.erase_node(node)
