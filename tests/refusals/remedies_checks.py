"""Messages of checks, files, wrappers and data that no other table holds, each with what it leads to."""

from pathlib import Path
from typing import Any

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence import (
    RVM,
    BadInput,
    EvidenceEM,
    LaplacePosterior,
    OverlapEM,
    Start,
    UnsupportedModel,
    bridge_sampling,
    find_modes,
    importance_sampling,
    tempered_smc,
    thames,
    to_inference_data,
)
from pyro_evidence.models.basis import GaussianRBF, Linear
from pyro_evidence.models.formula.mixed import mixed
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression
from pyro_evidence.models.wrappers import marginalised, with_background
from pyro_evidence.mppca import MPPCAPosterior
from pyro_evidence.prbf.posterior import PRBFPosterior
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.relevance.posteriors import RVMPosterior
from tests.refusals.remedies import LABELS, LINE, Remedy, X, Y, fit, normal, observed, plain
from tests.refusals.remedies import regression as by_hand
from tests.refusals.remedies_engines import BASIS, CHUNKS, WIDE
from tests.refusals.remedies_more import edge, no_axis
from tests.refusals.remedies_posteriors import saved
from tests.refusals.remedies_programs import BLOBS

OTHER_NOISE = by_hand(plain, lambda m: dist.Normal(m, 0.8))
HOLED = torch.cat([BLOBS, torch.full((len(BLOBS), 1), torch.nan)], -1)
FRAME = pd.DataFrame({"y": [1.0, -2.0, 0.0, 3.0, 2.0, 1.0], "x": range(6), "g": list("aabbcc")})


def stored(name: str, value: Tensor, model: Any, *, clear: bool) -> Any:
    """A run of a model while the param store holds something of another one's."""
    pyro.clear_param_store()
    pyro.param(name, value)
    if clear:
        pyro.clear_param_store()
    try:
        return poutine.trace(model).get_trace(X, Y)
    finally:
        pyro.clear_param_store()


def weighted_labels(y: Tensor, weight: Tensor) -> None:
    loc = normal("loc", 2)
    with pyro.plate("data", len(y)), poutine.scale(scale=weight):
        z = pyro.sample("z", dist.Categorical(torch.ones(2).double()))
        pyro.sample("y", dist.Normal(loc[z] + 2.0 * z, 0.5), obs=y)


def weighted_mixture(y: Tensor, weight: Tensor) -> None:
    loc = normal("loc", 2) + torch.tensor([0.0, 2.0])
    components = dist.Normal(loc.expand(len(y), 2), 0.5)
    with pyro.plate("data", len(y)), poutine.scale(scale=weight):
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(torch.ones(len(y), 2).double()), components), obs=y)


WEIGHT = torch.where(LABELS > 0, 2.0, 1.0)


def own_curvature(density: Any, u: Tensor, theta: Tensor) -> Tensor:
    return exact_hessian(density, u, theta)


def product(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(w[0] * w[1], 0.5), obs=y)


def by_own(*_: Any) -> LaplacePosterior:
    found: LaplacePosterior = fit(product, torch.tensor(2.0), curvature=own_curvature, start=Start(tour=0))
    return found


def modes_of_loaded(path: Path) -> Any:
    return find_modes(LaplacePosterior.load(path, product))


def line() -> LaplacePosterior:
    found: LaplacePosterior = fit(LINE, X, Y)
    return found


def rvm() -> RVMPosterior:
    return RVM(BASIS).run(X, Y)


def network() -> PRBFPosterior:
    return OverlapEM(prbf(2)).run(BLOBS, torch.arange(len(BLOBS)) % 2)


def halves(apart: float) -> dict[str, Tensor]:
    """Two chains of a regression's weights, their second halves elsewhere."""
    draws = line().get_samples(400, seed=0)["w"].reshape(2, 200, 2)
    return {"w": torch.cat([draws[:, :100], draws[:, 100:] + apart], 1)}


def two_means(spread: float) -> Any:
    def model(y: Tensor) -> None:
        with pyro.plate("components", 2):
            loc = pyro.sample("loc", dist.Normal(torch.tensor([-1.0, 1.0]) * spread, 2.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(2).double()))
            pyro.sample("y", dist.Normal(loc[z], 0.5), obs=y)

    return model


