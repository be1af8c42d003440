"""Effects of the prior beside the data: power-scaling by refits, and data that the prior did not expect."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.compare.many import engine_of, run_many
from pyro_evidence.compare.sbc import simulations
from pyro_evidence.display import Shown, Table
from pyro_evidence.fitting.iterate import Stop
from pyro_evidence.fitting.process_state import own_random_numbers
from pyro_evidence.numerics.importance import interpolated
from pyro_evidence.posterior.base import NUM_DRAWS
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.program.constants import Powered, sites_with_fixed_priors
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import check_count, seed_of

STEP = 0.1  # of the power: a distance goes with it, and is then ten times what adapted nodes may move
QUIET = Stop(progress=False)
SENSITIVE = 0.05  # Kallioinen et al. (2024), section 3.2: the normal's mean then moves by .05 deviations a doubling


@dataclass(frozen=True)
class PowerScaling(Shown):
    """Moves of the posterior with a power of the prior, and of the likelihood.

    :ivar prior: site -> change of the posterior of each element by power-scaling the prior, per doubling of the power,
        in cumulative Jensen-Shannon distance.
    :ivar likelihood: the same by power-scaling the likelihood.

    >>> from pyro_evidence.compare import PowerScaling
    >>> PowerScaling({"mu": torch.tensor(0.2)}, {"mu": torch.tensor(0.01)}).table().notes
    ['mu: strong prior or weak likelihood']
    """

    prior: Mapping[str, Tensor]
    likelihood: Mapping[str, Tensor]

    def table(self) -> Table:
        """A row for each element, the most sensitive to the prior first."""
        rows, said = {}, []
        for site, moves in self.prior.items():
            pairs = zip(moves.reshape(-1).tolist(), self.likelihood[site].reshape(-1).tolist(), strict=True)
            for i, (prior, likelihood) in enumerate(pairs):
                name = f"{site}[{i}]" if moves.dim() else site
                rows[name] = {"prior": prior, "likelihood": likelihood}
                if prior >= SENSITIVE:
                    how = "prior-data conflict" if likelihood >= SENSITIVE else "strong prior or weak likelihood"
                    said.append(f"{name}: {how}")
        columns = {
            "prior": "change of the posterior for each doubling of the prior's power",
            "likelihood": "the same of the likelihood's power",
        }
        return Table(dict(sorted(rows.items(), key=lambda row: -row[1]["prior"])), columns, said, "site")


def power_scaling(posterior: LaplacePosterior) -> PowerScaling:
    """The sensitivity of each posterior marginal to powers of the prior and of the likelihood, by four refits.

    Kallioinen, Paananen, Buerkner and Vehtari (2024), eq. 8, where importance weights take the place of the refits:
    ArviZ's ``psens`` has these two numbers by weights.  The prior is that of sites whose prior depends on no other:
    what lies between, such as effects given their spread, is left as it is.  Maximised hyperparameters are held.

    :raises BadInput: where the data of the fit were not kept.

    >>> from pyro import distributions as dist, sample
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.compare import power_scaling
    >>> def heights(y):
    ...     mu = sample("mu", dist.Normal(0.0, 1.0))
    ...     sample("y", dist.Normal(mu, torch.ones(2)).to_event(1), obs=y)
    >>> power_scaling(LaplaceEvidence(heights).run(torch.tensor([8.0, 9.0]))).table().notes
    ['mu: prior-data conflict']
    """
    posterior._needs_data("power_scaling()")
    joint = posterior._joint
    here, engine = posterior.get_samples(NUM_DRAWS, seed=0), replace(engine_of(posterior, held=True), stop=QUIET)

    def change(sites: Sequence[str]) -> dict[str, Tensor]:
        total = {site: torch.zeros(here[site].shape[1:], dtype=torch.float64) for site in joint.latents.names}
        for power in (1.0 + STEP, 1.0 / (1.0 + STEP)):
            powered = replace(engine, model=Powered(power, sites)(engine.model))
            there = powered.run(*joint.args, **joint.kwargs).get_samples(NUM_DRAWS, seed=0)
            for site in total:
                pairs = zip(*(each[site].reshape(NUM_DRAWS, -1).mT for each in (here, there)), strict=True)
                total[site] += torch.stack([distance(p, q) for p, q in pairs]).reshape(total[site].shape)
        return {site: moved / (2.0 * math.log2(1.0 + STEP)) for site, moved in total.items()}

    with own_random_numbers():
        priors = sites_with_fixed_priors(joint, *posterior._mode_at)
    return PowerScaling(change(priors), change(joint.observed))


def distance(p: Tensor, q: Tensor) -> Tensor:
    """Cumulative Jensen-Shannon distance of two samples ``(S,)``, 0 to 1, the larger of both directions.

    Nguyen and Vreeken (2015), section 4; Kallioinen et al. (2024), eq. 7.  Distribution functions are linear between
    draws: the steps of two samples that are nearly the same would be further apart than these.
    """
    p, q = p.double().sort().values, q.double().sort().values
    x = torch.cat([p, q]).sort().values
    width = x.diff()
    levels = ((torch.arange(len(p)).to(p) + 0.5) / len(p)).unsqueeze(0)  # of each draw's step
    P, Q = (interpolated(draws.unsqueeze(0), levels, x[:-1].unsqueeze(0))[0] for draws in (p, q))

    def one_way(P: Tensor, Q: Tensor) -> Tensor:
        middle = 0.5 * (P + Q)
        gap = torch.special.xlogy(P, P) + torch.special.xlogy(Q, Q) - 2.0 * torch.special.xlogy(middle, middle)
        bound = (width * (P + Q)).sum() * math.log(2.0)
        far = (width * gap).sum().clamp(min=0.0)  # which rounding alone makes negative
        return torch.where(bound > 0.0, far / bound, 0.0).sqrt()  # a site that never varies does not move

    return torch.maximum(one_way(P, Q), one_way(1.0 - P, 1.0 - Q))


@dataclass(frozen=True)
class PriorDataConflict:
    """The place of the data among those that the prior makes.

    :ivar p_value: share of data sets from the prior predictive whose density there is no higher than that of the data.
    :ivar standard_error: of it.
    :ivar log_evidences: of the simulated data sets whose fits ended, nats, ``(S,)``.

    >>> from pyro_evidence.compare import PriorDataConflict
    >>> print(PriorDataConflict(0.25, 0.22, torch.tensor([-3.0, -2.0, -2.5, -4.0])))
    prior-data conflict: tail probability 0.25 +- 0.22
    """

    p_value: float
    standard_error: float
    log_evidences: Tensor

    def __str__(self) -> str:
        return f"prior-data conflict: tail probability {self.p_value:.3g} +- {self.standard_error:.2g}"


def prior_data_conflict(
    posterior: LaplacePosterior, num_simulations: int = 200, seed: int | None = 0
) -> PriorDataConflict:
    """The tail probability of the data under the prior predictive distribution, by its density.

    Box (1980), eq. 2: the probability that ``p(y)`` of data from the prior is as low as that of the data.  Each data
    set takes a fit, as one batch where models allow it.  Hyperparameters that were maximised are held.

    :param num_simulations: data sets.
    :raises BadInput: where the data of the fit were not kept, or the prior cannot be drawn from.

    >>> from pyro import distributions as dist, sample
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.compare import prior_data_conflict
    >>> def heights(y):
    ...     mu = sample("mu", dist.Normal(0.0, 1.0))
    ...     sample("y", dist.Normal(mu, torch.ones(2)).to_event(1), obs=y)
    >>> posterior = LaplaceEvidence(heights).run(torch.tensor([8.0, 9.0]))
    >>> prior_data_conflict(posterior, num_simulations=20).p_value
    0.0
    """
    posterior._needs_data("prior_data_conflict()")
    engine, before = engine_of(posterior, held=True), posterior._joint
    joint = LogJoint(engine.model, before.args, before.kwargs, maximise=())
    model, data, _ = simulations(joint, check_count("num_simulations", num_simulations), seed_of(seed))
    found = run_many(replace(engine, model=model, stop=QUIET), data).log_evidence
    found = found[found.isfinite()]
    p = float((found <= float(posterior.log_evidence)).double().mean())
    return PriorDataConflict(p, math.sqrt(max(p * (1.0 - p), 1.0 / len(found)) / len(found)), found)
