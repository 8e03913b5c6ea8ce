"""Rotation-transparent operators: what carries a rotation of blocks along the last axis unchanged.

A value is *rotated in blocks of size d* if every run of d values along its last axis was multiplied by the same matrix.
An operator is transparent if it moves, copies, repeats or selects whole runs. One table says which operators are, and by
which of its inputs each carries the rotation: all of the returned inputs are rotated, or none may be. To add an operator,
add a row to :data:`TRANSPARENT`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from rotpass import _torch

aten = torch.ops.aten

FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}

# Users of a value that do not read what is in it.
BYSTANDERS = {
    aten._assert_tensor_metadata.default, aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default,
    aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default,
}  # fmt: skip

Rule = Callable[[Node, int], "list[Node] | None"]


def value(node: Node):
    """The fake tensor (or tuple, or symbolic number) that a node stands for."""
    return node.meta.get("val", node.meta.get("example_value"))


def last_dim(node: Node) -> int | None:
    """Length of the last axis if it is a tensor's and static, else None."""
    v = value(node)
    if isinstance(v, (tuple, list)):
        v = v[0] if v else None
    if not isinstance(v, torch.Tensor) or v.dim() == 0:
        return None
    return _torch.static_int(v.shape[-1])


def is_floating(node: Node) -> bool:
    """Whether a node is a tensor of a dtype that the Hadamard operator takes."""
    v = value(node)
    return isinstance(v, torch.Tensor) and v.dtype in FLOATS


def argument(node: Node, name: str, default=None):
    """An argument of an ATen call by its schema's name, however it was passed."""
    for i, schema in enumerate(node.target._schema.arguments):
        if schema.name == name:
            return (
                node.args[i]
                if i < len(node.args)
                else node.kwargs.get(name, schema.default_value if schema.has_default_value() else default)
            )
    return default


Position = int | tuple[int, int]  # of an argument, or within one that is a list


def argument_at(node: Node, position: Position):
    """The argument at a position."""
    if isinstance(position, int):
        return node.args[position]
    return node.args[position[0]][position[1]]


def positions(user: Node, node: Node) -> list[Position]:
    """Where ``user`` takes ``node``."""
    found: list[Position] = []
    for i, arg in enumerate(user.args):
        if arg is node:
            found.append(i)
        elif isinstance(arg, (list, tuple)):
            found.extend((i, j) for j, item in enumerate(arg) if item is node)
    return found


def users(node: Node) -> list[Node]:
    """The nodes that read the value; bystanders and dead nodes left out."""
    return [u for u in node.users if u.target not in BYSTANDERS]


def carriers(node: Node, size: int) -> list[Node] | None:
    """The inputs by which ``node`` carries blocks of ``size`` along the last axis; None if it is not transparent."""
    if node.op != "call_function":
        return None
    rule = TRANSPARENT.get(node.target)
    return rule(node, size) if rule else None


def _first(node: Node) -> Node:
    return node.args[0] if node.args else next(iter(node.kwargs.values()))


def _rank(node: Node) -> int:
    v = value(node)
    return (v[0] if isinstance(v, (tuple, list)) else v).dim()


def _is_last(node: Node, dim: int) -> bool:
    return dim % _rank(node) == _rank(node) - 1


def _whole(node: Node, size: int) -> bool:
    length = last_dim(node)
    return length is not None and length > 0 and length % size == 0


def _blocks(node: Node, size: int) -> list[Node] | None:
    """The order of the elements stays, and so do the runs: both last axes are whole numbers of blocks."""
    x = _first(node)
    return [x] if _whole(x, size) and _whole(node, size) else None


def _same_last(node: Node, size: int) -> list[Node] | None:
    """Other axes are repeated, broadcast or copied."""
    x = _first(node)
    return [x] if _whole(x, size) and last_dim(x) == last_dim(node) else None


def _cast(node: Node, size: int) -> list[Node] | None:
    x = _first(node)
    return _same_last(node, size) if is_floating(x) and is_floating(node) else None


def _dropout(node: Node, size: int) -> list[Node] | None:
    return _same_last(node, size) if argument(node, "p") == 0 or argument(node, "train") is False else None


