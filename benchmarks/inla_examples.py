"""R-INLA's kinds of models, fitted by default: processor seconds, memory beyond imports, and a dense check of each.

The seconds are those of the fit, and those of its log evidence with what importance sampling adds to it.

    PYRO_EVIDENCE_DATA=... python benchmarks/inla_examples.py [case ...]

One thread, each fit in a process of its own.  The check takes five of the nodes at which the engine has evaluated the
hyperparameters, finds the mode there again by Newton's method on a dense Hessian that autograd makes of the model's
whole log density, and gives the largest difference in the log evidence, nats; exact where the data are Gaussian.  It
is made where the latents are few enough for a dense Hessian; that of frailties by the integral of each patient on a
grid; of Weibull frailties seven nodes are up to 3e-3 nats off it, as the rule itself is, fifteen 6e-6.  Simulated data
have a seed of their own.

Where R has the model its seconds are below: rents by mgcv, counts over an autoregression by glmmTMB, whose likelihood
is compared at its own maximum.

With --nuts, the default table instead of the check, beside the chains that benchmarks/inla_nuts.py has stored: the
largest difference of means, in standard deviations, and the largest relative ones of standard deviations and of the
medians of hyperparameters; of the simulated rents, how much of what they were made of lies within intervals.
"""

import argparse
import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence
from pyro_evidence.models import gmrf
from pyro_evidence.models.survival import Censored
from pyro_evidence.numerics.evidence import log_evidence
from pyro_evidence.structure.density import AutogradDensity

Case = tuple[Callable[..., Any], tuple[Any, ...]]
STORED = Path(__file__).resolve().parents[1] / "tests" / "oracles" / "inla_nuts.json"
DENSE = 1600  # latents up to which the check is made
SECONDS = 120  # for each fit


# Data -----------------------------------------------------------------------------------------------------------------


def table(name: str) -> dict[str, Tensor]:
    """The columns of one of the data files; nan where an entry is missing."""
    with open(Path(os.environ["PYRO_EVIDENCE_DATA"]) / f"{name}.csv") as file:
        rows = list(csv.DictReader(file))
    missing = ("", "NA", "nan")
    return {k: torch.tensor([float("nan" if row[k] in missing else row[k]) for row in rows]) for k in rows[0]}


def neighbours(name: str) -> gmrf.Neighbours:
    """A graph in R-INLA's format: node, number of neighbours, neighbours."""
    numbers = [int(x) for x in (Path(os.environ["PYRO_EVIDENCE_DATA"]) / f"{name}.graph").read_text().split()]
    size, place, pairs = numbers[0], 1, set()
    while place < len(numbers):
        node, count = numbers[place : place + 2]
        pairs |= {(min(node, k) - 1, max(node, k) - 1) for k in numbers[place + 2 : place + 2 + count]}
        place += 2 + count
    return gmrf.Neighbours(torch.tensor(sorted(pairs)), size)


def planar(size: int) -> gmrf.Neighbours:
    """The triangles of points drawn at random: regions that touch about six others."""
    triangles = gmrf.Mesh.delaunay(torch.rand(size, 2)).triangles
    pairs = torch.cat([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [0, 2]]]).sort(-1).values
    return gmrf.Neighbours(torch.unique(pairs, dim=0), size)


def wave(size: int, periods: float = 1.0) -> Tensor:
    """A smooth curve."""
    return torch.sin(2.0 * torch.pi * periods * torch.arange(size) / size)


def without_slope(curve: Tensor) -> Tensor:
    """What a second-order walk of no level and slope may be."""
    basis = torch.linalg.qr(torch.stack([torch.ones(len(curve)), torch.arange(len(curve)).double()], -1)).Q
    return curve - basis @ (basis.mT @ curve)


def counts_of(field: Callable[..., Any], size: int, **priors: Any) -> Case:
    """Poisson counts around a smooth curve, with a field of the given hyperparameters."""
    y = torch.poisson((0.5 + 0.7 * wave(size)).exp())

    def model(y: Tensor) -> None:
        values = {name: pyro.sample(name, prior) for name, prior in priors.items()}
        intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
        x = pyro.sample("x", field(**values))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson((intercept + x).exp()), obs=y)

    return model, (y,)


