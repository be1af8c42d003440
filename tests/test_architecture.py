"""The house rules, read off the package's source text.

A rule is a function from the package's folder to a list of complaints. Each is applied to the package, to
small trees that break it and to small trees that keep it.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "pyro_evidence"

# A part may import those before it; the order inside a layer counts as well.
LAYERS = [
    ["errors"],
    ["arguments"],
    ["ops"],
    "contraction sites failed_run".split(),
    "checks parameters constants program predictors probes groups density network_density".split(),
    "gaussian_latent structure pruned laplace laplace_rows".split(),
    "simulate weights streamed gaps background mixture_kernels mixture_structure".split(),
    ["mppca_structure"],
    "models guide latent_prediction laplace_marginal archive report posterior mixture_fit mixture_posterior".split(),
    ["mppca_laplace", "mppca_posterior"],
    ["prbf_posterior"],
    "linear_newton axis_priors axes_state quadratic eigen_state reparametrised".split(),
    ["posterior_axes", "posterior_revm", "posterior_rvm"],
    ["infer"],
    "diagnostics datasets chains interop evidence_check compare_evidence committee labels tables runs held_out".split(),
    "compare sbc plots plots_compare".split(),
    ["learning_curve", "early_stopping", "plots_mixture", "sklearn"],
]
ORDER = [name for layer in LAYERS for name in layer]
RUN_MODELS = {
    "constants",
    "program",
    "simulate",
    "models",
    "guide",
    "laplace_marginal",
    "posterior",
    "reparametrised",
    "runs",
    "compare",
}
MAX_LINES = 400

Rule = Callable[[Path], list[str]]


def sources(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def part(root: Path, path: Path) -> str:
    """The name in ORDER that a file belongs to."""
    return path.relative_to(root).parts[0].removesuffix(".py")


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


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
        isinstance(node, ast.Attribute) and ast.unparse(node) == "pyro.poutine" for node in nodes(path)
    )


def poutine_outside_its_modules(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)} uses pyro.poutine"
        for path in sources(root)
        if part(root, path) not in RUN_MODELS and uses_poutine(path)
    ]


def more_than_torch_in_ops(root: Path) -> list[str]:
    allowed = {"torch", root.name} | sys.stdlib_module_names
    return [
        f"{path.relative_to(root)} imports {name}"
        for path in sources(root)
        if part(root, path) == "ops"
        for name in sorted(imported_names(path))
        if name.split(".")[0] not in allowed
    ]


def long_files(root: Path) -> list[str]:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(root)}
    long = [path for path, length in lengths.items() if length > MAX_LINES]
    return [f"{path.relative_to(root)} has {lengths[path]} lines" for path in long]


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


def prints(root: Path) -> list[str]:
    """Uses of ``print`` outside functions called ``summary``."""
    found = []
    for path in sources(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        allowed = {inner for node in functions if node.name == "summary" for inner in ast.walk(node)}
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "print"]
        found += [f"{path.relative_to(root)}:{node.lineno} prints" for node in names if node not in allowed]
    return found


def drawers_for_everything(root: Path) -> list[str]:
    """Modules and folders whose name says nothing."""
    relative = [path.relative_to(root) for path in sources(root)]
    return [str(path) for path in relative if {"util", "utils"} & set(path.with_suffix("").parts)]


BROKEN: list[tuple[Rule, str, str]] = [
    (strangers, "helpers.py", ""),
    (strangers, "misc/thing.py", ""),
    (upward_imports, "ops/linalg.py", "from pyro_evidence.program import LogJoint"),
    (upward_imports, "program.py", "from pyro_evidence import structure"),
    (upward_imports, "program.py", "def f():\n    import pyro_evidence.infer.revm"),
    (upward_imports, "models/gp.py", "from pyro_evidence.posterior import LaplacePosterior"),
    (upward_imports, "infer/revm.py", "from pyro_evidence.compare import table"),
    (upward_imports, "infer/revm.py", "import pyro_evidence"),
    (upward_imports, "infer/revm.py", "from pyro_evidence import LaplaceEvidence"),
    (upward_imports, "errors.py", "from pyro_evidence.ops import linalg"),
    (relative_imports, "ops/newton.py", "from .linalg import cholesky"),
    (relative_imports, "infer/revm.py", "def f():\n    from .. import ops"),
    (poutine_outside_its_modules, "structure.py", "from pyro import poutine"),
    (poutine_outside_its_modules, "infer/revm.py", "import pyro.poutine as handlers"),
    (poutine_outside_its_modules, "infer/revm.py", "from pyro.poutine.util import prune_subsample_sites"),
    (poutine_outside_its_modules, "plots.py", "import pyro\ntrace = pyro.poutine.trace"),
    (more_than_torch_in_ops, "ops/linalg.py", "import numpy as np"),
    (more_than_torch_in_ops, "ops/linalg.py", "import pyro"),
    (more_than_torch_in_ops, "ops/linalg.py", "from pyro.distributions import Normal"),
    (more_than_torch_in_ops, "ops/linalg.py", "def f():\n    from scipy.special import erf"),
    (long_files, "infer/revm.py", "x = 1\n" * (MAX_LINES + 1)),
    (unexplained_safety_constants, "program.py", "x = y + 1e-6"),
    (unexplained_safety_constants, "program.py", "# said too early\nx = y + 0.000001"),
    (unexplained_safety_constants, "ops/linalg.py", "x = y.clamp(min=0.0)"),
    (unexplained_safety_constants, "ops/linalg.py", "x = y.clamp( min = 0.0)  # noqa: B018"),
    (unexplained_safety_constants, "ops/linalg.py", "x = y.clamp_min(0.0)"),
    (prints, "infer/revm.py", "def run():\n    print(1)"),
    (prints, "plots.py", "say = print"),
    (drawers_for_everything, "utils.py", ""),
    (drawers_for_everything, "infer/utils.py", ""),
    (drawers_for_everything, "ops/util/shapes.py", ""),
]

KEPT: list[tuple[Rule, str, str]] = [
    (strangers, "infer/iterate.py", ""),
    (upward_imports, "__init__.py", "from pyro_evidence.infer.laplace_evidence import LaplaceEvidence"),
    (upward_imports, "structure.py", "from pyro_evidence.program import LogJoint"),
    (upward_imports, "infer/revm.py", "from pyro_evidence.infer.iterate import iterate"),
    (upward_imports, "ops/linalg.py", "from pyro_evidence.errors import NotPositiveDefinite"),
    (upward_imports, "ops/linalg.py", "import pyro_evidence_of_somebody_else"),
    (relative_imports, "ops/newton.py", "from pyro_evidence.ops.linalg import cholesky"),
    (poutine_outside_its_modules, "program.py", "from pyro import poutine"),
    (poutine_outside_its_modules, "models/gp.py", "from pyro import poutine"),
    (poutine_outside_its_modules, "infer/revm.py", "from pyro.infer import MCMC"),
    (more_than_torch_in_ops, "ops/linalg.py", "import math\nfrom torch import Tensor"),
    (more_than_torch_in_ops, "program.py", "import pyro"),
    (long_files, "infer/revm.py", "x = 1\n" * MAX_LINES),
    (unexplained_safety_constants, "program.py", "x = y + 1e-6  # keeps x > 0"),
    (unexplained_safety_constants, "program.py", 'x = "pass curvature=damped(exact_hessian, 1e-6)"'),
    (unexplained_safety_constants, "program.py", "x = y.clamp(min=0.0)  # a variance is >= 0"),
    (unexplained_safety_constants, "program.py", "x = 1e-60 + y.clamp(max=1.0)"),
    (prints, "posterior.py", "class P:\n    def summary(self):\n        print(1)"),
    (prints, "posterior.py", "from pyro.infer.mcmc.util import print_summary"),
    (drawers_for_everything, "infer/revm.py", "from pyro.infer.mcmc.util import print_summary"),
]

RULES = sorted({rule for rule, _, _ in BROKEN}, key=lambda rule: rule.__name__)


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


@pytest.mark.parametrize(("rule", "name", "text"), KEPT, ids=[rule.__name__ for rule, _, _ in KEPT])
def test_no_false_alarm(rule: Rule, name: str, text: str, tmp_path: Path) -> None:
    assert rule(small_tree(tmp_path, name, text)) == []
