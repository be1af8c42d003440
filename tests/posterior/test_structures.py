"""Sums over structures against closed forms, against fits one by one, and what is refused."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence import (
    RVM,
    BadInput,
    EvidenceEM,
    ImproperPosterior,
    LaplaceEvidence,
    NotAMode,
    NotConverged,
    Start,
    Stop,
    StructurePosterior,
    UnsupportedModel,
    diagonal,
    explore,
)
from pyro_evidence.errors import Unbounded
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.posterior import structures
from pyro_evidence.posterior.structures import StructureFits, over
from pyro_evidence.program.branching import IndependentChoices, fixed, structures_of

BRANCHING = {"branching": True}
QUIET = Stop(progress=False)
NOISE = 0.5


def linear(X: Tensor, y: Tensor | None = None, odds: float = 0.3) -> None:
    keep = pyro.sample("keep", dist.Bernoulli(odds).expand([X.shape[1]]).to_event(1), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ (w * keep), NOISE), obs=y)


def logistic(X: Tensor, y: Tensor | None = None) -> None:
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1), infer=BRANCHING)
    b = pyro.sample("b", dist.Normal(0.0, 10.0))
    w = pyro.sample("w", dist.Normal(0.0, 10.0).expand([X.shape[1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=b + X @ (w * keep)), obs=y)


def data(num: int = 40, size: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num, size, generator=generator)
    X = X + 0.5 * torch.randn(num, 1, generator=generator)
    y = X[:, 0] - 0.4 * X[:, 1] + 0.1 * X[:, 2] + NOISE * torch.randn(num, generator=generator)
    return X, y


def in_closed_form(X: Tensor, y: Tensor, odds: float = 0.3) -> tuple[Tensor, Tensor]:
    """Structures ``(S, D)``, and ``log p(y, structure)`` of each with the weights integrated out on paper."""
    every = torch.tensor(list(itertools.product([0.0, 1.0], repeat=X.shape[1])))
    found = []
    for keep in every:
        covariance = NOISE**2 * torch.eye(len(X)) + 4.0 * (X * keep) @ X.T
        prior = float((keep * math.log(odds) + (1.0 - keep) * math.log1p(-odds)).sum())
        found.append(float(dist.MultivariateNormal(torch.zeros(len(X)), covariance).log_prob(y)) + prior)
    return every, torch.tensor(found)


def test_linear_models_are_summed_as_on_paper() -> None:
    X, y = data()
    engine = LaplaceEvidence(linear)
    posterior = engine.run(X, y)
    assert engine.posterior is posterior
    every, expected = in_closed_form(X, y)
    assert isinstance(posterior, StructurePosterior) and posterior.unvisited == 0.0
    torch.testing.assert_close(posterior.log_evidence, expected.logsumexp(0), rtol=1e-11, atol=0.0)
    torch.testing.assert_close(posterior.inclusion("keep"), expected.softmax(0) @ every, rtol=1e-9, atol=1e-12)
    best = every[expected.argmax()]
    assert torch.equal(posterior.structure()["keep"], best)
    assert float(posterior.log_evidence_error) < 1e-8


def test_means_of_predictions_and_draws_are_averages_over_structures() -> None:
    X, y = data()
    posterior = LaplaceEvidence(linear).run(X, y)
    every, heights = in_closed_form(X, y)
    shares, new = heights.softmax(0), torch.eye(5)
    means = []
    for keep in every:
        A = (X * keep).T @ (X * keep) / NOISE**2 + torch.eye(5) / 4.0
        means.append(keep * torch.linalg.solve(A, (X * keep).T @ y / NOISE**2))
    expected = shares @ torch.stack(means)
    torch.testing.assert_close(posterior.predict(new), new @ expected, rtol=0.0, atol=3e-3)
    draws = posterior.get_samples(4000, seed=0)
    effect = draws["w"] * draws["keep"]
    assert bool(((effect.mean(0) - expected).abs() < 4.0 * effect.std(0) / 4000**0.5 + 1e-3).all())
    torch.testing.assert_close(draws["keep"].mean(0), posterior.inclusion("keep"), rtol=0.0, atol=0.035)
    assert torch.equal(draws["w"], posterior.get_samples(4000, seed=0)["w"])


def test_some_structures_stand_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = data()
    posterior = LaplaceEvidence(linear).run(X, y)
    whole = posterior.predict(X)
    monkeypatch.setattr(structures, "AVERAGED", 1)
    shares = posterior._shares()
    assert len(shares) == 2
    assert sum(share for _, share in shares) == pytest.approx(1.0, abs=1e-12)
    assert [place for place, _ in shares[:1]] == posterior.order[:1].tolist()
    torch.testing.assert_close(posterior.predict(X), whole, rtol=0.0, atol=0.03)


def test_the_structures_of_pima(data_dir: Path) -> None:
    """The 128 models by Laplace of an independent program: notes of the probabilities, three digits each."""
    rows = torch.from_numpy(np.loadtxt(data_dir / "pima_532.csv", delimiter=",", skiprows=1))
    posterior = LaplaceEvidence(logistic).run(rows[:, 1:], rows[:, 0])
    expected = torch.tensor([0.930, 1.000, 0.013, 0.020, 0.997, 0.953, 0.134])
    torch.testing.assert_close(posterior.inclusion("keep"), expected, rtol=0.0, atol=6e-4)
    best = posterior.structures(1)
    assert list(best.rows) == ["keep 0, 1, 4, 5"] and best.rows["keep 0, 1, 4, 5"]["probability"] == pytest.approx(
        0.803, abs=6e-4
    )


def test_a_batch_is_fits_one_by_one() -> None:
    X, y = data()
    y = (y > 0).double()
    posterior = LaplaceEvidence(logistic).run(X, y)
    assert not posterior._members
    for row in (0, 1, 7, 31):
        alone = LaplaceEvidence(fixed(logistic, posterior.found.of(row)), stop=QUIET).run(X, y)
        assert float(posterior.log_evidences[row]) == pytest.approx(float(alone.log_evidence), abs=1e-8)


@pytest.mark.parametrize("given", [{"maximise": ["b"]}, {"curvature": diagonal}], ids=["maximise", "curvature"])
def test_settings_of_the_engine_are_those_of_every_structure(given: dict[str, Any]) -> None:
    X, y = data(size=3)
    engine = LaplaceEvidence(logistic, stop=QUIET, **given)
    posterior = engine.run(X, (y > 0).double())
    for row in (0, 5):
        alone = replace(engine, model=fixed(logistic, posterior.found.of(row))).run(X, (y > 0).double())
        assert float(posterior.log_evidences[row]) == pytest.approx(float(alone.log_evidence), abs=1e-7)
    assert posterior.num_maximised == len(given.get("maximise", ()))


def noisier(X: Tensor, y: Tensor) -> None:
    """With more noise where one column is chosen, which few structures have."""
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ (w * keep), 0.9 if float(keep.sum()) == 1.0 else NOISE), obs=y)


def test_what_few_structures_have_is_seen() -> None:
    X, y = data(size=4)
    posterior = LaplaceEvidence(noisier, stop=QUIET).run(X, y)
    for k, keep in enumerate(posterior.found.values["keep"]):
        noise = 0.9 if float(keep.sum()) == 1.0 else NOISE
        exact = dist.MultivariateNormal(torch.zeros(40), noise**2 * torch.eye(40) + 4.0 * (X * keep) @ X.T).log_prob(y)
        assert float(posterior.log_evidences[k]) == pytest.approx(float(exact), abs=1e-8)


def robust(X: Tensor, y: Tensor) -> None:
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, 3.0).expand([X.shape[1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.StudentT(2.0, X @ (w * keep), 0.5), obs=y)


def test_structures_whose_density_may_have_other_modes_are_fitted() -> None:
    """Against quadrature: Laplace's approximation around one mode is two nats off."""
    X = torch.tensor([[-1.1], [-0.4], [0.9], [0.1], [0.2], [-1.4], [0.3], [-0.2]])
    y = torch.tensor([3.0, -3.0, 2.0, -2.0, 0.0, 4.0, -4.0, 0.5])
    w = torch.linspace(-15.0, 15.0, 3001)
    heights = dist.StudentT(2.0, w.unsqueeze(-1) * X[:, 0], 0.5).log_prob(y).sum(-1) + dist.Normal(0.0, 3.0).log_prob(w)
    exact = heights.logsumexp(0) + math.log(0.01)
    posterior = LaplaceEvidence(robust, stop=QUIET).run(X, y)
    assert float(posterior.log_evidences[1]) == pytest.approx(float(exact), abs=0.02)
    assert float(posterior.log_evidences[0]) == pytest.approx(float(dist.StudentT(2.0, 0.0, 0.5).log_prob(y).sum()))


