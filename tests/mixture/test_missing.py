"""Gaps in the data: integrated out in the Pyro model itself, so that every way to the evidence agrees."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, LaplaceEvidence, Start, Stop, class_conditional
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.models import marginalised
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mixture import FullNoise, SharedNoise, gaussian_mixture, linear_mixture
from pyro_evidence.program.distributions import WithGaps
from tests.models_for_tests.mixture_cases import assert_approx, same_as_generic

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def gappy(num_data: int = 60) -> Tensor:
    """Two blobs in three columns, a quarter of the values missing, one row of nothing but gaps."""
    generator = torch.Generator().manual_seed(0)
    Y = torch.randn(num_data, 3, generator=generator)
    Y[num_data // 2 :] = 0.5 * Y[num_data // 2 :] + torch.tensor([6.0, 3.0, -4.0])
    Y[torch.rand(num_data, 3, generator=generator) < 0.25] = math.nan
    Y[7] = math.nan
    return Y


def fit(Y: Tensor, num_components: int = 4, **model: object) -> MixturePosterior:
    engine = EvidenceEM(marginalised(gaussian_mixture(num_components, **model)))  # type: ignore[arg-type]
    found = engine.run(Y)
    assert isinstance(found, MixturePosterior)
    return found


def marginal_log_prob(found: MixturePosterior, row: Tensor) -> Tensor:
    """By leaving out columns."""
    seen = ~row.isnan()
    loc, scale = found.mode["w"][:, seen], found.hyperparameters["beta"][:, seen].rsqrt()
    each = dist.Normal(loc, scale).to_event(1).log_prob(row[seen])
    return (found.hyperparameters["mixing"].log() + each).logsumexp(0)


def test_log_density_and_responsibilities_are_those_of_the_columns_that_were_seen() -> None:
    Y = gappy()
    found = fit(Y)
    assert found.num_components == 2
    expected = torch.stack([marginal_log_prob(found, row) for row in Y])
    assert_exact(found.log_prob(Y), expected)
    assert_exact(found.responsibilities(Y)[7], found.hyperparameters["mixing"])


@pytest.mark.parametrize("noise", [None, SharedNoise()])
def test_the_posterior_is_laplaces_of_the_pyro_model(noise: SharedNoise | None) -> None:
    same_as_generic(fit(gappy(), **({} if noise is None else {"noise": noise})), gappy())


def test_one_component_is_a_product_over_columns() -> None:
    """Exact: the columns of one diagonal kernel have nothing to do with each other."""
    Y = gappy()
    found = fit(Y, 1, alpha=0.1)
    beta, total = found.hyperparameters["beta"][0], torch.zeros(())
    for column, precision in zip(Y.T, beta, strict=True):
        y = column[~column.isnan()]
        variance = 10.0 * y.var(correction=0)
        covariance = torch.eye(len(y)) / precision + variance
        total = total + dist.MultivariateNormal(y.mean().expand(len(y)), covariance).log_prob(y)
    assert_approx(found.log_evidence, total)


def test_without_gaps_nothing_changes() -> None:
    Y = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
    one, other = (EvidenceEM(m(gaussian_mixture(2))).run(Y) for m in (lambda model: model, marginalised))
    assert_exact(one.log_evidence, other.log_evidence)


def test_a_missing_row_changes_nothing() -> None:
    Y = gappy()
    one, other = fit(Y, 2, units=fixed_units), fit(torch.cat([Y[:7], Y[8:]]), 2, units=fixed_units)
    assert_approx(one.log_evidence, other.log_evidence)


def fixed_units(Y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tensor([3.0, 1.0, -2.0]), torch.tensor([3.0, 2.0, 2.0])


def test_correlated_noise_takes_the_generic_way() -> None:
    """Oracle: the marginal of what was seen, by rows and columns of the covariance."""
    generator = torch.Generator().manual_seed(2)
    root = torch.randn(3, 3, generator=generator)
    fn = dist.MultivariateNormal(torch.randn(5, 3, generator=generator), root @ root.T + torch.eye(3))
    Y = gappy()[3:8]
    seen = ~Y.isnan()
    actual = WithGaps(fn, seen).log_prob(torch.where(seen, Y, 0.0))
    for row, on, loc, log_prob in zip(Y, seen, fn.loc, actual, strict=True):
        expected = torch.zeros(())
        if bool(on.any()):
            expected = dist.MultivariateNormal(loc[on], fn.covariance_matrix[0][on][:, on]).log_prob(row[on])
        assert_exact(log_prob, expected)
    stop = Stop(num_steps=2, throw=False)
    engine = EvidenceEM(marginalised(gaussian_mixture(1, noise=FullNoise())), start=Start(restarts=1), stop=stop)
    with pytest.warns(UserWarning, match="ran out of steps"):
        found = engine.run(gappy(16)[:, :2])
    assert not isinstance(found, MixturePosterior) and bool(found.log_evidence.isfinite())


def test_weights_and_a_conditional_density() -> None:
    Y = gappy()
    twice = EvidenceEM(marginalised(gaussian_mixture(2))).run(Y, torch.ones(len(Y)))
    assert_approx(twice.log_evidence, fit(Y, 2).log_evidence)
    X = torch.randn(len(Y), 1, generator=torch.Generator().manual_seed(3))
    found = EvidenceEM(marginalised(linear_mixture(2, Linear(), num_outputs=3))).run(X, Y)
    assert isinstance(found, MixturePosterior)
    same_as_generic(found, X, Y)


def mean_of_what_is_there(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_any_model_may_have_gaps() -> None:
    y = torch.tensor([1.0, math.nan, 0.5, math.nan])
    found = LaplaceEvidence(marginalised(mean_of_what_is_there)).run(y)
    assert_exact(found.log_evidence, LaplaceEvidence(mean_of_what_is_there).run(y[[0, 2]]).log_evidence)


def heavy_tails(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MultivariateStudentT(4.0, mean.expand(2), torch.eye(2)), obs=y)


def test_what_cannot_be_integrated_is_refused() -> None:
    with pytest.raises(ValueError, match="MultivariateStudentT with missing elements"):
        LaplaceEvidence(marginalised(heavy_tails)).run(gappy()[:, :2])


def test_a_classifier_with_gaps() -> None:
    Y, labels = gappy(), (torch.arange(60) >= 30).long()
    found = class_conditional(EvidenceEM(marginalised(gaussian_mixture(2))), Y, labels)
    seen = ~Y.isnan().all(-1)
    assert bool((found.labels(Y)[seen] == labels[seen]).double().mean() > 0.95)


def test_gaps_are_refused_unless_asked_for() -> None:
    with pytest.raises(BadInput, match=r"EvidenceEM\(marginalised\(model\)\)"):
        EvidenceEM(gaussian_mixture(2)).run(gappy())
    Y = gappy()
    Y[:, 1] = math.nan
    with pytest.raises(BadInput, match=r"columns \[1\]"):
        EvidenceEM(marginalised(gaussian_mixture(2))).run(Y)
    Y[:, 1] = math.inf
    with pytest.raises(BadInput, match="inf"):
        EvidenceEM(marginalised(gaussian_mixture(2))).run(Y)


def test_a_posterior_of_gaps_survives_the_disk(tmp_path: object) -> None:
    found = fit(gappy())
    found.save(f"{tmp_path}/fit.pt")
    again = MixturePosterior.load(f"{tmp_path}/fit.pt", marginalised(gaussian_mixture(4)))
    assert_exact(again.log_evidence, found.log_evidence)
    assert_exact(again.responsibilities(), found.responsibilities())
