"""Names and values of a frame are data: never executed, never mixed up, and the source is the model that runs."""

import ast
import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_evidence
from pyro_evidence import BadInput

pytest.importorskip("formulae")
import pandas

from pyro_evidence.models.formula import FAMILIES, MixedModel, mixed
from pyro_evidence.models.formula.design import FUNCTIONS
from pyro_evidence.models.formula.priors import DISTRIBUTIONS
from tests.test_architecture import nodes

ROWS = 24
CODE = "a\n    open('executed','w')#", '"""\nopen(\'executed\',\'w\')\n"""', "'+str(open('executed','w'))+'\\"


@pytest.fixture(scope="module")
def frame() -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=ROWS)
    return pandas.DataFrame(
        {
            "x": x,
            "t": rng.uniform(1.0, 2.0, ROWS),
            "early": 0.9 * (np.arange(ROWS) % 2),
            "g": [str(i % 4) for i in range(ROWS)],
            "h": [str(i % 3) for i in range(ROWS)],
            "y": x + rng.normal(size=ROWS),
            "yes": rng.integers(0, 2, ROWS),
            "hits": rng.integers(0, 9, ROWS),
            "tries": 9,
            "k": rng.poisson(2.0, ROWS),
            "above": rng.poisson(2.0, ROWS) + 1,
            "share": rng.uniform(0.1, 0.9, ROWS),
            "kind": np.array(list("abcd"))[np.arange(ROWS) % 4],
            "grade": np.arange(ROWS) % 4,
        }
    )


def of_source(model: MixedModel) -> Any:
    """The function that the source of a model makes, when its reader runs it."""
    space: dict[str, Any] = {}
    exec(model.source, space)
    return space["model"]


