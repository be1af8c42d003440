"""The PRBF as a Pyro model: its density, its special cases, and every engine on it."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, OverlapEM, Start, Stop
from pyro_evidence.models.prbf import Diagonal, Full, Kernels, Separate, Spherical, class_labels, prbf
from pyro_evidence.prbf import AlphaPerKernel, StartFrom
from pyro_evidence.prbf.updates import em

KINDS = [Spherical(), Diagonal(), Full()]
each_kind = pytest.mark.parametrize("kernels", KINDS, ids=lambda kernels: type(kernels).__name__)


def two_blobs(num: int = 40) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    y = (torch.arange(num) % 2).long()
    return torch.randn(num, 2, generator=g) + 2.5 * y.unsqueeze(-1), y


@each_kind
def test_log_joint_of_the_data_is_what_the_posterior_says(kernels: Kernels) -> None:
    """The engine's point put into the model: likelihood by Pyro's distributions."""
    X, y = two_blobs()
    labels = torch.where(torch.arange(len(y)) % 5 == 0, -1, y)
    model = prbf(3, kernels=kernels)
    posterior = OverlapEM(model, stop=Stop(tolerance=0.0, num_steps=5)).run(X, labels)
    trace = poutine.trace(poutine.condition(model, posterior.mode)).get_trace(X, labels)
    trace.compute_log_prob()
    total = sum(trace.nodes[name]["log_prob_sum"] for name in ("label", "x", "x_unlabelled"))
    torch.testing.assert_close(total, posterior.log_prob(X, labels).sum(), rtol=1e-10, atol=1e-9)


def test_log_prob_in_one_dimension_is_a_sum_of_normals() -> None:
    X, y = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([0, 0, 1])
    start = StartFrom(
        torch.tensor([[0.5], [3.0]]), torch.tensor([[1.0], [4.0]]), torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    )
    point = OverlapEM(prbf(2), initial=start, alpha=0.0)._begin(X, y).point
    net = point.net
    assert net.class_prior.tolist() == [[pytest.approx(2 / 3), pytest.approx(1 / 3)]]
    kernels = dist.Normal(torch.tensor([0.5, 3.0]), torch.tensor([1.0, 2.0])).log_prob(X).exp()
    expected = sum(math.log(float(kernels[n] @ net.mixing[0, int(y[n])])) for n in range(3))
    assert float(point.log_likelihood) == pytest.approx(expected, abs=1e-12)


def test_separate_mixtures_are_separate() -> None:
    X, y = two_blobs()
    model = prbf(3, sharing=Separate((1, 2)))
    posterior = OverlapEM(model, alpha=AlphaPerKernel(20.0)).run(X, y)
    assert posterior.alpha == 0.0  # nothing is shared, so there is nothing to regularise
    assert torch.equal(posterior.mixing > 0, torch.tensor([[True, False, False], [False, True, True]]))
    torch.testing.assert_close(posterior.loc[0], X[y == 0].mean(0))
    assert set(posterior.mode) == {"class_prior", "loc", "scale", "mixing_0", "mixing_1"}
    assert not posterior.rejections


def test_one_class_is_a_gaussian_mixture() -> None:
    X, _ = two_blobs()
    one, two = (
        OverlapEM(prbf(3, 1), alpha=500.0, **extra).run(X, labels)  # type: ignore[arg-type]
        for labels, extra in ((None, {}), (torch.zeros(len(X)), {"update": em}))
    )
    torch.testing.assert_close(one.loc, two.loc, rtol=0, atol=0)
    assert one.predict_proba(X).tolist() == [[1.0]] * len(X)


@each_kind
def test_laplace_evidence_runs_on_it(kernels: Kernels) -> None:
    X, y = two_blobs()
    posterior = LaplaceEvidence(prbf(2, kernels=kernels), start=Start(restarts=1, tour=0)).run(X, y)
    assert math.isfinite(float(posterior.log_evidence))
    near = (posterior.mode["loc"].unsqueeze(1) - torch.stack([X[y == 0].mean(0), X[y == 1].mean(0)])).norm(dim=-1)
    assert bool((near.amin(0) < 0.7).all())


@pytest.mark.slow
def test_laplace_svi_and_nuts_agree_on_one_density() -> None:
    """A kernel for each class, so nothing can be swapped: the centres' posterior is nearly Gaussian."""
    X, y = two_blobs()
    model = prbf(2, sharing=Separate((1, 1)))
    laplace = LaplaceEvidence(model, start=Start(restarts=1)).run(X, y)
    precision = 20 / laplace.mode["scale"].unsqueeze(-1).square()  # closed form of the mode at its scale
    unit = X.std(0, correction=0)
    means = torch.stack([X[y == 0].mean(0), X[y == 1].mean(0)])
    expected = (precision * means + X.mean(0) / unit.square()) / (precision + 1 / unit.square())
    torch.testing.assert_close(laplace.mode["loc"], expected, rtol=1e-5, atol=1e-5)
    mcmc = MCMC(NUTS(model, max_tree_depth=4), num_samples=50, warmup_steps=40, disable_progbar=True)
    mcmc.run(X, y)
    guide = AutoNormal(model, init_scale=0.1)
    svi = SVI(model, guide, Adam({"lr": 0.1}), Trace_ELBO())
    for _ in range(100):
        svi.step(X, y)
    scale = (precision + 1 / unit.square()).rsqrt()
    draws = mcmc.get_samples()["loc"]
    assert bool(((draws.mean(0) - expected).abs() < 0.6 * scale).all())
    assert bool(((draws.std(0) / scale).log().abs() < 0.4).all())
    assert bool(((guide.median()["loc"] - expected).abs() < 1.0 * scale).all())


