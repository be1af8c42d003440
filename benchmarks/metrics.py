"""How large the package is for whoever reads it: what is, what was, what is asked for.

    python benchmarks/metrics.py              # the table
    python benchmarks/metrics.py --list NAME  # the places behind a row: files, functions, numbers, names
    python benchmarks/metrics.py --write      # keep the figures as those of before: benchmarks/results/metrics.json

How is counted:

lines
    Lines of modules that hold a token of code: docstrings, comments, blank lines and import statements are not
    code.  A string that is no docstring is.
modules, functions, lambdas
    Files but ``__init__.py``; ``def`` at any depth, methods and properties too; ``lambda``.
used_once
    Private functions at top level and private methods with exactly one use in the package, by resolved use, whose
    body has fewer than five lines of code.  A function's name is looked up where it is defined, not where a parameter
    or a local variable hides it, and where it is imported; its own body does not count.  A method is used by an
    attribute of ``self``, ``cls`` or ``super()`` in its class, those above and those below, and by an attribute of
    that name on anything whose class is not known.  One that overrides another or is overridden is a hook, and not
    counted.
numbers
    Literals other than 0, 1, 2 and .5, wherever they stand; -3 is 3.
thresholds
    Names in capitals to which a module assigns a number, a tuple of numbers, or an expression of numbers, ``math`` and
    such names alone.
circles
    Groups of folders that import one another in a circle, sub-folders as folders of their own, a module at the top as
    one; imports inside functions and under TYPE_CHECKING count, those of ``__init__.py`` do not.
duplicates
    Names without an underscore that two or more modules give to a function or class at their top level.
imported
    Modules of the package, with a file of their own, in ``sys.modules`` when LaplaceEvidence was imported and made.
docs
    Lines of ``docs/**/*.md``.
walks
    Files, functions (``def``, no lambda, no comprehension) and lines of code of these functions that one fit enters,
    each fit in a process of its own.  With lambdas and comprehensions a line through 30 points enters 633 functions.
"""

import argparse
import ast
import io
import json
import math
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pyro_evidence"
BEFORE = ROOT / "benchmarks" / "results" / "metrics.json"
SHORT = 5  # lines of a body: below, a private function that is used once rarely says more than it
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


@dataclass(frozen=True)
class Module:
    """A parsed file of the package, with the name by which it is imported."""

    path: Path
    name: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]  # all of the tree
    code: frozenset[int]  # numbers of its lines of code

    def place(self, node: ast.AST, name: str) -> str:
        return f"{self.path}:{node.lineno} {name}"  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Row:
    """A figure and what it is made of."""

    value: int
    places: list[str]


def listed(places: list[str]) -> Row:
    return Row(len(places), places)


def parsed(package: Path) -> list[Module]:
    """All files of a package, ``__init__.py`` among them."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        nodes = tuple(ast.walk(tree))
        found.append(Module(path.relative_to(package.parent), name, tree, nodes, code_lines(text, nodes)))
    return found


def is_init(module: Module) -> bool:
    return module.path.name == "__init__.py"


def docstring(node: ast.AST) -> ast.Expr | None:
    """The statement that is a docstring."""
    if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return first
    return None


def code_lines(text: str, nodes: Iterable[ast.AST]) -> frozenset[int]:
    """Numbers of the lines that hold code: no docstring, comment, blank line or import."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in nodes:
        gone = node if isinstance(node, (ast.Import, ast.ImportFrom)) else docstring(node)
        if gone is not None:
            found.difference_update(range(gone.lineno, (gone.end_lineno or gone.lineno) + 1))
    return frozenset(found)


def of_kind(modules: list[Module], *kinds: type) -> list[str]:
    """Places of the nodes of some kinds."""
    return [m.place(node, getattr(node, "name", "")) for m in modules for node in m.nodes if isinstance(node, kinds)]


def numbers(modules: list[Module]) -> list[str]:
    """Places of literals other than 0, 1, 2 and .5."""
    return [
        m.place(node, str(node.value))
        for m in modules
        for node in m.nodes
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value not in (0, 1, 2, 0.5)
    ]


