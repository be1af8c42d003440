"""Which model do the data prefer: log Bayes factors and posterior model probabilities, or a refusal."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pyro_evidence import display
from pyro_evidence.display import Axes, Shown, Table
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.evidence_check import EvidenceEstimate, importance_sampling
from pyro_evidence.evidence_check.importance import by_blocks
from pyro_evidence.evidence_check.target import estimated
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.posterior.base import Posterior
from pyro_evidence.posterior.diagnostics import MANY
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.sensitivity import log_evidence_after
from pyro_evidence.program.constants import PriorConstant

Estimates = Mapping[str, EvidenceEstimate]
NESTED_DRAWS = 2_000  # of a posterior whose marginalised sites were integrated: each is an inner mode, few are needed


@dataclass(frozen=True)
class Row:
    """One model's evidence in the comparison.

    :ivar log_evidence: log p(D | model, hyperparameters), nats: the checked estimate.
    :ivar standard_error: of ``log_evidence``, nats.
    :ivar laplace: Laplace's approximation of the same number, nats; NaN for a variational posterior, which has none.
    :ivar probability: posterior probability of the model, given the prior and these models only.
    :ivar num_hyperparameters: how many numbers were maximised, for which the evidence carries no penalty.
    :ivar log_labels: log K! of a mixture of K components, 0 otherwise; *not* added to ``log_evidence``.
    :ivar doubts: why not to believe the row; empty when there is no reason.
    """

    name: str
    log_evidence: float
    standard_error: float
    laplace: float
    probability: float
    num_hyperparameters: int
    log_labels: float
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class EvidenceComparison(Shown):
    """Models in the order of their evidence, best first.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = LaplaceEvidence(regression(Linear())).run(X, t)
    >>> from pyro_evidence import compare_evidence
    >>> held = LaplaceEvidence(regression(Linear(), alpha=1e4)).run(X, t)
    >>> compare_evidence(learned=posterior, held=held).rows[0].name
    'learned'
    """

    rows: tuple[Row, ...]
    doubts: tuple[str, ...]
    by_priors: tuple[str, ...] = ()  # which constants of priors, twice or half as large, put the second model first

    @property
    def probabilities(self) -> dict[str, float]:
        """Posterior model probabilities by name."""
        return {row.name: row.probability for row in self.rows}

    def log_bayes_factor(self, first: str, second: str) -> tuple[float, float]:
        """``log p(D | first) - log p(D | second)`` and its standard error, nats.

        :raises BadInput: for a name that was not compared.
        """
        a, b = self._row(first), self._row(second)
        return a.log_evidence - b.log_evidence, math.hypot(a.standard_error, b.standard_error)

    def _row(self, name: str) -> Row:
        found = [row for row in self.rows if row.name == name]
        if not found:
            raise BadInput(f"no model {name!r} was compared; expected one of {[row.name for row in self.rows]}.")
        return found[0]

    @property
    def notes(self) -> list[str]:
        """Sentences for what no column shows: doubts, and differences between the first two rows."""
        doubts = [f"{row.name}: {d}" for row in self.rows for d in row.doubts]
        return [*self.doubts, *doubts, *_caveats(*self.rows[:2]), *self.by_priors]

    def table(self) -> Table:
        """The rows as a table, which ``.to_pandas()`` keeps and a notebook shows."""
        rows = {}
        for row in self.rows:
            factor, error = self.log_bayes_factor(row.name, self.rows[0].name)
            rows[row.name] = {
                "log evidence": row.log_evidence,
                "+-": row.standard_error,
                "log BF": factor,
                "log BF +-": 0.0 if row is self.rows[0] else error,
                "probability": row.probability,
                "Laplace": row.laplace,
                "hypers": float(row.num_hyperparameters),
                "log K!": row.log_labels,
            }
        return Table(rows, COLUMNS, self.notes, "model", digits=6)

    def plot(self, axes: Axes | None = None) -> Axes:
        """The difference in log evidence to the best model, nats, with two standard errors, evidence and probability.

        >>> comparison.plot()  # doctest: +SKIP

        :param axes: to draw on; None makes a figure of its own.
        :raises ImportError: without matplotlib.
        """
        behind = [(0.0, 0.0), *(self.log_bayes_factor(row.name, self.rows[0].name) for row in self.rows[1:])]
        found = [(row.name, v, v - 2.0 * e, v + 2.0 * e) for row, (v, e) in zip(self.rows, behind, strict=True)]
        what = f"log Bayes factor against {self.rows[0].name}, nats, two standard errors"
        axes = display.on_panels(axes, [display.Panel("beside each: log evidence, nats, and probability", found)], what)
        for place, row in enumerate(self.rows):
            text = f" {row.log_evidence:.2f} ± {row.standard_error:.1g}, {row.probability:.2g}"
            axes.text(1.0, place, text, transform=axes.get_yaxis_transform(), va="center")
        return axes


COLUMNS = {
    "log evidence": "nats, by the estimate",
    "+-": "its standard error, nats",
    "log BF": "log Bayes factor against the best model, nats",
    "log BF +-": "its standard error, nats",
    "probability": "of the model, among these",
    "Laplace": "Laplace's own log evidence, nats",
    "hypers": "maximised and alive: each may have gained about a nat",
    "log K!": "nats for the labellings of a mixture, not added",
}


def _caveats(first: Row, second: Row) -> list[str]:
    """Reasons to doubt the order of two models."""
    lead, more = first.log_evidence - second.log_evidence, first.num_hyperparameters - second.num_hyperparameters
    said, error = [], math.hypot(first.standard_error, second.standard_error)
    if lead < 2.0 * error:
        said.append(
            f"{first.name} leads {second.name} by {lead:.3g} nats, and the error of that is {error:.3g}: the order is "
            "open. Refine the doubtful one: nodes=7 where blocks are independent, bridge_sampling(...) of long chains."
        )
    if 0 < more and lead < more:
        said.append(
            f"{first.name} leads {second.name} by {lead:.2f} nats and has {more} more maximised hyperparameters, each "
            f"of which may have gained one: the order is open. Integrate them (sites with priors), or hold out data."
        )
    if first.probability > 0.99995:
        said.append(
            "a probability of 1.0000 is among these models only; all of them may miss the data: look at "
            "plots.fitted.predictive_check."
        )
    return said


@entry_point
def compare_evidence(
    *,
    estimates: Estimates | None = None,
    prior: Mapping[str, float] | None = None,
    throw: bool = True,
    **posteriors: Posterior,
) -> EvidenceComparison:
    """Compare models fitted to the same data: ``compare_evidence(straight=posterior_a, curved=posterior_b)``.

    The evidence is that of each posterior's hyperparameters.  Where they were maximised it is the best the
    model can do, not an average over a hyperprior, so a difference of about one nat per extra hyperparameter
    means nothing. MacKay (1992), eq. 2.6.  For a :class:`REVMPosterior` or :class:`RVMPosterior` it is that of the
    learned prior on the axes, which for :class:`VRVM` has its mean precisions, and not the lower bound that its
    ``log_evidence`` is; for a :class:`MixturePosterior` or an :class:`MPPCAPosterior` that of one labelling, log K! of
    the components that are left beside it.

    :param estimates: model name -> estimate to use, from :func:`bridge_sampling` for example; others are
        estimated by :func:`importance_sampling`, or where its weights are in doubt or the coordinates more than 1,000
        by quadrature in independent blocks, and without such by Laplace with the second term of its series as error.
    :param prior: model name -> prior probability, any positive numbers; default all equal.
    :param throw: False lists what would have been refused among the doubts of the result.
    :param posteriors: two or more, under names of your choice.
    :raises BadInput: for fewer than two posteriors, for names without a posterior, for posteriors fitted to
        different data, for quantities that one of them maximised and another integrated, for priors that are flat, and
        for estimates in doubt (k-hat too high, chains too short).
    """
    _check_names(posteriors, estimates or {}, prior or {})
    found = {n: (estimates or {}).get(n) or _estimate(p) for n, p in posteriors.items()}
    doubts = different_data(posteriors) + maximised_here_integrated_there(posteriors) + flat_priors(posteriors)
    unsure = [f"{n}: {text}" for n, e in found.items() for text in e.doubts]
    if throw and (doubts or unsure):
        raise BadInput("\n".join([*doubts, *unsure, "To see the numbers all the same, pass throw=False."]))
    log_odds = torch.tensor([e.log_evidence + math.log((prior or {}).get(n, 1.0)) for n, e in found.items()])
    probabilities = log_odds.double().softmax(0).tolist()
    rows = []
    for (name, estimate), probability in zip(found.items(), probabilities, strict=True):
        posterior = posteriors[name]
        laplace, remarks = posterior._as_laplace
        num_components = posterior._num_components or posterior._joint.num_states
        row = Row(
            name,
            estimate.log_evidence,
            estimate.standard_error,
            laplace,
            probability,
            posterior._num_maximised,
            math.lgamma(num_components + 1.0),
            (*estimate.doubts, *remarks),
        )
        rows.append(row)
    rows.sort(key=lambda row: -row.log_evidence)
    lead, runner_up = rows[0].log_evidence - rows[1].log_evidence, rows[1].name
    overturned = overturned_by_priors(posteriors[rows[0].name], posteriors[runner_up], runner_up, lead)
    return EvidenceComparison(tuple(rows), tuple(doubts), tuple(overturned))


def overturned_by_priors(first: Posterior, second: Posterior, runner_up: str, lead: float) -> list[str]:
    """A sentence for each constant of a prior that takes a lead away where it is twice or half as large.

    A constant of one name in both models moves in both.  Slopes choose the constants to look at, those that would do it
    with slopes twice as steep; refits say whether they do.

    :param runner_up: the name of the second model.
    :param lead: of the first, nats.
    """
    pair = first, second
    known = [_scales(posterior) for posterior in pair]
    said = []
    for name in dict.fromkeys([*known[0], *known[1]]):
        constants, slopes = zip(*(each.get(name, (None, 0.0)) for each in known), strict=True)
        if 2.0 * abs(slopes[0] - slopes[1]) < lead:
            continue
        for step, times in ((1.0, "twice"), (-1.0, "half")):
            gains = [_gain(posterior, constant, step) for posterior, constant in zip(pair, constants, strict=True)]
            behind = gains[1] - gains[0] - lead
            if behind > 0.0:
                said.append(f"with {name} {times} as large {runner_up} would lead by {behind:.2g} nats")
    return said


def _gain(posterior: Posterior, constant: PriorConstant | None, step: float) -> float:
    """Nats that the log evidence gains where a constant of the prior moves by a step; of a model without it none."""
    return 0.0 if constant is None else log_evidence_after(posterior, constant, step) - float(posterior.log_evidence)


def _scales(posterior: Posterior) -> dict[str, tuple[PriorConstant, float]]:
    """The constants of priors that can be doubled, and the slopes in them; none where these are not known."""
    if not isinstance(posterior, LaplacePosterior) or not posterior._joint.has_data:
        return {}
    try:
        found = posterior.sensitivity()
    except (ArithmeticError, UnsupportedModel):
        return {}
    return {n: (found.constants[n], s) for n, s in found.log_evidence.items() if found.constants[n].unit is None}


def _check_names(posteriors: Mapping[str, object], *others: Mapping[str, Any]) -> None:
    if len(posteriors) < 2:
        raise BadInput(
            f"{len(posteriors)} posterior(s) given; expected at least two, as compare_evidence(a=..., b=...)."
        )
    odd = {n: type(p).__name__ for n, p in posteriors.items() if not isinstance(p, Posterior)}
    if odd:
        raise BadInput(
            f"{odd} have no density to check; expected posteriors of one model each, as engine.run(...) returns them. "
            f"Of averages over structures subtract log_evidence, or compare posterior.member(0)."
        )
    unknown = [n for names in others for n in names if n not in posteriors]
    if unknown:
        raise BadInput(f"{unknown} name no posterior; expected names among {list(posteriors)}.")
    estimates, prior = others
    wrong = {n: type(e).__name__ for n, e in estimates.items() if not isinstance(e, EvidenceEstimate)}
    if wrong:
        raise BadInput(f"estimates are {wrong}; expected what bridge_sampling(...) or another estimator returns.")
    if not all(isinstance(p, int | float) and 0.0 < p < math.inf for p in prior.values()):
        raise BadInput(f"prior={dict(prior)}; expected finite numbers above 0. Leave a model out to give it none.")


def _estimate(posterior: Posterior) -> EvidenceEstimate:
    if not posterior._num_directions:
        return estimated("nothing left to integrate", posterior.log_evidence, 0.0, {})
    of_many = posterior._in_blocks and int(posterior._laplace.state.problem.active.sum()) > MANY
    if of_many and (found := by_blocks(posterior._laplace)) is not None:
        return found
    found = importance_sampling(posterior, num_samples=NESTED_DRAWS if posterior.marginalised_sites else None)
    looked = of_many or found.reliable or not posterior._in_blocks
    return found if looked else by_blocks(posterior._laplace) or found


def different_data(posteriors: Mapping[str, Posterior]) -> list[str]:
    """An error message when not all posteriors were fitted to the same observed values, else nothing."""
    joints = {n: (p._joint, p._mode_at[1]) for n, p in posteriors.items()}
    hashes = {n: joint.data_hash(theta) for n, (joint, theta) in joints.items()}
    if len(set(hashes.values())) == 1:
        return []
    found = []
    for n, (joint, theta) in joints.items():
        nodes = joint.trace(joint.initial_u, theta).nodes
        shapes = ", ".join(f"'{site}' {tuple(nodes[site]['value'].shape)}" for site in joint.observed)
        found.append(f"{n} observes {shapes or 'nothing'}, hash {hashes[n]:.8}")
    return [
        f"the posteriors were fitted to different data: {'; '.join(found)}. Evidences of different data cannot be "
        "compared; fit every model to the same observed values (same rows, weights and units, no "
        "transformation of the target)."
    ]


def maximised_here_integrated_there(posteriors: Mapping[str, Posterior]) -> list[str]:
    """Error messages for pairs of which one has at its best value what the other averages over.

    That is a latent site or param of one name in both; or params of which the other has none, where the other
    integrates hyperparameters that the first does not have, as when the same quantities have other names.
    """
    joints = {n: p._joint for n, p in posteriors.items()}
    found = []
    for n, m in itertools.permutations(joints, 2):
        maximised, integrated = joints[n].hypers.names, joints[m].latents.names
        same = sorted(set(maximised) & set(integrated))
        others = sorted(set(posteriors[m].marginalised_sites) - set(joints[n].latents.names))
        renamed = bool(maximised and others) and not joints[m].hypers.names
        if same or renamed:
            best = ", ".join(map(repr, same or maximised))
            averaged = "" if same else ", ".join(map(repr, others)) + " "
            found.append(
                f"{best} is maximised in {n} and {averaged}integrated in {m}: the first evidence is the best that can "
                f"be done, the second an average over a prior, so their difference is no odds of the models. Fit both "
                f"alike: sites with priors in both, or params, or maximise={same or others}, in both."
            )
    return found


def flat_priors(posteriors: Mapping[str, Posterior]) -> list[str]:
    """An error message for each posterior under improper priors, whose evidence has an arbitrary factor.

    It is in units of the sites: with a covariate in hours in place of days a coefficient's factor is 24.
    """
    found = []
    for n, posterior in posteriors.items():
        flat = posterior.flat_sites
        if flat:
            found.append(
                f"{n} has a flat prior for {', '.join(flat)}, which has no integral: its log evidence has an arbitrary "
                f"constant, which changes with the units of the data. Expected proper priors, such as Normal(0, 2.5). "
                f"Where all models share these sites and what they multiply, units included, the constant cancels: "
                f"pass throw=False."
            )
    return found
