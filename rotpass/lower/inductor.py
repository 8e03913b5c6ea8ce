"""What Inductor makes of the operators.

Each becomes plain aten after autograd and functionalization: small products with constants, between which Inductor fuses
signs, casts and the neighbours of the rotation; on a GPU one kernel, where a program can hold a row. On the CPU the
operator's own kernel, called from Inductor's code, measured slower: 2 to 3 times for few rows (it costs a call into
Python), 15 to 20 % for 2^21 elements; only at 64 with many rows it was 15 % faster (examples/benchmarks/RESULTS.md).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from rotpass.lower import fast_math, portable, tiled


def lower(graph: Graph) -> int:
    """Replaces rotpass's operators in a post-grad graph, forward or backward, in place; to be called from Inductor's
    ``post_grad_custom_post_pass``, so that the gradient is still the operator's own. Returns how many it replaced."""
    from torch._inductor.decomposition import select_decomp_table

    tiled.register()
    expansions = {"expand": _on_a_gpu("expansion"), "expand_quantize": _on_a_gpu("expansion_quantize")}
    count = portable.replace_operators(
        graph, portable.make_buffer, **expansions, decomposition_table=select_decomp_table()
    )
    if torch.version.hip is None:
        fast_math.register()
        for node in tiled.nodes(graph):
            if node.args[0].meta["val"].dtype.itemsize == 2:
                fast_math.speed_up(node.args[0])
    return count


def _on_a_gpu(name: str) -> Callable[..., Any]:
    """An expansion of ``tiled`` for tensors on a GPU; that of ``portable`` for others, and where ``tiled`` has none."""

    def expand(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = getattr(tiled, name)(x, *args, **kwargs) if x.device.type == "cuda" else None
        return found or getattr(portable, name)(x, *args, **kwargs)

    return expand
