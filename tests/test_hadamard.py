"""The mathematics: every order, the canonical rule, the tables, blocks and signs."""

import functools
import hashlib
import threading

import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rotpass
import rotpass.hadamard.stages as stages
from rotpass.hadamard import (
    TABLES,
    factor_matrices,
    factors,
    hadamard_matrix,
    hadamard_transform,
    largest_block,
    signs,
)
from rotpass.hadamard.field import jacobsthal, prime_power, squares
from rotpass.hadamard.tables import base_matrix, base_orders, is_power_of_two

# Head dimensions and intermediate sizes of real models with their canonical factoring.
CANONICAL = {
    64: (64,), 80: (20, 4), 96: (12, 8), 112: (28, 4), 128: (128,), 160: (20, 8), 192: (12, 16), 256: (256,),
    72: (36, 2), 40: (20, 2), 104: (52, 2), 1536: (12, 128), 1408: (44, 32), 2560: (20, 128), 3072: (12, 256),
    4864: (76, 64), 5504: (172, 32), 5632: (44, 128), 6400: (20, 20, 16), 6912: (12, 12, 12, 4), 8192: (8192,),
    8960: (28, 20, 16), 9216: (12, 12, 64), 9728: (76, 128), 10240: (20, 512), 10944: (76, 12, 12), 11008: (172, 64),
    12288: (12, 1024), 13824: (12, 12, 12, 8), 14336: (28, 512), 15360: (20, 12, 64), 16896: (44, 12, 32),
    17408: (68, 256), 17920: (28, 20, 32), 18176: (284, 64), 18432: (12, 12, 128), 18944: (148, 128),
    19200: (20, 20, 12, 4), 20480: (20, 1024), 21504: (28, 12, 64), 22016: (172, 128), 23040: (20, 12, 12, 8),
    24576: (12, 2048), 25600: (20, 20, 64), 27648: (12, 12, 12, 16), 28672: (28, 1024), 29568: (44, 28, 12, 2),
    36864: (12, 12, 256), 53248: (52, 1024),
}  # fmt: skip
BLOCKED = {3420: 380, 4304: 16, 13696: 128, 27392: 256}
OTHER_DIMENSIONS = [
    512,
    768,
    1280,
    2048,
    2880,
    4608,
    5120,
    5760,
    6144,
    7040,
    7680,
    11520,
    12800,
    16384,
    22528,
    32768,
    33792,
]

QUAROT = (12, 20, 28, 36, 40, 44, 52, 60, 108, 140, 156, 172)
COMPRESSED_TENSORS = (
    1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108,
    112, 116, 120, 124, 128, 132, 136, 140, 144, 148, 152, 156, 160, 164, 168, 172, 176, 180, 184, 188, 192, 196, 200,
    204, 208, 212, 216, 220, 224, 228, 232, 236, 240, 244, 248, 252, 256,
)  # fmt: skip

