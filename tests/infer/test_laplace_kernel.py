"""``MCMC(LaplaceKernel(model), ...)``: the posterior behind the interface of MCMC."""

import pickle
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, Predictive
from pyro.infer.mcmc import StreamingMCMC
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import RVM, BadInput, EvidenceEM, LaplaceEvidence, LaplaceKernel, Start, exact_hessian
from tests.models_for_tests.posterior_models import (
    Module,
    assert_approx,
    assert_exact,
    engine_of_supports,
    fitted_linear,
    fitted_supports,
    inputs,
    linear,
    linear_log_evidence,
    linear_posterior,
    logistic,
    many_supports,
    mixture,
    mixture_data,
    regression_data,
    supports_data,
)


def run(kernel: LaplaceKernel, *args: Any, num_samples: int = 200, **settings: Any) -> MCMC:
    mcmc = MCMC(kernel, num_samples=num_samples, warmup_steps=0, disable_progbar=True, **settings)
    mcmc.run(*args)
    return mcmc


def held_linear() -> LaplaceKernel:
    return LaplaceKernel(LaplaceEvidence(linear, maximise=()))


@pytest.mark.parametrize("num_chains", [1, 2])
def test_draws_have_the_closed_forms_moments(num_chains) -> None:  # 4 standard errors
    num = 2000
    w = run(held_linear(), *regression_data(), num_samples=num, num_chains=num_chains).get_samples()["w"]
    mean, covariance = linear_posterior(*regression_data())
    total, variance = num * num_chains, covariance.diagonal()
    assert w.shape == (total, 2)
    assert ((w.mean(0) - mean).abs() < 4.0 * (variance / total).sqrt()).all()
    noise = ((variance[:, None] * variance + covariance**2) / total).sqrt()
    assert ((w.mT.cov() - covariance).abs() < 4.0 * noise).all()


@pytest.mark.parametrize(("model", "data"), [(many_supports, supports_data()), (mixture, mixture_data())])
def test_draws_are_shaped_and_constrained_as_those_of_the_posterior(model, data) -> None:
    engine = LaplaceEvidence(model, marginalise=(), start=Start(tour=0))
    mcmc = run(LaplaceKernel(engine), *data, num_samples=7, num_chains=2)
    ours, expected = mcmc.get_samples(), mcmc.kernel.posterior.get_samples(14)
    assert {n: (v.shape, v.dtype) for n, v in ours.items()} == {n: (v.shape, v.dtype) for n, v in expected.items()}
    assert {n: v.shape[:2] for n, v in mcmc.get_samples(group_by_chain=True).items()} == dict.fromkeys(ours, (2, 7))


def test_draws_are_of_all_modes() -> None:
    def sign_unknown(t: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 3.0))
        pyro.sample("t", dist.Normal(a**2, 0.5), obs=t)

    mcmc = MCMC(LaplaceKernel(sign_unknown), num_samples=100, warmup_steps=0, disable_progbar=True)
    torch.manual_seed(0)
    mcmc.run(torch.tensor(4.0))
    a = mcmc.get_samples()["a"]
    assert 30 < int((a > 1.0).sum()) < 70 and bool((a.abs() > 1.0).all())


def test_draws_lie_in_the_support_and_around_the_mode() -> None:
    draws = run(LaplaceKernel(engine_of_supports()), *supports_data(), num_samples=400).get_samples()
    assert constraints.simplex.check(draws["probs"]).all()
    assert constraints.corr_cholesky.check(draws["corr"]).all()
    for name, value in fitted_supports().median().items():
        above = (draws[name] > value).double().mean(0)
        real = draws[name].std(0) > 0.0  # the corners of a Cholesky factor are constants
        if name in ("a", "b", "chance", "scale"):  # coordinate by coordinate, so the median is kept
            assert ((above[real] - 0.5).abs() < 4.0 * 0.5 / 400**0.5).all()


def test_chains_are_different_and_a_seed_repeats_them() -> None:
    draws = []
    for seed in (0, 0, 1):
        pyro.set_rng_seed(seed)
        mcmc = run(held_linear(), *regression_data(), num_samples=5, num_chains=2)
        draws.append(mcmc.get_samples(group_by_chain=True)["w"])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0][0], draws[0][1])


