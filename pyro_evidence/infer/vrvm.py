"""The variational relevance vector machine for Pyro models with a linear predictor."""

from collections.abc import Sequence

from pyro_evidence.data.rows import Rows
from pyro_evidence.fitting.iterate import Stop
from pyro_evidence.infer.rvm import LinearEngine
from pyro_evidence.program.log_joint import Model
from pyro_evidence.relevance import variational
from pyro_evidence.relevance.axis_priors import GaussianFit
from pyro_evidence.relevance.noise import noise_of_rows
from pyro_evidence.relevance.posteriors import RVMState
from pyro_evidence.relevance.variational import VariationalState
from pyro_evidence.relevance.weights import Weights, of_all_rows

SLOW = Stop(tolerance=1e-6, gradient_tolerance=1e-3, num_steps=2000)  # a rise of 1e-6 of the bound counts as none


class VRVM(LinearEngine):
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
        super().__init__(model, site=site, noise=noise, stop=stop)

    _step = staticmethod(variational.step)

    def _start(self, rows: Rows[Weights]) -> VariationalState:
        self._of = of_all_rows(rows)
        self._noise = None if self.noise is None else noise_of_rows(rows, self.noise)
        return variational.start(rows, self._noise.num_data if self._noise else 0.0)

    def _reached(self, state: VariationalState) -> RVMState:
        fit = GaussianFit(state.tril, state.mean.new_tensor(state.objective))
        return RVMState(state.alpha, state.mean, fit)
