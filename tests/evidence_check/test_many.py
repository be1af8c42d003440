"""Evidence of models of more than a thousand coordinates: by blocks, or with the error of Laplace's series."""

import math
from functools import cache

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop, compare_evidence, importance_sampling
from pyro_evidence.compare.evidence import EvidenceComparison, Row
from pyro_evidence.posterior import diagnostics
from pyro_evidence.posterior.laplace import LaplacePosterior

QUIET = Stop(progress=False)
NUM = 1_500


def counts() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    group = torch.arange(3 * NUM) % NUM
    rate = (0.2 + 0.8 * torch.randn(NUM, dtype=torch.float64)[group]).exp()
    return group, torch.poisson(rate)


def nested(group: Tensor, y: Tensor) -> None:
    with pyro.plate("groups", NUM):
        a = pyro.sample("a", dist.Normal(0.0, 0.8))
    with pyro.plate("rows", len(group)):
        pyro.sample("y", dist.Poisson((0.2 + a[group]).exp()), obs=y)


def centred(group: Tensor, y: Tensor) -> None:
    """The same with a level that all groups share."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", NUM):
        a = pyro.sample("a", dist.Normal(level, 0.8))
    with pyro.plate("rows", len(group)):
        pyro.sample("y", dist.Poisson(a[group].exp()), obs=y)


def crossed(group: Tensor, y: Tensor) -> None:
    with pyro.plate("groups", NUM):
        a = pyro.sample("a", dist.Normal(0.0, 0.8))
    with pyro.plate("columns", 150):
        b = pyro.sample("b", dist.Normal(0.0, 0.1))
    with pyro.plate("rows", len(group)):
        pyro.sample("y", dist.Poisson((0.2 + a[group] + b[torch.arange(len(group)) // 7 % 150]).exp()), obs=y)


def flat(group: Tensor, y: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(group)):
        pyro.sample("y", dist.Poisson(level.exp()), obs=y)


def on_grid(group: Tensor, y: Tensor, levels: Tensor, prior: dist.Distribution) -> Tensor:
    """Oracle: log p(data | level) by the trapezoidal rule in each group, ``(L,)``."""
    a = torch.linspace(-6.0, 6.0, 801, dtype=torch.float64)
    log_rows = dist.Poisson(a.exp()).log_prob(y.unsqueeze(-1))
    log_groups = torch.zeros(NUM, len(a), dtype=torch.float64).index_add(0, group, log_rows.double())
    weighed = torch.stack([(log_groups + prior(level).log_prob(a)).logsumexp(-1).sum() for level in levels])
    return weighed + NUM * math.log(float(a[1] - a[0]))


@cache
def fitted(model) -> LaplacePosterior:
    return LaplaceEvidence(model, stop=QUIET).run(*counts())


def test_blocks_are_integrated_by_quadrature() -> None:
    group, y = counts()
    posteriors = {"nested": fitted(nested), "centred": fitted(centred)}
    found = compare_evidence(**posteriors, flat=fitted(flat))
    assert not any(row.doubts for row in found.rows) and not found.doubts
    rows = {row.name: row for row in found.rows}
    exact = float(on_grid(group, y, torch.tensor([0.2]), lambda m: dist.Normal(m, 0.8))[0])
    assert rows["nested"].log_evidence == pytest.approx(exact, abs=1e-2)
    assert abs(rows["nested"].log_evidence - exact) < 3.0 * rows["nested"].standard_error + 1e-6
    levels = torch.linspace(0.0, 0.5, 101, dtype=torch.float64)
    over = on_grid(group, y, levels, lambda m: dist.Normal(m, 0.8)) + dist.Normal(0.0, 1.0).log_prob(levels)
    exact = float(over.logsumexp(0) + math.log(float(levels[1] - levels[0])))
    assert rows["centred"].log_evidence == pytest.approx(exact, abs=1e-2)
    assert abs(rows["centred"].log_evidence - exact) < 3.0 * rows["centred"].standard_error
    assert abs(rows["nested"].laplace - rows["nested"].log_evidence) > 1.0  # what Laplace lacks


def test_joint_weights_of_many_coordinates_are_said_to_say_little() -> None:
    posterior = fitted(nested)
    found = importance_sampling(posterior, num_samples=200)
    assert "in 1,500 dimensions that says little" in found.doubts[0] and "posterior.blocks(site)" in found.doubts[0]
    diagnostics = posterior.diagnostics(400)
    assert diagnostics["num_blocks"] == NUM and diagnostics["blocks_above"] < 0.2 * NUM
    gap = diagnostics["log_evidence_importance"] - float(posterior.log_evidence)
    assert gap == pytest.approx(
        posterior.log_evidence_error.signed, abs=4.0 * diagnostics["log_evidence_importance_se"]
    )
    assert "far from Gaussian" not in str(posterior.summary())


def test_crossed_effects_have_the_error_of_the_series() -> None:
    posterior = fitted(crossed)
    found = compare_evidence(crossed=posterior, flat=fitted(flat))
    row = next(row for row in found.rows if row.name == "crossed")
    assert row.log_evidence == float(posterior.log_evidence)
    assert row.standard_error == pytest.approx(abs(posterior.log_evidence_error.signed))
    assert not row.doubts
    said = "\n".join(diagnostics.lines(posterior.diagnostics(200)))
    assert "importance sampling says little of the log evidence" in said and "far from Gaussian" not in said


def test_a_lead_within_its_error_leaves_the_order_open() -> None:
    rows = [Row(n, value, error, value, 0.5, 0, 0.0, ()) for n, value, error in (("a", -10.0, 3.0), ("b", -15.0, 4.0))]
    notes = EvidenceComparison((rows[0], rows[1]), ()).notes
    assert notes == [
        "a leads b by 5 nats, and the error of that is 5: the order is open. Refine the doubtful one: nodes=7 where "
        "blocks are independent, bridge_sampling(...) of long chains."
    ]
    assert not EvidenceComparison((Row("a", -1.0, 1.0, 0.0, 0.5, 0, 0.0, ()), rows[1]), ()).notes
