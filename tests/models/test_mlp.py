"""The network as a Pyro model: its density, its settings, and what Pyro's other engines make of it."""

import itertools
import math
import pickle
from functools import partial

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, MultivariateNormal, Normal

from pyro_evidence import BadInput, LaplaceEvidence, Start, Stop
from pyro_evidence.laplace.restarts import starts
from pyro_evidence.models.mlp import MLP, Binary, Output, Regression, Softmax, ard
from pyro_evidence.models.regression import Learned
from pyro_evidence.program import LogJoint

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def inputs(num: int = 12, num_inputs: int = 2) -> Tensor:
    return torch.randn(num, num_inputs, generator=torch.Generator().manual_seed(0))


def weights_of(net: MLP) -> dict[str, Tensor]:
    return {n: v[0] for n, v in net.starts(1, seed=0).items()}


def log_joint(net: MLP, weights: dict[str, Tensor], X: Tensor, t: Tensor) -> Tensor:
    return poutine.trace(poutine.condition(net, data=weights)).get_trace(X, t).log_prob_sum()


OUTPUTS: list[tuple[Output, Tensor]] = [
    (Regression(beta=4.0), torch.linspace(-1.0, 1.0, 12)),
    (Regression(2, beta=torch.tensor([4.0, 1.0])), torch.linspace(-1.0, 1.0, 24).reshape(12, 2)),
    (Binary(), (torch.arange(12) % 2).double()),
    (Binary(), torch.arange(12) % 2 == 0),
    (Softmax(3), torch.arange(12) % 3),
    (Softmax(3), (torch.arange(12) % 3).double()),
]


@pytest.mark.parametrize(("output", "t"), OUTPUTS)
def test_log_joint_is_prior_plus_likelihood(output: Output, t: Tensor) -> None:
    alpha = {"W1": torch.tensor([2.0, 0.5]), "b1": 3.0, "W2": 0.25, "b2": torch.tensor(0.1)}
    net = MLP(2, 3, output=output, alpha=alpha)
    w, X = weights_of(net), inputs()
    eta = torch.tanh(X @ w["W1"] + w["b1"]) @ w["W2"] + w["b2"]
    likelihood = {
        Regression: lambda: Normal(eta.reshape(t.shape), torch.tensor([0.5, 1.0])[: output.num_outputs]).log_prob(t),
        Binary: lambda: Bernoulli(logits=eta[:, 0]).log_prob(t.double()),
        Softmax: lambda: Categorical(logits=eta).log_prob(t),
    }[type(output)]()
    prior = Normal(0.0, torch.tensor([[2.0], [0.5]]).rsqrt()).log_prob(w["W1"]).sum()
    for name, precision in [("b1", 3.0), ("W2", 0.25), ("b2", 0.1)]:
        prior = prior + Normal(0.0, precision**-0.5).log_prob(w[name]).sum()
    assert_exact(log_joint(net, w, X, t), prior + likelihood.sum())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {f"alpha_{s}": () for s in ("W1", "b1", "W2", "b2")} | {"beta": ()}),
        ({"alpha": 1.0}, {"beta": ()}),
        ({"alpha": 1.0, "output": Binary()}, {}),
        ({"alpha": ard(2), "output": Softmax(4)}, {"alpha_W1": (2,), "alpha_b1": (), "alpha_W2": (), "alpha_b2": ()}),
        ({"alpha": {"W1": 1.0, "b1": 1.0, "b2": 1.0}, "output": Regression(3)}, {"alpha_W2": (), "beta": ()}),
        ({"output": Regression(3, Learned(torch.ones(3))), "alpha": 1.0}, {"beta": (3,)}),
    ],
)
def test_only_what_the_caller_leaves_open_is_a_hyperparameter(settings, expected) -> None:
    net = MLP(2, 3, **settings)
    t = {1: torch.zeros(12), 3: torch.zeros(12, 3), 4: torch.arange(12) % 4}[net.output.num_outputs]
    joint = LogJoint(net, (inputs(), t))
    assert {p.name: tuple(p.shape) for p in joint.hypers} == expected


def test_several_hidden_layers_have_groups_of_their_own() -> None:
    net = MLP(2, (4, 3), activation=torch.relu)
    w, X = weights_of(net), inputs()
    hidden = torch.relu(torch.relu(X @ w["W1"] + w["b1"]) @ w["W2"] + w["b2"])
    assert_exact(net.predictor(X, w), hidden @ w["W3"] + w["b3"])
    joint = LogJoint(net, (X, torch.zeros(12)))
    assert {p.name for p in joint.hypers} == {f"alpha_{k}{i}" for k in "Wb" for i in (1, 2, 3)} | {"beta"}


