"""The torch.compile door over Inductor: custom passes, caches, CUDA graphs."""

import os
import subprocess
import sys
import textwrap
import uuid

import pytest
import torch
from small import TOLERANCE, Mlp, Model, agree
from torch._dynamo.utils import counters

import rotpass
from rotpass import _torch
from rotpass.doors.compile import backend
from rotpass.recipe import Recipe


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, 32)


PlainPass, InferenceAwarePass = _torch.custom_pass_classes()


class Pass(PlainPass):
    def __init__(self, name: str) -> None:
        self.name, self.ran = name, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.ran += 1

    def uuid(self) -> str:
        return self.name


class AwarePass(InferenceAwarePass, Pass):
    def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
        assert isinstance(is_inference, bool)
        self.ran += 1


def test_custom_passes_of_the_user_still_run(x: torch.Tensor) -> None:
    from rotpass.doors.inductor_pass import inductor_pass

    recipe = Recipe()
    keys = [
        inductor_pass(recipe, ()),
        inductor_pass(recipe, (Pass("a"),)),
        inductor_pass(recipe, (Pass("b"),)),
        inductor_pass(recipe, (AwarePass("a"), Pass("b"))),
        inductor_pass(Recipe(seed=1), ()),
    ]
    assert len({key.uuid() for key in keys}) == len(keys)
    assert inductor_pass(Recipe(), (Pass("a"),)).uuid() == keys[1].uuid()
    assert inductor_pass(recipe, (lambda graph: None,)).uuid() is None, "no uuid, no cache"
    run = str(uuid.uuid4())  # with a key that was there before, the cache would answer and no pass would run
    mine, globally, aware = Pass("option" + run), Pass("global" + run), AwarePass("aware" + run)
    model = Mlp()
    with torch._inductor.config.patch(post_grad_custom_post_pass=globally, post_grad_custom_pre_pass=aware):
        agree(torch.compile(model, backend=backend()), model, x)
        assert torch._inductor.config.post_grad_custom_post_pass is globally
    options = {"post_grad_custom_post_pass": mine}
    agree(torch.compile(model, backend=backend(options=options)), model, x)
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": aware}
    compiled = torch.compile(model, backend=backend(options=options), fullgraph=True)
    with torch.no_grad():
        _, code = torch._inductor.utils.run_and_get_code(compiled, x)
    assert "torch.ops.rotpass" not in "".join(code), "the operator is lowered, after the passes of the user"
    agree(compiled, model, x)
    assert (mine.ran, globally.ran, aware.ran) == (1, 1, 2)


CACHE_SCRIPT = textwrap.dedent(
    """
    import sys, torch
    sys.path.insert(0, sys.argv[1])
    import rotpass
    from torch._dynamo.utils import counters
    from small import Mlp, agree
    from rotpass.doors import inductor_pass

    torch._inductor.config.cpp_cache_precompile_headers = False
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(3, 32)

    def cached(version, **fields):
        inductor_pass._sources = lambda: version
        torch._dynamo.reset()
        counters.clear()
        agree(torch.compile(model, backend=rotpass.backend(**fields)), model, x)
        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert counters["inductor"]["fxgraph_cache_bypass"] == counters["aot_autograd"]["autograd_cache_bypass"] == 0
        return bool(hits)

    if sys.argv[2] == "fill":
        assert not cached("1")
    else:
        assert cached("1")
        assert not cached("1", skip=("nothing",)), "another recipe, though the graph is the same"
        assert not cached("2"), "another version of rotpass"
        assert cached("1", fake_quant=None)
    """
)


def test_caches_across_processes(tmp_path) -> None:
    # Without vector instructions: finding out which ones an empty cache directory's compiler can do takes 15 s.
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    for what in ("fill", "use"):
        command = [sys.executable, "-c", CACHE_SCRIPT, os.path.dirname(__file__), what]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr


def test_the_cache_key_covers_the_sources(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rotpass.doors import inductor_pass

    keys = set()
    for lowering in ("x = 1", "x = 2", "x = 1"):
        (tmp_path / "lower").mkdir(exist_ok=True)
        (tmp_path / "lower" / "inductor.py").write_text(lowering)
        monkeypatch.setattr(rotpass, "__file__", str(tmp_path / "__init__.py"))
        keys.add(inductor_pass._sources.__wrapped__())
    assert len(keys) == 2


@pytest.mark.gpu
def test_folded_weights_are_static_inputs_of_cuda_graphs(x: torch.Tensor) -> None:
    model, x = Model(2).cuda(), x.cuda()
    model.layers[1].attention.o.weight = model.layers[1].attention.q.weight  # a copy that is an input of its own
    compiled = torch.compile(model, backend=backend(), mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        agree(compiled, model, x)
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == 1, "x alone is copied at every call"
    recorded = dict(counters["inductor"])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    agree(compiled, model, x)
    down = model.layers[0].mlp.down.weight
    down.grad = torch.ones_like(down)
    torch.optim.AdamW([down], lr=0.1, fused=True).step()
    agree(compiled, model, x)
    down.data.mul_(2)
    backend().refresh()
    agree(compiled, model, x)
    assert dict(counters["inductor"]) == recorded, "no change of values records again"
    down.data = torch.randn_like(down)
    agree(compiled, model, x)


@pytest.mark.gpu
def test_refresh_reaches_a_cuda_graph_of_the_user(x: torch.Tensor) -> None:
    made, model, x = backend(), Mlp().cuda(), x.cuda()
    compiled = torch.compile(model, backend=made)
    agree(compiled, model, x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = compiled(x)
    with torch.no_grad():
        model.down.weight.add_(1)
    made.refresh()  # a replay calls no Python
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(y, model(x), **TOLERANCE)
