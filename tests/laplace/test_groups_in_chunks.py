"""Independent groups in chunks: the posterior of all rows, however whole groups are shared out among chunks."""

from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, LaplaceEvidence, Stop, UnsupportedModel
from pyro_evidence.data import Groups
from pyro_evidence.data.ranks import SINGLE_PROCESS
from pyro_evidence.laplace.approximation import Problem, laplace_problem, laplace_state
from pyro_evidence.laplace.gradient import slope
from pyro_evidence.laplace.grouped_chunks import group_rows
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.program.log_joint import LogJoint

Model = Any
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
QUIET = Stop(progress=False)
NUM = 20


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Eight rows of each group, in no order."""
    generator = torch.Generator().manual_seed(1)
    g = torch.arange(NUM).repeat_interleave(8)[torch.randperm(8 * NUM, generator=generator)]
    X = torch.randn(8 * NUM, 2, generator=generator)
    a, b = 0.8 * torch.randn(2, NUM, generator=generator)
    return g, X, a[g] + 1.0 + ((1.0 + b[g]) * X[:, 0]).tanh() + 0.3 * torch.randn(8 * NUM, generator=generator)


def intercepts(g: Tensor, X: Tensor, y: Tensor) -> None:
    """Nothing is shared but hyperparameters, fixed effects among them."""
    s = pyro.param("s", torch.tensor(0.7), constraint=constraints.positive)
    b = pyro.param("b", torch.zeros(2))
    with pyro.plate("groups", int(g.max()) + 1):
        a = pyro.sample("a", dist.Normal(0.0, s))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=a[g] + X @ b), obs=(y > 1.0).to(y.dtype))


def curves(g: Tensor, X: Tensor, y: Tensor) -> None:
    """A curve for each group about a shared one, heavy tails, a shared scale; no predictor is linear."""
    tau = pyro.param("tau", torch.tensor([0.7, 0.5]), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    lam = pyro.sample("lam", dist.Gamma(2.0, 1.0))
    with pyro.plate("groups", int(g.max()) + 1):
        c = pyro.sample("c", dist.Normal(w, tau).to_event(1))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.StudentT(5.0, c[g, 0] + (c[g, 1] * X[:, 0]).tanh(), lam.rsqrt()), obs=y)


def cut(sizes: list[int]) -> list[tuple[Tensor, ...]]:
    """The first so many groups, numbered from 0, then the next ones."""
    (g, X, y), found, begin = data(), [], 0
    for size in sizes:
        own = (g >= begin) & (g < begin + size)
        found.append((g[own] - begin, X[own], y[own]))
        begin += size
    return found


@pytest.mark.parametrize(
    ("model", "sizes"), [(intercepts, [8, 0, 12]), pytest.param(curves, [1, 19], marks=pytest.mark.slow)]
)
def test_any_cut_by_groups_gives_the_posterior_of_all_rows(
    model: Model, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """About the mode, both: the mean of groups that came in chunks is not looked for."""
    monkeypatch.setattr(LaplacePosterior, "_shifted", None)
    whole = LaplaceEvidence(model, marginalise=(), stop=QUIET).run(*data())
    engine, site = LaplaceEvidence(model, marginalise=(), stop=QUIET), "a" if model is intercepts else "c"
    found = engine.run_chunks(cut(sizes), local=[site])
    assert_close(found.log_evidence, whole.log_evidence)
    for name, value in whole.hyperparameters.items():
        assert_close(found.hyperparameters[name], value, rtol=1e-5, atol=1e-6)
    for name, value in whole.mode.items():
        assert_close(found.mode[name], value, rtol=1e-5, atol=1e-6)
        assert_close(found.quantiles(0.9)[name], whole.quantiles(0.9)[name], rtol=1e-5, atol=1e-6)
    assert found.get_samples(3, seed=0).keys() == whole.mode.keys()
    assert_close(found.predict(*data()), whole.predict(*data()), rtol=0.0, atol=0.1)  # of other draws
    assert "eliminated group by group" in found.structure
    with pytest.raises(BadInput, match="came in chunks"):
        found.log_weights()


def test_the_slope_of_the_evidence_is_a_sum_over_groups() -> None:
    """At hyperparameters that are no maximum, where the groups' modes and curvatures move with them; and variances."""
    whole, make = laplace_problem(LogJoint(curves, data())), partial(LogJoint, curves)
    chunks = cut([7, 13])
    rows = group_rows(curves, chunks, SINGLE_PROCESS, make, make(chunks[0]), ("c",))
    parts = Problem(rows.prior, rows.structure, exact_hessian, torch.ones(rows.prior.latents.size).bool())
    theta = whole.joint.initial_theta + 0.3
    states = [laplace_state(p, theta, p.joint.initial_u, cold=True) for p in (whole, parts)]
    assert_close(states[1].log_evidence, states[0].log_evidence)
    assert_close(slope(states[1]).total, slope(states[0]).total, rtol=1e-8, atol=1e-8)
    assert_close(states[1].precision.variance[0], states[0].precision.variance[0, -3:], rtol=1e-7, atol=1e-9)


