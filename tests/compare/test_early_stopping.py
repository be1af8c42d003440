"""Early stopping picks the round that its held-out data like best, and returns that round's mixture."""

from functools import partial

import pytest
import torch

from pyro_evidence import BadInput, EvidenceEM, Start
from pyro_evidence.compare.learning_curve import EarlyStopping, RandomShare, Unseen
from pyro_evidence.infer.class_conditional import class_conditional
from pyro_evidence.mixture import Unregularised
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mixture import FullNoise, SharedNoise, gaussian_mixture, linear_mixture
from tests.models_for_tests.mixture_cases import far_blobs

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def plain(num_components: int = 20, **model: object) -> EvidenceEM:
    start = Start(restarts=2, warm_up=0)
    return EvidenceEM(gaussian_mixture(num_components, **model), update=Unregularised(), start=start)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [None, FullNoise(), SharedNoise()])
def test_the_mixture_is_that_of_the_best_round(noise: object) -> None:
    train, test = far_blobs(80, 0), far_blobs(400, 1)
    engine = plain(5, **({} if noise is None else {"noise": noise}))
    found = EarlyStopping(engine, hold_out=Unseen((test,)), num_steps=15).run(train)
    assert_exact(-found.log_prob(test).mean(), found.curve.test_nll.min())
    assert_exact(found.log_prob(train), found.curve.train[found.step, found.restart])
    assert_exact(found.responsibilities(test).sum(-1), torch.ones(400))
    assert_exact(found.density(test).log_prob(test), found.log_prob(test))


def test_it_overfits_less_than_running_on() -> None:
    train, test = far_blobs(80, 0), far_blobs(400, 1)
    optimal = EarlyStopping(plain(), hold_out=Unseen((test,)), num_steps=60).run(train)
    real = EarlyStopping(plain(), hold_out=RandomShare(0.25, seed=1), num_steps=60).run(train)
    best, reached = -float(optimal.log_prob(test).mean()), -float(real.log_prob(test).mean())
    end = float(optimal.curve.test_nll[-1].min())
    assert max(best, reached) < end - 0.2
    assert 0 < optimal.step < 60


def test_a_share_takes_rows_of_all_arguments_alike() -> None:
    X = torch.arange(10.0).unsqueeze(-1)
    train, watched = RandomShare(0.3)((X, 2.0 * X, "name"))
    assert len(watched[0]) == 3 and train[2] == "name"
    assert_exact(torch.cat([watched[1], train[1]]), 2.0 * torch.cat([watched[0], train[0]]))
    assert sorted(torch.cat([watched[0], train[0]]).flatten().tolist()) == list(range(10))


def test_a_conditional_density_and_a_classifier() -> None:
    X, Y = torch.randn(50, 1), torch.randn(50, 1)
    engine = EvidenceEM(linear_mixture(2, Linear()), update=Unregularised(), start=Start(restarts=1, warm_up=0))
    assert EarlyStopping(engine, num_steps=5).run(X, Y).density(X).mean.shape == (50, 1)
    labels = (far_blobs(80, 0)[:, 0] > 530.0).long()
    found = class_conditional(EarlyStopping(plain(3), num_steps=10), far_blobs(80, 0), labels)
    assert float((found.predict(far_blobs(80, 0)) == labels).double().mean()) > 0.95


@pytest.mark.parametrize("share", [0.0, 1.0, 0.001])
def test_shares_that_leave_nothing_are_refused(share: float) -> None:
    with pytest.raises(BadInput, match="share"):
        EarlyStopping(plain(3), hold_out=RandomShare(share)).run(far_blobs(80, 0))


def test_no_rounds_are_refused() -> None:
    with pytest.raises(BadInput, match="num_steps=0"):
        EarlyStopping(plain(3), num_steps=0)
