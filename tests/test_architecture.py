"""The rules of the architecture, read off the package's source text.

A rule is a function from the package's folder to a list of complaints. Each is applied to the package, to
small trees that break it and to small trees that keep it.
"""

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from benchmarks import metrics

PACKAGE = Path(__file__).resolve().parents[1] / "pyro_evidence"

# One method, one folder: a part may import those before it, and nothing after it.
ORDER = (
    "lazy_import errors display settings files data numerics fitting precision program structure models blocks "
    "laplace nested posterior mixture relevance mppca prbf infer evidence_check datasets compare sklearn plots __main__"
).split()
RUN_MODELS = {
    "program",
    "models",
    "fitting/process_state.py",
    "infer/laplace_marginal.py",
    "posterior/guide.py",
    "posterior/laplace.py",
    "posterior/predict.py",
    "relevance/axis_priors.py",
    "compare/runs.py",
    "compare/comparison.py",
}
EQUATIONS = {  # files of published equations: torch, one another and errors only
    "numerics": "*",
    "precision": "*",
    "mixture": "data expectation updates evidence mode",
    "mppca": "expectation missing updates start evidence curvature",
    "prbf": "densities",
    "relevance": "axis_evidence",
}

Rule = Callable[[Path], list[str]]


def sources(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def part(root: Path, path: Path) -> str:
    """The name in ORDER that a file belongs to."""
    return path.relative_to(root).parts[0].removesuffix(".py")


@cache
def nodes_of(text: str) -> list[ast.AST]:
    """All nodes of a file with that text, which many rules look at."""
    return list(ast.walk(ast.parse(text)))


def nodes(path: Path) -> list[ast.AST]:
    return nodes_of(path.read_text(encoding="utf-8"))


def imported_names(path: Path) -> set[str]:
    """Dotted names of everything that is imported absolutely, inside functions too."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def imported_parts(root: Path, path: Path) -> list[str]:
    """Parts of the package that a file imports; "" is the package itself."""
    own = [name.split(".") for name in imported_names(path) if name.split(".")[0] == root.name]
    return sorted({name[1] if len(name) > 1 else "" for name in own})


def strangers(root: Path) -> list[str]:
    """Modules that have no place in ORDER."""
    found = {part(root, path) for path in sources(root)} - {"__init__", *ORDER}
    return [f"{name} has no place in the order of parts" for name in sorted(found)]


def upward_imports(root: Path) -> list[str]:
    rank = {name: number for number, name in enumerate(ORDER)}
    found = []
    for path in sources(root):
        here = rank.get(part(root, path), len(ORDER))  # __init__ may import everything
        upward = [name for name in imported_parts(root, path) if rank.get(name, len(ORDER)) > here]
        found += [f"{path.relative_to(root)} imports {root.name}.{name}" for name in upward]
    return found


def relative_imports(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{node.lineno} imports relatively"
        for path in sources(root)
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def uses_poutine(path: Path) -> bool:
    imported = any(f"{name}.".startswith("pyro.poutine.") for name in imported_names(path))
    return imported or any(
        isinstance(node, ast.Attribute) and node.attr == "poutine" and ast.unparse(node) == "pyro.poutine"
        for node in nodes(path)
    )


def poutine_outside_its_modules(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)} uses pyro.poutine"
        for path in sources(root)
        if not {part(root, path), path.relative_to(root).as_posix()} & RUN_MODELS and uses_poutine(path)
    ]


def holds_equations(relative: Path) -> bool:
    named = EQUATIONS.get(relative.parts[0], "").split() if len(relative.parts) > 1 else []
    return named == ["*"] or relative.stem in named


def global_switches_outside_process_state(root: Path) -> list[str]:
    """What belongs to the whole process is changed in one file, under one lock."""
    switches = {"validation_enabled", "enable_validation", "fork_rng", "catch_warnings"}
    return [
        f"{path.relative_to(root)}:{node.lineno} calls {node.attr}: see fitting/process_state.py"
        for path in sources(root)
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr in switches
        and path.relative_to(root).as_posix() != "fitting/process_state.py"
    ]


def more_than_torch_in_equations(root: Path) -> list[str]:
    allowed = {"torch", root.name} | sys.stdlib_module_names
    return [
        f"{path.relative_to(root)} imports {name}"
        for path in sources(root)
        if holds_equations(path.relative_to(root))
        for name in sorted(imported_names(path))
        if name.split(".")[0] not in allowed
    ]


def module_of(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root.parent).with_suffix("").parts)


def file_imports(root: Path) -> dict[str, set[str]]:
    """For each module the modules of the package that it imports when it is imported itself."""
    names = {module_of(root, path): path for path in sources(root) if path.name != "__init__.py"}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted = imported_names(path)
        above = {".".join(w.split(".")[: i + 1]) for w in wanted for i in range(w.count(".") + 1)}
        found[name] = (names.keys() & above) - {name}
    return found


def circles(root: Path) -> list[str]:
    """Circles among files, among folders with their sub-folders, and among sub-folders by themselves.

    Imports inside functions and those for type checkers count; what stands at the top is a folder of its own.
    """
    files = file_imports(root)
    found = []
    for folder in (lambda parts: parts, lambda parts: parts[:1], lambda parts: parts[:-1] or parts):
        graph: dict[str, set[str]] = {}
        for name, wanted in files.items():
            here, *there = (".".join(folder(m.split(".")[1:])) for m in (name, *sorted(wanted)))
            graph.setdefault(here, set()).update(set(there) - {here})
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append(" imports ".join(error.args[1]))
    return found


@cache
def code_and_comments(path: Path) -> dict[int, tuple[str, bool]]:
    """For each line its code without blanks and strings, and whether it carries an explanation."""
    lines: dict[int, tuple[str, bool]] = {}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        code, explained = lines.get(token.start[0], ("", False))
        if token.type in (tokenize.NAME, tokenize.OP):
            code += token.string
        elif token.type == tokenize.NUMBER:
            code += str(ast.literal_eval(token.string))
        elif token.type == tokenize.COMMENT:
            explained |= not re.match(r"#\s*(noqa|type:|fmt:|pragma)", token.string)
        lines[token.start[0]] = code, explained
    return lines


def unexplained_safety_constants(root: Path) -> list[str]:
    """Lines with 1e-6, ``.clamp(min=`` or ``clamp_min`` and no comment that names what they protect."""
    return [
        f"{path.relative_to(root)}:{row} needs a comment: {code}"
        for path in sources(root)
        for row, (code, explained) in code_and_comments(path).items()
        if not explained and re.search(r"1e-06|\.clamp\(min=|\.clamp_min_?\(", code)
    ]


def thresholds_without_a_reason(root: Path) -> list[str]:
    """Numbers in capitals that neither a comment on their lines or the one before nor a docstring after explains."""
    found = []
    for path in sources(root):
        tree, lines = nodes(path)[0], code_and_comments(path)
        assert isinstance(tree, ast.Module)
        documented = {
            before.end_lineno
            for before, after in itertools.pairwise(tree.body)
            if isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        }
        for name, value in metrics.assigned(tree):
            if not name.id.isupper() or not metrics.is_number(value):
                continue
            code_above, said_above = lines.get(name.lineno - 1, ("", False))
            own = any(lines.get(row, ("", False))[1] for row in range(name.lineno, value.end_lineno + 1))
            if not (own or (said_above and not code_above) or value.end_lineno in documented):
                found.append(f"{path.relative_to(root)}:{name.lineno} says no reason for {name.id}")
    return found


def prints(root: Path) -> list[str]:
    """Uses of ``print`` outside functions called ``summary``."""
    found = []
    for path in sources(root):
        functions = [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]
        allowed = {inner for node in functions if node.name == "summary" for inner in ast.walk(node)}
        names = [node for node in nodes(path) if isinstance(node, ast.Name) and node.id == "print"]
        found += [f"{path.relative_to(root)}:{node.lineno} prints" for node in names if node not in allowed]
    return found


def drawers_for_everything(root: Path) -> list[str]:
    """Modules and folders whose name says nothing."""
    relative = [path.relative_to(root) for path in sources(root)]
    return [str(path) for path in relative if {"util", "utils"} & set(path.with_suffix("").parts)]


def values_called_at(root: Path) -> list[str]:
    """Values, fields and functions with the name of a preposition, which does not say what they are."""
    return [
        f"{path.relative_to(root)}:{node.lineno} calls something 'at'; say what it is: a place, a point, a problem"
        for path in sources(root)
        for node in nodes(path)
        if "at" in vars(node).values() and not isinstance(node, ast.Constant)
    ]


BROKEN: list[tuple[Rule, str, str]] = [
    (strangers, "helpers.py", ""),
    (strangers, "misc/thing.py", ""),
    (upward_imports, "numerics/linalg.py", "from pyro_evidence.program.log_joint import LogJoint"),
    (upward_imports, "program/log_joint.py", "from pyro_evidence.structure import recognise"),
    (upward_imports, "program/log_joint.py", "def f():\n    import pyro_evidence.infer.revm"),
    (upward_imports, "models/gp.py", "from pyro_evidence.posterior.laplace import LaplacePosterior"),
    (upward_imports, "laplace/type2.py", "from pyro_evidence.mppca.fit import Planes"),
    (upward_imports, "infer/revm.py", "from pyro_evidence.compare.labels import table"),
    (upward_imports, "infer/revm.py", "import pyro_evidence"),
    (upward_imports, "infer/revm.py", "from pyro_evidence import LaplaceEvidence"),
    (upward_imports, "errors.py", "from pyro_evidence.numerics import linalg"),
    (relative_imports, "numerics/newton.py", "from .linalg import cholesky"),
    (relative_imports, "infer/revm.py", "def f():\n    from .. import numerics"),
    (poutine_outside_its_modules, "structure/probes.py", "from pyro import poutine"),
    (poutine_outside_its_modules, "infer/revm.py", "import pyro.poutine as handlers"),
    (poutine_outside_its_modules, "infer/revm.py", "from pyro.poutine.util import prune_subsample_sites"),
    (poutine_outside_its_modules, "plots/posterior.py", "import pyro\ntrace = pyro.poutine.trace"),
    (more_than_torch_in_equations, "numerics/linalg.py", "import numpy as np"),
    (more_than_torch_in_equations, "mixture/evidence.py", "import pyro"),
    (more_than_torch_in_equations, "numerics/linalg.py", "from pyro.distributions import Normal"),
    (more_than_torch_in_equations, "precision/dense.py", "def f():\n    from scipy.special import erf"),
    (
        global_switches_outside_process_state,
        "program/sites.py",
        "import pyro\nwith pyro.validation_enabled(False): x = 1",
    ),
    (global_switches_outside_process_state, "infer/revm.py", "import torch\nwith torch.random.fork_rng(): x = 1"),
    (unexplained_safety_constants, "datasets.py", "x = y + 1e-6"),
    (unexplained_safety_constants, "datasets.py", "# said too early\nx = y + 0.000001"),
    (unexplained_safety_constants, "numerics/linalg.py", "x = y.clamp(min=0.0)"),
    (unexplained_safety_constants, "numerics/linalg.py", "x = y.clamp( min = 0.0)  # noqa: B018"),
    (unexplained_safety_constants, "numerics/linalg.py", "x = y.clamp_min(0.0)"),
    (thresholds_without_a_reason, "datasets.py", "MOST = 60"),
    (thresholds_without_a_reason, "datasets.py", "MOST: int = 60  # noqa: B018"),
    (thresholds_without_a_reason, "datasets.py", "LEAST = 0.1  # of a nat\nMOST = 60\nOTHER = other()  # of all"),
    (thresholds_without_a_reason, "datasets.py", "# said too early\n\nMOST = (1.0, -0.5)"),
    (prints, "infer/revm.py", "def run():\n    print(1)"),
    (prints, "plots/posterior.py", "say = print"),
    (values_called_at, "numerics/linalg.py", "def at(x): pass"),
    (values_called_at, "numerics/linalg.py", "class Mode:\n    at: int"),
    (drawers_for_everything, "utils.py", ""),
    (drawers_for_everything, "infer/utils.py", ""),
    (drawers_for_everything, "numerics/util/shapes.py", ""),
]

KEPT: list[tuple[Rule, str, str]] = [
    (strangers, "infer/revm.py", ""),
    (upward_imports, "__init__.py", "from pyro_evidence.infer.laplace_evidence import LaplaceEvidence"),
    (upward_imports, "structure/probes.py", "from pyro_evidence.program.log_joint import LogJoint"),
    (upward_imports, "infer/revm.py", "from pyro_evidence.fitting.iterate import iterate"),
    (upward_imports, "numerics/linalg.py", "from pyro_evidence.errors import NotPositiveDefinite"),
    (upward_imports, "numerics/linalg.py", "import pyro_evidence_of_somebody_else"),
    (relative_imports, "numerics/newton.py", "from pyro_evidence.numerics.linalg import cholesky"),
    (poutine_outside_its_modules, "program/log_joint.py", "from pyro import poutine"),
    (poutine_outside_its_modules, "models/gp.py", "from pyro import poutine"),
    (poutine_outside_its_modules, "posterior/guide.py", "from pyro import poutine"),
    (poutine_outside_its_modules, "infer/revm.py", "from pyro.infer import MCMC"),
    (more_than_torch_in_equations, "numerics/linalg.py", "import math\nfrom torch import Tensor"),
    (more_than_torch_in_equations, "mixture/fit.py", "import pyro"),
    (circles, "laplace/type2.py", "from pyro_evidence.numerics import newton"),
    (unexplained_safety_constants, "datasets.py", "x = y + 1e-6  # keeps x > 0"),
    (unexplained_safety_constants, "datasets.py", 'x = "pass curvature=damped(exact_hessian, 1e-6)"'),
    (unexplained_safety_constants, "datasets.py", "x = y.clamp(min=0.0)  # a variance is >= 0"),
    (unexplained_safety_constants, "datasets.py", "x = 1e-60 + y.clamp(max=1.0)"),
    (thresholds_without_a_reason, "datasets.py", "MOST = 60  # steps"),
    (thresholds_without_a_reason, "datasets.py", "# Of steps.\nMOST = 60"),
    (thresholds_without_a_reason, "datasets.py", "MOST = (\n    1e-6  # of a variance\n)"),
    (thresholds_without_a_reason, "datasets.py", 'MOST = 60\n"""Steps."""'),
    (thresholds_without_a_reason, "datasets.py", "QUIET = Stop(num_steps=3)\nname = 60\nNAME = 'x'"),
    (prints, "posterior/laplace.py", "class P:\n    def summary(self):\n        print(1)"),
    (prints, "posterior/laplace.py", "from pyro.infer.mcmc.util import print_summary"),
    (values_called_at, "numerics/linalg.py", 'x = "not at a mode"  # at it'),
    (drawers_for_everything, "infer/revm.py", "from pyro.infer.mcmc.util import print_summary"),
]

RULES = sorted({rule for rule, _, _ in BROKEN} | {circles}, key=lambda rule: rule.__name__)


def small_tree(folder: Path, name: str, text: str) -> Path:
    """A package of one module."""
    root = folder / "pyro_evidence"
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return root


def test_there_is_a_package_to_look_at() -> None:
    assert PACKAGE / "__init__.py" in sources(PACKAGE)


@pytest.mark.parametrize("rule", RULES)
def test_package_keeps(rule: Rule) -> None:
    assert rule(PACKAGE) == []


@pytest.mark.parametrize(("rule", "name", "text"), BROKEN, ids=[rule.__name__ for rule, _, _ in BROKEN])
def test_breach_is_seen(rule: Rule, name: str, text: str, tmp_path: Path) -> None:
    assert len(rule(small_tree(tmp_path, name, text))) == 1


@pytest.mark.parametrize(("first", "second"), [("laplace/a.py", "laplace/b.py"), ("laplace/a.py", "models/b.py")])
def test_a_circle_is_seen(first: str, second: str, tmp_path: Path) -> None:
    dotted = [name[:-3].replace("/", ".") for name in (first, second)]
    root = small_tree(tmp_path, first, f"import pyro_evidence.{dotted[1]}")
    (root / second).parent.mkdir(exist_ok=True)
    (root / second).write_text(f"import pyro_evidence.{dotted[0]}")
    assert circles(root)


def test_a_circle_of_sub_folders_for_type_checkers_is_seen(tmp_path: Path) -> None:
    root = small_tree(tmp_path, "laplace/a.py", "def f():\n    from pyro_evidence.laplace.inside import b")
    (root / "laplace/inside").mkdir()
    (root / "laplace/inside/b.py").write_text("")
    assert circles(root) == []
    (root / "laplace/inside/c.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pyro_evidence.laplace import d"
    )
    (root / "laplace/d.py").write_text("")
    assert circles(root) == ["laplace imports laplace.inside imports laplace"]


@pytest.mark.parametrize(("rule", "name", "text"), KEPT, ids=[rule.__name__ for rule, _, _ in KEPT])
def test_no_false_alarm(rule: Rule, name: str, text: str, tmp_path: Path) -> None:
    assert rule(small_tree(tmp_path, name, text)) == []
