"""Modes of many mixtures at once, the order of the three evidences there, and sums over shards and groups."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from pyro_evidence.mixture import evidence as mixture_evidence
from pyro_evidence.mixture import expectation as mixture_expectation
from pyro_evidence.mixture import mode as mixture_mode
from pyro_evidence.mixture.evidence import WellDetermined, well_determined
from pyro_evidence.mixture.expectation import Mixture, MixtureData, e_step, mixture_data, natural_parameters
from pyro_evidence.mixture.updates import Pool
from tests.models_for_tests.mixture_cases import log_evidence

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
NUM_RESTARTS = 4
SHAPES = [(1, 2, 1), (4, 2, 1), (3, 1, 3), (2, 3, 2)]  # components, outputs, basis functions


def case(shape: tuple[int, int, int], *, full: bool = False, separate: bool = False) -> tuple[MixtureData, Mixture]:
    generator = torch.Generator().manual_seed(sum(shape))
    K, m, B = shape
    lead = (NUM_RESTARTS,) if separate else ()
    Y = torch.randn(*lead, 40, m, generator=generator) + 3.0 * torch.randint(2, (*lead, 40, 1), generator=generator)
    G = None if B == 1 else torch.randn(*lead, 40, B, generator=generator)
    weight = torch.rand(40, generator=generator) + 0.5
    w = 2.0 * torch.randn(NUM_RESTARTS, *shape, generator=generator)
    noise = torch.rand(NUM_RESTARTS, K, m, generator=generator) + 0.5
    if full:
        root = torch.randn(NUM_RESTARTS, K, m, m, generator=generator)
        noise = root @ root.mT + torch.eye(m)
    log_mixing = torch.randn(NUM_RESTARTS, K, generator=generator).log_softmax(-1)
    alpha = (torch.rand(NUM_RESTARTS, K, 1, 1, generator=generator) + 0.05).expand(w.shape)
    at = Mixture(w, noise, log_mixing, alpha, torch.zeros(shape))
    return mixture_data(Y, G, weight=weight), at


def log_joint(data: MixtureData, at: Mixture, w: Tensor) -> Tensor:
    return mixture_evidence.log_joint(data, replace(at, w=w))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_modes_of_a_batch_are_modes_and_those_of_each_row(shape: tuple[int, int, int], separate: bool) -> None:
    data, at = case(shape, separate=separate)
    found = mixture_mode.find_mode(data, at)
    w = found.w.clone().requires_grad_()
    (slope,) = torch.autograd.grad(log_joint(data, at, w).sum(), w)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-5)
    for row in range(NUM_RESTARTS):
        index = torch.tensor([row])
        alone = mixture_mode.find_mode(mixture_expectation.rows_of(data, index), at[index])
        torch.testing.assert_close(alone.w, found.w[index], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_block_is_below_coordinate_is_below_full_at_the_mode(shape: tuple[int, int, int], full: bool) -> None:
    """Fischer's inequality."""
    data, at = case(shape, full=full)
    at = mixture_mode.find_mode(data, at)
    stats = e_step(data, at, spread=True)
    kinds = (mixture_evidence.block, mixture_evidence.coordinate, mixture_evidence.full)
    low, middle, high = (log_evidence(data, at, f(data, at, stats)) for f in kinds)
    assert bool((low <= middle + 1e-9).all()) and bool((middle <= high + 1e-9).all())
    if shape[0] > 1:
        assert bool((high > low + 1e-6).any())


def test_gradient_is_autograds() -> None:
    data, at = case((3, 2, 1))
    w = at.w.clone().requires_grad_()
    value = log_joint(data, at, w)
    expected = torch.autograd.grad(value.sum(), w)[0]
    actual = mixture_evidence.log_joint_gradient(data, at)
    assert_exact(actual[0], value.detach())
    assert_exact(actual[1], expected)