# Cases ----------------------------------------------------------------------------------------------------------------


def tokyo(*, cyclic: bool = True) -> Case:
    """Days with rain, of each day of a year."""
    data = table("tokyo")

    def model(n: Tensor, y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(0.1))
        x = pyro.sample("x", gmrf.RandomWalk(scale, len(n), order=2, level=10.0, cyclic=cyclic))
        with pyro.plate("data", len(n)):
            pyro.sample("y", dist.Binomial(n, logits=x), obs=y)

    return model, (data["n"], data["y"])


def germany() -> Case:
    """Cancer in 544 districts: BYM2, and a walk over the values of a covariate."""
    data, graph = table("germany"), neighbours("germany")
    values, which = torch.unique(data["x"], return_inverse=True)

    def model(E: Tensor, Y: Tensor) -> None:
        scale, mixing = pyro.sample("scale", dist.HalfNormal(1.0)), pyro.sample("mixing", dist.Beta(1.0, 1.0))
        rough = pyro.sample("rough", dist.HalfNormal(0.1))
        smooth = pyro.sample("smooth", gmrf.RandomWalk(rough, values, order=2))
        field = pyro.sample("field", gmrf.BYM2(graph, scale, mixing))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
        with pyro.plate("data", len(Y)):
            pyro.sample("Y", dist.Poisson(E * (intercept + smooth[which] + field[0]).exp()), obs=Y)

    return model, (data["E"], data["Y"])