def of_means(**labels: Any) -> Any:
    posterior = fit(two_means(0.5), Y)
    draws = posterior.get_samples(400, seed=0)["loc"].reshape(2, 200, 2)
    return thames(posterior, {"loc": draws}, num_volume=2000, **labels)


def pruned() -> LaplacePosterior:
    """A regression whose second weight has nothing to say."""
    t = Y - X[:, 1] * (X[:, 1] @ Y) / (X[:, 1] @ X[:, 1])
    model = regression(Linear(bias=False), groups=torch.arange(2), beta=4.0)
    found: LaplacePosterior = fit(model, X, t)
    return found


def on_a_circle(known: bool) -> Any:
    def model(y: Tensor) -> None:
        height = normal("angle").sin() if known else pyro.sample("d", dist.ProjectedNormal(torch.ones(2).double()))[0]
        observed("y", dist.Normal(height, 0.5), y)

    return model


CHECKS: dict[str, Remedy] = {
    "weights of labelled data": Remedy(
        UnsupportedModel,
        r"write MixtureSameFamily\(Categorical\(\.\.\.\), components\) under poutine\.scale",
        lambda: fit(weighted_labels, Y, WEIGHT),
        lambda: fit(weighted_mixture, Y, WEIGHT),
    ),
    "weights of labelled data, another way": Remedy(
        UnsupportedModel,
        r"take gaussian_mixture with run\(Y, weight\)",
        lambda: fit(weighted_labels, Y, WEIGHT),
        lambda: EvidenceEM(gaussian_mixture(2)).run(BLOBS, torch.ones(len(BLOBS))),
    ),
    "a curvature in a file": Remedy(
        BadInput,
        "give LaplaceEvidence that curvature",
        lambda: saved(modes_of_loaded, by_own),
        lambda: by_own(),
    ),
    "another density of the same sites": Remedy(
        BadInput,
        "load it with the model",
        lambda: saved(lambda path: LaplacePosterior.load(path, OTHER_NOISE), line),
        lambda: saved(lambda path: LaplacePosterior.load(path, LINE), line),
    ),
    "another density of weights": Remedy(
        BadInput,
        "load it with the model that it was fitted to",
        lambda: saved(lambda path: RVMPosterior.load(path, regression(Linear(), beta=1.0)), rvm),
        lambda: saved(lambda path: RVMPosterior.load(path, BASIS), rvm),
    ),
    "a file of no planes": Remedy(
        BadInput,
        r"load it with LaplacePosterior\.load",
        lambda: saved(lambda path: MPPCAPosterior.load(path, LINE), line),
        lambda: saved(lambda path: LaplacePosterior.load(path, LINE), line),
    ),
    "a network of another": Remedy(
        BadInput,
        "Load it with its own model",
        lambda: saved(lambda path: PRBFPosterior.load(path, prbf(3)), network),
        lambda: saved(lambda path: PRBFPosterior.load(path, prbf(2)), network),
    ),
    "data of chunks that are gone": Remedy(
        BadInput,
        "pass the model's arguments for some rows to predict",
        lambda: RVM(BASIS).run_chunks(CHUNKS).predictor(),
        lambda: RVM(BASIS).run_chunks(CHUNKS).predictor(X, Y)[0],
    ),
    "nothing left to integrate": Remedy(
        BadInput,
        "use its log_evidence, which is exact",
        lambda: importance_sampling(no_axis()),
        lambda: no_axis().log_evidence,
    ),
    "particles of pruned weights": Remedy(
        BadInput,
        "use importance_sampling or bridge_sampling",
        lambda: tempered_smc(pruned(), num_particles=256),
        lambda: importance_sampling(pruned(), num_samples=200),
    ),
    "draws outside of the support": Remedy(
        BadInput,
        r"those of NUTS\(posterior\.model\)",
        lambda: bridge_sampling(edge(), {"m": torch.linspace(-2.0, 2.0, 80).reshape(2, 40)}),
        lambda: bridge_sampling(edge(), {"m": edge().get_samples(80, seed=0)["m"].reshape(2, 40)}),
    ),
    "halves that do not meet": Remedy(
        BadInput,
        "Run them longer",
        lambda: thames(line(), halves(50.0), num_volume=2000),
        lambda: thames(line(), halves(0.0), num_volume=2000),
    ),
    "labels that mean something": Remedy(
        BadInput,
        r"or pass labels=\{\}",
        lambda: of_means(labels={"loc": 0}),
        lambda: of_means(labels={}),
    ),
    "blocks of what is tied together": Remedy(
        UnsupportedModel,
        "leave nodes=1",
        lambda: fit(wide, WIDE, Y, nodes=5),
        lambda: fit(wide, WIDE, Y, nodes=1),
    ),
    "no posterior to export": Remedy(
        BadInput,
        r"expected a posterior that has get_samples",
        lambda: to_inference_data({"w": Y}),
        lambda: to_inference_data(line()),
    ),
    "a kernel's setting of another model": Remedy(
        BadInput,
        r"call pyro\.clear_param_store\(\) first",
        lambda: stored("kernel.lengthscale", torch.ones(3), gp_regression(RBF()), clear=False),
        lambda: stored("kernel.lengthscale", torch.ones(3), gp_regression(RBF()), clear=True),
    ),
    "a precision of another model": Remedy(
        BadInput,
        r"call pyro\.clear_param_store\(\) first",
        lambda: stored("alpha", torch.ones(3), regression(Linear()), clear=False),
        lambda: stored("alpha", torch.ones(3), regression(Linear()), clear=True),
    ),
    "a column without a value": Remedy(
        BadInput,
        "Drop them",
        lambda: EvidenceEM(marginalised(gaussian_mixture(2))).run(HOLED),
        lambda: EvidenceEM(marginalised(gaussian_mixture(2))).run(HOLED[:, :-1]),
    ),
    "a background of whole numbers": Remedy(
        BadInput,
        r"Write Y\.double\(\)",
        lambda: poutine.trace(with_background(whole)).get_trace(torch.arange(9)),
        lambda: poutine.trace(with_background(whole)).get_trace(torch.arange(9).double()),
    ),
    "a background of chunks": Remedy(
        BadInput,
        "pass low= and high=",
        lambda: EvidenceEM(with_background(gaussian_mixture(2))).run_chunks([(BLOBS,)]),
        lambda: EvidenceEM(with_background(gaussian_mixture(2), low=BLOBS.amin(0), high=BLOBS.amax(0))).run_chunks(
            [(BLOBS,)]
        ),
    ),
    "counts below zero": Remedy(
        BadInput,
        "Look at the column's smallest and largest values",
        lambda: mixed("y ~ x + (1 | g)", FRAME, family="poisson"),
        lambda: mixed("y ~ x + (1 | g)", FRAME[FRAME.y >= 0], family="poisson"),
    ),
    "half precision": Remedy(
        BadInput,
        r"Pass the data's \.double\(\)",
        lambda: fit(halved, Y.half()),
        lambda: fit(halved, Y.half().double()),
    ),
    "a site on a circle": Remedy(
        UnsupportedModel,
        "Draw it from sites that have one",
        lambda: fit(on_a_circle(False), Y),
        lambda: fit(on_a_circle(True), Y),
    ),
    "centres in a list": Remedy(
        BadInput,
        r"Write torch\.as_tensor\(\.\.\.\)",
        lambda: fit(regression(GaussianRBF([[0.0, 0.0], [1.0, 1.0]], 1.0), beta=4.0), X, Y),  # type: ignore[arg-type]
        lambda: fit(regression(GaussianRBF(torch.as_tensor([[0.0, 0.0], [1.0, 1.0]]).double(), 1.0), beta=4.0), X, Y),
    ),
}


def wide(X: Tensor, y: Tensor) -> None:
    observed("y", dist.Normal(X @ normal("w", 40), 0.5), y)


def whole(y: Tensor) -> None:
    observed("y", dist.Normal(normal("m"), 1.0), y)


def halved(y: Tensor) -> None:
    observed("y", dist.Normal(normal("m").to(y), 1.0), y)
