"""Smooths in formulas: mgcv's curves and restricted likelihoods, new rows, the same program by hand, messages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, LaplacePosterior, Start, Stop

pytest.importorskip("formulae")
import pandas

from pyro_evidence.models.formula import mixed
from tests.models_for_tests.curves import ROWS, curves

REML = {"b": "flat"}
NEW = pandas.DataFrame(
    {"x": [0.05, 0.3, 0.55, 0.8, 1.1], "z": [0.9, 0.1, 0.5, 0.3, 0.7], "g": list("abcab"), "f": list("02467")}
)
PATH = {"f": [(str(j), str(j + 1)) for j in range(7)]}


@pytest.fixture(scope="module")
def frame() -> Any:
    """The data of the R lines below."""
    d = curves()
    return d.assign(f=np.floor(8 * d.x).astype(int).astype(str))


def fit(formula: str, frame: Any, **settings: Any) -> LaplacePosterior:
    model, data = mixed(formula, frame, **({"priors": REML, "neighbours": PATH} | settings))
    return LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)


# i <- 1:120; d <- data.frame(x = (0.6180339887 * i) %% 1, z = (0.7548776662 * i) %% 1)
# d$g <- c("a", "b", "c")[i %% 3 + 1]
# d$y <- sin(6 * d$x) + d$z^2 + (d$g == "b") * cos(5 * d$x) + 0.3 * qnorm((0.5698402910 * i) %% 1)
# d$k <- floor(exp(d$y / 2) + (0.4142135624 * i) %% 1); d$g <- factor(d$g); d$f <- factor(floor(8 * d$x))
# nb <- lapply(0:7, function(j) intersect(as.character(c(j - 1, j + 1)), as.character(0:7))); names(nb) <- 0:7
# new <- data.frame(x = c(.05, .3, .55, .8, 1.1), z = c(.9, .1, .5, .3, .7), g = factor(c("a", "b", "c", "a", "b")),
#                   f = factor(c("0", "2", "4", "6", "7")))
# predict(gam(FORMULA, data = d, method = "REML"), new)  # mgcv 1.8-41; of cc knots = list(x = c(0, 1)), of mrf
# xt = list(nb = nb)
CURVES = {
    "y ~ s(x)": [1.024310322, 1.357810150, -0.097718969, -0.886174141, 0.795510941],
    "y ~ s(x, bs='cr', k=8)": [1.020084394, 1.355645645, -0.094270985, -0.881799223, 0.829548954],
    "y ~ s(x, bs='cc', k=7, knots=[0, 1])": [0.82451930, 1.37767587, -0.11232942, -0.95762380, 1.12842641],
    "y ~ g + s(x, by=g)": [0.43946479, 1.68550962, 0.60299093, -0.55195520, 0.85730360],
    "y ~ s(x, by=g)": [0.33676045, 1.79947108, 0.54267830, -0.62340620, 0.89842242],
    "y ~ s(x, by=z)": [1.7026956148, -0.0013191723, 0.0078550141, -0.4850714400, 1.2671829173],
    "y ~ s(x, z)": [1.60376605, 0.98067431, -0.24163790, -0.93634264, 0.63033411],
    "y ~ s(x) + s(g, bs='re')": [1.059394417, 1.311053651, -0.083701691, -0.855615951, 0.763284094],
    "y ~ s(f, bs='mrf')": [1.06972333, 1.34768704, -0.18566210, -0.80713275, -0.29873948],
}


def test_few_functions_of_a_graph_are_its_smoothest(frame: Any) -> None:
    """As in mgcv; those along the graph, by closed form: cosines of half waves."""
    _, data = mixed("y ~ s(f, bs='mrf', k=5)", frame, neighbours=PATH)
    node, Z = torch.tensor(frame.f.astype(int).to_numpy()), data[1]
    waves = torch.stack([(torch.pi * j * (torch.arange(8.0).double() + 0.5) / 8.0).cos() for j in range(5)], -1)[node]
    left = Z - waves @ torch.linalg.lstsq(waves, Z).solution
    assert Z.shape == (120, 4) and float(left.abs().max()) < 1e-10


@pytest.mark.parametrize("formula", CURVES)
def test_a_curve_is_that_of_mgcv(frame: Any, formula: str) -> None:
    """Where each finds the highest restricted likelihood: the same smoothing parameters give the same curves."""
    np.testing.assert_allclose(fit(formula, frame).predict(NEW).numpy(), CURVES[formula], rtol=0.0, atol=1e-6)


def test_a_curve_of_counts_is_that_of_mgcv(frame: Any) -> None:
    """At the mode; means of the posterior are those of a skewed density."""
    model, data = mixed("k ~ s(x)", frame, family="poisson", priors=REML)
    found, (X, Z) = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data), model.arguments(NEW)
    expected = [0.608315742, 0.620633584, 0.089153923, -0.243054984, -0.133301171]
    np.testing.assert_allclose((X @ found.mode["b"] + Z @ found.mode["u_s_x"]).numpy(), expected, atol=1e-5)


def test_a_curve_is_as_uncertain_as_that_of_mgcv(frame: Any) -> None:
    _, sd = fit("y ~ s(x)", frame).predict(NEW, kind="link", return_std=True)
    np.testing.assert_allclose(sd.numpy(), [0.151275, 0.120193, 0.119945, 0.123972, 0.512699], atol=2e-6)


def test_a_curve_of_chances_is_as_uncertain_as_the_observed_information_says(frame: Any) -> None:
    """Second derivatives written out; mgcv takes their expectation, which for links such as probit is another."""
    rows = frame.assign(up=(frame.y > 0.5).astype(float))
    model, data = mixed("up ~ s(x)", rows, family="bernoulli", link="probit", priors=REML)
    found, (X, Z) = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data), model.arguments()
    columns, penalised = torch.cat([X, Z], 1), torch.tensor([0.0] * X.shape[1] + [1.0] * Z.shape[1]).double()
    z = (2.0 * data[-1] - 1.0) * (columns @ torch.cat([found.mode["b"], found.mode["u_s_x"]]))
    ratio = (-0.5 * z.square() - 0.5 * np.log(2.0 * np.pi) - torch.special.log_ndtr(z)).exp()
    weights = ratio * (z + ratio)  # minus the second derivative of log_ndtr
    V = torch.linalg.inv((columns.T * weights) @ columns + (penalised / found.hyperparameters["sd_s_x"] ** 2).diag())
    _, sd = found.predict(rows, kind="link", return_std=True)
    torch.testing.assert_close(sd, ((columns @ V) * columns).sum(-1).sqrt(), rtol=1e-5, atol=0.0)


# for (sp in c(0.01, 1)) {m <- gam(y ~ s(x), data = d, method = "REML", sp = sp); s <- m$smooth[[1]]
#  X <- predict(m, type = "lpmatrix")[, s$first.para:s$last.para]; K <- X %*% pinv(s$S[[1]]) %*% t(X)
#  P <- cbind(1, d$x); M <- diag(120) - P %*% solve(crossprod(P), t(P)); V <- M %*% K %*% M
#  c(m$gcv.ubre, sqrt(mean(diag(V)) * m$reml.scale / sp), sqrt(m$reml.scale))}
RESTRICTED = {  # minus log restricted likelihood, spread and noise of one smoothing parameter
    0.01: (112.127035576, 1.147093247, 0.5577860478),
    1.0: (125.593874825, 0.1371547114, 0.66692908),
}


def test_restricted_likelihoods_differ_as_those_of_mgcv(frame: Any) -> None:
    """The spread of a curve is its root mean square around a straight line: mgcv's prior covariance, projected."""
    model, data = mixed("y ~ s(x)", frame, priors=REML)
    found = []
    for score, sd, sigma in RESTRICTED.values():
        start = Start(values={"sd_s_x": torch.tensor(sd), "sigma": torch.tensor(sigma)})
        engine = LaplaceEvidence(model, maximise=(), start=start, stop=Stop(progress=False))
        found.append(float(engine.run(*data).log_evidence) + score)
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_a_tensor_product_is_the_likelihood_of_its_blocks(frame: Any) -> None:
    """Each block a Kronecker product, with a spread of its own; written out as one normal density."""
    model, data = mixed("y ~ t2(x, z, k=4)", frame, priors=REML)
    found = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)
    x, z = (torch.tensor(frame[c].to_numpy()) for c in "xz")
    (A, B), (a, b) = zip(*(_margin(v) for v in (x, z)), strict=True)
    rows = torch.ones(ROWS)
    blocks = [torch.stack([rows, a], 1)[:, :, None] * B[:, None], A[:, :, None] * torch.stack([rows, b], 1)[:, None]]
    blocks.append(A[:, :, None] * B[:, None])
    V = found.hyperparameters["sigma"] ** 2 * torch.eye(ROWS)
    for name, block in zip(("z", "x", "x_z"), blocks, strict=True):
        Z = block.flatten(1)
        V += found.hyperparameters[f"sd_t2_x_z_{name}"] ** 2 * Z @ Z.T / (Z @ Z.T).diagonal().mean()
    X, y = torch.stack([rows, x - x.mean(), z - z.mean(), (x - x.mean()) * (z - z.mean())], 1), data[-1]
    precision = torch.linalg.inv(V)
    information = X.T @ precision @ X
    residual = y - X @ torch.linalg.solve(information, X.T @ precision @ y)
    quadratic = residual @ precision @ residual
    expected = -0.5 * (quadratic + V.logdet() + information.logdet() + (ROWS - 4) * np.log(2.0 * np.pi))
    assert float(found.log_evidence) == pytest.approx(float(expected), abs=1e-6)
    assert model.coords["coefficient"] == ("Intercept", "t2(x, z): z", "t2(x, z): x", "t2(x, z): x:z")


