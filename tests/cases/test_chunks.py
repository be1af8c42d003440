"""Sources of rows that change while a fit passes over them, and files whose columns are not what they were."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pyro_evidence import REVM, RVM, EvidenceEM, LaplaceEvidence, Start, Stop
from pyro_evidence.data import Groups, Parquet, Slices
from pyro_evidence.data.passes import SameRows
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.regression import regression
from tests.cases.expect import reached, refusal, says

Rows = tuple[Tensor, ...]

QUIET = Stop(progress=False, throw=False)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR, dtype=torch.float64)
TARGETS = X @ torch.tensor([1.0, -0.5, 0.2]).double() + 0.3 * torch.randn(60, generator=GENERATOR, dtype=torch.float64)
LABELS = (TARGETS + torch.randn(60, generator=GENERATOR, dtype=torch.float64) > 0).double()
CHANGED_PASS = 3


class Changing:
    """Rows in chunks of twenty, which become others in one pass.

    :ivar passes: how often the rows were asked for.
    """

    def __init__(self, rows: Rows, change: Callable[[Rows], Rows], changed_pass: int = CHANGED_PASS) -> None:
        self.rows, self.change, self.changed_pass, self.passes = rows, change, changed_pass, 0

    def __iter__(self) -> Iterator[Rows]:
        self.passes += 1
        rows = self.change(self.rows) if self.passes >= self.changed_pass else self.rows
        for begin in range(0, len(rows[0]), 20):
            yield tuple(r[begin : begin + 20] for r in rows)


def unchanged(rows: Rows) -> Rows:
    return rows


def exhausted(rows: Rows) -> Rows:
    return tuple(r[:0] for r in rows)


def a_third_gone(rows: Rows) -> Rows:
    return tuple(r[:40] for r in rows)


def a_column_less(rows: Rows) -> Rows:
    return (rows[0][:, :2], *rows[1:])


def a_value_lost(rows: Rows) -> Rows:
    first = rows[0].clone()
    first[7, 1] = torch.nan
    return (first, *rows[1:])


def other_values(rows: Rows) -> Rows:
    return (2 * rows[0] + 1, *rows[1:])


def rotated(rows: Rows) -> Rows:
    """The same rows in another order: no change."""
    return tuple(r.roll(20, 0) for r in rows)


ENGINES: dict[str, tuple[Callable[[], Any], Rows]] = {
    "LaplaceEvidence": (lambda: LaplaceEvidence(classifier(Linear()), stop=QUIET), (X, LABELS)),
    "RVM": (lambda: RVM(regression(Polynomial(2)), stop=QUIET), (X, TARGETS)),
    "REVM": (lambda: REVM(classifier(Linear())), (X, LABELS)),
    "EvidenceEM": (lambda: EvidenceEM(gaussian_mixture(2), start=Start(restarts=2), stop=QUIET), (X,)),
}


def fitted(engine: str, source: Changing) -> float:
    """Log evidence of a fit to rows that come in chunks."""
    return float(ENGINES[engine][0]().run_chunks(source).log_evidence)


@functools.cache
def undisturbed(engine: str) -> tuple[float, int]:
    """Log evidence and number of passes where nothing changes."""
    source = Changing(ENGINES[engine][1], unchanged)
    return fitted(engine, source), source.passes


@pytest.mark.parametrize(
    ("engine", "change", "words"),
    [
        ("LaplaceEvidence", a_third_gone, ["60 rows", "40"]),
        ("LaplaceEvidence", other_values, []),
        ("LaplaceEvidence", a_column_less, ["column"]),
        ("RVM", a_value_lost, ["nan"]),
        ("RVM", exhausted, ["60 rows"]),
        ("REVM", exhausted, ["60 rows"]),
        ("EvidenceEM", exhausted, ["60 rows"]),
        ("EvidenceEM", a_column_less, ["column"]),
    ],
)
def test_a_source_that_changes_is_refused(engine: str, change: Callable[[Rows], Rows], words: list[str]) -> None:
    """The message says that two passes differ, and in what."""
    reached(undisturbed(engine)[1] >= CHANGED_PASS, "a fit does not pass so often over its rows")
    source = Changing(ENGINES[engine][1], change)
    try:
        message = refusal(lambda: fitted(engine, source))
    finally:
        reached(source.passes >= CHANGED_PASS, f"after {source.passes} passes, before the change")
    says(message, "pass", *words)


@pytest.mark.parametrize("change", [a_third_gone, other_values])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_source_that_changes_after_it_was_first_looked_at_is_refused(
    engine: str, change: Callable[[Rows], Rows]
) -> None:
    """A fit that first looks at one chunk, and then has other rows in every pass, had the evidence of these."""
    says(refusal(lambda: fitted(engine, Changing(ENGINES[engine][1], change, 2))), "the rows changed", "in pass 1")


def test_rows_of_other_kinds_are_refused_after_a_pass_that_was_broken_off() -> None:
    """The first pass looks at the first rows alone: no pass is complete when the kinds of the columns change."""
    source = SameRows(Changing((X, LABELS), lambda rows: (rows[0].float(), rows[1])))
    for _ in range(CHANGED_PASS - 1):
        next(iter(source))
    says(refusal(lambda: next(iter(source))), "(., 3) float64", "(., 3) float32", "in an earlier pass", "in pass 3")


@pytest.mark.parametrize("engine", list(ENGINES))
def test_the_order_of_rows_may_change(engine: str) -> None:
    """Sums over rows do not depend on their order: the evidence is the same but for rounding."""
    source = Changing(ENGINES[engine][1], rotated)
    in_other_order = fitted(engine, source)
    reached(source.passes >= CHANGED_PASS, "the order has not changed")
    assert in_other_order == pytest.approx(undisturbed(engine)[0], abs=1e-4)


def written(path: Path, names: list[str], columns: list[Tensor]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_arrays([arrow.array(c.numpy()) for c in columns], names=names), path)
    return path


def test_tensors_without_numbers_are_refused_whole_and_in_chunks() -> None:
    """Those of torch's fake mode ended in an error of torch's own."""
    with FakeTensorMode():
        fake = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    for fit in (lambda x: RVM(regression(Linear())).run(*x), lambda x: EvidenceEM(gaussian_mixture(2)).run(x[0])):
        says(refusal(lambda fit=fit: fit(fake)), "argument 0, shape (20, 3), is fake", "load its data first")
    chunks = [(X[:20], TARGETS[:20]), fake]
    says(refusal(lambda: RVM(regression(Linear())).run_chunks(chunks)), "argument 0 of chunk 1", "is fake")


def test_a_number_too_large_is_named_with_its_chunk_before_anything_is_computed_from_it() -> None:
    """A mixture's precisions begin at those of all rows, and it was the start of one that was refused."""
    huge = X.clone()
    huge[50, 1] = 1e300
    said = refusal(lambda: EvidenceEM(gaussian_mixture(2)).run_chunks([(x,) for x in huge.split(20)]))
    says(said, "chunk 2: argument 0, shape (20, 3), holds 1e+300 at [10, 1]", "divide by a typical value")


