"""Models of the kinds that the books and galleries have beside those of the other files; data simulated."""

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import OrderedTransform
from torch import Tensor

from tests.gallery.programs.program import Program, coin, normal, ordered_logistic, poisson, random, uniform

T = torch.tensor


def monotonic(school: Tensor, y: Tensor) -> None:
    """Rethinking 12.4: an ordered predictor by increments that add up to one."""
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    increments = pyro.sample("increments", dist.Dirichlet(torch.full((4,), 2.0)))
    base = dist.Normal(0.0, 1.5).expand([4]).to_event(1)
    cuts = pyro.sample("cuts", dist.TransformedDistribution(base, [OrderedTransform()]))
    climbed = torch.cat([torch.zeros_like(increments[..., :1]), increments.cumsum(-1)], -1)
    pyro.factor("y", ordered_logistic(b * climbed[..., school], cuts, y).sum())


def instrument(season: Tensor, both: Tensor) -> None:
    """Rethinking 14.3: schooling and wages whose errors are correlated, by a season that acts on one of them."""
    aW = pyro.sample("aW", dist.Normal(0.0, 0.2))
    aE = pyro.sample("aE", dist.Normal(0.0, 0.2))
    bEW = pyro.sample("bEW", dist.Normal(0.0, 0.5))
    bQE = pyro.sample("bQE", dist.Normal(0.0, 0.5))
    rho = pyro.sample("rho", dist.LKJCholesky(2, T(2.0)))
    sigma = pyro.sample("sigma", dist.Exponential(1.0).expand([2]).to_event(1))
    mean = torch.stack([aW + bEW * both[:, 1], aE + bQE * season], -1)
    with pyro.plate("rows", len(both)):
        pyro.sample("both", dist.MultivariateNormal(mean, scale_tril=sigma.unsqueeze(-1) * rho), obs=both)


def careers(income: Tensor, career: Tensor) -> None:
    """Rethinking 11.3: a softmax of scores that share a positive slope."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    b = pyro.sample("b", dist.HalfNormal(0.5))
    scores = torch.cat([a + b * income[:2], torch.zeros_like(a[..., :1])], -1)
    with pyro.plate("rows", len(career)):
        pyro.sample("career", dist.Categorical(logits=scores), obs=career)


def hurricanes(femininity: Tensor, pressure: Tensor, deaths: Tensor) -> None:
    """Rethinking 12H: gamma-Poisson deaths with an interaction."""
    a = pyro.sample("a", dist.Normal(1.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    scale = pyro.sample("scale", dist.Exponential(1.0))
    rate = (a + b[..., 0] * femininity + b[..., 1] * pressure + b[..., 2] * femininity * pressure).exp()
    with pyro.plate("rows", len(deaths)):
        pyro.sample("deaths", dist.GammaPoisson(rate / scale, 1.0 / scale), obs=deaths)


def measured_predictor(seen: Tensor, y: Tensor) -> None:
    """A logistic regression on what is only measured with an error."""
    a = pyro.sample("a", dist.Normal(0.0, 1.5))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.Exponential(1.0))
    with pyro.plate("rows", len(y)):
        true = pyro.sample("true", dist.Normal(0.0, spread))
        pyro.sample("seen", dist.Normal(true, 0.5), obs=seen)
        pyro.sample("y", dist.Bernoulli(logits=a + b * true), obs=y)


def measured_predictor_in_noise(seen: Tensor, y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.5))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.Exponential(1.0))
    z = pyro.sample("z", dist.Normal(torch.zeros(len(y)), 1.0).to_event(1))
    with pyro.plate("rows", len(y)):
        pyro.sample("seen", dist.Normal(spread * z, 0.5), obs=seen)
        pyro.sample("y", dist.Bernoulli(logits=a + b * spread * z), obs=y)


def imputed(age: Tensor, holes: Tensor, sex: Tensor, survived: Tensor) -> None:
    """NumPyro's imputation: missing ages are latent, with the mean and the spread of the others."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    missing = pyro.sample("missing", dist.Normal(mu, sigma).expand([len(holes)]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    whole = torch.index_put(age, (holes,), missing)
    with pyro.plate("rows", len(age)):
        pyro.sample("age", dist.Normal(mu, sigma), obs=whole)
        pyro.sample("survived", dist.Bernoulli(logits=b[..., 0] + b[..., 1] * whole + b[..., 2] * sex), obs=survived)


