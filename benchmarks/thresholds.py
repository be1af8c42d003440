"""Which fits does a threshold move?  Each number in capitals, three times as large and a third of it.

    python benchmarks/thresholds.py laplace/type2.py            # all thresholds of a module
    python benchmarks/thresholds.py laplace/type2.py:FARTHEST   # one of them
    python benchmarks/thresholds.py                             # all of the package: days; by night, on many machines

Prints a line for each threshold and factor: the fits of ``portable.py`` whose decision or log evidence (beyond 1e-6
nats) is another one, and the time of all fits beside that without a change.  A threshold that moves neither a fit nor
the time, here and in the suite, wants a reason in a comment - an inequality, a paper - or goes.

The number is changed in the source text as the module is imported, so that whatever is derived from it follows.
"""

import ast
import json
import os
import subprocess
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
FACTORS = (3.0, 1.0 / 3.0)
MOVED = 1e-6  # nats


class Scaled(ast.NodeTransformer):
    """The assignment to one name at the top of a module, its value times a factor; whole numbers stay whole."""

    def __init__(self, name: str, factor: float) -> None:
        self.name, self.factor = name, factor

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if any(isinstance(target, ast.Name) and target.id == self.name for target in node.targets):
            scaled = ast.parse(
                f"(lambda v: tuple(type(x)(x * {self.factor}) for x in v) if isinstance(v, tuple) "
                f"else max(1, round(v * {self.factor})) if isinstance(v, int) else v * {self.factor})(0)",
                mode="eval",
            ).body
            assert isinstance(scaled, ast.Call)
            scaled.args = [node.value]
            node.value = scaled
        return ast.fix_missing_locations(node)


class Changed(SourceFileLoader):
    """A module with one number changed."""

    change: Scaled

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        tree = ast.parse(data)
        tree.body = [self.change.visit(node) if isinstance(node, ast.Assign) else node for node in tree.body]
        return compile(tree, path, "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # never the code that is cached without the change


class Finder(MetaPathFinder):
    """Hands out the changed module in place of the plain one."""

    def __init__(self, module: str, change: Scaled) -> None:
        self.module, self.change = module, change

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        loader = Changed(fullname, spec.origin)
        loader.change = self.change
        spec.loader = loader
        assert isinstance(spec.loader, Loader)
        return spec


def measure(module: str, name: str, factor: float) -> None:
    """Print what the fits come to with one number changed; of none where the name is empty."""
    if name:
        sys.meta_path.insert(
            0, Finder(f"pyro_evidence.{module.removesuffix('.py').replace('/', '.')}", Scaled(name, factor))
        )
    import portable

    portable.measure()


def fits(module: str = "", name: str = "", factor: float = 1.0) -> tuple[dict[str, Any], float]:
    """The 23 fits by a process of their own, and its seconds."""
    begun = time.perf_counter()
    command = [sys.executable, __file__, "--measure", module, name, str(factor)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    found = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    return found, time.perf_counter() - begun


def moved(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Names of the fits that another decision, another log evidence or no result tells apart."""
    return [
        name
        for name, row in before.items()
        if name not in now or now[name]["decided"] != row["decided"] or abs(now[name]["height"] - row["height"]) > MOVED
    ]


def main() -> None:
    """A line for each threshold asked for, and each factor."""
    import metrics

    module, _, name = (sys.argv[1] if len(sys.argv) > 1 else "").partition(":")
    places = [place.partition(" ") for place in metrics.thresholds(metrics.parsed(metrics.PACKAGE))]
    before, seconds = fits()
    for where, _, text in places:
        path = where.partition(":")[0].removeprefix("pyro_evidence/")
        own = text.partition(" = ")[0]
        if path.startswith(module) and name in ("", own):
            for factor in FACTORS:
                now, taken = fits(path, own, factor)
                names = "; ".join(moved(now, before)) or "no fit"
                print(f"{path} {text}, times {factor:.2g}: {names}; {taken / seconds:.2f} of the time", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        main()
