"""Sources whose rows are others in a later pass: refused by every engine; other orders and other chunks are not."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, VRVM, EvidenceEM, LaplaceEvidence, OverlapEM, Start, Stop
from pyro_evidence.data import Slices, passes
from pyro_evidence.data.passes import SameRows
from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression

Columns = tuple[Tensor, ...]
Change = Callable[[Columns], Columns]

ROWS = 60
QUIET = Stop(progress=False, throw=False)
FEW = Stop(progress=False, throw=False, tolerance=0.0, num_steps=8)


def by_group(group: Tensor, t: Tensor) -> None:
    scale = pyro.sample("scale", dist.LogNormal(t.new_zeros(()), 1.0))
    with pyro.plate("groups", int(group.max()) + 1):
        effect = pyro.sample("effect", dist.Normal(t.new_zeros(()), scale))
    with pyro.plate("rows", len(t)):
        pyro.sample("t", dist.Normal(effect[group], 0.5), obs=t)


class Grouped(LaplaceEvidence):
    """An engine that is told which sites are the groups'."""

    def run_chunks(self, chunks: Any) -> Any:
        return super().run_chunks(chunks, local=["effect"])


def columns() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, real targets, labels of two classes, and five groups of four rows in each chunk of twenty."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, ROWS, generator=generator, dtype=torch.float64)
    t = X @ torch.tensor([1.0, -0.5, 0.2]).double() + 0.3 * noise[0]
    return X, t, (t + noise[1] > 0).long(), torch.arange(20).repeat(3) // 4


X, TARGETS, LABELS, GROUPS = columns()
ENGINES: dict[str, tuple[Callable[[], Any], Columns]] = {
    "LaplaceEvidence": (lambda: LaplaceEvidence(classifier(Linear()), stop=QUIET), (X, LABELS.double())),
    "groups": (lambda: Grouped(by_group, maximise=["scale"], stop=QUIET), (GROUPS, TARGETS)),
    "RVM": (lambda: RVM(regression(Polynomial(2)), stop=QUIET), (X, TARGETS)),
    "VRVM": (lambda: VRVM(classifier(Linear()), stop=QUIET), (X, LABELS.double())),
    "REVM": (lambda: REVM(classifier(Linear()), stop=QUIET), (X, LABELS.double())),
    "EvidenceEM": (lambda: EvidenceEM(gaussian_mixture(2), start=Start(restarts=2), stop=FEW), (X,)),
    "planes": (lambda: EvidenceEM(mppca(2, 1), start=Start(restarts=2), stop=FEW), (X,)),
    "OverlapEM": (lambda: OverlapEM(prbf(2, 2), stop=FEW), (X, LABELS)),
}


def changed_at(place: int, row: int, change: Callable[[Tensor], Any]) -> Change:
    """One number of a column is another."""

    def change_it(rows: Columns) -> Columns:
        x = rows[place].clone()
        flat = x[row].reshape(-1)
        flat[0] = change(flat[0])
        return tuple(x if i == place % len(rows) else r for i, r in enumerate(rows))

    return change_it


def only(rows: Columns, numbers: Any) -> Columns:
    return tuple(x[numbers] for x in rows)


