"""The setting ``nodes``: fits against lme4, nothing changed without it, the error that a posterior knows."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Start, Stop
from pyro_evidence.blocks.marginal import MOST_NODES
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.laplace import evidence_error
from pyro_evidence.laplace.approximation import laplace_state
from pyro_evidence.laplace.evidence_error import second_order
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.quadrature.rules import gauss_hermite
from pyro_evidence.precision.choices import diagonal
from tests.models_for_tests.engine_models import positive
from tests.models_for_tests.grouped_models import fixed, groups, intercepts, problem_of, state_of

LME4 = {5: -50.00568, 7: -50.00500, 25: -50.00502}  # nAGQ; Laplace is -92.02628 there


@pytest.fixture
def cbpp(data_dir: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with (data_dir / "cbpp.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    herd = torch.tensor([int(r["herd"]) - 1 for r in rows])
    period = torch.tensor([int(r["period"]) - 1 for r in rows])
    X = torch.nn.functional.one_hot(period).double()
    X[:, 0] = 1.0
    size, y = (torch.tensor([float(r[n]) for r in rows]) for n in ("size", "incidence"))
    return X, herd, size, y


def herds(X: Tensor, herd: Tensor, size: Tensor, y: Tensor) -> None:
    b, sd = pyro.param("b", torch.zeros(4)), positive("sd", 1.0)
    with pyro.plate("herds", 15):
        a = pyro.sample("a", dist.Normal(0.0, sd))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Binomial(size, logits=X @ b + a[herd]), obs=y)


def saturated(size: Tensor, y: Tensor) -> float:
    """The log likelihood with a probability for each row, which lme4 leaves out above one node."""
    return sum(float(dist.Binomial(int(n), t / n).log_prob(t)) for n, t in zip(size, y, strict=True))


@pytest.mark.parametrize("nodes", LME4)
def test_cbpp_by_lme4(nodes: int, cbpp: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    posterior = LaplaceEvidence(herds, nodes=nodes).run(*cbpp)
    assert float(posterior.log_evidence) - saturated(*cbpp[2:]) == pytest.approx(LME4[nodes], abs=2e-5)
    assert float(posterior.log_evidence) > -92.02628  # on one scale with Laplace


def test_one_node_is_laplace_bit_by_bit() -> None:
    data = groups(12, 4)
    with_setting, without = (LaplaceEvidence(intercepts, **s).run(*data) for s in ({"nodes": 1}, {}))
    assert torch.equal(with_setting.log_evidence, without.log_evidence)
    assert all(torch.equal(with_setting.mode[n], without.mode[n]) for n in ("b", "w"))


def test_nodes_grow_until_the_error_is_what_was_asked_for() -> None:
    data = groups(60, 2, variance=4.0, seed=4)
    posterior = LaplaceEvidence(fixed, nodes="auto", stop=Stop(quadrature_tol=1e-3)).run(*data)
    assert posterior.log_evidence_error <= 1e-3
    assert posterior.state.problem.nodes > 7
    many = LaplaceEvidence(fixed, nodes=101).run(*data)
    assert float(posterior.log_evidence) == pytest.approx(float(many.log_evidence), abs=3e-3)


def test_what_does_not_settle_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_error, "GROWING", (3,))
    with pytest.warns(UserWarning, match=r"nodes='auto' ends at 3 nodes with an error of .* most of it is from b\["):
        LaplaceEvidence(fixed, nodes="auto").run(*groups(60, 2, variance=4.0, seed=4))


def test_groups_that_do_not_differ_are_pruned() -> None:
    X, group, num, _ = groups(40, 6, seed=6)
    generator = torch.Generator().manual_seed(6)
    y = (torch.rand(len(X), generator=generator) < (X @ torch.tensor([0.5, -0.5])).sigmoid()).double()
    posterior = LaplaceEvidence(fixed, nodes=7).run(X, group, num, y)
    w = posterior.hyperparameters["w"]
    expected = dist.Bernoulli(logits=X @ w).log_prob(y).sum()
    assert float(posterior.hyperparameters["s"]) == 0.0
    assert float(posterior.log_evidence) == pytest.approx(float(expected), abs=1e-9)


@pytest.fixture(scope="module")
def quadrature() -> LaplacePosterior:
    return LaplaceEvidence(intercepts, nodes=7).run(*groups(30, 5))


def test_draws_are_of_the_gaussian_around_the_modes(quadrature: LaplacePosterior) -> None:
    draws = quadrature.get_samples(20_000, seed=0)
    precision = quadrature.state.precision
    sd = precision.variance[0].sqrt()
    parts = quadrature.state.problem.joint.latents.slices
    for name in ("b", "w"):
        assert torch.allclose(draws[name].std(0), sd[parts[name]], rtol=0.05)
        assert torch.allclose(draws[name].mean(0), quadrature.mode[name], atol=0.03)
    b = torch.randn(len(sd))
    white = precision.whiten(b.unsqueeze(0))
    assert float(white.square().sum()) == pytest.approx(float(b @ torch.linalg.solve(dense(quadrature), b)), rel=1e-8)


def dense(posterior: LaplacePosterior) -> Tensor:
    """The covariance, column by column."""
    return posterior.state.precision.solve(torch.eye(len(posterior.state.u)))


def test_shared_coordinates_have_the_curvature_of_the_integral(quadrature: LaplacePosterior) -> None:
    marginal = replace(quadrature.state.problem.marginal, num=25)
    terms, p, u = marginal.density.terms(quadrature.state.theta), marginal.partition, quadrature.state.u
    h = 1e-3 * torch.eye(2)

    def value(move: Tensor) -> float:
        return marginal.place(terms, u[p.own], u[p.shared] + move).value

    second = [[(value(a + b) - value(a - b) - value(b - a) + value(-a - b)) / (4.0 * 1e-6) for a in h] for b in h]
    expected = torch.linalg.inv(-torch.tensor(second))
    assert torch.allclose(dense(quadrature)[p.shared][:, p.shared], expected, rtol=2e-3)


def test_log_evidence_error_is_two_nodes_more(quadrature: LaplacePosterior) -> None:
    state, error = quadrature.state, quadrature.log_evidence_error
    more = replace(state.problem.marginal, num=9)
    expected = more.log_evidence(more.find(state.theta, state.u)) - state.log_evidence
    assert error.signed == pytest.approx(float(expected), abs=1e-9)
    assert error == abs(error.signed)
    assert error.block.startswith("b[")
    assert error.method == "7 against 9 nodes"


def test_laplaces_error_is_what_quadrature_says() -> None:
    data = groups(40, 4, seed=2)
    posterior = LaplaceEvidence(intercepts, maximise=()).run(*data)
    better = state_of(intercepts, *data, nodes=25).log_evidence
    error = posterior.log_evidence_error
    assert error.signed == pytest.approx(float(better - posterior.log_evidence), rel=0.1)
    assert 0.0 < error.shared < error.signed


def test_blocks_have_a_check_each(quadrature: LaplacePosterior) -> None:
    found = quadrature.blocks("b", num_samples=2000)
    assert found.k_hat.shape == (30,)
    assert bool((found.k_hat < 0.9).all())
    assert found.names[3] == "b[3]"
    assert bool((found.laplace_error > 0).all())
    skewed = found.mean - quadrature.mode["b"]
    assert bool((skewed.abs() < 0.3 * found.sd).all())


def test_moments_of_blocks_are_those_of_a_grid(quadrature: LaplacePosterior) -> None:
    joint, state = quadrature.state.problem.joint, quadrature.state
    grid = torch.linspace(-8.0, 8.0, 2001)
    found = quadrature.blocks("b")
    for block in (0, 17):
        rows = state.u.expand(len(grid), -1).clone()
        rows[:, joint.latents.slices["b"].start + block] = grid
        weights = joint.log_joint(rows, state.theta).softmax(0)
        mean = weights @ grid
        assert float(found.mean[block]) == pytest.approx(float(mean), abs=1e-3)
        assert float(found.sd[block]) == pytest.approx(float((weights @ (grid - mean).square()).sqrt()), abs=1e-3)


def test_tails_side_by_side_are_tails_one_by_one() -> None:
    log_weights = torch.randn(600, 7) * torch.linspace(0.0, 3.0, 7)
    log_weights[:, 2] = -math.inf
    log_weights[:9, 2] = 0.0
    expected = [importance.checked(column).pareto_k for column in log_weights.mT]
    assert importance.pareto_shapes(log_weights).tolist() == pytest.approx(expected, abs=1e-9)


def test_importance_sampling_is_block_by_block(quadrature: LaplacePosterior) -> None:
    found = quadrature.diagnostics(4000, seed=1)
    assert found["num_blocks"] == 30
    assert found["pareto_k"] == pytest.approx(float(quadrature.blocks("b", 4000, seed=1).k_hat.max()), abs=1e-9)
    gap = found["log_evidence_importance"] - found["log_evidence"]
    assert abs(gap) < 4.0 * found["log_evidence_importance_se"] < 0.1


def test_summary_speaks_of_an_error_above_one_nat(capsys: pytest.CaptureFixture[str]) -> None:
    data = groups(250, 4)
    LaplaceEvidence(intercepts).run(*data).summary()
    said = capsys.readouterr().out
    assert "the log evidence is off by about +" in said
    assert "pass nodes=7" in said
    LaplaceEvidence(intercepts, nodes=7).run(*data).summary()
    assert "is off by about" not in capsys.readouterr().out


def crossed(y: Tensor, first: Tensor, second: Tensor, num: int) -> None:
    with pyro.plate("first", num):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("second", num):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=a[first] + b[second]), obs=y)


def walk(y: Tensor) -> None:
    x = pyro.sample("x", dist.Normal(0.0, 10.0).expand([len(y)]).to_event(1))
    pyro.sample("dx", dist.Normal(x[:-1], 0.7).to_event(1), obs=x[1:])
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x), obs=y)


def test_a_chain_has_no_blocks_and_a_second_order_term() -> None:
    y = (torch.rand(30) < 0.5).double()
    with pytest.raises(UnsupportedModel, match="nodes=7 asks for independent blocks"):
        LaplaceEvidence(walk, nodes=7).run(y)
    posterior = LaplaceEvidence(walk, start=Start(tour=0)).run(y)
    error = posterior.log_evidence_error
    assert "second-order" in error.method
    assert not error.block
    with pytest.raises(UnsupportedModel, match="but this model has none"):
        posterior.blocks("x")


def test_the_second_order_term_is_most_of_the_error_of_crossed_effects() -> None:
    first, second = (x.flatten() for x in torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"))
    y = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])  # skewed: both orders count
    state = state_of(crossed, y, first, second, 3)
    axis = torch.linspace(-6.0, 6.0, 25)
    a = torch.cartesian_prod(axis, axis, axis)
    log_a = dist.Normal(0.0, 1.0).log_prob(a).sum(-1)
    each = []
    for j in range(3):  # given all of a, the b are independent
        eta = a[:, None, :] + axis[None, :, None]
        rows = dist.Bernoulli(logits=eta).log_prob(y.reshape(3, 3)[:, j]).sum(-1)
        each.append((rows + dist.Normal(0.0, 1.0).log_prob(axis)).logsumexp(-1) + math.log(0.5))
    truth = float((log_a + sum(each)).logsumexp(0)) + 3.0 * math.log(0.5)
    error = second_order(state)
    gap = truth - float(state.log_evidence)
    assert error.signed == pytest.approx(gap, rel=0.25)


@pytest.mark.parametrize("nodes", [0, -3, 2.5, "many", True])
def test_letters_about_the_setting(nodes: object) -> None:
    with pytest.raises(BadInput, match="nodes="):
        LaplaceEvidence(intercepts, nodes=nodes)


def test_letter_beside_another_curvature() -> None:
    with pytest.raises(BadInput, match="must be the exact Hessian"):
        LaplaceEvidence(intercepts, nodes=5, curvature=diagonal)


def test_letters_about_sites(quadrature: LaplacePosterior) -> None:
    with pytest.raises(BadInput, match=r"share site 'w'.*\['b'\]"):
        quadrature.blocks("w")
    with pytest.raises(BadInput, match="expected a latent site in blocks"):
        quadrature.blocks("nowhere")


def test_saved_and_loaded(quadrature: LaplacePosterior, tmp_path: Path) -> None:
    quadrature.save(tmp_path / "fit.pt")
    again = LaplacePosterior.load(tmp_path / "fit.pt", intercepts)
    assert again.state.problem.nodes == 7
    assert torch.equal(again.log_evidence, quadrature.log_evidence)
    assert torch.allclose(again.get_samples(5, seed=1)["b"], quadrature.get_samples(5, seed=1)["b"])
    assert again.log_evidence_error == pytest.approx(quadrature.log_evidence_error, abs=1e-9)


def test_one_step_at_a_time() -> None:
    data, engine = groups(12, 4), LaplaceEvidence(intercepts, nodes=5)
    losses = [engine.step(*data) for _ in range(3)]
    assert losses[2] <= losses[1] <= losses[0]
    assert engine.posterior.state.problem.nodes == 5


def with_prior(X: Tensor, group: Tensor, num: int, y: Tensor) -> None:
    s = pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("groups", num):
        b = pyro.sample("b", dist.Normal(0.0, s))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=0.3 * X[:, 0] - 0.2 * X[:, 1] + b[group]), obs=y)


def test_scales_are_integrated_around_blocks() -> None:
    data = groups(10, 4)
    posterior = LaplaceEvidence(with_prior, nodes=15, stop=Stop(quadrature_tol=1e-4)).run(*data)
    assert posterior.marginalised_sites == ("s",)
    problem = problem_of(fixed, *data, nodes=25)
    theta, heights = problem.joint.initial_theta, []
    for x in torch.linspace(-7.0, 2.4, 48):
        theta[problem.joint.hypers.slices["s"]] = x
        given = float(laplace_state(problem, theta, problem.joint.initial_u).log_evidence)
        heights.append(given + float(dist.HalfNormal(1.0).log_prob(x.exp()) + x))
    expected = float(torch.tensor(heights).logsumexp(0)) + math.log(9.4 / 47)
    assert float(posterior.log_evidence) == pytest.approx(expected, abs=2e-3)


def scale_of_each_row(y: Tensor) -> None:
    """Student's t of four degrees of freedom, a normal with a precision of each row."""
    loc, scale = pyro.sample("loc", dist.Normal(0.0, 5.0)), pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(y)):
        precision = pyro.sample("precision", dist.Gamma(2.0, 2.0))
        pyro.sample("y", dist.Normal(loc, scale / precision.sqrt()), obs=y)


