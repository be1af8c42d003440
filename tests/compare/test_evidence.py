"""Bayes factors against closed forms; refusals."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, LaplaceEvidence, Start, compare_evidence
from pyro_evidence.compare.evidence import EvidenceComparison, Row
from pyro_evidence.evidence_check import EvidenceEstimate
from tests.models_for_tests.engine_models import linear, logistic_shared, targets
from tests.models_for_tests.exact_models import straight, two_normals, two_normals_data


def constant(X: Tensor, y: Tensor) -> None:
    """The same noise, no slope: one mean of prior sd 1."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("target", dist.Normal(mean, 0.5), obs=y)


def evidence(y: Tensor, design: Tensor) -> float:
    """Oracle: the multivariate normal of the targets, prior precision 1, noise sd 0.5."""
    covariance = 0.25 * torch.eye(len(y)) + design @ design.T
    return float(dist.MultivariateNormal(torch.zeros(len(y)), covariance).log_prob(y))


def test_bayes_factor_and_probabilities_of_two_linear_models() -> None:
    X, y = targets(num=8, noise=2.0)
    X, y = X[:, :2], 0.2 * y
    found = compare_evidence(
        slope=LaplaceEvidence(straight, maximise=()).run(X, y),
        flat=LaplaceEvidence(constant, maximise=()).run(X, y),
    )
    expected = evidence(y, X) - evidence(y, torch.ones(8, 1))
    factor, error = found.log_bayes_factor("slope", "flat")
    assert factor == pytest.approx(expected, abs=1e-9)
    assert error < 1e-9
    assert found.probabilities["slope"] == pytest.approx(1.0 / (1.0 + math.exp(-expected)), abs=1e-9)
    assert found.rows[0].log_evidence >= found.rows[1].log_evidence
    assert "flat" in str(found)


def test_prior_odds_multiply() -> None:
    X, y = targets(num=8)
    a = LaplaceEvidence(straight, maximise=()).run(X, y)
    found = compare_evidence(a=a, b=a, prior={"a": 3.0})
    assert found.probabilities == pytest.approx({"a": 0.75, "b": 0.25})


def test_no_overflow_at_ten_thousand_nats() -> None:
    X, y = targets(num=8)
    a = LaplaceEvidence(straight, maximise=()).run(X, y)
    far = EvidenceEstimate("by hand", float(a.log_evidence) - 1e4, 0.1, {})
    found = compare_evidence(a=a, b=a, estimates={"b": far})
    assert found.probabilities == {"a": 1.0, "b": 0.0}
    assert found.log_bayes_factor("a", "b") == pytest.approx((1e4, 0.1), rel=1e-9)


def test_different_data_are_refused_unless_told_otherwise() -> None:
    X, y = targets(num=8)
    a, b = (LaplaceEvidence(straight, maximise=()).run(X, t) for t in (y, y + 1.0))
    with pytest.raises(BadInput, match=r"different data: a observes 'y' \(8,\), hash"):
        compare_evidence(a=a, b=b)
    assert "different data" in compare_evidence(a=a, b=b, throw=False).doubts[0]


@pytest.mark.parametrize("weigh", [partial(poutine.scale, scale=0.5), partial(poutine.mask, mask=torch.arange(8) < 6)])
def test_data_that_count_otherwise_are_different_data(weigh: Callable[..., Any]) -> None:
    X, y = targets(num=8)
    a, b = (LaplaceEvidence(model, maximise=()).run(X, y) for model in (straight, weigh(straight)))
    with pytest.raises(BadInput, match="different data"):
        compare_evidence(a=a, b=b)


def test_other_name_and_precision_of_the_site_are_the_same_data() -> None:
    X, y = targets(num=8)
    y = y.float().double()
    a = LaplaceEvidence(straight, maximise=()).run(X, y)
    b = LaplaceEvidence(constant, maximise=()).run(X.float(), y.float())
    assert not compare_evidence(a=a, b=b).doubts


