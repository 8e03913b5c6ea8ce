"""MLPs whose last projection is no plain linear of its own: joined with an attention, convolutions, narrow ones."""

import pytest
import torch
from test_match import HEADS, HIDDEN, WIDTH, Attention, compiles_alike, rotate, x_of
from torch import nn
from torch.nn import functional as F

import rotpass


class Parallel(Attention):
    """As FLUX's single blocks: one projection of the attention's output and the MLP's hidden values side by side."""

    def __init__(self, first: str = "attention", gated: bool = False) -> None:
        super().__init__()
        self.first, self.gated = first, gated
        self.up = nn.Linear(HIDDEN, 128 if gated else 64)
        self.o = nn.Linear(HEADS * WIDTH + 64, HIDDEN)

    def hidden(self, x):
        if not self.gated:
            return F.gelu(self.up(x), approximate="tanh")
        gate, up = self.up(x).chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, x):
        y = self.merge(self.attend(*(self.heads(f(x)) for f in (self.q, self.k, self.v))))
        parts = (y, self.hidden(x)) if self.first == "attention" else (self.hidden(x), y)
        return self.o(torch.cat(parts, -1))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("first", ["attention", "mlp"])
def test_an_mlp_beside_an_attention(first: str, gated: bool) -> None:
    """R4 takes its columns of the projection, and V those of the heads."""
    outcome = rotate(Parallel(first, gated))
    assert outcome.how("r4") == ("rotated", "online", "folded")
    assert outcome.how("v") == ("rotated", "folded", "folded")
    assert (outcome.site("r4").width, outcome.site("r4").size) == (64, 64)
    assert compiles_alike(Parallel(first, gated)).counts == {"r3": 1, "v": 1, "r4": 1}
    assert rotate(Parallel(first, gated), block_size=16).site("r4").size == 16


def test_fold_cannot_hook_a_part_of_an_input() -> None:
    torch.manual_seed(0)
    model, x = Parallel().double(), x_of()
    before = model(x)
    report = rotpass.fold_(model, (x,), seed=5)
    assert [(s.kind, s.status) for s in report] == [("v", "refused"), ("r4", "refused")]
    assert "the compile and program doors rotate it" in report.refused[1].reason
    torch.testing.assert_close(model(x), before, rtol=1e-9, atol=1e-9)


def test_joined_values_that_are_read_elsewhere() -> None:
    class Model(Parallel):
        def __init__(self, shows: bool) -> None:
            super().__init__()
            self.shows, self.o = shows, nn.Linear(HIDDEN + 64, HIDDEN)

        def forward(self, x):
            joined = torch.cat((x, self.hidden(x)), -1)
            return (self.o(joined), joined) if self.shows else self.o(joined)

    assert len(rotate(Model(False)).report.rotated) == 1
    assert rotate(Model(True)).report.sites == []


def test_gradients_of_a_part_of_a_weight() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Parallel().double(), x_of()
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, backend=rotpass.backend(inner="aot_eager", seed=5, strict=True))
    found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch._dynamo.reset()


