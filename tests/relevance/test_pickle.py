"""Posteriors of relevant weights go into other processes."""

import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import REVM, RVM, VRVM, BadInput
from pyro_evidence.relevance.axis_priors import L1Prior
from pyro_evidence.relevance.quadratic import JaakkolaJordan
from tests.models_for_tests import weight_models as models


def with_noise(Phi: Tensor, t: Tensor | None = None) -> None:
    scale = pyro.param("scale", Phi.new_tensor(1.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(Phi.new_zeros(Phi.shape[-1]), 1.0).to_event(1))
    with pyro.plate("data", len(Phi)):
        pyro.sample("t", dist.Normal(Phi @ w, scale), obs=t)


def with_a_bend(Phi: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(Phi.new_zeros(Phi.shape[-1]), 1.0).to_event(1))
    with pyro.plate("data", len(Phi)):
        pyro.sample("t", dist.Bernoulli(logits=(Phi @ w) + 0.1 * (Phi @ w).tanh()), obs=t)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    Phi = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    return Phi, 2.0 * Phi[:, 0] - Phi[:, 1] + 0.7 * torch.randn(60, generator=generator, dtype=torch.float64)


FITS = {
    "RVM": lambda Phi, t: RVM(models.gaussian).run(Phi, t),
    "RVM, noise": lambda Phi, t: RVM(with_noise, noise="scale").run(Phi, t),
    "RVM, classes": lambda Phi, t: RVM(models.logistic).run(Phi, (t > 0).double()),
    "VRVM": lambda Phi, t: VRVM(models.gaussian).run(Phi, t),
    "REVM": lambda Phi, t: REVM(models.logistic).run(Phi, (t > 0).double()),
    "REVM, L1": lambda Phi, t: REVM(models.logistic, prior=L1Prior()).run(Phi, (t > 0).double()),
    "REVM, bound": lambda Phi, t: REVM(models.logistic, approximation=JaakkolaJordan()).run(Phi, (t > 0).double()),
    "REVM, bend": lambda Phi, t: REVM(with_a_bend).run(Phi, (t > 0).double()),
}


@pytest.mark.parametrize("name", FITS)
def test_a_posterior_comes_back(name) -> None:
    Phi, t = data()
    posterior = FITS[name](Phi, t)
    posterior.get_samples(1)  # what is computed on the way is left behind
    again = pickle.loads(pickle.dumps(posterior))
    for of in (
        lambda p: p.log_evidence,
        lambda p: p.hyperparameters,
        lambda p: p.get_samples(3, seed=1),
        lambda p: p.predictor(Phi[:4]),
        lambda p: p.log_prob(),
    ):
        torch.testing.assert_close(of(again), of(posterior), rtol=1e-12, atol=1e-12)
    assert again.status == posterior.status
    assert again.diagnostics().keys() == posterior.diagnostics().keys()


def test_data_in_chunks_that_were_not_kept_are_missed() -> None:
    Phi, t = data()
    posterior = REVM(models.logistic).run_chunks(list(zip(Phi.split(20), (t > 0).double().split(20), strict=True)))
    with pytest.raises(BadInput, match=r"data in chunks cannot be pickled, .* or fit with run\(\.\.\.\)"):
        pickle.dumps(posterior)


@pytest.mark.parametrize("engine", [RVM(models.gaussian), VRVM(models.gaussian), REVM(models.logistic)])
def test_an_engine_goes_into_another_process_before_and_after_a_fit(engine) -> None:
    Phi, t = data()
    t = (t > 0).double() if isinstance(engine, REVM) else t
    expected = pickle.loads(pickle.dumps(engine)).run(Phi, t).log_evidence
    assert torch.equal(engine.run(Phi, t).log_evidence, expected)
    again = pickle.loads(pickle.dumps(engine))
    assert torch.equal(again.run(Phi, t).log_evidence, expected)
