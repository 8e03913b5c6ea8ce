"""The nn.Module door: a module that is itself rotated, and the question what a rotation would do."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from rotpass import _torch, plan
from rotpass.capture import Capture, from_program
from rotpass.match.edits import Fold as FoldEdit
from rotpass.match.edits import Rotate
from rotpass.match.projection import projection
from rotpass.match.sites import Door, Match, match_sites
from rotpass.match.walk import BYSTANDERS, TRANSPARENT
from rotpass.recipe import Recipe, as_recipe
from rotpass.report import Report, check
from rotpass.rewrite import Fold, rotate


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

    The model is exported with ``args`` and ``kwargs``; meta tensors will do. Parameters as for :func:`fold_`.
    """
    recipe = as_recipe(recipe, recipe_fields)
    capture = from_program(_export(model, args, kwargs, dynamic_shapes))
    plan.read(capture)
    return Report(rotate(capture, recipe, Door(extra_inputs=True), strict=strict).sites)


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
    same function. R3 has no weight to go to: the other doors, which recognise what is folded, add it. The persistent
    buffer ``rotpass_plan`` goes along in the state dict. The cache that the module makes for itself holds rotated values.

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
    recipe = dataclasses.replace(as_recipe(recipe, recipe_fields), r3=False)
    if recipe.counter == "online" or recipe.fake_quant is not None:
        raise ValueError("fold_ puts counter-rotations into weights: give it no counter='online' and no fake_quant")
    if any(plan.of(module) for module in model.modules()):
        raise ValueError("the model is folded already: call rotpass.unfold_ first")
    ep = _export(model, args, kwargs, dynamic_shapes)
    capture = from_program(ep)
    matches = match_sites(capture, recipe, Door(own_caches=_own_caches(ep, capture)))
    decided = _decide(capture, matches.sites)
    sites = [match.site for match in decided]
    check(sites, recipe, strict=strict, holds_any=matches.holds_any)
    kept = [match for match in decided if match.site.status == "rotated"]
    made = plan.Plan(tuple(match.site for match in kept), _folds(capture, kept), _hooks(kept))
    if made.sites:
        _install(model, made, _folded(model, made.folds))
    return Report(sites)


def unfold_(model: nn.Module) -> nn.Module:
    """Takes :func:`fold_` back, to the precision of the weights' dtype; a folded submodule is unfolded too.

    Raises:
        ValueError: nothing is folded, or a folded weight has been quantized since. The model is as it was.
    """
    found = [(module, made) for module in model.modules() if (made := plan.of(module))]
    if not found:
        raise ValueError("the model is not folded")
    undone = []
    for module, made in found:
        inverse = tuple((name, fold.inverse) for name, fold in reversed(made.folds))
        undone.append((module, made, _folded(module, inverse)))
    for module, made, tensors in undone:
        _write(tensors)
        _remove(module, made)
    return model


class OnlineRotation:
    """Forward pre-hook: the online half of R4."""

    def __init__(self, size: int, table: str, seed: int | None) -> None:
        self.size, self.table, self.seed = size, table, seed

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._rotate(args[0]), *args[1:]), kwargs
        name, x = next(iter(kwargs.items()))
        return args, {**kwargs, name: self._rotate(x)}

    def _rotate(self, x: Tensor) -> Tensor:
        return torch.ops.rotpass.hadamard(x, self.size, False, self.table, self.seed)


class Watched:
    """A module's ``forward`` under another identity.

    Dynamo guards on that but not on hooks or on weights, so that code compiled before a fold is not run after it.
    """

    def __init__(self, forward: Any) -> None:
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


class _Member:
    """Has a folded module known again after it was copied or unpickled: the copy's member registers the copy."""

    def __init__(self, module: nn.Module) -> None:
        self.__setstate__({"module": module})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        plan.register(self.module)


