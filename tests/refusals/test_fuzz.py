"""A few of the cases of ``make fuzz``: a fit, or a message of the package's, whatever the data are."""

import pytest
import torch

from pyro_evidence import BadInput
from pyro_evidence.data import Groups, Slices
from pyro_evidence.data.arrays import as_tensor
from tests import fuzz

SLOW = ("network", "process", "formula of", "MPPCA", "planes", "VRVM", "REVM in", "RVMClassifier", "EvidenceEM full")
QUICK = [name for name in fuzz.ENGINES if not any(slow in name for slow in SLOW)]
CASES = 300
PARTS, BRIEF = 10, 3  # parts, and how many of them are not left to the slow run


@pytest.mark.parametrize("part", [pytest.param(k, marks=[pytest.mark.slow] * (k >= BRIEF)) for k in range(PARTS)])
def test_no_data_end_in_a_bare_error(part: int) -> None:
    torch.set_default_dtype(torch.float64)
    numbers = range(part, CASES, PARTS)
    found = {number: fuzz.outcome(*fuzz.drawn(number, 1, QUICK)) for number in numbers}
    wrong = {n: said for n, said in found.items() if said not in ("fit", "refused", "no data")}
    assert not wrong, {n: (fuzz.drawn(n, 1, QUICK), said) for n, said in wrong.items()}
    assert "fit" in found.values() and "refused" in found.values()


@pytest.mark.parametrize(
    "kind", ["sparse", "csr", "meta", "quantised", "None", "text", "list", "generator", "dates", "nested", "float8"]
)
@pytest.mark.parametrize("engine", [*fuzz.MAKE, *fuzz.DENSITIES, "LaplaceEvidence process", "LaplaceEvidence network"])
def test_inputs_without_numbers_are_refused(engine: str, kind: str) -> None:
    assert fuzz.outcome(engine, kind, "good") == "refused"


@pytest.mark.parametrize("chunks", [Slices, Groups])
@pytest.mark.parametrize("rows", [None, torch.tensor(1.0), "data.csv", iter([1.0]), torch.Tensor])
def test_what_has_no_rows_is_not_sliced(chunks: type, rows: object) -> None:
    with pytest.raises(BadInput, match=r"(Slices was|Groups was|labels of Groups)"):
        chunks(rows, torch.zeros(4))


def test_arrays_of_all_kinds_become_tensors() -> None:
    for kind in ("numpy", "big endian", "pandas"):
        made = fuzz.KINDS[kind](torch.arange(3.0, dtype=torch.float64))
        assert as_tensor(made).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(BadInput, match=r"shape \(3,\) has 1 masked elements"):
        as_tensor(fuzz.KINDS["masked array"](torch.arange(3.0, dtype=torch.float64)))


def test_cases_are_those_of_their_seed() -> None:
    assert fuzz.drawn(7, 0, QUICK) == fuzz.drawn(7, 0, QUICK) != fuzz.drawn(7, 3, QUICK)


@pytest.mark.parametrize(
    ("raised", "said"), [(KeyError("x"), "bare KeyError"), (ValueError("a b c"), "bare ValueError")]
)
def test_a_bare_error_is_seen(raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(X: object, t: object) -> None:
        raise raised

    monkeypatch.setitem(fuzz.ENGINES, "broken", broken)
    assert fuzz.outcome("broken", "good", "good").startswith("bare")


@pytest.mark.parametrize(
    ("engine", "inputs", "targets"),
    [
        ("groups", "pandas", "good"),
        ("groups", "buffer", "good"),
        ("RVMRegressor", "good", "numpy void"),
        ("groups", "pandas with words", "good"),
        ("groups", "good", "ragged list"),
        ("EvidenceEM planes in chunks", "no columns", "good"),
        ("formula of groups", "good", "big endian"),
        ("LaplaceEvidence line", "backwards", "backwards"),
        ("LaplaceEvidence line", "float8", "good"),
        ("RVM in chunks", "good", "nested"),
        ("formula", "numpy void", "good"),
        ("EvidenceMixture", "backwards", "good"),
        ("chunks as they are", "buffer", "good"),
        ("RVMRegressor", "good", "conjugate"),
        ("LaplaceEvidence network", "with a graph", "good"),
    ],
)
def test_cases_that_were_found(engine: str, inputs: str, targets: str) -> None:
    assert fuzz.outcome(engine, inputs, targets) in ("fit", "refused")
