"""Probabilities averaged over a Gaussian predictor: functions to pass as ``integral=``."""

import math

import torch
from torch import Tensor


def mackay(mean: Tensor, variance: Tensor) -> Tensor:
    r"""``E sigmoid(eta)`` by :math:`\sigma(\mu / \sqrt{1 + \pi v / 8})`.  MacKay (1992), eq. 10."""
    return torch.sigmoid(mean / (1.0 + math.pi * variance / 8.0).sqrt())


def hermite(mean: Tensor, variance: Tensor) -> Tensor:
    """``E sigmoid(eta)`` under ``N(mean, variance)`` by 40 Gauss-Hermite nodes, shape ``(...)``."""
    nodes, weights = gauss_hermite(40, mean)
    return torch.sigmoid(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes) @ weights


def gauss_hermite(num_nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes ``(Q,)`` and weights of the expectation under ``N(0, 1)``.  Golub and Welsch (1969)."""
    k = torch.arange(1, num_nodes, dtype=torch.float64, device=like.device).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(k, 1) + torch.diag(k, -1))
    return nodes, vectors[0].square()
