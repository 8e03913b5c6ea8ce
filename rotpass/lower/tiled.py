"""``rotpass::hadamard_tiled``: rows times a Hadamard matrix as one Triton kernel, with its neighbours fused by Inductor.

The operator is made by :func:`rotpass.lower.inductor.lower` alone. Inductor lowers it to a template of its own, so that a
pointwise producer (silu * mul, RoPE, a norm's scale) is computed as the kernel loads and a pointwise consumer as it
stores. ``tiling.py`` says what a program holds; this file writes the program and chooses how it is launched.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from rotpass import _torch
from rotpass.hadamard.stages import sign_vector
from rotpass.lower import portable
from rotpass.lower.tiling import Tiling, chunks, matrices, multiply, tiling
from rotpass.quantize import EPS, quantize_rows

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
    t = tiling(size, table)
    if t is None or x.dtype == torch.float64:
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
    t = tiling(size, table)
    one_row = x.shape[-1] == size and group in (0, size)
    if t is None or x.dtype == torch.float64 or not one_row or (transpose and seed is not None):
        return None

    def quantize(x: Tensor, left: Tensor, right: Tensor, *signs: Tensor) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, size) * signs[0] if signs else x.reshape(-1, size)
        q, *scales = torch.ops.rotpass.hadamard_tiled_quantize(rows, left, right, t.tiles, dtype, asymmetric)
        return q.view(x.shape), *(s.view(*x.shape[:-1], 1) if s.numel() else s for s in scales)

    return _constants(t, x, transpose, table, seed), quantize


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


@dataclasses.dataclass(frozen=True)
class Launch:
    """Attributes:
    rows: how many a program holds at once; 1 where a row has a left matrix.
    warps: of a program.
    per_sm: programs for each multiprocessor, each with a loop over rows; 0, a program for each row or block of rows.
    stages: loads in flight of that loop.
    """

    rows: int
    warps: int
    per_sm: int = 0
    stages: int = 1


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
        block = max(16, _power_of_two_below(8192 // t.values))
        found = [Launch(block, 4), Launch(block // 2, 4), Launch(block, 4, 4, 3), Launch(block, 8, 2, 4)]
        return [launch for launch in found if launch.rows >= 16]
    warps = 4 if t.values <= 16384 else 8
    constants = (t.left**2 + t.right**2) * itemsize
    row = t.values * itemsize
    found = [Launch(1, warps, 2, 2), Launch(1, warps, 1, 3), Launch(1, warps, 2, 3), Launch(1, warps)]
    if inputs == 1:
        found = [Launch(1, warps, 1, 3), *found] if t.values > 8192 else [Launch(1, warps), *found]
    found = [
        launch
        for launch in dict.fromkeys(found)
        if constants + row * (1 + inputs * (launch.stages - 1)) <= shared_memory
    ]
    return found or [Launch(1, warps)]


def _power_of_two_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


# ------------------------------------------------------------------------------------------------------- what it runs


def _block(start: int, length: int, padded: int) -> tuple[str, str]:
    """The indices of a chunk of an axis, and where it holds values."""
    at = f"({start} + tl.arange(0, {padded}))"
    return at, "" if length == padded else f"tl.arange(0, {padded}) < {length}"


def _constant(name: str, order: int, rows: tuple[int, int, int], columns: tuple[int, int, int], transpose: bool) -> str:
    """Loads a block of a matrix, or of its transpose, with zeros for padding."""
    (r, r_mask), (c, c_mask) = _block(*rows), _block(*columns)
    index = f"{r}[:, None] + {c}[None, :] * {order}" if transpose else f"{r}[:, None] * {order} + {c}[None, :]"
    mask = " & ".join([f"({m}){d}" for m, d in ((r_mask, "[:, None]"), (c_mask, "[None, :]")) if m])
    return f"tl.load({name} + {index}, mask={mask}, other=0.0)" if mask else f"tl.load({name} + {index})"


def _product(out: str, terms: list[tuple[str, str]], dtype: torch.dtype) -> list[str]:
    """Lines for ``out = sum of dots``; a float32 factor in three of the matrix units' own precision."""
    precision = ', input_precision="tf32x3"' if dtype == torch.float32 else ""
    lines = [f"{out} = tl.dot({terms[0][0]}, {terms[0][1]}{precision})"]
    return lines + [f"{out} = tl.dot({a}, {b}, acc={out}{precision})" for a, b in terms[1:]]