def with_scales(X: Tensor, y: Tensor) -> None:
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1), infer=BRANCHING)
    s, sigma = pyro.sample("s", dist.HalfNormal(2.0)), pyro.sample("sigma", dist.Exponential(1.0))
    w = pyro.sample("w", dist.Normal(0.0, s).expand([X.shape[1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ (w * keep), sigma), obs=y)


def test_structures_with_sampled_scales_are_one_batch() -> None:
    """Their integrals over scales are those of fits one by one, and few structures are fitted by themselves."""
    X, y = data(size=4)
    posterior = LaplaceEvidence(with_scales, stop=QUIET).run(X, y)
    together = [place for place in range(16) if place not in posterior._members]
    assert len(together) >= 5
    for place in together[::4]:
        alone = LaplaceEvidence(fixed(with_scales, posterior.found.of(place)), stop=QUIET).run(X, y)
        assert float(posterior.log_evidences[place]) == pytest.approx(float(alone.log_evidence), abs=1e-7)


def zellner_siow(X: Tensor, y: Tensor) -> None:
    """Zellner and Siow's prior, the same in all structures but for its columns; its scale is sampled."""
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1), infer=BRANCHING)
    g = pyro.sample("g", dist.InverseGamma(0.5, 0.5 * len(X)))
    kept = X * keep
    tril = torch.linalg.cholesky(kept.T @ kept + torch.diag(1.0 - keep))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    w = torch.linalg.solve_triangular(tril.T, z.unsqueeze(-1), upper=True).squeeze(-1)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(NOISE * g.sqrt() * (kept @ w), NOISE), obs=y)


