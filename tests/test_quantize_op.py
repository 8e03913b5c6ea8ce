"""``rotpass::hadamard_quantize``: rotation and dynamic quantization as one operator."""

import models
import pytest
import torch
from scipy.linalg import hadamard

import rotpass
from rotpass.lower.portable import to_portable

QUANTIZE = torch.ops.rotpass.hadamard_quantize
FP8 = torch.float8_e4m3fn


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(*shape) + 0.3
    x[..., :: max(shape[-1] // 5, 1)] *= 1000
    return x.to(dtype)


def back(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    repeat = q.shape[-1] // scale.shape[-1]
    values = q.double() - (zero.double().repeat_interleave(repeat, -1) if zero.numel() else 0)
    return values * scale.double().repeat_interleave(repeat, -1)


@pytest.mark.parametrize("x_dtype", (torch.float64, torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("asymmetric", (False, True))
@pytest.mark.parametrize("group", (0, 32, 128))
def test_int8(group: int, asymmetric: bool, x_dtype: torch.dtype) -> None:
    x = rows(2, 5, 128, dtype=x_dtype)
    q, scale, zero = QUANTIZE(x, 128, torch.int8, group, asymmetric)
    exact = x.double() @ torch.from_numpy(hadamard(128)).double() / 128**0.5
    assert q.dtype == torch.int8 and scale.dtype == torch.float32 and zero.dtype == torch.int32
    assert q.shape == x.shape and scale.shape == (2, 5, 128 // group if group else 1)
    assert zero.shape == (scale.shape if asymmetric else (0,))
    grouped = exact.unflatten(-1, (-1, group or 128))
    span = (grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)) / 255
    torch.testing.assert_close(scale.double(), span if asymmetric else grouped.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    step = scale.double().repeat_interleave(128 // scale.shape[-1], -1)
    assert ((back(q, scale, zero) - exact).abs() / step).max() < (1.01 if asymmetric else 0.501)
    assert q.min() >= -128 and (q.double().abs().amax() == 127 or asymmetric)


@pytest.mark.parametrize("size", (96, 128, 1536))
def test_fp8(size: int) -> None:
    x = rows(7, size)
    q, scale, zero = QUANTIZE(x, size, FP8)
    exact = x.double() @ models.rotation_matrix(size, size).T
    assert q.dtype == FP8 and zero.numel() == 0
    torch.testing.assert_close(scale.double(), exact.abs().amax(-1, keepdim=True) / 448, rtol=1e-5, atol=0)
    error = (back(q.float(), scale, zero) - exact).abs()
    assert (error <= exact.abs() / 16 * 1.001 + scale.double() * 2**-10 * 1.001).all()


def test_blocks_signs_and_the_transpose() -> None:
    x = rows(3, 256)
    for how in ({"seed": 5}, {"seed": 5, "transpose": True}, {"transpose": True}, {"table": "quarot"}):
        y = torch.ops.rotpass.hadamard(
            x.double(), 64, how.get("transpose", False), how.get("table", "default"), how.get("seed")
        )
        q, scale, zero = QUANTIZE(x, 64, torch.int8, **how)
        assert (back(q, scale, zero) - y).abs().max() < 0.501 * scale.max()


@pytest.mark.parametrize("dtype", (torch.int8, FP8), ids=str)
def test_zero_and_constant_rows(dtype: torch.dtype) -> None:
    q, scale, zero = QUANTIZE(torch.zeros(2, 64), 64, dtype)
    assert back(q.float(), scale, zero).abs().max() == 0 and (scale > 0).all()
    q, scale, zero = QUANTIZE(torch.ones(2, 64), 64, dtype)
    torch.testing.assert_close(back(q.float(), scale, zero)[:, 0], torch.full((2,), 8.0, dtype=torch.float64))
    assert QUANTIZE(torch.empty(0, 64), 64, dtype)[0].shape == (0, 64)


@pytest.mark.parametrize(
    "arguments, error, message",
    (
        ((64, torch.int16), TypeError, "gives int8 or float8_e4m3fn, not torch.int16"),
        ((64, FP8, 0, True), ValueError, "only int8 has a zero point"),
        ((64, torch.int8, -1), ValueError, "group -1 is negative"),
        ((64, torch.int8, 48), ValueError, "group 48 does not divide"),
        ((48, torch.int8), ValueError, "size 48 does not divide"),
    ),
)
def test_bad_arguments(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QUANTIZE(torch.randn(2, 128), *arguments)


@pytest.mark.parametrize("how", ({}, {"group": 32}, {"asymmetric": True}))
def test_opcheck(how: dict) -> None:
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(QUANTIZE, (rows(3, 128), 128, torch.int8), how, test_utils=utils)


@pytest.mark.parametrize("asymmetric", (False, True))
@pytest.mark.parametrize("group", (0, 64))
@torch.no_grad()
def test_inductor_and_portable(group: int, asymmetric: bool) -> None:
    def function(x):
        return QUANTIZE(x * 2, 128, torch.int8, group, asymmetric, seed=3)

    x, expected = rows(4, 6, 128), function(rows(4, 6, 128))
    torch.compiler.reset()
    compiled = torch.compile(function, backend=rotpass.backend(), fullgraph=True)(x)
    graph = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(x)
    portable = to_portable(graph)
    assert not any("rotpass" in str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    for actual in (compiled, portable(x)):
        torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=0)
        assert (actual[0].int() - expected[0].int()).abs().max() <= 1  # where two ways to add round a tie apart
        assert (actual[2] - expected[2]).abs().max() <= 1 if asymmetric else actual[2].numel() == 0