def test_rows_of_a_group_are_brought_together() -> None:
    g, X, y = data()
    chunks = Groups(100 + 3 * g, X, y.numpy(), size=110)
    assert [int(codes.max()) + 1 for codes, *_ in chunks] == [13, 7]
    for size in (8, 1):  # a group has eight rows
        assert [len(codes) for codes, *_ in Groups(g, X, y, size=size)] == [8] * NUM
    stop = Stop(progress=False, num_steps=1, throw=False)
    whole = LaplaceEvidence(intercepts, maximise=(), stop=stop).run(g, X, y)
    found = LaplaceEvidence(intercepts, maximise=(), stop=stop).run_chunks(chunks)
    assert_close(found.log_evidence, whole.log_evidence)
    assert_close(found.mode["a"], whole.mode["a"], rtol=1e-6, atol=1e-7)


def by_row(X: Tensor, y: Tensor) -> None:
    """A group for each row."""
    s = pyro.param("s", torch.tensor(0.7), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(X)):
        a = pyro.sample("a", dist.Normal(X @ w, s))
        pyro.sample("y", dist.Poisson(a.exp()), obs=y.abs().round())


def test_rows_that_are_groups_need_no_word() -> None:
    """Also where all chunks have equally many."""
    _, X, y = (x[:60] for x in data())
    y = y.exp()
    whole = LaplaceEvidence(by_row, stop=QUIET).run(X, y)
    found = LaplaceEvidence(by_row, stop=QUIET).run_chunks([(X[:30], y[:30]), (X[30:], y[30:])])
    assert_close(found.log_evidence, whole.log_evidence)
    assert_close(found.mode["a"], whole.mode["a"], rtol=1e-5, atol=1e-6)


def test_numbers_alone_do_not_say_whose_groups_they_are() -> None:
    """Equally many: an error message; a chunk that has fewer, which may lack some that all share: a warning."""
    engine = LaplaceEvidence(intercepts, maximise=(), stop=Stop(progress=False, num_steps=1, throw=False))
    with pytest.raises(BadInput, match=r"run_chunks\(chunks, local=\['a'\]\)"):
        engine.run_chunks(cut([10, 10]))
    told = engine.run_chunks(cut([10, 10]), local=["a"])
    with pytest.warns(UserWarning, match=r"site\(s\) a have another number of elements in every chunk"):
        found = engine.run_chunks(cut([9, 11]))
    assert_close(found.log_evidence, told.log_evidence)


def labelled(g: Tensor, y: Tensor) -> None:
    """Groups by whatever labels they have."""
    names, of_row = g.unique(return_inverse=True)
    m = pyro.sample("m", dist.Normal(0.0, 3.0))
    with pyro.plate("groups", len(names)):
        a = pyro.sample("a", dist.Normal(m, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(a[of_row], 1.0), obs=y)


def chained(g: Tensor, y: Tensor) -> None:
    """A walk over so many groups that they are one."""
    with pyro.plate("steps", len(y)):
        dx = pyro.sample("dx", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(dx.cumsum(0), 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "chunks", "error", "message"),
    [
        (
            labelled,
            lambda g, y: [(g[:80] + 5, y[:80]), (g[80:] % 17, y[80:])],
            BadInput,
            r"group\(s\) 5, 6, .*t 0",
        ),
        (chained, lambda g, y: [(g.repeat(2), y.repeat(2)), (g, y)], UnsupportedModel, "not independent"),
    ],
)
def test_what_is_refused(model: Model, chunks: Any, error: type[Exception], message: str) -> None:
    g, _, y = data()
    with pytest.raises(error, match=message):
        LaplaceEvidence(model, stop=QUIET).run_chunks(chunks(g, y))


def test_groups_that_begin_elsewhere_are_refused() -> None:
    g, X, y = data()
    chunks = [tuple(x[own] for x in (g, X, y)) for own in (g < 15, g >= 15)]
    with pytest.raises(BadInput, match=r"numbers the groups of a chunk 15 to 19, of which the model makes 20"):
        LaplaceEvidence(intercepts, stop=QUIET).run_chunks(chunks)


def test_groups_that_all_chunks_are_said_to_share_must_be_as_many() -> None:
    with pytest.raises(BadInput, match="chunk 1 has 13 weights and the first 7"):
        LaplaceEvidence(intercepts, stop=QUIET).run_chunks(cut([7, 13]), local=())


def test_a_site_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match=r"local=\['b'\]; expected latent sites among a"):
        LaplaceEvidence(intercepts, stop=QUIET).run_chunks(cut([7, 13]), local=["b"])
