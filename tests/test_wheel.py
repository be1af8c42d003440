"""The wheel runs the README in a fresh environment that holds its declared runtime dependencies alone.

No network: the dependencies are links to the distributions that run this test.
"""

import ast
import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pyro_evidence import __version__

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ["pyproject.toml", "README.md", "LICENSE"]
OPTIONAL = ["matplotlib", "sklearn", "arviz"]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that has to succeed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build from a copy without anything that lies about in the working tree."""
    tree = folder / "tree"
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "pyro_evidence", tree / "pyro_evidence", ignore=no_caches)
    for name in SHIPPED:
        shutil.copy(ROOT / name, tree)
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, tree, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def requirements(wheel: Path) -> list[str]:
    """What the wheel says it needs, extras included."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []


def runtime_closure(needed: Iterable[str]) -> dict[str, Distribution]:
    """Distributions reached from the requirements without any extra, by canonical name."""
    found: dict[str, Distribution] = {}
    queue = [Requirement(text) for text in needed]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and name not in found:
            found[name] = distribution(name)
            queue += [Requirement(text) for text in found[name].requires or []]
    return found


def link(installed: Distribution, site: Path) -> None:
    """Make an installed distribution visible in another site-packages folder."""
    tops = {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}
    assert tops, f"{installed.name} was installed without a list of its files"
    for top in tops:
        source, target = Path(str(installed.locate_file(top))), site / top
        if not target.is_symlink():  # distributions may share a namespace folder
            target.symlink_to(source, target_is_directory=source.is_dir())


def fresh_environment(folder: Path, installed: Iterable[Distribution]) -> Path:
    """A new virtual environment with ``installed`` alone, without pip; returns its interpreter."""
    home = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=folder)
    python = home / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-I", "-c", ask, cwd=folder).strip())
    for one in installed:
        link(one, site)
    return python


def modules(names: Iterable[str]) -> set[str]:
    """Those that are the package's files."""
    return {name for name in names if name.startswith("pyro_evidence/") and name.endswith((".py", "py.typed"))}


