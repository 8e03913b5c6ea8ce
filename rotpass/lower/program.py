"""Writes the Triton program of a tiling, as the Jinja source of a template of Inductor's.

Each load is a ``load_input`` and each store a ``store_output``, by which Inductor puts a fused producer or consumer there.
All loads come first: a product waits for its tile, and would hold up the loads behind it. (Products between the loads, and
stores between the last products, measured 8 to 30 % slower.)
"""

import dataclasses
import math

import torch

from rotpass.lower.tiling import Chunk, Tiling, chunks
from rotpass.quantize import EPS


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


@dataclasses.dataclass(frozen=True)
class Quantize:
    """What becomes of the rows before they are stored.

    Attributes:
        dtype: torch.int8 or torch.float8_e4m3fn.
        asymmetric: whether there is a zero point.
    """

    dtype: torch.dtype
    asymmetric: bool

    @property
    def outputs(self) -> list[str]:
        """The names of what is written beside the rows."""
        return ["SCALE", "ZERO"] if self.asymmetric else ["SCALE"]


def source(t: Tiling, launch: Launch, dtype: torch.dtype, quantize: Quantize | None = None) -> str:
    """The template for inputs of a dtype: named inputs of :func:`inputs_of`, LEFT, RIGHT, and what ``quantize`` writes."""
    head = [f'M = {{{{size("{inputs_of(t)[0]}", 0)}}}}', *_constants(t)]
    if launch.per_sm:
        steps = "M" if t.left > 1 else f"tl.cdiv(M, {launch.rows})"
        head.append(f"for step in tl.range(tl.program_id(0), {steps}, tl.num_programs(0), num_stages={launch.stages}):")
    else:
        head.append("step = tl.program_id(0)")
    indent = 8 if launch.per_sm else 4
    if t.left > 1:
        body = ["row = step.to(INDEX_DTYPE)", *_wide_row(t, dtype, quantize, indent)]
    else:
        rows = f"{launch.rows} + tl.arange(0, {launch.rows})"
        body = [f"block = step.to(INDEX_DTYPE) * {rows}", *_vectors(t, launch.rows, dtype, quantize, indent)]
    names = [*inputs_of(t), "LEFT", "RIGHT", *(quantize.outputs if quantize else [])]
    lines = [f"    {line}" for line in head] + [" " * indent + line for line in body]
    return "\n{{def_kernel(" + ", ".join(f'"{name}"' for name in names) + ")}}\n" + "\n".join(lines) + "\n"


def inputs_of(t: Tiling) -> list[str]:
    """The names by which the template knows its input: one for each load, which Inductor wants distinct."""
    return [f"X{i}_{k}" for k in range(t.tiles) for i in range(len(chunks(t.right if t.left == 1 else t.left)))]


# --------------------------------------------------------------------------------------------------- the two programs


def _vectors(t: Tiling, rows: int, dtype: torch.dtype, quantize: Quantize | None, indent: int) -> list[str]:
    """Many short rows: each tile has a block of them, and a part of the columns."""
    columns, lines = chunks(t.right), []
    tiles = {(i, k): Tile(f"{i}_{k}", Chunk(0, rows, rows), c, "block", f"{k * t.right}", True)
             for i, c in enumerate(columns) for k in range(t.tiles)}  # fmt: skip
    for tile in tiles.values():
        lines += tile.load(indent)
    for k in range(t.tiles):
        for j in range(len(columns)):
            lines += _product(f"y{j}_{k}", [(f"x{i}_{k}", f"right{i}_{j}") for i in range(len(columns))], dtype)
    for j in range(len(columns)):
        lines += _butterflies([f"y{j}_{k}" for k in range(t.tiles)])
    return lines + _finish([[tiles[j, k] for k in range(t.tiles)] for j in range(len(columns))], t, quantize, indent)


def _wide_row(t: Tiling, dtype: torch.dtype, quantize: Quantize | None, indent: int) -> list[str]:
    """One long row: a tile has part of the left digit, and all of the right one."""
    rows, (columns,), lines = chunks(t.left), chunks(t.right), []
    masked = any(
        c.length != c.padded for c in (*rows, columns)
    )  # all or none: a store without a mask is given another's
    tiles = {(i, k): Tile(f"{i}_{k}", r, columns, "row", f"{k * t.right}", masked, t.tiles * t.right)
             for i, r in enumerate(rows) for k in range(t.tiles)}  # fmt: skip
    for tile in tiles.values():
        lines += tile.load(indent)
    for k in range(t.tiles):
        for j in range(len(rows)):
            lines += _product(f"z{j}_{k}", [(f"left{j}_{i}", f"x{i}_{k}") for i in range(len(rows))], dtype)
    for j in range(len(rows)):
        lines += _butterflies([f"z{j}_{k}" for k in range(t.tiles)])
    for j, k in tiles:
        lines += _rounded(f"y{j}_{k}", f"z{j}_{k}", "right0_0", dtype)
    return lines + _finish([[tiles[j, k] for k in range(t.tiles)] for j in range(len(rows))], t, quantize, indent)


