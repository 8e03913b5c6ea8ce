"""The torch.compile door: ``torch.compile(model, backend=rotpass.backend(...))`` or ``backend="rotpass"``."""

from __future__ import annotations

import logging
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rotpass import _torch, copies, plan
from rotpass.capture import Capture, from_dynamo
from rotpass.doors import options as door_options
from rotpass.doors.record import Record, Records
from rotpass.doors.substitute import Substituted
from rotpass.match.sites import Door
from rotpass.recipe import Recipe, as_recipe
from rotpass.report import Report
from rotpass.rewrite import Rotated, rotate

log = logging.getLogger(__name__)


class Backend:
    """A torch.compile backend that rotates the graphs it is given and hands them to another one.

    Made by :func:`backend` only: equal arguments give the same object, so that a second one causes no recompilation.

    Attributes:
        recipe: what to rotate.
        inner: name of the backend that compiles the rotated graph, or the backend itself.
        strict: whether a refused site raises.
        options: Inductor's, for the graphs of this backend only.
    """

    compiler_name = __name__ = "rotpass"  # Dynamo's logs, and what it looks up to know a registered backend

    def __init__(self, recipe: Recipe, inner: str | Callable[..., Any], strict: bool, options: dict[str, Any]) -> None:
        self.recipe = recipe
        self.inner = inner
        self.strict = strict
        self.options = options
        self._records = Records()
        self._used_cudagraphs = False

    @property
    def report(self) -> Report:
        """The sites of all graphs compiled since this backend was made or :meth:`clear` was called.

        Recompiles of the same code for the same module count once. A graph that Dynamo reuses for further modules says
        so.
        """
        return self._records.report()

    def clear(self) -> None:
        """Empties :attr:`report`; compiled graphs and folded copies stay."""
        self._records.clear()

    def refresh(self) -> None:
        """Recomputes all folded copies of the process from their weights.

        Needed after writes that PyTorch itself cannot see: through ``.data``, or to inference tensors.
        """
        copies.refresh()

    def reset(self) -> None:
        """Called by ``torch._dynamo.reset()``."""
        if self._used_cudagraphs:
            _torch.reset_cudagraphs()

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compiles one graph, as torch.compile calls a backend.

        Args:
            gm: Dynamo's graph, or any fx graph whose placeholders are ``example_inputs`` in order.
            mode, options: torch.compile's, for Inductor.
        """
        door_options.check(options or {})
        patches = _torch.inductor_patches(mode, {**self.options, **(options or {})})
        self._used_cudagraphs |= bool(patches.get("triton.cudagraphs"))
        if self.recipe.asks_for_anything or self.recipe.fake_quant is not None:
            captured = self._capture(gm, example_inputs)
            if captured is not None:
                return self._rotate(gm, captured, example_inputs, patches)
        return self._compile(gm, example_inputs, patches)

    def _capture(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Capture | None:
        """The graph as ATen, or None where it cannot be had and the user can do without."""
        try:
            return from_dynamo(gm, list(example_inputs))
        except Exception as error:
            # Some graphs run, but cannot be traced again. Un-rotated they are still right, unless a cache is shared
            # with graphs that are rotated.
            if self.strict or (self.recipe.cache == "rotated" and any(map(_could_be_cached, example_inputs))):
                raise
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            note = f"a graph was left as it is, since it cannot be traced to ATen: {why}"
            warnings.warn(f"rotpass: {note}", stacklevel=2)
            log.debug("capture failed", exc_info=True)
            self._records.add(Record(_torch.current_frame(), {}, [], [note]))
            return None

    def _rotate(
        self, gm: GraphModule, captured: Capture, example_inputs: Sequence[Any], patches: dict[str, Any]
    ) -> Callable[..., Any]:
        plan.look_up(captured)
        trains = _trains(captured)
        weights = {captured.names.get(node, node.name): id(tensor) for node, tensor in captured.values.items()}
        # By their first weight the modules that share the graph are told apart.
        placeholders = captured.gm.graph.find_nodes(op="placeholder")
        plain = [_torch.is_plain(captured.values.get(node)) for node in placeholders]
        marker = plain.index(True) if True in plain else None
        with _torch.no_saved_tensor_hooks():
            rotated = rotate(captured, self.recipe, Door(extra_inputs=True, trains=trains), strict=self.strict)
        assert not rotated.contents, "no buffer is internal to a graph of torch.compile"
        record = Record(_torch.current_frame(), weights, rotated.sites, _notes(rotated, trains))
        _torch.trace_artifact("rotpass_report", lambda: str(Report(rotated.sites, record.notes)))
        if not _changed(rotated):
            compiled = self._compile(gm, example_inputs, patches)  # the user's own graph, as if we had not been there
        else:
            log.debug("%s", LazyString(lambda: rotated.gm.print_readable(print_output=False)))
            if self.recipe.cache == "rotated":
                _torch.fail_at_recompile_limit()
            compiled = self._compile_rotated(rotated, example_inputs, patches)
            compiled = Substituted(compiled, rotated.folds, len(example_inputs), marker, record, owner=self)
        self._records.add(record)
        return compiled

    def _compile_rotated(
        self, rotated: Rotated, example_inputs: Sequence[Any], patches: dict[str, Any]
    ) -> Callable[..., Any]:
        inputs, placeholders = list(example_inputs), rotated.gm.graph.find_nodes(op="placeholder")
        inputs.extend([None] * (len(placeholders) - len(inputs)))
        pairs = []
        for fold in rotated.folds:
            source = example_inputs[fold.source]
            inputs[fold.target] = copies.get(source, fold.folds)
            pairs.append((source, inputs[fold.target]))
        with _torch.same_symbols(pairs):
            return self._compile(rotated.gm, inputs, patches)

    def _compile(self, gm: GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
        from rotpass.doors.inductor_pass import SLOT, inductor_pass  # imports Inductor

        theirs = patches[SLOT] if SLOT in patches else _torch.inductor_setting(SLOT)
        patches = {**patches, SLOT: inductor_pass(self.recipe, _torch.custom_passes(theirs))}
        if self.inner == "inductor":
            return _torch.compile_inductor(gm, inputs, patches)
        inner = _torch.lookup_backend(self.inner) if isinstance(self.inner, str) else self.inner
        with _torch.inductor_patch(patches):  # for an inner that ends in Inductor
            return inner(gm, inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.recipe, self.inner, self.strict, self.options)

    def __repr__(self) -> str:
        return f"rotpass.backend({self.recipe!r}, inner={self.inner!r}, strict={self.strict}, options={self.options!r})"


class LazyString:
    """Text that is only made if a log handler wants it."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text()


