"""Data in chunks of rows: the same fit as of all rows at once, one chunk in memory at a time."""

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.utils.data import DataLoader, TensorDataset

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.infer.revm import REVM
from pyro_evidence.relevance.axis_priors import L1Prior
from pyro_evidence.relevance.eigen_state import score_centre
from pyro_evidence.relevance.quadratic import JaakkolaJordan, empirical_fisher, laplace_at_base
from pyro_evidence.relevance.weights import of_all_rows, weights_in_chunks
from tests.models_for_tests import weight_models as models
from tests.models_for_tests.weight_models import labels


def problem(N: int = 150, M: int = 6) -> tuple[Tensor, Tensor]:
    Phi = torch.randn(N, M, generator=torch.Generator().manual_seed(0))
    return Phi, labels(Phi, torch.tensor([2.0, -1.0, 0.5] + [0.0] * (M - 3)))


def chunks(Phi: Tensor, t: Tensor, size: int = 80) -> list[tuple[Tensor, ...]]:
    return list(zip(Phi.split(size), t.split(size), strict=True))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"prior": L1Prior()},
    {"centre": score_centre, "ridge": 3.0},
    {"approximation": empirical_fisher},
    {"ridge": 0.0},
    {"ridge": lambda weights, settings: 0.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ", ".join(s) or "default")
