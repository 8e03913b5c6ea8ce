"""Attentions in every spelling: one small model for each, through both doors, against the model before."""

import pytest
import torch
from test_match import HEADS, HIDDEN, WIDTH, Attention, compiles_alike, rotate, x_of
from torch import nn
from torch.export import export
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import rotpass
from rotpass import FakeQuant, RotationPass

LENGTH = 5
BIAS = torch.linspace(-1, 1, LENGTH * LENGTH, dtype=torch.float64).view(LENGTH, LENGTH)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def flat(t):
    return t.reshape(-1, *t.shape[-2:])


def matmul(q, k, v):
    return (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v


def bmm(q, k, v):
    scores = torch.bmm(flat(q), flat(k).transpose(1, 2)) * 0.25
    return torch.bmm(scores.softmax(-1), flat(v)).view(q.shape)


def baddbmm_with_alibi(q, k, v):
    alibi = BIAS.expand(q.shape[0] * HEADS, LENGTH, LENGTH)
    scores = alibi.baddbmm(flat(q), flat(k).transpose(-1, -2), beta=1.0, alpha=0.25).view(-1, HEADS, LENGTH, LENGTH)
    return torch.bmm(flat(scores.masked_fill(~CAUSAL, -1e4).softmax(-1)), flat(v)).view(q.shape)


def einsum(q, k, v):
    probabilities = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", probabilities, v)


def einsum_heads_inside(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    probabilities = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v).transpose(1, 2)


def einsum_transposed(q, k, v):
    probabilities = torch.einsum("bhqd,bhdk->bhqk", q, k.mT).softmax(-1)
    return probabilities @ v


def softcap_and_mask(q, k, v):
    scores = torch.tanh(q @ k.transpose(2, 3) * 0.25 / 50.0) * 50.0
    return (scores + torch.where(CAUSAL, 0.0, -1e4)).softmax(-1, dtype=torch.float64).to(q.dtype) @ v


def sinks(q, k, v):
    scores = q @ k.transpose(2, 3) * 0.25
    scores = torch.cat([scores, BIAS[0, 0].expand(*scores.shape[:3], 1)], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return scores.softmax(-1)[..., :-1] @ v


def scaled_keys_and_dropout(q, k, v):
    scores = q @ (k.permute(0, 1, 3, 2) * 0.25)
    return F.dropout(scores.where(CAUSAL, -1e4).softmax(3), 0.0) @ v


def queries_scaled(q, k, v):
    return ((q * 0.25) @ k.transpose(-1, -2).contiguous()).softmax(-1) @ v.contiguous()


def flex(q, k, v):
    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1)


def flex_with_block_mask(q, k, v):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cpu")
    return flex_attention(q, k, v, block_mask=mask, scale=0.3)


FORMS = [
    matmul, bmm, baddbmm_with_alibi, einsum, einsum_heads_inside, einsum_transposed, softcap_and_mask, sinks,
    scaled_keys_and_dropout, queries_scaled,
]  # fmt: skip


class Form(Attention):
    def __init__(self, form, kv_heads: int = HEADS) -> None:
        super().__init__(kv_heads)
        self.form = form

    def heads(self, t):
        return t.view(*t.shape[:2], t.shape[-1] // WIDTH, WIDTH).transpose(1, 2)  # -1 is ambiguous in an empty batch

    def attend(self, q, k, v):
        k = k * torch.linspace(0.5, 2, WIDTH, dtype=k.dtype)  # as RoPE: no rotation goes before it
        if k.shape[1] != q.shape[1]:
            k, v = (t[:, :, None].expand(-1, -1, q.shape[1] // t.shape[1], -1, -1).flatten(1, 2) for t in (k, v))
        return self.form(q, k, v)


@pytest.mark.parametrize("kv_heads", [HEADS, 1])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_products_and_a_softmax(form, kv_heads: int) -> None:
    outcome = rotate(Form(form, kv_heads))
    assert outcome.how("r3") == ("rotated", "online", "none")
    assert outcome.how("v") == ("rotated", "folded", "folded")
    assert len(outcome.rotations) == 2
    if kv_heads == 1:
        assert [tuple(n.meta["val"].shape[:2]) for n in outcome.rotations].count((2, 1)) == 1, "K before it is repeated"
    report = compiles_alike(Form(form, kv_heads))
    assert report.counts == {"r3": 1, "v": 1, "r4": 0}


@pytest.mark.parametrize("form", [flex, flex_with_block_mask], ids=lambda form: form.__name__)
def test_flex_attention(form) -> None:
    """In float32, which is all that it computes in on a CPU."""
    model, x = Form(form).eval(), x_of().float()
    with torch.no_grad():
        before = export(model, (x,))
        pass_ = RotationPass(seed=5, strict=True)
        after = pass_(before)
        torch.testing.assert_close(after.module()(x), before.module()(x), rtol=1e-5, atol=1e-5)
        assert [(s.kind, s.inserted, s.undone) for s in pass_.report] == [
            ("r3", "online", "none"),
            ("v", "folded", "folded"),
        ]


def test_multi_head_attention_modules() -> None:
    class Model(nn.Module):
        def __init__(self, weights: bool) -> None:
            super().__init__()
            self.attention, self.weights = nn.MultiheadAttention(HIDDEN * 2, 3, batch_first=True), weights

        def forward(self, x):
            x = torch.cat([x, x.square()], -1)
            return self.attention(x, x, x, need_weights=self.weights)[0]

    for weights in (True, False):
        outcome = rotate(Model(weights).train())
        assert outcome.how("r3") == ("rotated", "online", "none")
        assert outcome.how("v") == ("rotated", "folded", "folded")


@pytest.mark.filterwarnings("ignore:rotpass rotated nothing")
@pytest.mark.parametrize("whole_layer", [True, False])
@torch.no_grad()
def test_fast_paths_that_hide_an_attention(whole_layer: bool) -> None:
    """What torch.nn calls in eval mode under torch.compile: seen, refused, and the reason says how to avoid it."""

    class Fast(nn.MultiheadAttention):
        def forward(self, x):
            weights = self.in_proj_weight, self.in_proj_bias, self.out_proj.weight, self.out_proj.bias
            if torch.backends.mha.get_fastpath_enabled():
                return torch._native_multi_head_attention(x, x, x, 48, 4, *weights)[0]
            return super().forward(x, x, x)[0]

    model = (
        nn.TransformerEncoderLayer(48, 4, 64, batch_first=True) if whole_layer else Fast(48, 4, batch_first=True)
    ).eval()
    args = (torch.randn(2, LENGTH, 48),)
    for enabled in (True, False):
        torch._dynamo.reset()
        backend = rotpass.backend(inner="eager", seed=6)
        backend.clear()
        torch.backends.mha.set_fastpath_enabled(enabled)
        try:
            compiled, plain = torch.compile(model, backend=backend)(*args), model(*args)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)
        refused = [
            (s.kind, s.reason.partition(" computes more than the attention: call")[0]) for s in backend.report.refused
        ]
        name = "aten._transformer_encoder_layer_fwd" if whole_layer else "aten._native_multi_head_attention"
        assert refused == ([("r3", name), ("v", name)] if enabled else [])
        assert len(backend.report.rotated) == (0 if enabled else 2 + whole_layer)
    torch._dynamo.reset()


def test_cross_attention_of_a_module() -> None:
    """Its projections read slices of one weight."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(HIDDEN * 2, 3, batch_first=True)

        def forward(self, x):
            x, other = torch.cat([x, x.square()], -1), torch.cat([x.sin(), x], -1)
            return self.attention(x, other, other)[0]

    outcome = rotate(Model().train())
    assert outcome.how("r3") == ("rotated", "online", "none")
    assert outcome.how("v")[0] == "rotated" and outcome.how("v")[2] == "folded"
    assert len(compiles_alike(Model().train()).rotated) == 2


def test_quantized_where_the_attention_reads() -> None:
    """Fake quantizers of a decomposed attention are those of the fused one."""

    def outputs(form):
        torch.manual_seed(0)
        model = Form(form).double().eval()
        quantized = RotationPass(fake_quant=FakeQuant(q=4, k=4, v=4))(export(model, (x_of(),)))
        return quantized.module()(x_of())

    fused = outputs(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.25))
    for form in (matmul, bmm, queries_scaled):
        torch.testing.assert_close(outputs(form), fused, rtol=1e-9, atol=1e-9)


# --- what is none, or cannot be rotated


def refused(kind: str, form, reason: str) -> None:
    """That kind alone: R3 and V are decided apart."""
    outcome = rotate(Form(form))
    [site] = outcome.report.refused
    assert (site.kind, site.reason) == (kind, reason)
    assert len(outcome.report.rotated) == 1 and compiles_alike(Form(form)).refused == [site]


def test_scores_of_several_products() -> None:
    """Disentangled attention: every product would need the same rotation of all its factors."""
    refused(
        "r3",
        lambda q, k, v: (q @ k.mT + q.square() @ k.square().mT).softmax(-1) @ v,
        "its scores are the sum of several products",
    )


def test_head_vectors_along_another_axis() -> None:
    keys = "its queries or keys do not lie along the last axis, or are read with other axes elsewhere too"
    refused("r3", lambda q, k, v: (q @ k.mT.square().sqrt()).softmax(-1) @ v, keys)
    refused("r3", lambda q, k, v: ((q @ (keys := k.mT)).softmax(-1) @ v) * keys.sum((-1, -2))[..., None, None], keys)
    refused(
        "v",
        lambda q, k, v: torch.einsum("bhqk,bhdk->bhqd", (q @ k.mT).softmax(-1), v.mT.square()),
        "its values do not lie along the last axis",
    )


def test_values_before_the_probabilities() -> None:
    """Which factor the values are is told by the way from the softmax, not by its place."""

    def form(q, k, v):
        return torch.einsum("bhkd,bhqk->bhqd", v, (q @ k.mT).softmax(-1))

    outcome = rotate(Form(form))
    assert outcome.how("r3") == ("rotated", "online", "none") and outcome.how("v")[0] == "rotated"
    assert compiles_alike(Form(form)).counts == {"r3": 1, "v": 1, "r4": 0}


def test_image_attention_with_channels_first() -> None:
    """The autoencoder's of latent diffusion: bmm(values, probabilities.mT) gives (B, C, pixels)."""

    def form(q, k, v):
        probabilities = torch.bmm(flat(q), flat(k).mT).softmax(-1)
        return torch.bmm(flat(v).mT.contiguous(), probabilities.permute(0, 2, 1)).mT.reshape(q.shape)

    refused("v", form, "its values do not lie along the last axis")


def differential(q, k, v):
    half = WIDTH // 2
    first, second = ((a[..., :half] @ a[..., half:].mT).softmax(-1) for a in (q + k, q - k))
    return (first - 0.4 * second) @ v


def mixed(q, k, v):
    return ((q @ k.mT).softmax(-1) * 0.5 + 0.5 * (q @ k.mT * 0.1).softmax(-1)) @ v


def twice(q, k, v):
    return (q @ k.mT).softmax(-1).softmax(-1) @ v


def joined(q, k, v):
    scores = q @ k.mT
    return torch.cat([scores[:, :, :2].softmax(-1), (scores[:, :, 2:] * 2).softmax(-1)], 2) @ v


@pytest.mark.parametrize("form", [differential, mixed, twice, joined], ids=lambda form: form.__name__)
@pytest.mark.parametrize("counter", ["fold", "online"])
def test_several_softmaxes_before_one_product(form, counter: str) -> None:
    """V is rotated once and taken back once."""
    outcome = rotate(Form(form), counter=counter)
    [v] = [site for site in outcome.report if site.kind == "v"]
    assert v.status == "rotated"
    compiles_alike(Form(form), counter=counter)
    assert [site.kind for site in rotate(Form(form), r3=False).report] == ["v"]


def test_an_output_that_is_added_in_the_same_call() -> None:
    def added(q, k, v):
        return torch.baddbmm(flat(q), (flat(q) @ flat(k).mT).softmax(-1), flat(v)).view(q.shape)

    def not_added(q, k, v):
        return torch.baddbmm(flat(q), (flat(q) @ flat(k).mT).softmax(-1), flat(v), beta=0).view(q.shape)

    refused("v", added, "its output is added to something else in the same call")
    assert len(rotate(Form(not_added)).report.rotated) == 2


@torch.no_grad()
def test_flex_attention_that_makes_its_own_mask_is_left_alone() -> None:
    """Without a block mask it makes one by vmap inside the graph."""
    torch._dynamo.reset()
    backend = rotpass.backend(inner="eager", seed=7)
    backend.clear()
    q = torch.randn(1, 2, 16, 16)
    with pytest.warns(UserWarning, match="left as it is.*flex_attention makes its block mask by vmap"):
        found = torch.compile(lambda q: flex_attention(q, q, q) * 2, backend=backend)(q)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q) * 2, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("shape", [(0, LENGTH, HIDDEN), (2, 0, HIDDEN)])
@pytest.mark.parametrize("form", [matmul, F.scaled_dot_product_attention], ids=lambda form: form.__name__)
def test_empty_batches(form, shape) -> None:
    """They show no rows to fold into, and other batches come later."""
    torch._dynamo.reset()
    model, empty = Form(form).double().eval(), torch.zeros(shape, dtype=torch.float64)
    compiled = torch.compile(model, backend=rotpass.backend(inner="eager", seed=5))
    assert compiled(empty).shape == model(empty).shape
    torch.testing.assert_close(compiled(x_of()), model(x_of()), rtol=1e-9, atol=1e-9)
    before = model(x_of())
    rotpass.fold_(model, (empty,), seed=5)
    torch.testing.assert_close(model(x_of()), before, rtol=1e-9, atol=1e-9)
    torch._dynamo.reset()


@torch.no_grad()
def test_a_weight_that_projects_values_and_outputs() -> None:
    """Folded one way for its one use, the other way for the other."""

    class Tied(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

        def heads(self, t):
            return t.unflatten(-1, (-1, 8)).transpose(1, 2)

        def out(self, y):
            return F.linear(self.merge(y), self.v.weight)

    report = compiles_alike(Tied())
    assert [(s.inserted, s.undone) for s in report if s.kind == "v"] == [("folded", "folded")]
    assert len(rotate(Tied()).report.rotated) == 2


class Router(nn.Module):
    """Softmaxes that are no attention: a router, a pooling by weights, a classifier."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.experts, self.route = kind, nn.Linear(HIDDEN, 4 * 8), nn.Linear(HIDDEN, 4)

    def forward(self, x):
        weights = self.route(x).softmax(-1)
        if self.kind == "router":
            return (self.experts(x).view(*x.shape[:2], 4, 8) * weights[..., None]).sum(2)
        return weights if self.kind == "classifier" else weights.mT @ x


@pytest.mark.parametrize("kind", ["router", "classifier", "pooling"])
def test_a_softmax_that_is_no_attention(kind: str) -> None:
    outcome = rotate(Router(kind))
    assert outcome.report.sites == [] and not outcome.rotations


def test_probabilities_that_are_read_elsewhere() -> None:
    """They do not change."""

    class Model(Attention):
        def forward(self, x):
            q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
            probabilities = (q @ k.mT).softmax(-1)
            return self.out(probabilities @ v), probabilities

    outcome = rotate(Model())
    assert len(outcome.report.rotated) == 2
