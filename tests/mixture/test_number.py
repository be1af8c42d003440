"""The number of components: downwards, upwards, and why it stopped; on few data and on samples of many."""

from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import EvidenceEM, Start, Stop
from pyro_evidence.mixture import GreedyDeletion, fit
from pyro_evidence.mixture.data import mixture_data
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mixture import (
    DiagonalNoise,
    FullNoise,
    SharedNoise,
    SphericalNoise,
    enough_components,
    gaussian_mixture,
    linear_mixture,
)
from pyro_evidence.models.regression import Learned

QUIET = Stop(progress=False, throw=False)


def clusters(num_data: int, num: int, num_outputs: int = 2, seed: int = 0) -> Tensor:
    """Clusters of standard deviation 1, their centres of standard deviation 8."""
    generator = torch.Generator().manual_seed(seed)
    centres = 8.0 * torch.randn(num, num_outputs, generator=generator)
    which = torch.arange(num_data) % num
    return centres[which] + torch.randn(num_data, num_outputs, generator=generator)


def posterior(engine: EvidenceEM, *args: Tensor) -> MixturePosterior:
    found = engine.run(*args)
    assert isinstance(found, MixturePosterior)
    return found


@pytest.mark.parametrize("noise", [DiagonalNoise(), FullNoise(), SharedNoise(), SphericalNoise()])
def test_too_few_and_too_many_end_alike(noise: DiagonalNoise) -> None:
    """Twelve clusters from five components and from fifteen, in nats per datum."""
    Y = clusters(600, 12, 3)
    few, many = (posterior(EvidenceEM(gaussian_mixture(K, noise=noise), stop=QUIET), Y) for K in (5, 15))
    assert few.num_components == 12 and few.limit == ""
    assert abs(float(few.log_evidence - many.log_evidence)) < 0.1 * len(Y)
    assert few.responsibilities().shape == (600, 12)


def test_without_a_number() -> None:
    assert [enough_components(*shape) for shape in [(20, 2), (82, 1), (1000, 2), (10**6, 32)]] == [2, 5, 20, 20]
    assert posterior(EvidenceEM(gaussian_mixture(), stop=QUIET), clusters(90, 3)).num_components == 3
    Y = clusters(2500, 25, 3)  # two of them lie on others
    found, more = (posterior(EvidenceEM(gaussian_mixture(K), stop=QUIET), Y) for K in (None, 50))
    assert found.num_components > 20
    assert abs(float(found.log_evidence - more.log_evidence)) < 0.1 * len(Y)


def test_lines_that_cross_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 4.0 * torch.rand(600, 1, generator=generator) - 2.0
    slope = torch.tensor([-2.0, 0.0, 2.0])[torch.arange(600) % 3].unsqueeze(-1)
    y = slope * x + 0.1 * torch.randn(600, 1, generator=generator)
    found = posterior(EvidenceEM(linear_mixture(2, Linear()), stop=QUIET), x, y)
    assert found.num_components == 3
    slopes = found.mode["w"][found.active, 0, 0].sort().values
    torch.testing.assert_close(slopes, torch.tensor([-2.0, 0.0, 2.0]), rtol=0.0, atol=0.05)


def test_what_is_wanted_stays() -> None:
    """One component, no deletion, no splits, precisions of each component's own: the number that was given."""
    Y = clusters(240, 4)
    for engine, expected in [
        (EvidenceEM(gaussian_mixture(1), stop=QUIET), 1),
        (EvidenceEM(gaussian_mixture(2), deletion=None, stop=QUIET), 2),
        (EvidenceEM(gaussian_mixture(2), deletion=GreedyDeletion(splits=0), stop=QUIET), 2),
        (EvidenceEM(gaussian_mixture(2, alpha=Learned(torch.ones(2))), stop=QUIET), 2),
    ]:
        assert posterior(engine, Y).num_components == expected


def own_program(Y: Tensor) -> None:
    """A program of the user's, whose number of components is its own."""
    mixing = pyro.param("mixing", torch.ones(2) / 2.0, constraint=constraints.simplex)
    beta = pyro.param("beta", torch.ones(2, 2), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(2, 2), 8.0).to_event(2))
    with pyro.plate("data", len(Y)):
        z = pyro.sample("z", dist.Categorical(mixing), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(w[z], beta[z].rsqrt()).to_event(1), obs=Y)


def test_a_limit_is_named() -> None:
    Y = clusters(240, 4)
    found = posterior(EvidenceEM(own_program, stop=QUIET), Y)
    assert found.num_components == 2 and found.limit == "every one of the model's 2 components is used"
    once = posterior(EvidenceEM(gaussian_mixture(2), deletion=GreedyDeletion(splits=1), stop=QUIET), Y)
    assert once.limit == "GreedyDeletion(splits=1)"
    assert once.diagnostics(100)["num_components_limited_by"] == once.limit


def test_a_larger_posterior_survives_the_disk(tmp_path: Path) -> None:
    Y = clusters(240, 4)
    found = posterior(EvidenceEM(gaussian_mixture(2), stop=QUIET), Y)
    found.save(tmp_path / "fit.pt")
    again = MixturePosterior.load(tmp_path / "fit.pt", gaussian_mixture(2))
    torch.testing.assert_close(again.responsibilities(Y[:9]), found.responsibilities(Y[:9]))
    assert again.num_components == found.num_components == 4


def test_restarts_on_a_sample_end_where_those_on_all_data_do(monkeypatch: pytest.MonkeyPatch) -> None:
    Y = clusters(3000, 6, 3)
    whole = posterior(EvidenceEM(gaussian_mixture(9), stop=Stop(tolerance=1e-10, progress=False)), Y)
    monkeypatch.setattr(fit, "SAMPLE", 500)
    monkeypatch.setattr(fit, "SAMPLE_EACH", 1)
    engine = EvidenceEM(gaussian_mixture(9), start=Start(restarts=3), stop=Stop(tolerance=1e-10, progress=False))
    found = posterior(engine, Y)
    assert found.num_components == whole.num_components == 6
    torch.testing.assert_close(found.log_evidence, whole.log_evidence, rtol=0.0, atol=1e-3)


def test_a_sample_depends_on_the_numbers_of_the_rows_alone() -> None:
    """Scattered: no stretch of the rows is without, and doubling their number keeps the density of the sample."""
    data = mixture_data(torch.arange(10_000.0).unsqueeze(-1))
    rows = data.sampled(1000).Y.flatten()
    assert 950 < len(rows) < 1050 and float(rows.diff().max()) < 40.0
    assert data.sampled(10_000) is data
