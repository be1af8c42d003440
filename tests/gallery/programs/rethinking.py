"""Models of Statistical Rethinking (McElreath, 2020), as its translations write them; data simulated or tiny."""

import math

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import OrderedTransform
from torch import Tensor

from tests.gallery.programs.program import Program, coin, normal, ordered_logistic, poisson, random, uniform

T = torch.tensor


def chimpanzees(actor: Tensor, block: Tensor, treatment: Tensor, pulled: Tensor) -> None:
    """13.4: actors, blocks and treatments."""
    b = pyro.sample("b", dist.Normal(0.0, 0.5).expand([4]).to_event(1))
    a_bar = pyro.sample("a_bar", dist.Normal(0.0, 1.5))
    sigma_a = pyro.sample("sigma_a", dist.Exponential(1.0))
    sigma_g = pyro.sample("sigma_g", dist.Exponential(1.0))
    with pyro.plate("actors", 7):
        a = pyro.sample("a", dist.Normal(a_bar, sigma_a))
    with pyro.plate("blocks", 6):
        g = pyro.sample("g", dist.Normal(0.0, sigma_g))
    with pyro.plate("rows", len(pulled)):
        pyro.sample("pulled", dist.Bernoulli(logits=a[actor] + g[block] + b[treatment]), obs=pulled)


def chimpanzees_in_noise(actor: Tensor, block: Tensor, treatment: Tensor, pulled: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 0.5).expand([4]).to_event(1))
    a_bar = pyro.sample("a_bar", dist.Normal(0.0, 1.5))
    sigma_a = pyro.sample("sigma_a", dist.Exponential(1.0))
    sigma_g = pyro.sample("sigma_g", dist.Exponential(1.0))
    a = pyro.deterministic("a", a_bar + sigma_a * pyro.sample("z", dist.Normal(0.0, 1.0).expand([7]).to_event(1)))
    g = pyro.deterministic("g", sigma_g * pyro.sample("x", dist.Normal(0.0, 1.0).expand([6]).to_event(1)))
    with pyro.plate("rows", len(pulled)):
        pyro.sample("pulled", dist.Bernoulli(logits=a[actor] + g[block] + b[treatment]), obs=pulled)


def chimpanzees_varying(actor: Tensor, block: Tensor, treatment: Tensor, pulled: Tensor) -> None:
    """14.3: effects of treatments that vary with actor and with block, correlated, non-centred."""
    g = pyro.sample("g", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    effects = []
    for name, num in (("actor", 7), ("block", 6)):
        sigma = pyro.sample(f"sigma_{name}", dist.Exponential(1.0).expand([4]).to_event(1))
        L = pyro.sample(f"L_{name}", dist.LKJCholesky(4, T(2.0)))
        z = pyro.sample(f"z_{name}", dist.Normal(torch.zeros(num, 4), 1.0).to_event(2))
        effects.append(z @ (sigma.unsqueeze(-1) * L).mT)
    logits = g[treatment] + effects[0][actor, treatment] + effects[1][block, treatment]
    with pyro.plate("rows", len(pulled)):
        pyro.sample("pulled", dist.Bernoulli(logits=logits), obs=pulled)


def reedfrogs(density: Tensor, survived: Tensor) -> None:
    """13.2: tanks around a mean."""
    a_bar = pyro.sample("a_bar", dist.Normal(0.0, 1.5))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    with pyro.plate("tanks", len(survived)):
        a = pyro.sample("a", dist.Normal(a_bar, sigma))
        pyro.sample("S", dist.Binomial(density, logits=a), obs=survived)


def reedfrogs_in_noise(density: Tensor, survived: Tensor) -> None:
    a_bar = pyro.sample("a_bar", dist.Normal(0.0, 1.5))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(survived)]).to_event(1))
    a = pyro.deterministic("a", a_bar + sigma * z)
    with pyro.plate("tanks", len(survived)):
        pyro.sample("S", dist.Binomial(density, logits=a), obs=survived)


