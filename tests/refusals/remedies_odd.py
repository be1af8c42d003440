"""Messages that odd likelihoods and data bring about in sparse models, mixtures and networks, each with its way out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pyro
import pyro.distributions as dist
import torch
import torch.distributed
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import (
    REVM,
    RVM,
    BadInput,
    EvidenceEM,
    LaplaceEvidence,
    NotAMode,
    NotConverged,
    OverlapEM,
    Start,
    UnsupportedModel,
)
from pyro_evidence.data import Groups
from pyro_evidence.errors import NotPositiveDefinite, NotSmooth, TooLarge
from pyro_evidence.mixture import BoundedInflation, RandomWeights
from pyro_evidence.mixture.expectation import Mixture
from pyro_evidence.mixture.updates import EStep
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.wrappers import marginalised
from pyro_evidence.prbf import KMeans, StartFrom
from pyro_evidence.relevance.axis_priors import GaussianPrior, L1Prior
from pyro_evidence.relevance.quadratic import LeastKL, empirical_fisher, laplace_at_base
from tests.refusals.remedies import LABELS, LINE, SEPARATED, Remedy, X, Y, draw, fit, normal, observed, plain
from tests.refusals.remedies import regression as by_hand
from tests.refusals.remedies_checks import HOLED
from tests.refusals.remedies_engines import BELONGS, FOUR
from tests.refusals.remedies_programs import BLOBS, T

CAUCHY = by_hand(lambda: dist.Normal(torch.zeros(12), 1.0).to_event(1), lambda m: dist.Cauchy(m, 1e-3))
MANY = draw(40, 12, seed=9)
LABELLED = by_hand(plain, lambda m: dist.Bernoulli(logits=m))


def once(X: Tensor, y: Tensor) -> None:
    """A model that runs where fits begin, and not far from there."""
    w = normal("w", 2)
    if bool((w.detach().abs() > 2.0).any()):
        raise ValueError("other weights")
    observed("y", dist.Normal(X @ w, 0.5), y)


def planes(num: int) -> Any:
    with mock.patch("pyro_evidence.mppca.curvature.FULL_SIZE", 7):
        return EvidenceEM(mppca(num, 1), start=Start(restarts=1)).run(FOUR).log_weights(50)


def network(initial: Any) -> Any:
    return OverlapEM(prbf(2), initial=initial).run(BLOBS, BELONGS).log_prob(BLOBS)


def one_weight(X: Tensor, y: Tensor) -> None:
    observed("y", dist.StudentT(2.0, X @ normal("w", 1), 0.3), y)


def far_away(approximation: Any) -> Any:
    data = torch.tensor([[1.0], [0.0]]).double(), torch.tensor([3.0, 0.0]).double()
    return REVM(one_weight, ridge=3.0, approximation=approximation).run(*data)


def noisy(limits: Any) -> Callable[[Tensor, Tensor], None]:
    def model(X: Tensor, y: Tensor) -> None:
        sd = pyro.param("sd", T * 0.5, constraint=limits)
        observed("y", dist.Normal(X @ normal("w", 2), sd), y)

    return model


def noise_of(limits: Any, noise: str | None) -> Any:
    pyro.clear_param_store()
    return RVM(noisy(limits), noise=noise).run(X, 9.0 * Y)


def with_bias(X: Tensor, y: Tensor) -> None:
    observed("y", dist.Bernoulli(logits=X @ normal("w", 2) + normal("b")), y)


def rows(Y: Tensor) -> None:
    observed("Y", dist.Normal(normal("mean", Y.shape[-1]), 1.0).to_event(1), Y)


def two_parameters(X: Tensor, y: Tensor) -> None:
    m = X @ normal("w", 2)
    observed("y", dist.Normal(m.sin(), (m / 3.0).exp()), y)


def nowhere(at: EStep) -> Mixture:
    """An update whose weights are no numbers."""
    new = BoundedInflation()(at)
    return replace(new, w=new.w * torch.nan)


def settled(ridge: float) -> Any:
    return REVM(LABELLED, ridge=ridge, approximation=LeastKL(num_steps=50)).run(X, SEPARATED)


def kernels(update: Any) -> Any:
    pyro.clear_param_store()
    return EvidenceEM(
        gaussian_mixture(2), update=update, start=Start(restarts=2), initial=RandomWeights(warm_up=0)
    ).run(BLOBS)


CODES = torch.arange(40) % 8


def walked(y: Tensor) -> None:
    """Every value depends on all steps before it."""
    with pyro.plate("steps", len(y)):
        dx = pyro.sample("dx", dist.Normal(Y[0] * 0.0, 1.0))
    observed("y", dist.Normal(0.1 * dx.cumsum(0), 1.0), y)


def labelled(g: Tensor, y: Tensor) -> None:
    """Groups by whatever labels they have."""
    names, place = g.unique(return_inverse=True)
    m = normal("m")
    with pyro.plate("groups", len(names)):
        a = pyro.sample("a", dist.Normal(m, 1.0))
    observed("y", dist.Normal(a[place], 1.0), y)


def numbered(g: Tensor, y: Tensor) -> None:
    """As many groups as the largest number says."""
    m = normal("m")
    with pyro.plate("groups", int(g.max()) + 1):
        a = pyro.sample("a", dist.Normal(m, 1.0))
    observed("y", dist.Normal(a[g], 1.0), y)


PARTS = [(CODES[CODES < 3], Y[CODES < 3]), (CODES[CODES >= 3], Y[CODES >= 3])]  # of three groups, and of five


def in_chunks(model: Any, chunks: Any, **settings: Any) -> Any:
    return LaplaceEvidence(model).run_chunks(chunks, **settings)


ODD: dict[str, Remedy] = {
    "a model of one value": Remedy(
        UnsupportedModel,
        "Make it run at every value of its weights",
        lambda: RVM(once).run(X, Y),
        lambda: RVM(LINE).run(X, Y),
    ),
    "an empty column of a program": Remedy(
        BadInput,
        "Drop them",
        lambda: fit(marginalised(rows), HOLED),
        lambda: fit(marginalised(rows), HOLED[:, :-1]),
    ),
    "too many loadings": Remedy(TooLarge, "Fit fewer components or latents", lambda: planes(2), lambda: planes(1)),
    "a start where the data have no density": Remedy(
        BadInput,
        r"initial=KMeans\(\)",
        lambda: network(StartFrom(1e200 * BLOBS[:2])),
        lambda: network(KMeans()),
    ),
    "a curvature below zero": Remedy(
        NotPositiveDefinite,
        "pass approximation=empirical_fisher",
        lambda: far_away(laplace_at_base),
        lambda: far_away(empirical_fisher),
    ),
    "many maxima under a penalty": Remedy(
        NotAMode,
        r"pass prior=GaussianPrior\(\)",
        lambda: REVM(CAUCHY, prior=L1Prior(), approximation=empirical_fisher).run(MANY, Y),
        lambda: REVM(CAUCHY, prior=GaussianPrior(), approximation=empirical_fisher).run(MANY, Y),
    ),
    "corners by REVM": Remedy(
        NotAMode,
        r"take a smooth relative \(StudentT",
        lambda: REVM(by_hand(plain, lambda m: dist.Laplace(m, 0.5))).run(X, Y),
        lambda: REVM(by_hand(plain, lambda m: dist.StudentT(5.0, m, 0.5))).run(X, Y),
    ),
    "no curvature by RVM": Remedy(
        NotSmooth,
        "StudentT for Laplace noise",
        lambda: RVM(by_hand(plain, lambda m: dist.Laplace(m, 0.5))).run(X, Y),
        lambda: RVM(by_hand(plain, lambda m: dist.StudentT(5.0, m, 0.5))).run(X, Y),
    ),
    "a slope without curvature, a larger scale": Remedy(
        NotSmooth,
        "or a larger scale",
        lambda: RVM(by_hand(plain, lambda m: dist.SoftLaplace(m, 1e-5))).run(X, Y),
        lambda: RVM(by_hand(plain, lambda m: dist.SoftLaplace(m, 0.5))).run(X, Y),
    ),
    "a noise within limits": Remedy(
        UnsupportedModel,
        "or leave noise out",
        lambda: noise_of(constraints.interval(0.4, 0.6), "sd"),
        lambda: noise_of(constraints.interval(0.4, 0.6), None),
    ),
    "the same, without limits": Remedy(
        UnsupportedModel,
        "that may take any positive value",
        lambda: noise_of(constraints.interval(0.4, 0.6), "sd"),
        lambda: noise_of(constraints.positive, "sd"),
    ),
    "a KL of some weights": Remedy(
        UnsupportedModel,
        r"or name all latent sites in site=\[",
        lambda: REVM(with_bias, site="w", approximation=LeastKL()).run(X, LABELS),
        lambda: REVM(with_bias, site=["w", "b"], approximation=LeastKL()).run(X, LABELS),
    ),
    "a KL that does not settle": Remedy(
        NotConverged,
        "raise the ridge",
        lambda: settled(1e-2),
        lambda: settled(1.0),
    ),
    "two parameters of a predictor": Remedy(
        UnsupportedModel,
        "Use LaplaceEvidence, which needs none",
        lambda: REVM(two_parameters).run(X, Y),
        lambda: fit(two_parameters, X, Y),
    ),
    "groups that a walk ties together": Remedy(
        UnsupportedModel,
        r"pass all data to run\(\.\.\.\)",
        lambda: in_chunks(walked, [(Y.repeat(6),), (Y,)]),
        lambda: LaplaceEvidence(walked).run(Y.repeat(6)),
    ),
    "as many groups in every chunk": Remedy(
        BadInput,
        r"run_chunks\(chunks, local=\['a'\]\)",
        lambda: in_chunks(labelled, [(CODES, Y), (CODES, Y + 1.0)]),
        lambda: in_chunks(labelled, [(CODES, Y), (CODES, Y + 1.0)], local=["a"]),
    ),
    "groups numbered from elsewhere": Remedy(
        BadInput,
        r"as pyro_evidence\.data\.Groups numbers them",
        lambda: in_chunks(numbered, PARTS),
        lambda: in_chunks(numbered, Groups(CODES, Y, size=15)),
    ),
    "groups of a site that is none": Remedy(
        BadInput,
        r"local=\['b'\]; expected latent sites among a, m",
        lambda: in_chunks(labelled, PARTS, local=["b"]),
        lambda: in_chunks(labelled, PARTS, local=["a"]),
    ),
    "other groups, and said to be shared": Remedy(
        BadInput,
        "chunk 1 has 6 weights and the first 4; chunks must differ in their rows only",
        lambda: in_chunks(labelled, PARTS, local=()),
        lambda: in_chunks(labelled, [(CODES, Y), (CODES, Y + 1.0)], local=()),
    ),
    "a group in two chunks": Remedy(
        BadInput,
        r"Groups\(labels, \.\.\.\) brings together",
        lambda: in_chunks(labelled, [(CODES[:30] + 2, Y[:30]), (CODES[:5] + 2, Y[:5])]),
        lambda: in_chunks(labelled, Groups(CODES + 2, Y, size=25)),
    ),
    "restarts that all fail": Remedy(
        NotConverged,
        r"Pass update=BoundedInflation\(rho=0\.05\)",
        lambda: kernels(nowhere),
        lambda: kernels(BoundedInflation(rho=0.05)),
    ),
}
