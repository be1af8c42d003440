"""Examples of BUGS with the priors of BUGS, and the means and deviations that JAGS has of them.

Data and JAGS's results (with its effective draws) are in tests/oracles/bugs.json.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

Values = dict[str, Tensor]
Data = dict[str, Tensor]
STORED = json.loads((Path(__file__).parents[2] / "oracles" / "bugs.json").read_text())


@dataclass(frozen=True)
class Example:
    """A model, whose data it takes, and JAGS's quantities from draws of its sites.

    :ivar data: whose data, by the name in bugs.json.
    :ivar refused: words of the refusal, of a model that is refused for its kind.
    """

    model: Callable[[Data], None]
    data: str
    quantities: Callable[[Values], Values]
    refused: str = ""


def data_of(name: str) -> Data:
    return {k: torch.tensor(v, dtype=torch.float64) for k, v in STORED[name]["data"].items()}


def vague(name: str, sd: float = 1e3) -> Tensor:
    return pyro.sample(name, dist.Normal(0.0, sd))


def precision(name: str) -> Tensor:
    return pyro.sample(name, dist.Gamma(1e-3, 1e-3))


def of_sites(*names: str, **scales: str) -> Callable[[Values], Values]:
    """Sites as they are, elements numbered from 1, and scales of precisions."""

    def quantities(draws: Values) -> Values:
        found = {}
        for name in names:
            value = draws[name]
            found |= {name: value} if value.dim() == 1 else {f"{name}[{i + 1}]": v for i, v in enumerate(value.mT)}
        return found | {scale.replace("_", "."): draws[tau].rsqrt() for scale, tau in scales.items()}

    return quantities


def seeds(d: Data) -> None:
    a0, a1, a2, a12 = (vague(name) for name in ("alpha0", "alpha1", "alpha2", "alpha12"))
    tau = precision("tau")
    with pyro.plate("plates", 21):
        b = pyro.sample("b", dist.Normal(0.0, tau.rsqrt()))
        logits = a0 + a1 * d["x1"] + a2 * d["x2"] + a12 * d["x1"] * d["x2"] + b
        pyro.sample("n", dist.Binomial(d["N"], logits=logits), obs=d["n"])


def surgical(d: Data) -> None:
    mu, tau = vague("mu"), precision("tau")
    with pyro.plate("hospitals", 12):
        b = pyro.sample("b", dist.Normal(mu, tau.rsqrt()))
        pyro.sample("r", dist.Binomial(d["n"], logits=b), obs=d["r"])


def of_hospitals(draws: Values) -> Values:
    rates = {f"p[{i + 1}]": b.sigmoid() for i, b in enumerate(draws["b"].mT)}
    return {"mu": draws["mu"], "sigma": draws["tau"].rsqrt()} | rates


def dugongs(d: Data) -> None:
    alpha, beta, tau = vague("alpha"), vague("beta"), precision("tau")
    gamma = pyro.sample("gamma", dist.Uniform(0.5, 1.0))
    with pyro.plate("animals", 27):
        pyro.sample("Y", dist.Normal(alpha - beta * gamma ** d["x"], tau.rsqrt()), obs=d["Y"])


def rats(d: Data) -> None:
    mean_a, mean_b = vague("alpha.c"), vague("beta.c")
    tau_a, tau_b, tau = precision("tau.alpha"), precision("tau.beta"), precision("tau.c")
    with pyro.plate("rats", 30, dim=-2):
        a = pyro.sample("alpha", dist.Normal(mean_a, tau_a.rsqrt()))
        b = pyro.sample("beta", dist.Normal(mean_b, tau_b.rsqrt()))
        with pyro.plate("weeks", 5, dim=-1):
            pyro.sample("y", dist.Normal(a + b * (d["x"] - 22.0), tau.rsqrt()), obs=d["y"])


def pump(d: Data) -> None:
    alpha, beta = pyro.sample("alpha", dist.Exponential(1.0)), pyro.sample("beta", dist.Gamma(0.1, 1.0))
    with pyro.plate("pumps", 10):
        theta = pyro.sample("theta", dist.Gamma(alpha, beta))
        pyro.sample("x", dist.Poisson(theta * d["t"]), obs=d["x"])


def epil(d: Data) -> None:
    """Seizures of 59 patients in four visits, an effect of each patient and of each visit."""
    names = {"alpha.Base": "log_Base4", "alpha.Trt": "Trt", "alpha.BT": "BT", "alpha.Age": "log_Age"}
    fixed = vague("a0", 100.0) + sum(vague(k, 100.0) * (d[v] - d[v].mean()) for k, v in names.items())
    of_last, tau_1, tau = vague("alpha.V4", 100.0), precision("tau.b1"), precision("tau.b")
    with pyro.plate("patients", 59, dim=-2):
        b1 = pyro.sample("b1", dist.Normal(0.0, tau_1.rsqrt()))
        with pyro.plate("visits", 4, dim=-1):
            b = pyro.sample("b", dist.Normal(0.0, tau.rsqrt()))
            mean = (fixed.unsqueeze(-1) + of_last * (d["V4"] - d["V4"].mean()) + b1 + b).exp()
            pyro.sample("y", dist.Poisson(mean), obs=d["y"])


def stacks(d: Data, errors: str = "normal") -> None:
    z = (d["x"] - d["x"].mean(0)) / d["x"].std(0)
    b0, b, tau = vague("b0", 316.0), pyro.sample("b", dist.Normal(torch.zeros(3), 316.0).to_event(1)), precision("tau")
    mean, scale = b0 + z @ b, tau.rsqrt()
    kinds = {
        "normal": dist.Normal(mean, scale),
        "t4": dist.StudentT(4.0, mean, scale),
        "dexp": dist.Laplace(mean, 1 / tau),
    }
    with pyro.plate("days", 21):
        pyro.sample("Y", kinds[errors], obs=d["Y"])


def of_student(draws: Values) -> Values:
    """The deviation of Student's t with four degrees of freedom is the root of two of its scales."""
    return of_sites("b0", "b")(draws) | {"sigma": (2.0 / draws["tau"]).sqrt()}


