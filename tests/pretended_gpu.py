"""What Inductor and Triton make for a GPU, on a machine without one. Only the device is pretended: lowering, scheduling,
fusion, the template's rendering and the compilers are the real ones. It cannot choose by timing, nor run."""

import contextlib
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator
from unittest import mock

import jinja2
import torch
import torch.utils._triton
import triton
from torch._dynamo.device_interface import CudaInterface, device_interfaces, get_registered_device_interfaces
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rotpass.hadamard.stages import stages
from rotpass.lower import portable, tiled
from rotpass.lower.inductor import lower
from rotpass.lower.program import Launch, Quantize, inputs_of, source
from rotpass.lower.tiling import Tiling

# Bytes of shared memory that one program may take, by compute capability.
SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448, 100: 232448}


class H200:
    """The device properties that Inductor asks for."""

    name, major, minor, gcnArchName = "pretended H200", 9, 0, ""
    multi_processor_count, warp_size, total_memory, L2_cache_size = 132, 32, 140 << 30, 60 << 20
    regs_per_multiprocessor, max_threads_per_multi_processor = 65536, 2048
    shared_memory_per_block, shared_memory_per_block_optin = 49152, SHARED_MEMORY[90]


class Interface(CudaInterface):
    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    get_compute_capability = staticmethod(lambda device=None: 90)
    get_device_properties = staticmethod(lambda device=None: H200)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)
    is_bf16_supported = staticmethod(lambda *args: True)

    class Worker(CudaInterface.Worker):
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: H200)


class Driver:
    """Stands in for Triton's driver; knows the target, runs nothing."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_device_capability = staticmethod(lambda *args: (9, 0))
    get_device_interface = staticmethod(lambda: Interface)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    known = {
        "type": "cuda", "index": 0, "multi_processor_count": 132, "cc": 90, "major": 9, "warp_size": 32,
        "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
    }  # fmt: skip
    properties = DeviceProperties(**{name: known[name] for name in DeviceProperties._fields if name in known})
    cuda = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_properties": H200, "_lazy_init": None, "get_device_name": H200.name, "is_bf16_supported": True,
        "synchronize": None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", lambda *args, _value=value, **kwargs: _value))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", classmethod(lambda cls, device: properties)))
        [*get_registered_device_interfaces()]  # registers them, once: what is put back must have them
        stack.enter_context(mock.patch.dict(device_interfaces, {"cuda": Interface}))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", Driver()))
        # The constants are not computed: there is no memory to put them in.
        stack.enter_context(mock.patch.object(tiled, "matrices", _no_matrices))
        stack.enter_context(mock.patch.object(portable, "stage_matrices", _no_stages))
        for module in (tiled, portable):
            stack.enter_context(mock.patch.object(module, "sign_vector", lambda n, seed, **how: torch.empty(n, **how)))
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    """What PyTorch remembers of the devices that it found."""
    for function in vars(torch.utils._triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _no_matrices(t: Tiling, *, table: str, transpose: bool, **how) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(t.left, t.left, **how), torch.empty(t.right, t.right, **how)


def _no_stages(n: int, *, table: str, transpose: bool, **how) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(k, k, **how) for k in stages(n, table=table))


def inductor_code(function: Callable, *inputs: tuple[tuple[int, ...], torch.dtype]) -> str:
    """The module that Inductor generates for a function of CUDA tensors of these shapes, rotpass's operators lowered."""
    with pretended_gpu():
        fake = FakeTensorMode()
        with fake:
            args = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in inputs]
            gm = make_fx(function, decomposition_table=select_decomp_table())(*args)
            lower(gm.graph)
        gm.recompile()
        graph = GraphLowering(gm, fake.shape_env)
        with V.set_graph_handler(graph), V.set_fake_mode(fake), V.set_debug_handler(DebugContext()):
            graph.run(*args)
            code, _ = graph.codegen()
    return code.value


def kernels(code: str) -> int:
    """How many kernels a generated module launches."""
    return code.count(".run(") + code.count("extern_kernels.")


@functools.cache
def plain_source(t: Tiling, launch: Launch, dtype: torch.dtype, quantize: Quantize | None = None) -> str:
    """The program of a tiling as a Triton kernel of its own, nothing fused:
    ``kernel(X, LEFT, RIGHT, SCALE, ZERO, Y, M)`` for contiguous rows."""

    def def_kernel(*names: str) -> str:
        assert [*names] == [*inputs_of(t), "LEFT", "RIGHT", *(quantize.outputs if quantize else [])]
        return (
            "@triton.jit\ndef kernel(X, LEFT, RIGHT, SCALE, ZERO, Y, rows):\n    INDEX_DTYPE: tl.constexpr = tl.int64"
        )

    def load_input(name, out, at, mask=None, indent_width=4, index_shape=None) -> str:
        return f"{out} = tl.load(X + {at[0]} * {t.size} + {at[1]}" + (f", mask={mask}, other=0.0)" if mask else ")")

    def store_output(at, value, mask=None, indent_width=4, val_shape=None) -> str:
        to = f"Y + {at[0]} * {t.size} + {at[1]}, {value}.to(Y.dtype.element_ty)"
        return f"tl.store({to}" + (f", mask={mask})" if mask else ")")

    hooks = {"def_kernel": def_kernel, "load_input": load_input, "store_output": store_output}
    text = jinja2.Template(source(t, launch, dtype, quantize)).render(size=lambda name, axis: "rows", **hooks)
    text = text.replace(
        "step.to(INDEX_DTYPE)", "(tl.full((), 0, INDEX_DTYPE) + step)"
    )  # an int in the interpreter's loops
    return f"import triton\nimport triton.language as tl\n\n{text}"


def compile_plain(folder: pathlib.Path, t: Tiling, launch: Launch, dtype: torch.dtype, capability: int, quantize=None):
    """The compiled kernel of :func:`plain_source`, whose source goes into a folder, for a compute capability."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    left, right = tiled.constant_dtypes(t, dtype)
    out = {None: names[dtype], torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv"}[quantize and quantize.dtype]
    types = ["*" + names[dtype], "*" + names[left], "*" + names[right], "*fp32", "*i32", "*" + out, "i32"]
    signature = dict(zip(("X", "LEFT", "RIGHT", "SCALE", "ZERO", "Y", "rows"), types))
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(6)}
    kernel = load_kernel(folder, plain_source(t, launch, dtype, quantize))
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(
        ASTSource(kernel, signature, attrs=aligned), target=target, options={"num_warps": launch.warps}
    )


def load_kernel(folder: pathlib.Path, text: str):
    """The kernel of a source. Triton reads the file again, and keeps what it read: each source has a file of its own."""
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.py"
    path.write_text(text, encoding="utf-8")
    scope: dict = {}
    exec(compile(text, str(path), "exec"), scope)
    return scope["kernel"]
