"""Laws of every kind of precision: a batch is a loop over its members, many vectors for one are a loop over them."""

from functools import partial

import pytest
import torch
from torch import Tensor

from pyro_evidence.precision.blocks import BlockPrecision
from pyro_evidence.precision.dense import (
    DenseElements,
    DensePlan,
    Precision,
    Separate,
    factorise,
    packed_factors,
    unpacked_factors,
)
from pyro_evidence.precision.gaussian_process import LatentPrecision, Selection
from pyro_evidence.precision.low_rank import LowRank, LowRankPlan
from tests.models_for_tests.patterns import groups_with_weights, with_elements
from tests.precision import test_gaussian_process_mode as process
from tests.precision.test_elements import to_the_last_block
from tests.precision.test_low_rank import case

assert_exact = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)


def matrices() -> Tensor:
    """Three positive definite ones, ``(3, 4, 4)``."""
    B = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    return B @ B.mT + 0.1 * torch.eye(4)


def structured(dense: bool) -> tuple[Precision, ...]:
    pattern, elements = with_elements(groups_with_weights())
    plan = DensePlan(pattern) if dense else to_the_last_block(pattern)
    return tuple(plan.factorise(tuple(scale * e for e in elements), str) for scale in (1.0, 2.0, 3.0))


def low_rank() -> tuple[Precision, ...]:
    pattern, elements, B = case(False)
    plan = LowRankPlan(pattern, B)
    return tuple(plan.factorise(tuple(scale * e for e in elements), str) for scale in (1.0, 2.0, 3.0))


def latents() -> tuple[Precision, ...]:
    each = [process.latent(name) for name in ("bernoulli", "normal", "student")]
    seen = Selection(torch.arange(12), 12)
    return tuple(
        LatentPrecision(at.covariance, torch.linalg.cholesky(at.covariance), seen, process.solved(at)) for at in each
    )


def batches() -> dict[str, Precision]:
    """Three precisions of each kind, one batch."""
    A = matrices()
    return {
        "dense": factorise(A),
        "diagonal": factorise(A.diagonal(dim1=-2, dim2=-1)),
        "dense by factors": Separate(structured(dense=True)),
        "blocks": Separate(structured(dense=False)),
        "low rank": Separate(low_rank()),
        "process": Separate(latents()),
        "mixed": Separate((factorise(A[:1]), factorise(A[1:2].diagonal(dim1=-2, dim2=-1)), factorise(A[2:]))),
    }


KINDS = ("dense", "diagonal", "dense by factors", "blocks", "low rank", "process", "mixed")


def vectors(precision: Precision) -> tuple[Tensor, Tensor]:
    """Three vectors, and which coordinates are active: all but the third."""
    size = precision.variance.shape[-1]
    active = torch.ones(size, dtype=torch.bool).index_fill(0, torch.tensor([2]), False)
    return torch.randn(3, size, generator=torch.Generator().manual_seed(1)), active


def test_the_kinds_are_what_they_are_called() -> None:
    expected = {"dense by factors": DenseElements, "blocks": BlockPrecision, "low rank": LowRank}
    for kind, cls in expected.items():
        assert isinstance(batches()[kind].row(0), cls)


@pytest.mark.parametrize("kind", ["dense", "dense by factors", "blocks", "low rank"])
def test_factors_are_what_was_packed(kind: str) -> None:
    batch = batches()[kind]
    rows, (b, _) = [batch.row(row) for row in range(3)], vectors(batch)
    again = unpacked_factors(torch.cat([packed_factors(A) for A in rows]), rows[0])
    for name in ("unwhiten", "whiten"):
        assert_exact(getattr(again, name)(b), getattr(batch, name)(b))
        assert_exact(getattr(again.row(1), name)(b), getattr(rows[1], name)(b))
    assert_exact(again.log_det, batch.log_det)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_loop(kind: str) -> None:
    batch = batches()[kind]
    b, active = vectors(batch)
    for i in range(3):
        one, part = batch.row(i), slice(i, i + 1)
        assert one.log_det.shape == (1,)
        assert_exact(batch.log_det[part], one.log_det)
        assert_exact(batch.variance[part], one.variance)
        for name in ("solve", "unwhiten", "whiten"):
            assert_exact(getattr(batch, name)(b)[part], getattr(one, name)(b[part]))
        assert_exact(batch.least_precise_direction(active)[part], one.least_precise_direction(active))
        assert_exact(
            batch.log_det_gradient[i], one.log_det_gradient if isinstance(batch, Separate) else one.log_det_gradient[0]
        )


@pytest.mark.parametrize("kind", KINDS)
def test_many_vectors_for_one_are_a_loop(kind: str) -> None:
    one = batches()[kind].row(0)
    b, _ = vectors(one)
    for name in ("solve", "unwhiten", "whiten"):
        together = getattr(one, name)(b)
        assert_exact(together, torch.cat([getattr(one, name)(v) for v in b.split(1)]))
    assert_exact(one.whiten(one.unwhiten(b)), b, rtol=1e-6, atol=1e-6)