def flats() -> tuple[gmrf.Neighbours, tuple[Tensor, ...], tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Simulated: districts; size, year and district of each flat; covariates and rents; what they were made of."""
    torch.manual_seed(1)
    num, graph = 2035, planar(380)
    size, year = torch.randint(130, (num,)), torch.randint(80, (num,))
    place, X = torch.randint(380, (num,)), torch.randn(num, 12)
    district, w = gmrf.ICAR(graph, 0.5).sample(), torch.linspace(-1, 1, 12)
    by_size, by_year = without_slope(wave(130)), without_slope(0.5 * wave(80, 0.5))
    rent = 8.0 + by_size[size] + by_year[year] + district[place] + X @ w
    rent = rent + 0.8 * torch.randn(num)
    truth = {"by_size": by_size, "by_year": by_year, "by_place": district, "w": w}
    truth |= {"intercept": torch.tensor(8.0), "s_place": torch.tensor(0.5), "noise": torch.tensor(0.8)}
    return graph, (size, year, place), (X, rent), truth


def rents() -> Case:
    """Two walks of order 2, a graph of 380 districts, twelve coefficients, four scales."""
    graph, (size, year, place), data, _ = flats()

    def model(X: Tensor, rent: Tensor) -> None:
        scales = [pyro.sample(n, dist.HalfNormal(1.0)) for n in ("s_size", "s_year", "s_place", "noise")]
        by_size = pyro.sample("by_size", gmrf.RandomWalk(scales[0], 130, order=2))
        by_year = pyro.sample("by_year", gmrf.RandomWalk(scales[1], 80, order=2))
        by_place = pyro.sample("by_place", gmrf.ICAR(graph, scales[2]))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 20.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(12), 5.0).to_event(1))
        mean = intercept + by_size[size] + by_year[year] + by_place[place] + X @ w
        with pyro.plate("data", len(rent)):
            pyro.sample("rent", dist.Normal(mean, scales[3]), obs=rent)

    return model, data


def drivers() -> Case:
    """Car drivers killed: a walk, seasons, the law on belts; twelve months ahead."""
    data = table("drivers")
    seen = torch.nonzero(~data["y"].isnan()).flatten()

    def model(belt: Tensor, log_y: Tensor) -> None:
        s_walk, s_season = (pyro.sample(n, dist.HalfNormal(0.1)) for n in ("s_walk", "s_season"))
        noise = pyro.sample("noise", dist.HalfNormal(0.5))
        walk = pyro.sample("walk", gmrf.RandomWalk(s_walk, len(belt), order=2, level=10.0))
        season = pyro.sample("season", gmrf.Seasonal(s_season, len(belt), 12))
        law = pyro.sample("law", dist.Normal(0.0, 1.0))
        mean = walk + season + law * belt
        with pyro.plate("data", len(log_y)):
            pyro.sample("log_y", dist.Normal(mean[seen], noise), obs=log_y)

    return model, (data["belt"], data["y"][seen].log())


def districts() -> tuple[gmrf.Neighbours, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Simulated: 1,000 patients of 24 districts, a third of the times censored."""
    torch.manual_seed(2)
    graph, where, x = planar(24), torch.randint(24, (1000,)), torch.randn(1000)
    field = gmrf.ICAR(graph, 0.5).sample()
    time_ = dist.Weibull((1.0 - 0.5 * x - field[where]).exp(), torch.tensor(1.4)).sample()
    end = dist.Exponential(torch.tensor(0.15)).sample((1000,))
    return graph, where, (x, (time_ <= end).double(), torch.minimum(time_, end))


def weibull() -> Case:
    """Times of patients, a field of districts."""
    graph, where, data = districts()

    def model(x: Tensor, event: Tensor, time_: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        shape = pyro.sample("shape", dist.LogNormal(0.0, 1.0))
        field = pyro.sample("field", gmrf.ICAR(graph, scale))
        intercept, slope = (pyro.sample(n, dist.Normal(0.0, 5.0)) for n in ("intercept", "slope"))
        typical = (intercept + slope * x + field[where]).exp()
        with pyro.plate("data", len(time_)):
            pyro.sample("time", Censored(dist.Weibull(typical, shape), event=event), obs=time_)

    return model, data


def new_york(*, level: float | None = None) -> Case:
    """BYM2 on 1,921 regions, simulated in the size of New York's tracts."""
    torch.manual_seed(3)
    graph = planar(1921)
    E = 5.0 + 20.0 * torch.rand(1921)
    truth = 0.4 * gmrf.BYM2(graph, torch.tensor(1.0), torch.tensor(0.7)).sample()[0]
    y = torch.poisson(E * truth.exp())

    def model(E: Tensor, y: Tensor) -> None:
        scale, mixing = pyro.sample("scale", dist.HalfNormal(1.0)), pyro.sample("mixing", dist.Beta(1.0, 1.0))
        field = pyro.sample("field", gmrf.BYM2(graph, scale, mixing, level=level))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(E * (intercept + field[0]).exp()), obs=y)

    return model, (E, y)


def car(side: int = 100) -> Case:
    """Counts on a square, proper CAR, two hyperparameters."""
    torch.manual_seed(4)
    graph = gmrf.lattice(side, side)
    y = torch.poisson((1.0 + gmrf.CAR(graph, torch.tensor(0.5), torch.tensor(0.95)).sample()).exp())

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        coefficient = pyro.sample("coefficient", dist.Beta(2.0, 1.0))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
        x = pyro.sample("x", gmrf.CAR(graph, scale, coefficient))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson((intercept + x).exp()), obs=y)

    return model, (y,)


def matern() -> Case:
    """2,000 binomials on a mesh of 1,000 nodes."""
    torch.manual_seed(5)
    mesh = gmrf.Mesh.delaunay(torch.cat([torch.rand(960, 2), 1.3 * torch.rand(40, 2) - 0.15]))
    at, n = mesh.locate(0.2 + 0.6 * torch.rand(2000, 2)), torch.randint(1, 10, (2000,)).double()
    truth = at(gmrf.Matern(mesh, torch.tensor(1.0), torch.tensor(0.3)).sample())
    y = dist.Binomial(n, logits=truth).sample()

    def model(n: Tensor, y: Tensor) -> None:
        scale, range_ = pyro.sample("scale", gmrf.PCScale(2.0, 0.05)), pyro.sample("range", gmrf.PCRange(0.1, 0.05))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
        x = pyro.sample("x", gmrf.Matern(mesh, scale, range_))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Binomial(n, logits=intercept + at(x)), obs=y)

    return model, (n, y)


