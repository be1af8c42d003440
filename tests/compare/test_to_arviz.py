"""ArviZ's groups against draws, densities and the models themselves; both generations of ArviZ."""

import math
import sys
from types import ModuleType, SimpleNamespace

import arviz
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_evidence import (
    REVM,
    RVM,
    BadInput,
    LaplaceEvidence,
    LaplacePosterior,
    OverlapEM,
    Start,
    StructurePosterior,
    TooLarge,
    explore,
)
from pyro_evidence.compare.to_arviz import arviz_groups, to_datatree, to_inference_data
from pyro_evidence.models.prbf import prbf
from tests.models_for_tests.exact_models import straight, straight_data, two_normals, two_normals_data


@pytest.fixture(scope="module")
def fitted() -> LaplacePosterior:
    torch.set_default_dtype(torch.float64)
    return LaplaceEvidence(straight, maximise=()).run(*straight_data())


def many_data() -> tuple[Tensor, Tensor]:
    """So many that no datum is influential, and ArviZ's leave-one-out has nothing to warn of."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(80, 3, generator=generator)
    return X, X @ torch.tensor([1.0, -0.5, 0.3]) + 0.5 * torch.randn(80, generator=generator)


def run_nuts(model: object, *args: Tensor, num_chains: int = 1, num_samples: int = 60) -> MCMC:
    mcmc = MCMC(NUTS(model), num_samples=num_samples, warmup_steps=60, num_chains=num_chains, disable_progbar=True)
    mcmc.run(*args)
    return mcmc


def test_groups_of_a_posterior(fitted: LaplacePosterior) -> None:
    groups = arviz_groups(fitted, num_samples=40)
    assert {name: {n: v.shape for n, v in group.items()} for name, group in groups.items()} == {
        "posterior": {"w": (4, 10, 3)},
        "posterior_predictive": {"y": (4, 10, 20)},
        "log_likelihood": {"y": (4, 10, 20)},
        "sample_stats": {"lp": (4, 10)},
        "observed_data": {"y": (20,)},
        "prior": {"w": (1, 40, 3)},
        "prior_predictive": {"y": (1, 40, 20)},
    }


def least_squares(X: Tensor, y: Tensor) -> None:
    w = pyro.param("w", X.new_zeros(3))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def test_a_model_of_params_alone_has_draws_around_their_maximum() -> None:
    fit = LaplaceEvidence(least_squares).run(*many_data())
    groups = arviz_groups(fit, num_samples=40)
    assert {name: {n: v.shape for n, v in group.items()} for name, group in groups.items()} == {
        "posterior": {"w": (4, 10, 3)},
        "posterior_predictive": {"y": (4, 10, 80)},
        "log_likelihood": {"y": (4, 10, 80)},
        "observed_data": {"y": (80,)},
        "prior_predictive": {"y": (1, 40, 80)},
    }
    assert fit.pruned == {}
    with pytest.raises(BadInput, match="no latent site"):
        arviz_groups(fit.importance_resampled(400), num_samples=40)


def test_numbers_of_the_groups(fitted: LaplacePosterior) -> None:
    X, y = straight_data()
    groups = arviz_groups(fitted, num_samples=8)
    w = torch.as_tensor(groups["posterior"]["w"])
    log_likelihood = dist.Normal(w @ X.T, 0.5).log_prob(y)
    np.testing.assert_allclose(groups["log_likelihood"]["y"], log_likelihood, rtol=1e-10)
    log_prior = dist.Normal(0.0, 1.0).log_prob(w).sum(-1)
    np.testing.assert_allclose(groups["sample_stats"]["lp"], log_prior + log_likelihood.sum(-1), rtol=1e-10)
    np.testing.assert_array_equal(groups["observed_data"]["y"], y)


@pytest.mark.parametrize("engine", [RVM, REVM])
def test_relevance_machines_show_their_axes_and_the_weights_that_follow(engine: type) -> None:
    def logistic(X: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("rows", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    X = torch.randn(60, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = (torch.arange(60) % 3 < 1 + (X[:, 0] > 0.0).long()).double()
    fit = engine(logistic).run(X, y)
    groups = arviz_groups(fit, num_samples=400)
    w = torch.as_tensor(groups["posterior"]["w"]).flatten(0, 1)
    assert w.shape == (400, 3)
    assert torch.allclose(w.mean(0), fit.mode["w"], atol=4.0 * float(w.std(0).max()) / 400**0.5)
    at = {n: torch.as_tensor(v).flatten(0, 1) for n, v in groups["posterior"].items()}
    assert torch.allclose(at["w"], at["axes"] @ fit.state.directions.mT)
    assert groups["log_likelihood"]["y"].shape == (4, 100, 60)
    assert arviz.loo(to_inference_data(fit, num_samples=400)).elpd_loo < 0.0


def test_a_network_without_draws_is_refused() -> None:
    X = torch.randn(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    fit = OverlapEM(prbf(2)).run(X, (X[:, 0] > 0).long())
    with pytest.raises(BadInput, match="a PRBFPosterior, which has no draws"):
        arviz_groups(fit)  # type: ignore[arg-type]


def test_predictive_draws_have_the_right_moments(fitted: LaplacePosterior) -> None:
    X, y = straight_data()
    groups = arviz_groups(fitted, num_samples=8000)
    prior_sd = (0.25 + X.square().sum(-1)).sqrt()
    drawn = torch.as_tensor(groups["prior_predictive"]["y"][0])
    assert ((drawn.std(0) / prior_sd - 1.0).abs() < 4.0 / math.sqrt(2 * 8000)).all()
    covariance = torch.linalg.inv(torch.eye(3) + 4.0 * X.T @ X)
    sd = (0.25 + (X @ covariance * X).sum(-1)).sqrt()
    replicated = torch.as_tensor(groups["posterior_predictive"]["y"]).reshape(8000, 20)
    assert ((replicated.std(0) / sd - 1.0).abs() < 4.0 / math.sqrt(2 * 8000)).all()
    assert not np.array_equal(replicated[0], y)


def test_loo_and_summary_of_arviz() -> None:
    X, y = many_data()
    data = to_inference_data(LaplaceEvidence(straight, maximise=()).run(X, y), num_samples=4000)
    loo = arviz.loo(data)
    exact = 0.0  # oracle: each datum left out in turn, on paper
    for i in range(80):
        rest = torch.arange(80) != i
        covariance = torch.linalg.inv(torch.eye(3) + 4.0 * X[rest].T @ X[rest])
        mean = 4.0 * X[i] @ covariance @ X[rest].T @ y[rest]
        exact += float(dist.Normal(mean, (0.25 + X[i] @ covariance @ X[i]).sqrt()).log_prob(y[i]))
    assert loo.elpd_loo == pytest.approx(exact, abs=0.1)
    assert float(arviz.summary(data)["r_hat"].max()) < 1.01


def vector_weights(X: Tensor, y: Tensor) -> None:
    """Observed by ``to_event``, for which Pyro's own conversion has no pointwise log likelihood."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    pyro.sample("y", dist.Normal(X @ w, 0.5).to_event(1), obs=y)


