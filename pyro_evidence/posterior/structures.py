"""The posterior over structures of a model: their probabilities, and averages over them."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add, itemgetter
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_evidence.display import Axes, Table, axes_or_own, check_axes, matplotlib
from pyro_evidence.errors import BadInput, NotAMode, NotConverged, Unbounded, UnsupportedModel
from pyro_evidence.files import Array
from pyro_evidence.fitting.codec import encoded_arguments
from pyro_evidence.fitting.iterate import Status, Stop, bar_of
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.laplace.evidence_error import EvidenceError
from pyro_evidence.laplace.replicates import Columns
from pyro_evidence.laplace.restarts import can_tour
from pyro_evidence.nested.structures import Evaluate, Search, Switched, search, switched
from pyro_evidence.numerics.batched import along
from pyro_evidence.posterior.archive import Saved, require_equal
from pyro_evidence.posterior.base import NUM_DRAWS
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.multimodal import QUANTILE_DRAWS
from pyro_evidence.posterior.predict import PredictionMixin, SitePrediction
from pyro_evidence.posterior.replicates import together
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.program.branching import (
    MOST,
    IndependentChoices,
    Model,
    Structures,
    fixed,
    has_singular_matrix,
    structures_of,
)
from pyro_evidence.program.checks import Arguments, OutsideSupport
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.sites import Values, is_discrete
from pyro_evidence.settings import Start, check_count, quantile_levels, seed_of, seeded

SEARCHED, SEARCHED_APART = 2**14, 2**9  # structures looked at where there are more: together, or a fit for each
FAR, AWAY = 10.0, 0.02  # nats below the best at which fits are made beside a batch, and between them that count
CLOSE = 5.0  # nats below the best structure, within which a structure's own error counts
SHOWN = 10  # structures in a summary
NESTED = 8  # in a tree
AVERAGED = 50  # structures whose own shares count in an average, and as many that stand for the rest
NEGLIGIBLE = 1e-3  # share of the mass whose structures a prediction may leave out


@dataclass(frozen=True)
class StructureFits:
    """Fits of an engine's model, a structure of it fixed, to one data set.

    :ivar outside: sites that were marginalised in the fits so far.
    """

    engine: Any
    data: Arguments
    outside: set[str] = field(default_factory=set)

    @property
    def is_plain(self) -> bool:
        """Whether fits are Laplace's approximation of all latents by the exact Hessian, as far as settings say."""
        of = self.engine
        plain = of.maximise is None and not of.marginalise and of.nodes in (None, 1)
        return plain and of.curvature in (None, exact_hessian)

    def __call__(self, values: Values) -> LaplacePosterior:
        """The posterior given a structure, with those sites marginalised that were so in others.

        A structure that leaves the data no say in a scale would have it inside, under its prior alone, where Laplace is
        of another quality than in the structures that it is compared with.
        """
        of, (args, kwargs) = self.engine, self.data
        fitted = replace(of, model=fixed(of.model, values), stop=replace(of.stop, progress=False))
        fitted._outside = self.outside
        found: LaplacePosterior = fitted.run(*args, **kwargs)
        self.outside.update(found.marginalised_sites)
        return found


