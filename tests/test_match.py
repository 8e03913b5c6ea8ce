"""What is a site, where its rotation goes, and what stays as it is: one small module for each case."""

import copy
import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from models import randomize_, rotation_matrix
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F
from torch.nn.utils import parametrize

import rotpass
from rotpass import FakeQuant, RotationPass
from rotpass.report import Report

aten = torch.ops.aten
hadamard = torch.ops.rotpass.hadamard.default
HIDDEN, HEADS, WIDTH = 24, 2, 16


class Attention(nn.Module):
    """The plainest attention; a test overrides what it is about."""

    def __init__(self, kv_heads: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        kv = kv_heads * WIDTH
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n, bias) for n in (HEADS * WIDTH, kv, kv))
        self.o = nn.Linear(HEADS * WIDTH, HIDDEN, bias)
        self.register_buffer("other", x_of(), persistent=False)

    def forward(self, x: Tensor):
        return self.out(self.attend(*(self.heads(f(x)) for f in (self.q, self.k, self.v))))

    def heads(self, t: Tensor) -> Tensor:
        return t.view(*t.shape[:2], -1, WIDTH).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **kwargs) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **kwargs)

    def merge(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)

    def out(self, y: Tensor) -> Tensor:
        return self.o(self.merge(y))


class Mlp(nn.Module):
    def __init__(self, inside: int = HIDDEN, width: int = 64, outside: int = HIDDEN, bias: bool = True) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(inside, width, bias), nn.Linear(inside, width, bias)
        self.down = nn.Linear(width, outside, bias)

    def forward(self, x: Tensor):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@dataclasses.dataclass
class Outcome:
    before: ExportedProgram
    after: ExportedProgram
    report: Report

    def site(self, kind: str):
        [site] = [site for site in self.report if site.kind == kind]
        return site

    def how(self, kind: str) -> tuple[str, str, str]:
        site = self.site(kind)
        return site.status, site.inserted, site.undone

    @property
    def rotations(self) -> list[torch.fx.Node]:
        return self.after.graph.find_nodes(op="call_function", target=hadamard)

    @property
    def changed(self) -> set[str]:
        """Names of the weights that hold something else now."""
        old = self.before.state_dict
        return {
            name for name, tensor in self.after.state_dict.items() if name in old and not torch.equal(tensor, old[name])
        }


