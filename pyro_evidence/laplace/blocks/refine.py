"""From the hyperparameters that are best for Laplace to those that are best with blocks integrated."""

import warnings
from dataclasses import replace

import torch

from pyro_evidence.iterate import Fit, Status, Stop, iterate
from pyro_evidence.laplace import type2
from pyro_evidence.laplace.approximation import LaplaceState, laplace_state
from pyro_evidence.laplace.blocks.error import EvidenceError, evidence_error
from pyro_evidence.laplace.type2 import TypeII
from pyro_evidence.settings import outside

GROWING = (7, 11, 15, 21, 31, 45, 65, 95)


def with_nodes(fit: Fit[TypeII], nodes: int | str) -> Fit[TypeII]:
    """The same hyperparameters with blocks integrated by so many nodes, in the metric that was learned."""
    state = _at(fit.state.laplace, _numbers(nodes)[0])
    new = type2.outer_state(state)
    learned = fit.state.learned and new.metric.shape == fit.state.metric.shape
    new = replace(new, metric=fit.state.metric, learned=True, trusted=True) if learned else new
    return Fit(replace(new, scanned=True), Status.BY_HAND, (new.objective,))


def _at(laplace: LaplaceState, nodes: int) -> LaplaceState:
    """The state with blocks integrated, from the mode of the whole."""
    return laplace_state(replace(laplace.problem, nodes=nodes), laplace.theta, laplace.u)


def refined(fit: Fit[TypeII], begun: Fit[TypeII], nodes: int | str, stop: Stop) -> Fit[TypeII]:
    """The fit gone on with blocks integrated; from its very beginning where Laplace has led it to an end of its range.

    :param nodes: on each axis of a block; ``"auto"``: as many as bring the error below ``stop.integral``.
    """
    active, full = (f.state.laplace.problem.active for f in (fit, begun))
    fit = fit if fit.status is Status.CONVERGED and torch.equal(active, full) else begun
    for num in _numbers(nodes):
        begin = with_nodes(fit, num)
        fit = iterate(type2.step, begin.state, stop, "LaplaceEvidence", before=begin.objectives)
        if fit.status is Status.INTERRUPTED or not isinstance(nodes, str):
            return fit
        error = evidence_error(fit.state.laplace)
        if error <= stop.integral:
            return fit
    warnings.warn(_unsettled(num, error, stop.integral), stacklevel=outside())
    return fit


def _unsettled(num: int, error: EvidenceError, wanted: float) -> str:
    return (
        f"nodes='auto' ends at {num} nodes with an error of {float(error):.2g} nats, where stop.integral asks for "
        f"{wanted:g}; most of it is from {error.block}, whose density is far from normal. Take the log evidence as "
        "good to that error, or ask for less by Stop(integral=...)."
    )


def _numbers(nodes: int | str) -> tuple[int, ...]:
    return GROWING if isinstance(nodes, str) else (nodes,)
