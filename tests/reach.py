"""Which tests reach a module: ``make reach ARGS=laplace/pruning.py``.

Reads the coverage contexts that ``make reach`` records once, in ``build/reach``; ``make clean`` removes them.
"""

import sys
from collections import Counter
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "build" / "reach"


def tests_of(data: CoverageData, module: Path) -> Counter[str]:
    """How many lines of the module each test runs, imports apart."""
    lines = data.contexts_by_lineno(str(module))
    return Counter(context.partition("|")[0] for contexts in lines.values() for context in contexts if context)


def report(data: CoverageData, names: list[str]) -> str:
    """For each module its tests, those that run most of its lines first; of all modules those that none reaches."""
    package = ROOT / "pyro_evidence"
    if names:
        found = {name: tests_of(data, package / name) for name in names}
        return "\n".join(f"{name}\n{_table(tests)}" for name, tests in found.items())
    modules = [path for path in sorted(package.rglob("*.py")) if path.name != "__init__.py"]
    return "".join(f"{len(tests_of(data, m)):6d} tests  {m.relative_to(package)}\n" for m in modules)


def _table(found: Counter[str]) -> str:
    return "".join(f"{lines:6d} lines  {test}\n" for test, lines in found.most_common())


if __name__ == "__main__":
    coverage_data = CoverageData(str(RECORDED))
    coverage_data.read()
    sys.stdout.write(report(coverage_data, sys.argv[1:]))
