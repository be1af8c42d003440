"""PyMC's gallery of examples, written for Pyro; data tiny or simulated."""

import math

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import EvidenceEM
from tests.gallery.programs.program import Program, coin, normal, poisson, uniform

T = torch.tensor


# --- disasters in coal mines: a year of change, in three ways ---


def disasters(counts: Tensor) -> None:
    early = pyro.sample("early", dist.Exponential(1.0))
    late = pyro.sample("late", dist.Exponential(1.0))
    num = len(counts)
    when = pyro.sample("when", dist.Categorical(torch.ones(num) / num), infer={"enumerate": "parallel"})
    rate = torch.where(torch.arange(num) < when.unsqueeze(-1), early, late)
    pyro.sample("y", dist.Poisson(rate).to_event(1), obs=counts)


def disasters_summed(counts: Tensor) -> None:
    early = pyro.sample("early", dist.Exponential(1.0))
    late = pyro.sample("late", dist.Exponential(1.0))
    before = dist.Poisson(early).log_prob(counts)
    after = dist.Poisson(late).log_prob(counts)
    start = torch.zeros(1).to(counts)
    gained = torch.cat([start, (before - after).cumsum(-1)[:-1]])
    pyro.factor("y", after.sum() + gained.logsumexp(-1) - math.log(len(counts)))


def disasters_continuous(counts: Tensor) -> None:
    early = pyro.sample("early", dist.Exponential(1.0))
    late = pyro.sample("late", dist.Exponential(1.0))
    when = pyro.sample("when", dist.Uniform(0.0, float(len(counts))))
    rate = torch.where(torch.arange(len(counts)) < when, early, late)
    pyro.sample("y", dist.Poisson(rate).to_event(1), obs=counts)


# --- regressions ---


def truncated(x: Tensor, y: Tensor, low: float, high: float) -> None:
    """Rows outside two bounds were never seen."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
    noise = pyro.sample("sigma", dist.HalfNormal(1.0))
    likelihood = dist.Normal(slope * x + intercept, noise)
    seen = (likelihood.cdf(T(high)) - likelihood.cdf(T(low))).log()
    pyro.factor("y", (likelihood.log_prob(y) - seen).sum())


def censored(x: Tensor, y: Tensor, low: float, high: float) -> None:
    """Rows outside two bounds are known to be outside."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
    noise = pyro.sample("sigma", dist.HalfNormal(1.0))
    z_low = (low - slope * x - intercept) / noise
    z_high = (high - slope * x - intercept) / noise
    inside = dist.Normal(slope * x + intercept, noise).log_prob(y)
    below, above = torch.special.log_ndtr(z_low), torch.special.log_ndtr(-z_high)
    pyro.factor("y", torch.where(y <= low, below, torch.where(y >= high, above, inside)).sum())


def ab_test(trials: Tensor, successes: Tensor) -> None:
    with pyro.plate("groups", 2):
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        pyro.sample("y", dist.Binomial(trials, p), obs=successes)
    pyro.deterministic("lift", p[..., 1] / p[..., 0] - 1.0)


def differences(treated: Tensor, after: Tensor, y: Tensor) -> None:
    """Differences in differences."""
    control = pyro.sample("control_intercept", dist.Normal(0.0, 5.0))
    trend = pyro.sample("trend", dist.Normal(0.0, 1.0))
    offset = pyro.sample("treat_intercept_delta", dist.Normal(0.0, 1.0))
    effect = pyro.sample("treatment_effect", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    mean = control + offset * treated + trend * after + effect * treated * after
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def sneezes(alcohol: Tensor, medicine: Tensor, y: Tensor) -> None:
    """Negative binomial counts with an interaction."""
    b = pyro.sample("b", dist.Normal(0.0, 2.0).expand([4]).to_event(1))
    alpha = pyro.sample("alpha", dist.Exponential(0.5))
    mean = (b[0] + b[1] * alcohol + b[2] * medicine + b[3] * alcohol * medicine).exp()
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.GammaPoisson(alpha, alpha / mean), obs=y)


def weibull(x: Tensor, time: Tensor, seen: Tensor) -> None:
    """Accelerated failure times, censored; Gumbel errors of log time."""
    beta = pyro.sample("beta", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(5.0))
    z = (time.log() - beta[0] - beta[1] * x) / s
    pyro.factor("y", (torch.where(seen, z - s.log(), torch.zeros(())) - z.exp()).sum())