_lock = threading.Lock()
_interned: weakref.WeakValueDictionary[tuple[Any, ...], Backend] = weakref.WeakValueDictionary()
# An inner given by name costs nothing to keep, and its report outlives the compiled model; a callable may hold a lot.
_kept: dict[tuple[Any, ...], Backend] = {}


def backend(
    recipe: Recipe | None = None,
    *,
    inner: str | Callable[..., Any] = "inductor",
    strict: bool = False,
    options: dict[str, Any] | None = None,
    **recipe_fields: Any,
) -> Backend:
    """A backend for ``torch.compile(model, backend=...)`` that rotates what it compiles.

    Equal arguments give the same object, also after pickling, so a second call causes no recompilation and its report
    is the one that was filled.

    Args:
        recipe: what to rotate; ``recipe_fields`` change single fields, as in ``rotpass.backend(r4=False)``.
        inner: the torch.compile backend that compiles the rotated graph: a name, or a callable (compared by identity).
        strict: raise if a site of a kind that the recipe asks for is refused.
        options: Inductor's config, for these graphs only, as ``torch.compile``'s ``options``.

    Raises:
        ValueError: there is no backend ``inner`` or no such option.
        TypeError: an argument is of the wrong type.

    Example::

        >>> backend = rotpass.backend(r4=False)
        >>> compiled = torch.compile(model, backend=backend)
        >>> compiled(x)
        >>> print(backend.report)
    """
    recipe = as_recipe(recipe, recipe_fields, "; beside them inner, strict and options, which takes what is Inductor's")
    _check_inner(inner)
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False; got {strict!r}")
    if not isinstance(options, (dict, type(None))):
        raise TypeError(f"options must be a dict of Inductor's options; got {options!r}")
    options = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    key = (recipe, _identity(inner), strict, door_options.frozen(options))
    with _lock:
        made = _interned.get(key)
        if made is None:
            door_options.check(options)
            made = _interned[key] = Backend(recipe, inner, strict, options)
            if isinstance(inner, str):
                _kept[key] = made
        return made


