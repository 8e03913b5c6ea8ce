"""Every reason for which a place is left alone, every remark and every exception: what triggers it, and that nothing changed."""

import pickle
import re
import warnings

import pytest
import torch
from models import make, randomize_, rotation_matrix, tokens
from test_match import HEADS, HIDDEN, WIDTH, Attention, Mlp, equal, x_of
from torch import nn
from torch.export import Dim, export
from torch.nn import functional as F

import rotpass
from rotpass import FakeQuant, Recipe, RotationPass
from rotpass.report import Report, Site, check

hadamard = torch.ops.rotpass.hadamard.default


def program(model: nn.Module, *args, **kwargs):
    return export(randomize_(model.double().eval()), args or (x_of(),), **kwargs)


def refused(ep, kind: str, reason: str, **recipe) -> Site:
    """The kind is refused for this reason and alone; nothing of the graph or the weights changes."""
    pass_ = RotationPass(**{k: k == kind for k in ("r3", "v", "r4")}, **recipe)
    with pytest.warns(UserWarning, match="rotpass rotated nothing: 1 refused, e.g. "):
        after = pass_(ep)
    [site] = pass_.report.refused
    assert pass_.report.sites == [site] and pass_.report.rotated == [] and pass_.report.counts[kind] == 0
    assert (site.kind, site.status, site.inserted, site.undone) == (kind, "refused", "none", "none")
    assert re.search(reason, site.reason), site.reason
    assert str(after.graph) == str(ep.graph)
    assert set(after.state_dict) == set(ep.state_dict)
    assert all(after.state_dict[name] is tensor for name, tensor in ep.state_dict.items())
    with pytest.raises(ValueError, match=rf"strict=True and 1 of 1 sites were refused: {kind} at .*: .*{reason}"):
        RotationPass(pass_.recipe, strict=True)(ep)
    return site


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


class Plain(nn.Module):
    def forward(self, q, k, v):
        return attend(q, k, v) * 2


def qkv(width: int, v_width: int | None = None, dtype=torch.float64) -> list[torch.Tensor]:
    return [torch.randn(2, 2, 5, w).to(dtype) for w in (width, width, v_width or width)]


# --- attention


@pytest.mark.parametrize("kind", ["r3", "v"])
def test_a_head_vector_whose_length_is_not_static(kind: str) -> None:
    width = Dim("width", min=4, max=64)
    shapes = ({3: width}, {3: width}, {3: width})
    ep = export(Plain(), tuple(qkv(16)), dynamic_shapes=shapes)
    refused(ep, kind, "head vectors have no static length in common: make head_dim static")


@pytest.mark.parametrize("kind", ["r3", "v"])
def test_a_head_vector_of_one_value(kind: str) -> None:
    site = refused(export(Plain(), tuple(qkv(1))), kind, "a head vector of length 1 has nothing to rotate")
    assert site.width == 1


@pytest.mark.parametrize("kind, width, table", [("r3", 6, "default"), ("v", 14, "default"), ("r3", 11, "quarot")])
def test_a_head_dim_without_a_matrix(kind: str, width: int, table: str) -> None:
    reason = f"head_dim {width} has no Hadamard matrix, nor a block of at least 16, in the '{table}' table"
    site = refused(export(Plain(), tuple(qkv(width))), kind, reason, table=table)
    assert (site.size, site.width) == (0, width)


def test_values_without_a_matrix_leave_the_keys_alone() -> None:
    """Each kind is decided for itself."""
    pass_ = RotationPass()
    pass_(export(Plain(), tuple(qkv(16, 6))))
    assert [(s.kind, s.status) for s in pass_.report] == [("r3", "rotated"), ("v", "refused")]


class HalfRotated(Attention):
    def attend(self, q, k, v):
        return super().attend(torch.ops.rotpass.hadamard(q, WIDTH), k, v)


def test_one_half_of_a_pair() -> None:
    site = refused(program(HalfRotated()), "r3", "one of queries and keys is rotated already: rotate both or neither")
    assert site.size == WIDTH


