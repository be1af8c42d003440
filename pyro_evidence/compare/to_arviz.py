"""To ArviZ, 0.x and 1.x, from the posteriors of this package and from Pyro's MCMC, SVI and Predictive."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from pyro.infer import MCMC, SVI, Predictive
from torch import Tensor

from pyro_evidence.compare import chains as sampled
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import entry_point, own_random_numbers
from pyro_evidence.lazy_import import import_extra
from pyro_evidence.numerics.linalg import require_memory
from pyro_evidence.posterior.base import NUM_DRAWS
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.reweighted import CorrectedPosterior
from pyro_evidence.posterior.structures import StructurePosterior
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.parameters import DUMMY_SITE
from pyro_evidence.program.simulate import ROWS, from_predictive, from_prior, pointwise_rows, rows_at_once
from pyro_evidence.relevance.posteriors import AxesPosterior
from pyro_evidence.settings import seed_of, seeded
from pyro_evidence.structure.names import Coords, Dims, names_of

Arrays = dict[str, np.ndarray[Any, Any]]
Groups = dict[str, Arrays]
Values = Mapping[str, Tensor]
Posterior = LaplacePosterior | CorrectedPosterior | StructurePosterior
Fit = Posterior | AxesPosterior | MCMC | SVI | Predictive | sampled.Chains
NUM_CHAINS = 4  # independent draws are shown as four chains, so that R-hat is defined


@dataclass(frozen=True, eq=False)
class GroupedDraws:
    """Draws and data from which every group of ``InferenceData`` is computed.

    :ivar joint: the density at fixed hyperparameters.
    :ivar theta: those hyperparameters, unconstrained.
    :ivar draws: constrained draws, each ``(C, T) + site shape``.
    :ivar estimated: the same of hyperparameters that were maximised, around the maximum.
    :ivar stats: sampler statistics, each ``(C, T)``.
    :ivar of_one_density: whether all draws are of this density's latents, not of several structures'.
    """

    joint: LogJoint
    theta: Tensor
    draws: dict[str, Tensor]
    stats: dict[str, Tensor]
    estimated: dict[str, Tensor] = field(default_factory=dict)
    of_one_density: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of chains and of draws in each."""
        first = next(iter(self.draws.values()))
        return first.shape[0], first.shape[1]

    def grouped(self, rows: Values) -> Arrays:
        """Values ``(C * T,) + shape`` as arrays ``(C, T) + shape``."""
        return {n: _array(v.reshape(*self.shape, *v.shape[1:])) for n, v in rows.items()}


@entry_point
def to_inference_data(
    fit: Fit,
    *args: Any,
    num_samples: int = NUM_DRAWS,
    seed: int | None = 0,
    coords: Coords | None = None,
    dims: Dims | None = None,
    **kwargs: Any,
) -> Any:
    """An ``arviz.InferenceData`` (ArviZ 0.x): ``az.summary``, ``az.loo`` and the plots work on it.

    See :func:`arviz_groups` for the groups and the other parameters.  The log evidence and the hyperparameters of a
    posterior are attributes of its group ``posterior``.

    :param coords: dimension -> names of its elements; ``dims`` site -> its dimensions.  Those that the model has, and
        the columns of a data frame, are known without them.
    :raises ImportError: when ArviZ is missing, or is 1.x; then use :func:`to_datatree`.
    """
    arviz = import_extra("arviz", "ArviZ is missing: pip install 'pyro-evidence[arviz]'.")
    version = str(getattr(arviz, "__version__", "?"))
    if not version.startswith("0."):
        raise ImportError(f"ArviZ {version} has no InferenceData; expected 0.x. Use to_datatree(...) for 1.x.")
    seed = seed_of(seed)
    chains = _chains(fit, args, kwargs, num_samples, seed)
    return _described(arviz.from_dict(**_groups(chains, num_samples, seed), **_named(chains, coords, dims)), fit)


@entry_point
def to_datatree(
    fit: Fit,
    *args: Any,
    num_samples: int = NUM_DRAWS,
    seed: int | None = 0,
    coords: Coords | None = None,
    dims: Dims | None = None,
    **kwargs: Any,
) -> Any:
    """An ``xarray.DataTree`` as ArviZ 1.x uses it; needs ``arviz-base``, which ``arviz`` 1.x brings.

    See :func:`arviz_groups` for the groups and the other parameters.  The log evidence and the hyperparameters of a
    posterior are attributes of its group ``posterior``.

    :param coords: dimension -> names of its elements; ``dims`` site -> its dimensions.  Those that the model has, and
        the columns of a data frame, are known without them.
    :raises ImportError: when ``arviz-base`` is missing.
    """
    missing = "arviz-base is missing: pip install arviz-base. For ArviZ 0.x use to_inference_data(...)."
    arviz = import_extra("arviz_base", missing)
    seed = seed_of(seed)
    chains = _chains(fit, args, kwargs, num_samples, seed)
    return _described(arviz.from_dict(_groups(chains, num_samples, seed), **_named(chains, coords, dims)), fit)