def test_to_event_sites_of_mcmc_keep_their_log_likelihood() -> None:
    X, y = many_data()
    mcmc = run_nuts(vector_weights, X, y, num_chains=2, num_samples=150)
    data = to_inference_data(mcmc, X, y, num_samples=40)
    w = torch.as_tensor(data.posterior["w"].values)
    torch.testing.assert_close(w, mcmc.get_samples(group_by_chain=True)["w"])
    expected = dist.Normal(w @ X.T, 0.5).log_prob(y)
    np.testing.assert_allclose(data.log_likelihood["y"].values, expected, rtol=1e-10)
    assert data.sample_stats["diverging"].shape == (2, 150)
    assert math.isfinite(arviz.loo(data).elpd_loo)


def test_divergences_are_marked_where_they_were() -> None:
    X, y = straight_data()
    mcmc = run_nuts(straight, X, y)
    mcmc.diagnostics = lambda: {"divergences": {"chain 0": [3, 7]}}  # type: ignore[method-assign]
    diverging = arviz_groups(mcmc, X, y, num_samples=4)["sample_stats"]["diverging"]
    assert np.flatnonzero(diverging[0]).tolist() == [3, 7]


def test_discrete_sites_are_summed_out() -> None:
    x = two_normals_data(6.0)
    posterior = LaplaceEvidence(two_normals, maximise=(), start=Start(restarts=2)).run(x)
    groups = arviz_groups(posterior, num_samples=8)
    centre = torch.as_tensor(groups["posterior"]["centre"]).unsqueeze(-2)
    expected = dist.Normal(centre, 1.0).log_prob(x.unsqueeze(-1)).logsumexp(-1) - math.log(2.0)
    (found,) = groups["log_likelihood"].values()
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert groups["posterior_predictive"]["x"].shape == (4, 2, 50)