@pytest.mark.parametrize("separate", [False, True])
def test_a_search_knows_slope_and_curvature_of_its_rows(separate: bool) -> None:
    """All rows, or some."""
    data, at = case((3, 2, 1), separate=separate)
    density = mixture_mode.LogJointOfWeights(data, at)
    u = torch.cat([at.w.flatten(1), torch.arange(NUM_RESTARTS).unsqueeze(-1).to(at.w)], -1)
    moved = u + 0.5 * (torch.arange(7) < 6)
    there = replace(at, w=moved[:, :-1].reshape(at.w.shape))
    for rows, mixture in ((u, at), (moved, there)):
        value, slope = density.gradient(rows, u)
        expected = mixture_evidence.log_joint_gradient(data, mixture)
        assert_exact(value, expected[0])
        assert_exact(slope[:, :-1], expected[1].flatten(1))
        curvature = mixture_evidence.full(data, mixture, e_step(data, mixture)).squeeze(1)
        expected_precision = curvature + mixture.alpha.flatten(1).diag_embed()
        assert_exact(density.precision(rows[1:], u)[:, :-1, :-1], expected_precision[1:])


@pytest.mark.parametrize("kind", [mixture_evidence.block, mixture_evidence.coordinate, mixture_evidence.full])
def test_shards_do_not_matter(kind: mixture_evidence.MixtureCurvature, monkeypatch: pytest.MonkeyPatch) -> None:
    data, at = case((3, 1, 3))
    whole = kind(data, at, e_step(data, at)), *mixture_evidence.log_joint_gradient(data, at)
    monkeypatch.setattr(mixture_expectation, "SHARD", at.w.numel() * 7)
    assert len(list(data.parts(7))) == 6
    for a, b in zip(
        (kind(data, at, e_step(data, at)), *mixture_evidence.log_joint_gradient(data, at)), whole, strict=True
    ):
        assert_exact(a, b)


def test_determinants_come_with_gamma() -> None:
    data, at = case((3, 2, 1))
    at = mixture_mode.find_mode(data, at)
    for kind in (mixture_evidence.block, mixture_evidence.coordinate, mixture_evidence.full):
        A = kind(data, at, e_step(data, at, spread=True))
        whole = A + at.alpha.reshape(A.shape[:-1]).diag_embed()
        assert_exact(well_determined(A, at.alpha).log_det, torch.linalg.slogdet(whole).logabsdet.sum(-1))


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    data, at = case((3, 2, 1))
    A = mixture_evidence.coordinate(data, at, e_step(data, at, spread=True))
    expected = well_determined(A, at.alpha)
    spoiled = A.clone()
    spoiled[1, 2, 0, 0] = torch.nan
    found: WellDetermined = well_determined(spoiled, at.alpha)
    rest = torch.tensor([0, 2, 3])
    assert_exact(found.gamma[rest], expected.gamma[rest])
    assert bool(found.gamma[1].isnan().any())


@pytest.mark.parametrize(
    "group",
    [
        torch.zeros(3, 2, 1),
        torch.arange(6).reshape(3, 2, 1),
        torch.arange(3)[:, None, None].expand(3, 2, 1),
        torch.arange(2)[:, None].expand(3, 2, 1),
        torch.tensor([0, 0, 1, 2, 2, 0]).reshape(3, 2, 1),
        torch.tensor([0, 1, 1, 0, 0, 1]).reshape(3, 2, 1),
    ],
)
def test_pools_add_up_groups(group: Tensor) -> None:
    group, x = group.long(), torch.randn(5, 3, 2, 1)
    expected = torch.stack([torch.where(group == g, x, 0.0).sum((1, 2, 3)) for g in group.flatten()], -1)
    assert_exact(Pool(group)(x).expand_as(x).flatten(1), expected)


@pytest.mark.parametrize("num_outputs", [1, 2, 4])
def test_diagonal_noise_needs_the_first_columns_only(num_outputs: int) -> None:
    Y, shape = torch.randn(9, num_outputs), (2, num_outputs, 1)
    data = mixture_data(Y)
    noise = torch.rand(1, 2, num_outputs) + 0.5
    at = Mixture(torch.randn(1, *shape), noise, torch.zeros(1, 2), torch.ones(1, *shape), torch.zeros(shape))
    natural = natural_parameters(at, data.layout)
    expected = torch.distributions.Normal(at.w[0, :, None, :, 0], noise[0, :, None].rsqrt()).log_prob(Y).sum(-1)
    assert natural.shape[-1] == 1 + 2 * num_outputs
    assert_exact((natural @ data.features[:, : natural.shape[-1]].mT)[0], expected)
    together = natural_parameters(replace(at, noise=noise.diag_embed()), data.layout)
    assert_exact((together @ data.features.mT)[0], expected)