def _transpose(node: Node, size: int) -> list[Node] | None:
    x, a, b = node.args[:3]
    moved = {a % _rank(x), b % _rank(x)}
    return _same_last(node, size) if len(moved) == 1 or _rank(x) - 1 not in moved else None


def _permute(node: Node, size: int) -> list[Node] | None:
    x, dims = node.args[:2]
    return _same_last(node, size) if _is_last(x, dims[-1]) else None


def _other_axis(node: Node, size: int) -> list[Node] | None:
    """Selection or repetition along ``dim``, which must not be the last axis."""
    x, dim = _first(node), argument(node, "dim")
    return [x] if isinstance(dim, int) and not _is_last(x, dim) and _whole(x, size) else None


def _slice(node: Node, size: int) -> list[Node] | None:
    """Along the last axis, a slice must begin and end between blocks."""
    x, dim, start, step = _first(node), argument(node, "dim"), argument(node, "start") or 0, argument(node, "step")
    if not _is_last(x, dim):
        return [x] if _whole(x, size) else None
    if not isinstance(start, int) or step != 1 or not _whole(x, size) or not _whole(node, size):
        return None
    start = min(max(start + last_dim(x) if start < 0 else start, 0), last_dim(x))
    return [x] if start % size == 0 else None


def _split(node: Node, size: int) -> list[Node] | None:
    """chunk, split, unbind: along the last axis every piece must be whole blocks."""
    x, dim = _first(node), argument(node, "dim")
    if not _whole(x, size):
        return None
    if not _is_last(x, dim):
        return [x]
    pieces = value(node)
    whole = all(p.dim() == _rank(x) and isinstance(p.shape[-1], int) and p.shape[-1] % size == 0 for p in pieces)
    return [x] if whole else None


def _getitem(node: Node, size: int) -> list[Node] | None:
    return [node.args[0]] if isinstance(node.args[0], Node) and carriers(node.args[0], size) else None


def _index(node: Node, size: int) -> list[Node] | None:
    x, indices = node.args[:2]
    return [x] if (len(indices) < _rank(x) or indices[-1] is None) and _whole(x, size) else None


def _cat(node: Node, size: int) -> list[Node] | None:
    # What is empty and flat takes part in any cat and adds nothing (a DynamicCache begins so).
    tensors = [t for t in node.args[0] if tuple(value(t).shape) != (0,)]
    return tensors if tensors and all(_whole(t, size) and _rank(t) == _rank(node) for t in tensors) else None


def _stack(node: Node, size: int) -> list[Node] | None:
    return list(node.args[0]) if not _is_last(node, argument(node, "dim")) and _whole(node, size) else None


def _other_axes(node: Node, size: int) -> list[Node] | None:
    """Whole head vectors change places along ``dims``, which must not hold the last axis (nor be all axes as one)."""
    x, dims = _first(node), argument(node, "dims")
    return [x] if dims and not any(_is_last(x, dim) for dim in dims) and _whole(x, size) else None


def _where(node: Node, size: int) -> list[Node] | None:
    """One choice for each head vector."""
    chosen = node.args[1:3]
    whole = all(isinstance(x, Node) and is_floating(x) and _whole(x, size) for x in chosen)
    return list(chosen) if whole and last_dim(node) == last_dim(chosen[0]) and _is_one(node.args[0]) else None


def _blanked(node: Node, size: int) -> list[Node] | None:
    """Zeros are their own rotation."""
    return _same_last(node, size) if node.args[2] == 0 and _is_one(node.args[1]) else None


def _pad(node: Node, size: int) -> list[Node] | None:
    """Zeros are their own rotation."""
    pad = node.args[1]
    return _same_last(node, size) if tuple(pad[:2]) == (0, 0) and not argument(node, "value") else None


def _scaled(node: Node, size: int) -> list[Node] | None:
    """One factor for all values of a run: a number, or a tensor that broadcasts along the last axis."""
    a, b = node.args[0], argument(node, "other")
    for x, factor in ((a, b), (b, a)) if node.target in (aten.mul.Tensor, aten.mul_.Tensor) else ((a, b),):
        if (
            isinstance(x, Node)
            and _whole(x, size)
            and size > 1
            and last_dim(node) == last_dim(x)
            and _is_one_factor(factor)
        ):
            return [x]
    return None


