"""Messages of checks of the evidence, of relevance machines and of what is rarer, each with what it leads to."""

import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import NUTS
from torch import Tensor

from pyro_evidence import (
    REVM,
    RVM,
    BadInput,
    EvidenceEM,
    LaplaceEvidence,
    LaplaceKernel,
    LaplaceMarginal,
    LaplaceNUTS,
    OverlapEM,
    Start,
    UnsupportedModel,
    bridge_sampling,
    find_modes,
    tempered_smc,
    thames,
    thermodynamic_integration,
)
from pyro_evidence.compare import compare
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression
from pyro_evidence.models.wrappers import with_background
from pyro_evidence.prbf import choose_alpha
from pyro_evidence.relevance.quadratic import LeastKL, laplace_at_base
from pyro_evidence.sklearn import RVMClassifier, VRVMClassifier
from tests.refusals.remedies import LABELS, LINE, Remedy, X, Y, draw, fit, normal, observed, plain
from tests.refusals.remedies import regression as by_hand
from tests.refusals.remedies_engines import BELONGS, CHUNKS, FOUR, GROUPS, groups, mcmc
from tests.refusals.remedies_programs import BLOBS, T, two_sites

LOGISTIC = by_hand(plain, lambda m: dist.Bernoulli(logits=m))


def pruned() -> Any:
    """A weight that the data do not need."""
    return LaplaceEvidence(regression(Linear())).run(X, draw(40, seed=11) * 0.1)


def correlated(g: Tensor, y: Tensor) -> None:
    L = pyro.sample("L", dist.LKJCholesky(2, T))
    sd = pyro.sample("sd", dist.HalfNormal(torch.ones(2).double()).to_event(1))
    with pyro.plate("groups", 5):
        a = pyro.sample("a", dist.MultivariateNormal(torch.zeros(2).double(), scale_tril=sd[:, None] * L))
    observed("y", dist.Normal(a[g].sum(-1), 0.5), y)


def beside(*, sized: bool) -> Any:
    def model(g: Tensor, extra: Tensor, y: Tensor) -> None:
        a = normal("a", 5)
        observed("y", dist.Normal(a[g], 0.5 + 0.0 * extra.sum()), y)

    found = fit(model, GROUPS, X[:3, 0], Y)
    return found.loo(by=GROUPS if sized else "extra").elpd


def typed(X: Tensor, y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros((), dtype=torch.float32), torch.ones((), dtype=torch.float32)))
    observed("y", dist.Normal(X @ a + b, 0.5), y)


def named(X: Tensor, y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfNormal(T))
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), tau).to_event(1))
    observed("y", dist.Normal(X @ w, 0.5), y)


def matrices(Y: Tensor) -> None:
    with pyro.plate("data", len(Y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(2).double() / 2), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(z.double()[..., None, None], torch.ones(2, 2).double()).to_event(2), obs=Y)


