"""Updates of the network: against the naive version, against scikit-learn, against autograd, and their laws."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor

from pyro_evidence.models.covariances import Covariance, Diagonal, Full, Spherical
from pyro_evidence.prbf import updates as prbf_updates
from pyro_evidence.prbf.densities import ClassData, Network, Point, class_data, evaluate
from pyro_evidence.prbf.updates import (
    clamped_mixing,
    climb_penalised,
    correction,
    em,
    exact_m_step,
    prbf2001_update,
    stepped,
    uphill,
)
from tests.models_for_tests.prbf_cases import random_network, three_classes
from tests.oracles import prbf as naive

KINDS = [Spherical(), Diagonal(), Full()]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
Step = Callable[[Point], Point]


def rounds(step: Step, at: Point, num: int) -> Point:
    for _ in range(num):
        at = step(at)
    return at


def start(kind: Covariance, alpha: float, rows: int = 2, apart: float = 1.0) -> Point:
    X, y = three_classes(apart=apart)
    data = class_data(X, y, 3, kind)
    net = random_network(kind, rows, sizes=(3, 4 if apart == 1.0 else 2, 3))
    prior = (data.per_class[..., 1:] / len(X)).expand(rows, -1)
    return evaluate(data, Network(net.mixing, net.loc, net.covariance, prior), torch.full((rows,), alpha))


@each_kind
@pytest.mark.parametrize("step", [prbf2001_update, exact_m_step])
def test_without_alpha_every_update_is_plain_em(kind: Covariance, step: Step) -> None:
    a, b = rounds(step, start(kind, 0.0), 20), rounds(em, start(kind, 0.0), 20)
    for name in ("mixing", "loc", "covariance"):
        torch.testing.assert_close(getattr(a.net, name), getattr(b.net, name), rtol=1e-12, atol=1e-12)


def test_literal_without_alpha_is_plain_em_bit_for_bit() -> None:
    a, b = rounds(prbf2001_update, start(Spherical(), 0.0), 20), rounds(em, start(Spherical(), 0.0), 20)
    for name in ("mixing", "loc", "covariance"):
        assert torch.equal(getattr(a.net, name), getattr(b.net, name))


@each_kind
def test_plain_em_never_falls(kind: Covariance) -> None:
    at = start(kind, 0.0)
    for _ in range(60):
        new = em(at)
        assert bool((new.log_likelihood >= at.log_likelihood - 1e-10).all())
        at = new


@pytest.mark.parametrize(
    ("kind", "name"), [(Spherical(0.0), "spherical"), (Diagonal(0.0), "diag"), (Full(0.0), "full")]
)
def test_block_mixing_is_one_mixture_for_each_class(kind: Covariance, name: str) -> None:
    """scikit-learn's, from the same start, 30 rounds."""
    X, y = three_classes(300)
    data, net = class_data(X, y, 3, kind), random_network(kind, 1, sizes=(3, 6, 3))
    block = torch.eye(3).repeat_interleave(2, -1)[None] / 2
    at = evaluate(data, Network(block, net.loc, net.covariance, net.class_prior), torch.tensor([40.0]))
    at = rounds(prbf2001_update, at, 30)
    inverse = net.covariance.reciprocal() if name != "full" else torch.linalg.inv(net.covariance)
    for k in range(3):
        own = slice(2 * k, 2 * k + 2)
        precision = inverse[0, own, 0] if name == "spherical" else inverse[0, own]
        peer = GaussianMixture(
            2, covariance_type=name, tol=0.0, reg_covar=0.0, max_iter=30, means_init=net.loc[0, own].numpy(),
            weights_init=np.full(2, 0.5), precisions_init=precision.numpy(),
        )  # fmt: skip
        with pytest.warns(match="converge"):
            peer.fit(X[y == k].numpy())
        found = at.net.covariance[0, own]
        found = found.squeeze(-1) if name == "spherical" else found
        tolerance = {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(at.net.loc[0, own], torch.as_tensor(peer.means_), **tolerance)
        torch.testing.assert_close(at.net.mixing[0, k, own], torch.as_tensor(peer.weights_), **tolerance)
        torch.testing.assert_close(found, torch.as_tensor(peer.covariances_), **tolerance)


def test_with_one_class_the_published_update_is_plain_em() -> None:
    X, _ = three_classes()
    net = random_network(Spherical(), 1, sizes=(1, 4, 3))
    data = class_data(X, torch.zeros(len(X)).long(), 1, Spherical())
    a, b = (rounds(u, evaluate(data, net, torch.tensor([500.0])), 20) for u in (prbf2001_update, em))
    for name in ("mixing", "loc", "covariance"):
        torch.testing.assert_close(getattr(a.net, name), getattr(b.net, name), rtol=1e-11, atol=1e-11)


def test_literal_is_the_published_update_index_by_index() -> None:
    X, y = three_classes()
    at, alpha = start(Spherical(), 8.0, rows=1), 8.0
    net = at.net.mixing[0], at.net.loc[0], at.net.covariance[0, :, 0]
    lag, negative = torch.zeros(3, 4), 0
    for _ in range(25):
        at = prbf2001_update(at)
        net, lag, numerators = naive.published_round(X, y, net, alpha, lag)
        negative += int((numerators < 0).sum())
        found = at.net.mixing[0], at.net.loc[0], at.net.covariance[0, :, 0]
        for a, b in zip(found, net, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert negative  # the clamp was at work


def test_the_published_update_lowers_its_objective_somewhere() -> None:
    at, falls = start(Spherical(), 16.0, rows=4), 0
    for _ in range(60):
        new = prbf2001_update(at)
        falls += int((new.objective < at.objective - 1e-6).sum())
        at = new
    assert falls > 0


@each_kind
def test_at_a_plain_fixed_point_the_published_centres_do_not_move(kind: Covariance) -> None:
    at = rounds(em, start(kind, 0.0, apart=4.0), 150)
    for alpha in (1.0, 100.0, 1e5):
        new = prbf2001_update(replace(at, alpha=torch.full((2,), alpha)))
        assert float((new.net.loc - at.net.loc).abs().max()) < 1e-12


def test_correction_of_the_mixing_sums_to_zero_in_every_kernel() -> None:
    at = start(Full(), 50.0)
    each = correction(at, at.distance)
    assert float(each.sum(1).abs().max()) < 1e-12 and float(each.abs().max()) > 0.1


def test_negative_numerators_are_clamped_before_the_sum() -> None:
    found = clamped_mixing(torch.tensor([[0.839, -45.69]]), torch.tensor([[0.5, 0.5]]))
    assert found.tolist() == [[1.0, 0.0]]
    kept = clamped_mixing(torch.tensor([[-1.0, -45.69]]), torch.tensor([[0.25, 0.75]]))
    assert kept.tolist() == [[0.25, 0.75]]


@each_kind
@pytest.mark.parametrize("step", [prbf2001_update, exact_m_step, climb_penalised])
def test_mixing_stays_on_the_simplex_after_every_round(kind: Covariance, step: Step) -> None:
    at = start(kind, 60.0)
    for _ in range(30):
        at = step(at)
        assert bool((at.net.mixing >= 0).all())
        torch.testing.assert_close(at.net.mixing.sum(-1), torch.ones(2, 3), rtol=0, atol=1e-13)
        assert bool(torch.isfinite(at.objective).all())


def by_autograd(at: Point, b: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of eq. 22 in mixing, centres and covariance, by autograd through the naive version."""
    X, y = three_classes()
    free = [v[b].clone().requires_grad_() for v in (at.net.mixing, at.net.loc, at.net.covariance)]
    S = at.kind.matrix(free[2], 3)
    value = naive.penalised(X, y, free[0], free[1], S, float(at.alpha[b]), at.net.class_prior[b])
    return torch.autograd.grad(value, free)


@each_kind
@pytest.mark.parametrize("alpha", [0.0, 5.0, 80.0])
def test_gradient_of_equation_22_is_exact(kind: Covariance, alpha: float) -> None:
    at = start(kind, alpha)
    found = uphill(at).gradient
    for b in range(2):
        for a, e in zip((found.mixing[b], found.loc[b], found.covariance[b]), by_autograd(at, b), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


def test_gradient_with_unlabelled_rows_is_the_slope_of_the_objective() -> None:
    """A difference quotient along the step, class prior and all."""
    X, y = three_classes()
    data = class_data(X, torch.where(torch.arange(len(y)) % 2 == 0, -1, y), 3, Diagonal())
    at = evaluate(data, random_network(Diagonal()), torch.full((2,), 20.0))
    found, h = uphill(at), torch.full((2,), 1e-5)
    up, down = (evaluate(data, stepped(at.net, data, found.step, s), at.alpha).objective for s in (h, -h))
    torch.testing.assert_close((up - down) / 2e-5, found.gain, rtol=1e-6, atol=1e-6)
    assert float(found.step.class_prior.abs().max()) > 1e-3


@each_kind
def test_without_alpha_a_step_of_the_ascent_is_one_of_em(kind: Covariance) -> None:
    a, b = climb_penalised(start(kind, 0.0)).net, em(start(kind, 0.0)).net
    for name in ("mixing", "loc", "covariance"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-9, atol=1e-9)


@each_kind
@pytest.mark.parametrize("alpha", [2.0, 40.0, 800.0])
def test_ascent_never_falls(kind: Covariance, alpha: float) -> None:
    at = rounds(em, start(kind, alpha), 20)
    for _ in range(40):
        new = climb_penalised(at)
        assert bool((new.objective >= at.objective).all())
        at = new


def test_ascent_ends_where_the_gradient_vanishes() -> None:
    at = rounds(climb_penalised, rounds(em, start(Diagonal(), 40.0), 20), 200)
    assert float(uphill(at).gain.max()) < 1e-6


@each_kind
def test_ascent_with_unlabelled_rows_never_falls(kind: Covariance) -> None:
    X, y = three_classes()
    data = class_data(X, torch.where(torch.arange(len(y)) % 3 == 0, -1, y), 3, kind)
    at = evaluate(data, random_network(kind), torch.full((2,), 20.0))
    for _ in range(40):
        new = climb_penalised(at)
        assert bool((new.objective >= at.objective).all())
        at = new
    torch.testing.assert_close(at.net.class_prior.sum(-1), torch.ones(2))


def expected_log_posterior(at: Point, mixing: Tensor, loc: Tensor, covariance: Tensor, P: Tensor) -> Tensor:
    """Eq. 26 of one row with the new covariance in the penalty, subkernels held."""
    total, S = torch.zeros(()), at.kind.matrix(covariance, 3)
    X, y = three_classes()
    parts = naive.by_class(X, y, at.net.mixing[0], at.net.loc[0], at.kind.matrix(at.net.covariance[0], 3))
    for k, (Xk, resp, _) in enumerate(parts):
        total = total + (resp * naive.log_joint(Xk, mixing[k], loc, S)).sum()
        for j in range(len(loc)):
            offset = loc[j] - at.centres[0, k, j]
            total = total - at.alpha[0] / 8 * P[k, j] * offset @ torch.linalg.solve(S[j], offset)
    return total


@each_kind
def test_exact_m_step_is_stationary(kind: Covariance) -> None:
    """Centres and covariances at held ownership, then the mixing with an ownership of its own."""
    at = start(kind, 10.0)
    new = exact_m_step(at).net
    free = [v[0].clone().requires_grad_() for v in (new.mixing, new.loc, new.covariance)]
    held = expected_log_posterior(at, free[0].detach(), free[1], free[2], at.net.ownership[0])
    for gradient in torch.autograd.grad(held, free[1:]):
        assert float(gradient.abs().max()) < 1e-8
    P = naive.ownership(free[0], at.net.class_prior[0])
    whole = expected_log_posterior(at, free[0], free[1].detach(), free[2].detach(), P)
    (slope,) = torch.autograd.grad(whole, free[:1])
    tangent = free[0] * (slope - (free[0] * slope).sum(-1, keepdim=True))
    assert float(tangent.detach().abs().max()) < 1e-5 * float(slope.abs().max())
    assert bool((new.mixing > 0).all())


def test_exact_shares_sum_to_one_with_one_and_the_same_multiplier() -> None:
    g = torch.tensor([[0.0, 5.0, -3.0], [-700.0, 2.0, 900.0]])
    R = torch.tensor([[10.0, 0.0, 1.0], [1e-9, 20.0, 5.0]])
    found = prbf_updates.shares(R, g, torch.ones(2, 3))
    torch.testing.assert_close(found.sum(-1), torch.ones(2), rtol=1e-14, atol=0)
    for b in range(2):
        used = found[b] > 0
        multiplier = R[b, used] / found[b, used] - g[b, used]
        torch.testing.assert_close(multiplier, multiplier[:1].expand_as(multiplier), rtol=1e-9, atol=1e-7)
        assert torch.equal(used, R[b] > 0)


@pytest.mark.parametrize("step", [prbf2001_update, exact_m_step, climb_penalised])
def test_data_that_are_given_twice_make_the_same_way(step: Step) -> None:
    X, y = three_classes()
    net = random_network(Spherical(), rows=1)

    def way(times: int) -> Point:
        data: ClassData = class_data(X.repeat(times, 1), y.repeat(times), 3, Spherical())
        return rounds(step, evaluate(data, net, torch.tensor([7.0 * times])), 20)

    a, b = way(1), way(2)
    torch.testing.assert_close(a.net.loc, b.net.loc, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.net.mixing, b.net.mixing, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(2 * a.objective, b.objective, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step", [em, prbf2001_update, exact_m_step, climb_penalised])
def test_a_batch_of_rows_is_a_loop(step: Step) -> None:
    whole = rounds(step, start(Diagonal(), 15.0), 10)
    for b in range(2):
        one = rounds(step, start(Diagonal(), 15.0)[torch.tensor([b])], 10)
        torch.testing.assert_close(whole.objective[b], one.objective[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("step", [em, prbf2001_update, exact_m_step, climb_penalised])
@each_kind
def test_a_kernel_without_data_stays_and_breaks_nothing(step: Step, kind: Covariance) -> None:
    at = start(kind, 15.0)
    loc = at.net.loc.clone()
    loc[:, 0] = 1e4
    at = rounds(
        step, evaluate(at.data, Network(at.net.mixing, loc, at.net.covariance, at.net.class_prior), at.alpha), 5
    )
    assert bool(torch.isfinite(at.objective).all())
    torch.testing.assert_close(at.net.loc[:, 0], loc[:, 0])
