"""What to rotate: the :class:`Recipe` a user gives to a door, and the :class:`FakeQuant` it may carry."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any

from rotpass.hadamard import largest_block

TABLES = ("default", "quarot", "compressed-tensors")
COUNTERS = ("fold", "online", "prefolded")
CACHES = ("plain", "rotated")
QUANTIZERS = (None, 8, 4, 3, 2, "fp8")


def _one_of(name: str, value: Any, allowed: tuple) -> None:
    # True and 4.0 equal numbers of bits, and are none.
    if isinstance(value, (bool, float)) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeQuant:
    """Quantizers to simulate, each a number of bits (8, 4, 3, 2), ``"fp8"`` or None.

    Args:
        q: queries, symmetric, one scale per token and head: amax / (2^(bits-1) - 1).
        k, v: keys and values, asymmetric, per token and head: (max - min) / (2^bits - 1).
        down: the input of an MLP's down projection, symmetric, per token.

    ``"fp8"`` is float8_e4m3fn, symmetric, scale amax / 448. A fake quantizer stands where a real one would: after
    the rotation, and before the KV cache where the cache is internal to the graph, else at the attention's input.
    It works without any rotation too (``r3=v=r4=False``), for the baseline. Gradients pass straight through.

    Raises:
        ValueError: a value that is not in the list.
    """

    q: int | str | None = None
    k: int | str | None = None
    v: int | str | None = None
    down: int | str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _one_of(f"FakeQuant.{field.name}", getattr(self, field.name), QUANTIZERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to rotate and how; frozen, hashable and picklable.

    Args:
        r3: rotate queries and keys, per head.
        v: rotate values per head, undone at the attention's output.
        r4: rotate the input of an MLP's down projection, undone in its weight.
        counter: ``"fold"`` puts counter-rotations into weights where that is right, ``"online"`` leaves both halves
            in the graph, ``"prefolded"`` says that the weights already hold theirs.
        block_size: R4 in blocks of this many values along the last axis; None means the full width, or the largest
            block that can be built where the full width has no Hadamard matrix.
        seed: random signs from an integer hash of this number; None means none.
        table: which Hadamard matrices: ``"default"``, ``"quarot"`` or ``"compressed-tensors"``.
        cache: what a KV cache that crosses the graph's boundary holds: ``"plain"`` or ``"rotated"`` keys and values.
            With ``"rotated"`` under torch.compile, Dynamo raises at its recompile limit from then on
            (``torch._dynamo.config.fail_on_recompile_limit_hit``): un-compiled code would misread the cache.
        only, skip: shell patterns on :attr:`Site.where`; a place that they exclude is no site.
        fake_quant: quantizers to simulate.

    Raises:
        ValueError, TypeError: a field has no such value.
    """

    r3: bool = True
    v: bool = True
    r4: bool = True
    counter: str = "fold"
    block_size: int | None = None
    seed: int | None = None
    table: str = "default"
    cache: str = "plain"
    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] | None = None
    fake_quant: FakeQuant | None = None

    def __post_init__(self) -> None:
        for name in ("r3", "v", "r4"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Recipe.{name} must be True or False; got {getattr(self, name)!r}")
        _one_of("Recipe.counter", self.counter, COUNTERS)
        _one_of("Recipe.table", self.table, TABLES)
        _one_of("Recipe.cache", self.cache, CACHES)
        for name in ("block_size", "seed"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"Recipe.{name} must be an integer or None; got {value!r}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"Recipe.seed must fit in 64 bits; got {self.seed}")
        if self.block_size is not None and (
            self.block_size < 2 or largest_block(self.block_size, table=self.table) != self.block_size
        ):
            raise ValueError(
                f"Recipe.block_size={self.block_size}: the {self.table!r} table has no Hadamard matrix of that order"
            )
        for name in ("only", "skip"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            if value is not None:
                patterns = tuple(value) if isinstance(value, Iterable) else (value,)
                if not all(isinstance(pattern, str) for pattern in patterns):
                    raise TypeError(f"Recipe.{name} must be shell patterns; got {value!r}")
                value = patterns
                object.__setattr__(self, name, value)
        if self.fake_quant is not None and not isinstance(self.fake_quant, FakeQuant):
            raise TypeError(f"Recipe.fake_quant must be a rotpass.FakeQuant or None; got {self.fake_quant!r}")

    def asks_for(self, kind: str) -> bool:
        """Whether sites of this kind (``"r3"``, ``"v"``, ``"r4"``) are wanted."""
        return getattr(self, kind)

    def includes(self, where: str) -> bool:
        """Whether ``only`` and ``skip`` leave this module path in."""
        if self.only is not None and not any(fnmatch.fnmatchcase(where, pattern) for pattern in self.only):
            return False
        return not any(fnmatch.fnmatchcase(where, pattern) for pattern in self.skip or ())

    @property
    def asks_for_anything(self) -> bool:
        """Whether any rotation is wanted; False for a baseline that only fake-quantizes."""
        return self.r3 or self.v or self.r4


def as_recipe(recipe: Recipe | None, fields: dict[str, Any], hint: str = "") -> Recipe:
    """The recipe a door was given, whole or as keyword fields (which change single fields of a whole one).

    ``hint`` is what a door adds to the message about an unknown field.

    Raises:
        TypeError: ``recipe`` is not a Recipe, or a field has an unknown name (the message lists the valid ones).
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a rotpass.Recipe; got {type(recipe).__name__}")
    valid = [field.name for field in dataclasses.fields(Recipe)]
    unknown = sorted(set(fields) - set(valid))
    if unknown:
        raise TypeError(f"unknown recipe field {', '.join(map(repr, unknown))}; valid fields: {', '.join(valid)}{hint}")
    return dataclasses.replace(recipe or Recipe(), **fields)
