"""The only file that imports private PyTorch APIs: one small function each, with the versions it was checked on.

Checked by running on 2.13 and by reading on 2.11, 2.12 and 2.14 unless a comment says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

OLDEST, NEWEST = (2, 11), (2, 14)


def check_version(version: str = torch.__version__) -> None:
    """Warns of a torch that rotpass was not tested with.

    Raises:
        ImportError: it is too old.
    """
    release = tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", version).groups())
    if release < OLDEST:
        raise ImportError(f"rotpass needs torch {OLDEST[0]}.{OLDEST[1]} or newer; this is torch {version}")
    if release > NEWEST:
        newest = f"{NEWEST[0]}.{NEWEST[1]}"
        warnings.warn(f"rotpass was tested up to torch {newest}, and this is torch {version}", stacklevel=3)


@contextlib.contextmanager
def plain_state(device: torch.device) -> Iterator[None]:
    """No gradients, inference mode, autocast, torch function or dispatch mode of the caller: just arithmetic.

    A folded copy is computed in the middle of a user's call, so it must depend on nothing that surrounds it (a default
    device, a flop counter, autocast), and it must be an ordinary tensor even if that call is in inference mode.
    """
    # 2.11-2.14: DisableTorchFunction covers modes such as torch.device(...); _disable_current_modes the dispatch modes.
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False)
        if torch.amp.is_autocast_available(device.type)
        else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """No saved-tensor hook of the caller (``checkpoint``, ``save_on_cpu``) sees what is traced inside."""
    # 2.5-2.14, as AOTAutograd does it.
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def apply_at_autograd_key(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` for a kernel at an operator's Autograd key, under ``torch.func`` transforms too."""
    # 2.11-2.14. The dispatcher has come here through functorch's layers: what Function.apply does about them would be
    # done twice. The switch is the one that functorch's own custom_function_call turns.
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*args)


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Redispatches from a ``Function.forward`` that ran by :func:`apply_at_autograd_key` to what lies below."""
    # apply() has turned off what an outer torch.func level may need; functorch itself remembers which levels do not.
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def is_functorch(target: Any) -> bool:
    """Whether a call in Dynamo's graph is one of those around which ``torch.func`` transforms (2.11-2.14)."""
    module = getattr(target, "__module__", None) or ""
    return module.startswith(("torch._functorch.", "torch._C._functorch", "torch.autograd.forward_ad"))


def size_hint(size: int | torch.SymInt) -> int:
    """A size as a plain number: a symbolic one's value in the inputs that were traced, 2 where it has none."""
    # 2.1-2.14; reading the hint adds no guard, as int() would. Unbacked symbols have none.
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return 2 if hint is None else int(hint)


def is_fake(value: Any) -> bool:
    """Whether a value is a FakeTensor (2.11-2.14); by its type, which is quicker than isinstance and as good."""
    return type(value) is FakeTensor


def lookup_backend(name: str) -> Callable[..., Any] | None:
    """The torch.compile backend of this name, or None (2.0-2.14)."""
    from torch._dynamo.backends.registry import lookup_backend as lookup
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup(name)
    except InvalidBackend:
        return None


def backend_names() -> list[str]:
    """Names that torch.compile takes as a backend, debugging ones too."""
    return torch._dynamo.list_backends(None)


def inductor_option_names() -> list[str]:
    """Every option of Inductor, as ``torch._inductor.list_options()`` (2.0-2.14)."""
    return torch._inductor.list_options()


def inductor_patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor config patches for torch.compile's ``mode`` and ``options``, checked as torch.compile itself does."""
    # 2.0-2.14: this wrapper is what torch.compile(backend="inductor") makes; `dynamic` changes no mode's options.
    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)


def inductor_patch(patches: dict[str, Any]) -> contextlib.AbstractContextManager:
    """Inductor's config with these patches, for the time of a ``with`` block (2.0-2.14)."""
    return torch._inductor.config.patch(patches)


def inductor_setting(name: str) -> Any:
    """The present value of one of Inductor's config entries."""
    return getattr(torch._inductor.config, name)


