"""The torch.compile door: interning, options, the report, what is recompiled, and whose weights are used."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import rotpass
from rotpass import _torch, copies
from rotpass.doors.compile import Backend, backend, from_options
from rotpass.recipe import FakeQuant, Recipe

TOLERANCE = dict(rtol=2e-5, atol=2e-5)


class Attention(nn.Module):
    def __init__(self, dim: int = 32, head_dim: int = 16) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, hidden), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Counting:
    """An inner backend that counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.inputs: list[list] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list):
        self.graphs.append(gm)
        self.inputs.append([weakref.ref(value) for value in inputs if isinstance(value, torch.Tensor)])
        return gm.forward

    def calls(self, i: int = -1) -> list[str]:
        return [str(node.target) for node in self.graphs[i].graph.nodes if node.op == "call_function"]


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


def agree(compiled, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), **TOLERANCE)


# --- the object


def test_public_names() -> None:
    assert rotpass.backend is backend


def test_equal_arguments_give_the_same_object() -> None:
    inner = Counting()
    assert backend() is backend(Recipe()) is backend(r4=True) is backend(options={})
    assert backend(Recipe(r4=False), seed=3) is backend(seed=3, r4=False)
    assert backend(inner=inner) is backend(inner=inner)
    assert backend(inner=inner.__call__) is backend(inner=inner.__call__), "a bound method is another object each time"
    assert backend(options={"max_autotune": True, "epilogue_fusion": False}) is backend(
        options={"epilogue-fusion": False, "max_autotune": True}
    )
    nested = {"post_grad_fusion_options": {"a": {"b": [1, 2]}}}
    assert backend(options=nested) is backend(options=copy.deepcopy(nested))
    assert backend(fake_quant=FakeQuant(k=4)) is backend(fake_quant=FakeQuant(k=4))
    different = [
        backend(),
        backend(r4=False),
        backend(strict=True),
        backend(inner="eager"),
        backend(inner=inner),
        backend(inner=Counting()),
        backend(options={"max_autotune": True}),
        backend(options={"max_autotune": False}),
    ]
    assert len(set(map(id, different))) == len(different) == len(set(different))


def test_pickle_and_copy_give_the_same_object() -> None:
    for made in (backend(), backend(r4=False, inner="eager", strict=True, options={"max_autotune": True})):
        assert pickle.loads(pickle.dumps(made)) is copy.deepcopy(made) is copy.copy(made) is made


