"""What make installs: all that is declared, in one version for each Python and system, by the hashes of its files."""

import re
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

TOP = Path(__file__).parent.parent
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_DEV = next(Requirement(r).extras for r in EXTRAS["dev"] if r.startswith("pyro-evidence"))
DEV = [*PROJECT["dependencies"], *(r for extra in ("dev", *OF_DEV) for r in EXTRAS[extra])]
PYTHONS = ("3.10.13", "3.11.7", "3.12.1", "3.13.0")


def pins(*names: str) -> dict[Requirement, list[str]]:
    """Requirement -> its hashes."""
    text = "".join((TOP / name).read_text() for name in names).replace("\\\n", "")
    lines = [line.split("--hash=") for line in text.splitlines()]
    return {Requirement(head): [h.strip() for h in hashes] for head, *hashes in lines}


def here(pin: Requirement, python: str) -> bool:
    environment = {**default_environment(), "python_full_version": python, "python_version": python.rpartition(".")[0]}
    return pin.marker is None or pin.marker.evaluate(environment)


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-docs.txt"])
def test_every_pin_has_one_version_and_hashes(name) -> None:
    for pin, hashes in pins(name).items():
        assert re.fullmatch(r"==[^,*]+", str(pin.specifier)), pin
        assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", h) for h in hashes), pin


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    "declared, names", [(DEV, ["constraints.txt"]), (EXTRAS["docs"], ["constraints.txt", "constraints-docs.txt"])]
)
def test_what_is_declared_is_pinned_once_and_within_bounds(python, declared, names) -> None:
    pinned = [pin for pin in pins(*names) if here(pin, python)]
    for wanted in map(Requirement, declared):
        found = {str(p.specifier)[2:] for p in pinned if canonicalize_name(p.name) == canonicalize_name(wanted.name)}
        if wanted.name in ("torch", "pyro-evidence"):
            assert not found
        else:
            assert len(found) == 1 and found.pop() in wanted.specifier, wanted


def test_the_torch_that_is_installed_is_one_that_is_claimed() -> None:
    (torch,) = re.findall(r"^TORCH := torch==(\S+)$", (TOP / "Makefile").read_text(), re.MULTILINE)
    (claimed,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert torch in claimed.specifier