def _export(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module; got {type(model).__name__}")
    return torch.export.export(model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False)


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
    return frozenset(
        node for node, path in named if isinstance(node, Node) and re.search("cache|past|present", path, re.IGNORECASE)
    )


def _decide(capture: Capture, matches: list[Match]) -> list[Match]:
    """The matches, with those refused that a module cannot hold."""
    calls: dict[str, list[Node]] = defaultdict(list)
    for node in capture.gm.graph.nodes:
        if node.op == "call_function":
            calls[capture.where(node)].append(node)
    unfolded = {match.plan for match in matches if match.site.kind == "v" and not _all_folded(match)}
    decided = []
    for match in matches:
        reason = ""
        if match.site.status == "rotated" and match.site.undone != "prefolded":
            if match.site.kind == "v" and match.plan in unfolded:
                reason = "one of its halves folds into no weight; the compile and program doors put it online"
            elif match.site.kind == "r4":
                reason = _no_hook(capture, match, calls[match.site.where])
        refused = dataclasses.replace(match.site, status="refused", inserted="none", undone="none", reason=reason)
        decided.append(Match(refused) if reason else match)
    return decided


def _all_folded(match: Match) -> bool:
    return match.site.inserted == "folded" and all(
        isinstance(edit, FoldEdit) and not edit.in_graph for edit in match.edits
    )


def _no_hook(capture: Capture, match: Match, inside: list[Node]) -> str:
    """Why the online half of R4 cannot be a pre-hook of the module that holds the weight, or ""; ``inside`` are its calls."""
    folds = [edit for edit in match.edits if isinstance(edit, FoldEdit)]
    if any(fold.in_graph for fold in folds):
        return match.site.reason or "its weight does not fold"
    down = folds[0].at.projection
    if capture.names[down.source].rpartition(".")[0] != match.site.where:
        return "its weight belongs to another module than the one that multiplies by it"
    if not all(projection(n) is not None or n.target in TRANSPARENT or n.target in BYSTANDERS for n in inside):
        return "its module does more than multiply by the weight, so the input of the weight is not that of the module"
    return ""


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


def _folded(model: nn.Module, folds: tuple[tuple[str, Fold], ...]) -> list[tuple[Tensor, Tensor]]:
    """(weight, what it is to hold); all of it is made before the first weight changes, so that a failure leaves the model."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for name, fold in folds:
        tensor = _named(model, name)
        if not _torch.is_plain(tensor):
            raise ValueError(f"the weight {name} has become a {type(tensor).__name__}: unfold before quantizing")
        made[id(tensor)] = tensor, fold.apply(made.get(id(tensor), (tensor, tensor))[1])
    return list(made.values())


def _named(model: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    return getattr(model.get_submodule(owner), last)


def _write(tensors: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, new in tensors:
            tensor.copy_(new)


def _touched(model: nn.Module, made: plan.Plan) -> list[nn.Module]:
    names = [name.rpartition(".")[0] for name, _ in made.folds] + [where for where, *_ in made.hooks]
    return [model.get_submodule(name) for name in dict.fromkeys(names)]


def _install(model: nn.Module, made: plan.Plan, tensors: list[tuple[Tensor, Tensor]]) -> None:
    model.register_buffer(plan.BUFFER, made.to_tensor())
    for where, size, table, seed in made.hooks:
        model.get_submodule(where).register_forward_pre_hook(OnlineRotation(size, table, seed), with_kwargs=True)
    for module in _touched(model, made):
        module.forward = Watched(module.forward)
    model._rotpass_member = _Member(model)
    _write(tensors)


def _remove(model: nn.Module, made: plan.Plan) -> None:
    for where, *_ in made.hooks:
        hooks = model.get_submodule(where)._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, OnlineRotation)]:
            del hooks[key]
            model.get_submodule(where)._forward_pre_hooks_with_kwargs.pop(key, None)
    for module in _touched(model, made):
        original = module.__dict__.pop("forward").__wrapped__
        if getattr(original, "__func__", None) is not type(module).forward:
            module.forward = original  # it was an attribute of the module before
    del model._buffers[plan.BUFFER], model._rotpass_member
    model._non_persistent_buffers_set.discard(plan.BUFFER)
    plan.forget(model)
