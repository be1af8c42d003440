"""NUTS in whitened coordinates: the same target, whatever the conditioning."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplaceNUTS, LaplacePosterior, Stop
from pyro_evidence.errors import BadInput
from pyro_evidence.infer import laplace_nuts
from pyro_evidence.posterior.whitening import fused, with_gradient
from tests.models_for_tests.sampled_scales import SCHOOLS, schools_centred

GEWEKE = 100  # turns
SCALES = torch.tensor([10**-1.5, 1.0, 10**1.5], dtype=torch.float64)
TURN = torch.linalg.qr(torch.tensor([[1.0, 2.0, 0.5], [0.3, 1.0, -1.0], [0.7, 0.1, 1.0]], dtype=torch.float64)).Q


def ill_conditioned(y: Tensor) -> None:
    """A Gaussian posterior whose variances span six orders of magnitude, in no coordinate's direction."""
    w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(3), scale_tril=torch.linalg.cholesky(prior())))
    pyro.sample("y", dist.Normal((TURN.mT @ w / SCALES).sum(), 1.0), obs=y)


def prior() -> Tensor:
    return TURN @ SCALES.square().diag() @ TURN.mT


def drawn(posterior: LaplacePosterior, num_samples: int, seed: int = 0) -> MCMC:
    pyro.set_rng_seed(seed)
    mcmc = MCMC(LaplaceNUTS(posterior), num_samples=num_samples, warmup_steps=50, disable_progbar=True)
    mcmc.run()
    return mcmc


def test_conditioning_does_not_matter() -> None:
    posterior = LaplaceEvidence(ill_conditioned, stop=Stop(progress=False)).run(torch.tensor(2.0))
    mcmc = drawn(posterior, 200)
    draws = mcmc.get_samples()["w"]
    precision = torch.linalg.inv(prior()) + torch.outer(TURN @ (1 / SCALES), TURN @ (1 / SCALES))
    mean = torch.linalg.solve(precision, 2.0 * TURN @ (1 / SCALES))
    white = (draws - mean) @ torch.linalg.cholesky(precision)
    assert float(white.mean(0).abs().max()) < 0.25 and float((white.std(0) - 1.0).abs().max()) < 0.2
    assert float(mcmc.diagnostics()["w"]["n_eff"].min()) > 100


def test_a_funnel_is_said_to_be_one() -> None:
    posterior = LaplaceEvidence(schools_centred, stop=Stop(progress=False)).run(SCHOOLS)
    kernel = LaplaceNUTS(posterior, max_tree_depth=4)
    kernel.setup(10)
    kernel._num_drawn = 20
    kernel._running._divergences = [1, 2, 3]
    with pytest.warns(UserWarning, match=r"3 of 20 draws diverged"):
        kernel.cleanup()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.cleanup()


def test_outer_sites_are_sampled_in_the_coordinates_of_their_integral() -> None:
    """Eight schools, centred: no funnel is left."""
    posterior = LaplaceEvidence(schools_centred, stop=Stop(progress=False)).run(SCHOOLS)
    mcmc = drawn(posterior, 80)
    assert mcmc.kernel._value.__qualname__.startswith("fused")  # four times as fast
    log_tau = mcmc.get_samples()["tau"].log()
    mean, sd = (float(part) for part in posterior.integral.moments)
    assert (
        float(log_tau.mean()) == pytest.approx(mean, abs=0.5 * sd) and not mcmc.diagnostics()["divergences"]["chain 0"]
    )
    assert float(mcmc.diagnostics()["tau"]["n_eff"]) > 20


def test_where_draws_diverge_a_metric_is_adapted_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace_nuts, "AGAIN", 30)
    kernel = LaplaceNUTS(LaplaceEvidence(ill_conditioned, stop=Stop(progress=False)).run(torch.tensor(2.0)))
    kernel.setup(5)
    first = kernel._running
    for _ in range(5):
        kernel.sample({})
    first._divergences.extend([1, 2, 3])
    with pytest.warns(UserWarning, match=r"3 of 20 draws diverged.*A metric is adapted"):
        kernel.sample({})
    assert kernel._running is not first and kernel._num_drawn == 1


def test_other_data_and_other_things_are_refused() -> None:
    posterior = LaplaceEvidence(ill_conditioned, stop=Stop(progress=False)).run(torch.tensor(2.0))
    with pytest.raises(BadInput, match="other data"):
        LaplaceNUTS(posterior).setup(5, torch.tensor(3.0))
    with pytest.raises(BadInput, match="expected a posterior"):
        LaplaceNUTS(ill_conditioned)
    with pytest.raises(BadInput, match="begins at the posterior's mode"):
        LaplaceNUTS(posterior).initial_params = {}
    assert set(LaplaceNUTS(posterior).initial_params) == {"w"}


def three_groups(y: Tensor | None = None) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("tau", dist.LogNormal(0.0, 0.5))
    with pyro.plate("groups", 3):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, 2.0), obs=y)


@pytest.mark.slow
def test_data_and_latents_drawn_in_turn_stay_in_their_joint_density(monkeypatch: pytest.MonkeyPatch) -> None:
    """Geweke (2004): were the kernel not to leave the posterior of each data set as it is, they would drift away."""
    monkeypatch.setattr(laplace_nuts, "fused", lambda f, places: with_gradient(f))
    pyro.set_rng_seed(1)
    nodes = poutine.trace(three_groups).get_trace().nodes
    values = {n: nodes[n]["value"] for n in ("mu", "tau", "theta")}
    rows = []
    for _ in range(GEWEKE):
        y = dist.Normal(values["theta"], 2.0).sample()
        kernel = LaplaceNUTS(LaplaceEvidence(three_groups, stop=Stop(progress=False)).run(y))
        kernel.setup(0)
        latents = kernel.posterior.state.problem.joint.latents
        kernel._z, kernel._adapted = kernel.round.inverse(latents.flat(values)), True
        kernel._running.clear_cache()  # of the mode, where it would begin otherwise
        drawn = kernel.sample({})
        values = {n: kernel.transforms[n].inv(v).detach() for n, v in drawn.items()}
        rows.append(torch.stack([values["mu"], values["tau"].log(), values["theta"][0]]))
    found, spread = torch.stack(rows), torch.tensor([1.0, 0.5, (1.0 + math.exp(0.5)) ** 0.5])
    worth = effective_sample_size(found.unsqueeze(0)).clamp(min=5.0)
    assert bool((found.mean(0).abs() < 4.0 * spread * worth.rsqrt()).all())
    assert bool(((found.std(0) / spread).log().abs() < 4.0 * (2.0 * worth).rsqrt()).all())


def test_a_run_that_writes_into_views_and_asks_constants_is_written_down() -> None:
    def f(z: Tensor) -> Tensor:
        table = torch.zeros(3, 3, dtype=z.dtype)
        if bool((table == 0.0).all()):  # a number, but none that hangs on z
            table[1] = z
        row = table[2]
        row.add_(1.0).mul_(z[0])
        return torch.linalg.cholesky(table @ table.mT + torch.eye(3, dtype=z.dtype)).sum() + z[2].exp()

    places = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = fused(f, places[:3])
    assert found.__qualname__.startswith("fused")  # not the run itself
    for twice in (places[3], places[3], places[2]):
        for ours, plain in zip(found(twice), with_gradient(f)(twice), strict=True):
            torch.testing.assert_close(ours, plain)
