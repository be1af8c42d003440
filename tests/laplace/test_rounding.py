"""A model that rounds inside is fitted, and named."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Start
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.mode_checks import rounded_inside
from pyro_evidence.program.log_joint import LogJoint

SEEN = torch.tensor([[1.0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1]]).double()


def survival(as_float: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Capture and recapture: a mask times a probability, which of two precisions is float32."""

    def model(seen: Tensor) -> None:
        phi = pyro.sample("phi", dist.Beta(2.0, 2.0))
        rho = pyro.sample("rho", dist.Beta(2.0, 2.0))
        with pyro.plate("animals", len(seen), dim=-1):
            z, first = torch.ones(len(seen)), torch.zeros(len(seen), dtype=torch.bool)
            for t in pyro.markov(range(seen.shape[1])):
                with pyro.poutine.mask(mask=first):
                    mu = as_float(first) * phi * z + (1 - as_float(first))
                    z = pyro.sample(f"z_{t}", dist.Bernoulli(mu), infer={"enumerate": "parallel"})
                    pyro.sample(f"y_{t}", dist.Bernoulli(rho * z), obs=seen[:, t])
                first = first | seen[:, t].bool()

    return model


def test_a_mask_as_float32_is_named_and_the_fit_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    rounded = LaplaceEvidence(survival(lambda m: m.float()), start=Start(tour=0)).run(SEEN)
    rounded.summary()
    assert "round to float32 within a float64 model" in capsys.readouterr().out
    exact = LaplaceEvidence(survival(lambda m: m.double()), start=Start(tour=0)).run(SEEN)  # the advice
    assert exact.diagnostics(200)["notes"] == []
    assert float(rounded.log_evidence) == pytest.approx(float(exact.log_evidence), abs=1e-5)
    state = rounded.state
    assert isinstance(state, LaplaceState)
    (said,) = rounded_inside(state.problem.joint, state.u, state.theta)
    assert said.startswith("site(s) z_1,") and "write .double()" in said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_simple_numbers_and_single_precision_throughout_are_not(dtype: torch.dtype) -> None:
    def model(y: Tensor) -> None:
        half = y.new_full((), 0.5)
        a = pyro.sample("a", dist.Normal(0.0 * half, 2.0 * half))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(a, half * torch.ones_like(y)), obs=y)
            pyro.sample("x", dist.Normal(0.0 * a + half, half), obs=y)

    joint = LogJoint(model, (torch.tensor([0.1, 0.7], dtype=dtype),))
    assert rounded_inside(joint, torch.tensor([1.0 / 3.0]), joint.initial_theta) == []
