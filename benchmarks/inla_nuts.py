"""Long chains of NumPyro's NUTS on models of benchmarks/inla_examples.py, kept as means, deviations and medians.

    python -m benchmarks.inla_nuts [case ...]

needs NumPyro (pip install numpyro) and writes tests/oracles/inla_nuts.json: by case and site the means and deviations
of all elements, the medians of hyperparameters, the smallest effective number of draws and the largest R-hat.  Only
the data are shared with the package.  Models are written again, with dense matrices: fields along the eigenvectors of
their differences, where what is given as zero is left out.

A sampler moves in ``z`` instead of the latents ``v``: ``v = S^2 p m + S L'^-1 z``, with the mode ``m`` and the Cholesky
factor ``L`` of the precision at typical hyperparameters, ``S`` diagonal, one there, that follows what priors and data
leave of single latents, and ``p`` the precision of the data over that there.  This is close to a standard normal
whatever the data say, and exact: the density is that of the model with the log determinant of the change.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import numpy as np
import torch

torch.set_default_dtype(torch.float64)  # before data are made

try:
    import jax
    import numpyro
except ImportError as missing:
    raise SystemExit("benchmarks/inla_nuts.py needs NumPyro: pip install numpyro.") from missing

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import numpyro.distributions as prior
from jax.scipy.special import log_ndtr
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from benchmarks import inla_examples as data_of

STORED = Path(__file__).resolve().parents[1] / "tests" / "oracles" / "inla_nuts.json"
Hypers = dict[str, Any]


# Fields ---------------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """Latents whose prior precision is diagonal, up to a constant: values are ``basis @ v``."""

    name: str
    basis: np.ndarray  # (n, k)
    design: np.ndarray  # of the predictors, (N, k)
    diagonal: Callable[[Hypers], Any]  # of the precision, (k,)
    constant: np.ndarray | float = 0.0  # (k, k)
    rank: int | None = None  # how many have a precision of their own; None: all


def squares_of(differences: np.ndarray, drop: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues and vectors of ``D'D``, largest first, without the ``drop`` that are zero."""
    values, vectors = np.linalg.eigh(differences.T @ differences)
    rank = len(values) - drop
    return np.append(values[::-1][:rank], np.zeros(drop)), vectors[:, ::-1]


def second_differences(t: np.ndarray) -> np.ndarray:
    """Lindgren and Rue (2008): slopes' differences over the root of the mean distance."""
    D, d = np.zeros((len(t) - 2, len(t))), np.diff(t)
    for i in range(len(t) - 2):
        D[i, i : i + 3] = np.array([1 / d[i], -1 / d[i] - 1 / d[i + 1], 1 / d[i + 1]]) * np.sqrt(2 / (d[i] + d[i + 1]))
    return D


def edge_differences(graph: Any) -> np.ndarray:
    """One row for each pair of neighbours."""
    edges = graph.edges.numpy()
    D = np.zeros((len(edges), graph.size))
    D[np.arange(len(edges)), edges[:, 0]], D[np.arange(len(edges)), edges[:, 1]] = 1.0, -1.0
    return D


def intrinsic(name: str, scale: str, D: np.ndarray, drop: int, rows: np.ndarray) -> Part:
    """Differences of one scale, without the ``drop`` directions that cost nothing."""
    values, vectors = squares_of(D, drop)
    rank = len(values) - drop
    values, vectors = values[:rank], vectors[:, :rank]
    return Part(name, vectors, vectors[rows], lambda own: values / own[scale] ** 2)


def coefficients(name: str, X: np.ndarray, sd: float) -> Part:
    """Independent normals."""
    return Part(name, np.eye(X.shape[1]), X, lambda own: jnp.full(X.shape[1], sd**-2))


# Models ---------------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """Priors of hyperparameters, latents, and the log likelihood of each predictor."""

    hypers: Hypers
    parts: list[Part]
    log_likelihood: Callable[[Hypers, Any], Any]  # of the predictors (N,), a sum
    typical: Hypers  # where the likelihood is expanded
    precision: Callable[[Hypers], Any] = lambda own: 1.0  # of the data, times what the expansion has
    more: Callable[[Hypers, dict[str, Any], Any], dict[str, Any]] | None = None  # draws of what was summed out
    length: tuple[int, int] = (500, 1500)