def test_a_batch_of_linear_models_searches_no_modes_at_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The integrals over g are those on paper, Liang et al. (2008), with the noise known, and those of single fits."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a search for modes at nodes")

    monkeypatch.setattr("pyro_evidence.posterior.replicates.solve_inner", refused)
    X, y = data(size=4)
    posterior = LaplaceEvidence(zellner_siow, stop=QUIET).run(X, y)
    assert len(posterior._members) == 1
    log_g = torch.linspace(-15.0, 30.0, 4001)
    prior = dist.InverseGamma(0.5, 0.5 * len(X)).log_prob(log_g.exp()) + log_g + (log_g[1] - log_g[0]).log()
    noise = dist.Normal(0.0, NOISE).log_prob(y).sum()
    for keep, found in zip(posterior.found.values["keep"], posterior.log_evidences.tolist(), strict=True):
        kept = X[:, keep > 0]
        explained = (kept.T @ y) @ torch.linalg.solve(kept.T @ kept, kept.T @ y) / NOISE**2 if len(kept.T) else 0.0
        of_g = -0.5 * kept.shape[1] * log_g.exp().log1p() + 0.5 * explained * log_g.exp() / (1.0 + log_g.exp())
        assert found == pytest.approx(float(noise + (of_g + prior).logsumexp(0)), abs=2e-3)
    alone = LaplaceEvidence(fixed(zellner_siow, posterior.found.of(5)), stop=QUIET).run(X, y)
    assert float(posterior.log_evidences[5]) == pytest.approx(float(alone.log_evidence), abs=1e-7)


def noisy(X: Tensor, y: Tensor, with_columns: bool = True) -> None:
    """Coefficients whose scale relative to the noise is sampled, under a heavy tail; the noise is sampled too."""
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    mean = torch.zeros(len(X))
    if with_columns:
        keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1), infer=BRANCHING)
        g = pyro.sample("g", dist.InverseGamma(0.5, 10.0))
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
        mean = sigma * g.sqrt() * (X @ (w * keep))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def test_a_scale_is_integrated_in_structures_that_do_not_meet_it() -> None:
    """Its prior integrates to one there: the log evidence is that of the model without columns."""
    X, y = data(size=3)
    fits, alone = StructureFits(LaplaceEvidence(noisy, stop=QUIET), ((X, y), {})), LaplaceEvidence(noisy, stop=QUIET)
    with_all, without = fits({"keep": torch.ones(3)}), fits({"keep": torch.zeros(3)})
    assert with_all.marginalised_sites == without.marginalised_sites == ("g", "sigma")
    assert float(without.log_evidence) == pytest.approx(
        float(alone.run(X, y, with_columns=False).log_evidence), abs=0.01
    )


def test_the_only_scale_is_integrated_in_a_structure_that_does_not_meet_it() -> None:
    """Nothing else is outside there: closed form, the density of white noise."""
    X, y = data(size=3)
    model = poutine.condition(noisy, data={"sigma": torch.tensor(1.0)})
    fits = StructureFits(LaplaceEvidence(model, stop=QUIET), ((X, y), {}))
    with_all, without = fits({"keep": torch.ones(3)}), fits({"keep": torch.zeros(3)})
    assert with_all.marginalised_sites == without.marginalised_sites == ("g",)
    exact = dist.Normal(0.0, 1.0).log_prob(y).sum() + dist.LogNormal(0.0, 1.0).log_prob(torch.tensor(1.0))
    assert float(without.log_evidence) == pytest.approx(float(exact), abs=0.005)


def test_structures_with_a_singular_matrix_are_left_out() -> None:
    """A column of zeros, under a prior that divides by its size, has no posterior; without it there are others."""
    X, y = data(size=3)
    X[:, 2] = 0.0
    posterior = LaplaceEvidence(zellner_siow, stop=QUIET).run(X, y)
    assert posterior.log_evidences.isnan().equal(posterior.found.values["keep"][:, 2] == 1)
    assert len(posterior.failures) == 4 and "with keep 0, 1, 2: linalg.cholesky" in posterior.failures[0]
    assert len(posterior._members) == 2  # those without are one batch all the same: two say how
    assert float(posterior.inclusion("keep")[2]) == 0.0 and float(posterior.inclusion("keep")[0]) > 0.99


def test_structures_whose_prior_has_a_singular_precision_are_left_out() -> None:
    """A column of zeros, under a prior whose precision is made of the columns and validated by Pyro."""
    X, y = data(size=3)
    X[:, 2] = 0.0

    def model(X: Tensor, y: Tensor) -> None:
        keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([3]).to_event(1), infer=BRANCHING)
        kept = X[:, keep > 0]
        precision = kept.T @ kept / len(X) if kept.numel() else torch.eye(1)
        w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(len(precision)), precision_matrix=precision))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(kept @ w if kept.numel() else 0.0, 0.5), obs=y)

    posterior = LaplaceEvidence(model, stop=QUIET).run(X, y)
    assert posterior.log_evidences.isnan().equal(posterior.found.values["keep"][:, 2] == 1)
    assert "PositiveDefinite" in posterior.failures[0]


def test_errors_of_structures_are_averaged_whatever_they_come_from() -> None:
    """That of nodes has no sign, that of Laplace has one."""

    def model(X: Tensor, y: Tensor) -> None:
        of_counts = pyro.sample("of_counts", dist.Bernoulli(0.5), infer=BRANCHING)
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        w = pyro.sample("w", dist.Normal(0.0, scale).expand([2]).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Poisson((X @ w).exp()) if of_counts else dist.Normal(X @ w, 1.0), obs=y)

    X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    posterior = LaplaceEvidence(model, stop=QUIET).run(X, torch.tensor([1.0, 0.0] * 4))
    shares, errors = posterior.probabilities[posterior.order], [posterior.member(k).log_evidence_error for k in (0, 1)]
    assert float(shares[1]) > 1e-3 and all(error > 0 for error in errors)
    expected = sum(float(share * error) for share, error in zip(shares, errors, strict=True))
    assert float(posterior.log_evidence_error) == pytest.approx(expected, rel=0.1)


