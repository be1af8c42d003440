"""Which sites are integrated numerically: scales, correlations, kernel settings; never locations, weights, layers."""

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence
from pyro_evidence.models import gmrf
from pyro_evidence.models.survival import Censored
from pyro_evidence.nested.roles import NUM_POINTS, sites_to_marginalise
from pyro_evidence.program.log_joint import LogJoint
from tests.models_for_tests.sampled_scales import CASES, SCHOOLS, Case, schools_centred


@pytest.mark.parametrize("case", CASES, ids=[c.model.__name__ for c in CASES])
def test_sites_that_spread_others_are_found(case: Case) -> None:
    assert " ".join(sites_to_marginalise(LogJoint(case.model, case.data))) == case.marginalised


def test_a_maximised_site_is_not_integrated() -> None:
    assert sites_to_marginalise(LogJoint(schools_centred, (SCHOOLS,), maximise=["tau"])) == ()


def test_one_run_of_the_model_at_each_point_tells_the_roles_of_all_sites() -> None:
    runs = []

    def counted(y: Tensor) -> None:
        runs.append(1)
        schools_centred(y)

    joint = LogJoint(counted, (SCHOOLS,))
    runs.clear()
    assert sites_to_marginalise(joint) == ("tau",)
    assert len(runs) == NUM_POINTS


def measured(seen: Tensor | None, y: Tensor, middle: float) -> None:
    """A slope on a predictor that is latent: without measurements of it the signs of both can be turned."""
    slope, scale = pyro.sample("slope", dist.Normal(0.0, 1.0)), pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("units", 8):
        x = pyro.sample("x", dist.Normal(middle, 1.0))
        if seen is not None:
            pyro.sample("seen", dist.Normal(x, 0.5), obs=seen)
        pyro.sample("y", dist.Normal(slope * x, scale), obs=y)


@pytest.mark.parametrize(
    ("seen", "middle", "expected"),
    [(SCHOOLS / 10.0, 0.0, "scale slope"), (None, 1.0, "scale slope"), (None, 0.0, "scale")],
)
def test_a_number_that_multiplies_many_latents_goes_with_scales(
    seen: Tensor | None, middle: float, expected: str
) -> None:
    joint = LogJoint(measured, (seen, SCHOOLS / 10.0, middle))
    assert " ".join(sites_to_marginalise(joint)) == expected


def test_the_scale_of_a_scale_goes_with_it() -> None:
    def model(y: Tensor) -> None:
        width, mu = pyro.sample("width", dist.HalfNormal(5.0)), pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(width))
        with pyro.plate("units", 8):
            pyro.sample("y", dist.Normal(pyro.sample("theta", dist.Normal(mu, tau)), 10.0), obs=y)

    assert sites_to_marginalise(LogJoint(model, (SCHOOLS,))) == ("tau", "width")


def test_scales_of_enumerated_components_stay_inside() -> None:
    def model(y: Tensor) -> None:
        with pyro.plate("components", 2):
            loc, scale = pyro.sample("loc", dist.Normal(0.0, 10.0)), pyro.sample("scale", dist.HalfNormal(5.0))
        with pyro.plate("data", 8):
            z = pyro.sample("z", dist.Categorical(torch.ones(2)))
            pyro.sample("y", dist.Normal(loc[z], scale[z]), obs=y)

    assert sites_to_marginalise(LogJoint(model, (SCHOOLS,))) == ()


def test_single_precision_finds_the_same() -> None:
    assert sites_to_marginalise(LogJoint(schools_centred, (SCHOOLS.float(),))) == ("tau",)


VISITS, REGION = torch.tensor([0.0, 2, 0, 1, 0, 0, 3, 0, 2, 1, 0, 0], dtype=torch.float64), torch.arange(12) % 4


def effects() -> Tensor:
    with pyro.plate("regions", 4):
        return pyro.sample("e", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))


def present() -> Tensor:
    """Logits of being there for each place."""
    return (pyro.sample("s", dist.HalfNormal(1.0)) * effects())[REGION]


def occupancy(y: Tensor) -> None:
    logits, p = present(), torch.tensor(0.45, dtype=torch.float64)
    with pyro.plate("places", 12):
        z = pyro.sample("z", dist.Bernoulli(logits=logits))
        pyro.sample("y", dist.Binomial(4, p * z), obs=y)


