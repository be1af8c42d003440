"""Calls of step with equal data go on, whichever tensors hold them; other data begin anew."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyro_evidence import RVM, EvidenceEM, OverlapEM
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.prbf import prbf
from tests.models_for_tests.mixture_cases import far_blobs
from tests.models_for_tests.weight_models import logistic, problem

Y = far_blobs(60, 0)
ENGINES = {
    "RVM": (lambda: RVM(logistic), problem()),
    "OverlapEM": (lambda: OverlapEM(prbf(3, 2)), (Y, (Y[:, 1] > 0.15).long())),
    "EvidenceEM": (lambda: EvidenceEM(gaussian_mixture(3)), (Y,)),
}


@pytest.mark.parametrize("name", ENGINES)
def test_equal_data_go_on_and_other_data_begin_anew(name: str) -> None:
    make: Callable[[], Any]
    make, data = ENGINES[name]
    engine, same = make(), make()
    losses = [engine.step(*(x.clone() for x in data)) for _ in range(3)]
    assert losses == [same.step(*data) for _ in range(3)]
    assert losses[2] < losses[0]
    others = tuple(torch.cat([x, x[:1]]) for x in data)
    assert engine.step(*others) == make().step(*others)
