"""The doors and the operators on a CUDA device. Not for CI, which has none: run `pytest -m gpu` on a machine that does."""

import models
import pytest
import torch

import rotpass

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    return ((expected.double() - actual.double()).abs().max() / expected.double().abs().max()).item()


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 64, 80, 128, 172, 768, 1536, 4096, 14336])
def test_operator(size, dtype):
    torch.manual_seed(0)
    x = (torch.randn(3, 5, 2 * size, dtype=torch.float64, device="cuda") + 1).to(dtype)
    expected = x.double() @ models.rotation_matrix(size, 2 * size).cuda().T
    actual = torch.ops.rotpass.hadamard(x, size)
    assert actual.dtype == dtype and actual.device == x.device
    assert (
        error(expected, actual)
        < {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    )
    assert error(x, torch.ops.rotpass.hadamard(actual, size, True)) < 2e-2


@pytest.mark.parametrize("style", list(models.STYLES))
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_inductor(style, dtype):
    model, ids = models.make(style, dtype=dtype).cuda().eval(), models.tokens().cuda()
    exact = models.make(style).cuda().eval()
    backend = rotpass.backend(seed=list(models.STYLES).index(style))
    backend.clear()
    with torch.no_grad():
        expected, before, after = exact(ids), model(ids), torch.compile(model, backend=backend)(ids)
    assert backend.report.counts == {"r3": 2, "v": 2, "r4": 2}
    # Rounding in the dtype, as the model itself has it; rotation may double it.
    assert error(expected, after) < 2 * error(expected, before) + TOLERANCE[dtype] / 10


def test_gradients():
    model, ids = models.make("llama", dtype=torch.float32).cuda().train(), models.tokens().cuda()
    model(ids).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, backend=rotpass.backend(), fullgraph=True)(ids).square().mean().backward()
    for name, p in model.named_parameters():
        assert error(expected[name], p.grad) < 1e-4, name


def test_cuda_graphs_follow_the_weights():
    """Folded copies are static inputs: the graph is recorded once, and sees what is written into them."""
    model, ids = models.make("llama", dtype=torch.float32).cuda().eval(), models.tokens().cuda()
    compiled = torch.compile(model, backend=rotpass.backend(), mode="reduce-overhead")
    with torch.no_grad():
        for step in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            assert error(model(ids), compiled(ids).clone()) < TOLERANCE[torch.float32], step
            if step >= 2:
                for p in model.parameters():
                    p.mul_(1.01)


def test_static_cache():
    model = models.make("llama", dtype=torch.float32, cache="index_copy").cuda().eval()
    other = models.make("llama", dtype=torch.float32, cache="index_copy").cuda().eval()
    compiled = torch.compile(other, backend=rotpass.backend(cache="rotated"), dynamic=True)
    ids = models.tokens(12).cuda()
    with torch.no_grad():
        for start, stop in [(0, 6), (6, 7), (7, 8), (8, 12)]:
            positions = torch.arange(start, stop, device="cuda")
            assert error(model(ids[:, start:stop], positions), compiled(ids[:, start:stop], positions)) < 1e-4


def test_fold_and_program():
    model, ids = models.make("phi3", dtype=torch.float32).cuda().eval(), models.tokens().cuda()
    with torch.no_grad():
        expected = model(ids)
        program = torch.export.export(model, (ids,))
        assert error(expected, rotpass.RotationPass()(program).module()(ids)) < TOLERANCE[torch.float32]
        rotpass.fold_(model, (ids,))
        assert error(expected, model(ids)) < TOLERANCE[torch.float32]
        rotpass.unfold_(model)
        assert error(expected, model(ids)) < TOLERANCE[torch.float32]


# ------------------------------------------------------------------------------------------- the templates (lower/tiled.py)

SIZES = (
    16,
    64,
    80,
    96,
    112,
    128,
    192,
    256,
    512,
    1536,
    4096,
    4864,
    6912,
    8192,
    11008,
    13824,
    14336,
    18944,
    20480,
    28672,
)
QUANTIZE = torch.ops.rotpass.hadamard_quantize
# How much more a result may be off than the exact one rounded once. bfloat16 is rounded between its two products.
MORE = {torch.float16: 1.2, torch.bfloat16: 1.8}


