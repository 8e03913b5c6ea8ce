"""The ExportedProgram door: a pass from program to program."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch.export import ExportedProgram

from rotpass import _torch, plan
from rotpass.capture import from_program
from rotpass.match.sites import Door
from rotpass.recipe import Recipe, as_recipe
from rotpass.report import Report
from rotpass.rewrite import Rotated, rotate


class RotationPass:
    """Rotates an ExportedProgram.

    Counter-rotations go into new weights under the same names; the contents of a KV cache that is a buffer of the program
    are rotated with what is written to it. The program given is left as it was, and the result is an ExportedProgram as
    good as any: it validates, saves, loads, decomposes and exports again.

    Args:
        recipe: what to rotate; single fields can be given as keywords.
        strict: raise if a site of a kind that the recipe asks for is refused.

    Attributes:
        report: the sites of the program rotated last.

    Raises:
        TypeError: no ExportedProgram was given, or an unknown field.
        ValueError: a refused site under ``strict``, or a cache that crosses the boundary and cannot be rotated under
            ``cache="rotated"``.
        RuntimeError: the program's weights were folded by ``fold_`` and their online half is missing.
    """

    def __init__(self, recipe: Recipe | None = None, *, strict: bool = False, **recipe_fields: Any) -> None:
        self.recipe = as_recipe(recipe, recipe_fields)
        self.strict = strict
        self.report = Report()

    def __call__(self, ep: ExportedProgram) -> ExportedProgram:
        if not isinstance(ep, ExportedProgram):
            raise TypeError(f"RotationPass takes an ExportedProgram; got {type(ep).__name__}")
        capture = from_program(ep)
        planned = plan.read(capture)
        rotated = rotate(capture, self.recipe, Door(), strict=self.strict)
        self.report = Report(plan.unmatched(capture, self.recipe, planned, rotated.sites))
        return _assemble(ep, rotated)


def _assemble(ep: ExportedProgram, rotated: Rotated) -> ExportedProgram:
    names = [spec.target for spec in ep.graph_signature.input_specs]
    state_dict, constants = dict(ep.state_dict), dict(ep.constants)
    homes = plan.names_by_storage(state_dict, constants)
    for folded in [*rotated.folds, *rotated.contents]:
        old = _tensor(ep, names[folded.source])
        new = old
        for fold in folded.folds:
            new = fold.apply(new)
        if isinstance(old, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
        # Aliases of one weight stay one weight: every name that had the old tensor gets the new one.
        for home, name in homes[_torch.storage_key(old)]:
            if _torch.same_view(home[name], old):
                home[name] = new
    signature = copy.deepcopy(ep.graph_signature)
    # An output that is rotated with its other readers (a cache, with cache="rotated") is another node now.
    [output] = rotated.gm.graph.find_nodes(op="output")
    for spec, node in zip(signature.output_specs, output.args[0]):
        if isinstance(node, torch.fx.Node):
            spec.arg = dataclasses.replace(spec.arg, name=node.name)
    plan.write(
        rotated.gm.graph.find_nodes(op="placeholder"),
        signature,
        state_dict,
        rotated.sites,
        [(names[folded.source], fold) for folded in rotated.folds for fold in folded.folds],
    )
    rotated.gm.recompile()
    result = ExportedProgram(
        root=rotated.gm,
        graph=rotated.gm.graph,
        graph_signature=signature,
        state_dict=state_dict,
        range_constraints=copy.deepcopy(ep.range_constraints),
        module_call_graph=list(map(copy.copy, ep.module_call_graph)),  # a deep copy of a tree spec warns
        example_inputs=ep.example_inputs,
        constants=constants,
        verifiers=ep.verifiers,
    )
    result.validate()
    return result


def _tensor(ep: ExportedProgram, name: str) -> torch.Tensor:
    return ep.state_dict[name] if name in ep.state_dict else ep.constants[name]
