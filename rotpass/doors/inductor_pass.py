"""The custom pass of rotpass's Inductor compilations: lowers the operators, and completes the key of Inductor's caches.

Inductor keys its compiled graphs by the graph, its config and the ``uuid()`` of custom passes. The body of a lowering
is in none of these, so without a pass of ours a new version of rotpass would be served the old one's kernels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import pathlib
from typing import Any

from torch.fx import Graph

import rotpass
from rotpass import _torch
from rotpass.lower.inductor import lower
from rotpass.recipe import Recipe

SLOT = "post_grad_custom_post_pass"

_CustomGraphPass, _CustomInferenceAwareGraphPass = _torch.custom_pass_classes()


class InductorPass(_CustomGraphPass):
    """Runs the user's passes of the slot that it takes, then lowers rotpass's operators.

    Args:
        recipe: of this compilation.
        passes: the user's own, in order.
    """

    def __init__(self, recipe: Recipe, passes: tuple[Any, ...] = ()) -> None:
        self.recipe = recipe
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for user_pass in self.passes:
            user_pass(graph)
        lower(graph)

    def uuid(self) -> Any | None:
        """Rotpass's part of the cache key; None, which turns the caches off, if a pass of the user has none."""
        theirs = []
        for user_pass in self.passes:
            uuid = user_pass.uuid() if isinstance(user_pass, _CustomGraphPass) else None
            if not uuid:
                return None
            theirs.append(uuid)
        return ("rotpass", _sources(), repr(self.recipe), tuple(theirs))


class InferenceAwareInductorPass(InductorPass, _CustomInferenceAwareGraphPass):
    """:class:`InductorPass` over passes of which some want to know whether the graph is for inference."""

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for user_pass in self.passes:
            if isinstance(user_pass, _CustomInferenceAwareGraphPass):
                user_pass(graph, is_inference)
            else:
                user_pass(graph)
        lower(graph)


def inductor_pass(recipe: Recipe, passes: tuple[Any, ...]) -> InductorPass:
    """The pass to install, over the user's."""
    aware = any(isinstance(user_pass, _CustomInferenceAwareGraphPass) for user_pass in passes)
    return (InferenceAwareInductorPass if aware else InductorPass)(recipe, passes)


@functools.cache
def _sources() -> str:
    # All of rotpass: its lowerings, the operators they stand for and the matrices that both are made of.
    digest = hashlib.sha256()
    try:
        digest.update(importlib.metadata.version("rotpass").encode())
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        pass
    root = pathlib.Path(rotpass.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
