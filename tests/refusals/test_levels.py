"""Groups as they come: levels that are none, groups without rows or with one, a factor of one level, too many."""

import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, ImproperPosterior, LaplaceEvidence, Stop

NUM = 230  # more than are treated as one dense matrix
GROUP = torch.arange(NUM).repeat_interleave(3)
DRAWS = torch.randn(NUM + len(GROUP), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = 0.8 * DRAWS[GROUP] + DRAWS[NUM:]
QUIET = Stop(progress=False)


def groups(group: Tensor, num: int, y: Tensor, x: Tensor | None = None) -> None:
    s = pyro.param("s", torch.ones(()), constraint=constraints.positive)
    with pyro.plate("groups", num):
        a = pyro.sample("a", dist.Normal(0.0, s))
    with pyro.plate("data", len(group)):
        pyro.sample("y", dist.Normal(a[group] + (0.0 if x is None else x), 1.0), obs=y)


def two_factors(group: Tensor, other: Tensor, num: Sequence[int], y: Tensor) -> None:
    with pyro.plate("groups", num[0]):
        a = pyro.sample("a", dist.Normal(0.0, 0.7))
    with pyro.plate("others", num[1]):
        b = pyro.sample("b", dist.Normal(0.0, 1.3))
    with pyro.plate("data", len(group)):
        pyro.sample("y", dist.Normal(a[group] + b[other], 1.0), obs=y)


def flat(group: Tensor, num: int, y: Tensor) -> None:
    with pyro.plate("groups", num):
        a = pyro.sample("a", dist.ImproperUniform(constraints.real, (), ()))
    with pyro.plate("data", len(group)):
        pyro.sample("y", dist.Bernoulli(logits=a[group]), obs=y)


def fit(*args: Any, model: Any = groups, maximise: Any = None) -> Any:
    return LaplaceEvidence(model, maximise=maximise, stop=QUIET).run(*args)


def closed_form(group: Tensor, num: int, y: Tensor, variance: float) -> float:
    """The log evidence of normal groups, each by itself: an oracle."""
    total = 0.0
    for g in range(num):
        own = y[group == g]
        if len(own):
            covariance = torch.eye(len(own)).double() + variance
            total += float(dist.MultivariateNormal(torch.zeros(len(own)).double(), covariance).log_prob(own))
    return total


def test_a_group_without_rows_is_integrated_from_its_prior() -> None:
    found = fit(GROUP, NUM + 2, Y)
    s = float(found.hyperparameters["s"])
    assert float(found.log_evidence) == pytest.approx(closed_form(GROUP, NUM + 2, Y, s * s), rel=1e-9)
    assert float(found.log_evidence) == pytest.approx(float(fit(GROUP, NUM, Y).log_evidence), abs=1e-8)
    assert found.mode["a"][NUM:].tolist() == pytest.approx([0.0, 0.0], abs=1e-9)
    torch.testing.assert_close(found.state.precision.variance[0, NUM:].sqrt(), torch.full((2,), s).double())


def test_a_group_of_one_row() -> None:
    group, y = torch.cat([GROUP, torch.tensor([NUM])]), torch.cat([Y, torch.tensor([2.0]).double()])
    found = fit(group, NUM + 1, y, maximise=())
    assert float(found.log_evidence) == pytest.approx(closed_form(group, NUM + 1, y, 1.0), rel=1e-9)
    assert float(found.mode["a"][NUM]) == pytest.approx(1.0)  # half way between the prior mean and the one datum


def test_a_factor_of_one_level_is_an_intercept() -> None:
    found = fit(GROUP, torch.zeros_like(GROUP), (NUM, 1), Y, model=two_factors)
    same = (GROUP[:, None] == GROUP).double()
    covariance = torch.eye(len(Y)).double() + 0.49 * same + 1.69
    expected = dist.MultivariateNormal(torch.zeros_like(Y), covariance).log_prob(Y)
    assert float(found.log_evidence) == pytest.approx(float(expected), rel=1e-9)


def test_separable_groups_under_a_flat_prior_are_refused_by_site() -> None:
    with pytest.raises(ImproperPosterior, match=r"site 'a', unconstrained element.*separable classes.*proper prior"):
        fit(GROUP, NUM, (GROUP % 2).double(), model=flat)


def test_separable_groups_under_a_proper_prior_are_none_the_worse() -> None:
    def model(group: Tensor, num: int, y: Tensor) -> None:
        with pyro.plate("groups", num):
            a = pyro.sample("a", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(group)):
            pyro.sample("y", dist.Bernoulli(logits=a[group]), obs=y)

    found = fit(GROUP, NUM, (GROUP % 2).double(), model=model)
    assert math.isfinite(float(found.log_evidence))
    torch.testing.assert_close(found.mode["a"][0::2], -found.mode["a"][1::2])  # all groups alike but for the sign


def test_a_level_too_many_is_named_with_the_range() -> None:
    group = GROUP.clone()
    group[17] = NUM
    with pytest.raises(BadInput, match=f"levels 0 to n - 1; those of argument 0 go from 0 to {NUM}"):
        fit(group, NUM, Y)


def test_levels_that_are_floats() -> None:
    with pytest.raises(BadInput, match=r"whole numbers from 0: write .long\(\)"):
        fit(GROUP.double(), NUM, Y)
    assert float(fit(GROUP.double().long(), NUM, Y).log_evidence) < 0.0  # what it says to do


@pytest.mark.parametrize("kind", [list, np.array])
def test_levels_that_are_words(kind: Any) -> None:
    words = [f"school {g}" for g in GROUP.tolist()]
    with pytest.raises(BadInput, match=r"whole numbers from 0: codes, levels = pandas.factorize\(argument 0\)"):
        fit(kind(words), NUM, Y)
    pandas = pytest.importorskip("pandas")
    codes, levels = pandas.factorize(np.array(words))  # what it says to do
    found = fit(codes, len(levels), Y)
    assert float(found.log_evidence) == pytest.approx(float(fit(GROUP, NUM, Y).log_evidence))


def missing(num: int = 2) -> Tensor:
    group = GROUP.clone()
    group[17 : 17 + num] = -1
    return group


def test_a_missing_level_is_not_the_last_one() -> None:
    with pytest.raises(BadInput, match=r"argument 0, shape \(690,\), is an index and holds -1 at 17.*in 2 of 690 rows"):
        fit(missing(), NUM, Y)
    keep = missing() >= 0  # what it says to do
    assert math.isfinite(float(fit(missing()[keep], NUM, Y[keep]).log_evidence))
    own = torch.where(missing() < 0, NUM, missing())
    assert math.isfinite(float(fit(own, NUM + 1, Y).log_evidence))
    assert math.isfinite(float(fit(missing() % NUM, NUM, Y).log_evidence))


@pytest.mark.parametrize("kind", [lambda x: x.to(torch.int32), lambda x: x.numpy(), lambda x: x.reshape(-1, 3)])
def test_a_missing_level_of_another_kind(kind: Any) -> None:
    def model(group: Any, y: Tensor) -> None:
        with pyro.plate("groups", NUM):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(a[group.reshape(-1).long()], 1.0).to_event(1), obs=y)

    with pytest.raises(BadInput, match=r"argument 0.*holds -1 at 17.*keep = index >= 0"):
        fit(kind(missing()), Y, model=model)


