"""The error of a log evidence because Laplace, or few nodes, stand for integrals: in nats, and where."""

import math
import warnings
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pyro_evidence.blocks import marginal as blocks
from pyro_evidence.blocks.marginal import Marginal, SharedIterate
from pyro_evidence.fitting.iterate import Fit, Status, Stop, iterate
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.laplace import type2
from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state
from pyro_evidence.laplace.gradient import evidence_slope
from pyro_evidence.laplace.type2 import TypeII
from pyro_evidence.numerics import evidence
from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.numerics.derivatives import normal_draws
from pyro_evidence.numerics.quadrature.rules import growing
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import stacklevel
from pyro_evidence.structure.names import Names, names_of

NUM_DRAWS = 400  # the mean over them is known to a twentieth of its spread: enough for the size of an error
STEP = 0.15  # of a draw, at which differences are taken, and twice as far

COMPARED = 7  # nodes that Laplace is compared with
COMPARED_OF_MANY = 5  # the same where there are many blocks
MANY = 20_000  # blocks: of two coordinates, by 7 nodes on each, they are a million evaluations


class EvidenceError(float):
    """An estimate of the error of a log evidence, nats, not negative; a float that knows where it comes from.

    :ivar signed: what the better number is higher by, nats.
    :ivar block: the block that contributes most, by its first coordinate; empty where there are no blocks.
    :ivar of_block: what that block contributes, nats.
    :ivar shared: what integrating the coordinates that blocks share around them, instead of beside them, changes, nats.
    :ivar method: how it was estimated, for the reader.
    :ivar num_blocks: how many independent blocks there are, and ``num_shared`` how many coordinates they share.

    >>> error = EvidenceError.of(-0.25, "a[3]", -0.2, 0.0, "5 against 7 nodes")
    >>> error < 0.3, error.block, error.signed
    (True, 'a[3]', -0.25)
    """

    signed: float
    block: str
    of_block: float
    shared: float
    method: str
    num_blocks: int = 0
    num_shared: int = 0

    @classmethod
    def of(cls, signed: float, block: str, of_block: float, shared: float, method: str) -> "EvidenceError":
        """With all that is known of it."""
        found = cls(abs(signed))
        found.signed, found.block, found.of_block, found.shared, found.method = signed, block, of_block, shared, method
        return found

    def beside(self, other: float) -> "EvidenceError":
        """This error with that of an integral around it added, nats."""
        found = type(self)(self + other)
        vars(found).update(vars(self))
        return found


