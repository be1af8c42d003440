"""The weights of data that come in chunks of rows: sums over a pass, never a whole design matrix."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.ranks import SINGLE_PROCESS, Communicator
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.numerics.derivatives import generic_directions
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.relevance.targets import LinearTarget, Parts, QuadraticTarget
from pyro_evidence.relevance.weights import Weights, linear_parts, weights_of
from pyro_evidence.structure.density import LinearDensity
from pyro_evidence.structure.streamed import linear_rows


def weights_in_chunks(
    model: Model, site: str | Sequence[str] | None, chunks: Chunks, communicator: Communicator = SINGLE_PROCESS
) -> Rows[Weights]:
    """The weights of each chunk alone, the example those of the first few rows; one pass, in which all is checked.

    Every chunk of every pass is read and dropped again.

    :raises BadInput: for no chunks, for those that can be gone through only once, or whose weights differ.
    :raises UnsupportedModel: for a predictor that is not linear, or latent sites besides the weights.
    """
    rows = linear_rows(model, chunks, communicator, partial(LogJoint, model, maximise=()))
    first = weights_of(rows.joint, site)
    if not isinstance(first.target, LinearTarget) or first.num_others:
        raise UnsupportedModel(
            "chunks of rows need linear predictors and no latent sites besides the weights. Pass all data to run(...)."
        )
    eps = first.target.eps

    def of_chunk(density: LinearDensity) -> Weights:
        target = LinearTarget.resident(linear_parts(density, first.order), eps=eps)
        return replace(first, joint=density.joint, target=target, slots=density.slots)

    return rows.mapped(of_chunk)


def of_all_rows(rows: Rows[Weights]) -> Weights:
    """The weights with a target that is a sum over all rows."""

    def parts_of(weights: Weights) -> Parts:
        assert isinstance(weights.target, LinearTarget)
        return weights.target.parts

    first = rows.example
    return replace(first, target=LinearTarget(rows.mapped(parts_of), eps=first.target.eps))


def summarised(target: LinearTarget) -> LinearTarget | QuadraticTarget:
    """The target by its sums at zero, where it is quadratic, as two more points tell; otherwise itself."""
    zero, eps = torch.zeros_like(target.parts[0].J[0, 0]), target.eps**0.75
    found = QuadraticTarget(target.sums(zero), eps=target.eps)
    step = found.origin.precision.diagonal().clamp(min=1e-300).rsqrt()  # a column of zeros may move by anything
    for move in step * generic_directions(2, len(zero), zero) * zero.new_tensor([[1.0], [3.0]]):
        foretold, there = found.sums(move), target.sums(move)
        scale = 1.0 + foretold.value.abs(), found.origin.precision.abs().amax()
        if not bool((there.value - foretold.value).abs() <= eps * scale[0]):
            return target
        if not bool(((there.precision - foretold.precision).abs() <= eps * scale[1]).all()):
            return target
    return found
