"""The mathematics of Hadamard rotations: which matrices there are, and their products. No graphs."""

from rotpass.hadamard.matrix import hadamard_matrix
from rotpass.hadamard.signs import signs
from rotpass.hadamard.tables import TABLES, factor_matrices, factors, largest_block
from rotpass.hadamard.transform import hadamard_transform

__all__ = ["TABLES", "factor_matrices", "factors", "hadamard_matrix", "hadamard_transform", "largest_block", "signs"]