def test_bad_pareto_k_is_refused() -> None:
    from tests.evidence_check.test_evidence_check import ridge

    bad = LaplaceEvidence(ridge, maximise=(), start=Start(tour=0)).run(torch.tensor(2.0))
    with pytest.raises(BadInput, match="k-hat is"):
        compare_evidence(a=bad, b=bad)
    found = compare_evidence(a=bad, b=bad, throw=False)
    assert "k-hat is" in str(found)


def test_hyperparameters_and_labels_are_listed_beside() -> None:
    x = two_normals_data(6.0)
    mixture = LaplaceEvidence(two_normals, maximise=(), start=Start(restarts=2, tour=0)).run(x)
    row = compare_evidence(a=mixture, b=mixture).rows[0]
    assert row.log_labels == pytest.approx(math.log(2.0))
    both = LaplaceEvidence(two_normals, maximise=()).run(x)
    assert compare_evidence(a=both, b=both).rows[0].log_labels == 0.0  # they are counted
    assert row.num_hyperparameters == 0
    X, y = targets()
    learned = LaplaceEvidence(linear).run(X, y)
    assert compare_evidence(a=learned, b=learned).rows[0].num_hyperparameters == 2


def test_letters() -> None:
    X, y = targets(num=8)
    a = LaplaceEvidence(straight, maximise=()).run(X, y)
    with pytest.raises(BadInput, match="expected at least two"):
        compare_evidence(a=a)
    with pytest.raises(BadInput, match=r"\['c'\] name no posterior"):
        compare_evidence(a=a, b=a, prior={"c": 1.0})
    with pytest.raises(BadInput, match="'b': 'float'"):
        compare_evidence(a=a, b=1.0)  # type: ignore[arg-type]
    for prior in (-1.0, 0.0, math.nan, "much"):
        with pytest.raises(BadInput, match="expected finite numbers above 0"):
            compare_evidence(a=a, b=a, prior={"a": prior})  # type: ignore[dict-item]
    with pytest.raises(BadInput, match=r"estimates are {'a': 'float'}; expected what bridge_sampling"):
        compare_evidence(a=a, b=a, estimates={"a": -3.0})  # type: ignore[dict-item]
    with pytest.raises(BadInput, match="no model 'z'"):
        compare_evidence(a=a, b=a).log_bayes_factor("a", "z")


def test_classes_and_numbers_are_different_data() -> None:
    X, y = targets()
    a = LaplaceEvidence(linear, maximise=()).run(X, y)
    b = LaplaceEvidence(logistic_shared, maximise=()).run(X, (y > 0).double())
    with pytest.raises(BadInput, match=r"a observes 'y' .*; b observes 't'"):
        compare_evidence(a=a, b=b)


def by_hand(name: str, log_evidence: float, hypers: int, probability: float) -> Row:
    return Row(name, log_evidence, 0.0, log_evidence, probability, hypers, 0.0, ())


def test_a_lead_that_hyperparameters_may_have_made_is_called_open() -> None:
    rows = by_hand("many", -10.0, 5, 0.95), by_hand("few", -13.0, 1, 0.05)
    assert "many leads few by 3.00 nats and has 4 more maximised hyperparameters" in str(EvidenceComparison(rows, ()))
    far = by_hand("many", -10.0, 5, 0.99), by_hand("few", -15.0, 1, 0.01)
    assert EvidenceComparison(far, ()).notes == []


def test_certainty_is_among_the_models_only() -> None:
    found = EvidenceComparison((by_hand("a", -10.0, 0, 1.0), by_hand("b", -30.0, 0, 0.0)), ())
    assert "a probability of 1.0000 is among these models only" in str(found)
    table = found.to_pandas()
    assert table.loc["b", "log evidence"] == -30.0 and "<table>" in found._repr_html_()


def test_the_picture_shows_how_far_each_lies_behind() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    rows = [Row(n, v, 0.1, v, p, 1, 0.0, ()) for n, v, p in (("best", -10.0, 0.9), ("other", -12.5, 0.1))]
    figure, axes = plt.subplots()
    EvidenceComparison(tuple(rows), ()).plot(axes)
    (points,) = axes.lines
    assert points.get_xdata().tolist() == [0.0, -2.5] and "against best, nats" in axes.get_xlabel()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["best", "other"]
    plt.close(figure)


