"""Generalised linear models in chunks: the posterior of all rows, however they are cut, none of them kept."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.utils.data import DataLoader, TensorDataset

from pyro_evidence import RVM, VRVM, BadInput, LaplaceEvidence, Stop, UnsupportedModel
from pyro_evidence.data import Slices
from pyro_evidence.data.ranks import SINGLE_PROCESS
from pyro_evidence.laplace.approximation import Problem, laplace_problem, laplace_state
from pyro_evidence.laplace.gradient import slope
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.regression import Learned, regression
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.streamed import first_joint, linear_rows, streamed_structure
from tests.models_for_tests import weight_models

assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
QUIET = Stop(progress=False)
QUIET_BOUND = Stop(tolerance=1e-6, gradient_tolerance=1e-3, num_steps=2000, progress=False)
CUTS = [[1, 199], [0, 90, 0, 110, 0]]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 3, generator=generator)
    return X, X[:, 0] - 0.5 * X[:, 1] + 0.4 * torch.randn(200, generator=generator)


def counts(X: Tensor, y: Tensor) -> None:
    """Poisson counts, an offset, a learned spread of the weights and a Student prior of the intercept."""
    scale = pyro.param("scale", torch.tensor(0.7), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), scale).to_event(1))
    b = pyro.sample("b", dist.StudentT(5.0, 0.0, 2.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Poisson((X @ w + b + 0.1 * X[:, 0].cos()).exp()), obs=y)


def cases() -> list[tuple[str, Any, tuple[Tensor, Tensor]]]:
    X, t = data()
    return [
        ("logistic", classifier(Linear(), alpha=Learned(torch.tensor(1.0))), (X, (t > 0).double())),
        ("counts", counts, (X, (0.5 * X[:, 0] + 0.3).exp().round())),
        ("noise", regression(Linear(), beta=Learned(torch.tensor(2.0))), (X, t)),
    ]


@cache
def whole_fit(name: str) -> Any:
    model, args = next((m, a) for n, m, a in cases() if n == name)
    return LaplaceEvidence(model, marginalise=(), stop=QUIET).run(*args)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{len(cut)} chunks")
@pytest.mark.parametrize("name", ["logistic", "counts", "noise"])
def test_any_cut_gives_the_posterior_of_all_rows(name: str, cut: list[int]) -> None:
    model, args = next((m, a) for n, m, a in cases() if n == name)
    whole = whole_fit(name)
    found = LaplaceEvidence(model, marginalise=(), stop=QUIET).run_chunks(
        list(zip(*(a.split(cut) for a in args), strict=True))
    )
    assert_close(found.log_evidence, whole.log_evidence)
    for site, value in whole.mode.items():
        assert_close(found.mode[site], value, rtol=1e-8, atol=1e-9)  # a mode is known to the root of the evidence
    for key, value in whole.hyperparameters.items():
        assert_close(found.hyperparameters[key], value, rtol=1e-6, atol=1e-9)
    assert_close(found.get_samples(3, seed=0)["w"], whole.get_samples(3, seed=0)["w"], rtol=1e-6, atol=1e-7)


def streamed(model: Any, args: tuple[Tensor, ...], size: int) -> Problem:
    chunks, make = Slices(*args, size=size), partial(LogJoint, model)
    rows = linear_rows(model, chunks, SINGLE_PROCESS, make, first_joint(model, chunks, SINGLE_PROCESS, make))
    return Problem(rows.joint, streamed_structure(rows), exact_hessian, torch.ones(rows.joint.latents.size).bool())


@pytest.mark.parametrize("name", ["logistic", "counts", "noise"])
def test_the_slope_of_the_evidence_is_a_sum_over_passes(name: str) -> None:
    """At hyperparameters that are no maximum, with derivatives of the curvature and of the mode; against all rows."""
    model, args = next((m, a) for n, m, a in cases() if n == name)
    whole, parts = laplace_problem(LogJoint(model, args)), streamed(model, args, 60)
    theta = whole.joint.initial_theta + 0.3
    states = [laplace_state(p, theta, p.joint.initial_u, cold=True) for p in (whole, parts)]
    assert_close(states[1].log_evidence, states[0].log_evidence)
    assert_close(slope(states[1]).total, slope(states[0]).total, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise", [None, "beta"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{len(cut)} chunks")
def test_relevance_vectors_of_gaussian_noise(cut: list[int], noise: str | None) -> None:
    X, t = data()
    engine = RVM(regression(Polynomial(2), beta=Learned(torch.tensor(4.0))), noise=noise, stop=QUIET)
    whole = engine.run(X, t)
    found = engine.run_chunks(list(zip(X.split(cut), t.split(cut), strict=True)))
    assert_close(found.log_evidence, whole.log_evidence)
    assert torch.equal(found.relevant, whole.relevant)
    assert_close(found.mode["w"], whole.mode["w"])
    assert_close(found.hyperparameters["beta"], whole.hyperparameters["beta"])


@pytest.mark.parametrize("model", [weight_models.logistic, weight_models.softmax])
def test_relevance_vectors_of_other_likelihoods(model: Any) -> None:
    X, t = data()
    labels = (t > 0).double() if model is weight_models.logistic else (t > 0).long() + (t > 0.7).long()
    whole = RVM(model, stop=QUIET).run(X, labels)
    found = RVM(model, stop=QUIET).run_chunks(DataLoader(TensorDataset(X, labels), batch_size=64))
    assert_close(found.log_evidence, whole.log_evidence)
    assert_close(found.weights["w"], whole.weights["w"], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("noise", [None, "beta"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{len(cut)} chunks")
def test_variational_relevance_vectors_of_gaussian_noise(cut: list[int], noise: str | None) -> None:
    X, t = data()
    engine = VRVM(regression(Polynomial(2), beta=Learned(torch.tensor(4.0))), noise=noise, stop=QUIET_BOUND)
    whole = engine.run(X, t)
    found = engine.run_chunks(list(zip(X.split(cut), t.split(cut), strict=True)))
    assert_close(found.log_evidence, whole.log_evidence, rtol=1e-9)
    assert_close(found.mode["w"], whole.mode["w"], rtol=1e-9)
    assert_close(found.hyperparameters["beta"], whole.hyperparameters["beta"], rtol=1e-9)


def test_variational_relevance_vectors_of_labels() -> None:
    X, t = data()
    whole = VRVM(weight_models.logistic, stop=QUIET_BOUND).run(X, (t > 0).double())
    found = VRVM(weight_models.logistic, stop=QUIET_BOUND).run_chunks(Slices(X, (t > 0).double(), size=64))
    assert_close(found.log_evidence, whole.log_evidence, rtol=1e-9)
    assert_close(found.weights["w"], whole.weights["w"], rtol=1e-9)
    with pytest.raises(BadInput, match="came in chunks"):
        found.predictor()


def test_nothing_is_kept_and_what_needs_data_says_so() -> None:
    X, t = data()
    found = LaplaceEvidence(classifier(Linear()), stop=QUIET).run_chunks(Slices(X, (t > 0).double(), size=100))
    assert found.log_prob(X, (t > 0).double()).shape == (200,)
    for asks in (found.log_prob, found.predict, partial(found.save, "nowhere"), lambda: found.log_evidence_error):
        with pytest.raises(BadInput, match="came in chunks"):
            asks()
    whole = LaplaceEvidence(classifier(Linear()), stop=QUIET).run(X, (t > 0).double())
    assert found.diagnostics(200)["pareto_k"] == pytest.approx(whole.diagnostics(200)["pareto_k"], abs=1e-3)


class Once:
    """Chunks that end after one pass."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor]:
        raise StopIteration


