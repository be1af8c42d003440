"""The relevance eigenvector machine for any Pyro model with a weight vector, and ways to choose its ridge."""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.ranks import COMMUNICATOR
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.checkpoint import NOT_FITTED, Engine
from pyro_evidence.fitting.iterate import Stop, check_stop
from pyro_evidence.numerics.evidence import log_evidence
from pyro_evidence.numerics.linalg import cholesky
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.relevance.axis_priors import AxisPrior, GaussianPrior
from pyro_evidence.relevance.eigen_state import (
    Centre,
    REVMSettings,
    base_centre,
    base_point,
    eigen_state,
    refuse_if_outweighed,
    warn_if_meaningless,
)
from pyro_evidence.relevance.posteriors import REVMPosterior
from pyro_evidence.relevance.quadratic import Approximation, laplace_at_base
from pyro_evidence.relevance.targets import LinearTarget, Penalised
from pyro_evidence.relevance.weights import Weights, of_all_rows, refuse_offsets, weights_in_chunks, weights_of
from pyro_evidence.settings import check_function, check_methods, check_model, check_result, check_ridge

Ridge = Callable[[Weights, REVMSettings], float]
GOLDEN = 0.5 * (math.sqrt(5.0) - 1.0)  # the share that keeps itself: one new height for each step, Kiefer (1953)
DECADE = math.log(10.0)  # a factor of ten, in the logarithm of the ridge
CLOSE = 0.02 * DECADE  # of the ridge: a factor of 1.05, which moves the log evidence by far less than a nat


def isotropic_evidence(weights: Weights, settings: REVMSettings) -> float:
    """The ridge of highest Laplace evidence when all weights share it, by golden section over eight decades.

    They lie around the largest curvature of the likelihood at weights of zero: the columns' units count for nothing.
    """
    start = torch.zeros(len(weights.order), dtype=torch.float64)
    free = Penalised(weights.target, torch.zeros_like(start))
    largest = float(free.precision(start.unsqueeze(0), start.new_zeros(0))[0].diagonal()[: weights.num_weights].max())
    middle = math.log(largest) if 0.0 < largest < math.inf else 0.0
    low, high = middle - 5.0 * DECADE, middle + 3.0 * DECADE
    inner = [high - GOLDEN * (high - low), low + GOLDEN * (high - low)]
    heights = [_isotropic(weights, math.exp(p), start) for p in inner]
    while high - low > CLOSE:
        if heights[0] >= heights[1]:
            high, inner = inner[1], [inner[1] - GOLDEN * (inner[1] - low), inner[0]]
            heights = [_isotropic(weights, math.exp(inner[0]), start), heights[0]]
        else:
            low, inner = inner[0], [inner[1], inner[0] + GOLDEN * (high - inner[0])]
            heights = [heights[1], _isotropic(weights, math.exp(inner[1]), start)]
    return math.exp(0.5 * (low + high))


def _isotropic(weights: Weights, ridge: float, start: Tensor) -> float:
    y = base_point(weights.target, ridge, start, weights.num_weights)
    alpha = torch.zeros_like(y)
    alpha[: weights.num_weights] = ridge
    density = Penalised(weights.target, alpha)
    tril = cholesky(density.precision(y.unsqueeze(0), y)[0], "the posterior precision")
    log_norm = 0.5 * weights.num_weights * torch.tensor(ridge / math.tau).log()
    log_joint = density.log_joint(y.unsqueeze(0), y)[0] + log_norm
    return float(log_evidence(log_joint, 2.0 * tril.diagonal().log().sum(), len(y)))