@entry_point
@dataclass(frozen=True, eq=False, repr=False)
class StructurePosterior(Saved, PredictionMixin):
    """Structures with their probabilities, and the posterior of each; draws and predictions are averages over them.

    Of predictions those draws are shared out among structures by their probabilities.  Structures that hold a
    thousandth of the mass together are left out; of more than a hundred others, the best fifty count by their
    probabilities, and fifty at equal steps of the rest's mass stand for the rest.

    :ivar search: the structures that were looked at, and their log evidences.
    :ivar fit: the posterior of a structure, by a fit.
    :ivar failures: messages of fits that failed.
    :ivar num_maximised: hyperparameters that are maximised in each structure.
    :ivar labels: structure site -> names of its values 0, 1, ...; empty for numbers.
    :ivar notes: what else is to be said beside the table.

    >>> import pyro, torch
    >>> from pyro import distributions as dist
    >>> from pyro_evidence import LaplaceEvidence
    >>> def model(X, y):
    ...     keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([2]).to_event(1), infer={"branching": True})
    ...     w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with pyro.plate("data", len(X)):
    ...         pyro.sample("y", dist.Normal(X @ (w * keep), 0.5), obs=y)
    >>> X = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [2.0, -1.0], [-2.0, -1.0]])
    >>> posterior = LaplaceEvidence(model).run(X, X[:, 0])
    >>> [round(p, 2) for p in posterior.inclusion("keep").tolist()]
    [1.0, 0.2]
    >>> posterior.structure(0)["keep"]
    tensor([1., 0.])
    """

    search: Search
    fit: Callable[[Values], LaplacePosterior]
    failures: tuple[str, ...] = ()
    num_maximised: int = 0
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    _members: dict[int, LaplacePosterior] = field(default_factory=dict)

    @property
    def found(self) -> Structures:
        """The structures that were looked at."""
        return self.search.structures

    @property
    def log_evidences(self) -> Tensor:
        """``log p(D | structure)`` of each, nats, nan where its fit failed, ``(S,)``."""
        return self.search.log_evidences

    @property
    def unvisited(self) -> float:
        """The share of the posterior mass that was not looked at.

        Zero where all structures were, else two standard errors above an estimate by importance sampling; nan where
        nothing is known about the others, as of kernels that are found by steps, or where few were asked for.
        """
        return self.search.unvisited

    def __repr__(self) -> str:
        return f"StructurePosterior({len(self.found):,} structures, log_evidence={float(self.log_evidence):.4g})"

    @property
    def probabilities(self) -> Tensor:
        """Probabilities of the visited structures, given that it is one of them or one they stand for, ``(S,)``."""
        return self.search.log_weights.softmax(0)

    @property
    def log_evidence(self) -> Tensor:
        """``log p(D)``, averaged over structures, nats, ``()``."""
        return self.search.log_weights.logsumexp(0)

    @cached_property
    def order(self) -> Tensor:
        """Places of the structures, the most probable first; of equal ones the first."""
        return self.search.log_weights.argsort(descending=True, stable=True)

    @cached_property
    def log_evidence_error(self) -> EvidenceError:
        """An estimate of its error, nats: the errors of the structures within five nats of the best, averaged."""
        best, weights = self.search.log_weights.max(), self.probabilities
        near = [i for i in self.order.tolist() if float(best - self.search.log_weights[i]) < CLOSE][:SHOWN]
        share = weights[near] / weights[near].sum()
        errors = [self._member(i).log_evidence_error for i in near]
        signed, whole = (share @ share.new_tensor([[e.signed, float(e)] for e in errors])).tolist()
        method = f"of the {len(near)} best structures, averaged: {errors[0].method}"
        return EvidenceError.of(signed, "", 0.0, 0.0, method).beside(whole - abs(signed) + self.search.error)

    def structure(self, k: int = 0) -> Values:
        """Site -> value of the structure in row ``k`` of :meth:`structures`: what ``poutine.condition`` takes.

        :raises BadInput: for a row that is not there.
        """
        return self.found.of(self._place(k))

    def member(self, k: int = 0) -> LaplacePosterior:
        """The posterior given the structure in row ``k`` of :meth:`structures`.

        :raises BadInput: for a row that is not there.
        """
        return self._member(self._place(k))

    def _place(self, k: int) -> int:
        k = check_count("k", k, at_least=0)
        if k >= len(self.found):
            raise BadInput(f"k={k}; expected the row of a structure, 0 to {len(self.found) - 1}.")
        return int(self.order[k])

    def _member(self, place: int) -> LaplacePosterior:
        if place not in self._members:
            self._members[place] = self.fit(self.found.of(place))
        return self._members[place]

    def structures(self, most: int | None = None) -> Table:
        """A row for each structure, the most probable first: its probability, log prior and log evidence.

        :param most: rows, None for all.
        """
        probabilities = self.probabilities
        rows = {}
        for place in self.order.tolist()[: None if most is None else check_count("most", most)]:
            rows[self._label(place)] = {
                "probability": float(probabilities[place]),
                "log prior": float(self.found.log_prior[place]),
                "log evidence": float(self.log_evidences[place]),
            }
        columns = {
            "probability": "of the structure given the data",
            "log prior": "of the structure, nats",
            "log evidence": "log p(data | structure), nats",
        }
        said = [*self._notes]
        if self.failures:
            said.append(f"{len(self.failures)} structures have no posterior: {self.failures[0]}")
        if math.isnan(self.unvisited):
            said.append("not all structures were looked at: how much of the mass is elsewhere is not known")
        if self.unvisited > 0:
            said.append(f"not all structures were looked at: up to {self.unvisited:.2g} of the mass is elsewhere")
        if self.num_maximised:
            said.append(f"{self.num_maximised} numbers are maximised in each structure, for which there is no penalty")
        return Table(rows, columns, [*said, self._vague], "structure", digits=4)

    def _label(self, place: int) -> str:
        return label_of(self.found.of(place), self.labels, self.found.values)

    @cached_property
    def _notes(self) -> tuple[str, ...]:
        """Notes on structures whose evidences may be of unlike things, by those that were fitted."""
        members = {self._label(k): m for k, m in self._members.items()}
        return *self.notes, *_unlike(members, self.failures)

    @cached_property
    def _vague(self) -> str:
        """The worth of a prior's width, in the best structure, where it is small or nothing is marginalised."""
        said = "vague priors decide between structures: the log evidence falls with the log of a prior's width"
        with suppress(ArithmeticError, NotConverged, BadInput, UnsupportedModel):
            best = self.member(0)
            if not best.marginalised_sites or can_tour(best.state):
                found = best.sensitivity()
                scales = [n for n in found.log_evidence if found.constants[n].unit is None]  # the largest slope first
                if scales:
                    said += f"; in the first, {found.log_evidence[scales[0]]:+.2g} nats as {scales[0]} is doubled"
        return said

    def inclusion(self, site: str) -> Tensor:
        """The probability that each element of a structure site is not zero, in the site's shape.

        Of a site with more than two values, the probability of each stands in :meth:`values_of`.

        :raises BadInput: for a name that no structure site has.
        """
        on = self._values(site) != 0
        return torch.tensordot(self.probabilities, (on & along(self.found.present[site], on)).double(), 1)

    def values_of(self, site: str) -> dict[Any, Tensor]:
        """Value, or its name -> the probability that each element of a structure site has it, in the site's shape.

        :raises BadInput: as :meth:`inclusion`.
        """
        values, present = self._values(site), self.found.present[site]
        names, found = self.labels.get(site), dict[Any, Tensor]()
        for value in values[present].unique():
            here = ((values == value) & along(present, values)).double()
            found[float(value) if names is None else names[int(value)]] = torch.tensordot(self.probabilities, here, 1)
        return found

    def _values(self, site: str) -> Tensor:
        if site not in self.found.values:
            raise BadInput(f"site={site!r}; expected a structure site: {', '.join(self.found.values)}.")
        return self.found.values[site]

    def get_samples(self, num_samples: int = NUM_DRAWS, seed: int | None = None) -> Values:
        """Draws of the structure and of the latent sites that every drawn structure has, in one shape.

        A term of a formula whose name is that of such a site is left out: draws by that name are of the site.

        :return: site name -> ``(S,) + shape``.
        """
        num_samples, seed = check_count("num_samples", num_samples, at_least=0), seed_of(seed)
        generator = seeded(seed)
        drawn = torch.multinomial(self.probabilities, max(1, num_samples), replacement=True, generator=generator)
        drawn = drawn[:num_samples].sort().values
        places, counts = drawn.unique(return_counts=True)
        parts = [
            self._member(place).get_samples(count, seed + number)
            for number, (place, count) in enumerate(zip(places.tolist(), counts.tolist(), strict=True))
        ]
        order = torch.randperm(num_samples, generator=generator)
        shared = [n for n in parts[0] if all(n in p and p[n].shape[1:] == parts[0][n].shape[1:] for p in parts)]
        found = {name: torch.cat([part[name] for part in parts])[order] for name in shared}
        there = {n: v for n, v in self.found.values.items() if bool(self.found.present[n][drawn].all())}
        return {name: value[drawn][order] for name, value in there.items()} | found

    def quantiles(self, q: float | Sequence[float]) -> Values:
        """Marginal quantiles of 10,000 draws, as :meth:`get_samples` has them.

        :return: ``(len(q),) + shape`` for each site; ``shape`` for a single ``q``.
        :raises BadInput: for a ``q`` outside 0 to 1.
        """
        levels = quantile_levels(q).double()
        return {n: v.double().quantile(levels, dim=0) for n, v in self.get_samples(QUANTILE_DRAWS, 0).items()}

    def _site_prediction(
        self, new: Arguments, num_samples: int, seed: int, kept: bool, *, site: str | None, kind: str
    ) -> SitePrediction:
        found = []
        for place, share in self._shares():
            num = max(2, math.ceil(share * num_samples))
            one = self._member(place)._site_prediction(new, num, seed + place, kept, site=site, kind=kind)
            found.append(replace(one, moments=replace(one.moments, weight=share)))
        return reduce(add, found)

    def _shares(self) -> list[tuple[int, float]]:
        """Places of structures that stand for all in an average, and the weight of each."""
        order, probabilities = self.order.tolist(), self.probabilities[self.order]
        num = int((probabilities.cumsum(0) < 1.0 - NEGLIGIBLE).sum()) + 1
        if num <= 2 * AVERAGED:
            return list(zip(order[:num], probabilities[:num].tolist(), strict=True))
        ends = probabilities[AVERAGED:].cumsum(0)
        steps = (torch.arange(AVERAGED) + 0.5).to(ends) / AVERAGED * ends[-1]
        rest = [order[AVERAGED + i] for i in torch.searchsorted(ends, steps).tolist()]
        exact = zip(order[:AVERAGED], probabilities[:AVERAGED].tolist(), strict=True)
        return [*exact, *((place, float(ends[-1]) / AVERAGED) for place in rest)]

    def summary(self) -> Table:
        """Print the most probable structures, and say what stands beside them."""
        table = self.structures(SHOWN)
        print(table)  # noqa: T201, what summaries do
        print(f"log evidence {float(self.log_evidence):.2f} nats, over {len(self.found):,} structures")  # noqa: T201
        return table

    schema: ClassVar[Mapping[str, Any]] = {
        "args": [object],
        "kwargs": {str: object},
        "values": {str: (Array(), Array(dtype=torch.int64))},
        "present": {str: Array("S", torch.bool)},
        "log_prior": Array("S"),
        "log_evidences": Array("S", finite=False),
        "log_weights": Array("S", finite=False),
        "error": float,
        "unvisited": float,
        "failures": [str],
        "num_maximised": int,
        "labels": {str: [str]},
        "notes": [str],
        "outside": [str],
    }

    def _record(self) -> dict[str, Any]:
        if not isinstance(self.fit, StructureFits):
            raise BadInput(
                "these structures are formulas or kernels, each with a model of its own; expected structure sites of "
                "one model. Save what is needed of them: posterior.member(0).save(path)."
            )
        encoded_arguments(*self.fit.data)
        names = ("failures", "num_maximised", "labels")
        known = vars(self.found) | vars(self.search) | {n: getattr(self, n) for n in names} | {"notes": self._notes}
        known |= {"outside": sorted(self.fit.outside)}
        known |= dict(zip(("args", "kwargs"), self.fit.data, strict=True))
        plain = {n: list(x) if isinstance(x, tuple) else x for n, x in known.items() if n in self.schema}
        return plain | {"labels": {n: list(x) for n, x in self.labels.items()}}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], model: Any, sizes: Mapping[str, int]) -> "StructurePosterior":
        if not hasattr(model, "run"):
            raise BadInput(f"expected the engine, LaplaceEvidence(model), in place of {type(model).__name__} model")
        structures = Structures(*(content[n] for n in ("values", "present", "log_prior")))
        numbers = (content[n] for n in ("log_evidences", "log_weights", "error", "unvisited"))
        fits = StructureFits(model, (tuple(content["args"]), dict(content["kwargs"])), set(content["outside"]))
        said = (tuple(content["failures"]), content["num_maximised"], content["labels"], tuple(content["notes"]))
        found = cls(Search(structures, *numbers), fits, *said)
        best = found.log_evidences[found.order[0]]
        require_equal("log_evidences", found.member(0).log_evidence, best, best.dtype)
        return found

    def plot(self, axes: Axes | None = None) -> Axes:
        """Bars: the probability that each element of each structure site is not zero; of each value, of choices by it.

        Choices are sites of other values than a Bernoulli's, and whole programs, whose bars have their names.

        Without Axes on a figure of its own, the tree of :meth:`plot_nested` beside them where there is one.

        :raises ImportError: without matplotlib.
        """
        bars = list[tuple[str, float]]()
        for site, values in self.found.values.items():
            shares = {"": self.inclusion(site)} if _is_switch(values) else self.values_of(site)
            for i in range(values[0].numel()):
                name = site if values.dim() == 1 else f"{site}[{i}]"
                for value, share in shares.items():
                    said = value or name if isinstance(value, str) else f"{name} = {value:g}"
                    bars.append((said, float(share.reshape(-1)[i])))
        if axes is None:
            nested = any(parent is not None for parent in self._parents(NESTED).values())
            size = 6.0 * (1 + nested), max(5.0, 0.25 * len(bars))
            figure = matplotlib("pyplot").figure(layout="constrained", figsize=size)
            axes = figure.add_subplot(1, 1 + nested, 1)
            if nested:
                self.plot_nested(figure.add_subplot(1, 2, 2))
        check_axes(axes)
        drawn = axes.barh(range(len(bars)), [share for _, share in bars], tick_label=[said for said, _ in bars])
        axes.bar_label(drawn, fmt="%.2f", padding=3)
        axes.invert_yaxis()
        switched = len(self._switches) == len(self.found.values)
        axes.set(xlim=(0.0, 1.15), xlabel="posterior probability" + " that it is in the model" * switched)
        return axes

    def plot_nested(self, axes: Axes | None = None, *, most: int = NESTED) -> Axes:
        """A tree of structures, each below the best that it has one element more than; nats gained on the edges.

        Shown are the most probable structures, with their probabilities, and the way to each from the smallest.  From
        top to bottom the number of elements that are not zero grows; on each edge stands the difference of the log
        evidences.

        :param most: number of the most probable structures.
        :raises BadInput: where none of them extends another that was looked at, as of links or whole programs.
        """
        parents, size = self._parents(check_count("most", most)), self._size
        height = self.log_evidences.nan_to_num(nan=-torch.inf)
        if all(parent is None for parent in parents.values()):
            raise BadInput(
                "none of these structures has one element more than another; expected a site of zeros and ones, such "
                "as dist.Bernoulli(0.5).expand([3]). For bars of the probabilities of values or programs call plot()."
            )
        axes = axes_or_own(axes)
        across = _across(parents)
        for place, x in across.items():
            parent, y = parents[place], int(size[place])
            if parent is not None:
                axes.plot([across[parent], x], [y - 1, y], color="0.7", zorder=1)
                gain, middle = float(height[place] - height[parent]), ((across[parent] + x) / 2, y - 0.5)
                axes.annotate(f"{gain:+.1f}", middle, ha="center", va="center", backgroundcolor="white")
            text = f"{self._label(place)}\n{float(self.probabilities[place]):.2g}"
            axes.annotate(
                text, (x, y), ha="center", va="center", bbox={"boxstyle": "round", "fc": "white", "ec": "0.4"}
            )
        axes.set(
            xlim=(min(across.values()) - 0.6, max(across.values()) + 0.6), xticks=[], ylabel="elements in the model"
        )
        axes.set_ylim(int(size[list(parents)].max()) + 0.5, int(size[list(parents)].min()) - 0.5)
        axes.yaxis.get_major_locator().set_params(integer=True)
        return axes

    @property
    def _switches(self) -> dict[str, Tensor]:
        """Sites of zeros and ones."""
        return {site: values for site, values in self.found.values.items() if _is_switch(values)}

    @property
    def _size(self) -> Tensor:
        """Number of elements in the model, of sites of zeros and ones, ``(S,)``."""
        parts = (on.reshape(len(on), -1).sum(-1) for on in self._switches.values())
        return sum(parts, torch.zeros(len(self.found)))

    def _parents(self, most: int) -> dict[int, int | None]:
        """The best structure with one element less, of the most probable ones and of all on their ways; or None."""
        height, elements = self.log_evidences.nan_to_num(nan=-torch.inf), self.found.elements()
        size = self._size
        parents: dict[int, int | None] = {}
        for first in self.order[:most].tolist():
            place: int | None = first if bool(height[first].isfinite()) else None
            while place is not None and place not in parents:
                smaller = ((elements != elements[place]).sum(-1) == 1) & (size == size[place] - 1) & height.isfinite()
                parents[place] = int(torch.where(smaller, height, -torch.inf).argmax()) if bool(smaller.any()) else None
                place = parents[place]
        return parents


