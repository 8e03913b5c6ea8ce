"""Which Hadamard matrix has which order: the canonical rule and the tables of two other projects.

A matrix of order n is a Kronecker product of factors, the first outermost. Its factoring under a table is part of what
a checkpoint depends on, so it never changes; tests pin a hash of every matrix.
"""

import functools

from torch import Tensor

from rotpass.hadamard import constructions as build
from rotpass.hadamard import rows
from rotpass.hadamard.clean import clean

TABLES = ("default", "quarot", "compressed-tensors")

# Order 260 is Goethals-Seidel from a Golay pair of length 32; see `rows` for the others.
_DEFAULT_EXTRA = (92, 116, 156, 172, 260, 292)
_DEFAULT_LIMIT = 512

# In the order in which QuaRot's and SpinQuant's get_hadK try them (44 is SpinQuant's alone).
_QUAROT = (172, 156, 140, 108, 60, 52, 36, 28, 44, 40, 20, 12)

# The keys of compressed-tensors' hadamards.safetensors, by the construction that reproduces each (Sloane's names: pal,
# pal2, tpal and ttpal as twice or four times a Paley matrix, will, twill, syl, tur, od, hall).
_CT_PALEY1 = (12, 24, 32, 44, 48, 60, 68, 72, 80, 84, 104, 108, 132, 140, 152, 164, 168, 180, 192, 200)
_CT_PALEY1_SYMMETRIC = (212, 224, 228, 240, 252)
_CT_PALEY2 = (28, 36, 76, 124, 148, 196, 204, 220)
_CT_DOUBLED = {40: 20, 56: 28, 88: 44, 96: 48, 112: 56, 120: 60, 136: 68, 144: 72, 160: 80, 176: 88, 184: 92, 216: 108}
_CT_DOUBLED_WILLIAMSON = (208, 232, 248)
_CT_WILLIAMSON = (52, 92, 100, 116, 156, 172, 244)
_CT_SYLVESTER = (1, 2, 4, 8, 16, 64, 128, 256)
_CT = frozenset(
    (*_CT_PALEY1, *_CT_PALEY1_SYMMETRIC, *_CT_PALEY2, *_CT_DOUBLED, *_CT_DOUBLED_WILLIAMSON, *_CT_WILLIAMSON)
    + (*_CT_SYLVESTER, 20, 188, 236)
)


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def check_table(table: str) -> None:
    if table not in TABLES:
        raise ValueError(f"unknown Hadamard table {table!r}: choose one of {', '.join(map(repr, TABLES))}")


@functools.cache
def base_orders() -> tuple[int, ...]:
    """The base orders of the default table, ascending."""
    paley = (n for n in range(4, _DEFAULT_LIMIT + 1, 4) if build.has_paley2(n) or build.has_paley1(n))
    return tuple(sorted({n for n in paley if not is_power_of_two(n)} | set(_DEFAULT_EXTRA)))


