"""Many fits in one table: the numbers of single fits, failures that stop nobody, and what is made of many fits."""

import math
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import (
    RVM,
    BadInput,
    LaplaceEvidence,
    Start,
    Stop,
    bootstrap,
    compare_evidence,
    explore,
    leave_one_group_out,
    run_many,
)
from pyro_evidence.compare.many import FAILED, rubin
from pyro_evidence.laplace.replicates import columns_of
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.kernels import Linear as LinearKernel
from pyro_evidence.models.regression import regression
from pyro_evidence.nested.hyperparameter_modes import other_places
from pyro_evidence.numerics.quadrature.reparameterise import PROBES, Standardisation, map_of
from pyro_evidence.posterior import replicates
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.replicates import Batch, together

QUIET = Stop(progress=False)


def line(X: Tensor, y: Tensor | None = None) -> None:
    """A linear model with noise of a half and a wide prior."""
    w = pyro.sample("w", dist.Normal(0.0, 10.0).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def lines(num: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num, rows, 2, generator=generator)
    return X, X @ torch.tensor([1.0, -1.0]) + 0.5 * torch.randn(num, rows, generator=generator)


def exact(X: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Posterior mean, covariance and log evidence of :func:`line` on paper."""
    covariance = torch.linalg.inv(X.T @ X / 0.25 + torch.eye(2) / 100.0)
    marginal = dist.MultivariateNormal(torch.zeros(len(y)), 0.25 * torch.eye(len(y)) + 100.0 * X @ X.T)
    return covariance @ X.T @ y / 0.25, covariance, float(marginal.log_prob(y))


def test_each_fit_has_its_own_closed_form() -> None:
    X, y = lines(5, 12)
    fits = run_many(LaplaceEvidence(line, stop=QUIET), X, y)
    expected = [exact(*pair) for pair in zip(X, y, strict=True)]
    assert fits.log_evidence.tolist() == pytest.approx([e for _, _, e in expected], rel=1e-10)
    medians, errors = fits.estimates("w")
    torch.testing.assert_close(medians, torch.stack([m for m, _, _ in expected]), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(errors, torch.stack([c.diagonal().sqrt() for _, c, _ in expected]), rtol=1e-8, atol=0.0)
    assert len(fits) == len(list(fits)) == 5
    assert set(fits.status) == {"converged"}
    assert float(fits.posterior(3).log_evidence) == pytest.approx(expected[3][2], rel=1e-10)
    assert fits.posterior(3).log_likelihood()["y"].shape == (12,)


def test_shapes_may_differ_and_what_is_shared_goes_by_keyword() -> None:
    X, y = lines(4, 12)
    ragged = [(X[0], y[0]), (X[1, :7], y[1, :7]), (X[2], y[2])]
    fits = run_many(LaplaceEvidence(line, stop=QUIET), ragged)
    assert fits.log_evidence.tolist() == pytest.approx([exact(*pair)[2] for pair in ragged], rel=1e-10)
    shared = run_many(LaplaceEvidence(lambda y, X: line(X, y), stop=QUIET), y, X=X[0])
    assert shared.log_evidence.tolist() == pytest.approx([exact(X[0], each)[2] for each in y], rel=1e-10)


def test_a_failure_is_an_entry_and_stops_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    X, y = lines(4, 12)
    y[2, 3] = torch.nan
    fits = run_many(LaplaceEvidence(line, stop=QUIET), X, y)
    assert fits.succeeded == (0, 1, 3)
    assert list(fits.errors) == [2]
    assert fits.status[2] == FAILED
    assert math.isnan(fits.log_evidence[2])
    assert float(fits.log_evidence[3]) == pytest.approx(exact(X[3], y[3])[2], rel=1e-10)
    with pytest.raises(BadInput, match="nan"):
        fits.posterior(2)
    assert "4 fits, 1 failed" in str(fits.table()) and not capsys.readouterr().out
    assert str(fits.summary()) == str(fits.table())
    assert "fit 2: " in capsys.readouterr().out


def test_any_engine() -> None:
    X, y = lines(3, 20)
    engine = RVM(regression(Linear()), stop=QUIET)
    fits = run_many(engine, X, y)
    for k, (design, target) in enumerate(zip(X, y, strict=True)):
        assert float(fits.log_evidence[k]) == float(
            RVM(regression(Linear()), stop=QUIET).run(design, target).log_evidence
        )


def test_arguments_that_are_no_rows_are_refused() -> None:
    X, y = lines(3, 12)
    for args in ((X, y[:2]), (X, "y"), (), (torch.tensor(1.0),), ([],)):
        with pytest.raises(BadInput, match="expected tensors with one leading axis, a row for each fit"):
            run_many(LaplaceEvidence(line), *args)
    fits = run_many(LaplaceEvidence(line, stop=QUIET), X, y)
    with pytest.raises(BadInput, match=r"posterior\(3\): expected the number of a fit, 0 to 2"):
        fits.posterior(3)
    with pytest.raises(BadInput, match=r"expected a latent site, one of \['w'\]"):
        fits.estimates("v")
    with pytest.raises(BadInput, match="1 of 1 fits succeeded; expected two or more"):
        run_many(LaplaceEvidence(line, stop=QUIET), X[:1], y[:1]).pool("w")


def test_rubins_rules() -> None:
    """Against the formulas in the book, by NumPy, of posteriors known in closed form."""
    X, y = lines(6, 12)
    pooled = run_many(LaplaceEvidence(line, stop=QUIET), X, y).pool("w")
    means, covariances = zip(*[exact(*pair)[:2] for pair in zip(X, y, strict=True)], strict=True)
    q, u = np.stack([m.numpy() for m in means]), np.stack([c.diagonal().numpy() for c in covariances])
    between = ((q - q.mean(0)) ** 2).sum(0) / 5.0
    total = u.mean(0) + between + between / 6.0
    r = (between + between / 6.0) / u.mean(0)
    assert pooled.mean.numpy() == pytest.approx(q.mean(0))
    assert pooled.sd.numpy() == pytest.approx(np.sqrt(total))
    assert pooled.df.numpy() == pytest.approx(5.0 * (1.0 + 1.0 / r) ** 2)
    assert pooled.missing_information.numpy() == pytest.approx(r / (1.0 + r))


def test_rubins_rules_without_missing_values() -> None:
    same = rubin(torch.ones(4, 2), torch.full((4, 2), 0.5))
    assert same.sd.tolist() == [0.5, 0.5]
    assert same.missing_information.tolist() == [0.0, 0.0]
    assert same.df.tolist() == [math.inf, math.inf]


def mean_of(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 100.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def test_bootstrap_of_a_mean() -> None:
    """The standard error of a mean is that of the data, 3 / sqrt 50, whatever noise the model believes in."""
    y = 3.0 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    fits = bootstrap(LaplaceEvidence(mean_of, stop=QUIET).run(y), 200)
    medians, errors = fits.estimates("mu")
    expected = float(y.std(correction=0)) / math.sqrt(50.0)
    assert float(medians.std()) == pytest.approx(expected, rel=4.0 / math.sqrt(2.0 * 200))
    assert abs(float(medians.mean() - y.mean())) < 4.0 * expected / math.sqrt(200.0)
    assert float(errors[0]) == pytest.approx(1.0 / math.sqrt(50.0), rel=1e-4)


def test_leaving_groups_out() -> None:
    X, y = (x[0] for x in lines(1, 12))
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 1, 0])
    posterior = LaplaceEvidence(line, stop=QUIET).run(X, y)
    found, fits = leave_one_group_out(posterior, groups)
    whole = exact(X, y)[2]
    expected = [whole - exact(X[groups != g], y[groups != g])[2] for g in range(3)]
    assert found.tolist() == pytest.approx(expected, rel=1e-8)
    assert len(fits) == 3
    words = leave_one_group_out(posterior, np.array(["a", "b", "c"])[groups])[0]
    assert words.tolist() == found.tolist()
    with pytest.raises(BadInput, match="no positional argument has 5 rows"):
        leave_one_group_out(posterior, groups[:5])
    with pytest.raises(BadInput, match="no positional argument has 12 rows"):
        bootstrap(LaplaceEvidence(partial(line, X, y), stop=QUIET).run())


def intercepts(x: Tensor, y: Tensor) -> None:
    """Random intercepts of ten groups about a mean that is a latent, the spreads maximised."""
    tau = pyro.param("tau", torch.tensor(1.0), constraint=dist.constraints.positive)
    sigma = pyro.param("sigma", torch.tensor(1.0), constraint=dist.constraints.positive)
    a, b = (pyro.sample(name, dist.Normal(0.0, 10.0)) for name in "ab")
    with pyro.plate("groups", 10):
        e = pyro.sample("e", dist.Normal(a, tau))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(b * x + e[torch.arange(len(x)) % 10], sigma), obs=y)


def grouped(num: int, spread: float = 0.8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, effects = torch.randn(num, 60, generator=generator), spread * torch.randn(num, 10, generator=generator)
    noise = 0.6 * torch.randn(num, 60, generator=generator)
    return x, 1.0 + 0.5 * x + effects[:, torch.arange(60) % 10] + noise


def effects(x: Tensor, y: Tensor) -> None:
    """The same, the spreads sampled and so integrated numerically."""
    tau, sigma = (pyro.sample(name, dist.HalfNormal(1.0)) for name in ("tau", "sigma"))
    a, b = (pyro.sample(name, dist.Normal(0.0, 10.0)) for name in "ab")
    with pyro.plate("groups", 10):
        e = pyro.sample("e", dist.Normal(0.0, tau))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a + b * x + e[torch.arange(len(x)) % 10], sigma), obs=y)


def schools(sigma: Tensor, y: Tensor) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def school_data(num: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    spread = 12.0 * torch.rand(num, 1, generator=generator)
    y = spread * torch.randn(num, 8, generator=generator) + sigma * torch.randn(num, 8, generator=generator)
    return sigma.expand(num, 8), y


def poisson(x: Tensor, y: Tensor) -> None:
    """Counts whose coefficients have a spread that is maximised, and no closed form."""
    scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, scale).expand([4]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)


def logistic(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def counts(num: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = 0.7 * torch.randn(num, 40, 4, generator=generator)
    return x, torch.poisson((x @ torch.tensor([1.0, -1.0, 0.5, 0.8])).exp(), generator=generator)


CASES = {
    "closed form": (line, lines(10, 12)),
    "spreads maximised": (intercepts, grouped(10)),
    "spreads integrated": (effects, grouped(9)),
    "one axis": (schools, school_data(12)),
    "counts": (poisson, counts(12)),
}


def batch_of(engine: LaplaceEvidence, sets: list[tuple[Tensor, ...]]) -> Batch:
    """What a batch finds, told by fits of some."""

    def alone(k: int) -> LaplacePosterior:
        return engine.run(*sets[k])

    return together(partial(columns_of, sets), len(sets), alone, engine.start, engine.stop.quadrature_tol)


@pytest.mark.parametrize("case", CASES)
def test_a_batch_is_a_loop(case: str) -> None:
    model, data = CASES[case]
    engine, sets = LaplaceEvidence(model, stop=QUIET), list(zip(*data, strict=True))
    batch = batch_of(engine, sets)
    assert len(batch.log_evidences) >= len(sets) - 2  # what is doubtful is left to single fits
    for k in list(batch.log_evidences)[1:-1:3]:
        log_evidence = batch.log_evidences[k]
        alone, found = LaplaceEvidence(model, stop=QUIET).run(*sets[k]), batch.posterior(k)
        assert log_evidence == pytest.approx(float(alone.log_evidence), abs=1e-7)
        assert float(found.log_evidence) == pytest.approx(log_evidence, abs=1e-8)
        for name, value in alone.hyperparameters.items():
            assert float(found.hyperparameters[name]) == pytest.approx(float(value), rel=1e-5)
        for name, value in alone.get_samples(20, seed=0).items():
            torch.testing.assert_close(found.get_samples(20, seed=0)[name], value, rtol=1e-4, atol=1e-5)
        assert found.log_likelihood()["y"] == pytest.approx(alone.log_likelihood()["y"], rel=1e-4)


def test_models_without_a_search_for_modes_are_a_batch_however_long_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of quadratic log joints derivatives are made one by one, where a search makes all of a few data sets at once."""
    for model, data, num in ((intercepts, grouped(9), 9), (poisson, counts(9), 0)):
        engine, sets = LaplaceEvidence(model, stop=QUIET), list(zip(*data, strict=True))
        joint = engine.run(*sets[0])._joint
        monkeypatch.setattr(replicates, "BATCH_BYTES", 15 * joint.row_bytes * joint.latents.size)
        batch = batch_of(engine, sets)
        assert len(batch.log_evidences) == num
        for k in list(batch.log_evidences)[1:2]:
            assert batch.log_evidences[k] == pytest.approx(float(engine.run(*sets[k]).log_evidence), abs=1e-7)


def test_searches_begin_where_each_data_set_is_likely() -> None:
    """A spread a hundred times that of the others is where theirs are not found from."""

    def model(y: Tensor) -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, 12.0), obs=y)

    y = 15.0 * torch.randn(12, 8, generator=torch.Generator().manual_seed(4))
    y[-1] *= 100.0
    engine = LaplaceEvidence(model, stop=QUIET, marginalise=["tau"])
    found = batch_of(engine, [(each,) for each in y]).log_evidences
    assert len(found) == 12
    for k in (0, 5, 11):  # by other nodes, within the tolerance of integrals
        assert found[k] == pytest.approx(float(engine.run(y[k]).log_evidence), abs=5e-3)


