"""Hyperparameters maximised around the integral over the marginalised sites, and the modes of that integral."""

import itertools
import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pyro_evidence.errors import ImproperPosterior, NotAMode
from pyro_evidence.fitting.process_state import own_random_numbers
from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state, log_priors
from pyro_evidence.laplace.gradient import slope
from pyro_evidence.laplace.mode_checks import is_proper
from pyro_evidence.nested.integration import NODES, OuterMode, followed, outer_mode
from pyro_evidence.numerics import lbfgs
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.line_search import lead_uphill
from pyro_evidence.numerics.quadrature import rules
from pyro_evidence.numerics.quadrature.densities import HILL, beyond_valleys
from pyro_evidence.numerics.quadrature.reparameterise import PROBES, STEPS, Standardisation, standardising
from pyro_evidence.program.sites import is_improper

ROUNDS = 8  # of any search, each around the mode that the last has found
NUM_STEPS = 200  # of each, in the hyperparameters
SETTLED = 1e-4  # a move of the hyperparameters, unconstrained, that counts as none
HIGHER = 1e-3  # nats above a mode at which a place leads to another
NEAR = 0.01  # squared standard deviations from a mode at which curvature and mode follow to first order
FLAT = 1e-6  # the largest derivative that counts as zero, nats; so does the square of one in standard deviations
NUM_DRAWS = 16  # of the prior, where other modes are looked for
ENDLESS = 50.0  # a standard deviation in unconstrained units, e^50 of a scale, that no data leave
INWARD, LOOKS = 8.0, 32  # units from where rounding hides a density, that tell how it falls; places on the way out
MISSING = 1e100  # nats below the top, where there is no inner mode
NEXT, TOLD = 1e-6, 0.01  # units, by which a density moves by so few nats unless it is rounding
FAINT = 7.0  # nats below the top, at twice the way to the probes: more than a thousandth may lie further
SLOW = 0.05  # of what the prior falls, or of a nat a unit
WORTH = 15.0  # nats below the top that are still worth counting, far away
SAME = 0.1  # standard deviations between two ends of one climb
SHARE = 0.1  # of the tolerance that another mode may hold unseen


