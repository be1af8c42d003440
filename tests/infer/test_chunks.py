"""Data in chunks of rows: the same fit as of all rows at once, one chunk in memory at a time."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pyro_evidence.axis_priors import LaplacePrior
from pyro_evidence.eigen_state import score_centre
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.infer.revm import REVM
from pyro_evidence.quadratic import JaakkolaJordan, empirical_fisher
from tests.infer import weight_models as models
from tests.infer.weight_models import labels


def problem(N: int = 150, M: int = 6) -> tuple[Tensor, Tensor]:
    Phi = torch.randn(N, M, generator=torch.Generator().manual_seed(0))
    return Phi, labels(Phi, torch.tensor([2.0, -1.0, 0.5] + [0.0] * (M - 3)))


def chunks(Phi: Tensor, t: Tensor, size: int = 80) -> list[tuple[Tensor, ...]]:
    return list(zip(Phi.split(size), t.split(size), strict=True))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"prior": LaplacePrior()},
    {"centre": score_centre, "ridge": 3.0},
    {"approximation": empirical_fisher},
    {"ridge": 0.0},
    {"ridge": lambda weights, recipe: 0.3},
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


def test_each_newton_step_is_one_pass_and_each_pass_reads_every_chunk_once() -> None:
    Phi, t = problem()

    class Counted:
        def __init__(self) -> None:
            self.passes, self.read = 0, 0

        def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
            self.passes += 1
            for chunk in chunks(Phi, t):
                self.read += 1
                yield chunk

    counted = Counted()
    posterior = REVM(models.logistic).run_chunks(counted)
    assert float(posterior.log_evidence) < 0.0
    assert counted.passes <= 18
    assert counted.read <= 2 * counted.passes


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
        with pytest.raises(BadInput, match="training data, which came in chunks"):
            use()


# Bad input


def test_chunks_that_cannot_be_gone_through_again_are_refused() -> None:
    Phi, t = problem()
    with pytest.raises(BadInput, match="zip, which can be gone through only once; expected a list, a DataLoader"):
        REVM(models.logistic).run_chunks(zip(Phi.split(40), t.split(40), strict=True))
    with pytest.raises(BadInput, match="there are no chunks"):
        REVM(models.logistic).run_chunks([])
    with pytest.raises(BadInput, match="chunk 0 is a Tensor; expected a tuple"):
        REVM(models.logistic).run_chunks([Phi])  # type: ignore[list-item]
    with pytest.raises(BadInput, match="chunk 1 has 5 weights and the first 6"):
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
