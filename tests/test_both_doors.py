"""Both doors on the same models: the same sites, the results of the model before, and values that really are rotated."""

import copy
import dataclasses
import warnings

import models
import pytest
import torch
from models import STYLES, Model, Style, make, rotation_matrix, tokens
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.export import Dim, ExportedProgram, export
from torch.utils import _pytree as pytree

import rotpass
from rotpass import FakeQuant, RotationPass

sdpa = torch.ops.aten.scaled_dot_product_attention.default
PROJECTIONS = {torch.ops.aten.linear.default: 0, torch.ops.aten.addmm.default: 1}
MAIN_STYLES = ["llama", "qwen3", "phi3", "gpt2"]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="rotpass")
        yield
    torch._dynamo.reset()


class Recording:
    """An inner backend: another one that keeps the graph and the inputs of every call."""

    def __init__(self, inner: str = "aot_eager") -> None:
        self.inner = inner
        self.calls: list[tuple[torch.fx.GraphModule, tuple]] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list):
        kept, run = copy.deepcopy(gm), lookup_backend(self.inner)(gm, inputs)

        def call(*args):
            self.calls.append((kept, tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)))
            return run(*args)

        return call


class Reads(torch.fx.Interpreter):
    """What reaches every attention and every projection whose input is ``ffn`` wide."""

    def __init__(self, gm: torch.fx.GraphModule, ffn: int) -> None:
        super().__init__(gm)
        self.ffn, self.q, self.k, self.v, self.down = ffn, [], [], [], []

    def call_function(self, target, args, kwargs):
        if target is sdpa:
            for kept, x in zip((self.q, self.k, self.v), args):
                kept.append(x.clone())
        elif (position := PROJECTIONS.get(target)) is not None and args[position].shape[-1] == self.ffn:
            self.down.append(args[position].clone())
        return super().call_function(target, args, kwargs)


def reads(gm: torch.fx.GraphModule, inputs, ffn: int) -> Reads:
    with torch.no_grad():
        (read := Reads(gm, ffn)).run(*inputs)
    return read


def inputs_of(ep: ExportedProgram, *args) -> list:
    given = iter(pytree.tree_leaves(args))
    tensors = {**ep.state_dict, **ep.constants}
    return [
        tensors[spec.target].clone() if spec.target in tensors else next(given)
        for spec in ep.graph_signature.input_specs
    ]


def close(actual, expected, tolerance: float = 1e-9) -> None:
    actual, expected = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        assert a.shape == e.shape and a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * max(e.abs().max().item(), 1e-3))


def rotated_by(matrix: Tensor, actual: list[Tensor], before: list[Tensor]) -> None:
    """Each value is the one before times the matrix, which is a change."""
    assert len(actual) == len(before) > 0
    for a, b in zip(actual, before):
        close(a, b @ matrix.T)
        assert (a - b).abs().max() > 0.1 * b.abs().max()


def check_reads(after: Reads, before: Reads, style: Style, **how) -> None:
    per_head = rotation_matrix(style.head_dim, **how)
    rotated_by(per_head, after.q, before.q)
    rotated_by(per_head, after.k, before.k)
    rotated_by(per_head, after.v, before.v)
    rotated_by(rotation_matrix(style.ffn, **how), after.down, before.down)


def site_key(site):
    return site.kind, site.where, site.size, site.width, site.status, site.inserted, site.undone, site.reason


def compiled(model, inner=None, **recipe):
    backend = rotpass.backend(inner=inner or "aot_eager", **recipe)
    backend.clear()
    return torch.compile(model, backend=backend, fullgraph=True), backend


def through(door: str, model, args: tuple, **recipe):
    """A callable that is the model, rotated through a door."""
    if door == "compile":
        return compiled(model, **recipe)[0]
    return RotationPass(**recipe)(export(model, args)).module()


DOORS = ["program", "compile"]


# --- static shapes, float64