def _rounded(out: str, z: str, right: str, dtype: torch.dtype) -> list[str]:
    """Lines for the product of the float32 tile ``z`` with the right matrix, which the matrix units take in 16 bits.

    bfloat16 is rounded once more, with the result that DESIGN's accuracy allows. float16 would overflow or lose small
    values: two bfloat16 parts hold its 11 bits and float32's range.
    """
    if dtype == torch.float32:
        return _product(out, [(z, right)], dtype)
    lines = [f"{z}_high = {z}.to(tl.bfloat16)", *_product(out, [(f"{z}_high", right)], dtype)]
    if dtype == torch.float16:
        lines.append(f"{z}_low = ({z} - {z}_high.to(tl.float32)).to(tl.bfloat16)")
        lines.append(f"{out} = tl.dot({z}_low, {right}, acc={out})")
    return lines


def _butterflies(names: list[str]) -> list[str]:
    """Lines that take the register tiles through Sylvester's matrix, in place."""
    lines, half = [], len(names) // 2
    while half:
        for i in (i for i in range(len(names)) if not i & half):
            a, b = names[i], names[i + half]
            lines += [f"{a}, {b} = {a} + {b}, {a} - {b}"]
        half //= 2
    return lines


def inputs_of(t: Tiling) -> list[str]:
    """The names by which the template knows its input: one for each load, which Inductor wants distinct."""
    outer = chunks(t.right) if t.left == 1 else chunks(t.left)
    return [f"X{i}_{k}" for i in range(len(outer)) for k in range(t.tiles)]


@dataclasses.dataclass(frozen=True)
class Quantize:
    """What the template does with the rows before it stores them."""

    dtype: torch.dtype
    asymmetric: bool

    @property
    def outputs(self) -> list[str]:
        """The names of what it writes beside the rows."""
        return ["SCALE", "ZERO"] if self.asymmetric else ["SCALE"]


def _reduced(out: str, tiles: list[str], how: str, vectors: bool) -> list[str]:
    """Lines for the largest or the least value of each row of float32 tiles, as (rows, 1), or of them all."""
    elementwise, reduce = {"max": ("tl.maximum", "tl.max"), "min": ("tl.minimum", "tl.min")}[how]
    if vectors:  # the tiles of one row may be of several widths
        lines = [f"{out} = {reduce}({tiles[0]}, 1, keep_dims=True)"]
        return lines + [f"{out} = {elementwise}({out}, {reduce}({t}, 1, keep_dims=True))" for t in tiles[1:]]
    lines = [f"{out} = {reduce}({reduce}({tiles[0]}, 1), 0)"]
    return lines + [f"{out} = {elementwise}({out}, {reduce}({reduce}({t}, 1), 0))" for t in tiles[1:]]


