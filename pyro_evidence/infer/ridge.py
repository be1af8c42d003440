"""Ways to choose the ridge of a relevance eigenvector machine: functions to pass as ``ridge=``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pyro_evidence.eigen_state import Recipe, base_point, eigen_state
from pyro_evidence.errors import BadInput
from pyro_evidence.ops.evidence import log_evidence
from pyro_evidence.ops.linalg import cholesky
from pyro_evidence.ops.parts import Part
from pyro_evidence.weights import LinearTarget, Penalised, Weights

Ridge = Callable[[Weights, Recipe], float]


def isotropic_evidence(weights: Weights, recipe: Recipe) -> float:
    """The ridge of highest Laplace evidence when all weights share it, by golden section from 1e-4 to 1e4."""
    start = torch.zeros(len(weights.order), dtype=torch.float64)
    low, high, ratio = -4.0, 4.0, 0.6180339887498949
    inner = [high - ratio * (high - low), low + ratio * (high - low)]
    heights = [_isotropic(weights, 10.0**p, start) for p in inner]
    while high - low > 0.02:  # of a decade
        if heights[0] >= heights[1]:
            high, inner = inner[1], [inner[1] - ratio * (inner[1] - low), inner[0]]
            heights = [_isotropic(weights, 10.0 ** inner[0], start), heights[0]]
        else:
            low, inner = inner[0], [inner[1], inner[0] + ratio * (high - inner[0])]
            heights = [heights[1], _isotropic(weights, 10.0 ** inner[1], start)]
    return float(10.0 ** (0.5 * (low + high)))


def _isotropic(weights: Weights, ridge: float, start: Tensor) -> float:
    y = base_point(weights.target, ridge, start, weights.num_weights)
    alpha = torch.zeros_like(y)
    alpha[: weights.num_weights] = ridge
    density = Penalised(weights.target, alpha)
    tril = cholesky(density.precision(y.unsqueeze(0), y)[0], "the posterior precision")
    log_joint = (
        density.log_joint(y.unsqueeze(0), y)[0] + 0.5 * weights.num_weights * torch.tensor(ridge / math.tau).log()
    )
    return float(log_evidence(log_joint, 2.0 * tril.diagonal().log().sum(), len(y)))


def cross_validation(ridges: Sequence[float] = (1.0, 0.1, 1e-2, 1e-3, 1e-4), num_folds: int = 2) -> Ridge:
    """The ridge whose fits give left-out data the highest log likelihood.

    Row ``n`` is in fold ``n % num_folds``.  Shuffle data that come in some order.

    :raises BadInput: for no ridges, one that is not positive, or fewer than two folds.
    """
    if not ridges or not all(0.0 < r < math.inf for r in ridges):
        raise BadInput(f"ridges={ridges!r}; expected some positive precisions, such as (1.0, 1e-2, 1e-4).")
    if num_folds < 2:
        raise BadInput(
            f"num_folds={num_folds}; expected at least 2, for some data to be left out and some to be fitted."
        )

    def choose(weights: Weights, recipe: Recipe) -> float:
        if not isinstance(weights.target, LinearTarget) or weights.num_others:
            raise BadInput(
                "cross_validation needs a linear predictor and no latents besides the weights; pass a number."
            )
        target = weights.target
        return max(ridges, key=lambda ridge: _left_out(target, ridge, recipe, num_folds))

    return choose


def _left_out(target: LinearTarget, ridge: float, recipe: Recipe, num_folds: int) -> float:
    start, total = torch.zeros(target.parts[0].J.shape[-1], dtype=torch.float64), 0.0
    for fold in range(num_folds):
        rest, left = (_rows(target, fold, num_folds, inside) for inside in (False, True))
        y = eigen_state(rest, len(start), start, ridge, recipe).y
        total += float(left.value(y.unsqueeze(0))[0])
    return total


def _rows(target: LinearTarget, fold: int, num_folds: int, inside: bool) -> LinearTarget:
    """The target of the rows inside or outside a fold; the others see no weights, and add a constant."""

    def masked(part: Part) -> Part:
        member = torch.arange(len(part.c)) % num_folds == fold
        keep = (member == inside).unsqueeze(-1).to(part.c)
        return replace(part, J=part.J * keep.unsqueeze(-1), c=part.c * keep)

    return replace(target, parts=tuple(masked(p) for p in target.parts))
