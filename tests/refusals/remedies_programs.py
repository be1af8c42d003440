"""Messages about a model as a program and about its data, each with what it leads to."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import RVM, BadInput, EvidenceEM, LaplaceEvidence, UnsupportedModel
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.wrappers import with_background
from tests.refusals.remedies import COUNTS, LINE, Model, Remedy, X, Y, draw, fit, normal, observed

T = torch.ones(()).double()
BLOBS = torch.cat([draw(20, 2), draw(20, 2, seed=1) + 6.0])
STALE = torch.ones(3).double()


def positive(name: str, start: float, shape: tuple[int, ...] = ()) -> Tensor:
    value: Tensor = pyro.param(name, lambda: torch.full(shape, start).double(), constraint=constraints.positive)
    return value


def scaled(start: float, shape: tuple[int, ...] = ()) -> Model:
    def model(X: Tensor, y: Tensor) -> None:
        alpha = positive("alpha", start, shape)
        w = pyro.sample("w", dist.Normal(T.new_zeros(2), alpha.rsqrt()).to_event(1))
        observed("y", dist.Normal(X @ w, 0.5), y)

    return model


def leftover(cleared: bool) -> Any:
    pyro.clear_param_store()
    pyro.param("alpha", STALE)
    if cleared:
        pyro.clear_param_store()
    try:
        return LaplaceEvidence(scaled(1.0)).run(X, Y)
    finally:
        pyro.clear_param_store()


def nothing_latent(y: Tensor) -> None:
    """A model all of whose latents are discrete."""
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def with_mean(y: Tensor) -> None:
    mean = normal("mean")
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(mean + z, 1.0), obs=y)


def hierarchy(y: Tensor) -> None:
    """A latent site in the prior of another that is to be maximised."""
    top = pyro.sample("top", dist.Normal(T * 0.0, 1.0))
    mean = pyro.sample("mean", dist.Normal(top, 1.0))
    observed("y", dist.Normal(mean, 1.0), y)


def batches(given: bool) -> Any:
    rows = (each for each in [Y])

    def model(data: Any) -> None:
        mean = normal("mean")
        for i, y in enumerate(data):
            observed(f"y{i}", dist.Normal(mean, 1.0), y)

    return fit(model, list(rows) if given else rows)


def weighted(together: bool) -> Model:
    @config_enumerate
    def model(y: Tensor) -> None:
        mean = normal("mean", 2)
        with pyro.plate("data", len(y)):
            with poutine.scale(scale=2.0):
                a = pyro.sample("a", dist.Bernoulli(0.3))
            with poutine.scale(scale=2.0 if together else 1.0):
                b = pyro.sample("b", dist.Bernoulli(0.2 + 0.5 * a))
            with poutine.scale(scale=2.0 if together else 1.0):
                pyro.sample("y", dist.Normal(mean[b.long()], 1.0), obs=y)

    return model


def outside(inside: bool) -> Model:
    @config_enumerate
    def model(y: Tensor) -> None:
        mean = normal("mean", 2)
        if inside:
            with pyro.plate("data", len(y)):
                z = pyro.sample("z", dist.Bernoulli(0.3)).long()
                pyro.sample("y", dist.Normal(mean[z], 1.0), obs=y)
            return
        z = pyro.sample("z", dist.Bernoulli(0.3)).long()
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean[z], 1.0), obs=y)

    return model


def vectors(Y: Tensor) -> None:
    mean = normal("mean", 2)
    with pyro.plate("data", len(Y)):
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=Y)


def counted(values: Tensor) -> Any:
    def model(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(T * 2.0, 1.0))
        observed("y", dist.Poisson(rate), y)

    return fit(model, values)


def two_sites(X: Tensor, y: Tensor) -> None:
    w, b = normal("w", 2), normal("b")
    observed("y", dist.Normal(X @ w + b, 0.5), y)


def shapes(X: Tensor, y: Tensor) -> None:
    observed("y", dist.Normal(X @ normal("w", 3)[: X.shape[-1]], 0.5), y)


def wrong_shapes(X: Tensor, y: Tensor) -> None:
    observed("y", dist.Normal(X @ normal("w", 3), 0.5), y)


def large(unit: float) -> Any:
    return RVM(LINE).run(X, Y * unit)


PROGRAMS: dict[str, Remedy] = {
    "a param of another model": Remedy(BadInput, "clear_param_store", lambda: leftover(False), lambda: leftover(True)),
    "a param at its edge": Remedy(
        BadInput, "for example at 1", lambda: fit(scaled(0.0), X, Y), lambda: fit(scaled(1.0), X, Y)
    ),
    "only discrete latents": Remedy(
        UnsupportedModel,
        "Give the parameters that you hold fixed a prior",
        lambda: fit(nothing_latent, Y),
        lambda: fit(with_mean, Y),
    ),
    "a prior of a maximised site that moves": Remedy(
        UnsupportedModel,
        "Maximise that site too",
        lambda: fit(hierarchy, Y, maximise=["mean"]),
        lambda: fit(hierarchy, Y, maximise=["top"]),
    ),
    "the same, integrated": Remedy(
        UnsupportedModel, "or integrate both", lambda: fit(hierarchy, Y, maximise=["mean"]), lambda: fit(hierarchy, Y)
    ),
    "everything maximised": Remedy(
        BadInput,
        "leave at least one to integrate",
        lambda: fit(hierarchy, Y, maximise=["top", "mean"]),
        lambda: fit(hierarchy, Y, maximise=["top"]),
    ),
    "data that are read once": Remedy(
        UnsupportedModel, "pass tensors or lists, not a generator", lambda: batches(False), lambda: batches(True)
    ),
    "two scales": Remedy(
        UnsupportedModel, "same poutine.scale", lambda: fit(weighted(False), Y), lambda: fit(weighted(True), Y)
    ),
    "a discrete site outside its plate": Remedy(
        UnsupportedModel,
        "Put the discrete site into the plate",
        lambda: fit(outside(False), Y).log_prob(Y),
        lambda: fit(outside(True), Y).log_prob(Y),
    ),
    "shapes that do not fit": Remedy(
        BadInput, "Shapes must broadcast", lambda: fit(wrong_shapes, X, Y), lambda: fit(shapes, X, Y)
    ),
    "data off their support": Remedy(
        BadInput,
        "data must lie in the support|lie in the support of their distribution",
        lambda: counted(COUNTS - 1.0),
        lambda: counted(COUNTS),
    ),
    "other columns for a prediction": Remedy(
        BadInput,
        "Pass the same columns as for the fit",
        lambda: fit(vectors, X).log_prob(X[:, :1]),
        lambda: fit(vectors, X).log_prob(X[:, :2]),
    ),
    "a prediction without targets": Remedy(
        BadInput,
        r"pass the targets as in run\(\.\.\.\)",
        lambda: fit(optional, X, Y).log_prob(X, None),
        lambda: fit(optional, X, Y).log_prob(X, Y),
    ),
    "values that have no fourth power": Remedy(
        BadInput, "else divide by a typical value", lambda: large(1e90), lambda: large(1.0)
    ),
    "values whose fourth power is 0": Remedy(
        BadInput, "Divide by a typical value", lambda: large(1e-90), lambda: large(1.0)
    ),
    "years": Remedy(
        BadInput,
        "subtract the mean before the fit",
        lambda: RVM(LINE).run(X, Y + 1e10),
        lambda: RVM(LINE).run(X, (Y + 1e10) - (Y + 1e10).mean()),
    ),
    "years, and a column of ones": Remedy(
        BadInput,
        "or add a column of ones",
        lambda: RVM(LINE).run(X, Y + 1e7),
        lambda: RVM(two_columns(3)).run(torch.cat([X, torch.ones_like(X[:, :1])], -1), Y + 1e7),
    ),
    "a background of no width": Remedy(
        BadInput,
        "Drop these columns",
        lambda: EvidenceEM(with_background(gaussian_mixture(1))).run(flat()),
        lambda: EvidenceEM(with_background(gaussian_mixture(1))).run(flat()[:, :2]),
    ),
    "a background of integers": Remedy(
        BadInput,
        r"Y\.double\(\) for integers",
        lambda: EvidenceEM(with_background(gaussian_mixture(1))).run(BLOBS.long()),
        lambda: EvidenceEM(with_background(gaussian_mixture(1))).run(BLOBS.long().double()),
    ),
    "planes in half precision": Remedy(
        BadInput,
        r"two or three digits: pass \.double\(\) of argument 0",
        lambda: EvidenceEM(mppca(2, 1)).run(BLOBS.half()),
        lambda: EvidenceEM(mppca(2, 1)).run(BLOBS.half().double()),
    ),
    "two sets of weights": Remedy(
        BadInput,
        "say which hold the weights: site=",
        lambda: RVM(two_sites).run(X, Y),
        lambda: RVM(two_sites, site=["w", "b"]).run(X, Y),
    ),
    "a site twice": Remedy(
        BadInput,
        "name each of them once|name it once",
        lambda: fit(hierarchy, Y, maximise=["top"], marginalise=["top"]),
        lambda: fit(hierarchy, Y, maximise=["top"]),
    ),
    "units whose slope jumps": Remedy(
        ArithmeticError,
        "the model computes with torch's relu, .* softplus or tanh for relu",
        lambda: fit(network(torch.relu), Y),
        lambda: fit(network(torch.nn.functional.softplus), Y),
    ),
}


def network(activation: Callable[[Tensor], Tensor]) -> Model:
    """One unit, which is on or off at the mode of its weight, with a slope of its own on either side."""

    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0 * T, 1.0))
        observed("y", dist.Normal(30.0 * w - 50.0 * activation(w) - 1.0, 1.0), y)

    return model


def two_columns(num: int) -> Model:
    def model(X: Tensor, y: Tensor) -> None:
        observed("y", dist.Normal(X @ normal("w", num), 0.5), y)

    return model


def flat() -> Tensor:
    return torch.cat([BLOBS, torch.ones_like(BLOBS[:, :1])], -1)


def optional(X: Tensor, y: Tensor | None = None) -> None:
    w = normal("w", 2)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)
