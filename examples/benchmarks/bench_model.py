"""What rotations cost a model of Llama-3-8B's shape with random weights, in bfloat16, beside plain torch.compile.

``python examples/benchmarks/bench_model.py [--layers 32]``. Milliseconds of the decoder layers (no lm_head): a prefill, and
one decoded token over a static cache that holds rotated keys and values.
"""

import argparse
import warnings

import torch
from gpu_timing import microseconds, versions
from transformers import LlamaConfig, LlamaModel, StaticCache

import rotpass

RECIPES = {"plain torch.compile": None, "R3+V+R4": {}, "R3": {"v": False, "r4": False}, "R4": {"r3": False, "v": False}}


def model_of(layers: int) -> LlamaModel:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=1024, max_position_embeddings=32768, rope_theta=5e5,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return LlamaModel(config).eval().requires_grad_(False)


def compiled(model: LlamaModel, fields: dict | None, **how):
    torch.compiler.reset()
    backend = "inductor" if fields is None else rotpass.backend(**fields, **how)
    return torch.compile(model.forward, backend=backend, dynamic=False)


def prefill(model: LlamaModel, fields: dict | None, tokens: int) -> float:
    ids = torch.randint(0, 1000, (1, tokens), device="cuda")
    forward = compiled(model, fields)
    return microseconds(lambda: forward(ids, use_cache=False), repeats=20) / 1000


def decode(model: LlamaModel, fields: dict | None, batch: int, past: int) -> float:
    cache = StaticCache(config=model.config, max_cache_len=past + 8)
    at = torch.tensor([past], device="cuda")
    cache.early_initialization(batch, 8, 128, torch.bfloat16, torch.device("cuda"))
    ids = torch.randint(0, 1000, (batch, 1), device="cuda")
    forward = compiled(model, fields, **({} if fields is None else {"cache": "rotated"}))
    step = dict(past_key_values=cache, use_cache=True, cache_position=at, position_ids=at[None])
    return microseconds(lambda: forward(ids, **step), repeats=50) / 1000


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prefill", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES)[:2], choices=list(RECIPES))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{versions()}, {args.layers} layers")
    with torch.no_grad():
        model = model_of(args.layers)
        work = [(f"prefill {n}", lambda f, n=n: prefill(model, f, n)) for n in args.prefill]
        work += [(f"decode, batch {b}", lambda f, b=b: decode(model, f, b, 2048)) for b in args.batch]
        for name, measure in work:
            base = None
            for recipe in args.recipes:
                time = measure(RECIPES[recipe])
                base = base or time
                print(f"{name:>18}  {recipe:<20} {time:9.3f} ms  {time / base:.3f}", flush=True)
