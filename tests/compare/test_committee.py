"""Predictions of networks by their tangent, and the picture of evidence against size."""

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior, UnsupportedModel, committee
from pyro_evidence.compare import linearised
from pyro_evidence.models.mlp import MLP, Regression, Softmax
from pyro_evidence.numerics.derivatives import jacobian
from pyro_evidence.plots import posterior as plots_posterior


def data() -> tuple[Tensor, Tensor]:
    X = torch.randn(15, 2, generator=torch.Generator().manual_seed(0))
    return X, torch.tanh(X[:, 0])


def fitted(num_hidden: int) -> LaplacePosterior:
    return LaplaceEvidence(MLP(2, num_hidden, alpha=1.0, output=Regression(beta=25.0))).run(*data())


def test_linearised_outputs_have_the_variance_of_the_tangent() -> None:
    """Oracle: the Jacobian by automatic differentiation of the model's own predictor."""
    X, t = data()
    net = MLP(2, 2, alpha=1.0, output=Softmax(3))
    posterior = LaplaceEvidence(net).run(X, (t > 0).long() + (t > 0.5).long())
    new = X[:4] + 0.3
    u = posterior.state.u.clone().requires_grad_()
    eta = net.predictor(new, posterior.state.problem.joint.latents.unconstrained(u))
    J = jacobian(eta.reshape(-1), u)
    covariance = posterior.state.precision.adjoint[0]
    mean, variance = linearised(posterior, new)
    torch.testing.assert_close(mean, eta.detach())
    torch.testing.assert_close(variance, (J @ covariance @ J.T).diagonal().reshape(4, 3).detach())


def test_a_committee_adds_the_spread_between_its_members() -> None:
    X, _ = data()
    members = [fitted(1), fitted(2)]
    vote = committee(members)
    (m, v), (n, w) = (linearised(p, X) for p in members)
    a, b = vote.weights
    mean, variance = vote.linearised(X)
    torch.testing.assert_close(mean, a * m + b * n)
    torch.testing.assert_close(variance, a * (v + m**2) + b * (w + n**2) - mean**2)


def test_only_plain_networks_have_a_tangent() -> None:
    X, t = data()
    model = poutine.condition(MLP(2, 2, alpha=1.0, output=Regression(beta=9.0)), {"b1": torch.zeros(2)})
    with pytest.raises(UnsupportedModel, match="no site conditioned"):
        linearised(LaplaceEvidence(model, restarts=2).run(X, t), X)


def test_prediction_leaves_no_param_behind() -> None:
    X, t = data()
    posterior = LaplaceEvidence(MLP(2, 1, output=Regression(beta=25.0))).run(X, t)
    Predictive(posterior.model, guide=posterior.guide, num_samples=2)(X)
    assert not list(pyro.get_param_store().keys())


def test_evidence_by_size_is_drawn_in_order() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    posteriors = {2: fitted(2), 1: fitted(1)}
    figure, axes = plt.subplots()
    plots_posterior.evidence_by_size(axes, posteriors, errors={1: 0.3, 2: 0.1})
    (line,), (other,) = axes.lines, figure.axes[1].lines
    assert line.get_xdata().tolist() == [1, 2] == other.get_xdata().tolist()
    assert line.get_ydata().tolist() == [float(posteriors[H].log_evidence) for H in (1, 2)]
    assert other.get_ydata().tolist() == [0.3, 0.1]
    for wrong in ({}, {1: posteriors[1]}):
        with pytest.raises(BadInput, match="expected the same"):
            plots_posterior.evidence_by_size(axes, wrong, errors={1: 0.3, 2: 0.1})
    plt.close(figure)
