"""Carries out what a match decided. Edits, never searches."""

from rotpass.rewrite.fold import Fold
from rotpass.rewrite.rotate import FoldedInput, Rotated, rotate

__all__ = ["Fold", "FoldedInput", "Rotated", "rotate"]
