"""The torch.compile door: every module gets folds of its own weights as they are now, and its gradients."""

import copy
import gc
import threading

import pytest
import torch
from small import TOLERANCE, Counting, Mlp, Model, agree
from torch import nn
from torch._dynamo.utils import counters

from rotpass import copies
from rotpass.doors.compile import backend


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, 32)


def test_two_instances_share_a_graph_and_not_their_weights(x: torch.Tensor) -> None:
    made, models = backend(inner=Counting()), [Model(1), Model(1), Model(1)]
    compiled = [torch.compile(model, backend=made) for model in models]
    for _ in range(2):
        for f, model in zip(compiled, models):
            agree(f, model, x)
    assert len(made.inner.graphs) == 1
    assert made.report.counts == {"r3": 1, "v": 1, "r4": 1}
    assert "2 further modules" in str(made.report)


def test_layers_compiled_one_by_one(x: torch.Tensor) -> None:
    made, model = backend(inner=Counting()), Model(4)
    reference = copy.deepcopy(model)
    for layer in model.layers:
        layer.compile(backend=made)
    agree(model, reference, x)
    agree(model, reference, x)
    assert len(made.inner.graphs) == 1
    assert "3 further modules" in str(made.report)


def test_online_graphs_tell_their_modules_apart_too(x: torch.Tensor) -> None:
    made, models = backend(inner=Counting(), v=False, r4=False), [Model(1), Model(1)]
    for model in models:
        agree(torch.compile(model, backend=made), model, x)
    assert "1 further module" in str(made.report)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_weights_that_change(x: torch.Tensor, inner: str) -> None:
    made, model = backend(inner=inner), Model(1)
    compiled = torch.compile(model, backend=made)
    down = model.layers[0].mlp.down
    agree(compiled, model, x)
    graphs = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        down.weight.mul_(2)
        model.layers[0].attention.v.bias.add_(1)
    agree(compiled, model, x)
    model.load_state_dict(Model(1).state_dict())
    agree(compiled, model, x)
    model.load_state_dict(Model(1).state_dict(), assign=True)
    agree(compiled, model, x)
    down.weight.data = torch.randn_like(down.weight)
    agree(compiled, model, x)
    down.weight.data.mul_(3)
    made.refresh()
    agree(compiled, model, x)
    other = nn.Parameter(torch.randn_like(down.weight))
    torch.utils.swap_tensors(down.weight, other)
    agree(compiled, model, x)
    down.weight = nn.Parameter(torch.randn_like(down.weight))
    agree(compiled, model, x)
    for kind in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kind)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        agree(compiled, model, x)
    assert counters["stats"]["unique_graphs"] == graphs, "no change of values recompiles"
    assert "further module" not in str(made.report)
    agree(compiled, model.to(torch.float64), x.double())


def test_the_copies_of_a_dead_model_die(x: torch.Tensor) -> None:
    def count() -> int:
        return sum(copy.folds[0].seed == 77 for _, _, copy in copies.live())

    made, model = backend(inner=Counting(), seed=77), Model(2)
    compiled = torch.compile(model, backend=made)
    agree(compiled, model, x)
    agree(compiled, model, x)
    assert count() == 8  # per layer v and its bias, o, down
    inputs = made.inner.inputs[0]
    del model, compiled
    gc.collect()
    assert count() == 0
    assert not any(ref() is not None and ref() is not x for ref in inputs)


def test_training_keeps_folds_in_the_graph(x: torch.Tensor) -> None:
    made, model = backend(inner=Counting()), Model(1)
    compiled = torch.compile(model, backend=made)
    reference = copy.deepcopy(model)
    agree(compiled, model, x)  # first without gradients: that graph must not be run with them
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(2):
        for f, optimizer in zip((compiled, reference), optimizers):
            optimizer.zero_grad()
            f(x).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(p.grad, q.grad, **TOLERANCE, msg=name)
        for optimizer in optimizers:
            optimizer.step()
        agree(compiled, model, x)
    assert "torch.no_grad()" in str(made.report)
    inference, training = made.inner.calls(0), made.inner.calls(1)
    assert len(made.inner.graphs) == 2
    assert training.count("rotpass.hadamard.default") > inference.count("rotpass.hadamard.default")


def test_frozen_weights_are_folded_by_value_while_others_train(x: torch.Tensor) -> None:
    inner, model = Counting(), Model(1)
    model.layers[0].mlp.down.requires_grad_(False)
    compiled = torch.compile(model, backend=backend(inner=inner, v=False, r3=False))
    reference = copy.deepcopy(model)
    for f in (compiled, reference):
        f(x).square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p.grad, q.grad, **TOLERANCE)
    assert inner.calls().count("rotpass.hadamard.default") == 1
    model.layers[0].mlp.down.weight.requires_grad_()
    try:
        compiled(x).square().mean().backward()
    except RuntimeError as error:  # torch 2.11 has no guard on it
        assert "compiled without gradients" in str(error)
    else:
        assert model.layers[0].mlp.down.weight.grad is not None and len(inner.graphs) == 2


def test_gradients_enabled_inside_the_graph(x: torch.Tensor) -> None:
    model = Mlp()

    def f(x):
        with torch.enable_grad():
            return model(x)

    compiled = torch.compile(f, backend=backend(inner="aot_eager"))
    with torch.no_grad():
        y = compiled(x)
        assert torch.allclose(y, f(x), atol=1e-5)


def test_loosened_guards_raise_instead_of_losing_gradients(x: torch.Tensor) -> None:
    model = Mlp()
    compiled = torch.compile(
        model, backend=backend(inner="eager"), options={"guard_filter_fn": lambda entries: [False for _ in entries]}
    )
    agree(compiled, model, x)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="compiled without gradients"):
        compiled(x)


def test_inference_mode_and_autocast(x: torch.Tensor) -> None:
    made, model = backend(inner="aot_eager"), Model(1)
    compiled = torch.compile(model, backend=made)
    with torch.inference_mode():
        agree(compiled, model, x)
        frozen = Model(1)  # whose parameters are inference tensors
        agree(torch.compile(frozen, backend=made), frozen, x)
    agree(compiled, model, x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0.05)


def test_threads_share_compiled_code(x: torch.Tensor) -> None:
    made, models = backend(inner="eager"), [Model(1) for _ in range(3)]
    compiled = [torch.compile(model, backend=made) for model in models]
    agree(compiled[0], models[0], x)
    errors = []

    def run(i: int) -> None:
        try:
            for _ in range(20):
                agree(compiled[i], models[i], x)
                with torch.no_grad():
                    models[i].layers[0].mlp.down.weight.add_(0.01)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
