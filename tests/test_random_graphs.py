"""Property: whatever is assembled of the blocks that real models are made of keeps its outputs.

Each choice below is a row of a table; hypothesis draws models from them and shrinks what fails to the simplest. The number in
a test's id is the seed of its draws: ``pytest tests/test_random_graphs.py -k export-3``.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, event, given, seed, settings
from hypothesis import strategies as st
from test_match import randomize_
from torch import Tensor, nn

import rotpass
from rotpass import RotationPass

BATCH, LENGTH, PAST, HIDDEN = 2, 5, 3, 24
CASES = 25  # of each of the twelve seeds

# ------------------------------------------------------------------------------------------------------------ the blocks


class Conv1D(nn.Module):
    """GPT-2's: a linear with its weight the other way round."""

    def __init__(self, inside: int, outside: int, bias: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inside, outside)), nn.Parameter(torch.empty(outside))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class LowRank(nn.Module):
    """A linear and its LoRA branch."""

    def __init__(self, inside: int, outside: int, bias: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inside, outside, bias)
        self.a, self.b = nn.Linear(inside, 4, bias=False), nn.Linear(4, outside, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


class Matmul(nn.Module):
    """Falcon's: a product with a transposed weight."""

    def __init__(self, inside: int, outside: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outside, inside))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


PROJECTIONS = {"linear": nn.Linear, "conv1d": Conv1D, "lora": LowRank, "matmul": Matmul}


def half(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t.chunk(2, -1)
    return t * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)


