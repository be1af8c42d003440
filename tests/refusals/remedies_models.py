"""Messages of the models that come with the package, about their settings and data, each with what it leads to."""

from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence import RVM, BadInput, EvidenceEM, LaplaceEvidence, OverlapEM
from pyro_evidence.datasets import Dataset, train_test_split
from pyro_evidence.models import marginalised
from pyro_evidence.models.basis import Linear, Standardised, mean_and_scale
from pyro_evidence.models.formula import mixed
from pyro_evidence.models.gmrf import ICAR, Neighbours
from pyro_evidence.models.gp import gp_poisson, gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import FixedUnits, FullNoise, gaussian_mixture
from pyro_evidence.models.mlp import MLP
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression
from tests.refusals.remedies import COUNTS, LABELS, Remedy, X, Y
from tests.refusals.remedies_programs import BLOBS

DATA = Dataset(X, Y, ("a", "b"), "nobody")
BELONGS = torch.arange(40) // 20
FRAME = pd.DataFrame({"x": X[:, 0].numpy(), "y": Y.numpy(), "g": np.arange(40) % 5, "yes": LABELS.numpy()})
MISSING = FRAME.assign(y=FRAME.y.where(FRAME.index % 7 != 0))
CONSTANT = torch.cat([X, torch.ones_like(X[:, :1])], -1)


def hole(value: float) -> Tensor:
    found = X.clone()
    found[3, 0] = value
    return found


def line(X: Tensor, y: Tensor, **settings: Any) -> Any:
    pyro.clear_param_store()
    return LaplaceEvidence(regression(Linear(), **settings)).run(X, y)


def of_formula(formula: str, frame: Any, **settings: Any) -> Any:
    pyro.clear_param_store()
    model, data = mixed(formula, frame, **settings)
    return LaplaceEvidence(model).run(*data)


def network(X: Tensor, labels: Any, num: int = 2) -> Any:
    return OverlapEM(prbf(num)).run(X, labels).log_prob(BLOBS)


def process(X: Tensor, y: Tensor = Y, **settings: Any) -> Any:
    pyro.clear_param_store()
    return LaplaceEvidence(gp_regression(RBF(**settings))).run(X, y)


def stale(cleared: bool) -> Any:
    pyro.clear_param_store()
    pyro.param("alpha", torch.ones(7).double())
    try:
        if cleared:
            pyro.clear_param_store()
        return LaplaceEvidence(regression(Linear())).run(X, Y)
    finally:
        pyro.clear_param_store()


def lattice(edges: list[list[int]]) -> Any:
    def model(y: Tensor) -> None:
        x = pyro.sample("x", ICAR(Neighbours(torch.tensor(edges), 4), scale=torch.ones(()).double()))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    return LaplaceEvidence(model).run(Y[:4])


