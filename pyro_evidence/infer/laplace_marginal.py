"""A model with some of its latents integrated out by Laplace: itself a Pyro model over the rest."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import global_lock
from pyro_evidence.laplace.approximation import (
    LaplaceState,
    Problem,
    laplace_problem,
    laplace_state,
    search_modes,
    state_at,
)
from pyro_evidence.laplace.gradient import evidence_slope
from pyro_evidence.numerics.derivatives import Last, normal_draws
from pyro_evidence.program.checks import Arguments, same_arguments
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.sites import is_plate
from pyro_evidence.settings import check_model, seed_of

FACTOR = "log_evidence"  # the site that stands for the integrated latents and the data


class InnerSearch:
    """Laplace's log evidence of what is inside, at one value of the rest after the other, and how often it failed.

    A search begins at the last mode that was found, moved by what Newton's step at the new value says, which is the
    mode's derivative times the move to first order; where that leads to none, at the origin.

    :ivar problem: of what is inside.
    :ivar num_values: how often the evidence was asked for, and ``num_failures``: how often no mode was found.
    :ivar message: what the last failure said.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_values: int = 0
        self.num_failures: int = 0
        self.message: str = ""
        self._last: LaplaceState | None = None
        self._found_last: tuple[Tensor, Tensor] = (torch.zeros(()), torch.zeros(0))

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Log evidence ``()`` and its exact derivatives ``(T,)``, hyperpriors left out.

        :raises NotAMode, NotPositiveDefinite: as :func:`laplace_state`; counted.
        """
        self.num_values += 1
        if self._last is not None and torch.equal(self._last.theta, theta):
            return self._found_last  # digit by digit
        try:
            state = self._state(theta)
        except ArithmeticError as error:
            self.num_failures += 1
            self.message = str(error)
            raise
        self._last, self._found_last = state, (state.log_evidence, evidence_slope(state)[0].double())
        return self._found_last

    def _state(self, theta: Tensor) -> LaplaceState:
        if self._last is not None:
            with suppress(ArithmeticError):  # else from further away
                last = self._last
                slope = self.problem.density.gradient(last.u.unsqueeze(0), theta)[1]
                start = last.u + last.precision.solve(slope.to(last.u))[0]  # where the mode has moved, to first order
                start = start if bool(torch.isfinite(start).all()) else last.u
                return self._found(theta, start, cold=False)
        return self._found(theta, self.problem.joint.initial_u, cold=True)

    def _found(self, theta: Tensor, start: Tensor, *, cold: bool) -> LaplaceState:
        mode = search_modes(self.problem, start.unsqueeze(0), theta, cold=cold)
        return state_at(self.problem, theta, mode, 0, log_hyperprior=theta.new_zeros(()))


class LaplaceMarginal:
    """``model`` with the sites in ``integrate`` and the data replaced by one factor, Laplace's log evidence of them.

    An ordinary Pyro model over the other latent sites and the params, for NUTS, SVI or an AutoGuide: its density is
    ``p(rest) p(D | rest)``, the second factor by Laplace with its exact gradient, the mode's dependence included.
    Exact where the integrated part is Gaussian.  Meant for a few hyperparameters above many latents, such as the
    lengthscales of a Gaussian process: ``MCMC(NUTS(LaplaceMarginal(model, integrate=["f"])), ...)``.  Margossian et
    al. (2020), "Hamiltonian Monte Carlo using an adjoint-differentiated Laplace approximation", NeurIPS.

    First derivatives only: what differentiates twice, ``LaplaceEvidence`` among them, is refused.  Where no mode can
    be found the density is zero; that is counted (``num_failures``), and said when it happens first.

    :param model: a Pyro model with at least one more latent site, or param, than ``integrate`` names.
    :param integrate: names of the latent sites to integrate out.

    >>> import torch
    >>> from pyro.infer import MCMC, NUTS
    >>> from pyro_evidence import LaplaceMarginal
    >>> from pyro_evidence.models.gp import gp_classifier
    >>> from pyro_evidence.models.kernels import RBF
    >>> X = torch.linspace(-1.0, 1.0, 10).unsqueeze(-1)
    >>> model = LaplaceMarginal(gp_classifier(RBF()), integrate=["f"])
    >>> import pyro
    >>> trace = pyro.poutine.trace(model).get_trace(X, (X[:, 0] > 0.0).double())
    >>> bool(trace.log_prob_sum().isfinite()), "f" in trace.nodes
    (True, False)
    """

    def __init__(self, model: Model, *, integrate: Sequence[str]) -> None:
        check_model(model, goes_to="its call")
        if isinstance(integrate, str) or not len(integrate):
            raise BadInput(f"integrate={integrate!r}; expected a list of names of latent sites, such as ['f'].")
        self.model = model
        self.integrate: tuple[str, ...] = tuple(integrate)
        self._last: Last[Arguments, InnerSearch] = Last()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the model over the rest.

        :raises BadInput: for names that are no latent sites, and for data that the model refuses.
        """
        search = self._search(args, kwargs)
        joint, before = search.problem.joint, search.num_failures
        theta = joint.hypers.flat(self._rest(search.problem, args, kwargs)).double()
        with poutine.block():  # the runs inside are nobody else's
            log_evidence = _LogEvidence.apply(theta, search)
        if not before and search.num_failures:
            values = {n: v.tolist() for n, v in joint.hypers.constrained(theta.detach()).items() if v.numel() < 9}
            warnings.warn(
                f"LaplaceMarginal: no mode of {list(self.integrate)} was found at {values}, where the density is taken "
                f"as zero. {search.message} This is said once; num_failures counts it: where it is more than a few in "
                "a hundred of num_values, chains avoid a part of the posterior, so integrate other sites or run "
                "NUTS(model).",
                stacklevel=2,
            )
        pyro.factor(FACTOR, log_evidence.to(joint.dtype))

    @property
    def num_values(self) -> int:
        """Number of evaluations of the inner log evidence, on the last arguments."""
        return self._last.pair[1].num_values if self._last.pair else 0

    @property
    def num_failures(self) -> int:
        """At how many of these no mode was found, so that the density was taken as zero."""
        return self._last.pair[1].num_failures if self._last.pair else 0

    def _search(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InnerSearch:
        return self._last.found((args, kwargs), same_arguments, self._made)

    def _made(self, given: Arguments) -> InnerSearch:
        with poutine.block(), torch.enable_grad():
            joint = LogJoint(self.model, *given, integrate=self.integrate)
            if not joint.hypers.size:
                raise BadInput(
                    f"integrate={list(self.integrate)} leaves nothing to sample; expected at least one more latent "
                    f"site or param. Use LaplaceEvidence for the evidence itself."
                )
            return InnerSearch(laplace_problem(joint))

    def _rest(self, problem: Problem, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The other sites and the params of one run, which handlers around it see; nothing else is seen."""
        joint = problem.joint
        fixed = joint.latents.constrained(joint.initial_u.to(joint.dtype))
        hidden = {*fixed, *joint.observed, *joint.discrete}
        model = poutine.block(
            poutine.condition(self.model, data=fixed),
            hide_fn=lambda msg: msg["type"] == "sample" and (msg["name"] in hidden or is_plate(msg)),
        )
        nodes = poutine.trace(model).get_trace(*args, **kwargs).nodes
        return {n: torch.as_tensor(nodes[n]["value"]) for n in joint.hypers.names}

    def latents(
        self, samples: Mapping[str, Tensor], *args: Any, seed: int | None = 0, **kwargs: Any
    ) -> dict[str, Tensor]:
        """One draw of the integrated sites for each draw of the rest, ``(S,) + site shape``.

        :param samples: of the other sites, as ``MCMC.get_samples()`` gives them.
        :param args: the model's arguments.
        :raises BadInput: when a site is missing.
        """
        first = seed_of(seed)

        def draw(i: int, state: LaplaceState) -> dict[str, Tensor]:
            joint, u = state.problem.joint, state.u
            white = normal_draws(1, len(u), seed=first + i).to(u.device)
            return joint.latents.constrained((u + state.precision.unwhiten(white)[0]).to(joint.dtype))

        return _each(self._search(args, kwargs).problem, samples, draw)

    def log_evidences(self, samples: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Laplace's ``log p(D | rest)`` for each draw of the rest, nats, shape ``(S,)``."""
        found = _each(self._search(args, kwargs).problem, samples, lambda i, state: {"": state.log_evidence})
        return found[""]


OfDraw = Callable[[int, LaplaceState], dict[str, Tensor]]  # its number, and what is inside given it


def _each(problem: Problem, samples: Mapping[str, Tensor], of: OfDraw) -> dict[str, Tensor]:
    """The results of each draw of the rest, ``(S, ...)``.

    :raises BadInput: when a site is missing.
    """
    joint = problem.joint
    missing = [n for n in joint.maximised_sites if n not in samples]
    if missing:
        raise BadInput(
            f"samples lack the site(s) {missing}; expected draws of {list(joint.maximised_sites)}. Pass "
            "mcmc.get_samples()."
        )
    with global_lock():
        store = pyro.get_param_store()
        params = {n: store[n].detach() for n in joint.hypers.names if n not in joint.maximised_sites}
    found = []
    for i in range(len(next(iter(samples.values())))):
        values = params | {n: samples[n][i] for n in joint.maximised_sites}
        found.append(of(i, laplace_state(problem, joint.hypers.flat(values).double(), joint.initial_u, cold=True)))
    return {n: torch.stack([row[n] for row in found]) for n in found[0]}


class _LogEvidence(torch.autograd.Function):
    """Laplace's log evidence at unconstrained hyperparameters ``(T,)``; minus infinity where there is no mode."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, search: InnerSearch) -> Tensor:
        ctx.theta, theta = theta, theta.detach()
        try:
            with torch.enable_grad():
                log_evidence, ctx.slope = search(theta)
        except ArithmeticError:
            log_evidence, ctx.slope = theta.new_full((), -torch.inf), torch.full_like(theta, torch.nan)
        return log_evidence

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        slope: Tensor = cotangents[0] * ctx.slope
        return (_Final.apply(slope, ctx.theta) if torch.is_grad_enabled() else slope), None


class _Final(torch.autograd.Function):
    """A gradient that will not be differentiated again, rather than be differentiated as if it were constant."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, theta: Tensor) -> Tensor:
        return slope.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, None]:
        raise UnsupportedModel(
            "LaplaceMarginal has first derivatives only, but its gradient is being differentiated again. Use NUTS, SVI "
            "or an AutoGuide on it; for a Laplace evidence of everything, use LaplaceEvidence on the model itself."
        )
