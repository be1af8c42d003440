"""Log evidence as a sum of forecasts: what each new datum adds, given those before it."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import cut_rows
from pyro_evidence.errors import BadInput
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import check_count


@dataclass(frozen=True)
class Prequential:
    """Log predictive densities of a series, one step after the other; Dawid (1984).

    :ivar steps: lengths of the series, ascending, ``(S,)``.
    :ivar log_evidences: of the data up to each length, nats, ``(S,)``.

    >>> import torch
    >>> from pyro_evidence.compare import Prequential
    >>> Prequential(torch.tensor([1, 2, 3]), torch.tensor([-1.0, -2.0, -4.5])).log_scores
    tensor([-1.0000, -2.5000])
    """

    steps: Tensor
    log_evidences: Tensor

    @property
    def log_scores(self) -> Tensor:
        """``log p(y_t | y_<t)`` of what each length has more than the one before, nats, ``(S - 1,)``."""
        return self.log_evidences.diff()


def prequential(engine: LaplaceEvidence, args: tuple[Any, ...], *, first: int, step: int = 1) -> Prequential:
    """Fit ever longer parts of a series, each begun where the last one ended.

    The scores and the log evidence of the first part sum to the log evidence of all: exactly so where the engine's is
    exact.  Where one model's cumulated scores rise above another's is where it forecasts better.

    :param args: the model's arguments over all steps: tensors as long as the data are cut along their first dimension,
        and whole numbers that are their length are made smaller.
    :param first: length of the first part.
    :param step: how many one part has more than the last.
    :raises BadInput: for a first part that is not shorter than the series, and for an engine that maximises: a maximum
        over hyperparameters is another one at each length, and no forecast.

    >>> import torch
    >>> from pyro import distributions as dist, plate, sample
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.compare import prequential
    >>> def model(y):
    ...     loc = sample("loc", dist.Normal(0.0, 1.0))
    ...     with plate("steps", len(y)):
    ...         sample("y", dist.Normal(loc, 1.0), obs=y)
    >>> scores = prequential(LaplaceEvidence(model), (torch.tensor([0.5, 0.2, 2.0]),), first=1).log_scores
    >>> [round(float(x), 2) for x in scores]
    [-1.12, -2.23]
    """
    joint = LogJoint(engine.model, args)
    nodes = joint.trace(joint.initial_u, joint.initial_theta).nodes
    size = len(nodes[joint.observed[0]]["value"])
    first, step = check_count("first", first), check_count("step", step)
    if first >= size:
        raise BadInput(f"prequential(first={first}) of {size} steps; expected fewer, so that some can be forecast.")
    steps = [*range(first, size, step), size]
    known: dict[str, Tensor] = {}
    found = []
    for length in steps:
        cut = cut_rows(args, size, slice(length))
        part = tuple(length if isinstance(x, int) and x == size else x for x in cut)
        run = copy.copy(engine)
        run.start = replace(engine.start, values={**(engine.start.values or {}), **known})
        posterior = run.run(*part)
        if posterior._num_maximised:
            raise BadInput(
                f"prequential: the engine maximises {sorted(posterior.hyperparameters)}; expected all to be integrated "
                f"or held. Give them priors (pyro.sample), or take maximise=()."
            )
        found.append(posterior.log_evidence)
        known = {n: v for n, v in posterior.mode.items() if length not in v.shape}  # what grows begins anew
    return Prequential(torch.tensor(steps), torch.stack(found))