def test_what_is_doubtful_is_left_to_single_fits() -> None:
    """Data of no spread among groups, whose maximum is at zero; data outside the support; data that are missing."""
    x, y = grouped(12)
    y[4] = 1.0 + 0.5 * x[4] + 0.6 * torch.randn(60, generator=torch.Generator().manual_seed(5))
    y[4] -= torch.stack([y[4][torch.arange(60) % 10 == g].mean() for g in range(10)])[torch.arange(60) % 10]
    y[7, 3] = torch.nan
    batch = batch_of(LaplaceEvidence(intercepts, stop=QUIET), list(zip(x, y, strict=True)))
    assert set(batch.log_evidences) == set(range(12)) - {4, 7}
    X, n = counts(12)
    label = (n > 1.0).double()
    label[5, 0] = 2.0  # whose log probability is a number
    fits = run_many(LaplaceEvidence(logistic, stop=QUIET), X, label)
    assert list(fits.errors) == [5]
    with pytest.raises(BadInput, match="support"):
        fits.posterior(5)


def test_a_model_that_looks_at_its_data_is_fitted_one_by_one() -> None:
    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0 if float(y.mean()) > 0.0 else 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    y = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    engine = LaplaceEvidence(model, stop=QUIET)
    assert batch_of(engine, [(each,) for each in y]).log_evidences == {}
    fits = run_many(engine, y)
    for k, each in enumerate(y):
        cov = torch.eye(5) + (4.0 if float(each.mean()) > 0.0 else 1.0)
        exact = dist.MultivariateNormal(torch.zeros(5), cov).log_prob(each)
        assert float(fits.log_evidence[k]) == pytest.approx(float(exact), rel=1e-9)


