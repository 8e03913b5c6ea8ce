"""The torch.compile door: interning, options, the report, what is recompiled, and odd graphs."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.utils.checkpoint
from small import TOLERANCE, Counting, Mlp, Model, agree
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rotpass
from rotpass.doors.compile import Backend, backend, from_options
from rotpass.recipe import FakeQuant, Recipe


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
        (
            {"r5": True},
            TypeError,
            "unknown recipe field 'r5'; valid fields: r3, v, r4.*; beside them inner, strict and options",
        ),
        ({"recipe": "r3"}, TypeError, "must be a rotpass.Recipe"),
        ({"strict": "yes"}, TypeError, "strict must be True or False"),
        ({"options": "max_autotune"}, TypeError, "options must be a dict of Inductor's options; got 'max_autotune'"),
        ({"options": {"max_autotun": True}}, ValueError, "unknown option 'max_autotun'.*such as max_autotune"),
        ({"options": {"seed": 3}}, ValueError, "unknown option 'seed'; pass seed= to rotpass.backend itself"),
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
    # Whatever other tests left: torchao's quantize_ sets some of these for the whole process.
    with config.patch(epilogue_fusion=True, max_autotune=False, coordinate_descent_tuning=False):
        before = config.get_config_copy()
        agree(torch.compile(model, backend=backend(inner=inner, options={"epilogue_fusion": False})), model, x)
        agree(torch.compile(model, backend=backend(inner=inner), mode="max-autotune-no-cudagraphs"), model, x)
        agree(torch.compile(model, backend=backend(inner=inner), options={"epilogue-fusion": False}), model, x)
        agree(torch.compile(model, backend="rotpass", options={"inner": inner, "max_autotune": True}), model, x)
        assert config.get_config_copy() == before
    assert seen == [(False, False, False), (True, True, True), (False, False, False), (True, True, False)]


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


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f: torch.func.jacrev(lambda x: f(x).sum((0, 1))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_transforms_inside_a_graph_leave_it_as_it_is(name: str, x: torch.Tensor) -> None:
    transformed, made = TRANSFORMS[name](Mlp()), backend(inner=Counting())
    with pytest.warns(UserWarning, match=r"cannot be traced to ATen: .*torch.func transforms"):
        found = torch.compile(transformed, backend=made)(x)
    torch.testing.assert_close(found, transformed(x), **TOLERANCE)
    assert made.report.sites == [] and len(made.report.notes) == 1


@pytest.mark.parametrize("around", ["checkpoint", "save_on_cpu"])
def test_saved_tensor_hooks_of_the_caller_do_not_see_the_compilation(around: str, x: torch.Tensor) -> None:
    model, made = Mlp(), backend(inner=Counting())
    compiled = torch.compile(model, backend=made)
    if around == "checkpoint":
        y = checkpoint(compiled, x, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            y = compiled(x)
    found = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    torch.testing.assert_close(
        found, torch.autograd.grad(model(x).square().sum(), list(model.parameters())), **TOLERANCE
    )
    assert made.report.counts["r4"] == 1


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


def test_repr_and_logs_do_not_need_a_graph(caplog: pytest.LogCaptureFixture, x: torch.Tensor) -> None:
    made, model = backend(inner=Counting()), Mlp()
    assert isinstance(made, Backend) and "Recipe(" in repr(made) and made.__name__ == "rotpass"
    with caplog.at_level("DEBUG", logger="rotpass"):
        agree(torch.compile(model, backend=made), model, x)
    assert "rotpass.hadamard" in caplog.text


# ------------------------------------------------------------------------- what has a gradient of its own


class _Scale(torch.autograd.Function):
    """Its gradient is not its derivative."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class _Hooked(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate, self.up, self.down = (torch.nn.Linear(a, b) for a, b in ((8, 64), (8, 64), (64, 8)))

    def inner(self, x):
        return _Scale.apply(x) if self.how == "function in a checkpoint" else x * 2

    def forward(self, x):
        if self.how == "function":
            x = _Scale.apply(x)
        if self.how == "function in a checkpoint":
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        hidden = torch.nn.functional.silu(self.gate(x)) * self.up(x)
        if self.how == "hook":
            hidden.register_hook(lambda grad: grad * 3)
        return self.down(hidden)


@pytest.mark.parametrize("how", ("function", "function in a checkpoint", "hook"))
@pytest.mark.parametrize("inner", ("eager", "aot_eager"))
def test_a_gradient_of_its_own_is_kept(how: str, inner: str) -> None:
    model, x = _Hooked(how).double(), torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    model(x).square().sum().backward()
    expected = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    torch.compiler.reset()
    with pytest.warns(UserWarning, match="left as it is.* in it, whose gradient is its own"):
        torch.compile(model, backend=rotpass.backend(inner=inner))(x).square().sum().backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in model.parameters())], expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_dropout_in_an_activation_checkpoint_without_gradients() -> None:
    """Recomputation is for the backward; AOTAutograd refuses random numbers in it where there is none."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)

        def inner(self, x):
            return self.down(torch.nn.functional.dropout(torch.nn.functional.silu(self.up(x)), 0.1))

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    torch.compiler.reset()
    compiled = torch.compile(Model(), backend=rotpass.backend(inner="aot_eager"))
    assert compiled(torch.randn(4, 8)).shape == (4, 8)
