"""Rows of maximised hyperparameters: standard deviations, and intervals taken where each has no bounds."""

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.hyperparameters.uncertainty import HyperparameterCovariance
from pyro_evidence.laplace.summary.elements import Layout, Rows, correlation_rows, correlations, is_correlation
from pyro_evidence.numerics.coordinates import Coordinate

Values = dict[str, Tensor]


def hyper_rows(
    state: LaplaceState, values: Values, gamma: Values, spread: HyperparameterCovariance | None, layout: Layout
) -> tuple[Rows, list[str]]:
    """A row for each element of each hyperparameter that is not pruned, and what is to be said of the others.

    :param values: constrained, a pruned precision inf.
    :param gamma: of those that are precisions.
    :param spread: how well they are determined, where it is known.
    """
    rows: Rows = {}
    said: list[str] = []
    for part in layout.in_order(state.problem.joint.hypers):
        if is_correlation(part):
            rows |= _correlations(state, part, spread, layout)
            continue
        alive = values[part.name].isfinite()
        places = layout.shown(alive)
        columns = {"value": values[part.name], **_spreads(state, part, spread, layout)}
        if part.name in gamma and gamma[part.name].shape == part.shape:
            columns["gamma"] = gamma[part.name]
        rows |= layout.rows(part.name, part.shape, places, {c: v.reshape(-1)[places] for c, v in columns.items()})
        said += layout.left_out(part.name, alive)
    held, more = _held({n: v for n, v in values.items() if n not in state.problem.joint.hypers.slices}, layout)
    return rows | held, [*said, *more]


def _held(values: Values, layout: Layout) -> tuple[Rows, list[str]]:
    """Params that were not maximised: their values."""
    rows: Rows = {}
    said: list[str] = []
    for name, value in values.items():
        places = layout.shown(torch.ones(value.shape, dtype=torch.bool))
        rows |= layout.rows(name, value.shape, places, {"value": value.reshape(-1)[places]})
        said += layout.left_out(name, torch.ones(value.shape, dtype=torch.bool))
    return rows, said


def _spreads(state: LaplaceState, part: Coordinate, spread: HyperparameterCovariance | None, layout: Layout) -> Values:
    """Standard deviations and intervals, where there are any."""
    if spread is None:
        return {}
    columns = {"sd": spread.sd[part.name]}
    if part.unconstrained_shape == part.shape:
        columns |= dict(zip(layout.ends, _interval(state, part, spread, layout), strict=True))
        for edge in (e for e in spread.edges if e.name == part.name):
            for column, end in zip(layout.ends, edge.interval, strict=True):
                columns[column].reshape(-1)[edge.index] = end
    return columns


def _interval(state: LaplaceState, part: Coordinate, spread: HyperparameterCovariance, layout: Layout) -> list[Tensor]:
    """Ends, in the coordinates of the search, where the log evidence is nearest to a parabola."""
    block = state.problem.joint.hypers.slices[part.name]
    sd = spread.unconstrained.diagonal()[block].sqrt()
    ends = [state.theta[block] + torch.special.ndtri(sd.new_tensor(level)) * sd for level in layout.levels]
    found = torch.stack([part.transform(end.reshape(part.unconstrained_shape)) for end in ends])
    return list(found.sort(0).values.clone())


def _correlations(
    state: LaplaceState, part: Coordinate, spread: HyperparameterCovariance | None, layout: Layout
) -> Rows:
    """Correlations, their intervals by Fisher's transformation."""
    block = state.problem.joint.hypers.slices[part.name]
    theta = state.theta[block]
    value = correlations(part.transform(theta))
    columns = {"value": value}
    if spread is not None:
        jacobian = torch.autograd.functional.jacobian(lambda t: correlations(part.transform(t)).atanh(), theta)
        sd = (jacobian @ spread.unconstrained[block, block] @ jacobian.mT).diagonal().sqrt()
        columns["sd"] = sd * (1.0 - value.square())
        for column, level in zip(layout.ends, layout.levels, strict=True):
            columns[column] = (value.atanh() + torch.special.ndtri(sd.new_tensor(level)) * sd).tanh()
    return correlation_rows(layout, part.name, part.shape[-1], {c: v.detach() for c, v in columns.items()})
