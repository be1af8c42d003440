"""Errors of every round: those of the way that the engine went, on data seen and unseen."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, Start, Stop, UnsupportedModel
from pyro_evidence.compare import learning_curve
from pyro_evidence.mixture import GreedyDeletion, RandomWeights
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.wrappers import with_background

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
ROUNDS = Stop(tolerance=0.0, num_steps=8, throw=False, progress=False)


def blobs(num_data: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[500.0, 0.0], [560.0, 0.3]])
    which = torch.randint(2, (num_data,), generator=generator)
    return centres[which] + torch.tensor([10.0, 0.1]) * torch.randn(num_data, 2, generator=generator)


def engine(**settings: object) -> EvidenceEM:
    defaults: dict[str, object] = {"stop": ROUNDS, "deletion": None}
    defaults |= {"start": Start(restarts=3), "initial": RandomWeights(warm_up=4)}
    return EvidenceEM(gaussian_mixture(3), **{**defaults, **settings})  # type: ignore[arg-type]


def fit(found: EvidenceEM, Y: Tensor) -> MixturePosterior:
    posterior = found.run(Y)
    assert isinstance(posterior, MixturePosterior)
    return posterior


def test_errors_are_those_of_the_learning_curve_of_the_restart_that_was_chosen() -> None:
    """Oracle: the looking round by round, which computes densities datum by datum in another way."""
    Y, Z = blobs(60, 0), blobs(40, 1)
    found = fit(engine().track_validation(Z), Y)
    curve = learning_curve(engine(), (Y,), (Z,), num_steps=12)
    chosen = int((curve.train_nll[-1] + found.log_prob().mean()).abs().argmin())
    assert chosen > 0, "the first restart would be right by chance"
    assert_exact(found.train_nll, curve.train_nll[:, chosen])
    assert_exact(found.test_nll, curve.test_nll[:, chosen])
    assert len(found.train_nll) == 4 + len(found.log_evidences)


def test_watching_changes_nothing_else_and_stays_with_its_engine() -> None:
    Y, plain = blobs(60, 0), engine()
    watched = fit(plain.track_validation(blobs(40, 1)), Y)
    alone = fit(plain, Y)
    assert alone.log_evidences == watched.log_evidences
    assert_exact(alone.train_nll, watched.train_nll)
    with pytest.raises(BadInput, match=r"track_validation\(Y_test\)"):
        alone.test_nll  # noqa: B018


def test_after_a_deletion_the_way_goes_on_alone_to_the_density_that_is_returned() -> None:
    """The end is the posterior's own error, for weights that another round leaves where they are."""
    Y, Z = blobs(120, 0), blobs(80, 1)
    stop = Stop(tolerance=1e-13, gradient_tolerance=1e-7, num_steps=3000, throw=False, progress=False)
    found = fit(engine(stop=stop, deletion=GreedyDeletion()).track_validation(Z), Y)
    assert found.num_components == 2 and len(found.test_nll) == 4 + len(found.log_evidences)
    torch.testing.assert_close(found.test_nll[-1], -found.log_prob(Z).mean(), rtol=0.0, atol=1e-3)
    torch.testing.assert_close(found.train_nll[-1], -found.log_prob().mean(), rtol=0.0, atol=1e-3)


def test_weights_count_and_a_background_is_part_of_the_density() -> None:
    """A datum of weight two is two; the engine's last weights are known where the mode is that of the rounds."""
    Y, Z = blobs(60, 0), blobs(10, 1)
    twice = torch.cat([Z, Z[:5]])
    weight = torch.ones(10)
    weight[:5] = 2.0
    model = with_background(gaussian_mixture(2), 0.1)
    one = EvidenceEM(model, start=Start(restarts=1), stop=ROUNDS, deletion=None)
    a, b = fit(one.track_validation(Z, weight=weight), Y), fit(one.track_validation(twice), Y)
    assert_exact(a.test_nll, b.test_nll)
    curve = learning_curve(one, (Y,), (twice,), num_steps=18)
    assert_exact(b.test_nll, curve.test_nll[:, 0])


def test_by_hand_there_is_one_entry_and_a_file_keeps_all(tmp_path: Path) -> None:
    Y, by_hand = blobs(60, 0), engine()
    by_hand.step(Y)
    assert isinstance(by_hand.posterior, MixturePosterior)
    assert by_hand.posterior.train_nll.shape == (1,)
    found = fit(by_hand.track_validation(blobs(40, 1)), Y)
    found.save(tmp_path / "fit.pt")
    loaded = MixturePosterior.load(tmp_path / "fit.pt", gaussian_mixture(3))
    assert_exact(loaded.test_nll, found.test_nll)
    assert_exact(loaded.train_nll, found.train_nll)


def test_models_that_go_another_way_are_refused_in_words() -> None:
    Y = blobs(60, 0)
    with pytest.raises(UnsupportedModel, match="probabilistic PCA: leave it out"):
        EvidenceEM(mppca(2, 1)).track_validation(Y).run(Y)
