"""A latent space that can be turned is refused by name; one that the data or the prior hold still is not."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Start, Stop, UnsupportedModel
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.symmetries import off_orbits, sign_flips

torch.manual_seed(0)
Y = torch.randn(30, 4, dtype=torch.float64)


def factor_analysis(Y: Tensor) -> None:
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))
    with pyro.plate("rows", len(Y)):
        pyro.sample("y", dist.LowRankMultivariateNormal(torch.zeros(4), loadings, torch.ones(4)), obs=Y)


def factorisation(Y: Tensor) -> None:
    left = pyro.sample("left", dist.Normal(torch.zeros(30, 3), 1.0).to_event(2))
    right = pyro.sample("right", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))
    pyro.sample("y", dist.Normal(left @ right.mT, 1.0).to_event(2), obs=Y)


def one_of_two(Y: Tensor) -> None:
    """Only the second part has columns of one prior precision."""
    scale = torch.tensor([[[1.0, 2.0]], [[1.0, 1.0]]]).expand(2, 4, 2)
    W = pyro.sample("W", dist.Normal(torch.zeros(2, 4, 2), scale).to_event(3))
    components = dist.LowRankMultivariateNormal(torch.zeros(2, 4), W, torch.ones(2, 4))
    with pyro.plate("rows", len(Y)):
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(torch.ones(2) / 2), components), obs=Y)


def told_apart(Y: Tensor) -> None:
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(4, 2), torch.tensor([1.0, 2.0])).to_event(2))
    with pyro.plate("rows", len(Y)):
        pyro.sample("y", dist.LowRankMultivariateNormal(torch.zeros(4), loadings, torch.ones(4)), obs=Y)


def of_own_scales(Y: Tensor) -> None:
    """Columns whose scales are equal only where the search begins."""
    scale = pyro.param("scale", torch.ones(2), constraint=dist.constraints.positive)
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(3, 2), scale).to_event(2))
    with pyro.plate("rows", len(Y)):
        pyro.sample("y", dist.LowRankMultivariateNormal(torch.zeros(3), loadings, 0.3 * torch.ones(3)), obs=Y)


def slopes(Y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(torch.zeros(5, 2), 1.0).to_event(2))
    x = torch.linspace(0.0, 1.0, 30)
    pyro.sample(
        "y", dist.Normal(b[torch.arange(30) % 5, 0] + b[torch.arange(30) % 5, 1] * x, 1.0).to_event(1), obs=Y[:, 0]
    )


def unused(Y: Tensor) -> None:
    pyro.sample("spare", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(m, 1.0).expand([30]).to_event(1), obs=Y[:, 0])


@pytest.mark.parametrize(
    ("model", "names"),
    [(factor_analysis, "'loadings'"), (factorisation, "'left' and 'right'"), (one_of_two, "'W'")],
    ids=["factor analysis", "factorisation", "one part"],
)
def test_what_can_be_turned_is_refused_by_name(model: object, names: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"site {names} can be turned.*EvidenceEM\(model\)"):
        LaplaceEvidence(model).run(Y)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [told_apart, slopes, unused])
def test_what_stays_is_fitted(model: object) -> None:
    joint = LogJoint(model, (Y,))  # type: ignore[arg-type]
    assert off_orbits(joint) is joint.initial_theta


def test_what_turns_at_equal_scales_alone_begins_at_unequal_ones() -> None:
    """And ends where the search from others does: at equal ones Laplace's log evidence is infinite."""
    rows = torch.randn(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    Y = rows @ torch.tensor([[2.0, -1.0, 0.5], [0.3, 0.4, -0.6]], dtype=torch.float64)
    begun = off_orbits(LogJoint(of_own_scales, (Y,)))
    assert abs(float(begun[0] - begun[1])) > 0.1
    fit = LaplaceEvidence(of_own_scales).run(Y)
    elsewhere = LaplaceEvidence(of_own_scales, start=Start(values={"scale": torch.tensor([3.0, 0.5])})).run(Y)
    assert float(fit.log_evidence) == pytest.approx(float(elsewhere.log_evidence), abs=0.02)
    assert float(fit.hyperparameters["scale"].max() / fit.hyperparameters["scale"].min()) > 1.5


def test_the_advice_works() -> None:
    """Zeros above the diagonal hold the turn."""
    lower = torch.ones(4, 2).tril()

    def held(Y: Tensor) -> None:
        loadings = pyro.sample("loadings", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2)) * lower
        with pyro.plate("rows", len(Y)):
            pyro.sample("y", dist.LowRankMultivariateNormal(torch.zeros(4), loadings, torch.ones(4)), obs=Y)

    assert LaplaceEvidence(held, stop=Stop(progress=False)).run(Y).log_evidence.isfinite()


