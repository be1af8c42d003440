"""The textbook's mixed models from zero, against maximum likelihood by lme4 1.1-31 and glmmTMB 1.1.5."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Stop
from tests.models_for_tests.engine_models import positive

MOST_STEPS = 15
Case = tuple[Callable[..., None], tuple[Any, ...]]


@pytest.fixture
def table(data_dir: Path) -> Callable[[str], dict[str, list[str]]]:
    def read(name: str) -> dict[str, list[str]]:
        with (data_dir / f"{name}.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return {key: [row[key] for row in rows] for key in rows[0]}

    return read


def codes(column: list[str]) -> tuple[Tensor, int]:
    levels = sorted(set(column))
    return torch.tensor([levels.index(c) for c in column]), len(levels)


def numbers(column: list[str]) -> Tensor:
    return torch.tensor([float(c) for c in column])


def contrasts(column: list[str]) -> Tensor:
    index, num = codes(column)
    return torch.nn.functional.one_hot(index, num)[:, 1:].double()


def sleepstudy(columns: dict[str, list[str]]) -> Case:
    (group, num), x, y = codes(columns["Subject"]), numbers(columns["Days"]), numbers(columns["Reaction"])

    def model(x: Tensor, y: Tensor) -> None:
        b, sd, sigma = pyro.param("b", torch.zeros(2)), positive("sd", torch.ones(2)), positive("sigma", 1.0)
        L = pyro.param("L", torch.eye(2), constraint=constraints.corr_cholesky)
        with pyro.plate("subjects", num):
            a = pyro.sample("a", dist.MultivariateNormal(torch.zeros(2), scale_tril=sd[:, None] * L))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(b[0] + a[group, 0] + (b[1] + a[group, 1]) * x, sigma), obs=y)

    return model, (x, y)


def penicillin(columns: dict[str, list[str]]) -> Case:
    (plate, plates), (sample, samples) = codes(columns["plate"]), codes(columns["sample"])

    def model(y: Tensor) -> None:
        b, sigma = pyro.param("b", torch.zeros(1)), positive("sigma", 1.0)
        with pyro.plate("plates", plates):
            a = pyro.sample("a", dist.Normal(0.0, positive("sd_plate", 1.0)))
        with pyro.plate("samples", samples):
            c = pyro.sample("c", dist.Normal(0.0, positive("sd_sample", 1.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(b + a[plate] + c[sample], sigma), obs=y)

    return model, (numbers(columns["diameter"]),)


def cbpp(columns: dict[str, list[str]]) -> Case:
    (herd, herds), size = codes(columns["herd"]), numbers(columns["size"])
    X = torch.cat([torch.ones(len(size), 1), contrasts(columns["period"])], 1)

    def model(X: Tensor, y: Tensor) -> None:
        b, sd = pyro.param("b", torch.zeros(4)), positive("sd", 1.0)
        with pyro.plate("herds", herds):
            a = pyro.sample("a", dist.Normal(0.0, sd))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Binomial(size, logits=X @ b + a[herd]), obs=y)

    return model, (X, numbers(columns["incidence"]))


def verbagg(columns: dict[str, list[str]]) -> Case:
    (person, persons), (item, items) = codes(columns["id"]), codes(columns["item"])
    anger = numbers(columns["Anger"]).unsqueeze(-1)
    factors = [contrasts(columns[name]) for name in ("Gender", "btype", "situ")]
    X = torch.cat([torch.ones_like(anger), anger, *factors], 1)

    def model(X: Tensor, y: Tensor) -> None:
        b = pyro.param("b", torch.zeros(X.shape[1]))
        with pyro.plate("persons", persons):
            a = pyro.sample("a", dist.Normal(0.0, positive("sd_person", 1.0)))
        with pyro.plate("items", items):
            c = pyro.sample("c", dist.Normal(0.0, positive("sd_item", 1.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=X @ b + a[person] + c[item]), obs=y)

    return model, (X, torch.tensor([float(r == "Y") for r in columns["r2"]]))


def fit(case: Case) -> LaplacePosterior:
    model, args = case
    return LaplaceEvidence(model, stop=Stop(progress=False)).run(*args)


EXPECTED = {
    sleepstudy: (-875.9696722, {"b": [251.4051, 10.4673], "sd": [23.7798, 5.7168], "sigma": [25.5919]}),
    penicillin: (-166.0941743, {"b": [22.97222], "sd_plate": [0.84557], "sd_sample": [1.77065], "sigma": [0.54993]}),
    cbpp: (-92.02628, {"b": [-1.39853, -0.99233, -1.12867, -1.58031], "sd": [0.64226]}),
    verbagg: (-4075.69986, {"sd_person": [1.33970], "sd_item": [0.49531]}),
}


@pytest.mark.parametrize(
    "model", [sleepstudy, penicillin, cbpp, pytest.param(verbagg, marks=pytest.mark.slow)], ids=lambda m: m.__name__
)
def test_from_zero_in_few_steps(table: Callable[[str], dict[str, list[str]]], model: Callable[..., Case]) -> None:
    found = fit(model(table(model.__name__)))
    log_likelihood, values = EXPECTED[model]
    assert float(found.log_evidence) == pytest.approx(log_likelihood, abs=1e-5)
    assert found.status == "converged" and len(found.log_evidences) - 1 <= MOST_STEPS
    for name, expected in values.items():
        torch.testing.assert_close(found.hyperparameters[name].reshape(-1), torch.tensor(expected), rtol=1e-3, atol=0.0)


def test_standard_errors_of_fixed_effects_are_lme4s(table: Callable[[str], dict[str, list[str]]]) -> None:
    sd = fit(sleepstudy(table("sleepstudy"))).hyperparameter_covariance().sd["b"]
    torch.testing.assert_close(sd, torch.tensor([6.632, 1.502]), rtol=0.0, atol=5e-4)