def from_options(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """What ``torch.compile(model, backend="rotpass", options={...})`` calls.

    Options are rotpass's own first (recipe fields, ``recipe``, ``strict``, ``inner``); all others are Inductor's.
    ``rotpass.backend(..., options=...)`` with the same values is the object that holds the report.

    Raises:
        ValueError: an option is neither.
    """
    own, theirs = door_options.split(options or {})
    return backend(own.pop("recipe", None), options=theirs, **own)(gm, example_inputs, mode=mode)


def _restore(recipe: Recipe, inner: str | Callable[..., Any], strict: bool, options: dict[str, Any]) -> Backend:
    return backend(recipe, inner=inner, strict=strict, options=options)


def _check_inner(inner: Any) -> None:
    if inner == "rotpass" or isinstance(inner, Backend) or inner is from_options:
        raise ValueError("inner must be another backend than rotpass itself")
    if isinstance(inner, str):
        if inner != "inductor" and _torch.lookup_backend(inner) is None:
            names = ", ".join(name for name in _torch.backend_names() if name != "rotpass")
            raise ValueError(f"torch.compile has no backend {inner!r} for inner; it has {names}")
    elif not callable(inner):
        raise TypeError(f"inner must be the name of a torch.compile backend or a callable; got {inner!r}")


def _identity(inner: str | Callable[..., Any]) -> Any:
    if isinstance(inner, types.MethodType):  # a new object at every access
        return id(inner.__self__), inner.__func__
    return inner if isinstance(inner, str) else id(inner)


def _could_be_cached(value: Any) -> bool:
    """Whether an input may hold keys or values, or what they are made of: activations, also quantized ones."""
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return False
    return value.is_floating_point() or value.dtype.itemsize == 1


def _trains(captured: Capture) -> frozenset[Node]:
    """The weights that need gradients in some part of the graph. Dynamo guards on grad mode and ``requires_grad``."""
    switches = captured.gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    if not torch.is_grad_enabled() and not any(node.args[0] for node in switches):
        return frozenset()
    return frozenset(node for node, tensor in captured.values.items() if tensor.requires_grad)


def _changed(rotated: Rotated) -> bool:
    """Whether the graph is another one than the user's."""
    if rotated.folds:
        return True
    targets = {node.target for node in rotated.gm.graph.nodes if node.op == "call_function"}
    return any(isinstance(target, torch._ops.OpOverload) and target.namespace == "rotpass" for target in targets)


def _notes(rotated: Rotated, trains: frozenset[Node]) -> list[str]:
    aten = torch.ops.aten
    for node in rotated.gm.graph.find_nodes(op="call_function", target=torch.ops.rotpass.hadamard.default):
        source = node.args[0]
        while source.target in (aten.transpose.int, aten.slice.Tensor):
            source = source.args[0]
        if source in trains:
            return [
                "weights that need gradients are folded in the graph at every call; for inference use torch.no_grad()"
            ]
    return []