def test_quantiles_are_those_of_draws() -> None:
    X, y = data()
    posterior = LaplaceEvidence(linear, stop=QUIET).run(X, y)
    below = (posterior.get_samples(4000, seed=1)["w"] < posterior.quantiles(0.3)["w"]).double().mean(0)
    torch.testing.assert_close(below, torch.full_like(below, 0.3), rtol=0.0, atol=0.04)


@pytest.mark.parametrize(("noise", "error"), [(None, NotConverged), (dist.HalfCauchy(1.0), Unbounded)])
def test_a_structure_that_meets_the_data_exactly_is_not_left_out(noise: Any, error: type[Exception]) -> None:
    """Its log evidence grows without bound: probabilities of the others would be those of what is ruled out."""

    def model(x: Tensor, y: Tensor) -> None:
        keep = pyro.sample("keep", dist.Bernoulli(0.5), infer=BRANCHING)
        if noise is None:
            sigma = pyro.param("sigma", torch.tensor(1.0), constraint=dist.constraints.positive)
        else:
            sigma = pyro.sample("sigma", noise)
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x * w * keep, sigma), obs=y)

    x = torch.linspace(-1.0, 1.0, 20)
    with pytest.raises(error, match=r"with keep=1 the log evidence is .* nats or more, -"):
        LaplaceEvidence(model, stop=QUIET).run(x, 2.0 * x)
    noise = dist.InverseGamma(1.0, 0.1)  # as the message advises
    assert float(LaplaceEvidence(model, stop=QUIET).run(x, 2.0 * x).inclusion("keep")) > 0.999


def by_a_list(X: Tensor, y: Tensor) -> None:
    keep = pyro.sample("keep", dist.Bernoulli(0.5), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, [1.0, 2.0][keep.type(torch.int64) if keep in (0.0, 1.0) else keep]))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X[:, 0] * w, NOISE), obs=y)


def by_a_table(X: Tensor, y: Tensor) -> None:
    keep = pyro.sample("keep", dist.Bernoulli(0.5), infer=BRANCHING)
    index = keep.long() if keep in (0.0, 1.0) else keep
    w = pyro.sample("w", dist.Normal(0.0, torch.tensor([1.0, 2.0])[index]))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X[:, 0] * w, NOISE), obs=y)


def by_a_probability(X: Tensor, y: Tensor) -> None:
    keep = pyro.sample("keep", dist.Bernoulli(0.5), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("other", dist.Bernoulli(0.25 + 0.5 * keep), obs=(y > 0).double())
        pyro.sample("y", dist.Normal(X[:, 0] * w, NOISE), obs=y)


@pytest.mark.parametrize("model", [by_a_list, by_a_table, by_a_probability])
def test_a_model_that_bears_zeros_and_ones_alone_is_fitted_one_by_one(model: Callable[..., Any]) -> None:
    X, y = data()
    posterior = LaplaceEvidence(model, stop=QUIET).run(X, y)
    alone = [LaplaceEvidence(fixed(model, {"keep": torch.tensor(k)}), stop=QUIET).run(X, y) for k in (0.0, 1.0)]
    expected = torch.stack([one.log_evidence for one in alone])
    order = [int(posterior.found.of(row)["keep"]) for row in (0, 1)]
    torch.testing.assert_close(posterior.log_evidences, expected[order], rtol=1e-10, atol=0.0)


def test_an_error_in_the_batch_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_evidence.nested.structures._owners", lambda *args: [][1])
    with pytest.raises(IndexError):
        LaplaceEvidence(linear, stop=QUIET).run(*data())


def test_columns_in_another_order_and_structures_recoded() -> None:
    X, y = data()
    order = torch.tensor([3, 0, 4, 1, 2])

    def recoded(X: Tensor, y: Tensor) -> None:
        with pyro.plate("columns", X.shape[1]):
            out = pyro.sample("out", dist.Bernoulli(0.7), infer=BRANCHING)
            w = pyro.sample("w", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ torch.where(out > 0, 0.0, w), NOISE), obs=y)

    one = LaplaceEvidence(linear, stop=QUIET).run(X, y)
    other = LaplaceEvidence(linear).run(X[:, order], y)
    torch.testing.assert_close(other.inclusion("keep"), one.inclusion("keep")[order], rtol=1e-9, atol=1e-12)
    again = LaplaceEvidence(recoded, stop=QUIET).run(X[:, :3], y)
    expected = in_closed_form(X[:, :3], y)[1].logsumexp(0)
    torch.testing.assert_close(again.log_evidence, expected, rtol=1e-9, atol=0.0)


def likelihoods(y: Tensor) -> None:
    """A structure that chooses the likelihood; one branch has a latent of its own."""
    dispersed = pyro.sample("dispersed", dist.Bernoulli(0.25), infer=BRANCHING)
    level = pyro.sample("level", dist.Normal(0.0, 3.0))
    with pyro.plate("data", len(y)):
        if bool(dispersed):
            noise = pyro.sample("noise", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Poisson((level + noise).exp()), obs=y)
        else:
            pyro.sample("y", dist.Poisson(level.exp()), obs=y)


def test_branches_with_sites_of_their_own_are_their_fits() -> None:
    y = torch.tensor([0.0, 9.0, 2.0, 25.0, 1.0, 3.0])
    posterior = LaplaceEvidence(likelihoods, stop=QUIET).run(y)
    heights = []
    for value, prior in ((0.0, 0.75), (1.0, 0.25)):
        alone = LaplaceEvidence(fixed(likelihoods, {"dispersed": torch.tensor(value)}), stop=QUIET).run(y)
        heights.append(float(alone.log_evidence) + math.log(prior))
    assert float(posterior.log_evidence) == pytest.approx(float(torch.tensor(heights).logsumexp(0)), abs=1e-9)
    assert float(posterior.inclusion("dispersed")) == pytest.approx(
        float(torch.tensor(heights).softmax(0)[1]), abs=1e-9
    )
    assert "noise" in posterior.member(0).mode and "noise" not in posterior.member(1).mode
    assert set(posterior.get_samples(50, seed=1)) >= {"level", "dispersed"}


