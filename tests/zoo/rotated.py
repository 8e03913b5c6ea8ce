"""The zoo's models through both doors: their sites, one a line, and how far the rotated model is from the one before."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

import rotpass
from rotpass.report import Report, Site

HERE = Path(__file__).parent
SITES = HERE / "sites.txt"

# No float64 path: grouped_mm and flex_attention.
FLOAT32 = {
    "llama_flex", "qwen3_moe", "qwen3_next", "mixtral", "granitemoe", "deepseek_v2", "deepseek_v3", "jamba", "gpt_oss",
}  # fmt: skip

# These round to float32 inside even when their weights are float64, so a difference of 1e-16 may come out as 1e-7.
ROUND_INSIDE = {
    "gemma3n_text",
    "gemma4_text",
    "gpt_neo",
    "llama4_text",
    "ernie4_5",
    "flux",
    "flux2",
    "meta_complex",
    "z_image",
}

# What torch.export itself refuses; these have the compile door alone.
NOT_EXPORTED = {
    "dbrx": "data-dependent guards",
    "qwen2_5_vl_vision": "data-dependent guards",
    "lumina2": "TypeError: unhashable SymInt",
}

# Decode steps over a static cache that transformers and torch.export may not export, rotpass or not.
NO_STATIC_CACHE = {
    "dbrx": "data-dependent guards",
    "deepseek_v2": "a fake-tensor error in its static cache",
    "deepseek_v3": "a fake-tensor error in its static cache",
    "falcon_7b": "a fake-tensor error in its static cache",
    "gemma3n_text": "Dynamo: skipped function",
    "jamba": "its cache of linear attention has no keys",
    "lfm2": "its cache of linear attention has no keys",
    "mpt": "unbacked symbols",
    "qwen3_next": "its cache of linear attention has no keys",
}


def tolerance(name: str) -> float:
    """Largest difference, relative to the largest output."""
    return 1e-5 if name in FLOAT32 else 3e-6 if name in ROUND_INSIDE else 1e-9


def built(name: str) -> tuple[torch.nn.Module, tuple, dict]:
    """A model with weights and biases that are not small, some outliers among them, and its inputs."""
    from architectures import build

    dtype = torch.float32 if name in FLOAT32 else torch.float64
    model, args, kwargs = build(name)
    model = spoil(model.to(dtype))
    return model, *pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs)
    )


def spoil(model: torch.nn.Module) -> torch.nn.Module:
    """Offsets and outliers, by which a wrong rotation shows where random normal weights hide it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((torch.randn(p.shape, generator=generator) * 0.05 + 0.01).to(p.dtype))
            p.view(-1)[:: max(p.numel() // 3, 1)] *= 2
    return model


@torch.no_grad()
def through_export(name: str) -> tuple[Report, float]:
    """Its report, and the difference from the exported program (the model itself is no oracle: it may not repeat)."""
    model, args, kwargs = built(name)
    program = torch.export.export(model, args, kwargs, strict=False)
    pass_ = rotpass.RotationPass(seed=5)
    rotated = pass_(program)
    return pass_.report, difference(program.module()(*args, **kwargs), rotated.module()(*args, **kwargs))


@torch.no_grad()
def through_compile(name: str) -> tuple[Report, float]:
    """The same through torch.compile, beside the graphs that it makes without rotpass."""
    model, args, kwargs = built(name)
    outputs = []
    backend = rotpass.backend(inner="aot_eager", seed=5)
    backend.clear()
    for made in ("aot_eager", backend):
        torch._dynamo.reset()
        torch.manual_seed(0)
        outputs.append(torch.compile(model, backend=made)(*args, **kwargs))
    torch._dynamo.reset()
    return backend.report, difference(*outputs)


@torch.no_grad()
def decoded(name: str, kind: str, backend: rotpass.Backend | None = None) -> list[torch.Tensor]:
    """The logits of a prompt and eight further tokens over a "static" or "dynamic" cache; eager without a backend."""
    from architectures import cached

    model, new_cache, steps = cached(name, kind)
    model = spoil(model.to(torch.float32 if name in FLOAT32 else torch.float64))
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = model if backend is None else torch.compile(model, backend=backend)
    cache = new_cache()
    return [run(**step, past_key_values=cache, use_cache=True).logits for step in steps]


@torch.no_grad()
def decoded_by_export(program: torch.export.ExportedProgram, inputs: dict) -> tuple[Report, float]:
    """Eight steps of an exported program over a static cache in its own buffers."""
    pass_ = rotpass.RotationPass(seed=5)
    before, after = program.module(), pass_(program).module()
    tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(2))
    error = 0.0
    for i, token in enumerate(tokens):
        step = {**inputs, "input_ids": token.view(1, 1), "cache_position": torch.tensor([i])}
        error = max(error, difference(before(**step), after(**step)))
    return pass_.report, error


@torch.no_grad()
def in_bfloat16(name: str) -> tuple[float, float]:
    """How far the model in bfloat16 is from itself in float32, without and with rotations: relative RMS."""
    model, args, kwargs = built(name)
    exact = model(*args, **kwargs)
    model, (args, kwargs) = model.bfloat16(), pytree.tree_map_only(torch.Tensor, to_bfloat16, (args, kwargs))
    outputs = [model(*args, **kwargs), torch.compile(model, backend=rotpass.backend(inner="eager"))(*args, **kwargs)]
    torch._dynamo.reset()
    return tuple(rms(exact, output) for output in outputs)


def to_bfloat16(t: torch.Tensor) -> torch.Tensor:
    return t.bfloat16() if t.is_floating_point() else t


def rms(a: object, b: object) -> float:
    """The largest over all outputs of |a - b| relative to |a|, in root mean square."""
    pairs = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    floats = [(x.double(), y.double()) for x, y in pairs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return max(((x - y).norm() / x.norm()).item() for x, y in floats)


def difference(a: object, b: object) -> float:
    """The largest over all outputs, relative to the largest value of each."""
    pairs = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    floats = [(x, y) for x, y in pairs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    assert floats and all(x.shape == y.shape and x.isfinite().all() for x, y in floats)
    return max(((x - y).abs().max() / x.abs().max().clamp_min(1e-30)).item() for x, y in floats)


DOORS: dict[str, Callable[[str], tuple[Report, float]]] = {"export": through_export, "compile": through_compile}


def line(site: Site) -> str:
    """A site as the table keeps it."""
    size = f"{site.width}" if site.size in (0, site.width) else f"{site.width // site.size}x{site.size}"
    words = (site.kind, site.where or "(root)", size, site.status, site.inserted, site.undone)
    return " ".join(words) + (f": {site.reason}" if site.reason else "")


def names() -> list[str]:
    """All models of the zoo."""
    from architectures import REG

    return list(REG)


def doors(name: str) -> list[str]:
    """The doors that a model can go through at all."""
    return ["compile"] if name in NOT_EXPORTED else ["export", "compile"]


def expected() -> dict[tuple[str, str], list[str]]:
    """(model, door) -> the lines of its sites. A block without a door is for both."""
    found: dict[tuple[str, str], list[str]] = {}
    for block in SITES.read_text(encoding="utf-8").strip().split("\n\n"):
        title, *lines = block.splitlines()
        name, _, door = title.partition(" ")
        for each in [door.strip("()")] if door else DOORS:
            found[name, each] = [text.strip() for text in lines]
    return found


def measured(some: list[str]) -> Iterator[str]:
    """The blocks of sites.txt, of some models as they are now; raises where a rotated model differs from the one before."""
    for name in names():
        if name not in some:
            lines = SITES.read_text(encoding="utf-8").strip().split("\n\n")
            yield from (block for block in lines if block.split(maxsplit=1)[0] == name)
            continue
        found = {}
        for door in doors(name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report, error = DOORS[door](name)
            assert error <= tolerance(name), (name, door, error)
            found[door] = [line(site) for site in report]
        same = len(found) == 2 and found["export"] == found["compile"]
        for door, lines in list(found.items())[: 1 if same else 2]:
            yield "\n".join([name if same else f"{name} ({door})", *(f"    {text}" for text in lines)])


if __name__ == "__main__":
    blocks = list(measured(sys.argv[1:] or names()))
    SITES.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