MORE: dict[str, Remedy] = {
    "THAMES where some are pruned": Remedy(
        BadInput,
        "Use bridge_sampling",
        lambda: thames(pruned(), pruned().get_samples(200, seed=0)),
        lambda: bridge_sampling(pruned(), pruned().get_samples(200, seed=0)),
    ),
    "chains without draws": Remedy(
        BadInput,
        "run the chains first",
        lambda: bridge_sampling(fit(LINE, X, Y), {"w": X[:0]}),
        lambda: bridge_sampling(fit(LINE, X, Y), mcmc(NUTS(LINE), X, Y, warmup_steps=100, num_samples=60)),
    ),
    "a kernel that has not run": Remedy(
        BadInput,
        r"run MCMC\(kernel, \.\.\.\) first",
        lambda: LaplaceKernel(LINE).diagnostics(),
        lambda: mcmc(LaplaceKernel(LINE), X, Y, warmup_steps=0),
    ),
    "LaplaceNUTS that has not run": Remedy(
        BadInput,
        r"run MCMC\(kernel, \.\.\.\) first",
        lambda: LaplaceNUTS(fit(LINE, X, Y)).diagnostics(),
        lambda: mcmc(LaplaceNUTS(fit(LINE, X, Y)), warmup_steps=5),
    ),
    "nothing to sample": Remedy(
        BadInput,
        "Use LaplaceEvidence for the evidence itself",
        lambda: LaplaceMarginal(LINE, integrate=["w"])(X, Y),
        lambda: fit(LINE, X, Y),
    ),
    "a marginal of a simplex": Remedy(
        BadInput,
        r"Use posterior\.get_samples\(\)\['L'\]",
        lambda: fit(correlated, GROUPS, Y).marginal("L"),
        lambda: fit(correlated, GROUPS, Y).get_samples(10)["L"],
    ),
    "leaving out by another argument": Remedy(
        BadInput,
        r"with one label for each of the 40 data: loo\(by=group\)",
        lambda: beside(sized=False),
        lambda: beside(sized=True),
    ),
    "errors that nobody watched": Remedy(
        BadInput,
        r"track_validation\(Y_test\)",
        lambda: EvidenceEM(gaussian_mixture(2)).run(BLOBS).test_nll,
        lambda: EvidenceEM(gaussian_mixture(2)).track_validation(BLOBS).run(BLOBS).test_nll,
    ),
    "a precision that has no powers": Remedy(
        BadInput,
        "Choose other units for the data",
        lambda: LaplaceEvidence(regression(Linear(), beta=1e300)).run(X, Y),
        lambda: LaplaceEvidence(regression(Linear(), beta=1e2)).run(X, Y),
    ),
    "planes of an array": Remedy(
        BadInput,
        r"Y\.double\(\) for integers",
        lambda: EvidenceEM(mppca(1, 1)).run(FOUR.long()),
        lambda: EvidenceEM(mppca(1, 1)).run(FOUR.long().double()),
    ),
    "a fold without a class": Remedy(
        BadInput,
        "Take more data of it",
        lambda: choose_alpha(OverlapEM(prbf(2)), BLOBS[:21], BELONGS[:21], num_folds=2),
        lambda: choose_alpha(OverlapEM(prbf(2)), BLOBS, BELONGS, num_folds=2).alpha,
    ),
    "weights of two dtypes": Remedy(
        BadInput,
        "float32 and float64 are mixed|Cast the priors' parameters",
        lambda: RVM(typed, site=["a", "b"]).run(X, Y),
        lambda: RVM(two_sites, site=["w", "b"]).run(X, Y),
    ),
    "a curved predictor in chunks": Remedy(
        UnsupportedModel,
        r"Pass all data to run\(\.\.\.\)",
        lambda: REVM(two_sites, site="w").run_chunks(CHUNKS),
        lambda: REVM(two_sites, site="w").run(X, Y),
    ),
    "a fit to chunks as a pickle": Remedy(
        BadInput,
        r"or fit with run\(\.\.\.\)",
        lambda: pickle.dumps(RVM(LINE).run_chunks(CHUNKS)),
        lambda: pickle.loads(pickle.dumps(RVM(LINE_OF_PACKAGE).run(X, Y))),
    ),
    "every axis pruned": Remedy(
        BadInput,
        r"use get_samples\(\.\.\.\), whose weights are 0",
        lambda: no_axis().importance_resampled(),
        lambda: no_axis().get_samples(3)["w"],
    ),
    "a guide of no axis": Remedy(
        BadInput,
        r"use get_samples\(\.\.\.\), whose weights are 0",
        lambda: no_axis().guide,
        lambda: no_axis().get_samples(3)["w"],
    ),
    "a KL of three classes": Remedy(
        UnsupportedModel,
        "Use approximation=laplace_at_base",
        lambda: REVM(three(), approximation=LeastKL()).run(X, LABELS.long() + (X[:, 1] > 1)),
        lambda: REVM(three(), approximation=laplace_at_base).run(X, LABELS.long() + (X[:, 1] > 1)),
    ),
    "three labels for VRVM": Remedy(
        BadInput,
        "or RVMClassifier",
        lambda: VRVMClassifier().fit(X.numpy(), (BELONGS + (X[:, 0] > 0)).numpy()),
        lambda: RVMClassifier().fit(X.numpy(), (BELONGS + (X[:, 0] > 0)).numpy()),
    ),
    "a background of matrices": Remedy(
        BadInput,
        "Flatten each datum",
        lambda: EvidenceEM(with_background(matrices)).run(BLOBS.reshape(20, 2, 2)),
        lambda: EvidenceEM(with_background(gaussian_mixture(2))).run(BLOBS.reshape(20, 4)),
    ),
    "no draws of the reference": Remedy(
        BadInput,
        "Pass another as reference",
        lambda: compare(LINE, X, Y, engines={"a": LaplaceEvidence(LINE), "b": LaplaceEvidence(groups)}, reference="b"),
        lambda: compare(LINE, X, Y, engines={"a": LaplaceEvidence(LINE), "b": LaplaceEvidence(groups)}, reference="a"),
    ),
    "an expected log likelihood that is none": Remedy(
        BadInput,
        "use tempered_smc",
        lambda: thermodynamic_integration(edge(), num_temperatures=4, num_particles=256),
        lambda: tempered_smc(edge(), num_particles=256),
    ),
    "so many labellings": Remedy(
        BadInput,
        r"use labels=\{\}",
        lambda: find_modes(fit(nine, Y), labels={"mean": 0}, start=Start(restarts=1)),
        lambda: find_modes(fit(nine, Y), labels={}, start=Start(restarts=1)),
    ),
}

LINE_OF_PACKAGE = regression(Linear(), beta=4.0)


def three() -> Any:
    return classifier(Linear(), num_classes=3)


def no_axis() -> Any:
    wave = torch.linspace(-1.0, 1.0, 40).double()
    return REVM(regression(Linear(bias=False), beta=1.0)).run(wave[:, None], 0.01 * wave.square())


def uniform(y: Tensor) -> None:
    m = normal("m")
    pyro.factor("y", dist.Normal(m, 1.0).log_prob(y).sum() + torch.where(m > -0.5, 0.0, -torch.inf))


def edge() -> Any:
    return fit(uniform, Y + 3.0)


def nine(y: Tensor) -> None:
    mean = normal("mean", 9)
    observed("y", dist.Normal(mean.sum(), 1.0), y)
