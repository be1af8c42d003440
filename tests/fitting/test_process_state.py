"""Fits in several threads: the numbers of one thread, and everything global as it was."""

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import sympy  # noqa: F401, which torch imports late, and which adds a filter of warnings
import torch
from pyro.infer.util import is_validation_enabled
from pyro.poutine import runtime
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import REVM, RVM, EvidenceEM, LaplaceEvidence, Stop, compare
from pyro_evidence.fitting import process_state
from pyro_evidence.fitting.iterate import iterate
from pyro_evidence.models.basis import Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture

QUIET = Stop(progress=False)


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    return X, X[:, 0] + 0.5 * torch.randn(30, generator=generator, dtype=torch.float64)


def linear(X: Tensor, t: Tensor | None = None) -> None:
    alpha = pyro.param("alpha", X.new_ones(()), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)


def laplace(X: Tensor, t: Tensor) -> list[Tensor]:
    posterior = LaplaceEvidence(linear, stop=QUIET).run(X, t)
    return [posterior.log_evidence, posterior.get_samples(3, seed=1)["w"], posterior.log_weights(5)]


def relevance(X: Tensor, t: Tensor) -> list[Tensor]:
    fast, eigen = (engine(classifier(Polynomial(1))).run(X, (t > 0).double()) for engine in (RVM, REVM))
    return [fast.log_evidence, fast.get_samples(3, seed=1)["w"], eigen.predict(X)]


def mixture(X: Tensor, t: Tensor) -> list[Tensor]:
    posterior = EvidenceEM(gaussian_mixture(2), stop=Stop(num_steps=5, tolerance=0.0, progress=False)).run(X)
    return [posterior.log_evidence, posterior.log_prob(X)]


FITS: list[Callable[[Tensor, Tensor], list[Tensor]]] = [laplace, relevance, mixture]


def everything_global() -> list[Any]:
    store = {n: v.tolist() for n, v in pyro.get_param_store().items()}
    state = torch.get_rng_state().tolist()
    return [store, state, is_validation_enabled(), list(warnings.filters), list(runtime._PYRO_STACK)]


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Results of jobs, every second one in a thread of its own."""
    found: list[Any] = [None] * len(jobs)

    def work(numbers: range) -> None:
        for i in numbers:
            try:
                found[i] = jobs[i]()
            except Exception as error:
                found[i] = error

    workers = [threading.Thread(target=work, args=(range(k, len(jobs), 2),)) for k in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    return found


def test_two_threads_find_what_one_finds() -> None:
    pyro.param("mine", torch.tensor(3.0))
    jobs = [lambda fit=fit, i=i: fit(*data(i)) for i in range(4) for fit in FITS]
    expected, before = [job() for job in jobs], everything_global()
    found = in_threads(jobs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)
    assert everything_global() == before


def test_one_engine_in_two_threads_fits_one_after_the_other() -> None:
    engine = LaplaceEvidence(linear, stop=QUIET)
    expected = [LaplaceEvidence(linear, stop=QUIET).run(*data(i)).log_evidence for i in range(6)]
    found = in_threads([lambda i=i: engine.run(*data(i)).log_evidence for i in range(6)])
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize(
    "context",
    [
        process_state.global_lock,
        process_state.without_validation,
        process_state.own_random_numbers,
        process_state.empty_store,
        process_state.without_validation_or_params,
        lambda: process_state.own_warnings("ignore"),
    ],
)
def test_a_thread_waits_for_another(context) -> None:
    inside, leave, done = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with context():
            inside.set()
            leave.wait(60)

    def second() -> None:
        with context():
            done.set()

    workers = [threading.Thread(target=work) for work in (first, second)]
    workers[0].start()
    inside.wait(60)
    workers[1].start()
    assert not done.wait(0.05)
    leave.set()
    assert done.wait(60)
    for worker in workers:
        worker.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with process_state.global_lock():
            inside.set()
            leave.wait(60)

    worker = threading.Thread(target=hold)
    worker.start()
    inside.wait(60)
    child = os.fork()
    if child == 0:
        with process_state.global_lock():
            os._exit(7)
    leave.set()
    worker.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_compare_leaves_no_param_behind() -> None:
    pyro.param("mine", torch.tensor(3.0))  # so that the model is asked which params are its own
    before = everything_global()
    compare(linear, *data(0), engines={n: LaplaceEvidence(linear, stop=QUIET) for n in ("a", "b")})
    assert everything_global() == before


def test_an_interrupt_amid_a_plate_leaves_no_plate_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Control-C does when it comes after Pyro has given a plate its dimension and before anyone can take it back."""
    X, t = data(0)
    expected = LaplaceEvidence(linear, stop=QUIET).run(X, t).log_evidence
    allocate, calls = runtime._DIM_ALLOCATOR.allocate, []

    def interrupted(*args: Any) -> int:
        found = allocate(*args)
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(runtime._DIM_ALLOCATOR, "allocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            LaplaceEvidence(linear, stop=QUIET).run(X, t)
    assert runtime._DIM_ALLOCATOR._stack == [] and runtime._PYRO_STACK == []
    assert torch.equal(LaplaceEvidence(linear, stop=QUIET).run(X, t).log_evidence, expected)


def test_plates_around_a_fit_stay_when_it_fails() -> None:
    with pyro.plate("around", 2), pytest.raises(KeyError), process_state.global_lock():
        with pyro.plate("inside", 3):
            raise KeyError("mine")
    assert runtime._DIM_ALLOCATOR._stack == []


def test_an_interrupt_amid_the_switch_leaves_validation_as_it_was() -> None:
    before = is_validation_enabled()
    with pytest.raises(KeyboardInterrupt), process_state.global_lock():
        pyro.enable_validation(not before)  # as where its context is left before it could put it back
        raise KeyboardInterrupt
    assert is_validation_enabled() is before


def test_an_interrupt_amid_the_switch_of_gradients_leaves_them_on() -> None:
    with pytest.raises(KeyboardInterrupt), process_state.global_lock():
        torch.set_grad_enabled(False)  # as where torch.no_grad is left before it could put it back
        raise KeyboardInterrupt
    on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert on


def test_an_interrupt_that_a_loop_keeps_to_itself_leaves_no_plate_either() -> None:
    """The last good state is kept, and what follows in the same fit runs the model again."""

    class State:
        objective, gradient_norm = 0.0, 1.0

    def step(_: State) -> State:
        runtime._DIM_ALLOCATOR.allocate("rows", None)
        raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        iterate(step, State(), QUIET, "test")
    assert runtime._DIM_ALLOCATOR._stack == []
