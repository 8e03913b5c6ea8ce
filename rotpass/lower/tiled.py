"""``rotpass::hadamard_tiled``: rows times a Hadamard matrix as one Triton kernel, with its neighbours fused by Inductor.

The operator is made by :func:`rotpass.lower.inductor.lower` alone. Inductor lowers it to a template of its own, so that a
pointwise producer (silu * mul, RoPE, a norm's scale) is computed as the kernel loads and a pointwise consumer as it
stores. ``tiling.py`` says what a program holds, ``program.py`` writes it; this file chooses how it is launched.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from rotpass import _torch
from rotpass.hadamard.stages import sign_vector
from rotpass.lower import portable
from rotpass.lower.program import Launch, Quantize, inputs_of, source
from rotpass.lower.tiling import FOUR_WARPS, Tiling, chunks, matrices, multiply, tiling
from rotpass.quantize import quantize_rows

# Any layout will do: else Inductor realizes what comes in, and fuses no producer behind a view.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library = torch.library.Library("rotpass", "FRAGMENT")
_library.define("hadamard_tiled(Tensor x, Tensor left, Tensor right, int tiles) -> Tensor", tags=_TAGS)
_library.define(
    "hadamard_tiled_quantize(Tensor x, Tensor left, Tensor right, int tiles, ScalarType dtype, bool asymmetric)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _multiply_quantize(
    x: Tensor, left: Tensor, right: Tensor, tiles: int, dtype: torch.dtype, asymmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return quantize_rows(multiply(x.float(), left, right, tiles), dtype, 0, asymmetric)


def _multiply_quantize_fake(
    x: Tensor, left: Tensor, right: Tensor, tiles: int, dtype: torch.dtype, asymmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    zeros = x.new_empty((len(x), 1) if asymmetric else (0,), dtype=torch.int32)
    return torch.empty_like(x, dtype=dtype), x.new_empty((len(x), 1), dtype=torch.float32), zeros


_library.impl("hadamard_tiled", multiply, "CompositeExplicitAutograd")
_library.impl("hadamard_tiled_quantize", _multiply_quantize, "CompositeExplicitAutograd")
torch.library.register_fake("rotpass::hadamard_tiled", lambda x, left, right, tiles: torch.empty_like(x), lib=_library)
torch.library.register_fake("rotpass::hadamard_tiled_quantize", _multiply_quantize_fake, lib=_library)


def nodes(graph: Graph) -> list[Node]:
    """The calls of the operators of this file."""
    operators = (torch.ops.rotpass.hadamard_tiled.default, torch.ops.rotpass.hadamard_tiled_quantize.default)
    return [node for op in operators for node in graph.find_nodes(op="call_function", target=op)]


def expansion(
    x: Tensor, size: int, transpose: bool, table: str, seed: int | None
) -> tuple[dict[str, Tensor], Callable[..., Tensor]] | None:
    """As :func:`rotpass.lower.portable.expansion`; None where a program cannot hold a row, or not this dtype."""
    t = _tiling_for(x, size, table)
    if t is None:
        return None

    def rotate(x: Tensor, left: Tensor, right: Tensor, *signs: Tensor) -> Tensor:
        def rows(x: Tensor) -> Tensor:
            x = x * signs[0] if signs and not transpose else x
            y = torch.ops.rotpass.hadamard_tiled(x, left, right, t.tiles)
            return y * signs[0] if signs and transpose else y

        return portable.along_rows(x, size, rows)

    return _constants(t, x, transpose, table, seed), rotate


def expansion_quantize(
    x: Tensor,
    size: int,
    dtype: torch.dtype,
    group: int,
    asymmetric: bool,
    transpose: bool,
    table: str,
    seed: int | None,
) -> tuple[dict[str, Tensor], Callable[..., tuple[Tensor, ...]]] | None:
    """As :func:`rotpass.lower.portable.expansion_quantize`; None where that is not one kernel: a scale for part of a row or
    for several, or signs after the rotation."""
    t = _tiling_for(x, size, table)
    one_row = x.shape[-1] == size and group in (0, size)
    if t is None or not one_row or (transpose and seed is not None):
        return None

    def quantize(x: Tensor, left: Tensor, right: Tensor, *signs: Tensor) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, size) * signs[0] if signs else x.reshape(-1, size)
        q, *scales = torch.ops.rotpass.hadamard_tiled_quantize(rows, left, right, t.tiles, dtype, asymmetric)
        return q.view(x.shape), *(s.view(*x.shape[:-1], 1) if s.numel() else s for s in scales)

    return _constants(t, x, transpose, table, seed), quantize


def _tiling_for(x: Tensor, size: int, table: str) -> Tiling | None:
    """The tiling for tensors like ``x``, or None where there is none for this dtype or device."""
    t = tiling(size, table)
    if t is None or x.dtype == torch.float64:
        return None
    return t if fits(t, x.dtype.itemsize, _torch.device_properties(x.device).shared_memory) else None


def _constants(t: Tiling, x: Tensor, transpose: bool, table: str, seed: int | None) -> dict[str, Tensor]:
    """The left and the right matrix and the signs, by name."""
    named, suffix = {}, f"{table}_{t.size}_{'t_' if transpose else ''}{x.dtype}"
    for i, dtype in enumerate(constant_dtypes(t, x.dtype)):
        pair = matrices(t, table=table, transpose=transpose, dtype=dtype, device=x.device)
        named[portable.constant_name(f"{('left', 'right')[i]}_{suffix}", x.device)] = pair[i]
    if seed is not None:
        signs = sign_vector(t.size, seed, dtype=x.dtype, device=x.device)
        named[portable.constant_name(f"signs_{t.size}_{seed}_{x.dtype}", x.device)] = signs
    return named


# --------------------------------------------------------------------------------------------------- how it is launched


def launches(t: Tiling, rows: int, inputs: int, itemsize: int, shared_memory: int) -> list[Launch]:
    """Launches of a tiling that fit a device, the best first, as measured on an H200 (RESULTS.md).

    Args:
        t: the tiling.
        rows: of the input, as far as known.
        inputs: how many tensors of its size the program reads: 1, or those of a fused producer.
        itemsize: bytes of a value.
        shared_memory: bytes that a program may take.
    """
    if t.left == 1:
        # 64 rows are what the matrix units take at once; with several tiles fewer do, and leave room for more programs.
        block = 16 if t.tiles > 2 else max(64, 8192 // t.values)
        found = [Launch(block, 4), Launch(2 * block, 4), Launch(max(16, block // 2), 4, 4, 3), Launch(block, 8)]
        found = found if t.values == t.size else [Launch(block, 8, 2, 4), *found]
        return _within(found, t, 1, itemsize, shared_memory)
    warps = 2 if t.values <= 2048 else 4 if t.values <= FOUR_WARPS else 8
    once, few, many = Launch(1, warps), Launch(1, warps, 1, 3), Launch(1, warps, 2, 3)
    if t.values <= 2048:
        found = [Launch(1, warps, 8, 3), once]
    elif rows <= 132:
        found = [once, few]
    elif inputs > 1:
        found = [Launch(1, warps, 2, 2), many, Launch(1, warps, 1, 2), once]
    elif t.values > 8192:
        found = [few, many, Launch(1, warps, 1, 2), once]
    else:
        found = [many, once] if t.left > 64 else [once, many]  # more than one group of rows: it pays to load ahead
    return _within(found, t, inputs, itemsize, shared_memory)


def fits(t: Tiling, itemsize: int, shared_memory: int) -> bool:
    """Whether a device can run a tiling at all. Of float32 only the right matrix goes through shared memory, in two parts."""
    if t.left == 1:
        return True
    if itemsize == 4:
        return 2 * itemsize * sum(c.padded for c in chunks(t.right)) ** 2 <= shared_memory
    return _constants_bytes(t, itemsize) + t.values * itemsize <= shared_memory


def _constants_bytes(t: Tiling, itemsize: int) -> int:
    """Of both matrices, float32 in two parts."""
    orders = sum(sum(c.padded for c in chunks(order)) ** 2 for order in (t.left, t.right))
    return (2 if itemsize == 4 else 1) * itemsize * orders


def _within(found: list[Launch], t: Tiling, inputs: int, itemsize: int, shared_memory: int) -> list[Launch]:
    """Those that fit, by an estimate that is seldom too low: the matrices, the loads in flight, and a tile on its way
    between layouts. One without loads in flight always stays."""
    constants, fitting = _constants_bytes(t, itemsize), []
    for launch in found:
        ahead = inputs * (launch.stages if t.left == 1 else launch.stages - 1) if launch.per_sm else 0
        if not launch.per_sm or constants + launch.rows * t.values * itemsize * (1.25 + ahead) <= shared_memory:
            fitting.append(launch)
    return fitting or [Launch(found[0].rows, found[0].warps)]


# ------------------------------------------------------------------------------------------------------ its lowering


def constant_dtypes(t: Tiling, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Of the left and the right matrix for inputs of a dtype: what they are multiplied with in the program."""
    return dtype, torch.bfloat16 if dtype == torch.float16 and t.left > 1 else dtype


