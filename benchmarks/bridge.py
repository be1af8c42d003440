"""Log evidence of hierarchies with blocks integrated, beside bridge sampling between Pyro's NUTS and a normal.

    python -m benchmarks.bridge [NAME ...]

Six hierarchies of up to three marginalised sites, an item response model, and four spreads that are marginalised
together. NUTS runs on the form of a model that chains move in well, two chains from apart; the bridge is
``evidence_check.bridge_sampling`` on that form's own density, which knows nothing of Laplace. Rows are written to
benchmarks/results/bridge.md as they come, in place of those of the same name.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch

torch.set_default_dtype(torch.float64)  # before models make tensors

from pyro.infer import MCMC, NUTS
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.evidence_check import bridge_sampling
from pyro_evidence.program.log_joint import LogJoint
from tests.models_for_tests import long_runs
from tests.models_for_tests.sampled_scales import BINARY, COUNTS, beta_binomial, generated, item_response

TABLE = Path(__file__).parent / "results" / "bridge.md"
HEAD = """# Log evidence beside bridge sampling

Written by `python -m benchmarks.bridge`, which says what is measured. Nats; seconds of the processor, one thread.

| model | marginalised sites | nodes | log evidence | bridge +- s.e. | gap | fit, s | NUTS, s |
|---|---|---|---|---|---|---|---|
"""

CLINIC = torch.arange(150) % 25
TREATED = (torch.arange(150) // 75).double()


def intercepts(y: Tensor) -> None:
    """Binary rows of 25 clinics, whose levels differ."""
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with pyro.plate("clinics", 25):
        b = pyro.sample("b", dist.Normal(0.0, tau))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=w[0] + w[1] * TREATED + b[CLINIC]), obs=y)


def intercepts_in_noise(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with pyro.plate("clinics", 25):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=w[0] + w[1] * TREATED + tau * z[CLINIC]), obs=y)


def recovered() -> Tensor:
    eta = 0.3 - 0.8 * TREATED + 1.2 * generated(25, seed=21)[CLINIC]
    return (torch.rand(150, generator=torch.Generator().manual_seed(22)) < eta.sigmoid()).double()


SITE = torch.arange(80) % 10
TIME = (torch.arange(80) // 10).double() / 4.0 - 0.875


def counts_over_time(y: Tensor) -> None:
    """Counts at ten sites, levels and rates of growth with spreads of their own."""
    level, rate = pyro.sample("level", dist.Normal(0.0, 2.0)), pyro.sample("rate", dist.Normal(0.0, 1.0))
    spreads = [pyro.sample(name, dist.HalfNormal(1.0)) for name in ("of_levels", "of_rates")]
    with pyro.plate("sites", 10):
        a, b = pyro.sample("a", dist.Normal(0.0, spreads[0])), pyro.sample("b", dist.Normal(0.0, spreads[1]))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((level + rate * TIME + a[SITE] + b[SITE] * TIME).exp()), obs=y)


def counts_over_time_in_noise(y: Tensor) -> None:
    level, rate = pyro.sample("level", dist.Normal(0.0, 2.0)), pyro.sample("rate", dist.Normal(0.0, 1.0))
    spreads = [pyro.sample(name, dist.HalfNormal(1.0)) for name in ("of_levels", "of_rates")]
    with pyro.plate("sites", 10):
        za, zb = pyro.sample("za", dist.Normal(0.0, 1.0)), pyro.sample("zb", dist.Normal(0.0, 1.0))
    a, b = spreads[0] * za, spreads[1] * zb
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((level + rate * TIME + a[SITE] + b[SITE] * TIME).exp()), obs=y)


def seen() -> Tensor:
    a, b = 0.6 * generated(10, seed=31), 0.4 * generated(10, seed=32)
    return torch.poisson((0.7 + 0.5 * TIME + a[SITE] + b[SITE] * TIME).exp(), torch.Generator().manual_seed(33))


STUDIES = torch.tensor([0.3, -0.2, 1.9, 0.5, 0.1, 0.7, -0.4, 0.4, 0.9, 0.2, 2.6, 0.0])
ERRORS = torch.tensor([0.3, 0.25, 0.4, 0.2, 0.35, 0.3, 0.45, 0.15, 0.4, 0.3, 0.5, 0.25])


def studies(y: Tensor) -> None:
    """Effects of studies that may lie far out."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.2))
    with pyro.plate("studies", len(y)):
        theta = pyro.sample("theta", dist.StudentT(2.0 + nu, mu, tau))
        pyro.sample("y", dist.Normal(theta, ERRORS), obs=y)


def studies_in_noise(y: Tensor) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.2))
    with pyro.plate("studies", len(y)):
        eta = pyro.sample("eta", dist.StudentT(2.0 + nu, 0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * eta, ERRORS), obs=y)


SHARE, LINE = torch.arange(120) % 12, torch.arange(120) % 8