def two_lines(x: Tensor, y: Tensor, summed: bool = False) -> None:
    """A mixture of two regressions with a common spread; the steeper line comes second."""
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    base = dist.Normal(0.0, 2.0).expand([2]).to_event(1)
    slopes = pyro.sample("slopes", dist.TransformedDistribution(base, [OrderedTransform()]))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    if summed:
        height = dist.Normal(slopes * x.unsqueeze(-1), sigma).log_prob(y.unsqueeze(-1))
        pyro.factor("y", (height + torch.stack([1.0 - share, share], -1).log()).logsumexp(-1).sum())
        return
    with pyro.plate("rows", len(y)):
        which = pyro.sample("which", dist.Bernoulli(share), infer={"enumerate": "parallel"}).long()
        pyro.sample("y", dist.Normal(slopes[which] * x, sigma), obs=y)


def broken_line(x: Tensor, y: Tensor) -> None:
    """A trend that changes its slope in a place that is summed out."""
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    after = (x - x.unsqueeze(-1)).clamp(min=0.0)
    mean = a + b[0] * x + b[1] * after
    pyro.factor("y", dist.Normal(mean, sigma).log_prob(y).sum(-1).logsumexp(-1) - math.log(len(x)))


def hurdle(x: Tensor, y: Tensor) -> None:
    """Counts that are zero with one probability, and above zero negative binomial, cut off at zero."""
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    c = pyro.sample("c", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    shape = pyro.sample("shape", dist.Exponential(0.5))
    counts = dist.GammaPoisson(shape, shape / (b[..., 0] + b[..., 1] * x).exp())
    logits = c[..., 0] + c[..., 1] * x
    above = counts.log_prob(y) - (-counts.log_prob(torch.zeros_like(y)).expm1()).log()
    pyro.factor(
        "y",
        torch.where(y > 0, above + torch.nn.functional.logsigmoid(logits), -torch.nn.functional.softplus(logits)).sum(),
    )


def proportions(x: Tensor, y: Tensor) -> None:
    """Beta regression."""
    b = pyro.sample("b", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
    size = pyro.sample("size", dist.HalfNormal(50.0))
    p = (b[..., 0] + b[..., 1] * x).sigmoid()
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Beta(p * size, (1.0 - p) * size), obs=y)


def claims(x: Tensor, y: Tensor) -> None:
    """Gamma regression with a log link."""
    b = pyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    shape = pyro.sample("shape", dist.Exponential(0.5))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Gamma(shape, shape / (b[..., 0] + b[..., 1] * x).exp()), obs=y)


def garch(y: Tensor) -> None:
    """GARCH(1, 1), a variance after the other."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    omega = pyro.sample("omega", dist.HalfNormal(1.0))
    alpha = pyro.sample("alpha", dist.Beta(2.0, 5.0))
    beta = pyro.sample("beta", dist.Beta(5.0, 2.0))
    variance = torch.ones(())
    for t, value in enumerate(y):
        pyro.sample(f"y_{t}", dist.Normal(mu, variance.sqrt()), obs=value)
        variance = omega + alpha * (value - mu).square() + beta * variance


def rugby(home: Tensor, away: Tensor, points: Tensor) -> None:
    """PyMC's rugby: strengths of attack and defence that sum to zero, with sampled scales."""
    lead = pyro.sample("lead", dist.Normal(0.0, 1.0))
    level = pyro.sample("level", dist.Normal(3.0, 1.0))
    sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
    raw = pyro.sample("raw", dist.Normal(0.0, 1.0).expand([6, 2]).to_event(2))
    attack, defence = (sd * (raw - raw.mean(-2, keepdim=True))).unbind(-1)
    rate = torch.stack([level + lead + attack[home] - defence[away], level + attack[away] - defence[home]]).exp()
    pyro.sample("points", dist.Poisson(rate).to_event(2), obs=points)


def angles(x: Tensor, y: Tensor) -> None:
    """Directions of wind around a mean that turns."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Gamma(2.0, 0.5))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.VonMises(a + b * x, kappa), obs=y)


def tennis(winner: Tensor, loser: Tensor) -> None:
    """Bradley and Terry's skills, their scale sampled."""
    sd = pyro.sample("sd", dist.HalfNormal(1.0))
    with pyro.plate("players", 8):
        skill = pyro.sample("skill", dist.Normal(0.0, sd))
    with pyro.plate("matches", len(winner)):
        pyro.sample("won", dist.Bernoulli(logits=skill[winner] - skill[loser]), obs=torch.ones(len(winner)))