def test_no_data_set_is_fitted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One says how a batch of quadratic log joints is made, two of others, a third where one of these has failed.

    Where they are too few, each is fitted once all the same.
    """
    run, runs = LaplaceEvidence.run, []
    monkeypatch.setattr(LaplaceEvidence, "run", lambda self, *args: runs.append(args) or run(self, *args))
    X, y = lines(9, 12)
    broken = y.clone()
    broken[4, 0] = torch.nan
    label = (y > 0.0).double()
    label[4, 0] = 2.0
    cases = [(line, y[:5], 5, []), (line, y, 1, []), (line, broken, 3, [4]), (logistic, (y > 0.0).double(), 2, [])]
    for model, target, expected, wrong in (*cases, (logistic, label, 3, [4])):
        runs.clear()
        assert list(run_many(LaplaceEvidence(model, stop=QUIET), X[: len(target)], target).errors) == wrong
        assert len(runs) == expected


def test_scales_of_priors_may_be_those_of_the_data() -> None:
    """Each data set's own, though the fit of one says how all are made."""

    def model(x: Tensor, y: Tensor) -> None:
        sigma = pyro.sample("sigma", dist.LogNormal(y.std().log(), 0.5))
        w = pyro.sample("w", dist.Normal(y.mean(), 2.0 * y.std()).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w[0] + x * w[1], sigma), obs=y)

    x, y = grouped(9)
    y *= torch.linspace(0.5, 20.0, 9).unsqueeze(-1)
    engine, sets = LaplaceEvidence(model, stop=QUIET), list(zip(x, y, strict=True))
    found = batch_of(engine, sets).log_evidences
    assert len(found) == 9
    for k in (1, 5, 7):
        assert found[k] == pytest.approx(float(engine.run(*sets[k]).log_evidence), abs=1e-7)