def admissions(gender: Tensor, applications: Tensor, admit: Tensor) -> None:
    """12.2: beta-binomial admissions."""
    a = pyro.sample("a", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
    phi = pyro.sample("phi", dist.Exponential(1.0))
    theta = phi + 2.0
    p = a[gender].sigmoid()
    with pyro.plate("rows", len(admit)):
        pyro.sample("A", dist.BetaBinomial(p * theta, (1.0 - p) * theta, applications), obs=admit)


def kline(contact: Tensor, population: Tensor, tools: Tensor) -> None:
    """12.3: tools of islands, gamma-Poisson around a law of growth and loss."""
    a = pyro.sample("a", dist.Normal(1.0, 1.0).expand([2]).to_event(1))
    b = pyro.sample("b", dist.Exponential(1.0).expand([2]).to_event(1))
    g = pyro.sample("g", dist.Exponential(1.0))
    phi = pyro.sample("phi", dist.Exponential(1.0))
    rate = a[contact].exp() * population ** b[contact] / g
    with pyro.plate("rows", len(tools)):
        pyro.sample("T", dist.GammaPoisson(rate / phi, 1.0 / phi), obs=tools)


def trolley(x: Tensor, y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 0.5))
    prior = dist.TransformedDistribution(dist.Normal(0.0, 1.5).expand([6]).to_event(1), [OrderedTransform()])
    cuts = pyro.sample("cutpoints", prior)
    with pyro.plate("rows", len(y)):
        pyro.sample("R", dist.OrderedLogistic(b * x, cuts), obs=y)


def trolley_in_noise(x: Tensor, y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 0.5))
    z = pyro.sample("z", dist.Normal(0.0, 1.5).expand([6]).to_event(1))
    cuts = pyro.deterministic("cutpoints", z[0] + torch.cat([z.new_zeros(1), z[1:].exp().cumsum(-1)]))
    pyro.factor("R", ordered_logistic(b * x, cuts, y).sum())


def islands(distance: Tensor, population: Tensor, tools: Tensor, centred: bool = True) -> None:
    """14.5: a Gaussian process over islands beside the law."""
    a = pyro.sample("a", dist.Exponential(1.0))
    b = pyro.sample("b", dist.Exponential(1.0))
    g = pyro.sample("g", dist.Exponential(1.0))
    etasq = pyro.sample("etasq", dist.Exponential(2.0))
    rhosq = pyro.sample("rhosq", dist.Exponential(0.5))
    K = etasq * (-rhosq * distance.square()).exp() + 0.01 * torch.eye(len(tools))
    if centred:
        k = pyro.sample("k", dist.MultivariateNormal(torch.zeros(len(tools)), K))
    else:
        k = torch.linalg.cholesky(K) @ pyro.sample("z", dist.Normal(torch.zeros(len(tools)), 1.0).to_event(1))
    with pyro.plate("rows", len(tools)):
        pyro.sample("T", dist.Poisson(a * population**b / g * k.exp()), obs=tools)


def islands_in_noise(distance: Tensor, population: Tensor, tools: Tensor) -> None:
    islands(distance, population, tools, centred=False)


def divorce(age: Tensor, marriage: Tensor, seen: Tensor, error: Tensor) -> None:
    """15.1: rates that are known with an error."""
    a = pyro.sample("a", dist.Normal(0.0, 0.2))
    bA = pyro.sample("bA", dist.Normal(0.0, 0.5))
    bM = pyro.sample("bM", dist.Normal(0.0, 0.5))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    with pyro.plate("rows", len(seen)):
        true = pyro.sample("D_true", dist.Normal(a + bA * age + bM * marriage, sigma))
        pyro.sample("D_obs", dist.Normal(true, error), obs=seen)


def divorce_integrated(age: Tensor, marriage: Tensor, seen: Tensor, error: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 0.2))
    bA = pyro.sample("bA", dist.Normal(0.0, 0.5))
    bM = pyro.sample("bM", dist.Normal(0.0, 0.5))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    with pyro.plate("rows", len(seen)):
        spread = (sigma.square() + error.square()).sqrt()
        pyro.sample("D_obs", dist.Normal(a + bA * age + bM * marriage, spread), obs=seen)


def milk(brain: Tensor, mass: Tensor, energy: Tensor) -> None:
    """15.2: a predictor with holes, which are latent."""
    a = pyro.sample("a", dist.Normal(0.0, 0.5))
    bB = pyro.sample("bB", dist.Normal(0.0, 0.5))
    bM = pyro.sample("bM", dist.Normal(0.0, 0.5))
    nu = pyro.sample("nu", dist.Normal(0.0, 0.5))
    sigma_B = pyro.sample("sigma_B", dist.Exponential(1.0))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    hole = brain.isnan()
    with pyro.plate("holes", int(hole.sum())):
        imputed = pyro.sample("B_impute", dist.Normal(nu, sigma_B))
    filled = torch.zeros(len(brain)).to(brain).masked_scatter(hole, imputed) + brain.nan_to_num()
    with pyro.plate("known", int((~hole).sum())):
        pyro.sample("B", dist.Normal(nu, sigma_B), obs=brain[~hole])
    with pyro.plate("rows", len(energy)):
        pyro.sample("K", dist.Normal(a + bB * filled + bM * mass, sigma), obs=energy)


