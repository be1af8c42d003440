"""Relevance vector machines for any Pyro model with a linear predictor: by the evidence, or variational."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch

from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.ranks import COMMUNICATOR
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput, NotSmooth, UnsupportedModel
from pyro_evidence.fitting.checkpoint import NOT_FITTED, Resumable
from pyro_evidence.fitting.iterate import MANY_STEPS, Fit, Status, Stop, check_stop, iterate, require_convergence
from pyro_evidence.laplace.mode_checks import certify_sites
from pyro_evidence.program.checks import Arguments, constant_targets, same_arguments
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.relevance import fast_marginal, variational
from pyro_evidence.relevance.axis_priors import GaussianFit
from pyro_evidence.relevance.fast_marginal import FastState
from pyro_evidence.relevance.noise import Noise, noise_of_rows
from pyro_evidence.relevance.posteriors import RVMPosterior, RVMState
from pyro_evidence.relevance.targets import LinearTarget, summarised
from pyro_evidence.relevance.variational import VariationalState
from pyro_evidence.relevance.weights import (
    Weights,
    of_all_rows,
    refuse_offsets,
    weights_in_chunks,
    weights_of,
)
from pyro_evidence.settings import check_model
from pyro_evidence.structure.recognise import recognition_error


@dataclass(eq=False, repr=False)
class LinearEngine(Resumable):
    """An engine for models with linear predictors, whose weights are all that is latent."""

    _start: ClassVar[Callable[..., Any]]  # the first state, from rows of weights
    _step: ClassVar[Any]  # from one state to the next
    _reached: ClassVar[Callable[..., RVMState]]  # a state as the posterior has it

    model: Model
    _: KW_ONLY
    site: str | Sequence[str] | None = None
    noise: str | None = None
    stop: Stop = Stop(num_steps=MANY_STEPS)

    def __post_init__(self) -> None:
        check_model(self.model)
        check_stop(self.stop)
        self._of: Weights | None = None
        self._noise: Noise | None = None
        self._fit: Fit[Any] | None = None
        self._data: Arguments = ((), {})

    def __getstate__(self) -> dict[str, Any]:
        """The settings; a copy, in another process say, has nothing fitted.  The posterior has a pickle of its own."""
        return {**vars(self), "_of": None, "_noise": None, "_fit": None, "_data": ((), {})}

    def run(self, *args: Any, **kwargs: Any) -> RVMPosterior:
        """Fit to data.

        :param args: the model's arguments, as for ``MCMC.run``.
        :raises NotConverged: unless ``stop.throw`` is off; it carries the posterior that was reached.
        :raises UnsupportedModel: for a predictor that is not linear, latent sites besides the weights, or a likelihood
            that the engine does not take.
        """
        weights = weights_of(LogJoint(self.model, args, kwargs, maximise=()), self.site)
        return self._climbed(linear_weights(weights, self.noise))

    def run_chunks(self, chunks: Chunks) -> RVMPosterior:
        """Fit to data of which a chunk of rows is in memory at a time: the fit that :meth:`run` makes of all rows.

        A step takes a pass or a few; :class:`RVM` knows a Gaussian likelihood by its sums after three, also where
        ``noise`` is found.  The posterior has no training data to fall back on, so its methods ask for theirs.

        :param chunks: tuples of the model's positional arguments, as for :meth:`REVM.run_chunks`.
        :raises BadInput: for what can be gone through only once, in addition to what :meth:`run` raises.
        """
        rows = weights_in_chunks(self.model, self.site, chunks, COMMUNICATOR.get())
        require_search(rows.example, self.noise)
        return self._climbed(rows)

    def _climbed(self, rows: Rows[Weights]) -> RVMPosterior:
        start, name = self._start(rows), type(self).__name__
        _ = start.gradient_norm  # what is kept of the design is made here, where autograd may use it later
        with torch.inference_mode(start.is_closed):
            self._fit = iterate(self._step, start, self.stop, name)
        posterior = self.posterior
        require_convergence(name, self._fit.status, posterior, self.stop)
        return posterior

    @property
    def posterior(self) -> RVMPosterior:
        """The posterior at the last state.

        :raises BadInput: before the first ``run``, or ``step`` where there is one.
        """
        if self._fit is None or self._of is None:
            raise BadInput(NOT_FITTED)
        state = self._fit.state
        of = self._of if self._noise is None else self._noise.weights_at(state.log_scale)
        return RVMPosterior(of, self._reached(state), self._fit.status.value, self._fit.objectives)


class RVM(LinearEngine):
    """One prior precision per weight, chosen by the evidence, one weight at a time; most weights are pruned.

    Tipping (2001); the sequential algorithm of Tipping and Faul (2003).  Any likelihood with a linear
    predictor: exact evidence for a Gaussian one, Laplace's otherwise, classes by softmax.  What the user
    wrote as the weights' prior is not counted; params stay at their stored or declared values, but for the
    one that ``noise`` names.

    The search is greedy.  It can stop at a poor model, even the constant one, where no single weight helps
    alone; and the predictive variance of localised basis functions falls far from the data, where it should
    rise.  And its log evidence is that of a prior learned from the same data: it cannot choose a kernel, its width or
    a basis.  Cross-validate.

    :param model: a Pyro model with a linear predictor and no latent sites besides the weights.
    :param site: the site(s) that hold the weights; may be left out when there is only one latent site.
    :param noise: the param that sets the precision of Gaussian noise (a scale, variance or precision of one
        element), to be re-estimated by the evidence as well; None holds it.
    :param stop: most steps, whether to raise and to show a progress bar.

    >>> import torch
    >>> from pyro_evidence import RVM
    >>> from pyro_evidence.models.basis import Polynomial
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = RVM(regression(Polynomial(3), beta=20.0)).run(X, t)
    >>> posterior.mode["w"].shape[-1]
    4
    """

    _step = staticmethod(fast_marginal.step)

    def _start(self, rows: Rows[Weights]) -> FastState:
        """The model without weights."""
        self._of = of_all_rows(rows)
        self._noise = None if self.noise is None else noise_of_rows(rows, self.noise)
        if self._noise is not None:
            return fast_marginal.empty(self._noise)
        target = self._of.target
        return fast_marginal.empty(target if target.is_resident else summarised(target))

    def step(self, *args: Any, **kwargs: Any) -> float:
        """One weight's change, as ``SVI.step``; other data start anew.

        :return: minus the log evidence, nats.
        """
        if self._fit is None or not same_arguments(self._data, (args, kwargs)):
            weights = weights_of(LogJoint(self.model, args, kwargs, maximise=()), self.site)
            state, self._data = self._start(linear_weights(weights, self.noise)), (args, kwargs)
            self._fit = Fit(state, Status.STEP_LIMIT, (state.objective,))
        state = fast_marginal.step(self._fit.state)
        self._fit = Fit(state, state.stop_reason or Status.STEP_LIMIT, (*self._fit.objectives, state.objective))
        return -state.objective

    def _reached(self, state: FastState) -> RVMState:
        return RVMState(state.alpha.clone(), state.mode.x.clone())  # outside of inference mode, so fit for derivatives


SLOW = Stop(tolerance=1e-6, gradient_tolerance=1e-3, num_steps=MANY_STEPS)  # a rise of 1e-6 of the bound counts as none


@dataclass(eq=False, repr=False)
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

    _: KW_ONLY
    stop: Stop = SLOW

    _step = staticmethod(variational.step)

    def _start(self, rows: Rows[Weights]) -> VariationalState:
        self._of = of_all_rows(rows)
        self._noise = None if self.noise is None else noise_of_rows(rows, self.noise)
        return variational.start(rows, self._noise.num_data if self._noise else 0.0)

    def _reached(self, state: VariationalState) -> RVMState:
        fit = GaussianFit(state.tril, state.mean.new_tensor(state.objective))
        return RVMState(state.alpha, state.mean, fit)


def linear_weights(weights: Weights, noise: str | None = None) -> Rows[Weights]:
    """The rows of a model in which weights are all that is latent, behind a linear predictor.

    :param noise: the param that sets the precision of the noise, where it is to be found.
    :raises BadInput: for targets that are one constant, where it is.
    :raises UnsupportedModel: for any other model.
    :raises NotSmooth: for a likelihood with a corner at weights of zero, where the search starts.
    """
    if not isinstance(weights.target, LinearTarget) or weights.num_others:
        other = sorted(set(weights.joint.latents.names) - set(weights.sites))
        if not other and (why := recognition_error(weights.joint)) is not None:
            raise UnsupportedModel(
                f"nothing can be said about the model's predictors, because at other weights than the first it raises "
                f"{type(why).__name__}: {why}. Make it run at every value of its weights."
            ) from why
        raise UnsupportedModel(
            f"expected observed sites with linear predictors and no latent sites besides the weights; "
            f"{'there are ' + ', '.join(other) if other else 'a predictor is not linear'}. REVM takes such "
            "models."
        )
    require_search(weights, noise)
    return Rows.resident(weights, len(weights.target.parts[0].c))


def require_search(weights: Weights, noise: str | None) -> None:
    """Refuse targets whose digits are an offset, and a corner or no curvature at weights of zero, where it starts.

    :param noise: the param of a scale that is to be found, for which targets must vary.
    :raises BadInput, NotSmooth: naming the site.
    """
    joint = weights.joint
    if noise is not None and joint.constant is not None:
        raise constant_targets(joint.constant)
    refuse_offsets(weights)
    size = torch.stack([part.J.abs().amax((0, 1)) for part in weights.target.parts]).amax(0)
    unit = weights.flat(torch.where(size > 0.0, size, 1.0).reciprocal())  # that moves some predictor by one
    certify_sites(joint, joint.initial_u, joint.initial_theta, joint.observed, unit)
    for likelihood, part in zip(weights.likelihoods, weights.target.parts, strict=True):
        slope, curvature = part.derivatives(part.c.unsqueeze(0))
        if bool((slope != 0).any()) and not bool((curvature.abs() > torch.finfo(curvature.dtype).tiny).any()):
            raise NotSmooth(
                f"the likelihood of site '{likelihood.site}' has a slope but no curvature at weights of zero, where "
                "the search begins; expected both. Take a smooth one (StudentT for Laplace noise), or a larger scale."
            )
