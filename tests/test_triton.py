"""The Triton programs without a GPU: their mathematics in Triton's interpreter, what Inductor fuses into them, and that
each compiles for the GPUs there are within their shared memory. test_gpu.py runs them on one."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import rotpass
from rotpass.lower import tiled
from rotpass.lower.program import Launch
from rotpass.lower.tiling import MOST_VALUES, chunks, matrices, multiply, tiling

triton = pytest.importorskip("triton", reason="Triton compiles and interprets the programs")

from pretended_gpu import SHARED_MEMORY, compile_plain, inductor_code, kernels  # noqa: E402  it imports triton

HEAD_DIMS = (16, 64, 80, 96, 112, 128, 192, 256)
WIDTHS = (512, 1024, 1536, 2048, 3072, 4096, 4864, 5120, 6144, 6912, 8192, 9728, 11008, 12288, 13824, 14336, 16384)
WIDTHS += (17408, 18944, 20480, 22016, 28672)
NO_PROGRAM = (8960, 21504, 29568, 53248)  # a row is too long for one program, or a factor too large
BF16 = torch.bfloat16

# ---------------------------------------------------------------------------------------------------------- the tilings


@pytest.mark.parametrize("transpose", (False, True))
@pytest.mark.parametrize("size", (*HEAD_DIMS, 512, 1536, 4864, 6912, 8192, 11008, 14336))
def test_a_tiling_is_the_rotation(size: int, transpose: bool) -> None:
    x, dense = torch.randn(2, size, dtype=torch.float64), rotpass.hadamard_matrix(size).double() / size**0.5
    t, how = tiling(size, "default"), {"dtype": torch.float64, "device": torch.device("cpu")}
    y = multiply(x, *matrices(t, table="default", transpose=transpose, **how), t.tiles)
    torch.testing.assert_close(y, x @ (dense if transpose else dense.T), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("table", ("default", "quarot", "compressed-tensors"))
def test_every_tiling_is_within_its_limits(table: str) -> None:
    found = 0
    for size in range(1, 4096):
        try:
            t = tiling(size, table)
        except ValueError:
            continue
        if t is None:
            continue
        found += 1
        assert t.size == size and t.values <= MOST_VALUES and t.tiles & (t.tiles - 1) == 0
        for order in (t.left, t.right):
            parts = chunks(order)
            assert [c.start for c in parts] == [sum(c.length for c in parts[:i]) for i in range(len(parts))]
            assert sum(c.length for c in parts) == order
            assert all(c.length <= c.padded and c.padded >= 16 and c.padded & (c.padded - 1) == 0 for c in parts)
    assert found > 50


def test_what_has_no_program() -> None:
    assert all(tiling(size, "default") is None for size in NO_PROGRAM)
    assert all(tiling(size, "default") is not None for size in (*HEAD_DIMS, *WIDTHS))


@pytest.mark.parametrize("shared_memory", SHARED_MEMORY.values(), ids=SHARED_MEMORY)
@pytest.mark.parametrize("size", (*HEAD_DIMS, *WIDTHS))
def test_there_is_always_a_launch(size: int, shared_memory: int) -> None:
    t = tiling(size, "default")
    for rows in (1, 16, 4096):
        for inputs in (1, 2, 4):
            for itemsize in (2, 4):
                found = tiled.launches(t, rows, inputs, itemsize, shared_memory)
                assert found and len(found) == len(set(found))
                assert all(launch.rows & (launch.rows - 1) == 0 for launch in found)


# ------------------------------------------------------------------------------------------------------ their mathematics

# (size, rows, dtype, launch, quantization, table) -> the largest error allowed. The interpreter multiplies bfloat16 wrongly and
# rounds to fp8 otherwise than a GPU does: test_gpu.py has these, and float16's wide rows, which go through bfloat16.
LOOP, ONCE = [1, 4, 2, 2], [1, 4]
CASES = {
    "vectors": ((128, 70, "float32", [32, 4], None, "default"), 1e-6),
    "vectors, loop": ((128, 200, "float16", [32, 4, 2, 2], None, "default"), 4e-4),
    "vectors, padded": ((96, 37, "float32", [16, 4], None, "default"), 1e-6),
    "vectors, two parts": ((192, 37, "float32", [16, 4], None, "default"), 1e-6),
    "vectors, butterflies": ((256, 20, "float32", [16, 4], None, "default"), 1e-6),
    "wide": ((8192, 3, "float32", ONCE, None, "default"), 1e-6),
    "wide, loop": ((14336, 5, "float32", LOOP, None, "default"), 1e-6),
    "wide, two parts": ((11008, 2, "float32", LOOP, None, "default"), 1e-6),
    "wide, composite right factor": ((6912, 2, "float32", ONCE, None, "default"), 1e-6),
    "quarot": ((14336, 2, "float32", ONCE, None, "quarot"), 1e-6),
    "compressed-tensors": ((14336, 2, "float32", ONCE, None, "compressed-tensors"), 1e-6),
    "vectors to int8": ((128, 37, "float32", [16, 4], ("int8", False), "default"), 0.51),
    "vectors to int8, asymmetric": ((192, 37, "float32", [16, 4], ("int8", True), "default"), 1.01),
    "wide to int8": ((14336, 3, "float32", LOOP, ("int8", False), "default"), 0.51),
    "wide to int8, asymmetric": ((11008, 3, "float32", LOOP, ("int8", True), "default"), 1.01),
}


def test_programs_in_the_interpreter() -> None:
    script = pathlib.Path(__file__).with_name("interpret_programs.py")
    cases = json.dumps([case for case, _ in CASES.values()])
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    done = subprocess.run([sys.executable, script, cases], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = dict(zip(CASES, json.loads(done.stdout.splitlines()[-1])))
    assert {name: error for name, error in errors.items() if not error <= CASES[name][1]} == {}


# ---------------------------------------------------------------------------------------------------------- what is fused


def silu(gate, up):
    return F.silu(gate) * up


def gelu(gate, up):
    return F.gelu(gate) * up


def heads(q):
    return q.view(1, 512, 8, 128).transpose(1, 2)


def rope_half(q, cos, sin):
    a, b = heads(q).chunk(2, -1)
    return heads(q) * cos + torch.cat([-b, a], -1) * sin


def rope_interleaved(q, cos, sin):
    a, b = heads(q).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = (t.narrow(-1, 0, 64) for t in (cos, sin))
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def rope_then_scale(q, cos, sin):
    return rope_half(q, cos, sin) * sin + cos


def rotate(size, **how):
    return lambda x: torch.ops.rotpass.hadamard(x, size, **how)


def quantize(size, dtype, **how):
    return lambda x: torch.ops.rotpass.hadamard_quantize(x, size, dtype, **how)


def static_int8(y):
    return (y * 3.7).round().clamp(-127, 127).to(torch.int8)


TWO, ROPE = [((512, 14336), BF16)] * 2, [((1, 512, 1024), BF16), *[((1, 1, 512, 128), BF16)] * 2]
FUSED = {
    "silu * mul": (silu, rotate(14336), None, TWO),
    "gelu * mul": (gelu, rotate(14336), None, TWO),
    "silu * mul with signs": (silu, rotate(14336, seed=3), None, TWO),
    "silu * mul -> static int8": (silu, rotate(14336), static_int8, TWO),
    "silu * mul -> residual": (silu, rotate(14336), lambda y: y + 1, TWO),
    "silu * mul -> blocks": (silu, rotate(512), None, TWO),
    "silu * mul -> fp8 per token": (silu, quantize(14336, torch.float8_e4m3fn), None, TWO),
    "silu * mul -> int8 per token": (silu, quantize(14336, torch.int8), None, TWO),
    "silu * mul -> int8 per token, asymmetric": (silu, quantize(14336, torch.int8, asymmetric=True), None, TWO),
    "cast": (lambda x: x.to(BF16), rotate(8192), None, [((64, 8192), torch.float32)]),
    "RoPE": (rope_half, rotate(128), None, ROPE),
    "interleaved RoPE": (rope_interleaved, rotate(128), None, ROPE),
    "RoPE and what follows it": (rope_then_scale, rotate(128), None, ROPE),
    "RoPE -> int8 per token and head": (rope_half, quantize(128, torch.int8), None, ROPE),
    "inverse with signs": (lambda x: x * 2, rotate(128, transpose=True, seed=1), None, [((64, 32, 128), BF16)]),
    "columns that are not contiguous": (lambda x: x.narrow(1, 64, 128), rotate(128), None, [((64, 512), BF16)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUSED)
def test_one_kernel(name: str) -> None:
    before, rotation, after, inputs = FUSED[name]

    def function(*tensors):
        y = rotation(before(*tensors))
        return y if after is None else after(y)

    code = inductor_code(function, *inputs)
    assert kernels(code) == 1
    assert "tl.dot" in code
    # The fast silu, and no other exponential.
    assert ("ex2.approx.ftz" in code) == (before is silu) and "exp(" not in code


@pytest.mark.filterwarnings("ignore")
def test_a_row_too_long_for_a_program_is_plain_aten() -> None:
    code = inductor_code(rotate(53248), ((16, 53248), BF16))
    assert "extern_kernels" in code and "rotpass_hadamard" not in code


# ---------------------------------------------------------------------------------------------------------- they compile


def compiles(tmp_path: pathlib.Path, size: int, dtype: torch.dtype, capability: int, q=None) -> None:
    t, limit = tiling(size, "default"), SHARED_MEMORY[capability]
    if not tiled.fits(t, dtype.itemsize, limit):  # then it is plain aten there
        least = compile_plain(tmp_path, t, Launch(1, 4 if t.values <= 16384 else 8), dtype, capability, q)
        assert least.metadata.shared > limit
        return
    tried = {launch for rows in (16, 4096) for launch in tiled.launches(t, rows, 1, dtype.itemsize, limit)[:1]}
    for launch in tried:
        made = compile_plain(tmp_path, t, launch, dtype, capability, q)
        assert made.metadata.shared <= limit, (size, launch)
        if capability == 90 and dtype == BF16 and launch.warps >= 4 and t.left > 32:
            assert re.search(r"wgmma\.mma_async", made.asm["ptx"])


@pytest.mark.parametrize("capability", (80, 90, 100))
@pytest.mark.parametrize("size", (128, 14336))
def test_compiles(tmp_path, size: int, capability: int) -> None:
    compiles(tmp_path, size, BF16, capability)


@pytest.mark.long
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", (BF16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("size", (*HEAD_DIMS, *WIDTHS))
def test_all_compile(tmp_path, size: int, dtype: torch.dtype, capability: int) -> None:
    compiles(tmp_path, size, dtype, capability)


def test_launch_is_a_value() -> None:
    assert Launch(1, 4) == Launch(1, 4, 0, 1) and len({Launch(1, 4), Launch(1, 4)}) == 1
