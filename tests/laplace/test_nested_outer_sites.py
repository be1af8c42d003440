"""Which sites are integrated numerically: scales, correlations, kernel settings; never locations, weights, layers."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.laplace.nested.outer_sites import found_outer
from pyro_evidence.program.log_joint import LogJoint
from tests.models_for_tests.sampled_scales import CASES, SCHOOLS, Case, schools_centred


@pytest.mark.parametrize("case", CASES, ids=[c.model.__name__ for c in CASES])
def test_sites_that_spread_others_are_found(case: Case) -> None:
    assert " ".join(found_outer(LogJoint(case.model, case.data))) == case.outer


def test_a_maximised_site_is_not_integrated() -> None:
    assert found_outer(LogJoint(schools_centred, (SCHOOLS,), hyper=["tau"])) == ()


def test_the_scale_of_a_scale_goes_with_it() -> None:
    def model(y: Tensor) -> None:
        width, mu = pyro.sample("width", dist.HalfNormal(5.0)), pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(width))
        with pyro.plate("units", 8):
            pyro.sample("y", dist.Normal(pyro.sample("theta", dist.Normal(mu, tau)), 10.0), obs=y)

    assert found_outer(LogJoint(model, (SCHOOLS,))) == ("tau", "width")


def test_scales_of_enumerated_components_stay_inside() -> None:
    def model(y: Tensor) -> None:
        with pyro.plate("components", 2):
            loc, scale = pyro.sample("loc", dist.Normal(0.0, 10.0)), pyro.sample("scale", dist.HalfNormal(5.0))
        with pyro.plate("data", 8):
            z = pyro.sample("z", dist.Categorical(torch.ones(2)))
            pyro.sample("y", dist.Normal(loc[z], scale[z]), obs=y)

    assert found_outer(LogJoint(model, (SCHOOLS,))) == ()


def test_single_precision_finds_the_same() -> None:
    assert found_outer(LogJoint(schools_centred, (SCHOOLS.float(),))) == ("tau",)
