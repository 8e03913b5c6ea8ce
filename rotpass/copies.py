"""Folded copies of weights for inference: one per (weight, folds) in the process, renewed when the weight changes.

Dynamo reuses one graph for many modules, so copies belong to weights and never to graphs. A copy lives as long as its
weight's storage. It is watched through a weak reference to that *storage*, not to the parameter: ``swap_tensors``, and
with it ``Module.to`` of quantized tensor subclasses, refuses parameters that have weak references. A storage that is
watched also cannot have its address taken by another one unnoticed, so comparing addresses is enough.

Changes that are followed: in-place updates (``_version``), new data (``.data =``, ``swap_tensors``), ``torch.optim``
steps (fused optimizers change neither) and, by :func:`refresh`, writes through ``.data`` or to inference tensors.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from rotpass import _torch

if TYPE_CHECKING:
    from rotpass.rewrite.fold import Fold


class Copy:
    """One folded copy and the state of the weight that it was computed from.

    ``tensor`` is None once the copy is released. ``pointer`` is None while the copy matches no live storage.
    """

    __slots__ = (
        "tensor", "folds", "pointer", "version", "shape", "strides", "dtype", "offset", "base", "stale", "storage",
    )  # fmt: skip

    def __init__(self, folds: tuple[Fold, ...]) -> None:
        self.folds = folds
        self.tensor: Tensor | None = None
        self.pointer: int | None = None
        self.stale = True
        self.storage: weakref.ref | None = None
        self.base = 0

    def is_of(self, source: Tensor) -> bool:
        """Whether the copy is the fold of what ``source`` holds now."""
        # A microsecond; runs for every folded weight when two modules take turns in one graph.
        return (
            self.pointer == source.data_ptr()
            and self.version == version(source)
            and not self.stale
            and self.strides == source.stride()
            and self.shape == source.shape
            and self.dtype is source.dtype
            and self.tensor is not None
        )

    def fits(self, source: Tensor) -> bool:
        """Whether the copy's storage can take a fold of ``source``."""
        return (
            self.tensor is not None
            and (self.shape, self.strides, self.dtype) == (source.shape, source.stride(), source.dtype)
            and self.tensor.device == source.device
        )


def version(source: Tensor) -> int:
    """``_version``, or -1 for an inference tensor, which has none."""
    try:
        return source._version
    except RuntimeError:
        return -1


_columns: dict[tuple[Fold, ...], dict[int, Copy]] = {}  # folds -> id(source) -> its copy
_orphans: list[tuple[dict[int, Copy], int, Copy]] = []  # copies whose source's storage died
_lock = threading.RLock()  # for computing and inserting; never taken in callbacks, which run at any point of any thread
_ticks = itertools.count(1)
_tick = 0
_hooked = False


def tick() -> int:
    """A number that is another one after any copy became stale or was released: no change, nothing to check."""
    return _tick


def _advance() -> None:
    global _tick
    _tick = next(_ticks)  # next() is atomic, so that no two threads can write the same number


def column(folds: tuple[Fold, ...]) -> dict[int, Copy]:
    """The copies by these folds, by id of their source; for callers that look up many times."""
    with _lock:
        return _columns.setdefault(folds, {})


def get(source: Tensor, folds: tuple[Fold, ...]) -> Tensor:
    """The folded copy of a weight, up to date; the same storage as long as shape, strides, dtype and device stay.

    Args:
        source: a parameter or buffer; its own values are never changed.
        folds: applied in order.

    Raises:
        RuntimeError: whatever the folds raise, out of memory too; the copy then stays stale and the next call retries.
    """
    return lookup(source, column(folds), folds).tensor


def lookup(source: Tensor, copies: dict[int, Copy], folds: tuple[Fold, ...]) -> Copy:
    """:func:`get` for a caller that holds the :func:`column`; the copy's ``tensor`` is not None."""
    copy = copies.get(id(source))
    if copy is not None and copy.is_of(source):
        return copy
    with _lock:
        _install_hooks()
        copy = copies.get(id(source))
        if copy is not None and copy.is_of(source):
            return copy
        if copy is None or not copy.fits(source):
            if copies.pop(id(source), None) is not None:
                copy.tensor = None  # whoever else holds the record looks up again
            release_orphans()  # memory first: another weight takes a copy, so the dead ones' will hardly be asked for
            copy = Copy(folds)
        _recompute(copy, source)
        copies[id(source)] = copy
        _watch(copy, copies, source)
        _advance()
        return copy


