"""Choice of the penalty, averages of networks, and kernels added one by one."""

import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, OverlapEM, Start, Stop
from pyro_evidence.models.prbf import Diagonal, Full, Kernels, Separate, Spherical, prbf
from pyro_evidence.prbf import (
    AlphaPerKernel,
    add_kernels,
    average_networks,
    choose_alpha,
    error_rate,
    log_loss,
)
from pyro_evidence.prbf.choice import _folds, _promise, num_parameters
from pyro_evidence.prbf.updates import Update, em, prbf2001_update
from tests.models_for_tests.prbf_cases import three_classes

STOP = Stop(tolerance=0.0, num_steps=15)
KINDS = [Spherical(), Diagonal(), Full()]


def engine(updates: Update = prbf2001_update, **settings: object) -> OverlapEM:
    settings = {"start": Start(restarts=2), "stop": STOP} | settings
    return OverlapEM(prbf(4, 3), update=updates, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("score", [error_rate, log_loss])
def test_scores_are_those_of_fits_one_by_one(score: object) -> None:
    X, y = three_classes()
    found = choose_alpha(engine(), X, y, multiples=(0.0, 10.0), score=score, num_folds=3, seed=4)  # type: ignore[arg-type]
    fold = _folds(y, 3, 4)
    for i, c in enumerate((0.0, 10.0)):
        for f in range(3):
            posterior = engine(alpha=AlphaPerKernel(c)).run(X[fold != f], y[fold != f])
            expected = score(posterior.log_proba(X[fold == f]), y[fold == f])  # type: ignore[operator]
            torch.testing.assert_close(found.scores[i, f], expected, rtol=1e-7, atol=1e-9)
    assert found.alpha.c == (0.0, 10.0)[int(found.scores.mean(-1).argmin())]


def test_folds_spread_every_class() -> None:
    y = torch.tensor([0] * 7 + [1] * 3 + [2] * 2)
    fold = _folds(y, 2, 0)
    for k in range(3):
        counts = fold[y == k].bincount(minlength=2)
        assert int(counts.max() - counts.min()) <= 1


def test_scores_by_hand() -> None:
    log_proba = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]]).log()
    y = torch.tensor([0, 1, 1])
    assert float(error_rate(log_proba, y)) == pytest.approx(1 / 3)
    assert float(log_loss(log_proba, y)) == pytest.approx(-float(torch.tensor([0.9, 0.6, 0.2]).log().mean()))


def test_the_average_is_of_probabilities() -> None:
    X, y = three_classes()
    found = average_networks(engine(), X, y, multiples=(0.0, 5.0, 20.0))
    each = torch.stack([p.predict_proba(X) for p in found.posteriors])
    torch.testing.assert_close(found.predict(X), each.mean(0))
    assert [p.alpha for p in found.posteriors] == [pytest.approx(c * len(X) / 12) for c in (0.0, 5.0, 20.0)]
    assert torch.equal(found.labels(X), each.mean(0).argmax(-1))


@pytest.mark.parametrize("kernels", KINDS, ids=lambda kernels: type(kernels).__name__)
def test_added_kernels_find_the_clusters(kernels: Kernels) -> None:
    """Four far clusters, two of them in one class."""
    g = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    which = torch.arange(240) % 4
    X, y = centres[which] + torch.randn(240, 2, generator=g), which.clamp(max=2)
    path = add_kernels(OverlapEM(prbf(1, 3, kernels=kernels), alpha=0.0, stop=STOP), X, y, most=6)
    assert [p.loc.shape[0] for p in path.posteriors] == [1, 2, 3, 4, 5, 6]
    assert path.best.loc.shape[0] == 4
    nearest = torch.cdist(centres, path.best.loc).amin(-1)
    assert bool((nearest < 0.5).all())
    heights = [float(p.log_likelihood) for p in path.posteriors]
    assert heights == sorted(heights)


def test_a_promise_is_the_log_likelihood_of_the_mixture() -> None:
    old, new = torch.randn(20), torch.randn(3, 20)
    promised, share = _promise(old, new)
    for c in range(3):
        a = share[c]
        expected = ((1 - a) * old.exp() + a * new[c].exp()).log().sum()
        torch.testing.assert_close(promised[c], expected)
    grid = torch.linspace(0.001, 0.5, 200)
    best = torch.stack([((1 - a) * old.exp() + a * new[0].exp()).log().sum() for a in grid]).max()
    assert float(best - promised[0]) < 0.5


def test_parameters_are_counted() -> None:
    X, y = three_classes()
    posterior = engine(em).run(X, y)
    assert num_parameters(posterior) == 3 * 3 + 4 * (3 + 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda X, y: choose_alpha(engine(), X, y, multiples=(-1.0,)), "multiples="),
        (lambda X, y: choose_alpha(engine(), X, y, num_folds=1), "num_folds=1"),
        (lambda X, y: choose_alpha(engine(), X[:4], torch.tensor([0, 0, 1, 2])), r"class 1 with 1;"),
        (lambda X, y: average_networks(engine(), X, y, multiples=()), r"multiples=\(\)"),
        (lambda X, y: choose_alpha(engine(), X, y, multiples=5.0), "multiples=5.0; expected one or more"),
        (lambda X, y: choose_alpha(engine(), X, y, num_folds=91), "num_folds=91 for 90"),
        (lambda X, y: choose_alpha(engine(), X, y, multiples=(0.0, 1e9)), r"class \d would vanish"),
        (lambda X, y: choose_alpha(engine(), X, y, num_folds=3.0), "num_folds=3.0"),
        (lambda X, y: choose_alpha(engine(), X, y, score="error"), "score='error'"),
        (lambda X, y: choose_alpha(prbf(3, 3), X, y), r"engine is a PRBF; expected OverlapEM"),
        (lambda X, y: average_networks(prbf(3, 3), X, y), r"engine is a PRBF; expected OverlapEM"),
        (lambda X, y: add_kernels(prbf(3, 3), X, y, most=2), r"engine is a PRBF; expected OverlapEM"),
        (lambda X, y: add_kernels(engine(), X, y, most=0), "most=0"),
        (lambda X, y: add_kernels(engine(), X, y, most=2, num_candidates=0), "num_candidates=0"),
        (lambda X, y: add_kernels(OverlapEM(prbf(3, 3, sharing=Separate((1, 1, 1)))), X, y, most=3), "Separate"),
    ],
)
def test_settings_that_cannot_be_meant(call: object, message: str) -> None:
    X, y = three_classes()
    with pytest.raises(BadInput, match=message):
        call(X, y)  # type: ignore[operator]


def test_rows_without_label_are_left_out_of_the_choice() -> None:
    X, y = three_classes()
    more: Tensor = torch.cat([X, torch.full((5, 3), 40.0)])
    labels = torch.cat([y, torch.full((5,), -1)])
    a = choose_alpha(engine(), X, y, multiples=(0.0, 5.0))
    b = choose_alpha(engine(), more, labels, multiples=(0.0, 5.0))
    assert torch.equal(a.scores, b.scores)


def test_a_choice_carries_the_fit_that_it_chose() -> None:
    X, y = three_classes()
    found = choose_alpha(engine(), X, y, multiples=(0.0, 10.0))
    expected = engine(alpha=found.alpha).run(X, y)
    torch.testing.assert_close(found.posterior.log_proba(X), expected.log_proba(X))
    assert "\n" not in repr(found.posterior) and len(repr(found.posterior)) < 200