def second_order(state: LaplaceState) -> EvidenceError:
    """The next term of Laplace's series: mean fourth-order term plus half the mean square of the third, along draws."""
    white = normal_draws(NUM_DRAWS, len(state.u)).to(state.u) * state.problem.active
    away, size = state.precision.unwhiten(white), max(1, BATCH_NUMBERS // max(1, len(state.u)))

    def log_joint(moves: Tensor) -> Tensor:
        density = state.problem.density
        return torch.cat([density.log_joint(state.u + part, state.theta) for part in moves.split(min(size, 64))])

    odd, even = [], []
    for h in (STEP, 2.0 * STEP):
        with torch.no_grad(), without_validation():
            ahead, behind, here = log_joint(h * away), log_joint(-h * away), log_joint(0.0 * away[:1])
        odd.append((ahead - behind) / (2.0 * h**3))
        even.append((ahead + behind - 2.0 * here + (h * white).square().sum(-1)) / (2.0 * h**4))
    third, fourth = (near + (near - far) / 3.0 for near, far in (odd, even))  # Richardson's: errors of h^2
    signed = float(fourth.mean() + 0.5 * third.square().mean())
    return EvidenceError.of(signed, "", 0.0, 0.0, f"the second-order term of Laplace's series, by {NUM_DRAWS} draws")


def evidence_error(state: LaplaceState) -> EvidenceError:
    """The error of a state's log evidence at its hyperparameters.

    With ``n`` nodes, against ``n + 2``.  By Laplace, against quadrature in its independent blocks; where it has none
    (crossed effects, chains, graphs), the next term of Laplace's series.
    """
    problem, place = state.problem, state.place
    if problem.marginal is None or place is None:
        marginal = _compared(problem)
        if marginal is None:
            return second_order(state)
        # One step from the mode of everything: integrals of blocks there, and the quadratic that shared ones see.
        p = marginal.partition
        here = marginal.place(marginal.density.terms(state.theta), state.u[p.own], state.u[p.shared])
        if not bool(here.direction.definite.all()):  # the integrals have no mode near this one
            return second_order(state)
        step = torch.linalg.solve(here.curvature, here.slope) if len(p.shared) else here.slope
        return _beside_laplace(state, marginal, here, 0.5 * float(here.slope @ step), ", at the mode")
    more = replace(problem.marginal, num=problem.nodes + 2)
    better = more.find(state.theta, state.u)
    gain, signed = (better.each - place.each)[:-1], float(more.log_evidence(better) - state.log_evidence)
    return _of_blocks(more, signed, gain, 0.0, f"{problem.nodes} against {more.num} nodes")


def slope_of_error(state: LaplaceState) -> Tensor | None:
    """Derivatives of a state's :func:`evidence_error` by Laplace, ``(T,)``, nats; None where no blocks are independent.

    By few nodes in each block: most of the error is seen by them, and its slope.
    """
    marginal = None if state.place is not None else _compared(state.problem)
    if marginal is None:
        return None
    marginal = replace(marginal, num=COMPARED_OF_MANY)
    p, terms = marginal.partition, marginal.density.terms(state.theta)
    here = marginal.place(terms, state.u[p.own], state.u[p.shared])
    return (blocks.slope(marginal, here, state.theta)[0] - evidence_slope(state)[0]).detach()


def in_blocks(state: LaplaceState, nodes: int) -> LaplaceState:
    """A state with independent blocks integrated by so many nodes; itself without any, and where they are already."""
    if state.place is not None or _compared(state.problem) is None:
        return state
    return laplace_state(replace(state.problem, nodes=nodes), state.theta, state.u)


def is_in_blocks(state: LaplaceState) -> bool:
    """Whether an error of a state's log evidence is found in independent blocks."""
    return state.place is not None or _compared(state.problem) is not None


def by_more_nodes(state: LaplaceState, error: EvidenceError) -> EvidenceError:
    """A better number than an error's: two more nodes, around the mode of what blocks share with these integrated.

    The same error where the state is by quadrature already, or has no blocks.
    """
    compared = None if state.place is not None else _compared(state.problem)
    if compared is None:
        return error
    more = replace(compared, num=compared.num + 2)
    return _beside_laplace(state, more, more.find(state.theta, state.u))


def _beside_laplace(
    state: LaplaceState, marginal: Marginal, place: SharedIterate, more: float = 0.0, where: str = ""
) -> EvidenceError:
    """The error of Laplace's log evidence against blocks integrated at a place, where ``more`` nats are left to it."""
    gain = place.each[:-1] - by_laplace(place)
    signed = float(marginal.log_evidence(place) - state.log_evidence) + more
    return _of_blocks(marginal, signed, gain, signed - float(gain.sum()), f"1 against {marginal.num} nodes{where}")


def _compared(problem: Problem) -> Marginal | None:
    """The blocks, integrated by as many nodes as Laplace is compared with; None where there are none."""
    found = problem.by_quadrature(COMPARED) if problem.curvature is exact_hessian else None
    if found is None or found.partition.num_blocks <= MANY:
        return found
    return replace(found, num=COMPARED_OF_MANY)


def _of_blocks(marginal: Marginal, signed: float, gain: Tensor, shared: float, method: str) -> EvidenceError:
    """The error that blocks contribute ``gain`` ``(G,)`` to, and with the most of them by name."""
    p = marginal.partition
    worst = int(gain.abs().argmax())
    first = torch.nonzero(p.block == worst)[0, 0]
    name = element_names(marginal.density.joint, p.own[first].reshape(1))[0]
    found = EvidenceError.of(signed, name, float(gain[worst]), shared, method)
    found.num_blocks, found.num_shared = p.num_blocks, len(p.shared)
    return found


def element_names(joint: LogJoint, index: Tensor) -> tuple[str, ...]:
    """Names of flat coordinates ``(n,)`` in tables, such as ``b[3]``; by unconstrained places where shapes differ."""
    known, found, slices = names_of(joint), [], joint.latents.slices
    for number in index.tolist():
        part = next(p for p in joint.latents if slices[p.name].start <= number < slices[p.name].stop)
        names = known if part.shape == part.unconstrained_shape else Names({}, {})
        # torch's own imports modules for a third of a second
        place = np.unravel_index(number - slices[part.name].start, part.unconstrained_shape)
        found.append(names.label(part.name, [int(i) for i in place]))
    return tuple(found)


def by_laplace(here: SharedIterate) -> Tensor:
    """Laplace's approximation of the log integral of each block, nats, ``(G,)``."""
    parts = [
        evidence.log_evidence(torch.zeros(()), 2.0 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1), L.shape[-1])
        for L in here.modes.tril
    ]
    return here.modes.here.value[:-1] + torch.cat(parts)


