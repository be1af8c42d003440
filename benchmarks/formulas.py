"""Examples of glmmTMB, lme4 and ordinal by formulas, one line each: log likelihoods and processor seconds of both.

    apt-get install r-cran-glmmtmb r-cran-lme4 r-cran-ordinal
    OMP_NUM_THREADS=1 python benchmarks/formulas.py [case ...]

The data come with R's packages: R writes them to a folder that is deleted afterwards, fits the same model, and says its
log likelihood.  Ours and theirs are maximum likelihood with Laplace's approximation; a difference above zero means that
ours is the higher maximum.
"""

import argparse
import subprocess
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pandas

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
suppressPackageStartupMessages(library({package})); data({data}); d <- {data}; d <- {prepare}
write.csv(d, "{path}", row.names = FALSE)
seconds <- system.time(m <- suppressWarnings({call}))[["user.self"]]
cat(format(as.numeric(logLik(m)), digits = 12), seconds, "\\n")
"""


def theirs(case: Case, path: Path) -> tuple[float, float]:
    """R's log likelihood and seconds; the data are written to the path."""
    text = SCRIPT.format(package=case.package, data=case.data, prepare=case.prepare, path=path, call=case.call)
    done = subprocess.run(["Rscript", "-e", text], capture_output=True, text=True, check=True)
    value, seconds = done.stdout.split()[-2:]
    return float(value), float(seconds)


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
        begun = time.process_time()
        model, data = mixed(case.formula, frame, family=case.family)
        found = float(LaplaceEvidence(model, stop=Stop(progress=False)).run(*data).log_evidence)
        took = time.process_time() - begun
        print(f"| {name} | {found:.4f} | {value:.4f} | {found - value:+.1e} | {took:.2f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
