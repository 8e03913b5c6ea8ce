"""fold_, unfold_ and explain: the module itself, in eager mode. What other doors make of it: test_folded_elsewhere.py."""

import copy
import pickle
import warnings
import weakref

import pytest
import torch
from models import make, randomize_, rotation_matrix, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from rotpass import fold_, unfold_

ALREADY = "folded already"


def error(actual: Tensor, expected: Tensor) -> float:
    """Of the largest value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def marks(model: nn.Module) -> list:
    """All that fold_ may leave on modules: attributes, hooks, buffers."""
    found = []
    for name, module in model.named_modules():
        hooks = {k: list(v.values()) for k, v in vars(module).items() if k.endswith(("_hooks", "_with_kwargs"))}
        rest = sorted(k for k in vars(module) if k not in hooks)
        found.append((name, rest, hooks, sorted(module._buffers), vars(module).get("forward"), module.training))
    return found


def unchanged(model: nn.Module, before: dict[str, Tensor], marked: list) -> None:
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert marks(model) == marked


# The function stays, the weights change as the mathematics says.


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt2", "neox", "llama-enable-gqa"])
def test_keeps_the_function_and_comes_back(name: str) -> None:
    model, ids = make(name), tokens()
    expected, before, marked = model(ids), state(model), marks(model)
    report = fold_(model, (ids,), seed=5)
    assert report.counts == {"r3": 0, "v": 2, "r4": 2} and not report.refused
    assert error(model(ids), expected) < 1e-12 and error(model(tokens(5, 3)), make(name)(tokens(5, 3))) < 1e-12
    changed = {name for name in before if not torch.equal(model.state_dict()[name], before[name])}
    assert len(changed) >= 6 and not any("norm" in name or "embed" in name for name in changed)
    assert unfold_(model) is model
    assert list(model.state_dict()) == list(before) and marks(model) == marked
    for name in before:
        assert error(model.state_dict()[name], before[name]) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    exact, model, ids = make("llama"), make("llama", dtype=dtype), tokens()
    expected = exact(ids)
    unfolded = error(model(ids).double(), expected)
    fold_(model, (ids,))
    assert error(model(ids).double(), expected) < max(3 * unfolded, 1e-6)
    assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("seed", [None, 7])
def test_weights_are_rotated(seed: int | None) -> None:
    model = make("llama")
    before = state(model)
    report = fold_(model, (tokens(),), seed=seed)
    head, ffn = rotation_matrix(16, seed=seed), rotation_matrix(128, seed=seed)
    kv, all_heads = torch.block_diag(head, head), torch.block_diag(*[head] * 4)
    for i in range(2):
        at, down = f"layers.{i}.attention", f"layers.{i}.mlp.down_proj"
        expected = {
            f"{at}.v_proj.weight": kv @ before[f"{at}.v_proj.weight"],
            f"{at}.v_proj.bias": kv @ before[f"{at}.v_proj.bias"],
            f"{at}.o_proj.weight": before[f"{at}.o_proj.weight"] @ all_heads.T,
            f"{down}.weight": before[f"{down}.weight"] @ ffn.T,
        }
        for name, value in expected.items():
            assert error(model.state_dict()[name], value) < 1e-14
        before.update(expected)
    now = model.state_dict()
    assert all(error(now[name], before[name]) < 1e-14 for name in before) and set(now) - set(before) == {"rotpass_plan"}
    assert [(s.kind, s.where, s.inserted, s.undone) for s in report.sites][:2] == [
        ("v", "layers.0.attention", "folded", "folded"),
        ("r4", "layers.0.mlp.down_proj", "online", "folded"),
    ]


class Calls(TorchDispatchMode):
    """Notes the operators that run, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_eager_runs_the_hook_and_v_costs_nothing() -> None:
    model, ids, seen = make("llama"), tokens(), []
    model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    model(ids)
    fold_(model, (ids,), seed=1)
    del seen[1:]  # while it was exported
    with Calls() as calls:
        model(ids)
    assert error(seen[1], seen[0] @ rotation_matrix(128, seed=1).T) < 1e-13
    assert calls.seen.count(torch.ops.rotpass.hadamard.default) == 2