def test_a_callable_inner_is_not_kept_forever() -> None:
    inner = Counting()
    inner_ref = weakref.ref(inner)
    made = backend(inner=inner)
    del made, inner
    gc.collect()
    assert inner_ref() is None


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"inner": "inductr"}, ValueError, "no backend 'inductr' for inner; it has .*inductor"),
        ({"inner": "rotpass"}, ValueError, "another backend than rotpass"),
        ({"inner": 3}, TypeError, "name of a torch.compile backend or a callable; got 3"),
        ({"r5": True}, TypeError, "unknown recipe field 'r5'; valid fields: r3, v, r4"),
        ({"recipe": "r3"}, TypeError, "must be a rotpass.Recipe"),
        ({"strict": "yes"}, TypeError, "strict must be True or False"),
        ({"options": {"max_autotun": True}}, ValueError, "unknown option 'max_autotun'.*such as max_autotune"),
        ({"options": {"seed": 3}}, ValueError, "unknown option 'seed'; as rotpass.backend's own argument"),
    ],
)
def test_wrong_arguments_say_what_is_right(kwargs: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        backend(**kwargs)
    with pytest.raises(ValueError, match="another backend"):
        backend(inner=backend())


# --- options, mode and the entry point


def test_entry_point(x: torch.Tensor) -> None:
    assert "rotpass" in torch._dynamo.list_backends()
    model = Model()
    options = {"inner": "eager", "r3": False, "epilogue_fusion": False, "seed": 3}
    holder = rotpass.backend(inner="eager", r3=False, seed=3, options={"epilogue_fusion": False})
    holder.clear()
    agree(torch.compile(model, backend="rotpass", options=options, fullgraph=True), model, x)
    assert holder.report.counts == {"r3": 0, "v": 2, "r4": 2}
    assert options == {"inner": "eager", "r3": False, "epilogue_fusion": False, "seed": 3}


def test_entry_point_names_valid_options(x: torch.Tensor) -> None:
    says = "unknown option 'r5'; valid are rotpass's own .*r3, v, r4.*strict, inner.*Inductor"
    with pytest.raises(ValueError, match=says):
        from_options(torch.fx.symbolic_trace(nn.Identity()), [x], options={"r5": True})
    compiled = torch.compile(Model(), backend="rotpass", options={"inner": "eager", "blok_size": 16})
    with pytest.raises(Exception, match="unknown option 'blok_size'"):
        compiled(x)


def test_options_and_mode_reach_inductor_for_this_compile_only(x: torch.Tensor) -> None:
    config = torch._inductor.config
    seen = []

    def inner(gm, inputs):
        seen.append((config.epilogue_fusion, config.max_autotune, config.coordinate_descent_tuning))
        return gm.forward

    model = Mlp()
    before = config.get_config_copy()
    agree(torch.compile(model, backend=backend(inner=inner, options={"epilogue_fusion": False})), model, x)
    agree(torch.compile(model, backend=backend(inner=inner), mode="max-autotune-no-cudagraphs"), model, x)
    agree(torch.compile(model, backend=backend(inner=inner), options={"epilogue-fusion": False}), model, x)
    agree(torch.compile(model, backend="rotpass", options={"inner": inner, "max_autotune": True}), model, x)
    assert seen == [(False, False, False), (True, True, True), (False, False, False), (True, True, False)]
    assert config.get_config_copy() == before


def test_nothing_global_stays_set(x: torch.Tensor) -> None:
    def broken(gm, inputs):
        raise ZeroDivisionError("inner")

    def state():
        return (
            torch._inductor.config.get_config_copy(),
            torch._dynamo.config.get_config_copy(),
            torch._functorch.config.get_config_copy(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
        )

    before = state()
    with torch.no_grad():
        with pytest.raises(Exception, match="inner"):
            torch.compile(Model(), backend=backend(inner=broken, options={"max_autotune": True}))(x)
        with pytest.raises(Exception, match="strict=True"):
            torch.compile(Mlp(60, 107), backend=backend(inner="eager", strict=True))(torch.randn(1, 60))
    assert state() == before
    assert not backend(inner=broken).report.sites, "what failed to compile is not reported as done"


# --- reports and recompilation


def test_report_of_sites(x: torch.Tensor) -> None:
    made, model = backend(inner=Counting()), Model()
    compiled = torch.compile(model, backend=made, fullgraph=True)
    assert not made.report.sites
    agree(compiled, model, x)
    assert made.report.counts == {"r3": 2, "v": 2, "r4": 2} and not made.report.notes
    assert [site.where for site in made.report][:3] == ["layers.0.attention", "layers.0.attention", "layers.0.mlp.down"]
    agree(compiled, model, torch.randn(3, 7, 32))  # dynamic shapes
    agree(compiled, model.double(), x.double())
    assert len(made.inner.graphs) == 3
    assert made.report.counts == {"r3": 2, "v": 2, "r4": 2}, "recompiles of the same code count once"
    made.clear()
    assert not made.report.sites
    agree(compiled, model, x.double())
    assert len(made.inner.graphs) == 3, "clear() empties the report only"


def test_models_that_share_names_do_not_merge(x: torch.Tensor) -> None:
    made, small, large = backend(inner=Counting()), Model(1), Model(1)
    large.layers[0].mlp = Mlp(hidden=128)
    for model in (small, large):
        agree(torch.compile(model, backend=made), model, x)
    assert [site.size for site in made.report if site.kind == "r4"] == [64, 128]
    assert len(made.inner.graphs) == 2


def test_equal_backend_does_not_recompile_and_a_different_one_does(x: torch.Tensor) -> None:
    inner, model = Counting(), Model(1)
    for _ in range(3):
        agree(torch.compile(model, backend=backend(inner=inner)), model, x)
    agree(torch.compile(model, backend=pickle.loads(pickle.dumps(backend(r3=True, inner="eager")))), model, x)
    assert len(inner.graphs) == 1 and counters["stats"]["unique_graphs"] == 2
    agree(torch.compile(model, backend=backend(inner=inner, r4=False)), model, x)
    assert len(inner.graphs) == 2
    assert "rotpass.hadamard.default" in inner.calls(0)


def test_nothing_to_rotate_is_compiled_as_it_came(x: torch.Tensor) -> None:
    inner = Counting()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(torch.compile(lambda x: x.sin(), backend=backend(inner=inner))(x), x.sin())
        model = Model(1)
        agree(torch.compile(model, backend=backend(inner=inner, r3=False, v=False, r4=False)), model, x)
    assert all(call.find("aten") < 0 for i in range(2) for call in inner.calls(i)), "Dynamo's own graph"


def test_warns_once_where_nothing_could_be_rotated() -> None:
    model, x = Mlp(60, 107), torch.randn(2, 60)
    made = backend(inner=Counting())
    with pytest.warns(UserWarning, match="rotated nothing"):
        agree(torch.compile(model, backend=made), model, x)
    assert len(made.report.refused) == 1 and made.report.refused[0].reason


# --- whose weights


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


# --- graphs of other shapes and makers


def test_called_directly_on_an_fx_graph(x: torch.Tensor) -> None:
    model = Model(1)
    gm = torch.fx.symbolic_trace(lambda x: x * 2 + 1)
    assert torch.equal(backend(inner="eager")(gm, [x])(x), x * 2 + 1)

    def f(x, w1, w2, w3):
        return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w2), w3)

    weights = [p.detach() for p in (model.layers[0].mlp.gate.weight, model.layers[0].mlp.up.weight)]
    weights.append(nn.Parameter(torch.randn(32, 64)))
    made = backend(inner="eager")
    made.clear()
    gm = torch.fx.symbolic_trace(f)
    with torch.no_grad():
        compiled = made(gm, [x, *weights])
        torch.testing.assert_close(compiled(x, *weights), f(x, *weights), **TOLERANCE)
    assert made.report.counts["r4"] == 1