def _quantized(groups: list[list[str]], q: Quantize, size: int, vectors: bool) -> list[str]:
    """Lines that turn the float32 tiles into quantized ones, still un-scaled by the orthonormal factor; ``groups``
    are tiles of one shape each. Integers come of adding 1.5 * 2^23, whose last bits are the rounded number."""
    scale = 1 / math.sqrt(size)
    tiles = [y for group in groups for y in group]
    lines: list[str] = []
    if q.asymmetric:
        lines += [*_largest("high", groups, "{}", "max", vectors), *_largest("low", groups, "{}", "min", vectors)]
        lines += ["high = tl.maximum(high, 0.0)", "low = tl.minimum(low, 0.0)"]
        lines.append(f"scale = tl.maximum((high - low) * {scale / 255!r}, {EPS!r})")
        lines.append(f"zero = -128.0 - ((low * {scale!r} / scale + 12582912.0) - 12582912.0)")
    else:
        top = 127 if q.dtype == torch.int8 else 448
        lines += _largest("high", groups, "tl.abs({})", "max", vectors)
        lines.append(f"scale = tl.maximum(high * {scale / top!r}, {EPS!r})")
    lines.append(f"inverse = {scale!r} / scale")
    for y in tiles:
        if q.dtype != torch.int8:
            lines.append(f"{y} = ({y} * inverse).to(tl.float8e4nv)")
        elif q.asymmetric:
            lines.append(f"{y} = (({y} * inverse + 12582912.0) - 12582912.0) + zero")
            lines.append(f"{y} = tl.minimum(tl.maximum({y}, -128.0), 127.0).to(tl.int8)")
        else:
            lines.append(f"{y} = ({y} * inverse + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)")
    where = ("block[:, None]", ", mask=(block < M)[:, None]") if vectors else ("row", "")
    lines.append(f"tl.store(SCALE + {where[0]}, scale{where[1]})")
    if q.asymmetric:
        lines.append(f"tl.store(ZERO + {where[0]}, zero.to(tl.int32){where[1]})")
    return lines


def _largest(out: str, groups: list[list[str]], value: str, how: str, vectors: bool) -> list[str]:
    """Lines for the extreme of all tiles: elementwise over those of one shape, so that each shape is reduced once."""
    elementwise = {"max": "tl.maximum", "min": "tl.minimum"}[how]
    lines = []
    for i, group in enumerate(groups):
        lines.append(f"{out}{i} = {value.format(group[0])}")
        lines += [f"{out}{i} = {elementwise}({out}{i}, {value.format(y)})" for y in group[1:]]
    return lines + _reduced(out, [f"{out}{i}" for i in range(len(groups))], how, vectors)


