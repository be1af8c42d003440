"""The index of equations is that of the docstrings."""

import pytest

from tests.test_architecture import PACKAGE
from tests.test_site import ROOT, rendering


def test_the_page_is_that_of_the_docstrings() -> None:
    equations = rendering("equations")
    written = (ROOT / "docs/equations.md").read_text(encoding="utf-8")
    assert written == equations.page(PACKAGE), "run make equations"
    assert written.count("\n| ") > 80


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bishop (2006), eq. 4.137.", [("Bishop (2006)", "eq. 4.137")]),
        (
            "MacKay (1992), eq. 2.4; Bishop\n (2006), eqs. 3.1 to 3.3.",
            [("MacKay (1992)", "eq. 2.4"), ("Bishop (2006)", "eqs. 3.1 to 3.3")],
        ),
        ("Meng and Wong (1996), eq. 4.1.  After that 7 rounds, eq. 9.", [("Meng and Wong (1996)", "eq. 4.1")]),
        ("Neal (1996) says nothing of equations.", []),
    ],
)
def test_a_citation_is_read(text: str, expected: list[tuple[str, str]]) -> None:
    assert list(rendering("equations").citations(text)) == expected
