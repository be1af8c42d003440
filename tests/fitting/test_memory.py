"""Memory that cannot be had is an error message with the bytes, whoever asked for it."""

import pickle
import subprocess
import sys
from functools import cached_property

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, LaplaceEvidence, TooLarge, compare
from pyro_evidence.fitting.process_state import bytes_asked, entry_point
from tests.installed import before

HUGE = 2**57  # numbers; no machine has room for them


def linear(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 1.0), obs=t)


def hungry(X: Tensor, t: Tensor | None = None) -> None:
    linear(X + X.new_empty(HUGE)[:1], t)


def hungry_far(X: Tensor, t: Tensor | None = None) -> None:
    """Where it is first run it is modest."""
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), 1.0).to_event(1))
    if float(w.detach().abs().max()) > 0.0:
        X.new_empty(HUGE)
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 1.0), obs=t)


def data() -> tuple[Tensor, Tensor]:
    X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return X, X.sum(-1)


@pytest.mark.parametrize(
    "said, asked",
    [
        ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
         "allocate 8000000000 bytes. Error code 12 (Cannot allocate memory)", 8_000_000_000),
        ("CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of", 22_011_707_392),
        ("Unable to allocate 1.00 TiB for an array with shape (1, 2) and data type float64", 2**40),
        ("HIP out of memory. Tried to allocate 512.00 MiB", 2**29),
        ("The size of tensor a (3) must match the size of tensor b (4)", None),
    ],
)  # fmt: skip
def test_bytes_are_read_from_what_torch_and_numpy_say(said, asked) -> None:
    assert bytes_asked(RuntimeError(said)) == asked == bytes_asked(MemoryError(said))
    assert bytes_asked(ValueError(said)) is None


@pytest.mark.parametrize("engine", [LaplaceEvidence, RVM, REVM])
@pytest.mark.parametrize("model", [hungry, hungry_far])
def test_a_model_that_asks_for_too_much(engine, model) -> None:
    with pytest.raises(TooLarge, match=rf"^{8 * HUGE:,} bytes were asked for.*expected room.*num_samples=") as error:
        engine(model).run(*data())
    assert bytes_asked(error.value.__cause__ or error.value) or error.value.__cause__ is not None


def test_another_error_of_the_model_is_what_it_was() -> None:
    def forgetful(X: Tensor, t: Tensor) -> None:
        raise MemoryError("mine")

    with pytest.raises(MemoryError, match=r"^mine$") as error:
        LaplaceEvidence(forgetful).run(*data())
    assert not isinstance(error.value, TooLarge)


def test_draws_are_refused_before_they_are_made() -> None:
    for posterior in (LaplaceEvidence(linear).run(*data()), REVM(linear).run(*data())):
        with pytest.raises(TooLarge, match=r"draws of [0-9]+ coordinates needs [0-9,]{14,} bytes.*fewer at a time"):
            posterior.get_samples(10**13)
        with pytest.raises(TooLarge, match="draws of"):
            posterior.predict(data()[0], num_samples=10**13)


def test_a_comparison_says_it_in_the_row() -> None:
    found = compare(linear, *data(), engines={"a": LaplaceEvidence(hungry), "b": LaplaceEvidence(linear)})
    assert f"TooLarge: {8 * HUGE:,} bytes" in found.runs["a"].failure


@entry_point
class Wide:
    """One of each kind of member."""

    def method(self) -> Tensor:
        return torch.empty(HUGE)

    @property
    def property(self) -> Tensor:
        return torch.empty(HUGE)

    @cached_property
    def cached(self) -> Tensor:
        return torch.empty(HUGE)


def test_every_public_member_and_none_that_works_is_changed() -> None:
    for ask in (lambda: Wide().method(), lambda: Wide().property, lambda: Wide().cached, entry_point(torch.empty)):
        with pytest.raises(TooLarge):
            ask(HUGE) if ask.__name__ == "empty" else ask()
    posterior = LaplaceEvidence(linear).run(*data())
    assert "Independent draws" in (posterior.get_samples.__doc__ or "")
    assert pickle.loads(pickle.dumps(Wide())).__class__ is Wide


@pytest.mark.parametrize("engine", [LaplaceEvidence, RVM, REVM])
def test_gradients_that_a_caller_has_switched_off_are_taken_all_the_same(engine) -> None:
    posterior, X_new = engine(linear).run(*data()), data()[0][:3]
    with torch.no_grad():
        again = engine(linear).run(*data())
        torch.testing.assert_close(again.quantiles(0.9), posterior.quantiles(0.9))
        torch.testing.assert_close(again.log_evidence, posterior.log_evidence)
        torch.testing.assert_close(again.predict(X_new), posterior.predict(X_new))
        if engine is LaplaceEvidence:
            assert bool(again.loo().elpd.isfinite().all())
        assert not torch.is_grad_enabled()


LIMITED = """
import resource, torch
from tests.fitting.test_memory import linear
from pyro_evidence import LaplaceEvidence, TooLarge
X = torch.randn(400, 40, dtype=torch.float64)
posterior = LaplaceEvidence(linear).run(X, X.sum(-1))
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 2**27, resource.RLIM_INFINITY))
try:
    posterior.predict(X.repeat(1000, 1), num_samples=100)
except TooLarge as message:
    print("message:", message)
print(tuple(posterior.predict(X, num_samples=10).shape))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(before("2.10"), reason="older torch dies without memory, inside its threads")
def test_a_limit_of_the_system_is_a_letter_and_the_posterior_lives_on() -> None:
    found = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "message:" in found.stdout and "bytes were asked for at once" in found.stdout and "(400,)" in found.stdout
