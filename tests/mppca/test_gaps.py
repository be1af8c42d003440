"""EvidenceEM on mixtures of probabilistic PCA and data with gaps."""

import math
from pathlib import Path

import pyro
import pytest
import torch
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal

from pyro_evidence import BadInput, EvidenceEM
from pyro_evidence.models.mppca import MPPCA, DiagonalNoise, explicit_latents, mppca
from pyro_evidence.models.wrappers import marginalised
from pyro_evidence.mppca import MPPCAPosterior
from pyro_evidence.mppca.data import Observations
from pyro_evidence.program import LogJoint
from pyro_evidence.program.distributions import WithGaps
from pyro_evidence.program.log_joint import Model
from tests.mppca.test_fit import QUIET, SHORT, fit, my_model, near, planes


def gappy(num: int = 160) -> Tensor:
    """Two planes, every seventh value missing, and one datum wholly."""
    Y = planes(num)
    Y.view(-1)[::7] = torch.nan
    Y[2] = torch.nan
    return Y


@pytest.fixture(scope="module")
def found() -> MPPCAPosterior:
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()  # a fixture of a module begins before those of its tests
    return fit(gappy(), marginalised(mppca(3, 2)))


def test_planes_are_found_in_spite_of_gaps(found: MPPCAPosterior) -> None:
    whole = fit(planes())
    assert found.num_components == 2 and found.num_latents.sort().values.tolist() == [0, 2, 2]
    assert abs(float(found.log_prob(planes()).mean() - whole.log_prob().mean())) < 0.05
    gone = gappy().isnan()
    error = (found.reconstruct() - planes())[gone].square().mean()
    assert float(error) < 0.25 * float(planes().var(0).mean())


def test_evidence_is_that_of_what_was_seen(found: MPPCAPosterior) -> None:
    """Oracle: importance sampling; and the log joint of the Pyro model that NUTS would see, at a mode of it.

    By 40,000 draws each from the approximation made 10 and 20 % wider, and from Student's t of 15 and 30 degrees of
    freedom about it, the log evidence is -810.27 (+- .01 each): Laplace's, -810.72, is too low, because the density is
    not Gaussian.
    """
    said = found.diagnostics(3000)
    assert said["pareto_k"] < 0.8
    assert said["log_evidence"] == pytest.approx(-810.7237, abs=1e-3)
    assert said["log_evidence_importance"] == pytest.approx(-810.27, abs=0.2)
    joint = LogJoint(found.model, (gappy(),))
    u = found.state.u.clone().requires_grad_()
    value = joint.log_joint(u, joint.initial_theta)
    near(value.detach(), found.state.log_joint)
    assert float(torch.autograd.grad(value, u)[0].abs().max()) < 1e-5


@pytest.mark.parametrize("model", [mppca(3, 2), mppca(3, 2, latents=explicit_latents)], ids=["marginal", "kept"])
def test_without_gaps_nothing_changes(model: MPPCA) -> None:
    near(fit(planes(), marginalised(model)).log_evidence, fit(planes(), model).log_evidence)


def test_units_change_nothing_else(found: MPPCAPosterior) -> None:
    other = fit(1000.0 * gappy() + 1e6, marginalised(mppca(3, 2)))
    num = int((~gappy().isnan()).sum())
    near(other.log_evidence, found.log_evidence - num * math.log(1000.0), 1e-6)
    near(other.log_prob(), found.log_prob() - (~gappy().isnan()).sum(-1) * math.log(1000.0), 1e-5)


def test_the_unit_is_that_of_what_was_seen() -> None:
    Y = gappy()
    each = torch.stack([column[~column.isnan()].var(correction=0) for column in Y.T])
    found = Observations.resident(Y).units
    near(found.unit, each.mean().sqrt())
    near(found.origin, torch.stack([column[~column.isnan()].mean() for column in Y.T]))


def test_other_noise_and_models_of_ones_own_take_gaps_too() -> None:
    Y = torch.cat([planes(2), gappy()])
    assert math.isfinite(float(fit(Y, marginalised(mppca(2, 2, noise=DiagonalNoise())), stop=SHORT).log_evidence))
    found = EvidenceEM(marginalised(my_model), stop=QUIET).run(Y)
    assert isinstance(found, MPPCAPosterior)
    joint = LogJoint(found.model, (Y,))
    near(joint.log_joint(found.state.u, joint.initial_theta), found.state.log_joint)


def test_a_posterior_survives_the_disk(found: MPPCAPosterior, tmp_path: Path) -> None:
    found.save(tmp_path / "fit.pt")
    again = MPPCAPosterior.load(tmp_path / "fit.pt", marginalised(mppca(3, 2)))
    near(again.log_evidence, found.log_evidence)
    near(again.log_prob(), found.log_prob())


def test_a_gaussian_of_low_rank_is_integrated_over_what_is_missing() -> None:
    """Oracle: the dense Gaussian."""
    factor, diagonal, loc = torch.randn(4, 2), torch.rand(4) + 0.5, torch.randn(4)
    fn = LowRankMultivariateNormal(loc, factor, diagonal)
    dense = torch.distributions.MultivariateNormal(loc, fn.covariance_matrix)
    seen = torch.tensor([[True, False, True, True]])
    kept_columns = torch.tensor([0, 2, 3])
    value = torch.randn(1, 4)
    C = dense.covariance_matrix[kept_columns][:, kept_columns]
    expected = torch.distributions.MultivariateNormal(loc[kept_columns], C).log_prob(value[:, kept_columns])
    near(WithGaps(fn, seen).log_prob(value), expected)


@pytest.mark.parametrize(
    ("column", "value", "model", "message"),
    [
        (1, math.nan, marginalised(mppca(3, 2)), r"only nan, in columns \[1\].*Drop them"),
        (1, math.inf, marginalised(mppca(3, 2)), r"160 values that are inf in columns \[1\]"),
        (1, math.nan, mppca(3, 2), r"only nan, in columns \[1\].*EvidenceEM\(marginalised\(model\)\)"),
    ],
)
def test_gaps_that_cannot_be_filled_are_refused(column: int, value: float, model: Model, message: str) -> None:
    Y = planes()
    Y[:, column] = value
    with pytest.raises(BadInput, match=message):
        fit(Y, model)