def occupancy_summed(y: Tensor) -> None:
    logits, p = present(), torch.tensor(0.45, dtype=torch.float64)
    with pyro.plate("places", 12):
        seen = dist.Binomial(4, p).log_prob(y) + torch.nn.functional.logsigmoid(logits)
        either = torch.logaddexp(seen, torch.nn.functional.logsigmoid(-logits))
        pyro.factor("y", torch.where(y == 0.0, either, seen))


def test_a_scale_behind_a_discrete_site_is_found() -> None:
    """Oracle: the same model with its discrete site summed out by hand."""
    assert sites_to_marginalise(LogJoint(occupancy, (VISITS,))) == ("s",)
    first, second = (LaplaceEvidence(m).run(VISITS) for m in (occupancy, occupancy_summed))
    assert float(first.log_evidence) == pytest.approx(float(second.log_evidence), abs=1e-5)


def test_a_scale_of_a_smooth_curve_behind_a_discrete_site_is_found_with_its_length() -> None:
    def model(y: Tensor) -> None:
        length, s = pyro.sample("length", dist.InverseGamma(5.0, 8.0)), pyro.sample("s", dist.HalfNormal(1.0))
        places = torch.arange(4.0, dtype=torch.float64)
        K = (-0.5 * ((places[:, None] - places) / length).square()).exp() + 1e-6 * torch.eye(4)
        logits, p = s * (torch.linalg.cholesky(K) @ effects())[REGION], pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("places", 12):
            z = pyro.sample("z", dist.Bernoulli(logits=logits))
            pyro.sample("y", dist.Binomial(4, p * z), obs=y)

    assert sites_to_marginalise(LogJoint(model, (VISITS,))) == ("length", "s")


def test_weights_of_a_mixture_are_no_scale() -> None:
    def model(y: Tensor) -> None:
        weight = pyro.sample("weight", dist.Beta(2.0, 2.0))
        with pyro.plate("components", 2):
            loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        with pyro.plate("data", 8):
            z = pyro.sample("z", dist.Bernoulli(weight)).long()
            pyro.sample("y", dist.Normal(loc[z], 5.0), obs=y)

    assert sites_to_marginalise(LogJoint(model, (SCHOOLS,))) == ()


def censored(y: Tensor) -> None:
    """Measurements that nobody reads below 9, their density written by hand."""
    mu, s = pyro.sample("mu", dist.Normal(0.0, 20.0)), pyro.sample("s", dist.HalfNormal(20.0))
    noise = dist.Normal(mu, s)
    with pyro.plate("data", len(y)):
        pyro.factor("y", torch.where(y > 9.0, noise.log_prob(y), noise.cdf(torch.tensor(9.0)).log()))


def test_a_scale_in_a_factor_is_integrated() -> None:
    """Oracle: the sum over a grid of both."""
    posterior = LaplaceEvidence(censored).run(SCHOOLS)
    assert posterior.marginalised_sites == ("s",)
    mu, log_s = torch.linspace(-80.0, 80.0, 641), torch.linspace(-2.0, 6.0, 801)
    noise, s = dist.Normal(mu[:, None, None], log_s.exp()[:, None]), log_s.exp()
    data = torch.where(SCHOOLS > 9.0, noise.log_prob(SCHOOLS), noise.cdf(torch.tensor(9.0)).log()).sum(-1)
    prior = dist.Normal(0.0, 20.0).log_prob(mu)[:, None] + dist.HalfNormal(20.0).log_prob(s) + log_s
    log_evidence = (data + prior).logsumexp((0, 1)) + math.log(0.25 * 0.01)
    assert float(posterior.log_evidence) == pytest.approx(float(log_evidence), abs=0.05)
    mass = (data + prior - (data + prior).logsumexp((0, 1))).exp().sum(0)
    mean = float(mass @ s)
    assert float(posterior.marginal("s").mean) == pytest.approx(mean, abs=0.05 * float(mass @ (s - mean) ** 2) ** 0.5)


def test_a_factor_that_sees_many_positive_numbers_has_none_of_them_outside() -> None:
    def model(y: Tensor) -> None:
        names = [pyro.sample(f"r{i}", dist.Gamma(2.0, 0.2)) for i in range(4)]
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        pyro.factor("y", dist.Poisson(sum(names) * slope.exp()).log_prob(y.abs().round()).sum())

    assert sites_to_marginalise(LogJoint(model, (SCHOOLS,))) == ()