def _smallest_sum(n: int) -> tuple[int, ...] | None:
    """Base orders whose product is n over a power of two, descending, with the smallest sum.

    Of choices with equal sums the one with fewer factors wins, then the one whose first differing factor is larger.
    Up to 2^20 this decides 475200, 786240 and 950400 only.
    """
    best: tuple[tuple[int, int, tuple[int, ...]], tuple[int, ...]] | None = None

    def extend(rest: int, chosen: tuple[int, ...], largest: int) -> None:
        nonlocal best
        if is_power_of_two(rest):
            key = (sum(chosen), len(chosen), tuple(-k for k in chosen))
            if best is None or key < best[0]:
                best = key, chosen
            return
        for k in reversed(base_orders()):
            if k <= largest and rest % k == 0:
                extend(rest // k, (*chosen, k), k)

    extend(n, (), n)
    return None if best is None else best[1]


def _base(n: int, table: str) -> tuple[int, ...] | None:
    """The factors before the last power of two, or None where the table has no matrix of order n."""
    if table == "default":
        return () if is_power_of_two(n) else _smallest_sum(n)
    if table == "quarot":
        first = next((k for k in _QUAROT if n % k == 0), None)
        if first is None:
            return () if is_power_of_two(n) else None
        return (first,) if is_power_of_two(n // first) else None
    divisor = max((k for k in _CT if n % k == 0 and is_power_of_two(n // k)), default=None)
    return None if divisor is None else (divisor,)


@functools.cache
def _factors(n: int, table: str) -> tuple[int, ...] | None:
    check_table(table)
    base = _base(n, table) if n > 0 else None
    if base is None:
        return None
    rest = n
    for k in base:
        rest //= k
    return base if base and rest == 1 else (*base, rest)


def factors(n: int, *, table: str = "default") -> tuple[int, ...]:
    r"""The orders whose Kronecker product is the Hadamard matrix of order ``n``, outermost first.

    Under ``"default"``: :math:`H = H_{K_1} \otimes H_{K_2} \otimes \dots \otimes H_{2^b}` with base orders
    :math:`K_1 \ge K_2 \ge \dots` of product :math:`n / 2^b` and the smallest sum. Base orders are the orders up to 512,
    not powers of two, that Paley's second or first construction gives, and 92, 116, 156, 172, 260 and 292.

    Raises:
        ValueError: the table has no matrix of this order; the message names the largest block that it has.
    """
    found = _factors(n, table)
    if found is None:
        block = largest_block(n, table=table)
        advice = (
            f"the largest block that divides it is {block}" if block else "no block of at least 16 divides it either"
        )
        raise ValueError(f"the {table!r} table has no Hadamard matrix of order {n}; {advice}")
    return found


def largest_block(width: int, *, table: str = "default", limit: int = 512) -> int | None:
    """``width`` if the table has a matrix of that order, else the largest order of at least 16 and at most ``limit``
    that it has and that divides ``width``, else None."""
    if _factors(width, table) is not None:
        return width
    blocks = range(min(limit, width), 15, -1)
    return next((b for b in blocks if width % b == 0 and _factors(b, table) is not None), None)


def is_sylvester(k: int, place: int, table: str) -> bool:
    """Whether a factor k, the ``place``-th of its matrix, is Sylvester's; compressed-tensors has another 32."""
    return is_power_of_two(k) and (place > 0 or table != "compressed-tensors" or k in _CT_SYLVESTER)


def _default_base(k: int) -> Tensor:
    if is_power_of_two(k):
        return build.sylvester(k)
    if build.has_paley2(k):
        return build.paley2(k)
    if build.has_paley1(k):
        return build.paley1(k)
    if k == 260:
        return build.goethals_seidel(65, build.golay_rows(32))
    if k == 292:
        return build.goethals_seidel(73, build.orbit_rows(73, 2, rows.ORBIT_LEADERS_73))
    return build.williamson(k // 4, rows.WILLIAMSON[k // 4])


def _quarot_base(k: int) -> Tensor:
    if is_power_of_two(k):
        return build.sylvester(k)
    if k in (28, 36):
        return build.paley2(k)
    if k in (52, 156, 172):
        return build.williamson(k // 4, rows.WILLIAMSON[k // 4])
    return build.double(build.paley1(20)) if k == 40 else build.paley1(k)


def _compressed_tensors_base(k: int) -> Tensor:
    if k in _CT_PALEY1:
        return build.paley1(k)
    if k in _CT_PALEY1_SYMMETRIC:
        return build.paley1_symmetric(k)
    if k in _CT_PALEY2:
        return build.paley2(k)
    if k in _CT_DOUBLED:  # 40 doubles Paley's 20, not the table's own
        return build.double(build.paley1(20) if k == 40 else _compressed_tensors_base(_CT_DOUBLED[k]))
    if k in _CT_DOUBLED_WILLIAMSON:
        m = 13 if k == 208 else k // 8
        h = build.double(build.williamson(m, rows.WILLIAMSON[m], right=True))
        return build.double(h) if k == 208 else h
    if k in _CT_WILLIAMSON:
        return build.williamson(k // 4, rows.WILLIAMSON[k // 4])
    if k == 20:
        return build.from_bits(rows.HALL_20)
    if k in (188, 236):
        return build.goethals_seidel(k // 4, rows.GOETHALS_SEIDEL[k // 4])
    return build.sylvester(k)


@functools.cache
def base_matrix(k: int, table: str) -> Tensor:
    """The matrix of one order in a table, int8, on the CPU; shared, so not to be written to."""
    bases = {"default": _default_base, "quarot": _quarot_base, "compressed-tensors": _compressed_tensors_base}
    return clean(bases[table], k)


def factor_matrices(n: int, *, table: str = "default") -> tuple[Tensor, ...]:
    """The matrices of :func:`factors`, as int8 tensors on the CPU; shared, so not to be written to."""
    matrices = []
    for place, k in enumerate(factors(n, table=table)):
        # Sylvester's are not kept: one of order 32768 takes a gigabyte.
        sylvester = is_sylvester(k, place, table)
        matrices.append(clean(build.sylvester, k) if sylvester else base_matrix(k, table))
    return tuple(matrices)
