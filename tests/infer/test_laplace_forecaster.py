"""A forecaster for pyro.contrib.forecast: exact conditionals of a walk, reparametrised drift, backtest, the store."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.forecast import ForecastingModel, backtest
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor

from pyro_evidence import BadInput
from pyro_evidence.infer import LaplaceForecaster

STEP, NOISE, SIZE, AHEAD = 0.4, 0.2, 12, 3


class Walk(ForecastingModel):
    """A level that drifts, observed with noise."""

    def model(self, zero_data: Tensor, covariates: Tensor) -> None:
        with self.time_plate, pyro.poutine.reparam(config={"drift": LocScaleReparam()}):
            drift = pyro.sample("drift", dist.Normal(zero_data[..., 0], STEP))
        self.predict(dist.Normal(zero_data.new_tensor(0.0), NOISE), drift.cumsum(-1).unsqueeze(-1))


@pytest.fixture(scope="module")
def data() -> Tensor:
    torch.manual_seed(0)
    white = torch.randn(SIZE, 2, dtype=torch.float64)
    return (STEP * white[:, :1]).cumsum(0) + NOISE * white[:, 1:]


def test_forecasts_are_draws_of_the_exact_conditional(data: Tensor) -> None:
    pyro.clear_param_store()
    forecaster = LaplaceForecaster(Walk(), data, torch.zeros(SIZE, 0), num_samples=20_000)
    torch.manual_seed(1)
    drawn = forecaster(data, torch.zeros(SIZE + AHEAD, 0), num_samples=20_000)
    assert not list(pyro.get_param_store().keys())
    assert drawn.shape == (20_000, AHEAD, 1)
    times = torch.arange(1.0, 1.0 + SIZE + AHEAD, dtype=torch.float64)
    signal = STEP**2 * torch.minimum(times, times.unsqueeze(-1))
    covariance = signal + NOISE**2 * torch.eye(len(times)).double()
    gain = torch.linalg.solve(covariance[:SIZE, :SIZE], covariance[:SIZE, SIZE:]).mT
    mean, law = (gain @ data)[:, 0], covariance[SIZE:, SIZE:] - gain @ covariance[:SIZE, SIZE:]
    sd = law.diagonal().sqrt()
    assert bool(((drawn[..., 0].mean(0) - mean).abs() < 0.03 * sd).all())
    torch.testing.assert_close(torch.cov(drawn[..., 0].mT), law, rtol=0.06, atol=0.0)
    whole = torch.distributions.MultivariateNormal(torch.zeros(SIZE).double(), covariance[:SIZE, :SIZE])
    assert float(forecaster.posterior.log_evidence) == pytest.approx(float(whole.log_prob(data[:, 0])), abs=1e-8)


def test_a_backtest_takes_it(data: Tensor) -> None:
    windows = backtest(
        data,
        torch.zeros(SIZE, 0),
        Walk,
        forecaster_fn=LaplaceForecaster,
        test_window=2,
        min_train_window=6,
        stride=3,
        num_samples=50,
        forecaster_options={"num_samples": 200},
    )
    assert [window["t1"] for window in windows] == [6, 9]
    assert all(0.0 < window["crps"] < 1.0 for window in windows)


class Regression(ForecastingModel):
    """No latents along time, and no plate."""

    def model(self, zero_data: Tensor, covariates: Tensor) -> None:
        bias = pyro.sample("bias", dist.Normal(zero_data.new_zeros(1), 3.0).to_event(1))
        self.predict(dist.Normal(zero_data.new_zeros(()), 0.3), bias + covariates)


def test_a_model_without_plates_forecasts(data: Tensor) -> None:
    slope = torch.linspace(0.0, 1.0, SIZE + AHEAD).double().unsqueeze(-1)
    drawn = LaplaceForecaster(Regression(), data, slope[:SIZE])(data, slope, num_samples=4000)
    precision = SIZE / 0.09 + 1.0 / 9.0
    expected = slope[SIZE:] + (data - slope[:SIZE]).sum() / 0.09 / precision
    torch.testing.assert_close(drawn.mean(0), expected, rtol=0.0, atol=0.03)
    assert float(drawn.var(0).mean()) == pytest.approx(0.09 + 1.0 / precision, rel=0.05)


def test_another_model_is_refused(data: Tensor) -> None:
    with pytest.raises(BadInput, match="expected a ForecastingModel"):
        LaplaceForecaster(lambda data, covariates: None, data, torch.zeros(SIZE, 0))
    with pytest.raises(BadInput, match="both of one length"):
        LaplaceForecaster(Walk(), data, torch.zeros(SIZE + 1, 0))
