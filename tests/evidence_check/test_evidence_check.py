"""Estimators of the evidence against closed forms and quadrature; errors against their standard errors."""

import math
from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Start
from pyro_evidence.evidence_check import (
    EvidenceEstimate,
    bridge_sampling,
    find_modes,
    importance_sampling,
    tempered_smc,
    thames,
    thermodynamic_integration,
)
from pyro_evidence.evidence_check.target import target_of
from pyro_evidence.evidence_check.thames import Labellings, TruncationSet
from tests.models_for_tests.exact_models import (
    coin,
    location,
    location_log_evidence,
    location_posterior,
    sticky,
    straight,
    straight_data,
    straight_log_evidence,
    straight_posterior,
    two_normals,
    two_normals_data,
    two_normals_draws,
    two_normals_log_evidence,
)

HEADS = torch.tensor(6.0)
TOSSES = 20
SEEDS = range(100)
# Of the slowest: the root mean square below is known to an eighth or a fifth, and its bounds are four or three away.
FEWER = {"smc": range(15), "importance": range(15), "modes": range(15)}


@cache
def straight_case() -> tuple[LaplacePosterior, float]:
    X, y = straight_data()
    return LaplaceEvidence(straight, maximise=()).run(X, y), straight_log_evidence(X, y)


@cache
def coin_case() -> tuple[LaplacePosterior, float]:
    return LaplaceEvidence(coin, maximise=()).run(TOSSES, HEADS), -math.log(TOSSES + 1)


def observations() -> Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(3)) + 1.5


@cache
def location_case() -> tuple[LaplacePosterior, float]:
    x = observations()
    return LaplaceEvidence(location, maximise=()).run(x), location_log_evidence(x)


CASES = {"straight": straight_case, "coin": coin_case, "location": location_case}


def exact_draws(case: str, seed: int, num: int = 300) -> dict[str, Tensor]:
    """Two stationary chains of the exact posterior, autocorrelation 0.7 where it is normal."""
    generator = torch.Generator().manual_seed(10_000 + seed)  # not the numbers that the estimators draw
    if case == "straight":
        mean, covariance = straight_posterior(*straight_data())
        return {"w": torch.stack([sticky(mean, covariance, num, 0.7, generator) for _ in range(2)])}
    if case == "location":
        mean, sd = location_posterior(observations())
        at, spread = torch.tensor([mean]), torch.tensor([[sd**2]])
        return {"mean": torch.stack([sticky(at, spread, num, 0.7, generator)[:, 0] for _ in range(2)])}
    white = torch.rand(2, num, int(HEADS) + 1 + TOSSES - int(HEADS), generator=generator)
    return {"p": white.sort(-1).values[..., int(HEADS)]}  # order statistic of n + 1 uniforms: Beta(h + 1, n - h + 1)


def estimate(method: str, case: str, posterior: Any, seed: int) -> EvidenceEstimate:
    if method in ("importance", "modes"):
        return importance_sampling(posterior, num_samples=400, seed=seed)
    if method == "bridge":
        return bridge_sampling(posterior, exact_draws(case, seed), seed=seed)
    if method == "smc":
        return tempered_smc(posterior, num_particles=128, num_moves=2, seed=seed)
    if method == "thermodynamic":
        return thermodynamic_integration(posterior, seed=seed)
    return thames(posterior, exact_draws(case, seed), num_volume=2000, seed=seed)


@pytest.mark.parametrize("case", ["straight", *(pytest.param(c, marks=pytest.mark.slow) for c in ("coin", "location"))])
@pytest.mark.parametrize(
    "method",
    ["importance", "modes", "bridge", "smc", "thames", pytest.param("thermodynamic", marks=pytest.mark.slow)],
)
def test_errors_are_within_three_standard_errors(method: str, case: str) -> None:
    posterior, exact = CASES[case]()
    source = find_modes(posterior, start=Start(restarts=2)) if method == "modes" else posterior
    found = [estimate(method, case, source, seed) for seed in FEWER.get(method, SEEDS)]
    z = torch.tensor([(e.log_evidence - exact) / e.standard_error for e in found])
    assert (z.abs() < 3.0).double().mean() >= 0.95
    errors = torch.tensor([e.standard_error for e in found])
    assert float(z.square().mean().sqrt()) < 1.6, "standard errors are too small"
    if float(errors.median()) > 1e-6:  # exact to rounding otherwise: Laplace on a Gaussian
        least = 0.1 if method in ("importance", "modes") else 0.5  # quasi-random draws are better than is said of them
        assert float(z.square().mean().sqrt()) > least, "standard errors are too large"


