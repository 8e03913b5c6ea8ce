"""How the GPU benchmarks time: the median of a captured graph's replays, with the L2 cache flushed before each."""

import torch


def microseconds(function, repeats: int = 50) -> float:
    """Median time of one call on the device. ``function`` takes nothing and must not wait for the device.

    A graph leaves the host's time out; flushing makes every call read device memory.
    """
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) * 1000 for start, end in events)[repeats // 2]


def versions() -> str:
    """What a result is good for."""
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