class ConvGate(nn.Module):
    """As Sana's: expand by 1x1, mix over space, gate, project by 1x1."""

    def __init__(self, dims: int, kernel: int = 1, groups: int = 1) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.dims = dims
        self.expand = conv(HIDDEN, 64, 1)
        self.mix = conv(64, 64, 3, padding=1, groups=64)
        self.down = conv(32, HIDDEN, kernel, padding=kernel // 2, groups=groups)

    def forward(self, x):
        x = x.mT.unflatten(-1, (-1, *(1,) * (self.dims - 1)))
        value, gate = self.mix(F.silu(self.expand(x))).chunk(2, 1)
        return self.down(value * F.silu(gate))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_pointwise_convolution_that_ends_a_gated_mlp(dims: int) -> None:
    outcome = rotate(ConvGate(dims))
    assert outcome.how("r4") == ("rotated", "online", "folded") and outcome.site("r4").width == 32
    assert compiles_alike(ConvGate(dims)).counts["r4"] == 1


@pytest.mark.parametrize("kernel, groups", [(3, 1), (1, 2)])
def test_a_convolution_that_is_no_projection(kernel: int, groups: int) -> None:
    assert rotate(ConvGate(2, kernel, groups)).report.sites == []


def spelled_out(h):
    return h * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(h.dtype)


def sparse(h):
    """Gemma 3n's: what is far enough above the mean."""
    return F.gelu(F.relu(h - (h.mean(-1, keepdim=True) + 0.5 * h.std(-1, keepdim=True, unbiased=False))))


NORMS = {
    "rms_norm": lambda h: F.rms_norm(h, (64,)),
    "layer_norm": lambda h: F.layer_norm(h, (64,)),
    "spelled out": spelled_out,
    "sparse": sparse,
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_before_the_last_projection(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

        def forward(self, x):
            return self.down(NORMS[name](F.silu(self.gate(x)) * self.up(x)))

    assert rotate(Model()).how("r4") == ("rotated", "online", "folded")


@pytest.mark.parametrize("autocast", [False, True])
def test_time_embedders_of_any_shape(autocast: bool) -> None:
    """They read sines and cosines, computed under autocast in some models."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, t):
            with torch.autocast("cpu", enabled=False) if autocast else torch.no_grad():
                angles = t.flatten()[:, None] * torch.arange(8, dtype=t.dtype)
                waves = torch.cat([angles.cos(), angles.sin()], -1)
            return self.down(F.silu(self.up(waves.to(t.dtype))))

    assert rotate(Model()).report.sites == []


class Ungated(nn.Module):
    def __init__(self, outer: int, inside: int, out: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(outer, inside), nn.Linear(inside, out)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize(
    "outer, inside, out, sites",
    [
        (HIDDEN, 96, HIDDEN, 1),  # expands
        (HIDDEN, 16, HIDDEN, 1),  # narrow inside, and comes back
        (HIDDEN, 96, 16, 1),
        (HIDDEN, HIDDEN, 96, 0),  # AdaLN: as many outputs as are modulated
        (HIDDEN, 96, 96, 0),  # a time embedder
        (HIDDEN, HIDDEN, HIDDEN, 0),  # a pooled-text embedder
    ],
)
def test_what_tells_an_ungated_mlp_from_a_head(outer: int, inside: int, out: int, sites: int) -> None:
    assert len(rotate(Ungated(outer, inside, out)).report.sites) == sites


class Xielu(Ungated):
    """Apertus's activation: quadratic above zero, exponential below, both slopes learned."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, 96, HIDDEN)
        self.above, self.below = nn.Parameter(torch.tensor([0.8])), nn.Parameter(torch.tensor([0.6]))
        self.register_buffer("eps", torch.tensor(-1e-6))

    def forward(self, x):
        x, above, below = self.up(x), F.softplus(self.above), 0.5 + F.softplus(self.below)
        negative = (torch.expm1(torch.min(x, self.eps)) - x) * below + 0.5 * x
        return self.down(torch.where(x > 0, above * x * x + 0.5 * x, negative))


def test_xielu() -> None:
    assert rotate(Xielu()).how("r4") == ("rotated", "online", "folded")


def test_a_convolution_of_each_channel_inside_an_mlp() -> None:
    """SegFormer's and PVT's: it mixes positions, and leaves the hidden values in their places."""

    class Model(Ungated):
        def __init__(self) -> None:
            super().__init__(HIDDEN, 96, HIDDEN)
            self.conv = nn.Conv1d(96, 96, 3, padding=1, groups=96)

        def forward(self, x):
            hidden = self.conv(self.up(x).transpose(1, 2)).transpose(1, 2)
            return self.down(F.gelu(hidden))

    assert rotate(Model()).how("r4") == ("rotated", "online", "folded")


def test_position_embedders_that_read_a_table() -> None:
    """Swin v2's continuous position bias: an MLP of coordinates that are a buffer."""

    class Model(Ungated):
        def __init__(self) -> None:
            super().__init__(HIDDEN, 96, HIDDEN)
            self.register_buffer("table", torch.randn(5, HIDDEN))

        def forward(self, x):
            return x + super().forward(self.table)

    assert rotate(Model()).report.sites == []
