"""The pieces of benchmarks/papers/husmeier2000.py whose numbers are told, on problems small enough for a test."""

import json
import math
from functools import partial
from pathlib import Path

import husmeier2000
import husmeier2000_series
import pytest
import torch
from results import Results

from pyro_evidence import Start, datasets
from pyro_evidence.mixture import RandomWeights, Unregularised, corrected
from pyro_evidence.mixture.expectation import natural_parameters

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def test_matched_pairs() -> None:
    """By hand: differences 1, 2, 3 have mean 2 and standard deviation 1."""
    assert husmeier2000.matched_t([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx(2.0 * math.sqrt(3.0))


def test_a_result_is_computed_once_and_kept(tmp_path: Path) -> None:
    calls = []
    for _ in range(2):
        cache = Results[dict[str, str]](tmp_path / "cache" / "results.jsonl")
        for key in "ab":
            cache.get(key, lambda key=key: calls.append(key) or {"value": key})
    assert calls == ["a", "b"]
    assert json.loads(cache.path.read_text().splitlines()[1]) == {"key": "b", "value": {"value": "b"}}


def test_early_stopping_takes_the_best_round_and_the_others_the_twentieth() -> None:
    def curves(scale: float) -> dict[str, list[tuple[int, list[float]]]]:
        rounds = [[abs(n - best) * scale + seed for n in range(61)] for seed, best in ((0.0, 10), (0.5, 12), (0.25, 5))]
        return {measure: [(5, curve) for curve in rounds] for measure in husmeier2000.MEASURES}

    runs = {"plain EM": curves(1.0), "ours": curves(0.25)}
    late = husmeier2000.matched_t([10.0, 8.5, 15.25], [2.5, 2.5, 4.0])
    best = husmeier2000.matched_t([0.0, 0.5, 0.25], [2.5, 2.5, 4.0])
    assert husmeier2000.t_statistics(runs, "ours", early=False) == pytest.approx([late] * 3)
    assert husmeier2000.t_statistics(runs, "ours", early=True) == pytest.approx([best] * 3)


def test_networks_start_as_the_paper_says() -> None:
    nets = husmeier2000_series.networks(0, husmeier2000_series.hidden_units)
    assert nets.start.w.shape == (80, 10, 1, 11)
    assert nets.train.Y.shape == (80, 200, 1) and nets.test.Y.shape == (80, 1000, 1)
    spread = nets.start.w.reshape(4, 4, -1).std(-1)
    torch.testing.assert_close(spread, torch.tensor([0.1, 0.25, 0.5, 1.0]).expand(4, 4), rtol=0.1, atol=0.0)
    assert bool((nets.train.G[..., -1] == 1).all())
    assert bool((nets.start.noise == 1).all())


def test_committee_is_never_worse_than_its_mean_member() -> None:
    """Jensen's inequality; a committee of one, or of twins, is its member."""
    log_density = torch.randn(5, 30)
    assert husmeier2000_series.committee(log_density) < -float(log_density.mean())
    for num in (1, 2):
        twins = log_density[:1].expand(num, -1)
        assert husmeier2000_series.committee(twins) == pytest.approx(-float(log_density[0].mean()))


def test_evolution_is_plain_em_during_the_warm_up() -> None:
    nets = husmeier2000_series.networks(0, husmeier2000_series.cubic)
    plain = husmeier2000_series.evolution(Unregularised(), 0, nets, 3)
    warm = husmeier2000_series.evolution(corrected, 2, nets, 3)
    assert warm["mean"][:2] == plain["mean"][:2]
    assert warm["mean"][2] != plain["mean"][2]
    assert all(best < average for best, average in zip(warm["best"], warm["mean"], strict=True))


def test_density_of_many_networks_is_that_of_each_by_hand() -> None:
    """So many that the products of their basis functions are not kept."""
    nets = husmeier2000_series.networks(0, husmeier2000_series.hidden_units)
    assert nets.test.features is None
    G, at = nets.test.G[3], nets.start
    normal = torch.distributions.Normal(G @ at.w[3, :, 0].mT, 1.0)
    by_hand = (normal.log_prob(nets.test.Y[3]) - math.log(10.0)).logsumexp(-1)
    columns = nets.test.columns(natural_parameters(at, nets.test.layout).shape[-1])
    assert_exact(husmeier2000_series.log_density(nets.test, columns, at)[3], by_hand)
    assert husmeier2000_series.evolution(Unregularised(), 0, nets, 1)["singular"] == 0


def test_bayes_limit_is_below_what_a_network_reaches() -> None:
    nets = husmeier2000_series.networks(0, husmeier2000_series.cubic)
    assert husmeier2000_series.bayes_limit(0) < min(husmeier2000_series.evolution(corrected, 5, nets, 10)["best"])


def test_error_of_the_classifier_is_the_one_of_its_densities() -> None:
    """One component per class with no prior to speak of: a Gaussian classifier, by hand."""
    train, test = datasets.train_test_split(datasets.breast_cancer(), fraction=0.5, seed=0)
    parts = [(part.X[:, :2], part.t) for part in (train, test)]
    kept = (parts[0][1] == 1) | (torch.arange(len(parts[0][1])) % 8 == 0)  # few of class 0, so that shares matter
    parts[0] = parts[0][0][kept], parts[0][1][kept]
    problem = husmeier2000.Problem(parts[0], parts[1], 1)
    found = husmeier2000.density_run(problem, "plain EM", (Start(restarts=1), RandomWeights(warm_up=0)), 1)
    (X, t), (Z, labels) = parts
    log_joint = []
    for c in (0, 1):
        own = X[t == c]
        normal = torch.distributions.Normal(own.mean(0), own.std(0, correction=0))
        density = normal.log_prob(Z).sum(-1)
        assert found[f"E{c + 1}"][0][60] == pytest.approx(-float(density[labels == c].mean()))
        log_joint.append(density + math.log(len(own) / len(X)))
    wrong = (log_joint[1] > log_joint[0]).to(labels) != labels
    assert found["error"][0][60] == pytest.approx(100.0 * float(wrong.double().mean()))
