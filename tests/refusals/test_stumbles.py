"""What people meet who use the package from its documentation alone: short reprs, mixed-up updates, tables."""

import pyro.distributions as dist
import pytest
import torch

from pyro_evidence import REVM, RVM, VRVM, BadInput, EvidenceEM, LaplaceEvidence, OverlapEM, Start, compare, find_modes
from pyro_evidence.mixture.updates import BoundedInflation, husmeier2000_update
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.prbf import prbf
from pyro_evidence.prbf import updates as prbf_updates
from tests.evidence_check.test_kinds_of_precision import WIDE, relevant
from tests.gallery.idioms import TABLE, growth

T = WIDE[:, 0] - WIDE[:, 1] + 0.5 * torch.randn(60, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("engine", [RVM, REVM, VRVM, LaplaceEvidence])
def test_posteriors_show_themselves_in_one_line(engine: type) -> None:
    shown = repr(engine(relevant).run(WIDE, T))
    assert "\n" not in shown and len(shown) < 300 and "log_evidence=" in shown


def test_comparisons_and_modes_show_themselves_in_one_line() -> None:
    posterior = LaplaceEvidence(relevant).run(WIDE, T)
    engines = {"one": LaplaceEvidence(relevant), "other": LaplaceEvidence(relevant)}
    for shown in (
        repr(find_modes(posterior, start=Start(restarts=1))),
        repr(compare(relevant, WIDE, T, engines=engines)),
    ):
        assert "\n" not in shown and len(shown) < 300


@pytest.mark.parametrize("update", [prbf_updates.prbf2001_update, prbf_updates.Ascent()])
def test_an_update_of_the_overlap_in_a_mixture(update: object) -> None:
    with pytest.raises(BadInput, match=r"is an update of pyro_evidence.prbf, made for another engine"):
        EvidenceEM(gaussian_mixture(2), update=update)  # type: ignore[arg-type]


@pytest.mark.parametrize("update", [husmeier2000_update, BoundedInflation()])
def test_an_update_of_a_mixture_in_the_overlap(update: object) -> None:
    with pytest.raises(BadInput, match=r"is an update of pyro_evidence.mixture, made for another engine"):
        OverlapEM(prbf(4, 2), update=update)  # type: ignore[arg-type]


def test_a_pruned_weight_leaves_the_others_their_sample_size(capsys) -> None:
    posterior = LaplaceEvidence(relevant).run(WIDE, T)
    assert bool(posterior.pruned["w"].any())
    posterior.summary()
    table = capsys.readouterr().out.partition("alpha =")[0]
    assert "nan" not in table and "inf" not in table


@pytest.mark.parametrize(("engine", "words"), [(RVM, "that of a prior learned"), (VRVM, "a lower bound, in which")])
def test_what_the_evidence_of_relevant_weights_is_not_for(engine: type, words: str, capsys) -> None:
    posterior = engine(relevant).run(WIDE, T)
    posterior.summary()
    text = capsys.readouterr().out
    assert f"the log evidence is {words}" in text and text.rstrip().endswith("Cross-validate.")


def test_data_outside_the_support_where_they_are_allowed() -> None:  # oracle: torch
    posterior = LaplaceEvidence(growth).run(TABLE)
    found = posterior.log_likelihood()["obs"].flatten()
    mode = posterior.mode
    logits = mode["init"] + mode["rate"] * torch.arange(4.0)[:, None]
    expected = dist.Multinomial(10, logits=logits).log_prob(TABLE)
    torch.testing.assert_close(found, expected)
