"""Which of several programs, and with which probability: one structure site in front of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import distributions as dist

from pyro_evidence.errors import BadInput
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.posterior.structures import StructurePosterior
from pyro_evidence.program.branching import Model

CHOICE = "program"  # the structure site


@dataclass(frozen=True)
class Programs:
    """One of several programs, by a structure site ``program`` that counts them from zero.

    :ivar programs: with the same arguments and the same data.
    :ivar probabilities: prior, of each.
    """

    programs: tuple[Model, ...]
    probabilities: tuple[float, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        law = dist.Categorical(torch.tensor(self.probabilities, dtype=torch.float64))
        annotation: Any = {"branching": True}  # which is not among Pyro's own
        choice = pyro.sample(CHOICE, law, infer=annotation)
        return self.programs[int(choice)](*args, **kwargs)


def explore(
    programs: Mapping[str, Model],
    *args: Any,
    prior: Mapping[str, float] | None = None,
    engine: Callable[[Model], LaplaceEvidence] = LaplaceEvidence,
    **kwargs: Any,
) -> StructurePosterior:
    """The posterior over whole programs of the same data: their probabilities, and predictions averaged over them.

    Structure sites of the programs' own are summed over as well.

    :param programs: by name; likelihoods, priors, plates and names of sites may differ.
    :param args: their arguments, data included.
    :param prior: probability of each, up to a factor; None: alike.
    :param engine: makes the engine of a model, such as ``partial(LaplaceEvidence, nodes=7)``.
    :raises BadInput: for no programs, and a prior of other names or of numbers that are no probabilities.

    >>> import torch
    >>> from pyro_evidence import explore
    >>> def heads(y):
    ...     pyro.sample("p", dist.Beta(9.0, 1.0))
    ...     pyro.sample("y", dist.Bernoulli(0.9).expand([len(y)]).to_event(1), obs=y)
    >>> def fair(y):
    ...     pyro.sample("p", dist.Beta(5.0, 5.0))
    ...     pyro.sample("y", dist.Bernoulli(0.5).expand([len(y)]).to_event(1), obs=y)
    >>> posterior = explore({"heads": heads, "fair": fair}, torch.tensor([1.0, 1.0, 0.0, 1.0]))
    >>> {name: round(float(p), 3) for name, p in posterior.values_of("program").items()}
    {'heads': 0.538, 'fair': 0.462}
    """
    if not isinstance(programs, Mapping) or not programs:
        raise BadInput(f"programs={programs!r}; expected programs by name: explore({{'poisson': model, ...}}, *data).")
    weights = dict.fromkeys(programs, 1.0) if prior is None else dict(prior)
    if weights.keys() != programs.keys() or not all(w > 0 for w in weights.values()):
        raise BadInput(f"prior={weights}; expected a positive number for each of {', '.join(programs)}.")
    total = sum(weights.values())
    model = Programs(tuple(programs.values()), tuple(weights[n] / total for n in programs))
    found = engine(model).run(*args, **kwargs)
    assert isinstance(found, StructurePosterior)
    return replace(found, labels={CHOICE: tuple(programs)})
