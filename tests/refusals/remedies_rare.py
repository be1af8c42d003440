"""Messages that only odd files, machines, draws and other people's engines bring about, each with its way out."""

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pyro
import pyro.distributions as dist
import torch
import torch.distributed
from pyro.infer import HMC, MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_evidence import (
    BadInput,
    LaplaceEvidence,
    LaplaceMarginal,
    LaplacePosterior,
    NotAMode,
    Stop,
    UnsupportedModel,
    datasets,
    tempered_smc,
    to_inference_data,
)
from pyro_evidence.compare import NUTSRun, SVIRun, compare
from pyro_evidence.data.distributed import shards
from pyro_evidence.errors import TooLarge
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.regression import regression as of_basis
from pyro_evidence.program.log_joint import LogJoint
from tests.refusals.remedies import LINE, Remedy, X, Y, draw, fit, normal, observed
from tests.refusals.remedies_engines import in_a_folder
from tests.refusals.remedies_programs import T, scaled

PAIRS, SIDE = torch.arange(250).repeat(2), draw(500, seed=1)


class ByHand:
    """Somebody's engine, whose draws are given."""

    def __init__(self, **draws: Tensor) -> None:
        self.draws = draws

    def run(self, *_: Any) -> "ByHand":
        return self

    def get_samples(self) -> dict[str, Tensor]:
        return self.draws


def beside_laplace(engine: Any, first: Any = None) -> Any:
    """An engine as the reference, so that what it says is an error rather than a row."""
    pyro.clear_param_store()
    engines = {"laplace": LaplaceEvidence(LINE) if first is None else first, "other": engine}
    return compare(LINE, X, Y, engines=engines, reference="other")


def point(rate: float) -> SVIRun:
    return SVIRun(AutoDelta, Adam({"lr": rate}), num_steps=2)


def short_nuts(**settings: Any) -> NUTSRun:
    return NUTSRun(num_samples=8, warmup_steps=4, **settings)


def with_scale(**settings: Any) -> Any:
    pyro.clear_param_store()
    engines = {"laplace": LaplaceEvidence(scaled(1.0)), "other": short_nuts(**settings)}
    return compare(scaled(1.0), X, Y, engines=engines, reference="other")