ATTACKS: dict[str, Change] = {
    "exhausted": lambda rows: only(rows, slice(0, 0)),
    "a third gone": lambda rows: only(rows, slice(0, 40)),
    "a row gone": lambda rows: only(rows, slice(0, ROWS - 1)),
    "a row twice": lambda rows: only(rows, [*range(ROWS), ROWS - 1]),
    "a row in place of another": lambda rows: only(rows, [*range(ROWS - 1), 0]),
    "all rows twice": lambda rows: tuple(torch.cat([x, x]) for x in rows),
    "other numbers": lambda rows: (*rows[:-1], rows[-1] * 2 + 1) if len(rows) > 1 else (rows[0] * 2 + 1,),
    "other unit": lambda rows: (rows[0] * 1000, *rows[1:]),
    "sign": lambda rows: (*rows[:-1], -rows[-1]),
    "one number": changed_at(-1, 7, lambda x: 1 - x),
    "a small change": lambda rows: (
        (*rows[:-1], rows[-1] * (1 + 1e-6))
        if rows[-1].is_floating_point()
        else changed_at(-1, 3, lambda x: 1 - x)(rows)
    ),
    "nan": lambda rows: changed_at(-1 if rows[-1].is_floating_point() else 0, 7, lambda _: torch.nan)(rows),
    "inf": lambda rows: changed_at(-1 if rows[-1].is_floating_point() else 0, 7, lambda _: torch.inf)(rows),
    "columns in another order": lambda rows: (rows[0].flip(-1), *rows[1:]),
    "a column less": lambda rows: (rows[0][:, :-1] if rows[0].dim() > 1 else rows[0].unsqueeze(-1), *rows[1:]),
    "a column more": lambda rows: (torch.cat([rows[0].reshape(ROWS, -1)] * 2, -1), *rows[1:]),
    "float32": lambda rows: tuple(x.float() for x in rows),
    "a column handed out to other rows": lambda rows: (
        (*rows[:-1], rows[-1].roll(7, 0)) if len(rows) > 1 else (torch.cat([X[:, :1].roll(7, 0), X[:, 1:]], -1),)
    ),
    "an argument more": lambda rows: (*rows, rows[-1]),
    "one column of zeros": lambda rows: (*rows[:-1], torch.zeros_like(rows[-1])),
}


class Changing:
    """Rows in chunks of twenty, others from one pass on."""

    def __init__(self, rows: Columns, change: Change, size: int = 20, at: int = 3) -> None:
        self.rows, self.change, self.size, self.at, self.passes = rows, change, size, at, 0

    def __iter__(self) -> Iterator[Columns]:
        self.passes += 1
        changed = self.passes >= self.at
        rows = self.change(self.rows) if changed else self.rows
        size = self.size if changed else 20
        for begin in range(0, len(rows[0]), size):
            yield tuple(x[begin : begin + size] for x in rows)


def outcome(engine: str, change: Change, at: int) -> str:
    """Whether a fit whose source changes is refused for that, raises something else, goes on, or ends before."""
    make, rows = ENGINES[engine]
    source = Changing(rows, change, at=at)
    try:
        make().run_chunks(source)
    except BadInput as error:
        return "refused" if " in pass " in str(error) else f"other: {error}"
    except Exception as error:
        return f"bare: {type(error).__name__}: {error}"
    return "goes on" if source.passes >= at else "over"


def number_of_passes(engine: str) -> int:
    make, rows = ENGINES[engine]
    source = Changing(rows, lambda x: x)
    make().run_chunks(source)
    return source.passes


@pytest.mark.parametrize(
    ("attack", "engine"), [(attack, list(ENGINES)[i % len(ENGINES)]) for i, attack in enumerate(ATTACKS)]
)
def test_rows_that_change_are_refused(attack: str, engine: str) -> None:
    """Every attack on one engine; this file as a script tries all of them on all engines."""
    assert outcome(engine, ATTACKS[attack], 3) == "refused"


def gone_through(rows: Columns, change: Change, size: int = 20) -> None:
    source = SameRows(Changing(rows, change, size, at=2))
    for _ in range(2):
        list(source)


def test_other_orders_and_other_chunks_are_the_same_rows() -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    with_gaps = X.clone()
    with_gaps[5, 1] = torch.nan
    for rows in [(X, TARGETS), (1e8 + X, LABELS), (with_gaps,), (X.float(), TARGETS.float()), (1e300 * X,)]:
        for size in (1, 7, 60):
            gone_through(rows, lambda rows: only(rows, order), size)


