"""EvidenceEM on mixtures of probabilistic PCA: what is refused, and poor data."""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, LaplaceEvidence, NotAMode, NotConverged, Stop, UnsupportedModel
from pyro_evidence.models.mppca import (
    MPPCA,
    DiagonalNoise,
    IsotropicNoise,
    Latents,
    PerColumn,
    explicit_latents,
    marginal,
    mppca,
)
from pyro_evidence.models.regression import Learned
from pyro_evidence.mppca import MPPCAPosterior
from tests.models_for_tests.mppca_cases import QUIET, SHORT, fit, my_model, planes


@pytest.mark.parametrize(
    ("Y", "message"),
    [
        (torch.tensor([[1.0, math.nan, 0.0], [0.0, 1.0, 2.0]]), "1 nan"),
        (torch.tensor([[1.0, math.inf, 0.0], [0.0, 1.0, 2.0]]), r"1 values that are inf in columns \[1\]"),
        (torch.tensor([[1.0, 1e120, 0.0], [0.0, 1.0, 2.0]]), r"1e\+120 at \[0, 1\].*divide by a typical value"),
        (1e12 * planes(200).float(), r"in torch.float32, or powers.*Rescale: Y / Y.std\(\)"),
        (planes(8).half(), "float16"),
        (torch.zeros(3), r"shape \(3,\)"),
        (torch.zeros(0, 3), "no data; expected at least one row"),
        (torch.zeros(4, 3).long(), "int64"),
        (torch.randn(9, 2), "num_latents=2"),
        (torch.randn(9, 2), "^num_latents=2 and Y has 2 columns.* num_latents=1 at most, or .*FullNoise"),
        (torch.randn(9, 1), r"Pass gaussian_mixture\(K, noise=FullNoise\(\)\)\.$"),
        (torch.randn(1, 3), "at least two"),
    ],
)
def test_bad_data_are_refused(Y: Tensor, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fit(Y)


@pytest.mark.parametrize(("num_components", "num_latents"), [(0, 2), (2, 0), (2, -1), (2.0, 1), (2, True)])
def test_bad_sizes_are_refused(num_components: int, num_latents: int) -> None:
    with pytest.raises(BadInput, match="whole number"):
        mppca(num_components, num_latents)


@pytest.mark.parametrize("alpha", [torch.ones(4), torch.ones(2, 3), -1.0, PerColumn(torch.ones(2))])
def test_bad_precisions_are_refused(alpha: Tensor | float) -> None:
    with pytest.raises(BadInput, match="alpha"):
        mppca(3, 2, alpha=alpha)


def test_no_latents_is_a_spherical_mixture() -> None:
    with pytest.raises(BadInput, match=r"gaussian_mixture\(K, noise=SphericalNoise\(\)\)"):
        mppca(2, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": "ard"}, "'ard'; expected a number greater than 0"),
        ({"noise": "diagonal"}, r"noise='diagonal'; expected .* IsotropicNoise\(\)"),
        ({"noise": DiagonalNoise}, "noise=.*DiagonalNoise"),
        ({"latents": "kept"}, "latents='kept'; expected .* marginal"),
    ],
)
def test_settings_that_are_none_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        mppca(2, 2, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (IsotropicNoise(-1.0), "beta has the value -1; expected finite and greater than 0"),
        (IsotropicNoise(torch.ones(5)), r"^beta has shape \(5,\); expected \(\) or \(3,\), one per component\.$"),
        (
            DiagonalNoise(torch.ones(3)),
            r"^beta has shape \(3,\); expected \(\) or \(3, 5\), one per component and output",
        ),
        (DiagonalNoise(Learned(torch.ones(3, 5, 1))), r"shape \(3, 5, 1\)"),
    ],
)
def test_noise_that_does_not_fit_is_refused(noise: IsotropicNoise | DiagonalNoise, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fit(planes(), mppca(3, 2, noise=noise))


@pytest.mark.parametrize("num_samples", [0, -1, 2.0, True])
def test_a_number_of_draws_is_a_number(two: MPPCAPosterior, num_samples: int) -> None:
    with pytest.raises(BadInput, match="num_samples"):
        two.sample(num_samples)


def test_no_data_have_no_densities(two: MPPCAPosterior) -> None:
    none = torch.zeros(0, 5)
    assert two.log_prob(none).shape == (0,) and two.responsibilities(none).shape == (0, 3)
    assert two.reconstruct(none).shape == (0, 5) and two.transform(none).covariance.shape == (0, 3, 2, 2)


def test_rounds_that_run_out_are_told() -> None:
    Y, stop = planes(), Stop(num_steps=3, throw=False, progress=False)
    with pytest.warns(UserWarning, match="ran out of steps"):
        fit(Y, stop=stop, deletion=None)
    with pytest.raises(NotConverged, match="ran out of steps") as caught:
        fit(Y, stop=replace(stop, throw=True), deletion=None)
    assert isinstance(caught.value.posterior, MPPCAPosterior)
    assert fit(Y, stop=replace(stop, tolerance=0.0), deletion=None).status.startswith("ran out")  # as it was asked to


@pytest.mark.parametrize(
    "model", [mppca(2, 2), mppca(1, 2, latents=explicit_latents), my_model], ids=["marginal", "kept", "own"]
)
def test_an_engine_for_points_refuses_orbits(model: MPPCA) -> None:
    with pytest.raises(UnsupportedModel, match=r"can be turned.*EvidenceEM\(model\)"):
        LaplaceEvidence(model).run(planes(30))


def test_an_engine_for_points_takes_one_axis() -> None:
    assert math.isfinite(float(LaplaceEvidence(mppca(1, 1)).run(planes(30)).log_evidence))


def heavy(Y: Tensor, freedom: float = 3.0) -> None:
    prior = dist.StudentT(freedom, torch.zeros(1, 5, 2), 1.0) if math.isfinite(freedom) else dist.Normal(0.0, 1.0)
    W = pyro.sample("W", prior.expand([1, 5, 2]).to_event(3))
    with pyro.plate("rows", len(Y)):
        pyro.sample("y", dist.LowRankMultivariateNormal(torch.zeros(5), W[0], torch.ones(5)), obs=Y)


def test_a_model_that_is_nearly_one_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModel, match="not Normal about zero"):
        EvidenceEM(heavy, stop=QUIET).run(planes())
    assert EvidenceEM(heavy, stop=QUIET).run(planes(), math.inf).num_components == 1


