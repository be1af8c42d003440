"""Class probabilities: Bayes' rule, and priors that make good for densities that are too high."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from pyro_evidence import BadInput
from pyro_evidence.infer.class_conditional import class_conditional, empirical_class_prior, fitted_class_prior

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@dataclass(frozen=True)
class Gauss:
    """Fits a Gaussian; its density is wrong by a constant factor."""

    log_factor: float = 0.0

    def run(self, *args: Any) -> "Fitted":
        return Fitted(args[0].mean(), args[0].std(), self.log_factor)


@dataclass(frozen=True)
class Fitted:
    mean: Tensor
    scale: Tensor
    log_factor: float

    def log_prob(self, *args: Any) -> Tensor:
        wrong = self.log_factor * float(self.mean > 0)
        return Normal(self.mean, self.scale).log_prob(args[0][:, 0]) + wrong


def classes(num: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(num, generator=generator) < 0.3).long() * 4
    X = torch.randn(num, 1, generator=generator) + 0.5 * labels.unsqueeze(-1) - 1.0
    return X, labels


def test_bayes_rule() -> None:
    X, labels = classes()
    found = class_conditional(Gauss(), X, labels)
    assert_exact(found.log_prior.exp()[1], (labels == 4).double().mean())
    joint = found.log_density(X).exp() * found.log_prior.exp()
    assert_exact(found.log_proba(X).exp(), joint / joint.sum(-1, keepdim=True))
    assert_exact(found.log_prob(X, labels).exp(), found.log_proba(X).exp()[torch.arange(200), (labels == 4).long()])


def test_predict_gives_probabilities_and_labels_the_likeliest_class() -> None:
    X, labels = classes()
    found = class_conditional(Gauss(), X, labels)
    assert_exact(found.predict(X), found.log_proba(X).exp())
    assert torch.equal(found.predict_proba(X), found.predict(X))
    assert torch.equal(found.labels(X), torch.where(found.predict(X)[:, 1] > 0.5, 4, 0))


def test_an_optimised_prior_makes_good_for_a_density_that_is_too_high() -> None:
    """Law: a constant factor of one class's density goes into the prior, and out of the probabilities."""
    X, labels = classes()
    right = class_conditional(Gauss(), X, labels, fitted_class_prior)
    wrong = class_conditional(Gauss(3.0), X, labels, fitted_class_prior)
    assert_exact(wrong.log_proba(X), right.log_proba(X), rtol=1e-6, atol=1e-6)
    assert_exact(wrong.log_prior.exp().sum(), torch.ones(()))
    # stationary: the mean probability of each class is its share
    assert_exact(
        right.log_proba(X).exp().mean(0),
        empirical_class_prior(right.log_density(X), (labels == 4).long()).exp(),
        rtol=1e-6,
        atol=1e-6,
    )
    assert float(right.log_prob(X, labels).sum()) >= float(
        class_conditional(Gauss(), X, labels).log_prob(X, labels).sum()
    )


def test_an_optimised_prior_of_separated_classes_is_finite() -> None:
    X = torch.cat([torch.full((5, 1), -50.0), torch.full((5, 1), 50.0)]) + torch.randn(10, 1)
    found = class_conditional(Gauss(), X, torch.arange(10) // 5, fitted_class_prior)
    assert bool(found.log_prior.isfinite().all())


def test_a_prior_that_is_given_is_kept() -> None:
    X, labels = classes()
    prior = torch.tensor([0.9, 0.1]).log()
    assert_exact(class_conditional(Gauss(), X, labels, prior).log_prior, prior)
    with pytest.raises(BadInput, match="log_prior"):
        class_conditional(Gauss(), X, labels, torch.zeros(3))


@pytest.mark.parametrize(
    ("labels", "message"), [(torch.zeros(3).long(), r"shape \(3,\)"), (torch.arange(200), "single datum")]
)
def test_labels_that_do_not_fit_are_refused(labels: Tensor, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        class_conditional(Gauss(), classes()[0], labels)


def test_a_label_that_was_not_seen_is_refused() -> None:
    X, labels = classes()
    with pytest.raises(BadInput, match=r"\[7\]"):
        class_conditional(Gauss(), X, labels).log_prob(X[:1], torch.tensor([7]))
    assert math.isfinite(float(class_conditional(Gauss(), X, labels).log_prob(X, labels).sum()))
