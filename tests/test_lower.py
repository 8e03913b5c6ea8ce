"""The operators as plain aten: the same values, strides and metadata, in exported graphs and in Inductor's."""

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

import rotpass.ops  # noqa: F401
from rotpass.hadamard import hadamard_matrix, signs
from rotpass.lower import inductor, portable

hadamard = torch.ops.rotpass.hadamard
fake_quantize = torch.ops.rotpass.fake_quantize
DYNAMIC = torch.export.Dim.DYNAMIC


class Model(torch.nn.Module):
    """Every form of the operators, on inputs of every order of axes."""

    def forward(self, x):
        y = hadamard(x.transpose(1, 2), 96, False, "default", 3)
        z = hadamard(y, 48, True, seed=4)
        last = hadamard(z.transpose(-1, -2), 4)
        skew = hadamard(x.flatten(-2), 24, table="compressed-tensors")
        low, high = fake_quantize(z, "int4_asymmetric", 32), fake_quantize(x=y, kind="fp8")
        return y, z, last, skew, low, high


def make_input(batch=2, dtype=torch.float32):
    return torch.randn(batch, 12, 8, 96).to(dtype)


def assert_same(actual, expected):
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e)
        assert a.stride() == e.stride()


def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_to_portable(dtype):
    x = make_input(dtype=dtype)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: DYNAMIC},))
    gm = portable.to_portable(program.graph_module)
    gm.graph.lint()
    assert not any("rotpass" in target for target in targets(gm.graph))
    for batch in (2, 5):
        x = make_input(batch, dtype)
        assert_same(gm(x), Model()(x))


def test_new_nodes_keep_the_metadata_and_have_values():
    class Nested(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, x):
            return self.inner(x)

    program = torch.export.export(Nested(), (make_input(),), dynamic_shapes=({0: DYNAMIC},))
    old = {
        str(node.meta["nn_module_stack"])
        for node in program.graph.find_nodes(op="call_function", target=hadamard.default)
    }
    gm = portable.to_portable(program.graph_module)
    products = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(products) == 4 and all(str(node.meta["nn_module_stack"]) in old for node in products)
    for node in gm.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            assert "val" in node.meta
    outputs = gm.graph.find_nodes(op="output")[0].args[0]
    expected = Model()(make_input())
    for node, tensor in zip(outputs, expected):
        assert [int(s) if isinstance(s, int) else 2 for s in node.meta["val"].shape] == list(tensor.shape)


def test_constants_are_shared_and_can_be_made_by_the_caller():
    def forward(x):
        return hadamard(hadamard(x, 64), 64) + hadamard(x, 64, True)

    with torch._subclasses.FakeTensorMode() as mode:
        gm = make_fx(forward)(mode.from_tensor(torch.randn(3, 64)))
    made = []

    def make_constant(graph, name, value):
        made.append((name, tuple(value.shape)))
        return portable.make_buffer(graph, name, value)

    portable.to_portable(gm, make_constant=make_constant)
    assert len(made) == 3 and len(set(made)) == 2
    assert len(dict(gm.named_buffers())) == 2 and not gm.state_dict()
    x = torch.randn(3, 64)
    torch.testing.assert_close(gm(x), forward(x))


@pytest.mark.parametrize("size", [1, 32, 96, 128, 1536])
def test_portable_functions_against_a_dense_matmul(size):
    x = torch.randn(3, 2, size * 2, dtype=torch.float64)
    r, s = hadamard_matrix(size) / size**0.5, signs(size, 7)
    expected = (x.unflatten(-1, (-1, size)) * s @ r.T).flatten(-2)
    torch.testing.assert_close(portable.hadamard(x, size, seed=7), expected)
    torch.testing.assert_close(portable.hadamard(expected, size, True, seed=7), x)
    assert portable.hadamard(x[:0], size).shape == (0, 2, size * 2)
    torch.testing.assert_close(portable.fake_quantize(x, "int8"), fake_quantize(x, "int8"))
    traced = make_fx(lambda t: portable.hadamard(t, size), tracing_mode="real")(x)
    assert not any("rotpass" in target for target in targets(traced.graph))


class Lower(CustomGraphPass):
    """As the compile door installs it; what it left is kept for a look."""

    def __init__(self):
        self.replaced, self.left = 0, []

    def __call__(self, graph):
        self.replaced += inductor.lower(graph)
        self.left += [target for target in targets(graph) if "rotpass" in target]

    def uuid(self):
        return None  # no caching: the passes have to run


def test_inductor_forward_backward_dynamic():
    torch._dynamo.reset()
    lowering = Lower()

    def model(x):
        y = hadamard((x * 2).transpose(1, 2), 48, False, "default", 3)
        return y, fake_quantize(y, "int8_asymmetric", 32)

    compiled = torch.compile(model, fullgraph=True, dynamic=True, options={"post_grad_custom_post_pass": lowering})
    for batch in (2, 3):
        x = torch.randn(batch, 5, 4, 96, requires_grad=True)
        actual, expected = compiled(x), model(x)
        torch.testing.assert_close(actual[0], expected[0])
        assert [a.stride() for a in actual] == [e.stride() for e in expected]
        weights = [torch.randn_like(e) for e in expected]
        grads = [
            torch.autograd.grad(sum((o * w).sum() for o, w in zip(outputs, weights)), x)[0]
            for outputs in (actual, expected)
        ]
        torch.testing.assert_close(*grads)  # the quantization's gradient is straight through, after lowering too
    assert lowering.replaced == 3 and not lowering.left


def test_inductor_bfloat16():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda t: hadamard(t * 2, 1536) + 1, fullgraph=True, options={"post_grad_custom_post_pass": Lower()}
    )
    x = torch.randn(4, 1536).bfloat16()
    expected = x.double() * 2 @ hadamard_matrix(1536).T / 1536**0.5 + 1
    with torch.no_grad():
        assert float((compiled(x).double() - expected).abs().max()) < 0.04
