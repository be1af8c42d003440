"""A marker and an event that share an effect of each patient: the log evidence by quadrature per patient."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import norm, weibull_min
from torch import Tensor

from pyro_evidence import LaplaceEvidence
from pyro_evidence.models.survival import Censored

PATIENTS, VISITS, SD, NOISE, LINK, SHAPE = 6, 3, 0.8, 0.5, -0.7, 1.5


def model(y: Tensor, event: Tensor, time: Tensor) -> None:
    with pyro.plate("patients", PATIENTS):
        b = pyro.sample("b", dist.Normal(y.new_tensor(0.0), SD))
        with pyro.plate("visits", VISITS):
            pyro.sample("y", dist.Normal(b, NOISE), obs=y)
        lifetime = dist.Weibull((1.0 + LINK * b).exp(), y.new_tensor(SHAPE).expand(PATIENTS))
        pyro.sample("time", Censored(lifetime, event=event), obs=time)


def test_a_marker_and_an_event_share_their_patients() -> None:
    rng = np.random.default_rng(0)
    b = SD * rng.normal(size=PATIENTS)
    y = b + NOISE * rng.normal(size=(VISITS, PATIENTS))
    time = np.exp(1.0 + LINK * b) * rng.weibull(SHAPE, PATIENTS)
    event, time = (time < 3.0).astype(float), np.minimum(time, 3.0)
    grid = np.linspace(-10.0 * SD, 10.0 * SD, 20_001)[:, None]
    law = weibull_min(SHAPE, scale=np.exp(1.0 + LINK * grid))
    log_density = norm(0.0, SD).logpdf(grid) + np.where(event == 1.0, law.logpdf(time), law.logsf(time))
    log_density = log_density + norm(grid[..., None], NOISE).logpdf(y.T).sum(-1)
    expected = np.log(np.exp(log_density).sum(0) * (grid[1, 0] - grid[0, 0])).sum()
    found = LaplaceEvidence(model, nodes=15, marginalise=()).run(*(torch.tensor(x) for x in (y, event, time)))
    assert 0.0 < event.mean() < 1.0
    assert float(found.log_evidence) == pytest.approx(expected, abs=1e-6)
