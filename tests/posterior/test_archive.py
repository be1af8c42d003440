"""Saved posteriors come back whole, over the same model, or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import (
    BadInput,
    LaplaceEvidence,
    LaplacePosterior,
    Start,
    damped,
    diagonal,
    exact_hessian,
    files,
    gauss_newton,
)
from pyro_evidence.numerics.newton import Density
from pyro_evidence.posterior import archive
from tests.installed import before
from tests.models_for_tests.posterior_models import (
    Module,
    ard,
    assert_exact,
    engine_of_supports,
    fitted_linear,
    fitted_logistic,
    inputs,
    linear,
    logistic,
    many_supports,
    mixture,
    mixture_data,
    other_linear,
    precision_prior,
    regression_data,
    supports_data,
)


def pruned_data() -> tuple[Tensor, Tensor]:
    X = torch.cat([inputs(), inputs(seed=5)], -1)
    return X, X[:, 0] - X[:, 1] + X[:, 2] + 0.5 * inputs(seed=6)[:, 0]


FITS: dict[str, Callable[[], tuple[Any, LaplaceEvidence, tuple[Tensor, ...]]]] = {
    "learned": lambda: (linear, LaplaceEvidence(linear), regression_data()),
    "held": lambda: (linear, LaplaceEvidence(linear, maximise=()), regression_data()),
    "supports": lambda: (many_supports, engine_of_supports(), supports_data()),
    "modes": lambda: (mixture, LaplaceEvidence(mixture, start=Start(restarts=4)), mixture_data()),
    "site": lambda: (precision_prior, LaplaceEvidence(precision_prior, maximise=["alpha"]), regression_data()),
    "chosen": lambda: (precision_prior, LaplaceEvidence(precision_prior, maximise=["alpha"]), regression_data()),
    "pruned": lambda: (ard, LaplaceEvidence(ard), pruned_data()),
    "all pruned": lambda: (ard, LaplaceEvidence(ard), (inputs(), inputs().sum(-1))),  # the means of the prior fit best
    "diagonal": lambda: (linear, LaplaceEvidence(linear, maximise=(), curvature=diagonal), regression_data()),
    "damped": lambda: (
        linear,
        LaplaceEvidence(linear, maximise=(), curvature=damped(exact_hessian, 0.123456789)),
        regression_data(),
    ),
    "single": lambda: (
        linear,
        LaplaceEvidence(linear, maximise=()),
        tuple(x.float() for x in regression_data()),
    ),
}


def words(posterior: LaplacePosterior) -> list[Any]:
    found = posterior.diagnostics(100)
    return [repr(posterior), posterior.status, posterior.failures, found["curvature"], found["failed_restarts"]]


def numbers(posterior: LaplacePosterior) -> dict[str, Any]:
    torch.manual_seed(0)
    conditioned = poutine.condition(posterior.model, data=posterior.mode)
    trace = poutine.trace(conditioned).get_trace(*posterior.state.problem.joint.args)
    return {
        "log_evidence": posterior.log_evidence,
        "log_hyperposterior": posterior.log_hyperposterior,
        "hyperparameters": posterior.hyperparameters,
        "mode": posterior.mode,
        "gamma": posterior.gamma,
        "pruned": posterior.pruned,
        "samples": posterior.get_samples(5, seed=0),
        "quantiles": posterior.quantiles([0.1, 0.9]),
        "log_likelihood": posterior.log_likelihood(),
        "guide": posterior.guide(),
        "model": trace.log_prob_sum(),
        "diagnostics": {n: v for n, v in posterior.diagnostics(100).items() if isinstance(v, float | int)},
        "log_evidences": posterior.log_evidences,
        "restarts": posterior.restarts,
    }


def assert_same(loaded: LaplacePosterior, posterior: LaplacePosterior) -> None:
    assert words(loaded) == words(posterior)
    torch.testing.assert_close(numbers(loaded), numbers(posterior), rtol=1e-12, atol=1e-12, equal_nan=True)
    assert torch.equal(loaded.state.u, posterior.state.u)
    assert type(loaded.state.precision) is type(posterior.state.precision)


@pytest.mark.parametrize("name", FITS)
def test_every_member_comes_back(name, tmp_path: Path) -> None:
    model, engine, data = FITS[name]()
    posterior = engine.run(*data)
    posterior.save(tmp_path / "fit.pt")
    loaded = type(posterior).load(tmp_path / "fit.pt", model)
    assert_same(loaded, posterior)


@pytest.mark.parametrize("maximise", [None, ()])
def test_a_module_comes_back_in_another_instance(maximise, tmp_path: Path) -> None:
    posterior = LaplaceEvidence(Module(), maximise=maximise).run(*regression_data())
    posterior.save(tmp_path / "fit.pt")
    loaded = LaplacePosterior.load(tmp_path / "fit.pt", Module())
    assert_same(loaded, posterior)


def test_nothing_is_fitted(tmp_path: Path, monkeypatch) -> None:
    fitted_logistic().save(tmp_path / "fit.pt")
    for name in ("search_modes", "laplace_state", "state_at"):
        monkeypatch.setattr(f"pyro_evidence.laplace.approximation.{name}", None)
    loaded = LaplacePosterior.load(tmp_path / "fit.pt", logistic)
    assert_exact(loaded.log_evidence, fitted_logistic().log_evidence)


def test_a_file_needs_no_trust(tmp_path: Path) -> None:
    fitted_logistic().save(tmp_path / "fit.pt")
    content = files.read(tmp_path / "fit.pt")
    assert content["format"] == archive.FORMAT
    assert [p.name for p in tmp_path.iterdir()] == ["fit.pt"]


def test_the_store_of_the_moment_does_not_matter(tmp_path: Path) -> None:
    pyro.param("alpha", torch.tensor(7.0), constraint=constraints.positive)
    posterior = LaplaceEvidence(linear, maximise=()).run(*regression_data())
    posterior.save(tmp_path / "fit.pt")
    pyro.clear_param_store()
    pyro.param("alpha", torch.zeros(3))  # of another model, in another shape
    loaded = LaplacePosterior.load(tmp_path / "fit.pt", linear)
    assert_exact(loaded.hyperparameters, {"alpha": torch.tensor(7.0), "beta": torch.tensor(4.0)})
    assert pyro.param("alpha").shape == (3,)


def odd(X: Tensor, things: list[Any], t: Tensor | None = None, *, power: int, shift: float | None = None) -> None:
    """Takes arguments of every kind that a file can hold."""
    assert things == [True, None, ("word", {"key": 3, 4: torch.float32}), 2.5]
    assert type(power) is int
    assert shift is None
    w = pyro.sample("w", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    pyro.sample("t", dist.Normal(X.double() ** power @ w, 1.0).to_event(1), obs=t)


def test_arguments_come_back_exactly(tmp_path: Path) -> None:
    X, t = regression_data()
    X = (3 * X).round().to(torch.int32)
    things = [True, None, ("word", {"key": 3, 4: torch.float32}), 2.5]

    def model(X, *args, **kwargs):
        return odd(X, *args, **kwargs)

    engine = LaplaceEvidence(in_double(model))
    posterior = engine.run(X, things, power=2, t=t)
    posterior.save(tmp_path / "fit.pt")
    joint = LaplacePosterior.load(tmp_path / "fit.pt", in_double(odd)).state.problem.joint
    assert joint.args[0].dtype == torch.int32
    assert torch.equal(joint.args[0], X)
    assert joint.args[1:] == (things,)
    assert joint.kwargs.keys() == {"power", "t"}
    assert torch.equal(joint.kwargs["t"], t)


def in_double(model):
    """Integer inputs, real latents."""

    def wrapped(X, *args, **kwargs):
        return model(X.double(), *args, **kwargs)

    return wrapped


def test_a_view_is_saved_without_the_storage_behind_it(tmp_path: Path) -> None:
    X, t = regression_data()
    large = torch.zeros(1000, 1000)
    large[:30, :2] = X
    posterior = LaplaceEvidence(linear, maximise=()).run(large[:30, :2], t.expand(2, 30)[1])
    posterior.save(tmp_path / "fit.pt")
    assert (tmp_path / "fit.pt").stat().st_size < 20_000
    assert_exact(LaplacePosterior.load(tmp_path / "fit.pt", linear).log_evidence, fitted_linear().log_evidence)


class Text(str):
    """A string that only its own module can make."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [(object(), "object"), (Text("a"), "Text"), ({Text("key"): 1}, "dict")],
    ids=["object", "subclass", "key"],
)
@pytest.mark.parametrize("where", ["argument 2", "argument 'option'"])
def test_an_argument_that_a_file_cannot_hold_is_refused(value, kind, where, tmp_path: Path) -> None:
    def with_option(X, t, *args, **kwargs):
        return linear(X, t)

    engine = LaplaceEvidence(with_option, maximise=())
    posterior = engine.run(*regression_data(), *([value] if where == "argument 2" else []), option=value)
    with pytest.raises(BadInput, match=f"{where} of the model is a {kind}, .* functools.partial"):
        posterior.save(tmp_path / "fit.pt")
    assert not list(tmp_path.iterdir())