@pytest.mark.parametrize("layer", ["output held", "hidden held"])
def test_a_network_that_is_linear_in_its_weights_has_the_exact_evidence(layer: str) -> None:
    """Oracle: Bayesian linear regression, the weights integrated out on paper."""
    X, t = inputs(), torch.sin(inputs()[:, 0])
    if layer == "output held":  # identity activation: linear in W1 and b1
        net = MLP(2, 3, activation=torch.nn.Identity(), alpha=2.0, output=Regression(beta=5.0))
        held = {n: v for n, v in weights_of(net).items() if n in ("W2", "b2")}
        v = held["W2"].square().sum()
        K, mean = v * (X @ X.mT + 1.0) / 2.0, held["b2"].expand(12)
    else:  # any activation: linear in W2 and b2
        net = MLP(2, 3, alpha=2.0, output=Regression(beta=5.0))
        held = {n: v for n, v in weights_of(net).items() if n in ("W1", "b1")}
        h = torch.tanh(X @ held["W1"] + held["b1"])
        K, mean = (h @ h.mT + 1.0) / 2.0, torch.zeros(12)
    expected = MultivariateNormal(mean, K + torch.eye(12) / 5.0).log_prob(t)
    expected = expected + sum(Normal(0.0, 2.0**-0.5).log_prob(v).sum() for v in held.values())  # they count as data
    posterior = LaplaceEvidence(poutine.condition(net, held)).run(X, t)
    assert_exact(posterior.log_evidence, expected)


def test_starts_have_the_variance_of_glorot_and_bengio() -> None:
    net = MLP(30, 20)
    W = net.starts(50, seed=0)["W1"]
    assert W.shape == (50, 30, 20)
    assert float(W.var()) == pytest.approx(2.0 / 50.0, rel=0.05)
    joint = LogJoint(net, (inputs(12, 30), torch.zeros(12)))
    u = starts(joint, 50, seed=0)
    assert_exact(joint.latents.unconstrained(u)["W1"], W)
    assert not torch.equal(starts(joint, 50, seed=1), u)


def test_symmetries_of_a_network() -> None:
    assert MLP(2, 3).log_symmetries() == pytest.approx(math.log(2**3 * 6))
    assert MLP(2, 3, activation=torch.relu).log_symmetries() == pytest.approx(math.log(6))
    assert MLP(2, (3, 2)).log_symmetries() == pytest.approx(math.log(2**3 * 6 * 2**2 * 2))
    net = MLP(2, 3)
    w = weights_of(net)
    assert net.log_copies(w) == pytest.approx(math.log(48))
    for name, dim in (("W1", 1), ("b1", 0), ("W2", 0)):
        w[name].narrow(dim, 1, 1).copy_(w[name].narrow(dim, 0, 1))
    assert net.log_copies(w) == pytest.approx(math.log(24))  # two units are one and the same


def test_relabelling_units_changes_nothing() -> None:
    net, X = MLP(2, 3), inputs()
    w = weights_of(net)
    t = torch.sin(X[:, 0])
    for order in itertools.permutations(range(3)):
        sign = torch.tensor([1.0, -1.0, -1.0])
        other = {
            "W1": w["W1"][:, order] * sign,
            "b1": w["b1"][list(order)] * sign,
            "W2": w["W2"][list(order)] * sign[:, None],
            "b2": w["b2"],
        }
        assert_exact(log_joint(net, other, X, t), log_joint(net, w, X, t))


def test_dtype_follows_the_inputs() -> None:
    net = MLP(2, 3)
    for dtype in (torch.float32, torch.float64):
        pyro.clear_param_store()
        trace = poutine.trace(net).get_trace(inputs().to(dtype), torch.zeros(12, dtype=dtype))
        assert {trace.nodes[n]["value"].dtype for n in ("W1", "b1", "W2", "b2", "t")} == {dtype}


@pytest.mark.parametrize("output", [Regression(), Regression(2), Binary(), Softmax(3)])
@pytest.mark.parametrize("parallel", [False, True])
def test_predictive_has_one_row_per_draw(output: Output, parallel: bool) -> None:
    net, X = MLP(2, 3, output=output), inputs()
    w = net.starts(5, seed=0)
    draws = Predictive(net, w, parallel=parallel, return_sites=["t", "_RETURN"])(X)
    assert draws["t"].shape == ((5, 12, 2) if output.num_outputs == 2 else (5, 12))
    assert net.predictor(X, w).shape == (5, 12, output.num_outputs)


