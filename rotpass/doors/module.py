"""The nn.Module door: a module that is itself rotated, and the question what a rotation would do."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from rotpass import _torch, plan
from rotpass.capture import Capture, from_program
from rotpass.doors import folded
from rotpass.match.edits import Fold as FoldEdit
from rotpass.match.edits import Rotate
from rotpass.match.projection import projection
from rotpass.match.sites import TRANSPOSES, Door, Match, match_sites
from rotpass.match.walk import BYSTANDERS, TRANSPARENT, users, value
from rotpass.recipe import Recipe, as_recipe
from rotpass.report import Explanation, Report, check
from rotpass.rewrite import Fold, rotate

HINT = "; arguments of the model itself go into args and kwargs"

_alone = threading.RLock()


def _one_at_a_time(door: Any) -> Any:
    """While torch.export runs, it changes what other threads would trace and compute."""

    @functools.wraps(door)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _alone:
            return door(*args, **kwargs)

    return run


@_one_at_a_time
def explain(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    recipe: Recipe | None = None,
    strict: bool = False,
    dynamic_shapes: Any = None,
    **recipe_fields: Any,
) -> Report:
    """Says what a recipe would do to a model; changes nothing.

    The model is exported with ``args`` and ``kwargs``; meta tensors will do. Parameters as for :func:`fold_`. The
    report prints one line per kind and reason, with a count and an example; its ``sites`` are all of them.
    """
    recipe = as_recipe(recipe, recipe_fields, HINT)
    model = _uncompiled(model)
    _, capture = _capture(model, args, kwargs, dynamic_shapes)
    planned = plan.read(capture)
    plan.look_up(capture)
    rotated = rotate(capture, recipe, Door(extra_inputs=True), strict=strict)
    return Explanation(plan.unmatched(capture, recipe, planned, rotated.sites))


@_one_at_a_time
def fold_(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    recipe: Recipe | None = None,
    strict: bool = False,
    dynamic_shapes: Any = None,
    **recipe_fields: Any,
) -> Report:
    """Makes the module itself a rotated one that computes the same function wherever it goes.

    V is folded into its projections' weights on both sides, R4 into the weight of each down projection with its online
    half as a forward pre-hook there; eager forward, ``generate()``, a quantizer, torch.compile and export all see the
    same function. What the example inputs do not reach (a branch not taken) is not found. R3 has no weight to go to: the
    other doors, which recognise what is folded, add it. The persistent buffer ``rotpass_plan`` goes along in the state
    dict. The cache that the module makes for itself holds rotated values.

    Args:
        model: changed in place.
        args, kwargs: example inputs, with which the model is exported to find its sites.
        recipe: what to rotate; single fields can be given as keywords.
        strict: raise if a V or R4 site is refused.
        dynamic_shapes: as in ``torch.export.export``.

    Returns:
        The V and R4 sites.

    Raises:
        ValueError: the model is folded already, the recipe asks for what a module cannot hold (``counter="online"``,
            ``fake_quant``), or a refused site under ``strict``. The model is as it was.
    """
    recipe = dataclasses.replace(as_recipe(recipe, recipe_fields, HINT), r3=False)
    if recipe.counter == "online" or recipe.fake_quant is not None:
        raise ValueError("fold_ puts counter-rotations into weights: give it no counter='online' and no fake_quant")
    model = _uncompiled(model)
    if plan.is_folded(model):
        raise ValueError("the model or a part of it is folded already: call rotpass.unfold_ first")
    ep, capture = _capture(model, args, kwargs, dynamic_shapes)
    matches = match_sites(capture, recipe, Door(own_caches=_own_caches(ep, capture)))
    decided = _decide(model, capture, matches.sites)
    sites = [match.site for match in decided]
    check(sites, recipe, strict=strict, holds_any=matches.holds_any)
    kept = [match for match in decided if match.site.status == "rotated"]
    made = plan.Plan(tuple(match.site for match in kept), _folds(capture, kept), _hooks(kept))
    if made.sites:
        folded.install(model, made, folded.folded(model, made.folds))
    return Report(sites)


@_one_at_a_time
def unfold_(model: nn.Module) -> nn.Module:
    """Takes :func:`fold_` back, to the precision of the weights' dtype; a folded submodule is unfolded too.

    Raises:
        ValueError: nothing is folded, or a folded weight has been quantized since. The model is as it was.
    """
    within = _uncompiled(model)
    found = [(module, made) for module in within.modules() if (made := plan.of(module))]
    if not found:
        part = plan.is_folded(within)
        raise ValueError("this is a part of a folded model: unfold the whole" if part else "the model is not folded")
    undone = []
    for module, made in found:
        folded.check_hooks(module, made)
        inverse = tuple((name, fold.inverse) for name, fold in reversed(made.folds))
        undone.append((module, made, folded.folded(module, inverse)))
    for module, made, tensors in undone:
        folded.remove(module, made, tensors)
    return model


def _uncompiled(model: Any) -> nn.Module:
    """The module that ``torch.compile(module)`` wrapped, or the module itself.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module; got {type(model).__name__}")
    return model._modules.get("_orig_mod", model)


