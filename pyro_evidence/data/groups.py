"""Groups that must lie whole in one chunk: rows brought together, and those that are not refused by name."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_evidence.data.arrays import as_tensor, require_dense, require_rows
from pyro_evidence.data.chunks import SIZE
from pyro_evidence.data.ranks import Communicator
from pyro_evidence.errors import BadInput
from pyro_evidence.settings import check_count

NAMED = 5  # groups that an error message names


class Groups:
    """Arrays in chunks of whole groups: rows of one group come together, groups are numbered from 0 in each chunk.

    A chunk is ``(number of each row's group, *arrays)``.  The rows of a chunk are copied when it is its turn.

    :param labels: the group of each row, whole numbers in any order, or words, ``(N,)``.
    :param arrays: the model's further arguments, of the same length; tensors, NumPy's arrays, or mapped ones.
    :param size: rows of a chunk, more where a group has more.
    :raises BadInput: for arrays of different lengths.

    >>> import torch
    >>> from pyro_evidence.data import Groups
    >>> [(g.tolist(), t.tolist()) for g, t in Groups(torch.tensor([7, 3, 7, 5]), torch.arange(4), size=2)]
    [([0, 1], [1, 3]), ([0, 0], [0, 2])]
    """

    def __init__(self, labels: Any, *arrays: Any, size: int = SIZE) -> None:
        found = labels_as_tensor(labels)
        require_rows("Groups", found, *arrays)
        self.arrays = tuple(a.to_numpy() if hasattr(a, "iloc") else a for a in arrays)  # no names
        self.size: int = check_count("size", size)
        self.groups: Tensor
        self.groups, self._of_row, counts = torch.unique(found, return_inverse=True, return_counts=True)
        self._order, self._ends = self._of_row.argsort(stable=True), counts.cumsum(0)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        begin = first = 0
        while first < len(self._ends):
            last = max(first + 1, int(torch.searchsorted(self._ends, begin + self.size, right=True)))
            end = int(self._ends[last - 1])
            rows = self._order[begin:end]
            taken = (a[rows if isinstance(a, Tensor) else rows.numpy()] for a in self.arrays)
            yield self._of_row[rows] - first, *map(as_tensor, taken)
            begin, first = end, last


def labels_as_tensor(labels: Any) -> Tensor:
    """Which group each row belongs to, as numbers, ``(N,)``; words are numbered in their order.

    :raises BadInput: for labels of another shape, missing ones and what is no label.
    """
    found = as_tensor(labels)
    if isinstance(found, Tensor):
        require_dense("labels", found)
    if not isinstance(found, Tensor):
        words = np.array(None)
        if isinstance(labels, list | tuple) or hasattr(labels, "__array__"):
            with suppress(ValueError, TypeError):  # a ragged list, or a class
                words = np.asarray(labels)
        if words.ndim == 1 and words.dtype.kind == "O" and all(isinstance(w, str) for w in words):
            words = words.astype(str)
        if words.dtype.kind in "biufUT":
            found = torch.tensor(np.unique(words, return_inverse=True)[1] if words.dtype.kind in "UT" else words)
    if not isinstance(found, Tensor) or found.dim() != 1 or found.is_complex() or bool(found.isnan().any()):
        given = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(labels).__name__}"
        raise BadInput(
            f"labels of Groups are {given}, or some are missing; expected the group of each row, numbers or words of "
            f"shape (N,). For a column take labels[:, 0]; codes, names = pandas.factorize(labels) numbers others."
        )
    return found


Labels = dict[int, Tensor]  # by place among the arguments, the distinct ones of a chunk


def labels_of(args: Sequence[Any], sizes: frozenset[int]) -> Labels:
    """The arguments that may say which group a row belongs to, as their distinct values.

    :param sizes: numbers of groups that the model has made of the chunk.
    :raises BadInput: where groups are numbered from another number than 0, so that some have no rows.
    """
    found = {}
    for place, x in enumerate(args):
        if isinstance(x, Tensor) and x.dim() == 1 and len(x) and not (x.is_floating_point() or x.is_complex()):
            values = x.unique().long()
            if len(values) in sizes:
                found[place] = values
            elif int(values[0]) > 0 and int(values[-1]) + 1 in sizes:
                raise BadInput(
                    f"argument {place} numbers the groups of a chunk {int(values[0])} to {int(values[-1])}, of which "
                    f"the model makes {int(values[-1]) + 1}; expected the groups of each chunk to be numbered from 0, "
                    f"as pyro_evidence.data.Groups numbers them."
                )
    return found


def require_whole(chunks: Any, found: Sequence[Labels], join: Communicator) -> None:
    """Refuse groups of which two chunks have rows, wherever these are.

    What is numbered 0, 1, ... in every chunk tells nothing.

    :param found: of the chunks of this process.
    :raises BadInput: on every process, naming groups.
    """
    groups = getattr(chunks, "groups", None)
    own = [{-1: groups}] if isinstance(groups, Tensor) else found
    places = {}
    for place in {place for labels in own for place in labels}:
        values = [labels[place] for labels in own if place in labels]
        numbered = all(torch.equal(x, torch.arange(len(x)).to(x)) for x in values)
        places[str(place)] = [len(values) == len(own), numbered]
    said = [json.loads(text) for text in join.gather_str(json.dumps([len(own), places]))]
    known = [here for count, here in said if count]
    for place in sorted(set.intersection(*(set(x) for x in known)) if known else ()):
        if all(x[place][0] for x in known) and not all(x[place][1] for x in known):
            _require_once(int(place), own, join)


def _require_once(place: int, own: Sequence[Labels], join: Communicator) -> None:
    here = torch.cat([x[place].double() for x in own]) if own else torch.zeros(0, dtype=torch.float64)
    values, counts = join.gathered(here.cpu()).unique(return_counts=True)
    twice = values[counts > 1].long().tolist()
    if twice:
        more = f" and {len(twice) - NAMED:,} more" if len(twice) > NAMED else ""
        where = "labels" if place < 0 else f"argument {place}"
        raise BadInput(
            f"the rows of group(s) {', '.join(map(str, twice[:NAMED]))}{more} ({where}) lie in more than one chunk or "
            f"process; expected each group whole in one. pyro_evidence.data.Groups(labels, ...) brings together the "
            f"rows of one process."
        )