def test_the_place_of_such_an_argument_is_given(tmp_path: Path) -> None:
    def with_option(X, t, options):
        return linear(X, t)

    posterior = LaplaceEvidence(with_option, maximise=()).run(*regression_data(), {"net": [1, object()]})
    with pytest.raises(BadInput, match=r"argument 2\['net'\]\[1\] of the model is a object"):
        posterior.save(tmp_path / "fit.pt")


def squared_slope(density: Density, u: Tensor, theta: Tensor) -> Tensor:
    """A curvature of the user's own."""
    return exact_hessian(density, u, theta) + torch.eye(u.shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("curvature", [gauss_newton, damped(damped(exact_hessian, 0.5), 0.25)])
def test_a_curvature_of_ours_comes_back(curvature, tmp_path: Path) -> None:
    LaplaceEvidence(linear, maximise=(), curvature=curvature).run(*regression_data()).save(tmp_path / "fit.pt")
    loaded = LaplacePosterior.load(tmp_path / "fit.pt", linear)
    assert loaded.state.problem.curvature == curvature
    assert loaded.diagnostics(10)["curvature"] == curvature.__name__


def test_a_curvature_of_the_users_keeps_its_name(tmp_path: Path) -> None:
    LaplaceEvidence(linear, maximise=(), curvature=squared_slope).run(*regression_data()).save(tmp_path / "fit.pt")
    with pytest.warns(UserWarning, match=r"curvature in the file, squared_slope, .* is computed anew"):
        state = LaplacePosterior.load(tmp_path / "fit.pt", linear).state
    with pytest.raises(BadInput, match=r"saved with curvature squared_slope, .* cannot hold"):
        state.problem.curvature(state.problem.density, state.u, state.theta)


def three_inputs(X: Tensor, t: Tensor | None = None) -> Tensor:
    return linear(torch.cat([X, X[:, :1]], -1), t)


def other_names(X: Tensor, t: Tensor | None = None) -> None:
    v = pyro.sample("v", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    pyro.sample("t", dist.Normal(X @ v, 0.5).to_event(1), obs=t)


def without_params(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(2), 2.0**0.5).to_event(1))
    pyro.sample("t", dist.Normal(X @ w, 0.5).to_event(1), obs=t)


@pytest.mark.parametrize("model", [three_inputs, other_names, without_params, many_supports])
def test_a_model_of_other_sites_is_refused(model, tmp_path: Path) -> None:
    fitted_linear().save(tmp_path / "fit.pt")
    with pytest.raises(BadInput, match=r"the file holds sites .*'w': \[2\]|do not fit this model"):
        LaplacePosterior.load(tmp_path / "fit.pt", model)


def wider_prior(X: Tensor, t: Tensor | None = None) -> Tensor:
    with poutine.scale(scale=1.01):
        return linear(X, t)


@pytest.mark.parametrize("model", [other_linear, wider_prior])
def test_a_model_of_the_same_sites_and_another_density_is_refused(model, tmp_path: Path) -> None:
    fitted_linear().save(tmp_path / "fit.pt")
    with pytest.raises(BadInput, match="the density is another"):
        LaplacePosterior.load(tmp_path / "fit.pt", model)


def test_a_density_that_agrees_at_the_mode_alone_is_refused(tmp_path: Path) -> None:
    X, t = regression_data()
    t = t - X @ torch.linalg.lstsq(X, t.unsqueeze(-1)).solution[:, 0]  # now the mode is 0, its own mirror image
    LaplaceEvidence(linear, maximise=()).run(X, t).save(tmp_path / "fit.pt")

    def steeper(X, t=None):
        alpha = pyro.param("alpha", X.new_tensor(0.5), constraint=constraints.positive)
        beta = pyro.param("beta", X.new_tensor(4.0), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(X.new_zeros(2), alpha.rsqrt()).to_event(1))
        pyro.sample("t", dist.Normal(3.0 * X @ w, beta.rsqrt()).to_event(1), obs=t)

    LaplacePosterior.load(tmp_path / "fit.pt", linear)
    with pytest.raises(BadInput, match="the density is another"):
        LaplacePosterior.load(tmp_path / "fit.pt", steeper)


def foreign_files(folder: Path) -> dict[str, Path]:
    torch.save({"weight": torch.ones(3)}, folder / "weights.pt")
    torch.save(torch.nn.Linear(2, 2), folder / "module.pt")
    torch.save([1, 2], folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"format": "pyro_evidence laplace posterior 0"}, folder / "version.pt")
    (folder / "text.pt").write_text("alpha = 0.5\n")
    (folder / "empty.pt").touch()
    (folder / "folder.pt").mkdir()
    fitted_linear().save(folder / "fit.pt")
    (folder / "short.pt").write_bytes((folder / "fit.pt").read_bytes()[:-100])
    return {p.stem: p for p in folder.iterdir() if p.stem != "fit"}


