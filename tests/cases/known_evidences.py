"""Small models whose log evidence is known by a closed form or by quadrature in one or two dimensions.

Most have several modes, labels that can be exchanged, or densities that are no mode at all; the rest tell whether what
is done for those spoils the ordinary ones.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy import integrate, optimize, special, stats
from torch import Tensor
from torch.distributions import constraints

normal = stats.norm.logpdf
RANDOM = np.random.default_rng(0)
RANDOM.normal(1, 1, 8)
T = torch.tensor


@dataclass(frozen=True)
class Known:
    """A model with its data and its log evidence.

    :ivar truth: log evidence in nats, computed when asked for.
    """

    model: Callable[..., Any]
    args: tuple[Tensor, ...]
    truth: Callable[[], float]
    settings: dict[str, Any]


KNOWN: dict[str, Known] = {}


def known(name: str, truth: Callable[[], float], *args: Tensor, **settings: Any) -> Callable[[Any], Any]:
    """Put the model below into the table."""

    def add(model: Callable[..., Any]) -> Callable[..., Any]:
        KNOWN[name] = Known(model, args, functools.cache(truth), settings)
        return model

    return add


def integral(log_f: Callable[[Any], Any], low: float, high: float, points: int = 400_001, also: Any = ()) -> float:
    """Log of the integral of ``exp(log_f)`` by the trapezoidal rule.

    :param log_f: of an array of points.
    :param also: further points, where the integrand is narrow.
    """
    x = np.sort(np.concatenate([np.linspace(low, high, points), also]))
    y = log_f(x)
    top = y[np.isfinite(y)].max()
    return float(top + np.log(np.trapezoid(np.exp(y - top), x)))


def integral_2d(
    log_f: Callable[[Any, Any], Any], first: tuple[float, float], second: tuple[float, float], points: int = 3001
) -> float:
    """Log of the integral over a rectangle, by the trapezoidal rule in each direction."""
    x, y = np.linspace(*first, points), np.linspace(*second, points)
    z = log_f(x[:, None], y[None])
    top = z[np.isfinite(z)].max()
    return float(top + np.log(np.trapezoid(np.trapezoid(np.exp(z - top), y, axis=1), x)))


def gaussian(t: Tensor, covariance: Tensor) -> float:
    """Log density of a multivariate normal with mean zero."""
    return float(dist.MultivariateNormal(torch.zeros(len(t)), covariance).log_prob(t))


def nothing_observed() -> None:
    """An observation of probability one."""
    pyro.sample("o", dist.Bernoulli(1.0 - 1e-16), obs=T(1.0))


# --- labels that can be exchanged ---

CLUSTERS = T([-5.2, -4.9, -5.1, 0.1, -0.2, 0.3, 5.3, 4.8, 5.1])


def three_clusters() -> float:
    """Equal shares, clusters far apart: six labellings of one term."""
    covariance = 25.0 * torch.ones(3, 3) + torch.eye(3)
    return sum(gaussian(c, covariance) for c in CLUSTERS.split(3)) - 9 * math.log(3) + math.log(6)


def in_clusters(means: Tensor, t: Tensor) -> None:
    with pyro.plate("data", len(t)):
        k = pyro.sample("k", dist.Categorical(torch.ones(3)), infer={"enumerate": "parallel"})
        pyro.sample("t", dist.Normal(means[k], 1.0), obs=t)


@known("three far means, a vector", three_clusters, CLUSTERS)
def means_in_a_vector(t: Tensor) -> None:
    in_clusters(pyro.sample("m", dist.Normal(torch.zeros(3), 5.0).to_event(1)), t)


@known("three far means, a plate", three_clusters, CLUSTERS)
def means_in_a_plate(t: Tensor) -> None:
    with pyro.plate("components", 3):
        means = pyro.sample("m", dist.Normal(0.0, 5.0))
    in_clusters(means, t)


# --- signs ---


@known(
    "slope |a|",
    lambda: integral(lambda a: normal(a, 0, 3) + normal(2.0, abs(a), 0.3) + normal(4.0, 2 * abs(a), 0.3), -30, 30),
    T([2.0, 4.0]),
)
def slope_without_sign(t: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 3.0))
    pyro.sample("t", dist.Normal(a.abs() * T([1.0, 2.0]), 0.3).to_event(1), obs=t)


@known("|a|", lambda: integral(lambda a: normal(a, 0, 3) + normal(2.0, abs(a), 0.3), -30, 30), T(2.0))
def absolute_value(t: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 3.0))
    pyro.sample("t", dist.Normal(a.abs(), 0.3), obs=t)


@known("sqrt(a^2)", lambda: integral(lambda a: normal(a, 0, 3) + normal(2.0, abs(a), 0.3), -30, 30), T(2.0))
def root_of_a_square(t: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 3.0))
    pyro.sample("t", dist.Normal(a.square().sqrt(), 0.3), obs=t)


UNIT_X = (-2.0, -1.0, 0.5, 1.0, 2.0)
UNIT_Y = (-1.4, -1.1, 0.6, 1.0, 1.5)


def hidden_unit_density(a: Any, b: Any) -> Any:
    data = zip(UNIT_X, UNIT_Y, strict=True)
    return normal(a, 0, 2) + normal(b, 0, 2) + sum(normal(y, a * np.tanh(b * x), 0.2) for x, y in data)


@known("a tanh(b x)", lambda: integral_2d(hidden_unit_density, (-9, 9), (-9, 9), 1001), T(UNIT_Y))
def hidden_unit(t: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    pyro.sample("t", dist.Normal(a * (b * T(UNIT_X)).tanh(), 0.2).to_event(1), obs=t)


EIGHT = T(np.random.default_rng(0).normal(1, 1, 8))


def loading_density(a: Any) -> Any:
    return normal(a, 0, 1) + sum(normal(x, 0, np.sqrt(a**2 + 0.25)) for x in EIGHT.tolist())


@known("factor loading a z", lambda: integral(loading_density, -9, 9), EIGHT)
def factor_loading(t: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(t)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("t", dist.Normal(a * z, 0.5), obs=t)


# --- waves ---

WAVE = T([math.sin(x + 0.05) for x in range(5)])


def wave_density(phase: Any) -> Any:
    return sum(normal(math.sin(x + 0.05), np.sin(x + phase), 0.1) for x in range(5))


def wave(phase: Tensor, t: Tensor) -> None:
    pyro.sample("t", dist.Normal((torch.arange(5.0) + phase).sin(), 0.1).to_event(1), obs=t)


@known("phase, uniform", lambda: integral(wave_density, 0, 2 * math.pi) - math.log(2 * math.pi), WAVE)
def phase_of_a_circle(t: Tensor) -> None:
    wave(pyro.sample("phase", dist.Uniform(0.0, 2 * math.pi)), t)


@known("phase, normal", lambda: integral(lambda f: normal(f, 0, 10) + wave_density(f), -90, 90, 800_001), WAVE)
def phase_of_a_line(t: Tensor) -> None:
    wave(pyro.sample("phase", dist.Normal(0.0, 10.0)), t)


def frequency_density(w: Any) -> Any:
    return sum(normal(math.sin(3 * x), np.sin(w * x), 0.3) for x in range(8)) - math.log(10)


@known("frequency", lambda: integral(frequency_density, 0, 10), T([math.sin(3.0 * x) for x in range(8)]))
def frequency(t: Tensor) -> None:
    w = pyro.sample("w", dist.Uniform(0.0, 10.0))
    pyro.sample("t", dist.Normal((w * torch.arange(8.0)).sin(), 0.3).to_event(1), obs=t)


# --- angles, which close on a circle: half of a mode may lie at either end of its interval ---

CIRCLE = math.tau * (torch.arange(2_000.0, dtype=torch.float64) + 0.5) / 2_000.0
HOURS = torch.linspace(0.0, 5.0, 12, dtype=torch.float64)
HEADING = -1.5 * HOURS.cos() + 0.5 * T([1.5, -0.3, -2.2, 0.6, -1.1, -1.4, 0.4, 0.8, -0.7, -0.4, -0.6, 0.2])


def heading_evidence() -> float:
    waves = (HOURS - CIRCLE.unsqueeze(-1)).cos()
    covariance = 0.25 * torch.eye(12) + 4.0 * waves.unsqueeze(-1) * waves.unsqueeze(-2)
    normals = dist.MultivariateNormal(torch.zeros(12), covariance)
    return float(normals.log_prob(HEADING).logsumexp(0)) - math.log(len(CIRCLE))


def heading(hours: Tensor, y: Tensor) -> None:
    a = pyro.sample("a", dist.Uniform(-math.pi, math.pi))
    w = pyro.sample("w", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(hours)):
        pyro.sample("y", dist.Normal(w * (hours - a).cos(), 0.5), obs=y)


known("a heading and a speed of either sign", heading_evidence, HOURS, HEADING)(heading)
known("a heading around its speed", heading_evidence, HOURS, HEADING, marginalise=["a"])(heading)


def ridge_evidence() -> float:
    a, b = CIRCLE.unsqueeze(-1), CIRCLE
    height = 50.0 * ((a + b - 0.4).cos() - 1.0) + a.cos()
    return float(height.flatten().logsumexp(0)) - 2.0 * math.log(len(CIRCLE))


@known("two angles of which the data see the sum", ridge_evidence)
def angles_of_known_sum() -> None:
    a, b = (pyro.sample(name, dist.Uniform(0.0, math.tau)) for name in "ab")
    pyro.sample("w", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    pyro.factor("ridge", 50.0 * ((a + b - 0.4).cos() - 1.0) + a.cos())


# --- two modes ---


@known(
    "a far observation, StudentT",
    lambda: integral(lambda m: normal(m, 0, 1) + stats.t.logpdf(12.0, 2, m, 0.3), -40, 60),
    T(12.0),
)
def far_observation(t: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    pyro.sample("t", dist.StudentT(2.0, m, 0.3), obs=t)


def sixty_forty(m: Any) -> Any:
    return np.logaddexp(math.log(0.6) + normal(m, 4, 0.5), math.log(0.4) + normal(m, -4, 0.5))


@known("two modes of 60 and 40 percent", lambda: integral(lambda m: normal(m, 0, 10) + sixty_forty(m), -40, 40), T(0.0))
def two_hills(t: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 10.0))
    right = math.log(0.6) + dist.Normal(4.0, 0.5).log_prob(m)
    left = math.log(0.4) + dist.Normal(-4.0, 0.5).log_prob(m)
    pyro.factor("modes", torch.logaddexp(right, left))


def needle_density(m: Any) -> Any:
    return np.logaddexp(math.log(0.05) + normal(m, 5, 0.01), math.log(0.95) + normal(m, 0, 2))


@known(
    "a narrow high mode, a wide heavy one",
    lambda: integral(needle_density, -20, 20, also=np.linspace(4.9, 5.1, 20_001)),
    T(0.0),
)
def needle(t: Tensor) -> None:
    prior = dist.Normal(0.0, 10.0)
    m = pyro.sample("m", prior)
    narrow = math.log(0.05) + dist.Normal(5.0, 0.01).log_prob(m)
    wide = math.log(0.95) + dist.Normal(0.0, 2.0).log_prob(m)
    pyro.factor("modes", torch.logaddexp(narrow, wide) - prior.log_prob(m))


# --- discrete latents, summed out ---


def spike_and_slab_density() -> float:
    return math.log(0.5 * math.exp(normal(1.5, 0, 1)) + 0.5 * math.exp(normal(1.5, 0, math.sqrt(10))))


@known("spike and slab", spike_and_slab_density, T(1.5))
def spike_and_slab(t: Tensor) -> None:
    z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
    w = pyro.sample("w", dist.Normal(0.0, 3.0))
    pyro.sample("t", dist.Normal(z * w, 1.0), obs=t)


def regimes_density() -> float:
    scale = math.sqrt(1.01)
    return math.log(0.5 * math.exp(normal(9.0, 8, scale)) + 0.5 * math.exp(normal(9.0, -8, scale)))


@known("two regimes", regimes_density, T(9.0))
def regimes(t: Tensor) -> None:
    z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.sample("t", dist.Normal(w + 16.0 * z - 8.0, 0.1), obs=t)


CHANGING = T([0.1, -0.2, 0.3, 2.1, 1.8, 2.2])


def change_point_density(m: Any) -> Any:
    points = [sum(normal(x, m if i >= c else 0.0, 0.5) for i, x in enumerate(CHANGING.tolist())) for c in range(6)]
    return normal(m, 0, 3) + special.logsumexp(points, axis=0) - math.log(6)


@known("a discrete change point", lambda: integral(change_point_density, -20, 20), CHANGING)
def change_point(t: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 3.0))
    c = pyro.sample("c", dist.Categorical(torch.ones(6)), infer={"enumerate": "parallel"})
    loc = torch.where(torch.arange(6) >= c.unsqueeze(-1), m.unsqueeze(-1), T(0.0))
    pyro.sample("t", dist.Normal(loc, 0.5).to_event(1), obs=t)


# --- hyperparameters that are maximised ---

SLOPE_X = T(RANDOM.normal(0, 1, 20))
SLOPE_T = 1.5 * SLOPE_X + T(RANDOM.normal(0, 0.7, 20))


def highest(log_f: Callable[[float], float], low: float, high: float) -> float:
    """Maximum over an interval."""
    return -float(optimize.minimize_scalar(lambda z: -log_f(z), bounds=(low, high), method="bounded").fun)


def slope_density(log_noise: float) -> float:
    return gaussian(SLOPE_T, 4 * torch.outer(SLOPE_X, SLOPE_X) + math.exp(2 * log_noise) * torch.eye(20))


def slope_with_noise(x: Tensor, t: Tensor) -> None:
    s = pyro.param("s", T(1.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 2.0))
    with pyro.plate("data", 20):
        pyro.sample("t", dist.Normal(w * x, s), obs=t)


known("noise, maximised", lambda: highest(slope_density, -5, 5), SLOPE_X, SLOPE_T)(slope_with_noise)

ALIKE = T([0.1, -0.1, 0.05, -0.05, 0.02, -0.02])


@known("a spread that goes to 0, maximised", lambda: float(sum(normal(ALIKE, 0, 1))), ALIKE)
def spread_of_groups(t: Tensor) -> None:
    s = pyro.param("s", T(1.0), constraint=constraints.positive)
    with pyro.plate("data", 6):
        a = pyro.sample("a", dist.Normal(0.0, s))
        pyro.sample("t", dist.Normal(a, 1.0), obs=t)


OUTLIERS = T([-20.0, -19.0, 0.1, 0.2, 19.5])


def outliers_density(log_scale: float) -> float:
    return float(stats.t.logpdf(OUTLIERS.numpy(), 1, 0, math.exp(log_scale)).sum())


@known("a scale with two modes, maximised", lambda: highest(outliers_density, -6, 6), OUTLIERS)
def scale_of_outliers(t: Tensor) -> None:
    s = pyro.param("s", T(0.01), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 1e-4))
    with pyro.plate("data", 5):
        pyro.sample("t", dist.StudentT(1.0, w, s), obs=t)


# --- groups ---

ANSWERS = T(RANDOM.binomial(2, special.expit(-2.5 * RANDOM.normal(size=300))).astype(float))


def answers_density() -> float:
    """One integral for each of the numbers of successes, 0, 1 and 2."""

    def of_group(successes: int) -> float:
        def density(a: float) -> float:
            return math.exp(normal(a, 0, 2.5)) * float(stats.binom.pmf(successes, 2, special.expit(a)))

        return math.log(integrate.quad(density, -40, 40)[0])

    by_successes = [of_group(k) for k in range(3)]
    return sum(by_successes[int(k)] for k in ANSWERS)


@known("300 groups of two answers, nodes=7", answers_density, ANSWERS, nodes=7)
@known("300 groups of two answers", answers_density, ANSWERS)
def answers(t: Tensor) -> None:
    with pyro.plate("groups", 300):
        a = pyro.sample("a", dist.Normal(0.0, 2.5))
        pyro.sample("t", dist.Binomial(2, logits=a), obs=t)


EFFECTS = T([28.0, 8, -3, 7, -1, 1, 18, 12])
ERRORS = T([15.0, 10, 16, 11, 9, 11, 10, 18])


def schools_density(m: Any, log_tau: Any) -> Any:
    data = zip(EFFECTS.tolist(), ERRORS.tolist(), strict=True)
    rows = sum(normal(y, m, np.sqrt(np.exp(2 * log_tau) + e**2)) for y, e in data)
    return normal(m, 0, 5) + log_tau - math.log(100) + rows


@known("eight schools", lambda: integral_2d(schools_density, (-40, 40), (-12, math.log(100)), 1001), EFFECTS, ERRORS)
def eight_schools(y: Tensor, errors: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.Uniform(0.0, 100.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(m, tau))
        pyro.sample("y", dist.Normal(theta, errors), obs=y)


CROSSED = T(RANDOM.normal(0, 1, (3, 4)))


def crossed_density(log_rows: Any, log_columns: Any) -> Any:
    rows = torch.kron(torch.eye(3), torch.ones(4, 4))
    columns = torch.kron(torch.ones(3, 3), torch.eye(4))

    def given(u: float, v: float) -> float:
        covariance = math.exp(2 * u) * rows + math.exp(2 * v) * columns + 0.25 * torch.eye(12)
        return gaussian(CROSSED.reshape(-1), covariance)

    prior = sum(stats.halfnorm.logpdf(np.exp(u)) + u for u in (log_rows, log_columns))
    return np.vectorize(given)(log_rows, log_columns) + prior


@known("two crossed scales", lambda: integral_2d(crossed_density, (-9, 2), (-9, 2), 61), CROSSED)
def crossed(t: Tensor) -> None:
    of_rows = pyro.sample("of_rows", dist.HalfNormal(1.0))
    of_columns = pyro.sample("of_columns", dist.HalfNormal(1.0))
    rows, columns = pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1)
    with rows:
        a = pyro.sample("a", dist.Normal(0.0, of_rows))
    with columns:
        b = pyro.sample("b", dist.Normal(0.0, of_columns))
    with rows, columns:
        pyro.sample("t", dist.Normal(a + b, 0.5), obs=t)


HEAVY = torch.cat([EIGHT, T([6.0, -5.0])])


def degrees_density(z: Any) -> Any:
    prior = stats.gamma.logpdf(np.exp(z), 2, scale=10) + z
    return prior + sum(stats.t.logpdf(x, np.exp(z)) for x in HEAVY.tolist())


@known("degrees of freedom", lambda: integral(degrees_density, -8, 9, 20_001), HEAVY)
def degrees_of_freedom(t: Tensor) -> None:
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with pyro.plate("data", 10):
        pyro.sample("t", dist.StudentT(nu, 0.0, 1.0), obs=t)


# --- the prior alone, whose integral is one ---


@known("prior: LKJ and StudentT(3)", lambda: 0.0)
def prior_of_correlations() -> None:
    pyro.sample("L", dist.LKJCholesky(3, 1.0))
    pyro.sample("x", dist.StudentT(3.0, 0.0, 1.0))
    nothing_observed()


@known("prior: StudentT(1.5)", lambda: 0.0)
def prior_of_heavy_tails() -> None:
    pyro.sample("x", dist.StudentT(1.5, 0.0, 1.0))
    nothing_observed()


@known("prior: Dirichlet(.2) of five", lambda: 0.0)
def prior_of_shares() -> None:
    pyro.sample("x", dist.Dirichlet(0.2 * torch.ones(5)))
    nothing_observed()


@known("prior: Weibull, Kumaraswamy, Pareto, LogNormal", lambda: 0.0)
def prior_of_positives() -> None:
    pyro.sample("a", dist.Weibull(1.0, 2.0))
    pyro.sample("b", dist.Kumaraswamy(2.0, 2.0))
    pyro.sample("c", dist.Pareto(1.0, 3.0))
    pyro.sample("e", dist.LogNormal(0.0, 1.0))
    nothing_observed()


# --- no smooth density: jumps, latents without a slope ---


def floor_density() -> float:
    steps = range(-20, 20)
    cdf = stats.norm.cdf
    return math.log(sum(math.exp(normal(1.7, k, 0.5)) * (cdf((k + 1) / 3) - cdf(k / 3)) for k in steps))


@known("a latent rounded down", floor_density, T(1.7))
def rounded_down(t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 3.0))
    pyro.sample("t", dist.Normal(w.floor(), 0.5), obs=t)


@known(
    "if on a latent",
    lambda: integral(lambda w: normal(w, 0, 2) + normal(1.0, np.where(w > 0, w, 10.0), 0.5), -20, 20),
    T(1.0),
)
def branch_on_a_latent(t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 2.0))
    pyro.sample("t", dist.Normal(w if w > 0 else w * 0 + 10.0, 0.5), obs=t)