def test_diagnostics_are_given_for_each_chain() -> None:
    mcmc = run(held_linear(), *regression_data(), num_chains=2)
    found = mcmc.diagnostics()
    expected = float(linear_log_evidence(*regression_data()))
    assert found["divergences"] == {"chain 0": [], "chain 1": []}
    assert found["log evidence"] == {"chain 0": pytest.approx(expected), "chain 1": pytest.approx(expected)}
    assert (found["w"]["r_hat"] < 1.05).all()


def test_summary_is_that_of_mcmc(capsys) -> None:
    run(held_linear(), *regression_data()).summary()
    text = capsys.readouterr().out
    assert "w[1]" in text
    assert "Number of divergences: 0" in text


def test_progress_shows_the_log_evidence() -> None:
    kernel = held_linear()
    kernel.setup(0, *regression_data())
    assert kernel.logging() == {"log evidence": f"{float(fitted_linear().log_evidence):.3f}"}


@pytest.mark.filterwarnings("ignore::UserWarning:arviz")
@pytest.mark.parametrize("num_chains", [1, 2])
def test_arviz_takes_it(num_chains) -> None:
    arviz = pytest.importorskip("arviz")
    mcmc = run(held_linear(), *regression_data(), num_samples=50, num_chains=num_chains)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ArviZ: one chain is few, and X @ w cannot be vectorised
        data = arviz.from_pyro(mcmc)
    assert data.posterior["w"].shape == (num_chains, 50, 2)
    assert data.sample_stats["diverging"].shape == (num_chains, 50)
    assert not data.sample_stats["diverging"].any()
    assert data.observed_data["t"].shape == (30,)


def test_warmup_is_refused() -> None:
    mcmc = MCMC(held_linear(), num_samples=5, warmup_steps=5, disable_progbar=True)
    with pytest.raises(BadInput, match=r"warmup_steps=5: .* pass MCMC\(\.\.\., warmup_steps=0\)"):
        mcmc.run(*regression_data())


def test_initial_params_are_refused() -> None:
    mcmc = MCMC(
        held_linear(), num_samples=5, warmup_steps=0, initial_params={"w": torch.zeros(2)}, disable_progbar=True
    )
    with pytest.raises(BadInput, match="initial_params cannot be set"):
        mcmc.run(*regression_data())


def test_before_the_fit_it_says_so() -> None:
    kernel = LaplaceKernel(linear)
    assert kernel.model is linear
    assert kernel.posterior is None
    for ask in (kernel.diagnostics, kernel.logging, lambda: kernel.sample({}), lambda: kernel.initial_params):
        with pytest.raises(BadInput, match="not fitted yet"):
            ask()


def test_a_refusal_of_the_engine_comes_through() -> None:
    X, t = regression_data()
    with pytest.raises(BadInput, match="cannot be run on these arguments"):
        run(LaplaceKernel(linear), X, t[:-1])


def test_the_model_has_the_fitted_hyperparameters() -> None:
    kernel = LaplaceKernel(linear)
    mcmc = run(kernel, *regression_data(), num_samples=500)
    assert kernel.posterior is not None
    alpha = kernel.posterior.hyperparameters["alpha"]
    trace = pyro.poutine.trace(kernel.model).get_trace(*regression_data())
    assert_exact(trace.nodes["alpha"]["value"], alpha)
    t = Predictive(kernel.model, mcmc.get_samples())(inputs(4))["t"]
    assert t.shape == (500, 4)
    assert not list(pyro.get_param_store())


def test_first_params_are_the_mode() -> None:
    kernel = LaplaceKernel(engine_of_supports())
    kernel.setup(0, *supports_data())
    assert kernel.posterior is not None
    assert kernel.transforms is not None
    for name, value in kernel.initial_params.items():
        assert_approx(kernel.transforms[name].inv(value), kernel.posterior.mode[name])


def test_settings_of_the_engine_are_kept_and_the_engine_is_left_alone() -> None:
    engine = LaplaceEvidence(mixture, start=Start(restarts=4), curvature=exact_hessian)
    kernel = LaplaceKernel(engine)
    run(kernel, *mixture_data(), num_samples=2)
    assert kernel.posterior is not None
    assert kernel.posterior.restarts.shape == (4,)
    with pytest.raises(BadInput, match="nothing is fitted yet"):
        _ = engine.posterior