@pytest.mark.parametrize("name", STYLES)
@torch.no_grad()
def test_same_sites_and_results(name: str) -> None:
    model, ids = make(name, layers=2 if name in MAIN_STYLES else 1), tokens()
    style, expected = model.style, model(ids)
    ep, inner, pass_ = export(model, (ids,)), Recording(), RotationPass(strict=True)
    rotated = pass_(ep)
    run, backend = compiled(model, inner, strict=True)

    close(rotated.module()(ids), expected)
    close(run(ids), expected)
    assert [site_key(s) for s in pass_.report] == [site_key(s) for s in backend.report]
    expect = [
        site
        for i in range(style.layers)
        for site in (
            ("r3", f"layers.{i}.attention", style.head_dim, style.head_dim, "rotated", "online", "none", ""),
            ("v", f"layers.{i}.attention", style.head_dim, style.head_dim, "rotated", "folded", "folded", ""),
            ("r4", f"layers.{i}.mlp.down_proj", style.ffn, style.ffn, "rotated", "online", "folded", ""),
        )
    ]
    assert [site_key(s) for s in pass_.report] == expect
    assert pass_.report.counts == dict.fromkeys(("r3", "v", "r4"), style.layers)

    before = reads(ep.graph_module, inputs_of(ep, ids), style.ffn)
    check_reads(reads(rotated.graph_module, inputs_of(rotated, ids), style.ffn), before, style)
    [(gm, inputs)] = inner.calls
    check_reads(reads(gm, inputs, style.ffn), before, style)


def test_v_costs_nothing_at_run_time() -> None:
    """Two Hadamards for R3 and one for R4 in a layer; V is in the weights."""
    model = make("llama", layers=1)
    graph = RotationPass()(export(model, (tokens(),))).graph
    assert len(graph.find_nodes(op="call_function", target=torch.ops.rotpass.hadamard.default)) == 3


# --- dtypes


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", MAIN_STYLES)
@torch.no_grad()
def test_float32(name: str, door: str) -> None:
    model, ids = make(name, layers=1, dtype=torch.float32), tokens()
    close(through(door, model, (ids,))(ids), model(ids), 1e-5)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", MAIN_STYLES)
@torch.no_grad()
def test_bfloat16(name: str, door: str) -> None:
    """The rotated model in bfloat16 is as near to the exact one as the model before in bfloat16 is."""
    model, ids = make(name, layers=1, dtype=torch.bfloat16), tokens(12)
    exact, before = copy.deepcopy(model).double()(ids), model(ids)
    after = through(door, model, (ids,))(ids)
    assert after.dtype == torch.bfloat16

    def error(y: Tensor) -> float:
        return ((y.double() - exact).square().mean() / exact.square().mean()).sqrt().item()

    assert error(after) < 2 * error(before) < 0.1


# --- dynamic shapes


@pytest.mark.parametrize("name", MAIN_STYLES)
@torch.no_grad()
def test_dynamic_shapes(name: str) -> None:
    model, inner = make(name, layers=1), Recording("aot_eager" if name == "gpt2" else "eager")
    shapes = {"ids": {0: Dim("batch", max=8), 1: Dim("length", max=models.LONGEST)}}
    ep = export(model, (tokens(),), dynamic_shapes=shapes)
    program = RotationPass(strict=True)(ep).module()
    backend = rotpass.backend(inner=inner, strict=True)
    run = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for length, batch in ((7, 2), (12, 3), (5, 4)):
        ids = tokens(length, batch)
        close(program(ids), model(ids))
        close(run(ids), model(ids))
    assert len({id(gm) for gm, _ in inner.calls}) == 1, "one graph for all shapes"
    before = reads(ep.graph_module, inputs_of(ep, ids), model.style.ffn)
    check_reads(reads(*inner.calls[-1], model.style.ffn), before, model.style)


# --- gradients