POOR = {
    "constant column": torch.cat([planes(60, 4), torch.ones(60, 1)], 1),
    "several constant columns": torch.cat([planes(60, 4), torch.zeros(60, 4)], 1),
    "rank deficient": planes(60, 4)[:, :2] @ torch.ones(2, 5),
    "fewer data than latents": planes(4, 6),
    "identical rows": torch.ones(20, 4),
    "two rows": planes(2, 5),
    "an outlier": torch.cat([planes(60), torch.full((1, 5), 1e6)]),
    "more columns than rows": torch.randn(8, 30, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("name", POOR)
@pytest.mark.parametrize("noise", [IsotropicNoise(), DiagonalNoise()])
def test_poor_data_give_a_finite_density(name: str, noise: IsotropicNoise | DiagonalNoise) -> None:
    found = fit(POOR[name], mppca(4, 3, noise=noise), stop=SHORT)
    assert bool(found.log_prob().isfinite().all()) and found.num_components >= 1
    assert bool(found.refusal) or math.isfinite(float(found.log_evidence))


def test_a_column_that_vanishes_is_a_reason_to_refuse() -> None:
    """Noise alone has no principal axes: under a precision that is held columns shrink, and the evidence says so."""
    Y = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
    found = fit(Y, mppca(1, 2, alpha=400.0))
    assert "as short as they are uncertain" in found.refusal
    with pytest.raises(NotAMode, match="PerColumn"):
        found.log_evidence  # noqa: B018 - asking for it raises
    assert math.isnan(found.diagnostics(10)["log_evidence"]) and "short" in repr(found)


@pytest.mark.parametrize("latents", [marginal, explicit_latents])
def test_svi_runs_on_either_form(latents: Latents) -> None:
    Y, model = planes(40), mppca(2, 2, latents=latents)
    guide = AutoNormal(poutine.block(model, hide=["z"]))
    loss = Trace_ELBO() if latents is marginal else TraceEnum_ELBO(max_plate_nesting=1)
    svi = SVI(model, guide, Adam({"lr": 0.02}), loss)
    losses = [svi.step(Y) for _ in range(60)]
    assert sum(losses[-10:]) < sum(losses[:10]) and math.isfinite(losses[-1])
