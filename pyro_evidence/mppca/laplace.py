"""Laplace's approximation of a mixture of probabilistic PCA about the orbits of its mode."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.curvature.choices import exact_hessian
from pyro_evidence.curvature.dense import Dense, Diagonal, Precision
from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.mppca import curvature, missing
from pyro_evidence.mppca import evidence as mppca_evidence
from pyro_evidence.mppca.expectation import Analysers
from pyro_evidence.mppca.recognise import MPPCAStructure, ScalarUnits
from pyro_evidence.mppca.streamed.data import Rows
from pyro_evidence.mppca.updates import Iterate
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.recognise import Structure


@dataclass(frozen=True)
class OrbitLaplace:
    """A state whose evidence is over the orbits of its mode.  Built by :func:`laplace_state`."""

    state: LaplaceState
    analysers: Analysers  # one row, the model's units
    refusal: str  # why there is no log evidence; empty where there is one
    literal: float  # log evidence by Husmeier (2000), eq. A.35, nats


def laplace_state(structure: MPPCAStructure, units: ScalarUnits, Y: Rows, it: Iterate) -> OrbitLaplace:
    """The approximation at the mode next to an iterate of one row, in the model's units.

    :param Y: data in the standard units of ``it``, which ``units`` describes.
    """
    analysers = curvature.canonical(curvature.find_mode(Y, it.analysers))
    params = structure.params(units.original(analysers))
    written = structure.prior_precision(params) * units.unit.square()  # what is pruned has the model's precision
    analysers = replace(
        analysers, alpha=torch.where(analysers.columns & analysers.active.unsqueeze(-1), analysers.alpha, written)
    )
    it = Iterate(analysers, it.ties, missing.e_step(Y, analysers), it.variance)
    precision, evidence, refusal = _laplace(Y, it)
    slope = curvature.slope(analysers, it.stats).reshape(1, -1)
    decrement = float((slope * precision.solve(slope)).sum())
    original, jacobian = units.original(analysers), units.log_jacobian(Y)
    joint = structure.fixed(params)
    problem = Problem(
        joint, Structure(None, None, None, AutogradDensity(joint, None)), exact_hessian, _unpruned(analysers)
    )
    log_joint = (
        mppca_evidence.log_joint(it)[0] - jacobian + _pruned_log_prior(original) - _loadings_jacobian(analysers, units)
    )
    numbers = (_scaled(precision, units.unit), decrement, evidence - jacobian, torch.zeros_like(evidence))
    state = LaplaceState(problem, joint.initial_theta, original.W.reshape(-1), log_joint, *numbers)
    return OrbitLaplace(state, original, refusal, float(mppca_evidence.literal(it)[0]) - jacobian)


def _unpruned(analysers: Analysers) -> Tensor:
    """Loadings that take part: all but pruned columns of components that are left, shape ``(D,)`` bool."""
    gone = ~analysers.columns & analysers.active.unsqueeze(-1)
    return ~gone.unsqueeze(-2).expand(analysers.W.shape).reshape(-1)


def _pruned_log_prior(analysers: Analysers) -> Tensor:
    """Log prior density of the loadings that are pruned, at zero, nats, shape ``()``."""
    gone = ~(analysers.columns & analysers.active.unsqueeze(-1))
    return 0.5 * analysers.W.shape[-2] * torch.where(gone, (analysers.alpha / math.tau).log(), 0.0).sum()


def _loadings_jacobian(analysers: Analysers, units: ScalarUnits) -> float:
    """What the density of the loadings gains in standard units, nats."""
    on = (analysers.columns & analysers.active.unsqueeze(-1)).sum() * analysers.W.shape[-2]
    return int(on) * math.log(float(units.unit))


def _scaled(precision: Precision, unit: Tensor) -> Precision:
    """The precision of loadings in the caller's units."""
    if isinstance(precision, Dense):
        return Dense(precision.tril / unit)
    return Diagonal(precision.adjoint.reciprocal() / unit.square())


def _laplace(Y: Rows, it: Iterate) -> tuple[Precision, Tensor, str]:
    """Curvature, log evidence, and why there is none."""
    refusal = vanishing(it)
    if it.analysers.W.numel() <= curvature.full_size(Y):
        try:
            split = curvature.gauge(curvature.precision(Y, it.analysers), it.analysers)
            found = curvature.log_evidence(mppca_evidence.log_joint(it)[0], split, it.analysers)
            return Dense(split.tril.unsqueeze(0)), torch.where(_flag(refusal), torch.nan, found), refusal
        except ArithmeticError as error:
            refusal = refusal or f"the loadings are not at a mode: {error}"
    found = torch.where(_flag(refusal), torch.nan, mppca_evidence.block(it)[0])
    return Diagonal(mppca_evidence.diagonal(it)), found, refusal


def _flag(reason: str) -> Tensor:
    return torch.tensor(bool(reason))


def vanishing(it: Iterate) -> str:
    """Why the orbit formula does not hold: a column no longer than it is uncertain; empty where it holds."""
    sizes, on = mppca_evidence.relative_lengths(it)
    short = on & (sizes < 1.0)
    if not bool(short.any()):
        return ""
    where = [int(k) for k in short[0].any(-1).nonzero().flatten()]
    return (
        f"component(s) {where} have columns of loadings that are as short as they are uncertain "
        f"(length over standard deviation {float(sizes[short].min()):.2g}; expected above 1): such a column has no "
        f"orbit, and Laplace's approximation no meaning. Offer fewer latents, or let the evidence leave columns out by "
        f"alpha=PerColumn()."
    )
