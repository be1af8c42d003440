"""One engine's run on a model: draws of the model's sites, and the model they belong to."""

import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoContinuous, AutoNormal
from pyro.infer.mcmc.util import diagnostics as chain_diagnostics
from torch import Tensor

from pyro_evidence.compare.chains import (
    FEWEST,
    Chains,
    Data,
    Draws,
    divergences,
    error_line,
    run_chains,
)
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import own_random_numbers
from pyro_evidence.posterior.base import NUM_DRAWS
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.simulate import recorded_rows
from pyro_evidence.program.sites import is_discrete, sample_nodes
from pyro_evidence.relevance.posteriors import AxesPosterior
from pyro_evidence.settings import check_count, seed_of


@dataclass(frozen=True, repr=False)
class EngineRun:
    """Result of one engine, or the reason why there is none.

    :ivar draws: constrained values by site, ``(C, T) + site shape``; empty when the engine failed.
    :ivar model: a model whose density the draws can be put into; hyperparameters put in.
    :ivar seconds: wall-clock time of the fit.
    :ivar fit: what the engine returned.
    :ivar failure: why there are no draws, or an empty string.
    :ivar divergences: number of divergent transitions, for NUTS.
    :ivar label_switches: how often neighbouring draws of a chain name the components of a mixture differently.
    :ivar target: the model that NUTS is to run on, where that is not ``model``.
    """

    name: str
    draws: Draws
    model: Model
    seconds: float
    fit: Any = None
    failure: str = ""
    divergences: int = 0
    label_switches: int = 0
    notes: tuple[str, ...] = field(default=())
    target: Model | None = None

    def __repr__(self) -> str:
        return (
            f"EngineRun({self.name!r}, sites={list(self.draws)}, seconds={self.seconds:.3g}, failure={self.failure!r})"
        )

    def noted(self, *notes: str) -> "EngineRun":
        """This run with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    @property
    def num_draws(self) -> int:
        """Draws in all chains together."""
        return next((v.shape[0] * v.shape[1] for v in self.draws.values()), 0)

    @cached_property
    def chain_numbers(self) -> tuple[float, float]:
        """Smallest effective sample size and largest R-hat over all elements that vary; nan for too few draws."""
        if self.num_draws < 2 * FEWEST or next(iter(self.draws.values())).shape[1] < FEWEST:
            return math.nan, math.nan
        varying = {n: moving(v) for n, v in self.draws.items()}
        found = chain_diagnostics({n: v for n, v in varying.items() if v.numel()})
        n_eff = min((float(d["n_eff"].min()) for d in found.values()), default=math.nan)
        return n_eff, max((float(d["r_hat"].max()) for d in found.values()), default=math.nan)


def moving(draws: Tensor) -> Tensor:
    """The elements ``(C, T, E)`` that are not the same in all draws ``(C, T) + shape``."""
    flat = draws.double().flatten(2) if draws.dim() > 2 else draws.double().unsqueeze(-1)
    return flat[..., (flat != flat[:1, :1]).any(0).any(0)]


@dataclass(frozen=True)
class NUTSRun:
    """NUTS as an engine of :func:`compare`.

    :ivar posterior: name of the engine whose fitted hyperparameters are held; None runs on the user's model.
    :ivar hyperpriors: param name -> prior; these params are lifted to latent sites and integrated as well.
    :ivar metric: ``"laplace"`` runs :class:`LaplaceNUTS` on the fit that ``of`` names, in coordinates whitened by it;
        None: Pyro's NUTS.
    :ivar num_samples: per chain, after as many as ``warmup_steps`` (fifty are enough with ``metric="laplace"``).
    :ivar num_chains: more than one run in processes of their own, for which the model must be importable.
    :ivar seed: of the first chain; the others count up.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence, compare
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> from pyro_evidence.compare import NUTSRun
    >>> model, nuts = regression(Linear()), NUTSRun(posterior="laplace", num_samples=50, warmup_steps=50)
    >>> found = compare(model, X, t, engines={"laplace": LaplaceEvidence(model), "nuts": nuts})
    >>> sorted(found.runs)
    ['laplace', 'nuts']
    """

    posterior: str | None = None
    hyperpriors: Mapping[str, Any] | None = None
    num_samples: int = 500
    warmup_steps: int = 500
    num_chains: int = 1
    seed: int | None = 0
    metric: str | None = None

    def __post_init__(self) -> None:
        if self.metric not in (None, "laplace") or (self.metric and self.posterior is None):
            raise BadInput(
                f"metric={self.metric!r} with posterior={self.posterior!r}; expected None, or 'laplace' together with "
                "the name of an engine that is LaplaceEvidence: NUTSRun(posterior='laplace', metric='laplace')."
            )

    def run_on(
        self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], fit: LaplacePosterior | None = None
    ) -> Chains:
        """Sample the model, given these data, to the end of all chains.

        :param fit: of the model to these data, in whose coordinates chains are to run.
        :raises BadInput: for fewer than one chain, draw or warmup step.
        """
        length = check_count("num_samples", self.num_samples), check_count("warmup_steps", self.warmup_steps)
        first, num = seed_of(self.seed), check_count("num_chains", self.num_chains)
        lifted = poutine.lift(model, prior=dict(self.hyperpriors)) if self.hyperpriors else model
        return run_chains(lifted, (args, kwargs), length, range(first, first + num), fit)


@dataclass(frozen=True)
class SVIRun:
    """SVI with a guide as an engine of :func:`compare`; params of the model are optimised with the guide's.

    :ivar guide: model -> guide, for example ``AutoNormal``.
    :ivar optim: a Pyro optimiser.
    :ivar posterior: name of the engine whose fitted hyperparameters are held; None optimises the model's params.
    :ivar elbo: makes the loss: ``TraceEnum_ELBO`` for models with discrete sites.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence, compare
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> from pyro.infer.autoguide import AutoNormal
    >>> from pyro.optim import Adam
    >>> from pyro_evidence.compare import SVIRun
    >>> model, svi = regression(Linear()), SVIRun(AutoNormal, Adam({"lr": 0.05}), num_steps=20, posterior="laplace")
    >>> found = compare(model, X, t, engines={"laplace": LaplaceEvidence(model), "svi": svi})
    >>> sorted(found.runs)
    ['laplace', 'svi']
    """

    guide: Callable[[Model], Any]
    optim: Any
    num_steps: int = 1000
    num_samples: int = NUM_DRAWS
    seed: int | None = 0
    posterior: str | None = None
    elbo: Callable[[], Any] = Trace_ELBO

    def run_on(self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Draws, Model]:
        """Draws from the guide, one chain, and the model at the optimised params."""
        torch.manual_seed(seed_of(self.seed))
        guide = self.guide(model)
        svi = SVI(model, guide, self.optim, self.elbo())
        losses = torch.tensor([svi.step(*args, **kwargs) for _ in range(self.num_steps)])
        if not bool(torch.isfinite(losses[-1:]).all()):
            raise BadInput(
                f"the loss of SVI is {float(losses[-1])} after {self.num_steps} steps; expected a number. Lower "
                "the learning rate."
            )
        trace = poutine.trace(model).get_trace(*args, **kwargs)
        params = {n: torch.as_tensor(trace.nodes[n]["value"]).detach().clone() for n in trace.param_nodes}
        latent = {n: s for n, s in sample_nodes(trace).items() if not s["is_observed"] and not is_discrete(s)}
        at_once = isinstance(guide, AutoContinuous | AutoNormal)  # a guide by hand may not bear a plate around it
        drawn = Predictive(guide, num_samples=self.num_samples, parallel=at_once)(*args, **kwargs)
        if not set(latent) <= set(drawn):  # the guide leaves some to the model
            drawn = Predictive(model, guide=guide, num_samples=self.num_samples)(*args, **kwargs)
        shapes = {n: torch.as_tensor(s["value"]).shape for n, s in latent.items()}
        draws = {n: drawn[n].detach().reshape(1, self.num_samples, *s) for n, s in shapes.items()}
        return draws, poutine.substitute(model, data=params) if params else model


def run_engine(name: str, engine: Any, model: Model, data: Data, done: Mapping[str, EngineRun]) -> EngineRun:
    """One engine on the data; a failure, of whatever kind, is a row as well.

    The global param store and the caller's random state are as before, whatever the engine does.
    """
    start = time.perf_counter()
    with own_random_numbers(), pyro.get_param_store().scope(_stored(model, data)):
        try:
            found = _run(name, engine, model, data, done)
            sizes = {n: tuple(v.shape[:2]) for n, v in found.draws.items()}
            if not found.num_draws or len(set(sizes.values())) > 1:
                raise BadInput(
                    f"the draws by site are (chains, draws) {sizes}; expected one number of them, at least 1. Look at "
                    "that engine's get_samples()."
                )
            counts = {n: int((~torch.isfinite(v.double())).sum()) for n, v in found.draws.items()}
            if bad := {n: count for n, count in counts.items() if count}:
                raise BadInput(f"draws that are nan or infinite, by site: {bad}. Look at that engine.")
        except Exception as error:  # an engine is anybody's code
            found = EngineRun(name, {}, model, 0.0, failure=error_line(error))
    return replace(found, seconds=time.perf_counter() - start)


def _stored(model: Model, data: Data) -> Any:
    """A copy of the store's values of the model's own params, for engines to start from and to change."""
    state = pyro.get_param_store().get_state()
    own: set[str] = set()
    if state["params"]:
        try:
            with pyro.get_param_store().scope({"params": {**state["params"]}, "constraints": {**state["constraints"]}}):
                own = set(poutine.trace(model, param_only=True).get_trace(*data[0], **data[1]).nodes)
        except Exception:  # the engine will fail as well, and say why
            own = set()
    params = {n: v.detach().clone().requires_grad_() for n, v in state["params"].items() if n in own}
    return {"params": params, "constraints": {n: c for n, c in state["constraints"].items() if n in own}}


def _run(name: str, engine: Any, model: Model, data: Data, done: Mapping[str, EngineRun]) -> EngineRun:
    args, kwargs = data
    if isinstance(engine, NUTSRun):
        return _nuts(name, engine, model, data, done)
    if isinstance(engine, SVIRun):
        held = engine.posterior
        base = model if held is None else poutine.block(_fitted(held, done), hide_types=["param"])
        draws, substituted = engine.run_on(base, args, kwargs)
        return EngineRun(name, draws, substituted, 0.0)
    if isinstance(engine, SVI):
        raise BadInput(
            f"engine '{name}' is Pyro's SVI; expected pyro_evidence.compare.SVIRun(guide, optim), "
            "its guide a function of a model."
        )
    if isinstance(engine, type) or not callable(getattr(engine, "run", None)):
        what = f"the class {engine.__name__}" if isinstance(engine, type) else f"a {type(engine).__name__}"
        raise BadInput(
            f"engine '{name}' is {what}; expected an object with run(*args, **kwargs), such as "
            "LaplaceEvidence(model), NUTSRun() or SVIRun(AutoNormal, Adam({'lr': 0.01})). For a posterior that is "
            "there already, give its engine."
        )
    return _of_fit(name, engine, engine.run(*args, **kwargs), model)


def _nuts(name: str, engine: NUTSRun, model: Model, data: Data, done: Mapping[str, EngineRun]) -> EngineRun:
    """NUTS on a fit's model, or on the user's, whose params are put in because other processes have no store."""
    if engine.posterior is not None and engine.hyperpriors:
        raise BadInput(
            f"posterior={engine.posterior!r} holds that fit's hyperparameters and "
            f"hyperpriors={sorted(engine.hyperpriors)} integrates them; expected one of the two. Give two "
            "engines for both questions."
        )
    held = engine.posterior
    if held is None:
        joint, lifted = LogJoint(model, *data, maximise=()), set(engine.hyperpriors or {})
        if unknown := sorted(lifted - set(joint.held)):
            raise BadInput(f"hyperpriors name {unknown}; expected params of the model, which are {sorted(joint.held)}.")
        others = {n: v for n, v in joint.held.items() if n not in lifted}
        base = poutine.substitute(model, data=others) if others else model
        base = base if lifted or not joint.held else joint.substituted(joint.initial_theta)
    else:
        base = _fitted(held, done)
    fit = done[held].fit if engine.metric and held is not None and held in done else None
    if engine.metric and not isinstance(fit, LaplacePosterior):
        raise BadInput(
            f"metric='laplace' takes the precision of {held!r}, which is a {type(fit).__name__}; expected the "
            "name of a LaplaceEvidence among the engines. Leave metric out for Pyro's own NUTS."
        )
    chains = engine.run_on(base, *data, fit)
    lacking = set() if held is None else set(done[held].draws) - set(chains.draws)
    draws = dict(chains.draws)
    if lacking:  # pyro.deterministic sites: what a model on other axes calls weights
        joint = LogJoint(chains.model, *data, maximise=())
        lead = next(iter(chains.draws.values())).shape[:2]
        rows = recorded_rows(joint, joint.latents.flat(chains.draws).flatten(0, 1))
        draws |= {n: v.reshape(*lead, *v.shape[1:]) for n, v in rows.items() if n in lacking}
    notes = (chains.note,) if chains.note else ()
    return EngineRun(name, draws, chains.model, 0.0, chains, "", int(chains.diverging.sum()), notes=notes)


def _fitted(name: str, done: Mapping[str, EngineRun]) -> Model:
    """The model of another engine's fit, hyperparameters put in."""
    if name not in done or done[name].failure:
        raise BadInput(f"posterior={name!r} needs that engine's fit; expected one listed before it, of {list(done)}.")
    return done[name].target or done[name].model


