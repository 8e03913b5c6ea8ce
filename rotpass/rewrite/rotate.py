"""Rotates a captured graph: matches, checks, then edits."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from rotpass.capture import Capture
from rotpass.match.edits import Edit, Quantize, Rotate, RotateContent
from rotpass.match.edits import Fold as FoldEdit
from rotpass.match.projection import Projection
from rotpass.match.sites import Door, Matches, match_sites, readers
from rotpass.recipe import Recipe
from rotpass.report import Site, check
from rotpass.rewrite.fold import Fold
from rotpass.rewrite.insert import Inserter


@dataclasses.dataclass(frozen=True)
class FoldedInput:
    """An input of the rewritten graph that takes a folded copy.

    ``source`` is the position of the weight among the inputs, ``target`` the position that takes the copy: the same one,
    or that of a new input at the end where something else reads the weight too.
    """

    source: int
    target: int
    folds: tuple[Fold, ...]


@dataclasses.dataclass
class Rotated:
    """A rewritten graph: ``gm``, its sites, and what its inputs must be given.

    ``contents`` are buffers whose present contents have to be rotated along with what the graph writes to them.
    """

    gm: GraphModule
    sites: list[Site]
    folds: list[FoldedInput]
    contents: list[FoldedInput]
    holds_any: bool


def rotate(capture: Capture, recipe: Recipe, door: Door, *, strict: bool = False) -> Rotated:
    """Rotates ``capture.gm`` in place. Nothing is edited before every site is decided and checked.

    Raises:
        ValueError: ``strict`` and a site is refused, or ``cache="rotated"`` and a cache cannot be.
        RuntimeError: one half of an earlier fold is missing.
    """
    matches = match_sites(capture, recipe, door)
    sites = [match.site for match in matches.sites]
    check(sites, recipe, strict=strict, holds_any=matches.holds_any)
    editor = _Editor(capture)
    for edit in _in_order(matches):
        editor.apply(edit)
    folds, contents = editor.finish()
    capture.gm.recompile()
    return Rotated(capture.gm, sites, folds, contents, matches.holds_any)


def _in_order(matches: Matches) -> list[Edit]:
    """Rotations before the quantizers that read them."""
    return [edit for match in matches.sites for edit in match.edits] + list(matches.quantizers)


class _Editor:
    def __init__(self, capture: Capture) -> None:
        self._graph = capture.gm.graph
        self._inserter = Inserter(self._graph)
        self._readers = {node: readers(node) for node in capture.values}
        self._by_value: dict[Node, dict[Projection, list[Fold]]] = defaultdict(lambda: defaultdict(list))
        self._contents: dict[Node, Fold] = {}
        # Two folds of one weight in the graph follow each other: what a projection reads now instead of a source, as the
        # source is laid out and as it is passed.
        self._now: dict[tuple[Node, Node], Node] = {}
        self._passed: dict[tuple[Node, Node], Node] = {}

    def apply(self, edit: Edit) -> None:
        """Carries out one edit; folds by value wait for :meth:`finish`."""
        if isinstance(edit, Rotate):
            r = edit.rotation
            at_last = edit.axis == -1
            at = edit.at if at_last else self._inserter.moved(edit.at, edit.axis)
            self._inserter.put(at, torch.ops.rotpass.hadamard.default, r.size, edit.transpose, r.table, r.seed)
        elif isinstance(edit, Quantize):
            self._inserter.put(edit.at, torch.ops.rotpass.fake_quantize.default, edit.kind, edit.group)
        elif isinstance(edit, RotateContent):
            r, buffer = edit.rotation, edit.at.buffer
            self._contents[buffer] = Fold(buffer.meta["val"].dim() - 1, r.size, r.table, r.seed)
        elif edit.in_graph:
            self._fold_in_graph(edit)
        else:
            found, fold = edit.at.projection, Fold.at(edit.at, edit.rotation)
            self._by_value[found.source][found].append(fold)
            if edit.at.side == "out" and found.bias is not None:
                self._by_value[found.bias][found].append(fold.bias)

    def finish(self) -> tuple[list[FoldedInput], list[FoldedInput]]:
        """Points every folded weight's readers at the input that takes it."""
        position = {node: i for i, node in enumerate(self._graph.find_nodes(op="placeholder"))}
        folds = []
        for source, by_user in self._by_value.items():
            groups: dict[tuple[Fold, ...], list[Projection]] = defaultdict(list)
            for found, wanted in by_user.items():
                groups[tuple(wanted)].append(found)
            alone = len(groups) == 1 and self._readers[source] == {found.node for found in by_user}
            for wanted, projections in groups.items():
                target = source if alone else self._inserter.placeholder(source)
                if not alone:
                    position[target] = len(position)
                    for found in projections:
                        self._give(found, source, target)
                folds.append(FoldedInput(position[source], position[target], wanted))
        contents = [FoldedInput(position[node], position[node], (fold,)) for node, fold in self._contents.items()]
        self._inserter.finish()
        return folds, contents

    def _fold_in_graph(self, edit: FoldEdit) -> None:
        found, fold = edit.at.projection, Fold.at(edit.at, edit.rotation)
        call = self._inserter.calls_before(found.node)
        self._give(found, found.source, fold.insert(call, self._now.get((found.node, found.source), found.source)))
        if edit.at.side == "out" and found.bias is not None:
            self._give(found, found.bias, fold.bias.insert(call, self._now.get((found.node, found.bias), found.bias)))

    def _give(self, found: Projection, source: Node, weight: Node) -> None:
        """Has a projection read ``weight``, which is laid out like ``source``, where it read that."""
        self._now[found.node, source] = weight
        position = found.node.args.index(
            self._passed.get((found.node, source), found.weight if source is found.source else source)
        )
        if source is found.source:
            call, above = self._inserter.calls_before(found.node), source
            for step in found.path:
                weight, above = call(step.target, *(weight if arg is above else arg for arg in step.args)), step
        self._passed[found.node, source] = weight
        found.node.update_arg(position, weight)
