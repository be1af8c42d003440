"""Averages of predictions, comparisons and slopes: marginaleffects' numbers, the same by draws, messages."""

from typing import Any

import numpy as np
import pytest
import torch

from pyro_evidence import BadInput, LaplaceEvidence, Start, Stop

pytest.importorskip("formulae")
from pyro_evidence.models.formula import mixed
from tests.models_for_tests.curves import ROWS, curves


@pytest.fixture(scope="module")
def frame() -> Any:
    """What statsmodels and marginaleffects were given too."""
    return curves().assign(h=(np.arange(ROWS) // 10).astype(str))


def fit(formula: str, frame: Any, **settings: Any) -> Any:
    model, data = mixed(formula, frame, **settings)
    return LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)


@pytest.fixture(scope="module")
def linear(frame: Any) -> Any:
    return fit("y ~ x + g", frame)


def found(table: Any) -> dict[str, tuple[float, float]]:
    return {label: (row["value"], row["sd"]) for label, row in table.rows.items()}


# m = statsmodels.formula.api.poisson("k ~ x * g", d).fit(); marginaleffects 0.6.0
# avg_comparisons(m, variables="g"); avg_slopes(m, variables="x", by="g", eps=1e-5), the same without by
MARGINALEFFECTS = {
    "g[b] - g[a]": (0.15940988, 0.26166835),
    "g[c] - g[a]": (-0.04574489, 0.25150969),
    "d/d x, g[a]": (-0.94469015, 0.65797204),
    "d/d x, g[b]": (-2.89637933, 0.82509492),
    "d/d x": (-1.63772056, 0.41038741),
}


def test_differences_and_slopes_are_those_of_marginaleffects(frame: Any) -> None:
    posterior = fit("k ~ x * g", frame, family="poisson")
    rows = found(posterior.comparisons("g")) | found(posterior.slopes("x", by="g")) | found(posterior.slopes("x"))
    for label, (value, sd) in MARGINALEFFECTS.items():
        assert rows[label] == (pytest.approx(value, abs=1e-6), pytest.approx(sd, rel=5e-4))
    assert rows["d/d x, g[c]"][0] == pytest.approx(-1.07209220, abs=1e-6)


def test_means_of_a_linear_model_are_its_coefficients(frame: Any) -> None:
    """Differences of means are contrasts of coefficients, with their standard errors."""
    posterior = fit("y ~ C(third) + x + (1 | h)", frame.assign(third=np.arange(ROWS) % 3))
    means, fixed = found(posterior.means("third")), found(posterior.fixed())
    assert means["third[1]"][0] - means["third[0]"][0] == pytest.approx(fixed["b[C(third)[1]]"][0], abs=1e-9)
    rows = found(posterior.comparisons("third")) | found(posterior.comparisons("x", step=2.0))
    assert rows["third[2] - third[0]"] == pytest.approx(fixed["b[C(third)[2]]"], rel=1e-6)
    assert rows["x + 2"] == pytest.approx(tuple(2.0 * number for number in fixed["b[x]"]), rel=1e-6)
    assert found(posterior.means("x", values=[0.25]))["x[0.25]"][0] == pytest.approx(
        float(posterior.predict(frame.assign(third=np.arange(ROWS) % 3, x=0.25)).mean()), abs=1e-9
    )


def test_means_of_two_columns_are_of_each_pair(frame: Any) -> None:
    posterior = fit("y ~ x * g", frame)
    rows = posterior.means(["g", "x"], values={"x": [0.25, 0.75]}).rows
    assert len(rows) == 3 * 2
    for level, value in (("a", 0.25), ("c", 0.75)):
        expected = float(posterior.predict(frame.assign(g=level, x=value)).mean())
        assert rows[f"g[{level}], x[{value}]"]["value"] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(BadInput, match=r"expected values to set it to, values=\{'x': \[...\]\}"):
        posterior.means(["g", "x"])


def test_standard_deviations_are_those_of_draws(frame: Any) -> None:
    """Of effects and coefficients together, where both are latent, the spread held."""
    posterior = fit("k ~ x + (0 + x | h)", frame, family="poisson", priors={"b": "flat"})
    draws, (X, h, _, Z) = posterior.get_samples(4000, seed=0), posterior._joint.args[:4]
    for kind in ("response", "link", "population"):
        u = draws["u_h"][:, h] * (kind != "population")

        def predicted(shift: float, u: Any = u, kind: str = kind) -> Any:
            eta = draws["b"] @ (X + torch.tensor([0.0, shift])).T + ((Z + shift) * u).sum(-1)
            return eta if kind == "link" else eta.exp()

        steps = predicted(0.5) - predicted(0.0), (predicted(1e-4) - predicted(-1e-4)) / 2e-4
        tables = posterior.comparisons("x", step=0.5, kind=kind), posterior.slopes("x", kind=kind)
        for step, table in zip(steps, tables, strict=True):
            ((value, sd),) = found(table).values()
            average = step.mean(-1)
            assert value == pytest.approx(float(average.mean()), abs=0.3 * float(average.std()))
            assert sd == pytest.approx(float(average.std()), rel=0.1)


def test_effects_move_with_coefficients_that_are_maximised(frame: Any) -> None:
    """Coefficients as params, or latent under a flat prior at the same spread and noise: one covariance."""
    rows = frame.assign(y=frame.y + 2.0 * np.sin(np.arange(ROWS) // 10))
    maximised, (model, data) = fit("y ~ x + (1 | h)", rows), mixed("y ~ x + (1 | h)", rows, priors={"b": "flat"})
    held = Start(values={name: maximised.hyperparameters[name] for name in ("sd_h", "sigma")})
    latent = LaplaceEvidence(model, maximise=(), start=held, stop=Stop(progress=False)).run(*data)
    for kind in ("response", "population"):
        (one,), (other,) = (found(p.means("x", values=[0.25], kind=kind)).values() for p in (maximised, latent))
        assert one == pytest.approx(other, rel=1e-3)


def test_groups_that_do_not_differ_have_no_part(frame: Any) -> None:
    posterior = fit("k ~ x + (1 | h)", frame, family="poisson")
    assert float(posterior.hyperparameters["sd_h"]) == 0.0
    assert found(posterior.slopes("x")) == found(posterior.slopes("x", kind="population"))


def test_without_one_gaussian_they_are_averages_over_draws(frame: Any) -> None:
    integrated = fit("y ~ x + (1 | h)", frame, priors={"sd": "HalfNormal(1)", "b": "Normal(0, 10)"})
    maximised = fit("y ~ x + (1 | h)", frame)
    (label,) = table = integrated.slopes("x").rows
    assert "draws" in integrated.slopes("x").notes[0] and len(table) == 1
    for one, other in zip(found(integrated.slopes("x"))[label], found(maximised.slopes("x"))[label], strict=True):
        assert one == pytest.approx(other, rel=0.1)


def test_classes_have_a_row_each_whose_differences_add_up_to_nothing(frame: Any) -> None:
    posterior = fit("g ~ x", frame, family="categorical")
    rows = found(posterior.comparisons("x", step=0.2))
    assert set(rows) == {"x + 0.2, a", "x + 0.2, b", "x + 0.2, c"}
    assert sum(value for value, _ in rows.values()) == pytest.approx(0.0, abs=1e-12)


MESSAGES = [
    (lambda p: p.means("x"), r"expected values to set it to, values=\[...\]"),
    (lambda p: p.slopes("g"), r"expected numbers. Ask for comparisons\('g'\)"),
    (lambda p: p.comparisons({"x": [0.0, 1.0]}), r"\{'x': \[0.0, 1.0\]\} is no column of"),
    (lambda p: p.slopes("w"), r"'w' is no column of 'y ~ x \+ g'; expected one of \['x', 'g', 'y'\]|expected one of"),
    (lambda p: p.slopes("x", by="w"), "'w' is no column"),
    (lambda p: p.means("g", kind="terms"), "kind='terms'; expected one of"),
    (lambda p: p.means("g", prob=2.0), "prob"),
]


@pytest.mark.parametrize(("call", "said"), MESSAGES)
def test_messages(linear: Any, call: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        call(linear)