def tokyo(*, cyclic: bool) -> Model:
    n, y = (x.numpy() for x in data_of.tokyo()[1])
    size = len(n)
    D = np.stack([np.roll([1.0, -2.0, 1.0, *np.zeros(size - 3)], i) for i in range(size)])
    D, anchors = (D, 1) if cyclic else (D[: size - 2], 2)
    values, vectors = squares_of(D, anchors)
    at_level = vectors[:anchors].T @ vectors[:anchors] / 10.0**2
    part = Part("x", vectors, vectors, lambda own: values / own["scale"] ** 2, at_level, size - anchors)
    return Model(
        {"scale": prior.HalfNormal(0.1)},
        [part],
        lambda own, eta: (y * eta - n * jax.nn.softplus(eta)).sum(),
        {"scale": 0.01},
    )


def germany() -> Model:
    data, graph = data_of.table("germany"), data_of.neighbours("germany")
    E, Y = (data[k].numpy() for k in ("E", "Y"))
    at, which = np.unique(data["x"].numpy(), return_inverse=True)
    values, vectors = squares_of(edge_differences(graph), 1)
    assert values[-2] > 1e-9  # connected
    variances = (vectors[:, :-1] ** 2 / values[:-1]).sum(1)
    inverse = np.append(1.0 / values[:-1], 0.0) / np.exp(np.log(variances).mean())  # typical variance of one

    def diagonal(own: Hypers) -> Any:
        return 1.0 / (own["scale"] ** 2 * (own["mixing"] * inverse + 1.0 - own["mixing"]))

    def smooth_part(own: Hypers, v: dict[str, Any], key: Any) -> dict[str, Any]:
        """The field within the effects, given those: along eigenvectors, of unit scale."""
        prior_variance, noise = inverse, own["scale"] ** 2 * (1.0 - own["mixing"])
        loading = own["scale"] * jnp.sqrt(own["mixing"])
        total = loading**2 * prior_variance + noise
        mean = loading * prior_variance / total * v["effect"]
        draw = mean + jnp.sqrt(prior_variance * noise / total) * jax.random.normal(key, mean.shape)
        return {"field": jnp.stack([vectors @ v["effect"], vectors @ draw])}

    return Model(
        {"scale": prior.HalfNormal(1.0), "mixing": prior.Beta(1.0, 1.0), "rough": prior.HalfNormal(0.1)},
        [
            Part("effect", vectors, vectors, diagonal),
            intrinsic("smooth", "rough", second_differences(at), 2, which),
            coefficients("intercept", np.ones((len(Y), 1)), 5.0),
        ],
        lambda own, eta: (Y * eta - E * jnp.exp(eta)).sum(),
        {"scale": 0.2, "mixing": 0.93, "rough": 0.001},
        more=smooth_part,
        length=(500, 2500),
    )


def rents() -> Model:
    graph, places, data, _ = data_of.flats()
    (size, year, place), (X, rent) = ([x.numpy() for x in several] for several in (places, data))
    parts = [
        intrinsic("by_size", "s_size", second_differences(np.arange(130.0)), 2, size),
        intrinsic("by_year", "s_year", second_differences(np.arange(80.0)), 2, year),
        intrinsic("by_place", "s_place", edge_differences(graph), 1, place),
        coefficients("intercept", np.ones((len(rent), 1)), 20.0),
        coefficients("w", X, 5.0),
    ]
    rotation, triangle = np.linalg.qr(np.concatenate([part.design for part in parts], 1))
    seen = rotation.T @ rent  # what latents have to do with; the rest is noise
    rest, ends = (rent**2).sum() - (seen**2).sum(), np.cumsum([part.design.shape[1] for part in parts])
    for part, columns in zip(parts, np.split(triangle, ends[:-1], 1), strict=True):
        part.design = columns

    def log_likelihood(own: Hypers, eta: Any) -> Any:
        return -0.5 * (((seen - eta) ** 2).sum() + rest) / own["noise"] ** 2 - len(rent) * jnp.log(own["noise"])

    return Model(
        {name: prior.HalfNormal(1.0) for name in ("s_size", "s_year", "s_place", "noise")},
        parts,
        log_likelihood,
        {"s_size": 0.0086, "s_year": 0.0054, "s_place": 0.48, "noise": 0.8},
        precision=lambda own: own["noise"] ** -2,
        length=(500, 1500),
    )


def log_weibull(eta: Any, shape: Any, event: np.ndarray, log_time: np.ndarray) -> Any:
    """Of scales ``exp(eta)``: the hazard where the event was seen, and the survival."""
    power = shape * (log_time - eta)
    return event * (jnp.log(shape) + power - log_time) - jnp.exp(power)


