"""The table of a posterior: moments on paper, intervals by other means, names, what is left out."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.mcmc.util import summary as pyro_summary
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, EvidenceEM, LaplaceEvidence, LaplacePosterior, Stop
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture
from pyro_evidence.models.regression import regression
from pyro_evidence.posterior.diagnostics import FEWEST_WEIGHTED
from tests.models_for_tests.posterior_models import (
    ard,
    fitted_linear,
    fitted_logistic,
    fitted_supports,
    linear_posterior,
    positive,
    regression_data,
)

Z = 1.6448536269514722  # the 95 % quantile of a standard normal


def test_real_sites_have_the_moments_of_the_normal_posterior() -> None:  # oracle: closed form
    hypers = {n: float(v) for n, v in fitted_linear().hyperparameters.items()}
    mean, covariance = linear_posterior(*regression_data(), **hypers)
    rows = fitted_linear().table().rows
    for place, (m, sd) in enumerate(zip(mean.tolist(), covariance.diagonal().sqrt().tolist(), strict=True)):
        expected = {"value": m, "sd": sd, "median": m, "5%": m - Z * sd, "95%": m + Z * sd}
        assert rows[f"w[{place}]"] == pytest.approx(expected)


def test_other_supports_have_the_moments_that_pyro_finds() -> None:  # oracle: Pyro's own summary of the draws
    posterior = fitted_supports()
    draws = posterior.get_samples(4_000, seed=0)
    rows = posterior.table(0.5).rows
    expected = pyro_summary({n: v.unsqueeze(0) for n, v in draws.items()}, prob=0.5)["probs"]
    for place in range(4):
        row = rows[f"probs[{place}]"]
        for ours, theirs in (("value", "mean"), ("sd", "std"), ("median", "median")):
            assert row[ours] == pytest.approx(float(expected[theirs].reshape(-1)[place]), abs=5e-3)
    assert rows["scale"]["25%"] == pytest.approx(float(draws["scale"].quantile(0.25)), rel=0.01)
    factor = draws["corr"]
    r = float((factor @ factor.mT)[:, 2, 0].mean())
    assert rows["cor(0, 2) of corr"]["value"] == pytest.approx(r, abs=0.02)
    assert "corr[0, 0]" not in rows


def test_intervals_of_scales_are_taken_on_the_log_scale() -> None:  # oracle: the delta method
    posterior = fitted_logistic()
    row, value = posterior.table(0.9).rows["alpha"], float(posterior.hyperparameters["alpha"])
    sd = float(posterior.hyperparameter_covariance().sd["alpha"])
    assert row["value"] == value and row["sd"] == pytest.approx(sd)
    assert row["5%"] == pytest.approx(value * math.exp(-Z * sd / value))
    assert row["95%"] == pytest.approx(value * math.exp(Z * sd / value))
    assert row["gamma"] == pytest.approx(float(posterior.gamma["alpha"]))
    assert posterior.table().notes[-1] == "gamma: how many parameters of that prior precision the data determine"


def pairs(y: Tensor) -> None:
    """Two correlated columns, as one normal vector for each row."""
    sd = positive("sd", torch.ones(2))
    L = pyro.param("L", torch.eye(2), constraint=constraints.corr_cholesky)
    with pyro.plate("rows", len(y)):
        a = pyro.sample("a", dist.MultivariateNormal(torch.zeros(2), scale_tril=sd[:, None] * L))
        pyro.sample("y", dist.Normal(a, 1e-3).to_event(1), obs=y)


def test_a_correlation_has_fishers_interval() -> None:  # oracle: 1 / N is the variance of atanh r for known means
    torch.manual_seed(1)
    y = torch.randn(40, 2) @ torch.tensor([[1.0, 0.6], [0.0, 0.8]])
    row = LaplaceEvidence(pairs, stop=Stop(progress=False)).run(y).table().rows["cor(0, 1) of L"]
    r = float((y[:, 0] * y[:, 1]).mean() / (y.square().mean(0).prod().sqrt()))
    assert row["value"] == pytest.approx(r, abs=1e-3)
    assert row["sd"] == pytest.approx((1.0 - r**2) / 40**0.5, rel=1e-2)
    assert row["5%"] == pytest.approx(math.tanh(math.atanh(r) - Z / 40**0.5), abs=2e-3)


def test_a_scale_at_zero_has_its_profile_interval() -> None:
    def schools(y: Tensor) -> None:
        mu, tau = pyro.param("mu", torch.tensor(0.0)), positive("tau", torch.tensor(1.0))
        with pyro.plate("schools", len(y)):
            pyro.sample("y", dist.Normal(pyro.sample("theta", dist.Normal(mu, tau)), 1.0), obs=y)

    found = LaplaceEvidence(schools, stop=Stop(progress=False)).run(torch.tensor([0.1, -0.2, 0.3, 0.0, 0.1]))
    (edge,) = found.hyperparameter_covariance().edges
    row = found.table().rows["tau"]
    assert math.isnan(row["sd"]) and (row["5%"], row["95%"]) == edge.interval


def relevant(X: Tensor, t: Tensor) -> None:
    alpha = positive("alpha", X.new_ones(X.shape[-1]))
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)


@pytest.fixture(scope="module")
def pruned() -> LaplacePosterior:
    torch.manual_seed(0)
    X = torch.randn(60, 15)
    weights = torch.cat([torch.tensor([2.0, -1.5]), torch.zeros(13)])
    return LaplaceEvidence(relevant, stop=Stop(progress=False)).run(X, X @ weights + 0.5 * torch.randn(60))


def test_only_what_is_alive_is_listed(pruned: LaplacePosterior) -> None:
    alive = (~pruned.pruned["w"]).nonzero().flatten().tolist()
    assert 2 <= len(alive) < 15
    table = pruned.table()
    assert [r for r in table.rows if r.startswith("w[")] == [f"w[{i}]" for i in alive]
    assert f"w: {15 - len(alive)} of 15 elements are pruned" in table.notes


def test_names_are_the_callers_or_those_of_a_frame(pruned: LaplacePosterior) -> None:
    columns = [f"x{i}" for i in range(15)]
    table = pruned.table(coords={"input": columns}, dims={"w": ["input"], "alpha": ["input"]})
    assert "w[x0]" in table.rows and "w[0]" not in table.rows
    with pytest.raises(BadInput, match=r"coords\['input'\] has 14 entries"):
        pruned.table(coords={"input": columns[1:]}, dims={"w": ["input"]})
    with pytest.raises(BadInput, match="dims names 'v'; expected a site or a param"):
        pruned.table(coords={"input": columns}, dims={"v": ["input"]})
    with pytest.raises(BadInput, match="expected a name for each dimension"):
        pruned.table(dims={"w": ["input"]})


def test_columns_of_a_frame_name_the_weights() -> None:
    pandas = pytest.importorskip("pandas")
    torch.manual_seed(0)
    frame = pandas.DataFrame(torch.randn(30, 3).numpy(), columns=["age", "dose", "weight"])
    found = LaplaceEvidence(ard, maximise=(), stop=Stop(progress=False)).run(frame, torch.randn(30))
    assert {"w[age]", "w[dose]", "w[weight]"} <= set(found.table().rows)
    biased = LaplaceEvidence(regression(Linear(), groups=torch.arange(3)), stop=Stop(progress=False))
    rows = biased.run(frame, 2.0 * torch.tensor(frame.dose.tolist()) + 3.0 + torch.randn(30)).table().rows
    assert {"alpha[dose]", "w[dose]", "w[bias]"} <= set(rows)


def test_a_table_can_be_kept_and_shown() -> None:
    pandas = pytest.importorskip("pandas")
    table = fitted_logistic().table()
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame.columns[:3]) == ["value", "sd", "median"]
    assert frame.loc["alpha", "value"] == float(fitted_logistic().hyperparameters["alpha"])
    page = fitted_logistic()._repr_html_()
    assert "<table>" in page and "alpha" in page and "LaplacePosterior" in page


def test_of_a_model_without_latents(capsys: pytest.CaptureFixture[str]) -> None:
    def params_alone(y: Tensor) -> None:
        pyro.sample("y", dist.Normal(pyro.param("mu", torch.tensor(0.0)), 1.0).expand([len(y)]).to_event(1), obs=y)

    y = torch.tensor([1.0, 2.0, 4.0])
    found = LaplaceEvidence(params_alone, stop=Stop(progress=False)).run(y)
    assert found.table().rows["mu"]["sd"] == pytest.approx(3.0**-0.5, rel=1e-6)
    found.summary()
    assert "(nothing is integrated: the log likelihood of what was maximised)" in capsys.readouterr().out
    size = found.diagnostics()["effective_sample_size"]
    assert size == pytest.approx(FEWEST_WEIGHTED)  # all weights are one, at whatever price


def test_components_that_are_pruned_are_not_listed() -> None:
    Y = torch.cat([torch.randn(80, 2), torch.randn(60, 2) + 8.0])
    found = EvidenceEM(gaussian_mixture(4, noise=FullNoise()), stop=Stop(progress=False)).run(Y)
    table, alive = found.table(), found.active.nonzero().flatten().tolist()
    assert len(alive) == 2
    for name in ("mixing[{}]", "beta[{}, 1]", "w[{}, 0]", "cor(0, 1) of correlation_tril[{}]"):
        assert [k for k in range(4) if name.format(k) in table.rows] == alive
    k = alive[0]
    factor = found.hyperparameters["correlation_tril"][k]
    assert table.rows[f"cor(0, 1) of correlation_tril[{k}]"]["value"] == pytest.approx(
        float((factor @ factor.mT)[1, 0])
    )
    assert "mixing: 2 of 4 elements are pruned" in table.notes
    few = found.table(most=1)
    assert sum(name.startswith("cor(") for name in few.rows) == 1
    assert "correlation_tril: 1 more, in table()" in few.notes
