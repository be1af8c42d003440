"""Which of several programs, and with which probability: one structure site in front of them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import distributions as dist

from pyro_evidence.errors import BadInput
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.models.formula.design import complete_rows, formulas_within
from pyro_evidence.models.formula.mixed import mixed
from pyro_evidence.models.formula.terms import parsed
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.structures import StructurePosterior, over
from pyro_evidence.program.branching import Model, Structures
from pyro_evidence.settings import Start

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
    programs: Mapping[str, Model] | str,
    *args: Any,
    prior: Mapping[str, float] | None = None,
    engine: Callable[[Model], LaplaceEvidence] = LaplaceEvidence,
    **kwargs: Any,
) -> StructurePosterior:
    """The posterior over whole programs of the same data: their probabilities, and predictions averaged over them.

    Structure sites of the programs' own are summed over as well.  Of a formula and a frame,
    ``explore("y ~ (a + b + c)^2 + (1 | g)", frame)``, the programs are the formulas within it: fixed terms may be in or
    out, an interaction with its margins alone, ``inclusion("a:b")`` is the probability of a term.

    :param programs: by name; likelihoods, priors, plates and names of sites may differ.  Or a formula, as
        :func:`~pyro_evidence.models.formula.mixed` takes it.
    :param args: their arguments, data included; the frame of a formula.
    :param prior: probability of each, up to a factor; None: alike.
    :param engine: makes the engine of a model, such as ``partial(LaplaceEvidence, nodes=7)``.
    :param kwargs: arguments of the programs by name; of a formula what ``mixed`` takes, ``priors="weak"`` unless given.
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
    if isinstance(programs, str):
        return _explore_formulas(programs, *args, prior=prior, engine=engine, **kwargs)
    if not isinstance(programs, Mapping) or not programs:
        raise BadInput(f"programs={programs!r}; expected programs by name: explore({{'poisson': model, ...}}, *data).")
    shares = _shares(programs, prior)
    model = Programs(tuple(programs.values()), tuple(shares))
    found = engine(model).run(*args, **kwargs)
    assert isinstance(found, StructurePosterior)
    return replace(found, labels={CHOICE: tuple(programs)})


def _shares(names: Collection[str], prior: Mapping[str, float] | None) -> list[float]:
    """Prior probabilities of names.

    :raises BadInput: for other names, and for what is not above zero.
    """
    weights = dict.fromkeys(names, 1.0) if prior is None else dict(prior)
    if weights.keys() != set(names) or not all(w > 0 for w in weights.values()):
        raise BadInput(f"prior={weights}; expected a positive number for each of {', '.join(names)}.")
    total = sum(weights.values())
    return [weights[n] / total for n in names]


def _explore_formulas(
    formula: str,
    frame: Any,
    *,
    prior: Mapping[str, float] | None,
    engine: Callable[[Model], LaplaceEvidence],
    weights: str | None = None,
    **settings: Any,
) -> StructurePosterior:
    """The posterior over the formulas within a formula, on the rows that the whole formula has."""
    kept = complete_rows(parsed(formula).values(), frame, [] if weights is None else [weights])
    terms, within = formulas_within(formula, kept)
    columns = torch.tensor(list(within.values()), dtype=torch.float64).unbind(-1)
    values = dict(zip(terms, columns, strict=True))
    there = {term: torch.ones(len(within), dtype=torch.bool) for term in terms}
    log_prior = torch.tensor(_shares(within, prior), dtype=torch.float64).log()
    texts = {keep: text for text, keep in within.items()}

    def engine_of(text: str) -> tuple[LaplaceEvidence, Any]:
        model, data = mixed(text, kept, weights=weights, **{"priors": "weak", **settings})
        return engine(model), data

    def fit(chosen: Mapping[str, Any]) -> LaplacePosterior:
        one, data = engine_of(texts[tuple(bool(chosen[term]) for term in terms)])
        one.stop = replace(one.stop, progress=False)
        found: LaplacePosterior = one.run(*data)
        return found

    whole, _ = engine_of(formula)
    return over(Structures(values, there, log_prior), fit, Start(), whole.stop.progress)
