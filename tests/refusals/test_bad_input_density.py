"""One error message for each way in which a model or its data make no density: what, expected, where, what to do."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import REVM, RVM, VRVM, LaplaceEvidence
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.gmrf import ICAR, RandomWalk
from pyro_evidence.models.regression import regression as linear_regression
from pyro_evidence.program.log_joint import LogJoint
from tests.refusals.messages import refused, says

NAN, INF = float("nan"), float("inf")
X = torch.tensor([[0.3, -1.2], [2.0, 0.1], [-0.7, 0.9], [1.1, 1.5]])
T = torch.tensor([0.2, -0.4, 1.3, 2.2])


def regression(X: Tensor, t: Tensor | None) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 1.0), obs=t)


# --- data ---


@pytest.mark.parametrize("bad", [NAN, INF])
def test_data_that_are_not_finite(bad: float) -> None:
    t = T.clone()
    t[1] = bad
    with pyro.validation_enabled(False):
        message = refused(BadInput, regression, X, t)
    says(message, "not finite at site(s) 't' (shape (4,), 1", "argument 1: shape (4,)", str(bad), "Remove")


def test_data_that_are_not_finite_with_validation() -> None:
    says(
        refused(BadInput, regression, X, torch.full_like(T, NAN)),
        "argument 1: shape (4,)",
        "4 nan",
        "support",
    )


def test_inputs_that_are_not_finite() -> None:
    bad = X.clone()
    bad[0, 0] = NAN
    with pyro.validation_enabled(False):
        says(refused(BadInput, regression, bad, T), "site(s) 't'", "argument 0: shape (4, 2)", "1 nan")


def test_missing_data_behind_a_mask() -> None:
    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(t)), poutine.mask(mask=~t.isnan()):
            pyro.sample("t", dist.Normal(w, 1.0, validate_args=False), obs=t)

    with pyro.validation_enabled(False):
        message = refused(BadInput, model, torch.tensor([0.1, NAN]))
    says(message, "gradient is not finite", "1 nan", "mask hides their value, not their gradient")


def test_data_outside_the_support() -> None:
    def model(t: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Exponential(rate), obs=t)

    says(refused(BadInput, model, -T.abs()), "support", "argument 0: shape (4,)")


def test_empty_data() -> None:
    says(refused(BadInput, regression, X[:0], T[:0]), "argument 1: shape (0,)", "at least one datum")

    def no_plate(X: Tensor, t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("t", dist.Normal(X @ w, 1.0).to_event(1), obs=t)

    says(refused(BadInput, no_plate, X[:0], T[:0]), "'t' observes no data", "shape (0,)")


@pytest.mark.parametrize("engine", [LaplaceEvidence, RVM, VRVM, REVM])
def test_matrices_without_rows_or_columns(engine: Callable[..., Any]) -> None:
    for empty in (X[:0], X[:, :0], X[:0, :0]):
        says(
            refused(BadInput, engine(linear_regression(Linear())).run, empty, T[: len(empty)]), "X has shape", "no data"
        )


def test_inference_mode() -> None:
    """Fits and predictions are the same inside, and what they and fields keep is of use outside."""
    graph = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])

    def fields(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        around = pyro.sample("around", ICAR(graph, scale)) + pyro.sample("along", RandomWalk(scale, 4))
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Normal(around, 0.5), obs=y)

    powers = linear_regression(Polynomial(2), alpha=1.0, beta=1.0)
    with torch.inference_mode():
        poutine.trace(powers).get_trace(X, T)
        poutine.trace(fields).get_trace(T[:4]).compute_log_prob()
        inside = LaplaceEvidence(regression).run(X * 1.0, T)
        predicted = inside.predict(X)
    outside = LaplaceEvidence(regression).run(X, T)
    assert torch.equal(inside.log_evidence, outside.log_evidence)
    assert torch.equal(predicted, outside.predict(X)) and torch.equal(predicted, inside.predict(X))
    assert inside.sensitivity().log_evidence == outside.sensitivity().log_evidence
    assert LaplaceEvidence(fields).run(T[:4]).log_evidence.isfinite()
    assert LaplaceEvidence(powers).run(X, T).log_evidence.isfinite()


def test_shapes_that_do_not_broadcast() -> None:
    says(
        refused(BadInput, regression, X, T[:3]),
        "argument 0: shape (4, 2)",
        "argument 1: shape (3,)",
        "broadcast",
    )
    says(refused(BadInput, regression, X[:, :1], T), "argument 0: shape (4, 1)", "size mismatch")


def test_shapes_that_broadcast_to_an_outer_product() -> None:
    message = refused(BadInput, regression, X, T.unsqueeze(-1))
    says(message, "site 't'", "values of shape (4, 1)", "parameters of shape (4,)", "(4, 4)", "squeeze")


def test_float32_and_float64() -> None:
    def single(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float32), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("t", dist.Normal(w * x, 1.0), obs=x)

    def both(x: Tensor) -> None:
        pyro.sample("v", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        single(x)

    says(refused(BadInput, regression, X.float(), T.double()), "float32", "float64", "one dtype")
    for model in (single, both):
        says(
            refused(BadInput, model, T.double()),
            "latent w",
            "single precision",
            "t double",
            "set_default_dtype",
        )

    def product(X: Tensor, t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
        pyro.sample("t", dist.Normal(X @ w, 1.0).to_event(1), obs=t)

    says(refused(BadInput, product, X.float(), T), "argument 0: shape (4, 2), torch.float32", "dtype")


# --- sites ---


def test_no_observation() -> None:
    message = refused(BadInput, regression, X, None)
    says(message, "no observed site", "obs=data", "poutine.condition", "argument 0: shape (4, 2)")


def test_no_latent() -> None:
    def model(t: Tensor) -> None:
        pyro.sample("t", dist.Normal(0.0, 1.0).expand([4]).to_event(1), obs=t)

    says(refused(UnsupportedModel, model, T), "no latent site", "pyro.sample")


def test_only_discrete_latents() -> None:
    def model(t: Tensor) -> None:
        with pyro.plate("data", len(t)):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("t", dist.Normal(z, 1.0), obs=t)

    says(refused(UnsupportedModel, model, T), "only discrete latents (z)")


def test_a_discrete_latent_without_end() -> None:
    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        n = pyro.sample("n", dist.Poisson(3.0))
        pyro.sample("t", dist.Normal(w + n, 1.0).expand([4]).to_event(1), obs=t)

    says(refused(UnsupportedModel, model, T), "'n'", "Poisson", "Truncate")


def test_a_support_without_bijection() -> None:
    def model(t: Tensor) -> None:
        d = pyro.sample("d", dist.ProjectedNormal(torch.tensor([1.0, 0.0])))
        pyro.sample("t", dist.Normal(d[0], 1.0).expand([4]).to_event(1), obs=t)

    says(refused(UnsupportedModel, model, T), "'d'", "ProjectedNormal", "Sphere", "biject_to")


@pytest.mark.parametrize("how", ["latent", "param", "discrete"])
def test_a_support_that_moves(how: str) -> None:
    def model(t: Tensor) -> None:
        if how == "latent":
            bound = pyro.sample("bound", dist.LogNormal(0.0, 1.0))
        elif how == "param":
            bound = pyro.param("bound", torch.tensor(2.0), constraint=constraints.positive)
        else:
            bound = torch.tensor([1.0, 2.0])[pyro.sample("z", dist.Categorical(torch.ones(2)))]
        x = pyro.sample("x", dist.Uniform(-bound, bound))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(x, 1.0), obs=t)

    message = refused(UnsupportedModel, model, T)
    says(message, "site 'x' has support", "Interval", "depends on another site or on a hyperparameter", "NUTS")


def test_structure_that_depends_on_a_value() -> None:
    def grows(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        if w > grows.edge:  # type: ignore[attr-defined]
            w = w + pyro.sample("extra", dist.Normal(0.0, 1.0))
        pyro.sample("t", dist.Normal(w, 1.0).expand([4]).to_event(1), obs=t)

    grows.edge = INF  # type: ignore[attr-defined]
    joint = LogJoint(grows, (T,))
    grows.edge = -INF  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel, match="'extra' appeared"):
        joint.log_joint(torch.zeros(1), joint.initial_theta)
    joint = LogJoint(grows, (T,))
    grows.edge = INF  # type: ignore[attr-defined]
    for u in (torch.zeros(2), torch.zeros(3, 2)):
        with pytest.raises(UnsupportedModel, match="'extra' vanished"):
            joint.log_joint(u, joint.initial_theta)


def test_a_param_that_appears_later() -> None:
    runs = 0

    def model(t: Tensor) -> None:
        nonlocal runs
        runs += 1
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        scale = pyro.param(f"scale_{min(runs, 2)}", torch.tensor(1.0))
        pyro.sample("t", dist.Normal(w, scale).expand([4]).to_event(1), obs=t)

    says(refused(UnsupportedModel, model, T), "'scale_2' appeared")
    assert not pyro.get_param_store()


def test_an_axis_that_no_plate_declares_beside_a_discrete_site() -> None:
    def model(t: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample("t", dist.Normal(loc[z], 1.0), obs=t)

    message = refused(UnsupportedModel, model, T[:2])
    says(message, "site 't', batch shape (2,)", "pyro.plate", ".to_event(1)")


def test_plates_that_cross_around_discrete_sites() -> None:
    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        rows, columns = pyro.plate("rows", 4, dim=-2), pyro.plate("columns", 4, dim=-1)
        with rows:
            a = pyro.sample("a", dist.Bernoulli(0.3))
        with columns:
            b = pyro.sample("b", dist.Bernoulli(0.3))
        with rows, columns:
            pyro.sample("t", dist.Normal(w + a + b, 1.0), obs=t.expand(4, 4))

    says(refused(UnsupportedModel, model, T), "a, b, t", "nested in each other")


def test_different_scales_on_discrete_sites_that_depend_on_each_other() -> None:
    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        a = pyro.sample("a", dist.Bernoulli(0.3))
        with pyro.plate("data", len(t)), poutine.scale(scale=2.0):
            z = pyro.sample("z", dist.Bernoulli(0.2 + 0.5 * a))
            pyro.sample("t", dist.Normal(w + z, 1.0), obs=t)

    says(refused(UnsupportedModel, model, T), "'a': 1.0", "'z': 2.0", "same poutine.scale")


def test_data_that_can_be_read_only_once() -> None:
    def model(data: Any) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        for i, t in enumerate(data):
            pyro.sample(f"t_{i}", dist.Normal(w, 1.0), obs=t)

    says(refused(UnsupportedModel, model, iter(T)), "t_0, t_1, t_2, t_3", "first run", "generator")
    assert LogJoint(model, (list(T),)).observed == ("t_0", "t_1", "t_2", "t_3")


# --- not a fixed function ---


def noisy(t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.sample("t", dist.Normal(w + torch.randn(()), 1.0).expand([4]).to_event(1), obs=t)


def unnamed(t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    f = dist.Normal(w, 0.3).rsample()
    pyro.sample("t", dist.Normal(f, 1.0).expand([4]).to_event(1), obs=t)


class Dropout(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([50]).to_event(1))
        self.drop = PyroModule[torch.nn.Dropout](0.5)

    def forward(self, t: Tensor) -> None:
        pyro.sample("t", dist.Normal(self.drop(self.w).sum(), 1.0).expand([4]).to_event(1), obs=t)


@pytest.mark.parametrize("make", [lambda: noisy, lambda: unnamed, Dropout])
def test_a_density_that_is_random(make: Callable[[], Callable[..., None]]) -> None:
    says(refused(UnsupportedModel, make(), T), "not a fixed function", "unnamed sampling", "dropout")


def test_rounding_that_depends_on_the_place_in_memory_is_no_random_number() -> None:
    runs = count()

    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("t", dist.Normal(w.double(), 0.01 + 2e-18 * next(runs)).expand([4]).to_event(1), obs=t)

    densities = {float(LogJoint(model, (T.double(),)).log_joint(torch.ones(1), torch.zeros(0))) for _ in range(9)}
    assert len(densities) > 1  # they differ in their last digits


@pytest.mark.parametrize("how", [{"subsample_size": 3}, {"subsample": torch.arange(3)}])
def test_a_subsampled_plate(how: dict[str, Any]) -> None:
    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(t), **how) as index:
            pyro.sample("t", dist.Normal(w, 1.0), obs=t[index])

    says(refused(UnsupportedModel, model, T), "plate 'data' subsamples 3 of 4", "subsample_size")


# --- the model itself ---


def test_an_error_of_the_models_own_is_not_dressed_up() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        LogJoint(regression, (X,))
    with pytest.raises(KeyError, match="nowhere"):
        LogJoint(lambda: {}["nowhere"])


def test_a_model_that_autograd_cannot_follow() -> None:
    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        scale = w.exp().expand(4).clone().sqrt()
        scale[0] += 1.0
        pyro.sample("t", dist.Normal(0.0, scale).to_event(1), obs=t)

    says(refused(BadInput, model, T), "inplace operation", "argument 0: shape (4,)")


def test_a_matrix_that_is_never_positive_definite() -> None:
    def model(t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        K = -torch.eye(4) + 0.0 * w
        pyro.sample("t", dist.MultivariateNormal(torch.zeros(4), K, validate_args=False), obs=t)

    with pyro.validation_enabled(False):
        says(refused(BadInput, model, T), "positive-definite", "argument 0: shape (4,)")
