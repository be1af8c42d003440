"""The advice of error messages works: each row breaks, reads the advice, follows it, and has an answer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.refusals.advice import report
from tests.refusals.remedies import REMEDIES
from tests.refusals.remedies_checks import CHECKS
from tests.refusals.remedies_engines import ENGINES
from tests.refusals.remedies_models import MODELS
from tests.refusals.remedies_more import MORE
from tests.refusals.remedies_odd import ODD
from tests.refusals.remedies_posteriors import POSTERIORS
from tests.refusals.remedies_programs import PROGRAMS
from tests.refusals.remedies_rare import RARE

SLOW = {  # chains by NUTS, seconds of compilation, and what another test sees
    "chains that have not run",
    "a marginal of a simplex",
    "draws of another model",
    "chains without draws",
    "draws that do not move",
    "a metric of nobody",
    "a kernel with a prior",
    "too many scales",
    "a latent space that turns",  # the same advice is followed in tests/structure/test_symmetries.py
    "leaving out by a name that is none",
}
ROWS = [
    pytest.param(row, id=f"{kind}: {name}", marks=[pytest.mark.slow] if name in SLOW else [])
    for kind, table in {
        "any": REMEDIES,
        "program": PROGRAMS,
        "engine": ENGINES,
        "model": MODELS,
        "posterior": POSTERIORS,
        "more": MORE,
        "check": CHECKS,
        "rare": RARE,
        "odd": ODD,
    }.items()
    for name, row in table.items()
]


def answered(found: Any) -> bool:
    """Whether there is an answer, and numbers in it are numbers."""
    value = getattr(found, "log_evidence", found)
    return not bool(torch.isnan(value).any()) if isinstance(value, Tensor) else value is not None


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.filterwarnings("ignore")
def test_the_advice_of_a_message_leads_to_an_answer(row: Any) -> None:
    with pytest.raises(row.error, match=row.words):
        row.broken()
    assert answered(row.mended())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_message_that_advises_has_a_row() -> None:
    counts, *untried = report()
    assert not untried, counts
