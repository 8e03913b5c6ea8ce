"""The operators against a dense float64 matmul, in every way that PyTorch may call them."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import rotpass.hadamard.stages as stages
import rotpass.hadamard.tables as tables
import rotpass.ops
from rotpass.hadamard import factor_matrices, hadamard_matrix, hadamard_transform, signs

hadamard = torch.ops.rotpass.hadamard
fake_quantize = torch.ops.rotpass.fake_quantize
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KINDS = [f"int{b}{a}" for b in (8, 4, 3, 2) for a in ("", "_asymmetric")] + ["fp8"]


def dense(x, size, transpose=False, table="default", seed=None):
    """By the definition: y = (x * s) R^T or x = (y R) * s, in float64 and one matrix."""
    r = hadamard_matrix(size, table=table) / size**0.5
    s = 1.0 if seed is None else signs(size, seed)
    blocks = x.double().unflatten(-1, (-1, size))
    y = (blocks @ r) * s if transpose else (blocks * s) @ r.T
    return y.flatten(-2)


def clear_caches():
    tables.base_matrix.cache_clear()
    stages.stage_matrices.cache_clear()
    stages.sign_vector.cache_clear()


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 8, 12, 32, 64, 80, 96, 128, 160, 192, 512, 1536])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_against_a_dense_matmul(dtype, size, transpose, seed):
    x = torch.randn(3, 5, size * 2).to(dtype)
    y = hadamard(x, size, transpose, "default", seed)
    expected = dense(x, size, transpose, "default", seed)
    assert y.dtype == dtype and y.shape == x.shape
    # Accumulated in float32 or better: the error is the result's own rounding, and in float32 a few ulps of the norm.
    bound = {torch.float64: 1e-14, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
    assert float((y.double() - expected).abs().max()) <= bound * float(expected.abs().max())


@pytest.mark.parametrize("table", ["quarot", "compressed-tensors"])
@pytest.mark.parametrize("size", [32, 40, 96, 156, 208, 896])
def test_other_tables(table, size):
    x = torch.randn(4, size, dtype=torch.float64)
    for transpose in (False, True):
        torch.testing.assert_close(hadamard(x, size, transpose, table), dense(x, size, transpose, table))


def test_the_inverse_uses_the_transpose_where_h_is_not_symmetric():
    h = hadamard_matrix(24, table="compressed-tensors")
    assert not torch.equal(h, h.T)
    x = torch.randn(2, 24, dtype=torch.float64)
    y = hadamard(x, 24, False, "compressed-tensors")
    torch.testing.assert_close(hadamard(y, 24, True, "compressed-tensors"), x)
    assert not torch.allclose(hadamard(y, 24, False, "compressed-tensors"), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outliers_and_an_offset(dtype):
    x = torch.randn(16, 1024) + 3
    x[:, 77] *= 1000
    x = x.to(dtype)
    y, expected = hadamard(x, 1024), dense(x, 1024)
    eps = torch.finfo(dtype).eps
    norm = float(x.double().norm(dim=-1).max())
    bound = eps * norm if dtype == torch.float32 else eps * float(expected.abs().max())
    assert float((y.double() - expected).abs().max()) < bound
    back = hadamard(y, 1024, True)
    assert float((back.double() - x.double()).abs().max()) < 2 * eps * norm


def test_float16_does_not_overflow_between_stages():
    x = torch.full((2, 4096), 900.0, dtype=torch.float16)  # its sum is far above 65504, its rotation is not
    y = hadamard(x, 4096)
    assert bool(y.isfinite().all()) and float(y[0, 0]) == pytest.approx(900 * 64)


@pytest.mark.parametrize("size", [8, 32, 96, 512])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_stays_in_its_block(size, bad):
    x = torch.randn(40, size * 3)
    x[7, size + 2] = bad
    y = hadamard(x, size)
    clean = x.clone()
    clean[7, size : 2 * size] = 0
    kept = torch.ones(40, size * 3, dtype=torch.bool)
    kept[7, size : 2 * size] = False
    assert not bool(y[7, size : 2 * size].isfinite().any())
    torch.testing.assert_close(y[kept], hadamard(clean, size)[kept])


def test_more_rows_than_a_chunk():
    x = torch.randn(12000, 192)
    y = hadamard(x, 64, False, "default", 1)
    torch.testing.assert_close(y.double(), dense(x, 64, False, "default", 1), atol=1e-5, rtol=0)
    z = hadamard(x.bfloat16(), 96, True, "default", 1)
    assert float((z.double() - dense(x.bfloat16(), 96, True, "default", 1)).abs().max()) < 0.02


def test_one_row_comes_out_the_same_in_any_batch():
    x = torch.randn(300, 3072)
    torch.testing.assert_close(hadamard(x, 3072)[17], hadamard(x[17], 3072), atol=2e-6, rtol=0)


# ------------------------------------------------------------------------------------------------------------ layout

LAYOUTS = {
    "transposed heads": lambda: torch.randn(2, 7, 3, 64).transpose(1, 2),
    "last axis outermost": lambda: torch.randn(64, 5, 3).permute(1, 2, 0),
    "last axis in the middle": lambda: torch.randn(5, 64, 3).transpose(1, 2),
    "every second": lambda: torch.randn(4, 128)[:, ::2],
    "rows with gaps": lambda: torch.randn(4, 6, 200)[:, ::2, 8:72],
    "expanded rows": lambda: torch.randn(1, 64).expand(6, 64),
    "expanded last axis": lambda: torch.randn(6, 1).expand(6, 64),
    "channels last": lambda: torch.randn(2, 3, 4, 64).to(memory_format=torch.channels_last),
    "size-1 axes": lambda: torch.randn(1, 5, 1, 64).transpose(1, 2),
    "no rows": lambda: torch.randn(0, 64),
    "no rows inside": lambda: torch.randn(3, 0, 64).transpose(0, 1),
    "one axis": lambda: torch.randn(64),
    "negated view": lambda: torch._neg_view(torch.randn(3, 64)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["eager", "fake", "autograd", "any device"])
def test_strides_are_those_of_empty_like(layout, mode):
    x = LAYOUTS[layout]()
    if mode in ("fake", "any device"):
        x = x.resolve_neg()  # as the dispatcher does before it calls a kernel
    wanted = torch.empty_like(x).stride()
    for call in (lambda t: hadamard(t, 32, False, "default", 5), lambda t: fake_quantize(t, "int4", 32)):
        if mode == "fake":
            with FakeTensorMode() as mode_:
                fake = mode_.from_tensor(x)
                y, wanted = call(fake), torch.empty_like(fake).stride()  # torch's own differs where there are no rows
        elif mode == "autograd":
            y = call(x.detach().requires_grad_())
        elif mode == "any device":
            from rotpass.hadamard.apply import apply_any

            y = apply_any(x, 32, False, "default", 5)
        else:
            y = call(x)
        assert y.shape == x.shape and y.stride() == wanted
    if mode in ("eager", "any device") and x.numel():
        y = hadamard(x, 32, False, "default", 5) if mode == "eager" else y
        torch.testing.assert_close(y.double(), dense(x, 32, False, "default", 5), atol=1e-5, rtol=0)


def test_no_output_aliases_its_input():
    x = torch.randn(4, 1)
    kept = x.clone()
    hadamard(x, 1).zero_(), fake_quantize(x, "int8").zero_()
    torch.testing.assert_close(x, kept)


# ------------------------------------------------------------------------------------------------------ fake_quantize


def quantized_by_hand(row, kind):
    """One group, element by element, in Python's floats."""
    if kind == "fp8":
        scale = max(map(abs, row)) / 448 or 1.0
        return [
            float(torch.tensor(v / scale, dtype=torch.float64).to(torch.float8_e4m3fn).double()) * scale for v in row
        ]
    bits = int(kind[3])
    if kind.endswith("_asymmetric"):
        low, top = min(row), 2**bits - 1
        scale = (max(row) - low) / top or 1.0
        return [min(max(round((v - low) / scale), 0), top) * scale + low for v in row]
    top = 2 ** (bits - 1) - 1
    scale = max(map(abs, row)) / top or 1.0
    return [min(max(round(v / scale), -top), top) * scale for v in row]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [0, 8])
