"""Attention calls: which arguments are queries, keys and values, and where the head vectors lie.

To teach rotpass another attention operator, add a row to :data:`ATTENTIONS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.fx import Node

from rotpass.match.walk import last_dim

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Roles:
    """Positions of the arguments of an attention operator; head vectors lie along the last axis of each and of the output."""

    q: int = 0
    k: int = 1
    v: int = 2


ATTENTIONS: dict[Callable, Roles] = {
    aten.scaled_dot_product_attention.default: Roles(),
}


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention call, ``node``; its head dimensions are None where they are not static."""

    node: Node
    roles: Roles
    head_dim: int | None
    v_head_dim: int | None

    def arg(self, role: str) -> Node:
        """The node that is passed as ``"q"``, ``"k"`` or ``"v"``."""
        return self.node.args[getattr(self.roles, role)]


def match_attention(node: Node) -> Attention | None:
    """Reads ``node`` as an attention call, or None."""
    roles = ATTENTIONS.get(node.target) if node.op == "call_function" else None
    if roles is None:
        return None
    q, k, v = (node.args[i] if i < len(node.args) else None for i in (roles.q, roles.k, roles.v))
    if not all(isinstance(n, Node) for n in (q, k, v)):
        return None
    same = last_dim(q) if last_dim(q) == last_dim(k) else None
    return Attention(node, roles, same, last_dim(v))