def _margin(x: Tensor) -> tuple[Tensor, Tensor]:
    """The cubic spline of four knots, orthogonal to straight lines, with a unit penalty; and the standardised value."""
    knots = x.unique().quantile(torch.linspace(0.0, 1.0, 4))
    K, line = (knots[:, None] - knots).abs() ** 3, torch.stack([torch.ones(4), knots], 1)
    orthogonal = torch.linalg.qr(line, mode="complete").Q[:, 2:]
    root = torch.linalg.cholesky(orthogonal.T @ K @ orthogonal)
    columns = (x[:, None] - knots).abs() ** 3 @ orthogonal @ torch.linalg.inv(root).T
    lines = torch.stack([torch.ones_like(x), x], 1)
    columns = columns - lines @ torch.linalg.lstsq(lines, columns).solution
    return columns / columns.square().sum(1).mean().sqrt(), (x - x.mean()) / x.std(correction=0)


def test_new_rows_have_the_functions_of_the_fit(frame: Any, tmp_path: Path) -> None:
    """Of a saved fit too, whatever order the rows are in."""
    formula = "y ~ g + s(x, by=g, k=6) + s(z, bs='cc', k=5) + t2(x, z, k=3) + s(f, bs='mrf')"
    model, data = mixed(formula, frame, neighbours=PATH)
    for found, expected in zip(model.arguments(frame.tail(7)), data, strict=False):
        torch.testing.assert_close(found, expected[-7:], rtol=1e-9, atol=1e-9)
    again, _ = mixed(formula, frame.sample(frac=1.0, random_state=0), neighbours=PATH)
    for found, expected in zip(again.arguments(frame), data, strict=False):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)
    posterior.save(tmp_path / "fit")
    loaded = LaplacePosterior.load(tmp_path / "fit", again)
    torch.testing.assert_close(loaded.predict(NEW), posterior.predict(NEW), rtol=1e-6, atol=1e-8)


