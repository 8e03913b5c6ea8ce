"""KV cache writes: operators that put new head vectors into a buffer of old ones.

Each row says by which inputs the result carries a rotation: the buffer itself and what is written. To teach rotpass
another cache operator, add a row to :data:`CACHE_WRITES`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from rotpass.match.walk import Rule, argument, is_floating, last_dim, value

aten = torch.ops.aten

# Freshly made buffers that hold zeros, which are their own rotation.
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


def _along(source: str) -> Rule:
    """A write of ``source`` along ``dim``, which must not be the last axis."""

    def rule(node: Node, size: int) -> list[Node] | None:
        buffer, written, dim = node.args[0], argument(node, source), argument(node, "dim")
        if dim % value(buffer).dim() == value(buffer).dim() - 1:
            return None
        return _same_vectors(buffer, written, size)

    return rule


def _index_put(node: Node, size: int) -> list[Node] | None:
    buffer, indices, written = node.args[:3]
    if len(indices) >= value(buffer).dim() and indices[-1] is not None or argument(node, "accumulate"):
        return None
    return _same_vectors(buffer, written, size)


def _copy(node: Node, size: int) -> list[Node] | None:
    return _same_vectors(node.args[0], node.args[1], size)


def _overwrite(node: Node, size: int) -> list[Node] | None:
    """Nothing is left of the old values."""
    sources = _copy(node, size)
    return sources and sources[1:]


def _zero(node: Node, size: int) -> list[Node] | None:
    return [node.args[0]]


def _same_vectors(buffer: Node, written, size: int) -> list[Node] | None:
    if not isinstance(written, Node) or not is_floating(written) or not is_floating(buffer):
        return None
    length = last_dim(buffer)
    return [buffer, written] if length is not None and length % size == 0 and last_dim(written) == length else None


CACHE_WRITES: dict[Callable, Rule] = {
    aten.index_copy_.default: _along("source"),
    aten.index_copy.default: _along("source"),
    aten.slice_scatter.default: _along("src"),
    aten.index_put_.default: _index_put,
    aten.index_put.default: _index_put,
    aten.copy_.default: _copy,
    aten.copy.default: _overwrite,
    aten.zero_.default: _zero,
}
