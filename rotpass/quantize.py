"""Quantize and dequantize at once, in plain aten: what a quantizer would lose, for measuring whether rotation helps."""

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
