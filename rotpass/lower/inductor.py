"""What Inductor makes of the operators.

Each becomes plain aten after autograd and functionalization: small products with constants, between which Inductor fuses
signs, casts and the neighbours of the rotation. On the CPU the operator's own kernel, called from Inductor's code,
measured slower: 2 to 3 times for few rows (it costs a call into Python), 15 to 20 % for 2^21 elements; only at 64 with
many rows it was 15 % faster (examples/benchmarks/RESULTS.md).
"""

from torch.fx import Graph

from rotpass.lower.portable import make_buffer, replace_operators


def lower(graph: Graph) -> int:
    """Replaces rotpass's operators in a post-grad graph, forward or backward, in place; to be called from Inductor's
    ``post_grad_custom_post_pass``, so that the gradient is still the operator's own. Returns how many it replaced."""
    from torch._inductor.decomposition import select_decomp_table

    return replace_operators(graph, make_buffer, decomposition_table=select_decomp_table())
