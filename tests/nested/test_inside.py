"""What Laplace inside leaves out, against integrals on grids that know nothing of it."""

import copy
import itertools
import math
from functools import cache, partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.laplace.tour import NormalMixture
from pyro_evidence.models.gmrf import RandomWalk
from pyro_evidence.nested import inside
from pyro_evidence.nested.inside import InsideCorrection, inside_correction
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.quadrature import rules
from pyro_evidence.numerics.quadrature.rules import quasi_normal
from pyro_evidence.posterior.nested import NestedPosterior
from pyro_evidence.precision.dense import Diagonal, precision_tril
from pyro_evidence.structure.groups import Pruned
from tests.models_for_tests.sampled_scales import SCHOOLS, generated, schools_centred

SCALES = 0.05 * (torch.arange(240, dtype=torch.float64) + 0.5)  # middles of cells: a half-normal density ends at zero
LEVELS = torch.linspace(-9.0, 9.0, 181, dtype=torch.float64)

CLINIC = torch.arange(40) % 10
TRIALS = 0.4 * generated(22, seed=3) + torch.tensor([0.0] * 19 + [2.0, -2.5, 3.0], dtype=torch.float64)
NOISE = torch.full((22,), 0.3, dtype=torch.float64)


def fitted(model: object, *args: Tensor, **settings: object) -> NestedPosterior:
    found = LaplaceEvidence(model, stop=Stop(progress=False), **settings).run(*args)  # type: ignore[arg-type]
    assert isinstance(found, NestedPosterior)
    return found


def clinics(y: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with pyro.plate("clinics", 10):
        b = pyro.sample("b", dist.Normal(0.0, tau))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=level + b[CLINIC]), obs=y)


def trials(y: Tensor) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("trials", len(y)):
        theta = pyro.sample("theta", dist.StudentT(3.0, mu, tau))
        pyro.sample("y", dist.Normal(theta, NOISE), obs=y)


