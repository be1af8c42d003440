"""Predictions of networks by their tangent, and the picture of evidence against size."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior, Start, UnsupportedModel, committee
from pyro_evidence.compare import linearised
from pyro_evidence.models.mlp import MLP, Binary, Regression, Softmax
from pyro_evidence.numerics.derivatives import jacobian
from pyro_evidence.plots import posterior as plots_posterior
from pyro_evidence.precision.choices import gauss_newton
from pyro_evidence.program.predictors import hermite
from pyro_evidence.structure import network


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
    covariance = posterior.state.precision.log_det_gradient[0]
    mean, variance = linearised(posterior, new)
    torch.testing.assert_close(mean, eta.detach())
    torch.testing.assert_close(variance, (J @ covariance @ J.T).diagonal().reshape(4, 3).detach())


def test_a_network_of_unlike_modes_predicts_by_tangents_too() -> None:
    """Oracle: two runs of sequential Monte Carlo from the prior, 4,000 particles each, by a program of their own."""

    def two_units(x: Tensor, y: Tensor | None = None) -> Tensor:
        noise = pyro.sample("noise", dist.Gamma(0.5, 1.0))
        slope, bias, out = (pyro.sample(n, dist.Normal(0.0, 1.0).expand([2]).to_event(1)) for n in ("w", "b", "v"))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(torch.tanh(x.unsqueeze(-1) * slope + bias) @ out, noise), obs=y)

    x = torch.linspace(-2.0, 2.0, 8).double()
    y = 1.2 * x.sin() + 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(4)).double()
    posterior = LaplaceEvidence(two_units, start=Start(restarts=1)).run(x, y)
    mean, sd = posterior.predict(torch.tensor([-3.0, 0.0, 3.0]).double(), return_std=True)
    torch.testing.assert_close(mean, torch.tensor([-1.31, 0.12, 1.28]).double(), rtol=0.0, atol=0.1)
    torch.testing.assert_close(sd, torch.tensor([0.145, 0.12, 0.145]).double(), rtol=0.5, atol=0.0)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_network_predicts_by_its_tangent(scale: float) -> None:
    """Oracles: a Gaussian's mean and variance beside the noise's; the logistic function under it, by quadrature."""
    X, t = data()
    new = scale * X + 0.3
    real = fitted(3)
    (mean, variance), (found, sd) = linearised(real, new), real.predict(new, return_std=True)
    torch.testing.assert_close(found, mean[:, 0])
    torch.testing.assert_close(sd.square(), variance[:, 0] + 1.0 / 25.0, rtol=0.2, atol=0.0)  # of 1,000 draws
    low, high = real.predict(new, quantiles=[0.05, 0.95], num_samples=4000)
    reach = 1.645 * (variance[:, 0] + 1.0 / 25.0).sqrt()
    torch.testing.assert_close((high - low) / 2.0, reach, rtol=0.15, atol=0.0)
    labels = LaplaceEvidence(MLP(2, 3, alpha=1.0, output=Binary())).run(X, (t > 0).double())
    mean, variance = linearised(labels, new)
    torch.testing.assert_close(labels.predict(new), hermite(mean[:, 0], variance[:, 0]), rtol=0.0, atol=0.03)


Activation = Callable[[Tensor], Tensor]


def own_network(hidden: int, sampled: bool, activation: Activation = torch.tanh) -> Callable[..., Tensor]:
    """As a user writes it, with the noise known or sampled."""

    def model(X: Tensor, t: Tensor | None = None) -> Tensor:
        noise = pyro.sample("noise", dist.HalfNormal(0.2)) if sampled else 0.2
        W = pyro.sample("W", dist.Normal(0.0, 2.0).expand([X.shape[1], hidden]).to_event(2))
        v = pyro.sample("v", dist.Normal(0.0, 1.0).expand([hidden]).to_event(1))
        with pyro.plate("data", len(X)):
            return pyro.sample("t", dist.Normal(activation(X @ W) @ v, noise), obs=t)

    return model


@pytest.mark.parametrize("sampled", [False, True])
def test_a_network_of_the_user_predicts_by_its_tangent(sampled: bool) -> None:
    """Oracle: forward derivatives of the network written again, at the mode of each node.

    Draws of its weights, some of which the data do not tell, are spread over a hundred times the noise.
    """
    X, t = data()
    t = t + 0.1 * torch.randn(15, generator=torch.Generator().manual_seed(1))
    engine = LaplaceEvidence(own_network(3, sampled), marginalise=["noise"] * sampled, start=Start(restarts=1))
    posterior = engine.run(X, t)
    new, inside = 2.0 * X[:5] + 0.3, posterior._inside
    shares, modes, unwhiten = posterior._normals
    slices = posterior._joint.latents.slices

    def network_of(u: Tensor) -> Tensor:
        return torch.tanh(new @ u[slices["W"]].reshape(2, 3)) @ u[slices["v"]]

    noise = [posterior._constrained(mode)["noise"] for mode in modes] if sampled else [torch.tensor(0.2)]
    eye = torch.eye(modes.shape[1])
    means, variances = [], []
    for k, mode in enumerate(modes):
        means.append(network_of(mode))
        u = mode.clone().requires_grad_()
        along = unwhiten(k, eye) @ jacobian(network_of(u), u).T
        variances.append(along.square().sum(0) + noise[k].square())
    average = torch.tensordot(shares, torch.stack(means), 1)
    spread = (torch.stack(means) - average).square() + torch.stack(variances)
    found, sd = posterior.predict(new, return_std=True, num_samples=4000)
    torch.testing.assert_close(found, average, rtol=0.0, atol=0.02)
    torch.testing.assert_close(sd, torch.tensordot(shares, spread, 1).sqrt(), rtol=0.07, atol=0.0)
    assert inside.problem.curvature is gauss_newton


def test_draws_along_a_tangent_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, calls = fitted(2), list[object]()
    outputs = network.outputs
    monkeypatch.setattr(network, "outputs", lambda *given: calls.append(given) or outputs(*given))
    posterior.predict(data()[0], num_samples=400)
    assert 1 <= len(calls) < 10


def test_a_network_is_its_tangent_only_while_it_predicts() -> None:
    X, _ = data()
    posterior, weights = fitted(2), {"W1": torch.ones(2, 2), "b1": torch.ones(2), "W2": torch.ones(2, 1)}
    weights["b2"] = torch.zeros(1)
    before = poutine.condition(posterior.model, weights)
    with pytest.raises(BadInput):
        posterior.predict(X[:, :1])
    posterior.predict(X)
    curved = poutine.trace(before).get_trace(X).nodes["t"]["fn"].mean
    torch.testing.assert_close(curved, 2.0 * torch.tanh(X.sum(-1) + 1.0))


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
        linearised(LaplaceEvidence(model, start=Start(restarts=2)).run(X, t), X)


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