def test_sites_that_only_some_structures_have() -> None:
    """A tree: the second choice is there after a first one only."""

    def tree(y: Tensor) -> None:
        shifted = pyro.sample("shifted", dist.Bernoulli(0.5), infer=BRANCHING)
        places = torch.tensor([-1.0, 1.0, 2.0])
        if bool(shifted):
            place = pyro.sample("place", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])), infer=BRANCHING)
            loc = places[place]
        else:
            loc = torch.tensor(0.0)
        mu = pyro.sample("mu", dist.Normal(loc, 1.0))
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    y = torch.tensor(1.3)
    posterior = LaplaceEvidence(tree, stop=QUIET).run(y)
    locs, prior = torch.tensor([0.0, -1.0, 1.0, 2.0]), torch.tensor([0.5, 0.1, 0.25, 0.15])
    heights = dist.Normal(locs, 2.0**0.5).log_prob(y) + prior.log()
    assert len(posterior.found) == 4
    assert float(posterior.log_evidence) == pytest.approx(float(heights.logsumexp(0)), abs=1e-10)
    shares = {value: float(p) for value, p in posterior.values_of("place").items()}
    assert shares == pytest.approx(dict(zip([0.0, 1.0, 2.0], heights.softmax(0)[1:].tolist(), strict=True)), abs=1e-10)
    assert any("place" not in posterior.structure(k) for k in range(4))


def test_kernels_are_chosen() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.linspace(0.0, 6.0, 30)
    t = torch.sin(2.0 * math.pi * X) + 0.1 * torch.randn(30, generator=generator)

    def model(X: Tensor, t: Tensor) -> None:
        waves = pyro.sample("waves", dist.Categorical(torch.ones(2)), infer=BRANCHING)
        away = X.unsqueeze(-1) - X
        away = torch.sin(math.pi * away) if int(waves) else away
        covariance = (-0.5 * away.square()).exp() + 0.01 * torch.eye(len(X))
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), covariance))
        pyro.sample("t", dist.Normal(f, 0.1).to_event(1), obs=t)

    posterior = LaplaceEvidence(model, stop=QUIET).run(X, t)
    heights = []
    for away in (X.unsqueeze(-1) - X, torch.sin(math.pi * (X.unsqueeze(-1) - X))):
        covariance = (-0.5 * away.square()).exp() + 0.02 * torch.eye(len(X))
        heights.append(float(dist.MultivariateNormal(torch.zeros(len(X)), covariance).log_prob(t)))
    expected = torch.tensor(heights).logsumexp(0) - math.log(2.0)
    torch.testing.assert_close(posterior.log_evidence, expected, rtol=1e-9, atol=0.0)
    share = float(torch.tensor(heights).softmax(0)[1])
    assert float(posterior.values_of("waves")[1.0]) == pytest.approx(share, abs=1e-9)


def test_a_search_says_what_it_has_not_visited() -> None:
    X, y = data(60, 10, seed=3)
    every, heights = in_closed_form(X, y)
    found = LaplaceEvidence(linear, start=Start(structures=200)).run(X, y)
    assert len(found.found) <= 220
    lookup = dict(zip(map(tuple, every.tolist()), heights.softmax(0).tolist(), strict=True))
    seen = sum(lookup[tuple(row)] for row in found.found.values["keep"].tolist())
    assert 0.0 < 1.0 - seen <= found.unvisited
    assert found.search.error < 0.005  # most draws are of structures that are known: these have no error
    assert abs(float(found.log_evidence - heights.logsumexp(0))) < 4.0 * found.search.error
    torch.testing.assert_close(found.inclusion("keep"), heights.softmax(0) @ every, rtol=0.0, atol=0.008)
    again = LaplaceEvidence(linear, start=Start(structures=200)).run(X, y)
    assert float(again.log_evidence) == float(found.log_evidence)
    assert any("not all structures" in note for note in found.structures(1).notes)


def test_a_search_among_fewer_structures_than_neighbours() -> None:
    X, y = data()
    posterior = LaplaceEvidence(linear, start=Start(structures=6)).run(X, y)
    exact = in_closed_form(X, y)[1]
    places = (posterior.found.values["keep"] @ torch.tensor([16.0, 8.0, 4.0, 2.0, 1.0])).long()
    torch.testing.assert_close(posterior.log_evidences + posterior.found.log_prior, exact[places])
    assert math.isnan(posterior.unvisited) and "is not known" in str(posterior.structures())


def test_a_structure_is_a_model_for_other_engines() -> None:
    X, y = data()
    posterior = LaplaceEvidence(linear).run(X, y)
    winner = poutine.condition(linear, data=posterior.structure())
    alone = LaplaceEvidence(winner, stop=QUIET).run(X, y)
    assert float(alone.log_evidence) == pytest.approx(float(posterior.search.log_weights.max()), abs=1e-9)