def log_log_normal(eta: Any, shape: Any, event: np.ndarray, log_time: np.ndarray) -> Any:
    """Of medians ``exp(eta)``: the density where the event was seen, otherwise the survival."""
    z = shape * (log_time - eta)
    density = -0.5 * z**2 - 0.5 * np.log(2.0 * np.pi) + jnp.log(shape) - log_time
    return jnp.where(event > 0, density, log_ndtr(-z))


def kidney(each: Callable[..., Any]) -> Model:
    who, X, event, time_ = (x.numpy() for x in data_of.patients())
    frailty = Part("frailty", np.eye(38), np.eye(38)[who], lambda own: jnp.full(38, 1.0) / own["spread"] ** 2)
    return Model(
        {"spread": prior.HalfNormal(1.0), "shape": prior.LogNormal(0.0, 1.0)},
        [frailty, coefficients("w", X, 5.0)],
        lambda own, eta: each(eta, own["shape"], event, np.log(time_)).sum(),
        {"spread": 0.5, "shape": 1.0},
        length=(1000, 4000),
    )


def weibull() -> Model:
    graph, where, data = data_of.districts()
    x, event, time_ = (column.numpy() for column in data)
    return Model(
        {"scale": prior.HalfNormal(1.0), "shape": prior.LogNormal(0.0, 1.0)},
        [
            intrinsic("field", "scale", edge_differences(graph), 1, where.numpy()),
            coefficients("intercept", np.ones((len(x), 1)), 5.0),
            coefficients("slope", x[:, None], 5.0),
        ],
        lambda own, eta: log_weibull(eta, own["shape"], event, np.log(time_)).sum(),
        {"scale": 0.5, "shape": 1.4},
        length=(1000, 4000),
    )


CASES: dict[str, Callable[[], Model]] = {
    "weibull": weibull,
    "kidney weibull": lambda: kidney(log_weibull),
    "kidney normal": lambda: kidney(log_log_normal),
    "tokyo": lambda: tokyo(cyclic=True),
    "tokyo plain": lambda: tokyo(cyclic=False),
    "rents": rents,
    "germany": germany,
}


# Chains ---------------------------------------------------------------------------------------------------------------


class Whitened:
    """A model's log density in ``z``."""

    def __init__(self, model: Model) -> None:
        self.model, self.A = model, np.concatenate([part.design for part in model.parts], 1)
        self.ends = np.cumsum([0, *(part.design.shape[1] for part in model.parts)])
        self.constant = np.zeros((self.size, self.size))
        for part, own in zip(model.parts, self.slices(), strict=True):
            self.constant[own, own] = part.constant
        self.expand()

    @property
    def size(self) -> int:
        return int(self.ends[-1])

    def slices(self) -> Iterator[slice]:
        return (slice(a, b) for a, b in zip(self.ends[:-1], self.ends[1:], strict=True))

    def expand(self) -> None:
        """The likelihood's precision and linear term at the mode of typical hyperparameters."""
        own, v = self.model.typical, np.zeros(self.size)
        slope = jax.jit(jax.grad(lambda eta: self.model.log_likelihood(own, eta)))
        curve = jax.jit(lambda eta: jax.jvp(slope, (eta,), (jnp.ones_like(eta),))[1])  # each datum by itself
        joint = jax.jit(lambda v: self.model.log_likelihood(own, self.A @ v) + self.log_prior(own, v))
        Q, H, r = np.diag(self.diagonal(own)) + self.constant, 0.0, 0.0
        for _ in range(100):
            eta = self.A @ v
            W = -np.asarray(curve(eta))
            H, r = self.A.T @ (W[:, None] * self.A), self.A.T @ (W * eta + np.asarray(slope(eta)))
            step = np.linalg.solve(Q + H, r) - v
            while not joint(v + step) >= joint(v) - 1e-6:  # nan too
                step = 0.5 * step
            v = v + step
        assert np.abs(self.A @ step).max() < 1e-6, "Newton's method has not settled"
        self.centre, self.unwhiten = v, np.linalg.inv(np.linalg.cholesky(Q + H)).T
        self.alone = np.diag(self.constant + H) / self.model.precision(own)

    def diagonal(self, own: Hypers) -> Any:
        return jnp.concatenate([part.diagonal(own) for part in self.model.parts])

    def log_prior(self, own: Hypers, v: Any) -> Any:
        """Of the latents, up to a constant."""
        diagonal = self.diagonal(own)
        log_det = sum(jnp.log(part.diagonal(own)[: part.rank]).sum() for part in self.model.parts)
        return 0.5 * log_det - 0.5 * (diagonal * v**2).sum() - 0.5 * v @ (self.constant @ v)

    def latents(self, own: Hypers, z: Any) -> tuple[Any, Any]:
        """``v``, and the log determinant of its derivative by ``z``."""
        shrunk = jnp.sqrt(self.spread(own) / self.spread(self.model.typical))
        said = shrunk**2 * self.model.precision(own) / self.model.precision(self.model.typical)
        return said * self.centre + shrunk * (self.unwhiten @ z), jnp.log(shrunk).sum()

    def spread(self, own: Hypers) -> Any:
        """Variances of single latents given all others, by the expansion, ``(k,)``."""
        return 1.0 / (self.diagonal(own) + self.alone * self.model.precision(own))

    def log_density(self, own: Hypers, z: Any) -> Any:
        v, log_det = self.latents(own, z)
        return self.model.log_likelihood(own, self.A @ v) + self.log_prior(own, v) + log_det

    def program(self) -> None:
        """As NumPyro samples it; ``z`` has a standard normal prior, which is taken off again."""
        own = {name: numpyro.sample(name, p) for name, p in self.model.hypers.items()}
        z = numpyro.sample("z", prior.Normal(0.0, 1.0).expand([self.size]).to_event(1))
        numpyro.factor("target", self.log_density(own, z) + 0.5 * (z**2).sum())

    def values(self, own: Hypers, z: Any, key: Any) -> dict[str, Any]:
        """What the sites of the model are."""
        v = self.latents(own, z)[0]
        parts = {part.name: v[rows] for part, rows in zip(self.model.parts, self.slices(), strict=True)}
        made = {part.name: part.basis @ parts[part.name] for part in self.model.parts}
        if self.model.more is not None:
            made = made | self.model.more(own, parts, key)
        return made


