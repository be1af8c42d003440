"""A matrix of elements, summed up one entry at a time, and what follows from its inverse; NumPy alone."""

import numpy as np


def assembled(size: int, index: list[np.ndarray], elements: list[np.ndarray]) -> np.ndarray:
    A = np.zeros((size, size))
    for rows, blocks in zip(index, elements, strict=True):
        for row, block in zip(rows, blocks, strict=True):
            for a, i in enumerate(row):
                for b, j in enumerate(row):
                    A[i, j] += block[a, b]
    return A


def on_pattern(Z: np.ndarray, index: list[np.ndarray]) -> list[np.ndarray]:
    return [np.array([Z[np.ix_(row, row)] for row in rows]).reshape(*rows.shape, rows.shape[1]) for rows in index]
