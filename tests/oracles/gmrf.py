"""Gaussian fields by dense eigenvalues; NumPy alone."""

import numpy as np


def laplacian(size: int, edges: np.ndarray) -> np.ndarray:
    Q = np.zeros((size, size))
    for i, j in edges:
        Q[i, i] += 1.0
        Q[j, j] += 1.0
        Q[i, j] -= 1.0
        Q[j, i] -= 1.0
    return Q


def walk_structure(size: int, order: int) -> np.ndarray:
    D = np.diff(np.eye(size), n=order, axis=0)
    return D.T @ D


def log_density(Q: np.ndarray, x: np.ndarray) -> float:
    """Of a field with precision ``Q``, in the subspace where ``Q`` is positive."""
    values = np.linalg.eigvalsh(Q)
    values = values[values > 1e-9 * values[-1]]
    return float(-0.5 * x @ Q @ x + 0.5 * np.log(values).sum() - 0.5 * len(values) * np.log(2.0 * np.pi))


def typical_variance(Q: np.ndarray) -> float:
    return float(np.exp(np.log(np.diag(np.linalg.pinv(Q, hermitian=True))).mean()))
