"""Pages of the site that are made from what there is already: the reference, the tutorials, the files at the top."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pyro_evidence"
TOP = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
GUIDE = ("guide.md", "interface.md", "which_engine.md", "when_not_to_trust.md", "coming_from.md", "glossary.md")
LESSONS = (  # in the order of need
    "01_swap_the_engine",
    "09_bayesian_workflow",
    "11_a_hundred_thousand_groups",
    "12_persons_and_items",
    "10_only_the_engine_line",
    "15_which_kernel",
    "16_fields_and_series",
    "17_which_columns",
    "18_a_new_subject",
    "02_mixtures",
    "03_conditional_densities",
    "04_handwritten_digits",
    "07_networks",
    "08_gaussian_processes",
    "13_scales_four_ways",
    "14_ten_million_rows",
    "05_relevance_eigenvectors",
    "06_class_overlap",
)
MODULES = tuple(
    f"models.{m}"
    for m in "basis kernels regression classifier gp mlp mixture mppca prbf wrappers survival counts".split()
)
MODULES += (
    "datasets",
    *(f"plots.{path.stem}" for path in sorted((PACKAGE / "plots").glob("[a-z]*.py"))),
)  # a page each


def names_of(init: Path) -> dict[str, str]:
    """Public names of a folder, its ``__all__`` or what it imports on demand, with the path of what each names."""
    tree = ast.parse(init.read_text(encoding="utf-8"))
    imported = {  # those that are made on demand stand under TYPE_CHECKING
        a.asname or a.name: f"{n.module}.{a.name}"
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom)
        for a in n.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {name: imported[name] for name in ast.literal_eval(node.value)}
    return {name: path for name, path in imported.items() if name not in ("TYPE_CHECKING", "import_on_demand")}


@cache
def public() -> dict[str, dict[str, str]]:
    """For the package and each of its folders the public names with their paths, each path once."""
    found = {"pyro_evidence": names_of(PACKAGE / "__init__.py")}
    seen = set(found["pyro_evidence"].values())
    for init in sorted(set(PACKAGE.rglob("__init__.py")) - {PACKAGE / "__init__.py"}):
        own = {name: path for name, path in names_of(init).items() if path not in seen and not in_a_module(path)}
        seen |= set(own.values())
        if own:
            found[".".join(init.parent.relative_to(ROOT).parts)] = own
    return found


def in_a_module(path: str) -> bool:
    """Whether a page of a whole module has it already."""
    return any(path.startswith(f"pyro_evidence.{module}.") for module in MODULES)


@cache
def public_paths() -> dict[str, str]:
    """Where each public name stands in the reference, by its last part."""
    return {path.split(".")[-1]: path for names in public().values() for path in names.values()}


def reference() -> dict[str, str]:
    """Address and text of every page of the reference: engines, posteriors, errors, then folders and modules."""
    pages, rest = dict[str, str](), dict[str, list[str]]()
    for place, names in public().items():
        for name, path in names.items():
            rest.setdefault(title_of(name, path) or place, []).append(path)
    for title, paths in rest.items():
        blocks = "\n\n".join(f"::: {path}" for path in paths)
        pages[f"reference/{title.removeprefix('pyro_evidence.')}.md"] = f"# {title}\n\n{blocks}\n"
    for module in MODULES:
        pages[f"reference/{module}.md"] = f"# pyro_evidence.{module}\n\n::: pyro_evidence.{module}\n"
    return pages


def title_of(name: str, path: str) -> str:
    """The title of the page on which a name stands with its like; none for what stands on the page of its folder."""
    if path.startswith(("pyro_evidence.errors.", "pyro_evidence.settings.", "pyro_evidence.fitting.")):
        return "errors" if ".errors." in path else "settings"
    if name.endswith("Posterior"):
        return f"posteriors.{name}"
    return f"engines.{name}" if path.startswith("pyro_evidence.infer.") and name[0].isupper() else ""


def papers() -> dict[str, str | bytes]:
    """The papers' tables and their pictures, and what was measured beside other packages."""
    folder, results = ROOT / "benchmarks/papers", ROOT / "benchmarks/results"
    pages = [*folder.glob("*.md"), *results.glob("*.md")]
    texts = {f"{path.parent.name}/{path.name}": path.read_text(encoding="utf-8") for path in pages}
    return {**texts, **{f"papers/{path.name}": path.read_bytes() for path in folder.glob("*.png")}}


def tutorials() -> dict[str, str | bytes]:
    """Every notebook as a page, and its pictures beside it."""
    found: dict[str, str | bytes] = {}
    for path in sorted((ROOT / "tutorials").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        text, resources = MarkdownExporter().from_notebook_node(notebook)
        for name, data in resources["outputs"].items():
            found[f"tutorials/{path.stem}/{name}"] = data
            text = text.replace(f"({name})", f"({path.stem}/{name})")
        found[f"tutorials/{path.stem}.md"] = titled(text.replace("\x1b", "").replace("(../docs/", "(../"))
    return found


def titled(text: str) -> str:
    """A tutorial without a number in its title: the menu has them in the order of need."""
    return re.sub(r"^# (?:Tutorial )?\d+[.:] (\w)", lambda m: f"# {m[1].upper()}", text, count=1, flags=re.MULTILINE)


def menu() -> list[dict[str, object]]:
    """What the site shows at its side; a new page comes last in its section until it is named here."""
    docs = ROOT / "docs"
    guide = ordered((path.name for path in docs.glob("*.md")), GUIDE)
    lessons = ordered((name for name in tutorials() if name.endswith(".md")), map("tutorials/{}.md".format, LESSONS))
    decisions = sorted(path.relative_to(docs).as_posix() for path in (docs / "decisions").glob("[0-9]*.md"))
    measured = sorted(name for name in papers() if name.endswith(".md"))
    development = ["architecture.md", "equations.md", "contributing.md", "decisions/README.md", *decisions, *measured]
    return [
        {"Start": "index.md"},
        {"Guide": [name for name in guide if name not in development]},
        {"Tutorials": lessons},
        {"Reference": ["reference/pyro_evidence.md", *sorted(set(reference()) - {"reference/pyro_evidence.md"})]},
        {"Changes": "changelog.md"},
        {"Development": development},
    ]


def ordered(names: Iterable[str], first: Iterable[str]) -> list[str]:
    """The names, those of ``first`` in front."""
    there, wanted = set(names), list(first)
    return [*(n for n in wanted if n in there), *sorted(there - set(wanted))]


def moved(text: str) -> str:
    """A page from the top of the repository with its links as the site has them."""
    text = re.sub(r"\(docs/", "(", text)
    text = re.sub(r"\((tutorials/[\w]+)\.ipynb\)", r"(\1.md)", text)
    for old, new in TOP.items():
        text = text.replace(f"({old})", f"({new})")
    return re.sub(r"\[([^\]]+)\]\((LICENSE|SECURITY\.md|CODE_OF_CONDUCT\.md)\)", r"\1", text)


def made() -> dict[str, str | bytes]:
    """All pages and pictures that are made, by address."""
    top = {new: moved((ROOT / old).read_text(encoding="utf-8")) for old, new in TOP.items()}
    return {**top, **reference(), **tutorials(), **papers()}
