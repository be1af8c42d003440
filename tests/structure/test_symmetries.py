"""A latent space that can be turned is refused by name; one that the data or the prior hold still is not."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, MultimodalPosterior, Start, Stop, UnsupportedModel, importance_sampling
from pyro_evidence.laplace.tour import MOST_MODES
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.symmetries import has_labels_beside, images, mirrors, off_orbits, other_orders

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
    starts = Start(tour=0), Start(values={"scale": torch.tensor([3.0, 0.5])}, tour=0)
    fit, elsewhere = (LaplaceEvidence(of_own_scales, start=start).run(Y) for start in starts)
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


@pytest.mark.slow
def test_both_signs_of_a_loading_count_over_all_latents_and_around_one_image_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = LaplaceEvidence(loading, stop=Stop(progress=False)).run(loaded())
    one = LaplaceEvidence(loading, marginalise=("variance",), stop=Stop(progress=False)).run(loaded())
    assert len(both.states) == 2 and len(one._turned) == 1
    assert float(both.log_evidence) == pytest.approx(float(one.log_evidence), abs=0.02)
    assert abs(float(both.get_samples(1000, seed=0)["w"].mean())) < 0.1
    assert abs(float(one.get_samples(1000, seed=0)["w"].mean())) > 0.3
    one.summary()
    assert "2 mirror images are in the log evidence" in capsys.readouterr().out


def test_mirror_images_that_are_counted_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    answers = (torch.rand(4, 60, generator=torch.Generator().manual_seed(0)) < 0.6).double()
    LaplaceEvidence(items, stop=Stop(progress=False)).run(answers).summary()
    assert "2 mirror images are in the log evidence" in capsys.readouterr().out


@pytest.mark.parametrize("model", [factor_analysis, slopes, unused])
def test_signs_that_the_data_tell_apart_or_do_not_see_are_none(model: object) -> None:
    joint = LogJoint(model, (Y,), {})
    found = mirrors(joint, joint.initial_theta)  # of loadings alone one column, and with it the other
    assert [name for turn in found for name, _ in turn] == (["loadings"] * 2 if model is factor_analysis else [])


def rank_one(size: int, num: int, noise: float) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    a, z, e = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((size, 1), (1, num), (size, num)))
    return a @ z + noise * e


def product_of_vectors(Y: Tensor, noise: float) -> None:
    a = pyro.sample("a", dist.Normal(torch.zeros(len(Y), dtype=Y.dtype), 1.0).to_event(1))
    with pyro.plate("columns", Y.shape[1]):
        z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=Y.dtype), 1.0))
        pyro.sample("Y", dist.Normal(a * z.unsqueeze(-1), noise).to_event(1), obs=Y.mT)


def by_quadrature_over_loadings(Y: Tensor, noise: float) -> float:
    """Columns are normal given the loadings, of which there are two, on a grid."""
    axis = torch.linspace(-5.0, 5.0, 401, dtype=Y.dtype)
    a = torch.cartesian_prod(axis, axis)
    covariance = a.unsqueeze(-1) * a.unsqueeze(-2) + noise**2 * torch.eye(2, dtype=Y.dtype)
    given = dist.MultivariateNormal(torch.zeros(2, dtype=Y.dtype), covariance).log_prob(Y.mT.unsqueeze(1)).sum(0)
    log_prior = dist.Normal(torch.zeros((), dtype=Y.dtype), 1.0).log_prob(a).sum(-1)
    return float((given + log_prior).logsumexp(0)) + 2.0 * math.log(float(axis[1] - axis[0]))


@pytest.mark.parametrize(("num", "noise"), [(4, 0.5), (4, 1.5), pytest.param(70, 0.5, marks=pytest.mark.slow)])
def test_a_product_of_two_vectors_has_the_evidence_of_quadrature(num: int, noise: float) -> None:
    """Also where its images overlap.  Laplace about one of them was 1.4 and .8 nats lower."""
    Y = rank_one(2, num, noise)
    found = LaplaceEvidence(product_of_vectors, stop=Stop(progress=False)).run(Y, noise)
    assert found.log_evidence_error < 0.05
    assert float(found.log_evidence) == pytest.approx(by_quadrature_over_loadings(Y, noise), abs=0.03)
    drawn = importance_sampling(found, seed=0)
    assert abs(drawn.log_evidence - float(found.log_evidence)) < 0.05 + 4.0 * drawn.standard_error


def test_columns_of_loadings_turn_with_their_factors_each_by_itself() -> None:
    def two_factors(Y: Tensor) -> None:
        loadings = pyro.sample("loadings", dist.Normal(0.0, 1.0).expand([4, 2]).to_event(2))
        with pyro.plate("rows", len(Y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            pyro.sample("Y", dist.Normal(z @ loadings.tril().mT, 0.5).to_event(1), obs=Y)

    joint = LogJoint(two_factors, (torch.randn(9, 4, generator=torch.Generator().manual_seed(0)),), {})
    turns = mirrors(joint, joint.initial_theta)
    assert [[name for name, _ in turn] for turn in turns] == [["loadings", "z"]] * 2
    assert images(joint, turns).sum(1).tolist() == [13, 13, 26]


def squares(t: Tensor, about: Tensor) -> None:
    with pyro.plate("elements", len(t)):
        a = pyro.sample("a", dist.Normal(about, 2.0))
        pyro.sample("t", dist.Normal(a.square(), 0.2), obs=t)


def test_signs_of_many_elements_count_however_many_images_they_make() -> None:
    """Of 512 images 256 were counted, and of elements beyond sixteen none."""
    t, a = torch.linspace(4.0, 9.0, 9), torch.linspace(-12.0, 12.0, 24_001, dtype=torch.float64)
    each = dist.Normal(0.0, 2.0).log_prob(a) + dist.Normal(a.square(), 0.2).log_prob(t.unsqueeze(-1))
    expected = float((each.logsumexp(-1) + math.log(0.001)).sum())
    found = LaplaceEvidence(squares, stop=Stop(progress=False)).run(t, torch.tensor(0.0))
    assert float(found.log_evidence) == pytest.approx(expected, abs=0.02)


def test_modes_that_are_too_many_and_no_images_are_no_evidence() -> None:
    """Laplace's log evidence of one of 128 stood for all."""
    found = LaplaceEvidence(squares, stop=Stop(progress=False)).run(torch.linspace(4.0, 9.0, 7), torch.tensor(0.5))
    assert isinstance(found, MultimodalPosterior) and len(found.states) > MOST_MODES
    assert "there are more than 120 of these" in found.diagnostics(64)["log_evidence_by"]