def test_fake_quantize_by_hand(kind, group):
    x = torch.randn(4, 32, dtype=torch.float64)
    x[1] = 0
    x[2] = 5
    y = fake_quantize(x, kind, group)
    for row, out in zip(x.view(-1, group or 32), y.view(-1, group or 32)):
        torch.testing.assert_close(out, torch.tensor(quantized_by_hand(row.tolist(), kind), dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_quantize_dtypes(kind, dtype):
    x = (torch.randn(64, 128) * 10).to(dtype)
    y = fake_quantize(x, kind)
    assert y.dtype == dtype and bool(y.isfinite().all())
    exact = fake_quantize(x.double() if dtype == torch.float64 else x.float(), kind)
    torch.testing.assert_close(y, exact.to(dtype))


@given(st.sampled_from(KINDS), st.integers(1, 40), st.floats(-30, 30))
@settings(max_examples=60, deadline=None)
def test_fake_quantize_error_is_half_a_step(kind, n, offset):
    x = torch.randn(3, n, dtype=torch.float64) + offset
    y = fake_quantize(x, kind)
    if kind == "fp8":
        assert bool(((y - x).abs() <= x.abs() / 16 + x.abs().amax(-1, keepdim=True) * 2**-18).all())
        return
    bits = int(kind[3])
    span = x.amax(-1) - x.amin(-1) if "asymmetric" in kind else x.abs().amax(-1)
    step = span / (2**bits - 1 if "asymmetric" in kind else 2 ** (bits - 1) - 1)
    assert bool(((y - x).abs().amax(-1) <= step / 2 + 1e-12).all())


def test_straight_through():
    x = torch.randn(4, 32, requires_grad=True)
    w = torch.randn(4, 32)
    (fake_quantize(x, "int3", 16) * w).sum().backward()
    assert torch.equal(x.grad, w)


# ----------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("table, size, seed", [("default", 12, None), ("compressed-tensors", 24, 2)])
@pytest.mark.parametrize("transpose", [False, True])
def test_gradients(table, size, seed, transpose):
    x = torch.randn(2, size * 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: hadamard(t, size, transpose, table, seed), x)
    assert torch.autograd.gradgradcheck(lambda t: hadamard(t, size, transpose, table, seed) ** 2, x)
    y = torch.randn(2, size * 2, dtype=torch.float64)
    (grad,) = torch.autograd.grad(hadamard(x, size, transpose, table, seed), x, y)
    torch.testing.assert_close(grad, dense(y, size, not transpose, table, seed))


def test_gradient_of_a_transposed_input_keeps_its_strides():
    x = torch.randn(2, 5, 3, 64).transpose(1, 2).requires_grad_()
    (grad,) = torch.autograd.grad(hadamard(x, 64), x, torch.randn(2, 5, 3, 64).transpose(1, 2))
    assert grad.stride() == x.stride()


def test_vmap():
    x = torch.randn(6, 4, 32, dtype=torch.float64)
    for dim in (0, 1):
        torch.testing.assert_close(torch.vmap(lambda t: hadamard(t, 16), dim, dim)(x), dense(x, 16))
    moved = x.movedim(0, -1)
    torch.testing.assert_close(
        torch.vmap(lambda t: hadamard(t, 16, False, "default", 1), -1)(moved), dense(x, 16, seed=1)
    )
    torch.testing.assert_close(torch.vmap(torch.vmap(lambda t: hadamard(t, 16)))(x), dense(x, 16))
    torch.testing.assert_close(torch.vmap(lambda t: fake_quantize(t, "int4"))(x), fake_quantize(x, "int4"))
    batched = torch.autograd.functional.jacobian(lambda t: hadamard(t, 16), x[0, 0, :16], vectorize=True)
    torch.testing.assert_close(batched, hadamard_matrix(16) / 4)  # vmap over the backward
    with pytest.raises(ValueError, match="none but the batch's"):
        torch.vmap(lambda t: hadamard(t, 1))(torch.randn(4))


# -------------------------------------------------------------------------------------------------- compile and export


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [None, 5])
def test_opcheck(dtype, seed):
    for x in (torch.randn(3, 2, 64).transpose(0, 1), torch.randn(2, 64, requires_grad=True), torch.randn(0, 64)):
        x = x.detach().to(dtype).requires_grad_(x.requires_grad)
        torch.library.opcheck(hadamard.default, (x, 32, True, "default", seed))


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_fake_quantize(kind):
    torch.library.opcheck(fake_quantize.default, (torch.randn(3, 64, requires_grad=True), kind, 32))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_dynamic_rows(backend):
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def model(x):
        return hadamard_transform(torch.nn.functional.silu(x), 48, seed=2) * 2 + fake_quantize(x, "int8_asymmetric")

    compiled = torch.compile(model, backend=frames, fullgraph=True, dynamic=True)
    for rows in (3, 8, 17):
        x = torch.randn(rows, 5, 96, requires_grad=True)
        y = torch.randn(rows, 5, 96)
        torch.testing.assert_close(compiled(x), model(x))
        (a,), (b,) = torch.autograd.grad(compiled(x), x, y), torch.autograd.grad(model(x), x, y)
        torch.testing.assert_close(a, b)
    assert frames.frame_count == 1


def test_compile_with_autocast():
    torch._dynamo.reset()

    def model(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return hadamard(torch.nn.functional.linear(x, w), 64), hadamard(x, 64)

    x, w = torch.randn(4, 64), torch.randn(64, 64)
    for f in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        low, high = f(x, w)
        assert low.dtype == torch.bfloat16 and high.dtype == torch.float32
        torch.testing.assert_close(high.double(), dense(x, 64), atol=1e-5, rtol=0)  # not run in bfloat16 inside


class Rotate(torch.nn.Module):
    def forward(self, x):
        return fake_quantize(hadamard(x.transpose(1, 2), 32, False, "default", 1), "int4_asymmetric", 32)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, tmp_path):
    dim = torch.export.Dim.DYNAMIC
    program = torch.export.export(
        Rotate(), (torch.randn(3, 4, 5, 64),), dynamic_shapes=({0: dim, 2: dim},), strict=strict
    )
    torch.export.save(program, tmp_path / "p.pt2")
    loaded = torch.export.load(tmp_path / "p.pt2")
    decomposed = program.run_decompositions({})
    x = torch.randn(2, 4, 9, 64)
    for p in (program, loaded, decomposed):
        y = p.module()(x)
        torch.testing.assert_close(y, Rotate()(x))
        assert y.stride() == Rotate()(x).stride()
    assert "rotpass.hadamard" in loaded.graph_module.code


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("mode", ["eager", "fake", "meta"])
def test_errors_are_one_sentence(mode):
    def make(*shape, dtype=torch.float32):
        x = torch.zeros(shape, dtype=dtype)
        return {"eager": x, "fake": FakeTensorMode().from_tensor(x), "meta": x.to("meta")}[mode]

    cases = [
        (TypeError, "not torch.int64", lambda: hadamard(make(2, 8, dtype=torch.int64), 8)),
        (TypeError, "not torch.complex64", lambda: hadamard(make(2, 8, dtype=torch.complex64), 8)),
        (ValueError, "size 8 does not divide the last axis of 12", lambda: hadamard(make(2, 12), 8)),
        (ValueError, "size 0 does not divide", lambda: hadamard(make(2, 12), 0)),
        (ValueError, "size -4 does not divide", lambda: hadamard(make(2, 12), -4)),
        (ValueError, "order 268", lambda: hadamard(make(2, 268), 268)),
        (ValueError, "unknown Hadamard table 'x'", lambda: hadamard(make(2, 12), 4, False, "x")),
        (ValueError, "this tensor has none", lambda: hadamard(make(), 1)),
        (ValueError, "unknown quantization 'int5'", lambda: fake_quantize(make(2, 8), "int5")),
        (ValueError, "unknown quantization 'fp8_asymmetric'", lambda: fake_quantize(make(2, 8), "fp8_asymmetric")),
        (ValueError, "group 3 does not divide", lambda: fake_quantize(make(2, 8), "int8", 3)),
        (ValueError, "group -1 is negative", lambda: fake_quantize(make(2, 8), "int8", -1)),
        (TypeError, "not torch.int32", lambda: fake_quantize(make(2, 8, dtype=torch.int32), "int8")),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words) as error:
            call()
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="this tensor has none"):
        hadamard_transform(make())


