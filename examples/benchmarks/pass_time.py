"""How long RotationPass takes on a Llama-3-8B-shaped graph, by layers: matching and rewriting, on meta weights.

python examples/benchmarks/pass_time.py [LAYERS ...]
"""

import statistics
import sys
import time

import torch
import transformers

import rotpass

LLAMA_3_8B = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    head_dim=128,
)


def export(layers: int) -> tuple[torch.export.ExportedProgram, float]:
    """The model without weights, exported for 2048 tokens, and the seconds that took."""
    config = transformers.LlamaConfig(**LLAMA_3_8B, num_hidden_layers=layers, use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        ids = torch.zeros(1, 2048, dtype=torch.long)
    start = time.perf_counter()
    program = torch.export.export(model, (ids,), strict=False)
    return program, time.perf_counter() - start


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'layers':>6} {'nodes':>6} {'export s':>9} {'pass s':>7} {'pass ms per layer':>18} {'sites':>6}")
    for layers in map(int, sys.argv[1:] or (2, 8, 32, 80)):
        program, exported = export(layers)
        rotate = rotpass.RotationPass()
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            rotate(program)
            seconds.append(time.perf_counter() - start)
        taken = statistics.median(seconds)
        nodes = len(program.graph.nodes)
        print(
            f"{layers:6} {nodes:6} {exported:9.2f} {taken:7.2f} {1000 * taken / layers:18.1f} {len(rotate.report.rotated):6}"
        )


if __name__ == "__main__":
    main()
