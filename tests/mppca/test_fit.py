"""EvidenceEM on mixtures of probabilistic PCA."""

import math
from operator import attrgetter
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, Start, Stop, class_conditional
from pyro_evidence.laplace.approximation import laplace_problem, laplace_state
from pyro_evidence.mixture import RandomWeights, Unregularised, WeightDecay, corrected, husmeier2000_update
from pyro_evidence.models import mppca as planes_model
from pyro_evidence.models.mppca import (
    DiagonalNoise,
    IsotropicNoise,
    Latents,
    PerColumn,
    explicit_latents,
    marginal,
    mppca,
)
from pyro_evidence.models.regression import Learned
from pyro_evidence.mppca import MPPCAPosterior
from pyro_evidence.mppca.recognise import recognise_mppca
from pyro_evidence.program import LogJoint
from tests.models_for_tests.mppca_cases import QUIET, SHORT, fit, my_model, near, planes


def test_two_planes_are_found(two: MPPCAPosterior) -> None:
    assert two.num_components == 2
    assert two.num_latents.sort().values.tolist() == [0, 2, 2]
    gamma = two.gamma["alpha"][two.active]
    assert bool((gamma > 8.5).all()) and bool((gamma < 9.0).all())  # of 10 loadings each, one only turns
    resp = two.responsibilities()
    near(resp.sum(-1), torch.ones(160))
    assert len(resp[::2].argmax(-1).unique()) == len(resp[1::2].argmax(-1).unique()) == 1


def test_a_search_that_ends_at_its_limit_says_so(two: MPPCAPosterior) -> None:
    assert not any("are used" in note for note in two.diagnostics(100)["notes"])  # three offered
    alpha = Learned(torch.ones(2))  # of two components, and no third
    full = fit(planes(), mppca(2, 2, alpha=alpha), stop=SHORT)
    assert any("every one of the model's 2 components is used" in note for note in full.diagnostics(100)["notes"])


def test_evidence_agrees_with_importance_sampling(two: MPPCAPosterior) -> None:
    found = two.diagnostics(4000)
    assert found["pareto_k"] < 0.8
    assert abs(found["log_evidence"] - found["log_evidence_importance"]) < 0.8


def test_the_mode_is_one_of_the_pyro_model(two: MPPCAPosterior) -> None:
    """Oracle: the log joint that NUTS would see, and its gradient."""
    joint = LogJoint(two.model, (planes(),))
    u = two.state.u.clone().requires_grad_()
    value = joint.log_joint(u, joint.initial_theta)
    near(value.detach(), two.state.log_joint)
    assert float(torch.autograd.grad(value, u)[0].abs().max()) < 1e-5
    near(two.log_prob(), joint.pointwise(two.state.u, joint.initial_theta)["y"].detach())


def test_curvature_is_that_of_the_pyro_model_across_the_orbit() -> None:
    """Oracle: one column has no orbit, so that Laplace's generic approximation is right, but for the two signs."""
    found = fit(planes(), mppca(2, 1), deletion=None)
    joint = LogJoint(found.model, (planes(),))
    state = laplace_state(laplace_problem(joint), joint.initial_theta, found.state.u)
    near(found.log_evidence, state.log_evidence + 2.0 * math.log(2.0), 1e-6)
    near(found.state.precision.variance[0], state.precision.variance[0], 1e-5)


def test_both_forms_have_the_same_density() -> None:
    """Oracle: the latent coordinate of each datum integrated by the trapezium rule."""
    Y = planes(6, 3)
    forms = [LogJoint(mppca(2, 1, latents=latents), (Y,)) for latents in (marginal, explicit_latents)]
    W = torch.tensor([[[1.0], [0.5], [-1.0]], [[-0.3], [0.8], [0.4]]])
    grid = torch.linspace(-8.0, 8.0, 161)
    theta = forms[0].initial_theta
    table = torch.stack(
        [forms[1].table(forms[1].latents.flat({"W": W, "x": torch.full((6, 1), float(x))}), theta) for x in grid]
    )
    with_x = table.logsumexp(-1) + dist.Normal(0.0, 1.0).log_prob(grid)[:, None]
    integrated = with_x.logsumexp(0) + (grid[1] - grid[0]).log()
    near(integrated.detach(), forms[0].pointwise(forms[0].latents.flat({"W": W}), theta)["y"].detach(), 1e-6)


def test_an_engine_takes_either_form() -> None:
    Y = planes()
    near(fit(Y, mppca(2, 2, latents=explicit_latents)).log_evidence, fit(Y, mppca(2, 2)).log_evidence)