def test_pruned_precisions_are_not_counted() -> None:
    torch.manual_seed(0)
    X = torch.randn(60, 12)
    posterior = LaplaceEvidence(relevance).run(X, 2.0 * X[:, 0] + 0.5 * torch.randn(60))
    alive = int(posterior.hyperparameters["alpha"].isfinite().sum())
    assert 1 <= alive < 12
    assert compare_evidence(a=posterior, b=posterior).rows[0].num_hyperparameters == alive


def relevance(X: Tensor, t: Tensor) -> None:
    alpha = pyro.param("alpha", X.new_ones(X.shape[-1]), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)


def of_scale(name: str, kind: str) -> Any:
    """Twenty data about zero, whose scale is a param or a site of some name."""
    t = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def model() -> None:
        m = pyro.sample("m", dist.Normal(t.new_zeros(()), 1.0))
        if kind == "param":
            scale = pyro.param(name, t.new_ones(()), constraint=constraints.positive)
        else:
            scale = pyro.sample(name, dist.LogNormal(t.new_zeros(()), 1.0))
        with pyro.plate("data", 20):
            pyro.sample("t", dist.Normal(m, scale), obs=t)

    return LaplaceEvidence(model).run()


@pytest.mark.parametrize("other", ["scale", "sigma"], ids=["of one name", "of another name"])
def test_a_scale_maximised_here_and_integrated_there_is_refused(other: str) -> None:
    fits = {"maximised": of_scale("scale", "param"), "integrated": of_scale(other, "site")}
    with pytest.raises(BadInput, match=r"'scale' is maximised in maximised and .*integrated in integr"):
        compare_evidence(**fits)
    found = compare_evidence(**fits, throw=False)
    assert "no odds of the models" in str(found)
    assert len(compare_evidence(a=fits["maximised"], b=fits["maximised"]).rows) == 2


@pytest.mark.parametrize("flat", ["ImproperUniform", "mask", "inner mask"])
def test_a_flat_prior_is_refused_and_said(flat: str) -> None:
    def model(t: Tensor) -> None:
        prior: Any = dist.Normal(t.new_zeros(1), 1.0).to_event(1)
        if flat == "ImproperUniform":
            prior = dist.ImproperUniform(constraints.real_vector, (), (1,))
        elif flat == "inner mask":
            prior = dist.Normal(t.new_zeros(1), 1.0).mask(False).to_event(1)
        with pyro.poutine.mask(mask=flat != "mask"):
            m = pyro.sample("m", prior)
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(m, 1.0), obs=t)

    posterior = LaplaceEvidence(model).run(torch.arange(5.0, dtype=torch.float64))
    with pytest.raises(BadInput, match="a has a flat prior for m, which has no integral"):
        compare_evidence(a=posterior, b=posterior)
    assert "b has a flat prior" in str(compare_evidence(a=posterior, b=posterior, throw=False))


def vague(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, torch.tensor(6.0, dtype=torch.float64)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def centred(y: Tensor) -> None:
    """The same without a mean, and with a latent site that says nothing of it."""
    aside = pyro.sample("aside", dist.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0 * aside, 1.0), obs=y)


@pytest.mark.parametrize(("shift", "said"), [(0.53, True), (0.0, False), (3.0, False)])
def test_a_lead_that_half_a_prior_scale_overturns_is_said(shift: float, said: bool) -> None:
    y = shift + torch.tensor([-1.0, 0.4, 0.9, -0.3] * 5, dtype=torch.float64)
    found = compare_evidence(vague=LaplaceEvidence(vague).run(y), centred=LaplaceEvidence(centred).run(y))
    lead = found.rows[0].log_evidence - found.rows[1].log_evidence
    variances = 1.0 / 20.0 + torch.tensor([36.0, 9.0, 144.0], dtype=torch.float64)  # of the mean of the data
    here, half, twice = dist.Normal(0.0, variances.sqrt()).log_prob(y.mean()).tolist()
    change = (half if found.rows[0].name == "centred" else -twice) - (
        here if found.rows[0].name == "centred" else -here
    )
    assert (change > lead) is said
    assert bool(found.by_priors) is said
    if said:
        assert f"would lead by {change - lead:.2g} nats" in str(found)
