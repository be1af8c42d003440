"""Logistic and softmax regression against sums over data written out, and optima from scikit-learn."""

import math
import pickle
from collections.abc import Callable
from functools import partial

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation
from pyro.optim import Adam
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import GaussianRBF, Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.likelihoods import Binary, Softmax
from pyro_evidence.models.regression import Learned

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
assert_approx = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)

three = partial(classifier, num_classes=3)


def problem(num_classes: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(20, 2, generator=generator)
    score = (2.0 * X[:, 0] - X[:, 1] + 0.5 * torch.randn(20, generator=generator)).argsort().argsort()
    return X, score * num_classes // 20


def log_joint(model: Callable[..., Tensor], w: Tensor, X: Tensor, t: Tensor) -> Tensor:
    trace = poutine.trace(poutine.condition(model, data={"w": w})).get_trace(X, t)
    return trace.log_prob_sum()


def log_normal(value: float, precision: float) -> float:
    return 0.5 * math.log(precision / math.tau) - 0.5 * precision * value**2


def naive_log_joint(w: list[list[float]], precision: list[float], Phi: Tensor, t: Tensor) -> float:
    """Prior and softmax likelihood, term by term, classes as rows of ``w``."""
    total = sum(log_normal(v, p) for row in w for v, p in zip(row, precision, strict=True))
    for phi, label in zip(Phi.tolist(), t.tolist(), strict=True):
        logits = [sum(a * b for a, b in zip(phi, row, strict=True)) for row in w]
        total += logits[label] - math.log(sum(math.exp(logit) for logit in logits))
    return total


PRIORS = [
    ({"alpha": 2.0, "alpha_bias": 0.1}, [2.0, 2.0, 0.1]),
    ({"alpha": Learned(2.0), "alpha_bias": Learned(0.1)}, [2.0, 2.0, 0.1]),
    ({"alpha": 2.0, "alpha_bias": None}, [2.0, 2.0, 2.0]),
    ({"alpha": Learned(torch.tensor([2.0, 3.0])), "groups": torch.tensor([1, 0])}, [3.0, 2.0, 1.0]),
]


@pytest.mark.parametrize(("settings", "precision"), PRIORS)
def test_softmax_log_joint_equals_a_loop(settings, precision) -> None:
    X, t = problem(3)
    w = torch.tensor([[0.3, -2.0, 1.0], [0.1, 0.5, -0.7], [-1.0, 0.2, 0.4]])
    expected = naive_log_joint(w.tolist(), precision, Linear()(X), t)
    assert_exact(log_joint(three(Linear(), **settings), w, X, t), torch.tensor(expected))


@pytest.mark.parametrize(("settings", "precision"), PRIORS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_logistic_log_joint_equals_a_loop(settings, precision, dtype: torch.dtype) -> None:
    X, t = problem()
    w = [0.3, -2.0, 1.0]
    prior_of_zeros = sum(log_normal(0.0, p) for p in precision)  # the loop has a second row, of zeros
    expected = naive_log_joint([[0.0] * 3, w], precision, Linear()(X), t) - prior_of_zeros
    actual = log_joint(classifier(Linear(), **settings), torch.tensor(w), X, t.to(dtype))
    assert_exact(actual, torch.tensor(expected))


def test_gradient_vanishes_at_the_optimum_of_scikit_learn() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    for num_classes in (2, 3):
        X, t = problem(num_classes)
        Phi = Linear()(X)
        fit = linear_model.LogisticRegression(C=1 / 2.0, fit_intercept=False, tol=1e-10, max_iter=1000)
        coefficients = torch.tensor(fit.fit(Phi.numpy(), t.numpy()).coef_)
        w = coefficients.squeeze(0).requires_grad_()
        joint = log_joint(classifier(Linear(), num_classes=num_classes, alpha=2.0, alpha_bias=None), w, X, t)
        (gradient,) = torch.autograd.grad(joint, w)
        assert_approx(gradient, torch.zeros_like(w))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # forward mode of torch 2.13
def test_hessian_is_that_of_the_textbook() -> None:  # Bishop (2006), eq. 4.97; torch.func goes through
    X, t = problem()
    w = torch.tensor([0.3, -2.0, 1.0])
    model = classifier(Linear(), alpha=2.0, alpha_bias=0.1)
    with pyro.validation_enabled(False):
        hessian = torch.func.hessian(lambda w: log_joint(model, w, X, t))(w)
    Phi = Linear()(X)
    y = (Phi @ w).sigmoid()
    assert_exact(-hessian, Phi.mT @ ((y * (1 - y))[:, None] * Phi) + torch.tensor([2.0, 2.0, 0.1]).diag())


def test_one_vector_added_to_every_class_changes_only_the_prior() -> None:
    X, t = problem(3)
    w, shift = (
        torch.tensor([[0.3, -2.0, 1.0], [0.1, 0.5, -0.7], [-1.0, 0.2, 0.4]]),
        torch.tensor([1.0, 2.0, 3.0]),
    )
    model = three(Linear(), alpha=2.0, alpha_bias=2.0)
    prior_change = -((w + shift).square().sum() - w.square().sum())
    assert_exact(log_joint(model, w + shift, X, t) - log_joint(model, w, X, t), prior_change)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        ({}, {"alpha": (), "alpha_bias": ()}),
        ({"alpha_bias": None}, {"alpha": ()}),
        ({"alpha_bias": 0.01, "groups": torch.arange(2)}, {"alpha": (2,)}),
        ({"alpha": 1.0, "alpha_bias": 1.0}, {}),
    ],
)
def test_only_what_the_caller_leaves_open_is_a_param(num_classes: int, settings, shapes) -> None:
    classifier(Linear(), num_classes=num_classes, **settings)(*problem(num_classes))
    found = {name: tuple(value.shape) for name, value in pyro.get_param_store().items()}
    assert found == shapes