def test_a_model_of_ones_own_is_recognised() -> None:
    Y = planes()
    found = EvidenceEM(my_model, stop=QUIET).run(Y)
    assert isinstance(found, MPPCAPosterior)
    assert found.hyperparameters.keys() == {"spread", "noise", "middle"}
    assert bool((found.hyperparameters["noise"] - 0.3).abs().max() < 0.05)
    joint = LogJoint(found.model, (Y,))
    near(joint.log_joint(found.state.u, joint.initial_theta), found.state.log_joint)


def test_structure_names_the_params() -> None:
    found = recognise_mppca(LogJoint(mppca(3, 2, alpha=PerColumn(), noise=DiagonalNoise()), (planes(),)))
    names = [list(x.totals(found.joint.hypers, torch.ones_like(x.offset))) for x in (found.alpha, found.beta)]
    assert (*names, found.mean, found.mixing) == (["alpha"], ["beta"], "mu", "mixing")
    assert found.ties.columnwise and found.ties.beta_group.unique().numel() == 15


@pytest.mark.parametrize("num_latents", [1, 2, 3])
def test_the_evidence_finds_the_number_of_columns(num_latents: int) -> None:
    for num in (50, 200):
        generator = torch.Generator().manual_seed(10 * num_latents + num)
        W = torch.randn(8, num_latents, generator=generator)
        Y = torch.randn(num, num_latents, generator=generator) @ W.mT + 0.5 * torch.randn(num, 8, generator=generator)
        found = fit(Y, mppca(1, 6, alpha=PerColumn()))
        assert found.num_latents.tolist() == [num_latents]
        assert int(found.hyperparameters["alpha"].isinf().sum()) == 6 - num_latents
        assert math.isfinite(float(found.log_evidence))


def test_units_change_nothing_else(two: MPPCAPosterior) -> None:
    Y = planes()
    other = fit(1000.0 * Y + 1e4)
    near(other.log_evidence, two.log_evidence - Y.numel() * math.log(1000.0), 1e-6)
    near(other.log_prob(), two.log_prob() - 5 * math.log(1000.0), 1e-6)
    near(other.hyperparameters["alpha"][other.active] * 1e6, two.hyperparameters["alpha"][two.active], 1e-4)


@pytest.mark.parametrize(("offset", "dtype"), [(1e9, torch.float64), (1e4, torch.float32)])
@pytest.mark.parametrize("latents", [marginal, explicit_latents])
def test_the_origin_may_be_far_away(two: MPPCAPosterior, offset: float, dtype: torch.dtype, latents: Latents) -> None:
    Y = (planes() + offset).to(dtype)
    found = fit(Y, mppca(3, 2, latents=latents))
    near(found.log_evidence, two.log_evidence, 1e-3)
    near(found.log_prob(), two.log_prob(), 0.02)
    near(found.transform().mean.square().sum(), two.transform().mean.square().sum(), 0.02)
    near(found.reconstruct() - offset, two.reconstruct(), 0.02)


@pytest.mark.parametrize("noise", [IsotropicNoise(), DiagonalNoise(), IsotropicNoise(10.0)])
@pytest.mark.parametrize("alpha", [Learned(), Learned(torch.ones(1)), PerColumn(), 0.5])
def test_every_setting_fits_in_single_precision(noise: IsotropicNoise | DiagonalNoise, alpha: Learned | float) -> None:
    found = fit(
        planes(40).float(),
        mppca(2, 2, alpha=alpha, noise=noise),
        start=Start(restarts=1),
        initial=RandomWeights(warm_up=5),
        stop=SHORT,
    )
    assert bool(found.log_prob().isfinite().all()) and found.mode["W"].dtype == torch.float32
    samples = found.get_samples(3, seed=0)["W"]
    assert samples.shape == (3, 2, 5, 2) and bool(samples.isfinite().all())


@pytest.mark.parametrize(
    "update", [husmeier2000_update, corrected, Unregularised(), Unregularised(rho=0.01), WeightDecay(0.1)]
)
def test_every_update_fits(update: object) -> None:
    assert bool(fit(planes(), update=update, deletion=None, stop=SHORT).log_prob().isfinite().all())


def test_an_update_without_a_form_is_refused() -> None:
    with pytest.raises(BadInput, match=r"attrgetter.* has no form"):
        fit(planes(), update=attrgetter("mixture"))


