"""From a model of ours and chunks of its data to a fit that never has all rows."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks, agree_on_kind, first_rows, looked_through, with_rows
from pyro_evidence.data.ranks import Communicator
from pyro_evidence.mixture.fit import RandomWeights
from pyro_evidence.models.wrappers import Marginalised, marginalised
from pyro_evidence.mppca import fit, rounds
from pyro_evidence.mppca.chunks import StreamedRows, added_up
from pyro_evidence.mppca.fit import MPPCAFit
from pyro_evidence.mppca.recognise import MPPCAStructure, ScalarUnits, recognise_mppca
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import Start


def begin(
    model: Any, chunks: Chunks, join: Communicator, start: Start, initial: RandomWeights, update: object
) -> MPPCAFit:
    """The mixture recognised by a few rows, and all restarts before the first round.

    :raises BadInput: for chunks that can be gone through only once, hold no rows, or cannot be used.
    """
    rule, ours, gappy = rounds.rule_of(update), fit.own_model(model), isinstance(model, Marginalised)
    assert ours is not None  # others go another way
    agree_on_kind(model, chunks, join)
    counts = looked_through(model, chunks, join, partial(_check, gappy))
    structure = _structure(marginalised(ours.marginalised) if gappy else ours.marginalised, chunks, join, ours)
    raw = _rows(chunks, join, counts, structure.Y.shape[1])
    raw = replace(raw, gappy=bool(added_up(raw, lambda y: y.isnan().sum())))
    units = ScalarUnits.of_rows(raw)
    Y = raw.mapped(lambda y: (y - units.origin) / units.unit)
    return fit.begun(replace(structure, Y=raw.nothing), units, Y, start, initial, rule)


def _check(gappy: bool, number: int, args: tuple[Any, ...]) -> None:
    fit.checked_data(args, {}, gappy=gappy)


def _structure(marginal: Any, chunks: Chunks, join: Communicator, ours: Any) -> MPPCAStructure:
    (few,) = first_rows(chunks, join)
    joint = LogJoint(marginal, (fit.some_rows(ours, few),))
    joint.has_data = False
    return recognise_mppca(joint)


def _rows(chunks: Chunks, join: Communicator, counts: tuple[int, ...], num_columns: int) -> StreamedRows:
    def passes() -> Iterator[Tensor]:
        for _, (y,) in with_rows(chunks):
            yield y.detach().double()

    return StreamedRows(passes, join, counts, torch.zeros(0, num_columns, dtype=torch.float64), gappy=False)
