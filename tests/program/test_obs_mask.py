"""Sites with an ``obs_mask``: what is not observed and touches nothing else is integrated exactly."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from torch import Tensor

from pyro_evidence import LaplaceEvidence
from pyro_evidence.program.log_joint import LogJoint
from tests.gallery import idioms
from tests.gallery.idioms import SEEN, X, Y


def noisy(mask: Tensor | None) -> Callable[[Tensor, Tensor], None]:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w, sigma), obs=y, **({} if mask is None else {"obs_mask": mask}))

    return model


def labelled(X: Tensor, t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t, obs_mask=SEEN)


def walk(y: Tensor) -> None:  # what is not observed matters to its neighbours
    level = torch.zeros(())
    for i in range(len(y)):
        level = pyro.sample(f"y_{i}", dist.Normal(0.9 * level, 1.0), obs=y[i], obs_mask=torch.tensor(i != 2))


def test_masked_rows_are_as_good_as_none() -> None:  # oracle: the rows left out
    expected = LaplaceEvidence(noisy(None)).run(X[SEEN], Y[SEEN])
    found = LaplaceEvidence(noisy(SEEN)).run(X, Y)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence)
    torch.testing.assert_close(found.mode, expected.mode)
    assert set(found.get_samples(3)) == {"w", "sigma"}


def test_poutine_mask_gives_the_same() -> None:  # oracle: poutine.mask
    expected = LaplaceEvidence(idioms.masked).run(X, Y)
    found = LaplaceEvidence(idioms.imputed).run(X, Y)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence)


def test_missing_values_are_drawn_by_predictive() -> None:
    posterior = LaplaceEvidence(noisy(SEEN)).run(X, Y)
    drawn = Predictive(posterior.model, guide=posterior.guide, num_samples=20)(X, Y)
    assert drawn["y"].shape[-1] == len(Y)
    assert torch.equal(drawn["y"][..., SEEN], Y[SEEN].expand_as(drawn["y"][..., SEEN]))


def test_missing_labels_are_summed() -> None:  # oracle: the rows left out
    found = LaplaceEvidence(labelled).run(X, idioms.LABELS)
    joint = LogJoint(labelled, (X, idioms.LABELS))
    w = found.mode["w"]
    terms = dist.Bernoulli(logits=X @ w).log_prob(idioms.LABELS)[SEEN].sum() + dist.Normal(0.0, 1.0).log_prob(w).sum()
    torch.testing.assert_close(joint.log_joint(w, joint.initial_theta), terms)


def test_what_matters_to_others_is_kept() -> None:
    joint = LogJoint(walk, (torch.ones(5),))
    assert "y_2_unobserved" in joint.latents.names
    assert set(joint.left_out) <= {f"y_{i}_unobserved" for i in range(5)} - {"y_2_unobserved"}


@pytest.mark.parametrize("engine", [LaplaceEvidence])
def test_whole_sites_may_be_missing(engine: type) -> None:
    found = engine(noisy(torch.zeros(len(Y), dtype=torch.bool))).run(X, Y)
    assert float(found.log_evidence) == pytest.approx(0.0, abs=1e-9)