def refresh() -> None:
    """Recomputes every live copy now, into its storage: for changes that leave no trace, as writes through ``.data``.

    Raises:
        RuntimeError: as :func:`get`; copies not reached are recomputed when they are next used.
    """
    with _lock:
        release_orphans()
        for _, _, copy in live():
            copy.stale = True
        _advance()
        for _, _, copy in live():
            source = _source_of(copy)
            if source is not None:
                _compute(source, copy.folds, out=copy.tensor)
                copy.stale = False
        _advance()


def live() -> Iterator[tuple[dict[int, Copy], int, Copy]]:
    """Every copy there is, with its column and its source's id."""
    for copies in list(_columns.values()):
        for key, copy in list(copies.items()):
            yield copies, key, copy


def release_orphans() -> None:
    """Drops the copies of weights that died. Takes no lock: it runs in garbage collection too.

    They are not dropped at once, because a storage also dies when its parameter is given new data (``.data =``,
    ``swap_tensors``): that parameter's copy then keeps its address, which CUDA graphs have recorded.
    """
    while _orphans:
        try:
            copies, key, copy = _orphans.pop()
        except IndexError:  # another thread took the last one
            return
        if copy.pointer is None:
            if copies.get(key) is copy:
                copies.pop(key, None)
            copy.tensor = None
            _advance()


def _compute(source: Tensor, folds: tuple[Fold, ...], out: Tensor | None = None) -> Tensor:
    with _torch.plain_state(source.device):
        value = source.detach()
        for fold in folds:
            value = fold.apply(value)
        if out is None:
            # The layout of a copy must not depend on how a fold computes: the compiler was shown empty_like's.
            out = torch.empty_like(source.detach())
        return out.copy_(value)


def _recompute(copy: Copy, source: Tensor) -> None:
    copy.stale = True  # stays so if what follows fails
    before = source.data_ptr(), version(source)
    copy.tensor = _compute(source, copy.folds, out=copy.tensor)
    # Read before computing: a change meanwhile, from another thread, then shows at the next check.
    copy.pointer, copy.version = before
    copy.shape, copy.strides, copy.dtype = source.shape, source.stride(), source.dtype
    copy.offset = source.storage_offset()
    copy.stale = False


def _watch(copy: Copy, copies: dict[int, Copy], source: Tensor) -> None:
    storage, key = source.untyped_storage(), id(source)

    def died(ref: weakref.ref) -> None:
        if copy.storage is ref:
            copy.pointer = None
            copy.storage = None  # ends the cycle copy -> ref -> died -> copy
            _orphans.append((copies, key, copy))
            _advance()

    if copy.storage is None or copy.storage() is not storage:
        copy.storage = weakref.ref(storage, died)
    copy.base = storage.data_ptr()


def _source_of(copy: Copy) -> Tensor | None:
    """The weight's values, found through its storage; None if that is gone or was resized."""
    storage = copy.storage() if copy.storage is not None else None
    if storage is None or storage.data_ptr() != copy.base:
        return None
    with _torch.plain_state(storage.device):
        empty = torch.empty(0, dtype=copy.dtype, device=storage.device)
        return empty.set_(storage, copy.offset, copy.shape, copy.strides)


def _install_hooks() -> None:
    global _hooked
    if not _hooked:
        register_optimizer_step_post_hook(_after_optimizer_step)
        gc.callbacks.append(_after_collection)
        _hooked = True


def _after_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2 and _orphans:
        release_orphans()


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    # Only marks: a training loop may step many times between two evaluations. By storage, since an optimizer may hold
    # other tensors over the same memory than the model (flattened parameters). A compiled step counts its updates in
    # _version, so there is nothing to trace here.
    if torch.compiler.is_compiling() or not any(_columns.values()):
        return
    stepped = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            stepped.add(id(parameter))
            if _torch.is_plain(parameter):
                stepped.add(parameter.untyped_storage().data_ptr())
    changed = False
    for _, key, copy in live():
        if key in stepped or copy.base in stepped:
            copy.stale = changed = True
    if changed:
        _advance()
