"""Mixtures of probabilistic PCA the naive way: NumPy, loops, full covariances; shares no code with the package."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = tuple[Array, Array, Array, Array]  # mixing (K,), mu (K, m), W (K, m, q), noise variance (K,)


def log_densities(Y: Array, params: Params) -> Array:
    """``log pi_k + log N(y_n | mu_k, W_k W_k' + v_k I)``, shape ``(N, K)``; Tipping and Bishop (1999), eq. 7."""
    columns = []
    for p, mu, W, v in zip(*params, strict=True):
        C = W @ W.T + v * np.eye(len(mu))
        away = Y - mu
        quadratic = np.einsum("ni,ij,nj->n", away, np.linalg.inv(C), away)
        columns.append(np.log(p) - 0.5 * (len(mu) * np.log(2 * np.pi) + np.linalg.slogdet(C)[1] + quadratic))
    return np.stack(columns, -1)


def log_likelihood(Y: Array, params: Params) -> float:
    table = log_densities(Y, params)
    peak = table.max(-1)
    return float((np.log(np.exp(table - peak[:, None]).sum(-1)) + peak).sum())


def em_step(Y: Array, params: Params, alpha: float = 0.0) -> Params:
    """Tipping and Bishop (1999), appendix C, eqs. C.1, C.2, C.14 and C.15; with Husmeier's (3.25) for ``alpha > 0``."""
    table = log_densities(Y, params)
    resp = np.exp(table - table.max(-1, keepdims=True))
    resp /= resp.sum(-1, keepdims=True)
    mixing, mus, Ws, variances = [], [], [], []
    for k, (_, _, W, v) in enumerate(zip(*params, strict=True)):
        r = resp[:, k]
        count, mu = r.sum(), r @ Y / r.sum()
        S = ((Y - mu) * r[:, None]).T @ (Y - mu) / count
        eye = np.eye(W.shape[1])
        M_inv = np.linalg.inv(v * eye + W.T @ W)
        ridge = alpha * v / count * np.linalg.inv(M_inv)
        new = S @ W @ np.linalg.inv(v * eye + M_inv @ W.T @ S @ W + ridge)
        rest = np.trace(S - S @ W @ M_inv @ new.T) - alpha * v / count * np.trace(new @ new.T)
        mixing.append(count / len(Y))
        mus.append(mu)
        Ws.append(new)
        variances.append(rest / len(mu))
    return np.array(mixing), np.stack(mus), np.stack(Ws), np.array(variances)


def direct(Y: Array, resp: Array, q: int) -> Params:
    """The maximum likelihood solution at given responsibilities; Tipping and Bishop (1999), eqs. 8 and 9."""
    mixing, mus, Ws, variances = [], [], [], []
    for r in resp.T:
        count, mu = r.sum(), r @ Y / r.sum()
        values, vectors = np.linalg.eigh(((Y - mu) * r[:, None]).T @ (Y - mu) / count)
        v = values[: len(mu) - q].mean()
        W = vectors[:, ::-1][:, :q] * np.sqrt(values[::-1][:q] - v)
        mixing.append(count / len(Y))
        mus.append(mu)
        Ws.append(W)
        variances.append(v)
    return np.array(mixing), np.stack(mus), np.stack(Ws), np.array(variances)
