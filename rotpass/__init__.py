"""Hadamard rotations for quantized transformers, on the graph, for any model.

Doors: :func:`backend` for torch.compile, :class:`RotationPass` for an ExportedProgram, :func:`fold_` for an nn.Module.
"""

from rotpass import _torch
from rotpass import ops as _ops  # noqa: F401  (registers the operators)
from rotpass.doors.compile import backend
from rotpass.doors.module import explain, fold_, unfold_
from rotpass.doors.program import RotationPass
from rotpass.hadamard import hadamard_matrix, hadamard_transform
from rotpass.recipe import FakeQuant, Recipe
from rotpass.report import Report, Site

__version__ = "0.1.0.dev0"

__all__ = [
    "FakeQuant",
    "Recipe",
    "Report",
    "RotationPass",
    "Site",
    "backend",
    "explain",
    "fold_",
    "hadamard_matrix",
    "hadamard_transform",
    "unfold_",
]

_torch.check_version()