def compile_inductor(gm: torch.fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """``compile_fx``, whose patches also reach the backward, which it compiles later (2.0-2.14)."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs, config_patches=patches)


def reset_cudagraphs() -> None:
    """What ``torch._dynamo.reset()`` does for a backend that used CUDA graphs (2.1-2.14)."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


def current_frame() -> int | None:
    """Dynamo's number for the code object it is compiling; recompiles of the same code have the same (2.3-2.14)."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def fail_at_recompile_limit() -> None:
    """Dynamo raises at its recompile limit, where it would run the rest as plain Python.

    That is always as right as the compiled code, but for one case: it would read a cache that holds rotated keys.
    """
    # 2.11-2.14. With suppress_errors, torch.compile itself refuses to go on with both.
    torch._dynamo.config.fail_on_recompile_limit_hit = True


@contextlib.contextmanager
def same_symbols(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Has AOTAutograd give each copy the static or symbolic sizes that Dynamo gave its source, while compiling.

    AOTAutograd makes fake tensors from real inputs by what Dynamo noted of them; of a tensor that Dynamo never saw it
    would make a dynamic one under ``dynamic=True``.
    """
    # 2.1-2.14: a WeakTensorKeyDictionary from real tensor to SymbolicContext.
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    contexts = {} if context is None else context.tensor_to_context
    added = []
    for source, copy in pairs:
        if source in contexts and copy not in contexts:
            contexts[copy] = contexts[source]
            added.append(copy)
    try:
        yield
    finally:
        for copy in added:
            contexts.pop(copy, None)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Writes a text into TORCH_TRACE's log (2.3-2.14); free when nobody listens."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def custom_passes(value: Any) -> tuple[Any, ...]:
    """The passes in one of Inductor's custom pass settings: None, one pass, or (2.13 on) a list of them."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


@functools.cache
def custom_pass_classes() -> tuple[type, type]:
    """Inductor's ``CustomGraphPass`` (2.6-2.14) and ``CustomInferenceAwareGraphPass`` (not on 2.11: a class of nobody)."""
    from torch._inductor import custom_graph_pass

    plain = custom_graph_pass.CustomGraphPass
    nobody = type("CustomInferenceAwareGraphPass", (plain,), {})
    return plain, getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", nobody)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense and of no subclass that gives its operators another meaning (quantized, distributed)."""
    return type(tensor) in (Tensor, torch.nn.Parameter, FakeTensor) and tensor.layout is torch.strided


def storage_key(tensor: Tensor) -> int:
    """A number that tensors have in common if and only if they share storage; right for meta and fake tensors too."""
    return tensor.untyped_storage()._cdata if is_plain(tensor) else id(tensor)


def same_view(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage show the same elements in the same order."""
    return a is b or (a.shape, a.stride(), a.storage_offset(), a.dtype) == (
        b.shape,
        b.stride(),
        b.storage_offset(),
        b.dtype,
    )


def leaf_paths(spec: Any) -> list[str]:
    """For each leaf of a pytree, the names of the containers and keys above it, as one string."""
    # TreeSpec.type, .context and .children(): 2.11-2.14; children_specs before.
    if spec.is_leaf():
        return [""]
    children = spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    context = spec.context if isinstance(spec.context, (list, tuple)) else [spec.context] * len(children)
    keys = (
        context
        if len(context) == len(children) and all(isinstance(key, str) for key in context)
        else [""] * len(children)
    )
    return [f"{spec.type.__name__}.{key}.{path}" for key, child in zip(keys, children) for path in leaf_paths(child)]


def is_wrapper(value: Any) -> bool:
    """Whether a value is a tensor subclass that is made of other tensors (quantized weights, DTensor)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(value)


def record_call(op: str, target: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """While make_fx traces: puts a call into its graph as it stands, without running it; ``result`` is what it gives."""
    # ProxyTorchDispatchMode, get_proxy_slot, track_tensor_tree: 2.11-2.14.
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor_tree

    tracer = get_proxy_mode().tracer

    def proxy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return get_proxy_slot(value, tracer).proxy
        return (
            get_proxy_slot(value.node, tracer).force() if isinstance(value, (torch.SymInt, torch.SymFloat)) else value
        )

    args, kwargs = torch.utils._pytree.tree_map(proxy, (args, kwargs))
    recorded = tracer.create_proxy(op, target, args, kwargs)
    return track_tensor_tree(result, recorded, constant=None, tracer=tracer)


def static_int(size: int | torch.SymInt) -> int | None:
    """A size that is one number whatever the inputs, a symbol specialised to it included; None for others."""
    return size if isinstance(size, int) else size.node.maybe_as_int()  # SymNode: 2.1-2.14


def constant_source(name: str) -> Any:
    """A source for a constant of a graph, which AOTAutograd wants for every buffer of it (2.1-2.14)."""
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


# ------------------------------------------------------------------------------------------- Inductor's Triton templates
# 2.11-2.14: TritonTemplate, maybe_append_choice and autotune_select_algorithm keep their parameters; the last returns the
# node on 2.11 and 2.12, and (node, choice) from 2.13 on.


class DeviceProperties(NamedTuple):
    """Of a GPU: how many multiprocessors it has, and the bytes of shared memory that one program may take."""

    multiprocessors: int
    shared_memory: int


def triton_template(name: str, grid: Callable[..., Any], source: str) -> Any:
    """A template of Inductor's. ``grid(*output sizes, meta, cdiv=, min=)`` gives the programs."""
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    return TritonTemplate(name=name, grid=SymbolicGridFn(grid), source=source)


def register_lowering(op: Any, function: Callable[..., Any]) -> None:
    """Has Inductor lower an operator by ``function``, which takes and returns Inductor's IR."""
    from torch._inductor.lowering import register_lowering

    register_lowering(op, type_promotion_kind=None)(function)


def register_pointwise_asm(op: Any, asm: str, constraints: str, dtype: torch.dtype) -> None:
    """Has Inductor lower an operator of one tensor to inline PTX for each element, fused as any pointwise operator is."""
    from torch._inductor.lowering import make_pointwise
    from torch._inductor.virtualized import ops

    how = {"asm": asm, "constraints": constraints, "dtype": dtype, "is_pure": True, "pack": 1}
    register_lowering(op, make_pointwise(functools.partial(ops.inline_asm_elementwise, **how)))


def realized(*nodes: Any) -> list[Any]:
    """IR nodes as contiguous buffers that a template can read, each with all of its pointwise producer in it."""
    from torch._inductor import ir
    from torch._inductor.select_algorithm import realize_inputs

    def realize(node: Any) -> Any:
        view = node.data
        base = view.unwrap_view() if isinstance(view, ir.BaseView) else view
        if isinstance(view, ir.BaseView) and isinstance(base, ir.StorageBox) and isinstance(base.data, ir.Pointwise):
            # realize_inputs would make a buffer of what is viewed, in an order of its own, and then another in ours.
            return ir.ExternKernel.copy_input(node)
        return ir.ExternKernel.require_contiguous(realize_inputs(node))

    return [realize(node) for node in nodes]


def fuse_producer(node: Any) -> int:
    """Lets Inductor fuse the pointwise producer of a realized node into the template that reads it, which a heuristic
    of Inductor's may forbid otherwise. Returns how many tensors of the node's size that producer reads, 1 without one."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    buffer = node
    while isinstance(buffer, ir.MutableBox):
        buffer = buffer.data
    if not isinstance(buffer, ir.ComputedBuffer) or not isinstance(buffer.data, ir.Pointwise):
        return 1
    V.graph.invoke_quant_ops.add(buffer.get_operation_name())
    return max(1, len(buffer.get_read_names()))


def hint(size: Any) -> int:
    """A dimension of Inductor's IR as a number, an example's where it is dynamic."""
    from torch._inductor.virtualized import V

    return V.graph.sizevars.optimization_hint(size, fallback=4096)


def device_properties(device: torch.device) -> DeviceProperties:
    """What limits a Triton kernel on a device."""
    properties = torch.cuda.get_device_properties(device)
    return DeviceProperties(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def empty_ir(like: Any, size: Sequence[Any], dtype: torch.dtype) -> Any:
    """The IR of a new buffer on the device of ``like``, contiguous, for a template to write to."""
    from torch._inductor.lowering import empty

    made = empty(list(size), dtype=dtype, device=like.get_device())
    made.realize()
    return made


def call_template(
    name: str,
    choices: list[tuple[Any, dict[str, Any]]],
    inputs: list[Any],
    like: Any,
    dtype: torch.dtype | None = None,
    written: Sequence[Any] = (),
) -> Any:
    """The IR of a template's output, contiguous and of the shape of ``like``: the first of (template, parameters) that
    generates code, or the fastest by measurement under ``max_autotune``.

    Args:
        name: for the autotuning's log.
        choices: templates with their parameters.
        inputs: what the template reads.
        like: an IR node.
        dtype: of the output; that of ``like`` if None.
        written: new buffers that the template fills besides.
    """
    from torch._inductor import config, ir
    from torch._inductor.select_algorithm import autotune_select_algorithm

    layout = ir.FixedLayout(like.get_device(), dtype or like.get_dtype(), like.get_size())
    nodes, generated = [*inputs, *written], []
    for template, parameters in choices:
        how = dict(parameters, mutated_inputs=list(written)) if written else parameters
        template.maybe_append_choice(generated, input_nodes=nodes, layout=layout, **how)
        if generated and not config.max_autotune:
            break
    result = autotune_select_algorithm(name, generated, nodes, layout, return_multi_template=False)
    result = result[0] if isinstance(result, tuple) else result
    if written:
        # From 2.13 on a template that mutates an input gets no fused producer, unless it says that this is harmless: here
        # what it writes is new, and no producer reads it.
        buffer = result
        while isinstance(buffer, ir.MutableBox):
            buffer = buffer.data
        buffer.has_aliasing_or_mutation_for_prologue_fusion = lambda node: False
    return result