def messages(error: EvidenceError, nodes: int) -> list[str]:
    """Sentences about an error that is above a nat, with the setting to pass; none below."""
    if not (error > 1.0 or abs(error.shared) > 1.0):
        return []
    where = f"; most from {error.block}: {error.of_block:.2g}" if error.block else ""
    said = f"the log evidence is off by about {error.signed:+.3g} nats ({error.method}{where})"
    if not error.block:
        return [said]
    if nodes > 1:
        return [said if abs(error.shared) > 0.5 * error else f"{said}: pass nodes={nodes + 4}"]
    beside = f", {error.shared:+.3g} of them because what blocks share is not integrated around them"
    return [f"{said}{beside if math.isfinite(error.shared) else ''}: pass nodes=7"]


GROWING = growing(COMPARED, 95, 1.45)


def with_nodes(fit: Fit[TypeII], nodes: int | str) -> Fit[TypeII]:
    """The same hyperparameters with blocks integrated by so many nodes, in the metric that was learned."""
    laplace = fit.state.laplace
    integrated = replace(laplace.problem, nodes=numbers_of_nodes(nodes)[0])
    new = type2.type2_state(laplace_state(integrated, laplace.theta, laplace.u))
    learned = fit.state.learned
    if learned is not None and len(learned) == len(new.laplace.theta):
        new = replace(new, learned=learned, trusted=True)
    return Fit(replace(new, scanned=True, enough=fit.state.enough), Status.BY_HAND, (new.objective,))


def refined(fit: Fit[TypeII], begun: Fit[TypeII], nodes: int | str, stop: Stop) -> Fit[TypeII]:
    """The fit gone on with blocks integrated; from its very beginning where Laplace has led it to an end of its range.

    :param nodes: on each axis of a block; ``"auto"``: as many as bring the error below ``stop.quadrature_tol``.
    """
    active, full = (f.state.laplace.problem.active for f in (fit, begun))
    fit = fit if fit.status is Status.CONVERGED and torch.equal(active, full) else begun
    for num in numbers_of_nodes(nodes):
        begin = with_nodes(fit, num)
        fit = iterate(type2.step, begin.state, stop, "LaplaceEvidence", before=begin.objectives)
        if fit.status is Status.INTERRUPTED or not isinstance(nodes, str):
            return fit
        error = evidence_error(fit.state.laplace)
        if abs(error.signed - error.shared) <= stop.quadrature_tol:  # more nodes do not change the rest
            return fit
    warnings.warn(
        f"nodes='auto' ends at {num} nodes with an error of {float(error):.2g} nats, where stop.quadrature_tol asks "
        f"for {stop.quadrature_tol:g}; most of it is from {error.block}, whose density is far from normal. Take the "
        "log evidence as good to that error, or ask for less by Stop(quadrature_tol=...).",
        stacklevel=stacklevel(),
    )
    return fit


def numbers_of_nodes(nodes: int | str) -> tuple[int, ...]:
    """The numbers of nodes that the setting stands for, in the order in which they are tried."""
    return GROWING if isinstance(nodes, str) else (nodes,)