def places(distances: Tensor, held: bool) -> None:
    """Multidimensional scaling: places in the plane, of which only distances are seen."""
    z = pyro.sample("z", dist.Normal(torch.zeros(5, 2), 1.0).to_event(2))
    if held:
        z = z * torch.ones_like(z).tril()
    i, j = torch.triu_indices(5, 5, 1)
    apart = (z[..., i, :] - z[..., j, :]).square().sum(-1).sqrt()
    pyro.sample("y", dist.Normal(apart, 0.2).to_event(1), obs=distances)


def test_the_advice_works_where_there_are_no_loadings() -> None:
    z = torch.randn(5, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    distances, fit = torch.pdist(z), LaplaceEvidence(places, stop=Stop(progress=False))
    with pytest.raises(UnsupportedModel, match=r"z \* torch.ones_like\(z\).tril\(\)"):
        fit.run(distances, False)
    found = fit.run(distances, True).mode["z"]
    assert torch.pdist(found * torch.ones_like(found).tril()).tolist() == pytest.approx(distances.tolist(), abs=0.4)


# --- signs ---


def loading(y: Tensor) -> None:
    """One factor, integrated on paper, beside noise that is sampled."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    variance = pyro.sample("variance", dist.InverseGamma(3.0, 1.0).expand([4]).to_event(1))
    covariance = w.unsqueeze(-1) * w.unsqueeze(-2) + variance.diag_embed()
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(4), covariance), obs=y)


def items(y: Tensor) -> None:
    """Discriminations times abilities, more than a tour takes."""
    with pyro.plate("items", 4, dim=-2):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("persons", 60, dim=-1):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
    with pyro.plate("of_items", 4, dim=-2), pyro.plate("of_persons", 60, dim=-1):
        pyro.sample("y", dist.Bernoulli(logits=slope * ability), obs=y)


def loaded() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    z, noise = (torch.randn(80, k, generator=generator) for k in (1, 4))
    return z * torch.tensor([0.9, 0.7, 0.8, 0.5]) + 0.5 * noise


def test_both_signs_of_a_loading_count_where_its_noise_would_be_integrated_around_one() -> None:
    """Log 2 more than around one sign, which importance sampling and quadrature over the noise agree on."""
    both = LaplaceEvidence(loading, stop=Stop(progress=False)).run(loaded())
    one = LaplaceEvidence(loading, marginalise=("variance",), stop=Stop(progress=False)).run(loaded())
    assert len(both.states) == 2
    assert float(both.log_evidence - one.log_evidence) == pytest.approx(math.log(2.0), abs=0.02)
    assert abs(float(both.get_samples(1000, seed=0)["w"].mean())) < 0.1


def test_a_mirror_image_that_is_left_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    answers = (torch.rand(4, 60, generator=torch.Generator().manual_seed(0)) < 0.6).double()
    for model, args, settings in ((items, answers, {}), (loading, loaded(), {"marginalise": ("variance",)})):
        LaplaceEvidence(model, stop=Stop(progress=False), **settings).run(args).summary()
        assert "change sign: one of two mirror images" in capsys.readouterr().out


@pytest.mark.parametrize("model", [factor_analysis, slopes, unused])
def test_signs_that_the_data_tell_apart_or_do_not_see_are_none(model: object) -> None:
    assert sign_flips(LogJoint(model, (Y,), {})) == ((("loadings",),) if model is factor_analysis else ())
