"""Which of several programs, and with which probability: one structure site in front of them."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import pyro
import torch
from pyro import distributions as dist
from torch import Tensor

from pyro_evidence.compare.many import FAILURES
from pyro_evidence.errors import BadInput, NotAMode, NotConverged
from pyro_evidence.fitting.iterate import bar_of
from pyro_evidence.infer.evidence_em import EvidenceEM
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.laplace.approximation import laplace_problem, laplace_state
from pyro_evidence.laplace.replicates import Columns
from pyro_evidence.laplace.restarts import thetas
from pyro_evidence.laplace.type2 import step, type2_state
from pyro_evidence.models.basis import Learned
from pyro_evidence.models.formula.design import complete_rows, formulas_within
from pyro_evidence.models.formula.mixed import MixedModel, mixed
from pyro_evidence.models.formula.terms import parsed
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import ChangePoint, CompositeKernel, Kernel, Product, Setting, Sum
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.replicates import agreed, can_be_batched, examples, together
from pyro_evidence.posterior.structures import StructurePosterior, over
from pyro_evidence.program.branching import Model, Structures
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import Start, check_count, check_model, seeded

CHOICE, KERNEL = "program", "kernel"  # the structure sites
LEVEL = 1e-3  # nats, a slope that is nothing beside the nat that a setting costs: one that runs to zero goes on long
DRAWN = 32  # starts of a kernel's settings, of which the highest is climbed from: a tenth of the climb
CLOSED = 0.25  # of the nats that a climb is short of, in two steps: one that closes less is given up


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
    engine: Callable[[Model], Any] = LaplaceEvidence,
    **kwargs: Any,
) -> StructurePosterior:
    """The posterior over whole programs of the same data: their probabilities, and predictions averaged over them.

    Structure sites of the programs' own are summed over as well.

    Of kernels, ``explore({"trend": RBF(), "season": Periodic()}, X, y, depth=3)``, the programs are Gaussian processes
    with sums, products and change points of these, found by steps: the best at each depth, as many as ``beam``, go on
    to all that one more kernel makes of it or of one of its parts (Duvenaud et al. 2013; Lloyd et al. 2014).  Settings
    with priors are integrated.  Those that are learned begin where their parts ended, or elsewhere if that is higher,
    or as given if a climb from there overtakes.  The prior of a kernel falls by a nat with each, since it may have
    gained as much; so it does for mixtures with each number that ``engine=EvidenceEM`` maximises.  What kernels that
    were not looked at hold is not known: ``unvisited`` is nan.

    Of a formula and a frame,
    ``explore("y ~ (a + b + c)^2 + (1 | g)", frame)``, the programs are the formulas within it: fixed terms may be in or
    out, an interaction with its margins alone, ``inclusion("a:b")`` is the probability of a term.

    :param programs: by name; likelihoods, priors, plates and names of sites may differ, and some may have no latents.
        Or kernels by name.  Or a formula, as :func:`~pyro_evidence.models.formula.mixed` takes it.
    :param args: their arguments, data included; the frame of a formula.
    :param prior: probability of each, up to a factor; None: alike.  Of programs and formulas.
    :param engine: makes the engine of a model, such as ``partial(LaplaceEvidence, nodes=7)``.
    :param kwargs: arguments of the programs by name; of a formula what ``mixed`` takes, ``priors="weak"`` unless given;
        of kernels ``depth``, the most of them in one, 3 unless given, ``beam``, 1 unless given, and ``model``, which
        makes the program of a kernel, :func:`~pyro_evidence.models.gp.gp_regression` unless given.
    :raises BadInput: for no programs, and a prior of other names or of numbers that are no probabilities.

    >>> import torch
    >>> from pyro_evidence import explore
    >>> def heads(y):
    ...     pyro.sample("y", dist.Bernoulli(0.9).expand([len(y)]).to_event(1), obs=y)
    >>> def fair(y):
    ...     pyro.sample("y", dist.Bernoulli(0.5).expand([len(y)]).to_event(1), obs=y)
    >>> posterior = explore({"heads": heads, "fair": fair}, torch.tensor([1.0, 1.0, 0.0, 1.0]))
    >>> {name: round(float(p), 3) for name, p in posterior.values_of("program").items()}
    {'heads': 0.538, 'fair': 0.462}
    """
    if not callable(engine):
        raise BadInput(f"engine={engine!r}; expected what makes one of a model: partial(LaplaceEvidence, nodes=7).")
    if isinstance(programs, str):
        return _explore_formulas(programs, *args, prior=prior, engine=engine, **kwargs)
    if not isinstance(programs, Mapping) or not programs:
        raise BadInput(f"programs={programs!r}; expected programs by name: explore({{'poisson': model, ...}}, *data).")
    if any(isinstance(each, Kernel) for each in programs.values()):
        if prior is not None or not all(isinstance(each, Kernel) for each in programs.values()):
            raise BadInput("programs has kernels, and prior= or other programs too; expected kernels alone.")
        return _explore_kernels(programs, *args, engine=engine, **kwargs)
    shares = _shares(programs, prior)
    for program in programs.values():
        check_model(program)
    one = engine(Programs(tuple(programs.values()), tuple(shares)))
    if isinstance(one, LaplaceEvidence):
        return replace(one.run(*args, **kwargs), labels={CHOICE: tuple(programs)})
    if not isinstance(one, EvidenceEM):
        raise BadInput(f"engine= makes {type(one).__name__}; expected LaplaceEvidence, or EvidenceEM of mixtures.")
    ends = dict[str, LaplacePosterior | Exception]()
    for name, program in programs.items():
        try:
            ends[name] = engine(program).run(*args, **kwargs)
        except (ArithmeticError, NotConverged) as error:
            ends[name] = error
    sizes = [0 if isinstance(end, Exception) else end._num_maximised for end in ends.values()]
    return _of_ends(CHOICE, ends, torch.tensor(shares, dtype=torch.float64).log(), sizes)


def _of_ends(
    site: str, ends: Mapping[str, LaplacePosterior | Exception], log_prior: Tensor, sizes: Sequence[int]
) -> StructurePosterior:
    """The posterior over programs, by name, of which fits are known, or why there is none.

    :param sizes: how many numbers are maximised in each.
    """
    names, every = tuple(ends), torch.ones(len(ends), dtype=torch.bool)

    def end(chosen: Mapping[str, Any]) -> LaplacePosterior:
        one = ends[names[int(chosen[site])]]
        if isinstance(one, Exception):
            raise one if isinstance(one, ArithmeticError | NotConverged) else NotAMode(str(one)) from one
        return one

    log_prior = (log_prior - torch.tensor(sizes, dtype=torch.float64)).log_softmax(0)
    looked = over(
        Structures({site: torch.arange(len(names))}, {site: every}, log_prior), end, Start(), False, penalised=True
    )
    said = "the log prior falls by a nat with each number that is maximised, which may have gained as much"
    return replace(looked, labels={site: names}, notes=(said,))


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
    frame: Any = None,
    *,
    prior: Mapping[str, float] | None,
    engine: Callable[[Model], LaplaceEvidence],
    weights: str | None = None,
    **settings: Any,
) -> StructurePosterior:
    """The posterior over the formulas within a formula, on the rows that the whole formula has."""
    kept = complete_rows(parsed(formula, frame).values(), frame, [] if weights is None else [weights])
    terms, within, alike_in_all = formulas_within(formula, kept)
    columns = torch.tensor(list(within.values()), dtype=torch.float64).unbind(-1)
    values = dict(zip(terms, columns, strict=True))
    there = {term: torch.ones(len(within), dtype=torch.bool) for term in terms}
    log_prior = torch.tensor(_shares(within, prior), dtype=torch.float64).log()
    texts = {keep: text for text, keep in within.items()}

    def model_of(text: str) -> tuple[MixedModel, tuple[Any, ...]]:
        return mixed(text, kept, weights=weights, **{"priors": "weak", **settings})

    def fit(chosen: Mapping[str, Any]) -> LaplacePosterior:
        model, data = model_of(texts[tuple(bool(chosen[term]) for term in terms)])
        one = engine(model)
        one.stop = replace(one.stop, progress=False)
        return one.run(*data)

    model, data = model_of(formula)
    whole = engine(model)

    def together_with(some: Structures, alone: Callable[[int], LaplacePosterior | None]) -> Mapping[int, float]:
        """Log evidences by the program of the whole formula: a coefficient whose column is zero has its prior alone."""
        if not alike_in_all:
            return {}
        names = model.coords["coefficient"]
        of_term = torch.tensor([[1.0 * (name in columns) for name in names] for columns in terms.values()]).double()
        every = 1.0 - (1.0 - torch.stack([some.values[term] for term in terms], -1)) @ of_term

        def masked(factors: Tensor, X: Tensor, *others: Any) -> Any:
            return model(X * factors, *others)

        def columns_of(joint: LogJoint) -> Columns:
            return [(every, True), *((x, False) for x in joint.args[1:])]

        one = replace(whole, model=masked, stop=replace(whole.stop, progress=False))

        def by_whole(k: int) -> LaplacePosterior | None:
            found = alone(k)
            if found is not None and can_be_batched(found, whole.start):
                with suppress(*FAILURES):
                    return one.run(every[k], *data)
            return None

        found = together(columns_of, len(some), by_whole, whole.start, whole.stop.quadrature_tol).log_evidences
        told = {k: alone(k) for k in examples(len(some))} if found else {}
        agree = all(each and agreed(found.get(k, math.nan), float(each.log_evidence)) for k, each in told.items())
        return found if agree else {}

    return over(Structures(values, there, log_prior), fit, Start(), whole.stop.progress, None, together_with)


@dataclass(frozen=True)
class KernelExpression:
    """A kernel made of others.

    :ivar text: how it is written; alike for terms and factors in another order.
    """

    text: str
    kernel: Kernel
    parts: tuple["KernelExpression", ...] = ()

    def ending(self, kernel: Kernel) -> "KernelExpression":
        """The expression whose settings begin where those of another kernel of its form do."""
        return KernelExpression(
            self.text, kernel, tuple(map(KernelExpression.ending, self.parts, getattr(kernel, "parts", ())))
        )

    def grown(self, bases: Collection["KernelExpression"]) -> Iterator["KernelExpression"]:
        """Expressions that one more kernel makes of it, or of one of its parts."""
        for base in bases:
            yield made(Sum(()), self, base)
            yield made(Product(()), self, base.ending(base.kernel.resolved(_without_variance)))
            yield from (made(ChangePoint(()), *pair) for pair in ((self, base), (base, self)))
        for i, part in enumerate(self.parts):
            yield from (made(self.kernel, *self.parts[:i], new, *self.parts[i + 1 :]) for new in part.grown(bases))


def made(kind: Kernel, *given: KernelExpression) -> KernelExpression:
    """A kernel of the kind and the settings of another, with these parts."""
    assert isinstance(kind, CompositeKernel)
    changes, multiplies = isinstance(kind, ChangePoint), isinstance(kind, Product)
    flat = [x for e in given for x in (e.parts if e.parts and type(e.kernel) is type(kind) and not changes else (e,))]
    texts = [f"({e.text})" if multiplies and e.parts and isinstance(e.kernel, Sum) else e.text for e in flat]
    text = f"change({', '.join(texts)})" if changes else (" * " if multiplies else " + ").join(sorted(texts))
    return KernelExpression(text, replace(kind, parts=tuple(e.kernel for e in flat)), tuple(flat))


def _without_variance(name: str, setting: Setting, kernel: Kernel) -> Setting:
    """A setting of a factor of a product, whose other factors have a variance."""
    return 1.0 if name.endswith(".variance") else setting


def _explore_kernels(
    kernels: Mapping[str, Any],
    *args: Any,
    engine: Callable[[Model], LaplaceEvidence],
    depth: int = 3,
    beam: int = 1,
    model: Callable[[Kernel], Model] = gp_regression,
    **kwargs: Any,
) -> StructurePosterior:
    """The posterior over kernels that a search among sums, products and change points has looked at."""
    depth, beam = check_count("depth", depth), check_count("beam", beam)
    bases = [KernelExpression(name, kernel) for name, kernel in kernels.items()]
    level, ends = {base.text: (base, dict[str, Tensor]()) for base in bases}, dict[str, LaplacePosterior | Exception]()
    sizes, progress = dict[str, int](), engine(model(bases[0].kernel)).stop.progress
    with bar_of("kernels", progress) as bar:
        for number in range(depth):
            found: list[tuple[float, KernelExpression, dict[str, Tensor]]] = []
            for text, (each, values) in level.items():
                bar.update()
                sizes[text] = _num_learned(each.kernel)
                one, plain = (engine(model(kernel)) for kernel in (each.kernel, each.kernel.resolved(_as_given)))
                ends[text] = posterior = _fitted(one, plain, args, kwargs, values)
                if isinstance(posterior, Exception):
                    continue
                reached = {n: v.detach() for n, v in posterior.hyperparameters.items()}
                others = {n: v for n, v in reached.items() if not n.startswith("kernel.")}
                found.append(
                    (float(posterior.log_evidence) - sizes[text], each.ending(_beginning(each.kernel, reached)), others)
                )
            if not number:
                if not found:
                    raise next(error for error in ends.values() if isinstance(error, Exception))
                known = {each.text: each for _, each, _ in found}
                bases = [known.get(base.text, base) for base in bases]
            best = sorted(found, key=itemgetter(0), reverse=True)[:beam]
            grown = [(new, others) for _, each, others in best for new in each.grown(bases)]
            level = {new.text: (new, others) for new, others in grown if new.text not in ends}
    looked = _of_ends(KERNEL, ends, torch.zeros(len(ends), dtype=torch.float64), [sizes[text] for text in ends])
    return replace(looked, search=replace(looked.search, unvisited=math.nan))


def _num_learned(kernel: Kernel) -> int:
    """Number of a kernel's settings that are learned."""
    sizes: list[int] = []

    def read(name: str, setting: Setting, kernel: Kernel) -> Setting:
        sizes.append(torch.as_tensor(setting.start).numel() if isinstance(setting, Learned) else 0)
        return setting

    kernel.resolved(read)
    return sum(sizes)