def alone() -> Any:
    """What ``torchrun`` would begin, with one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return sharded()
    finally:
        torch.distributed.destroy_process_group()


def sharded() -> Any:
    with shards():
        return fit(LINE, X, Y)


def labels_of(text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, PYRO_EVIDENCE_DATA=folder):
        (Path(folder) / "small.csv").write_text(text)
        return datasets.csv("small").t


def above(sd: float) -> LogJoint:
    """Data that only means above a half can produce."""

    def model(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(T * 0.0, sd))
        pyro.factor("y", dist.Normal(m, 1.0).log_prob(y).sum() + torch.where(m > 0.5, 0.0, -torch.inf))

    return LogJoint(model, (Y,))


def cornered(y: Tensor) -> None:
    """Twenty means, each with a wall next to its mode."""
    m = pyro.sample("m", dist.Normal(torch.zeros(20).double(), 1.0).to_event(1))
    inside = torch.where((m > -1.9 - 1e-6).all(), 0.0, -torch.inf)
    pyro.factor("y", dist.Normal(m, 0.05).log_prob(y).sum() + inside)


def in_a_corner() -> Any:
    return fit(cornered, torch.full((20,), -1.9).double())


def chain_in_a_corner() -> Any:
    chains = MCMC(NUTS(in_a_corner().model), num_samples=5, warmup_steps=5, disable_progbar=True)
    chains.run(torch.full((20,), -1.9).double())
    return chains.get_samples()["m"]


def on(place: str) -> Any:
    """A posterior read on a machine without another device."""

    def read(path: Path) -> Any:
        fit(LINE, X, Y).save(path)
        with mock.patch.object(torch.cuda, "is_available", lambda: False):
            return LaplacePosterior.load(path, LINE, map_location=place)

    return in_a_folder(read)


def mode(y: Tensor) -> None:
    """A param whose square is a mean: at its start the evidence is not curved downwards."""
    height = pyro.param("height", T * 0.1)
    observed("y", dist.Normal(normal("w") + 3.0 * height.square(), 0.5), y)


def covariance(num_steps: int) -> Any:
    stop = Stop(num_steps=num_steps, progress=False, throw=False)
    return fit(mode, Y + 4.0, stop=stop).hyperparameter_covariance().constrained


def scaled_line() -> Any:
    pyro.clear_param_store()
    return LaplaceMarginal(of_basis(Linear()), integrate=["w"])


def one_step(model: Any) -> float:
    return float(SVI(model, AutoNormal(model), Adam({"lr": 0.01}), Trace_ELBO()).step(X, Y))


def weighed(names: tuple[str, ...]) -> Any:
    draws = {"tau": torch.ones(3).double(), "w": torch.zeros(3, 2).double()}
    marginal = LaplaceMarginal(scale_and_weights, integrate=["w"])
    return marginal.log_evidences({n: draws[n] for n in names}, X, Y)


def scale_and_weights(X: Tensor, y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfNormal(T))
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), tau).to_event(1))
    observed("y", dist.Normal(X @ w, 0.5), y)


def many_groups(g: Tensor, x: Tensor, y: Tensor) -> None:
    observed("y", dist.Normal(normal("a", 250)[g] + x, 0.5), y)


def without_first() -> Any:
    kept = PAIRS != 0
    found = fit(many_groups, PAIRS[kept], SIDE[kept], SIDE[kept])
    return found.log_prob(PAIRS[~kept], SIDE[~kept], SIDE[~kept])


def left_out(**by: Any) -> Any:
    with mock.patch("pyro_evidence.posterior.reweighted.NUMBERS", 1000):
        return fit(LINE, X, Y).loo(**by).elpd


def two_cauchys(y: Tensor) -> None:
    mean = normal("mean")
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Cauchy(mean + z, 1.0), obs=y)


def optional(X: Tensor, y: Tensor, bias: bool = False) -> None:
    observed("y", dist.Normal(X @ normal("w", 2) + (normal("b") if bias else 0.0), 0.5), y)


def exported(bias: bool) -> Any:
    kernel = HMC(optional, step_size=0.01, num_steps=1, adapt_step_size=False)
    chains = MCMC(kernel, num_samples=8, warmup_steps=0, disable_progbar=True)
    chains.run(X, Y)
    return to_inference_data(chains, X, Y, bias)


def positive_data(X: Tensor, y: Tensor | None) -> None:
    noise = dist.TransformedDistribution(dist.Normal(X @ normal("w", 2), 1.0), [dist.transforms.SoftplusTransform()])
    with pyro.plate("data", len(X)):
        pyro.sample("y", noise, obs=y)


def replicated() -> Any:
    found = fit(positive_data, X, Y.exp())
    return pyro.infer.Predictive(found.model, guide=found.guide, num_samples=10)(X, None)["y"]


RARE: dict[str, Remedy] = {
    "an engine that is a posterior": Remedy(
        BadInput,
        "give its engine",
        lambda: beside_laplace(fit(LINE, X, Y)),
        lambda: beside_laplace(LaplaceEvidence(LINE)),
    ),
    "hyperparameters held and integrated": Remedy(
        BadInput,
        "Give two engines",
        lambda: with_scale(posterior="laplace", hyperpriors={"alpha": dist.HalfNormal(T)}),
        lambda: with_scale(posterior="laplace"),
    ),
    "the metric of another engine": Remedy(
        BadInput,
        "Leave metric out",
        lambda: beside_laplace(short_nuts(posterior="laplace", metric="laplace"), point(0.01)),
        lambda: beside_laplace(short_nuts(posterior="laplace"), point(0.01)),
    ),
    "draws of unequal numbers": Remedy(
        BadInput,
        r"Look at that engine's get_samples\(\)",
        lambda: beside_laplace(ByHand(w=X[:20], v=X[:10])),
        lambda: beside_laplace(ByHand(w=X[:20])),
    ),
    "draws that are infinite": Remedy(
        BadInput,
        "Look at that engine",
        lambda: beside_laplace(ByHand(w=X[:20] / 0.0)),
        lambda: beside_laplace(ByHand(w=X[:20])),
    ),
    "a loss that is no number": Remedy(
        BadInput,
        "Lower the learning rate",
        lambda: beside_laplace(point(1e160)),
        lambda: beside_laplace(point(1e-2)),
    ),
    "processes that nobody began": Remedy(BadInput, "an initialised process group", sharded, alone),
    "a row without a label": Remedy(
        BadInput,
        "Take these rows out",
        lambda: labels_of("a,label\n1,0\n2,\n3,1\n"),
        lambda: labels_of("a,label\n1,0\n3,1\n"),
    ),
    "data that the prior cannot produce": Remedy(
        BadInput,
        "Bring both to the same units",
        lambda: tempered_smc(above(0.01), num_particles=128),
        lambda: tempered_smc(above(1.0), num_particles=128),
    ),
    "a mode in a corner": Remedy(
        BadInput, r"run NUTS on posterior\.model", lambda: in_a_corner().importance_resampled(100), chain_in_a_corner
    ),
    "a device that is not here": Remedy(BadInput, r"Pass map_location='cpu'", lambda: on("cuda"), lambda: on("cpu")),
    "a covariance away from the maximum": Remedy(
        NotAMode, "Run the fit until it has converged", lambda: covariance(0), lambda: covariance(50)
    ),
    "second derivatives of a marginal": Remedy(
        UnsupportedModel,
        "use LaplaceEvidence on the model itself",
        lambda: LaplaceEvidence(scaled_line()).run(X, Y),
        lambda: fit(of_basis(Linear()), X, Y),
    ),
    "the same, by SVI": Remedy(
        UnsupportedModel,
        "Use NUTS, SVI or an AutoGuide on it",
        lambda: LaplaceEvidence(scaled_line()).run(X, Y),
        lambda: one_step(scaled_line()),
    ),
    "samples of other sites": Remedy(
        BadInput, r"Pass mcmc\.get_samples\(\)", lambda: weighed(("w",)), lambda: weighed(("tau",))
    ),
    "too many groups to leave out": Remedy(
        TooLarge, "Leave fewer, larger groups out", left_out, lambda: left_out(by=torch.arange(40) // 4)
    ),
    "too many coordinates to leave out of": Remedy(
        TooLarge,
        r"fit to all data but one group's and ask log_prob\(...\)",
        lambda: fit(many_groups, PAIRS, SIDE, SIDE).loo(by=PAIRS),
        without_first,
    ),
    "a noise without a mean": Remedy(
        UnsupportedModel,
        r"Use Predictive\(posterior\.model, guide=posterior\.guide",
        lambda: fit(positive_data, X, Y.exp()).predict(X, Y),
        replicated,
    ),
    "a mean over classes that is none": Remedy(
        BadInput,
        r"ask for quantiles=\[0\.05, 0\.5, 0\.95\]",
        lambda: fit(two_cauchys, Y).predict(Y),
        lambda: fit(two_cauchys, Y).predict(Y, quantiles=[0.05, 0.5, 0.95]),
    ),
    "arguments that were not sampled": Remedy(
        BadInput, r"Pass the arguments of mcmc\.run", lambda: exported(True), lambda: exported(False)
    ),
    "more than there is memory for": Remedy(
        TooLarge,
        "give fewer rows",
        lambda: fit(LINE, X[:1].expand(2**56, 2), Y[:1].expand(2**56)),
        lambda: fit(LINE, X[:1].expand(8, 2), Y[:1].expand(8)),
    ),
}
