"""Every setting given things of every kind: what cannot be used is an error message, whatever it is."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import REVM, RVM, VRVM, EvidenceEM, LaplaceEvidence, NotConverged, OverlapEM, Start, Stop
from pyro_evidence.errors import BadInput, ImproperPosterior, NotAMode, NotPositiveDefinite, TooLarge, UnsupportedModel
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression
from pyro_evidence.settings import check_count, check_flag, seeded

OWN_ERRORS = (BadInput, UnsupportedModel, NotPositiveDefinite, NotAMode, ImproperPosterior, TooLarge, NotConverged)
QUICK = Stop(num_steps=2, progress=False, throw=False)
KINDS: dict[str, Any] = {
    "None": None,
    "0": 0,
    "-1": -1,
    "nan": math.nan,
    "inf": math.inf,
    "a word": "abc",
    "no word": "",
    "True": True,
    "1.5": 1.5,
    "a complex number": 1 + 2j,
    "a list": [1, 2],
    "no list": [],
    "a dict": {"a": 1},
    "a number of NumPy's": np.int64(3),
    "an array": np.array([1.0, 2.0]),
    "an array of one": np.array(3),
    "a tensor": torch.tensor(2.0),
    "two numbers": torch.tensor([1.0, 2.0]),
    "a tensor of nan": torch.tensor(math.nan),
    "a truth value": torch.tensor(True),
    "a complex tensor": torch.tensor(1.0 + 1.0j),
    "half precision": torch.tensor(2.0, dtype=torch.float16),
    "a leaf": torch.tensor(2.0, requires_grad=True),
    "no numbers": torch.zeros(2, 0),
    "nowhere": torch.tensor(2.0, device="meta"),
    "an object": object(),
    "a class": int,
    "bytes": b"x",
    "large": 10**30,
}


def linear(X: Tensor, t: Tensor | None = None) -> None:
    alpha = pyro.param("alpha", X.new_ones(()), constraint=constraints.positive)
    scale = pyro.param("scale", X.new_ones(()), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, scale), obs=t)


X = torch.randn(12, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
T = X.sum(-1) + torch.randn(12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = (T > 0).double()

Use = Callable[..., Any]
USES: dict[str, tuple[Use, str]] = {
    "LaplaceEvidence": (
        lambda **k: LaplaceEvidence(linear, **{"stop": QUICK, **k}).run(X, T),
        "marginalise maximise curvature stop start",
    ),
    "RVM": (lambda **k: RVM(linear, **{"stop": QUICK, **k}).run(X, T), "site noise stop"),
    "VRVM": (lambda **k: VRVM(linear, **{"stop": QUICK, **k}).run(X, T), "site noise stop"),
    "REVM": (lambda **k: REVM(linear, **k).run(X, T), "site prior centre ridge approximation"),
    "EvidenceEM": (
        lambda **k: EvidenceEM(gaussian_mixture(2), **{"stop": QUICK, **k}).run(X),
        "update curvature start initial deletion stop",
    ),
    "OverlapEM": (
        lambda **k: OverlapEM(prbf(2, 2), **{"stop": QUICK, **k}).run(X, LABELS.long()),
        "alpha update start initial lost stop",
    ),
    "Stop": (
        lambda **k: Stop(**k),
        "tolerance gradient_tolerance num_steps throw progress quadrature_tol checkpoint checkpoint_interval",
    ),
    "Start": (lambda **k: Start(**k), "restarts seed"),
    "regression": (lambda **k: regression(Linear(), **k), "alpha alpha_bias beta groups"),
    "classifier": (lambda **k: classifier(Linear(), **k), "num_classes alpha alpha_bias groups"),
    "gaussian_mixture": (lambda **k: gaussian_mixture(**{"num_components": 2, **k}), "num_components alpha noise"),
    "mppca": (lambda **k: mppca(**{"num_components": 2, "num_latents": 1, **k}), "num_components num_latents alpha"),
    "prbf": (lambda **k: prbf(**{"num_kernels": 2, "num_classes": 2, **k}), "num_kernels num_classes"),
}


def answered(use: Callable[[], Any]) -> None:
    """An answer, or an error message of some length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = use()
        except OWN_ERRORS as message:
            assert len(str(message)) > 25
            return
    height = getattr(found, "log_evidence", None)
    assert not isinstance(height, Tensor) or not bool(height.isnan())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word is the path of a checkpoint too: what is written lies in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("use, setting", [(u, s) for u, (_, settings) in USES.items() for s in settings.split()])
