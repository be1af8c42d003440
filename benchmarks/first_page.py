"""The table and the picture of the README: eight schools under three engines, one program.

    python benchmarks/first_page.py

Seconds are of the processor, one thread, in this process, after a tiny fit that loads what torch loads once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import LocScaleReparam
from pyro.optim import Adam
from torch import Tensor

from pyro_evidence import LaplaceEvidence, NestedPosterior, Stop

PICTURE = Path(__file__).resolve().parents[1] / "docs/pictures/eight_schools.png"
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)
EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
DRAWS, STEPS = 1000, 1500


def schools(errors: Tensor, effects: Tensor | None = None) -> Tensor:
    """As it is written for NUTS."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(errors)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        return pyro.sample("effects", dist.Normal(theta, errors), obs=effects)


@dataclass(frozen=True)
class Row:
    """One engine: draws of tau, seconds, and a log evidence where there is one."""

    tau: Tensor
    seconds: float
    log_evidence: float


def timed(run: Callable[[], tuple[Tensor, float]]) -> Row:
    start = process_time()
    tau, log_evidence = run()
    return Row(tau.double(), process_time() - start, log_evidence)


def laplace() -> tuple[Tensor, float]:
    posterior = fitted()
    return posterior.get_samples(2000, seed=0)["tau"], float(posterior.log_evidence)


def fitted() -> NestedPosterior:
    return LaplaceEvidence(schools, stop=Stop(progress=False)).run(ERRORS, EFFECTS)


def nuts() -> tuple[Tensor, float]:
    non_centred = pyro.poutine.reparam(schools, {"theta": LocScaleReparam(0.0)})
    mcmc = MCMC(NUTS(non_centred), num_samples=DRAWS, warmup_steps=DRAWS, disable_progbar=True)
    mcmc.run(ERRORS, EFFECTS)
    return mcmc.get_samples()["tau"], math.nan


def svi() -> tuple[Tensor, float]:
    guide = AutoNormal(schools)
    engine = SVI(schools, guide, Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(STEPS):
        engine.step(ERRORS, EFFECTS)
    with torch.no_grad():
        draws = [guide(ERRORS)["tau"] for _ in range(2000)]
    return torch.stack(draws), math.nan


def table(rows: dict[str, Row]) -> str:
    lines = ["| engine | seconds | tau: median, 90 % | log evidence |", "|---|---|---|---|"]
    for name, row in rows.items():
        low, middle, high = row.tau.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        evidence = "" if math.isnan(row.log_evidence) else f"{row.log_evidence:.2f}"
        lines.append(f"| {name} | {row.seconds:.1f} | {middle:.1f}, {low:.1f} to {high:.1f} | {evidence} |")
    return "\n".join(lines)


def picture(rows: dict[str, Row]) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    found = fitted().marginal("tau")
    shown = (found.values < 20.0) & (found.values >= found.quantiles([0.005])[0])  # below, in log tau, is no picture
    axes.plot(found.values[shown], found.density[shown], color="C0", label="LaplaceEvidence")
    styles = ({"histtype": "stepfilled", "color": "0.75"}, {"histtype": "step", "color": "C1", "linestyle": "--"})
    for (name, row), style in zip(list(rows.items())[1:], styles, strict=True):
        axes.hist(row.tau, bins=40, range=(0.0, 20.0), density=True, label=name, linewidth=1.5, zorder=0, **style)
    axes.set_xlabel("tau, the spread between schools")
    axes.set_ylabel("posterior density")
    axes.legend()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    LaplaceEvidence(schools, stop=Stop(progress=False)).run(ERRORS[:2], EFFECTS[:2])
    rows = {"`LaplaceEvidence`": timed(laplace), "NUTS, non-centred": timed(nuts), "SVI, `AutoNormal`": timed(svi)}
    print(table(rows))
    picture({name.replace("`", ""): row for name, row in rows.items()})


if __name__ == "__main__":
    main()
