"""Arguments that cannot be meant are messages wherever they are given, and the user's own errors stay their own."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import (
    REVM,
    RVM,
    VRVM,
    BadInput,
    EvidenceEM,
    LaplaceEvidence,
    LaplacePosterior,
    Start,
    Stop,
    UnsupportedModel,
    class_conditional,
    committee,
    damped,
    exact_hessian,
    find_modes,
    predict_latent,
    sbc,
)
from pyro_evidence.models import gp, kernels
from pyro_evidence.models.basis import GaussianRBF, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import DiagonalNoise, gaussian_mixture, linear_mixture
from pyro_evidence.models.mlp import MLP, Binary
from pyro_evidence.models.mppca import IsotropicNoise, mppca
from pyro_evidence.models.regression import regression

QUIET = Stop(progress=False)


def linear(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)


@cache
def data() -> tuple[Tensor, Tensor]:
    X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return X, X[:, 0] - X[:, 1]


@cache
def heaps() -> Tensor:
    Y = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([Y, Y + 6.0])


@cache
def posteriors() -> dict[str, Any]:
    X, t = data()
    counted = Stop(tolerance=0.0, num_steps=3, progress=False)
    return {
        "laplace": LaplaceEvidence(linear, stop=QUIET).run(X, t),
        "relevance": RVM(linear).run(X, t),
        "mixture": EvidenceEM(gaussian_mixture(2), stop=counted).run(heaps()),
        "planes": EvidenceEM(mppca(2, 1), stop=counted).run(heaps()),
    }


def refused(error: type[Exception], message: str, run: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        run()


@pytest.mark.parametrize("name", ["laplace", "relevance", "mixture", "planes"])
@pytest.mark.parametrize("count", [1.5, "a", None, True, -1])
def test_draws_are_counted_in_whole_numbers(name, count) -> None:
    refused(BadInput, "num_samples.*; expected a whole number", lambda: posteriors()[name].get_samples(count))


@pytest.mark.parametrize("name", ["laplace", "relevance", "mixture", "planes"])
def test_no_draws_are_no_draws(name) -> None:
    assert all(len(v) == 0 for v in posteriors()[name].get_samples(0).values())


@pytest.mark.parametrize("name", ["laplace", "mixture", "planes"])
@pytest.mark.parametrize("count", [0, 1.5, "a", None])
@pytest.mark.parametrize("method", ["diagnostics", "log_weights"])
def test_checks_want_draws(name, method, count) -> None:
    if method == "diagnostics" and count is None:
        return  # as many as the size of the fit allows
    refused(BadInput, "num_samples.*; expected a whole number", lambda: getattr(posteriors()[name], method)(count))


@pytest.mark.parametrize("seed", ["a", 1.5, True, 2**70])
def test_seeds_are_whole_numbers(seed) -> None:
    for run in (
        *(lambda p=p: p.get_samples(2, seed=seed) for p in posteriors().values()),
        lambda: posteriors()["mixture"].sample(2, seed=seed),
        lambda: posteriors()["planes"].sample(2, seed=seed),
        lambda: LaplaceEvidence(linear, start=Start(seed=seed)),
        lambda: Start(seed=seed),
        lambda: find_modes(posteriors()["laplace"], start=Start(seed=seed)),
    ):
        refused(BadInput, "seed=.*; expected a whole number", run)


@pytest.mark.parametrize("prob", [0.0, 1.5, "a", None, math.nan])
def test_summaries_take_a_probability(prob) -> None:
    refused(BadInput, "prob=.*; expected a probability", lambda: posteriors()["laplace"].summary(prob))


@pytest.mark.parametrize("q", [None, "a", 1.5, [0.1, -0.1], math.nan])
@pytest.mark.parametrize("name", ["laplace", "relevance"])
def test_quantiles_take_probabilities(name, q) -> None:
    refused(BadInput, "quantiles.*: expected probabilities", lambda: posteriors()[name].quantiles(q))


@pytest.mark.parametrize("engine", [RVM, VRVM, REVM, LaplaceEvidence])
def test_inputs_without_columns_are_refused(engine) -> None:
    X, t = data()
    refused(BadInput, r"latent sites have no elements: \{'w': \(0,\)\}", lambda: engine(linear).run(X[:, :0], t))


@pytest.mark.parametrize("value", [1e300, 1e-300])
def test_extreme_precisions_are_refused(value) -> None:
    for make in (
        lambda: regression(Polynomial(1), beta=value),
        lambda: regression(Polynomial(1), alpha=value),
        lambda: EvidenceEM(gaussian_mixture(2, noise=DiagonalNoise(beta=value))).run(heaps()),
        lambda: EvidenceEM(mppca(2, 1, noise=IsotropicNoise(beta=value))).run(heaps()),
    ):
        refused(BadInput, rf"(alpha|beta) has the value {value:g}.*powers are floats".replace("+", r"\+"), make)


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("noise=None; expected a function", lambda: gaussian_mixture(2, noise=None)),
        ("noise=None; expected a function", lambda: linear_mixture(2, Polynomial(1), noise=None)),
        ("units=None; expected a function", lambda: gaussian_mixture(2, units=None)),
        (
            "units gave None; expected 2 tensors",
            lambda: EvidenceEM(gaussian_mixture(2, units=lambda Y: None)).run(heaps()),
        ),
        ("num_outputs='a'; expected", lambda: linear_mixture(2, Polynomial(1), num_outputs="a")),
        ("hidden is a NoneType; expected", lambda: MLP(3, None)),
        ("hidden='a'; expected", lambda: MLP(3, "a")),
        ("hidden=2.5; expected", lambda: MLP(3, 2.5)),
        ("hidden='a'; expected", lambda: MLP(3, [2, "a"])),
        ("hidden=True; expected", lambda: MLP(3, True)),
        ("hidden=-1; expected", lambda: MLP(3, -1)),
        ("output=None has no distribution", lambda: MLP(3, 2, output=None)),
        ("output=Binary is a class", lambda: MLP(3, 2, output=Binary)),
        ("activation=None; expected a function", lambda: MLP(3, 2, activation=None)),
        ("activation='tanh'; expected a function", lambda: MLP(3, 2, activation="tanh")),
        ("groups is a list; expected a tensor", lambda: regression(Polynomial(1), groups=[0, 0])),
        ("groups is a list; expected a tensor", lambda: classifier(Polynomial(1), groups=[0, 0])),
        ("alpha has no value", lambda: regression(Polynomial(1), alpha=[])),
        ("centres is a NoneType; expected a tensor", lambda: GaussianRBF(None, 1.0)),
        ("scale is a str; expected a number", lambda: GaussianRBF(torch.ones(2, 1), "a")),
        (r"damped\(None, ...\); expected a curvature", lambda: damped(None, 1.0)),
        ("amount=None", lambda: damped(exact_hessian, None)),
        ("restarts=0; expected", lambda: find_modes(posteriors()["laplace"], start=Start(restarts=0))),
        ("num_bins='a'; expected", lambda: sbc(linear, lambda m: m, *data(), num_bins="a")),
        ("num_bins=0; expected", lambda: sbc(linear, lambda m: m, *data(), num_bins=0)),
        ("posteriors is a NoneType; expected a list", lambda: committee(None)),
        ("chunks is a NoneType; expected a list", lambda: REVM(linear).run_chunks(None)),
        ("num_steps='a'; expected", lambda: Stop(num_steps="a")),
        ("maximise=0; expected a list", lambda: LaplaceEvidence(linear, maximise=0).run(*data())),
        ("maximise=1.5; expected a list", lambda: LaplaceEvidence(linear, maximise=1.5).run(*data())),
        ("path is a NoneType", lambda: LaplacePosterior.load(None, linear)),
        ("model is a NoneType", lambda: LaplaceEvidence(None)),
        (
            "mean is set to 'a'; expected",
            lambda: LaplaceEvidence(gp.gp_regression(kernels.RBF(), mean="a")).run(*data()),
        ),
        ("cannot be run on these arguments", lambda: posteriors()["relevance"].predictor("a")),
    ],
)
def test_settings_are_looked_at(message, make) -> None:
    refused(BadInput, message, make)


def test_another_kind_of_posterior_has_no_latent_function() -> None:
    refused(UnsupportedModel, "predict_latent needs a model", lambda: predict_latent(None))


def test_derivatives_of_the_callers_are_left_out() -> None:
    Y, (X, t) = heaps(), data()
    for name in ("mixture", "planes"):
        posterior = posteriors()[name]
        torch.testing.assert_close(posterior.log_prob(Y.clone().requires_grad_()), posterior.log_prob(Y))
    found = LaplaceEvidence(linear, stop=QUIET).run(X.clone().requires_grad_(), t).log_evidence
    torch.testing.assert_close(found, posteriors()["laplace"].log_evidence)


def test_a_class_in_place_of_data_is_refused_at_a_fit_and_after_it() -> None:
    engine = EvidenceEM(mppca(2, 1), start=Start(restarts=1), stop=QUIET)
    for given in (engine.run, engine.run(data()[0]).log_prob):
        with pytest.raises(BadInput, match="expect"):
            given(Tensor)


def test_labels_may_be_true_and_false() -> None:
    Y, labels = heaps(), torch.arange(120) % 2
    engine = EvidenceEM(gaussian_mixture(1), stop=QUIET)
    whole, words = (class_conditional(engine, Y, x) for x in (labels, labels.bool()))
    torch.testing.assert_close(words.log_proba(Y), whole.log_proba(Y))
    torch.testing.assert_close(words.log_prob(Y, labels.bool()), whole.log_prob(Y, labels))
    assert words.labels(Y).dtype == torch.bool


# The user's own errors


def failing(error: Exception) -> Callable[[Tensor, Tensor], None]:
    """A model that runs once and fails wherever it is run with derivatives."""

    def model(X: Tensor, t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
        if torch._C._functorch.is_batchedtensor(w) or w.requires_grad:
            raise error
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(X @ w, 1.0), obs=t)

    return model


@pytest.mark.parametrize("error", [MemoryError("mine"), KeyError("mine"), OSError("mine"), ZeroDivisionError("mine")])
@pytest.mark.parametrize("engine", [LaplaceEvidence, RVM, VRVM, REVM])
def test_an_error_of_the_users_stays_visible(engine, error) -> None:
    with pytest.raises(Exception, match="mine") as caught:
        engine(failing(error)).run(*data())
    assert error in (caught.value, caught.value.__cause__)
    assert "not linear" not in str(caught.value)


def far_away(X: Tensor, t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
    if not torch._C._functorch.is_batchedtensor(w) and float(w.detach().abs().max()) > 5.0:
        raise KeyError("mine")
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 1.0), obs=t)


@pytest.mark.parametrize("engine", [RVM, VRVM])
def test_a_model_that_fails_far_away_is_not_called_bent(engine) -> None:
    with pytest.raises(UnsupportedModel, match="it raises KeyError: 'mine'") as caught:
        engine(far_away).run(*data())
    assert isinstance(caught.value.__cause__, KeyError)
