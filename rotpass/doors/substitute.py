"""A compiled graph whose folded weights are put in place of the weights at each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rotpass import _torch, copies
from rotpass.doors.record import Record

if TYPE_CHECKING:
    from rotpass.rewrite import FoldedInput


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The weights of one module as they were at a call, in a form that is quick to compare."""

    tick: int
    pointers: list[int]
    versions: list[int]
    copies: list[copies.Copy]


class Substituted:
    """Calls ``compiled`` with the folded copies of the weights it is given.

    One graph serves all modules that Dynamo finds it good for, so the weights of each call decide. While they are
    unchanged since this module's call before, a call costs a comparison of addresses and one of versions.

    Args:
        compiled: takes the graph's inputs, and the copies of new placeholders after them.
        folds: which input becomes which.
        inputs: how many inputs the graph has without new placeholders.
        marker: position of a weight by which to tell modules that share the graph apart, if there is one.
        record: what the report says of the graph.
        owner: the backend, whose report must live as long as the graph.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        folds: Sequence[FoldedInput],
        inputs: int,
        marker: int | None,
        record: Record,
        owner: Any,
    ) -> None:
        self.compiled = compiled
        self.marker = marker
        self.record = record
        self.owner = owner
        self.targets = [fold.target for fold in folds]
        self.sources = [fold.source for fold in folds]
        self.folds = [fold.folds for fold in folds]
        self.columns = [copies.column(fold.folds) for fold in folds]
        self.added = 1 + max([inputs - 1, *self.targets]) - inputs
        self._seen: dict[int, _Seen] = {}  # by id of the first weight, of the present tick

    def __call__(self, *args: Any) -> Any:
        """Runs the graph."""
        if not self.sources:
            if self.marker is not None:
                self.record.serve(args[self.marker])
            return self.compiled(*args)
        inputs = list(args)
        inputs.extend([None] * self.added)
        for target, tensor in zip(self.targets, self._folded(args)):
            inputs[target] = tensor
        return self.compiled(*inputs)

    def _folded(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        if torch.is_grad_enabled():
            self._check_gradients(args)
        seen = self._seen.get(id(args[self.sources[0]]))
        if seen is not None and seen.tick == copies.tick() and self._same(seen, args):
            tensors = [copy.tensor for copy in seen.copies]
            if all(tensor is not None for tensor in tensors):
                return tensors
        return self._look_up(args)

    def _same(self, seen: _Seen, args: tuple[Any, ...]) -> bool:
        # No shapes: Dynamo's guards are on them, and it calls another graph when they change.
        try:
            return [args[i].data_ptr() for i in self.sources] == seen.pointers and [
                args[i]._version for i in self.sources
            ] == seen.versions
        except RuntimeError:  # inference tensors have no version, fake ones no address
            return False

    def _look_up(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        tick = copies.tick()
        sources = [args[i] for i in self.sources]
        if any(map(_torch.is_fake, sources)):  # the compiled function is being traced: no copy to keep
            return [stand_in(source) for source in sources]
        found = [copies.lookup(s, column, folds) for s, column, folds in zip(sources, self.columns, self.folds)]
        tensors = [copy.tensor for copy in found]
        if self.marker is not None:
            self.record.serve(args[self.marker])
        if tick == copies.tick():
            if any(seen.tick != tick for seen in list(self._seen.values())):  # list(): other threads add to it
                self._seen = {}
            pointers, versions = [copy.pointer for copy in found], [copy.version for copy in found]
            self._seen[id(sources[0])] = _Seen(tick, pointers, versions, found)
        return tensors

    def _check_gradients(self, args: tuple[Any, ...]) -> None:
        # Dynamo guards on grad mode, and from 2.12 or 2.13 on on a parameter's requires_grad; a guard filter can drop
        # both. The gradient would be lost without a word (as it is without rotpass).
        for i in self.sources:
            if args[i].requires_grad:
                raise RuntimeError(
                    "rotpass: this graph was compiled without gradients, and a weight that is folded in it needs them "
                    "now, of which Dynamo took no notice; call torch.compiler.reset() first"
                )


def stand_in(source: torch.Tensor) -> torch.Tensor:
    """A tensor that looks like the folded copy of ``source``, for tracing."""
    return torch.empty_like(source, requires_grad=False)