def x_of(length: int = 5, width: int = HIDDEN) -> Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def equal(actual, expected, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def rotate(model: nn.Module, *args, dynamic_shapes=None, tolerance: float = 1e-9, **recipe) -> Outcome:
    """Rotates through the program door and checks that the results are the same as before."""
    randomize_(model.double().eval())
    args = args or (x_of(),)
    before = export(model, args, dynamic_shapes=dynamic_shapes)
    pass_ = RotationPass(**{"seed": 5, **recipe})  # with signs R is not symmetric: a transpose too much shows
    after = pass_(before)
    equal(after.module()(*args), before.module()(*args), tolerance)
    return Outcome(before, after, pass_.report)


@torch.no_grad()
def compiles_alike(model: nn.Module, *args, **recipe) -> Report:
    """Rotates through torch.compile and checks the results; returns the report."""
    torch._dynamo.reset()
    randomize_(model.double().eval())
    args = args or (x_of(),)
    backend = rotpass.backend(inner="eager", **{"seed": 5, **recipe})
    backend.clear()
    equal(torch.compile(model, backend=backend, fullgraph=True)(*args), model(*args))
    return backend.report


def text(ep: ExportedProgram) -> str:
    """The calls of a graph, one a line, without the defaults that differ from one torch to the next."""

    def show(arg) -> str:
        return str(arg) if not isinstance(arg, (list, tuple)) else f"[{', '.join(map(show, arg))}]"

    lines = [
        f"{node} = {str(node.target).removeprefix('aten.').removesuffix('.default')}({', '.join(map(show, node.args))})"
        for node in ep.graph.nodes
        if node.op == "call_function"
    ]
    [output] = ep.graph.find_nodes(op="output")
    return "\n".join([*lines, f"return {', '.join(map(str, output.args[0]))}"])


# --- snapshots


def test_snapshot_of_an_attention() -> None:
    class Model(Attention):
        def attend(self, q, k, v):
            k, v = (t[:, :, None].expand(2, 1, 2, 5, WIDTH).reshape(2, 2, 5, WIDTH) for t in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    outcome = rotate(Model(kv_heads=1), seed=None)
    assert_expected_inline(
        text(outcome.before),
        """\
linear = linear(x, p_q_weight, p_q_bias)
view = view(linear, [2, 5, -1, 16])
transpose = transpose.int(view, 1, 2)
linear_1 = linear(x, p_k_weight, p_k_bias)
view_1 = view(linear_1, [2, 5, -1, 16])
transpose_1 = transpose.int(view_1, 1, 2)
linear_2 = linear(x, p_v_weight, p_v_bias)
view_2 = view(linear_2, [2, 5, -1, 16])
transpose_2 = transpose.int(view_2, 1, 2)
unsqueeze = unsqueeze(transpose_1, 2)
expand = expand(unsqueeze, [2, 1, 2, 5, 16])
reshape = reshape(expand, [2, 2, 5, 16])
unsqueeze_1 = unsqueeze(transpose_2, 2)
expand_1 = expand(unsqueeze_1, [2, 1, 2, 5, 16])
reshape_1 = reshape(expand_1, [2, 2, 5, 16])
scaled_dot_product_attention = scaled_dot_product_attention(transpose, reshape, reshape_1, None, 0.0, True)
transpose_3 = transpose.int(scaled_dot_product_attention, 1, 2)
flatten = flatten.using_ints(transpose_3, 2)
linear_3 = linear(flatten, p_o_weight, p_o_bias)
return linear_3""",
    )
    assert_expected_inline(
        text(outcome.after),
        """\
linear = linear(x, p_q_weight, p_q_bias)
hadamard_default = rotpass.hadamard(linear, 16, False, default, None)
view = view(hadamard_default, [2, 5, -1, 16])
transpose = transpose.int(view, 1, 2)
linear_1 = linear(x, p_k_weight, p_k_bias)
hadamard_default_1 = rotpass.hadamard(linear_1, 16, False, default, None)
view_1 = view(hadamard_default_1, [2, 5, -1, 16])
transpose_1 = transpose.int(view_1, 1, 2)
linear_2 = linear(x, p_v_weight, p_v_bias)
view_2 = view(linear_2, [2, 5, -1, 16])
transpose_2 = transpose.int(view_2, 1, 2)
unsqueeze = unsqueeze(transpose_1, 2)
expand = expand(unsqueeze, [2, 1, 2, 5, 16])
reshape = reshape(expand, [2, 2, 5, 16])
unsqueeze_1 = unsqueeze(transpose_2, 2)
expand_1 = expand(unsqueeze_1, [2, 1, 2, 5, 16])
reshape_1 = reshape(expand_1, [2, 2, 5, 16])
scaled_dot_product_attention = scaled_dot_product_attention(transpose, reshape, reshape_1, None, 0.0, True)
transpose_3 = transpose.int(scaled_dot_product_attention, 1, 2)
flatten = flatten.using_ints(transpose_3, 2)
linear_3 = linear(flatten, p_o_weight, p_o_bias)
return linear_3""",
    )
    assert_expected_inline(
        str(outcome.report),
        """\
kind  where   size  status   inserted  undone  reason
r3    (root)  16    rotated  online    none
v     (root)  16    rotated  folded    folded
rotpass: 2 rotated (r3=1 v=1 r4=0), 0 refused""",
    )


def test_snapshot_of_an_mlp() -> None:
    outcome = rotate(Mlp(), seed=3, block_size=32)
    assert_expected_inline(
        text(outcome.before),
        """\
linear = linear(x, p_gate_weight, p_gate_bias)
silu = silu(linear)
linear_1 = linear(x, p_up_weight, p_up_bias)
mul = mul.Tensor(silu, linear_1)
linear_2 = linear(mul, p_down_weight, p_down_bias)
return linear_2""",
    )
    assert_expected_inline(
        text(outcome.after),
        """\
linear = linear(x, p_gate_weight, p_gate_bias)
silu = silu(linear)
linear_1 = linear(x, p_up_weight, p_up_bias)
mul = mul.Tensor(silu, linear_1)
hadamard_default = rotpass.hadamard(mul, 32, False, default, 3)
linear_2 = linear(hadamard_default, p_down_weight, p_down_bias)
return linear_2""",
    )
    assert_expected_inline(
        str(outcome.report),
        """\
kind  where  size  status   inserted  undone  reason
r4    down   2x32  rotated  online    folded
rotpass: 1 rotated (r3=0 v=0 r4=1), 0 refused""",
    )


# --- MLPs


def squared_relu(m: Mlp, x: Tensor) -> Tensor:
    return m.down(F.relu(m.up(x)).square())


def in_place(m: Mlp, x: Tensor) -> Tensor:
    return m.down(F.silu(m.gate(x), inplace=True).mul_(m.up(x)))


MLPS = {
    "gate first": lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)),
    "up first": lambda m, x: m.down(m.up(x) * F.gelu(m.gate(x))),
    "sigmoid gate": lambda m, x: m.down(m.gate(x).sigmoid() * m.up(x)),
    "swish spelled out": lambda m, x: m.down(m.up(x) * (m.gate(x) * torch.sigmoid(m.gate(x)))),
    "casts": lambda m, x: m.down((F.silu(m.gate(x).float()).double() * m.up(x)).to(x.dtype)),
    "views": lambda m, x: m.down((F.silu(m.gate(x)) * m.up(x)).view(-1, 64)).view(2, 5, -1),
    "flat": lambda m, x: m.down((F.silu(m.gate(x)) * m.up(x)).flatten(0, 1)).unflatten(0, (2, 5)),
    "contiguous": lambda m, x: m.down((F.silu(m.gate(x).contiguous()) * m.up(x)).contiguous()),
    "dropout of nothing": lambda m, x: m.down(F.dropout(F.silu(m.gate(x)) * m.up(x), p=0.0, training=True)),
    "dropout in eval": lambda m, x: m.down(F.dropout(F.silu(m.gate(x)) * m.up(x), p=0.5, training=False)),
    "scaled": lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x) * 0.5),
    "clamped": lambda m, x: m.down((m.up(x) + 1) * F.silu(m.gate(x).clamp(max=7))),
    "un-gated": lambda m, x: m.down(F.gelu(m.up(x), approximate="tanh")),
    "squared relu": squared_relu,
    "in place": in_place,
    "matmul": lambda m, x: (F.silu(m.gate(x)) * m.up(x)) @ m.down.weight.T,
}


@pytest.mark.parametrize("door, bias", [("program", True), ("program", False), ("compile", True)])
@pytest.mark.parametrize("name", MLPS)
def test_mlps(name: str, bias: bool, door: str) -> None:
    class Model(Mlp):
        def forward(self, x):
            return MLPS[name](self, x)

    if door == "compile":
        [site] = compiles_alike(Model(bias=bias), strict=True)
        assert (site.kind, site.size, site.inserted, site.undone) == ("r4", 64, "online", "folded")
        return
    outcome = rotate(Model(bias=bias), strict=True)
    assert outcome.how("r4") == ("rotated", "online", "folded")
    assert outcome.changed == {"down.weight"}, "the bias is not rotated"
    equal(
        outcome.after.state_dict["down.weight"],
        outcome.before.state_dict["down.weight"] @ rotation_matrix(64, seed=5).T,
    )
    assert len(outcome.rotations) == 1


