"""silu in a fused producer: two special-function instructions where Inductor's takes about twenty in all.

The kernel that a producer is fused into is bound by instructions, not by memory, and what comes out is rounded to 16 bits,
so an error of a few 2^-23 is no loss.
"""

import functools

import torch
from torch.fx import Node

from rotpass import _torch

_library = torch.library.Library("rotpass", "FRAGMENT")
_library.define("silu_fast(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
_library.impl("silu_fast", torch.nn.functional.silu, "CompositeExplicitAutograd")
torch.library.register_fake("rotpass::silu_fast", lambda x: torch.empty_like(x), lib=_library)

# x * 1 / (1 + 2^(-x log2 e)). At x = -inf as at +inf it is what x / (1 + exp(-x)) is.
_SILU = (
    "{ .reg .f32 t; mul.ftz.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.ftz.f32 t, t, 0f3F800000;"
    " rcp.approx.ftz.f32 t, t; mul.ftz.f32 $0, $1, t; }"
)

# What a producer may be made of on the way from its silu to the rotation.
_ON_THE_WAY = (
    torch.ops.aten.mul.Tensor,
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten.view.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.clone.default,
)


@functools.cache
def register() -> None:
    """Tells Inductor how to lower the operator."""
    _torch.register_pointwise_asm(torch.ops.rotpass.silu_fast.default, _SILU, "=f,f", torch.float32)


def speed_up(node: Node) -> None:
    """Replaces the float32 silus by which the 16-bit input ``node`` of a rotation is made."""
    while node.op == "call_function" and len(node.users) == 1:
        if (x := _silu_of(node)) is not None:
            with node.graph.inserting_before(node):
                fast = node.graph.call_function(torch.ops.rotpass.silu_fast.default, (x,))
            fast.meta.update(node.meta)
            node.replace_all_uses_with(fast)
            node.graph.eliminate_dead_code()
            return
        if node.target not in _ON_THE_WAY:
            return
        inputs = [n for n in node.all_input_nodes]
        for other in inputs[1:]:
            speed_up(other)
        node = inputs[0]


def _silu_of(node: Node) -> Node | None:
    """x if a float32 node is x / (1 + exp(-x)), as silu comes decomposed; else None."""
    aten = torch.ops.aten
    if node.target != aten.div.Tensor or node.meta["val"].dtype != torch.float32:
        return None
    x, below = node.args
    if not isinstance(below, Node) or below.target != aten.add.Tensor or below.args[1] != 1 or below.kwargs:
        return None
    exp = below.args[0]
    if exp.target != aten.exp.default or exp.args[0].target != aten.neg.default or exp.args[0].args[0] is not x:
        return None
    return x
