"""Importing the package costs little, and every public name is there when it is asked for."""

import ast
import importlib
import subprocess
import sys
from types import FunctionType, ModuleType

import pytest

import pyro_evidence

FOLDERS = ("infer", "compare", "evidence_check", "mixture", "relevance", "prbf", "sklearn", "models.gmrf", "posterior")
PACKAGES = [pyro_evidence, *(importlib.import_module(f"pyro_evidence.{folder}") for folder in FOLDERS)]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_every_name_is_what_its_module_has(package) -> None:
    assert set(package.on_demand) >= set(package.__all__) != set()
    for name, path in package.on_demand.items():
        module = importlib.import_module(path)
        assert getattr(package, name) is getattr(module, name, module)
    assert [name for name in dir(package) if not name.startswith("_")] == sorted(package.__all__)


def test_one_engine_imports_no_other_a_fit_no_algebra_nuts_no_compiler_and_folders_are_there_unasked() -> None:
    """Of the lines of the README tests/test_wheel.py says the same; no module hides the function of its name."""
    others = ("mixture", "mppca", "prbf", "relevance", "compare", "evidence_check")
    code = (
        "import sys, torch, pyro_evidence; from pyro_evidence import LaplaceEvidence; print(list(sys.modules)); "
        "print(pyro_evidence.models.basis.Linear, pyro_evidence.prbf.choose_alpha); "
        "from pyro_evidence.models.basis import Linear; from pyro_evidence.models.classifier import classifier; "
        "X = torch.linspace(-1.0, 1.0, 20)[:, None]; "
        "p = LaplaceEvidence(classifier(Linear())).run(X, (X[:, 0].sin() > 0.1).float()); "
        "print('sympy' in sys.modules); "
        "from pyro.infer import MCMC; kernel = pyro_evidence.LaplaceNUTS(p); "
        "MCMC(kernel, num_samples=2, warmup_steps=2, disable_progbar=True).run(); "
        "print('torch._dynamo' in sys.modules); "
        "import pyro_evidence.compare.sbc, pyro_evidence.infer.class_conditional as module; "
        "from pyro_evidence import compare, sbc; from pyro_evidence.infer import class_conditional; "
        "print(type(compare).__name__, type(sbc).__name__, type(class_conditional).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    imported, folders, algebra, compiler, kinds = done.stdout.splitlines()
    found = set(ast.literal_eval(imported))
    assert "pyro_evidence.infer.laplace_evidence" in found
    assert not found & {f"pyro_evidence.{other}" for other in others}
    assert algebra == "False"  # torch does, which takes half a second, where it is given a cotangent
    assert compiler == "False"  # torch does, three seconds, where it writes down a function by itself
    assert "models.basis.Linear" in folders
    assert kinds == " ".join([FunctionType.__name__] * 3)


def test_what_is_not_there_is_missing() -> None:
    for package in PACKAGES:
        assert isinstance(package, ModuleType) and not hasattr(package, "nothing_of_the_kind")
        assert not hasattr(package, "_private")
