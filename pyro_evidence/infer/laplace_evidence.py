"""Laplace-evidence type-II maximum likelihood for any Pyro model."""

import copy
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pyro_evidence.blocks.block_density import check_nodes, require_blocks
from pyro_evidence.data.chunks import Chunks, agree_on_kind, first_rows
from pyro_evidence.data.ranks import COMMUNICATOR, SINGLE_PROCESS
from pyro_evidence.errors import BadInput, NotConverged, UnsupportedModel
from pyro_evidence.fitting import checkpoint
from pyro_evidence.fitting.iterate import Fit, Status, Stop, check_stop, iterate, require_convergence
from pyro_evidence.fitting.process_state import synchronized
from pyro_evidence.laplace import restarts as laplace_restarts
from pyro_evidence.laplace import type2, type2_rows
from pyro_evidence.laplace.approximation import Problem, is_certified, laplace_problem, require_proper
from pyro_evidence.laplace.approximation_rows import can_batch
from pyro_evidence.laplace.evidence_error import refined, with_nodes
from pyro_evidence.laplace.grouped_chunks import GroupRows, group_rows, local_sites
from pyro_evidence.laplace.restarts import Restarts, rescaled_start, search, starts, without_repeats
from pyro_evidence.laplace.type2 import TypeII
from pyro_evidence.nested.marginalised_joint import MarginalisedJoint, marginalised_problem
from pyro_evidence.nested.roles import marginalised_sites
from pyro_evidence.posterior.groups import with_groups
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.nested import NestedPosterior, integrated
from pyro_evidence.precision.choices import Curvature, exact_hessian
from pyro_evidence.program.checks import Arguments, same_arguments
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.parameters import with_dummy_site
from pyro_evidence.settings import Start, check_function, check_instance, check_model, seed_of
from pyro_evidence.structure.recognise import Structure
from pyro_evidence.structure.streamed import Making, linear_rows, streamed_structure
from pyro_evidence.structure.symmetries import refuse_orbits

GAIN = 0.05  # share of draws that one more marginalised site must save