def outliers(x: Tensor, y: Tensor, error: Tensor) -> None:
    """A line with bad points, Hogg's way: whether a point is bad is summed out."""
    b0 = pyro.sample("b0", dist.Normal(0.0, 10.0))
    b1 = pyro.sample("b1", dist.Normal(0.0, 10.0))
    bad_mean = pyro.sample("yest_out", dist.Normal(0.0, 10.0))
    bad_spread = pyro.sample("sigma_y_out", dist.HalfNormal(10.0))
    share = pyro.sample("frac_outliers", dist.Uniform(0.0, 0.5))
    with pyro.plate("rows", len(y)):
        bad = pyro.sample("is_outlier", dist.Bernoulli(share), infer={"enumerate": "parallel"})
        spread = torch.where(bad > 0, error + bad_spread, error)
        pyro.sample("y", dist.Normal(torch.where(bad > 0, bad_mean, b0 + b1 * x), spread), obs=y)


def outliers_summed(x: Tensor, y: Tensor, error: Tensor) -> None:
    b0 = pyro.sample("b0", dist.Normal(0.0, 10.0))
    b1 = pyro.sample("b1", dist.Normal(0.0, 10.0))
    bad_mean = pyro.sample("yest_out", dist.Normal(0.0, 10.0))
    bad_spread = pyro.sample("sigma_y_out", dist.HalfNormal(10.0))
    share = pyro.sample("frac_outliers", dist.Uniform(0.0, 0.5))
    good = (1.0 - share).log() + dist.Normal(b0 + b1 * x, error).log_prob(y)
    bad = share.log() + dist.Normal(bad_mean, error + bad_spread).log_prob(y)
    pyro.factor("y", torch.logaddexp(good, bad).sum())


def robust(x: Tensor, y: Tensor) -> None:
    intercept = pyro.sample("intercept", dist.Normal(0.0, 10.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 10.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(10.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.StudentT(nu, intercept + slope * x, sigma), obs=y)


def quantile(x: Tensor, y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.AsymmetricLaplace(b[0] + b[1] * x, 0.5, 1.5), obs=y)


def absolute(x: Tensor, y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Laplace(b[0] + b[1] * x, 0.5), obs=y)


# --- hierarchies ---


def rats(total: Tensor, tumours: Tensor) -> None:
    a = pyro.sample("a", dist.Gamma(2.0, 0.5))
    b = pyro.sample("b", dist.Gamma(2.0, 0.1))
    with pyro.plate("groups", len(total)):
        theta = pyro.sample("theta", dist.Beta(a, b))
        pyro.sample("y", dist.Binomial(total, theta), obs=tumours)


def rats_summed(total: Tensor, tumours: Tensor) -> None:
    a = pyro.sample("a", dist.Gamma(2.0, 0.5))
    b = pyro.sample("b", dist.Gamma(2.0, 0.1))
    with pyro.plate("groups", len(total)):
        pyro.sample("y", dist.BetaBinomial(a, b, total), obs=tumours)


def rats_flat(total: Tensor, tumours: Tensor, summed: bool = False) -> None:
    """Gelman's improper prior, (a + b)^-5/2."""
    ab = pyro.sample("ab", dist.ImproperUniform(constraints.positive, (), (2,)))
    pyro.factor("prior", -2.5 * ab.sum(-1).log())
    with pyro.plate("groups", len(total)):
        if summed:
            pyro.sample("y", dist.BetaBinomial(ab[0], ab[1], total), obs=tumours)
        else:
            theta = pyro.sample("theta", dist.Beta(ab[0], ab[1]))
            pyro.sample("y", dist.Binomial(total, theta), obs=tumours)


def rats_flat_summed(total: Tensor, tumours: Tensor) -> None:
    rats_flat(total, tumours, summed=True)


def item_response(y: Tensor) -> None:
    with pyro.plate("items", y.shape[1], dim=-1):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.5))
        slope = pyro.sample("slope", dist.LogNormal(0.0, 0.5))
    with pyro.plate("persons", y.shape[0], dim=-2):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        with pyro.plate("answers", y.shape[1], dim=-1):
            pyro.sample("y", dist.Bernoulli(logits=slope * (ability - difficulty)), obs=y)


def sleepstudy(subject: Tensor, day: Tensor, y: Tensor) -> None:
    """Reaction times of ten days, an intercept and a slope for each of eighteen people."""
    b = pyro.sample("b", dist.Normal(T([250.0, 0.0]), T([100.0, 20.0])).to_event(1))
    spread = pyro.sample("sd", dist.HalfNormal(T([50.0, 10.0])).to_event(1))
    L = pyro.sample("L", dist.LKJCholesky(2, T(2.0)))
    sigma = pyro.sample("sigma", dist.HalfNormal(50.0))
    with pyro.plate("subjects", 18):
        u = pyro.sample("u", dist.MultivariateNormal(b, scale_tril=spread.unsqueeze(-1) * L))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(u[subject, 0] + u[subject, 1] * day, sigma), obs=y)