def test_a_scale_of_each_row_is_integrated_in_blocks_where_there_are_too_many() -> None:
    y = 1.0 + 0.5 * torch.randn(31, generator=torch.Generator().manual_seed(1)) / torch.linspace(0.3, 1.5, 31)
    posterior = LaplaceEvidence(scale_of_each_row).run(y)
    assert posterior.marginalised_sites == ("scale",)
    loc, u = torch.linspace(-1.0, 3.0, 201).unsqueeze(-1), torch.linspace(-3.0, 1.0, 201)
    log_joint = dist.Normal(0.0, 5.0).log_prob(loc) + dist.HalfNormal(1.0).log_prob(u.exp()) + u
    log_joint = log_joint + dist.StudentT(4.0, loc.unsqueeze(-1), u.exp().unsqueeze(-1)).log_prob(y).sum(-1)
    log_evidence = float(log_joint.flatten().logsumexp(0)) + 2.0 * math.log(0.02)
    assert float(posterior.log_evidence) == pytest.approx(log_evidence, abs=0.03)
    share, draws = log_joint.flatten().softmax(0).reshape(log_joint.shape), posterior.get_samples(400, seed=0)
    for values, site in ((loc, "loc"), (u.exp(), "scale")):
        mean = float((share * values).sum())
        sd = float((share * (values - mean).square()).sum()) ** 0.5
        assert float(draws[site].mean()) == pytest.approx(mean, abs=0.15 * sd)
        assert float(draws[site].std()) == pytest.approx(sd, rel=0.1)


def test_nodes_that_would_weigh_nothing_are_refused() -> None:
    assert float(gauss_hermite(MOST_NODES).log_weights.exp().min()) > 0.0
    assert float(gauss_hermite(MOST_NODES + 1).log_weights.exp().min()) == 0.0
    with pytest.raises(BadInput, match="expected at most 388"):
        LaplaceEvidence(intercepts, nodes=10**9)