def ar(size: int = 500, order: int = 1) -> Case:
    """Counts over an autoregression."""
    torch.manual_seed(6)
    priors: dict[str, Any] = {"scale": dist.HalfNormal(1.0), "partial": dist.Uniform(-1.0, 1.0)}
    if order > 1:
        priors["partial"] = dist.Uniform(-torch.ones(order), torch.ones(order)).to_event(1)
    return counts_of(
        lambda scale, partial: gmrf.AR(scale, partial if order > 1 else partial.unsqueeze(-1), size), size, **priors
    )


def ou() -> Case:
    """Counts at uneven times."""
    torch.manual_seed(7)
    t = torch.rand(500).cumsum(0)
    priors = {"scale": dist.HalfNormal(1.0), "range": dist.LogNormal(2.0, 1.0)}
    return counts_of(lambda scale, range: gmrf.OrnsteinUhlenbeck(scale, range, t), 500, **priors)


def seasonal() -> Case:
    """Counts with a season of 12."""
    torch.manual_seed(8)
    return counts_of(lambda scale: gmrf.Seasonal(scale, 500, 12), 500, scale=dist.HalfNormal(0.3))


def on_graph(field: Any) -> Case:
    """Counts on a graph of 500 nodes."""
    torch.manual_seed(9)
    graph = planar(500)
    priors = {"scale": dist.HalfNormal(1.0), "mixing": dist.Beta(1.0, 1.0)}
    return counts_of(lambda scale, mixing: field(graph, scale, mixing), 500, **priors)


def kronecker() -> Case:
    """Counts over 25 times and 20 regions."""
    torch.manual_seed(10)
    graph, y = planar(20), torch.poisson((0.5 + 0.7 * wave(500)).exp()).view(25, 20)

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        coefficient = pyro.sample("coefficient", dist.Uniform(0.0, 1.0))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
        over_time = gmrf.AR1(scale, coefficient, 25)
        x = pyro.sample("x", gmrf.Kronecker(over_time, gmrf.ICAR(graph, torch.ones(()))))
        with pyro.plate("times", 25, dim=-2), pyro.plate("regions", 20, dim=-1):
            pyro.sample("y", dist.Poisson((intercept + x.view(25, 20)).exp()), obs=y)

    return model, (y,)


def barrier() -> Case:
    """Counts on a mesh with a barrier."""
    torch.manual_seed(11)
    points = torch.rand(500, 2)
    mesh = gmrf.Mesh.delaunay(points)
    middle = mesh.points[mesh.triangles].mean(1)
    wall = ((middle[:, 0] - 0.5).abs() < 0.05) & (middle[:, 1] < 0.7)
    mesh = gmrf.Mesh.delaunay(points, wall)
    priors = {"scale": gmrf.PCScale(2.0, 0.05), "range": gmrf.PCRange(0.1, 0.05)}
    return counts_of(lambda scale, range: gmrf.Matern(mesh, scale, range), 500, **priors)


