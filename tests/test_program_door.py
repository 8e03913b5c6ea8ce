"""The ExportedProgram door: the result is a program as good as any, and the one given is as it was."""

import copy
import io
import warnings

import pytest
import torch
from models import LONGEST, Style, make, randomize_, rotation_matrix, tokens
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional as F

import rotpass
from rotpass import FakeQuant, RotationPass

hadamard = torch.ops.rotpass.hadamard.default
PLAN = "rotpass_plan"


def equal(actual, expected, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def model():
    return make("llama", layers=1)


@pytest.fixture(scope="module")
def ep(model) -> ExportedProgram:
    shapes = {"ids": {0: Dim("batch", max=8), 1: Dim("length", max=LONGEST)}}
    return export(model, (tokens(),), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def rotated(ep) -> ExportedProgram:
    return RotationPass(seed=3, strict=True)(ep)


def saved_and_loaded(ep: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(ep, file)
    file.seek(0)
    return torch.export.load(file)


def exported_again(ep: ExportedProgram) -> ExportedProgram:
    shapes = {"ids": {0: Dim("batch", max=8), 1: Dim("length", max=LONGEST)}}
    return export(ep.module(), (tokens(),), dynamic_shapes=shapes)


ENDS = {
    "as it is": lambda ep: ep,
    "save and load": saved_and_loaded,
    "deepcopy": copy.deepcopy,
    "decompose": lambda ep: ep.run_decompositions(),
    "functionalize": lambda ep: ep.run_decompositions({}),
    "export again": exported_again,
    "decompose, save and load": lambda ep: saved_and_loaded(ep.run_decompositions({})),
}


@pytest.mark.parametrize("name", ENDS)
@torch.no_grad()
def test_a_good_program(name: str, model, rotated) -> None:
    program = ENDS[name](rotated)
    program.validate()
    module = program.module()
    for length, batch in ((7, 2), (12, 3)):
        ids = tokens(length, batch)
        equal(module(ids), model(ids))
    assert len(program.graph.find_nodes(op="call_function", target=hadamard)) == 3
    assert program.state_dict[PLAN].dtype == torch.uint8


def test_names(ep, rotated) -> None:
    """The same inputs and outputs under the same names; the plan comes last among the buffers."""
    before, after = ep.graph_signature, rotated.graph_signature
    assert [s for s in after.input_specs if s.target != PLAN] == list(before.input_specs)
    assert after.user_inputs == before.user_inputs and after.user_outputs == before.user_outputs
    assert set(rotated.state_dict) == set(ep.state_dict) | {PLAN}
    kinds = [s.kind for s in after.input_specs]
    position = next(i for i, s in enumerate(after.input_specs) if s.target == PLAN)
    assert kinds[position] == InputKind.BUFFER
    assert all(kind in (InputKind.PARAMETER, InputKind.BUFFER) for kind in kinds[:position])
    placeholders = rotated.graph.find_nodes(op="placeholder")
    assert [n.name for n in placeholders] == [s.arg.name for s in after.input_specs]
    assert rotated.range_constraints == ep.range_constraints
    for name, tensor in ep.state_dict.items():
        new = rotated.state_dict[name]
        assert type(new) is type(tensor) and new.requires_grad == tensor.requires_grad and new.dtype == tensor.dtype
        assert new.stride() == tensor.stride()


def test_untouched_weights_are_shared(ep, rotated) -> None:
    changed = {n for n, t in ep.state_dict.items() if rotated.state_dict[n] is not t}
    layer = "layers.0."
    assert changed == {
        layer + name
        for name in (
            "attention.v_proj.weight",
            "attention.v_proj.bias",
            "attention.o_proj.weight",
            "mlp.down_proj.weight",
        )
    }


def test_the_given_program_is_untouched(model, ep) -> None:
    def state(program):
        return (
            str(program.graph),
            str(program.graph_signature),
            [(n.name, sorted(n.meta), n.meta.get("val")) for n in program.graph.nodes],
        )

    before, tensors = state(ep), {n: (t, t._version, t.clone()) for n, t in ep.state_dict.items()}
    for recipe in ({}, {"counter": "online"}, {"fake_quant": FakeQuant(k=4, down=4)}, {"r3": False, "block_size": 16}):
        RotationPass(**recipe)(ep)
    assert state(ep) == before
    assert set(ep.state_dict) == set(tensors)
    for name, (tensor, version, copied) in tensors.items():
        assert ep.state_dict[name] is tensor and tensor._version == version and torch.equal(tensor, copied)
    equal(ep.module()(tokens()), model(tokens()))


def meta_is_right(program: ExportedProgram) -> None:
    """Shapes, strides and dtypes are what a fresh propagation finds."""
    mode = next(n.meta["val"].fake_mode for n in program.graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))
    kept = {n.name: n.meta.get("val") for n in program.graph.nodes}
    gm = copy.deepcopy(program.graph_module)
    inputs = [kept[n.name] for n in program.graph.find_nodes(op="placeholder")]
    with mode, torch.no_grad():
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    compared = 0
    for node in gm.graph.nodes:
        fresh = node.meta.get("val")
        if node.op == "call_function" and isinstance(fresh, torch.Tensor):
            old, compared = kept[node.name], compared + 1
            assert (str(old.shape), str(old.stride()), old.dtype) == (
                str(fresh.shape),
                str(fresh.stride()),
                fresh.dtype,
            ), node
    assert compared


def test_meta(rotated) -> None:
    meta_is_right(rotated)
    for node in rotated.graph.find_nodes(op="call_function", target=hadamard):
        assert node.meta["nn_module_stack"], "a new node says which module it is in"


@pytest.mark.parametrize("counter", ["fold", "online"])
@pytest.mark.parametrize("style", ["phi3", "gpt2", "neox", "qwen3"])
@torch.no_grad()
def test_meta_of_values_cut_out_of_others(style: str, counter: str) -> None:
    """A rotation of a slice has other strides than the slice; what follows must know."""
    model = make(style, layers=1)
    program = RotationPass(counter=counter, fake_quant=FakeQuant(q=8, k=8, v=8, down=8))(export(model, (tokens(),)))
    meta_is_right(program)
    program.module()(tokens())
    program.run_decompositions({}).module()(tokens())


# --- twice


@pytest.mark.parametrize("way", ["at once", "save and load", "functionalize", "export again"])
@torch.no_grad()
def test_twice_is_once(way: str, model, rotated) -> None:
    pass_, once = RotationPass(seed=3), ENDS["as it is" if way == "at once" else way](rotated)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pass_(once)
    assert [(s.kind, s.status) for s in pass_.report] == [("r3", "already"), ("v", "already"), ("r4", "already")]
    equal(again.module()(tokens()), model(tokens()))
    assert len(again.graph.find_nodes(op="call_function", target=hadamard)) == 3


@torch.no_grad()
def test_one_kind_after_the_other(model, ep) -> None:
    program = ep
    for kind in ("v", "r4", "r3"):
        flags = {k: k == kind for k in ("r3", "v", "r4")}
        program = RotationPass(strict=True, **flags)(program)
    pass_ = RotationPass()
    program = pass_(program)
    assert [s.status for s in pass_.report] == ["already"] * 3
    equal(program.module()(tokens()), model(tokens()))
    equal(
        program.state_dict["layers.0.mlp.down_proj.weight"],
        model.state_dict()["layers.0.mlp.down_proj.weight"] @ rotation_matrix(model.style.ffn).T,
    )


def test_online_twice(model, ep) -> None:
    """Without a fold to remember, the graph itself says what is there."""
    pass_ = RotationPass(counter="online")
    again = pass_(pass_(ep))
    assert {s.status for s in pass_.report} == {"already"}
    equal(again.module()(tokens()), model(tokens()))
    assert again.state_dict["layers.0.mlp.down_proj.weight"] is ep.state_dict["layers.0.mlp.down_proj.weight"]


def test_a_graph_that_lost_its_online_half(rotated) -> None:
    """Folded weights without their rotation are garbage, which nobody gets in silence."""
    broken = copy.deepcopy(rotated)
    for node in broken.graph.find_nodes(op="call_function", target=hadamard):
        node.replace_all_uses_with(node.args[0])
        broken.graph.erase_node(node)
    with pytest.raises(RuntimeError, match="down_proj.*folded by rotpass.*missing"):
        RotationPass()(broken)


# --- caches as buffers


def with_cache(kind: str, **changes):
    model = make(Style(layers=1, cache=kind, **changes))
    for buffer in model.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(2)))
    return model


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "raw"])
@pytest.mark.parametrize("kind", ["index_copy", "index_put", "slice"])
@torch.no_grad()
def test_a_cache_in_a_program_that_may_be_functional(kind: str, functional: bool) -> None:
    model = with_cache(kind)
    reference = copy.deepcopy(model)
    example = tokens(4).clamp(min=1), torch.arange(4)
    ep = export(model, example)
    ep = ep.run_decompositions({}) if functional else ep
    pass_ = RotationPass(seed=1, strict=True)
    program = pass_(ep)
    assert program.graph_signature.buffers_to_mutate == ep.graph_signature.buffers_to_mutate
    meta_is_right(program)
    r = rotation_matrix(model.style.head_dim, seed=1)
    for after in (program, saved_and_loaded(program) if functional else program.run_decompositions({})):
        module, eager = copy.deepcopy(after).module(), copy.deepcopy(reference)
        for start in (0, 0) if kind == "slice" else (0, 4, 8):
            step = tokens(4, seed=start).clamp(min=1), torch.arange(start, start + 4)
            equal(module(*step), eager(*step))
        contents = dict(module.named_buffers())
        for name, buffer in eager.named_buffers():
            equal(contents[name], buffer @ r.T)
    assert {(s.kind, s.inserted, s.undone) for s in pass_.report} == {
        ("r3", "online", "none"),
        ("v", "folded", "folded"),
        ("r4", "online", "folded"),
    }
    caches = program.graph.find_nodes(op="call_function", target=hadamard)
    assert not any(LONGEST in n.meta["val"].shape for n in caches), "what is new is rotated, not the cache"