def nuts(posterior: LaplacePosterior, *args: Tensor, num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    pyro.set_rng_seed(seed)
    kernel = pyro.infer.NUTS(posterior.model)
    mcmc = pyro.infer.MCMC(kernel, num_samples=num_samples, warmup_steps=200, disable_progbar=True)
    mcmc.run(*args)
    return mcmc.get_samples(group_by_chain=True)


@pytest.mark.parametrize("separation", [6.0, pytest.param(2.0, marks=pytest.mark.slow), 0.0])
def test_sum_over_labelled_modes_is_the_quadrature(separation: float) -> None:
    x = two_normals_data(separation)
    modes = find_modes(LaplaceEvidence(two_normals, maximise=(), start=Start(restarts=4)).run(x))
    assert len(modes.states) == 2
    assert modes.num_components == 2
    found, exact = importance_sampling(modes), two_normals_log_evidence(x)
    assert abs(found.log_evidence - exact) < 0.01
    assert abs(found.log_evidence - exact) < 4.0 * found.standard_error + 1e-6
    assert found.reliable
    if separation == 6.0:  # apart, so the sum of the Laplace evidences is right as well
        assert abs(float(modes.log_evidence) - exact) < 0.01


@pytest.mark.slow
def test_one_mode_misses_log_two_and_thames_does_not() -> None:
    x = two_normals_data(6.0)
    posterior = LaplaceEvidence(two_normals, maximise=(), start=Start(restarts=4)).run(x)
    exact, draws = two_normals_log_evidence(x), nuts(posterior, x, num_samples=600)
    one = importance_sampling(posterior)
    assert one.log_evidence == pytest.approx(exact - math.log(2.0), abs=0.01)
    found = thames(posterior, draws)
    assert abs(found.log_evidence - exact) < 3.0 * found.standard_error
    assert found.diagnostics["label_switches"] == 0.0
    flips = torch.arange(600) % 2 == 0
    draws["centre"][0, flips] = draws["centre"][0, flips].flip(-1)
    switched = thames(posterior, draws)
    assert abs(switched.log_evidence - found.log_evidence) < 0.1 * found.standard_error  # the volume points differ
    assert switched.diagnostics["label_switches"] == 299.0


def test_errors_know_of_autocorrelation() -> None:
    """Of ``bridge_sampling``, for which all ratios of this posterior are one, test_bridge.py says it."""
    posterior, exact = location_case()
    mean, sd = location_posterior(observations())
    z = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(20_000 + seed)
        chain = sticky(torch.tensor([mean]), torch.tensor([[sd**2]]), 2000, 0.95, generator)[:, 0]
        found = thames(posterior, {"mean": chain}, seed=seed)
        z.append((found.log_evidence - exact) / found.standard_error)
    assert 0.6 < float(torch.tensor(z).square().mean().sqrt()) < 1.5


def test_thames_where_the_labellings_overlap() -> None:
    x = two_normals_data(0.0)
    posterior = LaplaceEvidence(two_normals, maximise=(), start=Start(restarts=4)).run(x)
    draws = {"centre": two_normals_draws(x, 20_000).unsqueeze(0)}
    found = thames(posterior, draws, num_volume=50_000)
    assert abs(found.log_evidence - two_normals_log_evidence(x)) < 3.0 * found.standard_error
    assert found.standard_error < 0.03


def test_volume_of_a_region_that_is_its_own_image() -> None:
    posterior = LaplaceEvidence(two_normals, maximise=(), start=Start(restarts=2)).run(two_normals_data(6.0))
    space = Labellings(target_of(posterior), {"centre": 0}, [(0, 1), (1, 0)])
    region = TruncationSet(space, torch.ones(2), 0.1 * torch.eye(2), -math.inf)
    log_volume, error = region.log_volume(500, seed=0)
    assert log_volume == pytest.approx(math.log(math.pi * 3.0 * 0.01), abs=1e-12)
    assert error == 0.0


def proportions(k: Tensor) -> None:
    """Three proportions that can be exchanged, each seen ``k`` times."""
    p = pyro.sample("p", dist.Dirichlet(torch.full((3,), 2.0)))
    pyro.factor("seen", k * p.log().sum())


def test_thames_of_proportions_is_the_closed_form() -> None:
    """Relabelling changes volumes of unconstrained coordinates.  Oracle: the ratio of two Dirichlet constants."""
    k = torch.tensor(0.5)
    posterior = LaplaceEvidence(proportions, maximise=(), marginalise=()).run(k)
    torch.manual_seed(0)
    found = thames(posterior, {"p": dist.Dirichlet(torch.full((3,), 2.0) + k).sample((4, 2000))}, labels={"p": 0})
    log_constants = [3.0 * math.lgamma(a) - math.lgamma(3.0 * a) for a in (2.5, 2.0)]
    assert abs(found.log_evidence - (log_constants[0] - log_constants[1])) < 3.0 * found.standard_error < 0.1


def mixed(x: Tensor) -> None:
    """Three components whose proportions are latent as well."""
    mixing = pyro.sample("mixing", dist.Dirichlet(2.0 * torch.ones(3)))
    with pyro.plate("components", 3):
        centre = pyro.sample("centre", dist.Normal(0.0, 5.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(mixing), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(centre[z], 0.5), obs=x)


@pytest.mark.slow
def test_thames_with_latent_proportions_agrees_with_all_modes() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(45, generator=generator) * 0.5 + torch.tensor([-4.0, 0.0, 4.0]).repeat(15)
    posterior = LaplaceEvidence(mixed, maximise=(), start=Start(restarts=8)).run(x)
    modes = find_modes(posterior, start=Start(restarts=4))
    assert len(modes.states) >= 6
    sampled = importance_sampling(modes)
    found = thames(posterior, nuts(posterior, x, num_samples=800))
    assert sampled.reliable
    assert abs(found.log_evidence - sampled.log_evidence) < 3.0 * found.standard_error


def logistic(X: Tensor, t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


@pytest.fixture(scope="module")
def pima_case(data_dir: object) -> tuple[LaplacePosterior, Tensor, Tensor]:
    from pyro_evidence.datasets import pima, standardised

    torch.set_default_dtype(torch.float64)
    data = standardised(pima())
    X = torch.cat([data.X, torch.ones(len(data.X), 1)], -1)
    return LaplaceEvidence(logistic, maximise=()).run(X, data.t), X, data.t


PIMA = -383.882  # published reference: importance sampling, 5 x 100 000 draws, sd 0.0005


def test_pima_importance_sampling(pima_case: tuple[LaplacePosterior, Tensor, Tensor]) -> None:
    found = importance_sampling(pima_case[0], num_samples=20_000)
    assert found.log_evidence == pytest.approx(PIMA, abs=0.003)
    assert found.standard_error < 0.004
    assert found.diagnostics["pareto_k"] < 0.5


@pytest.mark.slow
def test_pima_bridge_from_nuts(pima_case: tuple[LaplacePosterior, Tensor, Tensor]) -> None:
    posterior, X, t = pima_case
    found = bridge_sampling(posterior, nuts(posterior, X, t, num_samples=2000))
    assert found.standard_error < 0.02
    assert abs(found.log_evidence - PIMA) < 3.0 * found.standard_error


def test_pima_smc(pima_case: tuple[LaplacePosterior, Tensor, Tensor]) -> None:
    found = tempered_smc(pima_case[0], num_particles=512)
    assert found.reliable
    assert abs(found.log_evidence - PIMA) < 3.0 * found.standard_error


def funnel(y: Tensor) -> None:
    v = pyro.sample("v", dist.Normal(0.0, 3.0))
    x = pyro.sample("x", dist.Normal(0.0, (v / 2).exp()).expand([3]).to_event(1))
    pyro.sample("y", dist.Normal(x.sum(), 5.0), obs=y)


def ridge(y: Tensor) -> None:
    """The likelihood knows the product only."""
    a = pyro.sample("a", dist.Normal(0.0, 5.0))
    b = pyro.sample("b", dist.Normal(0.0, 5.0))
    pyro.sample("y", dist.Normal(a * b, 0.1), obs=y)


def vague_logistic(X: Tensor, t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 100.0).expand([2]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def separable() -> tuple[Tensor, Tensor]:
    x = torch.tensor([-2.0, -1.5, -1.0, 1.0, 1.5, 2.0])
    return torch.stack([x, torch.ones(6)], -1), (x > 0).double()


@pytest.mark.parametrize(
    ("model", "args"),
    [(funnel, (torch.tensor(1.0),)), (ridge, (torch.tensor(2.0),)), (vague_logistic, separable())],
    ids=["funnel", "ridge", "separable"],
)
def test_posteriors_far_from_gaussian_are_said_to_be(
    model: object, args: tuple[Tensor, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    posterior = LaplaceEvidence(model, maximise=(), start=Start(tour=0)).run(*args)  # type: ignore[arg-type]
    found = importance_sampling(posterior)
    assert found.diagnostics["pareto_k"] > 0.7
    assert not found.reliable
    assert "k-hat is" in str(found)
    posterior.summary()
    assert "k-hat is above 0.7" in capsys.readouterr().out


def test_smc_is_right_where_the_gaussian_is_not() -> None:
    exact = ridge_log_evidence(2.0)
    posterior = LaplaceEvidence(ridge, maximise=(), start=Start(tour=0)).run(torch.tensor(2.0))
    found = tempered_smc(posterior, num_particles=2048, num_moves=5)
    assert abs(found.log_evidence - exact) < 3.0 * found.standard_error < 0.2
    assert abs(float(posterior.log_evidence) - exact) > 0.2


def ridge_log_evidence(y: float) -> float:
    """Oracle: the second factor integrated on paper, the first by quadrature."""
    a = torch.linspace(-40.0, 40.0, 200_001)
    inner = dist.Normal(0.0, (25.0 * a.square() + 0.01).sqrt()).log_prob(torch.tensor(y))
    return float((inner + dist.Normal(0.0, 5.0).log_prob(a)).logsumexp(0)) + math.log(float(a[1] - a[0]))


def test_nothing_global_moves() -> None:
    posterior, _ = coin_case()
    before = torch.random.get_rng_state()
    importance_sampling(posterior)
    tempered_smc(posterior, num_particles=128)
    bridge_sampling(posterior, exact_draws("coin", 0))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not list(pyro.get_param_store().keys())


def test_same_seed_same_number() -> None:
    posterior, _ = coin_case()
    assert tempered_smc(posterior, num_particles=128) == tempered_smc(posterior, num_particles=128)
    first, second = (importance_sampling(posterior, seed=seed).log_evidence for seed in (0, 1))
    assert first != second


def half_defined(y: Tensor) -> None:
    """Not a number for negative ``a``."""
    a = pyro.sample("a", dist.Normal(0.5, 1.0))
    pyro.sample("y", dist.Normal(a.sqrt(), 1.0, validate_args=False), obs=y)


@pytest.mark.parametrize("estimator", ["importance", "bridge", "smc"])
def test_nan_densities_are_a_doubt_and_not_silently_zero(estimator: str) -> None:
    posterior = LaplaceEvidence(half_defined, maximise=()).run(torch.tensor(1.5))
    positive = {"a": posterior.get_samples(400, seed=0)["a"].abs()}
    found = {
        "importance": lambda: importance_sampling(posterior, num_samples=500),
        "bridge": lambda: bridge_sampling(posterior, positive),
        "smc": lambda: tempered_smc(posterior, num_particles=128),
    }[estimator]()
    assert not found.reliable
    assert any("the log joint density is nan at " in doubt for doubt in found.doubts)
    assert math.isfinite(found.log_evidence)


def test_draws_may_be_arrays() -> None:
    posterior, _ = straight_case()
    draws = exact_draws("straight", 0)
    assert bridge_sampling(posterior, {"w": draws["w"].numpy()}) == bridge_sampling(posterior, draws)  # type: ignore[dict-item]


BAD_DRAWS = {
    "no site 'w'": lambda w: {"v": w},
    "have shape": lambda w: {"w": w[..., :2]},
    "expected at least": lambda w: {"w": w[:, :10]},
    "not finite": lambda w: {"w": torch.where(w > 0, w, torch.nan)},
    "0 draws": lambda w: {"w": w[:, :0]},
    "do not vary": lambda w: {"w": w[:, :1].expand(-1, 300, -1)},
}


@pytest.mark.parametrize("message", BAD_DRAWS)
@pytest.mark.parametrize("estimator", [bridge_sampling, thames])
def test_unusable_draws_are_refused(estimator: object, message: str) -> None:
    from pyro_evidence import BadInput

    posterior, _ = straight_case()
    draws = BAD_DRAWS[message](exact_draws("straight", 0)["w"])
    with pytest.raises(BadInput, match=message):
        estimator(posterior, draws)  # type: ignore[operator]


def test_thames_refuses_labels_that_mean_something() -> None:
    from pyro_evidence import BadInput
    from tests.models_for_tests.engine_models import mixture, two_clusters

    x = two_clusters()
    posterior = LaplaceEvidence(mixture, start=Start(restarts=2)).run(x)
    draws = {n: v.unsqueeze(0) for n, v in posterior.get_samples(200, seed=0).items()}
    with pytest.raises(BadInput, match="changes the log joint by up to"):
        thames(posterior, draws)


def test_too_few_draws_and_too_many_labellings() -> None:
    from pyro_evidence import BadInput
    from pyro_evidence.evidence_check.modes import permutations

    posterior, _ = coin_case()
    with pytest.raises(BadInput, match="num_samples=5; expected a whole number of at least 100"):
        importance_sampling(posterior, num_samples=5)
    with pytest.raises(BadInput, match="num_particles=16; expected a whole number of at least 64"):
        tempered_smc(posterior, num_particles=16)
    with pytest.raises(BadInput, match=r"num_samples=10000\.0; expected a whole number"):
        importance_sampling(posterior, num_samples=1e4)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="720 labellings"):
        permutations(6)
    with pytest.raises(BadInput, match="expected latent sites and axes"):
        find_modes(posterior, labels={"q": 0})
