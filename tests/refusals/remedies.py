"""Pairs of models: one that ends in an error message, and the same after the error message's advice."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import config_enumerate
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_evidence import (
    REVM,
    RVM,
    BadInput,
    EvidenceEM,
    ImproperPosterior,
    LaplaceEvidence,
    NotConverged,
    Stop,
    UnsupportedModel,
    exact_hessian,
    gauss_newton,
)
from pyro_evidence.errors import NotSmooth
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture

Model = Callable[..., Any]


@dataclass(frozen=True)
class Remedy:
    """What is refused and by which words, and what those words lead to."""

    error: type[Exception]
    words: str
    broken: Callable[[], Any]
    mended: Callable[[], Any]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, NOISE = draw(40, 2), draw(40, seed=1)
Y = X[:, 0] + 0.5 * NOISE
LABELS = (Y > 0).double()
COUNTS = torch.tensor([0.0, 2, 1, 3, 0, 1, 5, 2, 1, 0]).double()


def fit(model: Model, *data: Any, **settings: Any) -> Any:
    pyro.clear_param_store()
    return LaplaceEvidence(model, **settings).run(*data)


def normal(name: str, *shape: int) -> Tensor:
    value: Tensor = pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
    return value


def observed(name: str, distribution: Any, value: Any) -> None:
    with pyro.plate("data", len(value)):
        pyro.sample(name, distribution, obs=value)


def regression(prior: Callable[[], Any], noise: Callable[[Tensor], Any] = lambda m: dist.Normal(m, 0.5)) -> Model:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", prior())
        observed("y", noise(X @ w), y)

    return model


def plain() -> Any:
    return dist.Normal(torch.zeros(2), 1.0).to_event(1)


LINE = regression(plain)


def heavy(prior: Any) -> Model:
    """A likelihood with tails as of 1/x."""
    return lambda: pyro.factor("tails", -0.5 * (1.0 + pyro.sample("x", prior).square()).log())


def masked(X: Tensor, y: Tensor) -> None:
    w = normal("w", 2)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y.nan_to_num(), obs_mask=~y.isnan())


def subsampled(size: int | None) -> Model:
    def model(X: Tensor, y: Tensor) -> None:
        w = normal("w", 2)
        with pyro.plate("data", len(X), subsample_size=size) as index:
            pyro.sample("y", dist.Normal((X @ w)[index], 0.5), obs=y[index])

    return model


def truncated(finite: bool) -> Model:
    def model(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        log_weights = dist.Poisson(rate).log_prob(torch.arange(30.0))
        with pyro.plate("data", len(y)):
            count = dist.Categorical(logits=log_weights) if finite else dist.Poisson(rate)
            n = pyro.sample("n", count)
            pyro.sample("y", dist.Normal(n.to(y), 0.5), obs=y)

    return model


def moving(fixed: bool) -> Model:
    def model(y: Tensor) -> None:
        top = pyro.sample("top", dist.Gamma(20.0, 4.0))
        x = top * pyro.sample("x", dist.Uniform(0.0, 1.0)) if fixed else pyro.sample("x", dist.Uniform(0.0, top))
        observed("y", dist.Normal(x, 1.0), y)

    return model


def column_in_plate(squeezed: bool) -> Model:
    def model(X: Tensor, y: Tensor) -> None:
        mean = X @ normal("w", 2, 1)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean.squeeze(-1) if squeezed else mean, 0.5), obs=y)

    return model


def in_plate(declared: bool) -> Model:
    @config_enumerate
    def model(y: Tensor) -> None:
        mu, p = normal("mu", 2), pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(p)).long()
            pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y)
        extra = dist.Normal(mu[0], 1.0).expand([3])
        pyro.sample("more", extra.to_event(1) if declared else extra, obs=torch.zeros(3))

    return model


def detached(tensors: bool) -> Model:
    def model(X: Tensor, y: Tensor) -> None:
        alpha = pyro.param("alpha", lambda: torch.tensor(1.0), constraint=constraints.positive)
        scale = alpha.rsqrt() if tensors else torch.tensor(float(alpha)).rsqrt()
        w = pyro.sample("w", dist.Normal(torch.zeros(2), scale).to_event(1))
        observed("y", dist.Normal(X @ w, 0.5), y)

    return model


def registered(as_module: bool) -> Model:
    if as_module:
        net = nn.Linear(2, 1, bias=False).double()

        def model(X: Tensor, y: Tensor) -> None:
            pyro.module("net", net)
            observed("y", dist.Normal(net(X).squeeze(-1) + normal("b"), 0.5), y)

        return model

    class Net(PyroModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = PyroModule[nn.Linear](2, 1, bias=False)
            self.net.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))

        def forward(self, X: Tensor, y: Tensor) -> None:
            observed("y", dist.Normal(self.net(X).squeeze(-1) + normal("b"), 0.5), y)

    return Net()


def random_numbers(named: bool) -> Model:
    def model(X: Tensor, y: Tensor) -> None:
        shift = normal("shift") if named else torch.randn(())
        observed("y", dist.Normal(X @ normal("w", 2) + shift, 0.5), y)

    return model


def branching(always: bool) -> Model:
    def model(X: Tensor, y: Tensor) -> None:
        w = normal("w", 2)
        b = normal("b") if always or (w[0] > -10.0 and float(w.detach().sum()) >= 0.0) else 0.0
        observed("y", dist.Normal(X @ w + b, 0.5), y)

    return model


def separable(sd: float | None) -> Model:
    def prior() -> Any:
        flat = dist.ImproperUniform(constraints.real_vector, (), (2,))
        return flat if sd is None else dist.Normal(torch.zeros(2), sd).to_event(1)

    return regression(prior, lambda m: dist.Bernoulli(logits=m))


def two_parameters(X: Tensor, y: Tensor) -> None:
    observed("y", dist.Normal(X @ normal("w", 2), normal("s").exp()), y)


def process(jitter: float) -> Model:
    def model(x: Tensor, y: Tensor) -> None:
        K = torch.exp(-0.5 * (x[:, None] - x).square()) + jitter * torch.eye(len(x))
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(x)), K))
        observed("y", dist.Normal(f, 0.5), y)

    return model


def unbounded(prior: bool) -> Model:
    """Data that are met exactly: a noise scale as a param has no best value; as a maximised site it has a prior."""

    def model(y: Tensor) -> None:
        sigma = (
            pyro.sample("sigma", dist.InverseGamma(3.0, 1.0))
            if prior
            else pyro.param("sigma", lambda: torch.tensor(1.0), constraint=constraints.positive)
        )
        pyro.sample("y", dist.Normal(normal("mu") * RAMP, sigma).to_event(1), obs=y)

    return model


TWICE = torch.tensor([0.0, 0.0, 1.0, 2.0]).double()
RAMP = torch.arange(1.0, 6.0).double()
SAME = torch.full((5,), 0.3).double()
SEPARATED = (X[:, 0] > 0).double()
LAPLACE, SOFT = (
    (lambda: dist.Laplace(torch.zeros(2), 0.01).to_event(1)),
    (lambda: dist.SoftLaplace(torch.zeros(2), 0.01).to_event(1)),
)
WORDS = np.where(LABELS.numpy() > 0, "yes", "no")
QUIET = Stop(progress=False)


def steps(num: int) -> Stop:
    return Stop(num_steps=num, progress=False)


def learned(X: Tensor, y: Tensor) -> None:
    alpha = pyro.param("alpha", lambda: torch.tensor([30.0, 0.01]), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(2), alpha.rsqrt()).to_event(1))
    observed("y", dist.Bernoulli(logits=X @ w), y)


REMEDIES: dict[str, Remedy] = {
    "no data": Remedy(BadInput, "no observed site", lambda: fit(lambda X: normal("w", 2), X), lambda: fit(LINE, X, Y)),
    "minibatches": Remedy(
        UnsupportedModel, "Drop subsample_size", lambda: fit(subsampled(5), X, Y), lambda: fit(subsampled(None), X, Y)
    ),
    "nothing to integrate": Remedy(
        UnsupportedModel,
        "Give a weight a prior",
        lambda: fit(lambda y: observed("y", dist.Normal(0.0, 1.0), y), Y),
        lambda: fit(lambda y: observed("y", dist.Normal(normal("m"), 1.0), y), Y),
    ),
    "a latent count": Remedy(
        UnsupportedModel,
        r"Truncate it \(Categorical\)",
        lambda: fit(truncated(False), COUNTS),
        lambda: fit(truncated(True), COUNTS),
    ),
    "a support that moves": Remedy(
        UnsupportedModel,
        "Draw a site on a fixed support",
        lambda: fit(moving(False), COUNTS),
        lambda: fit(moving(True), COUNTS),
    ),
    "a loose axis": Remedy(
        UnsupportedModel, r"call \.to_event\(1\)", lambda: fit(in_plate(False), Y), lambda: fit(in_plate(True), Y)
    ),
    "a column in a plate": Remedy(
        BadInput,
        r"take \.squeeze\(-1\)",
        lambda: fit(column_in_plate(False), X, Y),
        lambda: fit(column_in_plate(True), X, Y),
    ),
    "a param as a float": Remedy(
        UnsupportedModel,
        "Expected tensors that the model computes with",
        lambda: fit(detached(False), X, Y),
        lambda: fit(detached(True), X, Y),
    ),
    "the same, held": Remedy(
        UnsupportedModel,
        r"pass maximise=\(\)",
        lambda: fit(detached(False), X, Y),
        lambda: fit(detached(False), X, Y, maximise=()),
    ),
    "pyro.module": Remedy(
        UnsupportedModel,
        "PyroModule with PyroSample priors",
        lambda: fit(registered(True), X, Y),
        lambda: fit(registered(False), X, Y),
    ),
    "the same module, held": Remedy(
        UnsupportedModel,
        r"pass maximise=\(\)",
        lambda: fit(registered(True), X, Y),
        lambda: fit(registered(True), X, Y, maximise=()),
    ),
    "unnamed numbers": Remedy(
        UnsupportedModel,
        "must come from a named pyro.sample site",
        lambda: fit(random_numbers(False), X, Y),
        lambda: fit(random_numbers(True), X, Y),
    ),
    "a branch": Remedy(
        UnsupportedModel,
        "the same latent sites and params at every value",
        lambda: fit(branching(False), X, Y),
        lambda: fit(branching(True), X, Y),
    ),
    "two columns of data": Remedy(
        BadInput, "squeeze the data", lambda: fit(LINE, X, Y[:, None]), lambda: fit(LINE, X, Y[:, None].squeeze(-1))
    ),
    "gaps, masked": Remedy(
        BadInput,
        r"or mask them, with any number of the support in their place \(obs_mask",
        lambda: fit(LINE, X, Y.where(Y > -1, torch.nan)),
        lambda: fit(masked, X, Y.where(Y > -1, torch.nan)),
    ),
    "gaps": Remedy(
        BadInput,
        "Remove rows with nan",
        lambda: fit(LINE, X, Y.where(Y > -1, torch.nan)),
        lambda: fit(LINE, X[Y > -1], Y[Y > -1]),
    ),
    "two precisions": Remedy(
        BadInput,
        r"data\.float\(\)",
        lambda: fit(
            regression(
                lambda: dist.Normal(torch.zeros(2, dtype=torch.float32), 1.0).to_event(1), lambda m: dist.Normal(m, 0.5)
            ),
            X.float(),
            Y,
        ),
        lambda: fit(
            regression(lambda: dist.Normal(torch.zeros(2, dtype=torch.float32), 1.0).to_event(1)), X.float(), Y.float()
        ),
    ),
    "tails that fall too slowly": Remedy(
        ImproperPosterior,
        "give the site a proper prior",
        lambda: fit(heavy(dist.ImproperUniform(constraints.real, (), ()))),
        lambda: fit(heavy(dist.Normal(0.0, 100.0))),
    ),
    "separable classes": Remedy(
        ImproperPosterior,
        r"Normal\(0, 10\)",
        lambda: fit(separable(None), X, SEPARATED),
        lambda: fit(separable(10.0), X, SEPARATED),
    ),
    "a corner": Remedy(
        NotSmooth, "SoftLaplace", lambda: fit(regression(LAPLACE), X, Y), lambda: fit(regression(SOFT), X, Y)
    ),
    "two learned parameters": Remedy(
        UnsupportedModel,
        "Use curvature=exact_hessian",
        lambda: fit(two_parameters, X, Y, curvature=gauss_newton, marginalise=()),
        lambda: fit(two_parameters, X, Y, curvature=exact_hessian, marginalise=()),
    ),
    "inputs that occur twice": Remedy(
        BadInput,
        "give it more jitter",
        lambda: fit(process(0.0), TWICE, TWICE),
        lambda: fit(process(1e-6), TWICE, TWICE),
    ),
    "data that are met exactly": Remedy(
        NotConverged,
        "runs to infinity",
        lambda: fit(unbounded(False), 0.3 * RAMP),
        lambda: fit(unbounded(True), 0.3 * RAMP, maximise=["sigma"]),
    ),
    "equal data": Remedy(
        BadInput,
        r"observes one constant, 0.3, 5 times.*or pass maximise=\(\)",
        lambda: fit(unbounded(False), SAME),
        lambda: fit(unbounded(False), SAME, maximise=()),
    ),
    "too few steps": Remedy(
        NotConverged,
        "raise num_steps",
        lambda: fit(learned, X, LABELS, stop=steps(1)),
        lambda: fit(learned, X, LABELS, stop=steps(300)),
    ),
    "too few steps, counted": Remedy(
        NotConverged,
        r"Stop\(throw=False\)",
        lambda: fit(learned, X, LABELS, stop=steps(1)),
        lambda: fit(learned, X, LABELS, stop=Stop(tolerance=0.0, num_steps=1)),
    ),
    "data in the constructor": Remedy(
        BadInput, "expected a callable Pyro model", lambda: LaplaceEvidence(X), lambda: fit(LINE, X, Y)
    ),
    "an update of another engine": Remedy(
        BadInput,
        "expected",
        lambda: EvidenceEM(gaussian_mixture(2), update=3),
        lambda: EvidenceEM(gaussian_mixture(2)).run(X),
    ),
    "no mixture": Remedy(
        UnsupportedModel, "LaplaceEvidence", lambda: EvidenceEM(LINE).run(X, Y), lambda: fit(LINE, X, Y)
    ),
    "no linear predictor": Remedy(
        UnsupportedModel,
        "REVM takes such models",
        lambda: RVM(regression(plain, lambda m: dist.Bernoulli(logits=m.tanh()))).run(X, LABELS),
        lambda: REVM(regression(plain, lambda m: dist.Bernoulli(logits=m.tanh()))).run(X, LABELS),
    ),
    "labels that are not numbers": Remedy(
        BadInput,
        r"pandas\.factorize",
        lambda: fit(classifier(Linear()), X, WORDS),
        lambda: fit(classifier(Linear()), X, pd.factorize(WORDS)[0]),
    ),
}
