"""Log likelihood datum by datum, component tables and responsibilities, against plain loops."""

import math
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from pyro import poutine
from torch import Tensor

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.program.log_joint import LogJoint
from tests.oracles.density import at

assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

DATA = torch.tensor([0.3, -1.2, 2.0, 2.2])
KEEP = torch.tensor([True, True, False, True])
NO_THETA = torch.zeros(0)
LOC = torch.tensor([-0.5, 1.5])


def pointwise(model: Any, *args: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the program says at some point, and the latents there."""
    joint = LogJoint(model, args)
    u = at(joint)
    return joint.pointwise(u, NO_THETA), joint.latents.constrained(u)


# --- without discrete sites ---


def test_plates_mask_scale_and_two_sites() -> None:
    def model(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 4), poutine.scale(scale=2.0):
            pyro.sample("y", dist.Bernoulli(logits=w), obs=(x > 0).double())
            with poutine.mask(mask=KEEP):
                pyro.sample("x", dist.Normal(w, 0.5), obs=x)

    found, at = pointwise(model, DATA)
    assert list(found) == ["y", "x"]
    assert_exact(found["x"], 2.0 * torch.where(KEEP, td.Normal(at["w"], 0.5).log_prob(DATA), 0.0))
    assert_exact(found["y"], 2.0 * td.Bernoulli(logits=at["w"]).log_prob((DATA > 0).double()))


def test_a_row_of_a_plate_is_one_datum() -> None:
    x = torch.stack([DATA, DATA + 1.0, DATA * 2.0])

    def model(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(w, 0.5).expand([3, 4]).to_event(1), obs=x)

    found, at = pointwise(model, x)
    assert_exact(found["x"], td.Normal(at["w"], 0.5).log_prob(x).sum(-1))


@pytest.mark.parametrize("event_dims", [0, 1])
def test_without_a_plate_every_number_is_a_datum(event_dims: int) -> None:
    def model(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(w.expand(4), 0.5).to_event(event_dims), obs=x)

    found, at = pointwise(model, DATA)
    assert_exact(found["x"], td.Normal(at["w"], 0.5).log_prob(DATA))


def test_nested_plates_and_sequential_ones() -> None:
    x = torch.stack([DATA, DATA + 1.0])

    def model(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", 2, dim=-2), pyro.plate("members", 4, dim=-1):
            pyro.sample("x", dist.Normal(w, 0.5), obs=x)
        for i in pyro.plate("again", 2):
            pyro.sample(f"y_{i}", dist.Normal(w, 0.5), obs=x[0, i])

    found, at = pointwise(model, x)
    assert_exact(found["x"], td.Normal(at["w"], 0.5).log_prob(x))
    assert_exact(found["y_1"], td.Normal(at["w"], 0.5).log_prob(x[0, 1]))


def test_pointwise_and_priors_add_up_to_the_log_joint() -> None:
    joint = LogJoint(mixture, (DATA,))
    u = at(joint)
    values, log_det = joint.latents.constrained_with_log_det(u)
    prior = td.Dirichlet(torch.ones(2)).log_prob(values["p"]) + td.Normal(0.0, 3.0).log_prob(values["loc"]).sum()
    assert_exact(
        sum(v.sum() for v in joint.pointwise(u, NO_THETA).values()) + prior + log_det,
        joint.log_joint(u, NO_THETA),
    )


# --- with discrete sites ---


def mixture(x: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(p))
        pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


def naive_table(p: Tensor, loc: Tensor, x: Tensor) -> np.ndarray:
    """``log p(x_n, z_n = k)`` of unit-variance components, in NumPy."""
    table = np.empty((len(x), len(p)))
    for n in range(len(x)):
        for k in range(len(p)):
            residual = float(x[n]) - float(loc[k])
            table[n, k] = math.log(float(p[k])) - 0.5 * residual**2 - 0.5 * math.log(2.0 * math.pi)
    return table


def test_table_and_responsibilities_of_a_mixture() -> None:
    joint = LogJoint(mixture, (DATA,))
    u = at(joint)
    values = joint.latents.constrained(u)
    expected = naive_table(values["p"], values["loc"], DATA)
    assert_exact(joint.table(u, NO_THETA), torch.from_numpy(expected))
    resp = np.exp(expected) / np.exp(expected).sum(1, keepdims=True)
    assert_exact(joint.responsibilities(u, NO_THETA), torch.from_numpy(resp))
    assert_exact(joint.pointwise(u, NO_THETA), {"x": torch.from_numpy(np.log(np.exp(expected).sum(1)))})


def test_table_adds_all_sites_that_see_the_component_and_no_other() -> None:
    def model(x: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
            pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)
            pyro.sample("other", dist.Normal(loc[0], 1.0), obs=x)
            with pyro.plate("again", 3):
                pyro.sample("y", dist.Normal(loc[z], 1.0), obs=x + torch.arange(3.0).unsqueeze(-1))

    joint = LogJoint(model, (DATA,))
    u = at(joint)
    loc = joint.latents.constrained(u)["loc"]
    parts = [naive_table(torch.tensor([0.3, 0.7]), loc, DATA)]
    parts += [naive_table(torch.ones(2), loc, DATA + i) for i in range(3)]
    assert_exact(joint.table(u, NO_THETA), torch.from_numpy(sum(parts)))
    found = joint.pointwise(u, NO_THETA)
    assert set(found) == {"other", "x+y"}
    assert_exact(found["x+y"], torch.from_numpy(np.log(np.exp(sum(parts)).sum(1))))


@pytest.mark.parametrize("order", [1, -1])
def test_table_in_nested_plates_keeps_their_order(order: int) -> None:
    x = torch.stack([DATA, DATA + 1.0, DATA - 1.0])

    def model(x: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        first, second = [pyro.plate("inner", 4, dim=-1), pyro.plate("outer", 3, dim=-2)][::order]
        with first, second:
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
            pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)

    joint = LogJoint(model, (x,))
    u = at(joint)
    loc = joint.latents.constrained(u)["loc"]
    rows = [naive_table(torch.tensor([0.3, 0.7]), loc, row) for row in x]
    assert_exact(joint.table(u, NO_THETA), torch.from_numpy(np.stack(rows)))
    assert_exact(joint.pointwise(u, NO_THETA)["x"], torch.from_numpy(np.log(np.exp(np.stack(rows)).sum(-1))))


def test_masked_and_scaled_tables() -> None:
    def model(x: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with pyro.plate("data", len(x)), poutine.scale(scale=2.0), poutine.mask(mask=KEEP):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
            pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)

    joint = LogJoint(model, (DATA,))
    u = at(joint)
    expected = naive_table(torch.tensor([0.3, 0.7]), joint.latents.constrained(u)["loc"], DATA)
    expected[~KEEP.numpy()] = math.log(0.5)
    assert_exact(joint.table(u, NO_THETA), torch.from_numpy(expected))
    total = 2.0 * torch.from_numpy(np.log(np.exp(expected).sum(1)))
    assert_exact(joint.pointwise(u, NO_THETA)["x"], total)
    assert float(total[~KEEP]) == pytest.approx(0.0, abs=1e-15)


def test_latents_that_depend_on_the_component_count_in_its_table() -> None:
    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
            effect = pyro.sample("effect", dist.Normal(LOC[z], 1.0))
            pyro.sample("x", dist.Normal(effect, 1.0), obs=x)

    joint = LogJoint(model, (DATA,))
    u = at(joint)
    expected = naive_table(torch.tensor([0.3, 0.7]), LOC, joint.latents.constrained(u)["effect"])
    assert_exact(joint.table(u, NO_THETA), torch.from_numpy(expected))


def test_one_component_one_datum() -> None:
    def model(x: Tensor, num: int) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([num]).to_event(1))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Categorical(torch.ones(num)))
            pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)

    for x, num in ((DATA, 1), (DATA[:1], 2), (DATA[:1], 1)):
        joint = LogJoint(model, (x, num))
        u = at(joint)
        expected = torch.from_numpy(naive_table(torch.ones(num) / num, u, x))
        assert_exact(joint.table(u, NO_THETA), expected)
        assert_exact(joint.pointwise(u, NO_THETA)["x"], expected.logsumexp(-1))


def test_a_chain_inside_a_plate_of_sequences() -> None:
    p, start = torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0.5, 0.5])
    y = torch.stack([DATA, DATA + 1.0, -DATA])

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("sequences", len(y)):
            x = None
            for t in pyro.markov(range(4)):
                x = pyro.sample(f"x_{t}", dist.Categorical(start if x is None else p[x]))
                pyro.sample(f"y_{t}", dist.Normal(LOC[x], scale), obs=y[:, t])

    joint = LogJoint(model, (y,))
    u = at(joint)
    scale = float(joint.latents.constrained(u)["scale"])
    forward = np.zeros(3)
    for n, sequence in enumerate(y):
        alpha = start.numpy()
        for t, value in enumerate(sequence):
            alpha = alpha if t == 0 else alpha @ p.numpy()
            likelihood = td.Normal(LOC, scale).log_prob(value).exp().numpy()
            alpha = alpha * likelihood
        forward[n] = np.log(alpha.sum())
    found = joint.pointwise(u, NO_THETA)
    assert list(found) == ["y_0+y_1+y_2+y_3"]
    assert_exact(found["y_0+y_1+y_2+y_3"], torch.from_numpy(forward))


def test_a_site_shared_by_all_data_leaves_no_pointwise_likelihood() -> None:
    def model(x: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)

    joint = LogJoint(model, (DATA,))
    with pytest.raises(UnsupportedModel, match=r"'x'.*couples all data points"):
        joint.pointwise(at(joint), NO_THETA)
    expected = torch.from_numpy(naive_table(torch.ones(2), at(joint), DATA).sum(0))
    assert_exact(joint.table(at(joint), NO_THETA), expected + torch.tensor([0.3, 0.7]).log())


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_a_table_needs_exactly_one_discrete_site(names: tuple[str, ...]) -> None:
    def model(x: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(x)):
            shifts = [pyro.sample(n, dist.Bernoulli(0.5)) for n in names]
            pyro.sample("x", dist.Normal(loc + sum(shifts), 1.0), obs=x)

    joint = LogJoint(model, (DATA,))
    with pytest.raises(UnsupportedModel, match=f"has {len(names)}.*{', '.join(names) or 'none'}"):
        joint.table(at(joint), NO_THETA)