def arviz_groups(fit: Fit, *args: Any, num_samples: int = NUM_DRAWS, seed: int | None = 0, **kwargs: Any) -> Groups:
    """The groups of ArviZ's schema as plain arrays, ``(chain, draw) + shape`` where there are draws.

    ``posterior``, with maximised hyperparameters drawn around their maximum where their standard deviations are known
    (the sampling distribution of an estimate, apart from the sites' draws); ``posterior_predictive`` and
    ``prior_predictive`` (new data, one set for each draw);
    ``prior``; ``log_likelihood`` (nats, one number for each datum, discrete sites summed out, ``to_event``
    dims of an observed site counted as data); ``sample_stats`` (``lp``, the log joint density in
    unconstrained space, nats; for MCMC also ``diverging``); ``observed_data``.  A group that the model does
    not define is left out: predictive draws of a ``pyro.factor``, a log likelihood that a discrete site
    outside the plates couples.

    Draws of a posterior over structures are averaged over these, of sites that all drawn structures have in one shape,
    and beside them stand the data alone; every group of one structure is that of its own posterior,
    ``posterior.member(0)``.

    :param fit: a posterior, ``pyro.infer.MCMC`` after ``run``, ``SVI`` after its steps, a ``Predictive`` with a guide
        or with draws, or the ``fit`` of a run of NUTS in a comparison.
    :param args: the model's arguments, data included, as they went to ``run`` or ``step``; needed for Pyro's own
        objects, ignored for posteriors, which keep theirs.
    :param num_samples: of independent draws from a posterior, a multiple of four, and of draws from the prior; those
        of the prior at which a covariance has no Cholesky factor are left out.
    :param seed: of all draws; the caller's random state is not touched.
    :param kwargs: the model's keyword arguments.
    :raises BadInput: when MCMC has not run, or its draws and its model disagree.
    :raises TooLarge: when the draws would not fit into memory.
    """
    seed = seed_of(seed)
    return _groups(_chains(fit, args, kwargs, num_samples, seed), num_samples, seed)


def _chains(fit: Fit, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_samples: int, seed: int) -> GroupedDraws:
    if num_samples < NUM_CHAINS or num_samples % NUM_CHAINS:
        raise BadInput(f"num_samples={num_samples}; expected a positive multiple of {NUM_CHAINS}, the chains shown.")
    if isinstance(fit, MCMC | sampled.Chains):
        if not (found := fit.get_samples(group_by_chain=True)):
            raise BadInput("this MCMC has no draws; call mcmc.run(...) first.")
        if isinstance(fit, sampled.Chains):
            model, diverging = fit.model, fit.diverging
        else:
            model, diverging = fit.kernel.model, sampled.divergences(fit)
        return _of_draws(model, found, {"diverging": diverging}, args, kwargs)
    if isinstance(fit, SVI | Predictive):
        known = getattr(fit, "posterior_samples", None)
        if not known and fit.guide is None:
            raise BadInput(
                "a Predictive without guide and draws; expected Predictive(model, guide=guide, num_samples=1)."
            )
        with own_random_numbers(), torch.no_grad():
            torch.manual_seed(seed)
            drawn = {} if known else Predictive(fit.guide, num_samples=num_samples)(*args, **kwargs)
        found = {n: v.unsqueeze(0) for n, v in known.items()} if known else _in_chains(drawn)  # draws are one chain
        return _of_draws(fit.model, found, {}, args, kwargs)
    if isinstance(fit, AxesPosterior):
        axes = fit._laplace
        drawn = axes.get_samples(num_samples, seed=seed)
        weights = _in_chains(fit.weights_of_axes(drawn))
        return GroupedDraws(axes._joint, axes.state.theta, _in_chains(drawn), {}, weights)
    if isinstance(fit, StructurePosterior):
        best, drawn = fit.member(0).state, fit.get_samples(num_samples, seed=seed)
        return GroupedDraws(best.problem.joint, best.theta, _in_chains(drawn), {}, of_one_density=False)
    if not isinstance(fit, Posterior):
        raise BadInput(
            f"fit is a {type(fit).__name__}, which has no draws; expected a posterior that has get_samples(...), or "
            f"Pyro's MCMC, SVI or Predictive."
        )
    draws, of = fit.get_samples(num_samples, seed=seed), fit._joint
    draws |= {n: torch.zeros(num_samples, dtype=of.dtype) for n in of.latents.names if n == DUMMY_SITE}
    chains = _in_chains(draws)
    if isinstance(fit, CorrectedPosterior):
        if DUMMY_SITE in chains:
            raise BadInput("the model has no latent sites, and weights say nothing of its params; pass the fit.")
        return GroupedDraws(fit.joint, fit.theta, chains, {})
    estimated = _in_chains(_estimated(fit, num_samples, seed))
    return GroupedDraws(fit.state.problem.joint, fit.state.theta, chains, {}, estimated)


def _in_chains(draws: Values) -> dict[str, Tensor]:
    """Independent draws, shown as several chains."""
    return {n: v.reshape(NUM_CHAINS, -1, *v.shape[1:]) for n, v in draws.items()}