MODELS: dict[str, Remedy] = {
    "one input": Remedy(BadInput, r"X\[:, None\]", lambda: line(X[:, 0], Y), lambda: line(X[:, 0][:, None], Y)),
    "integers": Remedy(BadInput, r"X\.double\(\)", lambda: line(X.long(), Y), lambda: line(X.long().double(), Y)),
    "a column of targets": Remedy(BadInput, r"Write t\[:, 0\]", lambda: line(X, Y[:, None]), lambda: line(X, Y)),
    "a constant column": Remedy(
        BadInput,
        r"X\[:, X\.amax\(0\) > X\.amin\(0\)\]",
        lambda: standardised(CONSTANT),
        lambda: standardised(CONSTANT[:, CONSTANT.amax(0) > CONSTANT.amin(0)]),
    ),
    "gaps before standardising": Remedy(
        BadInput,
        "Leave out these rows",
        lambda: standardised(hole(torch.nan)),
        lambda: standardised(hole(torch.nan)[hole(torch.nan).isfinite().all(-1)]),
    ),
    "a bias that is not there": Remedy(
        BadInput,
        "give it bias=True",
        lambda: LaplaceEvidence(regression(Linear(bias=False), alpha_bias=1.0)).run(X, Y),
        lambda: LaplaceEvidence(regression(Linear(bias=True), alpha_bias=1.0)).run(X, Y),
    ),
    "a flat prior": Remedy(BadInput, "such as 1e-3", lambda: line(X, Y, alpha=0.0), lambda: line(X, Y, alpha=1e-3)),
    "a param that is left over": Remedy(
        BadInput, r"pyro\.clear_param_store\(\)", lambda: stale(False), lambda: stale(True)
    ),
    "gaps in a process": Remedy(
        BadInput, "Fill them in first", lambda: process(hole(torch.nan)), lambda: process(hole(0.0))
    ),
    "counts that are none": Remedy(
        BadInput,
        "expected whole numbers from 0",
        lambda: LaplaceEvidence(gp_poisson(RBF())).run(X[:10], COUNTS + 0.5),
        lambda: LaplaceEvidence(gp_poisson(RBF())).run(X[:10], COUNTS),
    ),
    "a length of no end": Remedy(
        BadInput,
        "many times its range",
        lambda: process(X, lengthscale=torch.inf),
        lambda: process(X, lengthscale=100.0),
    ),
    "a kernel with a prior": Remedy(
        BadInput,
        r"gp_regression\(kernel\)",
        lambda: RBF(lengthscale=dist.LogNormal(0.0, 1.0))(X, X),
        lambda: process(X, lengthscale=dist.LogNormal(torch.zeros(()).double(), 1.0)),
    ),
    "other columns of a kernel": Remedy(
        BadInput,
        "Give both the same columns",
        lambda: RBF()(X, X[:, :1]),
        lambda: RBF(lengthscale=1.0)(X[:, :1], X[:, :1]),
    ),
    "a mixture of arrays": Remedy(
        BadInput,
        r"torch\.tensor\(rows, dtype=torch\.float64\)",
        lambda: gaussian_mixture(2)([[0.0, 1.0]]),
        lambda: EvidenceEM(gaussian_mixture(2)).run(torch.tensor(BLOBS.tolist(), dtype=torch.float64)),
    ),
    "a mixture of one response": Remedy(
        BadInput,
        r"Write Y\[:, None\]",
        lambda: EvidenceEM(gaussian_mixture(2)).run(BLOBS[:, 0]),
        lambda: EvidenceEM(gaussian_mixture(2)).run(BLOBS[:, 0][:, None]),
    ),
    "a response without a value": Remedy(
        BadInput,
        "Drop them",
        lambda: EvidenceEM(marginalised(gaussian_mixture(2))).run(nothing()),
        lambda: EvidenceEM(marginalised(gaussian_mixture(2))).run(nothing()[:, :1]),
    ),
    "units of all rows, in chunks": Remedy(
        BadInput,
        r"units=FixedUnits\(origin, unit\)",
        lambda: EvidenceEM(gaussian_mixture(2, units=by_spread)).run_chunks([(BLOBS,)]),
        lambda: EvidenceEM(gaussian_mixture(2, units=FixedUnits(BLOBS.mean(0), BLOBS.std(0)))).run_chunks([(BLOBS,)]),
    ),
    "a network without hidden units": Remedy(
        BadInput,
        r"models\.regression\.regression\(Linear\(\)\)",
        lambda: MLP(2, hidden=()),
        lambda: line(X, Y),
    ),
    "as many latents as columns": Remedy(
        BadInput,
        r"gaussian_mixture\(K, noise=FullNoise\(\)\)",
        lambda: mppca(1, 2)(BLOBS),
        lambda: EvidenceEM(gaussian_mixture(1, noise=FullNoise())).run(BLOBS),
    ),
    "inputs of a network as integers": Remedy(
        BadInput,
        r"X\.double\(\) for integers",
        lambda: network(BLOBS.long(), BELONGS),
        lambda: network(BLOBS.long().double(), BELONGS),
    ),
    "one input of a network": Remedy(
        BadInput,
        r"X\[:, None\]",
        lambda: OverlapEM(prbf(2)).run(BLOBS[:, 0], BELONGS),
        lambda: OverlapEM(prbf(2)).run(BLOBS[:, 0][:, None], BELONGS).log_prob(BLOBS[:, :1]),
    ),
    "gaps of a network": Remedy(
        BadInput,
        "Leave out these rows",
        lambda: network(blobs(torch.nan), BELONGS),
        lambda: network(blobs(torch.nan)[4:], BELONGS[4:]),
    ),
    "labels that are not counted from 0": Remedy(
        BadInput,
        r"labels\.unique\(return_inverse=True\)\[1\]",
        lambda: network(BLOBS, BELONGS * 4),
        lambda: network(BLOBS, (BELONGS * 4).unique(return_inverse=True)[1]),
    ),
    "labels that are words": Remedy(
        BadInput,
        r"numpy\.unique\(labels, return_inverse=True\)\[1\]",
        lambda: network(BLOBS, ["a"] * 20 + ["b"] * 20),
        lambda: network(BLOBS, np.unique(["a"] * 20 + ["b"] * 20, return_inverse=True)[1]),
    ),
    "columns of a network": Remedy(
        BadInput,
        "Pass those, in the same order",
        lambda: OverlapEM(prbf(2)).run(BLOBS, BELONGS).log_prob(BLOBS[:, :1]),
        lambda: OverlapEM(prbf(2)).run(BLOBS, BELONGS).log_prob(BLOBS[:, :2]),
    ),
    "a node alone": Remedy(
        BadInput, "join it to one", lambda: lattice([[0, 1], [1, 2]]), lambda: lattice([[0, 1], [1, 2], [2, 3]])
    ),
    "a fraction of nothing": Remedy(
        BadInput,
        "Choose another fraction",
        lambda: train_test_split(DATA, fraction=1.0, seed=0),
        lambda: train_test_split(DATA, fraction=0.5, seed=0),
    ),
    "a column that the frame has not": Remedy(
        BadInput,
        "columns of the frame|has no column",
        lambda: of_formula("y ~ z", FRAME),
        lambda: of_formula("y ~ x", FRAME),
    ),
    "a formula's data in one": Remedy(
        BadInput,
        r"called with 1 argument\(s\), missing a required argument: 'g'; expected X, g, num_g, y.*then run\(\*data\)",
        lambda: LaplaceEvidence(mixed("y ~ x + (1 | g)", FRAME)[0]).run(mixed("y ~ x + (1 | g)", FRAME)[1]),
        lambda: LaplaceEvidence(mixed("y ~ x + (1 | g)", FRAME)[0]).run(*mixed("y ~ x + (1 | g)", FRAME)[1]),
    ),
    "times of a family without": Remedy(
        BadInput,
        "has 'surv'; expected a family of times for that response, such as family='weibull'",
        lambda: of_formula("surv(t, yes) ~ g", FRAME.assign(t=FRAME.x.abs() + 0.1), family="gamma"),
        lambda: of_formula("surv(t, yes) ~ g", FRAME.assign(t=FRAME.x.abs() + 0.1), family="weibull"),
    ),
    "zeros and ones by trials": Remedy(
        BadInput,
        r"For zeros and ones take family='bernoulli'",
        lambda: of_formula("yes ~ x", FRAME, family="binomial"),
        lambda: of_formula("yes ~ x", FRAME, family="bernoulli"),
    ),
    "words as a response": Remedy(
        BadInput,
        r"For classes take family='bernoulli'",
        lambda: of_formula("word ~ x", FRAME.assign(word=np.where(FRAME.yes > 0, "a", "b"))),
        lambda: of_formula("word ~ x", FRAME.assign(word=np.where(FRAME.yes > 0, "a", "b")), family="bernoulli"),
    ),
    "all rows with gaps": Remedy(
        BadInput,
        "Fill gaps in",
        lambda: of_formula("y ~ x", FRAME.assign(x=np.nan)),
        lambda: of_formula("y ~ x", FRAME.assign(x=FRAME.x.fillna(0.0))),
    ),
    "gaps in new rows": Remedy(
        BadInput,
        "Leave such rows out",
        lambda: mixed("y ~ x + (1 | g)", FRAME)[0].arguments(MISSING.assign(g=MISSING.g.where(MISSING.index > 3))),
        lambda: mixed("y ~ x + (1 | g)", FRAME)[0].arguments(MISSING.dropna()),
    ),
    "groups that are computed": Remedy(
        BadInput,
        "Put what is to be computed into a column of the frame first",
        lambda: of_formula("y ~ x + (1 | g % 2)", FRAME),
        lambda: of_formula("y ~ x + (1 | h)", FRAME.assign(h=FRAME.g % 2)),
    ),
    "a prior of what is flat": Remedy(
        BadInput,
        "Leave it out",
        lambda: of_formula("y ~ x + (1 | g)", FRAME, priors={"sd": "flat"}),
        lambda: of_formula("y ~ x + (1 | g)", FRAME),
    ),
}


def standardised(X: Tensor) -> Any:
    return RVM(regression(Standardised(Linear(), *mean_and_scale(X)))).run(X, Y[: len(X)])


def nothing() -> Tensor:
    return torch.stack([BLOBS[:, 0], torch.full_like(BLOBS[:, 0], torch.nan)], -1)


def by_spread(Y: Tensor) -> tuple[Tensor, Tensor]:
    return Y.mean(0), Y.std(0)


def blobs(value: float) -> Tensor:
    found = BLOBS.clone()
    found[3, 0] = value
    return found