def milk_integrated(brain: Tensor, mass: Tensor, energy: Tensor) -> None:
    """Rows with a hole have the mean and the variance of its distribution."""
    a = pyro.sample("a", dist.Normal(0.0, 0.5))
    bB = pyro.sample("bB", dist.Normal(0.0, 0.5))
    bM = pyro.sample("bM", dist.Normal(0.0, 0.5))
    nu = pyro.sample("nu", dist.Normal(0.0, 0.5))
    sigma_B = pyro.sample("sigma_B", dist.Exponential(1.0))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    hole = brain.isnan()
    mean = a + bB * torch.where(hole, nu, brain.nan_to_num()) + bM * mass
    spread = (sigma.square() + (bB * sigma_B).square() * hole).sqrt()
    with pyro.plate("known", int((~hole).sum())):
        pyro.sample("B", dist.Normal(nu, sigma_B), obs=brain[~hole])
    with pyro.plate("rows", len(energy)):
        pyro.sample("K", dist.Normal(mean, spread), obs=energy)


def monks(manuscripts: Tensor) -> None:
    """12.3: drunk monks; zeros have two causes, summed by hand in a factor."""
    ap = pyro.sample("ap", dist.Normal(-1.5, 1.0))
    al = pyro.sample("al", dist.Normal(1.0, 0.5))
    p, rate = ap.sigmoid(), al.exp()
    zero = (p + (1.0 - p) * (-rate).exp()).log()
    other = (1.0 - p).log() + dist.Poisson(rate).log_prob(manuscripts)
    pyro.factor("y", torch.where(manuscripts == 0, zero, other).sum())


def pandas(age: Tensor, seconds: Tensor, nuts: Tensor) -> None:
    """16.3: strength that grows with age, cracks nuts."""
    phi = pyro.sample("phi", dist.LogNormal(0.0, 0.1))
    k = pyro.sample("k", dist.LogNormal(math.log(2.0), 0.25))
    theta = pyro.sample("theta", dist.LogNormal(math.log(5.0), 0.25))
    with pyro.plate("rows", len(nuts)):
        pyro.sample("n", dist.Poisson(seconds * phi * (1.0 - (-k * age).exp()) ** theta), obs=nuts)


def cylinder(height: Tensor, weight: Tensor) -> None:
    """16.1: weight of a cylinder, p and k only through k p^2."""
    p = pyro.sample("p", dist.Beta(2.0, 18.0))
    k = pyro.sample("k", dist.Exponential(0.5))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    mean = (math.pi * k * p.square() * height**3).log()
    with pyro.plate("rows", len(weight)):
        pyro.sample("W", dist.LogNormal(mean, sigma), obs=weight)


