"""Mixtures of experts: every expert of a stacked weight takes the counter-rotation, or none does."""

import pytest
import torch
from test_match import HIDDEN, compiles_alike, rotate, x_of
from torch import nn
from torch.nn import functional as F

EXPERTS, INSIDE = 3, 32


class Experts(nn.Module):
    """Weights as ``(experts, out, in)``, or ``(experts, in, out)`` where ``flipped``."""

    def __init__(self, how: str, flipped: bool = False) -> None:
        super().__init__()
        self.how, self.flipped = how, flipped
        up, down = (EXPERTS, 2 * INSIDE, HIDDEN), (EXPERTS, HIDDEN, INSIDE)
        if flipped:
            up, down = (EXPERTS, HIDDEN, 2 * INSIDE), (EXPERTS, INSIDE, HIDDEN)
        self.up, self.down = nn.Parameter(torch.empty(up)), nn.Parameter(torch.empty(down))

    def forward(self, x):
        up, down = (self.up, self.down) if self.flipped else (self.up.mT, self.down.mT)
        return HOW[self.how](x.flatten(0, 1), up, down).view(*x.shape[:2], -1)


def act(t):
    gate, up = t.chunk(2, -1)
    return (up + 1) * F.silu(gate.clamp(max=7.0))


def dense(x, up, down):
    return torch.bmm(act(torch.bmm(x.expand(EXPERTS, *x.shape), up)), down).sum(0)


def broadcast(x, up, down):
    return (act(x[None] @ up) @ down).sum(0)


def with_bias(x, up, down):
    bias = x.new_full((EXPERTS, 1, HIDDEN), 0.3)
    return torch.baddbmm(bias, act(torch.bmm(x.expand(EXPERTS, *x.shape), up)), down).sum(0)


def loop(x, up, down):
    return sum(act(x @ up[i]) @ down[i] for i in range(EXPERTS))


def unbound(x, up, down):
    return sum(act(x @ u) @ d for u, d in zip(up.unbind(0), down.unbind(0)))


def chunked(x, up, down):
    pairs = zip(up.chunk(EXPERTS, 0), down.chunk(EXPERTS, 0))
    return sum(act(x @ u.squeeze(0)) @ d.squeeze(0) for u, d in pairs)


def gathered(x, up, down):
    chosen = torch.arange(x.shape[0]) % EXPERTS
    return torch.bmm(act(torch.bmm(x[:, None], up[chosen])), down[chosen])[:, 0]


def some(x, up, down):
    """The weights of experts that this graph does not use change too, which would be wrong for another."""
    return sum(act(x @ up[i]) @ down[i] for i in range(EXPERTS - 1))


HOW = {f.__name__: f for f in (dense, broadcast, with_bias, loop, unbound, chunked, gathered, some)}


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_stacked_experts(how: str, flipped: bool) -> None:
    outcome = rotate(Experts(how, flipped))
    assert {(s.kind, s.status, s.inserted, s.undone) for s in outcome.report} == {("r4", "rotated", "online", "folded")}
    assert outcome.changed == {"down"}
    report = compiles_alike(Experts(how, flipped))
    assert {s.undone for s in report} == {"folded"}


@pytest.mark.parametrize("how", HOW)
def test_gradients(how: str) -> None:
    """Where weights train, the fold is a part of the graph, of every expert."""
    import rotpass

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Experts(how).double(), x_of()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    backend = rotpass.backend(inner="aot_eager", seed=5)
    found = torch.autograd.grad(torch.compile(model, backend=backend)(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert backend.report.counts["r4"] >= 1
    torch._dynamo.reset()


def test_an_expert_that_is_read_elsewhere() -> None:
    """The program has no second weight to offer, so the rotation is taken back at every call."""

    class Model(Experts):
        def forward(self, x):
            return super().forward(x), self.down[0].sum()

    outcome = rotate(Model("loop"))
    assert {s.undone for s in outcome.report} == {"online"} and not outcome.changed
    assert {s.undone for s in compiles_alike(Model("loop"))} == {"folded"}


def test_experts_of_one_matrix() -> None:
    """As in DBRX: the rows of all experts under each other, and one expert cut out of a view."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.empty(EXPERTS * INSIDE, HIDDEN))
            self.down = nn.Parameter(torch.empty(EXPERTS * INSIDE, HIDDEN))

        def forward(self, x):
            up, down = (w.view(EXPERTS, INSIDE, HIDDEN) for w in (self.up, self.down))
            return sum(F.silu(x @ u.squeeze(0).t()) @ d.squeeze(0) for u, d in zip(up.chunk(3), down.chunk(3)))

    outcome = rotate(Model())
    assert outcome.changed == {"down"} and len(outcome.report.rotated) == EXPERTS


def test_grouped_mm() -> None:
    """Tokens sorted by expert, one of which gets none."""

    class Model(Experts):
        def forward(self, x):
            ends = torch.tensor([4, 4, x.shape[0] * x.shape[1]], dtype=torch.int32)
            up, down = (self.up, self.down) if self.flipped else (self.up.mT, self.down.mT)
            h = torch.nn.functional.grouped_mm(x.flatten(0, 1), up, offs=ends)
            return torch.nn.functional.grouped_mm(act(h), down, offs=ends)

    import rotpass

    for flipped in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Model("dense", flipped).bfloat16(), x_of().bfloat16()
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        with torch.no_grad():
            before = torch.export.export(model, (x,))
            pass_ = rotpass.RotationPass(seed=5, strict=True)
            found, expected = pass_(before).module()(x), before.module()(x)
            assert [(s.kind, s.undone) for s in pass_.report] == [("r4", "folded")]
            assert (found - expected).norm() < 0.02 * expected.norm()