def chain(target: Whitened, seed: int) -> dict[str, np.ndarray]:
    """One chain's draws of all sites."""
    warmup, length = target.model.length
    kernel = NUTS(target.program, dense_mass=[tuple(target.model.hypers)], target_accept_prob=0.8)
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=length, progress_bar=False)
    mcmc.run(jax.random.key(seed), extra_fields=("diverging", "num_steps"))
    draws, steps = mcmc.get_samples(), mcmc.get_extra_fields()
    own = {name: draws[name] for name in target.model.hypers}
    keys = jax.random.split(jax.random.key(1000 + seed), length)
    made = jax.lax.map(lambda one: target.values(*one), (own, draws["z"], keys))
    return {name: np.asarray(value) for name, value in (own | made).items()} | {
        "diverging": np.asarray(steps["diverging"])
    }


def rounded(x: np.ndarray) -> Any:
    """Five digits."""
    return json.loads(json.dumps(x.tolist()), parse_float=lambda text: float(f"{float(text):.5g}"))


def moments(draws: np.ndarray, *, median: bool) -> dict[str, Any]:
    """Of draws ``(C, S) + shape``."""
    pooled = draws.reshape(-1, *draws.shape[2:])
    moves = pooled.std(0) > 0
    found = {
        "mean": rounded(pooled.mean(0)),
        "sd": rounded(pooled.std(0)),
        "n_eff": int(np.min(effective_sample_size(draws), where=moves, initial=np.inf)),
        "r_hat": round(float(np.max(split_gelman_rubin(draws), where=moves, initial=1.0)), 4),
    }
    return found | ({"median": rounded(np.median(pooled, 0))} if median else {})


def run(model: Model, chains: int) -> dict[str, Any]:
    """Moments of all sites of some chains, one after the other."""
    target, start = Whitened(model), time.process_time()
    found = [chain(target, seed) for seed in range(chains)]
    draws = {name: np.stack([one[name] for one in found]) for name in found[0]}
    diverged = int(draws.pop("diverging").sum())
    draws.pop("effect", None)
    sites = {name: moments(value, median=name in model.hypers) for name, value in draws.items()}
    made = f"{chains} chains of {model.length[1]} draws after {model.length[0]}"
    return {"chains": made, "diverged": diverged, "seconds": round(time.process_time() - start), "sites": sites}


def main() -> None:
    """All cases, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    for name in parser.parse_args().cases or CASES:
        found = run(CASES[name](), 4)
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        stored[name] = found
        STORED.write_text(json.dumps(stored, separators=(",", ":")) + "\n")
        least = min(site["n_eff"] for site in found["sites"].values())
        worst = max(site["r_hat"] for site in found["sites"].values())
        print(f"{name:16} {found['seconds']:6d} s, n_eff from {least}, R-hat to {worst:.4f}", flush=True)


if __name__ == "__main__":
    main()
