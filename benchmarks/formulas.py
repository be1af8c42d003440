"""Examples of glmmTMB, lme4, ordinal and mgcv by formulas, one line each: what both find, and processor seconds.

    apt-get install r-cran-glmmtmb r-cran-lme4 r-cran-ordinal r-cran-mgcv r-cran-mass
    OMP_NUM_THREADS=1 python benchmarks/formulas.py [case ...]

The data come with R's packages: R writes them to a folder that is deleted afterwards, fits the same model, and says its
log likelihood.  Ours and theirs are maximum likelihood with Laplace's approximation; a difference above zero means that
ours is the higher maximum.  Restricted likelihoods of smooths are known up to a constant, which differs; of mgcv's
examples the curves are compared instead: how far our linear predictor is from theirs at most, in units of its standard
deviation over the rows.  mgcv's tolerance is set to ours: with its own it is 4e-3 away from itself in "a surface".
"""

import argparse
import subprocess
import tempfile
import time
import warnings
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import pandas
import torch

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.models.formula import mixed


@dataclass(frozen=True)
class Case:
    """A fit: the package and data set of R, its call there, formula and family here."""

    package: str
    data: str
    call: str
    formula: str
    family: str = "gaussian"
    prepare: str = "d"  # what R makes of the data before both fit them

    @property
    def smooth(self) -> bool:
        """Whether curves are compared."""
        return self.package == "mgcv"


OWLS = "FoodTreatment * SexParent + offset(log(BroodSize)) + (1 | Nest)"
TICKS = "YEAR + scale(HEIGHT) + (1 | BROOD) + (1 | INDEX) + (1 | LOCATION)"
CASES = {
    "Salamanders, Poisson": Case(
        "glmmTMB",
        "Salamanders",
        "glmmTMB(count ~ spp * mined + (1 | site), d, poisson)",
        "count ~ spp * mined + (1 | site)",
        "poisson",
    ),
    "Salamanders, zi ~ spp": Case(
        "glmmTMB",
        "Salamanders",
        "glmmTMB(count ~ spp * mined + (1 | site), d, poisson, ziformula = ~spp)",
        "count ~ spp * mined + (1 | site); zi ~ spp",
        "poisson",
    ),
    "Salamanders, nbinom2, zi ~ spp + mined": Case(
        "glmmTMB",
        "Salamanders",
        "glmmTMB(count ~ spp + mined + (1 | site), d, nbinom2, ziformula = ~spp + mined)",
        "count ~ spp + mined + (1 | site); zi ~ spp + mined",
        "nbinom2",
    ),
    "Salamanders, hurdle": Case(
        "glmmTMB",
        "Salamanders",
        "glmmTMB(count ~ spp + mined + (1 | site), d, truncated_nbinom2, ziformula = ~spp + mined)",
        "count ~ spp + mined + (1 | site); hurdle ~ spp + mined",
        "nbinom2",
    ),
    "Salamanders, dispersion ~ DOY": Case(
        "glmmTMB",
        "Salamanders",
        "glmmTMB(count ~ spp + mined + (1 | site), d, nbinom2, dispformula = ~DOY)",
        "count ~ spp + mined + (1 | site); shape ~ DOY",
        "nbinom2",
    ),
    "Owls, zi": Case(
        "glmmTMB",
        "Owls",
        f"glmmTMB(SiblingNegotiation ~ {OWLS}, d, poisson, ziformula = ~1)",
        f"SiblingNegotiation ~ {OWLS}; zi ~ 1",
        "poisson",
    ),
    "Owls, nbinom1, zi": Case(
        "glmmTMB",
        "Owls",
        f"glmmTMB(SiblingNegotiation ~ {OWLS}, d, nbinom1, ziformula = ~1)",
        f"SiblingNegotiation ~ {OWLS}; zi ~ 1",
        "nbinom1",
    ),
    "sleepstudy, ar1": Case(
        "glmmTMB",
        "lme4::sleepstudy",
        "glmmTMB(Reaction ~ Days + ar1(factor(Days) + 0 | Subject), d)",
        "Reaction ~ Days + ar1(factor(Days) + 0 | Subject)",
        prepare="d[d$Days != 4, ]",  # a factor has no level without rows
    ),
    "Owls, cs": Case(
        "glmmTMB",
        "Owls",
        "glmmTMB(SiblingNegotiation ~ ArrivalTime + cs(FoodTreatment + 0 | Nest), d, nbinom2)",
        "SiblingNegotiation ~ ArrivalTime + cs(0 + FoodTreatment | Nest)",
        "nbinom2",
    ),
    "Owls, diag": Case(
        "glmmTMB",
        "Owls",
        "glmmTMB(SiblingNegotiation ~ ArrivalTime + diag(FoodTreatment + 0 | Nest), d, nbinom2)",
        "SiblingNegotiation ~ ArrivalTime + diag(0 + FoodTreatment | Nest)",
        "nbinom2",
    ),
    "four smooths": Case(
        "mgcv",
        "gamSim(1, 400, verbose = FALSE)",
        "gam(y ~ s(x0) + s(x1) + s(x2) + s(x3), data = d, method = 'REML', control = TIGHT)",
        "y ~ s(x0) + s(x1) + s(x2) + s(x3)",
    ),
    "a smooth for each level": Case(
        "mgcv",
        "gamSim(4, 400, verbose = FALSE)",
        "gam(y ~ fac + s(x2, by = fac) + s(x0), data = d, method = 'REML', control = TIGHT)",
        "y ~ fac + s(x2, by=fac) + s(x0)",
        prepare="transform(d, fac = factor(paste0('g', fac)))",
    ),
    "a surface": Case(
        "mgcv",
        "gamSim(2, 400, verbose = FALSE)$data",
        "gam(y ~ s(x, z), data = d, method = 'REML', control = TIGHT)",
        "y ~ s(x, z)",
    ),
    "counts": Case(
        "mgcv",
        "gamSim(1, 400, dist = 'poisson', scale = 0.2, verbose = FALSE)",
        "gam(y ~ s(x0) + s(x1) + s(x2), data = d, family = poisson, method = 'REML', control = TIGHT)",
        "y ~ s(x0) + s(x1) + s(x2)",
        "poisson",
    ),
    "motorcycles": Case(
        "mgcv",
        "MASS::mcycle",
        "gam(accel ~ s(times, k = 20, bs = 'cr'), data = d, method = 'REML', control = TIGHT)",
        "accel ~ s(times, k=20, bs='cr')",
    ),
    "sleepstudy": Case(
        "lme4",
        "sleepstudy",
        "lmer(Reaction ~ Days + (Days | Subject), d, REML = FALSE)",
        "Reaction ~ Days + (Days | Subject)",
    ),
    "cbpp": Case(
        "lme4",
        "cbpp",
        "glmer(cbind(incidence, size - incidence) ~ period + (1 | herd), d, binomial)",
        "cbind(incidence, size - incidence) ~ C(period) + (1 | herd)",
        "binomial",
    ),
    "wine": Case(
        "ordinal",
        "wine",
        "clmm(rating ~ temp + contact + (1 | judge), d)",
        "rating ~ temp + contact + (1 | judge)",
        "ordinal",
    ),
    "grouseticks": Case(
        "lme4",
        "grouseticks",
        f"glmmTMB::glmmTMB(TICKS ~ {TICKS}, d, poisson)",
        f"TICKS ~ C({TICKS.replace(' +', ') +', 1)}",
        "poisson",
        "transform(d, YEAR = factor(YEAR))",
    ),
}
SCRIPT = """
suppressPackageStartupMessages(library({package})); set.seed(1)
TIGHT <- list(newton = list(conv.tol = 1e-12), epsilon = 1e-12) # as precise as ours
d <- {data}; d <- {prepare}
seconds <- system.time(m <- suppressWarnings({call}))[["user.self"]]
{predict}
write.csv(d, "{path}", row.names = FALSE)
cat(format(as.numeric(logLik(m)), digits = 12), seconds, "\n")
"""


