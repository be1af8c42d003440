"""Many starts, climbed as one batch; the distinct modes among them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.errors import NotAMode
from pyro_evidence.laplace import LaplaceState, Problem, find_modes, require_proper, state_at


@dataclass(frozen=True)
class Restarts:
    """The distinct modes that were found, best first, and which of them each restart reached."""

    states: tuple[LaplaceState, ...]
    reached: Tensor  # (R,) index into states, -1 where a restart failed
    failures: tuple[str, ...]


def search(at: Problem, starts: Tensor, theta: Tensor) -> Restarts:
    """Climb from ``starts`` ``(R, D)`` at hyperparameters ``theta``; modes of one height are one mode.

    Relabelled mixture components and mirrored hidden units give modes of equal height, of which one is kept.

    :raises NotAMode: when every restart failed, with what each said.
    """
    mode = find_modes(at, starts, theta, cold=True)
    states: list[LaplaceState] = []
    rows: list[int] = []
    failures: list[str] = []
    for row in range(len(starts)):
        try:
            rows.append(_index(states, at, theta, (mode, row)))
        except ArithmeticError as error:
            rows.append(-1)
            failures.append(f"restart {row}: {error}")
            last = error
    if not states:
        raise last if len(starts) == 1 else NotAMode("all restarts failed.\n" + "\n".join(failures))
    order = sorted(range(len(states)), key=lambda i: -states[i].objective)
    rank = torch.tensor([order.index(i) for i in range(len(states))] + [-1])
    return Restarts(tuple(states[i] for i in order), rank[torch.tensor(rows)], tuple(failures))


def _index(states: list[LaplaceState], at: Problem, theta: Tensor, which: tuple[object, int]) -> int:
    """Position of a row's mode among ``states``, which grows when it is a new one."""
    state = state_at(at, theta, *which)  # type: ignore[arg-type]
    for i, known in enumerate(states):
        scale = 1.0 + abs(known.objective)
        if abs(known.objective - state.objective) <= 1e-7 * scale and abs(float(known.log_joint - state.log_joint)) <= 1e-7 * scale:
            return i
    require_proper(state)
    states.append(state)
    return len(states) - 1
