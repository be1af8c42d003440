"""Log predictive density, by draws of an engine, of data that it has not seen."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.compare.runs import EngineRun
from pyro_evidence.program.checks import require_targets
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import from_predictive, mean_rows, pointwise_rows

MOST_REPLICATES = 500  # new data sets, from as many draws spread over the chains


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictive mean, deviation and log density of each held-out element, in the order of the observed sites.

    :ivar observed: the elements themselves, shape ``(E,)``.
    :ivar mean: their predictive means, shape ``(E,)``.
    :ivar replicates: new values of them, shape ``(S, E)``.
    :ivar support: the support of each site's distribution and its number of elements.
    """

    observed: Tensor
    mean: Tensor
    replicates: Tensor
    support: tuple[tuple[object, int], ...]


Loss = Callable[[Prediction], Tensor]  # -> (E,)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """One engine on held-out data.

    :ivar log_density: log posterior predictive density of each datum, nats, shape ``(N,)``.
    :ivar error: loss of each element, shape ``(E,)``.
    """

    log_density: Tensor
    error: Tensor
    prediction: Prediction

    @property
    def binary(self) -> bool:
        """Whether all elements are of two classes."""
        return all(support is constraints.boolean for support, _ in self.prediction.support)

    @property
    def pit(self) -> Tensor:
        """Share of the replicates below each observed element, half of the ties, shape ``(E,)``; uniform if right."""
        below = (self.prediction.replicates < self.prediction.observed).double().mean(0)
        return below + 0.5 * (self.prediction.replicates == self.prediction.observed).double().mean(0)


def misclassified_or_squared(prediction: Prediction) -> Tensor:
    """1 for a wrong class and 0 for a right one; squared error of the predictive mean for numbers, ``(E,)``."""
    sizes = [size for _, size in prediction.support]
    parts = zip(
        prediction.support,
        prediction.observed.split(sizes),
        prediction.mean.split(sizes),
        prediction.replicates.split(sizes, -1),
        strict=True,
    )
    losses = []
    for (support, _), observed, mean, replicates in parts:
        if support is constraints.boolean:
            losses.append(((mean > 0.5) != (observed > 0.5)).double())
        elif isinstance(support, type(constraints.integer_interval(0, 1))):
            losses.append((replicates.mode(0).values != observed).double())
        else:
            losses.append((mean - observed).square())
    return torch.cat(losses)


def held_out(of: EngineRun, joint: LogJoint, loss: Loss = misclassified_or_squared, seed: int = 0) -> HeldOut:
    """One engine's draws on data.

    :param joint: the engine's density over the held-out data.
    :raises BadInput: when the model cannot be run on them.
    """
    u, theta = joint.latents.flat(of.draws).flatten(0, 1), joint.initial_theta
    require_targets(joint.trace(u[0], theta).nodes, joint.observed, joint.unvalidated)
    rows = pointwise_rows(joint, u, theta)
    log_density = torch.cat([v.reshape(len(u), -1) for v in rows.values()], -1).double()
    some = u[torch.linspace(0, len(u) - 1, min(MOST_REPLICATES, len(u))).round().long()]
    replicates = from_predictive(joint, theta, some, seed)
    means = mean_rows(joint, u, theta)
    nodes = joint.trace(joint.initial_u, theta).nodes
    names = [n for n in joint.observed if n in replicates]
    flat = {n: replicates[n].double().reshape(len(some), -1) for n in names}
    mean = [(means[n].double().reshape(len(u), -1) if n in means else flat[n]).mean(0) for n in names]
    support = []
    for n in names:
        of_one = nodes[n]["fn"].support
        while hasattr(of_one, "base_constraint"):  # a dim that to_event declared
            of_one = of_one.base_constraint
        support.append((of_one, flat[n].shape[-1]))
    observed = torch.cat([nodes[n]["value"].double().flatten() for n in names])
    new = torch.cat([flat[n] for n in names], -1)
    prediction = Prediction(observed, torch.cat(mean), new, tuple(support))
    return HeldOut(log_density.logsumexp(0) - math.log(len(u)), loss(prediction), prediction)
