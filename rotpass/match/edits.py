"""What a match asks the rewrite to do, as plain records. Matching makes them, rewriting carries them out."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from rotpass.match.projection import Projection
from rotpass.match.walk import Position, argument_at


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Blocks of ``size`` along the last axis, as the arguments of ``rotpass::hadamard``."""

    size: int
    table: str
    seed: int | None


@dataclasses.dataclass(frozen=True)
class After:
    """Right after ``node``, for everyone who reads it."""

    node: Node


@dataclasses.dataclass(frozen=True)
class Before:
    """Right before ``user``, for the argument at ``position`` alone."""

    user: Node
    position: Position

    @property
    def node(self) -> Node:
        """What is passed there."""
        return argument_at(self.user, self.position)


@dataclasses.dataclass(frozen=True)
class FoldPoint:
    """In a projection's weight: on its output rows (``side="out"``, bias included) or its input columns (``"in"``).

    ``starts`` are the first indices of the blocks along that axis; None means that the whole axis is blocks. ``node``
    is the value that the fold rotates (``"out"``) or takes back (``"in"``).
    """

    projection: Projection
    side: str
    starts: tuple[int, ...] | None
    node: Node

    @property
    def axis(self) -> int:
        """Axis of ``projection.source`` that is rotated."""
        return self.projection.out_axis if self.side == "out" else self.projection.in_axis

    @property
    def weights(self) -> tuple[Node, ...]:
        """What changes: the weight, and on its output side the bias too."""
        bias = self.projection.bias if self.side == "out" else None
        return (self.projection.source,) if bias is None else (self.projection.source, bias)


@dataclasses.dataclass(frozen=True)
class Content:
    """An internal buffer whose contents at the start are rotated with everything that is written to it."""

    buffer: Node


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A cache that comes from outside and is rotated already (``cache="rotated"``)."""

    node: Node


Leaf = After | Before | FoldPoint | Content | Crossing


@dataclasses.dataclass(frozen=True)
class Rotate:
    """A Hadamard at a leaf, along ``axis``; ``transpose`` takes one back."""

    at: After | Before
    rotation: Rotation
    transpose: bool = False
    axis: int = -1


@dataclasses.dataclass(frozen=True)
class Fold:
    """A Hadamard folded at a point; ``in_graph`` where the weight has to be rotated at run time."""

    at: FoldPoint
    rotation: Rotation
    in_graph: bool = False


@dataclasses.dataclass(frozen=True)
class RotateContent:
    """The initial contents of a buffer, rotated once."""

    at: Content
    rotation: Rotation


@dataclasses.dataclass(frozen=True)
class Quantize:
    """A fake quantizer at a leaf, in groups along the last axis (0: the whole axis)."""

    at: After | Before
    kind: str
    group: int


Edit = Rotate | Fold | RotateContent | Quantize
