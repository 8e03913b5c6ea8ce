"""Speed of the rotation on the CPU: rotpass eagerly and under Inductor, a dense matmul, PyPI's fht-cpu, and a copy.

    OMP_NUM_THREADS=2 python examples/benchmarks/cpu_hadamard.py --threads 2

Each number is GB/s of bytes read and written once (2 x elements x itemsize), from the fastest of many runs taken turn
about, so that another process on the machine disturbs all columns alike. With --threads 1 the clock is the thread's own
CPU time, which a busy machine disturbs less. fht-cpu knows powers of two only, does not
scale its result, and is timed in place (its default) and out of place; install it with ``pip install fht-cpu``.
"""

import argparse
import platform
import time
from collections.abc import Callable

import torch

from rotpass.hadamard import factors, hadamard_matrix
from rotpass.hadamard.stages import stages
from rotpass.lower import portable

try:
    import fht_cpu
except ImportError:
    fht_cpu = None

SIZES = (64, 128, 256, 512, 1024, 1536, 2048, 4096, 8192, 11008, 14336, 16384, 28672)
DENSE_LIMIT = 4096  # above it the dense matmul takes seconds


def compiled(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """As the compile door lowers the operator; the constants are inputs here, which costs the same."""
    at = {"dtype": torch.float32, "device": torch.device("cpu")}
    matrices = portable.stage_matrices(size, **at)
    torch._dynamo.reset()
    run = torch.compile(lambda x, *m: portable._rotate(x, size, False, None, *m), fullgraph=True, dynamic=False)
    return lambda x: run(x, *matrices)


def fastest(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The shortest time of each call, all taking turns for so many seconds."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times = {name: float("inf") for name in calls}
    for call in calls.values():
        call()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, call in calls.items():
            start = clock()
            call()
            times[name] = min(times[name], clock() - start)
    return times


def measure(size: int, elements: int, dtype: torch.dtype, seconds: float) -> tuple[int, dict[str, float]]:
    rows = elements // size
    x = torch.randn(rows, size).to(dtype)
    out = torch.empty_like(x)
    calls = {"eager": lambda: torch.ops.rotpass.hadamard(x, size)}
    under_inductor = compiled(size)
    calls["inductor"] = lambda: under_inductor(x)
    if size <= DENSE_LIMIT:
        dense = (hadamard_matrix(size) / size**0.5).to(dtype)
        calls["dense"] = lambda: torch.mm(x, dense.T, out=out)
    if fht_cpu is not None and dtype == torch.float32 and size & (size - 1) == 0:
        array, target = x.clone().numpy(), torch.empty_like(x).numpy()
        array[:] = 0  # in place and unscaled, anything else would grow without bound
        calls["fht-cpu"] = lambda: fht_cpu.fht(array, num_threads=torch.get_num_threads())
        source = x.numpy()
        calls["fht-cpu out"] = lambda: fht_cpu.fht(source, out=target, num_threads=torch.get_num_threads())
    calls["copy"] = lambda: out.copy_(x)
    with torch.no_grad():
        times = fastest(calls, seconds)
    moved = 2 * x.numel() * x.element_size() / 1e9
    return rows, {name: moved / t for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--elements", type=int, default=1 << 22, help="of the tensor, rows times size")
    parser.add_argument("--seconds", type=float, default=2, help="for each size")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    print(f"{cpu or platform.processor()}, {options.threads} threads, torch {torch.__version__}, {options.dtype}\n")
    columns = ("eager", "inductor", "dense", "fht-cpu", "fht-cpu out", "copy")
    print(f"| size | factors | stages | rows | {' | '.join(columns)} |")
    print("|---|---|---|---|" + "---|" * len(columns))
    for size in options.sizes:
        rows, speed = measure(size, options.elements, getattr(torch, options.dtype), options.seconds)
        shape = ["·".join(map(str, orders)) for orders in (factors(size), stages(size))]
        cells = [f"{speed[name]:.1f}" if name in speed else "–" for name in columns]
        print(f"| {size} | {' | '.join(shape)} | {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