@pytest.mark.parametrize("kind", ["r3", "v"])
def test_inputs_that_are_quantized(kind: str) -> None:
    """No CPU kernel attends in float8, so the graph is made by hand; only matching looks at it."""
    ep = export(Plain(), tuple(qkv(16)))
    [call] = ep.graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    for n in call.args[:3]:
        n.meta["val"] = n.meta["val"].to(torch.float8_e4m3fn)
    pass_ = RotationPass(**{k: k == kind for k in ("r3", "v", "r4")})
    with pytest.warns(UserWarning, match="rotated nothing"):
        pass_(ep)
    [site] = pass_.report
    assert site.status == "refused"
    assert site.reason == "its inputs are torch.float8_e4m3fn: rotate before they are quantized"


# --- MLP


@pytest.mark.parametrize("width, table", [(6, "default"), (107 * 4, "default"), (77, "compressed-tensors")])
def test_a_width_without_a_matrix(width: int, table: str) -> None:
    reason = f"width {width} has no Hadamard matrix, nor a block of at least 16, in the '{table}' table"
    site = refused(program(Mlp(width=width)), "r4", reason, table=table)
    assert (site.where, site.size, site.width) == ("down", 0, width)


def test_a_block_that_does_not_divide() -> None:
    refused(program(Mlp(width=72)), "r4", "block_size 16 does not divide its width 72", block_size=16)


class Scaled(torch.Tensor):
    """A weight of a tensor subclass, as quantizers make them."""


def test_a_weight_that_is_quantized() -> None:
    """Its counter-rotation could go nowhere."""
    ep = program(Mlp())
    weight = torch.Tensor._make_subclass(Scaled, ep.state_dict["down.weight"].detach())
    ep.state_dict["down.weight"] = nn.Parameter(weight)
    refused(ep, "r4", "its weight is a Scaled: fold before quantizing, with rotpass.fold_")


def test_an_input_that_is_quantized() -> None:
    ep = program(Mlp())
    [mul] = ep.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    mul.meta["val"] = mul.meta["val"].to(torch.float8_e4m3fn)
    pass_ = RotationPass()
    with pytest.warns(UserWarning, match="rotated nothing"):
        pass_(ep)
    [site] = pass_.report
    assert (site.status, site.size) == ("refused", 64)
    assert site.reason == "its input is torch.float8_e4m3fn: rotate before it is quantized"


# --- remarks: rotated, and worth a word


class Computed(Mlp):
    def forward(self, x):
        return F.linear(F.silu(self.gate(x)) * self.up(x), self.down.weight * 2)


class Half(Mlp):
    def forward(self, x):
        return (
            F.linear(F.silu(self.gate(x)) * self.up(x), self.down.weight)
            + F.embedding(torch.zeros(1, dtype=torch.long), self.down.weight).sum()
        )


class Written(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randn(HIDDEN, 64))

    def forward(self, x):
        self.w[:3].mul_(0.5)
        return F.linear(F.silu(self.gate(x)) * self.up(x), self.w)


REMARKS = [
    (Computed, "its weight is rotated at every call: its weight is not a parameter"),
    (Half, "its weight is rotated at every call: its weight has other users"),
    (Written, "its weight is rotated at every call: its weight is written to in the graph"),
]


@pytest.mark.parametrize("model, remark", REMARKS)
def test_a_weight_that_is_rotated_at_every_call(model: type[Mlp], remark: str) -> None:
    pass_ = RotationPass(strict=True)
    ep = program(model())
    after = pass_(ep)
    [site] = pass_.report
    assert (site.status, site.inserted, site.undone, site.reason) == ("rotated", "online", "online", remark)
    names = set(ep.state_dict) - {"rotpass_plan"}
    assert all(after.state_dict[name] is ep.state_dict[name] for name in names)


class Past(Attention):
    def forward(self, x, past_k, past_v):
        q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
        k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        return self.out(self.attend(q, k, v)), k, v