def _to_export(model: nn.Module) -> nn.Module:
    """The model, with what it returns that is no container (a DynamicCache) shown as a dict of the tensors in it."""

    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.training = model.training
            self.model = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return _shown(self.model(*args, **kwargs))

    signature = inspect.signature(model.forward)  # dynamic_shapes go by the names in it
    own = inspect.Parameter("__self", inspect.Parameter.POSITIONAL_ONLY)
    Shown.forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    return Shown()


def _shown(result: Any) -> Any:
    def show(leaf: Any) -> Any:
        if isinstance(leaf, (Tensor, *_CONSTANTS)):
            return leaf
        if id(leaf) in seen:
            return None
        seen.add(id(leaf))
        name = type(leaf).__name__
        inside = {} if isinstance(leaf, (nn.Module, type)) else getattr(leaf, "__dict__", {})
        shown = {f"{name}.{key}": pytree.tree_map(show, value) for key, value in inside.items()}
        return {
            key: value for key, value in shown.items() if any(isinstance(v, Tensor) for v in pytree.tree_leaves(value))
        }

    seen: set[int] = set()
    return pytree.tree_map(show, result)


_CONSTANTS = (int, float, bool, str, type(None), torch.SymInt, torch.SymFloat, torch.SymBool)


def _capture(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> tuple[ExportedProgram, Capture]:
    """The model as ATen; names and paths are those of ``model``.

    Raises:
        TypeError: the example inputs are no sequence and mapping.
        RuntimeError: it cannot be exported.
    """
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, (Mapping, type(None))):
        raise TypeError(
            f"args is a tuple of example inputs and kwargs a dict; got {type(args).__name__} and {type(kwargs).__name__}"
        )
    try:
        ep = torch.export.export(
            _to_export(model), tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        )
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise RuntimeError(
            f"torch.export, by which rotpass reads a model, failed on {type(model).__name__} with these inputs: {why}"
        ) from error
    capture = from_program(ep)
    capture.root = "model"
    capture.names = {node: name.removeprefix("model.") for node, name in capture.names.items()}
    return ep, capture


# "present" alone, not in "representation".
_CACHE = re.compile("cache|(?<![a-z])(past|presents?)(?![a-z])", re.IGNORECASE)


def _own_caches(ep: ExportedProgram, capture: Capture) -> frozenset[Node]:
    """Inputs and outputs that lie in something called a cache: what they hold is the module's business."""
    inputs, outputs = _torch.leaf_paths(ep.call_spec.in_spec), _torch.leaf_paths(ep.call_spec.out_spec)
    users = [
        n
        for n, s in zip(capture.gm.graph.find_nodes(op="placeholder"), ep.graph_signature.input_specs)
        if s.kind == InputKind.USER_INPUT
    ]
    results = next(iter(capture.gm.graph.find_nodes(op="output"))).args[0]
    results = [n for n, s in zip(results, ep.graph_signature.output_specs) if s.kind == OutputKind.USER_OUTPUT]
    named = [*zip(users, inputs), *zip(results, outputs)]
    return frozenset(node for node, path in named if isinstance(node, Node) and _CACHE.search(path))


def _decide(model: nn.Module, capture: Capture, matches: list[Match]) -> list[Match]:
    """The matches, with those refused that a module cannot hold."""
    calls = [node for node in capture.gm.graph.nodes if node.op == "call_function"]
    inside: dict[str, list[Node]] = defaultdict(list)
    wheres = {match.site.where for match in matches if match.site.kind == "r4"}
    for node in calls:
        where = capture.where(node)
        for outer in (where[:i] for i, c in enumerate(where + ".") if c == "."):
            if outer in wheres:
                inside[outer].append(node)
    reasons: dict[int, str] = {}
    for i, match in enumerate(matches):
        if match.site.status == "rotated" and match.site.undone != "prefolded":
            if match.site.kind == "v" and not _all_folded(match):
                reasons[i] = "one of its halves folds into no weight; the compile and program doors put it online"
            elif match.site.kind == "r4":
                reasons[i] = _no_hook(model, capture, match, inside[match.site.where])
    _refuse_shared(model, capture, matches, reasons)
    return [
        Match(dataclasses.replace(match.site, status="refused", inserted="none", undone="none", reason=reasons[i]))
        if reasons.get(i)
        else match
        for i, match in enumerate(matches)
    ]


