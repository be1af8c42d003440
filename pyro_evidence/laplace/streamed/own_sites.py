"""Which latent sites belong to the groups of a chunk alone: those of which there are as many as its rows say."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.chunks.join import Join
from pyro_evidence.chunks.labels import labels_of
from pyro_evidence.chunks.reading import Chunks, looked_through, num_rows
from pyro_evidence.errors import BadInput
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import shapes_on
from pyro_evidence.settings import outside
from pyro_evidence.structure.recognise import recognise


@dataclass(frozen=True)
class Seen:
    """What a run of the model on one chunk shows.

    :ivar shapes: of the latent sites.
    :ivar counted: whether groups are the rows, or as many as an argument says.
    :ivar labelled: whether an argument has labels of groups other than 0, 1, ..., or groups were brought together.
    """

    shapes: dict[str, list[int]]
    counted: bool
    labelled: bool


def own_sites(first: LogJoint, chunks: Chunks, join: Join, named: Sequence[str] | None = None) -> tuple[str, ...]:
    """The sites whose shape is another in every chunk, or those that are named; none where chunks share all.

    :param first: the model on the first rows.
    :param named: what the user says; ``()`` for none.
    :raises BadInput: for names that are none, and where chunks of equally many groups leave open whose they are.
    """
    if named is not None:
        return _require_latent(first, named)
    found = _seen(first, chunks, join)
    different = tuple(n for n in first.latents.names if len({tuple(s.shapes.get(n, ())) for s in found}) > 1)
    told = all(s.counted for s in found) or any(s.labelled for s in found)
    if different:
        if not told:
            warnings.warn(_taken(different), stacklevel=outside())
        return different
    following = _following(first)
    if len(found) > 1 and following and not told:
        raise BadInput(_undecided(following))
    return following if len(found) > 1 or recognise(first).linear is None else ()


def _require_latent(first: LogJoint, named: Sequence[str]) -> tuple[str, ...]:
    unknown = [n for n in named if n not in first.latents.names]
    if unknown:
        raise BadInput(f"own={list(named)}; expected latent sites among {', '.join(first.latents.names)}.")
    return tuple(n for n in first.latents.names if n in named)


def _following(first: LogJoint) -> tuple[str, ...]:
    """The sites of which one row makes fewer."""
    size = num_rows(first.args)
    args = tuple(x[:1] if isinstance(x, Tensor) and x.dim() and len(x) == size else x for x in first.args)
    try:
        one, whole = shapes_on(first, args), shapes_on(first, first.args)
    except Exception:  # the model's own, of a single row
        return ()
    return tuple(n for n in first.latents.names if one.get(n) != whole[n])


def _seen(first: LogJoint, chunks: Chunks, join: Join) -> list[Seen]:
    """Of all chunks of all processes; one pass, in which chunks are found to be of one kind."""
    here: list[tuple[dict[str, list[int]], bool, bool]] = []

    def look(_: int, args: tuple[Any, ...]) -> None:
        shapes = shapes_on(first, args)
        sizes = frozenset(size for shape in shapes.values() for size in shape)
        counted = num_rows(args) in sizes or any(isinstance(x, int) and x in sizes for x in args)
        labels = labels_of(args, sizes).values()
        other = any(not torch.equal(x, torch.arange(len(x)).to(x)) for x in labels)
        here.append((shapes, counted, other or hasattr(chunks, "groups")))

    looked_through(first.model, chunks, join, look)
    return [Seen(*one) for said in join.said(json.dumps(here)) for one in json.loads(said)]


def _taken(sites: Sequence[str]) -> str:
    return (
        f"site(s) {', '.join(sites)} have another number of elements in every chunk, and are taken as those of groups "
        f"that lie whole in one chunk. Say run_chunks(chunks, own={list(sites)}), also where a process has one, if "
        f"that is meant; if some chunks merely lack elements that all share, let the model make all of them everywhere."
    )


def _undecided(sites: Sequence[str]) -> str:
    return (
        f"site(s) {', '.join(sites)} have as many elements as the rows of a chunk say, and all chunks have equally "
        f"many: are they each chunk's own groups, or the same in all? Expected to be told: "
        f"run_chunks(chunks, own={list(sites)}) for groups that lie whole in one chunk, also where a process has one, "
        f"own=() for elements that all chunks share."
    )
