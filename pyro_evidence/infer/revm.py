"""The relevance eigenvector machine for any Pyro model with a weight vector."""

from collections.abc import Sequence
from typing import Any

import torch

from pyro_evidence.arguments import check_model
from pyro_evidence.axis_priors import AxisPrior, GaussianPrior
from pyro_evidence.eigen_state import (
    Centre,
    Others,
    Recipe,
    base_centre,
    base_point,
    eigen_state,
    fixed_others,
)
from pyro_evidence.errors import BadInput
from pyro_evidence.infer.eigen_warnings import warn_if_meaningless
from pyro_evidence.infer.ridge import Ridge
from pyro_evidence.infer.settings import check_function, check_methods, check_ridge
from pyro_evidence.posterior_revm import REVMPosterior
from pyro_evidence.program import LogJoint, Model
from pyro_evidence.quadratic import Approximation, laplace_at_base
from pyro_evidence.streamed import Chunks, streamed_weights
from pyro_evidence.weights import LinearTarget, Weights, weights_of


class REVM:
    """Replaces the weights' prior by independent ones along the eigenvectors of the likelihood's curvature.

    The likelihood is approximated by a Gaussian at the weights' mode under ``N(0, 1/ridge)``; along each
    eigenvector of its precision a prior of the best evidence is found in closed form, ``inf`` for most, and
    the mode is found again in the axes that remain.  Kropotov and Vetrov (2007), algorithms 1 and 2.

    What the user wrote as the weights' prior is not counted; params stay at their stored or declared values.
    The result does not change when the basis is rotated, but it does when a column of the design is rescaled:
    standardise.

    :param model: any Pyro model whose weights are real-valued latent sites.
    :param site: the site(s) that hold the weights; may be left out when there is only one latent site.
    :param prior: :class:`GaussianPrior` or :class:`LaplacePrior`.
    :param centre: ``base_centre`` (the paper's) or ``score_centre``.
    :param ridge: prior precision under which the mode is found that stands for the maximum-likelihood point,
        which does not exist when the classes can be separated; or ``isotropic_evidence`` or
        ``cross_validation(...)``.
    :param approximation: ``laplace_at_base``, ``empirical_fisher``, ``JaakkolaJordan()`` or ``LeastKL()``.
    :param others: what happens to latent sites that are no weights: ``fixed_others`` or ``schur_complement``.
    """

    def __init__(
        self,
        model: Model,
        *,
        site: str | Sequence[str] | None = None,
        prior: AxisPrior = GaussianPrior(),  # noqa: B008 - frozen and without fields
        centre: Centre = base_centre,
        ridge: float | Ridge = 1e-2,
        approximation: Approximation = laplace_at_base,
        others: Others = fixed_others,
    ) -> None:
        check_model(model)
        check_methods("prior", prior, ("alpha", "log_gain", "mode", "distribution"), "LaplacePrior()")
        check_function("centre", centre, "score_centre")
        check_function("approximation", approximation, "laplace_at_base")
        check_function("others", others, "schur_complement")
        check_ridge(ridge)
        self.model, self.site, self.ridge = model, site, ridge
        self.recipe = Recipe(prior, centre, approximation, others)
        self._posterior: REVMPosterior | None = None

    def run(self, *args: Any, **kwargs: Any) -> REVMPosterior:
        """Fit to data.

        :param args: the model's arguments, as for ``MCMC.run``.
        :raises BadInput, UnsupportedModel, NotAMode, NotPositiveDefinite, ImproperPosterior, TooLarge: see
            errors.
        """
        weights = weights_of(LogJoint(self.model, args, kwargs, hyper=()), self.site)
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
        weights, first = streamed_weights(self.model, self.site, chunks)
        try:
            start = base_point(first.target, self._ridge(first), starting_point(first), first.num_weights)
        except ArithmeticError:  # the first chunk alone may have no mode
            start = starting_point(first)
        return self._fitted(weights, start)

    def _ridge(self, weights: Weights) -> float:
        return self.ridge(weights, self.recipe) if callable(self.ridge) else float(self.ridge)

    def _fitted(self, weights: Weights, start: torch.Tensor) -> REVMPosterior:
        state = eigen_state(weights.target, weights.num_weights, start, self._ridge(weights), self.recipe)
        warn_if_meaningless(state)
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
            raise BadInput("nothing is fitted yet; call run(...) with the model's data first.")
        return self._posterior


def starting_point(weights: Weights) -> torch.Tensor:
    """Zero where the predictor is linear, NUTS's kind of start elsewhere, shape ``(D,)``."""
    if isinstance(weights.target, LinearTarget):
        return torch.zeros(len(weights.order), dtype=torch.float64, device=weights.joint.device)
    return weights.joint.initial(1, seed=0)[0][weights.order]
