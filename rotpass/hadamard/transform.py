"""The public function for the rotation of a tensor."""

import torch
from torch import Tensor

import rotpass.ops  # noqa: F401  registers rotpass::hadamard


def hadamard_transform(
    x: Tensor,
    size: int | None = None,
    *,
    transpose: bool = False,
    table: str = "default",
    seed: int | None = None,
) -> Tensor:
    r"""Rotates the last axis: :math:`y = (x \odot s) R^T` with :math:`R = H / \sqrt{n}`, orthonormal.

    Args:
        x: any shape ``(..., width)``; float64, float32, float16 or bfloat16, accumulated in float32 or better.
        size: the order n of H, which must divide ``width``: each block of n along the last axis is rotated by itself.
            None, the whole width.
        transpose: the inverse, :math:`x = (y R) \odot s`.
        table: which H of order n; see :func:`rotpass.hadamard_matrix`.
        seed: of the signs s, by an integer hash (:func:`rotpass.hadamard.signs`); None, no signs.

    Returns:
        A tensor of the shape, dtype, device and strides of ``torch.empty_like(x)``. Differentiable any number of times.

    Raises:
        ValueError: ``size`` does not divide the last axis, or the table has no matrix of that order.
        TypeError: the dtype is none of the four, or an argument is of the wrong type.

    Example::

        >>> x = torch.randn(2, 14336)
        >>> y = rotpass.hadamard_transform(x, seed=0)
        >>> torch.allclose(rotpass.hadamard_transform(y, seed=0, transpose=True), x, atol=1e-5)
        True
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"hadamard_transform takes a tensor; got {type(x).__name__}")
    for name, value in (("size", size), ("seed", seed)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, torch.SymInt))):
            raise TypeError(f"{name} must be an int or None; got {value!r}")
    if not isinstance(transpose, bool):
        raise TypeError(f"transpose must be True or False; got {transpose!r}")
    if size is None:
        size = x.shape[-1] if x.dim() else 1
    return torch.ops.rotpass.hadamard(x, size, transpose, table, seed)
