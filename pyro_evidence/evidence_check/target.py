"""Integrand, proposal and result of the estimators of the evidence."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.laplace.tour import ActiveDensity
from pyro_evidence.numerics.linalg import relative_rounding
from pyro_evidence.numerics.newton import Density
from pyro_evidence.posterior.base import Posterior, varies
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import ROWS, rows_at_once
from pyro_evidence.structure.recognise import Structure, recognise


@dataclass(frozen=True)
class EvidenceEstimate:
    """A log evidence with its error and the reasons to doubt it.

    :ivar method: how it was estimated.
    :ivar log_evidence: log p(D | hyperparameters), nats, total, constants included, discrete sites summed
        out.
    :ivar standard_error: of ``log_evidence``, nats; never below the rounding of the arithmetic.
    :ivar diagnostics: the method's own numbers, by name.
    :ivar doubts: a sentence for each reason not to believe the two numbers; empty when there is none.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = LaplaceEvidence(regression(Linear())).run(X, t)
    >>> from pyro_evidence import importance_sampling
    >>> found = importance_sampling(posterior, num_samples=2000)
    >>> abs(found.log_evidence - float(posterior.log_evidence)) < 0.1, found.doubts
    (True, ())
    """

    method: str
    log_evidence: float
    standard_error: float
    diagnostics: dict[str, float]
    doubts: tuple[str, ...] = ()

    @property
    def reliable(self) -> bool:
        """Whether no diagnostic speaks against it."""
        return not self.doubts

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.diagnostics.items())
        head = f"log evidence = {self.log_evidence:.4f} +- {self.standard_error:.4f} nats"
        return "\n".join([f"{head}   ({self.method}; {numbers})", *self.doubts])


def rounding(log_evidence: float) -> float:
    """Size of the rounding errors in a log evidence, nats: a sum of about a thousand terms of its size."""
    return relative_rounding(torch.float64) * (1.0 + abs(log_evidence))


PER_COORDINATE = 4  # draws, fewer than which are too few for a covariance
Draws = Mapping[str, Tensor]
Doubt = tuple[bool, str]  # whether it holds, and a sentence
Source = Posterior | LogJoint


class Target(ActiveDensity):
    """The density with its gradient, and draws of chains in its coordinates."""

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint ``(S,)`` and its gradient ``(S, d)``; gradient 0 where the density is."""
        with without_validation():
            size = min(ROWS, rows_at_once(self.joint))
            parts = [self.density.gradient(self.embedded(part), self.theta) for part in x.split(size)]
        value, slope = (torch.cat(p) for p in zip(*parts, strict=True))
        bad = value.isnan() | value.isinf()
        return torch.where(bad, -torch.inf, value), torch.where(bad.unsqueeze(-1), 0.0, slope)[:, self.active]

    def coordinates(self, draws: Draws) -> Tensor:
        """Draws as ``MCMC.get_samples(group_by_chain=True)`` gives them, in active coordinates ``(C, T, d)``.

        Without the leading chain dim they count as one chain.

        :raises BadInput: when a site is missing or misshapen, or the draws are not finite.
        """
        parts = []
        for part in self.joint.latents:
            if part.name not in draws:
                raise BadInput(
                    f"the draws have no site '{part.name}', only {sorted(draws)}; expected draws of the same "
                    "model, for example NUTS(posterior.model)."
                )
            value = torch.as_tensor(draws[part.name]).detach()
            lead = value.dim() - len(part.shape)
            if value.numel() == 0:
                raise BadInput(f"site '{part.name}' has 0 draws, shape {tuple(value.shape)}; run the chains first.")
            if lead not in (1, 2) or value.shape[lead:] != part.shape:
                raise BadInput(
                    f"draws of site '{part.name}' have shape {tuple(value.shape)}; expected (chains, draws) or "
                    f"(draws,) followed by {tuple(part.shape)}."
                )
            value = value if lead == 2 else value.unsqueeze(0)
            parts.append(part.transform.inv(value).reshape(*value.shape[:2], -1).double())
        if len({p.shape[:2] for p in parts}) > 1:
            raise BadInput(
                "sites have different numbers of draws; expected those of one run: "
                f"{ {p.name: tuple(draws[p.name].shape) for p in self.joint.latents} }."
            )
        u = torch.cat(parts, -1)[..., self.active]
        if not bool(torch.isfinite(u).all()):
            raise BadInput(
                "some draws are not finite in unconstrained space: on the edge of their support, inf or "
                "nan. Drop them, or run in float64."
            )
        return u