def over_structures(model: Model, data: Arguments, fit: StructureFits, start: Start, stop: Stop) -> StructurePosterior:
    """The posterior over the structures of a model: as one batch where they switch columns, or by fits.

    Fits of structures are a batch where these are no more than numbers in the density, as data are.
    """
    structures = structures_of(model, data)
    batch = None
    if isinstance(structures, IndependentChoices) and fit.is_plain:
        batch = switched(model, data, structures)

    def alike(some: Structures, alone: Callable[[int], LaplacePosterior | None]) -> Mapping[int, float]:
        names = list(some.values)

        def program(*args: Any, **kwargs: Any) -> Any:
            values = dict(zip(names, args, strict=False))
            return fixed(model, values)(*args[len(names) :], **kwargs)

        if not all(bool(present.all()) for present in some.present.values()):
            return {}

        def columns(joint: LogJoint) -> Columns:
            return [*((each, True) for each in some.values.values()), *((each, False) for each in joint.args)]

        return together(columns, len(some), alone, start, stop.quadrature_tol, program).log_evidences

    return over(structures, fit, start, stop.progress, batch, alike)


def over(
    structures: IndependentChoices | Structures,
    fit: Callable[[Values], LaplacePosterior],
    start: Start,
    progress: bool,
    batch: Switched | None = None,
    alike: Callable[[Structures, Callable[[int], LaplacePosterior | None]], Mapping[int, float]] | None = None,
    penalised: bool = False,
) -> StructurePosterior:
    """The posterior over all of some structures, or over those that a search finds.

    :param batch: log evidences of many structures; None: by fits.  Where it is not certain that it finds what fits
        find, the best structures are fitted, too.
    :param alike: log evidences of those of many structures that some fits tell how to find together.
    :param penalised: whether the log prior counts the hyperparameters that are maximised.
    :raises UnsupportedModel: where structures maximise different numbers of hyperparameters, which evidences that have
        no penalty for them cannot be compared by.
    :raises NotAMode: where no structure has a posterior.
    """
    heights: list[float] = []  # of all structures that were fitted, nan where a fit failed
    members: dict[int, LaplacePosterior] = {}
    failures: list[str] = []
    reached: list[tuple[float, str, Exception]] = []  # what log evidences of fits that failed are at least

    def by_fits(some: Structures) -> Tensor:
        first = len(heights)
        heights.extend([math.nan] * len(some))
        told = set[int]()
        with bar_of("structures", progress, total=len(some)) as bar:

            def fit_each(rows: Iterable[int]) -> None:
                for row in rows:
                    try:
                        members[first + row] = found = fit(some.of(row))
                        heights[first + row] = float(found.log_evidence)
                    except (ArithmeticError, NotConverged, OutsideSupport) as error:
                        reached.append((_reached(error), label_of(some.of(row)), error))
                        failures.append(f"{type(error).__name__}: {error}")
                    except (BadInput, UnsupportedModel) as error:
                        if not has_singular_matrix(error):
                            raise type(error)(f"with {label_of(some.of(row))}: {error}") from error
                        failures.append(f"with {label_of(some.of(row))}: {str(error.__cause__).splitlines()[0]}")
                    bar.update()

            def alone(row: int) -> LaplacePosterior | None:
                fit_each({row} - told)
                told.add(row)
                return members.get(first + row)

            alone(len(some) - 1)  # of choices, the one with all elements first
            known = {} if alike is None else alike(some, alone)
            for row in known.keys() - told:
                heights[first + row] = known[row]
                bar.update()
            fit_each(set(range(len(some))) - known.keys() - told)
        return torch.tensor(heights[first:], dtype=torch.float64)

    def evaluate(some: Structures) -> Tensor:
        return (by_fits if batch is None else batch.log_evidences)(some).cpu()

    num = math.prod(structures.sizes) if isinstance(structures, IndependentChoices) else len(structures)
    most = start.structures or (num if num <= MOST else SEARCHED if batch else SEARCHED_APART)
    if isinstance(structures, IndependentChoices) and num > most:
        found = search(structures, evaluate, most, seed_of(start.seed))
    else:
        every = structures.with_choices(structures.all()) if isinstance(structures, IndependentChoices) else structures
        every = every.rows((every.log_prior > -math.inf).nonzero().flatten())
        log_evidences = evaluate(every)
        found = Search(every, log_evidences, log_evidences + every.log_prior, 0.0, 0.0)
    notes: tuple[str, ...] = ()
    if batch is not None and not batch.is_certain:
        found, fitted = _with_fits(found, by_fits)
        members = {fitted[k]: member for k, member in members.items()}
        if len(fitted) < len(found.structures):
            notes = (f"but for the best {len(fitted)}, log evidences are Laplace's approximation around one mode",)
    log_weights = found.log_weights.nan_to_num(nan=-math.inf)
    if not bool(log_weights.isfinite().any()):
        said = failures[0] if failures else "no mode was found."
        raise NotAMode(
            f"none of the {len(log_weights):,} structures has a posterior; expected one that has. The first ended with "
            f"{said} Look at it alone: fit poutine.condition(model, data=...) with a structure fixed."
        )
    beyond, label, error = max(reached, key=itemgetter(0), default=(-math.inf, "", None))
    if error is not None and beyond > (best := float(found.log_evidences.nan_to_num(nan=-math.inf).max())):
        raise type(error)(
            f"with {label} the log evidence is {beyond:.4g} nats or more, {best:.4g} "
            f"in the best of the other structures, which count for nothing beside it; expected a posterior. {error}"
        ) from error
    num_maximised = _num_maximised({} if penalised else members)
    found = replace(found, log_weights=log_weights)
    more: Any = {"notes": notes, "_members": dict(sorted(members.items()))}
    return StructurePosterior(found, fit, tuple(failures), num_maximised, **more)