def assigned(tree: ast.Module) -> Iterator[tuple[ast.Name, ast.expr | None]]:
    """Names that a module assigns at its top level, with their values."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign):
            yield from pairs(node.target, node.value)


def pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.Name, ast.expr | None]]:
    """A name and its value; each name of a tuple with its own."""
    if isinstance(target, ast.Name):
        yield target, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [None] * len(target.elts)
        for each, part in zip(target.elts, parts, strict=False):
            yield from pairs(each, part)


def is_number(value: ast.expr | None) -> bool:
    """Whether an expression is made of numbers, ``math`` and names in capitals alone."""
    if isinstance(value, ast.Constant):
        return type(value.value) in (int, float)
    if isinstance(value, ast.Name):
        return value.id.isupper()
    if isinstance(value, ast.Tuple):
        return all(map(is_number, value.elts))
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    if isinstance(value, ast.BinOp):
        return is_number(value.left) and is_number(value.right)
    if isinstance(value, ast.Call):
        return is_number(value.func) and all(map(is_number, value.args))
    return isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "math"


def thresholds(modules: list[Module]) -> list[str]:
    return [
        m.place(name, f"{name.id} = {ast.unparse(value)}")
        for m in modules
        for name, value in assigned(m.tree)
        if value is not None and name.id.isupper() and is_number(value)
    ]


def duplicates(modules: list[Module]) -> list[str]:
    """Public classes and functions that several modules define, with these modules."""
    homes: dict[str, set[str]] = defaultdict(set)
    for m in modules:
        for node in m.tree.body:
            if isinstance(node, (ast.ClassDef, *FUNCTION)):
                homes[node.name].add(m.name)
    many = {name: found for name, found in homes.items() if len(found) > 1 and not name.startswith("_")}
    return [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(many.items())]


def circles(modules: list[Module]) -> list[str]:
    """Folders that can be reached from one another by imports, a group a line."""
    folders = {m.name: folder(m) for m in modules}
    below: dict[str, set[str]] = {name: set() for name in folders.values()}
    for m in modules:
        if not is_init(m):
            below[folder(m)] |= {folders[home] for home in imported_modules(m, folders)} - {folder(m)}
    changed = True
    while changed:
        wider = {name: below[name].union(*(below[other] for other in below[name])) for name in below}
        changed, below = wider != below, wider
    groups = {tuple(sorted(other for other in below[name] if name in below[other])) for name in below}
    return [" - ".join(group) for group in sorted(groups) if group]


def folder(module: Module) -> str:
    """Where a module is, from the package's root; a module at the top is a folder of its own."""
    inside = module.path.parts[1:]
    return "/".join(inside[:-1]) or module.path.stem