def interleaved(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t[..., ::2], t[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def complex_numbers(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


def partial(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = t.shape[-1] // 2
    return torch.cat([half(t[..., :n], cos[..., : n // 2], sin[..., : n // 2]), t[..., n:]], -1)


def in_place(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(t)
    out[..., ::2], out[..., 1::2] = t[..., ::2] * cos - t[..., 1::2] * sin, t[..., 1::2] * cos + t[..., ::2] * sin
    return out


ROPES = {
    "none": lambda t, cos, sin: t,
    "half": half,
    "interleaved": interleaved,
    "complex": complex_numbers,
    "partial": partial,
    "in place": in_place,
}

# What happens to values, keys or queries on their way.
ON_THE_WAY = {
    "nothing": lambda t, w: t,
    "scale": lambda t, w: t * 0.7,
    "weight": lambda t, w: t * w,
    "norm": lambda t, w: F.rms_norm(t, t.shape[-1:]),
    "weighted norm": lambda t, w: F.rms_norm(t, t.shape[-1:], w),
    "clamp": lambda t, w: t.clamp(-1.5, 1.5),
    "clamp_": lambda t, w: t.clamp_(-1.5, 1.5),
    "mul_": lambda t, w: t.mul_(w),
    "contiguous": lambda t, w: t.contiguous(),
    "cast": lambda t, w: t.to(torch.float64).clone(),
    "copy_": lambda t, w: torch.empty_like(t).copy_(t),
}


def expanded(t: Tensor, n: int) -> Tensor:
    b, h, s, d = t.shape
    return t[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


REPEATS = {"expand": expanded, "repeat_interleave": lambda t, n: t.repeat_interleave(n, 1)}


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.3)


def products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    return torch.matmul(scores.masked_fill(~mask, -1e9).softmax(-1, dtype=torch.float64), v)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = ((q * 0.3 @ k.mT) / 5).tanh() * 5 + torch.where(mask, 0.0, -1e9)
    return F.dropout(scores.softmax(-1), 0.1, False) @ v


def sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT).where(mask, -1e9)
    return torch.cat([scores, torch.ones_like(scores[..., :1])], -1).softmax(-1)[..., :-1] @ v


def batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    b, h, s, d = q.shape
    q, k, v = (t.reshape(b * h, -1, d) for t in (q, k, v))
    bias = torch.where(mask, 0.0, -1e9).to(q.dtype).expand(b * h, s, k.shape[1])
    return torch.bmm(torch.baddbmm(bias, q, k.transpose(1, 2), alpha=0.3).softmax(-1), v).view(b, h, s, d)


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).masked_fill(~mask, float("-inf"))
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def differential(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, mask) - 0.3 * products(k[:, :, -q.shape[2] :], k, v, mask)


FORMS = {f.__name__: f for f in (sdpa, products, capped, sinks, batched, einsum, differential)}

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh gelu": lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x.pow(3)))),
    "relu2": lambda x: F.relu(x).square(),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu_": lambda x: F.relu_(x * 1),
    "clamped": lambda x: x.clamp(max=3) * torch.sigmoid(x.clamp(max=3)),
    "identity": lambda x: x,
}

# How gate and up come out of the projections, and what is made of them.
GATES = {
    "gate * up": lambda act, a, b: act(a) * b,
    "up * gate": lambda act, a, b: b * act(a),
    "offset": lambda act, a, b: (b.clamp(-2, 2) + 1) * act(a),
    "in place": lambda act, a, b: (act(a) * 1).mul_(b),
    "no gate": lambda act, a, b: act(a),
    "sum": lambda act, a, b: act(a) + b,
}

LAYOUTS = {
    "chunk": lambda t: t.chunk(2, -1),
    "chunk back": lambda t: t.chunk(2, -1)[::-1],
    "split": lambda t: t.split(t.shape[-1] // 2, -1),
    "strided": lambda t: (t[..., ::2], t[..., 1::2]),
    "unflatten": lambda t: t.unflatten(-1, (2, -1)).unbind(-2),
}

BEFORE_DOWN = {
    "nothing": lambda t, w: t,
    "dropout": lambda t, w: F.dropout(t, 0.1, False),
    "scale": lambda t, w: t * 2,
    "norm": lambda t, w: F.rms_norm(t, t.shape[-1:], w),
    "layer norm": lambda t, w: F.layer_norm(t, t.shape[-1:], w),
    "view": lambda t, w: t.view(-1, t.shape[-1]).view(t.shape),
}

AFTER_ATTENTION = {
    "nothing": lambda y, x, w: y,
    "sigmoid gate": lambda y, x, w: y * torch.sigmoid(x.repeat(1, 1, 8)[..., : y.shape[-1]]),
    "norm": lambda y, x, w: F.rms_norm(y, y.shape[-1:], w),
    "scale": lambda y, x, w: y * 0.5,
    "weight": lambda y, x, w: y * w,
    "add": lambda y, x, w: y + x.repeat(1, 1, 8)[..., : y.shape[-1]],
    "tanh": lambda y, x, w: y.tanh(),
}

# ------------------------------------------------------------------------------------------------------------ the models


def one_of(table: dict) -> st.SearchStrategy[str]:
    return st.sampled_from(list(table))


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    heads: int
    groups: int
    width: int
    project: str
    out: str
    bias: bool
    fused: str
    rope: str
    way_q: str
    way_k: str
    way_v: str
    after_rope: str
    repeat: str
    form: str
    after: str
    cache: str
    values: str


@dataclasses.dataclass(frozen=True)
class MlpSpec:
    width: int
    project: str
    down: str
    bias: bool
    act: str
    gate: str
    layout: str
    before: str
    also: str


ATTENTION = st.builds(
    AttentionSpec,
    heads=st.sampled_from([2, 4]),
    groups=st.sampled_from([1, 2]),
    width=st.sampled_from([16, 8, 12]),
    project=one_of(PROJECTIONS),
    out=st.sampled_from([*PROJECTIONS, "none", "two"]),
    bias=st.booleans(),
    fused=st.sampled_from(["no", "joined", "by head"]),
    rope=one_of(ROPES),
    way_q=one_of(ON_THE_WAY),
    way_k=one_of(ON_THE_WAY),
    way_v=one_of(ON_THE_WAY),
    after_rope=one_of(ON_THE_WAY),
    repeat=one_of(REPEATS),
    form=one_of(FORMS),
    after=one_of(AFTER_ATTENTION),
    cache=st.sampled_from(["no", "cat", "index_copy_", "slice", "index_put_"]),
    values=st.sampled_from(["own", "keys", "shown"]),
)
MLP = st.builds(
    MlpSpec,
    width=st.sampled_from([64, 48, 40]),
    project=one_of(PROJECTIONS),
    down=one_of(PROJECTIONS),
    bias=st.booleans(),
    act=one_of(ACTIVATIONS),
    gate=one_of(GATES),
    layout=st.sampled_from([*LAYOUTS, "two"]),
    before=one_of(BEFORE_DOWN),
    also=st.sampled_from(["no", "shown", "read twice"]),
)


class Attention(nn.Module):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec, project = spec, PROJECTIONS[spec.project]
        self.kv_heads = spec.heads // spec.groups
        self.counts = [spec.heads, self.kv_heads, self.kv_heads]
        if spec.fused == "no":
            self.q, self.k, self.v = (project(HIDDEN, n * spec.width, spec.bias) for n in self.counts)
        else:
            self.qkv = project(HIDDEN, sum(self.counts) * spec.width, spec.bias)
        inner = spec.heads * spec.width
        self.w, self.w_out = nn.Parameter(torch.empty(spec.width)), nn.Parameter(torch.empty(inner))
        if spec.out == "two":
            self.o = nn.ModuleList(nn.Linear(inner, HIDDEN, spec.bias) for _ in range(2))
        elif spec.out != "none":
            self.o = PROJECTIONS[spec.out](inner, HIDDEN, spec.bias)

    def heads(self, x: Tensor) -> list[Tensor]:
        spec = self.spec
        if spec.fused == "no":
            parts = [f(x).view(BATCH, LENGTH, -1, spec.width) for f in (self.q, self.k, self.v)]
        elif spec.fused == "joined":
            parts = self.qkv(x).view(BATCH, LENGTH, -1, spec.width).split(self.counts, 2)
        else:
            grouped = self.qkv(x).view(BATCH, LENGTH, self.kv_heads, spec.groups + 2, spec.width)
            parts = [grouped[:, :, :, :-2].flatten(2, 3), grouped[:, :, :, -2], grouped[:, :, :, -1]]
        return [p.transpose(1, 2) for p in parts]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        spec, shown = self.spec, []
        q, k, v = self.heads(x)
        if spec.values == "keys":
            v = k * 1
        q, k, v = (ON_THE_WAY[way](t, self.w) for way, t in ((spec.way_q, q), (spec.way_k, k), (spec.way_v, v)))
        q, k = (
            ROPES[spec.rope](t, cos[: t.shape[2], : t.shape[3] // 2], sin[: t.shape[2], : t.shape[3] // 2])
            for t in (q, k)
        )
        k = ON_THE_WAY[spec.after_rope](k, self.w)
        if spec.values == "shown":
            shown += [v * 2]
        k, v = (self.cached(cache, new) for cache, new in zip(caches, (k, v)))
        if spec.cache == "cat":
            shown += [k, v]
        if spec.groups > 1:
            k, v = (REPEATS[spec.repeat](t, spec.groups) for t in (k, v))
        mask = torch.ones(LENGTH, k.shape[2], dtype=torch.bool).tril(k.shape[2] - LENGTH)
        y = FORMS[spec.form](q, k, v, mask).transpose(1, 2).reshape(BATCH, LENGTH, -1)
        y = AFTER_ATTENTION[spec.after](y, x, self.w_out)
        if spec.out == "none":
            return y.reshape(BATCH, LENGTH, -1, 8).sum(2).repeat(1, 1, HIDDEN // 8), shown
        return (self.o[0](y) - self.o[1](y) if spec.out == "two" else self.o(y)), shown

    def cached(self, cache: Tensor, new: Tensor) -> Tensor:
        match self.spec.cache:
            case "cat":
                return torch.cat([cache[:, :, :PAST], new], 2)
            case "index_copy_":
                return cache.index_copy_(2, torch.arange(PAST, PAST + LENGTH), new)
            case "index_put_":
                cache[:, :, torch.arange(PAST, PAST + LENGTH)] = new
                return cache
            case "slice":
                cache[:, :, PAST:] = new
                return cache
        return new


class Mlp(nn.Module):
    def __init__(self, spec: MlpSpec) -> None:
        super().__init__()
        self.spec, project = spec, PROJECTIONS[spec.project]
        if spec.layout == "two":
            self.gate, self.up = (project(HIDDEN, spec.width, spec.bias) for _ in range(2))
        else:
            self.gate_up = project(HIDDEN, 2 * spec.width, spec.bias)
        self.w = nn.Parameter(torch.empty(spec.width))
        self.down = PROJECTIONS[spec.down](spec.width, HIDDEN, spec.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        spec = self.spec
        a, b = (self.gate(x), self.up(x)) if spec.layout == "two" else LAYOUTS[spec.layout](self.gate_up(x))
        hidden = BEFORE_DOWN[spec.before](GATES[spec.gate](ACTIVATIONS[spec.act], a, b).contiguous(), self.w)
        y = self.down(hidden)
        return (y + self.down(hidden * 2) if spec.also == "read twice" else y), [hidden] * (spec.also == "shown")


class Model(nn.Module):
    def __init__(self, specs: list) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(s) if isinstance(s, AttentionSpec) else Mlp(s) for s in specs)
        angles = torch.arange(LENGTH)[:, None] * torch.arange(1, 9) / 7
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor, caches: list[list[Tensor]]) -> tuple:
        outputs = []
        for block, mine in zip(self.blocks, caches):
            inputs = (self.cos, self.sin, mine) if isinstance(block, Attention) else ()
            y, shown = block(F.rms_norm(x, (HIDDEN,)), *inputs)
            x = x + y
            outputs += shown
        return x, outputs


def caches_of(specs: list) -> list[list[Tensor]]:
    shapes = [(BATCH, s.heads // s.groups, PAST + LENGTH, s.width) for s in specs if isinstance(s, AttentionSpec)]
    shapes = iter(shapes)
    return [[torch.randn(next_) for next_ in [next(shapes)] * 2] if isinstance(s, AttentionSpec) else [] for s in specs]


# ---------------------------------------------------------------------------------------------------------- the property


@torch.no_grad()
def keeps(specs: list, door: str, recipe: dict) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model, x = randomize_(Model(specs).eval()), torch.randn(BATCH, LENGTH, HIDDEN) + 0.3
        x[..., 3] *= 20
        caches = caches_of(specs)
        given_, left = ([[t.clone() for t in pair] for pair in caches] for _ in range(2))
        outputs = model(x, given_)
        if door == "export":
            program = torch.export.export(model, (x, left), strict=False)
            pass_ = RotationPass(seed=5, **recipe)
            rotated = pass_(program).module()(x, left)
            report = pass_.report
        else:
            torch._dynamo.reset()
            backend = rotpass.backend(inner="eager", seed=5, **recipe)
            backend.clear()
            rotated = torch.compile(model, backend=backend)(x, left)
            report = backend.report
    finally:
        torch.set_default_dtype(torch.float32)
    event(f"{len(report.rotated)} rotated, {len(report.refused)} refused")
    torch.testing.assert_close(rotated, outputs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(left, given_, rtol=1e-9, atol=1e-9)


SETTINGS = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
RECIPES = st.fixed_dictionaries({}, optional={"counter": st.just("online"), "r3": st.just(False), "v": st.just(False)})


@pytest.mark.filterwarnings("ignore:rotpass rotated nothing")
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("door", ["export", "compile"])
def test_random_graphs_keep_their_outputs(door: str, number: int) -> None:
    @seed(number)
    @SETTINGS
    @given(specs=st.lists(st.one_of(ATTENTION, MLP), min_size=1, max_size=3), recipe=RECIPES)
    def check(specs: list, recipe: dict) -> None:
        keeps(specs, door, recipe)

    check()
