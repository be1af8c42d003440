"""Many fits of one model to data sets of their own: replicates, bootstraps, imputations, groups left out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_evidence.data.chunks import cut_rows, has_rows
from pyro_evidence.data.groups import labels_as_tensor
from pyro_evidence.display import Table
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.iterate import Status, bar_of
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.laplace.replicates import columns_of
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.replicates import together
from pyro_evidence.posterior.structures import StructureFits, StructurePosterior
from pyro_evidence.program.sites import sample_nodes
from pyro_evidence.settings import check_count, seed_of, seeded

Arguments = tuple[Any, ...]
FAILED, CONVERGED = "failed", Status.CONVERGED.value
FAILURES = (ArithmeticError, ValueError, RuntimeError)  # what a fit may raise: refusals, no mode, no convergence
SHOWN = 20  # fits of a summary
ONE_SD = torch.special.ndtr(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)).tolist()  # of a standard normal


class Pooled(NamedTuple):
    """One estimate from those of several imputed data sets, each of the site's shape.  Rubin (1987), section 3.1.

    :ivar mean: average of the estimates.
    :ivar sd: root of the total variance, ``within + (1 + 1 / m) between``.
    :ivar df: degrees of freedom of the t distribution to be used with it.
    :ivar missing_information: share of the total variance that missing values account for.
    """

    mean: Tensor
    sd: Tensor
    df: Tensor
    missing_information: Tensor


def rubin(estimates: Tensor, standard_errors: Tensor) -> Pooled:
    """Rubin's rules for estimates and standard errors ``(m, ...)`` of ``m`` imputed data sets.

    Rubin (1987), eqs. 3.1.2 to 3.1.7.

    >>> rubin(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])).sd  # sqrt(1 + 1.5 * 2)
    tensor(2.)
    """
    within, between = standard_errors.square().mean(0), estimates.var(0)
    more = (1.0 + 1.0 / len(estimates)) * between
    total = within + more
    return Pooled(estimates.mean(0), total.sqrt(), (len(estimates) - 1) * (total / more).square(), more / total)


@dataclass(frozen=True, eq=False)
class FitTable:
    """The fits of one model to many data sets, by number; fits that failed keep their place.

    ``len(fits)`` counts all of them; iteration gives the posteriors of those that did not fail.

    :ivar log_evidence: nats, nan where a fit failed, ``(R,)``.
    :ivar status: why each fit stopped, ``"failed"`` where it did.
    :ivar errors: what was raised, by the number of the fit.
    :ivar makers: what returns the posterior of each.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence, run_many
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = torch.stack([2.0 * X[:, 0], 1.0 - X[:, 0]]) + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> fits = run_many(LaplaceEvidence(regression(Linear())), X.expand(2, -1, -1), t)
    >>> len(fits), fits.posterior(1).mode["w"].shape[-1]
    (2, 2)
    """

    log_evidence: Tensor
    status: tuple[str, ...]
    errors: Mapping[int, Exception]
    makers: Sequence[Callable[[], Any]]

    def __len__(self) -> int:
        return len(self.status)

    def __iter__(self) -> Iterator[Any]:
        return (self.posterior(k) for k in self.succeeded)

    @property
    def succeeded(self) -> tuple[int, ...]:
        """Numbers of the fits that did not fail."""
        return tuple(k for k in range(len(self)) if k not in self.errors)

    def posterior(self, k: int) -> Any:
        """The posterior of fit ``k``.

        :raises BadInput: for a number that is none of a fit.
        :raises Exception: what the fit has raised, where it failed.
        """
        if not -len(self) <= k < len(self):
            raise BadInput(f"posterior({k}): expected the number of a fit, 0 to {len(self) - 1}.")
        if k % len(self) in self.errors:
            raise self.errors[k % len(self)]
        return self.makers[k % len(self)]()

    @cached_property
    def _quantiles(self) -> dict[str, Tensor]:
        """Quantiles of every site and succeeded fit, at a standard deviation below the median, there and above it."""
        found = [posterior.quantiles(ONE_SD) for posterior in self]
        if not found:
            raise BadInput(f"all of {len(self)} fits failed; expected one that did not. First: {self.errors[0]}")
        return {n: torch.stack([each[n] for each in found]) for n in found[0]}

    def estimates(self, site: str) -> tuple[Tensor, Tensor]:
        """Posterior median of a site, and half the width of its central 68.3 %, of each fit that did not fail.

        Mean and standard deviation where the posterior is normal.

        :return: two of ``(S,) + site shape``.
        :raises BadInput: for a name that is no latent site, and where all fits failed.
        """
        if site not in self._quantiles:
            raise BadInput(f"estimates({site!r}): expected a latent site, one of {list(self._quantiles)}.")
        low, middle, high = self._quantiles[site].unbind(1)
        return middle, 0.5 * (high - low)

    def pool(self, site: str) -> Pooled:
        """The estimate of a site from multiply imputed data sets, one fit of each, by Rubin's rules.

        :raises BadInput: for fewer than two fits that did not fail, and as :meth:`estimates`.
        """
        if len(self.succeeded) < 2:
            raise BadInput(f"{len(self.succeeded)} of {len(self)} fits succeeded; expected two or more to pool.")
        return rubin(*self.estimates(site))

    def table(self) -> Table:
        """The log evidence of each fit, the first twenty, and what failed."""
        rows = {str(k): {"log evidence": value} for k, value in enumerate(self.log_evidence.tolist()[:SHOWN])}
        notes = [f"{len(self)} fits, {len(self.errors)} failed"]
        notes += [f"fit {k}: {' '.join(str(error).split())}" for k, error in list(self.errors.items())[:3]]
        return Table(rows, {"log evidence": "nats"}, notes, corner="fit", digits=6)

    def summary(self) -> Table:
        """Print the table."""
        print(table := self.table())  # noqa: T201, what summaries do
        return table


def data_sets(args: Sequence[Any]) -> list[Arguments]:
    """The arguments of each fit: a list of tuples, or the rows of tensors with one leading axis.

    :raises BadInput: for arguments that are neither.
    """
    listed = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else ()
    if listed and all(isinstance(each, tuple) for each in listed):
        return list(listed)
    sizes = {len(x) if isinstance(x, Tensor) and x.dim() else None for x in args}
    if len(sizes) != 1 or not min(size or 0 for size in sizes):
        said = ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in args)
        raise BadInput(
            f"run_many(engine, ...) has arguments ({said}); expected tensors with one leading axis, a row for each "
            "fit, or a list of tuples of arguments. What all fits share goes by keyword, or by X.expand(R, *X.shape)."
        )
    return list(zip(*args, strict=True))


@entry_point
def run_many(engine: Any, *args: Any, **kwargs: Any) -> FitTable:
    """Fit one model to many data sets; a fit that fails is an entry of the table and stops no other.

    The numbers are those of ``engine.run(...)`` on each data set by itself.

    :param engine: with settings that hold for all fits; it is left as it is.
    :param args: tensors with one leading axis, a row for each fit; or a list of tuples of arguments, whose shapes may
        differ.  Ragged data are one batch where all have the longest's shape, and what is not there is masked by
        ``poutine.mask``.
    :param kwargs: arguments that all fits share.
    :raises BadInput: for arguments that are neither.

    >>> import torch
    >>> from pyro import distributions as dist, sample
    >>> from pyro_evidence import LaplaceEvidence, run_many
    >>> def heights(y):
    ...     mu = sample("mu", dist.Normal(0.0, 1.0))
    ...     sample("y", dist.Normal(mu, 1.0).expand([3]).to_event(1), obs=y)
    >>> y = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 3.0], [0.0, 0.0, torch.nan]])
    >>> fits = run_many(LaplaceEvidence(heights), y)
    >>> [round(value, 3) for value in fits.log_evidence.tolist()], fits.status[2]
    ([-5.95, -6.825, nan], 'failed')
    """
    sets, quiet = data_sets(args), copy(engine)
    if hasattr(engine, "stop"):
        quiet.stop = replace(engine.stop, progress=False)
    entries: dict[int, Entry] = {}
    with bar_of("fits", getattr(getattr(engine, "stop", None), "progress", True), len(sets)) as bar:

        def fit_alone(numbers: Iterable[int]) -> None:
            for k in numbers:
                if k not in entries:
                    entries[k] = _entry(copy(quiet), sets[k], kwargs)
                    bar.update()

        if type(quiet) is LaplaceEvidence and quiet.stop.checkpoint is None:
            alike: dict[Any, list[int]] = {}  # numbers of the data sets whose arguments have the same shapes
            for k, own in enumerate(sets):
                alike.setdefault(tuple(getattr(x, "shape", None) for x in own), []).append(k)
            for numbers in alike.values():
                columns = partial(columns_of, [sets[k] for k in numbers])

                def alone(row: int, numbers: list[int] = numbers) -> LaplacePosterior | None:
                    fit_alone([numbers[row]])
                    return entries[numbers[row]].make()

                batch = together(columns, len(numbers), alone, quiet.start, quiet.stop.quadrature_tol)
                for row in (row for row in batch.log_evidences if numbers[row] not in entries):
                    entries[numbers[row]] = Entry(batch.log_evidences[row], CONVERGED, partial(batch.posterior, row))
                    bar.update()
        fit_alone(range(len(sets)))
    table = [entries[k] for k in range(len(sets))]
    errors = {k: each.error for k, each in enumerate(table) if each.error is not None}
    values = torch.tensor([each.log_evidence for each in table], dtype=torch.float64)
    return FitTable(values, tuple(each.status for each in table), errors, [each.make for each in table])


class Entry(NamedTuple):
    """One fit of a table."""

    log_evidence: float
    status: str
    make: Callable[[], Any]
    error: Exception | None = None


def _entry(engine: Any, own: Arguments, kwargs: Mapping[str, Any]) -> Entry:
    """One fit by itself."""
    try:
        found = engine.run(*own, **kwargs)
    except FAILURES as error:
        return Entry(torch.nan, FAILED, lambda: None, error)
    return Entry(float(getattr(found, "log_evidence", torch.nan)), str(getattr(found, "status", "")), lambda: found)


def _one_of(posterior: LaplacePosterior | StructurePosterior) -> LaplacePosterior:
    """The posterior of one structure, of which all have the same data."""
    return posterior.member() if isinstance(posterior, StructurePosterior) else posterior


def _with_rows(
    posterior: LaplacePosterior | StructurePosterior, num: int, choices: Sequence[Tensor]
) -> list[Arguments]:
    """The arguments of a fit with some rows of the data: of every tensor among them with ``num`` rows."""
    joint = _one_of(posterior)._joint
    args, kwargs = joint.args, joint.kwargs
    if any(has_rows(x, num) for x in kwargs.values()) or not any(has_rows(x, num) for x in args):
        raise BadInput(
            f"no positional argument has {num} rows, or one by keyword has; expected data as positional arguments, "
            "run(X, y), a row for each observation, and as many labels of groups."
        )
    return [cut_rows(args, num, rows) for rows in choices]


def engine_of(posterior: LaplacePosterior | StructurePosterior, *, held: bool = False) -> Any:
    """An engine that fits the model of a posterior as that was fitted.

    :param held: with its hyperparameters, instead of maximising these anew.
    :raises BadInput: for structures with models of their own, and where their hyperparameters are to be held.
    """
    if isinstance(posterior, StructurePosterior):
        if not isinstance(posterior.fit, StructureFits) or (held and posterior.num_maximised):
            raise BadInput(
                "these structures have models or maximised hyperparameters of their own; expected structure sites of "
                "one model, whose hyperparameters have priors. Pass one structure's: posterior.member(k)."
            )
        return posterior.fit.engine
    posterior._needs_data("a refit")
    joint, (_, theta) = posterior._joint, posterior._mode_at
    model = joint.substituted(theta) if held else joint.model
    maximise = () if held or not joint.hypers.size else (joint.maximised_sites or None)
    problem = posterior._inside.problem
    settings: Any = {"marginalise": posterior.marginalised_sites, "curvature": problem.curvature}
    return LaplaceEvidence(model, maximise=maximise, nodes=problem.nodes, **settings)


def bootstrap(posterior: LaplacePosterior | StructurePosterior, num: int = 200, *, seed: int | None = 0) -> FitTable:
    """Fits to data sets whose rows are drawn from those of a fit with replacement.  Efron (1979).

    ``fits.estimates(site)[0].std(0)`` is the bootstrap's standard error of a site's posterior median: what it varies by
    among data sets, whatever the model says about the noise.  Rows are resampled by themselves: for data in groups give
    :func:`run_many` data sets of resampled groups.

    :param posterior: of a fit of data whose tensors, positional arguments, have a row for each observation.
    :param num: data sets.
    :param seed: of the rows that are drawn; None takes one from the state of the caller's generator.
    :raises BadInput: where observations have no rows in common.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.compare.many import bootstrap
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> posterior = LaplaceEvidence(regression(Linear(), alpha=1.0, beta=4.0)).run(X, X[:, 0] + X[:, 0] ** 2)
    >>> fits = bootstrap(posterior, 20)
    >>> len(fits), tuple(fits.estimates("w")[0].shape)
    (20, (20, 2))
    """
    num, generator = check_count("num", num, at_least=2), seeded(seed_of(seed))
    one, engine = _one_of(posterior), engine_of(posterior)
    joint, (u, theta) = one._joint, one._mode_at
    nodes = sample_nodes(joint.trace(u, theta))
    sizes = {tuple(nodes[n]["value"].shape[:1]) for n in joint.observed}
    if len(sizes) != 1 or () in sizes:
        raise BadInput(f"observed sites have {sorted(sizes)} rows; expected one number of rows, to draw from.")
    ((rows,),) = sizes
    choices = torch.randint(rows, (num, rows), generator=generator)
    return run_many(engine, _with_rows(posterior, rows, choices.unbind()))


def leave_one_group_out(posterior: LaplacePosterior | StructurePosterior, groups: Tensor) -> tuple[Tensor, FitTable]:
    """Log predictive density of each group of the data given all others, nats, by a refit without the group.

    It is the log evidence of all data less that without the group, hyperparameters held, as those of
    :meth:`~pyro_evidence.posterior.laplace.LaplacePosterior.loo`, which needs no refits and is an approximation of it.

    :param groups: labels of the rows of the data ``(N,)``, numbers or words; groups in their order.
    :return: ``(G,)``, nan where a fit failed, and the fits.
    :raises BadInput: for data that are no positional arguments, and for other numbers of labels than of rows.

    >>> log_densities, fits = leave_one_group_out(posterior, school)  # doctest: +SKIP
    """
    labels = labels_as_tensor(groups)
    kept = [(labels != group).nonzero().squeeze(-1) for group in labels.unique()]
    fits = run_many(engine_of(posterior, held=True), _with_rows(posterior, len(labels), kept))
    return posterior.log_evidence - fits.log_evidence, fits