def imported_modules(module: Module, known: dict[str, str]) -> Iterator[str]:
    """Names of the package's modules that a module imports, wherever it does so; the package itself is none."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            home = name if name in known else name.rpartition(".")[0]
            if home in known and "." in home:
                yield home


@dataclass
class Definition:
    """A private function or method, and where it is used."""

    module: Module
    node: ast.FunctionDef
    owner: str  # "module.Class", or "" at top level
    uses: int = 0


def used_once(modules: list[Module]) -> list[str]:
    """Private functions and methods with one use and a short body."""
    functions, methods = private_definitions(modules)
    for m in modules:
        count_names(m, functions)
    relatives = family(modules)
    for m in modules:
        count_attributes(m, methods, relatives)
    single = [f for f in functions.values() if f.uses == 1]
    for same in methods.values():
        single += [
            f for f in same if f.uses == 1 and not any(f.owner in relatives[o.owner] for o in same if o is not f)
        ]
    short = [(f, num) for f in single if (num := body_lines(f)) < SHORT]
    return sorted(f.module.place(f.node, f"{f.node.name}, {num} lines") for f, num in short)


def private_definitions(modules: list[Module]) -> tuple[dict[str, Definition], dict[str, list[Definition]]]:
    """Private functions by dotted name; private methods by bare name."""
    functions: dict[str, Definition] = {}
    methods: dict[str, list[Definition]] = defaultdict(list)
    for m in modules:
        for node in m.tree.body:
            if isinstance(node, ast.FunctionDef) and is_private(node.name):
                functions[f"{m.name}.{node.name}"] = Definition(m, node, "")
        for kind in m.nodes:
            if isinstance(kind, ast.ClassDef):
                for node in kind.body:
                    if isinstance(node, ast.FunctionDef) and is_private(node.name):
                        methods[node.name].append(Definition(m, node, f"{m.name}.{kind.name}"))
    return functions, methods


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def body_lines(found: Definition) -> int:
    """Lines of code of a function, without its signature and docstring."""
    body = found.node.body[1:] if docstring(found.node) else found.node.body
    return sum(len(found.module.code & set(range(s.lineno, (s.end_lineno or s.lineno) + 1))) for s in body)


def bound(module: Module) -> dict[str, str]:
    """Name in a module -> what it stands for: of its own, imported from a module, or a module."""
    found = {node.name: f"{module.name}.{node.name}" for node in module.tree.body if hasattr(node, "name")}
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return found


def count_names(module: Module, functions: dict[str, Definition]) -> None:
    """Add the uses of private functions in one module: by name, and as an attribute of a module."""
    names = bound(module)

    def visit(node: ast.AST, hidden: frozenset[str], inside: ast.AST | None) -> None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in hidden:
            use(names.get(node.id, ""), inside)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in hidden:
            use(f"{names.get(node.value.id, '')}.{node.attr}", inside)
        if isinstance(node, (ast.Lambda, *FUNCTION)):
            hidden = hidden | own_names(node)
            inside = inside or node
        for child in ast.iter_child_nodes(node):
            visit(child, hidden, inside)

    def use(dotted: str, inside: ast.AST | None) -> None:
        if dotted in functions and functions[dotted].node is not inside:
            functions[dotted].uses += 1

    visit(module.tree, frozenset(), None)


def own_names(function: ast.AST) -> frozenset[str]:
    """Parameters of a function and names that it assigns: they hide those of the module."""
    inside = list(ast.walk(function))
    stored = (n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return frozenset({*stored, *(n.arg for n in inside if isinstance(n, ast.arg))})


def family(modules: list[Module]) -> dict[str, set[str]]:
    """Class -> itself, the classes of the package above it and those below it, by dotted name."""
    above: dict[str, set[str]] = {}
    for m in modules:
        names = bound(m)
        for node in m.nodes:
            if isinstance(node, ast.ClassDef):
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                above[f"{m.name}.{node.name}"] = {names.get(ast.unparse(base), "") for base in bases}
    lines = {name: ancestors(name, above) for name in above}
    return {name: lines[name] | {other for other in lines if name in lines[other]} for name in lines}


def ancestors(name: str, above: dict[str, set[str]]) -> set[str]:
    """A class and all above it."""
    return {name}.union(*(ancestors(base, above) for base in above.get(name, ()) if base in above))


def count_attributes(module: Module, methods: dict[str, list[Definition]], relatives: dict[str, set[str]]) -> None:
    """Add the uses of private methods in one module."""

    def visit(node: ast.AST, owner: str, inside: tuple[ast.AST, ...]) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            own = is_own(node.value, owner)
            for found in methods.get(node.attr, ()):
                if found.node not in inside and (not own or found.owner in relatives.get(owner, ())):
                    found.uses += 1
        if isinstance(node, ast.ClassDef):
            owner = f"{module.name}.{node.name}"
        if isinstance(node, FUNCTION):
            inside = (*inside, node)
        for child in ast.iter_child_nodes(node):
            visit(child, owner, inside)

    visit(module.tree, "", ())


def is_own(receiver: ast.expr, owner: str) -> bool:
    """Whether an expression is ``self``, ``cls``, ``super()`` or the class that it stands in."""
    if isinstance(receiver, ast.Call):
        receiver = receiver.func
    return isinstance(receiver, ast.Name) and receiver.id in ("self", "cls", "super", owner.rpartition(".")[2])


def counted(everything: list[Module]) -> dict[str, Row]:
    """The rows that are read off the source text."""
    modules = [m for m in everything if not is_init(m)]
    sizes = sorted(((len(m.code), str(m.path)) for m in everything), reverse=True)
    return {
        "lines": Row(sum(size for size, _ in sizes), [f"{path}: {size}" for size, path in sizes]),
        "modules": listed([str(m.path) for m in modules]),
        "functions": listed(of_kind(everything, *FUNCTION)),
        "lambdas": listed(of_kind(everything, ast.Lambda)),
        "used_once": listed(used_once(everything)),
        "numbers": listed(numbers(everything)),
        "thresholds": listed(thresholds(everything)),
        "circles": listed(circles(everything)),
        "duplicates": listed(duplicates(modules)),
    }


LOADED = """import json, sys
from pyro_evidence import LaplaceEvidence
LaplaceEvidence(lambda: None)
own = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "pyro_evidence"}
print(json.dumps(sorted(name for name, module in own.items() if module.__spec__ and module.__spec__.has_location)))"""


def printed(*arguments: str) -> Any:
    """What a Python process of its own prints last, read as JSON."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def docs(root: Path) -> Row:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(root.glob("docs/**/*.md"))}
    return Row(sum(sizes.values()), [f"{path.relative_to(root)}: {size}" for path, size in sizes.items()])