def tennis_in_noise(winner: Tensor, loser: Tensor) -> None:
    sd = pyro.sample("sd", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    skill = pyro.deterministic("skill", sd * z)
    with pyro.plate("matches", len(winner)):
        pyro.sample("won", dist.Bernoulli(logits=skill[winner] - skill[loser]), obs=torch.ones(len(winner)))


def forests(counts: Tensor) -> None:
    """PyMC's Dirichlet-multinomial: species in forests, with a sampled concentration."""
    share = pyro.sample("share", dist.Dirichlet(torch.ones(4)))
    size = pyro.sample("size", dist.LogNormal(1.0, 1.0))
    a, total = share * size, counts.sum(-1)
    height = torch.lgamma(size) - torch.lgamma(total + size) + (torch.lgamma(counts + a) - torch.lgamma(a)).sum(-1)
    pyro.factor("counts", height.sum())


def gaps_in_a_series(y: Tensor, holes: Tensor) -> None:
    """AR(1) with Student's errors; what was not seen is latent."""
    phi = pyro.sample("phi", dist.Uniform(-1.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    missing = pyro.sample("missing", dist.Normal(0.0, 3.0).expand([len(holes)]).to_event(1))
    whole = torch.index_put(y, (holes,), missing)
    pyro.sample("y", dist.StudentT(5.0, phi * whole[:-1], sigma).to_event(1), obs=whole[1:])


def hidden(means: int) -> Callable[[Tensor], None]:
    """A hidden Markov model of so many states with ordered means and a common spread, its states summed by Pyro."""

    def model(y: Tensor) -> None:
        base = dist.Normal(0.0, 2.0).expand([means]).to_event(1)
        mu = pyro.sample("mu", dist.TransformedDistribution(base, [OrderedTransform()]))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        rows = pyro.sample("rows", dist.Dirichlet(torch.ones(means, means) + 2.0 * torch.eye(means)).to_event(1))
        first = torch.full((means,), -math.log(means))
        law = dist.DiscreteHMM(first, rows.log(), dist.Normal(mu, sigma), duration=len(y))
        pyro.sample("y", law, obs=y)

    return model


def hidden_summed(means: int) -> Callable[[Tensor], None]:
    """The same by the forward recursion; DiscreteHMM moves before it looks."""

    def model(y: Tensor) -> None:
        base = dist.Normal(0.0, 2.0).expand([means]).to_event(1)
        mu = pyro.sample("mu", dist.TransformedDistribution(base, [OrderedTransform()]))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        rows = pyro.sample("rows", dist.Dirichlet(torch.ones(means, means) + 2.0 * torch.eye(means)).to_event(1))
        now = torch.full((means,), -math.log(means))
        for height in dist.Normal(mu, sigma).log_prob(y.unsqueeze(-1)):
            now = (now.unsqueeze(-1) + rows.log()).logsumexp(-2) + height
        pyro.factor("y", now.logsumexp(-1))

    return model


LINE = torch.linspace(-2.0, 2.0, 60).double()
LOOKS = torch.randint(5, (120,), generator=random(1))


def graded() -> tuple[Tensor, Tensor]:
    score = T([0.0, 0.2, 0.9, 1.1, 1.5]).double()[LOOKS] + (lambda u: (u / (1.0 - u)).log())(uniform(120, seed=2))
    return LOOKS, torch.bucketize(score, T([-1.0, 0.0, 1.0, 2.0]).double())


def wages() -> tuple[Tensor, Tensor]:
    hidden, season = normal(150, seed=1), torch.randint(4, (150,), generator=random(2)).double() / 2.0 - 0.75
    school = season + hidden + 0.5 * normal(150, seed=3)
    wage = 0.2 * school - hidden + 0.5 * normal(150, seed=4)
    both = torch.stack([wage, school], -1)
    return season, (both - both.mean(0)) / both.std(0)


def storms() -> tuple[Tensor, Tensor, Tensor]:
    f, p = normal(80, seed=1), normal(80, seed=2)
    return f, p, poisson((1.0 + 0.3 * f + 0.5 * p + 0.7 * normal(80, seed=3)).exp(), 4)


def measured() -> tuple[Tensor, Tensor]:
    true = normal(60, seed=1)
    return true + 0.5 * normal(60, seed=2), coin((0.3 + 1.2 * true).sigmoid(), 3)


def passengers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    age, sex = normal(80, seed=1), coin(torch.full((80,), 0.5).double(), 2)
    survived = coin((0.5 - 0.8 * age + sex).sigmoid(), 3)
    holes = torch.arange(0, 80, 8)
    return age.index_fill(0, holes, 0.0), holes, sex, survived


def crossed() -> tuple[Tensor, Tensor]:
    slope = torch.where(uniform(60, seed=1) < 0.4, -1.0, 1.5)
    return LINE, slope * LINE + 0.4 * normal(60, seed=2)


def market() -> tuple[Tensor]:
    variance, out = T(1.0).double(), []
    for z in normal(80, seed=6):
        out.append(0.1 + variance.sqrt() * z)
        variance = 0.2 + 0.3 * (variance.sqrt() * z).square() + 0.5 * variance
    return (torch.stack(out),)


def matches() -> tuple[Tensor, Tensor, Tensor]:
    home, away = torch.combinations(torch.arange(6)).T
    attack, defence = 0.3 * normal(6, seed=1), 0.3 * normal(6, seed=2)
    rate = torch.stack([2.9 + attack[home] - defence[away], 2.6 + attack[away] - defence[home]]).exp()
    return home, away, poisson(rate, 3)


def duels() -> tuple[Tensor, Tensor]:
    pairs = torch.randint(8, (80, 2), generator=random(1))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    skill = normal(8, seed=2)
    won = coin((skill[pairs[:, 0]] - skill[pairs[:, 1]]).sigmoid(), 3).long()
    return pairs.gather(1, 1 - won.unsqueeze(-1)).squeeze(-1), pairs.gather(1, won.unsqueeze(-1)).squeeze(-1)


def trees() -> tuple[Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        p = torch.distributions.Dirichlet(6.0 * T([0.4, 0.3, 0.2, 0.1]).double()).sample((10,))
        return (torch.distributions.Multinomial(30, p).sample(),)


def broken_series() -> tuple[Tensor, Tensor]:
    y = [T(0.0).double()]
    for e in normal(59, seed=8):
        y.append(0.6 * y[-1] + 0.5 * e)
    holes = T([5, 17, 18, 40])
    return torch.stack(y).index_fill(0, holes, 0.0), holes


def regimes(means: list[float], num: int, seed: int) -> tuple[Tensor]:
    state, states = 0, []
    for u, v in uniform(num, 2, seed=seed):
        state = state if u < 0.85 else int(v * len(means))
        states.append(state)
    return (T(means).double()[states] + 0.7 * normal(num, seed=seed + 1),)


def directions() -> tuple[Tensor, Tensor]:
    return LINE, (0.5 + 0.6 * LINE + 0.4 * normal(60, seed=2) + math.pi) % math.tau - math.pi


def shares() -> tuple[Tensor, Tensor]:
    return LINE, (0.3 + 0.7 * LINE + 0.5 * normal(60, seed=4)).sigmoid()


PROGRAMS: dict[str, Program] = {
    "ordered predictor": Program(monotonic, graded),
    "instrument": Program(instrument, wages),
    "careers": Program(
        careers, lambda: (T([1.0, 2.0, 5.0]).double(), torch.randint(5, (100,), generator=random(1)).clamp(max=2))
    ),
    "hurricanes": Program(hurricanes, storms),
    "measured predictor": Program(measured_predictor, measured, summed=measured_predictor_in_noise),
    "imputed ages": Program(imputed, passengers),
    "two lines": Program(two_lines, crossed, summed=lambda x, y: two_lines(x, y, summed=True)),
    "broken line": Program(broken_line, lambda: (LINE, LINE.clamp(max=0.5) + 0.3 * normal(60, seed=3)), compared=False),
    "hurdle": Program(
        hurdle, lambda: (LINE, poisson((0.8 + 0.5 * LINE).exp(), 3) * coin(torch.full((60,), 0.7).double(), 4))
    ),
    "beta regression": Program(proportions, shares),
    "gamma regression": Program(
        claims, lambda: (LINE, (0.5 + 0.4 * LINE).exp() * -(uniform(60, seed=5) * uniform(60, seed=6)).log() / 2.0)
    ),
    "garch": Program(garch, market),
    "rugby": Program(rugby, matches),
    "angles": Program(angles, directions),
    "tennis": Program(tennis, duels, summed=tennis_in_noise),
    "forests": Program(forests, trees),
    "gaps in a series": Program(gaps_in_a_series, broken_series),
    "hidden Markov, two means": Program(hidden(2), lambda: regimes([-1.0, 1.0], 100, 1), summed=hidden_summed(2)),
    "hidden Markov, three means": Program(
        hidden(3), lambda: regimes([-2.0, 0.0, 2.0], 100, 3), summed=hidden_summed(3)
    ),
}
