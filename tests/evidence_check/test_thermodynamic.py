"""The integral over powers of the likelihood against closed forms; refusals; posteriors on a few axes."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, VRVM, BadInput, EvidenceEM, LaplaceEvidence, Start, compare_evidence
from pyro_evidence.evidence_check import (
    bridge_sampling,
    find_modes,
    importance_sampling,
    tempered_smc,
    thermodynamic_integration,
)
from pyro_evidence.evidence_check.target import target_of
from pyro_evidence.evidence_check.thermodynamic import corrected_trapezoid, jackknife, pooled_moments, powers
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.program import LogJoint
from tests.evidence_check.test_evidence_check import CASES, estimate, logistic, observations
from tests.models_for_tests.exact_models import location, location_log_evidence, straight, straight_data


def moments_of_location(x: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """Oracle: mean and variance of the log likelihood under its power, by the normal posterior's moments."""
    num, total = len(x), x.sum()
    variance = 1.0 / (0.25 + num * power)
    mean = power * total * variance
    square = x.square().sum() - 2.0 * mean * total + num * (mean**2 + variance)
    slope = total - num * mean
    return -0.5 * (num * math.log(math.tau) + square), 0.5 * num**2 * variance**2 + slope**2 * variance


@pytest.mark.parametrize(("num", "tolerance"), [(20, 1e-3), (40, 1e-4), (80, 1e-5)])
def test_corrected_rule_integrates_exact_moments(num: int, tolerance: float) -> None:
    x, power = observations(), powers(num)
    found = corrected_trapezoid(power, *moments_of_location(x, power))
    assert float(found) == pytest.approx(location_log_evidence(x), abs=tolerance)


def test_pooled_moments_are_those_of_the_pool() -> None:
    values = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(0)) + torch.arange(4.0).unsqueeze(-1)
    log_weight = torch.tensor([[0.0, 1.0, -1.0, 2.0], [5.0, 5.0, 5.0, 5.0]]) - 700.0
    kept = torch.tensor([[True, True, True, True], [True, False, True, True]])
    found = pooled_moments(log_weight, values.mean(-1), values.var(-1, correction=0), kept)
    for j, members in enumerate(kept):
        share = log_weight[:, members].softmax(-1).unsqueeze(-1).expand(-1, -1, 50) / 50.0
        mean = (share * values[:, members]).sum((1, 2))
        square = (share * values[:, members].square()).sum((1, 2))
        assert torch.allclose(found[0][:, j], mean)
        assert torch.allclose(found[1][:, j], square - mean.square())


def test_weighing_groups_by_their_evidence_takes_the_bias_out() -> None:
    """Four draws reweighed from N(0, 1) to N(1, 1), whose mean they miss group by group."""
    x = torch.randn(4000, 16, 4, generator=torch.Generator().manual_seed(0))
    log_weight = x.logsumexp(-1) - 0.5 - math.log(4.0)
    mean = (x.softmax(-1) * x).sum(-1)
    pooled, _ = pooled_moments(log_weight, mean, torch.zeros_like(mean), torch.ones(1, 16, dtype=torch.bool))
    assert float(mean.mean()) < 0.8
    assert float(pooled.mean()) == pytest.approx(1.0, abs=0.05)


def test_jackknife_of_a_mean_and_of_its_square() -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    without = (x.sum() - x) / 15.0
    value, error = jackknife(x.mean(), without)
    assert torch.allclose(value, x.mean())
    assert torch.allclose(error, x.std() / 4.0)
    assert torch.allclose(jackknife(x.mean().square(), without.square())[0], x.mean().square() - x.var() / 16.0)


@pytest.mark.parametrize("case", ["straight", *(pytest.param(c, marks=pytest.mark.slow) for c in ("coin", "location"))])
def test_thermodynamic_integration_is_within_its_error(case: str) -> None:
    posterior, exact = CASES[case]()
    found = estimate("thermodynamic", case, posterior, seed=1)
    assert abs(found.log_evidence - exact) < 3.5 * found.standard_error
    assert found.standard_error < 0.15
    assert found.reliable, found.doubts


def test_of_a_log_joint_and_nothing_global_moves() -> None:
    x = observations()
    before = torch.random.get_rng_state()
    settings = {"num_temperatures": 10, "num_particles": 256, "num_moves": 1}
    first, second = (thermodynamic_integration(LogJoint(location, (x,), maximise=()), **settings) for _ in range(2))
    assert first == second
    assert abs(first.log_evidence - location_log_evidence(x)) < 4.0 * first.standard_error
    assert torch.equal(before, torch.random.get_rng_state())
    assert not list(pyro.get_param_store().keys())


