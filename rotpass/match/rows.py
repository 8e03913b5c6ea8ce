"""Which rows of a projection's weight a value downstream is made of.

A fused projection (qkv, interleaved heads, kv of MLA) is cut up by views, splits and selections. Rather than reading each
layout, the cutting operators themselves are run on an index tensor: an ``arange`` over the output features, broadcast over
the other axes. What comes out says which rows every value comes from, whatever the layout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from rotpass._torch import size_hint
from rotpass.match.edits import FoldPoint
from rotpass.match.projection import projection
from rotpass.match.walk import BYSTANDERS, TRANSPARENT, carriers, value

aten = torch.ops.aten

LONGEST_CHAIN = 32

# Rules of operators that leave every value in its place.
_KEEPS_PLACE = {TRANSPARENT[op] for op in (aten.to.dtype, aten.dropout.default, aten.mul.Tensor)}
_COPIES = {aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default, aten.neg.default}
# A view that no longer fits the index tensor's strides is the reshape it stands for.
_AS_RESHAPE = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}


def fold_point(node: Node, size: int, *, unwritten: Callable[[Node], bool]) -> FoldPoint | None:
    """Where the rotation of ``node`` (read by attentions alone) folds: rows of the projection that it is cut out of.

    None if ``node`` is not cut out of a projection, its rows do not come in whole runs of ``size``, another value is made
    of the same rows, or something on the way is written to (``unwritten``).
    """
    path = [node]
    while (found := projection(path[-1])) is None:
        above = carriers(path[-1], size)
        if above is None or len(above) != 1 or len(path) > LONGEST_CHAIN:
            return None
        path.append(above[0])
    if not all(map(unwritten, path)) or value(found.source).shape[found.out_axis] != found.out_features:
        return None
    path.reverse()
    try:
        values = _run(path, found.out_features)
        rows = _distinct(values[-1])
        starts = _block_starts(rows, size)
        if starts is None or not _others_keep_off(path, values, set(rows.flatten().tolist())):
            return None
    except (NotImplementedError, RuntimeError, IndexError, TypeError):
        return None  # an operator that does not run on indices: the rotation stays online
    whole = tuple(range(0, found.out_features, size))
    return FoldPoint(found, "out", None if starts == whole else starts, node)


def _run(path: list[Node], features: int) -> list[Any]:
    shape = [size_hint(n) for n in value(path[0]).shape]
    values: list[Any] = [torch.arange(features).expand(shape)]
    for above, node in zip(path, path[1:]):
        values.append(_apply(node, above, values[-1]))
    return values


def _apply(node: Node, above: Node, index: Any) -> Any:
    """``node`` with ``index`` in the place of its input ``above``."""
    if node.target is operator.getitem:
        return index[node.args[1]]
    if node.target in _COPIES or TRANSPARENT.get(node.target) in _KEEPS_PLACE:
        return index
    if node.target not in TRANSPARENT:
        raise NotImplementedError(f"{node.target} on an index tensor")

    def argument(n: Node) -> Any:
        if n is above:
            return index
        if isinstance(value(n), torch.Tensor):
            raise NotImplementedError(f"{node.target} reads {n}")
        return size_hint(value(n))

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), argument)
    target = aten.reshape.default if node.target in _AS_RESHAPE else node.target
    return target(*args, **kwargs)


def _distinct(index: torch.Tensor) -> torch.Tensor:
    """``index`` without the axes it was merely broadcast over."""
    return index[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in index.stride())]


def _block_starts(rows: torch.Tensor, size: int) -> tuple[int, ...] | None:
    if not rows.numel():
        return None  # an empty batch shows no rows
    blocks = rows.reshape(-1, size).unique(dim=0)
    contiguous = bool((blocks == blocks[:, :1] + torch.arange(size)).all())
    return tuple(blocks[:, 0].tolist()) if contiguous and blocks.unique().numel() == blocks.numel() else None


def _others_keep_off(path: list[Node], values: list[Any], rows: set[int]) -> bool:
    """Whether nothing that branches off the path above its end reads one of ``rows``."""
    return all(
        user is below or _keeps_off(user, node, index, rows)
        for node, index, below in zip(path, values, path[1:])
        for user in node.users
    )


def _keeps_off(user: Node, above: Node, index: Any, rows: set[int], depth: int = 0) -> bool:
    if user.target in BYSTANDERS:
        return True
    if user.op != "call_function" or depth > LONGEST_CHAIN:
        return False
    try:
        read = _apply(user, above, index)
    except (NotImplementedError, RuntimeError, IndexError, TypeError):
        return False
    if isinstance(read, torch.Tensor) and rows.isdisjoint(_distinct(read).flatten().tolist()):
        return True
    return bool(user.users) and all(_keeps_off(below, user, read, rows, depth + 1) for below in user.users)
