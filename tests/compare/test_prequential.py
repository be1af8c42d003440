"""Prequential log evidence: dense Gaussians step by step, what is refused, the picture."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, Stop
from pyro_evidence.compare import prequential
from pyro_evidence.models.gmrf import AR1
from pyro_evidence.plots.comparison import prequential_difference

SCALE, PHI, NOISE = 0.5, 0.8, 0.3


def chain(y: Tensor) -> None:
    x = pyro.sample("x", AR1(y.new_tensor(SCALE), PHI, len(y)))
    with pyro.plate("steps", len(y)):
        pyro.sample("y", dist.Normal(x, NOISE), obs=y)


def test_scores_are_those_of_dense_normals_and_sum_to_the_log_evidence() -> None:
    torch.manual_seed(0)
    y = torch.randn(7).double().cumsum(0)
    engine = LaplaceEvidence(chain, marginalise=(), stop=Stop(progress=False))
    found = prequential(engine, (y,), first=2, step=2)
    assert found.steps.tolist() == [2, 4, 6, 7]
    lag = (torch.arange(7).double() - torch.arange(7).double().unsqueeze(-1)).abs()
    covariance = SCALE**2 / (1.0 - PHI**2) * PHI**lag + NOISE**2 * torch.eye(7).double()
    expected = []
    for before, after in ((2, 4), (4, 6), (6, 7)):
        gain = torch.linalg.solve(covariance[:before, :before], covariance[:before, before:after]).mT
        law = covariance[before:after, before:after] - gain @ covariance[:before, before:after]
        normal = torch.distributions.MultivariateNormal(gain @ y[:before], law)
        expected.append(normal.log_prob(y[before:after]))
    torch.testing.assert_close(found.log_scores, torch.stack(expected), rtol=0.0, atol=1e-8)
    whole = found.log_evidences[0] + found.log_scores.sum()
    assert float(whole) == pytest.approx(float(engine.run(y).log_evidence), abs=1e-8)


def test_a_maximum_is_no_forecast() -> None:
    def scaled(y: Tensor) -> None:
        scale = pyro.param("scale", y.new_tensor(1.0), constraint=dist.constraints.positive)
        loc = pyro.sample("loc", dist.Normal(y.new_tensor(0.0), 1.0))
        with pyro.plate("steps", len(y)):
            pyro.sample("y", dist.Normal(loc, scale), obs=y)

    y = torch.tensor([0.1, -0.4, 0.9, 0.3]).double()
    with pytest.raises(BadInput, match=r"maximises \['scale'\]"):
        prequential(LaplaceEvidence(scaled), (y,), first=3)
    assert len(prequential(LaplaceEvidence(scaled, maximise=()), (y,), first=3).log_scores) == 1
    with pytest.raises(BadInput, match="expected fewer"):
        prequential(LaplaceEvidence(chain), (y,), first=4)


def test_the_picture_is_of_cumulated_differences() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    y = torch.tensor([0.1, -0.4, 0.9, 0.3]).double()
    one = prequential(LaplaceEvidence(chain, marginalise=()), (y,), first=2)
    other = type(one)(one.steps, 2.0 * one.log_evidences)
    line = prequential_difference(figure.subplots(), one, other).lines[-1]
    assert line.get_ydata().tolist() == pytest.approx([-float(x) for x in one.log_scores.cumsum(0)])
    assert line.get_xdata().tolist() == [3, 4]
    with pytest.raises(BadInput, match="the same first and step"):
        prequential_difference(figure.subplots(), one, type(one)(one.steps + 1, one.log_evidences))