def test_steps_are_a_run() -> None:
    Y = planes()
    engine = EvidenceEM(mppca(3, 2), deletion=None, stop=Stop(num_steps=9, tolerance=0.0, throw=False, progress=False))
    whole = engine.run(Y)
    losses = [engine.step(Y) for _ in range(10)]
    near(torch.tensor(losses), -torch.tensor(whole.log_evidences), 1e-10)
    assert isinstance(engine.posterior, MPPCAPosterior) and engine.posterior.status.startswith("stepped by hand")
    near(engine.posterior.log_prob(), whole.log_prob(), 1e-10)


# -- what a posterior says ---------------------------------------------------------------------------------------------


def test_latent_coordinates_are_bayes_rule(two: MPPCAPosterior) -> None:
    """Oracle: the conditional of the joint Gaussian of x and y."""
    Y, at = planes(), two.analysers
    assert at is not None
    found, k = two.transform(Y[:3]), int(two.active.nonzero()[0])
    W, C = at.W[0, k], at.W[0, k] @ at.W[0, k].mT + at.beta[0, k].reciprocal().diag()
    gain = W.mT @ torch.linalg.inv(C)
    near(found.mean[:, k], (Y[:3] - at.mu[0, k]) @ gain.mT)
    near(found.covariance[0, k], torch.eye(2) - gain @ W)
    near(found.responsibilities, two.responsibilities()[:3])


def test_missing_values_are_integrated_out(two: MPPCAPosterior) -> None:
    """Oracle: the marginal and conditional of dense Gaussians."""
    Y, at = planes()[:4].clone(), two.analysers
    assert at is not None
    Y[0, 1], Y[1, :4], Y[2] = torch.nan, torch.nan, torch.nan
    for n, row in enumerate(Y):
        seen = ~row.isnan()
        parts, filled = [], []
        for k in two.active.nonzero().flatten():
            C = at.W[0, k] @ at.W[0, k].mT + at.beta[0, k].reciprocal().diag()
            away = row[seen] - at.mu[0, k, seen]
            log_det, known = torch.linalg.slogdet(C[seen][:, seen]).logabsdet, C[seen][:, seen]
            solved = torch.linalg.solve(known, away) if len(away) else away
            parts.append(at.log_mixing[0, k] - 0.5 * (away @ solved + log_det + len(away) * math.log(math.tau)))
            signal = C - at.beta[0, k].reciprocal().diag()
            filled.append(at.mu[0, k] + signal[:, seen] @ solved)
        table = torch.stack(parts)
        near(two.log_prob(Y)[n], table.logsumexp(0))
        near(two.reconstruct(Y)[n], table.softmax(0) @ torch.stack(filled))
    near(two.log_prob(Y)[3], two.log_prob()[3])
    near(two.transform(Y).mean[3], two.transform(planes()[:4]).mean[3])


def test_draws_have_the_moments_of_the_density(two: MPPCAPosterior) -> None:
    Y, drawn = planes(), two.sample(20_000, seed=0)
    scale = Y.std(0)
    assert float(((drawn.mean(0) - Y.mean(0)) / scale).abs().max()) < 0.05
    assert float((torch.cov(drawn.mT) - torch.cov(Y.mT)).abs().max() / scale.max() ** 2) < 0.08
    near(two.sample(3, seed=1), two.sample(3, seed=1))


def test_draws_of_loadings_lie_on_whole_orbits(two: MPPCAPosterior) -> None:
    k = int(two.active.nonzero()[0])
    W = two.get_samples(2000, seed=0)["W"][:, k]
    assert float(W.mean(0).abs().max()) < 0.1  # every rotation as often as its mirror image
    mode = two.mode["W"][k]
    near((W @ W.mT).mean(0), mode @ mode.mT, 0.15)


def test_principal_subspaces_are_canonical(two: MPPCAPosterior) -> None:
    Y = planes()
    resp = two.responsibilities()
    for k, found in enumerate(two.principal_subspaces()):
        if not two.active[k]:
            assert found is None
            continue
        assert found is not None and found.is_determined
        near(found.axes.mT @ found.axes, torch.eye(2))
        assert bool((found.variances.diff() < 0).all())
        assert bool((found.axes.gather(0, found.axes.abs().argmax(0, keepdim=True)) > 0).all())
        S = torch.cov(Y[resp[:, k] > 0.5].mT, correction=0)
        values = torch.linalg.eigvalsh(S).flip(-1)
        near(found.variances, values[:2], 0.1)


