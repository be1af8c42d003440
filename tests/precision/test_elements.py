"""Each kind of elimination against the dense inverse of a matrix that NumPy sums up entry by entry."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pyro_evidence.errors import NotPositiveDefinite, TooLarge
from pyro_evidence.precision import elimination as ordering
from pyro_evidence.precision.blocks import elimination
from pyro_evidence.precision.dense import DensePlan, Pattern, Plan, Precision, Separate, pattern_product
from pyro_evidence.precision.elimination import elimination_order
from tests.models_for_tests.patterns import (
    EVERY,
    chain,
    columns,
    crossed,
    drawn,
    grid,
    groups_with_weights,
    with_elements,
)
from tests.oracles import elements as oracle

Planner = Callable[[Pattern], Plan]


def to_the_last_block(pattern: Pattern) -> Plan:
    """Nothing left for a dense matrix."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "BATCH", -1.0)
        return elimination(pattern)


def padded(pattern: Pattern) -> Plan:
    """The same with all blocks of a level in one batch, of the size of the largest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "_batches", lambda own, width: [torch.arange(len(own))])
        return to_the_last_block(pattern)


PLANNERS = [elimination, to_the_last_block, padded, DensePlan]


def named(index: int) -> str:
    return f"a[{index}]"


def worst(actual: torch.Tensor, expected: np.ndarray) -> float:
    assert tuple(actual.shape) == expected.shape
    return float(np.abs(actual.numpy() - expected).max() / np.abs(expected).max())


def case(pattern: Pattern, plan: Planner) -> tuple[Precision, np.ndarray, Pattern, tuple[torch.Tensor, ...]]:
    whole, elements = with_elements(pattern)
    A = oracle.assembled(whole.size, [rows.numpy() for rows in whole.index], [e.numpy() for e in elements])
    return plan(whole).factorise(elements, named), A, whole, elements


@pytest.mark.parametrize("plan", PLANNERS)
@pytest.mark.parametrize("pattern", EVERY)
def test_equals_the_dense_inverse(pattern: Callable[[], Pattern], plan: Planner) -> None:
    precision, A, whole, elements = case(pattern(), plan)
    Z, some = np.linalg.inv(A), drawn(whole.size, 4, seed=3)
    rows = torch.randn(3, whole.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert worst(precision.log_det, np.linalg.slogdet(A)[1].reshape(1)) < 1e-12
    assert worst(precision.variance, np.diag(Z)[None]) < 1e-10
    assert worst(precision.solve(rows), rows.numpy() @ Z) < 1e-10
    assert worst(precision.covariance_of(some, len(Z))[:, some], Z[np.ix_(some, some)]) < 1e-10
    for actual, expected in zip(precision.log_det_gradient, oracle.on_pattern(Z, list(whole.index)), strict=True):
        assert worst(actual, expected) < 1e-10
    assert worst(pattern_product(whole, elements, rows), rows.numpy() @ A) < 1e-12
    middle = tuple(0.5 * (m + m.mT) for m in map(torch.randn_like, elements))
    M = oracle.assembled(whole.size, [index.numpy() for index in whole.index], [m.numpy() for m in middle])
    sandwich = oracle.on_pattern(Z @ M @ Z, list(whole.index))
    for actual, expected in zip(precision.sandwich(middle), sandwich, strict=True):  # type: ignore[attr-defined]
        assert worst(actual, expected) < 1e-9


@pytest.mark.parametrize("plan", PLANNERS)
@pytest.mark.parametrize("pattern", EVERY)
def test_several_matrices_at_a_time_are_each_by_itself(pattern: Callable[[], Pattern], plan: Planner) -> None:
    _, _, whole, elements = case(pattern(), plan)
    made, several = plan(whole), [tuple(factor * e for e in elements) for factor in (1.0, 2.0, 5.0)]
    batch = made.factorise_rows(tuple(map(torch.stack, zip(*several, strict=True))), named)
    each = [made.factorise(own, named) for own in several]
    rows = torch.randn(3, whole.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for found in (batch, Separate(tuple(batch.row(i) for i in range(3)))):
        assert worst(found.log_det, torch.cat([A.log_det for A in each]).numpy()) < 1e-13
        for name in ("solve", "unwhiten", "whiten"):
            expected = torch.cat([getattr(A, name)(row) for A, row in zip(each, rows.split(1), strict=True)])
            assert worst(getattr(found, name)(rows), expected.numpy()) < 1e-12
    assert worst(batch.row(1).variance, each[1].variance.numpy()) < 1e-12
    with pytest.raises(NotPositiveDefinite):
        made.factorise_rows(tuple(torch.stack([e, -e]) for e in elements), named)


@pytest.mark.parametrize("plan", PLANNERS)
@pytest.mark.parametrize("pattern", EVERY)
def test_draws_have_the_inverse_as_covariance_and_can_be_taken_back(
    pattern: Callable[[], Pattern], plan: Planner
) -> None:
    precision, A, whole, _ = case(pattern(), plan)
    root = precision.unwhiten(torch.eye(whole.size, dtype=torch.float64))
    assert worst(root.mT @ root, np.linalg.inv(A)) < 1e-10
    assert worst(precision.whiten(root), np.eye(whole.size)) < 1e-10


@pytest.mark.parametrize("pattern", EVERY)
def test_adjoint_is_the_slope_of_the_log_determinant(pattern: Callable[[], Pattern]) -> None:
    whole, elements = with_elements(pattern())
    plan = elimination(whole)
    shift = [torch.randn_like(e) for e in elements]
    shift = [0.5 * (s + s.mT) for s in shift]
    ahead, behind = (
        plan.factorise(tuple(e + step * s for e, s in zip(elements, shift, strict=True)), named).log_det
        for step in (1e-6, -1e-6)
    )
    slope = sum((z * s).sum() for z, s in zip(plan.factorise(elements, named).log_det_gradient, shift, strict=True))
    assert float((ahead - behind) / 2e-6) == pytest.approx(float(slope), rel=1e-6)


def test_the_order_of_the_rows_changes_nothing() -> None:
    whole, elements = with_elements(crossed())
    mixed = [torch.randperm(len(rows), generator=torch.Generator().manual_seed(2)) for rows in whole.index]
    other = Pattern(whole.size, tuple(rows[m] for rows, m in zip(whole.index, mixed, strict=True)))
    one = elimination(whole).factorise(elements, named)
    two = elimination(other).factorise(tuple(e[m] for e, m in zip(elements, mixed, strict=True)), named)
    torch.testing.assert_close(one.log_det, two.log_det, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(one.variance, two.variance, rtol=1e-12, atol=0.0)


def test_a_plan_serves_many_factorisations_and_random_state_stays() -> None:
    before = torch.random.get_rng_state()
    whole, elements = with_elements(groups_with_weights())
    plan = elimination(whole)
    first = plan.factorise(elements, named).log_det
    plan.factorise(tuple(2.0 * e for e in elements), named)
    assert torch.equal(plan.factorise(elements, named).log_det, first)
    assert torch.equal(before, torch.random.get_rng_state())


def test_weakest_is_the_direction_of_least_precision() -> None:
    precision, A, whole, _ = case(crossed(), elimination)
    found = precision.least_precise_direction(torch.ones(whole.size, dtype=torch.bool)).numpy()[0]
    assert found @ A @ found == pytest.approx(1.0, rel=0.1)
    assert found @ found >= 0.9 / np.linalg.eigvalsh(A)[0]


def test_sentences() -> None:
    assert elimination(with_elements(crossed())[0]).sentence == "500 blocks of 1 eliminated; dense 20"
    assert elimination(Pattern(30, (drawn(30, 60).view(30, 2),))).sentence == "dense 30"


def test_groups_are_left_to_a_dense_matrix_where_that_is_cheaper() -> None:
    assert isinstance(elimination(Pattern(12, (columns(torch.arange(10), 10, 11, count=10),))), DensePlan)


@pytest.mark.parametrize("plan", PLANNERS)
@pytest.mark.parametrize("coordinate", [17, 61])
def test_the_letter_names_the_coordinate_that_is_not_positive(plan: Planner, coordinate: int) -> None:
    whole, elements = with_elements(groups_with_weights())
    elements[-1][coordinate] -= 1e4
    with pytest.raises(NotPositiveDefinite, match=rf"a\[{coordinate}\]"):
        plan(whole).factorise(elements, named)


@pytest.mark.parametrize("plan", PLANNERS)
def test_the_letter_names_the_coordinate_of_a_nan(plan: Planner) -> None:
    whole, elements = with_elements(crossed())
    elements[-1][23] = torch.nan
    with pytest.raises(NotPositiveDefinite, match=r"nan, first in the .* of a\[23\]"):
        plan(whole).factorise(elements, named)


def test_factors_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, elements = with_elements(grid(100))
    plan = elimination(whole)
    monkeypatch.setattr("pyro_evidence.numerics.linalg.available_bytes", lambda device: 1000)
    with pytest.raises(TooLarge, match="10,000 coordinates in blocks needs"):
        plan.factorise(elements, named)


def test_a_long_chain_is_halved_and_halved_again() -> None:
    plan = elimination(with_elements(chain(30_000))[0])
    assert plan.sentence.startswith("15001 blocks of 1")


@pytest.mark.parametrize("sizes", [(500,), (200, 1, 250)])
def test_a_band_is_cut_into_blocks_that_wait_for_no_other(sizes: tuple[int, ...]) -> None:
    size, shuffled = sum(sizes) + 1, torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(0))
    starts = [torch.arange(max(0, n - 11)) + sum(sizes[:i]) for i, n in enumerate(sizes)]
    windows = shuffled[torch.cat(starts).unsqueeze(-1) + torch.arange(12)]
    level = torch.stack([shuffled, torch.full_like(shuffled, size - 1)], -1)  # that all see
    order = elimination_order(Pattern(size, (windows, level)))
    assert len(order.levels) == 1
    assert len(order.rest) < 130
    precision, A, *_ = case(Pattern(size, (windows, level)), elimination)
    assert worst(precision.variance, np.linalg.inv(A).diagonal().reshape(1, -1)) < 1e-12


def test_the_larger_plate_goes_first_and_as_a_whole() -> None:
    persons, items = drawn(2000, 16_000), drawn(800, 16_000, 1) * drawn(800, 16_000, 2) // 800  # some items are rare
    first = elimination_order(Pattern(2800, (columns(persons, 2000 + items, count=16_000),))).levels[0]
    own = torch.cat([front.own.flatten() for front in first])
    assert torch.equal(own[own < 2000].sort().values, torch.arange(2000))
    assert not torch.isin(own, 2000 + items).any()
