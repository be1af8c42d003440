"""Draws, importance ratios and well-determined parameters of loadings whose posterior is an orbit, not a point.

Loadings near the orbit are ``(mode + d) Q``, with ``d`` orthogonal to the directions in which the mode turns and Q a
rotation.  Of the 2^q such pairs for one and the same matrix, ``mode' (mode + d)`` is positive definite in one.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.mixture.data import Units
from pyro_evidence.mixture.recognise import held_at
from pyro_evidence.mppca import curvature, evidence, expectation
from pyro_evidence.mppca.curvature import shares_precision, turns
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.recognise import MPPCAStructure
from pyro_evidence.mppca.updates import Iterate
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.precision.dense import Dense, Diagonal, Precision
from pyro_evidence.settings import seeded
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.recognise import Structure

GRID = 2001  # angles at which the density of a turn is tabulated
ROWS = 32  # draws whose densities are found together


def _basis(analysers: FactorAnalysers) -> Tensor:
    """Orthonormal directions in which the mode turns, shape ``(D, P)``."""
    return torch.linalg.qr(turns(analysers)).Q


def across(d: Tensor, analysers: FactorAnalysers) -> Tensor:
    """Displacements ``(S, D)`` without their part along the orbit."""
    V = _basis(analysers)
    return d - (d @ V) @ V.mT


def well_determined_columns(precision: Precision, analysers: FactorAnalysers) -> Tensor:
    """Number of well-determined loadings of each column, ``(K, q)``; turning is none of them."""
    variance = precision.variance[0]
    own = torch.ones_like(variance)
    if isinstance(precision, Dense):
        V = _basis(analysers)
        stand_in = torch.cholesky_solve(V, precision.tril[0])
        variance = variance - (V * stand_in).sum(-1)
        own = own - V.square().sum(-1)
    prior = analysers.alpha[0].unsqueeze(-2).expand(analysers.W.shape[1:]).reshape(-1)
    gamma = (own - prior * variance).clamp(0.0, 1.0).reshape(analysers.W.shape[1:]).sum(-2)
    return torch.where(analysers.columns[0] & analysers.active[0].unsqueeze(-1), gamma, 0.0)


def turned(W: Tensor, analysers: FactorAnalysers, generator: torch.Generator) -> Tensor:
    """Draws ``(S, K, m, q)`` near the mode, spread over their orbits.

    Uniformly for columns of one precision; for others by signs and pairwise angles of density exp(-kappa sin^2).
    """
    K, q = analysers.W.shape[1], analysers.W.shape[-1]
    white = torch.randn(len(W), K, q, q, generator=generator, dtype=torch.float64).to(analysers.W)
    uniform, R = torch.linalg.qr(white)
    uniform = uniform * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    angle = torch.linspace(-0.5 * math.pi, 0.5 * math.pi, GRID).to(analysers.W)
    kappa, on = evidence.held_by_prior(analysers.alpha[0], analysers.W[0].square().sum(-2)), analysers.columns[0]
    signs = torch.randint(2, (len(W), K, q), generator=generator).to(analysers.W) * 2.0 - 1.0
    held = torch.diag_embed(signs)
    for a, b in torch.combinations(torch.arange(q), 2).tolist():  # rotations do not commute
        table = (-kappa[:, a, b, None] * angle.sin().square()).exp().cumsum(-1)
        level = torch.rand(K, len(W), generator=generator, dtype=torch.float64).to(analysers.W) * table[:, -1:]
        theta = angle[torch.searchsorted(table, level).clamp(max=GRID - 1)].mT * (on[:, a] & on[:, b])
        left, right = held[..., a].clone(), held[..., b].clone()
        c, s = theta.cos().unsqueeze(-1), theta.sin().unsqueeze(-1)
        held[..., a], held[..., b] = c * left + s * right, c * right - s * left
    Q = torch.where(shares_precision(analysers)[0, :, None, None], uniform, held)
    return torch.where(analysers.active[0][:, None, None], W @ Q, W)


def log_weights(Y: Tensor, analysers: FactorAnalysers, precision: Dense, num_samples: int, seed: int) -> Tensor:
    """Log ratios of the exact density to the Gaussian across the orbit, orbits integrated in both, nats, ``(S,)``.

    Exact where columns share a precision, or are two; otherwise the orbit's integral is that of ``log_orbit``.
    """
    K, m, q = analysers.W.shape[1:]
    V, tril = _basis(analysers), precision.tril[0]
    generator = seeded(seed)
    white = torch.randn(num_samples, K * m * q, generator=generator, dtype=torch.float64).to(analysers.W)
    d = torch.linalg.solve_triangular(tril.mT, white.mT, upper=True).mT
    d = across(d, analysers)
    on = analysers.on[0].unsqueeze(-2).expand(K, m, q).reshape(-1)
    d = torch.where(on, d, 0.0)
    quadratic = (d @ tril).square().sum(-1)
    log_det = 2.0 * tril.diagonal().log().sum() - torch.linalg.slogdet(V.mT @ tril @ tril.mT @ V).logabsdet
    left_out = torch.where(on, 0.0, analysers.alpha[0].unsqueeze(-2).expand(K, m, q).reshape(-1).log()).sum()
    log_q = 0.5 * (log_det - left_out - quadratic - (on.sum() - V.shape[1]) * math.log(math.tau))
    found = []  # log p(D, W) integrated over the orbits through these rows, times the measure across them
    for W in (analysers.W + d.reshape(num_samples, K, m, q)).split(ROWS):
        num = len(W)
        rows = replace(analysers.rebuilt(lambda _, x, num=num: x.expand(num, *x.shape[1:])), W=W)  # type: ignore[misc]
        log_lik = expectation.log_joint(Y, rows).logsumexp(-1).sum(-1)
        measure, inside = _measure(analysers, W)
        found.append(torch.where(inside, log_lik + measure + _orbits(analysers, W), -torch.inf))
    return torch.cat(found) - log_q


def _measure(analysers: FactorAnalysers, W: Tensor) -> tuple[Tensor, Tensor]:
    """Log density of the orbits' measure across them, ``(S,)``, and whether this is the one of 2^q copies that counts.

    ``prod_(a<b) (b_a + b_b)`` with the eigenvalues b of ``mode' W``, over the same product's root at the mode.
    """
    q, num = W.shape[-1], analysers.on[0].sum(-1)
    values = torch.linalg.eigvalsh(0.5 * (analysers.W.mT @ W + W.mT @ analysers.W))
    on = torch.arange(q, device=W.device) >= q - num.unsqueeze(-1)  # the last ones; pruned columns have zeros
    inside = (torch.where(on, values, 1.0) > 1e-14 * values[..., -1:].abs()).all(-1).all(-1)
    pairs = evidence.pairs_of(on) & inside[:, None, None, None]
    sums = torch.where(pairs, values.unsqueeze(-1) + values.unsqueeze(-2), 1.0)
    T = turns(analysers)
    return sums.log().sum((-3, -2, -1)) - 0.5 * torch.linalg.slogdet(T.mT @ T).logabsdet, inside


def _orbits(analysers: FactorAnalysers, W: Tensor) -> Tensor:
    """Log prior density integrated over the orbits through ``W``, nats, ``(S,)``."""
    num = analysers.on[0].sum(-1)
    on = torch.arange(W.shape[-1], device=W.device) < num.unsqueeze(-1)  # the first ones
    norms = torch.where(on, torch.linalg.eigvalsh(W.mT @ W).flip(-1), 0.0)
    place = torch.where(analysers.on[0], analysers.alpha[0], torch.inf)
    alpha = torch.where(on, place.sort(-1).values, 1.0)  # the longest column goes with the least precision
    kappa = evidence.held_by_prior(alpha, norms)
    orbit = evidence.log_orbit(kappa, evidence.pairs_of(on).expand(kappa.shape), num.expand(len(W), -1))
    each = analysers.W.shape[-2] * (alpha / math.tau).log() - alpha * norms
    return (orbit + 0.5 * torch.where(on, each, 0.0).sum(-1)).sum(-1)


def laplace_state(
    structure: MPPCAStructure, units: Units, Y: Observations, it: Iterate
) -> tuple[LaplaceState, FactorAnalysers, str]:
    """The approximation at the mode next to an iterate of one row, in the model's units; evidence is over its orbits.

    :param Y: data in the standard units of ``it``, which ``units`` describes.
    :return: with the analysers, one row, and why there is no log evidence, empty where there is one.
    """
    analysers = curvature.canonical(curvature.find_mode(Y, it.analysers))
    joint = held_at(structure.joint, structure.params(units.original(analysers)))
    written = structure.alpha.read(structure.theta(units.original(analysers)))  # what is pruned has the model's
    analysers = replace(analysers, alpha=torch.where(analysers.on, analysers.alpha, written * units.unit.square()))
    it = Iterate(analysers, it.ties, expectation.e_step_of_all(Y, analysers), it.variance)
    precision, log_evidence, refusal = _laplace(Y, it)
    slope = curvature.loading_slope(analysers, it.stats).reshape(1, -1)
    decrement = float((slope * precision.solve(slope)).sum())
    original, jacobian = units.original(analysers), Y.log_jacobian(units.unit)
    m = analysers.W.shape[-2]
    takes_part = (analysers.columns | ~analysers.active.unsqueeze(-1)).unsqueeze(-2).expand(analysers.W.shape)
    density = Structure(None, None, None, AutogradDensity(joint, None))
    problem = Problem(joint, density, exact_hessian, takes_part.reshape(-1))
    pruned_prior = 0.5 * m * torch.where(original.on, 0.0, (original.alpha / math.tau).log()).sum()  # at zero
    loadings_jacobian = int(analysers.on.sum() * m) * math.log(float(units.unit))
    log_joint = evidence.log_joint(it.analysers, it.stats)[0] - jacobian + pruned_prior - loadings_jacobian
    if isinstance(precision, Dense):
        scaled: Precision = Dense(precision.tril / units.unit)
    else:
        scaled = Diagonal(precision.log_det_gradient.reciprocal() / units.unit.square())
    numbers = (scaled, decrement, log_evidence - jacobian, torch.zeros_like(log_evidence))
    state = LaplaceState(problem, joint.initial_theta, original.W.reshape(-1), log_joint, *numbers)
    return state, original, refusal


def _laplace(Y: Observations, it: Iterate) -> tuple[Precision, Tensor, str]:
    """Curvature, log evidence, and why there is none."""
    refusal = vanishing(it)
    if it.analysers.W.numel() <= curvature.full_size(Y):
        try:
            split = curvature.gauge(curvature.loading_precision(Y, it.analysers), it.analysers)
            found = curvature.orbit_laplace(evidence.log_joint(it.analysers, it.stats)[0], split, it.analysers)
            return Dense(split.tril.unsqueeze(0)), torch.full_like(found, torch.nan) if refusal else found, refusal
        except ArithmeticError as error:
            refusal = refusal or f"the loadings are not at a mode: {error}"
    found = evidence.orbit_log_evidence(it)[0]
    found = torch.full_like(found, torch.nan) if refusal else found
    return Diagonal(evidence.loading_curvature(it)), found, refusal


def vanishing(it: Iterate) -> str:
    """Why the orbit formula does not hold: a column no longer than it is uncertain; empty where it holds."""
    sizes, on = evidence.relative_lengths(it)
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