def fits() -> dict[str, Callable[[], Callable[[], Any]]]:
    """Name of a walk -> what makes its data and engine and returns the run, which alone is profiled."""
    import pyro
    import pyro.distributions as dist
    import torch

    from pyro_evidence import RVM, EvidenceEM, LaplaceEvidence
    from pyro_evidence.compare import compare
    from pyro_evidence.models.basis import Linear, Polynomial
    from pyro_evidence.models.mixture import gaussian_mixture
    from pyro_evidence.models.regression import regression
    from pyro_evidence.posterior import nested  # noqa: F401  what runs when it is imported is no part of a fit

    x = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    t = 2.0 * x[:, 0] + 0.3 * torch.cos(40.0 * x[:, 0])

    def schools(errors: torch.Tensor, effects: torch.Tensor | None = None) -> Any:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", len(errors)):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            return pyro.sample("effects", dist.Normal(theta, errors), obs=effects)

    def eight_schools() -> Callable[[], Any]:
        errors = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
        effects = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
        engine = LaplaceEvidence(schools)
        return lambda: engine.run(errors, effects)

    def two_gaussians() -> Callable[[], Any]:
        noise = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        Y = noise + 6.0 * (torch.arange(60) >= 30).unsqueeze(-1)
        engine = EvidenceEM(gaussian_mixture(2))
        return lambda: engine.run(Y)

    def line() -> Callable[[], Any]:
        engine = LaplaceEvidence(regression(Linear()))
        return lambda: engine.run(x, t)

    def rvm() -> Callable[[], Any]:
        engine = RVM(regression(Polynomial(3), beta=20.0))
        return lambda: engine.run(x, t)

    def compare_two() -> Callable[[], Any]:
        model = regression(Linear())
        engines = {"once": LaplaceEvidence(model), "again": LaplaceEvidence(model)}
        return lambda: compare(model, x, t, engines=engines)

    return {
        "line": line,
        "eight schools": eight_schools,
        "two Gaussians": two_gaussians,
        "RVM": rvm,
        "compare": compare_two,
    }


def entered(run: Callable[[], Any]) -> list[tuple[str, int]]:
    """File and first line of each function of the package that is called, in the order of the first calls."""
    found: dict[tuple[str, int], None] = {}
    prefix = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix) and not code.co_name.startswith("<"):
            found.setdefault((code.co_filename.removeprefix(f"{ROOT}/"), code.co_firstlineno))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(found)


def walks(modules: list[Module]) -> dict[str, Row]:
    """The rows that are read off five fits."""
    found = {}
    for name in WALKS:
        keys = [tuple(key) for key in printed(__file__, "--walk", name)]
        found |= walked(name, keys, modules)
    return found


def walked(name: str, keys: list[tuple[str, int]], modules: list[Module]) -> dict[str, Row]:
    """Files, functions and lines of the functions that begin in these lines."""
    by_path = {str(m.path): m for m in modules}
    lines: set[tuple[str, int]] = set()
    places = []
    for path, first in keys:
        for node in by_path[path].nodes:
            if isinstance(node, FUNCTION) and first == min([node.lineno, *(d.lineno for d in node.decorator_list)]):
                lines |= {(path, n) for n in range(first, (node.end_lineno or first) + 1) if n in by_path[path].code}
                places.append(by_path[path].place(node, node.name))
    return {
        f"{name}: files": listed(list(dict.fromkeys(path for path, _ in keys))),
        f"{name}: functions": listed(places),
        f"{name}: lines": Row(len(lines), places),
    }


WALKS = ("line", "eight schools", "two Gaussians", "RVM", "compare")
ASKED: dict[str, int | str] = {  # a figure, or a part of what was
    "lines": 25_000,
    "modules": 205,
    "functions": 3_400,
    "lambdas": 177,
    "used_once": "1/5",
    "numbers": 900,
    "circles": 0,
    "duplicates": 50,
    "imported": "2/3",
    "line: files": 38,
    "line: functions": "5/8",
    "line: lines": "2/3",
    "eight schools: files": 45,
    "two Gaussians: files": 32,
    "RVM: files": 28,
    "compare: files": 50,
}


def asked_for(name: str, before: dict[str, int]) -> int | None:
    """What a row should become; None where nothing is asked."""
    asked = ASKED.get(name)
    if isinstance(asked, str):
        part, whole = map(int, asked.split("/"))
        return math.floor(before[name] * part / whole) if name in before else None
    return asked


def table(rows: dict[str, Row], before: dict[str, int]) -> str:
    """A line for each row."""
    lines = ["| measure | now | before | asked |", "|---|---|---|---|"]
    for name, row in rows.items():
        cells = [row.value, before.get(name), asked_for(name, before)]
        lines.append(f"| {name} | {' | '.join('' if cell is None else f'{cell:,}' for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the figures of this tree")
    parser.add_argument("--list", metavar="NAME", help="the places behind one row")
    parser.add_argument("--walk", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.walk:
        print(json.dumps(entered(fits()[asked.walk]())))
        return
    modules = parsed(PACKAGE)
    rows = counted(modules) | {"imported": listed(printed("-c", LOADED)), "docs": docs(ROOT)} | walks(modules)
    if asked.list is not None:
        if asked.list not in rows:
            raise SystemExit(f"no row is called {asked.list!r}; there are: {', '.join(rows)}")
        print(*rows[asked.list].places, sep="\n")
        return
    before = json.loads(BEFORE.read_text(encoding="utf-8")) if BEFORE.exists() else {}
    if asked.write:
        before = {name: row.value for name, row in rows.items()}
        BEFORE.write_text(json.dumps(before, indent=1) + "\n", encoding="utf-8")
    print(table(rows, before))


if __name__ == "__main__":
    main()
