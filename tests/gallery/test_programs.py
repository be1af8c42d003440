"""Other people's programs with one line changed, the engine: moments and what the summary says, or the refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence import Stop
from tests.cases.expect import refusal, says, summary_of
from tests.gallery.programs import (
    flat_priors,
    further_models,
    numpyro_examples,
    pymc_examples,
    pyro_examples,
    rethinking,
)
from tests.gallery.programs.program import Program

pytestmark = pytest.mark.slow  # two minutes together; run by ARGS="-m slow tests/gallery"

TABLES = (pyro_examples, numpyro_examples, rethinking, pymc_examples, flat_priors, further_models)
PROGRAMS = {name: program for table in TABLES for name, program in table.PROGRAMS.items()}
STORED = json.loads((Path(__file__).parents[1] / "oracles" / "gallery.json").read_text())
ABOUT_MOMENTS = ("take draws from posterior", "run NUTS on posterior.model")
NOT_KNOWN = ("may be off by", "is not known")
ABOUT_EVIDENCE = ("k-hat is above", "too low by importance", "too high by importance")
ALARMS = (*ABOUT_MOMENTS, *ABOUT_EVIDENCE, "different modes")
NUM_DRAWS = 4000


def entries() -> list[Any]:
    """Every program that has a reference or a closed form, or is refused."""
    found = []
    for name, program in PROGRAMS.items():
        if name in STORED or program.refused or program.closed_form:
            marks = [pytest.mark.slow] if program.slow else []
            if program.pending:
                marks.append(pytest.mark.xfail(strict=True, reason=program.pending))
            found.append(pytest.param(name, id=name, marks=marks))
    return found


def shifts(draws: dict[str, Tensor], stored: dict[str, Any]) -> tuple[float, float]:
    """Largest distance of a mean in the reference's deviations, and largest ratio of deviations, less one.

    Of the sites that both have; elements that are constant, as in a Cholesky factor, are left out.
    """
    far, wide = 0.0, 0.0
    common = draws.keys() & stored.keys()
    assert common
    for site in common:
        mean, sd = (torch.tensor(stored[site][part]) for part in ("mean", "sd"))
        found, varies = draws[site].reshape(len(draws[site]), -1), sd > 0.0
        assert found.shape[1:] == mean.shape
        far = max(far, float(((found.mean(0) - mean).abs() / sd)[varies].max()))
        wide = max(wide, float((found.std(0) / sd - 1.0).abs()[varies].max()))
    return far, wide


def test_references_are_worth_enough_draws() -> None:
    for name, entry in STORED.items():
        for site in entry["sites"].values():
            assert max(site.get("r_hat", [1.0])) < 1.03, name
            assert min((n for n in site.get("n_eff", []) if n), default=400) >= 400, name


def test_there_are_enough() -> None:
    of_stan = flat_priors.PROGRAMS.keys() & STORED.keys()
    assert len(of_stan) >= 10 and len(entries()) - len(of_stan) >= 60


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", entries())
def test_a_program_has_the_moments_of_its_reference_or_says_not(name: str) -> None:
    """No alarm where means are within a tenth of a deviation and deviations within 10 %; one beyond three tenths.

    Under Stan's flat priors means are within a fifth of a deviation, and deviations within 15 %.
    """
    program: Program = PROGRAMS[name]
    fit = program.engine(program.model, stop=Stop(progress=False), **program.settings)
    if program.refused:
        says(refusal(lambda: fit.run(*program.data())), program.refused)
        return
    posterior = fit.run(*program.data())
    if program.closed_form:
        assert float(posterior.log_evidence) == pytest.approx(program.closed_form(*program.data()), abs=1e-6)
        return
    said, stored = summary_of(posterior), STORED[name]
    sites = {site: moments for site, moments in stored["sites"].items() if site not in program.heavy}
    far, wide = shifts(posterior.get_samples(NUM_DRAWS, seed=0), sites)
    says(said, *program.says)
    limits = (0.2, 0.15) if name in flat_priors.PROGRAMS else (0.3, 0.3)
    if any(alarm in said for alarm in ABOUT_MOMENTS):
        assert far > 0.1 or wide > 0.1, (far, wide)
    elif not any(doubt in said for doubt in NOT_KNOWN):
        assert far < limits[0] and wide < limits[1], (far, wide)
    if "log_evidence" in stored and not any(alarm in said for alarm in ABOUT_EVIDENCE):
        assert float(posterior.log_evidence) == pytest.approx(stored["log_evidence"], abs=0.15)
    assert ("different modes" in said) == ("different modes" in program.says)
