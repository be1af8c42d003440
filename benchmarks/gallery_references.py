"""Means, standard deviations and integrals of the gallery's programs, by Pyro's own density and no engine of ours.

    OMP_NUM_THREADS=1 python -m benchmarks.gallery_references [NAME ...]

writes tests/oracles/gallery.json, by program and site.  Up to three unconstrained numbers are integrated on a grid in
the coordinates of a mode's curvature (``log_evidence`` is the log of that integral); more are sampled by Hamiltonian
Monte Carlo, a hundred chains at once under ``vmap``, with the effective draws and the R-hat of every element.  The
density is that of ``pyro.infer.mcmc.util.initialize_model``, the one NUTS samples, in double precision; where a program
has discrete sites, that of its ``summed`` form.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pyro
import pyro.distributions as dist
import torch

torch.set_default_dtype(torch.float64)  # before models make tensors

from pyro import poutine
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor
from torch.distributions import biject_to

from tests.gallery.programs import (
    flat_priors,
    further_models,
    numpyro_examples,
    pymc_examples,
    pyro_examples,
    rethinking,
)
from tests.gallery.programs.program import Program

STORED = Path(__file__).resolve().parents[1] / "tests" / "oracles" / "gallery.json"
TABLES = (pyro_examples, numpyro_examples, rethinking, pymc_examples, flat_priors, further_models)
CHAINS, WARM_UP, DRAWS = 100, 150, 80
MIXED = 1.015  # R-hat
Batch = Callable[[Tensor], tuple[Tensor, Tensor]]


def some_value(fn: dist.ImproperUniform, sample_shape: Sequence[int] = ()) -> Tensor:
    """A value in the support of a flat prior, where Pyro asks for shapes; it has no draws."""
    transform = biject_to(fn.support)
    return transform(torch.randn(transform.inverse_shape(torch.Size(sample_shape) + fn.shape())))


class Density:
    """The unconstrained log density of a program, and its recorded values."""

    def __init__(self, program: Program) -> None:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        pyro.enable_validation(False)
        self.model, self.args = program.summed or program.model, program.data()
        with mock.patch.object(dist.ImproperUniform, "sample", some_value):
            self.start, self.potential, self.transforms, _ = initialize_model(self.model, self.args)
        self.size = sum(v.numel() for v in self.start.values())

    def values(self, u: Tensor) -> dict[str, Tensor]:
        parts = u.split([v.numel() for v in self.start.values()], -1)
        return {n: p.reshape(v.shape) for (n, v), p in zip(self.start.items(), parts, strict=True)}

    def log_density(self, u: Tensor) -> Tensor:
        return -self.potential(self.values(u)).reshape(())

    def recorded(self, u: Tensor) -> dict[str, Tensor]:
        """Values of sites and of deterministic sites."""
        sites = {n: self.transforms[n].inv(v) for n, v in self.values(u).items()}
        nodes = poutine.trace(poutine.condition(self.model, sites)).get_trace(*self.args).nodes
        made = {n: s["value"] for n, s in nodes.items() if s.get("infer", {}).get("_deterministic")}
        return sites | made

    def starts(self, num: int) -> tuple[Tensor, Tensor]:
        """Points around a mode, half as wide again as its curvature says, and a root of the inverse curvature.

        Newton's method with the absolute eigenvalues, so that it climbs from anywhere.
        """
        generator = torch.Generator().manual_seed(0)
        tries = 2.0 * torch.rand(20, self.size, generator=generator) - 1.0
        heights = torch.stack([self.log_density(u) for u in tries]).nan_to_num(-math.inf)
        u, height = tries[heights.argmax()], heights.max()
        for _ in range(200):
            slope, curvature = torch.func.grad(self.log_density)(u), torch.func.hessian(self.log_density)(u)
            eigenvalues, axes = torch.linalg.eigh(curvature)
            root = axes / eigenvalues.abs().clamp(min=1e-8).sqrt()
            step = root @ (root.mT @ slope)
            taken = next((s for s in 0.5 ** torch.arange(40.0) if self.log_density(u + s * step) > height), 0.0)
            u, before = u + taken * step, height
            height = self.log_density(u)
            if height - before < 1e-9:
                break
        return u + 1.5 * torch.randn(num, self.size, generator=generator) @ root.mT, root

    def starts_in_a_box(self, batch: Batch, num: int) -> tuple[Tensor, Tensor]:
        """Points within one of the origin that have a density, and a small metric."""
        tries = 2.0 * torch.rand(10 * num, self.size, generator=torch.Generator().manual_seed(0)) - 1.0
        usable = batch(tries)[0].isfinite()
        return tries[usable][:num], 0.2 * torch.eye(self.size)


def whitening(draws: Tensor) -> Tensor:
    """Cholesky factor of the covariance of draws, which have the prior weight of five draws of their own variances."""
    covariance = draws.mT.cov().reshape(draws.shape[-1], draws.shape[-1])
    weight = len(draws) / (len(draws) + 5.0)
    return torch.linalg.cholesky(weight * covariance + (1.0 - weight) * covariance.diagonal().diag_embed())


def chains(batch: Batch, x: Tensor, tril: Tensor, warm_up: int, draws: int) -> Tensor:
    """Draws ``(C, S, D)`` of Hamiltonian Monte Carlo with trajectories of random length, Neal (2011).

    The step is adapted during warm-up to four acceptances in five, the metric to the covariance over all chains.

    :param tril: a root of the covariance to begin with.
    """
    generator = torch.Generator().manual_seed(1)
    log_step, kept = math.log(0.5), []
    value, slope = batch(x)
    recent: list[Tensor] = []
    for i in range(warm_up + draws):
        step = math.exp(log_step)
        length = int(torch.randint(1, min(32, math.ceil(2.5 / step)) + 1, (), generator=generator))
        momentum = torch.randn(x.shape, generator=generator)
        place, height, uphill, moving = x, value, slope, momentum
        for _ in range(length):
            moving = moving + 0.5 * step * uphill @ tril
            place = place + step * moving @ tril.mT
            height, uphill = batch(place)
            moving = moving + 0.5 * step * uphill @ tril
        gain = height - value + 0.5 * (momentum.square() - moving.square()).sum(-1)
        accepted = gain.exp().clamp(max=1.0).nan_to_num(0.0)
        taken = torch.rand(len(x), generator=generator) < accepted
        x, slope = (torch.where(taken.unsqueeze(-1), a, b) for a, b in ((place, x), (uphill, slope)))
        value = torch.where(taken, height, value)
        recent.append(x)
        if i < warm_up:
            log_step += (float(accepted.mean()) - 0.8) / math.sqrt(1.0 + i % 50)
            if i % 50 == 49 and i + 1 < warm_up:  # the last fifty are for the step alone
                tril, recent = whitening(torch.cat(recent[25:])), []
                log_step = math.log(0.5)
        else:
            kept.append(x)
    return torch.stack(kept, 1)


def on_a_grid(batch: Batch, draws: Tensor, num: int) -> tuple[float, Tensor, Tensor]:
    """Log integral, points and their weights by the trapezoid rule over eight (or more) deviations of the draws.

    :raises ArithmeticError: where there is mass at the edge.
    """
    centre, tril = draws.mean(0), whitening(draws)
    for reach in (8.0, 16.0, 32.0):
        axis = torch.linspace(-reach, reach, int(num * reach / 8.0))
        z = torch.cartesian_prod(*[axis] * len(centre)).reshape(-1, len(centre))
        points = centre + z @ tril.mT
        heights = torch.cat([batch(part)[0] for part in points.split(2000)]).nan_to_num(-math.inf)
        weights = heights.softmax(0)
        edge = weights[(z.abs() >= reach - 1e-6).any(-1)].sum()
        if edge < 1e-6:
            log_cell = float(tril.diagonal().log().sum()) + len(centre) * math.log(float(axis[1] - axis[0]))
            return float(heights.logsumexp(0)) + log_cell, points, weights
    raise ArithmeticError(f"a share of {float(edge):.1e} of the mass lies at the edge of the grid")


def reference(program: Program) -> dict[str, Any]:
    """What is stored of one program."""
    start = time.process_time()
    density = Density(program)
    both = torch.func.vmap(torch.func.grad_and_value(density.log_density))

    def batch(u: Tensor) -> tuple[Tensor, Tensor]:
        slope, value = both(u)
        return value.nan_to_num(-math.inf), slope.nan_to_num(0.0)

    record = torch.func.vmap(density.recorded)
    try:
        how, sites = by_quadrature(density, batch, record)
    except ArithmeticError:  # too many numbers, or a mode that is narrow beside the mass
        how, sites = by_chains(density, batch, record)
    return how | {"seconds": round(time.process_time() - start, 1), "sites": sites}


def by_quadrature(density: Density, batch: Batch, record: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """How, with the log integral, and moments of all sites.

    :raises ArithmeticError: where there are more than three numbers, or where the grid is too small.
    """
    if density.size > 3:
        raise ArithmeticError(f"{density.size} numbers are too many for a grid")
    if density.size == 1:  # which may have two modes
        around = chains(batch, *density.starts_in_a_box(batch, CHAINS), 100, 20).flatten(0, 1)
    else:
        around, _ = density.starts(CHAINS)
    log_evidence, points, weights = on_a_grid(batch, around, (0, 40_001, 101, 121)[density.size])
    sites = {n: moments(v.reshape(len(v), -1), weights) for n, v in record(points).items()}
    return {"how": "quadrature", "log_evidence": log_evidence}, sites


def by_chains(density: Density, batch: Batch, record: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """How, and moments of all sites."""
    found = chains(batch, *density.starts(CHAINS), WARM_UP, DRAWS)
    if not bool((split_gelman_rubin(found) < MIXED).all()):  # a mode far from the mass, as of spreads
        found = chains(batch, *density.starts_in_a_box(batch, CHAINS), 4 * WARM_UP, 4 * DRAWS)
    sites = {n: of_chains(v.reshape(*found.shape[:2], -1)) for n, v in record(found.flatten(0, 1)).items()}
    return {"how": f"Hamiltonian Monte Carlo, {CHAINS} chains of {found.shape[1]} draws"}, sites


def rounded(values: Tensor) -> list[float]:
    return [float(f"{v:.6g}") for v in values.tolist()]


def moments(values: Tensor, weights: Tensor) -> dict[str, list[float]]:
    mean = weights @ values
    return {"mean": rounded(mean), "sd": rounded((weights @ (values - mean).square()).sqrt())}


def of_chains(draws: Tensor) -> dict[str, list[float]]:
    pooled = draws.flatten(0, 1)
    constant = pooled.std(0) == 0.0  # elements of a Cholesky factor, for instance
    effective = torch.where(constant, torch.inf, effective_sample_size(draws))
    r_hat = torch.where(constant, 1.0, split_gelman_rubin(draws))
    return {
        "mean": rounded(pooled.mean(0)),
        "sd": rounded(pooled.std(0)),
        "n_eff": [round(v) if v < math.inf else 0 for v in effective.tolist()],
        "r_hat": [round(v, 3) for v in r_hat.tolist()],
    }


def main() -> None:
    programs = {n: p for table in TABLES for n, p in table.PROGRAMS.items() if p.compared and not p.refused}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of programs; by default all that have no reference yet")
    asked = parser.parse_args()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    for name in asked.names or [n for n in programs if n not in stored and not programs[n].slow]:
        try:
            entry = reference(programs[name])
        except Exception as error:  # the others are still to be made
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        stored[name] = entry
        STORED.write_text(
            json.dumps(dict(sorted(stored.items())), indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n"
        )
        worst = max((v for s in entry["sites"].values() for v in s.get("r_hat", [1.0])), default=1.0)
        least = min((v for s in entry["sites"].values() for v in s.get("n_eff", [])), default=0)
        print(f"{name}: {entry['how']}, {entry['seconds']} s, R-hat {worst}, effective {least}", flush=True)


if __name__ == "__main__":
    main()