def test_a_setting_is_used_or_refused(use, setting) -> None:
    for value in KINDS.values():
        answered(lambda value=value: USES[use][0](**{setting: value}))


@pytest.fixture(scope="module")
def posteriors() -> dict[str, Any]:
    return {
        "LaplaceEvidence": LaplaceEvidence(linear).run(X, T),
        "REVM": REVM(linear).run(X, T),
        "EvidenceEM": EvidenceEM(gaussian_mixture(2)).run(X),
    }


METHODS = {
    "get_samples": "num_samples seed",
    "predict": "quantiles site num_samples seed",
    "quantiles": "q",
    "diagnostics": "num_samples seed",
}


@pytest.mark.parametrize("method, argument", [(m, a) for m, names in METHODS.items() for a in names.split()])
@pytest.mark.parametrize("name", ["LaplaceEvidence", "REVM", "EvidenceEM"])
def test_an_argument_of_a_posterior_is_used_or_refused(posteriors, name, method, argument) -> None:
    if method == "diagnostics" and name == "REVM":
        pytest.skip("takes none")
    for value in KINDS.values():
        if not (method == "diagnostics" and value is None):
            answered(lambda value=value: getattr(posteriors[name], method)(**{argument: value}))


def test_a_seed_of_numpys_is_the_seed_that_it_is() -> None:
    expected, found = (LaplaceEvidence(linear, start=Start(seed=s)).run(X, T) for s in (3, np.int64(3)))
    assert torch.equal(found.log_evidence, expected.log_evidence)
    assert torch.equal(torch.rand(2, generator=seeded(np.int64(5))), torch.rand(2, generator=seeded(5)))


@pytest.mark.parametrize("value", [True, False, 0, 1, np.bool_(True)])
def test_flags_that_are_flags(value) -> None:
    check_flag("throw", value)


@pytest.mark.parametrize("value", ["no", None, 2, 0.0, torch.tensor(True), [True]])
def test_flags_that_are_none(value) -> None:
    with pytest.raises(BadInput, match=r"throw.*; expected True or False"):
        check_flag("throw", value)


def test_a_count_has_a_largest_value() -> None:
    assert check_count("num_samples", 2**53) == 2**53
    with pytest.raises(BadInput, match=r"at least 1 and at most 9,007,199,254,740,992\."):
        check_count("num_samples", 2**53 + 1)


@pytest.mark.parametrize(
    "fit, said",
    [
        (lambda: REVM(linear, centre=lambda s: None).run(X, T), r"centre gave None; expected a tensor"),
        (lambda: REVM(linear, ridge=lambda w, s: "1").run(X, T), r"ridge gave '1'; expected a prior precision"),
        (lambda: REVM(linear, approximation=lambda *a: 1).run(X, T), r"approximation gave 1; expected a Quadratic"),
        (lambda: LaplaceEvidence(linear, curvature=lambda *a: None).run(X, T), r"curvature gave None; expected a prec"),
        (lambda: LaplaceEvidence(linear, curvature=lambda *a: torch.ones(1)).run(X, T), r"curvature gave shape \(1,\)"),
        (lambda: RVM(classifier(lambda X: None)).run(X, LABELS), r"basis gave None; expected a design matrix"),
        (lambda: EvidenceEM(gaussian_mixture(2, noise=lambda *a: None)).run(X), r"noise gave None; expected a funct"),
        (lambda: LaplaceEvidence(linear).run(X, T).loo(by=1.5), r"by=1.5; expected a plate's or argument's name"),
        (lambda: LaplaceEvidence(linear).run(X, T).blocks([]), r"blocks\(\[\]\): expected a latent site"),
        (lambda: EvidenceEM(gaussian_mixture(2), update=lambda e: None).run(X), r"update gave None; expected a Mix"),
        (lambda: OverlapEM(prbf(2, 2), update=lambda p: 3).run(X, LABELS.long()), r"update gave 3; expected the"),
        (
            lambda: OverlapEM(prbf(2, 2), initial=lambda t, start: 3).run(X, LABELS.long()),
            r"initial gave 3; expected a Network",
        ),
    ],
)
def test_what_a_function_of_the_users_gives(fit, said) -> None:
    with pytest.raises(BadInput, match=said):
        fit()