@pytest.mark.parametrize(
    ("fields", "v", "r4"), [({"r4": False}, 2, 0), ({"v": False}, 0, 2), ({"block_size": 16}, 2, 2)]
)
def test_parts(fields: dict, v: int, r4: int) -> None:
    model, ids = make("llama"), tokens()
    expected, before = model(ids), state(model)
    assert fold_(model, (ids,), **fields).counts == {"r3": 0, "v": v, "r4": r4}
    assert error(model(ids), expected) < 1e-12
    same = [torch.equal(model.state_dict()[n], before[n]) for n in before if "down_proj.weight" in n]
    assert all(same) == (r4 == 0)
    unfold_(model)
    assert error(model(ids), expected) < 1e-12


def test_only_and_skip() -> None:
    model = make("llama")
    assert fold_(model, (tokens(),), only="layers.1.*").counts == {"r3": 0, "v": 1, "r4": 1}
    assert not model.layers[0].mlp.down_proj._forward_pre_hooks and model.layers[1].mlp.down_proj._forward_pre_hooks


def test_prefolded_adds_the_online_half_only() -> None:
    model, ids = make("llama"), tokens()
    expected = model(ids)
    for i in range(2):
        with torch.no_grad():
            weight = model.layers[i].mlp.down_proj.weight
            weight.copy_(weight @ rotation_matrix(128).T)
    before = state(model)
    report = fold_(model, (ids,), v=False, counter="prefolded")
    assert [site.undone for site in report.sites] == ["prefolded"] * 2
    assert error(model(ids), expected) < 1e-12
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    unfold_(model)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_dynamic_shapes_by_name() -> None:
    model = make("llama")
    report = fold_(model, (tokens(),), dynamic_shapes={"ids": {1: torch.export.Dim("length", min=2, max=20)}})
    assert report.counts == {"r3": 0, "v": 2, "r4": 2}


def test_keyword_arguments_and_keyword_calls() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(input=F.relu(self.up(input=x)))

    model, x = randomize_(Mlp()).double(), torch.randn(3, 8).double()
    expected = model(x)
    assert fold_(model, kwargs={"x": x}).counts["r4"] == 1
    assert error(model(x=x), expected) < 1e-13


# State: hooks, attributes, copies, devices.


def test_own_forward_attributes_and_hooks_stay() -> None:
    model, ids = make("llama"), tokens()
    down, o_proj = model.layers[0].mlp.down_proj, model.layers[0].attention.o_proj
    calls = []

    def forward(x: Tensor) -> Tensor:
        calls.append("forward")
        return F.linear(x, down.weight, down.bias)

    down.forward = forward
    down.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    o_proj.register_forward_hook(lambda module, args, out: calls.append("post"))
    expected, marked = model(ids), marks(model)
    assert fold_(model, (ids,)).counts == {"r3": 0, "v": 2, "r4": 2}
    calls.clear()
    assert error(model(ids), expected) < 1e-12 and calls == ["post", "pre", "forward"]
    unfold_(model)
    assert marks(model) == marked and down.forward is forward
    assert error(model(ids), expected) < 1e-12


def test_a_users_pre_hooks_before_and_after() -> None:
    model, ids, seen = make("llama"), tokens(), {}
    down = model.layers[0].mlp.down_proj

    def note(name: str):
        return lambda module, args: seen.__setitem__(name, args[0])

    def double(module: nn.Module, args: tuple) -> tuple:
        return (2 * args[0],)

    down.register_forward_pre_hook(note("before"))
    expected = model(ids)
    plain = seen["before"]
    fold_(model, (ids,))
    down.register_forward_pre_hook(note("after"))
    down.register_forward_pre_hook(note("first"), prepend=True)
    assert error(model(ids), expected) < 1e-12
    assert error(seen["before"], plain) < 1e-12 and error(seen["first"], plain) < 1e-12
    assert error(seen["after"], plain @ rotation_matrix(128).T) < 1e-12
    handle = down.register_forward_pre_hook(double)
    doubled = model(ids)
    unfold_(model)
    assert error(model(ids), doubled) < 1e-12  # a scale commutes with the rotation; the hook is still there
    handle.remove()
    assert error(model(ids), expected) < 1e-12


def test_a_pre_hook_that_changes_values_is_not_overtaken() -> None:
    model, ids = make("llama"), tokens()
    model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0].clamp(-1, 1),))
    expected = model(ids)
    report = fold_(model, (ids,))
    assert [s.status for s in report.sites if s.kind == "r4"] == ["refused", "rotated"]
    assert error(model(ids), expected) < 1e-12