def walk(y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    steps = pyro.sample("x", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((2.0 * tau * steps.cumsum(-1) - 2.0).exp()), obs=y)


def outcomes() -> Tensor:
    chance = (0.4 + 1.3 * generated(10, seed=5))[CLINIC].sigmoid()
    return (torch.rand(40, generator=torch.Generator().manual_seed(6), dtype=torch.float64) < chance).double()


def counts() -> Tensor:
    rate = (1.6 * generated(14, seed=7).cumsum(0) - 2.0).exp()
    return torch.poisson(rate, torch.Generator().manual_seed(8))


def log_integral(log_density: Tensor, x: Tensor) -> Tensor:
    """Over the last axis, by the trapezium rule on equal steps."""
    return log_density.logsumexp(-1) + math.log(float(x[1] - x[0]))


@cache
def kept(model: object) -> NestedPosterior:
    return fitted(model, outcomes() if model is clinics else counts())


def again(model: object) -> NestedPosterior:
    """A fit that was made before, of which nothing is known that Laplace leaves out inside."""
    found = copy.copy(kept(model))
    for name in ("_left_out", "_by_inside_draws"):
        vars(found).pop(name, None)
    return found


def evidence_of_clinics(y: Tensor) -> float:
    ones, sizes = (torch.zeros(10, dtype=torch.float64).index_add(0, CLINIC, v) for v in (y, torch.ones_like(y)))
    white, levels = torch.linspace(-8.0, 8.0, 161, dtype=torch.float64), LEVELS[::3]
    eta, inner = levels[:, None] + SCALES[:, None, None] * white, torch.zeros(len(SCALES), len(levels)).double()
    for k, n in zip(ones, sizes, strict=True):
        seen = k * eta - n * torch.nn.functional.softplus(eta)
        inner = inner + log_integral(seen + dist.Normal(0.0, 1.0).log_prob(white), white)
    of_scale = log_integral(inner + dist.Normal(0.0, 2.0).log_prob(levels), levels)
    return float(log_integral(of_scale + dist.HalfNormal(2.0).log_prob(SCALES), SCALES))


def evidence_of_trials(y: Tensor) -> float:
    scales, levels = SCALES[:80], torch.linspace(-2.0, 2.0, 81, dtype=torch.float64)
    theta = torch.linspace(-5.0, 5.0, 1001, dtype=torch.float64)
    seen = dist.Normal(theta, 0.3).log_prob(y[:, None])
    rows = []
    for scale in scales:
        prior = dist.StudentT(3.0, levels[:, None], scale).log_prob(theta)
        each = (prior.exp() @ seen.exp().mT * (theta[1] - theta[0])).log().sum(-1)
        rows.append(log_integral(each + dist.Normal(0.0, 2.0).log_prob(levels), levels))
    return float(log_integral(torch.stack(rows) + dist.HalfNormal(1.0).log_prob(scales), scales))


def evidence_of_walk(y: Tensor) -> float:
    """By a forward pass over a grid of states for each scale."""
    scales, x = SCALES[:70], torch.linspace(-14.0, 14.0, 801, dtype=torch.float64)
    found = []
    for scale in scales:
        moves = dist.Normal(x, 2.0 * scale).log_prob(x[:, None]).softmax(0)  # of narrow steps too
        state = dist.Normal(0.0, 2.0 * scale).log_prob(x).softmax(0)
        for t, one in enumerate(y):
            state = (state if t == 0 else moves @ state) * dist.Poisson((x - 2.0).exp()).log_prob(one).exp()
        found.append(state.sum().log())
    return float(log_integral(torch.stack(found) + dist.HalfNormal(1.0).log_prob(scales), scales))


@pytest.mark.parametrize(
    ("model", "data", "expected", "short"),
    [
        (clinics, outcomes(), evidence_of_clinics, 0.05),
        (trials, TRIALS, evidence_of_trials, 0.4),
        (walk, counts(), evidence_of_walk, 0.02),
    ],
    ids=["blocks and what they share", "tails", "no blocks"],
)
def test_log_evidence_is_that_of_a_grid(model: object, data: Tensor, expected: object, short: float) -> None:
    found, exact = fitted(model, data), expected(data)  # type: ignore[operator]
    off = float(found.log_evidence) - exact
    assert abs(off) < 2.0 * float(found.log_evidence_error) and abs(off) < 0.06
    assert abs(float(found.integral.log_evidence) - exact) > short


DIGITS = "3533242567865297a7393966945635330411204201220011031103043233"
SERIES = torch.tensor([float(int(digit, 16)) for digit in DIGITS], dtype=torch.float64)


def series(y: Tensor) -> None:
    scale, x = pyro.sample("scale", dist.HalfNormal(1.0)), pyro.sample("x_0", dist.Normal(0.0, 5.0))
    for t in range(len(y)):
        x = x if t == 0 else pyro.sample(f"x_{t}", dist.Normal(x, scale))
        pyro.sample(f"y_{t}", dist.Poisson(x.exp()), obs=y[t])


def series_at_once(y: Tensor) -> None:
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    x = pyro.sample("x", RandomWalk(scale, len(y), level=5.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)


def evidence_of_series(y: Tensor) -> float:
    """By a forward pass over a grid of states for each scale, in logs of which scales are spaced."""
    logs, x = torch.linspace(-5.5, -0.5, 24, dtype=torch.float64), torch.linspace(-6.0, 4.0, 700, dtype=torch.float64)
    found = []
    for scale in logs.exp():
        moves = dist.Normal(x, scale).log_prob(x[:, None]).softmax(0).mT
        state, total = dist.Normal(0.0, 5.0).log_prob(x).exp() * (x[1] - x[0]), dist.HalfNormal(1.0).log_prob(scale)
        for t, one in enumerate(y):
            state = (state if t == 0 else state @ moves) * dist.Poisson(x.exp()).log_prob(one).exp()
            total, state = total + state.sum().log(), state / state.sum()
        found.append(total + scale.log())
    return float(log_integral(torch.stack(found), logs))


def test_a_loop_and_its_vectorised_form_are_integrated_alike_and_drawn_within_their_errors() -> None:
    found, exact = [fitted(model, SERIES) for model in (series, series_at_once)], evidence_of_series(SERIES)
    assert float(found[0].integral.log_evidence) == pytest.approx(float(found[1].integral.log_evidence), abs=1e-8)
    for each in found:
        assert float(each.log_evidence) == pytest.approx(exact, abs=0.03)
        assert each._left_out is not None and each._left_out.error < 0.02


def test_what_is_odd_about_a_mode_cancels_in_each_pair_of_draws() -> None:
    kinds, one = torch.tensor([0.8, 0.2]).double(), Diagonal(torch.ones(1, 3).double())
    mixture = NormalMixture(kinds.log(), generated(2, 3, seed=0), (one, one), torch.ones(3).bool(), (False, True))
    u = mixture.unwhiten_pairs(quasi_normal(32, 4))
    means = mixture.loc.repeat_interleave(mixture.counts(32), 0)
    log_weights = torch.log1p(0.5 * (u - means.repeat(2, 1)).sum(-1).tanh())
    gain, error, _ = inside._controlled(log_weights, torch.ones(64).double())
    assert gain == pytest.approx(0.0, abs=1e-12) and error < 1e-12


def test_draws_of_all_coordinates_have_the_normal_density_of_their_node() -> None:
    places = again(walk)._inside_places
    index, size = torch.arange(len(places.u)).repeat_interleave(3), places.u.shape[-1]
    white = generated(len(index), size, seed=0)
    covariance_at = partial(inside._covariance, places, torch.arange(size))
    u, log_slope = inside._at_nodes(places, index, torch.arange(size), white, torch.empty(0), covariance_at)
    log_normal = dist.Normal(0.0, 1.0).log_prob(white).sum(-1) - log_slope
    for row, node in enumerate(index.tolist()):
        tril = precision_tril(places.precision.row(node), size)
        normal = dist.MultivariateNormal(places.u[node], precision_matrix=tril @ tril.mT)
        assert float(log_normal[row]) == pytest.approx(float(normal.log_prob(u[row])), abs=1e-8)


def softmax(y: Tensor) -> None:
    """Counts of four kinds in twelve groups: blocks of four coordinates."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("groups", 12):
        e = pyro.sample("e", dist.Normal(torch.zeros(4).double(), scale).to_event(1))
        pyro.sample("y", dist.Multinomial(8, logits=e), obs=y)


def kinds() -> Tensor:
    shares = (0.8 * generated(12, 4, seed=9)).softmax(-1)
    ends = shares.cumsum(-1).unsqueeze(1)
    uniform = torch.rand(12, 8, 1, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    return torch.nn.functional.one_hot((uniform > ends).sum(-1).clamp(max=3), 4).sum(1).double()


def test_wide_blocks_tell_what_fewer_nodes_would_say() -> None:
    """Of 5 and of 7 nodes beyond three axes directions are the same, and their agreement says nothing."""
    found = fitted(softmax, kinds())
    white = generated(40_000, 4, seed=11)  # each group by itself, at draws of its prior
    log_each = []
    for scale in SCALES[:100]:
        eta = scale * white
        p = (eta @ kinds().mT - 8.0 * eta.logsumexp(-1, keepdim=True)).exp()
        log_each.append(p.mean(0).log().sum())
    orders = (torch.lgamma(torch.tensor(9.0).double()) - torch.lgamma(kinds() + 1.0).sum(-1)).sum()
    log_density = torch.stack(log_each) + dist.HalfNormal(1.0).log_prob(SCALES[:100])
    exact = float(log_integral(log_density, SCALES) + orders)
    off = float(found.log_evidence) - exact
    assert abs(off) < float(found.log_evidence_error) < 0.15


def shares(X: Tensor, y: Tensor) -> None:
    """Shares of three kinds beside slopes that a scale multiplies: one block of eight coordinates, and none shared."""
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3).double()))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(2, 3).double(), 1.0).to_event(2))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Categorical(logits=p.log().unsqueeze(-2) + s[..., None, None] * (X @ w)), obs=y)


def test_a_wide_block_that_is_all_there_is_is_drawn() -> None:
    """Directions of it cost more than there is to pay, and Laplace was left as it was, .09 nats too low."""
    X = generated(60, 2, seed=3)
    found = fitted(shares, X, (X @ torch.tensor([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]).double()).argmax(-1))
    assert found._left_out is not None
    assert float(found.log_evidence) == pytest.approx(float(importance.log_mean(found.log_weights(500))), abs=0.04)


def test_several_modes_inside_are_in_the_log_evidence() -> None:
    """Around one of three for each scale, it was .34 nats too low, and the weights said that this is no number."""
    y = torch.tensor([-6.0, -5.5, 0.0, 5.0, 6.2], dtype=torch.float64)

    def cauchy() -> None:
        m, s = pyro.sample("m", dist.Normal(0.0, 10.0)), pyro.sample("s", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Cauchy(m, s), obs=y)

    m, z = torch.linspace(-60.0, 60.0, 4_001).double(), torch.linspace(-6.0, 6.0, 401).double().unsqueeze(-1)
    log_density = dist.Normal(0.0, 10.0).log_prob(m) + dist.Normal(0.0, 1.0).log_prob(z)
    log_density = log_density + sum(dist.Cauchy(m, z.exp()).log_prob(one) for one in y)
    exact = float(log_density.logsumexp((0, 1))) + math.log(0.03 * 0.03)
    found = fitted(cauchy)
    assert float(found.log_evidence) == pytest.approx(exact, abs=0.02)
    assert found.log_evidence_error < 0.02


def test_a_normal_inside_is_left_as_it_is() -> None:
    found = fitted(schools_centred, SCHOOLS)
    assert float(found.log_evidence) == float(found.integral.log_evidence)
    assert float(found.log_evidence_error) == pytest.approx(found.integration_error, abs=1e-6)


def test_blocks_that_are_integrated_already_have_the_same_evidence() -> None:
    found, other = (fitted(clinics, outcomes(), nodes=n) for n in (1, 7))
    errors = float(found.log_evidence_error + other.log_evidence_error)
    assert float(found.log_evidence) == pytest.approx(float(other.log_evidence), abs=errors)


@pytest.mark.parametrize(
    ("gain", "error", "k", "trusted"),
    [(0.3, 0.05, 0.2, True), (0.3, 0.05, 0.75, False), (0.04, 0.05, 0.2, False), (1e-6, 0.0, -math.inf, False)],
    ids=["sound", "heavy tails", "less than its error", "rounding"],
)
def test_what_cannot_be_trusted_is_not_added_but_said(gain: float, error: float, k: float, trusted: bool) -> None:
    found = again(clinics)
    vars(found)["_left_out"] = InsideCorrection(gain, error, 0.0, k, 1024, 1, torch.zeros(1))
    added = float(found.log_evidence - found.integral.log_evidence)
    assert added == pytest.approx(gain if trusted else 0.0, abs=1e-12)
    stated = found.integration_error + error + (0.0 if trusted else gain)
    assert float(found.log_evidence_error) == pytest.approx(stated)
    assert found.log_evidence_error.signed == (0.0 if trusted else gain)
    assert (found.log_evidence_error.shared == 0.0) == trusted  # which is then in what was added
    said = [line for line in found._notes(1.0) if "beside Laplace inside" in line]
    assert len(said) == (gain > 0.1) and all(("are not added" in line) != trusted for line in said)


def test_what_costs_too_much_is_left_to_laplace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "PRICE", 1e4)
    found = fitted(clinics, outcomes())
    assert inside_correction(found._inside_places) is None
    assert float(found.log_evidence) == float(found.integral.log_evidence)
    assert "quadrature" in found.log_evidence_error.method or "nodes" in found.log_evidence_error.method


def test_searches_for_the_modes_of_blocks_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one coordinate: four steps cost as much as 16 rows, so that 256 draws of five nodes are too dear."""
    places = kept(clinics)._inside_places
    row_bytes = places.problem.joint.row_bytes
    assert row_bytes is not None
    monkeypatch.setattr(inside, "PRECISE", 0.0)  # more draws would follow
    nums = []
    for rows in (256 * 21, 256 * 21 - 1):
        monkeypatch.setattr(inside, "PRICE", rows * row_bytes)
        found = inside_correction(places)
        assert found is not None
        nums.append(found.num_draws)
    assert nums == [256, 64]


def test_coordinates_may_be_more_than_quasi_random_numbers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """21,201 is the most of torch's."""
    by_sobol = inside_correction(again(walk)._inside_places)
    monkeypatch.setattr(torch.quasirandom.SobolEngine, "MAXDIM", 14)
    monkeypatch.setattr(rules, "BATCH_NUMBERS", 0)
    by_margins = inside_correction(again(walk)._inside_places)
    assert by_sobol is not None and by_margins is not None
    assert by_margins.gain == pytest.approx(by_sobol.gain, abs=4.0 * (by_sobol.error + by_margins.error))


def test_draws_are_evaluated_a_part_of_them_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    places, sizes, log_joint = again(walk)._inside_places, list[int](), Pruned.log_joint
    whole, row_bytes = inside_correction(places), places.problem.joint.row_bytes
    assert whole is not None and row_bytes is not None
    monkeypatch.setattr(Pruned, "log_joint", lambda *args: sizes.append(len(args[1])) or log_joint(*args))
    monkeypatch.setattr(inside, "BATCH_BYTES", 10 * inside.PARTS * row_bytes)
    parts = inside_correction(places)
    assert parts is not None and parts.gain == pytest.approx(whole.gain, abs=1e-9) and max(sizes) == 10


def test_a_density_that_is_zero_at_all_draws_leaves_laplace(monkeypatch: pytest.MonkeyPatch) -> None:
    found = again(clinics)
    nothing = InsideCorrection(math.nan, math.nan, 0.0, math.inf, 64, 1, torch.zeros(1))
    monkeypatch.setattr(inside, "_by_draws", lambda *given: (nothing, given[3]))
    assert inside_correction(found._inside_places) is None


def test_a_mixture_is_not_judged_by_the_draws_that_it_has_adapted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thousand coordinates that was .08 nats, twenty of its standard errors."""
    made, find = list[Tensor](), quasi_normal
    monkeypatch.setattr(inside, "quasi_normal", lambda *given: made.append(find(*given)) or made[-1])
    monkeypatch.setattr(inside, "PRECISE", 0.0)
    monkeypatch.setattr(inside, "PRICE", 1e7)
    inside_correction(again(walk)._inside_places)
    assert len(made) > 1 and not any(torch.equal(a, b[: len(a)]) for a, b in itertools.pairwise(made))


@pytest.mark.parametrize(("k", "last"), [(1.1, 256), (0.9, 256), (0.75, 65_536)])
def test_no_more_draws_are_made_where_no_number_of_them_is_enough(
    k: float, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, nums = again(walk), list[int]()

    def drawn(
        _: object, __: object, num: int, mixture: NormalMixture, *___: object
    ) -> tuple[InsideCorrection, NormalMixture]:
        nums.append(num)
        return InsideCorrection(0.3, 0.1, 0.0, k, num, 14, torch.zeros(1)), mixture

    monkeypatch.setattr(inside, "_by_draws", drawn)
    row_bytes = found.integral.outer_mode.state.problem.joint.row_bytes
    assert row_bytes is not None
    monkeypatch.setattr(inside, "PRICE", 100_000 * row_bytes)
    monkeypatch.setattr(inside, "LITTLE", 0)
    made = inside_correction(found._inside_places)
    assert made is not None and (made.num_draws, nums[-1]) == (last, last)