def test_several_modes_are_looked_for_one_by_one() -> None:
    """Two modes of the data that are exact, none of them among the three that say how the batch is to be made."""

    def model(y: Tensor, sd: Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x**2, sd), obs=y)

    y, sd = torch.full((9,), 2.0), torch.full((9,), 0.5)
    sd[[0, 4, 8]] = 1e3
    engine = LaplaceEvidence(model, stop=QUIET, start=Start(restarts=1))
    fits = run_many(engine, y, sd)
    expected = [float(engine.run(*each).log_evidence) for each in zip(y, sd, strict=True)]
    assert fits.log_evidence.tolist() == expected


def test_ragged_data_are_a_batch_by_masks() -> None:
    """Whatever stands where nothing is, the numbers are those of the data that are there."""
    x, y = grouped(9)
    num = torch.arange(52, 61)
    there = torch.arange(60) < num.unsqueeze(-1)

    def model(x: Tensor, y: Tensor, there: Tensor) -> None:
        tau, sigma = (pyro.sample(name, dist.HalfNormal(1.0)) for name in ("tau", "sigma"))
        with pyro.plate("groups", 10):
            e = pyro.sample("e", dist.Normal(0.0, tau))
        with pyro.plate("data", len(x)), pyro.poutine.mask(mask=there):
            pyro.sample("y", dist.Normal(0.5 * x + e[torch.arange(len(x)) % 10], sigma), obs=y)

    engine = LaplaceEvidence(model, stop=QUIET)
    batch = batch_of(engine, list(zip(x, torch.where(there, y, 9.0), there, strict=True)))
    assert len(batch.log_evidences) >= 7
    for k in (2, 6):
        alone = engine.run(x[k, : num[k]], y[k, : num[k]], torch.tensor(True))
        assert batch.log_evidences[k] == pytest.approx(float(alone.log_evidence), abs=1e-7)


