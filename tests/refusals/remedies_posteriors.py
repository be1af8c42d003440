"""Messages of posteriors, of what compares them and of what is drawn of them, each with what it leads to."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, Predictive
from torch import Tensor

from pyro_evidence import (
    BadInput,
    EvidenceEM,
    LaplaceEvidence,
    LaplacePosterior,
    NestedPosterior,
    UnsupportedModel,
    bridge_sampling,
    class_conditional,
    committee,
    compare,
    compare_evidence,
    find_modes,
    predict_latent,
    to_inference_data,
)
from pyro_evidence.compare import NUTSRun, linearised
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mixture import gaussian_mixture, linear_mixture
from pyro_evidence.models.regression import regression
from pyro_evidence.plots import comparison as comparison_plots
from pyro_evidence.plots import mixture as mixture_plots
from pyro_evidence.plots import posterior as posterior_plots
from tests.refusals.remedies import COUNTS, LABELS, LINE, Remedy, X, Y, fit, normal, observed, plain
from tests.refusals.remedies import regression as by_hand
from tests.refusals.remedies_engines import BELONGS, GROUPS, groups
from tests.refusals.remedies_programs import BLOBS, two_sites

CAUCHY = by_hand(plain, lambda m: dist.Cauchy(m, 0.5))
LOGITS = by_hand(plain, lambda m: dist.Bernoulli(logits=m))
POISSON = by_hand(plain, lambda m: dist.Poisson(m.exp()))


def line() -> LaplacePosterior:
    found: LaplacePosterior = fit(LINE, X, Y)
    return found


def nested() -> NestedPosterior:
    found: NestedPosterior = fit(groups, GROUPS, Y)
    return found


def two_counts(y: Tensor, n: Tensor) -> None:
    mean = normal("mean")
    observed("y", dist.Normal(mean, 1.0), y)
    with pyro.plate("others", len(n)):
        pyro.sample("n", dist.Poisson(mean.exp()), obs=n)


def draws_of(model: Any, *data: Any, num: int = 60) -> Any:
    chains = MCMC(NUTS(model), num_samples=num, warmup_steps=100, disable_progbar=True)
    chains.run(*data)
    return chains


def saved(read: Callable[[Path], Any], posterior: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit.pt"
        posterior().save(path)
        return read(path)


def drawn(draw: Callable[[Any], Any]) -> Any:
    figure, axes = plt.subplots()
    try:
        return draw(axes)
    finally:
        plt.close(figure)


def engines(**more: Any) -> dict[str, Any]:
    return {"laplace": LaplaceEvidence(LINE), **more}


def compared(**more: Any) -> Any:
    pyro.clear_param_store()
    return compare(LINE, X, Y, engines=engines(**more), reference="laplace")


POSTERIORS: dict[str, Remedy] = {
    "deviations and quantiles at once": Remedy(
        BadInput,
        "Call it twice",
        lambda: line().predict(X, Y, return_std=True, quantiles=[0.1]),
        lambda: line().predict(X, Y, quantiles=[0.1]),
    ),
    "a mean that is none": Remedy(
        BadInput,
        r"ask for quantiles=\[0\.05, 0\.5, 0\.95\]",
        lambda: fit(CAUCHY, X, Y).predict(X, Y),
        lambda: fit(CAUCHY, X, Y).predict(X, Y, quantiles=[0.05, 0.5, 0.95]),
    ),
    "a log predictive density of two sites": Remedy(
        BadInput,
        r"use log_likelihood\(\.\.\.\)",
        lambda: fit(two_counts, Y, COUNTS).log_prob(Y, COUNTS),
        lambda: fit(two_counts, Y, COUNTS).log_likelihood(Y, COUNTS)["n"],
    ),
    "a latent function that is none": Remedy(
        UnsupportedModel,
        r"Use Predictive\(posterior\.model",
        lambda: predict_latent(line(), X),
        lambda: Predictive(line().model, guide=line().guide, num_samples=3)(X, Y)["w"],
    ),
    "leaving out by a name that is none": Remedy(
        BadInput, "or a tensor of labels", lambda: nested().loo(by="colour"), lambda: nested().loo(by=GROUPS).elpd
    ),
    "a marginal of what is no site": Remedy(
        BadInput, "expected a latent site", lambda: nested().marginal("b"), lambda: nested().marginal("tau").mean
    ),
    "a file of another model": Remedy(
        BadInput,
        "Load it with the model that it was fitted to|load it with the model that it was fitted to",
        lambda: saved(lambda path: LaplacePosterior.load(path, two_sites), line),
        lambda: saved(lambda path: LaplacePosterior.load(path, LINE), line),
    ),
    "a file with marginalised sites": Remedy(
        BadInput,
        r"NestedPosterior\.load",
        lambda: saved(lambda path: LaplacePosterior.load(path, groups), nested),
        lambda: saved(lambda path: NestedPosterior.load(path, groups), nested),
    ),
    "a file without marginalised sites": Remedy(
        BadInput,
        r"load it with LaplacePosterior\.load",
        lambda: saved(lambda path: NestedPosterior.load(path, LINE), line),
        lambda: saved(lambda path: LaplacePosterior.load(path, LINE), line),
    ),
    "an argument that a file cannot hold": Remedy(
        BadInput,
        r"functools\.partial",
        lambda: saved(lambda path: path, lambda: fit(with_function, X, Y, torch.tanh)),
        lambda: saved(lambda path: LaplacePosterior.load(path, LINE), line),
    ),
    "one posterior in a committee": Remedy(
        BadInput, "Pass them in a list", lambda: committee([X]), lambda: committee([line()]).log_evidence
    ),
    "a network that is none": Remedy(
        UnsupportedModel,
        r"use Predictive\(posterior\.model",
        lambda: linearised(line(), X),
        lambda: Predictive(line().model, guide=line().guide, num_samples=3)(X, Y)["w"],
    ),
    "one posterior to compare": Remedy(
        BadInput,
        "expected at least two",
        lambda: compare_evidence(a=line()),
        lambda: compare_evidence(a=line(), b=fit(two_sites, X, Y)).table(),
    ),
    "other data to compare": Remedy(
        BadInput,
        "pass throw=False",
        lambda: compare_evidence(a=line(), b=fit(LINE, X, Y + 1.0)),
        lambda: compare_evidence(a=line(), b=fit(LINE, X, Y + 1.0), throw=False).table(),
    ),
    "a prior of zero": Remedy(
        BadInput,
        "Leave a model out to give it none",
        lambda: compare_evidence(a=line(), b=fit(two_sites, X, Y), c=line(), prior={"a": 0.0, "b": 1.0, "c": 1.0}),
        lambda: compare_evidence(b=fit(two_sites, X, Y), c=line(), prior={"b": 1.0, "c": 1.0}).table(),
    ),
    "a metric of nobody": Remedy(
        BadInput,
        r"NUTSRun\(posterior='laplace', metric='laplace'\)",
        lambda: compared(nuts=NUTSRun(metric="laplace")),
        lambda: compared(
            nuts=NUTSRun(posterior="laplace", metric="laplace", num_samples=10, warmup_steps=5, num_chains=1)
        ),
    ),
    "chains that have not run": Remedy(
        BadInput,
        r"call mcmc\.run\(\.\.\.\) first",
        lambda: to_inference_data(MCMC(NUTS(LINE), num_samples=10), X, Y),
        lambda: to_inference_data(draws_of(LINE, X, Y), X, Y),
    ),
    "draws of another model": Remedy(
        BadInput,
        r"NUTS\(posterior\.model\)",
        lambda: bridge_sampling(line(), {"v": X[:5]}),
        lambda: bridge_sampling(line(), draws_of(line().model, X, Y).get_samples()),
    ),
    "too few draws": Remedy(
        BadInput,
        "Run the chains longer",
        lambda: bridge_sampling(line(), line().get_samples(3, seed=0)),
        lambda: bridge_sampling(line(), line().get_samples(100, seed=0)),
    ),
    "draws that do not move": Remedy(
        BadInput,
        "Warm up longer",
        lambda: bridge_sampling(line(), {"w": torch.ones(100, 2).double()}),
        lambda: bridge_sampling(line(), draws_of(line().model, X, Y).get_samples()),
    ),
    "draws that are not finite": Remedy(
        BadInput,
        "Drop them",
        lambda: bridge_sampling(line(), {"w": with_nan()}),
        lambda: bridge_sampling(line(), {"w": with_nan()[1:]}),
    ),
    "labels of several lengths": Remedy(
        BadInput,
        "Name axes of one length",
        lambda: find_modes(fit(lengths, Y), labels={"a": 0, "b": 0}),
        lambda: find_modes(fit(lengths, Y), labels={"a": 0}),
    ),
    "a single datum of a class": Remedy(
        BadInput,
        "at least two, or no density",
        lambda: classes(torch.cat([BELONGS[:-1], BELONGS.new_tensor([2])])),
        lambda: classes(BELONGS),
    ),
    "classes with names": Remedy(
        BadInput,
        r"numpy\.unique\(labels, return_inverse=True\)",
        lambda: classes(["a", "b"] * 20),
        lambda: classes(torch.as_tensor(numpy_labels())),
    ),
    "a class without a density": Remedy(
        BadInput,
        "Fit these classes too, or leave their rows out",
        lambda: classes(BELONGS).log_prob(BLOBS, BELONGS + 1),
        lambda: classes(BELONGS).log_prob(BLOBS[:20], BELONGS[:20]),
    ),
    "other columns for a mixture": Remedy(
        BadInput,
        "Pass the same columns, in the same order",
        lambda: EvidenceEM(gaussian_mixture(2)).run(BLOBS).log_prob(BLOBS[:, :1]),
        lambda: EvidenceEM(gaussian_mixture(2)).run(BLOBS).log_prob(BLOBS[:, :2]),
    ),
    "no data behind a fit to chunks": Remedy(
        BadInput,
        "pass the model's arguments for some rows",
        lambda: LaplaceEvidence(LINE).run_chunks([(X, Y)]).log_prob(),
        lambda: LaplaceEvidence(LINE).run_chunks([(X, Y)]).log_prob(X, Y),
    ),
    "a comparison without predictions": Remedy(
        BadInput,
        r"held_out=\(X_new, t_new\)",
        lambda: drawn(lambda axes: comparison_plots.calibration(axes, compared(other=LaplaceEvidence(LINE)))),
        lambda: drawn(lambda axes: comparison_plots.calibration(axes, with_held_out())),
    ),
    "one coordinate for a pair": Remedy(
        BadInput,
        r"Draw overlaid\(\.\.\.\) instead",
        lambda: drawn(lambda axes: comparison_plots.worst_pair(axes, of_mean(), "other")),
        lambda: drawn(lambda axes: comparison_plots.overlaid(axes, of_mean(), "m")),
    ),
    "a conditional density as one picture": Remedy(
        BadInput,
        "draw density_strips",
        lambda: drawn(lambda axes: mixture_plots.ellipses(axes, conditional().density(X))),
        lambda: drawn(lambda axes: mixture_plots.density_strips(axes, strip, X[:, 0], Y)),
    ),
    "no precision to draw": Remedy(
        BadInput,
        "Write the prior so",
        lambda: drawn(lambda axes: posterior_plots.well_determined(axes, line())),
        lambda: drawn(lambda axes: posterior_plots.well_determined(axes, fit(regression(Linear()), X, Y))),
    ),
}


def with_function(X: Tensor, y: Tensor, link: Any) -> None:
    observed("y", dist.Normal(link(X @ normal("w", 2)), 0.5), y)


def lengths(y: Tensor) -> None:
    a, b = normal("a", 2), normal("b", 3)
    observed("y", dist.Normal(a.sum() + b.sum(), 1.0), y)


def with_nan() -> Tensor:
    w = line().get_samples(100, seed=0)["w"].clone()
    w[0] = torch.nan
    return w


def classes(labels: Any) -> Any:
    return class_conditional(EvidenceEM(gaussian_mixture(1)), BLOBS, labels)


def numpy_labels() -> Any:
    return np.unique(["a", "b"] * 20, return_inverse=True)[1]


def twice(model: Any) -> dict[str, Any]:
    return {"laplace": LaplaceEvidence(model), "other": LaplaceEvidence(model)}


def with_held_out() -> Any:
    pyro.clear_param_store()
    return compare(LOGITS, X, LABELS, engines=twice(LOGITS), reference="laplace", held_out=(X, LABELS))


def one_mean(y: Tensor) -> None:
    observed("y", dist.Normal(normal("m"), 1.0), y)


def of_mean() -> Any:
    return compare(one_mean, Y, engines=twice(one_mean), reference="laplace")


def strip(x: Tensor, y: Tensor) -> Tensor:
    return conditional().log_prob(torch.stack([x, X[0, 1].expand_as(x)], -1), y[:, None])


def conditional() -> Any:
    return EvidenceEM(linear_mixture(1, Linear())).run(X, Y[:, None])