def _num_maximised(members: Mapping[int, LaplacePosterior]) -> int:
    """Number of hyperparameters that each structure maximises."""
    maximised = {member._num_maximised for member in members.values()}
    if len(maximised) > 1:
        raise UnsupportedModel(
            f"structures maximise different numbers of hyperparameters, {sorted(maximised)}; expected one number, "
            "since a log evidence has no penalty for them. Give those that only some structures have a prior: "
            "pyro.sample in place of pyro.param."
        )
    return max(maximised, default=0)


def _with_fits(found: Search, by_fits: Evaluate) -> tuple[Search, list[int]]:
    """With the log evidences of fits for the best structures, ten at a time as long as these differ; and which."""
    fitted, moved = list[int](), math.inf
    while moved > AWAY:
        log_weights = found.log_weights.nan_to_num(nan=-math.inf)
        order = log_weights.argsort(descending=True, stable=True)
        near = order[log_weights[order] > log_weights[order[0]] - FAR].tolist()
        near = [place for place in near if place not in fitted][:SHOWN]
        if not near:
            break
        rows = torch.tensor(near)
        rise = by_fits(found.structures.rows(rows)) - found.log_evidences[rows]
        own, weights = (x.index_add(0, rows, rise) for x in (found.log_evidences, found.log_weights))
        found, moved = replace(found, log_evidences=own, log_weights=weights), float(rise.abs().nan_to_num().max())
        fitted += near
    return found, fitted


