"""A formula's text in its parts: the rules of lme4 for groups, and where a sign is part of a name or a function."""

import pytest

from pyro_evidence.errors import BadInput
from pyro_evidence.models.formula.terms import Varying, parsed

GROUPINGS = {
    "(1 | g)": [("g",)],
    "(1 | a / b / c)": [("a",), ("a", "b"), ("a", "b", "c")],
    "(1 | a * b)": [("a",), ("b",), ("a", "b")],
    "(1 | a:b)": [("a", "b")],
    "(1 | a + b:c)": [("a",), ("b", "c")],
    "(1 | `my group`)": [("my group",)],
    "(1 | C(g))": [("g",)],
    "(1 | g) + (1 | g)": [("g",)],
}


@pytest.mark.parametrize("text", GROUPINGS)
def test_groups_are_those_of_lme4(text: str) -> None:
    assert [varying.columns for varying in parsed(f"y ~ x + {text}")[""].varying] == GROUPINGS[text]


@pytest.mark.parametrize(
    ("right", "fixed", "varying"),
    [
        ("x", "x", ()),
        ("x + (x | g)", "x", (Varying("x", ("g",)),)),
        ("(0 + x || g) + x:z", "x:z", (Varying("0 + x", ("g",), "diag"),)),
        ("(1 | g)", "1", (Varying("1", ("g",)),)),
        ("x - 1 + (1 | g)", "x - 1", (Varying("1", ("g",)),)),
        ("np.log(x + 1) + (x + z) * v", "np.log(x + 1) + (x + z) * v", ()),
        ("`a - b` + x + (`a - b` | g)", "`a - b` + x", (Varying("`a - b`", ("g",)),)),
    ],
)
def test_what_varies_is_told_from_what_does_not(right: str, fixed: str, varying: tuple[Varying, ...]) -> None:
    found = parsed(f"y ~ {right}")[""]
    assert (found.response, found.fixed, found.varying) == ("y", fixed, varying)


def test_words_are_columns_and_functions_without_their_quotes() -> None:
    assert parsed("log(y) ~ `x 1` + np.exp(z) + (w | a / b)")[""].words == {
        *("log", "y", "x 1", "np.exp", "z", "w", "a", "b")
    }


NO_FORMULAS = ["y", "y ~ x ~ z", " ~ x", "y ~ ", "y ~ (x", "y ~ x | g", "y ~ (1 | )", "y ~ (1 | f(g))"]


@pytest.mark.parametrize("text", NO_FORMULAS)
def test_what_is_no_formula_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput, match="expected"):
        parsed(text)


def test_a_point_is_every_other_column() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(0.0, index=range(2), columns=["y", "x 1", "z", "g", "n"])
    found = parsed("log(y) ~ . - z + offset(n) + (1 | g); sigma ~ .", frame)
    assert found[""].fixed == "`x 1` - z + offset(n)"
    assert found["sigma"].fixed == "`x 1` + `z` + `g` + `n`"
