"""The next values of a series: dense multivariate normal conditionals, draws, messages."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence
from pyro_evidence.models.gmrf import AR, AR1, ICAR, OrnsteinUhlenbeck, RandomWalk, Seasonal

PLACES = torch.tensor([0.0, 0.5, 1.7, 2.0, 3.1, 4.0, 6.0, 6.5]).double()
FIELDS = {  # of 8 values, and of which covariance the first are a part
    "walk": lambda n: RandomWalk(torch.tensor(0.7).double(), n, 1, torch.tensor(2.0).double()),
    "second order": lambda n: RandomWalk(torch.tensor(0.7).double(), n, 2, torch.tensor(2.0).double()),
    "unequal distances": lambda n: RandomWalk(torch.tensor(0.7).double(), PLACES[:n], 2, torch.tensor(2.0).double()),
    "seasonal": lambda n: Seasonal(torch.tensor(0.7).double(), n, 3, torch.tensor(2.0).double()),
    "AR": lambda n: AR(torch.tensor(0.7).double(), torch.tensor([0.8, -0.4]).double(), n),
    "OU": lambda n: OrnsteinUhlenbeck(torch.tensor(0.7).double(), 1.5, PLACES[:n]),
}


def dense_covariance(field: Any) -> Tensor:
    """From the log density's second derivatives."""
    zero = torch.zeros(field.event_shape, dtype=torch.float64)
    return torch.linalg.inv(-torch.autograd.functional.hessian(field.log_prob, zero))


@pytest.mark.parametrize("kind", FIELDS)
def test_a_field_goes_on_by_its_conditional_law(kind: str) -> None:
    size, steps = 8, 3
    covariance, old = dense_covariance(FIELDS[kind](size)), torch.linspace(-1.0, 2.0, size - steps).double() ** 2
    first, cross, last = (
        covariance[a, b] for a, b in ((slice(5), slice(5)), (slice(5, 8), slice(5)), (slice(5, 8),) * 2)
    )
    torch.testing.assert_close(dense_covariance(FIELDS[kind](size - steps)), first, rtol=1e-9, atol=1e-9)
    gain = cross @ torch.linalg.inv(first)
    field = FIELDS[kind](size)
    mean = field.continued(old, torch.zeros(steps).double())
    assert torch.equal(mean[:5], old)
    torch.testing.assert_close(mean[5:], gain @ old, rtol=1e-8, atol=1e-8)
    by_axis = field.continued(old, torch.eye(steps).double())[:, 5:] - mean[5:]
    torch.testing.assert_close(by_axis.mT @ by_axis, last - gain @ cross.mT, rtol=1e-8, atol=1e-8)


LEVEL, WALK, SEASON, NOISE = 0.1, 0.02, 0.01, 0.07


def drivers(belt: Tensor, y: Tensor | None = None) -> None:
    """Structural model of the monthly log number of drivers killed or injured."""
    size, of = len(belt), belt.new_tensor
    effect = pyro.sample("effect", dist.Normal(of(0.0), 1.0))
    walk = pyro.sample("walk", RandomWalk(of(WALK), size, 2, level=of(LEVEL)))
    season = pyro.sample("season", Seasonal(of(SEASON), size, 12, level=of(LEVEL)))
    with pyro.plate("months", size):
        pyro.sample("y", dist.Normal(walk + season + effect * belt, NOISE), obs=y)