def _of_fit(name: str, engine: Any, fit: Any, model: Model) -> EngineRun:
    """A posterior of this package, MCMC, or any object with ``get_samples``."""
    fit = engine if fit is None else fit
    if isinstance(fit, MCMC):
        chains = dict(fit.get_samples(group_by_chain=True))
        if not chains:
            raise BadInput("this MCMC has no draws; expected num_samples of at least 1.")
        diverging = int(divergences(fit).sum())
        return EngineRun(name, chains, fit.kernel.model, 0.0, fit=fit, divergences=diverging)
    if not hasattr(fit, "get_samples"):
        raise BadInput(f"run(...) returned a {type(fit).__name__}; expected an object with get_samples(num_samples).")
    try:
        names = set(inspect.signature(fit.get_samples).parameters)
    except (TypeError, ValueError):
        names = set()
    samples = fit.get_samples(*([NUM_DRAWS] if names else []), **({"seed": 0} if "seed" in names else {}))
    draws = {n: torch.as_tensor(v).detach().unsqueeze(0) for n, v in samples.items()}
    if isinstance(fit, AxesPosterior):  # its own model has axes in place of weights
        joint = fit.of.joint
        return EngineRun(name, draws, joint.substituted(joint.initial_theta), 0.0, fit=fit, target=fit.model)
    return EngineRun(name, draws, getattr(fit, "model", None) or model, 0.0, fit=fit)