def _is_one_factor(factor) -> bool:
    return _is_one(factor) if isinstance(factor, Node) else isinstance(factor, (int, float))


def _is_one(node: Node) -> bool:
    """Whether a node is a number, or a tensor that broadcasts along the last axis."""
    v = value(node)
    return not isinstance(v, torch.Tensor) or v.dim() == 0 or _torch.static_int(v.shape[-1]) == 1


def _rows(rule: Rule, *targets) -> dict:
    return {target: rule for target in targets}


TRANSPARENT: dict[Callable, Rule] = {
    **_rows(_blocks, aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_alias.default,
            aten.view_as.default, aten.reshape_as.default, aten.flatten.using_ints, aten.unflatten.int),
    **_rows(_same_last, aten.expand.default, aten.expand_as.default, aten.broadcast_to.default, aten.repeat.default,
            aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default,
            aten.contiguous.default, aten.alias.default, aten.detach.default, aten.detach_.default,
            aten.lift_fresh_copy.default, aten.neg.default),
    **_rows(_cast, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default,
            aten.type_as.default),
    **_rows(_dropout, aten.dropout.default, aten.feature_dropout.default),
    **_rows(_transpose, aten.transpose.int, aten.swapaxes.default, aten.swapdims.default),
    **_rows(_permute, aten.permute.default),
    **_rows(_other_axis, aten.select.int, aten.narrow.default, aten.index_select.default,
            aten.repeat_interleave.self_int, aten.repeat_interleave.self_Tensor),
    **_rows(_other_axes, aten.roll.default, aten.flip.default),
    **_rows(_where, aten.where.self),
    **_rows(_blanked, aten.masked_fill.Scalar),
    **_rows(_slice, aten.slice.Tensor),
    **_rows(_split, aten.split.Tensor, aten.split.default, aten.split_with_sizes.default, aten.chunk.default,
            aten.unbind.int, aten.tensor_split.sections, aten.tensor_split.indices),
    **_rows(_getitem, operator.getitem),
    **_rows(_index, aten.index.Tensor),
    **_rows(_cat, aten.cat.default, aten.concat.default),
    **_rows(_stack, aten.stack.default),
    **_rows(_pad, aten.constant_pad_nd.default, aten.pad.default),
    **_rows(_scaled, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar),
}  # fmt: skip


def columns_in_cat(user: Node, node: Node) -> range | None:
    """Which columns of ``user``, a cat along the last axis, ``node`` becomes."""
    if user.target is not aten.cat.default or not _is_last(user, argument(user, "dim")):
        return None
    widths = [last_dim(part) for part in user.args[0]]
    if user.args[0].count(node) != 1 or None in widths:
        return None
    i = user.args[0].index(node)
    return range(sum(widths[:i]), sum(widths[: i + 1]))


def disjoint(a: Node, b: Node) -> bool:
    """Whether two nodes certainly are different parts of one value."""
    if a.target is not b.target or a.args[:1] != b.args[:1]:
        return False
    if a.target is operator.getitem:
        return a.args[1] != b.args[1]
    if a.target is aten.select.int:
        same_dim, static = a.args[1] == b.args[1], isinstance(a.args[2], int) and isinstance(b.args[2], int)
        return same_dim and static and (a.args[2] < 0) == (b.args[2] < 0) and a.args[2] != b.args[2]
    if a.target is aten.slice.Tensor and argument(a, "dim") == argument(b, "dim"):
        ends = [(argument(n, "start") or 0, argument(n, "end")) for n in (a, b)]
        return all(isinstance(n, int) and n >= 0 for pair in ends for n in pair) and (
            ends[0][1] <= ends[1][0] or ends[1][1] <= ends[0][0]
        )
    return False


def rotation_above(node: Node, size: int | None) -> Node | None:
    """The Hadamard node whose result ``node`` carries along whole runs of ``size``, if there is one."""
    while node.target is not torch.ops.rotpass.hadamard.default:
        carried = carriers(node, size) if size else None
        if not carried or len(carried) != 1:
            return None
        node = carried[0]
    return node