def theirs(case: Case, path: Path) -> tuple[float, float]:
    """R's log likelihood and seconds; the data are written to the path, and mgcv's linear predictor beside them."""
    predict = "d$theirs <- as.numeric(predict(m))" if case.smooth else ""
    text = SCRIPT.format(**vars(case), path=path, predict=predict)
    done = subprocess.run(["Rscript", "-e", text], capture_output=True, text=True, check=True)
    value, seconds = done.stdout.split()[-2:]
    return float(value), float(seconds)


def ours(case: Case, frame: pandas.DataFrame) -> tuple[float, float]:
    """Log likelihood, or the linear predictor furthest from mgcv's, and seconds."""
    begun = time.process_time()
    model, data = mixed(case.formula, frame, family=case.family, priors={"b": "flat"} if case.smooth else None)
    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)
    took = time.process_time() - begun
    if not case.smooth:
        return float(posterior.log_evidence), took
    given = dict(zip(signature(model).parameters, data, strict=True))
    columns = {name: Z for name, Z in given.items() if name.startswith("Z_")}
    eta = given["X"] @ posterior.mode["b"] + sum(Z @ posterior.mode[f"u{n[1:]}"] for n, Z in columns.items())
    known = torch.tensor(frame.theirs.to_numpy())
    return float((eta - known).abs().max() / known.std()), took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="case")
    warnings.simplefilter("ignore")
    print("| case | ours | theirs | difference | ours, s | theirs, s |\n|---|---|---|---|---|---|")
    for name in parser.parse_args().cases:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "data.csv"
            value, seconds = theirs(case, path)
            frame = pandas.read_csv(path)
        found, took = ours(case, frame)
        compared = f"{found:.1e} | - | -" if case.smooth else f"{found:.4f} | {value:.4f} | {found - value:+.1e}"
        print(f"| {name} | {compared} | {took:.2f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