def test_a_forward_wrapped_after_folding_stays() -> None:
    model, ids = make("llama"), tokens()
    expected = model(ids)
    fold_(model, (ids,))
    down, calls = model.layers[0].mlp.down_proj, []
    inner = down.forward

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return inner(x)

    down.forward = forward
    unfold_(model)
    assert error(model(ids), expected) < 1e-12 and calls


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_are_folded_models(how: str, tmp_path) -> None:
    model, ids = make("llama", layers=1), tokens()
    expected = model(ids)
    fold_(model, (ids,), seed=2)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
    unfold_(model)
    assert error(model(ids), expected) < 1e-12
    assert error(twin(ids), expected) < 1e-12
    down = twin.layers[0].mlp.down_proj
    assert down.forward.__wrapped__.__self__ is down
    with pytest.raises(ValueError, match=ALREADY):
        fold_(twin, (ids,))
    unfold_(twin)
    assert error(twin(ids), expected) < 1e-12 and marks(twin) == marks(model)


def test_dtype_and_meta() -> None:
    model, ids = make("llama"), tokens()
    expected = model(ids)
    fold_(model, (ids,))
    for cast in (lambda m: m.to(torch.float32), nn.Module.half, nn.Module.bfloat16, nn.Module.double):
        cast(model)
        assert model.rotpass_plan.dtype is torch.uint8
    assert error(model(ids), expected) < 0.1  # it was in bfloat16
    model.to("meta")
    assert model(ids.to("meta")).is_meta
    with pytest.raises(ValueError, match=ALREADY):
        fold_(model, (ids.to("meta"),))


def test_fold_on_meta_then_load() -> None:
    real, ids = make("llama"), tokens()
    expected = real(ids)
    fold_(real, (ids,), seed=3)
    with torch.device("meta"):
        model = type(real)(real.style).double()
    assert fold_(model, (ids.to("meta"),), seed=3).counts == {"r3": 0, "v": 2, "r4": 2}
    model.load_state_dict(real.state_dict(), assign=True)
    assert error(model(ids), expected) < 1e-12
    unfold_(model)
    assert error(model(ids), expected) < 1e-12


def test_garbage_collection() -> None:
    model = make("llama", layers=1)
    fold_(model, (tokens(),))
    gone = weakref.ref(model)
    del model
    import gc

    gc.collect()
    assert gone() is None


# State dicts.


def test_state_dict_round_trip(tmp_path) -> None:
    model, ids = make("llama", layers=1, seed=1), tokens()
    expected = model(ids)
    fold_(model, (ids,), seed=9)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    second = make("llama", layers=1, seed=2)
    with pytest.raises(RuntimeError, match="rotpass_plan"):
        copy.deepcopy(second).load_state_dict(loaded)
    fold_(second, (ids,), seed=9)
    second.load_state_dict(loaded)
    assert error(second(ids), expected) < 1e-12
    assert error(unfold_(second)(ids), expected) < 1e-12
    second.load_state_dict(state(make("llama", layers=1, seed=1)))


@pytest.mark.parametrize("strict", [True, False])
def test_weights_that_do_not_fit_the_hooks_are_not_loaded(strict: bool) -> None:
    model, other, ids = make("llama", layers=1, seed=1), make("llama", layers=1, seed=2), tokens()
    plain = state(other)
    fold_(other, (ids,), seed=4)
    fold_(model, (ids,), seed=3)
    before, expected = state(model), model(ids)
    for weights in (plain, other.state_dict()):
        with pytest.raises(RuntimeError, match="fold"):
            model.load_state_dict(weights, strict=strict)
        assert torch.equal(model(ids), expected) and torch.equal(model.rotpass_plan, before["rotpass_plan"])
    model.load_state_dict({"norm.weight": plain["norm.weight"]}, strict=False)  # nothing that is folded
    with pytest.raises(RuntimeError, match="fold"):
        nn.Sequential(model).load_state_dict({f"0.{name}": t for name, t in plain.items()}, strict=False)


# Twice, parts, wholes.


def test_folding_twice_is_refused() -> None:
    model, ids = make("llama"), tokens()
    fold_(model, (ids,))
    before, marked, x = state(model), marks(model), torch.randn(2, 4, 32).double()
    for again, args in ((model, (ids,)), (nn.Sequential(model), (ids,)), (model.layers[0].mlp, (x,))):
        with pytest.raises(ValueError, match=ALREADY):
            fold_(again, args)
    unchanged(model, before, marked)
    with pytest.raises(ValueError, match="unfold the whole"):
        unfold_(model.layers[0].mlp)
    unfold_(model)
    with pytest.raises(ValueError, match="not folded"):
        unfold_(model)


