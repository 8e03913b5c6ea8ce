"""The options of the torch.compile door: which are ours, which Inductor's, and when two sets are the same."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from rotpass import _torch
from rotpass.recipe import Recipe

OWN = ("recipe", *(field.name for field in dataclasses.fields(Recipe)), "strict", "inner")


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of ``torch.compile(..., backend="rotpass", options=...)`` as rotpass's own and Inductor's.

    Raises:
        ValueError: an option is neither.
    """
    own = {name: value for name, value in options.items() if name in OWN}
    theirs = {name: value for name, value in options.items() if name not in OWN}
    check(theirs, f"valid are rotpass's own ({', '.join(OWN)}) and")
    return own, theirs


def check(options: dict[str, Any], also: str = "valid are") -> None:
    """Raises a ValueError if one of these is not an option of Inductor."""
    if not options:
        return
    known = _torch.inductor_option_names()
    for name in options:
        if name.replace("-", "_") in known:
            continue
        hint = f"pass {name}= to rotpass.backend itself; " if name in OWN else ""
        near = difflib.get_close_matches(name, known, n=3)
        near_text = f", such as {', '.join(near)}" if near else ""
        raise ValueError(
            f"unknown option {name!r}; {hint}{also} Inductor's (torch._inductor.list_options(){near_text})"
        )


def frozen(value: Any) -> Any:
    """A hashable form of an option's value: equal for equal values of the same types, by identity where all else fails.

    ``True`` and ``1`` differ, as do a list and a tuple: what Inductor makes of them may.
    """
    if isinstance(value, dict):
        return dict, tuple(sorted((repr(key), frozen(key), frozen(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(frozen, value))
    try:
        hash(value)
    except TypeError:
        return type(value), "id", id(value)
    return type(value), value
