"""Data of a mixture that come in chunks, pass by pass, from this process and from others: a pass is a sum."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data import ranks as joining
from pyro_evidence.data.ranks import SINGLE_PROCESS, Communicator, Sums
from pyro_evidence.mixture.data import AXES, SCATTER, MixtureData

LARGEST = 2**15  # data of the largest sample, which is kept


@dataclass(frozen=True)
class Source:
    """Where the rows come from, in standard units."""

    passes: Callable[[], Iterator[MixtureData]]
    join: Communicator
    num_rows: int  # of all processes
    first_row: int  # number of the first one here among all
    num_data: Tensor  # () total weight
    samples: dict[int, MixtureData] = field(default_factory=dict, compare=False)


def by_restarts(join: Communicator, num: int, of_rows: Callable[[Tensor | None], Sums]) -> Sums:
    """What ``of_rows`` gives of all restarts, where groups of processes share them out.

    :param num: of the restarts.
    :param of_rows: told whose sums are asked for; None for all.
    """
    if join.restarts is None or num == 1:
        return of_rows(None)
    size, mine = join.restarts.num_ranks, torch.arange(num)[join.restarts.rank :: join.restarts.num_ranks]
    here = of_rows(mine if len(mine) else torch.arange(1))
    order = torch.cat([torch.arange(num)[i::size] for i in range(size)]).argsort()

    def whole(x: Tensor) -> Tensor:
        return x if x.dim() == 0 else join.restarts.gathered(x[: len(mine)])[order]  # type: ignore[union-attr]

    found: Sums = replace(here, **{f.name: whole(getattr(here, f.name)) for f in fields(here)})  # type: ignore[type-var,arg-type]
    return found


@dataclass(frozen=True)
class StreamedData(MixtureData):
    """Data that are never together: every pass reads the chunks anew, and adds up what all processes found."""

    source: Source | None = None

    @property
    def _source(self) -> Source:
        assert self.source is not None
        return self.source

    @property
    def num_rows(self) -> int:
        """Number of data of all processes, whatever their weight."""
        return self._source.num_rows

    @property
    def num_data(self) -> Tensor:
        """Total weight of the data of all processes, shape ``()``."""
        return self._source.num_data

    def parts(self, size: int) -> Iterator[MixtureData]:
        """The data of this process, ``size`` rows at a time."""
        for chunk in self._source.passes():
            if chunk.num_rows:
                yield from chunk.parts(size)

    def total(self, size: int, of_part: Callable[[MixtureData], Sums]) -> Sums:
        """One pass: the sum of ``of_part`` over the data of all processes."""
        return joining.total(self._source.join, self.parts(size), of_part, lambda: of_part(self._nothing))

    def by_restarts(self, num: int, of_rows: Callable[[Tensor | None], Sums]) -> Sums:
        """What ``of_rows`` gives of all restarts, each group of processes some of them."""
        return by_restarts(self._source.join, num, of_rows)

    @property
    def _nothing(self) -> MixtureData:
        """No data, of the same kind."""
        names = ("Y", "G", "weight", "observed", "floor")
        values = {n: getattr(self, n) for n in names} | {"layout": self.layout, "log_share": self.log_share}
        return MixtureData(features=self.Y.new_zeros(0, self.layout.num_features), **values)

    def sampled(self, most: int) -> MixtureData:
        """About ``most`` of the data, scattered over all by the numbers of their rows."""
        most = min(self._source.num_rows, most)
        kept = self._source.samples
        if most not in kept:
            kept[most] = self._gathered(most)
        return kept[most]

    def _gathered(self, most: int) -> MixtureData:
        source, number, found = self._source, self._source.first_row, []
        for chunk in source.passes():
            index = torch.arange(number, number + chunk.num_rows)
            number += chunk.num_rows
            chosen = ((index * SCATTER) % 2**32 < most * 2**32 // source.num_rows).nonzero().flatten()
            found.append([_rows(x, chosen) for x in (chunk.Y, chunk.G, chunk.weight, chunk.floor)])
        empty = self._nothing
        found.append([empty.Y, empty.G, empty.weight, empty.floor])
        Y, G, weight, floor = (_joined(source.join, column) for column in zip(*found, strict=True))
        assert Y is not None and G is not None and weight is not None
        values = {"Y": Y, "G": G, "weight": weight, "observed": None, "features": None, "floor": floor}
        settled: dict[str, Any] = values | {"layout": self.layout, "log_share": self.log_share}
        join = source.join
        part = MixtureData(**settled) if join.num_ranks == 1 else SharedData(**settled, join=join)
        return part.with_features


@dataclass(frozen=True)
class SharedData(MixtureData):
    """Data that all processes have: each adds up a part of them, and all get the sum."""

    join: Communicator = SINGLE_PROCESS

    def total(self, size: int, of_part: Callable[[MixtureData], Sums]) -> Sums:
        """One pass: the sum of ``of_part`` over all data, this process's part ``size`` rows at a time."""
        nothing = lambda: of_part(self._of(slice(0, 0)))  # noqa: E731
        mine = self._of(joining.share(self.join, self.num_rows))
        return joining.total(self.join, mine.parts(size) if mine.num_rows else (), of_part, nothing)

    def by_restarts(self, num: int, of_rows: Callable[[Tensor | None], Sums]) -> Sums:
        """What ``of_rows`` gives of all restarts, each group of processes some of them."""
        return by_restarts(self.join, num, of_rows)

    def _of(self, rows: slice) -> MixtureData:
        """Some of the rows, which no other process knows of."""
        names = {name: getattr(self, name) for name in AXES}
        taken: dict[str, Any] = {
            n: None if v is None else v.narrow(AXES[n], rows.start, rows.stop - rows.start) for n, v in names.items()
        }
        return MixtureData(**taken, layout=self.layout, log_share=self.log_share)


def _rows(x: Tensor | None, index: Tensor) -> Tensor | None:
    return None if x is None else x[index.to(x.device)]


def _joined(join: Communicator, parts: tuple[Any, ...]) -> Tensor | None:
    return None if parts[0] is None else join.gathered(torch.cat(parts))