@torch.no_grad()
def test_a_cache_that_the_program_shows() -> None:
    """Its contents go out too, so they stay as they are."""

    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = with_cache("index_copy")

        def forward(self, ids, positions):
            return self.inner(ids, positions), self.inner.layers[0].attention.k_cache.clone()

    model = Shows()
    step = tokens(4).clamp(min=1), torch.arange(4)
    ep = export(model, step)
    module, eager = RotationPass(seed=1)(copy.deepcopy(ep)).module(), copy.deepcopy(model)
    for _ in range(2):
        equal(module(*step), eager(*step))


class Overwrites(nn.Module):
    """A buffer that is read as it was, by no attention, and then filled anew."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("last", torch.ones(2, 2, 5, 16))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        before = self.last.cumsum(-1)
        self.last.copy_(k * torch.linspace(0.5, 1, 16, dtype=k.dtype))
        return F.scaled_dot_product_attention(q, self.last, v), before


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "raw"])
@torch.no_grad()
def test_a_buffer_that_ends_as_it_began(functional: bool) -> None:
    """Were it left rotated, the next call would read that where it had plain contents."""
    model, x = randomize_(Overwrites().double()), torch.randn(2, 5, 32, dtype=torch.float64)
    ep = export(model, (x,))
    program = RotationPass(seed=1, strict=True)(ep.run_decompositions({}) if functional else ep)
    module, eager = copy.deepcopy(program).module(), copy.deepcopy(model)
    for scale in (1, 2, 3):
        equal(module(x * scale), eager(x * scale))


@torch.no_grad()
def test_other_mutated_buffers() -> None:
    """A counter and a batch norm keep their state."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = make("llama", layers=1), nn.BatchNorm1d(32).double()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, ids):
            self.calls.add_(1)
            return self.norm(self.inner(ids).flatten(0, 1))

    model = Model().train()
    ep = export(model, (tokens(),))
    module, eager = RotationPass()(copy.deepcopy(ep)).module(), copy.deepcopy(model)
    for _ in range(3):
        equal(module(tokens()), eager(tokens()))
    equal(dict(module.named_buffers())["norm.running_mean"], eager.norm.running_mean)
    assert dict(module.named_buffers())["calls"] == eager.calls == 3


