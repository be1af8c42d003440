"""Each datum counts once: a log density has the axes of its plates, and no others that a plate has stretched."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence import BadInput
from pyro_evidence.program import LogJoint
from tests.refusals.messages import refused, says

N = 6
DATA = torch.linspace(-1.0, 1.0, N)
TABLE = torch.stack([DATA, DATA + 1.0, DATA + 2.0])  # (3, N)
COLUMN = torch.ones(N, 1)

Model = Callable[[], None]


def weight() -> Tensor:
    value: Tensor = pyro.sample("w", dist.Normal(0.0, 1.0))
    return value


def predictor() -> None:
    mean = COLUMN * weight()
    with pyro.plate("data", N):
        pyro.sample("t", dist.Normal(mean, 0.5), obs=DATA)


def both() -> None:
    mean = COLUMN * weight()
    with pyro.plate("data", N):
        pyro.sample("t", dist.Normal(mean, 0.5), obs=DATA[:, None])


def likelihood() -> None:
    mean = COLUMN * weight()
    with pyro.plate("data", N):
        pyro.factor("t", dist.Normal(mean, 0.5).log_prob(DATA[:, None]))


def latent() -> None:
    w = weight()
    with pyro.plate("data", N):
        z = pyro.sample("t", dist.Normal(w * COLUMN, 1.0))
        pyro.sample("y", dist.Normal(z, 0.5), obs=DATA.expand(N, N))


def masked() -> None:
    w = weight()
    with pyro.plate("data", N), poutine.mask(mask=COLUMN > 0):
        pyro.sample("t", dist.Normal(w, 0.5), obs=DATA)


def partly_observed() -> None:
    mean = COLUMN * weight()
    with pyro.plate("data", N):
        pyro.sample("t", dist.Normal(mean, 0.5), obs=DATA, obs_mask=DATA > 0)


def left_plate() -> None:
    mean = torch.ones(4, 1, 1) * weight()
    with pyro.plate("rows", 3, dim=-2):
        pyro.sample("t", dist.Normal(mean, 0.5), obs=TABLE[:, :1])


def mixture() -> None:
    mean = torch.tensor([-1.0, 1.0]) * weight()
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Categorical(torch.ones(2)))
        pyro.sample("t", dist.Normal(mean[z] * COLUMN, 0.5), obs=DATA)


@pytest.mark.parametrize(
    "model",
    [predictor, both, likelihood, latent, masked, partly_observed, left_plate, mixture],
    ids=lambda m: m.__name__,
)
def test_what_a_plate_would_stretch_is_refused(model: Model) -> None:
    says(refused(BadInput, model), "site 't", "No plate declares axis -", "take .squeeze(-1)", ".to_event(1)")


def test_the_letter_names_site_shapes_and_plate() -> None:
    says(
        refused(BadInput, predictor),
        "site 't': values of shape (6,) have a log density of shape (6, 6)",
        "in plate(s) 'data' of size 6 at axis -1",
        "No plate declares axis -2, along which each datum would count 6 times",
    )
    says(refused(BadInput, left_plate), "'rows' of size 3 at axis -2", "No plate declares axis -3")
    says(refused(BadInput, latent), "along which it would be drawn 6 times")


# What is right stays right: the log joint at w = 0, by hand


def squeezed() -> None:
    mean = COLUMN.squeeze(-1) * weight()
    with pyro.plate("data", N):
        pyro.sample("t", dist.Normal(mean, 0.5), obs=DATA)


def one_event() -> None:
    mean = COLUMN * weight()
    with pyro.plate("data", N):
        pyro.sample("t", dist.Normal(mean, 0.5).to_event(1), obs=DATA[:, None])


def column_plate() -> None:
    mean = COLUMN * weight()
    with pyro.plate("data", N, dim=-2):
        pyro.sample("t", dist.Normal(mean, 0.5), obs=DATA[:, None])


def a_number_for_each_cell() -> None:
    w = weight()
    with pyro.plate("data", N):
        pyro.sample("t", dist.Normal(w * torch.ones(3, 1), 0.5), obs=TABLE)


def crossed() -> None:
    w = weight()
    with pyro.plate("rows", 3, dim=-2), pyro.plate("data", N, dim=-1), poutine.mask(mask=torch.ones(3, 1) > 0):
        pyro.sample("t", dist.Normal(w, 0.5), obs=TABLE)


def with_a_column_kept() -> None:
    mean = COLUMN * weight()
    with pyro.plate("data", N):
        pyro.deterministic("mean", mean, event_dim=0)
        pyro.sample("t", dist.Normal(mean.squeeze(-1), 0.5), obs=DATA)


def one_by_one() -> None:
    w = weight()
    for i in pyro.plate("data", N):
        pyro.sample(f"t_{i}", dist.Normal(w, 0.5), obs=DATA[i])


def several_one_by_one() -> None:
    w = weight()
    for i in pyro.plate("data", N):
        pyro.sample(f"t_{i}", dist.Normal(w * torch.ones(3), 0.5), obs=DATA[i])


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (squeezed, DATA),
        (one_event, DATA),
        (column_plate, DATA),
        (a_number_for_each_cell, TABLE),
        (crossed, TABLE),
        (with_a_column_kept, DATA),
        (one_by_one, DATA),
        (several_one_by_one, DATA.expand(3, N)),
    ],
)
def test_what_the_plates_declare_is_the_density(model: Model, data: Tensor) -> None:
    joint = LogJoint(model)
    expected = dist.Normal(0.0, 0.5).log_prob(data).sum() + dist.Normal(0.0, 1.0).log_prob(torch.zeros(()))
    torch.testing.assert_close(joint.log_joint(joint.initial_u, joint.initial_theta), expected.double())