# ------------------------------------------------------------------------------------------------------ first-use safety


def first_uses():
    x = torch.randn(3, 96)
    return [
        ("fake", lambda: _in_fake(x)),
        ("inference", lambda: _in_inference(x)),
        ("default device", lambda: _under_device(x)),
        ("compile", lambda: _compiled(x)),
        ("vmap", lambda: torch.vmap(lambda t: hadamard(t, 96, False, "default", 9))(x)),
        ("make_fx", lambda: torch.fx.experimental.proxy_tensor.make_fx(lambda t: hadamard(t, 96, seed=9))(x)),
        ("functionalize", lambda: torch.func.functionalize(lambda t: hadamard(t, 96, seed=9))(x)),
        ("autocast", lambda: _autocast(x)),
    ]


def _in_fake(x):
    with FakeTensorMode() as mode:
        hadamard(mode.from_tensor(x), 96, False, "default", 9)
        hadamard_matrix(96), signs(96, 9), factor_matrices(96)


def _in_inference(x):
    with torch.inference_mode():
        hadamard(x, 96, False, "default", 9)
        hadamard_matrix(96), signs(96, 9), factor_matrices(96)


def _under_device(x):
    with torch.device("meta"):
        hadamard(x, 96, False, "default", 9)
        hadamard_matrix(96), signs(96, 9)


