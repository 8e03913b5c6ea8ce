"""Quantizers in plain aten: at once with their inverse, to measure whether rotation helps, and into int8 or fp8 rows."""

import re

import torch
from torch import Tensor

_KINDS = re.compile(r"int(?P<bits>[8432])(?P<asymmetric>_asymmetric)?|fp8")
_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0


def check_kind(kind: str) -> None:
    if _KINDS.fullmatch(kind) is None:
        raise ValueError(
            f"unknown quantization {kind!r}: choose int8, int4, int3, int2, one of these with _asymmetric, or fp8"
        )


def _step(span: Tensor, steps: float) -> Tensor:
    """span / steps, or 1 where that is zero, so that a constant group comes out as it is."""
    scale = span / steps
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize_dequantize(x: Tensor, kind: str, group: int = 0) -> Tensor:
    r"""``x`` as it would come back from a quantizer with one scale per group along the last axis.

    ========================  ======================================================  ==================================
    kind                      scale                                                   levels
    ========================  ======================================================  ==================================
    ``int{b}_asymmetric``     :math:`(\max - \min) / (2^b - 1)`                       0 to :math:`2^b - 1`, from min up
    ``int{b}``                :math:`\mathrm{amax} / (2^{b-1} - 1)`                   :math:`\pm (2^{b-1} - 1)`
    ``fp8``                   :math:`\mathrm{amax} / 448`                             float8_e4m3fn
    ========================  ======================================================  ==================================

    Args:
        x: float64, float32, float16 or bfloat16; computed in float32 or better.
        kind: as above, b one of 8, 4, 3, 2.
        group: elements that share a scale; 0, the whole axis.

    Returns:
        A tensor of the shape and dtype of ``x``.
    """
    if x.numel() == 0:
        return x.clone()
    match = _KINDS.fullmatch(kind)
    exact = x if x.dtype == torch.float64 else x.float()
    grouped = exact.unflatten(-1, (-1, group)) if group else exact
    if kind == "fp8":
        scale = _step(grouped.abs().amax(-1, keepdim=True), _FP8_MAX)
        result = (grouped / scale).clamp(-_FP8_MAX, _FP8_MAX).to(_FP8).to(grouped.dtype) * scale
    elif match["asymmetric"]:
        levels = 2 ** int(match["bits"]) - 1
        low, high = grouped.aminmax(dim=-1, keepdim=True)
        scale = _step(high - low, levels)
        result = ((grouped - low) / scale).round().clamp(0, levels) * scale + low
    else:
        top = 2 ** (int(match["bits"]) - 1) - 1
        scale = _step(grouped.abs().amax(-1, keepdim=True), top)
        result = (grouped / scale).round().clamp(-top, top) * scale
    return (result.flatten(-2) if group else result).to(x.dtype)


EPS = 1e-12  # the least scale, so that a row of zeros comes out as zeros


def quantize_rows(
    y: Tensor, dtype: torch.dtype, group: int = 0, asymmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Dynamic quantization along the last axis.

    Symmetric: :math:`s = \mathrm{amax} / 127` (448 for float8_e4m3fn), :math:`q = \mathrm{round}(y / s)`. Asymmetric,
    int8 only, with zero among the values so that it is exact: :math:`s = (\max - \min) / 255`,
    :math:`z = -128 - \mathrm{round}(\min / s)`, :math:`q = \mathrm{round}(y / s) + z`. Ties go to even.

    Args:
        y: floating point; computed in float32 or better.
        dtype: torch.int8 or torch.float8_e4m3fn.
        group: elements that share a scale; 0, the whole axis.
        asymmetric: whether there is a zero point.

    Returns:
        q of the shape of ``y``; the scales, float32, one in place of each group along the last axis; the zero points,
        int32, of that shape, or empty where symmetric. :math:`y \approx (q - z) s`.
    """
    exact = y if y.dtype == torch.float64 else y.float()
    grouped = exact.unflatten(-1, (-1, group or y.shape[-1]))
    zero = None
    if asymmetric:
        low, high = grouped.amin(-1, keepdim=True).clamp(max=0), grouped.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=EPS)
        zero = (-128 - (low / scale).round()).clamp(-128, 127)
        q = ((grouped / scale).round() + zero).clamp(-128, 127)
    else:
        top = _FP8_MAX if dtype == _FP8 else 127.0
        scale = (grouped.abs().amax(-1, keepdim=True) / top).clamp(min=EPS)
        q = (grouped / scale).clamp(-top, top)
        q = q if dtype == _FP8 else q.round()
    zeros = y.new_empty(0, dtype=torch.int32) if zero is None else zero.squeeze(-1).to(torch.int32)
    return q.flatten(-2).to(dtype), scale.squeeze(-1).float(), zeros
