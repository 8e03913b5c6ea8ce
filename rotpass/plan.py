"""What a model or program says of the rotations that are already in it: the persistent buffer ``rotpass_plan``.

The buffer holds JSON as uint8, so it goes wherever a state dict goes: save, load, export, ``quantize_``. A strict load into
a model that is not rotated fails on it, which is what it is for.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Node

from rotpass import _torch
from rotpass.capture import Capture
from rotpass.recipe import Recipe
from rotpass.report import Site
from rotpass.rewrite.fold import Fold

BUFFER = "rotpass_plan"
FORMAT = 1

# Folded modules that are alive: torch.compile never sees an unused buffer, so that door looks its parameters up here.
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Plan:
    """Rotated sites, the folds of each weight by name, and the order, table and seed of each online half by module."""

    sites: tuple[Site, ...] = ()
    folds: tuple[tuple[str, Fold], ...] = ()
    hooks: tuple[tuple[str, int, str, int | None], ...] = ()

    def to_tensor(self) -> Tensor:
        """As a buffer."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)})
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")

    @staticmethod
    def from_tensor(tensor: Tensor) -> Plan:
        """From a buffer.

        Raises:
            ValueError: it is no plan, or one of a later rotpass.
        """
        try:
            data = json.loads(bytes(tensor.detach().cpu().tolist()))
            if data["format"] > FORMAT:
                raise ValueError(f"{BUFFER} was written by a later rotpass (format {data['format']}): upgrade rotpass")
            return Plan(
                tuple(Site(**site) for site in data["sites"]),
                tuple(
                    (name, Fold(**{**fold, "starts": fold["starts"] and tuple(fold["starts"])}))
                    for name, fold in data["folds"]
                ),
                tuple(tuple(hook) for hook in data["hooks"]),
            )
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"the buffer {BUFFER} holds no plan of rotpass: {error}") from error


def names_by_storage(*homes: dict[str, Any]) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """The names under which dictionaries of tensors hold each storage."""
    names = defaultdict(list)
    for home in homes:
        for name, tensor in home.items():
            if isinstance(tensor, Tensor):
                names[_torch.storage_key(tensor)].append((home, name))
    return names


def read(capture: Capture) -> list[Site]:
    """Notes in a program's capture what its plans say (a folded submodule has one under its own name).

    Returns:
        The sites of the plans.
    """
    plans = {}
    for node, name in capture.names.items():
        if name == BUFFER or name.endswith("." + BUFFER):
            tensor = capture.values[node]
            if not tensor.is_meta:  # meta weights are in no danger
                plans[name.removesuffix(BUFFER)] = Plan.from_tensor(tensor)
    planned = []
    for prefix, plan in plans.items():
        folded = {prefix + name for name, _ in plan.folds}
        capture.folded |= {node for node, name in capture.names.items() if name in folded}
        planned += [dataclasses.replace(site, where=(prefix + site.where).rstrip(".")) for site in plan.sites]
    capture.already |= {(site.kind, site.where) for site in planned}
    return planned


def unmatched(capture: Capture, recipe: Recipe, planned: list[Site], sites: list[Site]) -> list[Site]:
    """``sites`` and, in their place, the planned R4 sites that no matcher sees, as in a quantized program.

    Raises:
        RuntimeError: the online half of one is missing from the graph.
    """
    result, seen = list(sites), {(site.kind, site.where) for site in sites}
    online = {
        capture.where(node)
        for node in capture.gm.graph.find_nodes(op="call_function", target=torch.ops.rotpass.hadamard.default)
    }
    before: set[tuple[str, str]] = set()
    for site in planned:
        key = site.kind, site.where
        if key not in seen and site.kind == "r4" and recipe.r4 and recipe.includes(site.where):
            if site.where not in online:
                raise RuntimeError(
                    f"the weight of {site.where!r} was folded by rotpass, but its online rotation is missing from the "
                    "graph: a module that was swapped lost its forward pre-hook; fold again after the swap"
                )
            at = max((i + 1 for i, s in enumerate(result) if (s.kind, s.where) in before), default=0)
            result.insert(at, dataclasses.replace(site, status="already"))
        before.add(key)
    return result