def _finish(groups: list[list["Tile"]], t: Tiling, quantize: Quantize | None, indent: int) -> list[str]:
    """Scales or quantizes the tiles, in groups of one shape, and stores them."""
    if quantize is None:
        lines = [f"y{tile.name} = y{tile.name} * {1 / math.sqrt(t.size)!r}" for group in groups for tile in group]
    else:
        lines = _quantized([[f"y{tile.name}" for tile in group] for group in groups], quantize, t.size, t.left == 1)
    return lines + [tile.store(indent) for group in groups for tile in group]


# ------------------------------------------------------------------------------------------------------------- its parts


@dataclasses.dataclass(frozen=True)
class Tile:
    """One register tile and where it lies.

    Attributes:
        name: by which its variables end.
        rows, columns: the part of either axis.
        m: the variable of the row in the tensor, or of its rows.
        offset: of the tile in a row.
        masked: whether loads and stores are.
        stride: between the tile's rows within a row of the tensor; 0 if they are rows of the tensor.
    """

    name: str
    rows: Chunk
    columns: Chunk
    m: str
    offset: str
    masked: bool
    stride: int = 0

    def load(self, indent: int) -> list[str]:
        """Lines for its indices and its load."""
        shape = f"({self.rows.padded}, {self.columns.padded})"
        (r, r_mask), (c, c_mask) = _axis(self.rows), _axis(self.columns)
        m = self.m if self.stride else f"{self.m}[:, None]"
        n = f"{self.offset} + {c}[None, :]" + (f" + {r}[:, None] * {self.stride}" if self.stride else "")
        masks = [f"({r_mask})[:, None]"] * bool(r_mask) + [f"({c_mask})[None, :]"] * bool(c_mask)
        masks += [] if self.stride else [f"({self.m} < M)[:, None]"]
        lines = [
            f"m{self.name} = {m} + tl.zeros({shape}, INDEX_DTYPE)",
            f"n{self.name} = {n} + tl.zeros({shape}, tl.int32)",
        ]
        if self.masked:
            lines.append(f"mask{self.name} = {' & '.join([f'tl.full({shape}, True, tl.int1)', *masks])}")
        arguments = f'"X{self.name}", "x{self.name}", {self._at}, indent_width={indent}, index_shape={self._shape}'
        return [*lines, f"{{{{load_input({arguments})}}}}"]

    def store(self, indent: int) -> str:
        """The line that stores it."""
        at, mask = self._at.split(", mask=")
        return f'{{{{store_output({at}, "y{self.name}", {mask}, indent_width={indent}, val_shape={self._shape})}}}}'

    @property
    def _at(self) -> str:
        mask = f'"mask{self.name}"' if self.masked else "None"
        return f'("m{self.name}", "n{self.name}"), mask={mask}'

    @property
    def _shape(self) -> str:
        return f'("{self.rows.padded}", "{self.columns.padded}")'


def _axis(chunk: Chunk) -> tuple[str, str]:
    """The indices of a part of an axis, and where it holds values, "" if everywhere."""
    at = f"tl.arange(0, {chunk.padded})"
    mask = "" if chunk.length == chunk.padded else f"{at} < {chunk.length}"
    return f"({chunk.start} + {at})" if chunk.start else at, mask


def _constants(t: Tiling) -> list[str]:
    """Lines that load both matrices in blocks; the right one transposed, since rows are multiplied with it."""
    lines = []
    for name, variable, order, transpose in (("RIGHT", "right", t.right, True), ("LEFT", "left", t.left, False)):
        parts = chunks(order) if order > 1 else []
        for i, a in enumerate(parts):
            for j, b in enumerate(parts):
                (r, r_mask), (c, c_mask) = _axis(a), _axis(b)
                index = (
                    f"{r}[:, None] + {c}[None, :] * {order}" if transpose else f"{r}[:, None] * {order} + {c}[None, :]"
                )
                masks = [f"({r_mask})[:, None]"] * bool(r_mask) + [f"({c_mask})[None, :]"] * bool(c_mask)
                mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
                lines.append(f"{variable}{i}_{j} = tl.load({name} + {index}{mask})")
    return lines