def past() -> list[torch.Tensor]:
    return [torch.randn(2, HEADS, 4, WIDTH, dtype=torch.float64) for _ in range(2)]


def test_a_cache_that_is_rotated_at_every_step() -> None:
    pass_ = RotationPass()
    pass_(program(Past(), x_of(), *past()))
    remark = 'the whole cache is rotated at every step: cache="rotated" rotates only what is new'
    assert [s.reason for s in pass_.report] == [remark] * 2
    pass_ = RotationPass(cache="rotated")
    pass_(program(Past(), x_of(), *past()))
    assert [s.reason for s in pass_.report] == ["", ""]


# --- cache="rotated" that cannot be


class Reads(Past):
    def forward(self, x, past_k, past_v):
        return *super().forward(x, past_k, past_v), past_k.mean()


class Unknown(Past):
    """An update that no table knows."""

    def forward(self, x, past_k, past_v):
        q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
        past_k = past_k.masked_scatter(torch.ones(2, HEADS, 4, 1, dtype=torch.bool), k)
        return self.out(self.attend(q, past_k, v)), past_k


class Scatter(Past):
    def forward(self, x, past_k, past_v):
        q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
        past_k.masked_scatter_(torch.ones(2, HEADS, 4, 1, dtype=torch.bool), k)
        return self.out(self.attend(q, past_k, past_v))


class Narrow(Past):
    """Head vectors that no matrix fits."""

    def heads(self, t):
        return t.unflatten(-1, (-1, 6)).transpose(1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(24, 12), nn.Linear(24, 12), nn.Linear(24, 12), nn.Linear(12, 24)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "model, why",
    [
        (
            Reads,
            "the keys of the model cross the graph's boundary at 'past_k' and cannot be rotated: something else reads",
        ),
        (
            Unknown,
            "at 'past_k' and cannot be rotated: rotpass does not know how aten.masked_scatter.default updates it",
        ),
        (
            Scatter,
            "at 'past_k' and cannot be rotated: rotpass does not know how aten.masked_scatter_.default writes it",
        ),
        (Narrow, "cross the graph's boundary at '.*' and cannot be rotated: head_dim 6 has no Hadamard matrix"),
    ],
)
def test_a_cache_that_must_be_rotated_and_cannot(model: type[Past], why: str, strict: bool) -> None:
    """Mixed contents would be silent garbage, so it raises, strict or not, through both doors."""
    width = 6 if model is Narrow else WIDTH
    caches = [torch.randn(2, HEADS, 4, width, dtype=torch.float64) for _ in range(2)]
    ep = program(model(), x_of(), *caches)
    text = str(ep.graph)
    with pytest.raises(ValueError, match=f'cache="rotated": .*{why}'):
        RotationPass(cache="rotated", strict=strict)(ep)
    assert str(ep.graph) == text
    torch._dynamo.reset()
    compiled = torch.compile(randomize_(model().double()), backend=rotpass.backend(inner="eager", cache="rotated"))
    with pytest.raises(Exception, match=f'cache="rotated": .*{why}'), torch.no_grad():
        compiled(x_of(), *caches)
    torch._dynamo.reset()


class Sliding(Past):
    """Keeps the last four tokens; the attention reads all, or no more than it keeps."""

    def __init__(self, reads_all: bool) -> None:
        super().__init__()
        self.reads_all = reads_all

    def forward(self, x, past_k, past_v):
        q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
        k, v = torch.cat((past_k, k * torch.linspace(0.5, 1, WIDTH, dtype=k.dtype)), 2), torch.cat((past_v, v), 2)
        kept = k[:, :, -4:], v[:, :, -4:]
        return self.out(self.attend(q, *((k, v) if self.reads_all else kept))), *kept