# --- names of one weight


class Tied(nn.Module):
    """Two MLPs with one down projection, and an embedding that is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 24), nn.Linear(24, 32, bias=False)
        self.a, self.b = (
            nn.ModuleDict({n: nn.Linear(*s) for n, s in (("gate", (24, 64)), ("up", (24, 64)), ("down", (64, 24)))})
            for _ in range(2)
        )
        self.b["down"].weight = self.a["down"].weight
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for m in (self.a, self.b):
            x = x + m["down"](F.silu(m["gate"](x)) * m["up"](x))
        return self.head(x)


@torch.no_grad()
def test_aliases_stay_one_weight() -> None:
    model = randomize_(Tied().double())
    ep, ids = export(model, (tokens(),)), tokens()
    pass_ = RotationPass(strict=True)
    program = pass_(ep)
    assert [s.undone for s in pass_.report] == ["folded", "folded"]
    state = program.state_dict
    assert state["a.down.weight"] is state["b.down.weight"], "one weight under two names, folded once"
    equal(state["a.down.weight"], model.a["down"].weight @ rotation_matrix(64).T)
    assert state["embed.weight"] is state["head.weight"]
    for after in (program, saved_and_loaded(program), program.run_decompositions({})):
        equal(after.module()(ids), model(ids))


def test_constants_and_non_persistent_buffers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(24, 64).double()
            self.register_buffer("hidden", torch.randn(24, 64, dtype=torch.float64), persistent=False)
            self.constant = torch.randn(24, 64, dtype=torch.float64)

        def forward(self, x):
            return F.linear(F.gelu(self.up(x)), self.hidden) + F.linear(F.relu(self.up(x)), self.constant)

    model, x = Model(), torch.randn(3, 24, dtype=torch.float64)
    ep = export(model, (x,))
    pass_ = RotationPass(strict=True)
    program = pass_(ep)
    assert [s.undone for s in pass_.report] == ["folded"] * 2
    assert set(program.constants) == set(ep.constants)
    for after in (program, saved_and_loaded(program)):
        equal(after.module()(x), model(x))
    r = rotation_matrix(64)
    equal(program.constants["hidden"], model.hidden @ r.T)


# --- precision, devices, recipes


@torch.no_grad()
def test_folds_are_exact_and_cast_once() -> None:
    """In bfloat16 a folded weight is the exact product rounded once."""
    model = make("llama", layers=1, dtype=torch.bfloat16)
    program = RotationPass()(export(model, (tokens(),)))
    name = "layers.0.mlp.down_proj.weight"
    exact = model.state_dict()[name].double() @ rotation_matrix(model.style.ffn).T
    folded = program.state_dict[name]
    assert folded.dtype == torch.bfloat16
    # A product that lies between two bfloat16s to float64's own rounding may fall to either.
    assert (folded == exact.to(torch.bfloat16)).float().mean() > 0.999


def test_fake_weights() -> None:
    """A model on meta: nothing is computed, the sites and the shapes are there."""
    with torch.device("meta"):
        model = make("llama", layers=2)
        ep = export(model, (torch.zeros(2, 7, dtype=torch.long),))
    pass_ = RotationPass(strict=True)
    program = pass_(ep)
    assert pass_.report.counts == {"r3": 2, "v": 2, "r4": 2}
    assert program.state_dict["layers.0.mlp.down_proj.weight"].is_meta


def test_report_of_the_last_program(ep) -> None:
    pass_ = RotationPass(only="nothing*")
    with pytest.warns(UserWarning, match="only="):
        pass_(ep)
    assert not pass_.report.sites
    pass_ = RotationPass()
    pass_(ep)
    first = pass_.report
    pass_(ep)
    assert pass_.report is not first and len(pass_.report) == len(first) == 3


def test_a_submodule_that_is_kept_whole() -> None:
    """``preserve_module_call_signature`` survives."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make("llama", layers=1)

        def forward(self, ids):
            return self.inner(ids) * 2

    model = Model()
    ep = export(model, (tokens(),), preserve_module_call_signature=("inner.layers.0.attention", "inner.layers.0.mlp"))
    program = RotationPass()(ep)
    equal(program.module()(tokens()), model(tokens()))
    unflat = torch.export.unflatten(program)
    equal(unflat(tokens()), model(tokens()))


