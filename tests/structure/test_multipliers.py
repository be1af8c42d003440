"""Which latents multiply those of another plate: told by values, whatever the model is about."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Start, Stop, UnsupportedModel
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure import factors
from pyro_evidence.structure.recognise import recognise

T = torch.tensor
PERSONS, ITEMS = 12, 5
Y = (torch.rand(PERSONS, ITEMS, generator=torch.Generator().manual_seed(0), dtype=torch.float64) < 0.5).double()
PERSON = torch.arange(PERSONS).repeat_interleave(ITEMS)
ITEM = torch.arange(ITEMS).repeat(PERSONS)


def two_parameters(y: Tensor, person: Tensor = PERSON, item: Tensor = ITEM) -> None:
    """Answers in a long table, persons numbered as they come."""
    with pyro.plate("persons", int(person.max()) + 1):
        ability = pyro.sample("ability", dist.Normal(0.0, T(1.0).double()))
    with pyro.plate("items", ITEMS):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, T(1.0).double()))
        slope = pyro.sample("slope", dist.LogNormal(0.0, T(0.5).double()))
    with pyro.plate("answers", len(person)):
        logits = slope[item] * (ability[person] - difficulty[item])
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y.reshape(-1))


def on_log_scale(y: Tensor, spread: float = 0.5) -> None:
    """The same answers with logs of slopes in place of slopes, in units of their spread."""
    with pyro.plate("persons", PERSONS):
        ability = pyro.sample("ability", dist.Normal(0.0, T(1.0).double()))
    with pyro.plate("items", ITEMS):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, T(1.0).double()))
        z = pyro.sample("z", dist.Normal(0.0, T(1.0).double()))
    logits = (spread * z).exp() * (ability.unsqueeze(-1) - difficulty)
    pyro.sample("y", dist.Bernoulli(logits=logits).to_event(2), obs=y)


def guessed(y: Tensor) -> None:
    """The third parameter: what is answered by chance."""
    with pyro.plate("persons", PERSONS):
        ability = pyro.sample("ability", dist.Normal(0.0, T(1.0).double()))
    with pyro.plate("items", ITEMS):
        chance = pyro.sample("chance", dist.Beta(T(5.0).double(), 17.0))
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, T(1.0).double()))
        slope = pyro.sample("slope", dist.LogNormal(0.0, T(0.5).double()))
    p = chance + (1 - chance) * torch.sigmoid(slope * (ability.unsqueeze(-1) - difficulty))
    pyro.sample("y", dist.Bernoulli(probs=p).to_event(2), obs=y)


def graded(y: Tensor) -> None:
    """Answers in three grades, two thresholds to an item."""
    with pyro.plate("persons", PERSONS):
        ability = pyro.sample("ability", dist.Normal(0.0, T(1.0).double()))
    with pyro.plate("items", ITEMS):
        slope = pyro.sample("slope", dist.LogNormal(0.0, T(0.5).double()))
        low = pyro.sample("low", dist.Normal(T(-1.0).double(), 1.0))
        gap = pyro.sample("gap", dist.LogNormal(T(0.0).double(), 0.5))
    cuts = torch.stack([low, low + gap], -1)
    predictor = (slope * ability.unsqueeze(-1)).reshape(-1)
    grade = (y + y.flip(0)).reshape(-1)
    pyro.sample("y", dist.OrderedLogistic(predictor, cuts.repeat(PERSONS, 1)).to_event(1), obs=grade)


def rasch(y: Tensor) -> None:
    """No factors, crossed effects on a scale that is not linear in the latents."""
    with pyro.plate("persons", PERSONS):
        ability = pyro.sample("ability", dist.Normal(0.0, T(1.0).double()))
    with pyro.plate("items", ITEMS):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, T(1.0).double()))
    pyro.sample("y", dist.Bernoulli(logits=torch.sinh(ability.unsqueeze(-1) - difficulty)).to_event(2), obs=y)


def robust(y: Tensor) -> None:
    """Crossed effects of data that hardly feel what is far away."""
    with pyro.plate("persons", PERSONS):
        ability = pyro.sample("ability", dist.Normal(0.0, T(1.0).double()))
    with pyro.plate("items", ITEMS):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, T(1.0).double()))
    pyro.sample("y", dist.Cauchy((ability.unsqueeze(-1) - difficulty).sinh(), 1.0).to_event(2), obs=y)


def curves(y: Tensor) -> None:
    """Curves about a common one, which the data do not see but through them."""
    common = pyro.sample("common", dist.Normal(torch.zeros(2).double(), 2.0).to_event(1))
    with pyro.plate("persons", PERSONS):
        own = pyro.sample("own", dist.Normal(common, T([0.7, 0.5]).double()).to_event(1))
    mean = own[:, :1] + (own[:, 1:] * torch.linspace(-1, 1, ITEMS).double()).tanh()
    pyro.sample("y", dist.Normal(mean, 1.0).to_event(2), obs=y)


def spreads(y: Tensor) -> None:
    """Each kind of persons with its own scale, which multiplies effects of those persons alone."""
    with pyro.plate("kinds", 3):
        scale = pyro.sample("scale", dist.LogNormal(0.0, T(0.5).double()))
    with pyro.plate("persons", PERSONS):
        z = pyro.sample("z", dist.Normal(0.0, T(1.0).double()))
    mean = scale[torch.arange(PERSONS) % 3] * z
    pyro.sample("y", dist.Normal(mean.unsqueeze(-1), 1.0).to_event(2), obs=y)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (two_parameters, ("slope",)),
        (on_log_scale, ("z",)),
        (lambda y: on_log_scale(y, 0.35), ("z",)),
        (robust, ()),
        (guessed, ("slope",)),
        (graded, ("ability", "slope")),
        (rasch, ()),
        (curves, ()),
        (spreads, ()),
    ],
)
def test_what_multiplies_another_plate(model: Any, expected: tuple[str, ...]) -> None:
    structure = recognise(LogJoint(model, (Y,)))
    assert structure.linear is None
    assert structure.multipliers == expected


@pytest.mark.slow  # tests/cases/test_hierarchies.py has ten items by default against quadrature
@pytest.mark.parametrize("model", [two_parameters, guessed, graded])
def test_persons_are_integrated_by_default(model: Any) -> None:
    """As by seven nodes that are asked for; of these two more change little."""
    stop = Stop(progress=False)
    found = LaplaceEvidence(model, stop=stop).run(Y)
    assert f"{PERSONS} blocks of 1 by quadrature" in found.structure
    assert set(found.mode) == set(LogJoint(model, (Y,)).latents.names)  # none is taken for a scale of others
    more = LaplaceEvidence(model, nodes=15, marginalise=(), stop=stop).run(Y)
    assert float(found.log_evidence) == pytest.approx(float(more.log_evidence), abs=0.01)  # importance sampling's error


@pytest.mark.slow
def test_slopes_and_their_logs_are_one_model() -> None:
    stop = Stop(progress=False)
    one, other = (LaplaceEvidence(m, marginalise=(), stop=stop).run(Y) for m in (two_parameters, on_log_scale))
    torch.testing.assert_close(one.log_evidence, other.log_evidence, rtol=1e-7, atol=1e-7)


def test_chunks_of_persons_are_not_fitted_otherwise_than_all() -> None:
    """Refused where all persons would be integrated; by Laplace, as asked for, chunks give what all rows give."""
    halves = [PERSON < 5, PERSON >= 5]
    chunks = [(Y.reshape(-1)[h], PERSON[h] - PERSON[h].min(), ITEM[h]) for h in halves]
    stop = Stop(progress=False)
    with pytest.raises(UnsupportedModel, match=r"slope multiply those of another plate.*nodes=1"):
        LaplaceEvidence(two_parameters, marginalise=(), stop=stop).run_chunks(chunks, local=["ability"])
    found = LaplaceEvidence(two_parameters, marginalise=(), nodes=1, stop=stop).run_chunks(chunks, local=["ability"])
    whole = LaplaceEvidence(two_parameters, marginalise=(), nodes=1, stop=stop, start=Start(tour=0)).run(Y)
    torch.testing.assert_close(found.log_evidence, whole.log_evidence, rtol=1e-9, atol=1e-9)


def test_a_run_is_followed_only_where_a_site_switches_another_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter that a model cannot be run with a site at zero."""

    def sums(y: Tensor) -> None:
        spread = pyro.sample("spread", dist.Normal(torch.ones(3), 1.0).to_event(1))
        effect = pyro.sample("effect", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        tril = torch.linalg.cholesky(spread.diag() ** 2)
        pyro.sample("y", dist.MultivariateNormal(effect, scale_tril=tril), obs=y)

    monkeypatch.setattr(factors, "followed_terms", lambda *_: pytest.fail("a run was followed"))
    assert factors.multipliers(LogJoint(sums, (torch.ones(3),))) == ()