def test_programs_are_explored_by_name() -> None:
    X, y = data()
    counted = (y.exp() * 3.0).floor()

    def poisson(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Poisson((X @ w).exp()), obs=y)

    def geometric(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Geometric(logits=-(X @ w)), obs=y)

    posterior = explore({"Poisson": poisson, "geometric": geometric}, X, counted, prior={"Poisson": 1, "geometric": 3})
    alone = [float(LaplaceEvidence(m, stop=QUIET).run(X, counted).log_evidence) for m in (poisson, geometric)]
    expected = (torch.tensor(alone) + torch.tensor([0.25, 0.75]).log()).softmax(0)
    shares = posterior.values_of("program")
    assert {n: float(p) for n, p in shares.items()} == pytest.approx(
        {"Poisson": float(expected[0]), "geometric": float(expected[1])}, abs=1e-9
    )
    assert "program=" in str(posterior.structures())
    with pytest.raises(BadInput, match="expected programs by name"):
        explore([poisson], X, counted)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="a positive number for each"):
        explore({"Poisson": poisson}, X, counted, prior={"other": 1.0})
    for programs, settings, said in (
        ({"Poisson": 3}, {}, "model is a int"),
        ({"Poisson": poisson}, {"engine": RVM}, "engine= makes RVM"),
        ({"Poisson": poisson}, {"engine": LaplaceEvidence(poisson)}, "expected what makes one of a model"),
        ("y ~ a", {}, "frame is a Tensor"),
    ):
        with pytest.raises(BadInput, match=said):
            explore(programs, X, **settings)
    with pytest.raises(BadInput, match="frame is a NoneType"):
        explore("y ~ a")


def test_numbers_of_components_are_explored_by_em() -> None:
    """By the evidences of the fits, and a nat for each number that is maximised."""
    Y = torch.cat([torch.randn(30, 2, generator=torch.Generator().manual_seed(0)) + m for m in (-3.0, 3.0)])
    engine = partial(EvidenceEM, stop=QUIET)
    found = explore({str(k): gaussian_mixture(k) for k in (1, 2)}, Y, engine=engine, prior={"1": 3, "2": 1})
    alone = [engine(gaussian_mixture(k)).run(Y) for k in (1, 2)]
    evidences = torch.tensor([float(fit.log_evidence) for fit in alone])
    torch.testing.assert_close(found.log_evidences, evidences, rtol=1e-9, atol=0.0)
    expected = torch.tensor([3.0, 1.0]).log() - torch.tensor([3.0, 6.0])  # a precision of each kind, a share
    assert float(found.found.log_prior.diff()) == pytest.approx(float(expected.diff()))
    assert "falls by a nat with each number that is maximised" in str(found.structures())


def flat(y: Tensor) -> None:
    """Without a posterior where the flat site is not used."""
    unused = pyro.sample("unused", dist.Bernoulli(0.5), infer=BRANCHING)
    mu = pyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
    nu = pyro.sample("nu", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(nu if bool(unused) else mu + nu, 1.0), obs=y)


def test_structures_without_a_posterior_are_told_and_left_out() -> None:
    posterior = LaplaceEvidence(flat, stop=QUIET).run(torch.tensor(0.3))
    assert len(posterior.failures) == 1 and "1 structures have no posterior" in str(posterior.structures())
    assert "flat priors of mu have an arbitrary constant" in str(posterior.structures())
    assert float(posterior.probabilities.max()) == 1.0

    def fails(values: dict[str, Tensor]) -> Any:
        raise ImproperPosterior("it has no integral.")

    with pytest.raises(NotAMode, match=r"none of the 2 structures has a posterior.*it has no integral"):
        over(structures_of(flat, ((torch.tensor(0.3),), {})), fails, Start(), progress=False)


def continuous(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0), infer=BRANCHING)
    pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def hierarchical(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    keep = pyro.sample("keep", dist.Bernoulli(p), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(w * keep, 1.0), obs=y)


def learned(y: Tensor) -> None:
    wide = pyro.sample("wide", dist.Bernoulli(0.5), infer=BRANCHING)
    scale = pyro.param("scale", torch.tensor(2.0), constraint=dist.constraints.positive) if bool(wide) else 1.0
    w = pyro.sample("w", dist.Normal(0.0, scale))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def learned_odds(y: Tensor) -> None:
    odds = pyro.param("odds", torch.tensor(0.3), constraint=dist.constraints.unit_interval)
    keep = pyro.sample("keep", dist.Bernoulli(odds), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w * keep, 1.0), obs=y)


def sizes_of_sites(y: Tensor) -> None:
    size = 1 + int(pyro.sample("more", dist.Bernoulli(0.5), infer=BRANCHING))
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([size]).to_event(1), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal((w * keep).sum(), 1.0), obs=y)


def counted(y: Tensor) -> None:
    """Has what cannot be summed out in one branch alone, which is hardly ever drawn."""
    rare = pyro.sample("rare", dist.Bernoulli(1e-6), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    shift = pyro.sample("shift", dist.Poisson(1.0)) if bool(rare) else 0.0
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w + shift, 1.0), obs=y)


