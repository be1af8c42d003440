"""Single equations of tempered SMC and of the bridge, each against itself written out without logarithms or batches."""

import math

import pytest
import torch
from torch import Tensor

from pyro_evidence.evidence_check.bridge import bridge, bridge_step, relative_variance
from pyro_evidence.evidence_check.smc import leapfrog, next_temperature, resample

NORMAL = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("spread", "before"), [(4.0, 0.0), (20.0, 0.25)])
def test_the_next_temperature_halves_the_effective_sample_size(spread: float, before: float) -> None:
    log_ratio = spread * NORMAL
    power = next_temperature(log_ratio, before)
    w = [math.exp((power - before) * (x - float(log_ratio.max()))) for x in log_ratio.tolist()]
    assert before < power < 1.0
    assert sum(w) ** 2 / sum(x * x for x in w) == pytest.approx(0.5 * len(w), rel=1e-9)


def test_weights_that_are_nearly_equal_lead_to_the_posterior_at_once() -> None:
    assert next_temperature(0.1 * NORMAL, 0.5) == 1.0


def test_systematic_resampling_takes_the_parents_under_equally_spaced_points() -> None:
    log_weights, uniform = NORMAL.reshape(4, 100), torch.tensor([[0.0], [0.3], [0.5], [0.99]], dtype=torch.float64)
    found = resample(log_weights, uniform)
    for parents, row, u in zip(found.tolist(), log_weights.exp().tolist(), uniform.flatten().tolist(), strict=True):
        share = [w / sum(row) for w in row]
        for point, parent in enumerate(parents):
            assert sum(share[:parent]) <= (point + u) / 100 <= sum(share[: parent + 1]) + 1e-12
        assert all(abs(parents.count(i) - 100 * w) < 1.0 for i, w in enumerate(share))


def test_leapfrog_on_a_normal_is_a_power_of_one_matrix() -> None:
    """In whitened coordinates a step of size h maps (x, p) by [[1 - h^2/2, h], [-h (1 - h^2/4), 1 - h^2/2]]."""
    tril = torch.tensor([[2.0, 0.0], [0.6, 0.5]], dtype=torch.float64)
    precision = torch.cholesky_inverse(tril)
    x, p = NORMAL[:6].reshape(3, 2), NORMAL[6:12].reshape(3, 2)
    h = torch.tensor([0.1, 0.4, 0.9], dtype=torch.float64)

    def density(u: Tensor) -> tuple[Tensor, Tensor]:
        return -0.5 * torch.einsum("ri,ij,rj->r", u, precision, u), -u @ precision

    start = x @ tril.mT
    (u, value, _), gain = leapfrog(density, (start, *density(start)), tril, torch.cat([h[:, None], p], -1), num_steps=5)
    one = torch.stack([1 - h**2 / 2, h, -h * (1 - h**2 / 4), 1 - h**2 / 2], -1).reshape(3, 2, 2)
    moved = torch.linalg.matrix_power(one, 5) @ torch.stack([x, p], 1)
    torch.testing.assert_close(u, moved[:, 0] @ tril.mT)
    torch.testing.assert_close(value, -0.5 * moved[:, 0].square().sum(-1))
    torch.testing.assert_close(gain, 0.5 * (x.square() + p.square() - moved.square().sum(1)).sum(-1))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.7])
def test_a_step_of_the_bridge_is_a_ratio_of_two_means(share: float) -> None:
    """Meng and Wong (1996), eq. 4.1, and its fixed point."""
    posterior, proposal = 0.7 * NORMAL[:100] + 1.5, 0.7 * NORMAL[100:300] + 1.0

    def stepped(r: float) -> float:
        above = [math.exp(x) / (share * math.exp(x) + (1.0 - share) * r) for x in proposal.tolist()]
        below = [1.0 / (share * math.exp(x) + (1.0 - share) * r) for x in posterior.tolist()]
        return (sum(above) / len(above)) / (sum(below) / len(below))

    start = torch.tensor(0.3, dtype=torch.float64)
    assert float(bridge_step(start, posterior, proposal, share).exp()) == pytest.approx(stepped(math.exp(0.3)))
    found = bridge(posterior, proposal, share)
    ratio = float(found.log_evidence.exp())
    assert found.converged and stepped(ratio) == pytest.approx(ratio, rel=1e-11)
    f = found.below.exp()
    assert float(relative_variance(found.below)) == pytest.approx(float(f.var() / f.mean() ** 2))


def test_a_bridge_between_equal_densities_is_the_constant_between_them() -> None:
    found = bridge(torch.full((7,), -3.25, dtype=torch.float64), torch.full((9,), -3.25, dtype=torch.float64), 0.4)
    assert float(found.log_evidence) == pytest.approx(-3.25, abs=1e-14)
    assert float(found.relative_mean_square(7.0)) == 0.0
