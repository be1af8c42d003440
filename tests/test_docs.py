"""What the pages quote from messages is what the package says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def said() -> str:
    """All source text, adjacent string literals joined."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "pyro_evidence").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def quoted() -> list[str]:
    """The longest number-free piece of each message in the first column of the table of symptoms."""
    lines = (ROOT / "docs/when_not_to_trust.md").read_text(encoding="utf-8").splitlines()
    first = [line.split("|")[1] for line in lines if line.startswith("| ") and "---" not in line]
    messages = [m for cell in first for m in re.findall(r"`([^`]+)`", cell)]
    return [max(re.split(r"[\d.]+|\[\.\.\.\]", m), key=len).strip() for m in messages]


@pytest.mark.parametrize("message", quoted())
def test_messages_on_the_page_exist(message: str) -> None:
    assert message in said()


@pytest.mark.parametrize("page", ["which_engine", "when_not_to_trust", "coming_from"])
def test_names_on_the_pages_exist(page: str) -> None:
    import pyro_evidence

    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    called = set(re.findall(r"`(\w+)\(", text)) - {"Predictive", "to_pandas"}
    assert called <= set(pyro_evidence.__all__) | {"len"}