def sleepstudy_integrated(subject: Tensor, day: Tensor, y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(T([250.0, 0.0]), T([100.0, 20.0])).to_event(1))
    spread = pyro.sample("sd", dist.HalfNormal(T([50.0, 10.0])).to_event(1))
    L = pyro.sample("L", dist.LKJCholesky(2, T(2.0)))
    sigma = pyro.sample("sigma", dist.HalfNormal(50.0))
    design = torch.stack([torch.ones(10), day[:10]], -1).to(y)
    root = design @ (spread.unsqueeze(-1) * L)
    covariance = root @ root.mT + sigma.square() * torch.eye(10)
    with pyro.plate("subjects", 18):
        pyro.sample("y", dist.MultivariateNormal(design @ b, covariance), obs=y.reshape(18, 10))


def rolling(x: Tensor, y: Tensor) -> None:
    """A regression whose slope is a random walk."""
    step = pyro.sample("step", dist.Exponential(10.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
    pyro.sample("y", dist.Normal(intercept + step * noise.cumsum(-1) * x, sigma).to_event(1), obs=y)


def rolling_integrated(x: Tensor, y: Tensor) -> None:
    step = pyro.sample("step", dist.Exponential(10.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
    time = torch.arange(1.0, len(x) + 1.0).to(x)
    walk = step.square() * torch.minimum(time.unsqueeze(-1), time)
    covariance = x.unsqueeze(-1) * walk * x + sigma.square() * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(intercept.expand(len(x)), covariance), obs=y)


def mastectomy(metastasised: Tensor, exposure: Tensor, death: Tensor) -> None:
    """Piecewise constant hazards as Poisson counts."""
    with pyro.plate("intervals", exposure.shape[-1], dim=-1):
        hazard = pyro.sample("lambda0", dist.Gamma(0.5, 0.5))
    beta = pyro.sample("beta", dist.Normal(0.0, 3.0))
    rate = (beta * metastasised).exp().unsqueeze(-1) * hazard * exposure
    pyro.factor("death", (death * rate.clamp(min=1e-30).log() - rate).sum())


def cox_process(counts: Tensor) -> None:
    """A log Gaussian Cox process on a line of cells."""
    mean = pyro.sample("mu", dist.Normal(0.0, 3.0))
    place = torch.linspace(0.0, 1.0, len(counts)).to(counts)
    K = (-(place.unsqueeze(-1) - place).abs() / 0.3).exp()
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(counts)), K))
    pyro.sample("y", dist.Poisson((mean + f).exp()).to_event(1), obs=counts)


# --- mixtures, networks, processes ---


def mixture(x: Tensor) -> None:
    w = pyro.sample("w", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(w), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(mu[z], sigma), obs=x)


def mixture_same_family(x: Tensor) -> None:
    w = pyro.sample("w", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("data", len(x)):
        parts = dist.Normal(mu, sigma.unsqueeze(-1).expand(3))
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(w), parts), obs=x)


def network(X: Tensor, y: Tensor) -> None:
    first = pyro.sample("w_1", dist.Normal(0.0, 1.0).expand([2, 5]).to_event(2))
    second = pyro.sample("w_2", dist.Normal(0.0, 1.0).expand([5, 5]).to_event(2))
    third = pyro.sample("w_3", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=torch.tanh(torch.tanh(X @ first) @ second) @ third), obs=y)


def mauna_loa(t: Tensor, y: Tensor) -> None:
    """Trend, season and middle term of carbon dioxide: nine settings of a covariance."""
    season, middle = (pyro.sample(n, dist.HalfCauchy(s)) for n, s in (("eta_per", 2.0), ("eta_med", 0.5)))
    trend = pyro.sample("eta_trend", dist.HalfCauchy(3.0))
    decay = pyro.sample("l_pdecay", dist.Gamma(10.0, 0.075))
    period = pyro.sample("period", dist.Normal(1.0, 0.05))
    smooth = pyro.sample("l_psmooth", dist.Gamma(4.0, 3.0))
    of_middle = pyro.sample("l_med", dist.Gamma(2.0, 0.75))
    of_trend = pyro.sample("l_trend", dist.Gamma(4.0, 0.1))
    noise = pyro.sample("sigma", dist.HalfNormal(0.25))
    d = (t.unsqueeze(-1) - t).abs()
    K = season**2 * (-2.0 * ((math.pi * d / period).sin() / smooth).square() - 0.5 * (d / decay).square()).exp()
    K = K + middle**2 * (-0.5 * (d / of_middle).square()).exp() + trend**2 * (-0.5 * (d / of_trend).square()).exp()
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(t)), K + (noise**2 + 1e-5) * torch.eye(len(t))), obs=y)


