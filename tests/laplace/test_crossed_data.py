"""Mixed models of real data: maximum likelihood by lme4 1.1-31 and glmmTMB 1.1.5 (Laplace), in nats."""

import csv
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from tests.models_for_tests.hierarchies import positive

QUIET = Stop(progress=False)


def columns(path: Path) -> dict[str, list[str]]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in rows[0]}


def levels(column: list[str]) -> tuple[Tensor, int]:
    names = sorted(set(column))
    place = {name: i for i, name in enumerate(names)}
    return torch.tensor([place[x] for x in column]), len(names)


def numbers(column: list[str]) -> Tensor:
    return torch.tensor([float(x) for x in column])


def intercepts(X: Tensor, y: Tensor, *factors: Tensor, sizes: tuple[int, ...], gaussian: bool) -> None:
    """Fixed effects as params, one intercept for each level of each factor."""
    eta = X @ pyro.param("b", torch.zeros(X.shape[1]))
    for i, (factor, size) in enumerate(zip(factors, sizes, strict=True)):
        with pyro.plate(f"plate_{i}", size):
            effect = pyro.sample(f"effect_{i}", dist.Normal(0.0, positive(f"sd_{i}")))
        eta = eta + effect[factor]
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(eta, positive("sigma")) if gaussian else dist.Bernoulli(logits=eta), obs=y)


def test_persons_and_items(data_dir: Path) -> None:
    data = columns(data_dir / "verbagg.csv")
    person, item = levels(data["id"]), levels(data["item"])
    parts = [torch.ones(len(data["id"])), numbers(data["Anger"])]
    for name in ("Gender", "btype", "situ"):
        level, size = levels(data[name])
        parts += [(level == k).double() for k in range(1, size)]
    y = torch.tensor([float(x == "Y") for x in data["r2"]])
    args = (torch.stack(parts, -1), y, person[0], item[0])
    posterior = LaplaceEvidence(intercepts, stop=QUIET).run(*args, sizes=(person[1], item[1]), gaussian=False)
    assert abs(float(posterior.log_evidence) + 4075.69986) < 1e-4
    sds = torch.stack([posterior.hyperparameters["sd_0"], posterior.hyperparameters["sd_1"]])
    torch.testing.assert_close(sds, torch.tensor([1.33970, 0.49531]), rtol=1e-3, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("gaussian", [True, False])
def test_students_and_lecturers(data_dir: Path, gaussian: bool) -> None:
    data = columns(data_dir / "insteval.csv")
    factors = [levels(data[name]) for name in ("s", "d", "dept")[: 3 if gaussian else 2]]
    one, y = torch.ones(len(data["y"])), numbers(data["y"])
    X = one.unsqueeze(-1) if gaussian else torch.stack([one, numbers(data["service"])], -1)
    y = y if gaussian else (y >= 4.0).double()
    sizes = tuple(size for _, size in factors)
    posterior = LaplaceEvidence(intercepts, stop=QUIET).run(
        X, y, *(f for f, _ in factors), sizes=sizes, gaussian=gaussian
    )
    expected = -118884.7862 if gaussian else -46414.52183
    reference = torch.tensor([0.32642, 0.51730, 0.07736] if gaussian else [0.47606, 0.79644])
    assert abs(float(posterior.log_evidence) - expected) < 1e-3
    sds = torch.stack([posterior.hyperparameters[f"sd_{i}"] for i in range(len(sizes))])
    torch.testing.assert_close(sds, reference, rtol=1e-3, atol=0.0)
