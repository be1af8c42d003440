"""The probabilistic RBF network written down naively: matrices, one kernel and one class at a time."""

import math

import torch
from torch import Tensor

Sizes = tuple[int, int, int]


def log_normal(X: Tensor, loc: Tensor, S: Tensor) -> Tensor:
    offset = X - loc
    quadratic = (offset * torch.linalg.solve(S, offset.T).T).sum(-1)
    return -0.5 * (quadratic + torch.linalg.slogdet(S)[1] + X.shape[-1] * math.log(2 * math.pi))


def log_joint(X: Tensor, mixing: Tensor, loc: Tensor, S: Tensor) -> Tensor:
    """Of kernel j and each datum of one class, ``(n, M)``."""
    kernels = torch.stack([log_normal(X, m, s) for m, s in zip(loc, S, strict=True)], -1)
    return kernels + mixing.log()


def by_class(X: Tensor, y: Tensor, mixing: Tensor, loc: Tensor, S: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Data, responsibilities and log densities of each class."""
    found = []
    for k in range(len(mixing)):
        joint = log_joint(X[y == k], mixing[k], loc, S)
        found.append((X[y == k], joint.softmax(-1), joint.logsumexp(-1)))
    return found


def ownership(mixing: Tensor, prior: Tensor) -> Tensor:
    joint = mixing * prior[:, None]
    return joint / joint.sum(0)


def penalised(X: Tensor, y: Tensor, mixing: Tensor, loc: Tensor, S: Tensor, alpha: float, prior: Tensor) -> Tensor:
    """Eq. 22 with equal covariances in the distance; everything, the subkernels too, a function of the parameters."""
    total, P = torch.zeros(()), ownership(mixing, prior)
    for k, (Xk, resp, log_norm) in enumerate(by_class(X, y, mixing, loc, S)):
        total = total + log_norm.sum()
        for j in range(len(loc)):
            centre = (resp[:, j, None] * Xk).sum(0) / resp[:, j].sum()
            offset = loc[j] - centre
            total = total - alpha / 8 * P[k, j] * offset @ torch.linalg.solve(S[j], offset)
    return total


def published_round(
    X: Tensor, y: Tensor, net: tuple[Tensor, Tensor, Tensor], alpha: float, lag: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Eqs. 27 to 30 one index at a time, spherical; new parameters, new distances, raw numerators of eq. 29.

    ``net`` is mixing ``(K, M)``, centres ``(M, D)``, variances ``(M,)``; ``lag`` the distances of the round before.
    """
    mixing, loc, variance = net
    K, M = mixing.shape
    D = X.shape[1]
    prior = torch.stack([(y == k).double().mean() for k in range(K)])
    P = ownership(mixing, prior)
    parts = by_class(X, y, mixing, loc, variance[:, None, None] * torch.eye(D))
    centres = torch.stack([(resp.T @ Xk) / resp.sum(0)[:, None] for Xk, resp, _ in parts])
    centres = torch.where(P.unsqueeze(-1) > 0, centres, loc)  # 0 / 0 where the class has left the kernel
    new_loc, new_variance = torch.zeros_like(loc), torch.zeros_like(variance)
    for j in range(M):
        top = sum(resp[:, j] @ Xk for Xk, resp, _ in parts) + alpha / 4 * sum(P[k, j] * centres[k, j] for k in range(K))
        mass = sum(resp[:, j].sum() for _, resp, _ in parts)
        new_loc[j] = top / (mass + alpha / 4)
        squares = sum((resp[:, j] * (Xk - new_loc[j]).square().sum(-1)).sum() for Xk, resp, _ in parts)
        new_variance[j] = squares / mass / D
    numerators = torch.zeros_like(mixing)
    for k, (_, resp, _) in enumerate(parts):
        for j in range(M):
            mean = sum(P[i, j] * lag[i, j] for i in range(K))
            numerators[k, j] = resp[:, j].sum() + alpha / 8 * P[k, j] * (mean - lag[k, j])
    kept = numerators.clamp(min=0)
    total = kept.sum(1, keepdim=True)
    new_mixing = torch.where(total > 0, kept / total, mixing)  # a class without any keeps its mixing
    distances = (new_loc - centres).square().sum(-1) / new_variance
    return (new_mixing, new_loc, new_variance), distances, numerators
