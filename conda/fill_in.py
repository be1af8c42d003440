"""The SHA-256 of the source archive into the recipe beside this file: ``python conda/fill_in.py [ARCHIVE]``."""

import hashlib
import re
import sys
from pathlib import Path

RECIPE = Path(__file__).with_name("meta.yaml")
HASH = re.compile(r"(?m)^  sha256: [0-9a-f]{64}$")


def expected(recipe: str) -> str:
    """The archive's name by the recipe's version."""
    found = re.search(r'set version = "([^"]+)"', recipe)
    assert found is not None
    return f"pyro_evidence-{found[1]}.tar.gz"


def filled_in(recipe: str, archive: Path) -> str:
    """The recipe with the hash of an archive.

    :raises SystemExit: for an archive of another version, one that is not there, and a recipe with no place for a hash.
    """
    if archive.name != expected(recipe):
        raise SystemExit(f"{archive} is not of the recipe's version; expected {expected(recipe)}. Build it anew.")
    if not archive.is_file():
        raise SystemExit(f"there is no {archive}. Write: python -m build")
    new, places = HASH.subn(f"  sha256: {hashlib.sha256(archive.read_bytes()).hexdigest()}", recipe)
    if places != 1:
        raise SystemExit(f"the recipe has {places} lines of the form 'sha256: 64 digits'; expected one.")
    return new


if __name__ == "__main__":
    text = RECIPE.read_text(encoding="utf-8")
    given = Path(sys.argv[1]) if sys.argv[1:] else RECIPE.parents[1] / "dist" / expected(text)
    RECIPE.write_text(filled_in(text, given), encoding="utf-8")