def test_dropout_while_training_stays_the_users() -> None:
    class Model(Mlp):
        def forward(self, x):
            return self.down(F.dropout(F.silu(self.gate(x)) * self.up(x), 0.5, True))

    model = randomize_(Model().double())
    ep = export(model, (x_of(),))
    rotated = RotationPass(strict=True)(ep)
    results = []
    for program in (ep, rotated):
        torch.manual_seed(1)
        results.append(program.module()(x_of()))
    equal(*results)


def test_an_mlp_whose_hidden_is_read_elsewhere() -> None:
    """Only what goes to down is rotated."""

    class Model(Mlp):
        def forward(self, x):
            hidden = F.silu(self.gate(x)) * self.up(x)
            return self.down(hidden), hidden

    assert rotate(Model()).how("r4") == ("rotated", "online", "folded")


class NoSite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.square, self.narrow = nn.Linear(HIDDEN, 64), nn.Linear(HIDDEN, HIDDEN), nn.Linear(64, HIDDEN)
        self.modulate, self.time = nn.Linear(HIDDEN, 6 * HIDDEN), nn.Linear(64, HIDDEN)


NO_SITES = {
    "linear, linear": lambda m, x: m.narrow(m.wide(x)),
    "a residual": lambda m, x: m.square(x + F.silu(m.square(x))),
    "a residual of a projection": lambda m, x: m.square(m.narrow(m.wide(x)) + F.silu(m.square(x))),
    "AdaLN": lambda m, x: m.modulate(F.silu(m.square(x))),
    "AdaLN of an input": lambda m, x: m.modulate(F.silu(x)),
    "a time embedder": lambda m, x: m.square(F.silu(m.time(m.wide(x).detach().cos()))),
    "a softmax": lambda m, x: m.narrow(m.wide(x).softmax(-1)),
    "a cumulative sum": lambda m, x: m.narrow(F.silu(m.wide(x)).cumsum(-1)),
    "no linear behind": lambda m, x: F.silu(m.wide(x)) * m.wide(x),
}


@pytest.mark.parametrize("name", NO_SITES)
def test_what_is_no_mlp(name: str) -> None:
    class Model(NoSite):
        def forward(self, x):
            return NO_SITES[name](self, x)

    outcome = rotate(Model())
    assert not outcome.report.sites and not outcome.rotations and not outcome.changed


def test_an_attentions_output_projection_is_no_mlp() -> None:
    class Model(Attention):
        def out(self, y):
            return self.o(F.silu(self.q(self.other)) * self.merge(y))

    assert [s.kind for s in rotate(Model(), r3=False, v=False).report] == []


def test_two_mlps_in_a_row() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Mlp(), Mlp()

        def forward(self, x):
            return self.second(self.first(x))

    outcome = rotate(Model())
    assert [s.where for s in outcome.report] == ["first.down", "second.down"]
    assert outcome.changed == {"first.down.weight", "second.down.weight"}


# --- where K and V are rotated


ONLINE_R3 = ("rotated", "online", "none")
FOLDED = ("rotated", "folded", "folded")


def widths(outcome: Outcome) -> list[int]:
    """How many values each rotation moves, in graph order."""
    return [node.meta["val"].numel() for node in outcome.rotations]


@pytest.mark.parametrize("how", ["expand", "repeat_interleave", "repeat"])
def test_keys_are_rotated_before_they_are_repeated(how: str) -> None:
    class Model(Attention):
        def attend(self, q, k, v):
            if how == "expand":
                k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
            elif how == "repeat":
                k, v = (t.repeat(1, 2, 1, 1) for t in (k, v))
            else:
                k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            return super().attend(q, k, v)

    outcome = rotate(Model(kv_heads=1))
    assert outcome.how("r3") == ONLINE_R3 and outcome.how("v") == FOLDED
    assert widths(outcome) == [2 * 5 * 2 * WIDTH, 2 * 5 * WIDTH]
    assert outcome.changed == {"v.weight", "v.bias", "o.weight"}


def test_folded_weights_are_the_dense_product() -> None:
    outcome = rotate(Attention(kv_heads=2), r3=False)
    old, new, r = outcome.before.state_dict, outcome.after.state_dict, rotation_matrix(WIDTH, HEADS * WIDTH, seed=5)
    equal(new["v.weight"], r @ old["v.weight"])
    equal(new["v.bias"], r @ old["v.bias"])
    equal(new["o.weight"], old["o.weight"] @ r.T)
    assert torch.equal(new["o.bias"], old["o.bias"])


@pytest.mark.parametrize("reader", ["output", "sum", "linear"])
@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_a_second_reader_sees_what_it_saw(role: str, reader: str) -> None:
    class Model(Attention):
        def attend(self, q, k, v):
            self.seen = {"q": q, "k": k, "v": v}[role]
            return super().attend(q, k, v)

        def forward(self, x):
            y = super().forward(x)
            seen = self.__dict__.pop("seen")
            return y, seen if reader == "output" else seen.sum(-1) if reader == "sum" else self.o(self.merge(seen))

    outcome = rotate(Model())
    assert outcome.how("r3") == ONLINE_R3
    assert outcome.how("v")[:2] == ("rotated", "online" if role == "v" else "folded")
    compiles_alike(Model())


def test_a_key_that_two_attentions_share() -> None:
    """One rotation serves both; each query has its own."""

    class Model(Attention):
        def attend(self, q, k, v):
            return super().attend(q, k, v) + super().attend(q * 0.5, k, v)

    outcome = rotate(Model(), v=False)
    assert [s.status for s in outcome.report] == ["rotated"] * 2
    keys = [n for n in outcome.rotations if "k" in str(n.args[0].all_input_nodes)]
    assert len(outcome.rotations) <= 3 and len(keys) <= 1