def gradients(model: torch.nn.Module, run, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    run(ids).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name, training", [*((name, True) for name in MAIN_STYLES), ("llama", False)])
def test_gradients_under_compile(name: str, training: bool) -> None:
    model, ids, inner = make(name, layers=1).train(training), tokens(), Recording()
    expected = gradients(model, model, ids)
    run, backend = compiled(model, inner, seed=3)
    actual = gradients(model, run, ids)
    for parameter, gradient in expected.items():
        close(actual[parameter], gradient)
    assert backend.report.counts == {"r3": 1, "v": 1, "r4": 1}
    ep = export(model, (ids,))
    before = reads(ep.graph_module, inputs_of(ep, ids), model.style.ffn)
    check_reads(reads(*inner.calls[0], model.style.ffn), before, model.style, seed=3)


@pytest.mark.parametrize("name", MAIN_STYLES)
def test_gradients_of_a_program(name: str) -> None:
    """Where the fold stays in the graph they are the model's; a folded weight's are the model's, folded alike."""
    model, ids = make(name, layers=1).train(), tokens()
    expected = gradients(model, model, ids)
    program = RotationPass(counter="online")(export(model, (ids,))).module()
    actual = gradients(program, program, ids)
    for parameter, gradient in expected.items():
        close(actual[parameter], gradient)

    program = RotationPass(seed=5)(export(model, (ids,))).module()
    actual = gradients(program, program, ids)
    r4 = rotation_matrix(model.style.ffn, seed=5)
    down = "layers.0.mlp.down_proj.weight"
    close(actual[down], r4 @ expected[down] if model.style.conv1d else expected[down] @ r4.T)
    untouched = [p for p in expected if not any(part in p for part in ("down_proj.w", "o_proj.w", "v_proj"))]
    for parameter in untouched:
        if "qkv" not in parameter:
            close(actual[parameter], expected[parameter])


# --- caches


CACHES = ["index_copy", "index_put", "slice", "cat", "inout"]


def steps(style: Style) -> list[tuple[Tensor, Tensor]]:
    """A prefill and three tokens; the slice cache always writes from its beginning."""
    lengths = [5, 5] if style.cache == "slice" else [5, 1, 1, 1]
    starts = [0, 0] if style.cache == "slice" else [0, 5, 6, 7]
    return [(tokens(n, seed=i).clamp(min=1), torch.arange(s, s + n)) for i, (s, n) in enumerate(zip(starts, lengths))]


def decode(run, model: Model, start=None) -> list:
    """Outputs of all steps; a cache that is the caller's is handed on."""
    past = start if start is not None else model.empty_past(0 if model.style.cache == "cat" else models.LONGEST)
    outputs = []
    for ids, positions in steps(model.style):
        if model.style.cache in ("cat", "inout"):
            logits, past = run(ids, positions, past)
            outputs.append((logits, past))
        else:
            outputs.append(run(ids, positions))
    return outputs


def buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in module.named_buffers() if n.endswith("_cache")}


@pytest.mark.parametrize("rope", [True, False], ids=["rope", "plain"])
@pytest.mark.parametrize("cache", ["index_copy", "index_put", "slice"])
@torch.no_grad()
def test_a_programs_own_cache_holds_rotated_values(cache: str, rope: bool) -> None:
    """It begins with contents, which are rotated with what is written to it; K is rotated once, before the write."""
    model = make(
        "llama" if rope else "gpt2", layers=1, cache=cache, mask="bool", **({} if rope else {"fused": "split"})
    )
    for buffer in model.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(2)))
    reference, length = copy.deepcopy(model), Dim("length", min=1, max=models.LONGEST)
    static = cache == "slice"
    ep = export(model, steps(model.style)[0], dynamic_shapes=None if static else ({1: length}, {0: length}))
    pass_ = RotationPass(strict=True, seed=1)
    program = pass_(ep).module()
    r = rotation_matrix(model.style.head_dim, seed=1)
    for name, before in buffers(reference).items():
        close(dict(program.named_buffers())[name], before @ r.T)
    close(decode(program, model), decode(reference, reference))
    assert {(s.kind, s.inserted, s.undone) for s in pass_.report} == {
        ("r3", "online", "none"),
        ("v", "folded", "folded"),
        ("r4", "online", "folded"),
    }
    for name, before in buffers(reference).items():
        close(dict(program.named_buffers())[name], before @ r.T)
    graph = program.graph
    rotations = graph.find_nodes(op="call_function", target=torch.ops.rotpass.hadamard.default)
    assert len(rotations) == 3
    assert not any(models.LONGEST in n.meta["val"].shape for n in rotations), "what is new is rotated, not the cache"