class LaplaceEvidence:
    """Takes the place of ``SVI`` or ``MCMC(NUTS(model), ...)``: posterior, hyperparameters and log evidence by Laplace.

    The posterior mode and the curvature there give a Gaussian posterior and a log evidence; the model's params (and
    the latent sites named in ``maximise``) are set where that log evidence is highest, by its exact gradient, the mode
    re-found at every step.  MacKay (1992); exact for linear-Gaussian models.  Latent sites that set the spread of
    others, ``marginalise``, are integrated numerically around that, because the joint density of a scale and what it
    scales has no useful mode.

    :param model: any Pyro model whose discrete sites can be summed out.
    :param marginalise: latent sites to integrate numerically around Laplace.  None: those on positive or bounded
        support that set the spread of another site's prior or of the likelihood, multiply other sites on their way to
        the data, or enter a ``pyro.factor``, which does not say how; and beside these, up to three numbers, those
        without which few draws of the others would survive their importance weights.  ``()``: none, one Gaussian over
        everything.
    :param maximise: None: the params are maximised; names: the params and these latent sites, whose prior counts
        (type-II MAP, in the site's own constrained space); ``()``: neither, all hyperparameters are held fixed.
    :param nodes: of quadrature, on each axis of each independent block (a group's effects given everything that groups
        share; up to three axes, spheres where there are more).  1: Laplace.  Above: the blocks are
        integrated first, and the other latent sites by Laplace around them.  ``"auto"``: as many as bring
        ``posterior.log_evidence_error`` below ``stop.quadrature_tol`` nats.
    :param curvature: ``exact_hessian``, ``gauss_newton``, ``block_diagonal``, ``diagonal`` or ``damped(...)``.  None:
        the exact Hessian, but Gauss-Newton where the latents are weights of hidden units that can be exchanged: where
        two of them meet, a network's exact Hessian is singular and its log evidence infinite.
    :param stop: tolerances, the most steps, whether to raise and to show a progress bar.
    :param start: number of random starts for the mode, climbed as one batch, and their seed; by default one where a
        single mode is to be expected and four where not.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = LaplaceEvidence(regression(Linear())).run(X, t)
    >>> sorted(posterior.hyperparameters), tuple(posterior.mode["w"].shape)
    (['alpha', 'alpha_bias', 'beta'], (2,))
    """

    def __init__(
        self,
        model: Model,
        *,
        marginalise: Sequence[str] | None = None,
        maximise: Sequence[str] | None = None,
        nodes: int | str = 1,
        curvature: Curvature | None = None,
        stop: Stop = Stop(),
        start: Start = Start(),
    ) -> None:
        check_model(model)
        if curvature is not None:
            check_function("curvature", curvature, "exact_hessian")
        check_stop(stop)
        check_instance("start", start, Start)
        self.start = start
        self.marginalise = marginalise
        self.model = model
        self.maximise = maximise
        self.nodes: int | str = check_nodes(nodes, curvature)
        self.curvature = curvature
        self.stop = stop
        self._data: Arguments | None = None
        self._fits: tuple[Fit[TypeII], ...] = ()
        self._begun: tuple[Fit[TypeII], ...] = ()
        self._found: Restarts | None = None
        self._full: Problem | None = None
        self._groups: GroupRows | None = None
        self._integrated: dict[int, LaplacePosterior] = {}
        self._more: tuple[str, ...] = ()  # sites outside because few draws of the inside would be kept otherwise

    def resume(self, path: str | Path) -> "LaplaceEvidence":
        """This engine, whose next ``run`` on the same data goes on from a checkpoint that ``stop`` asked for.

        :raises BadInput: for a file that is no checkpoint of such an engine.
        """
        return checkpoint.resumed(self, path)

    @synchronized
    @checkpoint.recorded
    def run(self, *args: Any, **kwargs: Any) -> LaplacePosterior:
        """Fit to data, from scratch.

        :param args: the model's arguments, as for ``MCMC.run``.
        :raises NotConverged: unless ``stop.throw`` is off; it carries the posterior that was reached.
        :raises BadInput, UnsupportedModel, NotAMode, NotPositiveDefinite, ImproperPosterior, TooLarge: see errors.
        """
        if COMMUNICATOR.get() is not SINGLE_PROCESS:
            return self.run_chunks([(*args, *kwargs.values())])
        self._more = ()
        return self._with_more_outside(self._fitted(args, kwargs))

    def _fitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LaplacePosterior:
        self._start(args, kwargs)
        best = self._maximise()
        if not is_certified(best.state.laplace):
            self._start(args, kwargs, factors=False)
            best = self._maximise()
        return self._checked(best)

    def _with_more_outside(self, posterior: LaplacePosterior) -> LaplacePosterior:
        """With sites outside too without which few draws of the inside are kept, as long as that keeps more."""
        if self.marginalise is not None or not isinstance(posterior, NestedPosterior) or self._data is None:
            return posterior
        for site in posterior.candidate_hyperparameters:
            other = copy.copy(self)
            other._more = (*self._more, site)
            with suppress(ArithmeticError, NotConverged):
                found = other._fitted(*self._data)
                if isinstance(found, NestedPosterior) and found.relative_ess > posterior.relative_ess + GAIN:
                    vars(self).update(vars(other))
                    return self._with_more_outside(found)
        return posterior

    @synchronized
    @checkpoint.recorded_chunks
    def run_chunks(self, chunks: Chunks, *, own: Sequence[str] | None = None) -> LaplacePosterior:
        """Fit to data of which a chunk of rows is in memory at a time: the fit that :meth:`run` makes of all rows.

        For models whose observed sites see the latents through linear predictors, such as generalised linear ones,
        whatever their priors and hyperparameters: value, slope, curvature and the evidence's exact gradient are sums
        over a pass.  A fit takes four to six passes for each step of the hyperparameters.  The prior must not depend
        on the rows; params begin where the first chunk has them.  The posterior keeps none of the data: what needs
        them asks for them, and importance sampling goes through the chunks once more.

        And for any model of independent groups of which each lies whole in one chunk: sites that a chunk has for its
        own groups alone are eliminated there, and what is summed is the Schur complement of the others.  The
        posterior has the groups of all chunks, among several processes those of one's own.

        :param chunks: tuples of the model's positional arguments, such as ``Slices(X, t, size=100_000)`` of
            :mod:`pyro_evidence.data`, a list, or a ``DataLoader`` that does not shuffle; gone through once a pass.
        :param own: the sites of groups; ``()`` for none.  None: those of which other chunks have another number.
        :raises BadInput: for what can be gone through only once, in addition to what :meth:`run` raises.
        :raises UnsupportedModel: for models of neither kind, and for sites to be integrated around Laplace.
        """
        if self.nodes != 1:
            raise UnsupportedModel(f"nodes={self.nodes} integrates blocks of rows; expected nodes=1, or run(...).")
        joining, make = COMMUNICATOR.get(), self._making(self.model)
        agree_on_kind(self.model, chunks, joining, make)
        first = make(first_rows(chunks, joining))
        groups = local_sites(first, chunks, joining, own)
        self._full, self._integrated, self._groups = None, {}, None
        problem = self._in_groups(first, chunks, groups) if groups else self._linear(chunks, make)
        self._search(problem, joining.is_first)
        self._data = None
        return self._checked(self._maximise(joining.is_first))

    def _linear(self, chunks: Chunks, make: Making) -> Problem:
        rows = linear_rows(self.model, chunks, COMMUNICATOR.get(), make, self._look)
        return self._of_chunks(rows.joint, streamed_structure(rows), self.curvature or exact_hessian)

    def _making(self, model: Model) -> Making:
        return partial(LogJoint, model, maximise=self.maximise)

    def _in_groups(self, first: LogJoint, chunks: Chunks, own: tuple[str, ...]) -> Problem:
        """Of what all groups share, the groups' own ``own`` sites at their modes given that.

        :raises UnsupportedModel: for another curvature than the exact one.
        """
        if self.curvature not in (None, exact_hessian):
            raise UnsupportedModel(f"curvature={self.curvature} beside groups in chunks; expected exact_hessian.")
        self._look(first)
        make = self._making(self.model)
        if len(own) == len(first.latents.names):  # groups share hyperparameters only
            zero = torch.zeros((), dtype=first.dtype, device=first.device)
            make = self._making(partial(with_dummy_site, self.model, zero))
            first = make(first.args)
        self._groups = group_rows(self.model, chunks, COMMUNICATOR.get(), make, first, own)
        return self._of_chunks(self._groups.shared, self._groups.structure, exact_hessian)

    def _of_chunks(self, joint: LogJoint, structure: Structure, curvature: Curvature) -> Problem:
        active = torch.ones(joint.latents.size, dtype=torch.bool, device=joint.device)
        return Problem(joint, structure, curvature, active)

    def _look(self, joint: LogJoint) -> None:
        refuse_orbits(joint)
        require_nothing_outside(marginalised_sites(joint, self.marginalise))

    def _checked(self, best: Fit[TypeII]) -> LaplacePosterior:
        """The posterior, where it is one, and the search has converged."""
        if len(best.objectives) > 1 and best.status is not Status.UNBOUNDED:  # else standard deviations mean nothing
            require_proper(best.state.laplace)
        if self.nodes != 1:
            best = self._refine()
        posterior = self.posterior
        reached = {n: v.reshape(-1)[:5].tolist() for n, v in list(posterior.hyperparameters.items())[:5]}
        detail = f". Hyperparameters reached, at most five elements of each: {reached}"
        require_convergence("LaplaceEvidence", Status(posterior.status), posterior, self.stop, detail)
        return posterior

    def _maximise(self, shown: bool = True) -> Fit[TypeII]:
        """Every distinct mode to its own hyperparameters: together as far as that goes, then one by one.

        :param shown: whether this process shows the progress bar that was asked for.
        """
        stop = replace(self.stop, progress=self.stop.progress and shown)
        if len(self._fits) > 1 and can_batch(self._fits[0].state.laplace.problem):
            self._fits = type2_rows.climb(self._fits, stop)
        for i, fit in enumerate(self._fits):
            fit = iterate(type2.step, fit.state, stop, "LaplaceEvidence", before=fit.objectives)
            self._fits = (*self._fits[:i], fit, *self._fits[i + 1 :])
            if fit.status is Status.INTERRUPTED:
                break
        return without_repeats(self._fits)[0]

    def _refine(self) -> Fit[TypeII]:
        """Every fit gone on with blocks integrated."""
        self._fits = tuple(refined(fit, self._begun[i], self.nodes, self.stop) for i, fit in enumerate(self._fits))
        return without_repeats(self._fits)[0]

    @synchronized
    def step(self, *args: Any, **kwargs: Any) -> float:
        """One step of the hyperparameters from the best mode, as ``SVI.step``; the first call starts, other data anew.

        :return: minus the log evidence (plus log hyperprior, where sites are maximised), nats.
        """
        if self._data is None or not same_arguments(self._data, (args, kwargs)):
            self._start(args, kwargs)
            self._fits = self._fits[:1]
            if self.nodes != 1:
                self._fits = (with_nodes(self._fits[0], self.nodes),)
        else:
            fit = self._fits[0]
            state = type2.step(fit.state) if fit.state.gradient_norm else fit.state
            self._fits = (Fit(state, Status.BY_HAND, (*fit.objectives, state.objective)),)
        return -self._fits[0].state.objective

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, factors: bool = True) -> None:
        problem = self._problem(args, kwargs)
        self._search(problem if factors else problem.without_factors)
        assert self._found is not None  # or the search has raised
        if factors and not is_certified(self._found.states[0]):
            return self._start(args, kwargs, factors=False)
        self._data = (args, kwargs)

    def _search(self, problem: Problem, shown: bool = True) -> None:
        """The modes, at the hyperparameters that the model begins with."""
        joint, num = problem.joint, self.start.number(laplace_restarts.automatic(problem))
        problem, places = rescaled_start(problem, starts(joint, num, seed_of(self.start.seed)))
        theta = problem.joint.initial_theta
        network = problem.structure.network is not None and can_batch(problem)
        self._found = (
            laplace_restarts.search_in_batch(problem, places, theta)
            if network
            else search(problem, places, theta, self.stop.progress and shown)
        )
        states = [type2.type2_state(state) for state in self._found.states]
        self._fits = self._begun = tuple(Fit(state, Status.BY_HAND, (state.objective,)) for state in states)

    def _problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Problem:
        """What Laplace is to approximate: everything, or what is inside of the marginalised sites."""
        joint = LogJoint(self.model, args, kwargs, maximise=self.maximise)
        refuse_orbits(joint)
        full, marginalise = laplace_problem(joint, self.curvature), marginalised_sites(joint, self.marginalise)
        marginalise = tuple(sorted((*marginalise, *self._more)))
        self._full, self._integrated, self._groups = None, {}, None
        if not marginalise:
            self._require_blocks(joint)
            return full
        inside = MarginalisedJoint(self.model, args, kwargs, marginalise=marginalise, maximise=self.maximise)
        self._require_blocks(inside)
        inner = marginalised_problem(inside, self.curvature)
        self._full = replace(full, curvature=inner.curvature)
        return inner

    def _require_blocks(self, joint: LogJoint) -> None:
        if self.nodes != 1:
            require_blocks(joint, self.nodes)

    @property
    def posterior(self) -> LaplacePosterior:
        """The posterior at the best state so far.

        :raises BadInput: before the first ``run`` or ``step``.
        """
        return self._of(1)[0]

    @property
    def posteriors(self) -> tuple[LaplacePosterior, ...]:
        """One posterior per distinct mode, the best first: what :func:`committee` takes.

        :raises BadInput: before the first ``run`` or ``step``.
        """
        return self._of(None)

    def _of(self, most: int | None) -> tuple[LaplacePosterior, ...]:
        """Posteriors of the best modes; marginalised sites are integrated around these alone."""
        if self._found is None:
            raise BadInput("nothing is fitted yet; call run(...) or step(...) with the model's data first.")
        heights = [float(f.state.laplace.log_evidence) for f in self._fits] + [math.nan]
        reached = self._found.reached.clone()
        reached[reached >= len(self._fits)] = -1
        restarts = torch.tensor(heights, dtype=torch.float64)[reached]
        failures = self._found.failures
        return tuple(
            self._nested(f, LaplacePosterior(f.state.laplace, f.status.value, f.objectives, restarts, failures))
            for f in without_repeats(self._fits)[:most]
        )

    def _nested(self, fit: Fit[TypeII], posterior: LaplacePosterior) -> LaplacePosterior:
        """The posterior with the marginalised sites integrated, where there are any; done once for each fit."""
        if self._full is None:
            return posterior if self._groups is None else with_groups(self._groups, posterior)
        if id(fit) not in self._integrated:
            self._integrated[id(fit)] = integrated(self._full, fit, self.stop.quadrature_tol, posterior)
        return self._integrated[id(fit)]


def require_nothing_outside(sites: Sequence[str]) -> None:
    """Refuse sites to be integrated around Laplace, where rows come in chunks.

    :raises UnsupportedModel: naming them and what to do.
    """
    if sites:
        said = ", ".join(sites)
        raise UnsupportedModel(
            f"site(s) {said} set the spread of others and are integrated numerically around Laplace, for which all "
            f"rows must be at hand: pass them to run(...). Or pass maximise={list(sites)} to maximise them, or "
            f"marginalise=() for one Gaussian over everything."
        )
