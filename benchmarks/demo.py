"""The main job: three engines on the same models and real data, one table on the screen, one picture in demo.png.

    make demo

Every model is an ordinary Pyro program with learned prior precisions.  It is fitted four times:

- LaplaceEvidence learns the hyperparameters by their evidence;
- SVI with AutoLaplaceApproximation moves them to the joint mode with the weights;
- the same engine again, with the hyperparameters that LaplaceEvidence found;
- NUTS, also with those, is the reference for the posterior standard deviations.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import matplotlib.pyplot as plt
import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoLaplaceApproximation
from pyro.optim import Adam
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence import LaplaceEvidence, LaplacePosterior, datasets
from pyro_evidence.datasets import Dataset, standardised, train_test_split
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.regression import regression
from pyro_evidence.plots import posterior as plots_posterior

PICTURE = Path("demo.png")
NUM_SAMPLES = 300  # of every posterior
NUM_WARMUP = 200  # of NUTS
NUM_SVI_STEPS = 1000

Model = Callable[..., Tensor]


@dataclass(frozen=True)
class Problem:
    """A model of the weights ``w``, what it is fitted to and what it is tested on."""

    name: str
    model: Model
    train: Dataset
    test: Dataset

    @property
    def is_classification(self) -> bool:
        return bool(((self.train.t == 0) | (self.train.t == 1)).all())


@dataclass(frozen=True)
class Fit:
    """What an engine made of a problem; ``model`` has the hyperparameters in it."""

    model: Model
    w: Tensor  # (S, M) draws
    seconds: float
    posterior: LaplacePosterior | None = None  # of the one engine that has a log evidence


Fits = dict[str, Fit | Exception]


def problems() -> Iterator[Problem]:
    """Those whose data are there."""
    yield linear("breast cancer", datasets.breast_cancer(), classifier(Linear(), alpha_bias=0.01))
    yield linear("diabetes", in_standard_units(datasets.diabetes()), regression(Linear(), alpha_bias=0.01))
    if "PYRO_EVIDENCE_DATA" in os.environ:
        yield linear("Pima", datasets.pima(), classifier(Linear(), alpha_bias=0.01))
        yield ripley()


def linear(name: str, data: Dataset, model: Model) -> Problem:
    train, test = train_test_split(data, fraction=0.7, seed=0)
    return Problem(name, model, standardised(train), standardised(test, like=train))


def in_standard_units(data: Dataset) -> Dataset:
    """Targets with mean 0 and variance 1, which a fixed number of SVI steps can reach."""
    return data._replace(t=(data.t - data.t.mean()) / data.t.std())


def ripley() -> Problem:
    """Cubic polynomials, on the published split."""
    train, test = datasets.ripley_train(), datasets.ripley_test()
    model = classifier(Polynomial(degree=3), alpha_bias=0.01)
    return Problem("Ripley", model, standardised(train), standardised(test, like=train))


def by_laplace(problem: Problem, earlier: Fits) -> Fit:
    start = perf_counter()
    posterior = LaplaceEvidence(problem.model).run(problem.train.X, problem.train.t)
    w = posterior.get_samples(NUM_SAMPLES, seed=0)["w"]
    return Fit(posterior.model, w, perf_counter() - start, posterior)


def by_svi(problem: Problem, earlier: Fits) -> Fit:
    pyro.clear_param_store()
    w, seconds = auto_laplace(problem.model, problem.train)
    guide_params = ("AutoLaplaceApproximation", "AutoMultivariateNormal")
    params = {name: value.detach() for name, value in pyro.get_param_store().items()}
    hyperparameters = {name: value for name, value in params.items() if not name.startswith(guide_params)}
    return Fit(poutine.substitute(problem.model, data=hyperparameters), w, seconds)


def by_svi_given(problem: Problem, earlier: Fits) -> Fit:
    pyro.clear_param_store()
    model = fitted_model(earlier)
    constant = poutine.block(model, hide_types=["param"])  # or SVI would look for them in the param store
    return Fit(model, *auto_laplace(constant, problem.train))


def auto_laplace(model: Model, train: Dataset) -> tuple[Tensor, float]:
    """Draws of the weights and the seconds that they took."""
    start = perf_counter()
    guide = AutoLaplaceApproximation(model)
    engine = SVI(model, guide, Adam({"lr": 0.02}), Trace_ELBO())
    for _ in tqdm(range(NUM_SVI_STEPS), desc="SVI", leave=False, disable=None):
        engine.step(train.X, train.t)
    normal = guide.laplace_approximation(train.X, train.t)
    with torch.no_grad():
        w = torch.stack([normal(train.X)["w"] for _ in range(NUM_SAMPLES)])
    return w, perf_counter() - start


def by_nuts(problem: Problem, earlier: Fits) -> Fit:
    model = fitted_model(earlier)
    start = perf_counter()
    quiet = not sys.stderr.isatty()
    mcmc = MCMC(NUTS(model), num_samples=NUM_SAMPLES, warmup_steps=NUM_WARMUP, disable_progbar=quiet)
    mcmc.run(problem.train.X, problem.train.t)
    return Fit(model, mcmc.get_samples()["w"], perf_counter() - start)


def fitted_model(earlier: Fits) -> Model:
    ours = earlier[OURS]
    if isinstance(ours, Exception):
        raise RuntimeError(f"needs the hyperparameters of {OURS}")
    return ours.model


OURS, JOINT, REFERENCE = "LaplaceEvidence", "SVI + AutoLaplace", "NUTS, same hyperparameters"
ENGINES = {OURS: by_laplace, JOINT: by_svi, "  same hyperparameters": by_svi_given, REFERENCE: by_nuts}


def fit_all(problem: Problem) -> Fits:
    """What each engine found, or what stopped it."""
    fits: Fits = {}
    for name, engine in tqdm(ENGINES.items(), desc=problem.name, leave=False, disable=None):
        pyro.set_rng_seed(0)
        try:
            fits[name] = engine(problem, fits)
        except Exception as error:
            fits[name] = error
    return fits


def predict(fit: Fit, test: Dataset) -> tuple[Tensor, Tensor]:
    """Log density of each target, averaged over draws, and its predicted mean, each of shape ``(N,)``."""
    log_probs, means = [], []
    with torch.no_grad():
        for w in fit.w:
            trace = poutine.trace(poutine.condition(fit.model, data={"w": w})).get_trace(test.X, test.t)
            target = trace.nodes["t"]
            log_probs.append(target["fn"].log_prob(target["value"]))
            means.append(target["fn"].mean)
    return torch.stack(log_probs).logsumexp(0) - math.log(len(fit.w)), torch.stack(means).mean(0)


def error(problem: Problem, mean: Tensor) -> str:
    """Misclassified in per cent, or root mean squared error in standard deviations of the target."""
    t = problem.test.t
    if problem.is_classification:
        return f"{100 * float(((mean > 0.5) != t).double().mean()):.1f} %"
    return f"{float((mean - t).square().mean().sqrt()):.3f}"


def sd_error(fit: Fit, reference: Fit | Exception) -> str:
    """Median over the weights of ``|sd / sd of the reference - 1|``, in per cent."""
    if fit is reference or isinstance(reference, Exception):
        return "-"
    ratio = fit.w.std(0) / reference.w.std(0)
    return f"{100 * float((ratio - 1).abs().median()):.0f} %"


COLUMNS = ("{:<14}", "{:<27}", "{:>13}", "{:>10}", "{:>12}", "{:>9}", "{:>8}")
HEADER = ("data", "engine", "test log lik.", "error", "log evidence", "sd error", "seconds")
LEGEND = (
    "test log lik.: mean over test rows, nats, of the log of the density averaged over posterior draws",
    "error:         test rows misclassified, or root mean squared error in standard deviations of the target",
    "log evidence:  log p(training targets given hyperparameters), nats; a dash where an engine has none",
    f"sd error:      of the weights, median of |sd / sd of NUTS - 1|; {NUM_SAMPLES} draws make about 5 % by chance",
)


def line(cells: Iterable[str]) -> str:
    return " ".join(column.format(cell) for column, cell in zip(COLUMNS, cells, strict=True))


def table(problem: Problem, fits: Fits) -> Iterator[str]:
    """One line per engine; a failure is told in its line."""
    for name, fit in fits.items():
        try:
            yield line([problem.name, name, *numbers(problem, fit, fits[REFERENCE])])
        except Exception as failure:
            what = (str(failure).splitlines() or [""])[0]
            yield f"{line([problem.name, name, *[''] * 5]).rstrip()}   failed: {type(failure).__name__}: {what}"


def numbers(problem: Problem, fit: Fit | Exception, reference: Fit | Exception) -> list[str]:
    if isinstance(fit, Exception):
        raise fit
    log_prob, mean = predict(fit, problem.test)
    log_evidence = f"{float(fit.posterior.log_evidence):.2f}" if fit.posterior else "-"
    quality = [f"{float(log_prob.mean()):.4f}", error(problem, mean), log_evidence, sd_error(fit, reference)]
    return [*quality, f"{fit.seconds:.2f}"]


def picture(problem: Problem, fits: Fits) -> plt.Figure:
    """Weights by engine; how far the data determine each when it has a precision of its own; the way there."""
    num_inputs = problem.train.X.shape[1]
    model = classifier(Linear(), alpha_bias=0.01, groups=torch.arange(num_inputs))
    own = LaplaceEvidence(model).run(problem.train.X, problem.train.t)
    figure, axes = plt.subplots(1, 3, figsize=(15, 9), width_ratios=[4, 3, 3], layout="constrained")
    weights(axes[0], problem, fits)
    plots_posterior.well_determined(axes[1], own)
    axes[1].set_ylim(axes[0].get_ylim())  # a row is the same weight in both
    axes[1].set_title("with a precision for each weight:\nhow far the data determine it (inf: switched off)")
    paths(axes[2], {"a precision for each weight": own, "one for all": fits[OURS].posterior})
    return figure


def weights(axes: plt.Axes, problem: Problem, fits: Fits) -> None:
    good = {name: {"w": fits[name].w} for name in (OURS, JOINT, REFERENCE) if isinstance(fits[name], Fit)}
    plots_posterior.marginals(axes, good, site="w")
    axes.set_yticks(range(len(problem.train.names) + 1), [*problem.train.names, "bias"])
    axes.set_xlabel("log odds per standard deviation of the input,\nmedian and 90 % interval")
    axes.set_title(f"{problem.name}: the weights\nby three engines")
    axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.08), ncols=3)


def paths(axes: plt.Axes, posteriors: dict[str, LaplacePosterior]) -> None:
    for name, posterior in posteriors.items():
        plots_posterior.evidence_path(axes, posterior)
        axes.lines[-1].set_label(name)
    axes.set_title("the evidence\nwhile the precisions are learned")
    axes.legend()


def draw(problem: Problem, fits: Fits) -> str:
    """The picture's file, or why there is none."""
    try:
        picture(problem, fits).savefig(PICTURE, dpi=120)
    except Exception as failure:
        return f"No picture: {type(failure).__name__}: {failure}"
    return f"The picture is in {PICTURE}."


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # the matrices are small
    print(line(HEADER))
    about_picture = ""
    for problem in problems():
        fits = fit_all(problem)
        print("\n".join(table(problem, fits)), flush=True)
        about_picture = about_picture or draw(problem, fits)
    print("", *LEGEND, about_picture, sep="\n")
    if "PYRO_EVIDENCE_DATA" not in os.environ:
        print("Pima and Ripley were left out: PYRO_EVIDENCE_DATA does not name the folder of their files.")


if __name__ == "__main__":
    main()