def test_equal_variances_are_said_to_leave_the_axes_open() -> None:
    from pyro_evidence.mppca.posterior import principal_subspace

    found = principal_subspace(torch.eye(4)[:, :3] * torch.tensor([2.0, 2.0, 1.0]), torch.ones(4))
    assert found.groups.tolist() == [0, 0, 1] and not found.is_determined
    assert "[0, 1] have equal variances" in str(found)
    assert principal_subspace(torch.zeros(4, 2), torch.ones(4)).axes.shape == (4, 0)


def test_a_posterior_survives_the_disk(two: MPPCAPosterior, tmp_path: Path) -> None:
    two.save(tmp_path / "fit.pt")
    again = MPPCAPosterior.load(tmp_path / "fit.pt", mppca(3, 2))
    near(again.log_evidence, two.log_evidence)
    near(again.log_prob(planes()), two.log_prob(planes()))
    near(again.gamma["alpha"], two.gamma["alpha"])


def test_what_is_pruned_survives_the_disk_where_a_few_rows_tell_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hyperparameters stay where the model has them, which takes them from other rows when it is loaded."""
    monkeypatch.setattr(planes_model, "FEW", 16)
    found = fit(planes(), start=Start(restarts=1))
    assert not bool(found.active.all())
    found.save(tmp_path / "fit.pt")
    again = MPPCAPosterior.load(tmp_path / "fit.pt", mppca(3, 2))
    near(again.log_evidence, found.log_evidence)
    near(again.hyperparameters["beta"], found.hyperparameters["beta"])


def test_a_model_with_explicit_latents_loads_what_it_was_fitted_to(tmp_path: Path) -> None:
    model = mppca(2, 1, latents=explicit_latents)
    found = EvidenceEM(model, start=Start(restarts=1)).run(planes()[:60])
    found.save(tmp_path / "fit.pt")
    near(MPPCAPosterior.load(tmp_path / "fit.pt", model).log_evidence, found.log_evidence)


def nuts_draws(found: MPPCAPosterior, latents: Latents, Y: Tensor, num: int, warm_up: int) -> Tensor:
    """Loadings by NUTS on either form, hyperparameters as found."""
    q, params = found.mode["W"].shape[-1], found.hyperparameters
    model = (
        found.model if latents is marginal else poutine.substitute(mppca(1, q, latents=explicit_latents), data=params)
    )
    begin = {"W": found.mode["W"]} | ({} if latents is marginal else {"x": found.transform(Y).mean[:, 0]})
    mcmc = MCMC(NUTS(model), num_samples=num, warmup_steps=warm_up, initial_params=begin, disable_progbar=True)
    mcmc.run(Y)
    W: Tensor = mcmc.get_samples()["W"]
    return W


@pytest.mark.parametrize("latents", [marginal, explicit_latents])
def test_nuts_runs_on_either_form(latents: Latents) -> None:
    Y = planes(12, 3)
    W = nuts_draws(fit(Y, mppca(1, 1), stop=SHORT), latents, Y, 3, 3)
    assert W.shape == (3, 1, 3, 1) and bool(W.isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize("latents", [marginal, explicit_latents])
def test_nuts_finds_the_same_loadings_on_either_form(latents: Latents) -> None:
    Y = planes(60, 3)
    found = fit(Y, mppca(1, 1))
    W = nuts_draws(found, latents, Y, 150, 100)
    W = W * (W * found.mode["W"]).sum((-3, -2, -1), keepdim=True).sign()
    sd = found.state.precision.variance[0].sqrt().reshape(found.mode["W"].shape)
    assert float(((W.mean(0) - found.mode["W"]) / sd).abs().max()) < 0.8
    assert float((W.std(0) / sd - 1.0).abs().max()) < 0.35


def test_nothing_global_changes() -> None:
    pyro.get_param_store()["mine"] = torch.ones(())
    Y = planes()
    state = torch.random.get_rng_state()
    found = fit(Y, stop=SHORT)
    found.get_samples(3, seed=0), found.sample(2), found.diagnostics(50), found.summary()
    assert torch.equal(state, torch.random.get_rng_state())
    assert list(pyro.get_param_store().keys()) == ["mine"]


def test_classes_by_their_densities() -> None:
    Y = planes(200)
    labels = torch.arange(200) % 2
    found = class_conditional(EvidenceEM(mppca(1, 2), stop=QUIET), Y[:100], labels[:100])
    assert bool((found.labels(Y[100:]) == labels[100:]).all())


# -- bad input ---------------------------------------------------------------------------------------------------------