# Checkpoints depend on these matrices: a hash that changes is a bug, never a reason to write a new one here. Those of
# "quarot" and "compressed-tensors" were written when the matrices had been compared, bit for bit, with QuaRot's and
# SpinQuant's hadamard_utils.py and with the hadamards.safetensors of compressed-tensors 0.20.1.
# fmt: off
PINNED_BASES = {
    ("default", 12): "d426643ce4796602", ("default", 20): "9c6eab1ec80c5f18", ("default", 24): "392c15efeec0ffb0",
    ("default", 28): "90e9b61e93164eb5", ("default", 36): "147097e41d5a3707", ("default", 44): "d7e970988e4b3641",
    ("default", 48): "2d1780a1cc30b4f0", ("default", 52): "8b6bc037f2959071", ("default", 60): "c52cdbe534d54830",
    ("default", 68): "f5508830d0eb58fd", ("default", 72): "cff55c230a3f60ad", ("default", 76): "be472e0e3e1f1131",
    ("default", 80): "a0f601f791b95543", ("default", 84): "2ac599bf9c1bcd49", ("default", 92): "a80ff1f4266672be",
    ("default", 100): "2938947979677235", ("default", 104): "aa3f401b8c8f1ef6", ("default", 108): "6227f5d263e6f284",
    ("default", 116): "54ed86047196455d", ("default", 124): "3599311d97a33c20", ("default", 132): "7df19ae582378957",
    ("default", 140): "2b20c54cd8c49cdc", ("default", 148): "31f89b2526c3a527", ("default", 152): "94d02919c45416ee",
    ("default", 156): "1f9950c8e2e00ddc", ("default", 164): "1dabc0ceb3980e72", ("default", 168): "fc572c66d37fb98b",
    ("default", 172): "ac825f9b6bbb0ae4", ("default", 180): "506e4e7baad9cb9e", ("default", 192): "fa3f6bdc6bba875e",
    ("default", 196): "f5fa70a12c53a4ac", ("default", 200): "ff25de3c959726fb", ("default", 204): "9c656a3b9c98f76d",
    ("default", 212): "a73c1e5f5ef73bcd", ("default", 220): "d77c5949b57c07a0", ("default", 224): "b3136a4337183a21",
    ("default", 228): "30ae93e93470493c", ("default", 240): "2a38974aaf98c14c", ("default", 244): "afe44f0c8eb89c58",
    ("default", 252): "98fede3fa4b52dc5", ("default", 260): "dd392a7843fbf0f9", ("default", 264): "e808a56d33c11625",
    ("default", 272): "cb369348f7297b8e", ("default", 276): "51ed0959117f9d52", ("default", 284): "1e62e75f42763aa4",
    ("default", 292): "0855332ee6295829", ("default", 300): "7e24b59c8bf85891", ("default", 308): "2e8ce84be021e5f0",
    ("default", 312): "597661b4493f46d7", ("default", 316): "8be22d4dba61678c", ("default", 332): "6b99ebaab7b655be",
    ("default", 340): "47d813dc228f4033", ("default", 344): "656d37f7e9df6e40", ("default", 348): "d372363d38350913",
    ("default", 360): "8475dcafd18871aa", ("default", 364): "6486a2b6f3721eff", ("default", 368): "2c9f1e865f44263e",
    ("default", 380): "33cd13e86bfe147b", ("default", 384): "24d3011f53d9a994", ("default", 388): "f4defa736522c916",
    ("default", 396): "b0788901bb1dcb4b", ("default", 420): "66a675d3aa6b886e", ("default", 432): "ad108b0a6bb0b3c6",
    ("default", 440): "1c720c29bf2af1af", ("default", 444): "38c06174bc49dd61", ("default", 460): "23ceb06b2fa6cba5",
    ("default", 464): "831d8e4f12411067", ("default", 468): "4cf5eaaee1b4d4fa", ("default", 480): "08c192e81ccda44a",
    ("default", 484): "45c544f529b0ed69", ("default", 488): "e746340cdb6291f8", ("default", 492): "5a3578def84e95da",
    ("default", 500): "7eaf5f93f269fedf", ("default", 504): "204108ea22cf5012",
    ("quarot", 12): "c1be30fecbc13e7e", ("quarot", 20): "cff143e84622972b", ("quarot", 28): "90e9b61e93164eb5",
    ("quarot", 36): "147097e41d5a3707", ("quarot", 40): "09c4022b9b0bdfd1", ("quarot", 44): "d7e970988e4b3641",
    ("quarot", 52): "9aa6bec96394cfca", ("quarot", 60): "e0d3fe922af47d1e", ("quarot", 108): "f2515b85a3163765",
    ("quarot", 140): "2b20c54cd8c49cdc", ("quarot", 156): "1f9950c8e2e00ddc", ("quarot", 172): "ac825f9b6bbb0ae4",
    ("compressed-tensors", 1): "4bf5122f344554c5", ("compressed-tensors", 2): "f896c3a5f9841b6e",
    ("compressed-tensors", 4): "d2588f173ac68dd6", ("compressed-tensors", 8): "3f6b104af47a8a98",
    ("compressed-tensors", 12): "c1be30fecbc13e7e", ("compressed-tensors", 16): "2001d29ac481e655",
    ("compressed-tensors", 20): "3f22cce6d79ad18f", ("compressed-tensors", 24): "392c15efeec0ffb0",
    ("compressed-tensors", 28): "90e9b61e93164eb5", ("compressed-tensors", 32): "f2ee9613e9d8fa71",
    ("compressed-tensors", 36): "147097e41d5a3707", ("compressed-tensors", 40): "09c4022b9b0bdfd1",
    ("compressed-tensors", 44): "d7e970988e4b3641", ("compressed-tensors", 48): "2d1780a1cc30b4f0",
    ("compressed-tensors", 52): "9aa6bec96394cfca", ("compressed-tensors", 56): "48fb4806fc674b62",
    ("compressed-tensors", 60): "e0d3fe922af47d1e", ("compressed-tensors", 64): "ce50b224875b473e",
    ("compressed-tensors", 68): "f5508830d0eb58fd", ("compressed-tensors", 72): "cff55c230a3f60ad",
    ("compressed-tensors", 76): "be472e0e3e1f1131", ("compressed-tensors", 80): "a0f601f791b95543",
    ("compressed-tensors", 84): "b2674337a1e11c5b", ("compressed-tensors", 88): "1a4204f3fe51d1a1",
    ("compressed-tensors", 92): "a80ff1f4266672be", ("compressed-tensors", 96): "e027e8a26d806d2e",
    ("compressed-tensors", 100): "f1483621f6cabed7", ("compressed-tensors", 104): "aa3f401b8c8f1ef6",
    ("compressed-tensors", 108): "f2515b85a3163765", ("compressed-tensors", 112): "399a1368e6bf438b",
    ("compressed-tensors", 116): "54ed86047196455d", ("compressed-tensors", 120): "bc95a0084253b858",
    ("compressed-tensors", 124): "3599311d97a33c20", ("compressed-tensors", 128): "1b6c34d1427245f1",
    ("compressed-tensors", 132): "7df19ae582378957", ("compressed-tensors", 136): "7927d7edb0a46d26",
    ("compressed-tensors", 140): "2b20c54cd8c49cdc", ("compressed-tensors", 144): "67d8729274cfdd92",
    ("compressed-tensors", 148): "31f89b2526c3a527", ("compressed-tensors", 152): "94d02919c45416ee",
    ("compressed-tensors", 156): "1f9950c8e2e00ddc", ("compressed-tensors", 160): "0c915b14c5583fbe",
    ("compressed-tensors", 164): "93c264d78d1faae7", ("compressed-tensors", 168): "fc572c66d37fb98b",
    ("compressed-tensors", 172): "ac825f9b6bbb0ae4", ("compressed-tensors", 176): "08bce09f1cac5a7f",
    ("compressed-tensors", 180): "6333a278eeb0a4bb", ("compressed-tensors", 184): "98f495bbb0a62122",
    ("compressed-tensors", 188): "d4b9d135220728c4", ("compressed-tensors", 192): "fa3f6bdc6bba875e",
    ("compressed-tensors", 196): "f5fa70a12c53a4ac", ("compressed-tensors", 200): "ff25de3c959726fb",
    ("compressed-tensors", 204): "9c656a3b9c98f76d", ("compressed-tensors", 208): "938e687b438c94d7",
    ("compressed-tensors", 212): "aa577a493399c911", ("compressed-tensors", 216): "8c282b2d34c53031",
    ("compressed-tensors", 220): "d77c5949b57c07a0", ("compressed-tensors", 224): "b6cc2852643d8035",
    ("compressed-tensors", 228): "608887e189b51f5b", ("compressed-tensors", 232): "e59442dd3f57ff4a",
    ("compressed-tensors", 236): "c1d5142d5ac22766", ("compressed-tensors", 240): "10003ff264d38e9a",
    ("compressed-tensors", 244): "805f4daa09dce893", ("compressed-tensors", 248): "ca18069b4c6d34f0",
    ("compressed-tensors", 252): "8846730676cc3abc", ("compressed-tensors", 256): "e32f8cadb75c10e4",
}
PINNED_WHOLE = {
    ("default", 40): "efa237e70747093d", ("default", 72): "3a398228b73c247d",
    ("default", 80): "ef0f8b0136c346e1", ("default", 96): "acc2f481782fa790",
    ("default", 104): "de4dd1bd259607c0", ("default", 112): "37c4d7f1f7713a98",
    ("default", 160): "589ba6da2bd27ab9", ("default", 192): "752aea1dea59dc22",
    ("default", 144): "e0fd88e8f92a7d60", ("default", 400): "0f535d626f57caa9",
    ("default", 512): "04e265c34a080db6", ("default", 768): "7be7a3b3bd810550",
    ("default", 1408): "c63fd8d6668b5118", ("default", 1536): "b63eef1932c0bdc1",
    ("quarot", 80): "f661f96024745226", ("quarot", 96): "675bf870272b517b",
    ("quarot", 208): "8afe33e1ceaaef70", ("quarot", 1536): "ff5915f985146a2e",
    ("compressed-tensors", 32): "f2ee9613e9d8fa71", ("compressed-tensors", 512): "04e265c34a080db6",
    ("compressed-tensors", 416): "efa2da6d4a0c817e", ("compressed-tensors", 1536): "a2245f82a071862f",
}
# fmt: on


