"""The formulas within a formula: which there are, and their probabilities by fits of each."""

import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from pyro_evidence import BadInput, LaplaceEvidence, Stop, explore
from pyro_evidence.models.formula import mixed
from pyro_evidence.models.formula.design import formulas_within

QUIET = partial(LaplaceEvidence, stop=Stop(progress=False))
PRIORS = {"b": "Normal(0, 2)", "sigma": "HalfNormal(2)"}


def frame() -> pd.DataFrame:
    """A main effect of ``a``, an interaction of ``a`` and ``b``, nothing of ``c``; a gap in ``c``."""
    random = np.random.default_rng(0)
    found = pd.DataFrame({name: random.normal(size=60) for name in "abc"})
    found["g"] = [str(i % 6) for i in range(60)]
    found["y"] = 1.0 + found.a + 0.8 * found.a * found.b + random.normal(size=60)
    found.loc[0, "c"] = np.nan
    return found


def test_an_interaction_comes_with_its_margins() -> None:
    """Of three factors: each set of main effects, with any of the interactions among these."""
    terms, within, alike = formulas_within("y ~ (a + b + c)^2 + (1 | g)", frame().dropna())
    assert tuple(terms) == ("a", "b", "c", "a:b", "a:c", "b:c") and alike
    assert len(within) == sum(math.comb(3, k) * 2 ** math.comb(k, 2) for k in range(4))
    assert all(text.endswith(" + (1 | g)") for text in within)
    assert all(keep[0] and keep[1] for keep in within.values() if keep[3])


def test_what_is_no_choice_stays() -> None:
    rows = frame().dropna()
    assert list(formulas_within("y ~ 0 + a + offset(c) + s(b, k=5); sigma ~ b", rows)[1]) == [
        "y ~ 0 + offset(c) + s(b, k=5); sigma ~ b",
        "y ~ 0 + offset(c) + a + s(b, k=5); sigma ~ b",
    ]
    without_margin = formulas_within("y ~ a + a:b", rows)[1]
    assert list(without_margin.values()) == [(False, False), (True, False), (True, True)]


def test_probabilities_are_those_of_fits_of_each_formula_on_the_same_rows() -> None:
    rows = frame()
    found = explore("y ~ (a + b)^2 + c", rows, engine=QUIET, priors=PRIORS)
    expected = found.log_evidences
    assert len(found._members) == 3  # the others together with these
    for place, text in list(enumerate(formulas_within("y ~ a * b + c", rows.dropna())[1]))[::3]:
        model, data = mixed(text, rows.dropna(), priors=PRIORS)
        assert float(expected[place]) == pytest.approx(float(QUIET(model).run(*data).log_evidence), abs=1e-8)
    torch.testing.assert_close(found.probabilities, expected.softmax(0), atol=1e-6, rtol=0.0)
    assert float(found.log_evidence) == pytest.approx(float(expected.logsumexp(0)) - math.log(len(expected)), abs=1e-6)
    assert float(found.inclusion("a:b")) > 0.9 > 0.5 > float(found.inclusion("c"))
    assert found.structure(0) == {"a": 1.0, "b": 1.0, "c": 0.0, "a:b": 1.0}
    means = torch.stack([found.member(k).predict(rows.dropna().head(4)) for k in range(len(expected))])
    averaged = found.probabilities[found.order].to(means) @ means
    torch.testing.assert_close(found.predict(rows.dropna().head(4)), averaged, atol=0.02, rtol=0.0)


def test_columns_of_levels_hang_on_what_else_is_there() -> None:
    """Without a constant the first factor has a column for each level; so has ``g`` in ``a:g`` without ``g`` itself."""
    rows = frame().dropna()
    assert formulas_within("y ~ a * g", rows)[0]["g"] == tuple(f"g[{i}]" for i in range(1, 6))
    assert [formulas_within(text, rows)[2] for text in ("y ~ a * g", "y ~ 0 + a + g", "y ~ a + a:g")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("formula", "said"),
    [("y ~ 1 + (1 | g)", "0 fixed terms"), ("y ~ (a + b + c)^2 + a:nowhere", "nowhere"), ("y ~", "lacks a side")],
)
def test_formulas_without_a_choice_are_refused(formula: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        explore(formula, frame(), engine=QUIET)


def test_a_prior_names_formulas() -> None:
    with pytest.raises(BadInput, match="expected a positive number for each of y ~ 1, y ~ 1"):
        explore("y ~ a", frame(), engine=QUIET, prior={"a": 1.0})


def test_draws_by_the_name_of_a_site_are_of_the_site() -> None:
    random = np.random.default_rng(1)
    named = pd.DataFrame({"sigma": random.normal(size=40), "x": random.normal(size=40)})
    named["y"] = 1.0 + 0.8 * named.x + 0.3 * random.normal(size=40)
    draws = explore("y ~ x + sigma", named, engine=QUIET).get_samples(20, seed=0)
    assert len(draws["sigma"].unique()) == 20 and 0.2 < float(draws["sigma"].mean()) < 0.4
    assert set(draws["x"].unique().tolist()) <= {0.0, 1.0}