def factor_model(x: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.factor("likelihood", -0.5 * (x - mean).square().sum())


def test_factors_have_no_predictive_draws() -> None:
    groups = arviz_groups(LaplaceEvidence(factor_model, maximise=()).run(torch.ones(3)), num_samples=8)
    assert "posterior_predictive" not in groups
    assert "observed_data" not in groups
    assert groups["sample_stats"]["lp"].shape == (4, 2)


def test_nothing_global_moves(fitted: LaplacePosterior) -> None:
    before = torch.random.get_rng_state()
    first, second = (arviz_groups(fitted, num_samples=8, seed=1) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    np.testing.assert_array_equal(first["prior_predictive"]["y"], second["prior_predictive"]["y"])


def test_letters(fitted: LaplacePosterior, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = straight_data()
    with pytest.raises(BadInput, match="num_samples=6; expected a positive multiple of 4"):
        arviz_groups(fitted, num_samples=6)
    with pytest.raises(BadInput, match=r"call mcmc\.run"):
        arviz_groups(MCMC(NUTS(straight), num_samples=3), X, y)
    with pytest.raises(BadInput, match="fit is a dict"):
        arviz_groups({}, num_samples=8)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match="pip install 'pyro-evidence"):
        to_inference_data(fitted)
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(ImportError, match="pip install arviz-base"):
        to_datatree(fitted)
    monkeypatch.setitem(sys.modules, "arviz", SimpleNamespace(__version__="1.2.0"))  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r"ArviZ 1\.2\.0 has no InferenceData"):
        to_inference_data(fitted)
    monkeypatch.setitem(sys.modules, "arviz", SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r"ArviZ \? has no InferenceData"):
        to_inference_data(fitted)


def test_mcmc_with_other_arguments_is_refused() -> None:
    X, y = straight_data()
    with pytest.raises(BadInput, match="expected the same sites"):
        arviz_groups(_renamed(run_nuts(straight, X, y)), X, y)


def _renamed(mcmc: MCMC) -> MCMC:
    mcmc.kernel.model = vector_of_another_name
    return mcmc


def vector_of_another_name(X: Tensor, y: Tensor) -> None:
    v = pyro.sample("v", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    pyro.sample("y", dist.Normal(X @ v, 0.5).to_event(1), obs=y)


def conjugate(X: Tensor, y: Tensor) -> None:
    """The guide that is the posterior."""
    precision = torch.eye(3) + 4.0 * X.T @ X
    mean = 4.0 * torch.linalg.solve(precision, X.T @ y)
    pyro.sample("w", dist.MultivariateNormal(pyro.param("mean", mean), precision_matrix=precision))


def test_a_guide_of_svi_and_draws_of_a_predictive_have_the_same_groups() -> None:
    X, y = many_data()
    pyro.clear_param_store()
    svi = SVI(straight, conjugate, Adam({"lr": 1e-3}), Trace_ELBO())
    before = torch.random.get_rng_state()
    groups = arviz_groups(svi, X, y, num_samples=2000)
    assert torch.equal(before, torch.random.get_rng_state())
    assert {n: v.shape for n, v in groups["posterior"].items()} == {"w": (4, 500, 3)}
    w, covariance = torch.as_tensor(groups["posterior"]["w"]), torch.linalg.inv(torch.eye(3) + 4.0 * X.T @ X)
    error = (w.mean((0, 1)) - pyro.param("mean")).detach() / (covariance.diagonal() / 2000.0).sqrt()
    assert float(error.abs().max()) < 4.0
    np.testing.assert_allclose(groups["log_likelihood"]["y"], dist.Normal(w @ X.T, 0.5).log_prob(y), rtol=1e-10)
    pyro.set_rng_seed(7)  # which does not count
    guided = arviz_groups(Predictive(straight, guide=conjugate, num_samples=7), X, y, num_samples=2000)
    np.testing.assert_array_equal(guided["posterior"]["w"], groups["posterior"]["w"])
    drawn = Predictive(straight, posterior_samples={"w": w.flatten(0, 1)})
    found = to_inference_data(drawn, X, y, num_samples=40)
    np.testing.assert_array_equal(found.posterior["w"].values[0], w.flatten(0, 1))
    assert {"posterior_predictive", "log_likelihood", "observed_data", "prior"} <= set(found.groups())
    automatic = AutoMultivariateNormal(straight)
    automatic(X, y)
    assert set(
        arviz_groups(Predictive(straight, guide=automatic, num_samples=1), X, y, num_samples=8)["posterior"]
    ) == {"w"}
    with pytest.raises(BadInput, match="a Predictive without guide and draws"):
        arviz_groups(Predictive(straight, num_samples=3), X, y)


def test_datatree_is_asked_for_by_nested_groups(fitted: LaplacePosterior, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("arviz_base")
    fake.from_dict = lambda groups, **_: {n: SimpleNamespace(attrs={}) for n in groups}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "arviz_base", fake)
    assert set(to_datatree(fitted, num_samples=8)) == set(arviz_groups(fitted, num_samples=8))


def test_datatree_and_loo_of_arviz_itself() -> None:
    """With ArviZ 1.x in the environment, that is ``arviz-base`` and ``arviz-stats``, which 0.x does not exclude."""
    pytest.importorskip("arviz_base", reason="arviz-base is not installed")
    stats = pytest.importorskip("arviz_stats", reason="arviz-stats is not installed")
    X, y = many_data()
    posterior = LaplaceEvidence(straight, maximise=()).run(X, y)
    tree = to_datatree(posterior, num_samples=400)
    groups = arviz_groups(posterior, num_samples=400)
    assert {child.name for child in tree.children.values()} == set(groups)
    np.testing.assert_array_equal(tree["log_likelihood"]["y"], groups["log_likelihood"]["y"])
    old = arviz.loo(to_inference_data(posterior, num_samples=400))
    assert float(stats.loo(tree).elpd) == pytest.approx(float(old.elpd_loo), abs=0.01)  # another effective size


def test_names_of_dimensions_and_what_was_maximised_go_along(fitted: LaplacePosterior) -> None:
    names = {"coords": {"input": ["a", "b", "c"]}, "dims": {"w": ["input"]}}
    found = to_inference_data(fitted, num_samples=16, **names).posterior
    assert found["w"].dims == ("chain", "draw", "input") and found["input"].values.tolist() == ["a", "b", "c"]
    assert found.attrs["log_evidence"] == float(fitted.log_evidence)
    learned = LaplaceEvidence(learned_noise).run(*straight_data())
    attributes = to_inference_data(learned, num_samples=16).posterior.attrs
    assert attributes["hyperparameter beta"] == float(learned.hyperparameters["beta"])


def learned_noise(X: Tensor, y: Tensor | None = None) -> Tensor:
    beta = pyro.param("beta", torch.ones(()), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("y", dist.Normal(X @ w, beta.rsqrt()), obs=y)


def test_columns_of_a_frame_are_coordinates() -> None:
    pandas = pytest.importorskip("pandas")
    X, y = straight_data()
    frame = pandas.DataFrame(X.numpy(), columns=["a", "b", "c"])
    found = to_inference_data(LaplaceEvidence(straight, maximise=()).run(frame, y), num_samples=16).posterior
    assert found["w"].sel(column="b").shape == (4, 4)


def test_groups_that_would_not_fit_are_refused_with_the_number(
    fitted: LaplacePosterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyro_evidence.numerics.linalg.available_bytes", lambda device: 2**25)
    needed = 8 * 100_000 * (2 * 3 + 3 * 20)  # three latents, twenty data
    with pytest.raises(TooLarge, match=rf"needs {needed:,} bytes; 33,554,432 are free.*num_samples=100"):
        arviz_groups(fitted, num_samples=100_000)
    arviz_groups(fitted, num_samples=100)


def selection(X: Tensor, y: Tensor) -> None:
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([3]).to_event(1), infer={"branching": True})
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    mean = X @ (w * keep)
    if float(keep[2]) > 0:
        mean = mean + pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(mean, 2.0), obs=y)


def test_draws_over_structures_are_of_what_all_have() -> None:
    X, y = straight_data()
    fit = LaplaceEvidence(selection).run(X, y)
    assert isinstance(fit, StructurePosterior) and 0.05 < float(fit.inclusion("keep")[2]) < 0.95
    names = {"coords": {"column": ["a", "b", "c"]}, "dims": {"keep": ["column"], "w": ["column"]}}
    data = to_inference_data(fit, num_samples=400, seed=3, **names)
    assert data.groups() == ["posterior", "observed_data"]
    drawn = fit.get_samples(400, seed=3)
    assert set(data.posterior) == {"keep", "w"}  # without b, which half of the structures have
    for name, value in drawn.items():
        np.testing.assert_array_equal(data.posterior[name].values.reshape(400, 3), value)
    np.testing.assert_array_equal(data.observed_data["y"], y)
    means = arviz.summary(data, var_names=["keep"], kind="stats", round_to="none")["mean"]
    np.testing.assert_allclose(means.to_numpy(), fit.inclusion("keep"), atol=0.12)
    assert list(means.index) == ["keep[a]", "keep[b]", "keep[c]"]
    assert data.posterior.attrs["log_evidence"] == float(fit.log_evidence)
    assert "log_likelihood" in arviz_groups(fit.member(0), num_samples=40)


def test_a_term_with_the_name_of_a_site_has_no_dims_of_that_site() -> None:
    """The coefficients of a mixed model are its site b."""
    pandas = pytest.importorskip("pandas")
    X, y = straight_data()
    frame = pandas.DataFrame({"a": X[:, 0].numpy(), "b": X[:, 1].numpy(), "y": y.numpy()})
    found = to_inference_data(explore("y ~ a + b", frame), num_samples=400).posterior
    assert found["a"].dims == found["b"].dims == ("chain", "draw") and set(found["b"].values.ravel()) <= {0.0, 1.0}
