"""The whole matrix as one tensor, for folding, for reference and for users."""

import functools

import torch
from torch import Tensor

from rotpass.hadamard.clean import clean
from rotpass.hadamard.tables import factor_matrices


def hadamard_matrix(n: int, *, table: str = "default", dtype: torch.dtype = torch.float64) -> Tensor:
    r"""The Hadamard matrix of order ``n``: entries +1 and -1, :math:`H H^T = n I`.

    Its place in the library: a rotation is :math:`y = x R^T` with :math:`R = H / \sqrt n`. ``H`` need not be symmetric.

    Args:
        n: the order.
        table: ``"default"``, the canonical rule of this library (see :func:`rotpass.hadamard.factors`); ``"quarot"``,
            the matrices and the first-match rule of QuaRot and SpinQuant; ``"compressed-tensors"``, that project's own
            matrices and its largest-divisor rule. All three are Kronecker products with Sylvester's matrix innermost.
        dtype: of the result.

    Returns:
        An ``(n, n)`` tensor on the CPU, the caller's own.

    Raises:
        ValueError: the table has no matrix of this order; the message names the largest block that it has.
        TypeError: ``n`` is no int, or ``dtype`` cannot hold the entries.

    Example::

        >>> rotpass.hadamard_matrix(12) @ rotpass.hadamard_matrix(12).T  # 12 on the diagonal, 0 elsewhere
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"the order of a Hadamard matrix is an int; got {n!r}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_signed:
        raise TypeError(f"dtype must be a torch.dtype that holds +1 and -1; got {dtype!r}")
    matrices = factor_matrices(n, table=table)
    return clean(lambda: functools.reduce(torch.kron, (m.to(dtype) for m in matrices)).clone())