@pytest.mark.parametrize("model", [classifier(Linear()), three(Linear())])
def test_dtype_follows_the_inputs(model) -> None:
    X, t = problem()
    trace = poutine.trace(model).get_trace(X.float(), t)
    assert {trace.nodes[name]["value"].dtype for name in ("w", "alpha", "alpha_bias")} == {torch.float32}


SHAPES = [(classifier(Linear()), (3,)), (three(Linear()), (3, 3))]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(("model", "shape"), SHAPES)
def test_prior_predictive_has_the_shapes_of_the_sites(model, shape, parallel: bool) -> None:
    X, _ = problem()
    draws = Predictive(model, num_samples=6, parallel=parallel)(X)
    assert {name: tuple(value.shape) for name, value in draws.items()} == {"w": (6, 1, *shape), "t": (6, 20)}


@pytest.mark.parametrize("parallel", [False, True])
def test_predictive_labels_follow_the_weights(parallel: bool) -> None:
    X, _ = problem()
    certain = 1e3 * torch.tensor([[1.0, 2.0, 0.1], [-1.0, 0.5, 0.3], [3.0, -1.0, 0.2]])
    w = torch.stack([certain, -certain, certain.flip(0), certain.roll(1, 1)])
    Phi = Linear()(X)
    labels = Predictive(three(Linear()), {"w": w}, parallel=parallel)(X)["t"]
    assert torch.equal(labels, torch.stack([(Phi @ one.mT).argmax(-1) for one in w]))
    labels = Predictive(classifier(Linear()), {"w": w[:, 0]}, parallel=parallel)(X)["t"]
    assert torch.equal(labels, (w[:, 0] @ Phi.mT > 0).double())


@pytest.mark.parametrize("num_classes", [2, 3])
def test_particles_in_a_plate_equal_particles_in_a_loop(num_classes: int) -> None:
    model = classifier(Linear(), num_classes=num_classes)
    arguments = (model, AutoDelta(model), *problem(num_classes))
    once = Trace_ELBO().loss(*arguments)
    many = Trace_ELBO(num_particles=5, vectorize_particles=True, max_plate_nesting=1).loss(*arguments)
    assert_exact(many, once)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_pickles_and_compares_by_content(num_classes: int) -> None:
    X, t = problem(num_classes)
    basis = GaussianRBF(X[:4], 0.5)
    model = classifier(basis, num_classes=num_classes, groups=torch.tensor([0, 0, 1, 1]))
    other = pickle.loads(pickle.dumps(model))
    assert other == model
    assert hash(other) == hash(model)
    assert other != classifier(basis, num_classes=num_classes, groups=torch.tensor([0, 1, 1, 1]))
    assert other != classifier(basis, num_classes=4, groups=torch.tensor([0, 0, 1, 1]))
    w = torch.ones(5) if num_classes == 2 else torch.ones(3, 5)
    assert_exact(log_joint(other, w, X, t), log_joint(model, w, X, t))


def test_the_number_of_classes_decides() -> None:
    assert classifier(Linear()).likelihood == Binary()
    assert three(Linear()).likelihood == Softmax(3)


@pytest.mark.parametrize("num_classes", [-1, 0, 1])
def test_fewer_than_two_classes_are_refused(num_classes: int) -> None:
    with pytest.raises(BadInput, match=f"num_classes={num_classes}; expected a whole number of at least 2"):
        classifier(Linear(), num_classes=num_classes)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_the_prior_is_checked(num_classes: int) -> None:
    with pytest.raises(BadInput, match="alpha has the value 0"):
        classifier(Linear(), num_classes=num_classes, alpha=0.0)
    with pytest.raises(BadInput, match="has no bias column"):
        classifier(Linear(bias=False), num_classes=num_classes, alpha_bias=1.0)
    with pytest.raises(BadInput, match="groups has 3 entries, but the basis has 2 functions"):
        classifier(Linear(), num_classes=num_classes, groups=torch.arange(3))(*problem(num_classes))


@pytest.mark.parametrize("num_classes", [2, 3])
def test_labels_as_a_column_are_refused(num_classes: int) -> None:
    X, t = problem(num_classes)
    with pytest.raises(BadInput, match=r"t has shape \(20, 1\), but X has 20 rows"):
        classifier(Linear(), num_classes=num_classes)(X, t[:, None])


@pytest.mark.parametrize("num_classes", [2, 3])
def test_svi_and_nuts_run_on_it(num_classes: int) -> None:
    X, t = problem(num_classes)
    model = classifier(Linear(), num_classes=num_classes)
    guide = AutoLaplaceApproximation(model)
    svi = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step(X, t) for _ in range(20)]
    assert losses[-1] < losses[0]
    mcmc = MCMC(NUTS(model), num_samples=5, warmup_steps=5, disable_progbar=True)
    mcmc.run(X, t)
    assert mcmc.get_samples()["w"].shape == ((5, 3) if num_classes == 2 else (5, 3, 3))
