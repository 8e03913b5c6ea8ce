"""The operators, registered with torch.library when this module is imported.

``rotpass::hadamard`` carries no tensors: its matrix and signs follow from its arguments, so that no constant has to be
lifted through Dynamo or an export's signature. Importing this module builds nothing.
"""

import torch
from torch import Tensor

from rotpass import _torch
from rotpass.hadamard.apply import apply_any, apply_cpu
from rotpass.hadamard.tables import check_table, factors
from rotpass.quantize import check_kind, quantize_dequantize, quantize_rows

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_library = torch.library.Library("rotpass", "DEF")
_library.define(
    'hadamard(Tensor x, int size, bool transpose=False, str table="default", int? seed=None) -> Tensor',
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "hadamard_quantize(Tensor x, int size, ScalarType dtype, int group=0, bool asymmetric=False, bool transpose=False, "
    'str table="default", int? seed=None) -> (Tensor, Tensor, Tensor)',
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "fake_quantize(Tensor x, str kind, int group=0) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _check_input(name: str, x: Tensor, block: int, block_name: str) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(f"rotpass::{name} takes float64, float32, float16 or bfloat16, not {x.dtype}")
    if x.dim() == 0:
        raise ValueError(f"rotpass::{name} works along the last axis, and this tensor has none")
    if block < 1 or x.shape[-1] % block != 0:
        raise ValueError(f"rotpass::{name}: {block_name} {block} does not divide the last axis of {x.shape[-1]}")


# ---------------------------------------------------------------------------------------------------------- hadamard


def _check_hadamard(x: Tensor, size: int, table: str) -> None:
    check_table(table)
    _check_input("hadamard", x, size, "size")
    factors(size, table=table)


def _hadamard_cpu(x: Tensor, size: int, transpose: bool = False, table: str = "default", seed: int | None = None):
    _check_hadamard(x, size, table)
    return apply_cpu(x, size, transpose, table, seed)


def _hadamard_any(x: Tensor, size: int, transpose: bool = False, table: str = "default", seed: int | None = None):
    _check_hadamard(x, size, table)
    return apply_any(x, size, transpose, table, seed)


def _hadamard_fake(x: Tensor, size: int, transpose: bool = False, table: str = "default", seed: int | None = None):
    _check_hadamard(x, size, table)
    return torch.empty_like(x)


class _Hadamard(torch.autograd.Function):
    """Linear: its own derivative forward, and its transpose backward (R is orthonormal, the signs their own inverse)."""

    @staticmethod
    def forward(x: Tensor, size: int, transpose: bool, table: str, seed: int | None) -> Tensor:
        with _torch.below_autograd():
            return torch.ops.rotpass.hadamard(x, size, transpose, table, seed)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, *ctx.how = inputs

    @staticmethod
    def backward(ctx, grad: Tensor):
        size, transpose, table, seed = ctx.how
        return torch.ops.rotpass.hadamard(grad, size, not transpose, table, seed), None, None, None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_: None) -> Tensor:
        return torch.ops.rotpass.hadamard(tangent, *ctx.how)


def _hadamard_autograd(x: Tensor, size: int, transpose: bool = False, table: str = "default", seed: int | None = None):
    return _torch.apply_at_autograd_key(_Hadamard, x, size, transpose, table, seed)


def _hadamard_vmap(info, in_dims, x: Tensor, size, transpose=False, table="default", seed=None):
    x = x.movedim(in_dims[0], 0)
    if x.dim() == 1:
        raise ValueError("rotpass::hadamard works along the last axis, and these tensors have none but the batch's")
    return torch.ops.rotpass.hadamard(x, size, transpose, table, seed), 0


_library.impl("hadamard", _hadamard_any, "CompositeExplicitAutograd")
_library.impl("hadamard", _hadamard_cpu, "CPU")
torch.library.register_fake("rotpass::hadamard", _hadamard_fake, lib=_library)
_library.impl("hadamard", _hadamard_autograd, "Autograd")
torch.library.register_vmap("rotpass::hadamard", _hadamard_vmap, lib=_library)