# --- labels of any kind, written by hand ---

SWITCHING = torch.tensor([-1.0, -1.3, -0.9, 1.0, 1.2, 0.9], dtype=torch.float64)


def two_states(y: Tensor) -> None:
    """A hidden Markov model; its states can be exchanged where both stays, and the elements of ``m``, change places."""
    stays = torch.stack([pyro.sample(name, dist.Beta(2.0, 2.0)) for name in ("stays_0", "stays_1")])
    m = pyro.sample("m", dist.Normal(torch.zeros(2), 1.5).to_event(1))
    log_moves = torch.where(torch.eye(2).bool(), stays.log(), (1.0 - stays).log().expand(2, 2))
    found = dist.Normal(m, 0.5).log_prob(y[0]) - math.log(2.0)
    for each in y[1:]:
        found = (log_moves + found).logsumexp(-1) + dist.Normal(m, 0.5).log_prob(each)
    pyro.factor("y", found.logsumexp(-1))


def two_clusters(y: Tensor) -> None:
    share, sd = pyro.sample("share", dist.Beta(1.0, 1.0)), pyro.sample("sd", dist.HalfNormal(1.0))
    left, right = pyro.sample("left", dist.Normal(0.0, 2.0)), pyro.sample("right", dist.Normal(0.0, 2.0))
    parts = share.log() + dist.Normal(left, sd).log_prob(y), (1 - share).log() + dist.Normal(right, sd).log_prob(y)
    pyro.factor("y", torch.logaddexp(*parts).sum())


def grid(*ranges: tuple[float, float, int]) -> tuple[list[Tensor], float]:
    """Midpoints of cells of a box, each coordinate flat, and the volume of a cell."""
    axes = [low + (high - low) * (torch.arange(num, dtype=torch.float64) + 0.5) / num for low, high, num in ranges]
    cell = math.prod((high - low) / num for low, high, num in ranges)
    return [each.flatten() for each in torch.meshgrid(*axes, indexing="ij")], cell


def by_all_paths(y: Tensor) -> float:
    """The evidence of ``two_states`` by the sum over all paths at the places of a grid."""
    (a, b, *m), cell = grid((0.0, 1.0, 18), (0.0, 1.0, 18), (-4.0, 4.0, 32), (-4.0, 4.0, 32))
    move = [[a, 1.0 - a], [1.0 - b, b]]
    emitted = [[dist.Normal(level, 0.5).log_prob(each).exp() for level in m] for each in y]
    total = torch.zeros_like(a)
    for path in itertools.product((0, 1), repeat=len(y)):
        term = 0.5 * emitted[0][path[0]]
        for i in range(1, len(y)):
            term = term * move[path[i - 1]][path[i]] * emitted[i][path[i]]
        total += term
    prior = sum(dist.Beta(2.0, 2.0).log_prob(p) for p in (a, b)) + sum(dist.Normal(0.0, 1.5).log_prob(x) for x in m)
    return float((total * prior.exp()).sum() * cell)