@pytest.mark.parametrize("reads_all", [True, False])
@pytest.mark.parametrize("length, new", [(0, 7), (2, 1), (2, 7), (4, 1), (4, 7)])
def test_a_sliding_window_is_rotated_however_long_what_is_new(length: int, new: int, reads_all: bool) -> None:
    """Rotating what the attention reads would move fewer bytes, and leave the cache as it was."""
    torch._dynamo.reset()
    model, x = randomize_(Sliding(reads_all).double()), torch.randn(2, new, HIDDEN, dtype=torch.float64)
    k, v = (torch.randn(2, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(2))
    r = rotation_matrix(WIDTH)
    with torch.no_grad():
        y, k2, v2 = model(x, k, v)
        compiled = torch.compile(model, backend=rotpass.backend(inner="eager", cache="rotated", strict=True))
        equal(compiled(x, k @ r.T, v @ r.T), (y, k2 @ r.T, v2 @ r.T))
    torch._dynamo.reset()


def test_keys_that_go_out_are_rotated_with_the_cache() -> None:
    """A first call has no past, but what it returns is the past of the next."""

    class First(Attention):
        def forward(self, x):
            q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
            k, v = k * torch.linspace(0.5, 1, WIDTH, dtype=k.dtype), v.clamp(-1, 1)
            return self.out(self.attend(q, k, v)), k, v

    ep = program(First())
    after = RotationPass(cache="rotated", strict=True)(ep)
    (y, k, v), (y2, k2, v2), r = ep.module()(x_of()), after.module()(x_of()), rotation_matrix(WIDTH)
    equal(y2, y)
    equal(k2, k @ r.T)
    equal(v2, v @ r.T)
    assert len(after.graph_signature.user_outputs) == 3
    pass_ = RotationPass()
    plain = pass_(ep)
    equal(plain.module()(x_of()), (y, k, v))
    assert [s.reason for s in pass_.report] == ["", ""], "nothing comes in, so no whole cache is rotated"


# --- folded weights without their other half


def test_a_swapped_module_that_lost_its_hook() -> None:
    model = make("llama", layers=1)
    rotpass.fold_(model, (tokens(),))
    down = model.layers[0].mlp.down_proj
    model.layers[0].mlp.down_proj = nn.Linear(down.in_features, down.out_features, dtype=torch.float64)
    model.layers[0].mlp.down_proj.weight = down.weight
    model.layers[0].mlp.down_proj.bias = down.bias
    ep = export(model, (tokens(),))
    with pytest.raises(
        RuntimeError, match="down_proj' was folded by rotpass, but its online rotation is missing.*fold again"
    ):
        RotationPass()(ep)


# --- said once, or not at all


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

    def forward(self, x):
        return self.b(self.a(x).softmax(-1))


def test_a_graph_that_holds_neither_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ep = program(Silent())
        pass_ = RotationPass(strict=True)
        after = pass_(ep)
    assert not pass_.report.sites and str(after.graph) == str(ep.graph)


@pytest.mark.parametrize("quant", [None, FakeQuant(k=4)])
def test_a_recipe_that_asks_for_nothing_says_nothing(quant: FakeQuant | None) -> None:
    ep = program(Attention())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pass_ = RotationPass(r3=False, v=False, r4=False, fake_quant=quant, strict=True)
        after = pass_(ep)
    assert not pass_.report.sites
    assert (str(after.graph) == str(ep.graph)) is (quant is None)
    assert not after.graph.find_nodes(op="call_function", target=hadamard)


@pytest.mark.parametrize(
    "model, recipe, why",
    [
        (Attention, {"only": "elsewhere"}, "no place is left by only= and skip="),
        (Attention, {"skip": "*"}, "no place is left by only= and skip="),
        (Attention, {"r3": False, "v": False}, "the graph holds none of the kinds of site that the recipe asks for"),
        (Mlp, {"r4": False}, "the graph holds none of the kinds of site that the recipe asks for"),
    ],
)
def test_no_sites_warns_once(model, recipe: dict, why: str) -> None:
    ep = program(model())
    with pytest.warns(UserWarning) as caught:
        after = RotationPass(strict=True, **recipe)(ep)
    assert [str(w.message) for w in caught if "rotpass" in str(w.message)] == [f"rotpass rotated nothing: {why}"]
    assert str(after.graph) == str(ep.graph)


def test_no_sites_warns_once_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Mlp().double(), backend=rotpass.backend(r4=False, inner="eager"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(x_of())
    assert sum("rotated nothing" in str(w.message) for w in caught) == 1
    torch._dynamo.reset()


# --- strict


def mixed() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad, self.worse = Mlp(), Mlp(width=6), Mlp(width=6)

        def forward(self, x):
            return self.worse(self.bad(self.good(x)))

    return Model()


def test_strict_names_each_reason_once() -> None:
    ep = program(mixed())
    text, tensors = str(ep.graph), dict(ep.state_dict)
    with pytest.raises(ValueError) as caught:
        RotationPass(strict=True)(ep)
    message = str(caught.value)
    assert message.startswith(
        "strict=True and 2 of 3 sites were refused: r4 at bad.down: width 6 has no Hadamard matrix"
    )
    assert message.count("width 6") == 1
    assert str(ep.graph) == text and all(ep.state_dict[n] is t for n, t in tensors.items())


def test_without_strict_the_rest_is_rotated() -> None:
    ep = program(mixed())
    pass_ = RotationPass()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="rotpass")
        after = pass_(ep)
    assert [(s.where, s.status) for s in pass_.report] == [
        ("good.down", "rotated"),
        ("bad.down", "refused"),
        ("worse.down", "refused"),
    ]
    equal(after.module()(x_of()), ep.module()(x_of()))


def test_strict_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Mlp(width=6).double(), backend=rotpass.backend(strict=True, inner="eager"))
    with pytest.raises(Exception, match="strict=True and 1 of 1 sites were refused: r4 at down: width 6 has no"):
        compiled(x_of())
    torch._dynamo.reset()