def _grid(rows: Any, columns: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> tuple[Any, int, int]:
    programs = cdiv(rows, meta["ROWS"])
    return (min(programs, meta["PROGRAMS"]) if meta["PROGRAMS"] else programs, 1, 1)


@functools.cache
def _template(t: Tiling, launch: Launch, dtype: torch.dtype, quantize: Quantize | None) -> Any:
    words = [f"{t.left}x{t.tiles}x{t.right}", str(dtype)[6:], *dataclasses.astuple(launch)]
    if quantize is not None:
        words += [str(quantize.dtype)[6:], *(["asymmetric"] if quantize.asymmetric else [])]
    return _torch.triton_template(
        "_".join(map(str, ("rotpass_hadamard", *words))), _grid, source(t, launch, dtype, quantize)
    )


@functools.cache
def register() -> None:
    """Tells Inductor how to lower the operators; to be called once Inductor is imported anyway."""
    _torch.register_lowering(torch.ops.rotpass.hadamard_tiled.default, _lower)
    _torch.register_lowering(torch.ops.rotpass.hadamard_tiled_quantize.default, _lower_quantize)


def _lower(x: Any, left: Any, right: Any, tiles: int) -> Any:
    return _call(x, left, right, tiles, None, [])


def _lower_quantize(x: Any, left: Any, right: Any, tiles: int, dtype: torch.dtype, asymmetric: bool) -> tuple[Any, ...]:
    quantize = Quantize(dtype, asymmetric)
    rows = x.get_size()[0]
    outputs = [_torch.empty_ir(x, (rows, 1), dtype) for dtype in (torch.float32, torch.int32)[: 1 + asymmetric]]
    zeros = [] if asymmetric else [_torch.empty_ir(x, (0,), torch.int32)]
    return _call(x, left, right, tiles, quantize, outputs), *outputs, *zeros


def _call(x: Any, left: Any, right: Any, tiles: int, quantize: Quantize | None, outputs: list[Any]) -> Any:
    x, left, right = _torch.realized(x, left, right)
    t, dtype = Tiling(int(left.get_size()[0]), tiles, int(right.get_size()[0])), x.get_dtype()
    properties = _torch.device_properties(x.get_device())
    inputs = _torch.fuse_producer(x)
    choices = []
    for launch in launches(t, _torch.hint(x.get_size()[0]), inputs, dtype.itemsize, properties.shared_memory):
        meta = {"ROWS": launch.rows, "PROGRAMS": properties.multiprocessors * launch.per_sm}
        choices.append((_template(t, launch, dtype, quantize), {"num_warps": launch.warps, "num_stages": 1, **meta}))
    nodes = [x] * len(inputs_of(t)) + [left, right]
    return _torch.call_template("rotpass_hadamard", choices, nodes, x, quantize and quantize.dtype, outputs)
