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