def out_of_reach(y: Tensor) -> None:
    share = pyro.sample("share", dist.Bernoulli(0.5), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Beta(1.0, w.exp()) if bool(share) else dist.Bernoulli(logits=w), obs=y)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (continuous, BadInput, "annotated as branching and is a Normal"),
        (hierarchical, UnsupportedModel, "depends on other latent sites"),
        (learned, UnsupportedModel, "maximise different numbers of hyperparameters"),
        (learned_odds, UnsupportedModel, "'keep' depends on a param"),
        (sizes_of_sites, UnsupportedModel, "Give the sites different names"),
        (counted, UnsupportedModel, "with rare=1: site 'shift' is a discrete latent, Poisson, without finite support"),
        (out_of_reach, NotAMode, "none of the 2 structures has a posterior.*within the support"),
    ],
)
def test_what_is_no_structure_is_refused(model: Callable[..., Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LaplaceEvidence(model, stop=QUIET).run(torch.tensor([3.0, 4.0]))


def test_steps_and_chunks_take_one_structure() -> None:
    X, y = data()
    with pytest.raises(UnsupportedModel, match=r"structure site\(s\) keep are summed over by"):
        LaplaceEvidence(linear).step(X, y)
    with pytest.raises(UnsupportedModel, match=r"structure site\(s\) keep are summed over by"):
        LaplaceEvidence(linear).run_chunks([(X[:20], y[:20]), (X[20:], y[20:])])
    with pytest.raises(UnsupportedModel, match=r"structure site\(s\) keep are summed over by"):
        RVM(linear, site="w").run(X, y)
    posterior = LaplaceEvidence(linear).run(X, y)
    with pytest.raises(BadInput, match="expected a structure site: keep"):
        posterior.inclusion("w")
    with pytest.raises(BadInput, match="0 to 31"):
        posterior.structure(32)


def test_structures_are_a_product_where_their_priors_do_not_meet() -> None:
    X, y = data()
    assert isinstance(structures_of(linear, ((X, y), {})), IndependentChoices)
    assert len(structures_of(linear, ((X, y), {})).sizes) == 5


def test_a_model_is_run_once_for_each_structure_that_is_tried() -> None:
    X, y = data()
    runs = []

    def counted(X: Tensor, y: Tensor) -> None:
        runs.append(len(X))
        linear(X, y)

    structures_of(counted, ((X, y), {}))
    assert len(runs) == 11  # one, and the least, the largest and eight random structures


def test_bars_of_inclusion() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    X, y = data()
    posterior = LaplaceEvidence(linear).run(X, y)
    axes = posterior.plot(plt.figure().gca())
    widths = torch.tensor([bar.get_width() for bar in axes.patches])
    torch.testing.assert_close(widths, posterior.inclusion("keep"), rtol=1e-12, atol=0.0)
    plt.close("all")


def test_structures_without_a_posterior_have_no_place_in_the_tree() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    posterior = LaplaceEvidence(linear).run(*data(size=3))
    fails = posterior.found.values["keep"].sum(-1) == 3.0
    search, lost = posterior.search, lambda x, end: torch.where(fails, end, x)
    search = replace(
        search, log_evidences=lost(search.log_evidences, math.nan), log_weights=lost(search.log_weights, -math.inf)
    )
    axes = replace(posterior, search=search).plot_nested(plt.figure().gca())
    assert len(axes.texts) == 7 + 6 and not any("inf" in text.get_text() for text in axes.texts)
    plt.close("all")


def test_the_summary_has_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    X, y = data()
    table = LaplaceEvidence(linear).run(X, y).summary()
    assert len(table.rows) == 10 and "over 32 structures" in capsys.readouterr().out


def test_structures_that_observe_different_data_are_said() -> None:
    """The density of log y is in other units than that of y: LogNormal would be both in one."""
    y = torch.tensor([1.0, 2.0, 4.0, 3.0])

    def transformed(y: Tensor) -> None:
        logged = pyro.sample("logged", dist.Bernoulli(0.5), infer=BRANCHING)
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        pyro.sample("y", dist.Normal(mu, 1.0).expand([4]).to_event(1), obs=y.log() if logged else y)

    assert "structures observe different data" in str(LaplaceEvidence(transformed, stop=QUIET).run(y).structures())


def kinds(y: Tensor) -> None:
    """Three likelihoods: of positive numbers, of counts, and of all numbers under a flat prior of two shapes."""
    kind = int(pyro.sample("kind", dist.Categorical(torch.ones(3)), infer=BRANCHING))
    if kind == 2:
        mu = pyro.sample("mu", dist.ImproperUniform(dist.constraints.real_vector, (), (1,))).sum()
    else:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        laws = (lambda: dist.LogNormal(mu, 1.0), lambda: dist.Poisson(mu.exp()), lambda: dist.Normal(mu, 1.0))
        pyro.sample("y", laws[kind](), obs=y)


def test_data_outside_the_support_of_a_branch_leave_it_out() -> None:
    y = torch.tensor([0.0, 1.0, 2.0])
    posterior = LaplaceEvidence(kinds, stop=QUIET).run(y)
    assert float(posterior.values_of("kind")[0.0]) == 0.0
    said = str(posterior.structures())
    assert "OutsideSupport" in said and "probabilities of data are compared with densities" in said
    assert "site 'mu' has shape () with kind=1, (1,) with kind=2" in said
    assert "flat priors of mu have an arbitrary constant" in said


def test_what_a_wide_prior_costs_stands_beside_the_table() -> None:
    """Of three columns that are surely in, three times the log of two."""
    X, y = data(400, 3)
    y = X.sum(-1) + NOISE * torch.randn(400, generator=torch.Generator().manual_seed(1))

    def wide(X: Tensor, y: Tensor) -> None:
        keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([3]).to_event(1), infer=BRANCHING)
        w = pyro.sample("w", dist.Normal(0.0, 100.0).expand([3]).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ (w * keep), NOISE), obs=y)

    found = LaplaceEvidence(wide, stop=QUIET).run(X, y)
    assert "in the first, -2.1 nats as w.scale is doubled" in str(found.structures(2))


