"""Every kind of picture as a PNG, at the size of a page: ``make gallery`` writes build/gallery.

To be looked at after a change of ``plot``; a fit of each kind, a minute in all.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas
import pyro
import pyro.distributions as dist
import torch

from pyro_evidence import RVM, EvidenceEM, LaplaceEvidence, Stop, class_conditional, compare_evidence, datasets
from pyro_evidence.display import Axes
from pyro_evidence.models.basis import GaussianRBF, Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.formula import mixed
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture
from pyro_evidence.models.regression import regression
from pyro_evidence.plots import fitted

QUIET = Stop(progress=False)
FOLDER = Path("build/gallery")


def wave(num: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    X = torch.linspace(-3.0, 3.0, num)[:, None]
    return X, torch.sin(2.0 * X[:, 0]) + 0.2 * torch.randn(num)


def subjects() -> pandas.DataFrame:
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"subject": np.repeat(np.arange(30), 8), "day": np.tile(np.arange(8), 30)})
    own = rng.normal(size=(30, 2)) * [25.0, 6.0]
    mean = 250.0 + own[frame.subject, 0] + (10.0 + own[frame.subject, 1]) * frame.day
    return frame.assign(reaction=mean + 25.0 * rng.normal(size=len(frame)))


def groups() -> Axes:
    model, data = mixed("reaction ~ day + (day | subject)", subjects())
    return LaplaceEvidence(model, stop=QUIET).run(*data).plot()


def several_terms() -> Axes:
    frame = subjects().assign(site=lambda f: f.subject % 4)
    model, data = mixed("reaction ~ day + (1 | subject) + (1 | site)", frame, priors="weak")
    return LaplaceEvidence(model, stop=QUIET).run(*data).plot()


def relevance() -> Axes:
    X = torch.randn(150, 8)
    t = torch.bernoulli((2.0 * X[:, 0] - X[:, 3]).sigmoid())
    frame = pandas.DataFrame(X.numpy(), columns="age bmi iron sugar salt fat zinc lead".split())
    return LaplaceEvidence(classifier(Linear(), groups=torch.arange(8)), stop=QUIET).run(frame, t).plot()


def process() -> Axes:
    return LaplaceEvidence(gp_regression(RBF()), stop=QUIET).run(*wave()).plot()


def clusters() -> Axes:
    Y = torch.cat([torch.randn(n, 2) * s + c for n, s, c in ((150, 1.0, 0.0), (80, 0.5, 4.0), (40, 0.7, -3.0))])
    return EvidenceEM(gaussian_mixture(6, noise=FullNoise()), stop=QUIET).run(Y).plot()


def one_output() -> Axes:
    Y = torch.cat([torch.randn(120) * 0.6, torch.randn(60) + 4.0])[:, None]
    return EvidenceEM(gaussian_mixture(4), stop=QUIET).run(Y).plot()


def vectors_of_a_curve() -> Axes:
    X, t = wave()
    return RVM(regression(GaussianRBF(X, 0.8), beta=25.0), stop=QUIET).run(X, t).plot()


def vectors_of_two_classes() -> Axes:
    train = datasets.ripley_train()
    return RVM(classifier(GaussianRBF(train.X, 0.5)), stop=QUIET).run(train.X, train.t).plot()


def classes() -> Axes:
    X = torch.cat([torch.randn(80, 2), torch.randn(60, 2) * 0.6 + 3.0, torch.randn(60, 2) + torch.tensor([4.0, -1.0])])
    labels = torch.tensor([0] * 80 + [1] * 120)
    found = class_conditional(EvidenceEM(gaussian_mixture(3, noise=FullNoise()), stop=QUIET), X, labels)
    return found.plot(X=X, labels=labels)


def models() -> Axes:
    frame, fits = subjects(), {}
    for name, formula in {"none": "1", "intercepts": "(1 | subject)", "slopes": "(day | subject)"}.items():
        model, data = mixed(f"reaction ~ day + {formula}", frame, priors="weak")
        fits[name] = LaplaceEvidence(model, stop=QUIET).run(*data)
    return compare_evidence(**fits).plot()


def caterpillar() -> Axes:
    model, data = mixed("reaction ~ day + (1 | subject)", subjects())
    figure = plt.figure(layout="constrained")
    return fitted.caterpillar(figure.gca(), LaplaceEvidence(model, stop=QUIET).run(*data), site="u_subject")


def smooth() -> Axes:
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"x": rng.uniform(0.0, 6.0, 200), "group": rng.choice(["a", "b"], 200)})
    frame["y"] = rng.poisson(np.exp(1.0 + np.sin(frame.x) + 0.5 * (frame.group == "b")))
    model, data = mixed("y ~ s(x) + group", frame, family="poisson")
    axes = plt.figure(layout="constrained").gca()
    return fitted.average_predictions(axes, LaplaceEvidence(model, stop=QUIET).run(*data), column="x", by="group")


def selection(X: torch.Tensor, y: torch.Tensor) -> None:
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1), infer={"branching": True})
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ (w * keep), 0.5), obs=y)


def selections() -> Axes:
    X = torch.randn(30, 6)
    y = 0.5 * X[:, 0] + 0.3 * X[:, 2] + 0.2 * X[:, 4] + 0.5 * torch.randn(30)
    axes = plt.figure(figsize=(8.0, 5.0), layout="constrained").gca()
    return LaplaceEvidence(selection, stop=QUIET).run(X, y).plot_nested(axes)


PICTURES: list[Callable[[], Axes]] = [
    *(
        groups,
        several_terms,
        relevance,
        process,
        clusters,
        one_output,
        vectors_of_a_curve,
        vectors_of_two_classes,
        classes,
    ),
    *(models, caterpillar, smooth, selections),
]


def main() -> None:
    torch.set_default_dtype(torch.float64)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        torch.manual_seed(0)
        axes = draw()
        axes.figure.savefig(FOLDER / f"{draw.__name__}.png", dpi=100, bbox_inches="tight")
        plt.close("all")


if __name__ == "__main__":
    main()
