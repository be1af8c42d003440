"""Files of which one entry was changed, and the digest made anew: each is refused by an error that names it, or right.

A few changes of each kind of file, drawn with a seed; ``python -m tests.cases.changed_files`` tries them all.
"""

from pathlib import Path

import pytest

from tests.cases.changed_files import POSTERIORS, checkpoint_endings, posterior_endings


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_changed_posterior_is_refused_or_right(name: str, tmp_path: Path) -> None:
    endings = dict(posterior_endings(name, tmp_path, 5))
    assert {what: found for what, found in endings.items() if found not in ("refused", "right")} == {}
    assert "refused" in endings.values()


@pytest.mark.parametrize("name", ["RVM", "EvidenceEM", "OverlapEM"])
def test_a_fit_that_goes_on_from_a_changed_checkpoint_is_refused_or_right(name: str, tmp_path: Path) -> None:
    endings = dict(checkpoint_endings(name, tmp_path, 5))
    assert {what: found for what, found in endings.items() if found not in ("refused", "right")} == {}
    assert "refused" in endings.values()
