"""Counts and models among the arguments: one wording for all."""

from typing import Any

import pytest
import torch

from pyro_evidence import BadInput
from pyro_evidence.settings import check_count, check_model


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (0, "=0"),
        (-2, "=-2"),
        (2.0, "=2.0"),
        (True, "=True"),
        ("8", "='8'"),
        (None, " is a NoneType"),
        (torch.ones(3), " is a Tensor"),
    ],
)
def test_what_is_no_count_is_refused_by_name(value: Any, given: str) -> None:
    with pytest.raises(BadInput) as error:
        check_count("num_units", value, advice="Ask for one.")
    assert str(error.value) == f"num_units{given}; expected a whole number of at least 1. Ask for one."


def test_whole_numbers_of_numpy_and_torch_are_counts() -> None:
    numpy = pytest.importorskip("numpy")
    for value in (3, numpy.int64(3), numpy.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)):
        found = check_count("num_units", value)
        assert found == 3 and type(found) is int
    for value in (numpy.float64(3.0), torch.tensor(3.0), torch.tensor(True), torch.tensor([3])):
        with pytest.raises(BadInput, match=r"num_units.*; expected a whole number"):
            check_count("num_units", value)


def test_counts_from_a_larger_number() -> None:
    check_count("num_classes", 2, 2)
    with pytest.raises(BadInput, match="num_classes=1; expected a whole number of at least 2"):
        check_count("num_classes", 1, 2)


def test_a_model_is_called() -> None:
    check_model(print)
    with pytest.raises(BadInput, match=r"model is a Tensor; expected a callable Pyro model\. Data go to its call"):
        check_model(torch.ones(1), goes_to="its call")