def _reached(error: Exception) -> float:
    """A lower bound of the log evidence of a fit that failed, nats: infinite where its density rises without end."""
    if isinstance(error, Unbounded):
        return math.inf
    end: Any = getattr(error, "posterior", None)
    runs_away = (Status.UNBOUNDED.value, Status.INTERPOLATING.value)
    return float(end.log_evidence) if end is not None and end.status in runs_away else -math.inf


def _unlike(members: Mapping[str, LaplacePosterior], failures: Sequence[str]) -> Iterator[str]:
    """Remarks on fits of structures, by their labels, that differ in more than their evidences tell.

    Sites of one name and several shapes; flat priors that do not cancel; other data; probabilities beside densities.
    """
    shapes: dict[str, dict[tuple[int, ...], str]] = {}
    flat, hashes, kinds, num = set[str](), set[str](), set[frozenset[bool]](), dict[str, int]()
    for label, member in members.items():
        joint, (u, theta) = member._joint, member._mode_at
        for part in joint.latents:
            shapes.setdefault(part.name, {}).setdefault(tuple(part.shape), label)
            num[part.name] = num.get(part.name, 0) + 1
        nodes = joint.trace(u, theta).nodes
        flat |= set(member.flat_sites)
        hashes.add(joint.data_hash(theta))
        kinds.add(frozenset(is_discrete(nodes[n]) for n in joint.observed))
    for name, known in shapes.items():
        if len(known) > 1:
            each = ", ".join(f"{shape} with {label}" for shape, label in list(known.items())[:3])
            each += ", and others" * (len(known) > 3)
            yield f"site '{name}' has shape {each}: draws of it are those of one structure, posterior.member(k)"
    failed = {n for n in flat for said in failures if f"site '{n}'" in said}
    loose = sorted(n for n in flat if num[n] < len(members) or len(shapes[n]) > 1 or n in failed)
    if loose:
        yield (
            f"flat priors of {', '.join(loose)} have an arbitrary constant, which does not cancel where structures "
            "have other elements of them: the probabilities mean nothing; give proper priors"
        )
    if len(hashes) > 1:
        yield (
            "structures observe different data, whose evidences cannot be compared: in place of log y, for example, "
            "pass y and LogNormal"
        )
    if {frozenset({True}), frozenset({False})} <= kinds:
        yield "probabilities of data are compared with densities of them, which change with the unit of the data"