def cherries(basis: Tensor, day: Tensor) -> None:
    """4.5: splines of the blossom's day."""
    a = pyro.sample("a", dist.Normal(100.0, 10.0))
    w = pyro.sample("w", dist.Normal(0.0, 10.0).expand([basis.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    with pyro.plate("rows", len(day)):
        pyro.sample("D", dist.Normal(a + basis @ w, sigma), obs=day)


def primates(distance: Tensor, mass: Tensor, brain: Tensor) -> None:
    """14.5: species whose covariance falls with their distance on the tree."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    bM = pyro.sample("bM", dist.Normal(0.0, 0.5))
    etasq = pyro.sample("etasq", dist.LogNormal(0.0, 0.25))
    rhosq = pyro.sample("rhosq", dist.LogNormal(1.0, 0.25))
    K = etasq * (-rhosq * distance).exp() + 0.01 * torch.eye(len(brain))
    pyro.sample("B", dist.MultivariateNormal(a + bM * mass, K), obs=brain)


def cafes(cafe: Tensor, afternoon: Tensor, wait: Tensor) -> None:
    """14.1: intercepts and slopes of cafes, correlated."""
    ab = pyro.sample("ab", dist.Normal(T([5.0, -1.0]), T([2.0, 0.5])).to_event(1))
    sigma_cafe = pyro.sample("sigma_cafe", dist.Exponential(1.0).expand([2]).to_event(1))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    L = pyro.sample("L", dist.LKJCholesky(2, T(2.0)))
    with pyro.plate("cafes", 20):
        v = pyro.sample("v", dist.MultivariateNormal(ab, scale_tril=sigma_cafe.unsqueeze(-1) * L))
    with pyro.plate("rows", len(wait)):
        pyro.sample("wait", dist.Normal(v[cafe, 0] + v[cafe, 1] * afternoon, sigma), obs=wait)


def cafes_integrated(cafe: Tensor, afternoon: Tensor, wait: Tensor) -> None:
    """Ten waits of a cafe are normal, with the covariance that its intercept and its slope give them."""
    ab = pyro.sample("ab", dist.Normal(T([5.0, -1.0]), T([2.0, 0.5])).to_event(1))
    sigma_cafe = pyro.sample("sigma_cafe", dist.Exponential(1.0).expand([2]).to_event(1))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    L = pyro.sample("L", dist.LKJCholesky(2, T(2.0)))
    design = torch.stack([torch.ones(10), afternoon[:10]], -1).to(wait)
    root = design @ (sigma_cafe.unsqueeze(-1) * L)
    covariance = root @ root.mT + sigma.square() * torch.eye(10)
    with pyro.plate("cafes", 20):
        pyro.sample("wait", dist.MultivariateNormal(design @ ab, covariance), obs=wait.reshape(20, 10))


def boxes(choice: Tensor, majority_first: Tensor) -> None:
    """16.2: five strategies of children, summed by logsumexp."""
    p = pyro.sample("p", dist.Dirichlet(torch.full((5,), 4.0)))
    a = (choice == 1).double()
    like = torch.stack([a, (choice == 2).double(), (choice == 0).double(), torch.full_like(a, 1.0 / 3.0)], -1)
    like = torch.cat([like, (choice == torch.where(majority_first, 1, 2)).double().unsqueeze(-1)], -1)
    pyro.factor("choices", (p.log() + like.clamp(min=1e-30).log()).logsumexp(-1).sum())


def cats(cat: Tensor, notes: Tensor) -> None:
    """15.3: birds that sing less where there is a cat; some cats are unknown, and summed out."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 0.5))
    k = pyro.sample("k", dist.Beta(2.0, 2.0))
    known = cat >= 0
    with pyro.plate("known", int(known.sum())):
        pyro.sample("cat_seen", dist.Bernoulli(k), obs=cat[known].double())
        pyro.sample("notes_seen", dist.Poisson((a + b * cat[known]).exp()), obs=notes[known])
    with pyro.plate("unknown", int((~known).sum())):
        hidden = pyro.sample("cat_hidden", dist.Bernoulli(k), infer={"enumerate": "parallel"})
        pyro.sample("notes_hidden", dist.Poisson((a + b * hidden).exp()), obs=notes[~known])


def cats_summed(cat: Tensor, notes: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 0.5))
    k = pyro.sample("k", dist.Beta(2.0, 2.0))
    with_cat = k.log() + dist.Poisson((a + b).exp()).log_prob(notes)
    without = (1.0 - k).log() + dist.Poisson(a.exp()).log_prob(notes)
    either = torch.logaddexp(with_cat, without)
    pyro.factor("notes", torch.where(cat == 1, with_cat, torch.where(cat == 0, without, either)).sum())


def pulls() -> tuple[Tensor, ...]:
    actor, block, treatment = torch.arange(336) % 7, torch.arange(336) // 7 % 6, torch.arange(336) // 42 % 4
    logit = T([-0.4, 3.0, -0.7, -0.6, -0.4, 0.6, 2.0]).double()[actor] + 0.5 * (treatment == 1)
    return actor, block, treatment, coin(logit.sigmoid(), 1)


def tanks() -> tuple[Tensor, Tensor]:
    density = T([10.0, 25.0, 35.0]).double().repeat_interleave(8)
    return density, binomial(density, (1.3 + 1.5 * normal(24, seed=2)).sigmoid(), 3)


def binomial(total: Tensor, p: Tensor, seed: int) -> Tensor:
    """How many of the first uniform numbers, as many as the total, fall below p."""
    tries = uniform(int(total.max()), len(total), seed=seed) < p
    counted = torch.arange(int(total.max())).unsqueeze(-1) < total
    return (tries & counted).sum(0).double()


def answers() -> tuple[Tensor, Tensor]:
    x = normal(300, seed=4)
    return x, torch.bucketize(x - normal(300, seed=5) * 1.7, T([-2.5, -1.5, -0.8, 0.0, 1.0, 2.0]).double())


def tool_counts() -> tuple[Tensor, Tensor]:
    population = T([1100, 1500, 3600, 4791, 7400, 8000, 9200, 13000, 17500, 275000]).double()
    return population / population.mean(), T([13, 22, 24, 43, 33, 19, 40, 28, 55, 71]).double()


def sea() -> Tensor:
    place = 2.0 * normal(10, 2, seed=6)
    return torch.cdist(place, place)


def states() -> tuple[Tensor, ...]:
    age, error = normal(50), 0.1 + 0.6 * uniform(50, seed=7)
    marriage = -0.7 * age + 0.7 * normal(50, seed=8)
    return age, marriage, -0.6 * age + 0.5 * normal(50, seed=9) + error * normal(50, seed=10), error


def milks() -> tuple[Tensor, Tensor, Tensor]:
    mass = normal(29)
    brain = 0.7 * mass + 0.7 * normal(29, seed=11)
    energy = 0.6 * brain - 0.7 * mass + 0.7 * normal(29, seed=12)
    return torch.where(torch.arange(29) % 5 < 2, torch.nan, brain), mass, energy


def nut_counts() -> tuple[Tensor, ...]:
    age, seconds = 0.2 + 0.8 * uniform(80), 10.0 + 90.0 * uniform(80, seed=13)
    return age, seconds, poisson(seconds * (1.0 - (-2.0 * age).exp()) ** 5.0, 14)


def heights() -> tuple[Tensor, Tensor]:
    height = 0.5 + 0.8 * uniform(150, seed=15)
    return height, height**3 * (0.1 * normal(150, seed=16)).exp()


def blossoms() -> tuple[Tensor, Tensor]:
    year, knots = torch.linspace(0.0, 1.0, 120).double(), torch.linspace(0.0, 1.0, 10).double()
    basis = (1.0 - 9.0 * (year.unsqueeze(-1) - knots).abs()).clamp(min=0.0)
    return basis, 104.0 + 4.0 * (5.0 * year).sin() + 5.0 * normal(120, seed=17)


def species() -> tuple[Tensor, Tensor, Tensor]:
    place = uniform(30, 2, seed=18)
    mass = normal(30, seed=19)
    return torch.cdist(place, place), mass, 0.8 * mass + 0.4 * normal(30, seed=20)


def visits() -> tuple[Tensor, Tensor, Tensor]:
    cafe, afternoon = torch.arange(20).repeat_interleave(10), (torch.arange(200) % 2).double()
    z = normal(20, 2, seed=21)
    intercept, slope = 3.5 + z[:, 0], -1.0 + 0.5 * (-0.7 * z[:, 0] + 0.7 * z[:, 1])
    return cafe, afternoon, intercept[cafe] + slope[cafe] * afternoon + 0.5 * normal(200, seed=22)


def singing() -> tuple[Tensor, Tensor]:
    cat = coin(torch.full((60,), 0.5).double(), 23)
    notes = poisson((1.5 - 0.6 * cat).exp(), 24)
    return torch.where(torch.arange(60) % 5 == 0, -1, cat.long()), notes


CONTACT = T([0, 0, 0, 1, 1, 1, 1, 0, 1, 0])

PROGRAMS: dict[str, Program] = {
    "chimpanzees 13.4": Program(chimpanzees, pulls, summed=chimpanzees_in_noise),
    "chimpanzees 14.3": Program(chimpanzees_varying, pulls, slow=True),
    "reedfrogs 13.2": Program(reedfrogs, tanks, summed=reedfrogs_in_noise),
    "admissions, beta-binomial": Program(
        admissions,
        lambda: (
            torch.arange(12) % 2,
            T([825, 108, 560, 25, 325, 593, 417, 375, 191, 393, 373, 341]).double(),
            T([512, 89, 353, 17, 120, 202, 138, 131, 53, 94, 22, 24]).double(),
        ),
    ),
    "Kline, gamma-Poisson": Program(kline, lambda: (CONTACT, *tool_counts())),
    "trolley": Program(trolley, answers, summed=trolley_in_noise),
    "Kline, process": Program(islands, lambda: (sea(), *tool_counts()), summed=islands_in_noise),
    "Kline, process, non-centred": Program(islands_in_noise, lambda: (sea(), *tool_counts())),
    "divorce, measurement error": Program(divorce, states, summed=divorce_integrated),
    "milk, missing values": Program(milk, milks, summed=milk_integrated, slow=True),
    "monks, zeros of two kinds": Program(
        monks, lambda: (poisson(torch.full((200,), 1.0).double(), 25) * coin(torch.full((200,), 0.8).double(), 26),)
    ),
    "pandas and nuts": Program(pandas, nut_counts),
    "cylinder": Program(cylinder, heights),
    "cherry blossoms": Program(cherries, blossoms),
    "primates": Program(primates, species),
    "cafes": Program(cafes, visits, summed=cafes_integrated),
    "boxes": Program(
        boxes,
        lambda: (torch.randint(3, (200,), generator=random(27)).clamp(max=2), uniform(200, seed=28) < 0.5),
    ),
    "cats and birds": Program(cats, singing, summed=cats_summed),
}
