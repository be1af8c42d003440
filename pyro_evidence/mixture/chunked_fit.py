"""From a model and chunks of its arguments to a fit that never has all rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks, arguments, looked_through, with_rows
from pyro_evidence.data.ranks import COMMUNICATOR, Communicator
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.mixture import evidence, fit, rounds
from pyro_evidence.mixture.chunks import Source, StreamedData
from pyro_evidence.mixture.data import ResponseUnits, units_of
from pyro_evidence.mixture.evidence import MixtureCurvature
from pyro_evidence.mixture.expectation import MixtureData
from pyro_evidence.mixture.fit import MixtureFit, Starting
from pyro_evidence.mixture.recognise import MixtureStructure, recognise_mixture
from pyro_evidence.mixture.updates import Update
from pyro_evidence.models.mixture import Responses
from pyro_evidence.program.log_joint import LogJoint

FEW = 64  # rows on which the model is recognised


def begin(
    model: Any, chunks: Chunks, start: Starting, update: Update, curvature: MixtureCurvature, most: int
) -> MixtureFit:
    """The mixture recognised by a few rows, and all restarts before the first round, on a sample.

    :raises BadInput: for chunks that can be gone through only once, hold no rows, or differ in more than their rows.
    :raises UnsupportedModel: for models that do not say what their rows are.
    """
    read = Reader.of(model, chunks, COMMUNICATOR.get())
    settled = model.settled_over(read.passes, read.join.total)
    structure = recognise_mixture(LogJoint(settled, settled.few(1, *read.first)))
    units = units_of(lambda: ((r.Y, r.G, r.weight) for r in read.passes()), read.join.total)
    data = read.data(structure, units, products=curvature is not evidence.block or structure.correlation is not None)
    ties, own = rounds.in_units(structure.ties, units.unit), units.standard(structure.start)
    few = data.sampled(max(most, fit.SAMPLE_EACH * len(own.loc)))
    return MixtureFit(structure, units, data, ties, rounds.first(few, start(few, own, ties), ties, curvature, update))


@dataclass(frozen=True)
class Reader:
    """The rows of a model of ours, chunk by chunk, those of other processes counted."""

    model: Any
    chunks: Chunks
    join: Communicator
    counts: tuple[int, ...]  # rows of each process
    first: tuple[Tensor, ...]  # the arguments of the first few rows of all

    @staticmethod
    def of(model: Any, chunks: Chunks, join: Communicator) -> "Reader":
        """The rows counted and checked, in one pass.

        :raises BadInput, UnsupportedModel: as :func:`begin`.
        """
        _check(model)
        counts = looked_through(model, chunks, join, partial(_check_rows, model))
        if join.restarts is not None:
            join.restarts.check_equal("numbers of rows where shards(restarts=...) wants the same", str(counts))
        return Reader(model, chunks, join, counts, _first(chunks, join))

    def passes(self) -> Iterator[Any]:
        """What the arguments of each chunk say in rows; where all are empty, that there are none."""
        if not self.counts[self.join.rank]:
            yield _cut(_double(self.model.rows(*self.first)), 0)
        for _, args in with_rows(self.chunks):
            yield _double(self.model.rows(*args))

    def data(self, structure: MixtureStructure, units: ResponseUnits, *, products: bool) -> StreamedData:
        """The data in standard units."""

        def standard(found: Responses) -> MixtureData:
            part = units.data(found.Y, found.G, found.weight, products=products)
            here = replace(structure, Y=found.Y, offset=structure.offset[:1])
            return here.spread(part, structure.background, units.unit)

        empty = standard(
            Responses(structure.Y[:0], None if structure.G is None else structure.G[:0], structure.weight[:0])
        )
        weight = self.join.total(torch.stack([found.weight.sum() for found in self.passes()]).sum())
        first = sum(self.counts[: self.join.rank])
        source = Source(lambda: map(standard, self.passes()), self.join, sum(self.counts), first, weight)
        names = ("Y", "G", "weight", "observed", "features", "layout", "floor", "log_share")
        return StreamedData(**{n: getattr(empty, n) for n in names}, source=source)


def _check(model: Any) -> None:
    """Refuse what does not say what its rows are.

    :raises UnsupportedModel: naming what does.
    """
    if not hasattr(model, "settled_over"):
        raise UnsupportedModel(
            "run_chunks needs a model that says what its rows are: gaussian_mixture or linear_mixture, alone or in "
            "with_background. Pass all data of other models to run(...)."
        )


def _check_rows(model: Any, number: int, args: tuple[Any, ...]) -> None:
    """Refuse gaps."""
    Y = model.rows(*args).Y
    if bool(Y.isnan().any()):
        row, column = Y.isnan().nonzero()[0].tolist()
        raise BadInput(
            f"chunk {number} holds nan, first in row {row}, column {column} of it; expected numbers. Rows with gaps "
            f"are for EvidenceEM(marginalised(model)).run(Y), all at once."
        )


def _first(chunks: Chunks, join: Communicator) -> tuple[Tensor, ...]:
    """The arguments of the first few rows of all."""
    columns: list[list[Tensor]] = [[x[:0]] for x in arguments(0, next(iter(chunks)))]
    for _, args in with_rows(chunks):
        for column, x in zip(columns, args, strict=True):
            column.append(x[:FEW])
        if sum(len(x) for x in columns[0]) >= FEW:
            break
    return tuple(join.gathered(torch.cat(x)[:FEW])[:FEW] for x in columns)


def _double(rows: Responses) -> Responses:
    G = None if rows.G is None else rows.G.detach().double()
    return Responses(rows.Y.detach().double(), G, rows.weight.detach().double())


def _cut(rows: Responses, num: int) -> Responses:
    """The first ``num`` rows."""
    return Responses(rows.Y[:num], None if rows.G is None else rows.G[:num], rows.weight[:num])
