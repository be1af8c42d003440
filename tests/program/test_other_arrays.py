"""Arrays of NumPy, columns and tables of pandas, and labels of integers are data like tensors."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, BadInput, EvidenceEM, LaplaceEvidence, OverlapEM
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression
from pyro_evidence.program.checks import as_tensors
from tests.gallery import idioms

np = pytest.importorskip("numpy")
X = idioms.X
LABELS = idioms.LABELS


def family(make: Any) -> Any:
    def model(X: Tensor, t: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("t", make(X @ w), obs=t)

    return model


COUNTS = {
    "Bernoulli": (lambda eta: dist.Bernoulli(logits=eta), LABELS),
    "Binomial": (lambda eta: dist.Binomial(9, logits=eta), idioms.COUNTS.clamp(max=9.0)),
    "Poisson": (lambda eta: dist.Poisson(eta.exp()), idioms.COUNTS),
    "NegativeBinomial": (lambda eta: dist.NegativeBinomial(3.0, logits=eta - 1.0), idioms.COUNTS),
    "Geometric": (lambda eta: dist.Geometric(logits=eta), idioms.COUNTS),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_whole_numbers_are_the_same_data_as_floats(name: str, dtype: torch.dtype) -> None:  # law
    make, t = COUNTS[name]
    expected = LaplaceEvidence(family(make)).run(X, t)
    found = LaplaceEvidence(family(make)).run(X, t.long())
    assert float(found.log_evidence) == float(expected.log_evidence)
    assert torch.equal(found.log_prob(X, t.to(torch.int32)), expected.log_prob(X, t))


@pytest.mark.parametrize("engine", [LaplaceEvidence, RVM, REVM])
def test_arrays_and_tables_are_tensors(engine: Any) -> None:  # law
    pandas = pytest.importorskip("pandas")
    model = family(COUNTS["Bernoulli"][0])
    expected = float(engine(model).run(X, LABELS).log_evidence)
    table = pandas.DataFrame(X.numpy(), columns=["a", "b", "c"])
    for inputs, labels in ((X.numpy(), LABELS.numpy() > 0.5), (table, pandas.Series(LABELS.numpy().astype(int)))):
        posterior = engine(model).run(inputs, labels)
        assert float(posterior.log_evidence) == expected
        torch.testing.assert_close(posterior.predict(table), posterior.predict(X))


def test_mixtures_and_classifiers_take_arrays() -> None:
    posterior = EvidenceEM(gaussian_mixture(2)).run(X.numpy())
    assert torch.equal(posterior.log_prob(X.numpy()), posterior.log_prob(X))
    found = OverlapEM(prbf(2)).run(X.numpy(), LABELS.numpy().astype(int))
    expected = OverlapEM(prbf(2)).run(X, LABELS)
    assert torch.equal(found.predict(X), expected.predict(X))


def test_precision_is_that_of_the_tensors_or_the_default() -> None:
    (a, b), _ = as_tensors((np.ones(2), X.float()), {})
    assert a.dtype == b.dtype == torch.float32
    (a, b, c), named = as_tensors((np.ones(2, dtype=np.float32), [1.0, 2.0], "x"), {"k": np.arange(3, dtype=np.uint8)})
    assert a.dtype == torch.float64 and b == [1.0, 2.0] and c == "x"
    assert named["k"].dtype == torch.int64
    (words,), _ = as_tensors((np.array(["a"]),), {})
    assert isinstance(words, np.ndarray)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.astype(">f8"),
        lambda x: x[::-1].copy()[::-1],
        np.asfortranarray,
        lambda x: x.astype(np.longdouble),
        lambda x: np.ma.masked_array(x, np.zeros(x.shape, bool)),
        lambda x: np.broadcast_to(x, (1, *x.shape))[0],
    ],
)
def test_the_layout_of_an_array_in_memory_does_not_matter(change: Any) -> None:
    (found,), _ = as_tensors((change(X.numpy()),), {})
    assert torch.equal(found, X)
    there = X.numpy().copy()
    there.setflags(write=False)
    (found,), _ = as_tensors((there,), {})
    found += 1.0  # of a copy
    assert (there == X.numpy()).all()


@pytest.mark.parametrize("dtype", ["u2", "u4", "u8", ">u4", ">i8", "i1", "f2", ">f4", "?"])
def test_numbers_of_any_size_come_as_they_are(dtype: str) -> None:
    numbers = np.array([0, 1, 1, 0]).astype(dtype)
    (found,), _ = as_tensors((numbers,), {})
    assert found.tolist() == numbers.tolist()


@pytest.mark.parametrize(
    "numbers", [np.array([2**63 + 5], dtype=np.uint64), np.array([1], np.longdouble) / 3, np.longdouble("1e400")]
)
def test_numbers_that_a_tensor_would_change_are_refused(numbers: Any) -> None:
    if numbers.dtype == np.float64:
        pytest.skip("no longer float here than double")
    with pytest.raises(BadInput, match=r"holds numbers that .* would change"):
        as_tensors((numbers,), {})


@pytest.mark.parametrize("dtype", [object, "c16", "M8[D]", "S8"])
def test_an_array_without_numbers_is_refused_with_what_it_holds(dtype: Any) -> None:
    with pytest.raises(BadInput, match=r"X is a ndarray of .*X\.astype\(float\)"):
        RVM(regression(Linear())).run(X.numpy().astype(dtype), LABELS)
