"""A letter's advice works: each row breaks, reads the advice in the letter, follows it, and has an answer."""

import pytest
import torch

from tests.refusals.remedies import REMEDIES


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_advice_of_a_letter_leads_to_an_answer(name: str) -> None:
    row = REMEDIES[name]
    with pytest.raises(row.error, match=row.words):
        row.broken()
    assert bool(torch.isfinite(row.mended().log_evidence))