def register(module: nn.Module) -> None:
    """Has :func:`look_up` know a folded module."""
    with _lock:
        _modules.add(module)


def forget(module: nn.Module) -> None:
    """Undoes :func:`register`."""
    with _lock:
        _modules.discard(module)


def submodule(model: nn.Module, path: str) -> nn.Module | None:
    """``model.get_submodule(path)``, or None if there is none (any more)."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def weight(model: nn.Module, name: str) -> Tensor | None:
    """A weight by its name in the state dict, as it is now; None if it is gone."""
    owner, _, last = name.rpartition(".")
    return getattr(submodule(model, owner), last, None)


def _folded_weights() -> dict[int, Tensor]:
    """The present weights of all folded modules, by id."""
    with _lock:
        modules = list(_modules)
    found = [weight(module, name) for module in modules for name, _ in (of(module) or Plan()).folds]
    return {id(tensor): tensor for tensor in found if tensor is not None}


def is_folded(model: nn.Module) -> bool:
    """Whether the model, a part of it or something that it is a part of is folded."""
    if any(of(module) for module in model.modules()):
        return True
    weights = _folded_weights()
    return any(id(tensor) in weights for tensor in (*model.parameters(), *model.buffers()))


def look_up(capture: Capture) -> None:
    """Notes in a capture of torch.compile which of its weights belong to a folded module, by the module's present weights."""
    weights = _folded_weights()
    capture.folded |= {node for node, tensor in capture.values.items() if id(tensor) in weights}


def of(module: nn.Module) -> Plan | None:
    """The plan of a folded module, None if it is not folded."""
    member = module.__dict__.get("_rotpass_member")
    if member is not None:
        return member.plan  # the buffer's contents may be lost (to_empty)
    buffer = module._buffers.get(BUFFER)
    return None if buffer is None or buffer.is_meta else Plan.from_tensor(buffer)


def write(
    placeholders: list[Node],
    signature: ExportGraphSignature,
    state_dict: dict[str, Tensor],
    sites: list[Site],
    folds: list[tuple[str, Fold]],
) -> None:
    """Adds the sites that a pass rotated to a program's plan, as a buffer that nothing reads."""
    rotated = [site for site in sites if site.status == "rotated"]
    if not rotated:
        return
    before = Plan.from_tensor(state_dict[BUFFER]) if BUFFER in state_dict else None
    known = before or Plan()
    state_dict[BUFFER] = dataclasses.replace(
        known, sites=(*known.sites, *rotated), folds=(*known.folds, *folds)
    ).to_tensor()
    kinds = [spec.kind for spec in signature.input_specs]
    if before is not None:
        position = next(i for i, spec in enumerate(signature.input_specs) if spec.target == BUFFER)
        _describe(placeholders[position], state_dict[BUFFER])
        return
    position = sum(kind in (InputKind.PARAMETER, InputKind.BUFFER) for kind in kinds)
    graph = placeholders[0].graph if placeholders else None
    with (
        graph.inserting_before(placeholders[position])
        if position < len(placeholders)
        else graph.inserting_after(placeholders[-1])
    ):
        node = graph.placeholder(f"b_{BUFFER}")
    _describe(node, state_dict[BUFFER], placeholders)
    signature.input_specs.insert(
        position, InputSpec(InputKind.BUFFER, TensorArgument(node.name), BUFFER, persistent=True)
    )


def _describe(node: Node, tensor: Tensor, others: list[Node] | None = None) -> None:
    mode = next(
        (n.meta["val"].fake_mode for n in others or node.graph.nodes if hasattr(n.meta.get("val"), "fake_mode")), None
    )
    node.meta["val"] = mode.from_tensor(tensor) if mode is not None else tensor
