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


def test_counts_from_a_larger_number() -> None:
    check_count("num_classes", 2, 2)
    with pytest.raises(BadInput, match="num_classes=1; expected a whole number of at least 2"):
        check_count("num_classes", 1, 2)


def test_a_model_is_called() -> None:
    check_model(print)
    with pytest.raises(BadInput, match=r"model is a Tensor; expected a callable Pyro model\. Data go to its call"):
        check_model(torch.ones(1), goes_to="its call")