def excess_deaths(t: Tensor, month: Tensor, temperature: Tensor, y: Tensor) -> None:
    """Deaths of each month in raw units."""
    intercept = pyro.sample("intercept", dist.Normal(40000.0, 10000.0))
    of_temperature = pyro.sample("beta_temp", dist.Normal(0.0, 1000.0))
    linear = pyro.sample("linear", dist.Normal(0.0, 1000.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2000.0))
    with pyro.plate("months", 12):
        of_month = pyro.sample("month", dist.Normal(0.0, 2000.0))
    of_month = of_month - of_month.mean(-1, keepdim=True)
    with pyro.plate("rows", len(t)):
        mean = intercept + linear * t + of_month[month] + of_temperature * temperature
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


# --- data ---


COAL_BY_YEAR = (
    "454014340633402633545314415534252234213221111300101100310322011101010002100011023311211112420014000100000100101"
)
COAL = T([float(digit) for digit in COAL_BY_YEAR]).double()
HOGG_X = T([201, 244, 47, 287, 203, 58, 210, 202, 198, 158, 165, 201, 157, 131, 166, 160, 186, 125, 218, 146]).double()
HOGG_Y = T(
    [592, 401, 583, 402, 495, 173, 479, 504, 510, 416, 393, 442, 317, 311, 400, 337, 423, 334, 533, 344]
).double()
HOGG_ERROR = T([61, 25, 38, 15, 21, 15, 27, 14, 30, 16, 14, 25, 52, 16, 34, 31, 42, 26, 16, 22]).double()
LINE = normal(100)
TUMOURS = T([0, 0, 0, 0, 1, 1, 2, 2, 2, 1, 2, 3, 2, 4, 3, 5, 4, 6, 10, 5, 15, 9]).double()
RATS = T([20, 20, 19, 18, 20, 19, 25, 24, 23, 10, 20, 27, 17, 24, 18, 25, 20, 23, 48, 19, 47, 24]).double()


def around(low: float, high: float, cut: bool) -> tuple[Tensor, Tensor, float, float]:
    y = 1.0 * LINE + 0.2 + 0.8 * normal(100, seed=1)
    inside = (y > low) & (y < high)
    return (LINE[inside], y[inside], low, high) if cut else (LINE, y.clamp(low, high), low, high)


def hogg() -> tuple[Tensor, Tensor, Tensor]:
    scale = 2.0 * HOGG_Y.std()
    return (HOGG_X - HOGG_X.mean()) / (2.0 * HOGG_X.std()), (HOGG_Y - HOGG_Y.mean()) / scale, HOGG_ERROR / scale