def loop(size: int = 300, *, vectorised: bool = False) -> Case:
    """A walk of innovations in a Python loop."""
    torch.manual_seed(12)
    y = torch.poisson((1.0 + wave(size)).exp())

    def by_hand(y: Tensor) -> None:
        scale, x = pyro.sample("scale", dist.HalfNormal(1.0)), pyro.sample("x_0", dist.Normal(0.0, 5.0))
        for t in range(len(y)):
            x = x if t == 0 else pyro.sample(f"x_{t}", dist.Normal(x, scale))
            pyro.sample(f"y_{t}", dist.Poisson(x.exp()), obs=y[t])

    def at_once(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        x = pyro.sample("x", gmrf.RandomWalk(scale, len(y), level=5.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(x.exp()), obs=y)

    return at_once if vectorised else by_hand, (y,)


def patients() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Times to infections at catheters of 38 patients: who, covariates, whether each was seen, and when."""
    data = table("kidney")
    age = (data["age"] - data["age"].mean()) / data["age"].std()
    X = torch.stack([torch.ones_like(age), age, data["sex"] - 1.0], -1)
    return data["ID"].long() - 1, X, data["event"], data["time"]


def survival(family: str, eta: Tensor, shape: Tensor) -> Any:
    """Times of a family whose median, or near it, is ``exp(eta)``."""
    return dist.Weibull(eta.exp(), shape) if family == "weibull" else dist.LogNormal(eta, 1.0 / shape)


def kidney(family: str) -> Case:
    """A frailty for each patient, integrated by seven nodes."""
    who, *data = patients()

    def model(X: Tensor, event: Tensor, time_: Tensor) -> None:
        spread, shape = pyro.sample("spread", dist.HalfNormal(1.0)), pyro.sample("shape", dist.LogNormal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 5.0).to_event(1))
        with pyro.plate("patients", 38):
            frailty = pyro.sample("frailty", dist.Normal(0.0, spread))
        with pyro.plate("data", len(time_)):
            times = Censored(survival(family, X @ w + frailty[who], shape), event=event)
            pyro.sample("time", times, obs=time_)

    return model, tuple(data)


def by_patient(family: str, posterior: Any) -> float:
    """The largest difference of the five highest nodes from Laplace's evidence of each patient's integral on a grid."""
    (who, X, event, time_), nodes, gaps = patients(), posterior.integral.nodes, []
    joint, z = posterior.integral.outer_mode.state.problem.joint, torch.linspace(-8.0, 8.0, 801)
    for row in nodes.log_density.argsort(descending=True)[:5].tolist():
        theta = nodes.theta[row]
        own = {part.name: part.transform(theta[joint.hypers.slices[part.name]])[0] for part in joint.hypers}

        def log_density(w: Tensor, own: dict[str, Tensor] = own) -> Tensor:
            eta = (X @ w).unsqueeze(-1) + own["spread"] * z
            seen, times = (x.unsqueeze(-1).expand_as(eta) for x in (event, time_))
            each = Censored(survival(family, eta, own["shape"]), event=seen).log_prob(times)
            of_patient = torch.zeros(38, len(z)).index_add(0, who, each) + dist.Normal(0.0, 1.0).log_prob(z)
            total: Tensor = (of_patient.logsumexp(-1) + (z[1] - z[0]).log()).sum()
            return total + dist.Normal(0.0, 5.0).log_prob(w).sum()

        w = nodes.u[row, joint.latents.slices["w"]]
        for _ in range(8):
            slope, A = torch.func.grad(log_density)(w), -torch.func.hessian(log_density)(w)
            w = w + torch.linalg.solve(A, slope)
        exact = log_evidence(log_density(w), torch.logdet(A), 3) + joint.log_hyperprior(theta)
        gaps.append(abs(float(exact - nodes.log_density[row])))
    return max(gaps)


CASES: dict[str, Callable[[], Case]] = {
    "tokyo": tokyo,
    "tokyo plain": lambda: tokyo(cyclic=False),
    "germany": germany,
    "rents": rents,
    "drivers": drivers,
    "weibull": weibull,
    "kidney weibull": lambda: kidney("weibull"),
    "kidney normal": lambda: kidney("log-normal"),
    "new york": new_york,
    "new york level": lambda: new_york(level=5.0),
    "car 20": lambda: car(20),
    "car 100": car,
    "matern": matern,
    "ar2": lambda: ar(order=2),
    "ou": ou,
    "seasonal": seasonal,
    "leroux": lambda: on_graph(gmrf.Leroux),
    "sar": lambda: on_graph(gmrf.SAR),
    "kronecker": kronecker,
    "barrier": barrier,
    "loop": loop,
    "loop vectorised": lambda: loop(vectorised=True),
    "ar1 2000": lambda: ar(2000),
    "ar1 20000": lambda: ar(20000),
}


# Peers ----------------------------------------------------------------------------------------------------------------


def in_r(columns: dict[str, Tensor], code: str) -> list[float]:
    """Processor seconds of R's ``code`` on data ``d``, and the numbers that it leaves in ``said``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.csv"
        rows = zip(*(x.tolist() for x in columns.values()), strict=True)
        path.write_text("\n".join(",".join(map(str, row)) for row in (columns, *rows)))
        script = f"""suppressPackageStartupMessages({{library(mgcv); library(glmmTMB)}}); d <- read.csv("{path}")
            t <- system.time({{{code}}}); cat(sprintf("%.15g", c(sum(t[1:2]), said)))"""
        done = subprocess.run(["Rscript", "-e", script], capture_output=True, text=True, check=True)
    return [float(x) for x in done.stdout.split()]


def rents_by_mgcv(X: Tensor, rent: Tensor) -> str:
    """Splines for the walks, the same graph; restricted likelihood."""
    graph, (size, year, place), _, _ = flats()
    columns = {"rent": rent, "size": size, "year": year, "place": place}
    columns |= {f"x{j}": x for j, x in enumerate(X.unbind(-1))}
    ends = ",".join(str(int(end) + 1) for end in graph.edges.mT.flatten())
    code = f"""e <- matrix(c({ends}), ncol=2); nb <- split(c(e[,2], e[,1]), factor(c(e[,1], e[,2]), levels=1:380))
        names(nb) <- 0:379; d$place <- factor(d$place, levels=0:379)
        m <- bam(rent ~ {" + ".join(f"x{j}" for j in range(12))} + s(size, k=40) + s(year, k=30) +
        s(place, bs="mrf", xt=list(nb=nb)), data=d); said <- sqrt(m$sig2)"""
    seconds, noise = in_r(columns, code)
    return f"mgcv {seconds:.2f} s, noise {noise:.4f}"


def counts_by_glmmtmb(y: Tensor) -> str:
    """The likelihood's maximum in all that is not integrated, and how far Laplace here is from it there."""
    code = """d$t <- factor(1:nrow(d)); d$g <- factor(1)
        m <- glmmTMB(y ~ 1 + ar1(t + 0 | g), family=poisson, data=d); v <- VarCorr(m)$cond$g
        said <- c(logLik(m), attr(v, "stddev")[1], attr(v, "correlation")[1, 2], fixef(m)$cond)"""
    seconds, log_likelihood, sd, coefficient, intercept = in_r({"y": y.int()}, code)

    def model(y: Tensor) -> None:
        x = pyro.sample("x", gmrf.AR1(sd * (1.0 - coefficient**2) ** 0.5, coefficient, len(y)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson((intercept + x).exp()), obs=y)

    gap = abs(float(LaplaceEvidence(model).run(y).state.log_evidence) - log_likelihood)
    return f"glmmTMB {seconds:.2f} s, log likelihood {log_likelihood:.4f}, here {gap:.1e} from it"


PEERS: dict[str, Callable[..., str]] = {"rents": rents_by_mgcv, "ar1 2000": counts_by_glmmtmb}


# Fit and check --------------------------------------------------------------------------------------------------------


def gap(posterior: Any) -> float | None:
    """The largest difference of the five highest nodes from those by dense matrices, nats; None where too large."""
    nodes, problem = posterior.integral.nodes, posterior.integral.outer_mode.state.problem
    if nodes.u.shape[-1] > DENSE:
        return None
    density, gaps = AutogradDensity(problem.joint, None), []
    order = nodes.log_density.argsort(descending=True)[: len(nodes.u)]
    for row in order[:5].tolist():  # further out a dense factor loses digits: condition numbers grow to 1e14
        u, theta = nodes.u[row : row + 1], nodes.theta[row]
        for _ in range(2):
            value, slope = density.gradient(u, theta)
            tril = torch.linalg.cholesky(density.precision(u, theta).detach())
            u = u + torch.cholesky_solve(slope.unsqueeze(-1), tril).squeeze(-1)
        value, log_det = density.gradient(u, theta)[0], 2.0 * tril[0].diagonal().log().sum()
        exact = log_evidence(value[0], log_det, u.shape[-1]) + problem.joint.log_hyperprior(theta)
        gaps.append(abs(float(exact - nodes.log_density[row])))
    return max(gaps)


def rows_of(table: Any, site: str) -> list[dict[str, float]]:
    """The rows of a table that are elements of a site."""
    return [row for label, row in table.rows.items() if label == site or label.startswith(f"{site}[")]


def covered(table: Any, truth: dict[str, Tensor]) -> str:
    """How many elements of each site lie within their intervals of 90 %."""
    said = []
    for site, true in truth.items():
        rows, ends = rows_of(table, site), [c for c in table.columns if c.endswith("%")]
        low, high = (torch.tensor([row[c] for row in rows]).double() for c in ends)
        inside = (low < true.flatten()) & (true.flatten() < high)
        said.append(f"{site} {int(inside.sum())} of {len(rows)}")
    return "within 90 %: " + ", ".join(said)


def beside_nuts(table: Any, stored: Any) -> tuple[float, float, float]:
    """The largest differences of a table from stored moments: of means, deviations and medians."""
    off: dict[str, list[float]] = {"mean": [0.0], "sd": [0.0], "median": [0.0]}
    for site, known in stored["sites"].items():
        rows = rows_of(table, site)
        mean, sd, median = (torch.tensor([row[c] for row in rows]).double() for c in ("value", "sd", "median"))
        true = {name: torch.tensor(known[name]).double().flatten() for name in off.keys() & known.keys()}
        off["mean"].append(float(((mean - true["mean"]) / true["sd"]).abs().max()))
        off["sd"].append(float((sd / true["sd"] - 1.0).abs().max()))
        if "median" in true:
            off["median"].append(float((median / true["median"] - 1.0).abs().max()))
    return max(off["mean"]), max(off["sd"]), max(off["median"])


def peak() -> float:
    """MiB that the process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def fit(name: str, nuts: bool) -> None:
    """One case, in this process."""
    torch.set_default_dtype(torch.float64)
    model, args = CASES[name]()
    frailties, family = name.startswith("kidney"), name.split()[-1]
    before, start = peak(), time.process_time()
    posterior = LaplaceEvidence(model, nodes=7 if frailties else 1).run(*args)
    seconds = time.process_time() - start
    value, both = float(posterior.log_evidence), time.process_time() - start
    memory = peak() - before
    found = None
    if nuts:
        table = posterior.table()
        mean, sd, median = beside_nuts(table, json.loads(STORED.read_text())[name])
        print(f"{name:16} means {mean:.3f} sd, sds {sd:.1%}, medians {median:.1%}; {seconds:.2f} s")
        return print(f"{'':16} {covered(table, flats()[-1])}") if name == "rents" else None
    if frailties:
        found = by_patient(family, posterior)
    elif hasattr(posterior, "integral"):
        found = gap(posterior)
    check = "" if found is None else f"dense {found:.1e}"
    print(f"{name:16} {value:12.4f} {seconds:7.2f} + {both - seconds:5.2f} s {memory:6.0f} MiB  {check}")
    if name in PEERS and shutil.which("Rscript"):
        print(f"{'':16} {PEERS[name](*args)}")


def main() -> None:
    """All cases, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--nuts", action="store_true", help="beside stored chains")
    options = parser.parse_args()
    if options.here:
        torch.set_num_threads(1)
        return fit(options.cases[0], options.nuts)
    for name in options.cases or (json.loads(STORED.read_text()) if options.nuts else CASES):
        command = [sys.executable, __file__, "--here", name, *["--nuts"] * options.nuts]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{name:16} not done in {SECONDS} s")
            continue
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(done.stdout.rstrip() or f"{name:16} {last[:300]}", flush=True)


if __name__ == "__main__":
    main()