def undefined(value: Tensor, where: str) -> Doubt:
    """The doubt of log densities ``(S,)`` that are nan, which the estimators take for a density of zero.

    :param where: what the rows are draws of.
    """
    num = int(value.isnan().sum())
    return (
        num > 0,
        f"the log joint density is nan at {num} of {len(value)} draws from {where}, which counted as density zero. "
        "Expected numbers, or -inf: look for the square root or the logarithm of what may be negative, and restrict "
        "that site's support.",
    )


def estimated(
    method: str, log_evidence: float | Tensor, error: float | Tensor, diagnostics: dict[str, float], *doubts: Doubt
) -> EvidenceEstimate:
    """The estimate with rounding added to its error, and with those of the doubts that hold."""
    value = float(log_evidence)
    standard_error = math.hypot(float(error), rounding(value))
    return EvidenceEstimate(method, value, standard_error, diagnostics, tuple(said for holds, said in doubts if holds))


def check_halves(target: Target, chains: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second half of each chain, ``(C, T/2, d)``.

    :raises BadInput: when the first halves are too short for a covariance, or do not move in every
        coordinate.
    """
    half = chains.shape[1] // 2
    first, second = chains[:, :half], chains[:, half : 2 * half]
    fewest = PER_COORDINATE * target.size + 10
    if chains.shape[0] * half < fewest:
        raise BadInput(
            f"{chains.shape[0]} chain(s) of {chains.shape[1]} draws; expected at least {2 * fewest} draws in "
            f"all for {target.size} unconstrained coordinates, half of them for a covariance. Run the chains longer."
        )
    moves = varies(first.transpose(0, 1)).all(0)
    if not bool(moves.all()):
        stuck = target.joint.latents.label(int(target.active.nonzero()[int(moves.long().argmin())]))
        raise BadInput(f"the draws do not vary in {stuck}; expected chains that move. Warm up longer or reparametrise.")
    return first, second


def laplace_posterior(of: Posterior) -> LaplacePosterior:
    """The posterior itself; for one on a few axes that of its own model, whose latent site is ``axes``.

    :raises BadInput: when every axis is pruned, or for what is no posterior of this package.
    """
    if not isinstance(of, Posterior):
        raise BadInput(f"a {type(of).__name__} has no density to check; expected what engine.run(...) returns.")
    if not of._num_directions:
        raise BadInput("every axis was pruned, so there is nothing to integrate; use its log_evidence, which is exact.")
    return of._laplace


def target_of(of: Source) -> Target:
    """The density of a posterior, at its hyperparameters; or of a log joint, at its starting ones."""
    if isinstance(of, LogJoint):
        active = torch.ones(of.latents.size, dtype=torch.bool, device=of.device)
        return Target(of, _batched(recognise(of)), of.initial_theta, active, of.initial_u)
    state = laplace_posterior(of).state
    problem = state.problem
    density = _batched(problem.structure) if bool(problem.active.all()) else problem.density
    return Target(problem.joint, density, state.theta, problem.active, state.u)


def _batched(structure: Structure) -> Density:
    """The fastest density for many rows: linear predictors pay only if the prior needs no run per row."""
    linear = structure.linear
    return linear if linear is not None and linear.gaussian else structure.density