def test_wheel_runs_the_readme_on_its_declared_dependencies(tmp_path: Path, readme_blocks: list[str]) -> None:
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        shipped = modules(archive.namelist())
    here = (path.relative_to(ROOT).as_posix() for path in (ROOT / "pyro_evidence").rglob("*"))
    assert "pyro_evidence/py.typed" in shipped
    assert shipped == modules(here)

    python = fresh_environment(tmp_path, runtime_closure(requirements(wheel)).values())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", wheel, cwd=tmp_path)

    probe = f"from importlib.util import find_spec; print([n for n in {OPTIONAL} if find_spec(n)])"
    assert run(python, "-I", "-c", probe, cwd=tmp_path).strip() == "[]"
    where = run(python, "-I", "-c", "import pyro_evidence; print(pyro_evidence.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path)

    script = tmp_path / "readme.py"
    algebra = "import runpy, sys; print('algebra', 'sympy' in sys.modules)"  # half a second, where there is a cotangent
    check = "runpy.run_module('pyro_evidence', run_name='__main__')"
    script.write_text("\n".join([*readme_blocks, algebra, check]), encoding="utf-8")
    said = run(python, "-I", script, cwd=tmp_path)
    assert "algebra False\n" in said and "as it should be" in said


@pytest.mark.slow
def test_the_source_archive_has_all_that_is_kept(tmp_path: Path) -> None:
    """A packager runs the tests from the archive, and reads what has changed."""
    kept = run("git", "ls-files", cwd=ROOT).splitlines()
    for name in kept:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    (tmp_path / "dist").mkdir()
    run(
        sys.executable,
        "-c",
        "from setuptools.build_meta import build_sdist; build_sdist('../dist')",
        cwd=tmp_path / "tree",
    )
    (archive,) = (tmp_path / "dist").glob(f"pyro_evidence-{__version__}.tar.gz")
    with tarfile.open(archive) as members:
        shipped = {name.split("/", 1)[1] for name in members.getnames() if "/" in name}
    only_here = (".github/", ".ci/", "conda/", ".gitignore", ".pre-commit-config.yaml", "CODE_OF_CONDUCT.md")
    assert not [name for name in kept if name not in shipped and not name.startswith(only_here)]


@pytest.mark.slow
def test_the_source_archive_installs_and_checks_itself(tmp_path: Path) -> None:
    """From the archive to a wheel to an environment of its own, as a packager does it."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "pyro_evidence", tree / "pyro_evidence", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SHIPPED:
        shutil.copy(ROOT / name, tree)
    build = "from setuptools.build_meta import build_sdist; build_sdist('../dist')"
    (tmp_path / "dist").mkdir()
    run(sys.executable, "-c", build, cwd=tree)
    (archive,) = (tmp_path / "dist").glob(f"pyro_evidence-{__version__}.tar.gz")
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", tmp_path, archive, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    python = fresh_environment(tmp_path, runtime_closure(requirements(wheel)).values())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", wheel, cwd=tmp_path)
    assert "as it should be" in run(python, "-I", "-m", "pyro_evidence", cwd=tmp_path)


def test_the_conda_recipe_needs_what_the_project_needs() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.findall(r'"([^"]+)"', re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)[1])
    recipe = (ROOT / "conda/meta.yaml").read_text(encoding="utf-8")
    run_section = recipe.split("  run:\n")[1].split("\n\n")[0]
    wanted = {
        re.sub(r"\s*- ", "", line).replace(" ", "").replace("pytorch", "torch") for line in run_section.splitlines()
    }
    assert wanted - {"python>={{python_min}}"} == set(declared)
    assert f'version = "{__version__}"' in recipe


def test_one_command_writes_the_archives_hash_into_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "conda").mkdir()
    (tmp_path / "dist").mkdir()
    for name in ("meta.yaml", "fill_in.py"):
        shutil.copy(ROOT / "conda" / name, tmp_path / "conda")
    before = (tmp_path / "conda/meta.yaml").read_text(encoding="utf-8")
    archive = tmp_path / f"dist/pyro_evidence-{__version__}.tar.gz"
    archive.write_bytes(b"what was uploaded")
    run(sys.executable, tmp_path / "conda/fill_in.py", cwd=tmp_path)
    after = (tmp_path / "conda/meta.yaml").read_text(encoding="utf-8")
    changed = [b for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b]
    assert changed == [f"  sha256: {hashlib.sha256(b'what was uploaded').hexdigest()}"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pyro_evidence-9.9.9.tar.gz", "not of the recipe's version"),
        (f"pyro_evidence-{__version__}.tar.gz", "there is no"),
    ],
)
def test_another_archive_or_none_leaves_the_recipe_alone(name: str, message: str) -> None:
    before = (ROOT / "conda/meta.yaml").read_bytes()
    done = subprocess.run([sys.executable, ROOT / "conda/fill_in.py", name], capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stderr
    assert (ROOT / "conda/meta.yaml").read_bytes() == before


def test_the_version_stands_in_one_place_and_the_citation_agrees() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project and 'attr = "pyro_evidence.__version__"' in project
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_closure_follows_dependencies_and_leaves_extras_out() -> None:
    found = runtime_closure(["pyro-ppl>=1.9.1,<2", 'matplotlib; extra == "plots"'])
    assert {"pyro-ppl", "torch", "numpy", "tqdm", "opt-einsum"} <= set(found)
    assert not {"matplotlib", "scikit-learn", "arviz", "pytest"} & set(found)


def imported_on_loading(path: Path) -> set[str]:
    """Foreign modules that a file imports when it is loaded itself, not when it is used."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    plain = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in plain | named} - sys.stdlib_module_names - {"pyro_evidence"}


def test_what_is_imported_on_loading_is_declared() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.findall(r'"([\w-]+)', re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)[1])
    files = (path for path in (ROOT / "pyro_evidence").rglob("*.py") if path.parent.name not in ("plots", "sklearn"))
    found = set().union(*map(imported_on_loading, files))
    assert found == {"pyro" if name == "pyro-ppl" else name for name in declared}
