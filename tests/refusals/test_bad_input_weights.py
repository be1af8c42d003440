"""Bad or poor input to the relevance machines, through the public face: refused with what to do, or a finite fit."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, VRVM, BadInput, UnsupportedModel
from pyro_evidence.relevance import L1Prior
from tests.models_for_tests import weight_models as models
from tests.models_for_tests.weight_models import kernel

ENGINES = pytest.mark.parametrize("engine", [REVM, RVM, VRVM])


def problem(N: int = 40, M: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    Phi = torch.randn(N, M, generator=generator)
    return Phi, (Phi[:, 0] + 0.5 * torch.randn(N, generator=generator) > 0).double()


POOR = {
    "one observation": (torch.ones(1, 2), torch.ones(1)),
    "one label": (torch.cat([problem()[0], torch.ones(40, 1)], 1), torch.ones(40)),
    "constant columns": (torch.cat([torch.zeros(40, 1), torch.ones(40, 1)], 1), torch.arange(40.0).fmod(2.0)),
    "nothing but zeros": (torch.zeros(40, 3), problem()[1]),
    "all columns twice": (torch.cat([problem()[0]] * 2, 1), problem()[1]),
    "more weights than data": (problem(5, 40)[0], torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])),
    "columns of 1e8": (1e8 * problem()[0], problem()[1]),
}


@ENGINES
def test_columns_of_1e_minus_8_are_used_or_refused_with_their_factor(engine: Any) -> None:
    (Phi, t), small = problem(), 1e-8 * problem()[0]
    if engine is REVM:  # its ridge has a unit
        with pytest.raises(
            BadInput, match=r"every axis would be pruned for that.* Multiply the design matrix by 3e\+08"
        ):
            engine(models.logistic).run(small, t)
        small = 3e8 * small
    posterior, usual = engine(models.logistic).run(small, t), engine(models.logistic).run(Phi, t)
    assert abs(float(posterior.log_evidence - usual.log_evidence)) < 2.0


@ENGINES
@pytest.mark.parametrize("case", POOR)
@pytest.mark.filterwarnings("ignore::UserWarning")  # REVM says where all axes are pruned
def test_poor_data_give_finite_numbers(engine: Any, case: str) -> None:
    Phi, t = POOR[case]
    posterior = engine(models.logistic).run(Phi, t)
    assert bool(torch.isfinite(posterior.mode["w"]).all())
    assert bool(torch.isfinite(posterior.predictor()[1]).all())
    assert -1e4 < float(posterior.log_evidence) < 0.0


@pytest.mark.parametrize("engine", [REVM, RVM])
@pytest.mark.parametrize("labels", [(0, 1), (2, 2)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_absent_class_gets_little_probability(engine: Any, labels: tuple[int, int]) -> None:
    Phi, t = problem()
    Phi = torch.cat([Phi, torch.ones(40, 1)], 1)
    posterior = engine(models.softmax).run(Phi, torch.tensor(labels)[t.long()])
    shares = torch.softmax(Phi @ posterior.mode["w"].mT, -1).mean(0)
    absent = [c for c in range(3) if c not in labels]
    assert bool((shares[absent] < 1.0 / 3.0).all())


def test_a_duplicated_column_is_one_column_of_twice_the_prior_variance() -> None:
    """So it changes nothing for RVM, and for REVM, which depends on columns' sizes, as much as a factor sqrt(2)."""
    Phi, t = problem(200)
    twice = torch.cat([Phi[:, :1], Phi], 1)
    larger = torch.cat([math.sqrt(2.0) * Phi[:, :1], Phi[:, 1:]], 1)
    for prior in (None, L1Prior()):
        settings: dict[str, Any] = {"prior": prior} if prior else {}
        a, b = (REVM(models.logistic, **settings).run(P, t).predictor() for P in (twice, larger))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    found, alone = (RVM(models.logistic).run(P, t).predictor() for P in (twice, Phi))
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-8)


@ENGINES
def test_a_width_of_zero_is_refused_as_what_it_makes_of_the_features(engine: Any) -> None:
    X = torch.randn(20, 2)
    t = (X[:, 0] > 0).double()
    with pytest.raises(BadInput, match=r"argument 0: shape \(20, 21\), torch\.float64, 20 nan"):
        engine(models.logistic).run(kernel(X, X, 0.0), t)


@ENGINES
def test_noise_of_scale_zero_is_refused(engine: Any) -> None:
    def silent(Phi: Tensor, t: Tensor) -> None:
        w = models.weights(Phi.shape[1], Phi)
        with pyro.plate("data", len(Phi)):
            pyro.sample("t", dist.Normal(Phi @ w, 0.0), obs=t)

    with pytest.raises(BadInput, match=r"Expected parameter scale .* GreaterThan\(lower_bound=0\.0\)"):
        engine(silent).run(*problem())


@ENGINES
@pytest.mark.parametrize(("spoilt", "said"), [(math.nan, "1 nan"), (math.inf, "1 inf")])
def test_features_that_are_no_numbers_are_refused(engine: Any, spoilt: float, said: str) -> None:
    Phi, t = problem()
    Phi[3, 2] = spoilt
    with pytest.raises(BadInput, match=rf"argument 0: shape \(40, 5\), torch\.float64, {said}"):
        engine(models.logistic).run(Phi, t)


@ENGINES
def test_labels_outside_the_support_are_refused(engine: Any) -> None:
    Phi, t = problem()
    with pytest.raises(BadInput, match=r"site 't'.*within the support"):
        engine(models.logistic).run(Phi, 2.0 * t)


@pytest.mark.parametrize("ridge", [-1e-3, math.nan, math.inf, "1e-2", None])
def test_what_is_no_ridge_is_refused(ridge: Any) -> None:
    with pytest.raises(BadInput, match=r"ridge=.*; expected a precision of at least 0 and finite, such as 1e-2"):
        REVM(models.logistic, ridge=ridge)


def test_a_ridge_may_be_a_tensor_and_what_a_function_finds_is_checked() -> None:
    Phi, t = problem()
    one, other = (REVM(models.logistic, ridge=r).run(Phi, t) for r in (0.1, torch.tensor(0.1)))
    torch.testing.assert_close(one.weights, other.weights)
    with pytest.raises(BadInput, match="ridge=inf; expected a precision of at least 0 and finite"):
        REVM(models.logistic, ridge=lambda weights, settings: math.inf).run(Phi, t)


def test_what_is_no_prior_and_no_site_is_refused() -> None:
    with pytest.raises(BadInput, match=r"prior='laplace' has no alpha and .*; expected an object such as L1Prior"):
        REVM(models.logistic, prior="laplace")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="site=3; expected a latent site's name, or several: w"):
        REVM(models.logistic, site=3).run(*problem())  # type: ignore[arg-type]


def test_the_variational_machine_names_the_one_that_takes_the_likelihood() -> None:
    Phi, t = problem()
    with pytest.raises(UnsupportedModel, match=r"Bernoulli with a linear predictor.*Use RVM, which takes"):
        VRVM(models.poisson).run(Phi, t)