@dataclass(frozen=True, eq=False)
class Reached(Learned):
    """A setting that begins where that of a part has ended, and what it was given as."""

    given: Setting = 1.0


def _as_given(name: str, setting: Setting, kernel: Kernel) -> Setting:
    return setting.given if isinstance(setting, Reached) else setting


def _beginning(kernel: Kernel, values: Mapping[str, Tensor]) -> Kernel:
    """The kernel whose settings begin at values."""

    def begun(name: str, setting: Setting, kernel: Kernel) -> Setting:
        return Reached(values[name], _as_given(name, setting, kernel)) if name in values else setting

    return kernel.resolved(begun)


def _fitted(
    one: LaplaceEvidence,
    plain: LaplaceEvidence,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: Mapping[str, Tensor],
) -> LaplacePosterior | Exception:
    """The fit of a kernel from where its parts ended, or from the settings as given, where that climb overtakes it.

    :param plain: the engine of the settings as given.
    :param values: of what is learned beside the kernel, where that ended.
    """
    found: LaplacePosterior | Exception
    one.stop = replace(one.stop, progress=False, gradient_tolerance=max(LEVEL, one.stop.gradient_tolerance))
    plain.stop = one.stop
    try:
        one.start = replace(one.start, values=_highest(one, args, kwargs, values))
        found = one.run(*args, **kwargs)
    except FAILURES as error:
        found = error
    with suppress(*FAILURES):
        height = -math.inf if isinstance(found, Exception) else float(found.log_evidence)
        if _overtakes(LogJoint(plain.model, args, kwargs, maximise=plain.maximise), height + LEVEL):
            other = plain.run(*args, **kwargs)
            found = other if float(other.log_evidence) > height else found
    return found


