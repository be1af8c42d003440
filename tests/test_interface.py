"""The page of the interface says what the signatures say, and a word means one thing wherever it is asked for.

``python -m tests.test_interface`` writes the two tables of ``docs/interface.md`` anew.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pyro import distributions as dist
from pyro import param, plate, sample
from torch.distributions import constraints

import pyro_evidence
from pyro_evidence import LaplaceEvidence, Start, Stop, evidence_check, infer, mixture, prbf
from pyro_evidence.display import Table

PAGE = Path(__file__).parents[1] / "docs" / "interface.md"
ENGINES = ("LaplaceEvidence", "EvidenceEM", "RVM", "VRVM", "REVM", "OverlapEM", "LaplaceKernel", "LaplaceNUTS")
CALLS = ("run", "run_chunks", "step", "resume", "posterior")
BESIDE = (
    *("bridge_sampling", "importance_sampling", "tempered_smc", "thermodynamic_integration", "thames", "find_modes"),
    *("compare", "compare_evidence", "explore", "savage_dickey", "sbc", "committee", "class_conditional"),
    *("run_many", "bootstrap", "leave_one_group_out"),
    *("to_inference_data", "to_datatree", "predict_latent"),
)
ONE_WORD = {  # a word that is not in use -> the one that is
    "of": "posterior or target",
    "updates": "update",
    "num_draws": "num_samples",
    "restarts": "start",
    "every": "checkpoint_interval",
    "integral": "quadrature_tol",
    "missing": "marginalised(model)",
    "random_seed": "seed",
}


def settings_of(function: Any) -> list[str]:
    """Names of the parameters, those that have no default first as they stand."""
    parameters = inspect.signature(function).parameters.values()
    return [str(p).split(":")[0].split("=")[0].strip() for p in parameters if p.name != "self"]


def engines() -> str:
    """A row for each engine: its settings and what can be called."""
    head = ["engine", "settings", *CALLS]
    rows = [head, ["---"] * len(head)]
    for name in ENGINES:
        engine = getattr(pyro_evidence, name)
        here = ["yes" if hasattr(engine, call) else "" for call in CALLS]
        rows.append([f"`{name}`", ", ".join(f"`{s}`" for s in settings_of(engine.__init__)), *here])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def beside() -> str:
    """A row for each function beside the engines."""
    rows = [["function", "parameters"], ["---", "---"]]
    for name in BESIDE:
        rows.append([f"`{name}`", ", ".join(f"`{s}`" for s in settings_of(getattr(pyro_evidence, name)))])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def written(text: str) -> str:
    """The page with its tables, each between two comments, as the signatures are now."""
    for name, table in (("engines", engines()), ("beside", beside())):
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(\n<!-- end -->)",
            lambda found, table=table: f"{found[1]}\n{table}\n{found[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


def test_the_page_has_the_signatures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert engines() in text and beside() in text
    assert written(text) == text


def test_the_page_has_every_public_name_that_fits_or_looks_at_a_fit() -> None:
    """A new engine or function has a row, or is a class of results, settings, errors or curvatures."""
    others = {
        "FitTable",
        "ImportancePosterior",
        "LaplaceMarginal",
        "LaplacePosterior",
        "MultimodalPosterior",
        "NestedPosterior",
        "Start",
        "Status",
        "Stop",
        "StructurePosterior",
    }
    others |= {"block_diagonal", "damped", "diagonal", "exact_hessian", "gauss_newton"}
    errors = {n for n in pyro_evidence.__all__ if hasattr(pyro_evidence.errors, n)}
    assert set(pyro_evidence.__all__) == {*ENGINES, *BESIDE, *others, *errors}
    assert {*ENGINES, "LaplaceMarginal"} <= set(infer.__all__)


def public() -> dict[str, Any]:
    """Functions and classes by the name under which they are had."""
    compare = importlib.import_module("pyro_evidence.compare")  # at the top the name is the function's
    modules = (pyro_evidence, compare, evidence_check, infer, mixture, prbf)
    return {f"{m.__name__}.{n}": getattr(m, n) for m in modules for n in m.__all__}


def callables() -> list[str]:
    errors = {n for n, x in public().items() if inspect.isclass(x) and issubclass(x, Exception)}
    return sorted(n for n, x in public().items() if callable(x) and n not in errors)


@pytest.mark.parametrize("name", callables())
def test_one_word_for_one_thing(name) -> None:
    value = public()[name]
    if value is Start:  # where the word has its home
        return
    try:
        parameters = inspect.signature(value).parameters
    except ValueError:
        return
    if dict in getattr(value, "__mro__", ()) or name.rpartition(".")[2].endswith("Posterior"):
        return
    assert not {n: ONE_WORD[n] for n in parameters if n in ONE_WORD}


@pytest.mark.parametrize("name", [n for n in ENGINES if "start" in settings_of(getattr(pyro_evidence, n).__init__)])
def test_one_start_and_one_stop(name) -> None:
    parameters = inspect.signature(getattr(pyro_evidence, name).__init__).parameters
    assert type(parameters["start"].default) is Start and type(parameters["stop"].default) is Stop
    assert list(inspect.signature(Start).parameters) == ["restarts", "seed", "values", "tour", "structures"]


@pytest.mark.parametrize("name", [n for n in BESIDE if "seed" in settings_of(getattr(pyro_evidence, n))])
def test_a_seed_is_a_number_or_none(name) -> None:
    seed = inspect.signature(getattr(pyro_evidence, name)).parameters["seed"]
    assert seed.default == 0 and seed.annotation in (int | None, "int | None")


def test_without_a_seed_it_is_another_each_time() -> None:
    state = torch.get_rng_state()
    assert len({Start(seed=None).seed for _ in range(20)}) > 1
    assert torch.equal(torch.get_rng_state(), state)


def test_every_table_is_a_method() -> None:
    for name, value in public().items():
        for kind in ("table", "site_table"):
            found = inspect.getattr_static(value, kind, None)
            assert found is None or inspect.isfunction(found), f"{name}.{kind}"
            assert found is None or inspect.signature(found).return_annotation in (Table, "Table")


def hierarchy(x: torch.Tensor) -> None:
    """A param, and a mean about a level."""
    precision = param("precision", torch.tensor(1.0), constraint=constraints.positive)
    level = sample("level", dist.Normal(0.0, 3.0))
    mean = sample("mean", dist.Normal(level, 1.0))
    with plate("rows", len(x)):
        sample("x", dist.Normal(mean, precision**-0.5), obs=x)


@pytest.mark.parametrize(
    ("maximise", "moved", "sites"),
    [(None, True, {"precision"}), (["level"], True, {"precision", "level"}), ((), False, {"precision"})],
)
def test_what_is_maximised(maximise, moved, sites) -> None:
    """None: the params; names: the params and these sites; (): neither."""
    x = torch.tensor([0.0, 3.0, 6.0, 9.0, 12.0])
    found = LaplaceEvidence(hierarchy, marginalise=(), maximise=maximise, stop=Stop(progress=False)).run(x)
    assert set(found.hyperparameters) == sites
    assert (float(found.hyperparameters["precision"]) != 1.0) is moved


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
