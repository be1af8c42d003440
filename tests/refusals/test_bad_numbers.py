"""Numbers that no engine can calculate with are refused at once, in an error message that names them."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, VRVM, BadInput, EvidenceEM, LaplaceEvidence, OverlapEM
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from tests.refusals.messages import refused, says


def linear(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 1.0), obs=t)


def in_double(X: Tensor, t: Tensor) -> None:
    linear(X.double(), t.double())


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return X.to(dtype), X.sum(-1).to(dtype)


RUNS = {
    "LaplaceEvidence": lambda X, t: LaplaceEvidence(linear).run(X, t),
    "RVM": lambda X, t: RVM(linear).run(X, t),
    "VRVM": lambda X, t: VRVM(linear).run(X, t),
    "REVM": lambda X, t: REVM(linear).run(X, t),
    "EvidenceEM": lambda X, t: EvidenceEM(gaussian_mixture(2)).run(X),
    "EvidenceEM, planes": lambda X, t: EvidenceEM(mppca(2, 1)).run(X),
    "OverlapEM": lambda X, t: OverlapEM(prbf(2, 2)).run(X, (t > 0).long()),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype) -> None:
    for X, t in (data(dtype), (data()[0], data(dtype)[1])):
        message = refused(BadInput, linear, X, t)
        says(
            message, str(dtype), "too few for a log evidence", "expected float64 or float32", ".double()", "argument 1"
        )


def test_half_precision_that_the_model_makes_double_is_not() -> None:
    X, t = data(torch.bfloat16)
    found = LaplaceEvidence(in_double).run(X, t).log_evidence
    torch.testing.assert_close(found, LaplaceEvidence(linear).run(X.double(), t.double()).log_evidence)


class WithNames(torch.Tensor):
    """A tensor as ``refine_names`` of older releases of torch makes it."""

    names = ("rows", "columns")


@pytest.mark.parametrize("name", list(RUNS))
def test_tensors_whose_axes_have_names_are_refused(name) -> None:
    """torch refuses most functions of them, in words of its own."""
    X, t = data()
    with pytest.raises(BadInput, match=r"axes have names .*rename\(None\)"):
        RUNS[name](X.as_subclass(WithNames), t)


def test_complex_numbers_are_refused() -> None:
    X, t = data()
    says(refused(BadInput, linear, X, t + 1j), "complex128", "an imaginary part", ".real", "site 't'")
    says(refused(BadInput, linear, X + 1j, t), "complex128", "real numbers", ".real or the .abs() of argument 0")


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("factor", [1e100, 1e-160])
def test_extreme_data_are_refused_by_every_engine(name, factor) -> None:
    X, t = data()
    with pytest.raises(BadInput, match=r"shape \(24, 3\), holds .*([Dd]ivide by|Rescale)"):
        RUNS[name](X * factor, t)


@pytest.mark.parametrize("name", sorted(RUNS.keys() - {"EvidenceEM, planes"}))  # which has an error message of its own
def test_one_extreme_entry_is_refused_by_its_place(name) -> None:
    X, t = data()
    X[7, 1] = -1e155
    with pytest.raises(BadInput, match=r"holds -1e\+155 at \[7, 1\]; .* leave its row out"):
        RUNS[name](X, t)


@pytest.mark.parametrize("factor", [1e-60, 1e-20, 1.0, 1e20, 1e60])
def test_relevance_vectors_do_not_depend_on_a_common_factor(factor) -> None:
    X, t = data()
    expected, found = RVM(linear).run(X, t), RVM(linear).run(X * factor, t)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.mode["w"] * factor, expected.mode["w"], rtol=1e-6, atol=1e-9)


def test_missing_values_and_single_precision_are_nobodys_business() -> None:
    X, t = data(torch.float32)
    RVM(linear).run(X * 1e18, t)
    says(refused(BadInput, linear, *(torch.full_like(x, torch.nan) for x in data())), "nan")


@pytest.mark.parametrize("engine", [RVM, VRVM])
def test_targets_whose_digits_are_an_offset_are_refused(engine) -> None:
    X, t = data()
    with pytest.raises(BadInput, match=r"site 't' has values about 1\.7e\+09 that differ by .* subtract the mean"):
        engine(linear).run(X, t + 1.7e9)
    engine(linear).run(X, t + 1e4)