def traced(run: Any, data: tuple[Any, ...]) -> Any:
    """A run with values of params and sites that tell each element from the others; the same for the same shapes."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    pyro.poutine.trace(run).get_trace(*data)
    for i, (_, value) in enumerate(pyro.get_param_store().named_parameters()):
        value.data += 0.1 * torch.arange(1.0, 1.0 + value.numel()).reshape(value.shape) / (1.0 + i)
    pyro.set_rng_seed(0)
    found = pyro.poutine.trace(run).get_trace(*data)
    found.compute_log_prob()
    return found


def log_joint(run: Any, data: tuple[Any, ...]) -> float:
    return float(traced(run, data).log_prob_sum().detach())


RESPONSES = {
    "gaussian": "y",
    "student": "y",
    "gamma": "t",
    "ordinal": "grade",
    "beta": "share",
    "beta binomial": "prop(hits, tries)",
    "negative binomial 1": "k",
    "truncated poisson": "above",
    "truncated negative binomial": "above",
    "bernoulli": "yes",
    "binomial": "prop(hits, tries)",
    "poisson": "k",
    "negative binomial": "k",
    "categorical": "kind",
    "exponential": "surv(t)",
    "weibull": "surv(t, yes)",
    "lognormal": "surv(early, t, yes)",
    "loglogistic": "surv(t, yes)",
    "gompertz": "surv(early, t, yes)",
    "cox": "surv(early, t, yes)",
    "cox breslow": "surv(t, yes)",
}
RIGHT = [
    "x + (x | g)",
    "x + (x || g) + (1 | h)",
    "0 + offset(t) + (0 + x | g) + (1 | g / h)",
    "np.log(t) + bs(x, df=4)",
    "h + s(x, by=h, k=3) + s(t, bs='cc', k=4) + (1 | g)",
    "gp(x, by=h, k=5) + ar1(h | g) + cs(0 + h | g) + us(x | g)",
]


@pytest.mark.parametrize(
    ("right", "priors"), [*((right, None) for right in RIGHT), *((right, "weak") for right in RIGHT[::3])]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_source_is_the_model_that_runs(frame: Any, family: str, right: str, priors: str | None) -> None:
    model, data = mixed(f"{RESPONSES[family]} ~ {right}", frame, family=family, priors=priors)
    written, run = traced(of_source(model), data), traced(model, data)
    assert list(run.nodes) == list(written.nodes)
    assert torch.equal(run.log_prob_sum(), written.log_prob_sum())
    assert str(inspect.signature(model)) == str(inspect.signature(of_source(model)))


PARAMETERS = {
    "gaussian": "; sigma ~ x + (1 | g)",
    "poisson": "; zi ~ x + (x || g)",
    "negative binomial": "; hurdle ~ x; shape ~ h + offset(t)",
    "beta binomial": "; phi ~ 0 + x",
    "student": "; df ~ 1; sigma ~ h",
    "weibull": "; shape ~ x + (1 | g)",
}


@pytest.mark.parametrize("priors", [None, "weak"])
@pytest.mark.parametrize("family", PARAMETERS)
def test_parameters_with_formulas_are_in_the_source(frame: Any, family: str, priors: str | None) -> None:
    formula = f"{RESPONSES[family]} ~ x + (1 | g){PARAMETERS[family]}"
    model, data = mixed(formula, frame, family=family, priors=priors)
    written, run = traced(of_source(model), data), traced(model, data)
    assert list(run.nodes) == list(written.nodes)
    assert torch.equal(run.log_prob_sum(), written.log_prob_sum())
    again = model.arguments(frame)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(again, data, strict=False))


def test_weights_are_in_the_source(frame: Any) -> None:
    model, data = mixed("prop(hits, tries) ~ x + (1 | g)", frame, family="binomial", weights="t")
    plain, same = mixed("prop(hits, tries) ~ x + (1 | g)", frame, family="binomial")
    assert log_joint(model, data) == log_joint(of_source(model), data) != log_joint(plain, same)


@pytest.mark.parametrize("link", ["probit", "cloglog", "inverse", "identity"])
def test_links_are_in_the_source(frame: Any, link: str) -> None:
    family = "gamma" if link in ("inverse", "identity") else "binomial"
    model, data = mixed(f"{RESPONSES[family]} ~ 1", frame, family=family, link=link, priors={"b": "LogNormal(0, 0.1)"})
    assert log_joint(model, data) == log_joint(of_source(model), data)


@pytest.mark.parametrize(
    "priors",
    [
        {"b": "flat"},
        {"b": "Normal(0, [1, 2.5])", "sd": "HalfNormal(1)"},
        {"L": "LKJ(2)", "sigma": "Gamma(2, rate=0.5)"},
    ],
)
def test_priors_of_the_source_are_those_that_run(frame: Any, priors: dict[str, str]) -> None:
    model, data = mixed("y ~ x + (x | g)", frame, priors=priors)
    assert log_joint(model, data) == log_joint(of_source(model), data)


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("place", ["level", "column", "group", "groups", "class", "response"])
def test_nothing_in_a_frame_is_executed(
    frame: Any, code: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    family, formula, made, honest = {
        "level": ("gaussian", "y ~ x * h + (h | g)", frame.assign(h=frame.h.replace("1", code)), frame),
        "column": ("gaussian", f"y ~ `{code}` + (`{code}` | g)", frame.rename(columns={"x": code}), None),
        "group": ("gaussian", "y ~ x + (1 | g)", frame.assign(g=frame.g.replace("1", code)), frame),
        "groups": ("gaussian", f"y ~ x + (1 | `{code}`)", frame.rename(columns={"g": code}), None),
        "class": ("categorical", "kind ~ x", frame.assign(kind=frame.kind.replace("b", code)), None),
        "response": ("gaussian", f"`{code}` ~ x", frame.rename(columns={"y": code}), None),
    }[place]
    try:
        model, data = mixed(formula, made, family=family)
    except BadInput:
        assert place == "groups", "only names of groups are restricted"
    else:
        assert log_joint(model, data) == log_joint(of_source(model), data)
        assert honest is None or sum(map(len, model.coords.values())) == sum(
            map(len, mixed(formula, honest, family=family)[0].coords.values())
        )
    assert not list(tmp_path.iterdir())


def test_the_package_executes_no_text() -> None:
    folder = Path(pyro_evidence.__file__).parent
    words = ("exec", "eval(", "compile", "linecache")
    for path in (path for path in folder.rglob("*.py") if any(w in path.read_text(encoding="utf-8") for w in words)):
        for node in nodes(path):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            imported = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert called not in ("exec", "eval", "compile") and "linecache" not in imported, path


@pytest.mark.parametrize(
    "call",
    [
        "np.savetxt('executed', x)",
        "open('executed')",
        "import_module('os')",
        "np.random.normal(x)",
        "C.__globals__.clear()",
        "np.log.at(x, 0)",
        "np.log.at[x](x)",
        "scale(np.save('executed', x))",
        "np.savetxt",
        "C(x, np.__dict__)",
    ],
)
def test_a_formula_calls_what_is_listed(frame: Any, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for formula in (f"y ~ {call}", f"{call} ~ x", f"y ~ x + ({call} | g)"):
        with pytest.raises(BadInput, match="log1p"):
            mixed(formula, frame)
    assert not list(tmp_path.iterdir())


def test_names_of_the_caller_are_not_seen(frame: Any) -> None:
    with pytest.raises(BadInput, match="cannot be made into columns"):
        mixed("y ~ C(x, re)", frame)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_constant_response_has_no_unit_for_priors(frame: Any, value: float) -> None:
    """ZeroDivisionError: float division by zero."""
    with pytest.raises(BadInput, match=f"the response, which is one constant, {value:g}; expected data that vary"):
        mixed("t ~ x + (1 | g)", frame.assign(t=value), priors="weak")


def test_columns_of_times_and_objects_are_named_with_what_they_hold(frame: Any) -> None:
    """formulae says "Variable is of an unrecognized type (<class 'pandas.Series'>)", and there it stopped."""
    times = frame.assign(u=pandas.date_range("2020-01-01", periods=ROWS, tz="Europe/Berlin"), v=frame.x.astype(object))
    for name, held, right in (
        ("u", "times", (times.u - times.u.min()) / pandas.Timedelta("1D")),
        ("v", "float", times.v.astype(float)),
    ):
        with pytest.raises(BadInput, match=f"Column '{name}' holds {held}: expected numbers, by frame"):
            mixed(f"t ~ {name}", times)
        mixed(f"t ~ {name}", times.assign(**{name: right}))
    mixed("t ~ C(u) + C(v)", times.iloc[:3])


@pytest.mark.parametrize("call", ["log(t)", "np.log(t)", "`np.savetxt`", "np.savetxt + x", "C(h, Sum)", "{x + t}"])
def test_what_is_listed_or_a_column_is_taken(frame: Any, call: str) -> None:
    model, data = mixed(f"y ~ {call}", frame.assign(**{"np.savetxt": frame.x}))
    assert np.isfinite(log_joint(model, data))
    assert {"np.log", "log", "sqrt", "poly", "center"} <= set(FUNCTIONS)


@pytest.mark.parametrize(
    "text",
    [
        "open('executed','w')",
        "Normal(open('executed','w'), 1)",
        "Normal.__class__(0)",
        "Normal(0)",
        "Normal(0, -1)",
        "Normal(0, [1, 2, 3])",
        "Normal(0, '1')",
        "Normal(0, 1e999)",
        f"Normal(0, {10**400})",
        "Normal(*[0, 1])",
        "Normal(**{'loc': 0})",
        "Normal(**[0])",
        "Delta(0)",
        "LKJ(1)",
        "TransformedDistribution(0, 1)",
        "Normal(0, 1)\0",
        "(" * 5000,
        1.0,
    ],
)
def test_priors_are_parsed_and_not_evaluated(
    frame: Any, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="expected"):
        mixed("y ~ x + (x | g)", frame, priors={"b": text})
    assert not list(tmp_path.iterdir())


def test_correlations_have_a_prior_of_their_own(frame: Any) -> None:
    for text in ("Normal(0, 1)", "LKJ(0)", "LKJ([1, 2])"):
        with pytest.raises(BadInput, match=r"priors\['L_g'\]"):
            mixed("y ~ x + (x | g)", frame, priors={"L": text})


def test_the_listed_distributions_are_those_of_pyro() -> None:
    assert all(issubclass(getattr(dist, name), dist.Distribution) for name in DISTRIBUTIONS)


NAMES = ["u", "scale", "len", "sd_g", "sd_h", "L_g", "u_g", "num_g", "Z_g", "g_groups", "rows", "X", "b", "dist"]
NAMES += ["class", "num_h", "h_groups", "offset", "trials", "y_", "größe", "x²", "µ", "_"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("column", ["y", "h"])
def test_a_response_or_group_can_have_any_name(frame: Any, column: str, name: str) -> None:
    """A group is named, or a response; ``w`` collides with nothing."""
    named, plain = (frame.rename(columns={column: n}) for n in (name, "w"))
    formula = "`{y}` ~ x + (x | g) + (1 | `{h}`)".format
    model, data = mixed(formula(**{"y": "y", "h": "h", column: name}), named, priors="weak")
    other, same = mixed(formula(**{"y": "y", "h": "h", column: "w"}), plain, priors="weak")
    assert log_joint(model, data) == log_joint(other, same) == log_joint(of_source(model), data)
    assert len(set(model._sketch.arguments)) == len(other._sketch.arguments)
    assert len(model.dims) == len(other.dims)


def test_groups_with_the_same_words_are_kept_apart(frame: Any) -> None:
    table = frame.assign(p=["a:b", "a"] * 12, q=["c", "b:c"] * 12)
    model, (_, index, num, *_) = mixed("y ~ x + (1 | p:q)", table)
    assert num == 2 and index.tolist() == [1, 0] * 12
    assert len(set(model.coords["p_q"])) == 2
    _, again, num = model.arguments(table.tail(3))
    assert num == 2 and again.tolist() == [0, 1, 0]


def test_classes_named_by_numbers_have_their_own_params(frame: Any) -> None:
    codes = np.arange(ROWS) * 7 % 4
    by_number = frame.assign(kind=np.array([-2, -1, 1, 2])[codes])
    by_letter = frame.assign(kind=np.array(list("abcd"))[codes])
    model, data = mixed("kind ~ x + (1 | g)", by_number, family="categorical")
    other, same = mixed("kind ~ x + (1 | g)", by_letter, family="categorical")
    assert set(model.dims) == {f"{q}_{c}" for q in ("b", "u_g") for c in "123"}
    assert log_joint(model, data) == log_joint(other, same) == log_joint(of_source(model), data)
    assert set(other.dims) == {f"{q}_{c}" for q in ("b", "u_g") for c in "bcd"}


def test_classes_that_differ_in_a_far_digit_are_two(frame: Any) -> None:
    model, data = mixed("kind ~ x", frame.assign(kind=[0.1234567, 0.1234568] * 12), family="bernoulli")
    assert model.classes == ("0.1234567", "0.1234568") and data[-1].sum() == 12


def test_a_line_break_may_stand_in_a_formula(frame: Any) -> None:
    model, data = mixed("y ~ x + (1 +\n x | g)", frame)
    plain, same = mixed("y ~ x + (1 + x | g)", frame)
    assert log_joint(of_source(model), data) == log_joint(plain, same) == log_joint(model, data)


def test_a_model_is_copied_pickled_and_called_by_name(frame: Any) -> None:
    model, data = mixed("y ~ x + (x | g)", frame)
    assert str(inspect.signature(model)) == "(X, g, num_g, Z_g, y=None)"
    for again in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.source == model.source and log_joint(again, data) == log_joint(model, data)
    by_name = dict(zip(inspect.signature(model).parameters, data, strict=True))
    assert log_joint(lambda: model(**by_name), ()) == log_joint(model, data)
    with pytest.raises(BadInput, match="missing a required argument: 'g'; expected X, g, num_g, Z_g, y"):
        model(data[0])


def test_one_group_may_stand_in_three_brackets(frame: Any) -> None:
    model, data = mixed("y ~ x + (1 | g) + (1 + x | g) + (1 + t | g)", frame)
    assert {"sd_g", "sd_g_Intercept", "sd_g_Intercept_"} <= set(of_source(model).__code__.co_varnames)
    assert log_joint(model, data) == log_joint(of_source(model), data)


@pytest.mark.parametrize(
    "terms", ["poly(x, 1000000)", "poly(np.log(x), degree=1000000)", "bs(x, df=1000000)", "(x + z)**1000000"]
)
def test_more_columns_than_can_be_held_are_refused_at_once(terms: str) -> None:
    frame = pandas.DataFrame({"x": np.arange(1.0, 31.0), "z": np.arange(30.0) ** 2, "y": np.arange(30.0)})
    with pytest.raises(BadInput, match=r"expected a number of columns up to 2,000\. Write a smaller number, such as"):
        mixed(f"y ~ {terms}", frame)
    for advised in ("poly(x, 3)", "bs(x, df=10)", "s(x)"):
        mixed(f"y ~ {advised}", frame)


@pytest.mark.parametrize(
    ("term", "reason"),
    [
        *(("C(c, Treatment('z'))", "reference not in levels"), ("C(c, Sum('z'))", "'z' is not in list")),
        *(("poly(x, 0)", "has poly(x, 0), which makes no column"), ("x + (poly(x, 0) | c)", "which makes no column")),
    ],
)
def test_a_term_that_makes_no_columns_is_refused_and_nothing_is_printed(
    term: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bare IndexError, and a line of the package formulae's on stdout."""
    frame = pandas.DataFrame({"x": np.arange(30.0), "c": ["a", "b"] * 15, "y": np.arange(30.0)})
    with pytest.raises(BadInput, match=re.escape(reason)):
        mixed(f"y ~ {term}", frame)
    assert capfd.readouterr() == ("", "")


def test_words_as_grades_are_refused_unless_they_have_an_order() -> None:
    """They were taken in alphabetical order, high before low, in silence."""
    grades = ["high", "low", "middle", "low"] * 8
    frame = pandas.DataFrame({"x": np.arange(32.0) % 5, "y": grades})
    with pytest.raises(BadInput, match=r"words, .*which have no order of their own"):
        mixed("y ~ x", frame, family="ordinal")
    order = ["low", "middle", "high"]
    ordered = mixed("y ~ x", frame.assign(y=pandas.Categorical(grades, order, ordered=True)), family="ordinal")
    by_numbers = mixed("y ~ x", frame.assign(y=[order.index(g) for g in grades]), family="ordinal")
    assert torch.equal(ordered[1][-1], by_numbers[1][-1])
