"""Data on which a model cannot be run, before and after the fit: arrays, lists, integers, other columns or labels."""

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import REVM, RVM, BadInput, EvidenceEM, LaplaceEvidence, class_conditional
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.program.checks import run_failed
from tests.refusals.messages import refused, says

generator = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=generator)
T = torch.bernoulli(torch.sigmoid(X @ torch.tensor([2.0, -1.0, 0.5])), generator=generator)
Y = torch.randn(60, 2, generator=generator) + 3.0 * T.unsqueeze(-1)


def logistic(X: Tensor, t: Tensor | None = None) -> None:
    alpha = pyro.param("alpha", torch.ones(()), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def two_normals(Y: Tensor) -> None:
    sd = pyro.param("sd", torch.ones(2), constraint=constraints.positive)
    with pyro.plate("components", 2):
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    with pyro.plate("data", len(Y)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.5, 0.5])), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(loc[z], sd[z].unsqueeze(-1)).to_event(1), obs=Y)


def letter_of(call: Any, *args: Any) -> str:
    with pytest.raises(BadInput) as caught:
        call(*args)
    return " ".join(str(caught.value).split())


# --- before the fit ---


@pytest.mark.parametrize("X_given", [X.numpy().astype(object), X.tolist()], ids=["array", "list"])
def test_data_that_are_no_tensors_are_named(X_given: Any) -> None:
    kind = type(X_given).__name__
    says(
        refused(BadInput, logistic, X_given, T),
        f"argument 0: {kind}, no tensor",
        "argument 1: shape (60,), torch.float64",
        "torch.as_tensor(...) around argument 0.",
    )


def test_an_array_of_targets_is_named() -> None:
    says(
        refused(BadInput, logistic, X, T.numpy().astype(object)),
        "argument 1: ndarray",
        "torch.as_tensor(...) around argument 1.",
    )


def test_a_mistake_of_the_models_own_stays_what_it_is_when_the_data_are_tensors() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        LaplaceEvidence(lambda X: X.no_such).run(X)


def test_integers_are_named() -> None:
    message = refused(BadInput, logistic, X.long(), T)
    says(message, "argument 0: shape (60, 3), torch.int64", ".double() after argument 0.")
    assert "Integers" not in refused(BadInput, logistic, X.float(), T)


def test_the_first_value_that_is_not_finite_is_located() -> None:
    spoilt = X.clone()
    spoilt[7, 2] = spoilt[9, 0] = torch.nan
    says(refused(BadInput, logistic, spoilt, T), "argument 0: shape (60, 3), torch.float64, 2 nan (first at [7, 2])")


def test_a_letter_does_not_recite_the_data() -> None:
    message = refused(BadInput, logistic, X, T + 1.0)
    says(message, "site 't'", "support (Boolean())", "found values: tensor([", "Shapes must broadcast")
    assert len(message.split("found values:")[1].split(" ....")[0]) <= 60
    assert "found values: -1.0." in str(run_failed(ValueError("but found invalid values:\n-1.0"), (), {}))
    assert "Trace" not in str(run_failed(RuntimeError("size mismatch\nTrace Shapes:\n w dist | 4"), (), {}))


@pytest.mark.parametrize("engine", [LaplaceEvidence, EvidenceEM])
def test_columns_are_not_repeated_until_they_fit(engine: Any) -> None:
    says(letter_of(engine(two_normals).run, Y[:, :1]), "site 'y' has data of shape (60, 1)", "expected (..., 2)")


# --- after the fit ---


@pytest.mark.parametrize("engine", [LaplaceEvidence, RVM, REVM])
def test_new_data_that_the_fitted_model_cannot_be_run_on(engine: Any) -> None:
    log_prob = engine(logistic).run(X, T).log_prob
    says(letter_of(log_prob, X[:, :2], T), "cannot be run", "argument 0: shape (60, 2)")
    says(letter_of(log_prob, X.float(), T), "argument 0: shape (60, 3), torch.float32", "one dtype")
    says(letter_of(log_prob, X.tolist(), T.tolist()), "torch.as_tensor(...) around argument 0, argument 1.")
    says(letter_of(log_prob, X, T[:, None]), "site 't'", "(60, 1)", "broadcast to (60, 60)")
    first = int(T.nonzero()[0])
    says(letter_of(log_prob, X, T + 1.0), f"{int(T.sum())} values", "support of Bernoulli", f"2.0 at [{first}]")
    assert log_prob(X[:7], T[:7]).shape == (7,)


MIXTURES = {
    "ready made": EvidenceEM(gaussian_mixture(2)),
    "own": EvidenceEM(two_normals),
    "by Laplace": LaplaceEvidence(two_normals),
}


@pytest.mark.parametrize("engine", MIXTURES.values(), ids=MIXTURES)
def test_new_data_of_a_mixture_have_the_columns_of_the_old(engine: Any) -> None:
    posterior = engine.run(Y)
    one, three = Y[:, :1], torch.cat([Y, Y[:, :1]], -1)
    for wrong, number in ((one, "1"), (three, "3")):
        says(letter_of(posterior.log_prob, wrong), number, "2", "same columns")
    message = letter_of(posterior.log_prob, Y.tolist())
    assert "torch.as_tensor(" in message or "torch.tensor(rows" in message
    assert "Trace Shapes" not in message
    assert posterior.log_prob(Y[:1]).shape == (1,)


def test_data_of_another_precision_than_the_fit() -> None:
    posterior = EvidenceEM(gaussian_mixture(2)).run(Y)
    says(letter_of(posterior.log_prob, Y.float()), "torch.float32", "X.to(torch.float64)")


@pytest.mark.parametrize("engine", [LaplaceEvidence, RVM])
@pytest.mark.parametrize("number", [1.5, -1, "3"])
def test_a_number_of_draws_that_is_none(engine: Any, number: Any) -> None:
    says(letter_of(engine(logistic).run(X, T).get_samples, number), f"num_samples={number!r}", "whole number")


@pytest.mark.parametrize(
    ("data", "labels", "name"),
    [(Y.tolist(), T, "X is a list"), (Y, np.zeros(60), "labels is a ndarray"), (Y, ["a"] * 60, "labels is a list")],
)
def test_classes_of_arrays_or_lists(data: Any, labels: Any, name: str) -> None:
    says(letter_of(class_conditional, EvidenceEM(gaussian_mixture(2)), data, labels), name, "torch.as_tensor(")