def _product(out: str, terms: list[tuple[str, str]], dtype: torch.dtype) -> list[str]:
    """Lines for a sum of products; float32 in three of the matrix units' own precision."""
    precision = ', input_precision="tf32x3"' if dtype == torch.float32 else ""
    (a, b), *others = terms
    return [f"{out} = tl.dot({a}, {b}{precision})"] + [
        f"{out} = tl.dot({a}, {b}, acc={out}{precision})" for a, b in others
    ]


def _rounded(out: str, z: str, right: str, dtype: torch.dtype) -> list[str]:
    """Lines for the product of the float32 tile ``z`` with the right matrix, which the matrix units take in 16 bits.

    bfloat16 is rounded once more, as the accuracy of its results allows. float16 would overflow or lose small values: two
    bfloat16 parts hold its 11 bits and float32's range.
    """
    if dtype == torch.float32:
        return _product(out, [(z, right)], dtype)
    lines = [f"{z}_high = {z}.to(tl.bfloat16)", *_product(out, [(f"{z}_high", right)], dtype)]
    if dtype == torch.float16:
        lines.append(f"{z}_low = ({z} - {z}_high.to(tl.float32)).to(tl.bfloat16)")
        lines.append(f"{out} = tl.dot({z}_low, {right}, acc={out})")
    return lines


def _butterflies(names: list[str]) -> list[str]:
    """Lines that take the tiles through Sylvester's matrix, in place."""
    lines, half = [], len(names) // 2
    while half:
        for i in (i for i in range(len(names)) if not i & half):
            a, b = names[i], names[i + half]
            lines.append(f"{a}, {b} = {a} + {b}, {a} - {b}")
        half //= 2
    return lines


def _quantized(groups: list[list[str]], q: Quantize, size: int, vectors: bool) -> list[str]:
    """Lines that quantize float32 tiles, which still lack the orthonormal factor; ``groups`` are tiles of one shape each.

    Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the last bits.
    """
    scale, lines = 1 / math.sqrt(size), []
    if q.asymmetric:
        lines += [*_extreme("high", groups, "{}", "max", vectors), *_extreme("low", groups, "{}", "min", vectors)]
        lines += ["high = tl.maximum(high, 0.0)", "low = tl.minimum(low, 0.0)"]
        lines.append(f"scale = tl.maximum((high - low) * {scale / 255!r}, {EPS!r})")
        lines.append(f"zero = -128.0 - ((low * {scale!r} / scale + 12582912.0) - 12582912.0)")
    else:
        top = 127 if q.dtype == torch.int8 else 448
        lines += _extreme("high", groups, "tl.abs({})", "max", vectors)
        lines.append(f"scale = tl.maximum(high * {scale / top!r}, {EPS!r})")
    lines.append(f"inverse = {scale!r} / scale")
    for y in (y for group in groups for y in group):
        if q.dtype != torch.int8:
            lines.append(f"{y} = ({y} * inverse).to(tl.float8e4nv)")
        elif q.asymmetric:
            lines.append(f"{y} = (({y} * inverse + 12582912.0) - 12582912.0) + zero")
            lines.append(f"{y} = tl.minimum(tl.maximum({y}, -128.0), 127.0).to(tl.int8)")
        else:
            lines.append(f"{y} = ({y} * inverse + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)")
    at, mask = ("block[:, None]", ", mask=(block < M)[:, None]") if vectors else ("row", "")
    written = [("SCALE", "scale"), ("ZERO", "zero.to(tl.int32)")][: len(q.outputs)]
    return lines + [f"tl.store({name} + {at}, {value}{mask})" for name, value in written]


def _extreme(out: str, groups: list[list[str]], value: str, how: str, vectors: bool) -> list[str]:
    """Lines for the largest or the least value of each row of vectors, as a column, or of all there is: elementwise over
    tiles of one shape, then one reduction of each shape."""
    elementwise, reduce = {"max": ("tl.maximum", "tl.max"), "min": ("tl.minimum", "tl.min")}[how]
    lines = []
    for i, (first, *others) in enumerate(groups):
        lines.append(f"{out}{i} = {value.format(first)}")
        lines += [f"{out}{i} = {elementwise}({out}{i}, {value.format(y)})" for y in others]
        reduced = f"{reduce}({out}{i}, 1, keep_dims=True)" if vectors else f"{reduce}({reduce}({out}{i}, 1), 0)"
        lines.append(f"{out} = {elementwise}({out}, {reduced})" if i else f"{out} = {reduced}")
    return lines