def digest(matrix: torch.Tensor) -> str:
    """Sixteen hexadecimal digits of sha256 over the entries, row by row: byte 0 for -1, byte 1 for +1."""
    return hashlib.sha256(bytes((matrix > 0).flatten().to(torch.uint8).tolist())).hexdigest()[:16]


def assert_hadamard(h: torch.Tensor) -> None:
    n = len(h)
    assert h.shape == (n, n) and bool((h.abs() == 1).all())
    assert torch.equal(h.double() @ h.double().T, n * torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("table, n", PINNED_BASES)
def test_base_orders_are_hadamard_and_pinned(table, n):
    h = base_matrix(n, table)
    assert_hadamard(h)
    assert digest(h) == PINNED_BASES[table, n]


def test_every_base_order_is_pinned():
    assert {n for table, n in PINNED_BASES if table == "default"} == set(base_orders())
    assert {n for table, n in PINNED_BASES if table == "quarot"} == set(QUAROT)
    assert {n for table, n in PINNED_BASES if table == "compressed-tensors"} == set(COMPRESSED_TENSORS)


@pytest.mark.parametrize("table, n", PINNED_WHOLE)
def test_whole_matrices_are_pinned(table, n):
    h = hadamard_matrix(n, table=table)
    assert_hadamard(h)
    assert digest(h) == PINNED_WHOLE[table, n]


def test_base_orders_of_the_default_table():
    paley = {n for n in range(4, 513, 4) if prime_power(n - 1) or (n % 8 == 4 and prime_power(n // 2 - 1))}
    expected = {n for n in paley if not is_power_of_two(n)} | {92, 116, 156, 172, 260, 292}
    assert set(base_orders()) == expected
    assert not expected & {188, 236, 268, 428}


@pytest.mark.parametrize("n", [n for n in base_orders() if n % 8 == 4 and prime_power(n // 2 - 1)])
def test_paley2_comes_first_and_is_symmetric(n):
    h = base_matrix(n, "default")
    assert torch.equal(h, h.T)


@pytest.mark.parametrize("n, expected", CANONICAL.items())
def test_canonical_factoring(n, expected):
    assert factors(n) == expected
    assert largest_block(n) == n


@pytest.mark.parametrize("n, block", BLOCKED.items())
def test_widths_without_a_full_matrix(n, block):
    assert largest_block(n) == block
    with pytest.raises(ValueError, match=f"order {n}; the largest block that divides it is {block}"):
        hadamard_matrix(n)


@given(st.integers(1, 1 << 16))
@settings(max_examples=300, deadline=None)
def test_factoring_follows_the_rule(n):
    """Against a search of its own: the smallest sum over all multisets of base orders."""

    @functools.cache
    def smallest(rest: int) -> int | None:
        if is_power_of_two(rest):
            return 0
        sums = [k + s for k in base_orders() if rest % k == 0 and (s := smallest(rest // k)) is not None]
        return min(sums, default=None)

    if smallest(n) is None:
        with pytest.raises(ValueError):
            factors(n)
        block = largest_block(n)
        assert block is None or (16 <= block <= 512 and n % block == 0 and smallest(block) is not None)
        assert not any(n % b == 0 and smallest(b) is not None for b in range((block or 15) + 1, 513))
        return
    found = factors(n)
    bases = [k for k in found if not is_power_of_two(k)]
    assert functools.reduce(int.__mul__, found) == n
    assert sum(bases) == smallest(n) and bases == sorted(bases, reverse=True)
    assert found[: len(bases)] == tuple(bases) and len(found) - len(bases) <= 1


def test_ties_are_decided():
    assert [factors(n)[0] for n in (475200, 786240, 950400)] == [132, 156, 132]


@pytest.mark.parametrize("n", [1, 2, 4, 64, 512, 1024])
@pytest.mark.parametrize("table", ["default", "quarot"])
def test_powers_of_two_are_sylvester(n, table):
    assert hadamard_matrix(n, table=table).tolist() == scipy.linalg.hadamard(n).tolist()


def test_quarot_takes_the_first_match():
    assert factors(14336, table="quarot") == (28, 512)
    assert factors(80, table="quarot") == (40, 2)
    assert factors(20, table="quarot") == (20,)
    for n in (4864, 9728, 17408, 18944, 21504, 25600, 29568, 20 * 20):
        with pytest.raises(ValueError, match="'quarot' table has no Hadamard matrix"):
            factors(n, table="quarot")
    # It is not the default's: QuaRot's 20 is Paley I over GF(19), the default's is the symmetric Paley II over GF(9).
    assert not torch.equal(hadamard_matrix(20), hadamard_matrix(20, table="quarot"))


def test_compressed_tensors_takes_the_largest_divisor():
    table = "compressed-tensors"
    assert factors(14336, table=table) == (224, 64)
    assert factors(11008, table=table) == (172, 64)
    assert factors(8192, table=table) == (256, 32)
    assert factors(188, table=table) == (188,)
    assert not torch.equal(hadamard_matrix(32, table=table), hadamard_matrix(32))
    # Only the first factor is from its table: a 32 after it is Sylvester's.
    assert torch.equal(factor_matrices(8192, table=table)[1].double(), hadamard_matrix(32))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n", [12, 40, 96, 160, 416, 1536, 1376])
def test_outermost_first(table, n):
    parts = [m.double() for m in factor_matrices(n, table=table)]
    assert torch.equal(hadamard_matrix(n, table=table), functools.reduce(torch.kron, parts))


def reference_fht(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """H_K (x) H_2^m as the tables' projects apply it: adjacent butterflies down to K groups, then K from the left."""
    n, order = x.shape[-1], len(k)
    x = x.reshape(-1, n, 1)
    while x.shape[1] > order:
        x = x.view(len(x), x.shape[1] // 2, 2, -1)
        x = torch.stack([x[:, :, 0] + x[:, :, 1], x[:, :, 0] - x[:, :, 1]], 2).flatten(2)
    return (k @ x).flatten(1)


@pytest.mark.parametrize("table, n, k", [("quarot", 896, 28), ("quarot", 1376, 172), ("compressed-tensors", 1760, 220)])
def test_order_of_the_product(table, n, k):
    x = torch.randn(3, n, dtype=torch.float64)
    expected = reference_fht(x, base_matrix(k, table).double()) / n**0.5
    torch.testing.assert_close(hadamard_transform(x, table=table), expected)


@pytest.mark.parametrize("n", [n for n in {**CANONICAL, **BLOCKED} if n < 4500] + OTHER_DIMENSIONS[:5])
def test_dimensions_of_real_models(n):
    block = largest_block(n)
    x = torch.randn(2, n, dtype=torch.float64)
    h = hadamard_matrix(block)
    expected = (x.unflatten(-1, (-1, block)) @ h.T / block**0.5).flatten(-2)
    torch.testing.assert_close(hadamard_transform(x, block), expected)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x, block), block, transpose=True), x)


@pytest.mark.parametrize("n", [n for n in {**CANONICAL, **BLOCKED} if n >= 4500] + OTHER_DIMENSIONS[5:])
def test_large_dimensions_of_real_models(n):
    """Too large for a dense matrix each: columns of H by its definition, entry by entry, and the inverse."""
    block = largest_block(n)
    parts = []
    for k in factors(block):  # a large Sylvester matrix in two
        split = [k] if k < 1024 or not is_power_of_two(k) else [k // 512, 512]
        parts += [base_matrix(part, "default").double() for part in split]
    column = int(torch.randint(block, ()))
    digit, rest, expected = [], column, torch.ones(1, dtype=torch.float64)
    for part in reversed(parts):
        digit.append(rest % len(part))
        rest //= len(part)
    for part, d in zip(parts, reversed(digit)):
        expected = torch.kron(expected, part[:, d])
    unit = torch.zeros(n, dtype=torch.float64)
    unit[column] = 1
    torch.testing.assert_close(hadamard_transform(unit, block)[:block], expected / block**0.5)
    x = torch.randn(n, dtype=torch.float64)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x, block), block, transpose=True), x)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n", [1, 2, 32, 40, 64, 96, 104, 128, 512, 1536, 2048, 1376])
def test_stages_multiply_out_to_the_matrix(table, n):
    at = {"dtype": torch.float64, "device": torch.device("cpu")}
    product = functools.reduce(torch.kron, stages.stage_matrices(n, table=table, **at))
    torch.testing.assert_close(product * n**0.5, hadamard_matrix(n, table=table))


def test_unknown_table():
    with pytest.raises(ValueError, match="unknown Hadamard table 'sloane': choose one of 'default'"):
        hadamard_matrix(12, table="sloane")


@pytest.mark.parametrize("n", [0, -4, 3, 188, 268, 428])
def test_orders_that_there_are_not(n):
    with pytest.raises(ValueError, match=f"order {n}"):
        hadamard_matrix(n)


# ------------------------------------------------------------------------------------------------------------- signs

PINNED_SIGNS = {
    (64, 0): "796d44020fc275da",
    (64, 1): "d72eae7a8a7e90f2",
    (128, 0): "7dcdf6e6e80defa4",
    (128, -1): "9644ff81e3ab2f75",
    (1536, 0): "e54d062e8e6c6990",
    (14336, 1099511627781): "890fe6fdfe74e7db",
    (14336, 9223372036854775807): "c59bc7450115fcf1",
}


@pytest.mark.parametrize("n, seed", PINNED_SIGNS)
def test_signs_are_pinned(n, seed):
    s = signs(n, seed)
    assert s.dtype == torch.float64 and s.shape == (n,) and bool((s.abs() == 1).all())
    assert digest(s) == PINNED_SIGNS[n, seed]


def test_signs_use_no_generator_and_look_random():
    state = torch.random.get_rng_state()
    a, b, c = signs(8192, 0), signs(8192, 1), signs(4096, 0)
    assert torch.equal(torch.random.get_rng_state(), state)
    pairs = (a, b, c, a * b, a[:4096] * c, a[1:] * a[:-1], a[::2], a[: 1 << 8])
    assert all(abs(float(s.sum())) < 4 * len(s) ** 0.5 for s in pairs)


def test_signs_come_before_the_rotation():
    x = torch.randn(5, 96, dtype=torch.float64)
    s, h = signs(48, 7), hadamard_matrix(48)
    expected = ((x.view(5, 2, 48) * s) @ h.T / 48**0.5).view(5, 96)
    y = hadamard_transform(x, 48, seed=7)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(hadamard_transform(y, 48, seed=7, transpose=True), x)


# ------------------------------------------------------------------------------------------------------ fields, state


@pytest.mark.parametrize("q", [9, 25, 27, 49, 81, 121, 125, 169, 243, 343])
def test_squares_of_a_field(q):
    """Half of the nonzero elements, closed under products with each other: chi(ab) = chi(a)chi(b) shows in the matrix."""
    assert len(squares(q)) == (q - 1) // 2
    j = jacobsthal(q).long()
    eye, ones = torch.eye(q, dtype=torch.long), torch.ones(q, q, dtype=torch.long)
    assert torch.equal(j @ j.T, q * eye - ones)
    assert torch.equal(j.T, j if q % 4 == 1 else -j)


def test_returned_matrices_are_the_callers_own():
    hadamard_matrix(12).zero_(), signs(12, 0).zero_()
    assert_hadamard(hadamard_matrix(12))
    assert bool((signs(12, 0) != 0).all())
    assert hadamard_matrix(12, dtype=torch.int8).dtype == torch.int8


def test_first_use_by_many_threads():
    base_matrix.cache_clear(), stages.stage_matrices.cache_clear()
    x, results = torch.randn(4, 1536, dtype=torch.float64), []
    threads = [threading.Thread(target=lambda: results.append(hadamard_transform(x))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("n", ["4", None, 4.0, True])
def test_an_order_that_is_no_int(n: object) -> None:
    with pytest.raises(TypeError, match="the order of a Hadamard matrix is an int; got"):
        hadamard_matrix(n)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, "f"])
def test_a_dtype_without_minus_one(dtype: object) -> None:
    with pytest.raises(TypeError, match=r"dtype must be a torch.dtype that holds \+1 and -1; got"):
        hadamard_matrix(4, dtype=dtype)
    assert hadamard_matrix(4, dtype=torch.int8).unique().tolist() == [-1, 1]


@pytest.mark.parametrize(
    "args, kwargs, says",
    [
        (([1, 2],), {}, "hadamard_transform takes a tensor; got list"),
        ((torch.ones(4), 2.0), {}, "size must be an int or None; got 2.0"),
        ((torch.ones(4), True), {}, "size must be an int or None; got True"),
        ((torch.ones(4),), {"seed": "1"}, "seed must be an int or None; got '1'"),
    ],
)
def test_a_transform_of_wrong_types(args: tuple, kwargs: dict, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        rotpass.hadamard_transform(*args, **kwargs)