@pytest.mark.parametrize("contents", ["plain", "rotated"])
@pytest.mark.parametrize("cache", ["index_copy", "index_put", "slice"])
@torch.no_grad()
def test_a_modules_cache_under_compile(cache: str, contents: str) -> None:
    model = make("llama", layers=1, cache=cache)
    reference, inner = copy.deepcopy(model), Recording()
    run, backend = compiled(model, inner, cache=contents, strict=True)
    close(decode(run, model), decode(reference, reference))
    r = rotation_matrix(model.style.head_dim)
    for name, before in buffers(reference).items():
        close(buffers(model)[name], before @ r.T if contents == "rotated" else before)
    assert {s.kind for s in backend.report.rotated} == {"r3", "v", "r4"}
    remarked = [s.kind for s in backend.report if "whole cache" in s.reason]
    assert remarked == (["r3", "v"] if contents == "plain" else [])
    v = next(s for s in backend.report if s.kind == "v")
    assert v.inserted == ("folded" if contents == "rotated" else "online") and v.undone == "folded"


@pytest.mark.parametrize("contents", ["plain", "rotated"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("cache", ["cat", "inout"])
@torch.no_grad()
def test_a_cache_that_crosses_the_boundary(cache: str, door: str, contents: str) -> None:
    model = make("llama", layers=1, cache=cache)
    before = decode(model, model)
    start = [tuple(t.contiguous() for t in pair) for pair in before[0][1]]
    recipe = {"cache": contents, "strict": True}
    if door == "compile":
        run, _ = compiled(model, **recipe)
    else:
        length, past = Dim("length", min=1, max=8), Dim("past", min=1, max=64)
        shapes = ({1: length}, {0: length}, [({2: past}, {2: past})] if cache == "cat" else [(None, None)])
        example = tokens(3), torch.arange(5, 8), start
        run = RotationPass(**recipe)(export(model, example, dynamic_shapes=shapes)).module()
    r = rotation_matrix(model.style.head_dim)
    given = [tuple(t @ r.T for t in pair) for pair in start] if contents == "rotated" else start
    for (ids, positions), (logits, kept) in zip(steps(model.style)[1:], before[1:]):
        actual, given = run(ids, positions, given)
        close(actual, logits)
        close(given, [tuple(t @ r.T for t in pair) for pair in kept] if contents == "rotated" else kept)


# --- recipes


def in_both(model: Model, ids: Tensor, **recipe):
    """Both doors' results and what the program's graph reads; their reports are the same."""
    ep, pass_ = export(model, (ids,)), RotationPass(**recipe)
    rotated = pass_(ep)
    run, backend = compiled(model, **recipe)
    with torch.no_grad():
        results = rotated.module()(ids), run(ids)
    assert [site_key(s) for s in pass_.report] == [site_key(s) for s in backend.report]
    before = reads(ep.graph_module, inputs_of(ep, ids), model.style.ffn)
    return results, pass_.report, before, reads(rotated.graph_module, inputs_of(rotated, ids), model.style.ffn), rotated


@pytest.mark.parametrize(
    "name, counter", [("qwen3", "fold"), ("gpt2", "fold"), ("neox", "fold"), ("llama", "online"), ("gpt2", "online")]
)
def test_signs(name: str, counter: str) -> None:
    model, ids = make(name, layers=1), tokens()
    expected = model(ids).detach()
    results, report, before, after, _ = in_both(model, ids, seed=7, counter=counter, strict=True)
    for result in results:
        close(result, expected)
    check_reads(after, before, model.style, seed=7)
    undone = {"v": "folded", "r4": "folded"} if counter == "fold" else {"v": "online", "r4": "online"}
    assert {s.kind: s.undone for s in report if s.kind != "r3"} == undone


def test_online_leaves_the_weights() -> None:
    model, ids = make("llama", layers=1), tokens()
    *_, rotated = in_both(model, ids, counter="online")
    for name, tensor in model.state_dict().items():
        assert torch.equal(rotated.state_dict[name], tensor)


@pytest.mark.parametrize("block", [32, 16, 4])
def test_block_size(block: int) -> None:
    model, ids = make("llama", layers=1), tokens()
    results, report, before, after, _ = in_both(model, ids, block_size=block, strict=True)
    for result in results:
        close(result, model(ids).detach())
    rotated_by(rotation_matrix(block, model.style.ffn), after.down, before.down)
    rotated_by(rotation_matrix(16), after.k, before.k)
    assert [(s.size, s.width) for s in report if s.kind == "r4"] == [(block, 128)]


def test_a_width_without_a_full_matrix() -> None:
    """152 * 3 = 456 and 12 * 38 do not build 38 * 16: the largest block that divides the width is taken."""
    model, ids = make("llama", layers=1, ffn=107 * 16), tokens()
    results, report, before, after, _ = in_both(model, ids)
    for result in results:
        close(result, model(ids).detach())
    [site] = [s for s in report if s.kind == "r4"]
    assert (site.size, site.width, site.status) == (16, 1712, "rotated")
    rotated_by(rotation_matrix(16, 1712), after.down, before.down)


@pytest.mark.parametrize("table", ["quarot", "compressed-tensors"])
def test_other_tables(table: str) -> None:
    model, ids = make("llama", layers=1, head_dim=28, ffn=56), tokens()
    results, _, before, after, _ = in_both(model, ids, table=table, strict=True)
    for result in results:
        close(result, model(ids).detach())
    check_reads(after, before, model.style, table=table)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_prefolded(name: str) -> None:
    """The weights are folded here, densely; only the online half is missing."""
    model, ids = make(name, layers=1), tokens()
    expected, style, folded = model(ids), model.style, copy.deepcopy(model)
    r4, heads = rotation_matrix(style.ffn), rotation_matrix(style.head_dim, style.heads * style.head_dim)
    kv = rotation_matrix(style.head_dim, style.kv_heads * style.head_dim)
    attention, down = folded.layers[0].attention, folded.layers[0].mlp.down_proj
    if style.conv1d:
        down.weight.copy_(r4 @ down.weight)
        rows = slice(2 * len(heads), 3 * len(heads))
        attention.qkv_proj.weight[:, rows] = attention.qkv_proj.weight[:, rows] @ kv.T
        attention.qkv_proj.bias[rows] = kv @ attention.qkv_proj.bias[rows]
        attention.o_proj.weight.copy_(heads @ attention.o_proj.weight)
    else:
        down.weight.copy_(down.weight @ r4.T)
        attention.v_proj.weight.copy_(kv @ attention.v_proj.weight)
        attention.v_proj.bias.copy_(kv @ attention.v_proj.bias)
        attention.o_proj.weight.copy_(attention.o_proj.weight @ heads.T)
    assert (folded(ids) - expected).abs().max() > 0.01 * expected.abs().max()
    results, report, _, after, _ = in_both(folded, ids, counter="prefolded", strict=True)
    for result in results:
        close(result, expected)
    assert {s.kind: (s.inserted, s.undone) for s in report} == {
        "r3": ("online", "none"),
        "v": ("prefolded", "prefolded"),
        "r4": ("online", "prefolded"),
    }
    ep = export(model, (ids,))
    check_reads(after, reads(ep.graph_module, inputs_of(ep, ids), style.ffn), style)


@pytest.mark.parametrize(
    "recipe, where",
    [
        ({"only": "layers.0.*"}, {("r3", "layers.0.attention"), ("v", "layers.0.attention"), ("r4", "layers.0.mlp.down_proj")}),
        ({"skip": ("*.attention", "layers.1.*")}, {("r4", "layers.0.mlp.down_proj")}),
        ({"only": ("*attention",), "skip": ("layers.0.*",), "v": False}, {("r3", "layers.1.attention")}),
        ({"r3": False, "v": False}, {("r4", "layers.0.mlp.down_proj"), ("r4", "layers.1.mlp.down_proj")}),
        ({"r3": False, "r4": False, "only": "layers.1*"}, {("v", "layers.1.attention")}),
    ],
)  # fmt: skip
def test_only_and_skip(recipe: dict, where: set) -> None:
    """What is left out is no site, and nothing of it is touched."""
    model, ids = make("llama"), tokens()
    ep, pass_ = export(model, (ids,)), RotationPass(strict=True, **recipe)
    rotated = pass_(ep)
    close(rotated.module()(ids).detach(), model(ids).detach())
    assert {(s.kind, s.where) for s in pass_.report} == where
    before, after = (reads(p.graph_module, inputs_of(p, ids), model.style.ffn) for p in (ep, rotated))
    for i in range(2):
        for kind, names in (("r3", "qk"), ("v", "v")):
            for name in names:
                a, b = getattr(after, name)[i], getattr(before, name)[i]
                wanted = (kind, f"layers.{i}.attention") in where
                close(a, b @ rotation_matrix(16).T if wanted else b)
        wanted = ("r4", f"layers.{i}.mlp.down_proj") in where
        close(after.down[i], before.down[i] @ rotation_matrix(128).T if wanted else before.down[i])


@pytest.mark.parametrize("recipe", [{"only": "layers.0.*"}, {"skip": ("*.attention", "layers.1.*")}])
def test_only_and_skip_in_both_doors(recipe: dict) -> None:
    """Both spell a module's path alike."""
    model, ids = make("llama"), tokens()
    results, report, *_ = in_both(model, ids, strict=True, **recipe)
    for result in results:
        close(result, model(ids).detach())
    assert len(report) == (3 if "only" in recipe else 1)


# --- fake quantizers


def quantize(x: Tensor, bits, symmetric: bool) -> Tensor:
    """One scale for the last axis, written down plainly."""
    if bits is None:
        return x
    if bits == "fp8":
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    if symmetric:
        scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        return torch.round(x / scale) * scale
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    return torch.round((x - low) / scale) * scale + low


def naive(model: Model, monkeypatch: pytest.MonkeyPatch, quant: FakeQuant, r3: bool, v: bool, r4: bool, seed=None):
    """The eager model with everything done where it stands: dense rotations and quantizers around SDPA and down_proj."""
    plain, style = torch.nn.functional.scaled_dot_product_attention, model.style
    head = rotation_matrix(style.head_dim, seed=seed)
    wide = rotation_matrix(style.ffn, seed=seed)

    def attention(q, k, value, **kwargs):
        if r3:
            q, k = q @ head.T, k @ head.T
        if v:
            value = value @ head.T
        zeros = value.abs().amax(-1, keepdim=True) == 0  # an empty slot of a cache has no scale
        q, k, value = quantize(q, quant.q, True), quantize(k, quant.k, False), quantize(value, quant.v, False)
        if zeros.any():
            k, value = torch.where(zeros, 0, k), torch.where(zeros, 0, value)
        y = plain(q, k, value, **kwargs)
        return y @ head if v else y

    def down(module, args):
        x = args[0]
        return (quantize(x @ wide.T, quant.down, True) @ wide if r4 else quantize(x, quant.down, True),)

    monkeypatch.setattr(models.F, "scaled_dot_product_attention", attention)
    hooks = [layer.mlp.down_proj.register_forward_pre_hook(down) for layer in model.layers]

    def undo() -> None:
        monkeypatch.undo()
        for hook in hooks:
            hook.remove()

    return undo


QUANTIZERS = [
    FakeQuant(q=8, k=4, v=3, down=4),
    FakeQuant(k=2),
    FakeQuant(q="fp8", v="fp8", down="fp8"),
    FakeQuant(down=2),
]


@pytest.mark.parametrize(
    "quant, rotations",
    [(quant, rotated) for quant in QUANTIZERS for rotated in ("r3 v r4", "")] + [(QUANTIZERS[0], "r3 r4")],
)
@torch.no_grad()
def test_fake_quantizers(monkeypatch, quant: FakeQuant, rotations: str) -> None:
    flags = {kind: kind in rotations.split() for kind in ("r3", "v", "r4")}
    model, ids = make("llama", layers=1), tokens()
    unquantized = model(ids)
    undo = naive(model, monkeypatch, quant, **flags, seed=2)
    expected = model(ids)
    undo()
    results, *_ = in_both(model, ids, seed=2, fake_quant=quant, **flags)
    for result in results:
        close(result, expected)
    assert (expected - unquantized).abs().max() > 1e-4 * unquantized.abs().max()


def comes_quantized(write: torch.fx.Node) -> bool:
    """Whether what is written is a fake quantizer's result, seen through views."""
    node = write.args[3]
    while node.target in (torch.ops.aten.transpose.int, torch.ops.aten.view.default):
        node = node.args[0]
    return node.target is torch.ops.rotpass.fake_quantize.default


@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "baseline"])
@pytest.mark.parametrize("door", DOORS)
@torch.no_grad()
def test_fake_quantizers_of_a_cache(monkeypatch, door: str, rotated: bool) -> None:
    """Before the program's own cache, at the attention's input where the cache is the caller's: the numbers are the same."""
    quant = FakeQuant(q=8, k=4, v=4, down=4)
    model, flags = make("llama", layers=1, cache="index_copy"), dict.fromkeys(("r3", "v", "r4"), rotated)
    reference = copy.deepcopy(model)
    undo = naive(reference, monkeypatch, quant, **flags)
    expected = decode(reference, reference)
    undo()
    if door == "compile":
        run, _ = compiled(model, fake_quant=quant, **flags)
    else:
        length = Dim("length", min=1, max=models.LONGEST)
        ep = export(model, steps(model.style)[0], dynamic_shapes=({1: length}, {0: length}))
        rotated_ep = RotationPass(fake_quant=quant, **flags)(ep)
        run = rotated_ep.module()
        writes = rotated_ep.graph.find_nodes(op="call_function", target=torch.ops.aten.index_copy_.default)
        assert len(writes) == 2 and all(map(comes_quantized, writes))
    close(decode(run, model), expected)


def test_fake_quantizers_pass_gradients_straight_through() -> None:
    model, ids = make("llama", layers=1).train(), tokens()
    run, _ = compiled(model, fake_quant=FakeQuant(q=8, k=8, v=8, down=8))
    actual, expected = gradients(model, run, ids), gradients(model, model, ids)
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() < 0.1 * gradient.norm(), name


def test_recipe_is_one_for_both_doors() -> None:
    """A whole Recipe and its fields are the same thing."""
    recipe, ids, model = rotpass.Recipe(r4=False, seed=3), tokens(), make("llama", layers=1)
    ep = export(model, (ids,))
    texts = [
        str(p(ep).graph)
        for p in (
            RotationPass(recipe),
            RotationPass(**{f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}),
        )
    ]
    assert texts[0] == texts[1]
    assert rotpass.backend(recipe) is rotpass.backend(r4=False, seed=3)
