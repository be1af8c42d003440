"""What the estimators integrate: one density at fixed hyperparameters, over the coordinates not pruned."""

from collections.abc import Mapping
from dataclasses import dataclass

import pyro
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.ops.curvature import Density
from pyro_evidence.ops.precision import Dense, Precision
from pyro_evidence.ops.proposal import NormalMixture
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.posterior_axes import AxesPosterior
from pyro_evidence.program import LogJoint
from pyro_evidence.structure import Structure, recognise

Draws = Mapping[str, Tensor]
Posterior = LaplacePosterior | AxesPosterior
Source = LaplacePosterior | AxesPosterior | LogJoint
ROWS = 512  # evaluated at a time: keeps a (rows, N) table of predictors in the cache


@dataclass(frozen=True)
class Target:
    """``log p(D, w | hyperparameters)`` of rows ``(S, d)``: the active unconstrained coordinates."""

    joint: LogJoint
    density: Density
    theta: Tensor  # (T,)
    active: Tensor  # (D,) bool
    centre: Tensor  # (D,) where the inactive coordinates stay

    @property
    def size(self) -> int:
        """Number of active coordinates."""
        return int(self.active.sum())

    def embedded(self, x: Tensor) -> Tensor:
        """Rows ``(S, d)`` as rows ``(S, D)`` of all coordinates."""
        if self.size == len(self.active):
            return x
        u = self.centre.expand(len(x), -1).clone()
        u[:, self.active] = x
        return u

    def log_joint(self, x: Tensor) -> Tensor:
        """Log joint density, nats, Jacobian included, shape ``(S,)``; -inf outside the support, and where it is nan."""
        value = self.log_joint_or_nan(x)
        return torch.where(value.isnan(), -torch.inf, value)

    def log_joint_or_nan(self, x: Tensor) -> Tensor:
        """The same with nan where the model computes nan, for :func:`undefined` to count."""
        with torch.no_grad(), pyro.validation_enabled(False):
            return torch.cat([self.density.log_joint(self.embedded(part), self.theta) for part in x.split(ROWS)])

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint ``(S,)`` and its gradient ``(S, d)``; gradient 0 where the density is."""
        with pyro.validation_enabled(False):
            parts = [self.density.gradient(self.embedded(part), self.theta) for part in x.split(ROWS)]
        value, slope = (torch.cat(p) for p in zip(*parts, strict=True))
        bad = value.isnan() | value.isinf()
        return torch.where(bad, -torch.inf, value), torch.where(bad.unsqueeze(-1), 0.0, slope)[:, self.active]

    def coordinates(self, draws: Draws) -> Tensor:
        """Draws as ``MCMC.get_samples(group_by_chain=True)`` gives them, in active coordinates ``(C, T, d)``.

        Without the leading chain dim they count as one chain.

        :raises BadInput: when a site is missing or misshapen, or the draws are not finite.
        """
        parts = [self._site(draws, part.name) for part in self.joint.latents]
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

    def _site(self, draws: Draws, name: str) -> Tensor:
        part = next(p for p in self.joint.latents if p.name == name)
        if name not in draws:
            raise BadInput(
                f"the draws have no site '{name}', only {sorted(draws)}; expected draws of the same "
                "model, for example NUTS(posterior.model)."
            )
        value = torch.as_tensor(draws[name]).detach()
        lead = value.dim() - len(part.shape)
        if value.numel() == 0:
            raise BadInput(f"site '{name}' has 0 draws, shape {tuple(value.shape)}; run the chains first.")
        if lead not in (1, 2) or value.shape[lead:] != part.shape:
            raise BadInput(
                f"draws of site '{name}' have shape {tuple(value.shape)}; expected (chains, draws) or "
                f"(draws,) followed by {tuple(part.shape)}."
            )
        value = value if lead == 2 else value.unsqueeze(0)
        return part.transform.inv(value).reshape(*value.shape[:2], -1).double()


def undefined(value: Tensor, where: str) -> tuple[str, ...]:
    """A doubt where log densities ``(S,)`` are nan, which the estimators take for a density of zero.

    :param where: what the rows are draws of.
    """
    num = int(value.isnan().sum())
    if not num:
        return ()
    return (
        f"the log joint density is nan at {num} of {len(value)} draws from {where}, which counted as density zero. "
        "Expected numbers, or -inf: look for the square root or the logarithm of what may be negative, and restrict "
        "that site's support.",
    )


def check_halves(at: Target, chains: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second half of each chain, ``(C, T/2, d)``.

    :raises BadInput: when the first halves are too short for a covariance, or do not move in every
        coordinate.
    """
    half = chains.shape[1] // 2
    first, second = chains[:, :half], chains[:, half : 2 * half]
    if chains.shape[0] * half < 4 * at.size + 10:
        raise BadInput(
            f"{chains.shape[0]} chain(s) of {chains.shape[1]} draws; expected at least {8 * at.size + 20} "
            "draws in all "
            f"for {at.size} unconstrained coordinates, half of them for a covariance. Run the chains longer."
        )
    spread = first.std(1).amin(0)
    if not bool((spread > 1e-12 * (1.0 + first.abs().amax((0, 1)))).all()):
        stuck = at.joint.latents.label(int(at.active.nonzero()[int(spread.argmin())]))
        raise BadInput(
            f"the draws do not vary in {stuck}; expected chains that move. Warm up longer, or reparametrise."
        )
    return first, second


def laplace_posterior(of: Posterior) -> LaplacePosterior:
    """The posterior itself; for one on a few axes that of its own model, whose latent site is ``axes``.

    :raises BadInput: when every axis is pruned, or for what is no posterior of this package.
    """
    if isinstance(of, LaplacePosterior):
        return of
    if not isinstance(of, AxesPosterior):
        raise BadInput(
            f"a {type(of).__name__} has no density to check; expected a posterior as engine.run(...) returns."
        )
    if not len(of.state.x):
        raise BadInput("every axis was pruned, so there is nothing to integrate; use its log_evidence, which is exact.")
    return of._laplace


def target(of: Source) -> Target:
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


def precision_tril(precision: Precision, active: Tensor) -> Tensor:
    """Lower Cholesky factor of the active block of a posterior precision, shape ``(d, d)``."""
    if isinstance(precision, Dense):
        return precision.tril[0][active][:, active]
    return precision.variance[0][active].rsqrt().diag_embed()


def laplace_normal(posterior: Posterior) -> NormalMixture:
    """The posterior itself as a proposal."""
    state = laplace_posterior(posterior).state
    active = state.problem.active
    return NormalMixture(
        state.u.new_zeros(1),
        state.u[active].unsqueeze(0),
        precision_tril(state.precision, active).unsqueeze(0),
    )
