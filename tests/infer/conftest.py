"""What several test modules of the engines look at."""

import pyro
import pytest
import torch

from pyro_evidence import MPPCAPosterior
from tests.infer.mppca_cases import fit, planes


@pytest.fixture(scope="module")
def two() -> MPPCAPosterior:
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()  # a fixture of a module begins before those of its tests
    return fit(planes())