def inside(y: Tensor) -> None:
    """Zero likelihood on half of the prior."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.factor("y", torch.where(a > 0, -0.5 * (y - a).square(), -math.inf))


def test_letters() -> None:
    posterior, _ = CASES["location"]()
    with pytest.raises(BadInput, match="num_temperatures=7"):
        thermodynamic_integration(posterior, num_temperatures=7)
    with pytest.raises(BadInput, match="num_particles=64; expected"):
        thermodynamic_integration(posterior, num_particles=64)
    with pytest.raises(BadInput, match=r"not finite at \d+ of 512 draws from the prior"):
        thermodynamic_integration(LogJoint(inside, (torch.tensor(1.0),), maximise=()))


@pytest.fixture(scope="module")
def classes() -> tuple[Tensor, Tensor]:
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(80, 4, generator=generator)
    return X, torch.bernoulli(torch.sigmoid(X @ torch.tensor([1.5, -1.0, 0.0, 0.0])), generator=generator)


@pytest.mark.parametrize("engine", [REVM, RVM])
def test_evidence_of_a_posterior_on_a_few_axes(engine: type, classes: tuple[Tensor, Tensor]) -> None:
    posterior = engine(logistic).run(*classes)
    found = importance_sampling(posterior)
    slow = tempered_smc(posterior, num_particles=256)
    assert posterior.num_active < 4
    assert found.reliable
    assert abs(found.log_evidence - slow.log_evidence) < 3.0 * math.hypot(found.standard_error, slow.standard_error)
    assert abs(found.log_evidence - float(posterior.log_evidence)) < 0.3  # Laplace's error
    draws = {"axes": posterior._laplace.get_samples(600, seed=0)["axes"]}
    assert bridge_sampling(posterior, draws).log_evidence == pytest.approx(found.log_evidence, abs=0.3)
    assert len(find_modes(posterior, start=Start(restarts=2)).states) == 1


def test_relevance_machines_are_compared_with_a_remark(classes: tuple[Tensor, Tensor]) -> None:
    found = compare_evidence(
        laplace=LaplaceEvidence(logistic, maximise=()).run(*classes),
        revm=REVM(logistic).run(*classes),
        rvm=RVM(logistic).run(*classes),
    )
    rows = {row.name: row for row in found.rows}
    assert "axes were found from the same data" in rows["revm"].doubts[0]
    assert not rows["rvm"].doubts
    assert (rows["revm"].num_hyperparameters, rows["laplace"].num_hyperparameters) == (4, 0)
    X, t = classes
    with pytest.raises(BadInput, match="different data"):
        compare_evidence(revm=REVM(logistic).run(X, t), other=LaplaceEvidence(logistic, maximise=()).run(X, 1.0 - t))


def test_a_variational_bound_is_not_called_laplace(classes: tuple[Tensor, Tensor]) -> None:
    X, t = classes
    bound = VRVM(logistic).run(X, t)
    found = compare_evidence(vrvm=bound, rvm=RVM(logistic).run(X, t), throw=False)
    rows = {row.name: row for row in found.rows}
    assert math.isnan(rows["vrvm"].laplace)
    assert math.isfinite(rows["rvm"].laplace)
    assert f"{float(bound.log_evidence):.3f} nats, is a variational lower bound" in rows["vrvm"].doubts[0]
    shown = {cells[0]: dict(zip(found.table().cells[0], cells, strict=True)) for cells in found.table().cells}
    assert shown["vrvm"]["Laplace"] == "" != shown["rvm"]["Laplace"]
    prior = torch.distributions.MultivariateNormal(torch.zeros(4), bound.alpha.reciprocal().diag())
    torch.manual_seed(0)
    draws = prior.sample((200_000,))  # plain Monte Carlo of the evidence at the mean precisions
    log_likelihood = torch.distributions.Bernoulli(logits=draws @ X.T).log_prob(t).sum(-1)
    exact = log_likelihood.logsumexp(0) - math.log(len(draws))
    assert rows["vrvm"].log_evidence == pytest.approx(float(exact), abs=0.1)


def test_nothing_left_to_integrate_is_exact() -> None:
    half = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    X, t = torch.cat([half, half]), torch.arange(40) // 20 * 1.0  # every input once in each class
    empty = RVM(logistic).run(X, t)
    found = compare_evidence(empty=empty, laplace=LaplaceEvidence(logistic, maximise=()).run(X, t))
    assert empty.num_active == 0
    assert found.rows[0].name == "empty"
    assert found.rows[0].log_evidence == pytest.approx(40 * math.log(0.5), abs=1e-9)
    with pytest.raises(BadInput, match="every axis was pruned"):
        target_of(empty)


def test_mixture_posterior_has_its_hyperparameters_and_labels_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(60, 1, generator=generator) + 4.0 * ((torch.arange(60) % 2) * 2.0 - 1.0).unsqueeze(-1)
    posterior = EvidenceEM(gaussian_mixture(num_components=2)).run(y)
    found = compare_evidence(a=posterior, b=posterior, throw=False)
    row = found.rows[0]
    assert posterior.num_components == 2
    assert row.log_labels == pytest.approx(math.log(2.0))
    assert row.num_hyperparameters == posterior.recognised.joint.hypers.size > 0
    assert abs(row.log_evidence - float(posterior.log_evidence)) < 0.1
    assert row.standard_error < 0.05


def test_of_something_else_is_refused() -> None:
    with pytest.raises(BadInput, match="a float has no density to check"):
        importance_sampling(1.0)  # type: ignore[arg-type]
    posterior = LaplaceEvidence(straight, maximise=()).run(*straight_data())
    with pytest.raises(BadInput, match="'b': 'LogJoint'"):
        compare_evidence(a=posterior, b=posterior.state.problem.joint)  # type: ignore[arg-type]