def test_predictive_draws_about_the_predictor() -> None:
    net, X = MLP(2, 3, output=Regression(beta=1e24)), inputs()
    w = net.starts(5, seed=0)
    for parallel in (False, True):
        t = Predictive(net, w, parallel=parallel)(X)["t"]
        torch.testing.assert_close(t, net.predictor(X, w).squeeze(-1), rtol=1e-6, atol=1e-8)


def test_svi_and_nuts_run_on_it() -> None:
    net, X = MLP(2, 2), inputs()
    t = torch.sin(X[:, 0])
    svi = SVI(net, AutoNormal(net), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    assert math.isfinite([svi.step(X, t) for _ in range(3)][-1])
    pyro.clear_param_store()
    mcmc = MCMC(
        NUTS(MLP(2, 2, alpha=1.0, output=Regression(beta=9.0))), num_samples=3, warmup_steps=3, disable_progbar=True
    )
    mcmc.run(X, t)
    assert mcmc.get_samples()["W1"].shape == (3, 2, 2)


def test_pickles() -> None:
    net = MLP(2, 3, alpha=ard(2), output=Softmax(3))
    other = pickle.loads(pickle.dumps(net))
    w, X, t = weights_of(net), inputs(), torch.arange(12) % 3
    assert_exact(log_joint(other, w, X, t), log_joint(net, w, X, t))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"hidden": 0}, r"hidden=\(0,\): expected at least one unit.*linear: use models.regression"),
        ({"hidden": ()}, "at least one layer"),
        ({"hidden": (3, 0)}, "at least one unit in every"),
        ({"num_inputs": 0}, "num_inputs=0; expected a whole number of at least 1"),
        ({"alpha": {"W3": 1.0}}, r"alpha names \['W3'\]; expected some of W1, b1, W2, b2"),
        ({"alpha": 0.0}, "alpha_W1 has the value 0"),
        ({"alpha": {"W1": torch.ones(3)}}, r"alpha_W1 has shape \(3,\); expected one of \[\(\), \(2,\), \(2, 3\)\]"),
        ({"output": Regression(beta=-1.0)}, "beta has the value -1"),
        ({"output": Regression(2, torch.ones(3))}, r"beta has shape \(3,\)"),
    ],
)
def test_impossible_settings_are_refused(settings, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        MLP(**({"num_inputs": 2, "hidden": 3} | settings))


@pytest.mark.parametrize(
    ("output", "X", "t", "match"),
    [
        (Regression(), torch.ones(5, 3), torch.ones(5), r"expected floats of shape \(N, 2\)"),
        (Regression(), torch.ones(5), torch.ones(5), r"X has shape \(5,\)"),
        (Regression(), torch.ones(5, 2).long(), torch.ones(5), "X.double"),
        (Regression(), torch.ones(5, 2), torch.ones(5, 1), r"t has shape \(5, 1\).*expected \(5,\)"),
        (Regression(2), torch.ones(5, 2), torch.ones(5), r"expected \(5, 2\)"),
        (
            Softmax(3),
            torch.ones(5, 2),
            torch.full((5,), 0.5),
            "t holds the label 0.5; expected whole numbers from 0 to 2",
        ),
        (
            Softmax(3),
            torch.ones(5, 2),
            torch.tensor([0, 1, 2, 3, 1]),
            "t holds the label 3; expected whole numbers from 0 to 2",
        ),
        (
            Binary(),
            torch.ones(5, 2),
            torch.tensor([0.0, 1.0, 2.0, 1.0, 0.0]),
            "t holds the label 2; expected whole numbers from 0 to 1",
        ),
    ],
)
def test_impossible_data_are_refused(output: Output, X: Tensor, t: Tensor, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        MLP(2, 3, output=output)(X, t)


def test_a_posterior_can_be_sent_to_another_process() -> None:
    X = torch.linspace(-1.0, 1.0, 20, dtype=torch.float64).unsqueeze(-1)
    stop, t = Stop(tolerance=0.0, num_steps=2, progress=False), (2.0 * X + 0.1 * (40.0 * X).cos()).squeeze(-1).tanh()
    fit = LaplaceEvidence(MLP(1, 1), stop=stop, start=Start(restarts=1, tour=0)).run(X, t)
    again = pickle.loads(pickle.dumps(fit))
    assert torch.equal(again.log_evidence, fit.log_evidence)
    assert torch.equal(again.predict(X[:3]), fit.predict(X[:3]))