def test_a_column_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.parquet", ["a", "b", "a"], [X[:, 0], X[:, 1], X[:, 2]])
    says(refusal(lambda: list(Parquet(path, ["a", "b"]))), str(path), "a", "twice")


def test_a_column_that_has_gone_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.parquet", ["a", "b", "t"], [X[:, 0], X[:, 1], LABELS])
    source = Parquet(path, [("a", "b"), "t"])
    before = torch.cat([x for x, _ in source])
    reached(torch.equal(before, X[:, :2]), "the file was not read as it was written")
    written(path, ["a", "t"], [X[:, 0], LABELS])
    says(refusal(lambda: list(source)), str(path), "no column b")


def test_labels_of_groups_have_one_axis() -> None:
    labels = torch.tensor([[0], [1], [0], [1]])
    says(refusal(lambda: list(Groups(labels, torch.arange(4.0), size=10))), "(4, 1)", "(N,)")


WORDS, STRINGS = ["a", "b", "a", "b"], "T" if np.__version__ >= "2" else "O"


@pytest.mark.parametrize("labels", [[0, 1, 0, 1], WORDS, np.array(WORDS, dtype=STRINGS)], ids=["numbers", "words", "T"])
def test_labels_of_groups_may_be_a_list_or_strings(labels: Any) -> None:
    """Four rows in two groups, the first and the third in one."""
    chunks = list(Groups(labels, torch.arange(4.0), size=10))
    assert sorted(torch.cat([rows for _, rows in chunks]).tolist()) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("engine", [LaplaceEvidence, RVM])
def test_a_bad_label_is_named_with_its_chunk_and_row(engine: Any) -> None:
    X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    labels = (X[:, 0] > 0.0).double()
    labels[17] = 2.0
    attempt = engine(classifier(Linear()), stop=Stop(progress=False))
    says(refusal(lambda: attempt.run(X, labels)), "the label 2", "[17]")
    message = refusal(lambda: attempt.run_chunks(Slices(X, labels, size=10)))
    says(message, "chunk 1", "the label 2", "[7]")
    assert "Trace Shapes" not in message


@pytest.mark.parametrize("engine", [LaplaceEvidence, functools.partial(RVM, noise="beta")])
def test_constant_targets_in_chunks_are_named_where_the_noise_is_found(engine: Any) -> None:
    X = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(24.0).floor_divide(8.0)  # alike in each chunk, and not in all of them
    attempt = engine(regression(Linear()), stop=Stop(progress=False))
    says(refusal(lambda: attempt.run_chunks(Slices(X, torch.full((24,), 3.0), size=8))), "one constant, 3, 24 times")
    assert attempt.run_chunks(Slices(X, targets, size=8)).log_evidence.isfinite()


def of_groups(group: Tensor, t: Tensor) -> None:
    """Effects of groups, and noise whose scale is a hyperparameter."""
    scale = pyro.sample("scale", dist.LogNormal(t.new_zeros(()), 1.0))
    noise = pyro.param("noise", t.new_ones(()), constraint=dist.constraints.positive)
    with pyro.plate("groups", int(group.max()) + 1):
        effect = pyro.sample("effect", dist.Normal(t.new_zeros(()), scale))
    with pyro.plate("rows", len(t)):
        pyro.sample("t", dist.Normal(effect[group], noise), obs=t)


def test_constant_targets_in_chunks_of_groups_are_named_where_the_noise_is_found() -> None:
    groups = torch.arange(12).repeat(2) // 4
    attempt = LaplaceEvidence(of_groups, maximise=["scale"], stop=Stop(num_steps=2, throw=False, progress=False))
    message = refusal(lambda: attempt.run_chunks(Slices(groups, torch.full((24,), 3.0), size=12), local=["effect"]))
    says(message, "site 't' observes one constant, 3, 24 times")
    alike_in_a_chunk = torch.arange(24.0).floor_divide(12.0)
    with pytest.warns(UserWarning, match="ran out of steps"):
        found = attempt.run_chunks(Slices(groups, alike_in_a_chunk, size=12), local=["effect"])
    assert found.log_evidence.isfinite()
