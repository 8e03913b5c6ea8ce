"""``rotpass::hadamard_tiled``: rows times a Hadamard matrix as one Triton kernel, with its neighbours fused by Inductor.

The operator is made by :func:`rotpass.lower.inductor.lower` alone. Inductor lowers it to a template of its own, so that a
pointwise producer (silu * mul, RoPE, a norm's scale) is computed as the kernel loads and a pointwise consumer as it
stores. ``tiling.py`` says what a program holds; this file writes the program and chooses how it is launched.
"""

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor

from rotpass import _torch
from rotpass.lower.tiling import Tiling, chunks, multiply

_library = torch.library.Library("rotpass", "FRAGMENT")
_library.define(
    "hadamard_tiled(Tensor x, Tensor left, Tensor right, int tiles) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)
_library.impl("hadamard_tiled", multiply, "CompositeExplicitAutograd")
torch.library.register_fake("rotpass::hadamard_tiled", lambda x, left, right, tiles: torch.empty_like(x), lib=_library)

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
        block = max(16, 8192 // t.values)
        found = [Launch(block, 4), Launch(block // 2, 4), Launch(block, 4, 4, 3), Launch(block, 8, 2, 4)]
        return [launch for launch in found if launch.rows >= 16]
    warps = 4 if t.values <= 16384 else 8
    constants = (t.left**2 + t.right**2) * itemsize
    row = t.values * itemsize
    found = [Launch(1, warps, 2, 2), Launch(1, warps, 1, 3), Launch(1, warps, 2, 3), Launch(1, warps)]
    if inputs == 1:
        found = [Launch(1, warps, 1, 3), *found] if t.values > 8192 else [Launch(1, warps), *found]
    found = [launch for launch in dict.fromkeys(found) if constants + row * (1 + inputs * (launch.stages - 1)) <= shared_memory]
    return found or [Launch(1, warps)]


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


def source(t: Tiling, launch: Launch, dtype: torch.dtype) -> str:
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

    tiles: dict[tuple[int, int, int], tuple[str, str, int, int]] = {}  # (row chunk, column chunk, tile) -> indices, mask, shape
    for i, r in enumerate(rows):
        for j, c in enumerate(columns):
            (at_r, mask_r), (at_c, mask_c) = _block(*r), _block(*c)
            for k in range(t.tiles):
                n = f"{at_c}[None, :]" if vectors else f"({at_r}[:, None] * {t.tiles} + {k}) * {t.right} + {at_c}[None, :]"
                n = f"{k * t.right} + {n}" if vectors else n
                masks = [f"({m}){d}" for m, d in ((mask_r, "[:, None]"), (mask_c, "[None, :]")) if m]
                masks += ["(block < M)[:, None]"] if vectors else []
                m = "block[:, None]" if vectors else "row"
                name = f"{i}_{j}_{k}"
                body += [f"m{name} = {m} + tl.zeros(({r[2]}, {c[2]}), INDEX_DTYPE)", f"n{name} = {n} + tl.zeros(({r[2]}, {c[2]}), tl.int32)"]
                if masks:
                    body.append(f"mask{name} = ({' & '.join(masks)}) & tl.full(({r[2]}, {c[2]}), True, tl.int1)")
                tiles[i, j, k] = (name, f'"mask{name}"' if masks else "None", r[2], c[2])
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
    for name, mask, a, b in tiles.values():
        body.append(f"y{name} = y{name} * {1 / math.sqrt(t.size)!r}")
        store = f'("m{name}", "n{name}"), "y{name}", {mask}'
        body.append(f'{{{{store_output({store}, indent_width=INDENT, val_shape=("{a}", "{b}"))}}}}')

    first = f"block = step.to(INDEX_DTYPE) * {launch.rows} + tl.arange(0, {launch.rows})" if vectors else "row = step.to(INDEX_DTYPE)"
    if launch.per_sm:
        steps = f"tl.cdiv(M, {launch.rows})" if launch.rows > 1 else "M"
        head.append(f"for step in tl.range(tl.program_id(0), {steps}, tl.num_programs(0), num_stages={launch.stages}):")
    else:
        head.append("step = tl.program_id(0)")
    indent = 8 if launch.per_sm else 4
    lines = [f"    {line}" for line in head] + [" " * indent + line for line in (first, *body)]
    names = ", ".join(f'"{name}"' for name in (*inputs_of(t), "LEFT", "RIGHT"))
    return f"\n{{{{def_kernel({names})}}}}\n" + "\n".join(lines).replace("INDENT", str(indent)) + "\n"


# ------------------------------------------------------------------------------------------------------ its lowering


def constant_dtypes(t: Tiling, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Of the left and the right matrix for inputs of a dtype: what they are multiplied with in the program."""
    return dtype, torch.bfloat16 if dtype == torch.float16 and t.left > 1 else dtype


def _grid(rows: Any, columns: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> tuple[Any, int, int]:
    programs = cdiv(rows, meta["ROWS"])
    return (min(programs, meta["PROGRAMS"]) if meta["PROGRAMS"] else programs, 1, 1)


@functools.cache
def _template(t: Tiling, launch: Launch, dtype: torch.dtype) -> Any:
    name = f"rotpass_hadamard_{t.left}x{t.tiles}x{t.right}_{str(dtype)[6:]}_{launch.rows}_{launch.per_sm}_{launch.stages}"
    return _torch.triton_template(name, _grid, source(t, launch, dtype))


@functools.cache
def register() -> None:
    """Tells Inductor how to lower the operator; to be called once Inductor is imported anyway."""
    _torch.register_lowering(torch.ops.rotpass.hadamard_tiled.default, _lower)


def _lower(x: Any, left: Any, right: Any, tiles: int) -> Any:
    x, left, right = _torch.realized(x, left, right)
    (rows, _), a, b = x.get_size(), int(left.get_size()[0]), int(right.get_size()[0])
    t, dtype = Tiling(a, tiles, b), x.get_dtype()
    properties = _torch.device_properties(x.get_device())
    inputs = _torch.fuse_producer(x)
    choices = []
    for launch in launches(t, _torch.hint(rows), inputs, dtype.itemsize, properties.shared_memory):
        meta = {"ROWS": launch.rows, "PROGRAMS": properties.multiprocessors * launch.per_sm}
        choices.append((_template(t, launch, dtype), {"num_warps": launch.warps, "num_stages": 1, **meta}))
    nodes = [x] * len(inputs_of(t)) + [left, right]
    return _torch.call_template("rotpass_hadamard", choices, nodes, x)