def test_a_missing_level_that_the_model_takes_from_around_it() -> None:
    group = missing()

    def model(y: Tensor) -> None:
        with pyro.plate("groups", NUM):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(a[group], 1.0).to_event(1), obs=y)

    with pytest.raises(BadInput, match=r"a tensor that is no argument.*holds -1 at 17"):
        fit(Y, model=model)


def test_a_model_may_count_from_the_end_itself() -> None:
    def ring(y: Tensor) -> None:
        with pyro.plate("ring", NUM):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("d", dist.Normal(a[torch.arange(NUM) - 1] - a, 1.0).to_event(1), obs=y[:NUM])

    assert math.isfinite(float(fit(Y, model=ring).log_evidence))


@pytest.mark.parametrize("where", ["y", "x"])
def test_a_missing_number_is_named_by_its_group(where: str) -> None:
    values = {"y": Y.clone(), "x": torch.zeros_like(Y)}
    values[where][17] = math.nan
    with pytest.raises(BadInput, match=r"1 nan \(first at \[17\]\), where argument 0 is 5"):
        fit(GROUP, NUM, values["y"], values["x"])


MILLION = """
import resource, torch, pyro, pyro.distributions as dist
from pyro_evidence import LaplaceEvidence, Stop, TooLarge
from pyro_evidence.numerics import linalg

def model(group, num, y):
    with pyro.plate("groups", num):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(group)):
        pyro.sample("y", dist.Poisson(a[group].exp()), obs=y)

LaplaceEvidence(model, stop=Stop(progress=False)).run(torch.arange(300), 300, torch.zeros(300))  # loads what it needs
num = 1_000_000
group, y = torch.arange(num), torch.zeros(num)
limit = int(linalg.OWN_MEMORY.read_text().split()[0]) * resource.getpagesize() + 2**29
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    LaplaceEvidence(model, stop=Stop(progress=False)).run(group, num, y)
except TooLarge as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on a process's memory")
def test_a_million_groups_are_refused_by_a_process_that_may_not_have_the_memory() -> None:
    run = subprocess.run([sys.executable, "-c", MILLION], capture_output=True, text=True, check=False)
    assert "1,000,000 coordinates" in run.stdout and "bytes" in run.stdout, run.stdout + run.stderr[-2000:]
    assert "are free on cpu" in run.stdout  # before anything was asked of the system
