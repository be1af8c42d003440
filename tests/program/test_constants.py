"""The constants of priors: which there are, what a step does to them, and the density with them moved."""

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.program.constants import PriorConstant, Stepped, after_steps, prior_constants
from pyro_evidence.program.log_joint import LogJoint


def several(t: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(torch.tensor([1.0, 2.0]), 3.0).to_event(1))
    b = pyro.sample("b", dist.Gamma(torch.tensor(2.0), torch.tensor(5.0)))
    c = pyro.sample("c", dist.Normal(a.sum(), torch.tensor(0.5)))
    d = pyro.sample("d", dist.Uniform(torch.tensor(0.0), torch.tensor(4.0)))
    pyro.sample("t", dist.Normal(c + b * d, 1.0), obs=t)


def constants_of_several() -> tuple[LogJoint, dict[str, PriorConstant], tuple[str, ...]]:
    joint = LogJoint(several, (torch.tensor(0.3),))
    found, left_out = prior_constants(joint, joint.initial_u, joint.initial_theta)
    return joint, {constant.name: constant for constant in found}, left_out


def test_constants_are_arguments_that_no_latent_moves() -> None:
    """A location moves by its prior's scale, a scale doubles, and the bounds of a support stay."""
    _, found, left_out = constants_of_several()
    assert set(found) == {"a.loc", "a.scale", "b.concentration", "b.rate", "c.scale"}
    assert set(left_out) == {"d.low", "d.high"}
    unit = found["a.loc"].unit
    assert unit is not None and unit.tolist() == [3.0, 3.0]
    assert all(constant.unit is None for name, constant in found.items() if name != "a.loc")
    assert after_steps(torch.tensor(3.0), None, torch.tensor(-2.0)) == 0.75
    assert after_steps(torch.tensor(3.0), torch.tensor(0.5), torch.tensor(-2.0)) == 2.0


def test_a_model_with_moved_constants_has_the_density_written_out() -> None:
    joint, found, _ = constants_of_several()
    moved = [found["a.loc"], found["b.rate"]]
    stepped = LogJoint(Stepped(several, moved), (torch.tensor(0.3),))
    u, steps = torch.tensor([0.2, -0.4, 0.6, 0.1, -1.0]), torch.tensor([2.0, -1.0])
    before, after = (float(at.log_joint(u, theta)) for at, theta in ((stepped, 0.0 * steps), (stepped, steps)))
    assert before == float(joint.log_joint(u, joint.initial_theta))
    a, b = u[:2], u[2].exp()
    gain = dist.Normal(torch.tensor([7.0, 8.0]), 3.0).log_prob(a).sum() + dist.Gamma(2.0, 2.5).log_prob(b)
    loss = dist.Normal(torch.tensor([1.0, 2.0]), 3.0).log_prob(a).sum() + dist.Gamma(2.0, 5.0).log_prob(b)
    torch.testing.assert_close(torch.tensor(after - before), gain - loss)