def test_data_sets_of_which_few_can_be_held_are_fitted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by what is known of its structure, of which a batch makes no use."""
    sets = list(zip(*lines(9, 12), strict=True))
    assert len(batch_of(LaplaceEvidence(line, stop=QUIET), sets).log_evidences) == 9
    monkeypatch.setattr("pyro_evidence.posterior.replicates.BATCH_BYTES", 2**10)
    assert batch_of(LaplaceEvidence(line, stop=QUIET), sets).log_evidences == {}


def relevance(X: Tensor, y: Tensor) -> None:
    """A precision for each weight, those of useless columns without a maximum."""
    alpha = pyro.param("alpha", torch.ones(3), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def test_weights_to_be_pruned_are_left_to_single_fits() -> None:
    generator = torch.Generator().manual_seed(2)
    X, w = torch.randn(10, 40, 3, generator=generator), torch.ones(10, 3)
    w[[3, 6], 1] = 0.0
    y = (X @ w.unsqueeze(-1)).squeeze(-1) + 0.5 * torch.randn(10, 40, generator=generator)
    engine, sets = LaplaceEvidence(relevance, stop=QUIET), list(zip(X, y, strict=True))
    batch = batch_of(engine, sets)
    alone = [engine.run(*each) for each in sets]
    pruned = {k for k, posterior in enumerate(alone) if bool(posterior.pruned["w"].any())}
    assert pruned and len(batch.log_evidences) >= 6
    assert not pruned & set(batch.log_evidences)
    for k, log_evidence in batch.log_evidences.items():
        assert log_evidence == pytest.approx(float(alone[k].log_evidence), abs=1e-7)


def test_a_second_mode_of_the_marginalised_sites_is_seen() -> None:
    """A hill on the second of two axes; a place of the prior, far away, that is high; and neither."""
    where = Standardisation(torch.zeros(3, 1, 2), torch.eye(2).expand(3, 2, 2), map_of(torch.zeros(2, 4)))
    profile = (-0.5 * torch.tensor(PROBES).square()).repeat(3, 2)
    profile[0, -1] = -3.0
    drawn, height = torch.tensor([[1.0, 1.0], [0.0, 9.0]]), torch.tensor([[-1.0, -40.0], [-1.0, -8.0], [-1.0, -40.0]])
    assert other_places(where, profile, drawn, height).any(-1).tolist() == [True, True, False]


def chosen(X: Tensor, y: Tensor) -> None:
    """A column that is in or out, with noise of a half."""
    keep = pyro.sample("keep", dist.Bernoulli(0.5), infer={"branching": True})  # type: ignore[typeddict-unknown-key]
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X[:, 0] * w[0] + keep * X[:, 1] * w[1], 0.5), obs=y)


def test_structures_are_summed_in_each_of_many_fits() -> None:
    """Imputed data sets, draws of rows, and groups left out."""
    X, y = lines(10, 12)
    engine = LaplaceEvidence(chosen, stop=QUIET)
    fits, alone = run_many(engine, X, 0.2 * y), engine.run(X[3], 0.2 * y[3])
    torch.testing.assert_close(fits.log_evidence[3], alone.log_evidence, rtol=1e-12, atol=0.0)
    pooled = fits.pool("w")
    assert pooled.mean.shape == (2,) and 0.0 < float(pooled.missing_information[0]) < 1.0
    group = torch.arange(12) % 3
    log_densities, without = leave_one_group_out(alone, group)
    other = engine.run(X[3][group != 1], 0.2 * y[3][group != 1])
    assert float(log_densities[1]) == pytest.approx(float(alone.log_evidence - other.log_evidence), abs=1e-9)
    assert len(bootstrap(alone, 2)) == 2 and float(without.posterior(0).inclusion("keep")) < 1.0
    with pytest.raises(BadInput, match=r"subtract log_evidence, or compare posterior\.member\(0\)"):
        compare_evidence(a=alone, b=other)
    assert compare_evidence(a=alone.member(0), b=alone.member(1)).rows[0].log_evidence > -torch.inf


def test_structures_with_models_of_their_own_are_not_refitted() -> None:
    kernels = explore({"line": LinearKernel()}, torch.arange(6.0)[:, None], torch.arange(6.0) % 2, depth=1)
    with pytest.raises(BadInput, match=r"models or maximised hyperparameters of their own.*posterior\.member\(k\)"):
        bootstrap(kernels, 2)