def _all_folded(match: Match) -> bool:
    return match.site.inserted == "folded" and all(
        isinstance(edit, FoldEdit) and not edit.in_graph for edit in match.edits
    )


def _no_hook(model: nn.Module, capture: Capture, match: Match, inside: list[Node]) -> str:
    """Why the online half of R4 cannot be a pre-hook of the module that multiplies, or ""; ``inside`` are its calls."""
    folds = [edit for edit in match.edits if isinstance(edit, FoldEdit)]
    if any(fold.in_graph for fold in folds):
        return match.site.reason or "its weight does not fold"
    source = folds[0].at.projection.source
    if folds[0].at.starts is not None:
        return "its input is joined of several, of which one is an MLP's; the compile and program doors rotate it"
    if value(source).dim() > 2:
        return "its weight is a stack of experts, with no module to hook; the compile and program doors rotate it"
    key = _torch.storage_key(capture.values[source])
    module = model.get_submodule(match.site.where)
    tensors = (*module._parameters.values(), *module._buffers.values())
    if not any(t is not None and _torch.storage_key(t) == key for t in tensors):
        return "its weight belongs to another module than the one that multiplies by it"
    if not _only_multiplies(inside, source):
        return "its module does more than multiply by the weight, so the input of the weight is not that of the module"
    return ""


def _only_multiplies(inside: list[Node], source: Node) -> bool:
    """Whether the calls of a module lead its input to projections by ``source``, and their results out, and no more."""
    products = {node for node in inside if (found := projection(node)) is not None and found.source is source}
    others = [node for node in inside if node not in products and node.target not in BYSTANDERS]
    if not all(node.target in TRANSPARENT or node.target in TRANSPOSES for node in others):
        return False
    before, after = set(products), set(products)
    for node in others:
        if all(above in after or not isinstance(value(above), Tensor) for above in node.all_input_nodes):
            after.add(node)
    for node in reversed(others):
        if set(users(node)) <= before:
            before.add(node)
    return all(node in before or node in after for node in others)


def _refuse_shared(model: nn.Module, capture: Capture, matches: list[Match], reasons: dict[int, str]) -> None:
    """A weight is folded for all that read it or for none: refuses what shares weights or values with what is refused."""
    owners: dict[int, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                owners[_torch.storage_key(tensor)].add(module)
    readers: dict[int, set[nn.Module]] = defaultdict(set)
    held: list[list[Any]] = []  # of each match, what it has in common with others
    for match in matches:
        keys: list[Any] = [] if match.plan is None else [id(match.plan)]
        for edit in (edit for edit in match.edits if isinstance(edit, FoldEdit) and not edit.in_graph):
            found = edit.at.projection
            weights = [found.source, found.bias] if edit.at.side == "out" else [found.source]
            for key in [_torch.storage_key(capture.values[w]) for w in weights if w is not None]:
                keys.append(key)
                readers[key].add(model.get_submodule(capture.where(found.node)))
        held.append(keys)
    taken = {key for key in readers if len(owners[key]) > 1 and not owners[key] <= readers[key]}
    while True:
        for i, keys in enumerate(held):
            if not reasons.get(i) and taken.intersection(keys):
                reasons[i] = "its weight or its values are shared with a place that is not rotated: untie them"
        refused = {key for i, keys in enumerate(held) if reasons.get(i) for key in keys}
        if refused <= taken:
            return
        taken |= refused


def _folds(capture: Capture, matches: list[Match]) -> tuple[tuple[str, Fold], ...]:
    """Each weight's folds by name; a weight that several sites share is folded once."""
    made: dict[tuple[str, Fold], None] = {}
    for edit in (edit for match in matches for edit in match.edits if isinstance(edit, FoldEdit)):
        found, fold = edit.at.projection, Fold.at(edit.at, edit.rotation)
        made[capture.names[found.source], fold] = None
        if edit.at.side == "out" and found.bias is not None:
            made[capture.names[found.bias], fold.bias] = None
    return tuple(made)


def _hooks(matches: list[Match]) -> tuple[tuple[str, int, str, int | None], ...]:
    edits = {match.site.where: edit.rotation for match in matches for edit in match.edits if isinstance(edit, Rotate)}
    return tuple((where, r.size, r.table, r.seed) for where, r in edits.items())
