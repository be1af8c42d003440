"""A fit and everything that it returns leave the caller's process as it was."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import MCMC
from torch.distributions import constraints

from pyro_evidence import BadInput, LaplaceEvidence, LaplaceKernel, LaplacePosterior, Start
from tests.models_for_tests.posterior_models import Module, inputs, linear, mixture, mixture_data, regression_data


def surroundings() -> dict[str, Any]:
    """What a library could change behind its caller's back."""
    store = pyro.get_param_store()
    return {
        "settings": pyro.settings.get(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002 - the global one is what Pyro seeds
        "python": random.getstate(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "validation": torch.distributions.Distribution._validate_args,
        "params": {n: (id(store._params[n]), store[n].tolist()) for n in store},
        "constraints": {n: str(c) for n, c in store._constraints.items()},
        "handlers": len(pyro.poutine.runtime._PYRO_STACK),
    }


@pytest.fixture
def stored() -> None:
    """A store that is in use, by this model and by others."""
    pyro.param("alpha", torch.tensor(0.7), constraint=constraints.positive)
    pyro.param("others", torch.zeros(3))


@pytest.fixture
def posterior(stored) -> LaplacePosterior:
    return LaplaceEvidence(linear).run(*regression_data())


MEMBERS: dict[str, Callable[[LaplacePosterior], Any]] = {
    "numbers": lambda p: (p.log_evidence, p.log_hyperposterior, p.hyperparameters, p.mode, p.gamma, p.pruned),
    "draws": lambda p: (p.get_samples(3), p.get_samples(3, seed=1)),
    "model": lambda p: p.model,
    "guide": lambda p: p.guide,
    "quantiles": lambda p: (p.median(), p.quantiles([0.1, 0.9])),
    "log_prob": lambda p: p.log_prob(inputs(5), torch.zeros(5)),
    "diagnostics": lambda p: p.diagnostics(),
    "summary": lambda p: p.summary(),
    "repr": repr,
}


@pytest.mark.parametrize("name", MEMBERS)
def test_member_changes_nothing(name, posterior) -> None:
    before = surroundings()
    MEMBERS[name](posterior)
    assert surroundings() == before


def test_save_and_load_change_nothing(posterior, tmp_path: Path) -> None:
    before = surroundings()
    posterior.save(tmp_path / "fit.pt")
    LaplacePosterior.load(tmp_path / "fit.pt", linear)
    assert surroundings() == before


@pytest.mark.parametrize("validate", [True, False])
def test_run_and_step_change_nothing(validate, stored) -> None:
    pyro.enable_validation(validate)
    before = surroundings()
    LaplaceEvidence(linear, start=Start(restarts=2)).run(*regression_data())
    LaplaceEvidence(mixture).run(*mixture_data())
    LaplaceEvidence(linear).step(*regression_data())
    assert surroundings() == before


def test_a_fit_leaves_a_module_and_its_gradients_alone() -> None:
    module = Module()
    before = {n: v.detach().clone() for n, v in module.named_parameters()}
    posterior = LaplaceEvidence(module).run(*regression_data())
    posterior.diagnostics()
    posterior.log_prob(*regression_data())
    assert {n: v.tolist() for n, v in module.named_parameters()} == {n: v.tolist() for n, v in before.items()}
    assert all(v.grad is None and v.requires_grad for v in module.parameters())
    assert not list(pyro.get_param_store())


def test_a_fit_in_single_precision_changes_nothing(stored) -> None:
    torch.set_default_dtype(torch.float32)
    before = surroundings()
    LaplaceEvidence(linear, maximise=()).run(*(x.float() for x in regression_data())).diagnostics()
    assert surroundings() == before


def test_a_refusal_changes_nothing(stored) -> None:
    X, t = regression_data()
    before = surroundings()
    with pytest.raises(BadInput):
        LaplaceEvidence(linear).run(X, t / 0.0)
    with pytest.raises(BadInput):
        LaplaceEvidence(linear).run(X, t[:-1])
    assert surroundings() == before


def test_a_kernel_moves_torch_generator_and_nothing_else(stored) -> None:
    before = surroundings()
    MCMC(LaplaceKernel(linear), num_samples=3, warmup_steps=0, disable_progbar=True).run(*regression_data())
    after = surroundings()
    assert after.pop("torch") != before.pop("torch")
    assert after == before