# ------------------------------------------------------------------------------------------------- hadamard_quantize


def _check_hadamard_quantize(
    x: Tensor, size: int, dtype: torch.dtype, group: int, asymmetric: bool, table: str
) -> None:
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        raise TypeError(f"rotpass::hadamard_quantize gives int8 or float8_e4m3fn, not {dtype}")
    if asymmetric and dtype != torch.int8:
        raise ValueError("rotpass::hadamard_quantize: only int8 has a zero point (asymmetric=True)")
    if group < 0:
        raise ValueError(f"rotpass::hadamard_quantize: group {group} is negative; 0 means the whole axis")
    check_table(table)
    _check_input("hadamard_quantize", x, size, "size")
    _check_input("hadamard_quantize", x, group or 1, "group")
    factors(size, table=table)


def _hadamard_quantize(
    x: Tensor,
    size: int,
    dtype: torch.dtype,
    group: int = 0,
    asymmetric: bool = False,
    transpose: bool = False,
    table: str = "default",
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_hadamard_quantize(x, size, dtype, group, asymmetric, table)
    exact = x if x.dtype == torch.float64 else x.float()  # the rotated row is not rounded before it is quantized
    y = torch.ops.rotpass.hadamard(exact, size, transpose, table, seed)
    return quantize_rows(y.contiguous(), dtype, group, asymmetric)


def _hadamard_quantize_fake(
    x: Tensor,
    size: int,
    dtype: torch.dtype,
    group: int = 0,
    asymmetric: bool = False,
    transpose: bool = False,
    table: str = "default",
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_hadamard_quantize(x, size, dtype, group, asymmetric, table)
    scales = (*x.shape[:-1], x.shape[-1] // group if group else 1)
    zeros = x.new_empty(scales if asymmetric else (0,), dtype=torch.int32)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(scales, dtype=torch.float32), zeros


_library.impl("hadamard_quantize", _hadamard_quantize, "CompositeExplicitAutograd")
torch.library.register_fake("rotpass::hadamard_quantize", _hadamard_quantize_fake, lib=_library)

# ----------------------------------------------------------------------------------------------------- fake_quantize


def _check_fake_quantize(x: Tensor, kind: str, group: int) -> None:
    check_kind(kind)
    if group < 0:
        raise ValueError(f"rotpass::fake_quantize: group {group} is negative; 0 means the whole axis")
    _check_input("fake_quantize", x, group or 1, "group")


def _fake_quantize(x: Tensor, kind: str, group: int = 0) -> Tensor:
    _check_fake_quantize(x, kind, group)
    return torch.empty_like(x).copy_(quantize_dequantize(x, kind, group))


def _fake_quantize_fake(x: Tensor, kind: str, group: int = 0) -> Tensor:
    _check_fake_quantize(x, kind, group)
    return torch.empty_like(x)


class _FakeQuantize(torch.autograd.Function):
    """Straight through, in both directions."""

    @staticmethod
    def forward(x: Tensor, kind: str, group: int) -> Tensor:
        with _torch.below_autograd():
            return torch.ops.rotpass.fake_quantize(x, kind, group)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()


def _fake_quantize_autograd(x: Tensor, kind: str, group: int = 0):
    return _torch.apply_at_autograd_key(_FakeQuantize, x, kind, group)


def _fake_quantize_vmap(info, in_dims, x: Tensor, kind, group=0):
    x = x.movedim(in_dims[0], 0)
    if x.dim() == 1:
        raise ValueError(
            "rotpass::fake_quantize works along the last axis, and these tensors have none but the batch's"
        )
    return torch.ops.rotpass.fake_quantize(x, kind, group), 0


_library.impl("fake_quantize", _fake_quantize, "CompositeExplicitAutograd")
torch.library.register_fake("rotpass::fake_quantize", _fake_quantize_fake, lib=_library)
_library.impl("fake_quantize", _fake_quantize_autograd, "Autograd")
torch.library.register_vmap("rotpass::fake_quantize", _fake_quantize_vmap, lib=_library)