def _is_switch(values: Tensor) -> bool:
    """Whether a site keeps elements out or in, as a Bernoulli does by 0.0 and 1.0, and does not number choices."""
    return values.is_floating_point() and bool(((values == 0) | (values == 1)).all())


def label_of(
    values: Mapping[str, Tensor],
    labels: Mapping[str, Sequence[str]] = MappingProxyType({}),
    among: Mapping[str, Tensor] = MappingProxyType({}),
) -> str:
    """A structure on one line; of a site of zeros and ones the places of the ones, of others all values.

    :param labels: structure site -> names of its values.
    :param among: structure site -> its values in all structures, as far as they are known.

    >>> label_of({"keep": torch.tensor([1.0, 0.0, 1.0]), "link": torch.tensor(1)}, {"link": ("logit", "probit")})
    'keep 0, 2; link=probit'
    """
    parts = []
    for name, value in values.items():
        flat = value.reshape(-1).tolist()
        if name in labels:
            parts.append(f"{name}={', '.join(labels[name][int(x)] for x in flat)}")
        elif value.dim() and _is_switch(among.get(name, value)):
            parts.append(f"{name} {', '.join(str(i) for i, on in enumerate(flat) if on) or 'none'}")
        else:
            parts.append(f"{name}={', '.join(f'{x:g}' for x in flat)}")
    return "; ".join(parts)


def _across(parents: dict[int, int | None]) -> dict[int, float]:
    """Horizontal places of a tree's nodes: leaves side by side, others above the middle of what is below them."""
    across: dict[int, float] = {}
    leaves = itertools.count()

    def put(place: int) -> float:
        below = [put(child) for child, parent in parents.items() if parent == place]
        across[place] = sum(below) / len(below) if below else float(next(leaves))
        return across[place]

    for place, parent in parents.items():
        if parent is None:
            put(place)
    return across