def test_a_folded_part_of_a_model() -> None:
    model, ids = make("llama"), tokens()
    expected, marked = model(ids), marks(model)
    fold_(model.layers[0].mlp, (torch.randn(2, 4, 32).double(),))
    assert error(model(ids), expected) < 1e-12
    assert "layers.0.mlp.rotpass_plan" in model.state_dict()
    with pytest.raises(ValueError, match=ALREADY):
        fold_(model, (ids,))
    unfold_(model)
    assert error(model(ids), expected) < 1e-12 and marks(model) == marked


def test_a_swapped_module_is_not_unfolded() -> None:
    model, ids = make("llama"), tokens()
    fold_(model, (ids,))
    old = model.layers[1].mlp.down_proj
    model.layers[1].mlp.down_proj = nn.Linear(128, 32).double()
    before, marked = state(model), marks(model)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj is gone"):
        unfold_(model)
    unchanged(model, before, marked)
    model.layers[1].mlp.down_proj = old
    unfold_(model)


# Weights that are shared, computed or elsewhere.


class Mlp(nn.Module):
    def __init__(self, down: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 64), nn.Linear(16, 64)
        self.down = down or nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def folded_right(model: nn.Module, statuses: list[str], *args: Tensor, **fields) -> list:
    """Folds, checks the function and the way back, and returns the sites."""
    model.double()
    args = args or (torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)).double(),)
    expected, before, marked = model(*args), state(model), marks(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sites = fold_(model, args, **fields).sites
    assert [site.status for site in sites] == statuses, sites
    assert all(site.reason for site in sites if site.status == "refused")
    assert error(model(*args), expected) < 1e-12
    if "rotated" in statuses:
        unfold_(model)
        assert error(model(*args), expected) < 1e-12
        assert marks(model) == marked
    else:
        unchanged(model, before, marked)
    return sites


def test_tied_down_projections() -> None:
    model = randomize_(nn.Sequential(Mlp(), Mlp()))
    model[1].down.weight = model[0].down.weight
    folded_right(model, ["rotated"] * 2)


def test_one_module_twice() -> None:
    folded_right(randomize_(nn.Sequential(*[Mlp()] * 2)), ["rotated"] * 2)  # one MLP
    down = nn.Linear(64, 16)
    folded_right(
        randomize_(nn.Sequential(Mlp(down), Mlp(down))), ["rotated"] * 2
    )  # one down projection under two names


def test_a_weight_with_another_user_in_the_graph() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x) + self.mlp.down.weight.sum(1)

    folded_right(randomize_(Model()), ["refused"])


@pytest.mark.parametrize("name", ["down", "v", "o"])
def test_a_weight_tied_to_a_module_that_the_example_does_not_reach(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make("llama", layers=1, heads=2, head_dim=16, kv_heads=2, gqa="none", ffn=32)
            projections = {
                "down": self.inner.layers[0].mlp.down_proj,
                "v": self.inner.layers[0].attention.v_proj,
                "o": self.inner.layers[0].attention.o_proj,
            }
            self.other = nn.Linear(32, 32)
            self.other.weight = projections[name].weight

        def forward(self, ids: Tensor, other: bool = False) -> Tensor:
            return self.other(self.inner.embed(ids)) if other else self.inner(ids)

    model, ids = Model().double(), tokens()
    expected, expected_other = model(ids), model(ids, True)
    report = fold_(model, (ids,))
    assert [s.status for s in report.sites] == (["rotated", "refused"] if name == "down" else ["refused", "rotated"])
    assert "shared" in report.refused[0].reason
    assert error(model(ids), expected) < 1e-12 and error(model(ids, True), expected_other) < 1e-12


def test_a_shared_weight_is_refused_for_all_if_for_one() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clamp(-1, 1))

    model = randomize_(nn.Sequential(Mlp(), Mlp(Scaled(64, 16))))
    model[1].down.weight = model[0].down.weight
    assert "shared" in folded_right(model, ["refused"] * 2)[0].reason


@pytest.mark.parametrize("kind", ["more before", "more after", "input again", "side branch", "returns a view"])
def test_a_linear_that_does_more(kind: str) -> None:
    class More(nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 16)
            self.side = nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            if kind == "more before":
                return super().forward(x.clamp(-1, 1))
            if kind == "more after":
                return super().forward(x).tanh()
            if kind == "input again":
                return torch.cat((super().forward(x), x), -1)[..., 0:80:5]
            if kind == "side branch":
                return torch.cat((super().forward(x), self.side(x)), -1)[..., ::2]
            return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    rotated = kind == "returns a view"
    statuses = ["rotated"] if rotated else ["refused"] + ["rotated"] * (kind == "side branch")
    sites = folded_right(randomize_(Mlp(More())), statuses)
    assert rotated or "more than multiply" in sites[0].reason