def _compiled(x):
    torch._dynamo.reset()
    torch.compile(lambda t: hadamard(t, 96, seed=9), backend="aot_eager", fullgraph=True)(x)


def _autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        hadamard(x, 96, False, "default", 9)


@pytest.mark.parametrize("where", range(8), ids=[name for name, _ in first_uses()])
def test_first_use_anywhere_leaves_plain_constants(where):
    clear_caches()
    first_uses()[where][1]()
    at = {"dtype": torch.float32, "device": torch.device("cpu")}
    kept = [*stages.stage_matrices(96, **at), stages.sign_vector(96, 9, **at), *factor_matrices(96)]
    kept += [hadamard_matrix(96), signs(96, 9)]
    for constant in kept:
        assert type(constant) is torch.Tensor and constant.device.type == "cpu"
        assert not constant.is_inference() and not constant.requires_grad
    x = torch.randn(3, 96, requires_grad=True)
    y = hadamard(x, 96, False, "default", 9)
    torch.testing.assert_close(y.double(), dense(x, 96, False, "default", 9), atol=1e-5, rtol=0)
    y.sum().backward()


def test_many_threads():
    clear_caches()
    inputs = [torch.randn(7, 96 * (1 + i % 3)) for i in range(12)]
    results = [None] * 12

    def work(i):
        for _ in range(5):
            results[i] = hadamard(inputs[i], 96, False, "default", i % 2)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    [t.start() for t in threads], [t.join() for t in threads]
    for i, (x, y) in enumerate(zip(inputs, results)):
        torch.testing.assert_close(y.double(), dense(x, 96, False, "default", i % 2), atol=1e-5, rtol=0)