@dataclass(eq=False, repr=False)
class REVM(Engine):
    """Replaces the weights' prior by independent ones along the eigenvectors of the likelihood's curvature.

    The likelihood is approximated by a Gaussian at the weights' mode under ``N(0, 1/ridge)``; along each
    eigenvector of its precision a prior of the best evidence is found in closed form, ``inf`` for most, and
    the mode is found again in the axes that remain.  Kropotov and Vetrov (2007), algorithms 1 and 2.

    What the user wrote as the weights' prior is not counted; params stay at their stored or declared values.
    The result does not change when the basis is rotated, but it does when a column of the design is rescaled:
    standardise.

    :param model: any Pyro model whose weights are real-valued latent sites.
    :param site: the site(s) that hold the weights; may be left out when there is only one latent site.
    :param prior: :class:`GaussianPrior`, of groups of axes where its size is above 1, or :class:`L1Prior`.
    :param centre: ``base_centre`` (the paper's) or ``score_centre``.
    :param ridge: prior precision under which the mode is found that stands for the maximum-likelihood point,
        which does not exist when the classes can be separated; or ``isotropic_evidence``.
    :param approximation: ``laplace_at_base``, ``empirical_fisher``, ``JaakkolaJordan()`` or ``LeastKL()``.
    :param stop: whether to raise where the search for a mode fails, or only to warn and to return what was reached;
        and whether to show a progress bar.  There is no loop of hyperparameters that could end early.

    >>> import torch
    >>> from pyro_evidence import REVM
    >>> from pyro_evidence.models.basis import Polynomial
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = REVM(regression(Polynomial(3), beta=20.0)).run(X, t)
    >>> posterior.num_active <= 4
    True
    """

    model: Model
    _: KW_ONLY
    site: str | Sequence[str] | None = None
    prior: AxisPrior = GaussianPrior()  # noqa: RUF009 - frozen
    centre: Centre = base_centre
    ridge: float | Ridge = 1e-2
    approximation: Approximation = laplace_at_base
    stop: Stop = Stop()

    def __post_init__(self) -> None:
        check_model(self.model)
        check_methods("prior", self.prior, ("alpha", "log_gain", "mode", "distribution"), "L1Prior()")
        check_function("centre", self.centre, "score_centre")
        check_function("approximation", self.approximation, "laplace_at_base")
        check_ridge(self.ridge)
        check_stop(self.stop)
        self.settings: REVMSettings = REVMSettings(self.prior, self.centre, self.approximation, self.stop)
        self._posterior: REVMPosterior | None = None

    def run(self, *args: Any, **kwargs: Any) -> REVMPosterior:
        """Fit to data.

        :param args: the model's arguments, as for ``MCMC.run``.
        :raises BadInput, UnsupportedModel, NotAMode, NotPositiveDefinite, ImproperPosterior, TooLarge: see
            errors.
        """
        weights = weights_of(LogJoint(self.model, args, kwargs, maximise=()), self.site)
        refuse_offsets(weights)
        return self._fitted(weights, starting_point(weights))

    def run_chunks(self, chunks: Chunks) -> REVMPosterior:
        """Fit to data of which a chunk of rows is in memory at a time; the likelihood is the chunks' product.

        A pass over the chunks builds value, gradient and the ``(M, M)`` Gram matrix, and a fit takes some ten of
        them.  The first checks the model on every chunk as :meth:`run` does, later ones run it twice and trust that
        the rows are the same.  Params are held at what they are in the first chunk.  The posterior has no training
        data to fall back on, so its methods ask for theirs; without ``guide``, ``save`` and importance sampling.

        :param chunks: tuples of the model's positional arguments, such as ``list(zip(X.split(10_000),
            t.split(10_000)))`` or a ``DataLoader`` that does not shuffle; gone through once a pass.
        :raises BadInput: for what can be gone through only once, in addition to what :meth:`run` raises.
        :raises UnsupportedModel: for predictors that are not linear, other latent sites, and approximations other
            than ``laplace_at_base`` and ``empirical_fisher``.
        """
        rows = weights_in_chunks(self.model, self.site, chunks, COMMUNICATOR.get())
        weights, first = of_all_rows(rows), rows.example
        try:
            start = base_point(first.target, self._ridge(first), starting_point(first), first.num_weights)
        except ArithmeticError:  # the first chunk alone may have no mode
            start = starting_point(first)
        return self._fitted(weights, start)

    def _ridge(self, weights: Weights) -> float:
        if not callable(self.ridge):
            return float(self.ridge)
        return float(check_result("ridge", self.ridge(weights, self.settings), float, "a prior precision, a float"))

    def _fitted(self, weights: Weights, start: torch.Tensor) -> REVMPosterior:
        state = eigen_state(weights.target, weights.num_weights, start, self._ridge(weights), self.settings)
        if not callable(self.ridge):  # one that the evidence has chosen may say that there is nothing
            refuse_if_outweighed(state)
        warn_if_meaningless(state, weights.target)
        self._posterior = REVMPosterior(weights, state)
        return self._posterior

    def step(self, *args: Any, **kwargs: Any) -> float:
        """The whole fit, which is not iterative; minus the log evidence, nats."""
        return -float(self.run(*args, **kwargs).log_evidence)

    @property
    def posterior(self) -> REVMPosterior:
        """The last fit.

        :raises BadInput: before the first ``run``.
        """
        if self._posterior is None:
            raise BadInput(NOT_FITTED)
        return self._posterior


def starting_point(weights: Weights) -> torch.Tensor:
    """Zero where the predictor is linear, NUTS's kind of start elsewhere, shape ``(D,)``."""
    if isinstance(weights.target, LinearTarget):
        return torch.zeros(len(weights.order), dtype=torch.float64, device=weights.joint.device)
    return weights.joint.initial(1, seed=0)[0][weights.order]
