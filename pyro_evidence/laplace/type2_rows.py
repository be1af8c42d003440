"""Many restarts through the hyperparameter loop of :mod:`type2`, the modes that they ask for found as one batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pyro_evidence.fitting.iterate import Fit, Stop, bar_of
from pyro_evidence.laplace import type2
from pyro_evidence.laplace.approximation import LaplaceState, Problem, modes_of_rows, state_of_row
from pyro_evidence.laplace.gradient import Asking, ModeAt, Slope, slopes
from pyro_evidence.laplace.type2 import TypeII
from pyro_evidence.numerics import trust_region
from pyro_evidence.numerics.line_search import together


def climb(fits: Sequence[Fit[TypeII]], stop: Stop) -> tuple[Fit[TypeII], ...]:
    """Every mode, all of one problem, moved to where its log evidence is highest, or as far as no step fails."""
    problem = fits[0].state.laplace.problem
    with bar_of("restarts", stop.progress) as bar:

        def answers(waiting: Mapping[int, ModeAt | LaplaceState]) -> Mapping[int, Any]:
            bar.set_postfix_str(f"{len(waiting)} of {len(fits)} on their way", refresh=False)
            bar.update()
            places = {row: asked for row, asked in waiting.items() if isinstance(asked, ModeAt)}
            if places:  # rows that ask for slopes wait, so that they go on together
                return dict(zip(places, _modes(problem, [*places.values()]), strict=True))
            states = {row: asked for row, asked in waiting.items() if isinstance(asked, LaplaceState)}
            return dict(zip(states, _slopes(problem, [*states.values()]), strict=True))

        return together([_climbing(fit, stop) for fit in fits], answers)


def _climbing(fit: Fit[TypeII], stop: Stop) -> Asking[Fit[TypeII]]:
    """One fit, until there is a reason to stop, or a step fails: that it does is said by the loop of one fit."""
    state, path, reason = fit.state, [*fit.objectives], None
    while reason is None:
        try:
            state = yield from type2.steps(state)
        except ArithmeticError:
            break
        path.append(state.objective)
        reason = stop(path[-2], state, len(path) - 1)
    return Fit(state, fit.status, tuple(path))


def _modes(problem: Problem, asked: Sequence[ModeAt]) -> list[tuple[float, LaplaceState] | None]:
    """Answer of :func:`type2.answer` to each, the modes found in one batch."""
    if len(asked) == 1:
        return [type2.answer(asked[0])]
    theta, start = torch.stack([a.theta for a in asked]), torch.stack([a.start for a in asked])
    active = torch.stack([a.problem.active for a in asked])
    num_steps = None if problem.structure.network is None else trust_region.FOLLOWED
    mode = modes_of_rows(problem, theta, active, start, num_steps)
    found: list[tuple[float, LaplaceState] | None] = []
    for row, place in enumerate(asked):
        try:
            state = state_of_row(place.problem, place.theta, place.start, mode, row)
            found.append((state.objective, state))
        except ArithmeticError:
            found.append(None)
    return found


def _slopes(problem: Problem, states: Sequence[LaplaceState]) -> list[Slope]:
    """The slope of each, from one batch."""
    if len(states) == 1:
        return [type2.answer(states[0])]
    found = slopes(problem, states)
    return [Slope(*row) for row in zip(found.total, found.joint, strict=True)]