def test_graphs_without_weights_or_tensors(x: torch.Tensor) -> None:
    inner = Counting()
    made = backend(inner=inner)
    attention = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=made)
    q = torch.randn(1, 2, 4, 16)
    torch.testing.assert_close(attention(q), F.scaled_dot_product_attention(q, q, q), **TOLERANCE)
    sizes = torch.compile(lambda n: torch.full((n, 2), 3.0), backend=made, dynamic=True)
    assert sizes(5).shape == (5, 2) and sizes(7).shape == (7, 2)
    assert torch.equal(torch.compile(lambda: torch.ones(2), backend=made)(), torch.ones(2))


def test_graph_that_cannot_be_traced_again_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    def fails(*args):
        raise NotImplementedError("this operator")

    monkeypatch.setattr("rotpass.doors.compile.from_dynamo", fails)
    made, model = backend(inner=Counting()), Model(1)
    with pytest.warns(UserWarning, match="cannot be traced to ATen: NotImplementedError: this operator"):
        agree(torch.compile(model, backend=made), model, x)
    assert "left as it is" in str(made.report)
    torch._dynamo.reset()
    for fields in ({"strict": True}, {"cache": "rotated"}):
        with pytest.raises(Exception, match="this operator"):
            torch.compile(model, backend=backend(inner="eager", **fields))(x)


def test_shared_and_tied_weights(x: torch.Tensor) -> None:
    model = Model(2)
    model.layers[1].mlp.down.weight = model.layers[0].mlp.down.weight  # one parameter, two modules
    model.layers[1].attention.o.weight = model.layers[1].attention.q.weight  # folded here, plain there
    made = backend(inner=Counting())
    compiled = torch.compile(model, backend=made)
    agree(compiled, model, x)
    assert made.report.counts == {"r3": 2, "v": 2, "r4": 2}
    with torch.no_grad():
        model.layers[0].mlp.down.weight.mul_(2)
    agree(compiled, model, x)
    torch._dynamo.reset()
    agree(torch.compile(model, backend=backend(inner="aot_eager"), dynamic=True), model, x)


