"""Hierarchies whose inner part is no Gaussian, against long runs of NUTS that benchmarks/long_nuts.py has stored."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.posterior.nested import NestedPosterior
from pyro_evidence.program.log_joint import LogJoint
from tests.models_for_tests.long_runs import LONG_RUNS, captures, captures_summed, lives
from tests.models_for_tests.sampled_scales import generated

STORED = json.loads((Path(__file__).resolve().parents[1] / "oracles" / "long_nuts.json").read_text())
SLOW = {"captures"}
NAMES = [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in STORED]


@cache
def fitted(name: str) -> NestedPosterior:
    case = LONG_RUNS[name]
    posterior = LaplaceEvidence(case.model, marginalise=case.named, stop=Stop(progress=False)).run(case.data())
    assert isinstance(posterior, NestedPosterior)
    return posterior


def is_near(mean: Tensor, sd: Tensor, name: str, site: str) -> None:
    """Within .1 standard deviations and a tenth, and three standard errors of the chains."""
    known = STORED[name]["sites"][site]
    true_mean, true_sd, number = (torch.tensor(known[key]) for key in ("mean", "sd", "n_eff"))
    error = 3.0 * number.rsqrt()
    assert bool(((mean.reshape(-1) - true_mean).abs() < true_sd * (0.1 + error)).all())
    assert bool(((sd.reshape(-1) / true_sd - 1.0).abs() < 0.1 + error / math.sqrt(2.0)).all())


@pytest.mark.parametrize("name", NAMES)
def test_draws_have_the_means_and_deviations_of_long_chains(name: str) -> None:
    posterior = fitted(name)
    assert posterior.marginalised_sites == LONG_RUNS[name].marginalised
    draws = posterior.get_samples(2000, seed=0)
    for site in draws.keys() & STORED[name]["sites"].keys():
        is_near(draws[site].mean(0), draws[site].std(0), name, site)


@pytest.mark.parametrize("name", NAMES)
def test_margins_have_the_means_and_deviations_of_long_chains(name: str) -> None:
    for site in STORED[name]["sites"].keys() & fitted(name).mode.keys():
        found = fitted(name).marginal(site)
        is_near(found.mean, found.sd, name, site)


def test_lives_that_are_enumerated_are_those_summed_out_on_paper() -> None:
    forms = [LogJoint(model, (lives(),)) for model in (captures, captures_summed)]
    for u in generated(3, 9):
        first, second = (float(joint.log_joint(u, joint.initial_theta)) for joint in forms)
        assert first == pytest.approx(second, abs=1e-9)