@pytest.mark.parametrize("name", ["weights", "module", "old", "version", "text", "empty", "folder", "short"])
def test_a_foreign_file_is_refused(name, tmp_path: Path) -> None:
    path = foreign_files(tmp_path)[name]
    unsafe = "|earlier format, which torch .* cannot read safely" if before("2.10") else ""
    with pytest.raises(BadInput, match=rf"{name}\.pt .*(posterior\.save\(path\) wrote{unsafe})"):
        LaplacePosterior.load(path, linear)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LaplacePosterior.load(tmp_path / "nowhere.pt", linear)


@pytest.mark.parametrize("first", range(4))
def test_a_damaged_byte_is_found_or_harmless(first, tmp_path: Path) -> None:
    posterior = fitted_linear()
    posterior.save(tmp_path / "fit.pt")
    whole = (tmp_path / "fit.pt").read_bytes()
    found = 0
    for position in range(first * 23, len(whole), 97):
        damaged = bytearray(whole)
        damaged[position] ^= 0x55
        (tmp_path / "fit.pt").write_bytes(damaged)
        try:
            loaded = LaplacePosterior.load(tmp_path / "fit.pt", linear)
        except BadInput:
            found += 1
        else:
            assert torch.equal(loaded.get_samples(2, seed=0)["w"], posterior.get_samples(2, seed=0)["w"])
            assert torch.equal(loaded.log_evidence, posterior.log_evidence)
    assert found > 5


