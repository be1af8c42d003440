"""The relevance eigenvector machine: what it refuses, what it warns of, and poor data."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, ImproperPosterior, NotPositiveDefinite, TooLarge, UnsupportedModel
from pyro_evidence.infer.revm import REVM
from pyro_evidence.relevance.axis_priors import GaussianPrior
from pyro_evidence.relevance.eigen_state import score_centre
from pyro_evidence.relevance.quadratic import JaakkolaJordan, LeastKL, empirical_fisher
from tests.models_for_tests import weight_models as models
from tests.models_for_tests.weight_models import kernel, problem


def saturating(X: Tensor, t: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(X.new_zeros(3, X.shape[1]), 1.0).to_event(2))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Categorical(logits=torch.tanh(X @ w.T)), obs=t)


def test_a_nonlinear_predictor_of_which_no_axis_is_kept() -> None:
    X = torch.randn(100, 30, generator=torch.Generator().manual_seed(0))
    t = (X[:, :2] > 0).sum(1)
    with pytest.warns(UserWarning, match=r"every axis was pruned.*lower it, or pass centre=score_centre"):
        posterior = REVM(saturating).run(X, t)
    assert posterior.num_active == 0
    assert float(posterior.log_evidence) == pytest.approx(-100.0 * math.log(3.0))
    assert posterior.diagnostics()["status"] == "converged"
    assert REVM(saturating, centre=score_centre, ridge=1.0).run(X, t).num_active > 0


@pytest.mark.parametrize(("ridge", "remedy"), [(1e-13, "raise the ridge, say to"), (1e6, "lower it, or pass centre=")])
def test_the_warning_says_which_way_the_ridge_is_wrong(ridge: float, remedy: str) -> None:
    X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    t = (X[:, 0] > 0).double()
    Phi = kernel(X, X, 0.3) if ridge < 1.0 else 100.0 * X
    with pytest.warns(UserWarning, match=f"every axis was pruned.*{remedy}"):
        REVM(models.logistic, ridge=ridge).run(Phi, t)


# Bad input


def test_negative_ridge_is_refused() -> None:
    with pytest.raises(BadInput, match=r"ridge=-1\.0; expected a precision of at least 0"):
        REVM(models.logistic, ridge=-1.0)


def test_no_ridge_on_separable_classes_is_refused() -> None:
    Phi, _ = problem()
    with pytest.raises(ImproperPosterior, match="the classes can be separated"):
        REVM(models.logistic, ridge=0.0).run(Phi, (Phi[:, 0] > 0).double())


def test_no_ridge_with_a_duplicated_column_is_refused() -> None:
    Phi, t = problem()
    with pytest.raises(ImproperPosterior, match="columns of the design coincide"):
        REVM(models.logistic, ridge=0.0).run(torch.cat([Phi, Phi[:, :1]], 1), t)


def test_a_curvature_that_is_not_positive_is_refused_with_the_remedy() -> None:
    Phi = torch.ones(20, 1)
    t = torch.tensor([-5.0, 5.0]).repeat(10)
    with pytest.raises(NotPositiveDefinite, match=r"smallest eigenvalue -.*approximation=empirical_fisher"):
        REVM(models.student, ridge=10.0).run(Phi, t)
    REVM(models.student, ridge=10.0, approximation=empirical_fisher).run(Phi, t)


def test_nan_features_are_refused() -> None:
    Phi, t = problem()
    Phi[3, 2] = math.nan
    with pytest.raises(BadInput, match="1 nan"):
        REVM(models.logistic).run(Phi, t)


def test_several_latents_ask_for_the_site() -> None:
    Phi, t = problem()
    with pytest.raises(BadInput, match="latent sites b, w; say which hold the weights"):
        REVM(models.with_offset).run(Phi, t)
    with pytest.raises(BadInput, match="site='v': no such latent site"):
        REVM(models.with_offset, site="v").run(Phi, t)


def test_sites_of_different_dtype_are_refused() -> None:
    def mixed(X: Tensor, t: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
        b = pyro.sample(
            "b",
            dist.Normal(torch.zeros(2, dtype=torch.float32), torch.tensor(1.0, dtype=torch.float32)).to_event(1),
        )
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Bernoulli(logits=X @ a + X @ b.double()), obs=t)

    Phi, t = problem(M=3)
    with pytest.raises(BadInput, match="latent b are single precision, a, t double"):
        REVM(mixed, site=["a", "b"]).run(Phi[:, :2], t)


def test_a_design_that_does_not_fit_is_refused_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    Phi, t = problem()
    monkeypatch.setattr("pyro_evidence.numerics.linalg.SMALL", 0)
    monkeypatch.setattr("pyro_evidence.numerics.linalg.available_bytes", lambda device: 6000)
    with pytest.raises(
        TooLarge, match=r"design matrix and its Gram matrix needs 6,624 bytes; 6,000 are free.*run_chunks"
    ):
        REVM(models.logistic).run(Phi, t)


def test_constrained_weights_are_refused() -> None:
    def positive(X: Tensor, t: Tensor) -> None:
        w = pyro.sample("w", dist.LogNormal(X.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)

    Phi, t = problem(M=3)
    with pytest.raises(BadInput, match="w are constrained"):
        REVM(positive).run(Phi, t)


@pytest.mark.parametrize("size", [0, 2.5])
def test_groups_of_no_axes_are_refused(size: Any) -> None:
    with pytest.raises(BadInput, match=f"size={size}; expected a whole number of at least 1. It is the number of axes"):
        GaussianPrior(size=size)


@pytest.mark.parametrize("approximation", [JaakkolaJordan(), LeastKL()])
def test_what_knows_the_ridge_alone_refuses_other_priors(approximation: Any) -> None:
    Phi, t = problem()
    with pytest.raises(UnsupportedModel, match="knows the weights' ridge alone, and there are other latent sites"):
        REVM(models.with_offset, site="w", approximation=approximation).run(Phi, t)
    with pytest.raises(UnsupportedModel, match="the predictor is not linear"):
        REVM(models.network, approximation=approximation).run(Phi, t)


def test_the_bound_refuses_another_likelihood() -> None:
    Phi, t = problem()
    with pytest.raises(UnsupportedModel, match=r"Bernoulli with a linear predictor in log odds"):
        REVM(models.poisson, approximation=JaakkolaJordan()).run(Phi, t)


@pytest.mark.parametrize(
    ("Phi", "t"),
    [
        (torch.ones(1, 2), torch.ones(1)),
        (torch.cat([torch.randn(20, 2), torch.ones(20, 1)], 1), torch.ones(20)),
        (torch.cat([torch.zeros(20, 1), torch.ones(20, 1)], 1), torch.arange(20).fmod(2.0)),
        (torch.randn(5, 40), torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])),
    ],
    ids=["one observation", "one label", "constant columns", "more weights than data"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # some are pruned altogether, and say so
def test_poor_data_give_finite_numbers(Phi: Tensor, t: Tensor) -> None:
    posterior = REVM(models.logistic).run(Phi, t)
    assert bool(torch.isfinite(posterior.weights["w"]).all())
    assert bool(torch.isfinite(posterior.log_evidence))


@pytest.mark.filterwarnings("ignore::UserWarning")  # two classes are separated, and that is said
def test_an_absent_class_of_softmax() -> None:
    Phi, _ = problem(M=3)
    posterior = REVM(models.softmax).run(Phi, (Phi[:, 0] > 0).long())
    assert bool(torch.isfinite(posterior.weights["w"]).all())
