"""One engine's run on a model: draws of the model's sites, and the model they belong to."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.mcmc.util import diagnostics as chain_diagnostics
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.program import Model

Draws = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """What one engine found, or why it found nothing.

    :ivar draws: constrained values by site, ``(C, T) + site shape``; empty when the engine failed.
    :ivar model: a model whose latent sites are those of ``draws``; hyperparameters put in.
    :ivar seconds: wall-clock time of the fit.
    :ivar fit: what the engine returned.
    :ivar failure: why there are no draws, or an empty string.
    :ivar divergences: number of divergent transitions, for NUTS.
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

    @property
    def num_draws(self) -> int:
        """Draws in all chains together."""
        return next((v.shape[0] * v.shape[1] for v in self.draws.values()), 0)

    def chain_numbers(self) -> tuple[float, float]:
        """Smallest effective sample size and largest R-hat over all elements; nan for too few draws."""
        if self.num_draws < 8 or next(iter(self.draws.values())).shape[1] < 4:
            return math.nan, math.nan
        found = chain_diagnostics({n: v.double() for n, v in self.draws.items()})
        n_eff = min(float(d["n_eff"].min()) for d in found.values())
        return n_eff, max(float(d["r_hat"].max()) for d in found.values())


@dataclass(frozen=True)
class Nuts:
    """NUTS as an engine of :func:`compare`.

    :ivar of: name of the engine whose fitted hyperparameters are held; None runs on the user's model.
    :ivar hyperpriors: param name -> prior; these params are lifted to latent sites and integrated as well.
    :ivar num_samples: per chain, after as many as ``warmup_steps``.
    :ivar seed: of the chains.
    """

    of: str | None = None
    hyperpriors: Mapping[str, Any] | None = None
    num_samples: int = 500
    warmup_steps: int = 500
    num_chains: int = 1
    seed: int = 0

    def run_on(self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MCMC:
        """The finished chains."""
        kernel = NUTS(self.prepared(model))
        mcmc = MCMC(kernel, self.num_samples, self.warmup_steps, num_chains=self.num_chains, disable_progbar=True)
        pyro.set_rng_seed(self.seed)
        mcmc.run(*args, **kwargs)
        return mcmc

    def prepared(self, model: Model) -> Model:
        """The model with its params lifted."""
        return poutine.lift(model, prior=dict(self.hyperpriors)) if self.hyperpriors else model


@dataclass(frozen=True)
class Svi:
    """SVI with a guide as an engine of :func:`compare`; params of the model are optimised with the guide's.

    :ivar guide: model -> guide, for example ``AutoNormal``.
    :ivar optim: a Pyro optimiser.
    """

    guide: Callable[[Model], Any]
    optim: Any
    num_steps: int = 1000
    num_samples: int = 1000
    seed: int = 0

    def run_on(self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Draws, Model]:
        """Draws from the guide, one chain, and the model at the optimised params."""
        pyro.set_rng_seed(self.seed)
        guide = self.guide(model)
        svi = SVI(model, guide, self.optim, Trace_ELBO())
        for _ in range(self.num_steps):
            svi.step(*args, **kwargs)
        trace = poutine.trace(model).get_trace(*args, **kwargs)
        params = {n: torch.as_tensor(trace.nodes[n]["value"]).detach().clone() for n in trace.param_nodes}
        names = [n for n in trace.stochastic_nodes if not trace.nodes[n]["is_observed"]]
        drawn = Predictive(model, guide=guide, num_samples=self.num_samples)(*args, **kwargs)
        shapes = {n: torch.as_tensor(trace.nodes[n]["value"]).shape for n in names if n in drawn}
        draws = {n: drawn[n].detach().reshape(1, self.num_samples, *s) for n, s in shapes.items()}
        return draws, poutine.substitute(model, data=params) if params else model


def run(name: str, engine: Any, model: Model, data: tuple[Any, ...], done: Mapping[str, Run]) -> Run:
    """One engine on the data; a failure is a row as well.

    The global param store and the caller's random state are as before, whatever the engine does.
    """
    start = time.perf_counter()
    with pyro.get_param_store().scope(), torch.random.fork_rng():
        try:
            found = _run(name, engine, model, data, done)
        except (
            ArithmeticError,
            ValueError,
            RuntimeError,
            TypeError,
            MemoryError,
            NotImplementedError,
        ) as error:
            found = Run(name, {}, model, 0.0, failure=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    return replace(found, seconds=time.perf_counter() - start)


def _run(name: str, engine: Any, model: Model, data: tuple[Any, ...], done: Mapping[str, Run]) -> Run:
    args, kwargs = data
    if isinstance(engine, Nuts):
        base = _base(engine, model, done)
        mcmc = engine.run_on(base, args, kwargs)
        return replace(of_mcmc(name, mcmc), model=engine.prepared(base))
    if isinstance(engine, Svi):
        draws, substituted = engine.run_on(model, args, kwargs)
        return Run(name, draws, substituted, 0.0)
    return _of_fit(name, engine, engine.run(*args, **kwargs))


def _base(engine: Nuts, model: Model, done: Mapping[str, Run]) -> Model:
    if engine.of is None:
        return model
    if engine.of not in done or done[engine.of].failure:
        raise BadInput(
            f"Nuts(of={engine.of!r}) needs that engine's fit, listed before it; finished so far: {list(done)}."
        )
    return done[engine.of].model


def of_mcmc(name: str, mcmc: MCMC) -> Run:
    """Chains that have been run."""
    draws = mcmc.get_samples(group_by_chain=True)
    divergences = sum(len(d) for d in mcmc.diagnostics().get("divergences", {}).values())
    return Run(name, dict(draws), mcmc.kernel.model, 0.0, fit=mcmc, divergences=divergences)


def _of_fit(name: str, engine: Any, fit: Any) -> Run:
    """A posterior of this package, MCMC, or any object with ``get_samples`` and ``model``."""
    fit = engine if fit is None else fit
    if isinstance(fit, MCMC):
        return of_mcmc(name, fit)
    if not hasattr(fit, "get_samples") or not hasattr(fit, "model"):
        raise BadInput(f"run(...) returned a {type(fit).__name__}; expected an object with get_samples and model.")
    size = {"seed": 0} if isinstance(fit, LaplacePosterior) else {}
    draws = fit.get_samples(1000, **size)
    return Run(name, {n: v.detach().unsqueeze(0) for n, v in draws.items()}, fit.model, 0.0, fit=fit)
