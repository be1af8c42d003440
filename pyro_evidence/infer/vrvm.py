"""The variational relevance vector machine for Pyro models with a linear predictor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.ranks import COMMUNICATOR, SINGLE_PROCESS
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting import checkpoint
from pyro_evidence.fitting.iterate import Fit, Stop, check_stop, iterate, require_convergence
from pyro_evidence.infer.rvm import linear_weights, linear_weights_in_chunks
from pyro_evidence.program.log_joint import Model
from pyro_evidence.relevance import variational
from pyro_evidence.relevance.axis_priors import GaussianFit
from pyro_evidence.relevance.noise import Noise, noise_of_rows
from pyro_evidence.relevance.posteriors import RVMPosterior, RVMState
from pyro_evidence.relevance.variational import VariationalState
from pyro_evidence.relevance.weights import Weights, of_all_rows
from pyro_evidence.settings import check_model

SLOW = Stop(tolerance=1e-6, gradient_tolerance=1e-3, num_steps=2000)  # a rise of 1e-6 of the bound counts as none


@checkpoint.engine
class VRVM:
    """``q(w) q(alpha)`` under Gamma(1e-6, 1e-6) priors on all precisions, by a bound that never falls.

    Bishop and Tipping (2000).  Gaussian noise, or Bernoulli in log odds by Jaakkola and Jordan's bound.
    No weight becomes exactly zero.  The posterior's ``log_evidence`` is the lower bound, not
    Laplace's approximation, and the constants of the Gamma priors count in it: it cannot be compared with another
    engine's, nor choose a kernel, its width or a basis.  Cross-validate.

    :param model: a Pyro model with a linear predictor and no latent sites besides the weights.
    :param site: the site(s) that hold the weights; may be left out when there is only one latent site.
    :param noise: the param that sets the precision of Gaussian noise, to be set where the bound is highest as well;
        None holds it.
    :param stop: tolerances on the bound, most steps, whether to raise and to show a progress bar.

    >>> import torch
    >>> from pyro_evidence import VRVM
    >>> from pyro_evidence.models.basis import Polynomial
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = VRVM(regression(Polynomial(3), beta=20.0)).run(X, t)
    >>> posterior.mode["w"].shape[-1]
    4
    """

    def __init__(
        self, model: Model, *, site: str | Sequence[str] | None = None, noise: str | None = None, stop: Stop = SLOW
    ) -> None:
        check_model(model)
        check_stop(stop)
        self.model = model
        self.site = site
        self.noise = noise
        self.stop = stop
        self._of: Weights | None = None
        self._noise: Noise | None = None
        self._fit: Fit[VariationalState] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The settings; a copy, in another process say, has nothing fitted.  The posterior has a pickle of its own."""
        return {**vars(self), "_of": None, "_noise": None, "_fit": None}

    def resume(self, path: str | Path) -> "VRVM":
        """This engine, whose next ``run`` on the same data goes on from a checkpoint that ``stop`` asked for.

        :raises BadInput: for a file that is no checkpoint of such an engine.
        """
        return checkpoint.resumed(self, path)

    def run(self, *args: Any, **kwargs: Any) -> RVMPosterior:
        """Fit to data.

        :param args: the model's arguments, as for ``MCMC.run``.
        :raises NotConverged: unless ``stop.throw`` is off; it carries the posterior that was reached.
        :raises UnsupportedModel: for another likelihood, or latent sites besides the weights.
        """
        if COMMUNICATOR.get() is not SINGLE_PROCESS:
            return self.run_chunks([(*args, *kwargs.values())])
        return self._climbed(linear_weights(self.model, self.site, args, kwargs, self.noise))

    def run_chunks(self, chunks: Chunks) -> RVMPosterior:
        """Fit to data of which a chunk of rows is in memory at a time: the fit that :meth:`run` makes of all rows.

        One pass for each step.  The posterior has no training data to fall back on, so its methods ask for theirs.

        :param chunks: tuples of the model's positional arguments, as for :meth:`REVM.run_chunks`.
        :raises BadInput: for what can be gone through only once, in addition to what :meth:`run` raises.
        """
        return self._climbed(linear_weights_in_chunks(self.model, self.site, chunks, self.noise))

    def _climbed(self, rows: Rows[Weights]) -> RVMPosterior:
        self._of = of_all_rows(rows)
        self._noise = None if self.noise is None else noise_of_rows(rows, self.noise)
        start = variational.start(rows, self._noise.num_data if self._noise else 0.0)
        self._fit = iterate(variational.step, start, self.stop, "VRVM")
        posterior = self.posterior
        require_convergence("VRVM", self._fit.status, posterior, self.stop)
        return posterior

    @property
    def posterior(self) -> RVMPosterior:
        """The posterior at the last state.

        :raises BadInput: before the first ``run``.
        """
        if self._fit is None or self._of is None:
            raise BadInput("nothing is fitted yet; call run(...) with the model's data first.")
        state = self._fit.state
        of = self._of if self._noise is None else self._noise.weights_at(state.log_scale)
        fit = GaussianFit(state.tril, state.mean.new_tensor(state.objective))
        return RVMPosterior(of, RVMState(state.alpha, state.mean, fit), self._fit.status.value, self._fit.objectives)
