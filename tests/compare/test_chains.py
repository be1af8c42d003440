"""Chains of NUTS here and in other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, LaplaceEvidence, Stop, compare
from pyro_evidence.compare import NUTSRun, arviz_groups
from pyro_evidence.compare.chains import run_chains
from tests.models_for_tests.exact_models import straight_data


def shrunk(X: Tensor, y: Tensor) -> None:
    """The prior precision is a param that other processes would not know."""
    alpha = pyro.param("alpha", torch.tensor(1.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def test_other_processes_know_the_hyperparameters_and_the_dtype() -> None:
    X, y = straight_data()
    pyro.get_param_store().setdefault("alpha", torch.tensor(1e4), constraints.positive)  # all weights nearly 0
    engines = {
        "laplace": LaplaceEvidence(shrunk, maximise=()),
        "nuts": NUTSRun(num_samples=60, warmup_steps=30, num_chains=2),
    }
    found = compare(shrunk, X, y, engines=engines)
    draws = found.runs["nuts"].draws["w"]
    assert not found.runs["nuts"].notes, found.notes
    assert draws.shape == (2, 60, 3)
    assert draws.dtype == torch.float64
    assert 0.006 < float(draws.std()) < 0.02
    assert not torch.equal(draws[0], draws[1])


def test_a_model_that_cannot_be_pickled_runs_here_and_says_so() -> None:
    x = torch.zeros(3)
    before = torch.random.get_rng_state()
    found = run_chains(lambda x: location(x), ((x,), {}), (15, 10), [0, 1])
    assert "ran one after the other" in found.note
    assert found.draws["mean"].shape == (2, 15)
    alone = [run_chains(location, ((x,), {}), (15, 10), [seed]) for seed in (0, 1)]
    torch.testing.assert_close(found.draws["mean"], torch.cat([a.draws["mean"] for a in alone]))
    assert found.get_samples()["mean"].shape == (30,)
    assert found.get_samples(4, group_by_chain=True)["mean"].shape == (2, 4)
    torch.random.set_rng_state(before)


def location(x: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)


SCRIPT = """
import torch
from pyro_evidence.compare.chains import run_chains
from tests.compare.test_chains import location
found = run_chains(location, ((torch.zeros(3),), {}), (5, 5), [0, 1])
print("END", tuple(found.draws["mean"].shape), "after the other" in found.note)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_does_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "unguarded.py"
    path.write_text(SCRIPT, encoding="utf-8")
    place = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    found = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=place, timeout=300)
    assert found.stdout == "END (2, 5) True\n", found.stderr
    assert "put the script's statements under if __name__" in found.stderr


def test_arviz_takes_the_chains() -> None:
    x = torch.zeros(3)
    found = run_chains(location, ((x,), {}), (15, 10), [0])
    found.diverging[0, 4] = True
    groups = arviz_groups(found, x, num_samples=4)
    assert groups["posterior"]["mean"].shape == (1, 15)
    assert groups["log_likelihood"]["x"].shape == (1, 15, 3)
    assert groups["sample_stats"]["diverging"][0].nonzero()[0].tolist() == [4]


@pytest.mark.parametrize("num", [1, 3])
def test_fewer_draws_than_pyro_can_diagnose(num: int) -> None:
    found = run_chains(location, ((torch.zeros(3),), {}), (num, 5), [0])
    assert found.draws["mean"].shape == found.diverging.shape == (1, num)


def test_letters() -> None:
    with pytest.raises(BadInput, match="num_samples=0"):
        NUTSRun(num_samples=0).run_on(location, (torch.zeros(3),), {})


def test_nuts_in_the_coordinates_of_a_fit() -> None:
    X, y = straight_data()
    whitened = NUTSRun(posterior="laplace", metric="laplace", num_samples=60, warmup_steps=20, num_chains=2)
    found = compare(
        shrunk, X, y, engines={"laplace": LaplaceEvidence(shrunk, stop=Stop(progress=False)), "nuts": whitened}
    )
    run, fit = found.runs["nuts"], found.runs["laplace"].fit
    assert not run.failure and run.draws["w"].shape == (2, 60, 3) and not torch.equal(*run.draws["w"])
    draws, sd = run.draws["w"].flatten(0, 1), fit.state.precision.variance[0].sqrt()
    assert bool(((draws.mean(0) - fit.mode["w"]).abs() < 0.5 * sd).all())


def test_a_metric_needs_a_fit_that_has_one() -> None:
    for settings in ({"metric": "dense", "posterior": "laplace"}, {"metric": "laplace"}):
        with pytest.raises(BadInput, match="together with the name of an engine"):
            NUTSRun(**settings)
    short = NUTSRun(num_samples=10, warmup_steps=10)
    engines = {"a": short, "b": NUTSRun(posterior="a", metric="laplace", num_samples=10, warmup_steps=10)}
    with pytest.raises(BadInput, match="metric='laplace' takes the precision of 'a', which is a Chains"):
        compare(location, torch.zeros(3), engines=engines)