def test_strict_says_nothing_of_what_was_not_asked_for() -> None:
    ep = program(Mlp(width=6))
    with pytest.warns(UserWarning, match="holds none of the kinds"):
        RotationPass(r4=False, strict=True)(ep)


# --- recipes


BAD_RECIPES = [
    ({"r3": 1}, TypeError, "Recipe.r3 must be True or False; got 1"),
    ({"v": None}, TypeError, "Recipe.v must be True or False; got None"),
    ({"r4": "yes"}, TypeError, "Recipe.r4 must be True or False; got 'yes'"),
    ({"counter": "offline"}, ValueError, "Recipe.counter must be one of 'fold', 'online', 'prefolded'; got 'offline'"),
    ({"table": "dao"}, ValueError, "Recipe.table must be one of 'default', 'quarot', 'compressed-tensors'; got 'dao'"),
    ({"cache": True}, ValueError, "Recipe.cache must be one of 'plain', 'rotated'; got True"),
    ({"block_size": 64.0}, TypeError, "Recipe.block_size must be an integer or None; got 64.0"),
    ({"block_size": True}, TypeError, "Recipe.block_size must be an integer or None; got True"),
    ({"block_size": 6}, ValueError, "Recipe.block_size=6: the 'default' table has no Hadamard matrix of that order"),
    ({"block_size": 1}, ValueError, "Recipe.block_size=1: the 'default' table has no Hadamard matrix of that order"),
    (
        {"block_size": -64},
        ValueError,
        "Recipe.block_size=-64: the 'default' table has no Hadamard matrix of that order",
    ),
    ({"block_size": 76, "table": "quarot"}, ValueError, "Recipe.block_size=76: the 'quarot' table has no"),
    ({"seed": "x"}, TypeError, "Recipe.seed must be an integer or None; got 'x'"),
    ({"seed": False}, TypeError, "Recipe.seed must be an integer or None; got False"),
    ({"only": (1,)}, TypeError, "Recipe.only must be shell patterns; got (1,)"),
    ({"skip": ("a", None)}, TypeError, "Recipe.skip must be shell patterns; got ('a', None)"),
    ({"fake_quant": 4}, TypeError, "Recipe.fake_quant must be a rotpass.FakeQuant or None; got 4"),
    ({"r5": True}, TypeError, "unknown recipe field 'r5'; valid fields: r3, v, r4, counter"),
]