def source(t: Tiling, launch: Launch, dtype: torch.dtype, quantize: Quantize | None = None) -> str:
    """The Jinja source of the template."""
    vectors = t.left == 1
    columns = chunks(t.right)
    rows = [(0, launch.rows, launch.rows)] if vectors else chunks(t.left)
    assert vectors or len(columns) == 1, t
    body: list[str] = []
    head = [f'M = {{{{size("{inputs_of(t)[0]}", 0)}}}}']
    for i, a in enumerate(columns):  # the right matrix is applied as x @ right.T
        head += [f"right{i}_{j} = {_constant('RIGHT', t.right, a, b, True)}" for j, b in enumerate(columns)]
    if not vectors:
        for i, a in enumerate(rows):
            head += [f"left{i}_{j} = {_constant('LEFT', t.left, a, b, False)}" for j, b in enumerate(rows)]

    masked = vectors or any(
        length != padded for _, length, padded in rows
    )  # all or none: a store without is told another's
    tiles: dict[
        tuple[int, int, int], tuple[str, str, int, int]
    ] = {}  # (row chunk, column chunk, tile) -> indices, mask, shape
    for i, r in enumerate(rows):
        for j, c in enumerate(columns):
            (at_r, mask_r), (at_c, mask_c) = _block(*r), _block(*c)
            for k in range(t.tiles):
                n = (
                    f"{at_c}[None, :]"
                    if vectors
                    else f"({at_r}[:, None] * {t.tiles} + {k}) * {t.right} + {at_c}[None, :]"
                )
                n = f"{k * t.right} + {n}" if vectors else n
                shape = f"({r[2]}, {c[2]})"
                masks = [f"({m}){d}" for m, d in ((mask_r, "[:, None]"), (mask_c, "[None, :]")) if m]
                masks += ["(block < M)[:, None]"] if vectors else []
                m, name = "block[:, None]" if vectors else "row", f"{i}_{j}_{k}"
                body.append(f"m{name} = {m} + tl.zeros({shape}, INDEX_DTYPE)")
                body.append(f"n{name} = {n} + tl.zeros({shape}, tl.int32)")
                if masked:
                    body.append(f"mask{name} = {' & '.join([f'tl.full({shape}, True, tl.int1)', *masks])}")
                tiles[i, j, k] = (name, f'"mask{name}"' if masked else "None", r[2], c[2])
    for (i, j, k), (name, mask, a, b) in tiles.items():
        load = f'"X{j if vectors else i}_{k}", "x{name}", ("m{name}", "n{name}")'
        body.append(f'{{{{load_input({load}, mask={mask}, indent_width=INDENT, index_shape=("{a}", "{b}"))}}}}')

    if vectors:
        for k in range(t.tiles):
            for j in range(len(columns)):
                body += _product(f"y0_{j}_{k}", [(f"x0_{i}_{k}", f"right{i}_{j}") for i in range(len(columns))], dtype)
        for j in range(len(columns)):
            body += _butterflies([f"y0_{j}_{k}" for k in range(t.tiles)])
    else:
        for i in range(len(rows)):
            for k in range(t.tiles):
                body += _product(f"z{i}_{k}", [(f"left{i}_{j}", f"x{j}_0_{k}") for j in range(len(rows))], dtype)
            body += _butterflies([f"z{i}_{k}" for k in range(t.tiles)])
        for i in range(len(rows)):
            for k in range(t.tiles):
                body += _rounded(f"y{i}_0_{k}", f"z{i}_{k}", "right0_0", dtype)
    if quantize is not None:
        groups: dict[tuple[int, int], list[str]] = {}
        for (i, j, _), (name, *_) in tiles.items():
            groups.setdefault((i, j), []).append(f"y{name}")
        body += _quantized(list(groups.values()), quantize, t.size, vectors)
    for name, mask, a, b in tiles.values():
        if quantize is None:
            body.append(f"y{name} = y{name} * {1 / math.sqrt(t.size)!r}")
        store = f'("m{name}", "n{name}"), "y{name}", {mask}'
        body.append(f'{{{{store_output({store}, indent_width=INDENT, val_shape=("{a}", "{b}"))}}}}')

    first = (
        f"block = step.to(INDEX_DTYPE) * {launch.rows} + tl.arange(0, {launch.rows})"
        if vectors
        else "row = step.to(INDEX_DTYPE)"
    )
    if launch.per_sm:
        steps = f"tl.cdiv(M, {launch.rows})" if launch.rows > 1 else "M"
        head.append(f"for step in tl.range(tl.program_id(0), {steps}, tl.num_programs(0), num_stages={launch.stages}):")
    else:
        head.append("step = tl.program_id(0)")
    indent = 8 if launch.per_sm else 4
    lines = [f"    {line}" for line in head] + [" " * indent + line for line in (first, *body)]
    outputs = quantize.outputs if quantize is not None else []
    names = ", ".join(f'"{name}"' for name in (*inputs_of(t), "LEFT", "RIGHT", *outputs))
    return f"\n{{{{def_kernel({names})}}}}\n" + "\n".join(lines).replace("INDENT", str(indent)) + "\n"


# ------------------------------------------------------------------------------------------------------ its lowering


def constant_dtypes(t: Tiling, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Of the left and the right matrix for inputs of a dtype: what they are multiplied with in the program."""
    return dtype, torch.bfloat16 if dtype == torch.float16 and t.left > 1 else dtype


def _grid(rows: Any, columns: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> tuple[Any, int, int]:
    programs = cdiv(rows, meta["ROWS"])
    return (min(programs, meta["PROGRAMS"]) if meta["PROGRAMS"] else programs, 1, 1)


@functools.cache
def _template(t: Tiling, launch: Launch, dtype: torch.dtype, quantize: Quantize | None) -> Any:
    words = [f"{t.left}x{t.tiles}x{t.right}", str(dtype)[6:], launch.rows, launch.per_sm, launch.stages]
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