def magnesium(d: Data) -> None:
    mu, tau = pyro.sample("mu", dist.Uniform(-10.0, 10.0)), pyro.sample("tau", dist.Uniform(0.0, 50.0))
    with pyro.plate("trials", 8):
        pc = pyro.sample("pc", dist.Uniform(0.0, 1.0))
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("rc", dist.Binomial(d["nc"], probs=pc), obs=d["rc"])
        pyro.sample("rt", dist.Binomial(d["nt"], logits=theta + pc.logit()), obs=d["rt"])


def salm(d: Data) -> None:
    x, log_x = d["x"], (d["x"] + 10.0).log()
    alpha, beta, gamma, tau = vague("alpha"), vague("beta"), vague("gamma"), precision("tau")
    with pyro.plate("plates", 3, dim=-1), pyro.plate("doses", 6, dim=-2):
        effect = pyro.sample("lambda", dist.Normal(0.0, tau.rsqrt()))
        trend = alpha + beta * (log_x - log_x.mean()) + gamma * (x - x.mean())
        pyro.sample("y", dist.Poisson((trend.unsqueeze(-1) + effect).exp()), obs=d["y"])


def equiv(d: Data) -> None:
    """A trial in two periods with a change of treatments between them."""
    mu, phi, pi = vague("mu"), vague("phi"), vague("pi")
    tau_1, tau_2 = precision("tau1"), precision("tau2")
    treatment = torch.stack([d["group"], -d["group"]], -1)
    with pyro.plate("people", 10, dim=-2):
        delta = pyro.sample("delta", dist.Normal(0.0, tau_2.rsqrt()))
        with pyro.plate("periods", 2, dim=-1):
            mean = mu + treatment * phi / 2.0 + d["sign"] * pi / 2.0 + delta
            pyro.sample("Y", dist.Normal(mean, tau_1.rsqrt()), obs=d["Y"])