def test_a_kernel_can_be_used_again_on_other_data() -> None:
    kernel = held_linear()
    mcmc = run(kernel, *regression_data(), num_samples=500)
    X, t = regression_data()
    mcmc.run(X, -t)
    mean, covariance = linear_posterior(X, -t)
    assert ((mcmc.get_samples()["w"].mean(0) - mean).abs() < 4.0 * (covariance.diagonal() / 500).sqrt()).all()
    other = run(kernel, X[:20], t[:20], num_samples=4)
    assert other.diagnostics()["log evidence"]["chain 0"] == pytest.approx(float(linear_log_evidence(X[:20], t[:20])))


def test_a_kernel_for_a_module() -> None:
    draws = run(LaplaceKernel(Module()), *regression_data(), num_samples=4).get_samples()
    assert {n: v.shape for n, v in draws.items()} == {"layer.weight": (4, 1, 2)}


def test_single_precision_gives_single_precision() -> None:
    torch.set_default_dtype(torch.float32)
    draws = run(held_linear(), *(x.float() for x in regression_data()), num_samples=4).get_samples()
    assert draws["w"].dtype == torch.float32


def test_a_finished_run_can_be_pickled() -> None:
    mcmc = run(LaplaceKernel(logistic), inputs(20), (inputs(20, seed=2)[:, 0] > 0.0).to(torch.float64))
    again = pickle.loads(pickle.dumps(mcmc))
    assert torch.equal(again.get_samples()["w"], mcmc.get_samples()["w"])
    assert_exact(again.kernel.posterior.log_evidence, mcmc.kernel.posterior.log_evidence)


@pytest.mark.slow
def test_spawned_chains_see_the_held_params(monkeypatch) -> None:
    monkeypatch.setattr("pyro.infer.mcmc.api.mp.cpu_count", lambda: 3)  # two at once, however few cores
    pyro.param("alpha", torch.tensor(1e4), constraint=constraints.positive)  # the model itself says 0.5
    mcmc = run(held_linear(), *regression_data(), num_samples=100, num_chains=2, mp_context="spawn")
    w = mcmc.get_samples(group_by_chain=True)["w"]
    mean, covariance = linear_posterior(*regression_data(), alpha=1e4)
    assert w.shape == (2, 100, 2)
    assert not torch.equal(w[0], w[1])
    assert ((w.mean((0, 1)) - mean).abs() < 4.0 * (covariance.diagonal() / 200).sqrt()).all()
    found = mcmc.diagnostics()["log evidence"]
    expected = float(linear_log_evidence(*regression_data(), alpha=1e4))
    assert list(found.values()) == [pytest.approx(expected), pytest.approx(expected)]
    assert mcmc.kernel.posterior.hyperparameters["alpha"] == pytest.approx(1e4)


def test_streaming_mcmc_takes_it_too() -> None:
    streaming = StreamingMCMC(held_linear(), num_samples=400, warmup_steps=0, disable_progbar=True)
    streaming.run(*regression_data())
    found: dict[Any, Tensor] = streaming.get_statistics(group_by_chain=False)
    mean, covariance = linear_posterior(*regression_data())
    assert found
    means = [v["mean"] for k, v in found.items() if "w" in str(k) and "mean" in v]
    assert len(means) == 1
    assert ((means[0] - mean).abs() < 4.0 * (covariance.diagonal() / 400).sqrt()).all()


def test_an_engine_that_fits_by_laplace_is_taken_and_another_named() -> None:
    mcmc = MCMC(LaplaceKernel(EvidenceEM(mixture)), num_samples=20, warmup_steps=0, disable_progbar=True)
    mcmc.run(*mixture_data())
    assert all(len(v) == 20 for v in mcmc.get_samples().values())
    with pytest.raises(BadInput, match=r"LaplaceKernel\(RVM\(...\)\): expected a Pyro model, or LaplaceEvidence"):
        LaplaceKernel(RVM(linear))  # type: ignore[arg-type]
