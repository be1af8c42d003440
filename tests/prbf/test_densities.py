"""E-step, overlap and objective of the probabilistic RBF network against the naive version and identities."""

import pytest
import torch

from pyro_evidence.models.covariances import Covariance, Diagonal, Full, Spherical
from pyro_evidence.prbf.densities import Network, Point, class_data, evaluate, log_density
from tests.models_for_tests.prbf_cases import random_network, three_classes
from tests.oracles import prbf as naive

KINDS = [Spherical(), Diagonal(), Full()]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)


def point(kind: Covariance, alpha: float = 3.0) -> Point:
    X, y = three_classes()
    return evaluate(class_data(X, y, 3, kind), random_network(kind), torch.tensor([alpha, 2 * alpha]))


@each_kind
def test_objective_is_equation_22(kind: Covariance) -> None:
    X, y = three_classes()
    at = point(kind)
    S = kind.matrix(at.net.covariance, 3)
    for b, alpha in enumerate((3.0, 6.0)):
        expected = naive.penalised(X, y, at.net.mixing[b], at.net.loc[b], S[b], alpha, at.net.class_prior[b])
        torch.testing.assert_close(at.objective[b], expected, rtol=1e-12, atol=1e-10)


@each_kind
def test_log_density_is_that_of_each_class(kind: Covariance) -> None:
    X, _ = three_classes()
    at = point(kind)
    found = log_density(at.net, kind, kind.features(X))
    S = kind.matrix(at.net.covariance, 3)
    joint = torch.stack([naive.log_joint(X, at.net.mixing[1, k], at.net.loc[1], S[1]) for k in range(3)], 1)
    torch.testing.assert_close(found[1], joint.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_log_density_of_a_class_that_is_far_from_the_nearest_kernel_is_finite() -> None:
    loc = torch.tensor([[[0.0], [100.0]]])
    net = Network(torch.eye(2)[None], loc, torch.ones(1, 2, 1), torch.full((1, 2), 0.5))
    found = log_density(net, Spherical(), Spherical().features(torch.zeros(1, 1)))
    assert float(found[0, 0, 1] - found[0, 0, 0]) == pytest.approx(-5000.0)


@each_kind
def test_pieces_change_nothing(kind: Covariance) -> None:
    X, y = three_classes()
    net, alpha, data = random_network(kind), torch.tensor([3.0, 6.0]), class_data(X, y, 3, kind)
    expected = evaluate(data, net, alpha).objective
    torch.testing.assert_close(evaluate(data.sized(4, 1000), net, alpha).objective, expected, rtol=1e-12, atol=1e-10)


def test_rows_without_label_enter_through_the_mixture_over_classes() -> None:
    kind, (X, y) = Diagonal(), three_classes()
    hidden = torch.where(torch.arange(len(y)) % 2 == 0, -1, y)
    net, none = random_network(kind), torch.zeros(2)
    at = evaluate(class_data(X, hidden, 3, kind), net, none)
    density = log_density(net, kind, kind.features(X))
    joint = density + net.class_prior.log().unsqueeze(1)
    known = hidden >= 0
    each = torch.where(known, joint.gather(-1, y.expand(2, -1).unsqueeze(-1)).squeeze(-1), joint.logsumexp(-1))
    torch.testing.assert_close(at.objective, each.sum(-1), rtol=1e-12, atol=1e-10)
    shares = joint.softmax(-1)[:, ~known].sum(1) + torch.stack([(hidden == k).double().sum() for k in range(3)])
    torch.testing.assert_close(at.counts.sum(-1), shares, rtol=1e-12, atol=1e-10)