@pytest.mark.parametrize("size", [20, 7])
def test_chunks_as_they_were_are_not_added_up_again(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those before the first that is another; they count with the sums that they had."""
    added: list[int] = []
    sums = passes.Combination.sums
    monkeypatch.setattr(passes.Combination, "sums", lambda self, x: (added.append(len(x[0])), sums(self, x))[1])
    late = torch.cat([torch.arange(20), 20 + torch.randperm(40, generator=torch.Generator().manual_seed(1))])
    for change, again in [(lambda rows: rows, []), (lambda rows: only(rows, late), [20, 20])]:
        added.clear()
        gone_through((X, TARGETS), change, size)
        assert added == [20, 20, 20] + (again if size == 20 else [7] * 8 + [4])


def test_larger_chunks_leave_the_marks_of_smaller_ones() -> None:
    columns = [X, TARGETS.unsqueeze(-1)]
    of = passes.Combination.of((X, TARGETS), columns)
    before = of.marks([x[:5] for x in columns])
    assert of.marks(columns) != before
    assert of.marks([x[:5] for x in columns]) == before
    assert all(len(set(w.tolist())) == ROWS and w.abs().min() > 0.1 * w.abs().max() for w in of.by_row[1:])


def test_chunks_with_gaps_have_no_marks() -> None:
    of = passes.Combination.of((X,), [X])
    for number in (torch.nan, torch.inf):
        gap = X.clone()
        gap[3, 1] = number
        assert of.marks([gap]) is None


def test_numbers_made_anew_may_differ_by_their_rounding() -> None:
    noise = torch.rand(X.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5
    rounding = noise * torch.finfo(torch.float32).eps
    gone_through((X.float(), TARGETS), lambda rows: ((rows[0] * (1.0 + rounding)).float(), rows[1]))
    with pytest.raises(BadInput, match="column 0 of argument 0"):
        gone_through((X.float(), TARGETS), lambda rows: (rows[0] * (1.0 + 1e-5), rows[1]))


def test_columns_whose_combination_nearly_cancels_may_differ_by_their_rounding() -> None:
    x = X[:, :1].float()
    for seed in range(20):
        noise = torch.rand(ROWS, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
        rounding = noise * torch.finfo(torch.float32).eps
        gone_through((torch.cat([x, -x], -1),), lambda rows, r=rounding: ((rows[0] * (1.0 + r)).float(),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (ATTACKS["a third gone"], "60 rows in pass 1, 40 rows in pass 2"),
        (ATTACKS["other numbers"], "column 0 of argument 1 adding up to 2.0 in pass 1, .* up to 64.0 in pass 2"),
        (
            lambda rows: (rows[0], rows[1] + (torch.arange(ROWS) == 9).double() - (torch.arange(ROWS) == 8).double()),
            r"squares of column 0 of argument 1 adding up to 10\.0\d* in pass 1, .* up to 1[12]\.\d+ in pass 2",
        ),
        (ATTACKS["nan"], "0 numbers that are nan or infinite in column 0 of argument 1 in pass 1, 1 numbers"),
        (lambda rows: (rows[0].flip(0), rows[1]), "squares of a combination of all columns"),
    ],
)
def test_the_message_says_what_differs(change: Change, message: str) -> None:
    t = torch.zeros(ROWS, dtype=torch.float64)
    t[3], t[4] = 3.0, -1.0
    with pytest.raises(BadInput, match=message):
        gone_through((X, t), change)


def test_an_error_that_other_rows_caused_is_said_to_be_theirs() -> None:
    """The model raises amid the pass, before the sums are complete."""

    def model(X: Tensor, t: Tensor) -> None:
        if bool((X > 100.0).any()):
            raise RuntimeError("mine")
        w = pyro.sample("w", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("rows", len(X)):
            pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)

    source = Changing((X, TARGETS), ATTACKS["other unit"])
    with pytest.raises(BadInput, match="rows changed") as caught:
        LaplaceEvidence(model, stop=QUIET).run_chunks(source)
    assert "mine" in str(caught.value.__context__)


# --- rows that stay in memory ---


def passes_over(chunks: Any, change: Callable[[], Any], amid: bool = False, number: int = 3) -> int:
    """Passes over chunks, with a change before the third or amid it; how often the rows were added up."""
    source = SameRows(chunks)
    for i in range(number):
        if i == 2 and not amid:
            change()
        for place, _ in enumerate(source):
            if i == 2 and amid and place == 1:
                change()
    return source.passes


def in_chunks() -> list[tuple[Tensor, Tensor]]:
    return [(X[i : i + 20].clone(), TARGETS[i : i + 20].clone()) for i in range(0, ROWS, 20)]


def test_tensors_in_memory_that_nobody_writes_to_are_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []
    add = passes.Pass.add
    monkeypatch.setattr(passes.Pass, "add", lambda self, args: (added.append(self.number), add(self, args))[1])
    for chunks in (in_chunks(), Slices(X.clone(), TARGETS.clone(), size=20)):
        added.clear()
        assert passes_over(chunks, lambda: None, number=5) == 5
        assert added == [1, 1, 1]


@pytest.mark.parametrize("amid", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_write_to_a_list_of_tensors_is_seen(amid: bool, chunk: int) -> None:
    chunks = in_chunks()
    with pytest.raises(BadInput, match=r"rows changed.* in pass 3"):
        passes_over(chunks, lambda: chunks[chunk][1].add_(1.0), amid)


@pytest.mark.parametrize("amid", [False, True])
def test_a_write_to_arrays_that_are_sliced_is_seen(amid: bool) -> None:
    t = TARGETS.clone()
    with pytest.raises(BadInput, match="column 0 of argument 1"):
        passes_over(Slices(X, t, size=20), lambda: t[45].add_(1.0), amid)


@pytest.mark.parametrize("amid", [False, True])
def test_a_write_through_memory_of_numpy_is_seen(amid: bool) -> None:
    """Torch does not count it, and so these rows are added up in every pass."""
    array = TARGETS.numpy().copy()
    alias = torch.from_numpy(array)
    parts = [(X[i : i + 20], alias[i : i + 20]) for i in range(0, ROWS, 20)]
    for chunks in (Slices(X, array, size=20), Slices(X, alias, size=20), parts):
        with pytest.raises(BadInput, match="rows changed"):
            passes_over(chunks, lambda: array.__setitem__(slice(-5, None), array[-5:] + 1.0), amid)


def test_an_entry_that_is_replaced_is_seen() -> None:
    chunks = in_chunks()
    with pytest.raises(BadInput, match="rows changed"):
        passes_over(chunks, lambda: chunks.__setitem__(1, (chunks[1][0], chunks[1][1] + 1.0)))
    chunks = in_chunks()
    with pytest.raises(BadInput, match="60 rows in pass 1, 40 rows in pass 3"):
        passes_over(chunks, lambda: chunks.pop())
    chunks = in_chunks()
    assert passes_over(chunks, lambda: chunks.reverse()) == 3  # another order is none


def test_a_write_that_leaves_the_numbers_as_they_are_is_none() -> None:
    chunks = in_chunks()
    assert passes_over(chunks, lambda: chunks[0][1].mul_(1.0)) == 3


def loader(drop_last: bool) -> Any:
    rows = torch.utils.data.TensorDataset(X, TARGETS)
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(rows, batch_size=25, shuffle=True, drop_last=drop_last, generator=generator)


def test_a_loader_may_shuffle_and_may_not_drop_rows() -> None:
    assert passes_over(loader(False), lambda: None) == 3
    with pytest.raises(BadInput, match="rows changed"):
        passes_over(loader(True), lambda: None)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_write_to_memory_amid_a_fit_is_refused_by_each_engine(engine: str) -> None:
    make, rows = ENGINES[engine]

    chunks = [tuple(x[i : i + 20].clone() for x in rows) for i in range(0, ROWS, 20)]
    source, begun = passes.SameRows.__iter__, [0]

    def writing(self: SameRows) -> Iterator[Any]:
        begun[0] += 1
        if begun[0] == 5:
            chunks[1][-1].copy_(1 - chunks[1][-1])
        return source(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes.SameRows, "__iter__", writing)
        with pytest.raises(BadInput, match=r"rows changed.* in pass \d"):
            make().run_chunks(chunks)


if __name__ == "__main__":  # all attacks, in the third pass and in the last
    torch.set_default_dtype(torch.float64)
    tally = Counter[str]()
    for name in sys.argv[1:] or ENGINES:
        began = time.process_time()
        passes = number_of_passes(name)
        for number, attack in enumerate(ATTACKS):
            found = outcome(name, ATTACKS[attack], 3 if number % 2 else passes)
            tally[found.split(":")[0]] += 1
            if found != "refused":
                sys.stdout.write(f"{name}, {attack}: {' '.join(found.split())[:150]}\n")
        print(f"{name}: {passes} passes, {time.process_time() - began:.1f} s", flush=True)  # noqa: T201
    sys.stdout.write(f"{dict(tally)}\n")