def test_static_inputs_stay_static(x: torch.Tensor) -> None:
    inner, model = Counting(), Model(1)
    model.layers[0].attention.o.weight = model.layers[0].attention.q.weight
    agree(torch.compile(model, backend=backend(inner=inner)), model, x)
    placeholders = inner.graphs[0].graph.find_nodes(op="placeholder")
    static = [node for node in placeholders if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")]
    assert len(static) == len(list(model.parameters())) + 1, "all parameters and the copy that is an input of its own"
    sources = [node._dynamo_source for node in placeholders]
    assert sources[-1] is None and None not in sources[:-1] and len(set(sources)) == len(sources)


# --- Inductor


PlainPass, InferenceAwarePass = _torch.custom_pass_classes()


class Pass(PlainPass):
    def __init__(self, name: str) -> None:
        self.name, self.ran = name, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.ran += 1

    def uuid(self) -> str:
        return self.name


class AwarePass(InferenceAwarePass, Pass):
    def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
        assert isinstance(is_inference, bool)
        self.ran += 1


def test_custom_passes_of_the_user_still_run(x: torch.Tensor) -> None:
    from rotpass.doors.inductor_pass import inductor_pass

    recipe = Recipe()
    keys = [
        inductor_pass(recipe, ()),
        inductor_pass(recipe, (Pass("a"),)),
        inductor_pass(recipe, (Pass("b"),)),
        inductor_pass(recipe, (AwarePass("a"), Pass("b"))),
        inductor_pass(Recipe(seed=1), ()),
    ]
    assert len({key.uuid() for key in keys}) == len(keys)
    assert inductor_pass(Recipe(), (Pass("a"),)).uuid() == keys[1].uuid()
    assert inductor_pass(recipe, (lambda graph: None,)).uuid() is None, "no uuid, no cache"
    mine, globally, aware = Pass("option"), Pass("global"), AwarePass("aware")
    model = Mlp()
    with torch._inductor.config.patch(post_grad_custom_post_pass=globally, post_grad_custom_pre_pass=aware):
        agree(torch.compile(model, backend=backend()), model, x)
        assert torch._inductor.config.post_grad_custom_post_pass is globally
    options = {"post_grad_custom_post_pass": mine}
    agree(torch.compile(model, backend=backend(options=options)), model, x)
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": aware}
    compiled = torch.compile(model, backend=backend(options=options), fullgraph=True)
    with torch.no_grad():
        _, code = torch._inductor.utils.run_and_get_code(compiled, x)
    assert "torch.ops.rotpass" not in "".join(code), "the operator is lowered, after the passes of the user"
    agree(compiled, model, x)
    assert (mine.ran, globally.ran, aware.ran) == (1, 1, 2)


CACHE_SCRIPT = textwrap.dedent(
    """
    import sys, torch
    sys.path.insert(0, sys.argv[1])
    import rotpass
    from torch._dynamo.utils import counters
    from test_backend import Mlp, agree
    from rotpass.doors import inductor_pass

    torch._inductor.config.cpp_cache_precompile_headers = False
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(3, 32)

    def cached(version, **fields):
        inductor_pass._sources = lambda: version
        torch._dynamo.reset()
        counters.clear()
        agree(torch.compile(model, backend=rotpass.backend(**fields)), model, x)
        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert counters["inductor"]["fxgraph_cache_bypass"] == counters["aot_autograd"]["autograd_cache_bypass"] == 0
        return bool(hits)

    if sys.argv[2] == "fill":
        assert not cached("1")
    else:
        assert cached("1")
        assert not cached("1", skip=("nothing",)), "another recipe, though the graph is the same"
        assert not cached("2"), "another version of rotpass"
        assert cached("1", fake_quant=None)
    """
)


def test_caches_across_processes(tmp_path) -> None:
    # Without vector instructions: finding out which ones an empty cache directory's compiler can do takes 15 s.
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    for what in ("fill", "use"):
        command = [sys.executable, "-c", CACHE_SCRIPT, os.path.dirname(__file__), what]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr


def test_the_cache_key_covers_the_sources(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rotpass.doors import inductor_pass

    keys = set()
    for lowering in ("x = 1", "x = 2", "x = 1"):
        (tmp_path / "lower").mkdir(exist_ok=True)
        (tmp_path / "lower" / "inductor.py").write_text(lowering)
        monkeypatch.setattr(rotpass, "__file__", str(tmp_path / "__init__.py"))
        keys.add(inductor_pass._sources.__wrapped__())
    assert len(keys) == 2


def test_repr_and_logs_do_not_need_a_graph(caplog: pytest.LogCaptureFixture, x: torch.Tensor) -> None:
    made, model = backend(inner=Counting()), Mlp()
    assert isinstance(made, Backend) and "Recipe(" in repr(made) and made.__name__ == "rotpass"
    with caplog.at_level("DEBUG", logger="rotpass"):
        agree(torch.compile(model, backend=made), model, x)
    assert "rotpass.hadamard" in caplog.text


@pytest.mark.gpu
def test_folded_weights_are_static_inputs_of_cuda_graphs(x: torch.Tensor) -> None:
    model, x = Model(2).cuda(), x.cuda()
    model.layers[1].attention.o.weight = model.layers[1].attention.q.weight  # a copy that is an input of its own
    compiled = torch.compile(model, backend=backend(), mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        agree(compiled, model, x)
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == 1, "x alone is copied at every call"
    recorded = dict(counters["inductor"])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    agree(compiled, model, x)
    down = model.layers[0].mlp.down.weight
    down.grad = torch.ones_like(down)
    torch.optim.AdamW([down], lr=0.1, fused=True).step()
    agree(compiled, model, x)
    down.data.mul_(2)
    backend().refresh()
    agree(compiled, model, x)
    assert dict(counters["inductor"]) == recorded, "no change of values records again"
    down.data = torch.randn_like(down)
    agree(compiled, model, x)


@pytest.mark.gpu
def test_refresh_reaches_a_cuda_graph_of_the_user(x: torch.Tensor) -> None:
    made, model, x = backend(), Mlp().cuda(), x.cuda()
    compiled = torch.compile(model, backend=made)
    agree(compiled, model, x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = compiled(x)
    with torch.no_grad():
        model.down.weight.add_(1)
    made.refresh()  # a replay calls no Python
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(y, model(x), **TOLERANCE)
