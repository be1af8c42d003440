"""Simulation-based calibration: how often the truth is where an engine's posterior says."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.compare.chains import MOST_SAID
from pyro_evidence.compare.many import FAILURES, run_many
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import entry_point, own_random_numbers
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.simulate import from_prior, with_data
from pyro_evidence.settings import check_count, seed_of

FEWEST_IN_A_BIN = 5  # expected ranks, below which Pearson's statistic is not chi-square: Cochran (1954)


def rank(truth: Tensor, draws: Tensor) -> Tensor:
    """Number of draws ``(L, ...)`` below the truth ``(...)``: 0 to L."""
    return (draws < truth).sum(0)


def chi_square(ranks: Tensor, num_samples: int, num_bins: int) -> tuple[Tensor, Tensor]:
    """Pearson's statistic of ranks against uniform bins, and its p-value.

    :param ranks: whole numbers 0 to ``num_samples``, shape ``(S, Q)``; ``num_samples + 1`` a multiple of the
        bins.
    :return: two of shape ``(Q,)``; ``num_bins - 1`` degrees of freedom.
    """
    bins = ranks * num_bins // (num_samples + 1)
    counts = torch.stack([(bins == b).sum(0) for b in range(num_bins)]).double()
    expected = len(ranks) / num_bins
    statistic = ((counts - expected).square() / expected).sum(0)
    shape = torch.full_like(statistic, 0.5 * (num_bins - 1))
    return statistic, torch.special.gammaincc(shape, 0.5 * statistic)


@dataclass(frozen=True)
class Simulated:
    """A model on its own arguments that observes the values with which it is called.

    :ivar sites: that observe these, in their order.
    """

    joint: LogJoint
    sites: tuple[str, ...]

    def __call__(self, *values: Tensor) -> Any:
        data = dict(zip(self.sites, values, strict=True))
        return with_data(self.joint, self.joint.initial_theta, data)(*self.joint.args, **self.joint.kwargs)


def simulations(joint: LogJoint, num: int, seed: int) -> tuple[Simulated, list[tuple[Tensor, ...]], dict[str, Tensor]]:
    """A model that observes its arguments, so many of these from the prior predictive, and the values behind each.

    :raises BadInput: for a prior some draws of which make no data.
    """
    truth = from_prior(joint, joint.initial_theta, num, seed)
    drawn = len(next(iter(truth.values()), ()))
    if drawn < num:
        raise BadInput(
            f"{num - drawn} of {num} draws from the prior give a covariance that has no "
            f"Cholesky factor; expected a prior whose draws all make data. Give the settings of the covariance tighter "
            f"priors, or add more to its diagonal."
        )
    sites = tuple(n for n in joint.observed if n in truth)
    return Simulated(joint, sites), [tuple(truth[n][i] for n in sites) for i in range(num)], truth


@dataclass(frozen=True)
class Calibration:
    """Ranks of true values among posterior draws, over many simulated data sets.

    :ivar names: of the ``Q`` quantities, ``site[element]``.
    :ivar ranks: shape ``(S, Q)``, 0 to ``num_samples``; uniform for an exact posterior.
    :ivar statistic: Pearson's chi-square of each quantity, ``num_bins - 1`` degrees of freedom, shape
        ``(Q,)``.
    :ivar p_values: their p-values, shape ``(Q,)``.
    :ivar failures: what the runs said that failed; their data sets are not counted.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence, sbc
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> model = regression(Linear(), alpha=1.0, beta=4.0)
    >>> X = torch.linspace(-1.0, 1.0, 10).unsqueeze(-1)
    >>> settings = {"num_simulations": 10, "num_samples": 9, "num_bins": 2}
    >>> found = sbc(model, lambda m: LaplaceEvidence(m, maximise=()), X, X[:, 0], **settings)
    >>> tuple(found.ranks.shape)
    (10, 2)
    """

    names: tuple[str, ...]
    ranks: Tensor
    num_samples: int
    num_bins: int
    statistic: Tensor
    p_values: Tensor
    failures: tuple[str, ...]

    @property
    def p_value(self) -> float:
        """p-value of all quantities together: the smallest, times their number (Bonferroni), at most 1."""
        return min(1.0, float(self.p_values.min()) * len(self.names))

    def histogram(self, name: str) -> Tensor:
        """Counts of the ranks of one quantity in the bins, for a picture, shape ``(num_bins,)``."""
        bins = self.ranks[:, self.names.index(name)] * self.num_bins // (self.num_samples + 1)
        return torch.bincount(bins, minlength=self.num_bins)

    def __str__(self) -> str:
        expected = len(self.ranks) / self.num_bins
        head = f"{len(self.ranks)} data sets, {self.num_samples} draws; {expected:.1f} ranks expected in a bin"
        lines = [
            f"{n}: chi-square {float(s):.1f} on {self.num_bins - 1}, p = {float(p):.3g}, ranks "
            f"{self.histogram(n).tolist()}"
            for n, s, p in zip(self.names, self.statistic, self.p_values, strict=True)
        ]
        return "\n".join([head, *lines, f"together: p = {self.p_value:.3g}", *self.failures[:3]])


@entry_point
def sbc(
    model: Model,
    engine: Callable[[Model], Any],
    *args: Any,
    num_simulations: int = 200,
    num_samples: int = 99,
    num_bins: int = 10,
    seed: int | None = 0,
    **kwargs: Any,
) -> Calibration:
    """Draw parameters and data from the model, fit, and rank the truth among the posterior's draws.

    Hyperparameters are held at their starting values: calibration is a property of a proper joint density.
    Talts, Betancourt, Simpson, Vehtari and Gelman (2018), algorithm 1; draws must be independent, thin
    chains before.

    :param model: a Pyro model whose prior can be sampled.
    :param engine: model -> engine, for example ``lambda m: LaplaceEvidence(m, maximise=())``, for :func:`run_many`; the
        model takes the values of its observed sites, and what the engine returns has ``get_samples``.
    :param args: the model's arguments; observed values among them are replaced by simulated ones.
    :param num_simulations: number of data sets.
    :param num_samples: posterior draws for each; plus one a multiple of ``num_bins``.
    :param seed: of everything; the caller's random state is not touched.
    :raises BadInput: for numbers that do not fit together, a prior some draws of which make no data, or when more than
        a tenth of the runs failed.
    """
    num_simulations = check_count("num_simulations", num_simulations)
    num_samples, num_bins = check_count("num_samples", num_samples), check_count("num_bins", num_bins)
    seed = seed_of(seed)
    if (num_samples + 1) % num_bins or num_simulations < FEWEST_IN_A_BIN * num_bins:
        raise BadInput(
            f"num_samples={num_samples}, num_bins={num_bins}, num_simulations={num_simulations}; expected "
            f"num_samples + 1 to be a multiple of num_bins, and at least {FEWEST_IN_A_BIN * num_bins} simulations, "
            f"{FEWEST_IN_A_BIN} in each bin."
        )
    if not callable(engine):
        raise BadInput(
            f"engine is a {type(engine).__name__}; expected a function of a model that returns an engine, such as "
            "lambda m: LaplaceEvidence(m, maximise=()), because the model is given the data of each simulation."
        )
    joint = LogJoint(model, args, kwargs, maximise=())
    simulated, data, truth = simulations(joint, num_simulations, seed)
    with own_random_numbers():
        torch.manual_seed(seed)
        fits = run_many(engine(simulated), data)
        ranks, failures = [], []
        for i in range(num_simulations):
            try:
                torch.manual_seed(seed + i)
                draws: dict[str, Tensor] = fits.posterior(i).get_samples(num_samples)
                if any(len(v) != num_samples for v in draws.values()):
                    raise BadInput(
                        f"get_samples({num_samples}) gave { {n: len(v) for n, v in draws.items()} } draws; expected "
                        f"{num_samples}. An engine here must give as many as it is asked for."
                    )
                ranks.append(torch.cat([rank(truth[n][i], draws[n]).reshape(-1) for n in joint.latents.names]))
            except FAILURES as error:
                failures.append(f"data set {i}: {' '.join(str(error).split())[:MOST_SAID]}")
    if len(failures) > num_simulations // 10:
        raise BadInput(
            f"{len(failures)} of {num_simulations} runs failed; expected at most a tenth. The first said: {failures[0]}"
        )
    names = tuple(f"{p.name}[{e}]" if p.shape else p.name for p in joint.latents for e in range(math.prod(p.shape)))
    table = torch.stack(ranks)
    return Calibration(names, table, num_samples, num_bins, *chi_square(table, num_samples, num_bins), tuple(failures))