def outliers(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(size)
    x = torch.randn(rows, size, device="cuda") + 0.3
    x[:, :: max(size // 9, 1)] *= 1000
    return x.to(dtype)


def dense(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    return x.double() @ (rotpass.hadamard_matrix(size).double().cuda() / size**0.5).T


@pytest.mark.parametrize("rows", (1, 37))
@pytest.mark.parametrize("dtype", list(MORE), ids=str)
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_template_is_as_exact_as_it_says(size, dtype, rows):
    x = outliers(rows, size, dtype)
    compiled = torch.compile(lambda x: rotpass.hadamard_transform(x, size), backend=rotpass.backend(), dynamic=False)
    actual, exact = compiled(x), dense(x)
    once = (exact.to(dtype).double() - exact).norm()
    assert (actual.double() - exact).norm() <= MORE[dtype] * once


@pytest.mark.parametrize("q", (torch.int8, torch.float8_e4m3fn), ids=str)
@pytest.mark.parametrize("size", (96, 128, 192, 4096, 11008, 14336))
@torch.no_grad()
def test_template_quantizes(size, q):
    x = outliers(37, size, torch.bfloat16)
    values, scale, _ = torch.compile(lambda x: QUANTIZE(x, size, q), backend=rotpass.backend(), dynamic=False)(x)
    exact = dense(x)
    torch.testing.assert_close(
        scale[:, 0].double(), exact.abs().amax(-1) / (127 if q == torch.int8 else 448), rtol=2e-2, atol=0
    )
    rounded = (exact / scale.double()).clamp(-448, 448).float()
    ideal = rounded.to(q).double() if q != torch.int8 else rounded.round().double()
    off = lambda v: ((v.double() * scale.double() - exact).norm() / exact.norm()).item()  # noqa: E731
    assert off(values) <= 1.1 * off(ideal)


@torch.no_grad()
def test_template_asymmetric():
    x = outliers(37, 128, torch.bfloat16)
    q, scale, zero = torch.compile(lambda x: QUANTIZE(x, 128, torch.int8, 0, True), backend=rotpass.backend())(x)
    assert (((q.double() - zero) * scale - dense(x)).abs() / scale).max() < 1.6


def silu_mul(gate, up):
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("rows", (1, 300))
@torch.no_grad()
def test_template_with_its_neighbours_is_one_kernel(rows):
    from torch._inductor.utils import run_and_get_code

    gate, up = outliers(rows, 14336, torch.bfloat16) / 100, outliers(rows, 14336, torch.bfloat16)

    def function(gate, up):
        return rotpass.hadamard_transform(silu_mul(gate, up), 14336) + 1

    actual, code = run_and_get_code(torch.compile(function, backend=rotpass.backend(), dynamic=False), gate, up)
    assert sum(text.count(".run(") for text in code) == 1
    expected = dense(silu_mul(gate.double(), up.double())) + 1
    assert ((actual.double() - expected).norm() / expected.norm()).item() < 4e-3


@torch.no_grad()
def test_template_with_extreme_silu():
    gate = torch.tensor([[0.0, -0.0, 80.0, -80.0, 1e4, -1e4, 3e38, -3e38]], device="cuda").repeat(1, 8).bfloat16()
    function = lambda g: rotpass.hadamard_transform(silu_mul(g, g * 0 + 1), 64)  # noqa: E731
    actual = torch.compile(function, backend=rotpass.backend())(gate)
    assert error(dense(silu_mul(gate.double(), torch.ones_like(gate).double())), actual) < 1e-2


@torch.no_grad()
def test_template_with_dynamic_rows():
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x: rotpass.hadamard_transform(x, 128), backend=rotpass.backend(), dynamic=True)
    for rows in (5, 64, 1000, 4097):
        x = outliers(rows, 128, torch.float16)
        assert error(dense(x), compiled(x)) < 2e-3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@torch.no_grad()
def test_template_in_cuda_graphs():
    model, ids = models.make("llama", dtype=torch.float32).cuda().eval(), models.tokens().cuda()
    expected = model(ids)
    compiled = torch.compile(model, backend=rotpass.backend(), mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert error(expected, compiled(ids)) < 1e-4


@torch.no_grad()
def test_template_in_a_package_that_runs_without_rotpass(tmp_path):
    import subprocess
    import sys

    class Model(torch.nn.Module):
        def forward(self, gate, up):
            return torch.ops.rotpass.hadamard(silu_mul(gate, up), 14336)

    inputs = tuple(outliers(16, 14336, torch.bfloat16) / 100 for _ in range(2))
    from rotpass.doors.inductor_pass import SLOT, inductor_pass

    options = {SLOT: inductor_pass(rotpass.Recipe(), ())}
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(
        torch.export.export(Model(), inputs), package_path=path, inductor_configs=options
    )
    torch.save((inputs, Model()(*inputs)), tmp_path / "data.pt")
    script = (
        "import sys, torch; inputs, expected = torch.load(sys.argv[2]);"
        "actual = torch._inductor.aoti_load_package(sys.argv[1])(*inputs);"
        "assert 'rotpass' not in sys.modules;"
        "assert (actual.double() - expected.double()).norm() < 5e-3 * expected.double().norm()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, path, tmp_path / "data.pt"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
