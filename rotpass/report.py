"""What was found, done, refused and why: a :class:`Site` is one place, a :class:`Report` is all of them."""

from __future__ import annotations

import dataclasses
import html
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from rotpass.recipe import Recipe

log = logging.getLogger(__name__)

KINDS = ("r3", "v", "r4")
COLUMNS = ("kind", "where", "size", "status", "inserted", "undone", "reason")
GROUPED = ("kind", "count", "size", "status", "inserted", "undone", "for example", "reason")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """One place where a rotation belongs.

    Attributes:
        kind: ``"r3"`` (queries and keys), ``"v"`` (values) or ``"r4"`` (a down projection's input).
        where: module path as in ``torch.export``'s state dict: the attention module for R3 and V, the down projection
            for R4.
        size: order of the Hadamard matrix: head_dim for R3 and V, the block along the width for R4; 0 if refused
            because there is none.
        width: length of the axis that is rotated in blocks of ``size``.
        status: ``"rotated"``, ``"refused"`` or ``"already"`` (the model came with it).
        inserted: how the rotation was put in: ``"folded"``, ``"online"``, ``"prefolded"`` or ``"none"``.
        undone: how it is taken back, in the same words.
        reason: for a refusal, why and what a user can do; else a remark or "".
    """

    kind: str
    where: str
    size: int
    width: int
    status: str
    inserted: str = "none"
    undone: str = "none"
    reason: str = ""


@dataclasses.dataclass
class Report:
    """All sites of one or more graphs, in graph order; printed as an aligned table."""

    sites: list[Site] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def rotated(self) -> list[Site]:
        """The sites that are rotated: by this pass, or already when it came."""
        return [site for site in self.sites if site.status != "refused"]

    @property
    def refused(self) -> list[Site]:
        """The sites left alone; each has a reason."""
        return [site for site in self.sites if site.status == "refused"]

    @property
    def counts(self) -> dict[str, int]:
        """Rotated places per kind: ``{"r3": ..., "v": ..., "r4": ...}``."""
        rotated = self.rotated
        return {kind: sum(site.kind == kind for site in rotated) for kind in KINDS}

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, ready for JSON."""
        return {
            "sites": [dataclasses.asdict(site) for site in self.sites],
            "counts": self.counts,
            "notes": list(self.notes),
        }

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def grouped(self) -> str:
        """The table for a large model: by kind, one line for all sites that differ in ``where`` alone, with a count."""
        return self._text(Explanation(self.sites)._table())

    def _table(self) -> list[tuple[str, ...]]:
        return [COLUMNS, *(tuple(_cell(site, column) for column in COLUMNS) for site in self.sites)]

    def _summary(self) -> str:
        counts = " ".join(f"{kind}={count}" for kind, count in self.counts.items())
        already = sum(site.status == "already" for site in self.sites)
        came_so = f", {already} of them already" if already else ""
        return f"rotpass: {len(self.rotated)} rotated ({counts}){came_so}, {len(self.refused)} refused"

    def __str__(self) -> str:
        return self._text(self._table())

    def _text(self, table: list[tuple[str, ...]]) -> str:
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
        return "\n".join([*lines, self._summary(), *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        head, *rows = self._table()
        body = "".join(row(cells, "td") for cells in rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table>{row(head, 'th')}{body}</table><p>{html.escape(self._summary())}</p>{notes}"


class Explanation(Report):
    """A report that prints grouped: by kind, one line for all sites that differ in ``where`` alone."""

    def _table(self) -> list[tuple[str, ...]]:
        groups: dict[tuple[str, ...], list[str]] = {}
        for site in sorted(self.sites, key=lambda site: KINDS.index(site.kind)):
            same = tuple(_cell(site, column) for column in COLUMNS if column != "where")
            groups.setdefault(same, []).append(_cell(site, "where"))
        rows = [(kind, str(len(at)), *same, at[0], reason) for (kind, *same, reason), at in groups.items()]
        return [GROUPED, *rows]


def _cell(site: Site, column: str) -> str:
    if column == "size" and 0 < site.size < site.width:
        return f"{site.width // site.size}x{site.size}"
    if column == "where":
        return site.where or "(root)"
    return str(getattr(site, column))


def check(sites: list[Site], recipe: Recipe, *, strict: bool, holds_any: bool) -> None:
    """What every door does with the sites of a graph before it changes anything.

    Raises:
        ValueError: ``strict`` and a site was refused; the message holds every distinct reason with an example.
    """
    refused = [site for site in sites if site.status == "refused"]
    if strict and refused:
        reasons = {site.reason: site for site in reversed(refused)}
        told = "; ".join(
            f"{site.kind} at {site.where or 'the root'}: {reason}" for reason, site in reversed(reasons.items())
        )
        raise ValueError(f"strict=True and {len(refused)} of {len(sites)} sites were refused: {told}")
    for site in refused:
        log.info("refused %s at %s: %s", site.kind, site.where, site.reason)
    if holds_any and recipe.asks_for_anything and len(refused) == len(sites):
        why = f"{len(refused)} refused, e.g. {refused[0].reason}" if refused else _why_none(recipe)
        warnings.warn(f"rotpass rotated nothing: {why}", stacklevel=3)


def _why_none(recipe: Recipe) -> str:
    if recipe.only or recipe.skip:
        return "no place is left by only= and skip="
    return "the graph holds none of the kinds of site that the recipe asks for"