def of_all_rows(X: Tensor, y: Tensor) -> None:
    """A prior that looks at the data."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0 / X.std()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def curved(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal((X @ w).sin(), 1.0), obs=y)


def scaled(X: Tensor, y: Tensor) -> None:
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


@pytest.mark.parametrize(
    ("model", "chunks", "error", "message"),
    [
        (curved, lambda X, t: [(X, t)], UnsupportedModel, "chunk 0: chunks of rows need linear predictors"),
        (scaled, lambda X, t: [(X, t)], UnsupportedModel, r"site\(s\) sigma.*maximise=\['sigma'\]"),
        (of_all_rows, lambda X, t: [(X, t), (2.0 * X, t)], BadInput, "prior of w in chunk 1 is another"),
        (regression(Linear()), lambda X, t: [(X, t), (X[:, :2], t)], BadInput, "chunk 1 is"),
        (regression(Linear()), lambda X, t: [(X, t.sign() * t.new_tensor(torch.nan))], BadInput, "nan"),
        (regression(Linear()), lambda X, t: Once(), BadInput, "gone through only once"),
        (regression(Linear()), lambda X, t: [(X[:0], t[:0])], BadInput, "hold no rows"),
        (regression(Linear()), lambda X, t: [X], BadInput, "chunk 0 is a Tensor"),
    ],
)
def test_what_is_refused(model: Any, chunks: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LaplaceEvidence(model, stop=QUIET).run_chunks(chunks(*data()))


def test_a_site_that_is_named_is_maximised_instead() -> None:
    """What the error message about ``sigma`` advises."""
    X, t = data()
    whole = LaplaceEvidence(scaled, maximise=["sigma"], stop=QUIET).run(X, t)
    found = LaplaceEvidence(scaled, maximise=["sigma"], stop=QUIET).run_chunks(Slices(X, t, size=64))
    assert_close(found.log_evidence, whole.log_evidence)
    assert_close(found.hyperparameters["sigma"], whole.hyperparameters["sigma"], rtol=1e-6)