def test_a_field_with_a_constraint_is_symmetric_on_its_support() -> None:
    """Beside a site that multiplies nothing, and a scale of times whose censoring is no normal."""
    graph = gmrf.Neighbours(torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3]]))
    where = torch.arange(24) % 4

    def model(event: Tensor, time: Tensor) -> None:
        scale, shape = pyro.sample("scale", dist.HalfNormal(1.0)), pyro.sample("shape", dist.LogNormal(0.0, 1.0))
        field = pyro.sample("field", gmrf.ICAR(graph, scale))
        with pyro.plate("data", 24):
            pyro.sample("time", Censored(dist.Weibull(field[where].exp(), shape), event=event), obs=time)

    generator = torch.Generator().manual_seed(0)
    time = -torch.rand(24, generator=generator).log()
    event = (torch.arange(24) % 3 > 0).double()
    assert sites_to_marginalise(LogJoint(model, (event, time))) == ("scale",)


SERIES = torch.tensor([0.0, 2, 1, 0, 3, 1, 2, 4, 2, 1, 3, 2], dtype=torch.float64)


def lagged(y: Tensor, coefficients: Callable[[], Tensor], moved: Callable[[Tensor, Tensor], Tensor], how: str) -> None:
    """Counts over a series whose law is written by hand, of its lagged slices."""
    scale, a = pyro.sample("s", dist.HalfNormal(torch.tensor(1.0).double())), coefficients()
    x = pyro.sample("x", dist.Normal(torch.zeros(12).double(), 5.0).to_event(1))
    with pyro.plate("steps", 10):
        law = dist.StudentT(4.0, moved(a, x), scale) if how == "heavy" else dist.Normal(moved(a, x), scale)
        if how == "factor":
            pyro.factor("law", law.log_prob(x[2:]))
        else:
            pyro.sample("law", law, obs=x[2:])
    with pyro.plate("data", 12):
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)


def in_pair() -> Tensor:
    return torch.as_tensor(pyro.sample("a", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1)))


def one_by_one() -> Tensor:
    return torch.stack([pyro.sample(name, dist.Normal(torch.tensor(0.0).double(), 1.0)) for name in ("a", "b")])


def lags(a: Tensor, x: Tensor) -> Tensor:
    return a[0] * x[1:-1] + a[1] * x[:-2]


@pytest.mark.parametrize("how", ["data", "factor"])
@pytest.mark.parametrize(("coefficients", "expected"), [(in_pair, "a s"), (one_by_one, "a b s")])
def test_coefficients_of_lagged_slices_go_with_scales(
    coefficients: Callable[[], Tensor], expected: str, how: str
) -> None:
    joint = LogJoint(lagged, (SERIES, coefficients, lags, how))
    assert " ".join(sites_to_marginalise(joint)) == expected


@pytest.mark.parametrize(
    ("moved", "how"),
    [(lambda a, x: a[0] + a[1] * torch.arange(10.0) + x[1:-1], "factor"), (lags, "heavy")],
    ids=["added to the slices", "not quadratic in the slices, given them"],
)
def test_other_numbers_of_a_factor_stay_inside(moved: Callable[[Tensor, Tensor], Tensor], how: str) -> None:
    assert sites_to_marginalise(LogJoint(lagged, (SERIES, in_pair, moved, how))) == ("s",)


def innovations(y: Tensor, counts: str) -> None:
    """A walk of second order by its innovations, whose sums go beyond the largest rate at most places."""
    scale, level = pyro.sample("scale", dist.HalfNormal(1.0)), pyro.sample("level", dist.Normal(0.0, 3.0))
    spread = pyro.sample("spread", dist.Gamma(2.0, 0.1)) if counts == "spread" else None
    steps = pyro.sample("steps", dist.Normal(0.0, torch.ones(len(y))).to_event(1))
    eta = level + scale * steps.cumsum(0).cumsum(0)
    with pyro.plate("rows", len(y)):
        fn = dist.Poisson(eta.exp()) if spread is None else dist.NegativeBinomial(spread, logits=eta - spread.log())
        pyro.sample("y", fn, obs=y)


@pytest.mark.parametrize(("counts", "expected"), [("", "scale"), ("spread", "scale spread")])
def test_scales_are_found_where_counts_overflow_at_places_far_away(counts: str, expected: str) -> None:
    assert " ".join(sites_to_marginalise(LogJoint(innovations, (torch.ones(120), counts)))) == expected
