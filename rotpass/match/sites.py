"""From a graph and a recipe to sites: every place where a rotation belongs, decided whole before anything is edited."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch.fx import Graph, Node

from rotpass import _torch
from rotpass.capture import Capture
from rotpass.hadamard import largest_block
from rotpass.match.alias import Aliases
from rotpass.match.attention import ATTENTIONS, Attention, match_attentions
from rotpass.match.edits import After, Before, Content, Edit, Fold, FoldPoint, Quantize, Rotate, RotateContent, Rotation
from rotpass.match.lift import Carried, Lift, Plan
from rotpass.match.mlp import Mlp, match_mlps
from rotpass.match.projection import CONVOLUTIONS, SPELLINGS, projection, stacked_spellings
from rotpass.match.walk import (
    FLOATS,
    TRANSPARENT,
    carriers,
    columns_in_cat,
    last_dim,
    rotation_above,
    users,
    value,
)
from rotpass.recipe import Recipe
from rotpass.report import Site


@dataclasses.dataclass(frozen=True)
class Door:
    """What a door can do with a weight, and what it knows of caches.

    Attributes:
        extra_inputs: a weight that others use too can get a folded copy of its own.
        trains: placeholders whose weights need gradients: folds of them stay in the graph.
        own_caches: inputs and outputs that are the module's own cache, so that V may be rotated in them.
    """

    extra_inputs: bool = False
    trains: frozenset[Node] = frozenset()
    own_caches: frozenset[Node] | None = None


@dataclasses.dataclass
class Match:
    """One site and what has to be done for it; a refused site has nothing to do.

    Sites with the same ``plan`` share how their values are rotated; the edits for it are with the first of them.
    """

    site: Site
    edits: list[Edit] = dataclasses.field(default_factory=list)
    plan: Plan | None = None


@dataclasses.dataclass
class Matches:
    """All sites of a graph in graph order, the fake quantizers, and whether the graph holds an attention or an MLP."""

    sites: list[Match]
    quantizers: list[Quantize]
    holds_any: bool


def match_sites(capture: Capture, recipe: Recipe, door: Door) -> Matches:
    """Finds and decides every site.

    Raises:
        ValueError: ``cache="rotated"``, and a cache that crosses the graph's boundary cannot be rotated.
        RuntimeError: the weights of a module are folded, and the other half of the rotation is not in the graph.
    """
    # Anchors are single calls, found directly: Inductor's PatternMatcherPass passes over meta tensors and every dtype
    # that it cannot generate code for, and a site that is not seen is not reported.
    calls = sorted(
        node
        for target in {*ATTENTIONS, *SPELLINGS, *stacked_spellings(), *CONVOLUTIONS}
        for node in _calls(capture.gm.graph, target)
    )
    attentions = match_attentions(calls)
    mlps = [found for node in calls for found in match_mlps(node, capture.values)]
    aliases = Aliases(capture.gm.graph)
    blocked: frozenset[Node] = frozenset()
    while True:
        matches = _Matcher(capture, recipe, door, aliases, blocked).run(attentions, mlps)
        shared = frozenset() if door.extra_inputs else _shared_unequally(capture, matches.sites)
        if shared <= blocked:
            return matches
        # Folding these would change them under their other users: decide again without.
        blocked |= shared


def _calls(graph: Graph, target: Callable) -> list[Node]:
    return graph.find_nodes(op="call_function", target=target)


class _Matcher:
    def __init__(
        self, capture: Capture, recipe: Recipe, door: Door, aliases: Aliases, blocked: frozenset[Node]
    ) -> None:
        self._capture, self._recipe, self._door, self._aliases, self._blocked = capture, recipe, door, aliases, blocked
        self._lift = Lift(capture, aliases, self._folds, door.own_caches)
        self._quantizers: list[Quantize] = []

    def run(self, attentions: list[Attention], mlps: list[Mlp]) -> Matches:
        for attention in attentions:
            for role in ("q", "k", "v"):
                self._register(attention, role)
        found = {}
        for attention in attentions:
            sites = [m for kind in attention.kinds if (m := self._attention_site(attention, kind))]
            found.setdefault(attention.node, []).extend(sites)
            for role in ("q", "k", "v"):
                self._quantize_role(attention, role)
        for mlp in mlps:
            found.setdefault(mlp.down.node, []).extend([m] if (m := self._r4(mlp)) else [])
        ordered = [match for node in sorted(found) for match in found[node]]
        return Matches(ordered, self._quantizers, bool(attentions or mlps))

    # Attention

    def _wanted(self, kind: str, node: Node) -> bool:
        return self._recipe.asks_for(kind) and self._recipe.includes(self._capture.where(node))

    def _refusal(self, attention: Attention, kind: str) -> str:
        """Why this attention cannot be rotated, or ""."""
        if kind in attention.unfit:
            return attention.unfit[kind]
        dim = attention.head_dim if kind == "r3" else attention.v_head_dim
        if dim is None:
            return "its head vectors have no static length in common: make head_dim static"
        if dim < 2:
            return f"a head vector of length {dim} has nothing to rotate"
        dtypes = {value(attention.arg(role)).dtype for role in (("q", "k") if kind == "r3" else ("v",))}
        if not dtypes <= FLOATS:
            return f"its inputs are {', '.join(sorted(map(str, dtypes)))}: rotate before they are quantized"
        if largest_block(dim, table=self._recipe.table) is None:
            return f"head_dim {dim} has no Hadamard matrix, nor a block of at least 16, in the {self._recipe.table!r} table"
        return ""

    def _already(self, attention: Attention, kind: str) -> str:
        """Whether "all", "some" or "none" of this rotation is in the model as it came."""
        if (kind, self._capture.where(attention.node)) in self._capture.already:
            return "all"
        if kind == "r3":
            halves = {rotation_above(attention.arg(role), attention.head_dim) is not None for role in ("q", "k")}
            return "some" if len(halves) == 2 else "all" if True in halves else "none"
        undone = self._undone_points(attention)
        return "all" if any(point.projection.source in self._capture.folded for point in undone or ()) else "none"

    def _register(self, attention: Attention, role: str) -> None:
        """Announces a sink, so that plans know of all sinks before the first one is made."""
        kind = "v" if role == "v" else "r3"
        if kind in attention.unfit or kind not in attention.kinds:
            return
        rotated = (
            self._wanted(kind, attention.node)
            and not self._refusal(attention, kind)
            and self._already(attention, kind) == "none"
        )
        rotated = rotated and not (kind == "v" and self._recipe.counter == "prefolded")
        quantizer = self._quantizer(role)
        if not rotated and quantizer is None:
            return
        carried = Carried(
            rotation=self._rotation(attention, kind)
            if rotated
            else Rotation(_head_dim(attention, kind) or 1, "default", None),
            rotated=rotated,
            quantizer=quantizer,
            fold=rotated and kind == "v" and self._recipe.counter == "fold",
            crosses=rotated and role != "q" and (self._recipe.cache == "rotated" or self._door.own_caches is not None),
        )
        self._lift.sinks[getattr(attention, role)] = carried

    def _rotation(self, attention: Attention, kind: str) -> Rotation:
        block = largest_block(_head_dim(attention, kind), table=self._recipe.table)
        return Rotation(block, self._recipe.table, self._recipe.seed)

    def _attention_site(self, attention: Attention, kind: str) -> Match | None:
        node = attention.node
        if not self._wanted(kind, node):
            return None
        dim = _head_dim(attention, kind) or 0
        site = Site(kind=kind, where=self._capture.where(node), size=0, width=dim, status="refused")
        if reason := self._refusal(attention, kind):
            self._must_not_cross(attention, kind, reason)
            return Match(dataclasses.replace(site, reason=reason))
        rotation = self._rotation(attention, kind)
        site = dataclasses.replace(site, size=rotation.size, status="rotated")
        already = self._already(attention, kind)
        if already == "some":
            return Match(
                dataclasses.replace(
                    site, status="refused", reason="one of queries and keys is rotated already: rotate both or neither"
                )
            )
        if already == "all":
            how = "folded" if kind == "v" else "online"
            return Match(
                dataclasses.replace(site, status="already", inserted=how, undone=how if kind == "v" else "none")
            )
        return self._r3(attention, rotation, site) if kind == "r3" else self._v(attention, rotation, site)

    def _must_not_cross(self, attention: Attention, kind: str, reason: str) -> None:
        if self._recipe.cache != "rotated":
            return
        for role in ("k",) if kind == "r3" else ("v",):
            carried = Carried(Rotation(_head_dim(attention, kind) or 1, "default", None), False, None, False, True)
            plan = Plan(0, (Before(*getattr(attention, role)),))
            self._check_crossing(attention, role, plan, carried, reason)

    def _check_crossing(self, attention: Attention, role: str, plan: Plan, carried: Carried, reason: str = "") -> None:
        """Mixed contents of a cache are silent garbage: with ``cache="rotated"`` they are an error."""
        if self._recipe.cache == "rotated" and role != "q" and (cache := self._lift.crosses(plan, carried)) is not None:
            where = self._capture.where(attention.node) or "the model"
            what = "keys" if role == "k" else "values"
            reason = reason or self._lift.why_plain(cache, attention.arg(role), carried)
            raise ValueError(
                f'cache="rotated": the {what} of {where} cross the graph\'s boundary at '
                f"{self._capture.label(cache)!r} and cannot be rotated: {reason}"
            )

    def _plan(self, attention: Attention, role: str) -> tuple[Plan, list[Edit]]:
        """The plan for an argument and the edits that carry it out (none if an earlier plan covers it)."""
        sink = getattr(attention, role)
        carried = self._lift.sinks[sink]
        plan, new = self._lift.plan(*sink)
        if not new:
            return plan, []
        self._check_crossing(attention, role, plan, carried)
        edits: list[Edit] = []
        for leaf in plan.leaves:
            if isinstance(leaf, (After, Before)):
                edits.append(Rotate(leaf, carried.rotation))
            elif isinstance(leaf, FoldPoint):
                edits.append(Fold(leaf, carried.rotation, self._in_graph(leaf)))
            elif isinstance(leaf, Content):
                edits.append(RotateContent(leaf, carried.rotation))
        return plan, edits

    def _r3(self, attention: Attention, rotation: Rotation, site: Site) -> Match:
        edits, reason = [], ""
        for role in ("q", "k"):
            plan, made = self._plan(attention, role)
            edits += made
            if role == "k":
                reason = self._cache_remark(attention, role, plan)
        return Match(dataclasses.replace(site, inserted="online", reason=reason), edits)

    def _cache_remark(self, attention: Attention, role: str, plan: Plan) -> str:
        carried = self._lift.sinks[getattr(attention, role)]
        outside = self._lift.crosses(plan, carried, outputs=False) is not None
        return 'the whole cache is rotated at every step: cache="rotated" rotates only what is new' if outside else ""

    def _v(self, attention: Attention, rotation: Rotation, site: Site) -> Match:
        if self._recipe.counter == "prefolded":
            return Match(dataclasses.replace(site, inserted="prefolded", undone="prefolded"))
        plan, edits = self._plan(attention, "v")
        undone = self._undone_points(attention) if self._recipe.counter == "fold" else None
        undone = undone if undone and all(map(self._folds, undone)) else None
        if undone:
            edits += [Fold(point, rotation, self._in_graph(point)) for point in undone]
        else:
            edits.append(Rotate(After(attention.output), rotation, transpose=True))
        reason = self._cache_remark(attention, "v", plan)
        return Match(
            dataclasses.replace(site, inserted=_how(plan), undone="folded" if undone else "online", reason=reason),
            edits,
            plan,
        )

    def _undone_points(self, attention: Attention) -> list[FoldPoint] | None:
        """The projections that the output goes to, if it goes nowhere else and arrives there in whole heads."""
        dim = attention.v_head_dim
        if dim is None:
            return None
        size = largest_block(dim, table=self._recipe.table) or dim
        points: list[FoldPoint] = []
        todo: list[tuple[Node, range | None]] = [(attention.output, None)]  # with its columns in what it is joined with
        while todo:
            node, columns = todo.pop()
            if self._aliases.writes(node) or not users(node):
                return None
            for user in users(node):
                if (found := projection(user)) is not None and found.x is node and found.weight is not node:
                    starts = None if columns is None else tuple(columns)[::size]
                    points.append(FoldPoint(found, "in", starts, node))
                elif carriers(user, dim) == [node] and (columns is None or last_dim(user) == last_dim(node)):
                    todo.append((user, columns))
                elif columns is None and (joined := columns_in_cat(user, node)) is not None:
                    todo.append((user, joined))
                else:
                    return None
        return points

    # Weights

    def _folds(self, point: FoldPoint) -> bool:
        return not self._no_fold(point)

    def _no_fold(self, point: FoldPoint) -> str:
        """Why a fold point's weight cannot take a rotation, or ""."""
        for weight in point.weights:
            tensor = self._capture.values.get(weight)
            if tensor is None:
                return "its weight is not a parameter"
            if not _torch.is_plain(tensor):
                return f"its weight is a {type(tensor).__name__}"
            if tensor.dtype not in FLOATS:
                return f"its weight is {tensor.dtype}"
            if self._aliases.writes(weight):
                return "its weight is written to in the graph"
            if weight in self._blocked:
                return "its weight has other users"
        if any(value(bias).dim() != 1 for bias in point.weights[1:]):
            return "its bias is no vector"
        return ""

    def _in_graph(self, point: FoldPoint) -> bool:
        """Whether a weight needs gradients, for which its fold has to be part of the graph."""
        return not self._door.trains.isdisjoint(point.weights)

    # MLP

    def _r4(self, mlp: Mlp) -> Match | None:
        down, recipe = mlp.down, self._recipe
        where = self._capture.where(down.node)
        folded = down.source in self._capture.folded or ("r4", where) in self._capture.already
        match = self._r4_site(mlp, where, folded) if self._wanted("r4", down.node) else None
        if recipe.fake_quant is not None and (kind := _kind(recipe.fake_quant.down, symmetric=True)):
            self._add_once(Quantize(Before(down.node, down.node.args.index(down.x)), kind, 0))
        return match

    def _r4_site(self, mlp: Mlp, where: str, folded: bool) -> Match:
        down, recipe, width = mlp.down, self._recipe, mlp.width
        site = Site(kind="r4", where=where, size=0, width=width, status="refused")
        if mlp.rotated is not None:
            size = mlp.rotated.args[1]
            return Match(dataclasses.replace(site, size=size, status="already", inserted="online", undone="folded"))
        if folded:
            raise RuntimeError(
                f"the weight of {where!r} was folded by rotpass, but its online rotation is missing from the graph: "
                "a module that was swapped lost its forward pre-hook; fold again after the swap"
            )
        block = recipe.block_size or largest_block(width, table=recipe.table)
        if block is None or block < 2:
            return Match(
                dataclasses.replace(
                    site,
                    reason=f"width {width} has no Hadamard matrix, nor a block of at least 16, in the {recipe.table!r} table",
                )
            )
        if width % block:
            return Match(dataclasses.replace(site, reason=f"block_size {block} does not divide its width {width}"))
        if value(down.x).dtype not in FLOATS:
            return Match(
                dataclasses.replace(
                    site, size=block, reason=f"its input is {value(down.x).dtype}: rotate before it is quantized"
                )
            )
        rotation = Rotation(block, recipe.table, recipe.seed)
        site = dataclasses.replace(site, size=block, status="rotated", inserted="online")
        edits: list[Edit] = [Rotate(Before(mlp.user, mlp.position), rotation, axis=mlp.axis)]
        if recipe.counter == "prefolded":
            return Match(dataclasses.replace(site, undone="prefolded"), edits)
        starts = None if mlp.is_whole else tuple(range(mlp.offset, mlp.offset + width, block))
        point = FoldPoint(down, "in", starts, down.x)
        reason = self._no_fold(point)
        if reason and not _torch.is_plain(self._capture.values.get(down.source, value(down.source))):
            return Match(
                dataclasses.replace(
                    site,
                    status="refused",
                    inserted="none",
                    reason=f"{reason}: fold before quantizing, with rotpass.fold_",
                )
            )
        online = bool(reason) or recipe.counter == "online"
        edits.append(Fold(point, rotation, online or self._in_graph(point)))
        remark = f"its weight is rotated at every call: {reason}" if reason else ""
        return Match(dataclasses.replace(site, undone="online" if online else "folded", reason=remark), edits)

    # Fake quantizers

    def _quantizer(self, role: str) -> str | None:
        quantizers = self._recipe.fake_quant
        return _kind(getattr(quantizers, role), symmetric=role == "q") if quantizers else None

    def _quantize_role(self, attention: Attention, role: str) -> None:
        """Before an internal cache where there is one, else at the attention's input."""
        kind, sink = self._quantizer(role), getattr(attention, role)
        of = "v" if role == "v" else "r3"
        if kind is None or of in attention.unfit or of not in attention.kinds:
            return
        plan, new = self._lift.plan(*sink)
        if not any(isinstance(leaf, Content) for leaf in plan.leaves):
            self._quantizers.append(Quantize(Before(*sink), kind, 0))
            return
        for leaf in plan.leaves:
            if isinstance(leaf, (After, Before)):
                self._add_once(Quantize(leaf, kind, _head_dim(attention, "v" if role == "v" else "r3")))
            elif isinstance(leaf, FoldPoint):
                self._add_once(Quantize(After(leaf.node), kind, attention.v_head_dim))

    def _add_once(self, quantize: Quantize) -> None:
        if quantize not in self._quantizers:
            self._quantizers.append(quantize)


