"""Choices of curvature, and posterior precisions as values with one interface."""

from pyro_evidence.precision.choices import block_diagonal, damped, diagonal, exact_hessian, gauss_newton

__all__ = ["block_diagonal", "damped", "diagonal", "exact_hessian", "gauss_newton"]