def test_chunks_give_the_fit_of_all_rows(settings: dict[str, Any]) -> None:
    Phi, t = problem()
    whole = REVM(models.logistic, **settings).run(Phi, t)
    parts = REVM(models.logistic, **settings).run_chunks(chunks(Phi, t))
    torch.testing.assert_close(parts.eigenvalues, whole.eigenvalues, rtol=1e-9, atol=0)
    torch.testing.assert_close(parts.wald, whole.wald, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(parts.weights["w"], whole.weights["w"], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(parts.log_evidence, whole.log_evidence, rtol=1e-9, atol=0)
    for a, b in zip(parts.predictor(Phi), whole.predictor(Phi), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("model", [models.softmax, models.poisson, models.gaussian])
def test_any_likelihood(model: Any) -> None:
    Phi, t = problem()
    if model is models.softmax:
        t = t.long() + (Phi[:, 3] > 0.3).long()
    whole, parts = REVM(model).run(Phi, t), REVM(model).run_chunks(chunks(Phi, t))
    torch.testing.assert_close(parts.weights["w"], whole.weights["w"], rtol=1e-7, atol=1e-9)


def test_a_data_loader_is_a_way_to_give_chunks() -> None:
    Phi, t = problem()
    found = REVM(models.logistic).run_chunks(DataLoader(TensorDataset(Phi, t), batch_size=64))
    torch.testing.assert_close(found.weights["w"], REVM(models.logistic).run(Phi, t).weights["w"])


class Counted:
    """Chunks that count how often they are gone through."""

    def __init__(self, Phi: Tensor, t: Tensor) -> None:
        self.chunks, self.passes, self.read = chunks(Phi, t), 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        self.passes += 1
        for chunk in self.chunks:
            self.read += 1
            yield chunk


def test_the_log_evidence_comes_from_the_last_pass_of_the_fit() -> None:
    counted = Counted(*problem())
    posterior = REVM(models.logistic).run_chunks(counted)
    passes = counted.passes
    assert float(posterior.log_evidence) < 0.0
    assert float(posterior.state.null_log_likelihood) == pytest.approx(-150.0 * math.log(2.0))
    assert counted.passes == passes <= 14
    assert counted.read == 2 * (passes - 1) + 1  # first a look at the first chunk


def test_one_pass_gives_value_gradient_and_gram_matrix() -> None:
    Phi, t = problem()
    counted = Counted(Phi, t)
    target = of_all_rows(weights_in_chunks(models.logistic, "w", counted)).target
    y, passes = torch.randn(6), counted.passes
    (value,), (gradient,) = target.gradient(y.unsqueeze(0))
    (precision,) = target.precision(y.unsqueeze(0))
    at_both = target.value(torch.stack([y, torch.zeros(6)]))
    assert counted.passes == passes + 1
    s = torch.sigmoid(Phi @ y)
    torch.testing.assert_close(precision, Phi.T @ ((s * (1.0 - s))[:, None] * Phi))
    torch.testing.assert_close(gradient, Phi.T @ (t - s))
    torch.testing.assert_close(at_both, torch.stack([value, torch.tensor(-150.0 * math.log(2.0))]))
    torch.testing.assert_close(value, dist.Bernoulli(logits=Phi @ y).log_prob(t).sum())


def test_a_chunk_that_was_checked_is_read_in_two_runs_of_the_model() -> None:
    runs: list[int] = []

    def counting(Phi: Tensor, t: Tensor) -> Tensor:
        runs.append(len(Phi))
        return models.logistic(Phi, t)

    target = of_all_rows(weights_in_chunks(counting, "w", chunks(*problem()))).target
    target.value(torch.ones(1, 6))
    checked = len(runs)
    runs.clear()
    target.value(torch.zeros(1, 6))
    assert len(runs) == 4 < checked / 4  # each chunk for its Jacobian and for its constants


def test_params_are_those_of_the_first_chunk_in_every_pass() -> None:
    """An initial value may depend on the data; chunks of one data set still share one param."""

    def noisy(Phi: Tensor, t: Tensor) -> None:
        scale = pyro.param("scale", t.std(), constraint=constraints.positive)
        w = models.weights(Phi.shape[1], Phi)
        with pyro.plate("data", len(Phi)):
            pyro.sample("t", dist.Normal(Phi @ w, scale), obs=t)

    Phi, _ = problem()
    t = torch.arange(150.0).square()
    posterior = REVM(noisy).run_chunks(chunks(Phi, t))
    scale = t[:80].std()
    torch.testing.assert_close(posterior.hyperparameters["scale"], scale)
    gram = laplace_at_base(posterior.of.target, 1e-2, posterior.state.base).gram
    torch.testing.assert_close(gram, Phi.T @ Phi / scale.square())


def test_a_chunk_that_changes_its_size_is_checked_anew() -> None:
    Phi, t = problem()

    class Different:
        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
            self.passes += 1
            yield from chunks(Phi, t, size=60 + 10 * (self.passes % 3))

    found = REVM(models.logistic).run_chunks(Different())
    torch.testing.assert_close(found.weights["w"], REVM(models.logistic).run(Phi, t).weights["w"])


def test_chunks_are_let_go() -> None:
    """Rows are made when they are asked for; of a pass over seven chunks no more than a few are alive at its end."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Made:
        def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
            for seed in range(7):
                Phi = torch.randn(50, 6, generator=torch.Generator().manual_seed(seed))
                made.append(weakref.ref(Phi))
                yield Phi, labels(Phi, torch.linspace(-1.0, 1.0, 6), seed)
            if len(alive) < 2:
                gc.collect()
                alive.append(sum(r() is not None for r in made))

    REVM(models.logistic).run_chunks(Made())
    assert max(alive) <= 4  # the last of the pass, and an example that is kept for the posterior


def test_what_needs_the_training_data_says_so() -> None:
    Phi, t = problem()
    posterior = REVM(models.logistic).run_chunks(chunks(Phi, t))
    assert posterior.diagnostics()["status"] == "converged"
    assert posterior.get_samples(5, seed=0)["w"].shape == (5, 6)
    assert posterior.log_prob(Phi[:7], t[:7]).shape == (7,)
    for use in (lambda: posterior.guide, posterior.predictor, posterior.log_prob, lambda: posterior.save("p")):
        with pytest.raises(BadInput, match="data of the fit, which came in chunks"):
            use()


# Bad input


def test_chunks_that_cannot_be_gone_through_again_are_refused() -> None:
    Phi, t = problem()
    with pytest.raises(BadInput, match="zip, which can be gone through only once; expected a list, a DataLoader"):
        REVM(models.logistic).run_chunks(zip(Phi.split(40), t.split(40), strict=True))
    with pytest.raises(BadInput, match="the chunks hold no rows"):
        REVM(models.logistic).run_chunks([])
    with pytest.raises(BadInput, match="chunk 0 is a Tensor; expected a tuple"):
        REVM(models.logistic).run_chunks([Phi])  # type: ignore[list-item]
    with pytest.raises(BadInput, match=r"chunk 1 is .*\(., 5\) float64.*expected the same"):
        REVM(models.logistic).run_chunks([(Phi, t), (Phi[:, :5], t)])


def test_what_cannot_be_summed_is_refused() -> None:
    Phi, t = problem()
    with pytest.raises(UnsupportedModel, match="no latent sites besides the weights"):
        REVM(models.with_offset, site="w").run_chunks(chunks(Phi, t))
    with pytest.raises(UnsupportedModel, match="the data come in chunks"):
        REVM(models.logistic, approximation=JaakkolaJordan()).run_chunks(chunks(Phi, t))


def test_a_bad_row_in_a_later_chunk_is_named() -> None:
    Phi, t = problem()
    Phi[100, 2] = torch.nan
    with pytest.raises(BadInput, match="1 nan"):
        REVM(models.logistic).run_chunks(chunks(Phi, t))