def test_nuts_runs_on_it() -> None:
    X, y = two_blobs()
    fit = OverlapEM(prbf(2)).run(X, y)
    mcmc = MCMC(NUTS(prbf(2), max_tree_depth=3), num_samples=10, warmup_steps=10, disable_progbar=True)
    mcmc.run(X, y)
    draws = mcmc.get_samples()
    assert draws["loc"].shape == (10, 2, 2) and draws["mixing"].shape == (10, 2, 2)
    assert fit.mode.keys() == draws.keys()


def test_predictive_takes_the_posterior_as_guide() -> None:
    X, y = two_blobs()
    posterior = OverlapEM(prbf(2)).run(X, y)
    samples = Predictive(posterior.model, guide=posterior.guide, num_samples=2, return_sites=["loc"])(X, y)
    torch.testing.assert_close(samples["loc"][0].reshape(2, 2), posterior.loc)
    assert not list(pyro.get_param_store().keys())


@pytest.mark.parametrize(
    "labels",
    [
        [0, None, 1],
        torch.tensor([0.0, math.nan, 1.0]),
        torch.tensor([0.0, math.nan, 1.0], requires_grad=True),
        torch.tensor([0, -1, 1]),
        torch.tensor([0, -1, 1], dtype=torch.int8),
        [False, None, True],
        np.array([0, -1, 1]),
    ],
)
def test_labels_of_any_dtype(labels: object) -> None:
    assert class_labels(labels, 3, 2).tolist() == [0, -1, 1]  # type: ignore[arg-type]


def test_labels_of_an_unsigned_type() -> None:
    assert class_labels(torch.tensor([0, 2, 1], dtype=torch.uint8), 3, 3).tolist() == [0, 2, 1]
    assert class_labels(torch.tensor([False, True]), 2, 2).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["yes", "no", "no"], r"labels of type list are not numbers .*'yes'.*return_inverse"),
        (torch.tensor([0.0, math.inf, 1.0]), r"labels\[1\] is inf"),
        (torch.zeros(3, dtype=torch.complex64), r"dtype torch.complex64"),
        (torch.tensor([0, 1]), r"shape \(2,\); expected \(3,\)"),
        (torch.tensor([0, 1, 2]), r"labels\[2\] is 2; expected whole numbers from 0 to 1"),
        (torch.tensor([0.0, 0.5, 1.0]), r"labels\[1\] is 0.5"),
        (torch.tensor([0, -2, 1]), r"labels\[1\] is -2"),
    ],
)
def test_bad_labels_are_named(labels: Tensor, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        class_labels(labels, 3, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: prbf(0), "num_kernels=0"),
        (lambda: prbf(3, True), "num_classes=True"),
        (lambda: prbf(3, 2, sharing=Separate((1, 1))), r"add up to 3"),
        (lambda: prbf(3, kernels="full"), r"kernels='full'; expected Spherical\(\)"),  # type: ignore[arg-type]
        (lambda: prbf(3, kernels=Full), r"kernels=<class .*an object"),  # type: ignore[arg-type]
        (lambda: prbf(3, sharing=Separate), r"sharing=Separate is a class"),  # type: ignore[arg-type]
        (lambda: prbf(3, kernels=Diagonal(-1e-6)), r"expected a floor of at least 0"),
    ],
)
def test_settings_that_cannot_be_meant(make: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()  # type: ignore[operator]