def four_spreads(y: Tensor) -> None:
    """Counts of twelve shops on eight weekdays and holidays, and noise of their own: four spreads."""
    level = pyro.sample("level", dist.Normal(0.0, 2.0))
    s = [pyro.sample(f"s{i}", dist.HalfNormal(1.0)) for i in range(4)]
    with pyro.plate("shops", 12):
        a, b = pyro.sample("a", dist.Normal(0.0, s[0])), pyro.sample("b", dist.Normal(0.0, s[1]))
    with pyro.plate("days", 8):
        c, d = pyro.sample("c", dist.Normal(0.0, s[2])), pyro.sample("d", dist.Normal(0.0, s[3]))
    x = torch.linspace(-1.0, 1.0, 120)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((level + a[SHARE] + b[SHARE] * x + c[LINE] + d[LINE] * x).exp()), obs=y)


def four_spreads_in_noise(y: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(0.0, 2.0))
    s = [pyro.sample(f"s{i}", dist.HalfNormal(1.0)) for i in range(4)]
    with pyro.plate("shops", 12):
        a, b = (s[i] * pyro.sample(f"z{i}", dist.Normal(0.0, 1.0)) for i in (0, 1))
    with pyro.plate("days", 8):
        c, d = (s[i] * pyro.sample(f"z{i}", dist.Normal(0.0, 1.0)) for i in (2, 3))
    x = torch.linspace(-1.0, 1.0, 120)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((level + a[SHARE] + b[SHARE] * x + c[LINE] + d[LINE] * x).exp()), obs=y)


def sold() -> Tensor:
    x, effects = torch.linspace(-1.0, 1.0, 120), [0.5 * generated(12, seed=41 + i) for i in range(4)]
    eta = 1.0 + effects[0][SHARE] + 0.6 * effects[1][SHARE] * x + effects[2][LINE] + effects[3][LINE] * x
    return torch.poisson(eta.exp(), torch.Generator().manual_seed(45))


Model = Callable[[Tensor], None]


@dataclass(frozen=True)
class Case:
    """A model with its data.

    :ivar sampled: the same density in a form that chains run on well; None: the same.
    :ivar nodes: of the blocks.
    """

    model: Model
    data: Callable[[], Tensor]
    sampled: Model | None = None
    nodes: int = 7
    settings: dict[str, Any] = field(default_factory=dict)


RUNS = long_runs.LONG_RUNS
CASES = {
    "batting averages": Case(long_runs.baseball, lambda: long_runs.HITS, long_runs.baseball_in_noise),
    "germination": Case(long_runs.germination, long_runs.germinated, long_runs.germination_in_noise),
    "beta-binomial": Case(beta_binomial, lambda: COUNTS),
    "clinics, binary": Case(intercepts, recovered, intercepts_in_noise),
    "counts over time": Case(counts_over_time, seen, counts_over_time_in_noise),
    "studies, Student-t": Case(studies, lambda: STUDIES, studies_in_noise),
    "item response, 7 outer": Case(item_response, lambda: BINARY),
    "four spreads": Case(four_spreads, sold, four_spreads_in_noise),
}


def chain(model: Model, data: Tensor, num_samples: int, seed: int) -> dict[str, Tensor]:
    """One chain of Pyro's NUTS."""
    pyro.set_rng_seed(seed)
    kernel = NUTS(model, jit_compile=True, ignore_jit_warnings=True, target_accept_prob=0.9)
    mcmc = MCMC(kernel, num_samples=num_samples, warmup_steps=250, disable_progbar=True)
    mcmc.run(data)
    draws: dict[str, Tensor] = mcmc.get_samples()
    return draws


def row(name: str, num_samples: int) -> str:
    """One line of the table."""
    case, start = CASES[name], time.process_time()
    data = case.data()
    engine = LaplaceEvidence(case.model, nodes=case.nodes, stop=Stop(progress=False), **case.settings)
    posterior = engine.run(data)
    fit, start = time.process_time() - start, time.process_time()
    sampled = case.sampled or case.model
    chains = [chain(sampled, data, num_samples, seed) for seed in range(2)]
    seconds = time.process_time() - start
    draws = {n: torch.stack([each[n] for each in chains]) for n in chains[0]}
    found = bridge_sampling(LogJoint(sampled, (data,)), draws)
    for doubt in found.doubts:
        print(f"{name}: {doubt}")
    value = float(posterior.log_evidence)
    bridge = f"{found.log_evidence:.3f} +- {found.standard_error:.3f}"
    gap = f"{value - found.log_evidence:+.3f}"
    marginalised = ", ".join(posterior.marginalised_sites)
    return f"| {name} | {marginalised} | {case.nodes} | {value:.3f} | {bridge} | {gap} | {fit:.1f} | {seconds:.0f} |"


def written(line: str) -> None:
    """Put a line in its place."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    kept = {each.split("|")[1].strip(): each for each in lines if each.startswith("| ") and "---" not in each}
    kept[line.split("|")[1].strip()] = line
    TABLE.write_text(HEAD + "\n".join(kept[n] for n in CASES if n in kept) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--draws", type=int, default=500, help="of each of two chains, after 250 of warm-up")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in asked.names or CASES:
        line = row(name, asked.draws)
        written(line)
        print(line, flush=True)


if __name__ == "__main__":
    main()