def _overtakes(joint: LogJoint, height: float) -> bool:
    """Whether a climb from a model's own values passes a height, two steps closing a part of what is missing."""
    state = type2_state(laplace_state(laplace_problem(joint), joint.initial_theta, joint.initial_u))
    heights = [state.objective]
    while heights[-1] <= height:
        if len(heights) > 2 and heights[-1] - heights[-3] < CLOSED * (height - heights[-3]):
            return False
        state = step(state)
        heights.append(state.objective)
    return True


def _highest(
    engine: LaplaceEvidence, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Hyperparameters of the highest log evidence among those that a model begins with and draws around them.

    :param values: of those that are not drawn.
    """
    joint = LogJoint(engine.model, args, kwargs, maximise=engine.maximise, values=values)
    rows, generator = thetas(joint, DRAWN, 0), seeded(0)
    rows = torch.where(torch.rand(rows.shape, generator=generator).to(rows) < 0.5, rows, rows[0])
    problem, heights = laplace_problem(joint), torch.full(rows.shape[:1], -torch.inf)
    for row, theta in enumerate(rows if rows.shape[-1] else rows[:0]):
        with suppress(ArithmeticError):
            heights[row] = laplace_state(problem, theta, joint.initial_u).objective
    return joint.hypers.constrained(rows[int(heights.nan_to_num(nan=-torch.inf).argmax())])