def panel() -> tuple[Tensor, Tensor, Tensor]:
    treated, after = (torch.arange(40) % 2).double(), (torch.arange(40) // 20).double()
    return treated, after, 1.0 + 0.3 * treated + 0.4 * after + 0.5 * treated * after + 0.3 * normal(40)


def sneezing() -> tuple[Tensor, Tensor, Tensor]:
    alcohol, medicine = (torch.arange(200) % 2).double(), (torch.arange(200) // 2 % 2).double()
    rate = (0.5 + 1.0 * alcohol + 0.7 * medicine + 0.4 * alcohol * medicine).exp()
    spread = -(uniform(200, seed=2).log() + uniform(200, seed=3).log()) / 2.0  # gamma of shape 2 and mean 1
    return alcohol, medicine, poisson(rate * spread, 4)


def lifetimes() -> tuple[Tensor, Tensor, Tensor]:
    x = (torch.arange(44) % 2).double()
    time = (4.0 - 0.8 * x + 0.7 * (-uniform(44, seed=5).log()).log()).exp()
    return x, time.clamp(max=60.0), time < 60.0


def days() -> tuple[Tensor, Tensor, Tensor]:
    subject, day = torch.arange(18).repeat_interleave(10), (torch.arange(180) % 10).double()
    z = normal(18, 2, seed=6)
    mean = 250.0 + 25.0 * z[subject, 0] + (10.0 + 6.0 * z[subject, 1]) * day
    return subject, day, mean + 25.0 * normal(180, seed=7)


def intervals() -> tuple[Tensor, Tensor, Tensor]:
    metastasised = coin(torch.full((44,), 0.7).double(), 8)
    time = -uniform(44, seed=9).log() / (0.2 + 0.25 * metastasised)
    start = torch.arange(6.0).double()
    exposure = (time.clamp(max=6.0).unsqueeze(-1) - start).clamp(0.0, 1.0)
    return metastasised, exposure, ((time.unsqueeze(-1) > start) & (time.unsqueeze(-1) <= start + 1.0)).double()


def drifting() -> tuple[Tensor, Tensor]:
    x = normal(80, seed=10)
    return x, 0.5 + (0.1 * normal(80, seed=11)).cumsum(0) * x + 0.3 * normal(80, seed=12)


def three_clumps() -> tuple[Tensor]:
    place = T([-5.0, 0.0, 5.0]).double()[torch.arange(300) % 3]
    return (place + 1.2 * normal(300, seed=13),)


def air() -> tuple[Tensor, Tensor]:
    t = torch.linspace(0.0, 10.0, 60).double()
    y = 0.1 * t + 0.05 * t**1.5 + 0.3 * (2.0 * math.pi * t).sin() + 0.05 * normal(60)
    return t, y - y.mean()


def months() -> tuple[Tensor, ...]:
    index = torch.arange(100)
    t = index.double() / 50.0
    temperature = 10.0 + 8.0 * (2.0 * math.pi * index / 12.0).sin() + normal(100)
    y = 43000.0 + 1500.0 * t - 600.0 * (temperature - 10.0) + 1200.0 * normal(100, seed=14)
    return t, index % 12, temperature, y


PROGRAMS: dict[str, Program] = {
    "disasters, enumerated": Program(disasters, lambda: (COAL,), summed=disasters_summed, says=("different modes",)),
    "disasters, summed by hand": Program(disasters_summed, lambda: (COAL,), says=("different modes",)),
    "disasters, uniform year": Program(disasters_continuous, lambda: (COAL,), refused="no slope"),
    "truncated": Program(truncated, lambda: around(-1.0, 2.0, cut=True)),
    "censored": Program(censored, lambda: around(-1.0, 2.0, cut=False), slow=True),
    "A/B test": Program(ab_test, lambda: (T([1000.0, 1100.0]).double(), T([100.0, 140.0]).double())),
    "differences in differences": Program(differences, panel),
    "negative binomial": Program(sneezes, sneezing),
    "Weibull, censored": Program(weibull, lifetimes),
    "outliers": Program(outliers, hogg, summed=outliers_summed, says=("different modes",)),
    "robust line": Program(
        robust,
        lambda: (LINE[:50], 1.0 + 2.0 * LINE[:50] + 0.3 * normal(50, seed=15) / uniform(50, seed=16).sqrt()),
    ),
    "quantile": Program(quantile, lambda: (LINE, LINE + normal(100, seed=1)), refused="kink"),
    "absolute errors": Program(absolute, lambda: (LINE, LINE + normal(100, seed=1)), refused="kink"),
    "rat tumours": Program(rats, lambda: (RATS, TUMOURS), summed=rats_summed),
    "rat tumours, flat": Program(rats_flat, lambda: (RATS, TUMOURS), summed=rats_flat_summed, compared=False),
    "item response": Program(
        item_response, lambda: (coin((normal(40, 1) - normal(1, 6, seed=1)).sigmoid(), 2),), slow=True
    ),
    "sleepstudy": Program(sleepstudy, days, summed=sleepstudy_integrated),
    "rolling regression": Program(rolling, drifting, summed=rolling_integrated),
    "mastectomy": Program(mastectomy, intervals),
    "log Gaussian Cox process": Program(
        cox_process, lambda: (poisson((1.0 + (torch.arange(30.0).double() / 5.0).sin()).exp(), 17),)
    ),
    "mixture of three": Program(mixture, three_clumps, compared=False),
    "mixture of three, one distribution": Program(mixture_same_family, three_clumps, compared=False),
    "mixture of three, EvidenceEM": Program(mixture, three_clumps, engine=EvidenceEM, compared=False),
    "network": Program(
        network, lambda: (normal(60, 2), coin((4.0 * normal(60, 2).prod(-1)).sigmoid(), 18)), compared=False
    ),
    "Mauna Loa": Program(mauna_loa, air, slow=True, compared=False),
    "excess deaths": Program(excess_deaths, months),
}
