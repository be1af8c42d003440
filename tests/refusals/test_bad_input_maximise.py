"""One error message for each way in which hyperparameters, or the choice of them, make no sense."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.program.log_joint import LogJoint
from tests.refusals.messages import refused, says

NAN = float("nan")
X = torch.tensor([[0.3, -1.2], [2.0, 0.1], [-0.7, 0.9], [1.1, 1.5]])
T = torch.tensor([0.2, -0.4, 1.3, 2.2])


@pytest.mark.parametrize("start", [0.0, -1.0, NAN])
@pytest.mark.parametrize("run_fails", [True, False])
def test_a_hyperparameter_that_starts_outside(start: float, run_fails: bool) -> None:
    def model(t: Tensor) -> None:
        alpha = pyro.param("alpha", torch.tensor([1.0, start]), constraint=constraints.positive)
        scale = alpha[1].rsqrt() if run_fails else torch.ones(())
        w = pyro.sample("w", dist.Normal(0.0, scale))
        pyro.sample("t", dist.Normal(w, 1.0).expand([4]).to_event(1), obs=t)
        pyro.factor("alpha reaches the density", -alpha[0])

    message = refused(BadInput, model, T)
    says(message, "'alpha', shape (2,), starts at [1.0, ", str(start), "GreaterThan", "strictly inside")


@pytest.mark.parametrize(
    ("start", "constraint", "elsewhere"),
    [
        (torch.tensor(1.0), constraints.unit_interval, "at 0.5"),  # where its slope would be rounded away
        (torch.tensor(2.0), constraints.unit_interval, "at 0.5"),
        (torch.tensor(0.1), constraints.interval(0.1, 5.0), "at 2.55"),
        (torch.ones(2, 2), constraints.corr_cholesky, "at [1.0, 0.0, 0.0, 1.0]"),
    ],
)
def test_a_param_that_starts_on_an_edge_or_off_its_support(start: Tensor, constraint: object, elsewhere: str) -> None:
    def model(t: Tensor) -> None:
        p = pyro.param("p", start, constraint=constraint)
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("t", dist.Normal(w + p.sum(), 1.0).expand([4]).to_event(1), obs=t)

    says(refused(BadInput, model, T), "'p'", "strictly inside", elsewhere)


def test_a_stale_param_store() -> None:
    def model(t: Tensor) -> None:
        alpha = pyro.param("alpha", torch.ones(2), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).to_event(1))
        pyro.sample("t", dist.Normal(w.sum(), 1.0).expand([4]).to_event(1), obs=t)

    pyro.param("alpha", torch.ones(3), constraint=constraints.positive)
    says(refused(BadInput, model, T), "'alpha' has shape (2,)", "shape (3,)", "clear_param_store")
    pyro.get_param_store()["alpha"] = torch.tensor([1.0, -1.0])  # which the store takes for nan
    says(refused(BadInput, model, T), "'alpha'", "[1.0, nan]")


def test_a_param_that_does_not_reach_the_density() -> None:
    def model(t: Tensor) -> None:
        alpha = pyro.param("alpha", torch.tensor(1.0), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, float(alpha.detach())))
        pyro.sample("t", dist.Normal(w, 1.0).expand([4]).to_event(1), obs=t)

    says(refused(UnsupportedModel, model, T), "hyperparameter(s) alpha", "float(...)", "PyroParam", "maximise=()")
    assert LogJoint(model, (T,), maximise=()).hypers.size == 0


def test_a_parameter_out_of_reach() -> None:
    """A network's own parameter, held where nobody can find it."""
    network = PyroModule[torch.nn.Linear](2, 1)
    network.weight = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))

    class Hidden:
        __slots__ = ("get",)

        def __call__(self, X: Tensor, t: Tensor) -> None:
            pyro.sample("t", dist.Normal(self.get()(X).squeeze(-1), 1.0).to_event(1), obs=t)

    model = Hidden()
    model.get = iter(lambda: network, None).__next__
    says(refused(UnsupportedModel, model, X, T), "hyperparameter(s) bias", "PyroParam")


def test_weights_hidden_in_a_module() -> None:
    network = torch.nn.Linear(2, 1)

    def model(X: Tensor, t: Tensor) -> None:
        pyro.module("network", network)
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("t", dist.Normal(network(X).squeeze(-1) + b, 1.0).to_event(1), obs=t)

    says(refused(UnsupportedModel, model, X, T), "network.weight", "network.bias", "PyroModule", "maximise=()")


def hierarchical(t: Tensor) -> None:
    a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
    b = pyro.sample("b", dist.LogNormal(a, 1.0))
    pyro.sample("t", dist.Normal(b, a).expand([4]).to_event(1), obs=t)


def test_a_maximised_site_whose_prior_depends_on_an_integrated_one() -> None:
    says(refused(UnsupportedModel, hierarchical, T, maximise=["b"]), "prior of b depends on", "'a'", "integrated")
    assert LogJoint(hierarchical, (T,), maximise=["a"]).maximised_sites == ("a",)


def test_a_maximised_site_whose_prior_depends_on_a_discrete_one() -> None:
    def model(t: Tensor) -> None:
        z = pyro.sample("z", dist.Categorical(torch.ones(2)))
        scale = pyro.sample("scale", dist.LogNormal(torch.tensor([0.0, 1.0])[z], 1.0))
        w = pyro.sample("w", dist.Normal(0.0, scale))
        pyro.sample("t", dist.Normal(w, 1.0).expand([4]).to_event(1), obs=t)

    says(refused(UnsupportedModel, model, T, maximise=["scale"]), "prior of scale depends on z")


SETTINGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"maximise": ["c"]}, ("maximise=['c']", "a, b", "no ['c']")),
    ({"integrate": ["c", "a"]}, ("integrate=['c', 'a']", "no ['c']")),
    ({"maximise": "a"}, ("maximise='a'", "list of names")),
    ({"integrate": "ab"}, ("integrate='ab'", "list of names")),
    ({"integrate": ["a"], "maximise": ["a"]}, ("['a']", "both")),
    ({"maximise": ["a", "b"]}, ("a, b", "at least one")),
    ({"integrate": []}, ("a, b", "at least one")),
    ({"integrate": ["a"], "maximise": ()}, ("['b']", "poutine.condition")),
]


@pytest.mark.parametrize(("settings", "parts"), SETTINGS)
def test_settings_that_name_the_wrong_sites(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    says(refused(BadInput, hierarchical, T, **settings), *parts)