def test_a_linear_with_a_branch_of_its_own_inside() -> None:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.a, self.b = nn.Linear(64, 16), nn.Linear(64, 4, bias=False), nn.Linear(4, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    sites = folded_right(randomize_(Mlp(Lora())), ["rotated", "rotated"])
    assert {site.where for site in sites} >= {"down.base"}


def test_the_parents_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
            self.weight = nn.Parameter(torch.empty(16, 64))
            self.own = False

        def forward(self, x: Tensor) -> Tensor:
            y = F.gelu(self.up(x))
            return F.linear(y, self.weight) if self.own else F.linear(y, self.down.weight, self.down.bias)

    model = randomize_(Model())
    assert "another module" in folded_right(model, ["refused"])[0].reason
    model.own = True
    folded_right(model, ["refused"])


def test_computed_weights() -> None:
    for wrap in (parametrizations.weight_norm, lambda m: torch.nn.utils.weight_norm(m)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = Mlp(wrap(nn.Linear(64, 16)))
        assert "not a parameter" in folded_right(model, ["refused"])[0].reason


def test_stacked_experts() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.empty(3, 64, 16)), nn.Parameter(torch.empty(3, 16, 64))

        def forward(self, x: Tensor) -> Tensor:
            return sum(F.linear(F.relu(F.linear(x, self.up[i])), self.down[i]) for i in range(3))

    assert (
        "a stack of experts, with no module to hook" in folded_right(randomize_(Experts()), ["refused"] * 3)[0].reason
    )


def test_a_convolution_is_no_projection() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Conv1d(16, 64, 1), nn.Conv1d(64, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x.mT))).mT

    folded_right(randomize_(Model()), [])


def test_frozen_and_buffer_weights() -> None:
    model = randomize_(Mlp())
    model.requires_grad_(False)
    folded_right(model, ["rotated"])
    weight = model.down.weight.detach()
    del model.down.weight
    model.down.register_buffer("weight", weight)
    folded_right(model, ["rotated"])


# What leaves the model.


class Attention(nn.Module):
    """Returns more than the output; takes what it returned."""

    def __init__(self, key: str = "", cache: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.key, self.cache = key, cache

    def forward(self, x: Tensor, past_key_values=None):
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if past_key_values is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past_key_values, (k, v)))
        y = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        if self.key:
            return {"y": y, self.key: (k, v)}
        return (y, v) if self.cache else y


def test_v_that_is_an_output_stays() -> None:
    x = torch.randn(2, 3, 16).double()
    for model in (Attention(cache=True), Attention("representation"), Attention("values")):
        model = randomize_(model).double()
        expected = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = fold_(model, (x,))
        assert [site.status for site in report.sites] == ["refused"]
        actual = model(x)
        assert all(map(torch.equal, *(torch.utils._pytree.tree_leaves(r) for r in (actual, expected))))


@pytest.mark.parametrize("key", ["past_key_values", "present", "cache", "kv_cache", "PastCache"])
def test_its_own_cache_is_rotated(key: str) -> None:
    model, x = randomize_(Attention(key)).double(), torch.randn(2, 3, 16).double()
    first = model(x)
    second = model(x[:, :1], first[key])
    past = first[key]
    assert fold_(model, (x,)).counts["v"] == 1
    rotated = model(x)
    assert error(rotated["y"], first["y"]) < 1e-13
    assert error(rotated[key][1], past[1] @ rotation_matrix(8).T) < 1e-13 and torch.equal(rotated[key][0], past[0])
    assert error(model(x[:, :1], rotated[key])["y"], second["y"]) < 1e-13
    unfold_(model)
    # Given as an argument whose name says cache:
    assert fold_(model, (x[:, :1],), {"past_key_values": past}).counts["v"] == 1
    assert error(model(x[:, :1], rotated[key])["y"], second["y"]) < 1e-13
    unfold_(model)
    model.key = ""  # an output that nothing names: not ours to change
    model.cache = True
    with pytest.warns(UserWarning, match="rotated nothing"):
        fold_(model, (x[:, :1],), {"past_key_values": past})
