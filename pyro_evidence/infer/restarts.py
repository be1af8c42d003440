"""Many starts, climbed as one batch; the distinct modes among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence.errors import NotAMode
from pyro_evidence.infer.iterate import Fit, Status
from pyro_evidence.infer.type2 import TypeII
from pyro_evidence.laplace import LaplaceState, Problem, find_modes, require_proper, state_at
from pyro_evidence.parameters import submodules
from pyro_evidence.program import LogJoint


@runtime_checkable
class Starting(Protocol):
    """A network that knows where to start its weights."""

    def starts(self, num: int, seed: int) -> dict[str, Tensor]:
        """Values of real-valued sites by name, ``(num,) + shape`` each."""


def starts(joint: LogJoint, num: int, seed: int) -> Tensor:
    """Random starts, ``(num, D)``: as NUTS draws them, or where a network within the model's reach wants to start."""
    values = joint.latents.unconstrained(joint.initial(num, seed))
    for network in submodules(joint.model):
        if isinstance(network, Starting):
            own = {n: v for n, v in network.starts(num, seed).items() if n in values and v.shape == values[n].shape}
            values |= {n: v.to(values[n]) for n, v in own.items()}
    return torch.cat([v.reshape(num, -1) for v in values.values()], -1)


@dataclass(frozen=True)
class Restarts:
    """The distinct modes that were found, best first, and which of them each restart reached."""

    states: tuple[LaplaceState, ...]
    reached: Tensor  # (R,) index into states, -1 where a restart failed
    failures: tuple[str, ...]


def search(at: Problem, starts: Tensor, theta: Tensor, progress: bool = False) -> Restarts:
    """Climb from ``starts`` ``(R, D)`` at hyperparameters ``theta``; modes of one height are one mode.

    Relabelled mixture components and mirrored hidden units give modes of equal height, of which one is kept.

    :raises NotAMode: when every restart failed, with what each said.
    """
    with tqdm(desc="posterior mode", delay=1.0, disable=not progress, leave=False) as bar:
        mode = find_modes(at, starts, theta, cold=True, watch=partial(_show, bar))
    if not at.structure.agrees(mode.u[mode.converged], theta):
        return search(at.without_linear, starts, theta, progress)
    return distinct([partial(state_at, at, theta, mode, row) for row in range(len(starts))])


def distinct(found: Sequence[Callable[[], LaplaceState]]) -> Restarts:
    """The distinct modes among those that are found when asked for.

    :raises NotAMode: when none is found, with what each said.
    """
    states: list[LaplaceState] = []
    reached, failures = [], {}
    for row, find in enumerate(found):
        try:
            reached.append(_index(states, find()))
        except ArithmeticError as error:
            reached.append(-1)
            failures[row] = error
    if not states:
        raise _all_failed(failures)
    letters = tuple(f"restart {row}: {error}" for row, error in failures.items())
    return _sorted(states, torch.tensor(reached), letters)


def _sorted(states: list[LaplaceState], reached: Tensor, failures: tuple[str, ...]) -> Restarts:
    order = sorted(range(len(states)), key=lambda i: -states[i].objective)
    rank = torch.tensor([order.index(i) for i in range(len(states))] + [-1])
    return Restarts(tuple(states[i] for i in order), rank[reached], failures)


def _all_failed(failures: dict[int, ArithmeticError]) -> ArithmeticError:
    if len(failures) == 1:
        return failures[0]
    return NotAMode(
        "\n".join(["all restarts failed."] + [f"restart {row}: {error}" for row, error in failures.items()])
    )


def _show(bar: Any, log_joint: Tensor) -> None:
    bar.set_postfix_str(f"log joint {float(log_joint.max()):.4f}", refresh=False)
    bar.update()


def _index(states: list[LaplaceState], state: LaplaceState) -> int:
    """Position of a state's mode among ``states``, which grows when it is a new one."""
    for i, known in enumerate(states):
        if _same_height(known, state):
            return i
    require_proper(state)
    states.append(state)
    return len(states) - 1


def _same_height(a: LaplaceState, b: LaplaceState) -> bool:
    tolerance = a.problem.tolerance**0.5 * (1.0 + abs(a.objective))
    gaps = (a.objective - b.objective, float(a.log_joint - b.log_joint))
    return all(abs(gap) <= tolerance for gap in gaps)


def without_repeats(fits: Sequence[Fit[TypeII]]) -> list[Fit[TypeII]]:
    """The best first, of several at one height one; those whose height means nothing last."""
    ordered = sorted(fits, key=lambda fit: (fit.status is Status.SINGULAR, -fit.state.objective))
    found: list[Fit[TypeII]] = []
    for fit in ordered:
        if not any(_same_height(fit.state.laplace, other.state.laplace) for other in found):
            found.append(fit)
    return found