def _value_and_slope(problem: Problem, theta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Log evidence plus log hyperprior and its exact derivatives; minus infinity where there is no mode."""
    try:
        state = laplace_state(problem, theta, start)
        return theta.new_tensor(state.objective), slope(state).total
    except ArithmeticError:
        return theta.new_tensor(-torch.inf), torch.zeros_like(theta)


def maximised(state: LaplaceState, marginalised: Tensor, rise: Tensor | None = None) -> OuterMode:
    """The mode of the marginalised sites at hyperparameters where the integral over the marginalised sites is highest.

    :param state: at the maximum over marginalised sites and hyperparameters together.
    :param marginalise: positions of the marginalised coordinates in ``theta``.
    :param rise: as for :func:`outer_mode`.
    """
    found = outer_mode(state, marginalised, rise)
    inside = torch.ones_like(state.theta).index_fill(0, marginalised, 0.0).nonzero().flatten()
    for _ in range(ROUNDS if len(inside) else 0):
        before = found.state.theta[inside]
        integral = partial(_by_fixed_nodes, found, *_nodes(found), inside)
        psi = lbfgs.ascend(integral, before.unsqueeze(0), tolerance=FLAT, num_steps=NUM_STEPS)[0]
        theta = found.state.theta.clone()
        theta[inside] = psi
        found = outer_mode(_maximised_mode(found, theta), marginalised)
        if float((psi - before).abs().max()) <= SETTLED:
            break
    return found


def _nodes(found: OuterMode) -> tuple[Tensor, Tensor]:
    """Nodes ``(K, d)`` that stay as hyperparameters move, and log weights; beyond eight dimensions the mode alone."""
    where = standardising(found.centre, found.precision)
    if where.num_dims <= rules.PRODUCT_DIMS:
        rule = rules.product(rules.gauss_hermite(NODES[0]), where.num_dims)
    elif where.num_dims <= rules.LARGEST_DESIGN:
        rule = rules.central_composite(where.num_dims)
    else:
        rule = rules.product(rules.gauss_hermite(1), where.num_dims)
    z = rule.nodes.to(where.centre)
    return where.forward(z), rule.log_weights.to(z) + where.log_slope(z) + 0.5 * z.square().sum(-1)


def _by_fixed_nodes(
    found: OuterMode, phi: Tensor, constant: Tensor, inside: Tensor, psi: Tensor
) -> tuple[Tensor, Tensor]:
    """``log sum_k exp(constant_k + F(phi_k, psi))``, nats ``(1,)``, and its derivatives ``(1, P)``, exact.

    :param inside: positions of ``psi`` ``(1, P)`` among all hyperparameters.
    """
    theta = found.theta(phi)
    theta[:, inside] = psi
    rows = [_value_and_slope(found.state.problem, t, found.state.u) for t in theta]
    log_terms = constant + torch.stack([value for value, _ in rows])
    weights = log_terms.softmax(0).nan_to_num(0.0)
    slopes = torch.stack([each for _, each in rows])[:, inside]
    return log_terms.logsumexp(0).unsqueeze(0), (weights @ slopes).unsqueeze(0)


def _maximised_mode(found: OuterMode, theta: Tensor) -> LaplaceState:
    """The mode of the marginalised sites at new hyperparameters, searched from the old one."""
    problem, marginalised = found.state.problem, found.marginalised

    def value_and_slope(phi: Tensor) -> tuple[Tensor, Tensor]:
        value, each = _value_and_slope(problem, theta.index_copy(0, marginalised, phi[0]), found.state.u)
        return value.unsqueeze(0), each[marginalised].unsqueeze(0)

    phi = lbfgs.ascend(value_and_slope, found.centre.unsqueeze(0), tolerance=FLAT, num_steps=NUM_STEPS)[0]
    return laplace_state(problem, theta.index_copy(0, marginalised, phi), found.state.u)


def newton_step(found: OuterMode, slope: Tensor) -> OuterMode:
    """The mode that is a part of a standard deviation away; by a longer search where it is not so near.

    :param slope: of all hyperparameters, which are marginalised, ``(d,)``.
    """
    step = torch.linalg.solve(found.precision, slope)
    if float(slope @ step) > NEAR:
        return best_mode(found)
    state, u = found.state, followed(found.state.u, found.follows, step)
    return replace(found, state=laplace_state(state.problem, state.theta + step, u))


def best_mode(found: OuterMode) -> OuterMode:
    """The mode to which the highest points along the axes of this one lead; this one, polished, if it is highest."""
    if not has_arrived(found):
        found = outer_mode(_maximised_mode(found, found.state.theta), found.marginalised)
    for _ in range(ROUNDS):
        best = int(found.profile.argmax())
        if not bool(found.profile[best] > found.profile[PROBES.index(0.0)] + HIGHER):
            break
        found = outer_mode(_climbed(found, found.gaussian.probes()[best]), found.marginalised)
    return found


def _climbed(found: OuterMode, place: Tensor) -> LaplaceState:
    """The mode of the marginalised sites to which an ascent from ``place`` ``(d,)`` leads.

    :raises ArithmeticError: where there is no inner mode at that place.
    """
    state = found.state
    begun = laplace_state(state.problem, state.theta.index_copy(0, found.marginalised, place), state.u)
    return _maximised_mode(replace(found, state=begun), begun.theta)


def check_multimodality(found: OuterMode, tolerance: float) -> tuple[OuterMode, Tensor, float]:
    """The mode to integrate around, positions ``(M, 1)`` of other modes where there is but one axis, and hidden mass.

    Of which the log is that of :func:`require_integral`.

    :param tolerance: of the log evidence, nats.
    :raises ImproperPosterior: where the marginalised density does not fall.
    :raises NotAMode: where other modes count, on more than one axis.
    """
    hidden, elsewhere = require_integral(found), secondary_modes(found, tolerance)
    if len(elsewhere) and len(found.marginalised) > 1:  # this may not be the highest
        found = best_mode(found)
        elsewhere = secondary_modes(found, tolerance)
        if len(elsewhere):
            raise NotAMode(_several_modes(found, elsewhere))
    return found, elsewhere, hidden


def secondary_modes(found: OuterMode, tolerance: float) -> Tensor:
    """Places ``(M, d)`` on other modes of the marginalised density, as far as they count.

    On one axis these are all places far away where it is not low, since a table over all of them costs little; on
    several, places from which an ascent ends at another mode, with more mass than a tenth of the tolerance.
    """
    drawn = prior_draws(found)
    height = found.inner(drawn, searches=1, rough=True).log_density
    chosen = other_places(found.gaussian, found.profile, drawn, height)
    order = torch.cat([found.profile, height])[chosen].argsort(descending=True)
    places = torch.cat([found.gaussian.probes(), drawn])[chosen][order]  # the highest first
    if places.shape[-1] == 1:
        return places
    places = places[:ROUNDS]
    on_its_slope = lead_uphill(lambda way: found.inner(way, searches=1).log_density, places, found.centre)
    places = places[~on_its_slope]
    counted = [_is_another(found, place, tolerance) for place in places]
    return places[torch.tensor(counted, dtype=torch.bool, device=places.device)]


def _is_another(found: OuterMode, place: Tensor, tolerance: float) -> bool:
    """Whether ``place`` lies on a mode of its own; one without a top that is found counts as one."""
    try:
        reached = _climbed(found, place)
        apart = torch.linalg.solve(found.gaussian.basis, reached.theta[found.marginalised] - found.centre).norm()
        if float(apart) <= SAME:
            return False
        return _log_mass(outer_mode(reached, found.marginalised)) - _log_mass(found) > math.log(SHARE * tolerance)
    except (ArithmeticError, NotAMode):
        return True


def _log_mass(found: OuterMode) -> float:
    """Laplace's approximation of a mode's integral, less a constant, nats."""
    return found.state.objective - 0.5 * float(torch.logdet(found.precision))


def other_places(where: Standardisation, profile: Tensor, drawn: Tensor, height: Tensor) -> Tensor:
    """Probes beyond a valley and draws far from the mode at which the density is worth a look, ``(..., d J + S)`` bool.

    On one axis draws see valleys, too: those between the mode and them.

    :param where: axes of the Gaussian at the mode; of many in rows.
    :param profile: log density at its probes, nats, ``(..., d J)``.
    :param drawn: places ``(S, d)``, and ``height`` the log density there, ``(..., S)``.
    """
    axes = profile.unflatten(-1, (-1, len(PROBES)))
    fallen = torch.maximum(axes[..., 0], axes[..., -1]).amax(-1, keepdim=True) + HILL  # at the ends of the highest axis
    within = ((drawn - where.centre).abs() < ENDLESS).all(-1)
    z, heights = where.inverse(drawn), torch.cat([profile, height], -1)
    if drawn.shape[-1] == 1:
        places = torch.cat([z.new_tensor(PROBES).expand(*z.shape[:-2], -1), z.squeeze(-1)], -1).unsqueeze(-2)
        nearer = (places * z > 0.0) & (places.abs() < z.abs())
        fallen = torch.minimum(fallen, heights.unsqueeze(-2).where(nearer, torch.inf).amin(-1) + HILL)
    far = within & (z.norm(dim=-1) > -PROBES[0]) & (height > fallen)
    high = heights > profile.amax(-1, keepdim=True) - WORTH
    return high & torch.cat([beyond_valleys(axes).flatten(-2), far], -1)


def prior_draws(found: OuterMode) -> Tensor:
    """:func:`all_prior_draws` but those that are farther off than any data leave a scale, as of vague priors.

    On several axes those near the mode tell nothing either; on one they may see a valley before others.
    """
    rows = all_prior_draws(found)
    far = found.gaussian.inverse(rows).norm(dim=-1) > (-PROBES[0] if rows.shape[-1] > 1 else 0.0)
    return rows[far & ((rows - found.centre).abs() < ENDLESS).all(-1)]


def all_prior_draws(found: OuterMode) -> Tensor:
    """Marginalised coordinates drawn from the prior of each marginalised site, the others at the mode, ``(S, d)``.

    A flat prior has no draws: a site under one is looked at as far around the mode as other modes may be.  Last comes
    the mode with the signs of real sites turned, which draws on several axes would hardly meet.
    """
    joint, state = found.state.problem.joint, found.state
    nodes, slices = joint.trace(state.u, state.theta).nodes, joint.hypers.slices
    parts = [p for p in joint.hypers if p.name in found.names]
    spread = torch.ones_like(state.theta)
    spread[found.marginalised] = found.gaussian.basis.norm(dim=1).clamp(min=1.0).to(spread)  # a log unit at least
    draws = []
    with own_random_numbers():
        torch.manual_seed(0)
        for part in parts:
            if is_improper(nodes[part.name]):
                own, width = state.theta[slices[part.name]], spread[slices[part.name]]
                drawn = own + PROBES[0] * width * (2.0 * torch.rand(NUM_DRAWS, len(own)).to(own) - 1.0)
            else:
                drawn = part.transform.inv(nodes[part.name]["fn"].sample((NUM_DRAWS,))).reshape(NUM_DRAWS, -1).double()
            draws.append(drawn)
    real = torch.cat([torch.full((p.size,), is_identity(p.transform)) for p in parts]).to(found.centre.device)
    turned = found.centre.where(~real, -found.centre).unsqueeze(0)
    return torch.cat([torch.cat(draws, -1), *([turned] if bool(real.any()) else [])])


def has_arrived(found: OuterMode) -> bool:
    """Whether a Newton step of the marginalised sites promises nothing that counts."""
    left = slope(found.state).total[found.marginalised]
    return float(left @ torch.linalg.solve(found.precision, left)) < FLAT


def _several_modes(found: OuterMode, places: Tensor) -> str:
    places = torch.cat([found.centre.unsqueeze(0), places])
    lines = [
        f"  {height:10.2f} nats at {[round(v, 3) for v in place]}"
        for height, place in zip(found.inner(places).log_density.tolist(), places.tolist(), strict=True)
    ]
    return (
        f"the log density of the marginalised sites {found.names} has several modes. Its mode and other places that "
        "count, in unconstrained coordinates:\n"
        + "\n".join(lines)
        + "\nName one site in marginalise=[...], whose modes are all "
        "integrated, or sample them: "
        f"MCMC(NUTS(LaplaceMarginal(model, integrate={list(found.state.problem.joint.latents.names)})), ...)."
    )


def require_integral(found: OuterMode) -> float:
    """Refuse a density that stays up far from its mode, as under a prior without an integral.

    Integrals diverge at infinity only, so far is a matter of unconstrained units too, however narrow the mode is.

    :return: log of the mass beyond places where rounding hides the density, were it to fall on as it falls there, nats.
    :raises ImproperPosterior: unless all densities of the model are proper, where the density is no lower at 26 than
        at 6 standard deviations, or units if these are larger, and that not low enough; or hardly falls where rounding
        begins to hide it.  Where data by a factor are all that may be no density, it must fall by less than half, or
        there a twentieth, of what the priors fall: what is bounded has an integral under these.  And where an axis is
        endless under a flat prior.
    :raises NotAMode: where one is under proper priors.
    """
    around, beyond = found.state.around, -math.inf
    proper, bounded = is_proper(around), is_proper(around, factors=True)
    if float(found.gaussian.basis.norm(dim=0).max()) > ENDLESS:
        raise NotAMode(_flat(found, BEYOND)) if bounded else ImproperPosterior(_flat(found))
    profiles, basis = found.profile.reshape(found.gaussian.num_dims, -1), found.gaussian.basis
    for axis, side in itertools.product(range(len(profiles)), (-1, 1)):
        outward = (profiles[axis] if side > 0 else profiles[axis].flip(0))[len(STEPS) :]  # from the mode
        below, way = profiles.amax() - outward, side * PROBES[-1] * basis[:, axis]
        stretched = max(1.0, PROBES[-1] / float(way.norm()))
        hidden = (below > MISSING)[1:] & (below < WORTH)[:-1]
        straight = (below[-2] - below[-3]) / (STEPS[-2] - STEPS[-3])  # the last may be hidden
        far = below[-2] + stretched * PROBES[-1] * straight  # at twice the way
        if bool(hidden.any()) or bool(far < FAINT if proper else below[-1] < WORTH):
            others = basis[:, [k for k in range(len(profiles)) if k != axis]].norm(dim=0)
            volume = float((math.tau**0.5 * others).log().sum())
            beyond = max(beyond, volume + _hidden_mass(found, 4.0 * stretched * way, bounded, proper))
    return beyond


def _hidden_mass(found: OuterMode, way: Tensor, bounded: bool, proper: bool) -> float:
    """Log of the mass beyond where rounding begins to hide a density on the ``way`` ``(d,)`` out from the mode, nats.

    It is told where a millionth of a unit moves it by less than a hundredth of a nat.

    :param bounded: whether all priors are proper, and ``proper`` all that makes up the density.
    :raises ImproperPosterior: where it hardly falls there, or on the last three quarters, and may have no integral; and
        where it is higher at the end of the way than at the mode.
    """
    length, top = float(way.norm()), float(found.profile.amax())
    steps = torch.cat([torch.arange(-INWARD, INWARD), torch.linspace(INWARD, length, LOOKS)]).to(way)
    places = found.centre + steps.unsqueeze(-1) * way / length
    ahead, behind = (found.inner(places + sign * NEXT * way / length, searches=1) for sign in (1.0, -1.0))
    told = ((ahead.log_density - behind.log_density).abs() < TOLD).tolist()  # nan is not
    first = told.index(True) if any(told) else len(told) - 1
    last = next((k for k in range(first, len(told)) if not told[k]), len(told)) - 1
    if is_whole := last == len(told) - 1:  # nothing is hidden: how does it fall from a quarter of the way on?
        begin, share, least = int((steps < 0.25 * length).sum()), 0.5, 1.0
    else:
        begin, share, least = max(first, last - int(INWARD)), SLOW, SLOW * INWARD
    height = ahead.log_density[begin : last + 1]
    if not proper and is_whole and float(height[-1]) > top:  # as the way of a precision up, beside what others do
        raise ImproperPosterior(_flat(found))
    if last <= first or top - float(height[0 if is_whole else -1]) > WORTH:
        return -math.inf
    priors = log_priors(found.state.problem, ahead.theta[[begin, last]])
    if bounded:
        least = min(1.0, share * float(priors[0] - priors[1]))
    fall, run = float(height.amax() - height[-1]), float(steps[last] - steps[begin + int(height.argmax())])
    if fall < least and not proper:
        raise ImproperPosterior(_flat(found))
    rate = max(fall / max(run, 1.0), SLOW * SLOW)  # nats a unit; of what is level a mass of so many units
    return -math.inf if is_whole else float(height[-1]) - math.log(rate)


# of priors that are proper, and level over more scales than numbers hold
BEYOND = "ends, if at all, beyond what can be integrated numerically. Give them priors that say more"


def _flat(found: OuterMode, what: str = "has no integral, so there is no evidence. Give them proper priors") -> str:
    joint, state = found.state.around.joint, found.state
    nodes = joint.trace(state.u, state.theta).nodes
    flat = [n for n in (*joint.latents.names, *joint.hypers.names) if is_improper(nodes[n])]
    return (
        f"the log density of the marginalised sites {found.names} hardly falls far from where their search ended: "
        f"it {what}, such as HalfNormal or HalfCauchy, or maximise them by maximise=."
        + (f" Priors of {', '.join(flat)} are flat: it may be any of these." if flat else "")
    )
