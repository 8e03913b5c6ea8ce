"""The cheapest places to rotate what attentions read: as early as every reader downstream agrees.

A *sink* is an attention's argument that has to arrive rotated. From each sink the search climbs through transparent
operators and cache writes, as long as everything that reads a value on the way ends in sinks of the same rotation, and
stops where rotating moves the fewest bytes: nothing if a projection's weight takes it, one token rather than a whole cache,
two KV heads rather than eight repeated ones. At equal cost the earliest point wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.fx import Node

from rotpass._torch import size_hint
from rotpass.capture import Capture
from rotpass.match.alias import Aliases
from rotpass.match.caches import CACHE_WRITES, ZEROS
from rotpass.match.edits import After, Before, Content, Crossing, FoldPoint, Leaf, Rotation
from rotpass.match.projection import projection
from rotpass.match.rows import fold_point
from rotpass.match.walk import (
    Position,
    argument_at,
    carriers,
    disjoint,
    is_floating,
    last_dim,
    positions,
    users,
    value,
)

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Carried:
    """What a sink must receive, in blocks of ``rotation.size``.

    ``rotated`` is False where only a fake quantizer is wanted, ``fold`` says whether a projection's weight may take the
    rotation, ``crosses`` whether a cache outside the graph holds rotated contents.
    """

    rotation: Rotation
    rotated: bool
    quantizer: str | None
    fold: bool
    crosses: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """Leaves that together rotate a sink, and what that costs in bytes moved at run time.

    ``buffers`` are all nodes of the caches that are rotated by rotating what is written to them.
    """

    cost: int
    leaves: tuple[Leaf, ...]
    buffers: frozenset[Node] = frozenset()


class Lift:
    """Plans for all sinks of a graph. Sinks that one plan covers share it."""

    def __init__(
        self,
        capture: Capture,
        aliases: Aliases,
        foldable: Callable[[FoldPoint], bool],
        own_caches: frozenset[Node] | None = None,
    ) -> None:
        self._capture = capture
        self._aliases = aliases
        self._foldable = foldable
        self._own_caches = own_caches  # if given, no other cache outside the graph may be rotated
        self._fold_points: dict[tuple[Node, int], FoldPoint | None] = {}
        self.sinks: dict[tuple[Node, Position], Carried] = {}
        self._covered: dict[tuple[Node, Position], Plan] = {}

    def plan(self, user: Node, position: Position) -> tuple[Plan, bool]:
        """The plan for a registered sink, and whether it is new (a sink that an earlier plan covers needs no edits)."""
        sink = (user, position)
        if sink in self._covered:
            return self._covered[sink], False
        carried, node = self.sinks[sink], argument_at(user, position)
        plan = self._best(node, carried, frozenset())
        nodes, sinks = self._reached(plan, carried) if plan else (set(), [])
        if plan is None or not self._buffers_agree(plan, nodes):
            plan, sinks = Plan(self._bytes(node), (Before(user, position),)), []
        for covered in sinks:
            self._covered[covered] = plan
        self._covered[sink] = plan
        return plan, True

    def crosses(self, plan: Plan, carried: Carried, *, outputs: bool = True) -> Node | None:
        """A cache of the outside world above the plan's leaves, which they would leave unrotated; None if there is none.

        Without ``outputs``, only one that comes in counts, none that merely goes out.
        """
        rotated = [leaf.node for leaf in plan.leaves if isinstance(leaf, After)]  # for outputs too
        todo = [*rotated, *(leaf.node for leaf in plan.leaves if isinstance(leaf, Before))]
        below: dict[Node, Node | None] = dict.fromkeys(todo)
        while todo:
            node = todo.pop()
            if self._is_outside(node) or self._may_be_a_cache(node):
                return node
            if outputs and node not in rotated:
                out = self._goes_out(node, below[node], carried.rotation.size, rotated)
                if out is not None:
                    return self._cache_like(out) or out
            for above in (
                *(_sources(node, carried.rotation.size) or ()),
                *(w.args[0] for w in self._aliases.writes(node)),
            ):
                if above not in below:
                    below[above] = node
                    todo.append(above)
        return next((cache for node in rotated if outputs and (cache := self._cache_like(node)) is not None), None)

    def _goes_out(self, node: Node, part: Node | None, size: int, rotated: list[Node]) -> Node | None:
        """Where a value can be seen outside the graph, without passing one of ``rotated``: a buffer or an output.

        Of the value only ``part`` counts, and what goes out by way of it was looked at before.
        """
        todo, seen = [node], {*rotated, part, *(user for user in node.users if part and disjoint(user, part))}
        while todo:
            node = todo.pop()
            for user in users(node):
                if user.op == "output" and node not in self._capture.internal_outputs:
                    return node
                if user in seen or user.op == "output" or any((user, i) in self.sinks for i in positions(user, node)):
                    continue
                seen.add(user)
                members = self._aliases.members(user) if user in self._aliases.writes(user) else []
                if (buffer := next(filter(self._is_outside, members), None)) is not None:
                    return buffer
                if node in (_sources(user, size) or ()):
                    todo.append(user)
        return None

    def why_plain(self, cache: Node, read: Node, carried: Carried) -> str:
        """Why ``cache`` cannot be rotated, of which an attention reads ``read``."""
        if self._may_be_a_cache(cache):
            return "this graph does not write it: pass a cache as an input, or make a constant a parameter"
        for write in self._aliases.writes(cache):
            if write.target not in CACHE_WRITES:
                return f"rotpass does not know how {write.target} writes it"
        todo, seen = [read], set()
        while todo:
            node = todo.pop()
            if node is cache or node in seen or projection(node) is not None:
                continue
            seen.add(node)
            above = _sources(node, carried.rotation.size)
            if above is None and self._cache_like(node) is cache:
                return f"rotpass does not know how {node.target} updates it"
            todo.extend(above or ())
        return "something else reads them too"

    def _cache_like(self, node: Node) -> Node | None:
        """An input of the shape of a cache for ``node`` that it is made of by operators that no table knows."""
        todo, seen = [node], set()
        while todo:
            above = todo.pop()
            if above in seen or projection(above) is not None:
                continue
            seen.add(above)
            if self._is_outside(above) and is_floating(above) and _differ_in_length(value(above), value(node)):
                return above
            todo.extend(above.all_input_nodes)
        return None

    # The search. `through` holds the operators of several carriers (cat, cache writes) that the climb has gone through:
    # what reads a value through another one cannot be answered for.

    def _best(self, node: Node, carried: Carried, through: frozenset[Node]) -> Plan | None:
        writes = frozenset(self._aliases.writes(node))
        # A write reads its buffer too, through a view even where the attention reads the buffer itself.
        if not self._exclusive(node, carried, through | writes):
            return None
        size = carried.rotation.size
        here = self._here(node, carried)
        if writes:
            return _cheaper(self._cache(node, carried, through), here)
        if node.target in ZEROS:
            return Plan(0, ())
        if self._is_outside(node) and self._may_cross(node, carried):
            return Plan(0, (Crossing(node),))
        if node in self._capture.internal:
            return Plan(0, (Content(node),))
        above = _sources(node, size)
        several = above is not None and len(set(above)) > 1
        lifted = above and self._all(above, carried, through | {node} if several else through)
        # A fold is looked for only where no earlier one was found: each look runs the graph on indices.
        if carried.fold and (lifted is None or lifted.cost) and (point := self._fold_point(node, size)) is not None:
            return Plan(0, (point,))
        # Two kernels for what one can do are worth it only if they move less.
        return _cheaper(here, lifted) if several else _cheaper(lifted, here)

    def _all(self, nodes: list[Node], carried: Carried, through: frozenset[Node]) -> Plan | None:
        plans = [self._best(node, carried, through) for node in dict.fromkeys(nodes)]
        if any(plan is None for plan in plans):
            return None
        leaves = tuple(dict.fromkeys(leaf for plan in plans for leaf in plan.leaves))
        return Plan(sum(plan.cost for plan in plans), leaves, frozenset().union(*(plan.buffers for plan in plans)))

    def _here(self, node: Node, carried: Carried) -> Plan | None:
        """Rotating right after ``node``; not below a cache whose contents are to be rotated, however cheap that is."""
        if not is_floating(node) or (last_dim(node) or 1) % carried.rotation.size or not self._aliases.settled(node):
            return None
        plan = Plan(self._bytes(node), (After(node),))
        caches_are_rotated = carried.crosses and self._own_caches is None
        return None if caches_are_rotated and self.crosses(plan, carried) is not None else plan

    def _cache(self, node: Node, carried: Carried, through: frozenset[Node]) -> Plan | None:
        """Rotating a buffer by rotating all that is ever written to it."""
        size = carried.rotation.size
        members = self._buffers(node, size)
        writes = [write for member in members for write in self._aliases.writes(member)]
        through = through | frozenset(writes)
        written: list[Node] = []
        for write in dict.fromkeys(writes):
            sources = _written(write, size)
            if sources is None:
                return None
            written.extend(source for source in sources if source not in members)
        leaves: list[Leaf] = []
        read: set[Node] = set()  # views that an attention reads transposed, which are beyond its sink
        for member in members:
            if any((member, i) in self.sinks for above in member.all_input_nodes for i in positions(member, above)):
                read.add(member)
            if member in read or member not in writes and not read.isdisjoint(member.all_input_nodes):
                read.add(member)
                continue
            if not self._exclusive(member, carried, through):
                return None
            if member in writes or any(above in members for above in carriers(member, size) or ()):
                continue
            if member in self._capture.internal:
                leaves.append(Content(member))
            elif self._is_outside(member) and self._may_cross(member, carried):
                leaves.append(Crossing(member))
            elif member.target not in ZEROS:
                return None
        plan = self._all(written, carried, through)
        return plan and Plan(plan.cost, (*leaves, *plan.leaves), plan.buffers | frozenset(members))

    def _buffers(self, node: Node, size: int) -> dict[Node, None]:
        """The nodes of a buffer, and of those that are made of it and written back to it (a window that rolls)."""
        members = dict.fromkeys(self._aliases.members(node))
        todo = list(self._aliases.writes(node))
        while todo:
            for source in _written(todo.pop(), size) or []:
                writes, nodes = self._aliases.writes(source), self._aliases.members(source)
                if source not in members and writes and any(members.keys() & (carriers(n, size) or ()) for n in nodes):
                    members |= dict.fromkeys(nodes)
                    todo.extend(writes)
        return members

    def _exclusive(self, node: Node, carried: Carried, through: frozenset[Node]) -> bool:
        """Whether all that reads ``node`` ends in sinks which want the same."""
        return all(self._agrees(user, node, carried, through) for user in users(node))

    def _agrees(self, user: Node, node: Node, carried: Carried, through: frozenset[Node]) -> bool:
        taken = positions(user, node)
        if any((user, i) in self.sinks for i in taken):
            return all(self.sinks.get((user, i)) == carried for i in taken) and node not in user.kwargs.values()
        if user.op == "output":
            return node in self._capture.internal_outputs or self._may_cross(node, carried)
        if user.target is aten.copy.default and user.args[1] is not node:
            return True  # a functional copy takes nothing but the shape of what it stands for
        sources = _sources(user, carried.rotation.size)
        if sources is None or node not in sources:
            return False
        if user not in through and (others := [source for source in sources if source is not node]):
            # Beside what the attention reads: a cache that is filled here, and read by later calls.
            members = self._aliases.members(user)
            through = through | {user, *self._aliases.writes(user)}
            if not all(self._is_blank(other, carried) for other in others) or not all(
                self._exclusive(other, carried, through) for other in {*others, *members} - {user}
            ):
                return False
        return self._exclusive(user, carried, through)

    def _is_blank(self, node: Node, carried: Carried) -> bool:
        """Whether what a cache holds before a write is rotated without doing anything for it: zeros, or the outside's."""
        while (above := carriers(node, carried.rotation.size)) and len(above) == 1:
            [node] = above
        return node.target in ZEROS or self._is_outside(node) and self._may_cross(node, carried)

    def _may_cross(self, node: Node, carried: Carried) -> bool:
        return carried.crosses and (self._own_caches is None or node in self._own_caches)

    def _is_outside(self, node: Node) -> bool:
        """Whether a node is a tensor that code outside the graph holds too: an input, or a buffer that the graph writes."""
        if node.op != "placeholder" or node in self._capture.internal or not isinstance(value(node), torch.Tensor):
            return False
        return node not in self._capture.values or bool(self._aliases.writes(node))

    def _may_be_a_cache(self, node: Node) -> bool:
        """Whether a node is a buffer that this graph only reads, and another one may fill with rotated contents."""
        if self._own_caches is not None or node in self._capture.internal or self._is_outside(node):
            return False
        tensor = self._capture.values.get(node) if self._capture.sources else None
        return tensor is not None and not isinstance(tensor, torch.nn.Parameter)

    def _fold_point(self, node: Node, size: int) -> FoldPoint | None:
        # Aliases are part of the answer: a weight or a chain that is written to does not fold.
        key = (node, size)
        if key not in self._fold_points:
            self._fold_points[key] = fold_point(node, size, unwritten=lambda n: not self._aliases.writes(n))
        point = self._fold_points[key]
        return point if point is not None and self._foldable(point) else None

    def _buffers_agree(self, plan: Plan, rotated: set[Node]) -> bool:
        """Whether every buffer of a functional graph begins and ends a run alike: both rotated or neither."""
        begin = {leaf.buffer for leaf in plan.leaves if isinstance(leaf, Content)}
        end = {buffer for node, buffer in self._capture.internal_outputs.items() if node in rotated}
        return end == begin & set(self._capture.internal_outputs.values())

    def _reached(self, plan: Plan, carried: Carried) -> tuple[set[Node], list[tuple[Node, Position]]]:
        """The values that the plan's leaves rotate, and the sinks among their readers."""
        todo = [*plan.buffers, *(leaf.buffer if isinstance(leaf, Content) else leaf.node for leaf in plan.leaves)]
        seen: set[Node] = set()
        reached = []
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            for user in users(node):
                here = [(user, i) for i in positions(user, node) if (user, i) in self.sinks]
                reached.extend(here)
                if not here and node in (_sources(user, carried.rotation.size) or ()):
                    todo.append(user)
        return seen, reached

    @staticmethod
    def _bytes(node: Node) -> int:
        v = value(node)
        total = v.element_size()
        for n in v.shape:
            total *= size_hint(n)
        return total


def _sources(node: Node, size: int) -> list[Node] | None:
    """The inputs by which a transparent operator or a cache write carries the rotation."""
    write = CACHE_WRITES.get(node.target) if node.op == "call_function" else None
    return write(node, size) if write else carriers(node, size)


def _written(write: Node, size: int) -> list[Node] | None:
    """What a cache write puts into its buffer; None if it is none that rotpass knows."""
    sources = CACHE_WRITES[write.target](write, size) if write.target in CACHE_WRITES else None
    return None if sources is None else sources[1:]


def _differ_in_length(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two shapes are equal but for one axis, and end in the same length."""
    pairs = [(size_hint(m), size_hint(n)) for m, n in zip(a.shape, b.shape)]
    return a.dim() == b.dim() and pairs[-1][0] == pairs[-1][1] and sum(m != n for m, n in pairs) <= 1


def _cheaper(preferred: Plan | None, other: Plan | None) -> Plan | None:
    if preferred is None or other is None:
        return preferred or other
    return preferred if preferred.cost <= other.cost else other