def leuk(d: Data) -> None:
    """Cox's regression by counts: a step of the hazard for each of seventeen times."""
    t, seen, fail = d["t"], d["obs_t"].unsqueeze(-1), d["fail"].unsqueeze(-1)
    at_risk = seen >= t[:-1] - 1e-6
    died = at_risk.double() * fail * (t[1:] - seen > 1e-6)
    beta = vague("beta")
    with pyro.plate("times", 17, dim=-1):
        step = pyro.sample("dL0", dist.Gamma(1e-4 * t.diff(), 1e-3))
        with pyro.plate("patients", 42, dim=-2), pyro.poutine.mask(mask=at_risk):
            pyro.sample("dN", dist.Poisson((beta * d["Z"].unsqueeze(-1)).exp() * step), obs=died)


def of_hazard(draws: Values) -> Values:
    return {"beta": draws["beta"], "L": draws["dL0"].sum(-1)}


def bones(d: Data) -> None:
    """Skeletal age of thirteen children from graded indicators, some of them missing."""
    with pyro.plate("children", 13):
        theta = pyro.sample("theta", dist.Normal(0.0, 36.0))
    above = (d["delta"].unsqueeze(-1) * (theta[:, None, None] - d["gamma"])).sigmoid()
    above = torch.where(torch.arange(4) < d["ncat"].unsqueeze(-1) - 1.0, above, torch.zeros(()))
    edge = torch.ones(13, 34, 1).to(above)
    p = torch.cat([edge, above], -1) - torch.cat([above, 0.0 * edge], -1)
    grade = d["grade"].long()
    of_grade = p.gather(-1, (grade - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    pyro.factor("grades", torch.where(grade > 0, of_grade, torch.ones(())).clamp(min=1e-300).log().sum())


def dyes(d: Data) -> None:
    theta, within, between = vague("theta", 1e5), precision("tau.with"), precision("tau.btw")
    with pyro.plate("batches", 6, dim=-2):
        mu = pyro.sample("mu", dist.Normal(theta, between.rsqrt()))
        with pyro.plate("samples", 5, dim=-1):
            pyro.sample("y", dist.Normal(mu, within.rsqrt()), obs=d["y"])


EXAMPLES: dict[str, Example] = {
    "seeds": Example(seeds, "seeds", of_sites("alpha0", "alpha1", "alpha2", "alpha12", sigma="tau")),
    "surgical": Example(surgical, "surgical", of_hospitals),
    "dugongs": Example(dugongs, "dugongs", of_sites("alpha", "beta", "gamma", sigma="tau")),
    "rats": Example(
        rats, "rats", of_sites("alpha.c", "beta.c", sigma="tau.c", sigma_alpha="tau.alpha", sigma_beta="tau.beta")
    ),
    "pump": Example(pump, "pump", of_sites("alpha", "beta", "theta")),
    "epil": Example(
        epil,
        "epil",
        of_sites(
            "a0", "alpha.Base", "alpha.Trt", "alpha.BT", "alpha.Age", "alpha.V4", sigma_b1="tau.b1", sigma_b="tau.b"
        ),
    ),
    "stacks": Example(stacks, "stacks", of_sites("b0", "b", sigma="tau")),
    "stacks_t4": Example(functools.partial(stacks, errors="t4"), "stacks", of_student),
    "stacks_dexp": Example(functools.partial(stacks, errors="dexp"), "stacks", of_sites("b0", "b"), refused="kink"),
    "magnesium": Example(magnesium, "magnesium", lambda q: {"mu": q["mu"], "tau": q["tau"], "OR": q["mu"].exp()}),
    "salm": Example(salm, "salm", of_sites("alpha", "beta", "gamma", sigma="tau")),
    "equiv": Example(equiv, "equiv", of_sites("mu", "phi", "pi", sigma1="tau1", sigma2="tau2")),
    "leuk": Example(leuk, "leuk", of_hazard),
    "bones": Example(bones, "bones", of_sites("theta")),
    "dyes": Example(dyes, "dyes", of_sites("theta", sigma_with="tau.with", sigma_btw="tau.btw")),
}
