"""Each kind of model has its own picture: a curve, ellipses, ringed vectors, a panel for each term."""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

from pyro_evidence import RVM, EvidenceEM, LaplaceEvidence, Stop
from pyro_evidence.models.basis import GaussianRBF, Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture
from pyro_evidence.models.regression import regression
from pyro_evidence.posterior.process import predict_latent

QUIET = Stop(progress=False)
X = torch.linspace(-3.0, 3.0, 40, dtype=torch.float64)[:, None]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    plt.close("all")


def line(axes: Axes, label: str) -> np.ndarray:
    return next(found for found in axes.lines if found.get_label() == label).get_xydata()


def test_groups_have_a_panel_for_each_coefficient() -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("formulae")
    from pyro_evidence.models.formula import mixed

    g, x = torch.arange(90) % 15, torch.randn(90)
    y = 200.0 + 2.0 * x + (torch.randn(15) + torch.randn(15) * x[:, None])[:, 0] + 3.0 * torch.randn(15)[g]
    frame = pandas.DataFrame({"g": g.numpy(), "x": x.numpy(), "y": (y + 0.5 * torch.randn(90)).numpy()})
    model, data = mixed("y ~ x + (x || g)", frame)
    first = LaplaceEvidence(model, stop=QUIET).run(*data).plot()
    panels = {axes.get_title(loc="left"): axes for axes in first.figure.axes}
    assert list(panels) == ["b[Intercept]", "b", "sd_g", "u_g, Intercept", "u_g, x", ""]
    assert len(panels["u_g, x"].get_yticks()) == 12
    assert "u_g: 6 more" in first.figure.axes[-1].get_xlabel()


def test_precisions_that_lie_far_apart_are_on_a_logarithmic_axis() -> None:
    inputs = torch.randn(150, 4)
    t = 5.0 * inputs[:, 0] + 0.02 * inputs[:, 1] + 0.1 * torch.randn(150)
    model = regression(Linear(bias=False), beta=100.0, groups=torch.arange(4))
    first = LaplaceEvidence(model, stop=QUIET).run(inputs, t).plot()
    scales = {axes.get_title(loc="left"): axes.get_xscale() for axes in first.figure.axes}
    assert scales["alpha"] == "log" and scales["w"] == "linear"


def test_a_process_is_its_curve_in_its_band() -> None:
    found = LaplaceEvidence(gp_regression(RBF()), stop=QUIET).run(X, torch.sin(2.0 * X[:, 0]) + 0.2 * torch.randn(40))
    axes = found.plot(prob=0.5)
    grid, mean = torch.tensor(line(axes, "mean")).T
    latent = predict_latent(found, grid[:, None])
    torch.testing.assert_close(mean, latent.mean)
    low = torch.tensor(axes.collections[0].get_paths()[0].vertices)[1:201, 1]
    torch.testing.assert_close(low, latent.mean - 0.6744898 * latent.variance.sqrt())
    assert line(axes, "data").shape == (40, 2)


def test_a_mixture_has_shares_in_its_legend() -> None:
    Y = torch.cat([torch.randn(150, 2), 0.5 * torch.randn(50, 2) + 6.0])
    found = EvidenceEM(gaussian_mixture(4, noise=FullNoise()), stop=QUIET).run(Y)
    axes = found.plot()
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"75% of the data", "25% of the data"}
    assert axes.get_legend().get_title().get_text() == "ellipses hold 90 % of each"
    assert sum(len(found.get_xdata()) for found in axes.lines if "data" in str(found.get_label())) == 200


def test_relevance_vectors_are_ringed() -> None:
    t = torch.sin(2.0 * X[:, 0]) + 0.2 * torch.randn(40)
    found = RVM(regression(GaussianRBF(X, 0.8), beta=25.0), stop=QUIET).run(X, t)
    axes = found.plot()
    kept = found.relevant[found.relevant < 40]
    np.testing.assert_array_equal(line(axes, "relevance vectors"), torch.stack([X[kept, 0], t[kept]], 1))
    grid, mean = torch.tensor(line(axes, "prediction")).T
    torch.testing.assert_close(mean, found.predict(grid[:, None]))
    plane = torch.randn(60, 2)
    label = (plane.square().sum(1) < 1.4).double()
    found = RVM(classifier(GaussianRBF(plane, 1.0)), stop=QUIET).run(plane, label)
    axes = found.plot()
    np.testing.assert_array_equal(line(axes, "relevance vectors"), plane[found.relevant[found.relevant < 60]])
    boundary = torch.tensor(np.concatenate([path.vertices for path in axes.collections[0].get_paths()]))
    assert float((found.predict(boundary) - 0.5).abs().max()) < 0.05