def test_a_value_that_two_attentions_share() -> None:
    class Model(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.o2 = nn.Linear(HEADS * WIDTH, HIDDEN)

        def attend(self, q, k, v):
            return super().attend(q, k, v), super().attend(k, q, v)

        def out(self, y):
            return self.o(self.merge(y[0])), self.o2(self.merge(y[1]))

    outcome = rotate(Model(), r3=False)
    assert [(s.inserted, s.undone) for s in outcome.report] == [("folded", "folded")] * 2
    assert outcome.changed == {"v.weight", "v.bias", "o.weight", "o2.weight"}, "V is folded once"


def test_a_value_of_an_attention_that_is_left_out() -> None:
    class Part(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    class Model(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Part(), Part()

        def attend(self, q, k, v):
            return self.a(q, k, v) + self.b(k, q, v)

    outcome = rotate(Model(), only="a")
    assert [(s.kind, s.where) for s in outcome.report] == [("r3", "a"), ("v", "a")]
    assert outcome.how("v") == ("rotated", "online", "online") and not outcome.changed


def test_keys_that_are_the_values() -> None:
    class Model(Attention):
        def attend(self, q, k, v):
            return super().attend(q, k, k)

    outcome = rotate(Model())
    assert outcome.how("r3") == ONLINE_R3 and outcome.how("v")[0] == "rotated"
    assert "k.weight" not in outcome.changed
    compiles_alike(Model())


def test_self_attention_without_projections() -> None:
    """Q, K and V are one tensor."""

    class Model(Attention):
        def attend(self, q, k, v):
            return super().attend(v, v, v)

    outcome = rotate(Model())
    assert outcome.how("r3") == ONLINE_R3 and outcome.how("v")[0] == "rotated"
    assert "v.weight" not in outcome.changed


class Fused(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * WIDTH)

    def forward(self, x):
        return self.fused(self.qkv(x))

    def attend_fused(self, qkv):
        return self.out(self.attend(*(self.heads(t) for t in qkv.chunk(3, -1))))


def test_a_fused_projection_whose_value_rows_are_read_elsewhere() -> None:
    class Model(Fused):
        def fused(self, qkv):
            return self.attend_fused(qkv), qkv[..., -WIDTH:]

    outcome = rotate(Model())
    assert outcome.how("v") == ("rotated", "online", "folded") and outcome.changed == {"o.weight"}


def test_a_fused_projection_whose_other_rows_are_read_elsewhere() -> None:
    class Model(Fused):
        def fused(self, qkv):
            return self.attend_fused(qkv), qkv[..., :WIDTH].sum()

    outcome = rotate(Model())
    assert outcome.how("v") == FOLDED and outcome.changed == {"qkv.weight", "qkv.bias", "o.weight"}
    old, new, rows = outcome.before.state_dict, outcome.after.state_dict, slice(2 * HEADS * WIDTH, None)
    equal(new["qkv.weight"][rows], rotation_matrix(WIDTH, HEADS * WIDTH, seed=5) @ old["qkv.weight"][rows])
    assert torch.equal(new["qkv.weight"][: rows.start], old["qkv.weight"][: rows.start])


@pytest.mark.parametrize("layout", ["3hd", "h3d", "hd3"])
def test_layouts_of_a_fused_projection(layout: str) -> None:
    """The last axis of ``hd3`` cuts head vectors apart: V cannot fold, and is rotated all the same."""

    class Model(Fused):
        def fused(self, qkv):
            axes = {"3": 3, "h": HEADS, "d": WIDTH}
            qkv = qkv.view(*qkv.shape[:2], *(axes[a] for a in layout))
            order = [2 + layout.index(a) for a in "3hd"]
            q, k, v = qkv.permute(order[0], 0, order[1], 1, order[2]).unbind(0)
            return self.out(self.attend(q, k, v))

    outcome = rotate(Model())
    assert outcome.how("v") == (("rotated", "online", "folded") if layout == "hd3" else FOLDED)
    assert {s.status for s in compiles_alike(Model())} == {"rotated"}


def test_a_value_that_is_clamped_in_place() -> None:
    class Model(Attention):
        def forward(self, x):
            self_v = self.v(x)
            self_v.clamp_(-1, 1)
            return self.out(self.attend(self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self_v)))

    outcome = rotate(Model())
    assert outcome.how("v") == ("rotated", "online", "folded") and outcome.changed == {"o.weight"}
    compiles_alike(Model())


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_a_write_after_the_attention_has_read(role: str) -> None:
    class Model(Attention):
        def attend(self, q, k, v):
            y = super().attend(q, k, v)
            written = {"q": q, "k": k, "v": v}[role]
            written.add_(1)
            self.kept = written
            return y

        def forward(self, x):
            return super().forward(x), self.__dict__.pop("kept")

    outcome = rotate(Model())
    assert {s.status for s in outcome.report} == {"rotated"}
    compiles_alike(Model())


def test_a_write_before_the_attention_reads() -> None:
    """A key is finished by hand: zeros of its own, filled in two parts."""

    class Model(Attention):
        def attend(self, q, k, v):
            whole = torch.empty_like(k)
            whole[..., : WIDTH // 2] = k[..., WIDTH // 2 :]
            whole[..., WIDTH // 2 :] = -k[..., : WIDTH // 2]
            return super().attend(q + whole, whole, v)

    outcome = rotate(Model())
    assert outcome.how("r3") == ONLINE_R3
    compiles_alike(Model())


# --- where V is taken back


def gated(m: Attention, y: Tensor) -> Tensor:
    return m.o(m.merge(y) * torch.sigmoid(m.q(m.other)))


BETWEEN = {
    "a norm": lambda m, y: m.o(F.rms_norm(m.merge(y), (HEADS * WIDTH,))),
    "a gate": gated,
    "an activation": lambda m, y: m.o(F.relu(m.merge(y))),
    "nothing behind": lambda m, y: m.merge(y),
    "a residual": lambda m, y: m.o(m.merge(y) + 1),
    "two readers": lambda m, y: (m.o(m.merge(y)), y.sum()),
    "heads mixed": lambda m, y: m.o(y.transpose(1, 3).reshape(2, 5, -1)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_v_is_taken_back_online_where_something_stands_between(name: str) -> None:
    class Model(Attention):
        def out(self, y):
            return BETWEEN[name](self, y)

    outcome = rotate(Model())
    assert outcome.how("v") == ("rotated", "folded", "online")
    assert outcome.changed == {"v.weight", "v.bias"}
    [inverse] = [node for node in outcome.rotations if node.args[2] is True]
    assert inverse.args[0].target is aten.scaled_dot_product_attention.default
    assert {s.status for s in compiles_alike(Model())} == {"rotated"}


PASSES = {
    "a cast": lambda m, y: m.o(m.merge(y.float().double())),
    "dropout of nothing": lambda m, y: m.o(F.dropout(m.merge(y), 0.0)),
    "a factor": lambda m, y: m.o(m.merge(y) * 0.5),
    "a factor per head": lambda m, y: m.o(m.merge(y * torch.tensor([0.5, 2.0], dtype=y.dtype)[:, None, None])),
    "a slice of tokens": lambda m, y: m.o(m.merge(y)[:, -1:]),
    "two projections": lambda m, y: (m.o(m.merge(y)), F.linear(m.merge(y), m.o2.weight)),
    "flat tokens": lambda m, y: m.o(y.permute(0, 2, 1, 3).reshape(-1, HEADS * WIDTH)).view(2, 5, -1),
}


@pytest.mark.parametrize("name", PASSES)
def test_v_folds_through_what_keeps_heads_whole(name: str) -> None:
    class Model(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.o2 = nn.Linear(HEADS * WIDTH, HIDDEN)

        def out(self, y):
            return PASSES[name](self, y)

    assert rotate(Model(), tolerance=1e-5 if name == "a cast" else 1e-9).how("v") == FOLDED


@pytest.mark.parametrize("ending", ["view", "view_as", "reshape", "flatten", "as_strided"])
def test_strides_after_the_attention(ending: str) -> None:
    """An inverse on the attention's output must leave the views behind it possible."""

    class Model(Attention):
        def out(self, y):
            y = y.transpose(1, 2)
            if ending == "view":
                flat = y.view(*y.shape[:2], -1)
            elif ending == "view_as":
                flat = y.view_as(y).view(y.shape[0], -1, HEADS * WIDTH)
            elif ending == "as_strided":
                flat = y.as_strided((2, 5, HEADS * WIDTH), (5 * HEADS * WIDTH, HEADS * WIDTH, 1))
            else:
                flat = y.reshape(2, 5, -1) if ending == "reshape" else y.flatten(2)
            return self.o(flat), y.stride(1) * torch.ones(1)

    outcome = rotate(Model(), counter="online")
    assert outcome.how("v") == ("rotated", "online", "online") and not outcome.changed
    compiles_alike(Model(), counter="online")


# --- weights


class SharedO(Attention):
    def out(self, y):
        return self.o(self.merge(y)) + self.o(self.q(self.other))


class SharedV(Attention):
    def forward(self, x):
        return super().forward(x) + self.o(self.v(x).flip(-1))


class TiedKV(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.k = self.v

    def attend(self, q, k, v):
        return super().attend(q, k * 2, v)


@pytest.mark.parametrize("model", [SharedO, SharedV, TiedKV])
def test_a_shared_weight_never_changes_under_its_other_users(model: type[Attention]) -> None:
    """In a program that half goes online; torch.compile gives the site a folded copy of its own."""
    outcome = rotate(model())
    assert outcome.how("r3") == ONLINE_R3
    assert outcome.how("v")[0] == "rotated" and "online" in outcome.how("v")[1:]
    shared = {SharedO: {"o.weight"}, SharedV: {"v.weight", "v.bias", "o.weight"}, TiedKV: {"v.weight", "k.weight"}}
    assert not outcome.changed & shared[model]
    v = next(s for s in compiles_alike(model()) if s.kind == "v")
    assert v.status == "rotated"


def test_a_down_projection_that_two_mlps_share_alike() -> None:
    """Both need the same fold: one edit, not two."""

    class Model(Mlp):
        def forward(self, x):
            return super().forward(x) + super().forward(x * 0.5)

    outcome = rotate(Model())
    assert [s.undone for s in outcome.report] == ["folded", "folded"]
    equal(
        outcome.after.state_dict["down.weight"],
        outcome.before.state_dict["down.weight"] @ rotation_matrix(64, seed=5).T,
    )
    assert {s.undone for s in compiles_alike(Model())} == {"folded"}


def test_a_down_projection_tied_to_an_embedding() -> None:
    class Model(Mlp):
        def forward(self, x):
            return super().forward(x), F.embedding(torch.tensor([0, 1]), self.down.weight)

    outcome = rotate(Model())
    assert outcome.how("r4") == ("rotated", "online", "online") and not outcome.changed
    assert "other users" in outcome.site("r4").reason
    assert [s.undone for s in compiles_alike(Model())] == ["folded"]


def test_a_weight_under_two_names() -> None:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.twin = self.down

    outcome = rotate(Model())
    assert outcome.how("r4") == ("rotated", "online", "folded")
    state = outcome.after.state_dict
    assert "twin.weight" in state and torch.equal(state["twin.weight"], state["down.weight"])


class Masked(nn.Module):
    def forward(self, weight):
        return weight * (torch.arange(weight.shape[1]) % 3 > 0)


def transposed(m: Mlp) -> None:
    m.down.weight = nn.Parameter(m.down.weight.detach().t().clone())


def weighed(m: Mlp, weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.silu(m.gate(x)) * m.up(x), weight, m.down.bias)


WEIGHTS = {
    "transposed": (transposed, lambda m, x: weighed(m, m.down.weight.t(), x), "folded"),
    "permuted": (transposed, lambda m, x: weighed(m, m.down.weight.permute(1, 0), x), "folded"),
    "buffer": (lambda m: m.register_buffer("w", torch.randn(HIDDEN, 64)), lambda m, x: weighed(m, m.w, x), "folded"),
    "constant": (
        lambda m: m.__dict__.update(w=torch.randn(HIDDEN, 64, dtype=torch.float64)),
        lambda m, x: weighed(m, m.w, x),
        "folded",
    ),
    "masked": (lambda m: None, lambda m, x: weighed(m, m.down.weight * m.mask, x), "online"),
    "sliced": (lambda m: None, lambda m, x: weighed(m, m.tall[:HIDDEN], x), "online"),
    "cast": (lambda m: None, lambda m, x: weighed(m, m.down.weight.float().double(), x), "online"),
    "parametrized": (
        lambda m: parametrize.register_parametrization(m.down, "weight", Masked()),
        lambda m, x: weighed(m, m.down.weight, x),
        "online",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_all_sorts(name: str) -> None:
    change, forward, undone = WEIGHTS[name]

    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.ones(HIDDEN, 64))
            self.tall = nn.Parameter(torch.ones(2 * HIDDEN, 64))
            change(self)

        def forward(self, x):
            return forward(self, x)

    outcome = rotate(Model())
    assert outcome.how("r4") == ("rotated", "online", undone), outcome.site("r4").reason
    assert {s.status for s in compiles_alike(Model())} == {"rotated"}


@pytest.mark.parametrize("through", ["itself", "a view"])
def test_a_weight_that_the_graph_writes(through: str) -> None:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randn(HIDDEN, 64))

        def forward(self, x):
            (self.w if through == "itself" else self.w[:3]).mul_(0.5)
            return weighed(self, self.w, x)

    randomize_(model := Model().double())
    ep, pass_ = export(model, (x_of(),)), RotationPass()
    rotated = pass_(copy.deepcopy(ep))
    before, after = ep.module(), rotated.module()
    for _ in range(2):
        equal(after(x_of()), before(x_of()))
    [site] = pass_.report
    assert (site.inserted, site.undone) == ("online", "online")
    assert ("written" if through == "a view" else "not a parameter") in site.reason


# --- masks, lengths and other arguments of the attention


def test_a_padding_mask() -> None:
    class Model(Attention):
        def forward(self, x, padding):
            mask = padding[:, None, None, :].expand(2, 1, 5, 5)
            return self.out(self.attend(*(self.heads(f(x)) for f in (self.q, self.k, self.v)), attn_mask=mask))

    padding = torch.ones(2, 5, dtype=torch.bool)
    padding[0, :2] = False
    rotate(Model(), x_of(), padding, strict=True)


def test_causal_with_fewer_queries_than_keys() -> None:
    class Model(Attention):
        def forward(self, x, past):
            q, k, v = (self.heads(f(t)) for f, t in ((self.q, x), (self.k, past), (self.v, past)))
            return self.out(self.attend(q, k, v, is_causal=True, scale=0.3))

    outcome = rotate(Model(), x_of(3), x_of(9), strict=True)
    [call] = outcome.after.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    [old] = outcome.before.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert call.kwargs == old.kwargs and call.args[3:] == old.args[3:]


def test_another_width_of_values() -> None:
    class Model(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.o = nn.Linear(HIDDEN, 2 * 32), nn.Linear(2 * 32, HIDDEN)

        def forward(self, x):
            v = self.v(x).unflatten(-1, (2, 32)).transpose(1, 2)
            return self.out(self.attend(self.heads(self.q(x)), self.heads(self.k(x)), v))

    outcome = rotate(Model())
    assert (outcome.site("r3").size, outcome.site("v").size) == (16, 32) and outcome.how("v") == FOLDED


def test_a_past_that_is_concatenated() -> None:
    """What comes from outside stays as it is, and what goes out too."""

    class Model(Attention):
        def forward(self, x, past_k, past_v):
            q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
            k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
            return self.out(self.attend(q, k, v)), k, v

    past = [torch.randn(2, HEADS, 4, WIDTH, dtype=torch.float64) for _ in range(2)]
    n = Dim("past", min=1, max=64)
    outcome = rotate(Model(), x_of(), *past, dynamic_shapes=(None, {2: n}, {2: n}))
    assert outcome.how("v") == ("rotated", "online", "folded")
    assert "whole cache" in outcome.site("r3").reason and "whole cache" in outcome.site("v").reason


def test_a_cross_attention_over_a_given_cache() -> None:
    class Model(Attention):
        def forward(self, x, k, v):
            return self.out(self.attend(self.heads(self.q(x)), k, v))

    past = [torch.randn(2, HEADS, 4, WIDTH, dtype=torch.float64) for _ in range(2)]
    assert rotate(Model(), x_of(), *past).how("v") == ("rotated", "online", "folded")


def test_no_gradients_in_the_graph() -> None:
    """A barrier in the middle (torch.no_grad) is left where it is."""

    class Model(Attention):
        def forward(self, x):
            with torch.no_grad():
                q = self.heads(self.q(x))
            return self.out(self.attend(q, self.heads(self.k(x)), self.heads(self.v(x))))

    randomize_(model := Model().double())
    ep = export(model, (x_of(),))
    rotated = RotationPass(strict=True)(ep)
    equal(rotated.module()(x_of()), ep.module()(x_of()))


# --- fake quantizers


def test_a_fake_quantizer_stands_behind_the_rotation() -> None:
    outcome = rotate_only(Attention(), fake_quant=FakeQuant(q=4, k=4, v=4))
    [call] = outcome.after.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert [n.target for n in call.args[:3]] == [torch.ops.rotpass.fake_quantize.default] * 3
    assert [n.args[1] for n in call.args[:3]] == ["int4", "int4_asymmetric", "int4_asymmetric"]
    order = list(outcome.after.graph.nodes)
    assert max(map(order.index, outcome.rotations)) < min(map(order.index, call.args[:3]))


def rotate_only(model: nn.Module, *args, **recipe) -> Outcome:
    """As :func:`rotate`, for recipes that change the results."""
    before = export(randomize_(model.double().eval()), args or (x_of(),))
    pass_ = RotationPass(**recipe)
    return Outcome(before, pass_(before), pass_.report)


@pytest.mark.parametrize("window", ["same", "apart", "overlapping"])
def test_a_cache_that_two_attentions_read(window: str) -> None:
    """Two views of one cache: in torch.compile, where it stays plain, each is rotated for its own attention."""

    class Model(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.q2, self.o2 = nn.Linear(HIDDEN, HEADS * WIDTH), nn.Linear(HEADS * WIDTH, HIDDEN)
            for name in ("keys", "values"):
                self.register_buffer(name, torch.randn(2, HEADS, 12, WIDTH))

        def forward(self, x):
            q, q2, k, v = (self.heads(f(x)) for f in (self.q, self.q2, self.k, self.v))
            at = torch.arange(2, 2 + x.shape[1])
            keys, values = self.keys.index_copy_(2, at, k), self.values.index_copy_(2, at, v)
            first, second = {"same": (0, 0), "apart": (0, 6), "overlapping": (0, 4)}[window]
            a = self.attend(q, keys[:, :, first : first + 6], values[:, :, first : first + 6])
            b = self.attend(q2, keys[:, :, second : second + 6], values[:, :, second : second + 6])
            return self.o(self.merge(a)) + self.o2(self.merge(b))

    outcome = rotate(Model())
    assert len(outcome.rotations) == 3  # two queries and the new keys
    assert len(compiles_alike(Model()).rotated) == 4


UPDATES = {
    "where": lambda cache, new, at: torch.where((torch.arange(cache.shape[2]) == at)[:, None], new, cache),
    "index_copy": lambda cache, new, at: cache.index_copy(2, at, new),
    "rolled": lambda cache, new, at: cache.copy_(cache.roll(-1, -2).index_copy_(2, torch.tensor([7]), new)),
    "blank and where": lambda cache, new, at: torch.where(
        (torch.arange(cache.shape[2]) == at)[:, None],
        new,
        cache.masked_fill(torch.arange(cache.shape[2])[:, None] > at, 0),
    ),
    # Those that nobody knows.
    "index_add": lambda cache, new, at: cache.index_add(2, at, new),
    "rolled and added": lambda cache, new, at: cache.copy_(cache.roll(-1, -2).index_add_(2, at, new)),
    "where, by value": lambda cache, new, at: torch.where(cache < 0, new, cache),
    "rolled inside vectors": lambda cache, new, at: cache.roll(1, -1).index_copy(2, at, new),
    "rolled whole": lambda cache, new, at: cache.roll(1).index_copy(2, at, new),
    "blank, not zero": lambda cache, new, at: cache.masked_fill(torch.tensor([True]), 0.5).index_copy(2, at, new),
}


@pytest.mark.parametrize("update", UPDATES)
def test_a_rotated_cache_is_never_mixed(update: str) -> None:
    """An update that rotpass cannot follow is an error under cache="rotated", never a rotation of the whole cache."""

    class Model(Attention):
        def forward(self, x, keys, values, at):
            q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
            keys, values = UPDATES[update](keys, k, at), UPDATES[update](values, v, at)
            return self.out(self.attend(q, keys, values)), keys, values

    keys, values = (torch.randn(2, HEADS, 8, WIDTH, dtype=torch.float64) for _ in range(2))
    args = x_of(1), keys, values, torch.tensor([3])
    program = export(randomize_(Model().double().eval()), copy.deepcopy(args))
    if list(UPDATES).index(update) > 3:
        with pytest.raises(ValueError, match="cannot be rotated: rotpass does not know how aten"):
            RotationPass(cache="rotated")(program)
        return
    r = rotation_matrix(WIDTH)
    after = RotationPass(cache="rotated", strict=True)(program).module()
    y, keys2, values2 = program.module()(*copy.deepcopy(args))
    equal(after(args[0], keys @ r.T, values @ r.T, args[3]), (y, keys2 @ r.T, values2 @ r.T))


FILLS = {
    "zeros": lambda new: new.new_zeros(2, HEADS, 3, WIDTH).copy_(new[:, :, -3:]),
    "part of zeros": lambda new: torch.zeros(2, HEADS, 12, WIDTH, dtype=new.dtype).index_copy_(2, torch.arange(7), new),
    "slice of zeros": lambda new: torch.cat([new, torch.zeros(2, HEADS, 3, WIDTH, dtype=new.dtype)], 2),
    "itself": lambda new: new,
    # Contents that cannot be told.
    "ones": lambda new: torch.ones(2, HEADS, 12, WIDTH, dtype=new.dtype).index_copy_(2, torch.arange(7), new),
}


@pytest.mark.parametrize("fill", FILLS)
def test_a_cache_that_is_filled_beside_the_attention(fill: str) -> None:
    """A prefill's attention reads the new keys themselves; what it leaves for later calls must be rotated as well."""

    class Model(Attention):
        def forward(self, x):
            q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
            return self.out(self.attend(q, k, v)), FILLS[fill](k), FILLS[fill](v)

    program = export(randomize_(Model().double().eval()), (x_of(7),))
    if fill == "ones":
        with pytest.raises(ValueError, match="cross the graph's boundary at .* and cannot be rotated"):
            RotationPass(cache="rotated")(program)
        return
    y, keys, values = program.module()(x_of(7))
    r = rotation_matrix(WIDTH)
    after = RotationPass(cache="rotated", strict=True)(program).module()
    equal(after(x_of(7)), (y, keys @ r.T, values @ r.T))
    equal(RotationPass()(program).module()(x_of(7)), (y, keys, values))


@pytest.mark.parametrize("update", ["index_copy_", "index_add_"])
def test_a_cache_that_is_written_beside_the_attention(update: str) -> None:
    class Model(Attention):
        def forward(self, x, keys, values):
            q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
            for cache, new in (keys, k), (values, v):
                getattr(cache, update)(2, torch.arange(7), new)
            return self.out(self.attend(q, k, v))

    def blank():
        return [torch.zeros(2, HEADS, 12, WIDTH, dtype=torch.float64) for _ in range(2)]

    program = export(randomize_(Model().double().eval()), (x_of(7), *blank()))
    if update == "index_add_":
        with pytest.raises(ValueError, match="rotpass does not know how aten.index_add_.default writes it"):
            RotationPass(cache="rotated")(program)
        return
    caches, rotated = blank(), blank()
    y = program.module()(x_of(7), *caches)
    after = RotationPass(cache="rotated", strict=True)(program).module()
    equal(after(x_of(7), *rotated), y)
    equal(rotated, [cache @ rotation_matrix(WIDTH).T for cache in caches])


@torch.no_grad()
@pytest.mark.parametrize("how", ["input", "buffer", "parameter"])
def test_a_cache_that_a_graph_only_reads(how: str) -> None:
    """Cross-attention's, filled by another graph: a buffer could be that or a constant, so it raises."""
    torch._dynamo.reset()

    class Model(Attention):
        def __init__(self) -> None:
            super().__init__()
            kept = torch.randn(2, HEADS, 8, WIDTH)
            if how == "buffer":
                self.register_buffer("kept", kept)
            elif how == "parameter":
                self.kept = nn.Parameter(kept)

        def forward(self, x, kept):
            kept = kept if how == "input" else self.kept
            values = self.heads(self.v(x))[:, :, :1].expand(-1, -1, kept.shape[2], -1)
            return self.out(self.attend(self.heads(self.q(x)), kept, values))

    model, kept = randomize_(Model().double()), torch.randn(2, HEADS, 8, WIDTH, dtype=torch.float64)
    compiled = torch.compile(model, backend=rotpass.backend(inner="eager", cache="rotated", r4=False))
    if how == "buffer":
        with pytest.raises(
            Exception, match="at 'kept' and cannot be rotated: this graph does not write it: pass a cache"
        ):
            compiled(x_of(), kept)
    else:
        r = rotation_matrix(WIDTH) if how == "input" else torch.eye(WIDTH, dtype=torch.float64)
        equal(compiled(x_of(), kept @ r.T), model(x_of(), kept))
    torch._dynamo.reset()


@torch.no_grad()
def test_a_cache_that_is_read_transposed() -> None:
    class Model(Attention):
        def forward(self, x, keys, values):
            q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
            keys.index_copy_(2, torch.arange(2, 7), k)
            values[:, :, 2:7] = v
            return self.out((q @ keys.mT).softmax(-1) @ values)

    torch._dynamo.reset()
    model, r = randomize_(Model().double()), rotation_matrix(WIDTH)
    compiled = torch.compile(model, backend=rotpass.backend(inner="eager", cache="rotated", strict=True))
    plain = [torch.randn(2, HEADS, 8, WIDTH, dtype=torch.float64) for _ in range(2)]
    rotated = [cache @ r.T for cache in plain]
    equal(compiled(x_of(), *rotated), model(x_of(), *plain))
    equal(rotated, [cache @ r.T for cache in plain])
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("kept", ("plain", "rotated"))
def test_at_the_recompile_limit_no_rotated_cache_is_read_by_plain_python(kept) -> None:
    class Model(Attention):
        def forward(self, x, keys, values, n):
            return super().forward(x) * n + self.attend(self.heads(self.q(x)), keys, values).sum()

    torch._dynamo.reset()
    model, cache = randomize_(Model().double()), torch.randn(2, HEADS, 8, WIDTH, dtype=torch.float64)
    compiled = torch.compile(model, backend=rotpass.backend(inner="eager", cache=kept, v=False), dynamic=False)
    keys = cache @ (rotation_matrix(WIDTH) if kept == "rotated" else torch.eye(WIDTH, dtype=torch.float64)).T
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False):
        for n in range(5):
            if n >= 2 and kept == "rotated":
                with pytest.raises(Exception, match="recompile_limit"):
                    compiled(x_of(), keys, cache, n)
            else:
                equal(compiled(x_of(), keys, cache, n), model(x_of(), cache, cache, n))
    torch._dynamo.reset()


@torch.no_grad()
def test_a_literal_under_aot_autograd() -> None:
    model, x = randomize_(Mlp().double().eval()), x_of()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: model(x) * torch.tensor(2.0), backend=rotpass.backend(inner="aot_eager"))
    equal(compiled(x), model(x) * 2)
