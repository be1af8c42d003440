"""The one backtracking search: of ever shorter steps uphill, the first that an acceptance rule takes.

Of many rows at once, each with a step length of its own, or of one state (:func:`first_accepted`).
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyro_evidence.numerics.batched import Batched
from pyro_evidence.numerics.linalg import relative_rounding


@dataclass(frozen=True, eq=False)
class SearchPoint(Batched):
    """Points with their objective and its gradient."""

    u: Tensor  # (R, D)
    objective: Tensor  # (R,)
    gradient: Tensor  # (R, D)


Watch = Callable[[Tensor], None]  # told every row's objective once per step


def no_callback(objective: Tensor) -> None:
    """Does nothing."""


def along_step(u: Tensor, scale: Tensor, step: Tensor) -> Tensor:
    """``u + scale step`` in each row, ``(R, D)``."""
    return u + scale.unsqueeze(-1).to(step) * step


def curves(s: Tensor, y: Tensor) -> Tensor:
    """Whether slopes that fall by ``y`` along steps ``s`` ``(..., D)`` show a curvature, ``s'y > 0``, ``(..., 1)``."""
    return (s * y).sum(-1, keepdim=True) > relative_rounding(y.dtype) * y.square().sum(-1, keepdim=True)


ON_THE_WAY = 9  # places: from the ends of profiles less than a standard deviation apart; none misses a wide valley


def lead_uphill(height: Callable[[Tensor], Tensor], places: Tensor, top: Tensor) -> Tensor:
    """From which of ``places`` ``(M, d)`` the straight way to ``top`` rises all along, so that climbs end there.

    The ways are looked at in one batch, where climbs take many evaluations one after another.

    :param height: of rows ``(S, d)``, ``(S,)``.
    :param top: ``(d,)``, or one for each place.
    :return: bool, ``(M,)``.
    """
    way = places + torch.linspace(0.0, 1.0, ON_THE_WAY).to(places)[:, None, None] * (top - places)
    return (height(way.flatten(0, 1)).reshape(way.shape[:2]).diff(dim=0) > 0.0).all(0)


Rows = TypeVar("Rows", bound=Any)  # a Batched value with an ``objective`` that is maximised, ``(R,)``
State = TypeVar("State")


Real = Any  # a number for each row ``(r,)``, or one number


@dataclass(frozen=True, eq=False)
class Line(Batched):
    """Slope and rounding of each row's step, known before it is tried."""

    promised: Real  # rise of the objective along the whole step, by its slope here
    slack: Real  # rounding of the objective


Rule = Callable[[Real, Real, Line], Real]  # rise and scale of a step: whether it is accepted
Shorter = Callable[[Tensor, Tensor, Line], Tensor]  # rise and scale of one that was not: the next scale, ``(r,)``


KEPT = 1e-4  # of a promise; Nocedal and Wright (2006), section 3.1


def armijo(rise: Real, scale: Real, line: Line) -> Real:
    """Whether a step keeps a ten-thousandth of its promise, up to rounding.  Nocedal and Wright (2006), eq. 3.4."""
    return rise >= KEPT * scale * line.promised - line.slack


def clear_rise(rise: Real, scale: Real, line: Line) -> Real:
    """:func:`armijo`; and a shortened step must rise beyond rounding, or else the halving has found noise."""
    return armijo(rise, scale, line) & ((scale == 1.0) | (rise > line.slack))


def any_rise(rise: Real, _scale: Real, _line: Line) -> Real:
    """Whether a step goes up at all."""
    return rise > 0


def halved(_rise: Tensor, scale: Tensor, _line: Line) -> Tensor:
    """Half the step."""
    return 0.5 * scale


def halved_while_clear(_rise: Tensor, scale: Tensor, line: Line) -> Tensor:
    """Half the step; none where half of it promises no more than rounding, for a density that is concave there."""
    return torch.where(0.5 * scale * line.promised > line.slack, 0.5 * scale, 0.0)


def to_peak(rise: Tensor, scale: Tensor, line: Line) -> Tensor:
    """Where the parabola through what is known peaks, between a tenth and a half of the step.

    Nocedal and Wright (2006), eq. 3.58.  A tenth where nothing is known, because the trial was not finite.
    """
    curvature = (rise - line.promised * scale) / scale.square()
    peak = torch.where(torch.isfinite(curvature) & (curvature < 0), -0.5 * line.promised / curvature, 0.0)
    return torch.minimum(torch.maximum(peak, 0.1 * scale), 0.5 * scale)


