"""Likelihoods with linear predictors, datum by datum, with derivatives worked out on paper; NumPy only."""

import math

import numpy as np

Array = np.ndarray


def logistic(X: Array, t: Array, w: Array) -> tuple[float, Array, Array]:
    """Log likelihood, gradient and Hessian of ``t_n ~ Bernoulli(sigmoid(x_n' w))``."""
    value, gradient, hessian = 0.0, np.zeros(len(w)), np.zeros((len(w), len(w)))
    for x, label in zip(X, t, strict=True):
        p = 1.0 / (1.0 + math.exp(-float(x @ w)))
        value += math.log(p) if label == 1 else math.log(1.0 - p)
        gradient += (label - p) * x
        hessian -= p * (1.0 - p) * np.outer(x, x)
    return value, gradient, hessian


def poisson(X: Array, t: Array, w: Array) -> tuple[float, Array, Array]:
    """The same of ``t_n ~ Poisson(exp(x_n' w))``."""
    value, gradient, hessian = 0.0, np.zeros(len(w)), np.zeros((len(w), len(w)))
    for x, number in zip(X, t, strict=True):
        rate = math.exp(float(x @ w))
        value += number * math.log(rate) - rate - math.lgamma(number + 1.0)
        gradient += (number - rate) * x
        hessian -= rate * np.outer(x, x)
    return value, gradient, hessian


def softmax(X: Array, t: Array, W: Array) -> tuple[float, Array, Array]:
    """The same of ``t_n ~ Categorical(softmax(W x_n))``, ``W`` of shape ``(C, M)`` flattened row by row."""
    C, M = W.shape
    value, gradient, hessian = 0.0, np.zeros((C, M)), np.zeros((C, M, C, M))
    for x, label in zip(X, t, strict=True):
        p = np.exp(W @ x)
        p = p / p.sum()
        value += math.log(p[label])
        for c in range(C):
            gradient[c] += ((c == label) - p[c]) * x
            for d in range(C):
                hessian[c, :, d, :] -= p[c] * ((c == d) - p[d]) * np.outer(x, x)
    return value, gradient.reshape(-1), hessian.reshape(C * M, C * M)


def gaussian_log_evidence(Phi: Array, t: Array, alpha: Array, beta: float) -> float:
    """``log N(t | 0, I / beta + Phi diag(1 / alpha) Phi')``: the weights integrated out on paper."""
    covariance = np.eye(len(t)) / beta + Phi @ np.diag(1.0 / alpha) @ Phi.T
    _, log_det = np.linalg.slogdet(covariance)
    quadratic = t @ np.linalg.solve(covariance, t)
    return float(-0.5 * (len(t) * math.log(2.0 * math.pi) + log_det + quadratic))
