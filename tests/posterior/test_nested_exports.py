"""What leaves a posterior with marginalised sites: groups for ArviZ, and draws weighted by the exact density."""

from functools import cache

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.compare.to_arviz import arviz_groups, to_inference_data
from pyro_evidence.fitting.process_state import generator_of
from pyro_evidence.posterior.nested import NestedPosterior
from tests.models_for_tests.sampled_scales import SCHOOL_SDS, SCHOOLS, schools_centred


@cache
def fitted() -> NestedPosterior:
    posterior = LaplaceEvidence(schools_centred, stop=Stop(progress=False)).run(SCHOOLS)
    assert isinstance(posterior, NestedPosterior)
    return posterior


@cache
def by_grid() -> tuple[float, dict[str, tuple[float, float]]]:
    """Oracle: schools integrated on paper, ``mu`` and ``log tau`` on a grid; log evidence, means and deviations."""
    mu, log_tau = torch.linspace(-25.0, 30.0, 551).double(), torch.linspace(-25.0, 10.0, 1401).double()
    tau = log_tau.exp().unsqueeze(-1)
    log_density = dist.Normal(0.0, 5.0).log_prob(mu) + dist.HalfCauchy(5.0).log_prob(tau) + log_tau.unsqueeze(-1)
    for y, sd in zip(SCHOOLS, SCHOOL_SDS, strict=True):
        log_density = log_density + dist.Normal(mu, (sd**2 + tau**2).sqrt()).log_prob(y)
    cell = float((mu[1] - mu[0]) * (log_tau[1] - log_tau[0]))
    mass, log_norm = log_density.flatten().softmax(0).reshape(log_density.shape), log_density.flatten().logsumexp(0)
    pairs = {}
    for name, x, p in (("mu", mu, mass.sum(0)), ("log tau", log_tau, mass.sum(1))):
        mean = float((p * x).sum())
        pairs[name] = (mean, float((p * (x - mean) ** 2).sum()) ** 0.5)
    return float(log_norm) + float(np.log(cell)), pairs


def test_groups_for_arviz_hold_outer_and_inner_sites_and_their_density() -> None:
    groups = arviz_groups(fitted(), num_samples=400)
    shapes = {name: {n: v.shape for n, v in group.items()} for name, group in groups.items()}
    assert shapes["posterior"] == {"mu": (4, 100), "tau": (4, 100), "theta": (4, 100, 8)}
    assert shapes["log_likelihood"] == shapes["posterior_predictive"] == {"y": (4, 100, 8)}
    mu, tau, theta = (torch.as_tensor(groups["posterior"][n]) for n in ("mu", "tau", "theta"))
    each = dist.Normal(theta, SCHOOL_SDS).log_prob(SCHOOLS)
    np.testing.assert_allclose(groups["log_likelihood"]["y"], each, rtol=1e-10)
    inside = dist.Normal(mu.unsqueeze(-1), tau.unsqueeze(-1)).log_prob(theta).sum(-1) + each.sum(-1)
    prior = dist.Normal(0.0, 5.0).log_prob(mu) + dist.HalfCauchy(5.0).log_prob(tau) + tau.log()
    np.testing.assert_allclose(groups["sample_stats"]["lp"], inside + prior, rtol=1e-10)


def test_arviz_summarises_it_with_its_evidence() -> None:
    arviz = pytest.importorskip("arviz")
    if not hasattr(arviz, "InferenceData"):
        pytest.skip("ArviZ 1")
    found = to_inference_data(fitted(), num_samples=2000)
    (mean, sd), row = by_grid()[1]["mu"], arviz.summary(found, var_names=["mu"], round_to=6).iloc[0]
    assert row["mean"] == pytest.approx(mean, abs=0.1 * sd) and row["sd"] == pytest.approx(sd, rel=0.1)
    assert found.posterior.attrs["log_evidence"] == pytest.approx(float(fitted().log_evidence))


def test_weighted_draws_are_those_of_the_exact_density() -> None:
    log_evidence, moments = by_grid()
    corrected = fitted().importance_resampled(2000)
    assert corrected.effective_sample_size > 1800 and corrected.pareto_k < 0.7
    assert float(corrected.log_evidence) == pytest.approx(log_evidence, abs=4.0 * corrected.log_evidence_error + 1e-3)
    weights = corrected.weights
    for name, x in (("mu", corrected.draws["mu"]), ("log tau", corrected.draws["tau"].log())):
        mean, sd = float(weights @ x), float((weights @ (x - weights @ x) ** 2).sqrt())
        assert mean == pytest.approx(moments[name][0], abs=0.1 * moments[name][1])
        assert sd == pytest.approx(moments[name][1], rel=0.08)
    assert corrected.get_samples(50)["theta"].shape == (50, 8)

    drawn = fitted()._unwhitened(fitted()._white(2000, generator_of(0)))  # as those of a table
    assert torch.equal(corrected.draws["mu"], fitted()._constrained(drawn)["mu"])


def test_each_coordinate_of_sixteen_rows_of_noise_has_one_in_each_sixteenth() -> None:
    """However these are shared out."""
    rows = fitted()._white(112, generator_of(0))
    parts = (torch.special.ndtr(rows).view(7, 16, -1) * 16).long().sort(1).values
    assert torch.equal(parts, torch.arange(16).view(1, 16, 1).expand_as(parts))
    generator = generator_of(0)
    assert torch.equal(torch.cat([fitted()._white(num, generator) for num in (16, 96)]), rows)
