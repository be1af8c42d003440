"""Which latent sites belong to the groups of a chunk alone: those of which there are as many as its rows say."""

import json
from collections.abc import Sequence

from torch import Tensor

from pyro_evidence.chunks.join import Join
from pyro_evidence.chunks.reading import Chunks, looked_through, num_rows
from pyro_evidence.errors import BadInput
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import shapes_on
from pyro_evidence.structure.recognise import recognise


def own_sites(first: LogJoint, chunks: Chunks, join: Join, named: Sequence[str] | None = None) -> tuple[str, ...]:
    """The sites whose shape is another in every chunk, or those that are named; none where chunks share all.

    :param first: the model on the first rows.
    :param named: what the user says; ``()`` for none.
    :raises BadInput: for names that are none, and where chunks of equally many groups leave open whose they are.
    """
    if named is not None:
        return _require_latent(first, named)
    found = _shapes(first, chunks, join)
    different = [n for n in first.latents.names if len({tuple(s.get(n, ())) for s in found}) > 1]
    following = () if different else _following(first)
    if len(found) > 1 and following:
        raise BadInput(_undecided(following))
    alone = following and recognise(first).linear is None
    return tuple(different) or (following if alone else ())


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


def _shapes(first: LogJoint, chunks: Chunks, join: Join) -> list[dict[str, list[int]]]:
    """Of the latent sites, in all chunks of all processes; one pass, in which chunks are found to be of one kind."""
    here: list[dict[str, list[int]]] = []
    looked_through(first.model, chunks, join, lambda _, args: here.append(shapes_on(first, args)))
    return [shapes for said in join.said(json.dumps(here)) for shapes in json.loads(said)]


def _undecided(sites: Sequence[str]) -> str:
    return (
        f"site(s) {', '.join(sites)} have as many elements as the rows of a chunk say, and all chunks have equally "
        f"many: are they each chunk's own groups, or the same in all? Expected to be told: "
        f"run_chunks(chunks, own={list(sites)}) for groups that lie whole in one chunk, also where a process has one, "
        f"own=() for elements that all chunks share."
    )
