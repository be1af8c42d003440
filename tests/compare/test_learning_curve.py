"""The rounds that are looked at are the engine's own, in the model's units."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, Start, Stop
from pyro_evidence.compare.learning_curve import LearningCurve, learning_curve
from pyro_evidence.mixture import RandomWeights, Unregularised
from pyro_evidence.models import marginalised
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture, linear_mixture
from tests.models_for_tests.mixture_cases import far_blobs

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def curve(num_steps: int = 12, test: Tensor | None = None, **settings: object) -> LearningCurve:
    engine = EvidenceEM(gaussian_mixture(3), **settings)  # type: ignore[arg-type]
    return learning_curve(
        engine, (far_blobs(60, 0),), (far_blobs(40, 1) if test is None else test,), num_steps=num_steps
    )


def test_densities_are_those_of_the_mixtures_in_the_models_units() -> None:
    """Oracle: torch's own mixture at the weights that are given back."""
    Z = far_blobs(40, 1)
    found = curve(test=Z, start=Start(restarts=2), initial=RandomWeights(warm_up=3))
    for step in (0, 2, 12):
        mixture = found.mixtures[step]
        for row in range(2):
            parts = torch.distributions.Independent(
                torch.distributions.Normal(mixture.w[row, :, :, 0], mixture.noise[row].rsqrt()), 1
            )
            mixing = torch.distributions.Categorical(logits=mixture.log_mixing[row])
            oracle = torch.distributions.MixtureSameFamily(mixing, parts)
            assert_exact(found.test[step, row], oracle.log_prob(Z))
            assert_exact(found.train[step, row], oracle.log_prob(far_blobs(60, 0)))
            assert_exact(found.density(step, row).log_prob(Z), oracle.log_prob(Z))
    assert_exact(found.test_nll, -found.test.mean(-1))
    assert_exact(found.train_nll, -found.train.mean(-1))


def test_densities_of_rows_with_gaps_are_of_what_is_there() -> None:
    """Oracle: each component's normal densities, added over the values that are there."""
    Y, Z = far_blobs(60, 0), far_blobs(40, 1)
    Y[3, 0] = Z[5, 1] = math.nan
    Z[7] = math.nan
    found = learning_curve(EvidenceEM(marginalised(gaussian_mixture(3))), (Y,), (Z,), num_steps=5)
    mixture = found.mixtures[5]
    for values, density in ((Y, found.train[5, 0]), (Z, found.test[5, 0])):
        cells = torch.distributions.Normal(mixture.w[0, :, :, 0], mixture.noise[0].rsqrt())
        each = cells.log_prob(values.nan_to_num().unsqueeze(1)) * ~values.isnan().unsqueeze(1)
        assert_exact(density, (each.sum(-1) + mixture.log_mixing[0]).logsumexp(-1))


def test_the_rounds_are_those_of_run() -> None:
    """Warm-up first, then the update: the log evidence of each round is what run wrote down."""
    start, initial = Start(restarts=1), RandomWeights(warm_up=4)
    stop = Stop(tolerance=0.0, num_steps=8, throw=False, progress=False)
    engine = EvidenceEM(gaussian_mixture(3), start=start, initial=initial, deletion=None, stop=stop)
    path = engine.run(far_blobs(60, 0)).log_evidences
    found = learning_curve(engine, (far_blobs(60, 0),), (far_blobs(40, 1),), num_steps=12)
    assert_exact(found.log_evidence[4:, 0], torch.tensor(path))


def test_unregularised_rounds_never_lower_the_training_likelihood() -> None:
    """Law of EM; and plain EM, run on, overfits: its best round is not its last."""
    start, initial = Start(restarts=1), RandomWeights(warm_up=0)
    engine = EvidenceEM(gaussian_mixture(20), update=Unregularised(), start=start, initial=initial)
    found = learning_curve(engine, (far_blobs(60, 0),), (far_blobs(400, 1),), num_steps=60)
    assert bool((found.train_nll.diff(dim=0) <= 1e-9).all())
    assert float(found.test_nll[-1]) > float(found.test_nll.min()) + 0.2
    assert found.num_components.tolist() == [[20]] * 61


def test_components_are_counted_as_they_go() -> None:
    engine = EvidenceEM(gaussian_mixture(20), start=Start(restarts=2), initial=RandomWeights(warm_up=0))
    found = learning_curve(engine, (far_blobs(60, 0),), (far_blobs(40, 1),), num_steps=60)
    assert found.num_components[0].tolist() == [20, 20]
    assert int(found.num_components[-1].max()) < 20
    assert found.density(60).loc.shape == (1, int(found.num_components[60, 0]), 2)


def test_noise_matrices() -> None:
    Z = far_blobs(40, 1)
    engine = EvidenceEM(
        gaussian_mixture(3, noise=FullNoise()), start=Start(restarts=1), initial=RandomWeights(warm_up=2)
    )
    found = learning_curve(engine, (far_blobs(60, 0),), (Z,), num_steps=5)
    assert_exact(found.density(5).log_prob(Z), found.test[5, 0])


def test_a_conditional_density_has_a_curve_but_not_one_density() -> None:
    X, Y = torch.randn(50, 1), torch.randn(50, 1)
    engine = EvidenceEM(linear_mixture(2, Linear()), start=Start(restarts=1), initial=RandomWeights(warm_up=2))
    found = learning_curve(engine, (X, Y), (X[:9], Y[:9]), num_steps=5)
    assert_exact(found.test[:, :, :9], found.train[:, :, :9])
    with pytest.raises(BadInput, match="2 basis functions; expected an unconditional density"):
        found.density(0)


def test_arguments_come_in_a_tuple() -> None:
    engine = EvidenceEM(gaussian_mixture(3))
    for train, test in ((far_blobs(60, 0), (far_blobs(40, 1),)), ((far_blobs(60, 0),), far_blobs(40, 1))):
        with pytest.raises(BadInput, match=r"got Tensor; expected a tuple of the model's arguments, such as \(Y,\)"):
            learning_curve(engine, train, test, num_steps=3)


def test_what_a_newcomer_gets_wrong_is_told_in_words() -> None:
    with pytest.raises(BadInput, match="Y is a ndarray of float64; expected a tensor"):
        gaussian_mixture(3)(far_blobs(60, 0).numpy())
    with pytest.raises(BadInput, match="num_components is a Tensor; expected a whole number"):
        gaussian_mixture(far_blobs(60, 0))  # type: ignore[arg-type]
    shown = repr(EvidenceEM(gaussian_mixture(3)).run(far_blobs(60, 0)))
    assert shown.startswith("MixturePosterior(log_evidence=") and len(shown) < 300