def test_the_slope_of_a_vague_prior_is_said_where_the_noise_is_sampled() -> None:
    """Lindley: each coefficient that is in costs log 2 as its prior's scale is doubled."""

    def model(X: Tensor, y: Tensor) -> None:
        keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([2]).to_event(1), infer=BRANCHING)
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        w = pyro.sample("w", dist.Normal(0.0, 100.0).expand([2]).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ (w * keep), noise), obs=y)

    X, y = data(size=3)
    found = LaplaceEvidence(model, stop=QUIET).run(X[:, :2], 2.0 * X[:, 0] + 0.1 * y)
    assert found.member(0).marginalised_sites == ("noise",) and found.structure(0)["keep"].tolist() == [1.0, 0.0]
    assert "in the first, -0.69 nats as w.scale is doubled" in str(found.structures(2))


@pytest.mark.parametrize("model", [linear, pytest.param(with_scales, marks=pytest.mark.slow)])
def test_a_saved_posterior_is_the_same_over_its_engine(model: Callable[..., Any], tmp_path: Path) -> None:
    X, y = data(size=3)
    engine = LaplaceEvidence(model, stop=QUIET)
    posterior = engine.run(X, y)
    posterior.save(tmp_path / "fit")
    again = StructurePosterior.load(tmp_path / "fit", LaplaceEvidence(model, stop=QUIET))
    assert float(again.log_evidence) == float(posterior.log_evidence)
    assert str(again.structures()) == str(posterior.structures())
    for name, value in posterior.get_samples(50, seed=0).items():
        torch.testing.assert_close(again.get_samples(50, seed=0)[name], value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again.predict(X), posterior.predict(X), rtol=1e-6, atol=1e-6)
    with pytest.raises(BadInput, match=r"expected the engine, LaplaceEvidence\(model\)"):
        StructurePosterior.load(tmp_path / "fit", model)
    narrow = poutine.condition(model, data={"w": torch.zeros(3)})
    with pytest.raises(BadInput):
        StructurePosterior.load(tmp_path / "fit", LaplaceEvidence(narrow, stop=QUIET))


def test_formulas_are_not_saved(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    X, y = data()
    found = explore("y ~ a", pandas.DataFrame({"y": y.numpy(), "a": X[:, 0].numpy()}))
    with pytest.raises(BadInput, match=r"posterior.member\(0\).save\(path\)"):
        found.save(tmp_path / "fit")


def test_a_structure_without_latents_counts_by_its_likelihood() -> None:
    """A point null beside a Beta prior, and in one program."""
    y = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])

    def coin(y: Tensor, null: bool | None = None) -> None:
        null = null if null is not None else not pyro.sample("biased", dist.Bernoulli(0.5), infer=BRANCHING)
        p = torch.tensor(0.5) if null else pyro.sample("p", dist.Beta(torch.tensor(1.0), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(p), obs=y)

    known = [10.0 * math.log(0.5), math.lgamma(9.0) + math.lgamma(3.0) - math.lgamma(12.0)]
    programs = {"fair": partial(coin, null=True), "biased": partial(coin, null=False)}
    for found in (explore(programs, y), LaplaceEvidence(coin, stop=QUIET).run(y)):
        assert sorted(found.log_evidences.tolist()) == pytest.approx(known, abs=2e-3)
        assert "p" not in found.get_samples(20, 0)
    with pytest.raises(UnsupportedModel, match="no latent site"):
        LaplaceEvidence(programs["fair"]).run(y)


@pytest.mark.parametrize("kind", ["bernoulli", "categorical"])
def test_values_of_probability_zero_have_no_mass(kind: str) -> None:
    """In single precision torch takes 1e-7 for zero, which data that ask for such a value outweigh."""
    X, y = (x.float() for x in data(size=3))

    def model(X: Tensor, y: Tensor) -> None:
        if kind == "bernoulli":
            probs = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float32)
            keep = pyro.sample("keep", dist.Bernoulli(probs).to_event(1), infer=BRANCHING)
        else:
            one = pyro.sample("keep", dist.Categorical(torch.tensor([0.0, 0.5, 0.5]).float()), infer=BRANCHING)
            keep = torch.eye(3, dtype=torch.float32)[one]
        w = pyro.sample("w", dist.Normal(torch.zeros(3).float(), 1.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ (w * keep), 0.05), obs=y)

    found = LaplaceEvidence(model, stop=QUIET).run(X, 3.0 * X[:, 0] + 0.0 * y)
    assert len(found.found) == 2 and float(found.found.log_prior.logsumexp(0)) == pytest.approx(0.0, abs=1e-6)
    assert float(found.values_of("keep").get(0.0, torch.zeros(3)).reshape(-1)[0]) == (
        1.0 if kind == "bernoulli" else 0.0
    )


def by_choices(X: Tensor, y: Tensor) -> None:
    """Each of two columns left out, as it is, or without its sign."""
    how = pyro.sample("how", dist.Categorical(torch.ones(3)).expand([2]).to_event(1), infer=BRANCHING)
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    columns = torch.stack([torch.zeros_like(X), X, X.abs()])[how, :, torch.arange(2)]
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(w @ columns, NOISE), obs=y)


def test_labels_of_choices_say_all_values() -> None:
    X, y = data()
    rows = set(LaplaceEvidence(by_choices, stop=QUIET).run(X[:, :2], y).structures().rows)
    assert rows == {f"how={i}, {j}" for i in range(3) for j in range(3)}
    few = {"few": torch.tensor([0.0, 1.0])}
    assert structures.label_of(few) == "few 1"
    assert structures.label_of(few, among={"few": torch.tensor([[0.0, 1.0], [2.0, 1.0]])}) == "few=0, 1"