def to_peak_or_quarter(rise: Tensor, scale: Tensor, line: Line) -> Tensor:
    """:func:`to_peak`; where nothing is known a quarter of the step."""
    return torch.where(rise.isnan(), 0.25 * scale, to_peak(rise, scale, line))


@dataclass(frozen=True, eq=False)
class Backtracking:
    """Which step is accepted, how one that is not is shortened, and when that ends."""

    rule: Rule = armijo
    shorter: Shorter = halved
    num_trials: int = 40
    shortest: float = 0.0  # scale below which a step moves nothing

    def __call__(
        self, start: Rows, rows: Tensor, line: Line, trial: Callable[[Tensor, Tensor], Rows]
    ) -> tuple[Rows, Tensor]:
        """The first accepted step of each row, and the rows where there was none, which keep their place.

        :param rows: positions of the rows that are to move.
        :param line: of all rows.
        :param trial: of positions ``(r,)`` and scales ``(r,)``, what is that far along the steps of these rows.
        """
        new, scale = start, torch.ones_like(line.promised)[rows]
        for _ in range(self.num_trials):
            if not len(rows):
                break
            found, own = trial(rows, scale), line[rows]
            rise = found.objective - start.objective[rows]
            good = torch.isfinite(found.objective) & self.rule(rise, scale, own)
            if bool(good.all()) and len(rows) == len(start.objective):
                return found, rows[~good]
            new = new.with_rows(rows[good], found[good])
            scale = self.shorter(rise, scale, own)
            left = ~good & (scale >= self.shortest)
            rows, scale = rows[left], scale[left]
        return new, rows


Request = TypeVar("Request")
Answer = TypeVar("Answer")
Found = TypeVar("Found")


def together(
    asking: Sequence[Generator[Request, Answer, Found]],
    answers: Callable[[Mapping[int, Request]], Mapping[int, Answer]],
) -> tuple[Found, ...]:
    """Results of several searches, which ask for evaluations and are answered together.

    :param answers: of the requests of the searches by number, those of at least one; the others wait.
    """
    found, waiting = dict[int, Found](), dict[int, Request]()
    answered: Mapping[int, Any] = dict.fromkeys(range(len(asking)))  # None begins a search
    while answered:
        for number, answer in answered.items():
            waiting.pop(number, None)
            try:
                waiting[number] = asking[number].send(answer)
            except StopIteration as end:
                found[number] = end.value
        answered = answers(waiting) if waiting else {}
    return tuple(found[number] for number in range(len(asking)))


def alone(asking: Generator[Request, Answer, Found], answer: Callable[[Request], Answer]) -> Found:
    """Result of one search, its requests answered one by one."""
    return together([asking], lambda waiting: {0: answer(waiting[0])})[0]


def first_accepted(
    trial: Callable[[float], tuple[float, State] | None],
    height: float,
    promised: float = 0.0,
    slack: float = 0.0,
    search: Backtracking = Backtracking(),
) -> State | None:
    """Result of the first step that is accepted, or None.

    :param trial: of the share of the step that is taken; the objective there and what is there, or None where that
        cannot be computed.
    :param height: the objective here.
    :param promised: its rise along the whole step, by its slope here.
    :param slack: its rounding.
    """
    asking: Generator[float, tuple[float, State] | None, State | None]
    asking = accepted(float, height, Line(promised, slack), search)
    return alone(asking, trial)


def accepted(
    request: Callable[[float], Request], height: float, line: Line, search: Backtracking
) -> Generator[Request, tuple[float, State] | None, State | None]:
    """:func:`first_accepted`, asking for each trial by what ``request`` makes of the share of the step."""
    scale = 1.0
    for _ in range(search.num_trials):
        value, state = (yield request(scale)) or (math.nan, None)
        if math.isfinite(value) and search.rule(value - height, scale, line):
            return state
        rise, length = (torch.tensor(x, dtype=torch.float64) for x in (value - height, scale))
        scale = float(search.shorter(rise, length, line))
        if scale < search.shortest:
            break
    return None
