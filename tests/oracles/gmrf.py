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


def weighted_laplacian(size: int, edges: np.ndarray, weights: np.ndarray) -> np.ndarray:
    W = np.zeros((size, size))
    W[edges[:, 0], edges[:, 1]] = W[edges[:, 1], edges[:, 0]] = weights
    return np.diag(W.sum(1)) - W


def cyclic_structure(size: int, order: int) -> np.ndarray:
    D = np.roll(np.eye(size), 1, axis=1) - np.eye(size)
    return np.linalg.matrix_power(D.T @ D, order)


def uneven_structure(t: np.ndarray, order: int) -> np.ndarray:
    """Second order: the curvature of a broken line, squared and integrated over half of each interval."""
    d = np.diff(t)
    slope = np.diff(np.eye(len(t)), axis=0) / d[:, None]
    if order == 1:
        return slope.T @ np.diag(d) @ slope
    half = 0.5 * (d[1:] + d[:-1])
    curvature = np.diff(slope, axis=0) / half[:, None]
    return curvature.T @ np.diag(half) @ curvature


def finite_elements(points: np.ndarray, triangles: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each triangle the lumped mass and the stiffness, by the gradients of its linear functions."""
    found = []
    for corners in triangles:
        of_linear = np.linalg.inv(np.column_stack([np.ones(3), points[corners]]))
        area = 0.5 * abs(np.linalg.det(np.column_stack([np.ones(3), points[corners]])))
        gradients = of_linear[1:]
        C, G = np.zeros((len(points), len(points))), np.zeros((len(points), len(points)))
        C[corners, corners] = area / 3.0
        G[np.ix_(corners, corners)] = area * gradients.T @ gradients
        found.append((C, G))
    return found


def thin_plate(rows: int, columns: int) -> np.ndarray:
    across, down = np.diff(np.eye(columns), n=2, axis=0), np.diff(np.eye(rows), n=2, axis=0)
    one_across, one_down = np.diff(np.eye(columns), axis=0), np.diff(np.eye(rows), axis=0)
    fxx, fyy = np.kron(np.eye(rows), across), np.kron(down, np.eye(columns))
    fxy = np.kron(one_down, one_across)
    return fxx.T @ fxx + fyy.T @ fyy + 2.0 * fxy.T @ fxy
