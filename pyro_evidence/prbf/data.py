"""The network's data, in memory or in chunks, of this process and of others; and starts that see a sample."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.ranks import Communicator
from pyro_evidence.data.rows import PLACES, Rows, scattered
from pyro_evidence.errors import BadInput
from pyro_evidence.models.covariances import Covariance
from pyro_evidence.models.prbf import PRBF, Labels, check_network_inputs, class_labels
from pyro_evidence.prbf.densities import ROUNDED, Network, varied

SAMPLE = 2**14  # data that a start sees where there are more, as many of each class

Labelled = tuple[Tensor, Tensor]  # X (n, D) float64 and labels (n,) int64 of some of the data


def rows_in_memory(model: PRBF, X: Tensor, labels: Labels | None) -> Rows[Labelled]:
    """The rows of data that are all in memory, checked.

    :raises BadInput: on inputs or labels that cannot be used.
    """
    check_network_inputs(X)
    return Rows.resident(labelled(model, (X, labels)), len(X))


def rows_of_chunks(model: PRBF, chunks: Chunks, communicator: Communicator) -> Rows[Labelled]:
    """The rows of chunks counted and checked, in one pass.

    :raises BadInput: on chunks that cannot be used, naming the first.
    """

    def check(number: int, args: tuple[Any, ...]) -> None:
        if len(args) > 2:
            raise BadInput(f"chunk {number} has {len(args)} arguments; expected (X, labels), or (X,) of one class.")
        check_network_inputs(args[0])
        labelled(model, args)

    return Rows.of_chunks(
        model, chunks, lambda number, args: labelled(model, args), check=check, communicator=communicator
    )


@dataclass(frozen=True, eq=False)
class DataTotals:
    """Totals over all data.

    :ivar per_class: number of data without a label, then of each class, shape ``(1 + K,)``.
    """

    per_class: Tensor
    mean: Tensor  # (D,)
    scatter: Tensor  # (D, D) covariance

    @staticmethod
    def of(rows: Rows[Labelled], num_classes: int) -> "DataTotals":
        """Totals that the first round needs; three passes.

        :raises BadInput: on an absent class, or where no input varies.
        """
        per_class = rows.total(lambda piece: torch.bincount(piece[1] + 1, minlength=num_classes + 1).to(piece[0]))
        mean = rows.total(lambda piece: piece[0].sum(0)) / len(rows)
        scatter = rows.total(lambda piece: (piece[0] - mean).mT @ (piece[0] - mean)) / len(rows)
        if len(absent := (per_class[1:] == 0).nonzero().flatten().tolist()):
            raise BadInput(
                f"no row of X has label {absent}; expected at least one of each class from 0 to {num_classes - 1}. Set "
                f"num_classes to the number of classes that occur, and number them from 0; -1, nan and None mean that "
                f"a label is unknown."
            )
        if not bool((scatter.diagonal() > ROUNDED * mean.square()).any()):
            raise BadInput("all rows of X are the same; expected data that vary, or no kernel has a width.")
        return DataTotals(per_class, mean, scatter)

    @property
    def variance(self) -> Tensor:
        """Variance of each input; a constant input gets the mean of the others."""
        variance = self.scatter.diagonal()
        return varied(variance, variance + self.mean.square())


@dataclass(frozen=True, eq=False)
class Training:
    """Inputs, labels and the sizes of a network; of many data a sample of each class."""

    X: Tensor  # (N, D)
    labels: Tensor  # (N,) int64, -1 where unknown
    kind: Covariance
    allowed: Tensor  # (K, M) bool
    whole: DataTotals | None = None  # totals over all data; None where these are all

    @cached_property
    def totals(self) -> DataTotals:
        """Totals over all data."""
        return self.whole or DataTotals.of(Rows.resident((self.X, self.labels), len(self.X)), len(self.allowed))

    @property
    def class_prior(self) -> Tensor:
        """Shares of the labelled data, eq. 20, shape ``(K,)``."""
        known = self.totals.per_class[1:]
        return known / known.sum()

    @cached_property
    def covariance(self) -> Tensor:
        """Covariance of all data, in the shape of the kind; a constant input counts as the mean of the others."""
        matrix = self.totals.scatter.diagonal_scatter(self.totals.variance)
        return self.kind.floored(self.kind.restricted(matrix), self.kind.floor * matrix.diagonal())

    def network(self, loc: Tensor, covariance: Tensor) -> Network:
        """Networks at some centres ``(R, M, D)``, with equal mixing."""
        mixing, prior = (x.expand(len(loc), *x.shape).contiguous() for x in (self.mixing, self.class_prior))
        return Network(mixing, loc, covariance.contiguous(), prior)

    @property
    def mixing(self) -> Tensor:
        """Equal shares of the kernels that a class may use, shape ``(K, M)``."""
        return self.allowed.to(self.X) / self.allowed.sum(-1, keepdim=True)

    @property
    def usable(self) -> Tensor:
        """Whether a datum may belong to a kernel, shape ``(N, M)``."""
        table = torch.cat([self.allowed, self.allowed.any(0, keepdim=True)])  # the last row is for unlabelled data
        return table[self.labels]


def training_of(model: PRBF, rows: Rows[Labelled], totals: DataTotals) -> Training:
    """Data for a start: all, or where they are many about as many of each class, chosen by their numbers."""
    num_present = int((totals.per_class > 0).sum())
    each = float(PLACES) * SAMPLE / (num_present * totals.per_class.clamp(min=1.0))  # no matter in absent classes
    below = (torch.full_like(each, PLACES) if len(rows) <= SAMPLE else each.clamp(max=PLACES)).long()
    X, y = rows.selected(lambda piece: piece, lambda numbers, columns: scattered(numbers) < below[columns[1] + 1])
    allowed = model.sharing.allowed(model.num_classes, model.num_kernels).to(X.device)
    return Training(X, y, model.kernels, allowed, totals)


def labelled(model: PRBF, args: tuple[Any, ...]) -> Labelled:
    """Inputs in float64 and labels as int64."""
    X, labels = args if len(args) == 2 else (args[0], None)
    y = class_labels(labels, len(X), model.num_classes).to(X.device)
    return X.detach().double(), torch.zeros_like(y) if model.num_classes == 1 else y