def test_signs_of_eigenvectors_do_not_decide(frame: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine's may be others, and a fit that is loaded there is to find its functions again."""
    formula, eigh = "y ~ s(x, k=6) + s(z, bs='cc', k=5) + s(x, z) + s(f, bs='mrf')", torch.linalg.eigh
    _, data = mixed(formula, frame, neighbours=PATH)

    def turned(A: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = eigh(A)
        return values, vectors * (-1.0) ** torch.arange(len(A))

    monkeypatch.setattr(torch.linalg, "eigh", turned)
    _, again = mixed(formula, frame, neighbours=PATH)
    for found, expected in zip(again, data, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("unit", [1e-6, 1e9])
def test_a_curve_does_not_depend_on_the_unit(frame: Any, unit: float) -> None:
    moved, new = (f.assign(x=unit * f.x + 3.0 * unit) for f in (frame, NEW))
    torch.testing.assert_close(
        fit("y ~ s(x)", moved).predict(new), fit("y ~ s(x)", frame).predict(NEW), rtol=1e-5, atol=1e-5
    )


def test_a_spread_and_a_curve_can_have_priors(frame: Any) -> None:
    model, data = mixed("y ~ s(x) + s(z)", frame, priors="weak")
    assert "pyro.param" not in model.source and set(model.dims) == {"b", "u_s_x", "u_s_z"}
    found = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)
    assert float((found.predict(NEW)[:4] - fit("y ~ s(x) + s(z)", frame).predict(NEW)[:4]).abs().max()) < 0.05
    assert "s(x): x" in model.coords["coefficient"]


MESSAGES = [
    ("y ~ s(g)", r"s\(g\): 'g' has words; expected one column of numbers.*\(1 \| g\)"),
    ("y ~ s(few)", r"s\(few\) has 3 distinct values and is to have 10 functions; expected k= from 3"),
    ("y ~ s(one)", r"s\(one\) has 1 distinct values"),
    ("y ~ s(x, k=2)", "expected k= from 3"),
    ("y ~ t2(x, few)", r"s\(few\) has 3 distinct values and is to have 5"),
    ("y ~ s(x, bs='ps')", r"s\(x\) with basis 'ps'; expected smooths such as s\(x\)"),
    ("y ~ s(x, z, bs='cr')", "with basis 'cr'; expected smooths"),
    ("y ~ s(x, fx=True)", "expected smooths such as"),
    ("y ~ s(x, k=1.5)", "expected smooths such as"),
    ("y ~ s(x, k=0)", "expected smooths such as"),
    ("y ~ gp(x, k=-1)", "expected smooths such as"),
    ("y ~ s(x, k=open('executed'))", "expected smooths such as"),
    ("y ~ s()", "expected smooths such as"),
    ("y ~ s(x, bs='cc', k=3, knots=[1, 0, 2])", "ends of their range"),
    ("y ~ s(x, bs='cc', k=5, knots=[0, .5, 1])", "or 5 of them"),
    ("y ~ s(inf)", "values that are not finite"),
    ("y ~ s(x):z", r"has 's'.*Smooths stand between plus signs: s\(x\)"),
    ("y ~ x - s(x)", "has 's'"),
    ("y ~ x + (s(x) | g)", "has 's'"),
    ("y ~ s(np.savetxt('executed', x))", "has 'np.savetxt'"),
    ("y ~ s(x, by=open('executed'))", "has 'open'"),
    ("y ~ s(x, by=absent)", "cannot be made into columns"),
    ("y ~ s(g, bs='mrf')", r"mixed\(..., neighbours=\{'g': \[\('a', 'b'\), ...\]\}\)"),
    ("y ~ s(far, bs='mrf')", "'9' is none of the 8 nodes of the graph"),
]


@pytest.mark.parametrize(("formula", "said"), MESSAGES)
def test_messages(frame: Any, formula: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = frame.assign(
        few=np.arange(ROWS) % 3, one=1.0, inf=np.where(frame.x > 0.9, np.inf, frame.x), far=frame.f.replace("3", "9")
    )
    with pytest.raises(BadInput, match=said):
        mixed(formula, table, neighbours=PATH | {"far": PATH["f"]})
    assert not list(tmp_path.iterdir())


def test_new_rows_that_lack_something_are_refused(frame: Any) -> None:
    model, _ = mixed("y ~ s(x, by=g)", frame)
    with pytest.raises(BadInput, match="frame has no column 'x'"):
        model.arguments(NEW[["g"]])
    with pytest.raises(BadInput, match="the new rows lack values of 'x'"):
        model.arguments(NEW.assign(x=np.nan))
    with pytest.raises(BadInput, match="with levels that the fit has seen"):
        model.arguments(NEW.assign(g="new"))