def by_both_clusters(y: Tensor) -> float:
    (share, sd, left, right), cell = grid((0.0, 1.0, 12), (0.0, 4.0, 60), (-5.0, 5.0, 50), (-5.0, 5.0, 50))
    total = torch.ones_like(share)
    for each in y:
        one, other = (dist.Normal(loc, sd).log_prob(each).exp() for loc in (left, right))
        total *= share * one + (1.0 - share) * other
    prior = dist.HalfNormal(1.0).log_prob(sd) + sum(dist.Normal(0.0, 2.0).log_prob(x) for x in (left, right))
    return float((total * prior.exp()).sum() * cell)


@pytest.mark.parametrize(("model", "evidence"), [(two_states, by_all_paths), (two_clusters, by_both_clusters)])
def test_labels_count_in_every_order_whatever_tells_them_apart(model: Any, evidence: Callable[[Tensor], float]) -> None:
    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(SWITCHING)
    assert abs(float(posterior.log_evidence) - math.log(evidence(SWITCHING))) < 0.03


def labelled(y: Tensor) -> None:
    """As ``two_clusters``, but for the priors, which tell the clusters apart."""
    share, left = pyro.sample("share", dist.Beta(1.0, 3.0)), pyro.sample("left", dist.Normal(-1.0, 2.0))
    right = pyro.sample("right", dist.Normal(1.0, 2.0))
    parts = share.log() + dist.Normal(left, 1.0).log_prob(y), (1 - share).log() + dist.Normal(right, 1.0).log_prob(y)
    pyro.factor("y", torch.logaddexp(*parts).sum())


def trials(y: Tensor) -> None:
    s = pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("groups", len(y)):
        b = pyro.sample("b", dist.Normal(0.0, s))
        pyro.sample("y", dist.Normal(b, 1.0), obs=y)


def test_what_data_or_priors_tell_apart_cannot_be_exchanged() -> None:
    for model, y, num in (
        (two_clusters, SWITCHING, 1),
        (two_states, SWITCHING, 1),
        (labelled, SWITCHING, 0),
        (trials, SWITCHING, 0),
        (trials, SWITCHING[:1].expand(3), 3),
    ):
        joint = LogJoint(model, (y,))
        assert len(other_orders(joint, joint.initial_u)) == num


def test_groups_with_the_same_data_are_integrated_around_their_one_mode() -> None:
    same = torch.ones(4, dtype=torch.float64)
    (s,), cell = grid((0.0, 8.0, 4000))
    term = sum(dist.Normal(0.0, (1.0 + s**2).sqrt()).log_prob(each) for each in same) + dist.HalfNormal(1.0).log_prob(s)
    posterior = LaplaceEvidence(trials, stop=Stop(progress=False)).run(same)
    assert posterior.marginalised_sites == ("s",)
    assert abs(float(posterior.log_evidence) - math.log(float(term.exp().sum()) * cell)) < 0.01


def test_weights_that_the_data_do_not_see_are_no_labels() -> None:
    """As of columns that are switched off: exchanging them changes nothing, and their mode is a point."""

    def model(y: Tensor, factor: float) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("groups", 3):
            level = pyro.sample("level", dist.Normal(0.0, tau))
        pyro.sample("y", dist.Normal(level[[0, 0, 1, 2]] + factor * w.square().sum(), 1.0).to_event(1), obs=y)

    y = torch.tensor([0.3, 1.0, -1.0, 2.0])
    off, on = (LogJoint(model, (y, factor), {}) for factor in (0.0, 1.0))
    assert not has_labels_beside(off, ("tau",)) and has_labels_beside(on, ("tau",))
    found = LaplaceEvidence(model, stop=Stop(progress=False)).run(y, 0.0)
    assert found.marginalised_sites == ("tau",)


def test_labels_of_simplexes_have_fewer_coordinates_than_elements() -> None:
    def topics(y: Tensor) -> None:
        with pyro.plate("topics", 2):
            rows = pyro.sample("rows", dist.Dirichlet(torch.ones(3)))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        pyro.sample("y", dist.Categorical(rows.mean(0)).expand([4]).to_event(1), obs=y)
        pyro.sample("z", dist.Normal(0.0, tau), obs=torch.tensor(0.3))

    assert has_labels_beside(LogJoint(topics, (torch.tensor([0, 1, 1, 2]),), {}), ("tau",))
