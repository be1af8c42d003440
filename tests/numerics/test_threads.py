"""One thread for small fits, the caller's for large ones, and the caller's number as it was, whatever happens."""

import threading
from collections.abc import Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.numerics import linalg

CALLERS = 3
X = torch.linspace(-1.0, 1.0, 30, dtype=torch.float64).unsqueeze(-1)


@pytest.fixture(autouse=True)
def callers_threads() -> Iterator[None]:
    torch.set_num_threads(CALLERS)
    yield
    torch.set_num_threads(1)


class Model:
    """A regression that notes on how many threads it runs, and may raise."""

    def __init__(self, raises: bool = False) -> None:
        self.raises, self.seen = raises, list[int]()
        self.inside, self.leave = threading.Event(), threading.Event()

    def __call__(self, X: Tensor) -> None:
        self.seen.append(torch.get_num_threads())
        self.inside.set()
        self.leave.wait(60)
        if self.raises and len(self.seen) > 3:
            raise RuntimeError("mine")
        w = pyro.sample("w", dist.Normal(X.new_zeros(1), 1.0).to_event(1))
        with pyro.plate("rows", len(X)):
            pyro.sample("t", dist.Normal(X @ w, 0.5), obs=X[:, 0])


def fit(model: Model) -> Any:
    return LaplaceEvidence(model, stop=Stop(progress=False)).run(X)


def in_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize("raises", [False, True])
def test_a_small_fit_runs_on_one_thread(raises: bool) -> None:
    model = Model(raises)
    model.leave.set()
    if raises:
        with pytest.raises(ValueError, match="mine"):
            fit(model)
    else:
        fit(model)
    assert set(model.seen) == {1}
    assert torch.get_num_threads() == in_new_thread() == CALLERS


@pytest.mark.parametrize("limit", [linalg.PER_NUMBER * len(X), 2.0])
def test_a_large_fit_runs_on_the_callers(monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    """Its data are large, or a matrix is: from there on."""
    monkeypatch.setattr(linalg, "LARGE", limit)
    model = Model()
    model.leave.set()
    fit(model)
    assert model.seen[-1] == CALLERS
    assert torch.get_num_threads() == in_new_thread() == CALLERS


def test_other_threads_keep_their_number_while_one_fits() -> None:
    models = [Model(), Model()]
    found: list[Any] = []

    def work(model: Model) -> None:
        torch.set_num_threads(2)
        fit(model)
        found.append(torch.get_num_threads())

    workers = [threading.Thread(target=work, args=(model,)) for model in models]
    workers[0].start()
    models[0].inside.wait(60)
    assert torch.get_num_threads() == CALLERS and in_new_thread() == 2  # this one, and those that begin now
    torch.set_num_threads(4)
    assert in_new_thread() == 4
    workers[1].start()
    for model in models:
        model.leave.set()
    for worker in workers:
        worker.join(60)
    assert found == [2, 2] and set(models[0].seen + models[1].seen) == {1}
    assert torch.get_num_threads() == 4


def test_a_posterior_of_few_data_computes_on_one_thread() -> None:
    """Its summary and predictions call the model, too; each property gives the caller's number back."""
    model = Model()
    model.leave.set()
    posterior = fit(model)
    model.seen.clear()
    posterior.summary()
    posterior.predict(X)
    assert set(model.seen) == {1}
    assert torch.get_num_threads() == in_new_thread() == CALLERS


def test_predictions_of_many_data_run_on_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.leave.set()
    posterior = fit(model)
    monkeypatch.setattr(linalg, "LARGE", linalg.PER_NUMBER * len(X))
    posterior.predict(X)
    assert model.seen[-1] == CALLERS
    assert torch.get_num_threads() == in_new_thread() == CALLERS