@pytest.mark.parametrize("fields, error, message", BAD_RECIPES, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_bad_recipes_raise_one_sentence(fields: dict, error: type, message: str) -> None:
    for door in (RotationPass, rotpass.backend):
        with pytest.raises(error, match=re.escape(message)) as caught:
            door(**fields)
        assert "\n" not in str(caught.value)
    if "r5" not in fields:
        with pytest.raises(error, match=re.escape(message)):
            Recipe(**fields)


@pytest.mark.parametrize("bits", [5, 16, True, "int4", 4.5, "e5m2"])
@pytest.mark.parametrize("name", ["q", "k", "v", "down"])
def test_bad_quantizers(name: str, bits) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"FakeQuant.{name} must be one of None, 8, 4, 3, 2, 'fp8'; got {bits!r}")
    ):
        FakeQuant(**{name: bits})


def test_a_recipe_must_be_one() -> None:
    with pytest.raises(TypeError, match="recipe must be a rotpass.Recipe; got dict"):
        RotationPass({"r3": True})


def test_recipes_are_values() -> None:
    recipe = Recipe(seed=3, only=["a", "b"], fake_quant=FakeQuant(k=4))
    same = Recipe(seed=3, only=("a", "b"), fake_quant=FakeQuant(k=4))
    assert recipe == same and hash(recipe) == hash(same) and pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe != Recipe(seed=4, only=("a", "b"), fake_quant=FakeQuant(k=4))
    assert Recipe(only="a").only == ("a",)
    with pytest.raises(AttributeError):
        recipe.seed = 4
    with pytest.raises(TypeError):
        Recipe(True)


def test_fields_change_a_whole_recipe() -> None:
    assert RotationPass(Recipe(seed=3, r4=False), seed=4).recipe == Recipe(seed=4, r4=False)


# --- the report


SITES = [
    Site(kind="r3", where="layers.0.<a>", size=16, width=16, status="rotated", inserted="online"),
    Site(kind="v", where="layers.0.<a>", size=16, width=16, status="already", inserted="folded", undone="folded"),
    Site(kind="r4", where="layers.0.down", size=32, width=64, status="rotated", inserted="online", undone="folded"),
    Site(kind="r4", where="layers.1.down", size=0, width=6, status="refused", reason="width 6 & no matrix"),
]


def test_report() -> None:
    report = Report(SITES, ["a note"])
    assert report.rotated == SITES[:3] and report.refused == SITES[3:]
    assert report.counts == {"r3": 1, "v": 1, "r4": 1} and list(report) == SITES and len(report) == 4
    lines = str(report).splitlines()
    assert len({line.index(w) for line, w in zip(lines, ["status", "rotated", "already", "rotated", "refused"])}) == 1
    assert "2x32" in lines[3] and lines[-2:] == [
        "rotpass: 3 rotated (r3=1 v=1 r4=1), 1 of them already, 1 refused",
        "note: a note",
    ]
    page = report._repr_html_()
    assert "&lt;a&gt;" in page and "<a>" not in page and "width 6 &amp; no matrix" in page
    told = report.to_dict()
    assert told["counts"] == report.counts and told["sites"][2]["size"] == 32 and told["notes"] == ["a note"]


def test_an_empty_report() -> None:
    assert "0 rotated" in str(Report()) and Report()._repr_html_() and Report().counts == {"r3": 0, "v": 0, "r4": 0}


def test_check_speaks_only_where_there_is_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(SITES, Recipe(), strict=False, holds_any=True)
        check([], Recipe(), strict=True, holds_any=False)
    with pytest.raises(ValueError, match="1 of 4 sites"):
        check(SITES, Recipe(), strict=True, holds_any=True)