def test_a_year_of_road_deaths_ahead_is_the_dense_conditional(data_dir: Path) -> None:
    table = np.genfromtxt(data_dir / "drivers.csv", delimiter=",", skip_header=1)
    belt, y = torch.tensor(table[:, 1]), torch.tensor(table[:192, 0]).log() - 7.4
    posterior = LaplaceEvidence(drivers, marginalise=()).run(belt[:192], y)
    fields = (
        RandomWalk(belt.new_tensor(WALK), 204, 2, level=belt.new_tensor(LEVEL)),
        Seasonal(belt.new_tensor(SEASON), 204, 12, level=belt.new_tensor(LEVEL)),
    )
    signal = sum(dense_covariance(field) for field in fields) + torch.outer(belt, belt)
    seen = signal[:192, :192] + NOISE**2 * torch.eye(192).double()
    gain = torch.linalg.solve(seen, signal[:192, 192:]).mT
    mean, sd = posterior.forecast(12, belt, return_std=True)
    torch.testing.assert_close(mean, gain @ y, rtol=0.0, atol=1e-8)
    variance = (signal[192:, 192:] - gain @ signal[:192, 192:]).diagonal() + NOISE**2
    torch.testing.assert_close(sd, variance.sqrt(), rtol=0.0, atol=1e-8)
    for few in (192, 198):
        with pytest.raises(BadInput, match="192; expected arguments over all 204 steps"):
            posterior.forecast(12, belt[:few])
    drawn = posterior.forecast(12, belt, quantiles=[0.1587, 0.5, 0.8413], num_samples=4000)
    assert drawn.shape == (3, 12)
    assert float((drawn - torch.stack([mean - sd, mean, mean + sd])).abs().max()) < 0.1 * float(sd.max())


def counts(y: Tensor) -> None:
    walk = pyro.sample("walk", AR1(torch.tensor(0.3).double(), 0.9, len(y)))
    with pyro.plate("steps", len(y)):
        pyro.sample("y", dist.Poisson((1.0 + walk).exp()), obs=y)


def test_without_arguments_targets_grow_and_counts_are_drawn() -> None:
    y = torch.tensor([3.0, 2.0, 5.0, 8.0, 6.0, 9.0]).double()
    posterior = LaplaceEvidence(counts, marginalise=()).run(y)
    mean = posterior.forecast(4, num_samples=20_000)
    loc, variance = posterior.median()["walk"][-1], posterior.state.precision.variance[0, -1]
    power = 0.9 ** torch.arange(1.0, 5.0).double()
    spread = power.square() * variance + 0.09 * (1.0 - power.square()) / (1.0 - 0.81)
    torch.testing.assert_close(mean, (1.0 + power * loc + 0.5 * spread).exp(), rtol=0.02, atol=0.0)
    assert float(posterior.predict().max()) > float(mean.max())


def looped(y: Tensor, together: bool) -> None:
    states = [pyro.sample("x_0", dist.Normal(torch.tensor(0.0).double(), 1.0))]
    for t in range(1, len(y)):
        states.append(pyro.sample(f"x_{t}", dist.Normal(0.9 * states[-1], 0.3)))
    if together:
        with pyro.plate("steps", len(y)):
            return pyro.sample("y", dist.Normal(torch.stack(states), 0.2), obs=y)
    for t, state in enumerate(states):
        pyro.sample(f"y_{t}", dist.Normal(state, 0.2), obs=y[t])


def test_states_of_a_loop_go_on_where_one_site_observes_them() -> None:
    y = torch.tensor([1.0, 0.8, 0.9, 0.4, 0.6]).double()
    posterior = LaplaceEvidence(partial(looped, together=True), marginalise=()).run(y)
    expected = posterior.mode["x_4"] * 0.9 ** torch.arange(1.0, 4.0).double()
    torch.testing.assert_close(posterior.forecast(3, num_samples=20_000), expected, rtol=0.0, atol=0.01)
    with pytest.raises(BadInput, match="'y_0' observes a single number"):
        LaplaceEvidence(partial(looped, together=False), marginalise=()).run(y).forecast(3)


def test_what_cannot_be_known_is_asked_for() -> None:
    def graph(x: Tensor, y: Tensor | None = None) -> None:
        edges = torch.stack([torch.arange(len(x) - 1), torch.arange(1, len(x))], -1)
        field = pyro.sample("field", ICAR(edges, x.new_tensor(0.5), level=x.new_tensor(1.0)))
        pyro.sample("y", dist.Normal(field + x, 0.1).to_event(1), obs=y)

    x = torch.linspace(0.0, 1.0, 6).double()
    posterior = LaplaceEvidence(graph, marginalise=()).run(x, x.sin())
    with pytest.raises(BadInput, match="argument 0 has 6 values"):
        posterior.forecast(2)
    with pytest.raises(BadInput, match="What can be continued: RandomWalk"):
        posterior.forecast(2, torch.zeros(8).double())