def _estimated(fit: LaplacePosterior, num: int, seed: int) -> dict[str, Tensor]:
    """Draws of maximised hyperparameters, normal in the coordinates of the search; of those with standard deviations.

    They are the sampling distribution of a maximum-likelihood estimate, and do not belong to the draws of the sites.
    """
    if (spread := fit._spread) is None:
        return {}
    theta, known = fit.state.theta.double().repeat(num, 1), spread.unconstrained.diagonal().isfinite()
    index = known.nonzero().flatten()
    tril = torch.linalg.cholesky(spread.unconstrained[index.unsqueeze(-1), index])
    theta[:, index] += torch.randn(num, len(index), generator=seeded(seed), dtype=tril.dtype).to(tril) @ tril.mT
    values = fit.state.problem.joint.hypers.constrained(theta)
    return {n: v.detach() for n, v in values.items() if bool(spread.sd[n].isfinite().all())}


def _named(chains: GroupedDraws, coords: Coords | None, dims: Dims | None) -> dict[str, Any]:
    """Names of dimensions, those of the sites that are shown."""
    names = names_of(chains.joint, coords, dims, {n: v.shape[2:] for n, v in chains.draws.items()})
    shapes = {n: tuple(v.shape[2:]) for n, v in (chains.draws | chains.estimated).items()}
    once = {n: list(along) for n, along in names.dims.items() if len(set(along)) == len(along)}
    shown = {n: along for n, along in once.items() if shapes.get(n) == tuple(len(names.coords[d]) for d in along)}
    used = {d for along in shown.values() for d in along}
    return {"dims": shown, "coords": {d: list(names.coords[d]) for d in used}}


def _described(found: Any, fit: Fit) -> Any:
    """The groups with the log evidence in nats and the hyperparameters, numbers and lists, as attributes."""
    if isinstance(fit, Posterior):
        attributes = {f"hyperparameter {n}": _array(v).tolist() for n, v in getattr(fit, "hyperparameters", {}).items()}
        found["posterior"].attrs.update({"log_evidence": float(fit.log_evidence), **attributes})
    return found


def _groups(chains: GroupedDraws, num_samples: int, seed: int) -> Groups:
    joint, theta = chains.joint, chains.theta
    trace = joint.trace(joint.initial_u, theta)
    values = {n: trace.nodes[n]["value"] for n in joint.observed}
    observed = {n: _array(v) for n, v in values.items() if v.numel()}
    if not chains.of_one_density:
        return {"posterior": {n: _array(v) for n, v in chains.draws.items()}, "observed_data": observed}
    numbers = num_samples * (2 * joint.latents.size + 3 * sum(v.size for v in observed.values()))
    remedy = f"Take fewer draws (num_samples={NUM_CHAINS * 25})."
    require_memory(8 * numbers, f"{num_samples} draws of the latents and of the data", joint.device, remedy)
    sites = [n for n in joint.latents.names if n != DUMMY_SITE]
    u = joint.latents.flat(chains.draws).flatten(0, 1)
    prior = _or_nothing(partial(from_prior, joint, theta, num_samples, seed))
    with torch.no_grad():
        parts = u.split(min(ROWS, rows_at_once(joint)))
        density = {"lp": torch.cat([joint.log_joint(part, theta) for part in parts])} if sites else {}
    groups = {
        "posterior": {n: _array(v) for n, v in ({n: chains.draws[n] for n in sites} | chains.estimated).items()},
        "posterior_predictive": chains.grouped(_or_nothing(partial(from_predictive, joint, theta, u, seed))),
        "log_likelihood": chains.grouped(_or_nothing(partial(pointwise_rows, joint, u, theta))),
        "sample_stats": {n: _array(v) for n, v in chains.stats.items()} | chains.grouped(density),
        "observed_data": observed,
        "prior": {n: _array(v).reshape(1, *v.shape) for n, v in prior.items() if n in sites},
        "prior_predictive": {n: _array(v).reshape(1, *v.shape) for n, v in prior.items() if n in joint.observed},
    }
    return {name: group for name, group in groups.items() if group}


def _of_draws(
    model: Any, draws: Values, stats: Values, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> GroupedDraws:
    """Draws ``(C, T) + shape`` of a model's latent sites, others such as a guide's own left out."""
    joint = LogJoint(model, args, kwargs, maximise=())
    sites = joint.latents.names
    if not set(sites) <= set(draws) or not all(draws[n].shape[1] for n in sites):
        raise BadInput(
            f"the draws have sites { {n: tuple(v.shape) for n, v in draws.items()} }, the model with these arguments "
            f"{sites}; expected the same sites and at least one draw. Pass the arguments of mcmc.run or svi.step."
        )
    return GroupedDraws(joint, joint.initial_theta, {n: draws[n] for n in sites}, dict(stats))


def _or_nothing(function: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """An empty group where the model has no such thing to compute."""
    try:
        return function()
    except (NotImplementedError, UnsupportedModel):
        return {}


def _array(value: Tensor) -> "np.ndarray[Any, Any]":
    return value.detach().cpu().numpy()