def test_inference_mode_and_grad_modes_mix():
    with torch.inference_mode():
        x = torch.randn(2, 64)
        y = hadamard(x, 64)
        assert y.is_inference()
    torch.testing.assert_close(hadamard(x.clone(), 64), y.clone())


# --- torch.func and forward-mode derivatives

TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "dual numbers": lambda f, x: _with_duals(f, x),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).pow(3).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda y: f(y).pow(3).sum()))(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.vmap(f)(y).pow(3).sum())(x),
}

# Levels within levels: each of them pairs two of these.
DERIVATIVES = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "grad": lambda f, x: (torch.func.grad(lambda y: f(y).sum())(x) * x.sin()).sum(),
    "autograd": lambda f, x: (
        torch.autograd.grad(f(x.requires_grad_()).sum(), x, create_graph=True)[0] * x.sin()
    ).sum(),
}


def _with_duals(f, x):
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        return forward.unpack_dual(f(forward.make_dual(x, x.cos()))).tangent


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("transpose", [False, True])
def test_torch_func(name: str, transpose: bool) -> None:
    x, r = torch.randn(3, 12, dtype=torch.float64), rotpass.hadamard_matrix(12) / 12**0.5
    r = r.T if transpose else r
    found = TRANSFORMS[name](lambda y: torch.ops.rotpass.hadamard(y, 12, transpose), x)
    torch.testing.assert_close(found, TRANSFORMS[name](lambda y: y @ r.T, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outer", DERIVATIVES)
@pytest.mark.parametrize("inner", ["jvp", "grad"])
def test_torch_func_twice(outer: str, inner: str) -> None:
    x, r = torch.randn(3, 12, dtype=torch.float64), rotpass.hadamard_matrix(12) / 12**0.5

    def second(rotate):
        return DERIVATIVES[outer](lambda y: DERIVATIVES[inner](lambda z: rotate(z).pow(3).sum(), y), x.clone())

    dense = second(lambda y: y @ r.T)
    assert dense.abs() > 0.1
    torch.testing.assert_close(second(lambda y: torch.ops.rotpass.hadamard(y, 12)), dense, rtol=1e-10, atol=1e-10)


def test_torch_func_under_no_grad() -> None:
    """What is outside stays untracked, what is inside is not."""
    x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        found = torch.func.grad(lambda y: torch.ops.rotpass.hadamard(y, 12).pow(2).sum())(x)
    assert not found.requires_grad
    torch.testing.assert_close(found, 2 * x.detach())


@pytest.mark.parametrize("name", ["jvp", "dual numbers", "jacrev", "jacfwd"])
def test_torch_func_straight_through(name: str) -> None:
    x = torch.randn(3, 12, dtype=torch.float64)
    found = TRANSFORMS[name](lambda y: torch.ops.rotpass.fake_quantize(y, "int4"), x)
    torch.testing.assert_close(found, TRANSFORMS[name](lambda y: y * 1, x))