def _head_dim(attention: Attention, kind: str) -> int | None:
    return attention.head_dim if kind == "r3" else attention.v_head_dim


def _how(plan: Plan) -> str:
    if any(isinstance(leaf, (After, Before)) for leaf in plan.leaves):
        return "online"
    return "folded" if any(isinstance(leaf, FoldPoint) for leaf in plan.leaves) else "none"


def _kind(bits: int | str | None, *, symmetric: bool) -> str | None:
    """The name of a quantizer in ``rotpass::fake_quantize``."""
    if bits is None or bits == "fp8":
        return bits
    return f"int{bits}" if symmetric else f"int{bits}_asymmetric"


def _shared_unequally(capture: Capture, matches: Iterable[Match]) -> frozenset[Node]:
    """Folded weights that something else uses unfolded, or folded otherwise."""
    wanted: dict[Node, dict[Node, list]] = defaultdict(lambda: defaultdict(list))
    for edit in (edit for match in matches for edit in match.edits if isinstance(edit, Fold) and not edit.in_graph):
        found = edit.at.projection
        wanted[found.source][found.node].append((edit.at.axis, edit.at.starts, edit.rotation))
        if edit.at.side == "out" and found.bias is not None:
            wanted[found.bias][found.node].append((0, edit.at.starts, edit.rotation))
    storage = defaultdict(list)
    for node, tensor in capture.values.items():
        storage[_torch.storage_key(tensor)].append(node)
    unequal = set()
    for source, by_user in wanted.items():
        same_storage = storage[_torch.storage_key(capture.values[source])]
        reading = {reader for node in same_storage for reader in readers(node)}
        alike = all(_torch.same_view(capture.values[source], capture.values[node]) for node in same_storage)
        if not alike or reading != set(by_user) or len({tuple(folds) for folds in by_user.values()}) > 1:
            unequal.add(source)
    return frozenset(unequal)


def readers(node: Node) -> set[Node]:
    """The calls that read a weight, through transposes."""
    found = set()
    for user in users(node):
        looks_through = user.target in TRANSPOSES or user.target in TRANSPARENT
        found |= readers(user) if looks_through and user.users else {user}
    return found


TRANSPOSES = {torch.ops.aten.t.default, torch.ops.aten.numpy_T.default, torch.ops.aten.mT.default}