def test_saving_again_replaces_the_file_and_failing_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "fit.pt"
    fitted_linear().save(path)
    fitted_logistic().save(str(path))
    assert_exact(LaplacePosterior.load(str(path), logistic).log_evidence, fitted_logistic().log_evidence)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        fitted_linear().save(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fit.pt", "folder"]


def test_load_asks_for_the_device(tmp_path: Path) -> None:
    fitted_linear().save(tmp_path / "fit.pt")
    loaded = LaplacePosterior.load(tmp_path / "fit.pt", linear, map_location="cpu")
    assert loaded.state.u.device.type == "cpu"


def test_a_file_is_not_read_by_torch(tmp_path: Path, monkeypatch) -> None:
    fitted_linear().save(tmp_path / "fit.pt")
    monkeypatch.setattr(torch, "load", None)
    LaplacePosterior.load(tmp_path / "fit.pt", linear)


@pytest.mark.parametrize("path", [None, 3, ["fit.pt"]])
def test_a_path_that_is_none_is_refused(path) -> None:
    with pytest.raises(BadInput, match=r"path is a .*; expected the name of a file"):
        LaplacePosterior.load(path, linear)
    with pytest.raises(BadInput, match=r"path is a .*; expected the name of a file"):
        fitted_linear().save(path)
