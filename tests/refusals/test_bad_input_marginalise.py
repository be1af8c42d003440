"""One error message for each way in which sites cannot be integrated numerically around Laplace."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.errors import BadInput, NotAMode
from tests.models_for_tests.sampled_scales import SCHOOLS, generated, horseshoe, schools_centred
from tests.refusals.messages import says

QUIET = Stop(progress=False)


def message(model, *data: Tensor, **settings: object) -> str:
    with pytest.raises(BadInput) as caught:
        LaplaceEvidence(model, stop=QUIET, **settings).run(*data)
    return " ".join(str(caught.value).split())


def discrete(y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfNormal(5.0))
    z = pyro.sample("z", dist.Bernoulli(0.5))
    with pyro.plate("units", 8):
        pyro.sample("y", dist.Normal(pyro.sample("theta", dist.Normal(z, tau)), 10.0), obs=y)


def test_a_site_cannot_be_maximised_and_integrated() -> None:
    says(
        message(schools_centred, SCHOOLS, marginalise=["tau"], maximise=["tau"]),
        "'tau'",
        "marginalise",
        "maximise",
        "once",
    )


def test_a_discrete_site_is_summed_out_already() -> None:
    says(message(discrete, SCHOOLS, marginalise=["z"]), "'z'", "discrete", "summed out")


@pytest.mark.parametrize(
    ("marginalise", "part"), [(["sigma"], "['mu', 'tau', 'theta']"), ("tau", "marginalise=['tau']")]
)
def test_names_of_no_site(marginalise: object, part: str) -> None:
    says(message(schools_centred, SCHOOLS, marginalise=marginalise), "expected", part)


def draws_of_a_prior() -> None:
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("units", 3):
        pyro.sample("weight", dist.Normal(0.0, scale))
    pyro.factor("nothing", torch.zeros(()))


def groups_of_one(y: Tensor) -> None:
    scale = pyro.sample("scale", dist.ImproperUniform(dist.constraints.positive, (), ()))
    with pyro.plate("units", len(y)):
        pyro.sample("y", dist.Normal(pyro.sample("weight", dist.Normal(0.0, scale)), 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "data"), [(draws_of_a_prior, ()), pytest.param(groups_of_one, (SCHOOLS / 100.0,), marks=pytest.mark.slow)]
)
def test_a_scale_left_inside_without_a_mode_is_named_and_the_advice_works(model, data: tuple[Tensor, ...]) -> None:
    with pytest.raises(NotAMode) as caught:
        LaplaceEvidence(model, stop=QUIET, marginalise=()).run(*data)
    says(str(caught.value), "marginalise=() leaves ['scale']", "Leave marginalise out")
    assert math.isfinite(LaplaceEvidence(model, stop=QUIET).run(*data).log_evidence)


def test_something_must_be_left_inside() -> None:
    says(
        message(schools_centred, SCHOOLS, marginalise=["tau", "mu", "theta"]),
        "nothing for Laplace inside",
        "marginalise=()",
    )


def test_a_thousand_local_scales_are_too_many() -> None:
    X = generated(50, 1000)
    said = message(horseshoe, X, X[:, 0])
    says(
        said, "'local': 1000", "1002 coordinates", "at most 30", "REVM", "NUTS", "maximise=['local']", "marginalise=()"
    )


def test_an_unknown_setting_is_no_old_one() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'integrates'"):
        LaplaceEvidence(schools_centred, integrates=["mu"])


def two_hills(y: Tensor) -> None:
    """One of two scales has a prior of two narrow modes."""
    modes = dist.Normal(torch.tensor([-1.0, 2.0]), 0.2)
    both = dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.3, 0.7])), modes)
    sigma = pyro.sample("sigma", dist.TransformedDistribution(both, dist.transforms.ExpTransform()))
    mu = pyro.sample("mu", dist.Normal(0.0, pyro.sample("width", dist.LogNormal(0.0, 0.3))))
    pyro.sample("y", dist.Normal(mu, sigma), obs=y)


def test_several_modes_of_two_scales_are_listed_and_of_one_are_integrated() -> None:
    y = torch.tensor(1.0)
    with pytest.raises(NotAMode) as caught:
        LaplaceEvidence(two_hills, marginalise=["sigma", "width"], stop=QUIET).run(y)
    said = " ".join(str(caught.value).split())
    says(said, "['sigma', 'width'] has several modes", "nats at", "Name one site in marginalise=", "integrate=['mu']")
    log_sigma, log_width = torch.linspace(-3.0, 4.5, 751), torch.linspace(-2.0, 2.0, 201)
    parts = [math.log(w) + dist.Normal(m, 0.2).log_prob(log_sigma) for w, m in ((0.3, -1.0), (0.7, 2.0))]
    sd = (log_sigma.exp().unsqueeze(-1) ** 2 + log_width.exp() ** 2).sqrt()
    log_density = torch.stack(parts).logsumexp(0).unsqueeze(-1) + dist.Normal(0.0, 0.3).log_prob(log_width)
    log_density = log_density + dist.Normal(0.0, sd).log_prob(y)
    exact = float(log_density.flatten().logsumexp(0)) + math.log(0.01 * 0.02)
    posterior = LaplaceEvidence(two_hills, marginalise=["sigma"], stop=QUIET).run(y)
    assert float(posterior.log_evidence) == pytest.approx(exact, abs=0.03)


def test_a_density_without_a_mode_is_refused_soon() -> None:
    """The joint density of a scale and its effects has no mode; steps whose rise is lost in rounding end the search."""
    runs = []

    def counted(y: Tensor) -> None:
        runs.append(None)
        schools_centred(y)

    with pytest.raises(NotAMode, match="site 'tau'"):
        LaplaceEvidence(counted, marginalise=(), stop=QUIET).run(SCHOOLS)
    assert len(runs) < 1000