def test_it_takes_programs_only(model) -> None:
    with pytest.raises(TypeError, match="RotationPass takes an ExportedProgram; got Model"):
        RotationPass()(model)


# --- what others get wrong


def rope_chunk(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rope_halves(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos[..., :half], sin[..., :half]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def rope_interleaved(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    c, s = cos[..., ::2], sin[..., ::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


def rope_complex(x, cos, sin):
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.complex(cos[..., ::2], sin[..., ::2])).flatten(-2)


def rope_partial(x, cos, sin):
    turned, rest = x[..., :8], x[..., 8:]
    return torch.cat((rope_chunk(turned, cos[..., :8], sin[..., :8]), rest), -1)


def rope_addcmul(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((-b, a), -1), sin)


def rope_filled(x, cos, sin):
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    out[..., :half] = -x[..., half:]
    out[..., half:] = x[..., :half]
    return x * cos + out * sin


ROPES = [rope_chunk, rope_halves, rope_interleaved, rope_complex, rope_partial, rope_addcmul, rope_filled]


@pytest.mark.parametrize(
    "rope, norm",
    [*((rope, "") for rope in ROPES), *((r, n) for r in (rope_chunk, rope_filled) for n in ("before", "after"))],
)
@torch.no_grad()
def test_every_spelling_of_rope(rope, norm: str) -> None:
    """With other tables for Q than for K, and a norm on either side; what comes after them is what is rotated."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            q, k, v = (f(x).unflatten(-1, (2, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
            angles = torch.arange(x.shape[1])[:, None] * torch.linspace(0.1, 1, 8, dtype=x.dtype).repeat(2)
            tables = [(angles.cos(), angles.sin()), ((angles * 2).cos(), (angles * 2).sin())]
            if norm == "before":
                q, k = F.rms_norm(q, (16,)), F.rms_norm(k, (16,))
            q, k = rope(q, *tables[0]), rope(k, *tables[1])
            if norm == "after":
                q, k = F.rms_norm(q, (16,)), F.rms_norm(k, (16,))
            return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    model, x = randomize_(Model().double()), torch.randn(2, 5, 32, dtype=torch.float64)
    pass_ = RotationPass(seed=2, strict=True)
    program = pass_(export(model, (x,)))
    equal(program.module()(x), model(x))
    assert [(s.kind, s.inserted) for s in pass_.report] == [("r3", "online"), ("v", "folded")]
    [call] = program.graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    assert [n.target for n in call.args[:2]] == [hadamard] * 2


def test_public_names() -> None:
    assert rotpass.RotationPass is RotationPass


def test_an_input_with_the_name_of_a_builtin() -> None:
    """``input`` is what torch.nn's own modules call theirs."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, input, len, type=None):
            return self.down(F.gelu(self.up(input))) * len

    model, x = Model(), torch.randn(2, 16)
    for program in (export(model, (x, torch.ones(1))), export(nn.Sequential(model.up, nn.GELU(), model.down), (x,))):
        pass_ = RotationPass(strict=True)
        after = pass_(program)
        assert pass_.report.counts["r4"] == 1
        args = program.example_inputs[0]
        torch.testing.assert_close(after.module()(*args), program.module()(*args), rtol=1e-5, atol=1e-5)
        after.run_decompositions()
