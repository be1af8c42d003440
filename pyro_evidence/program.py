"""One Pyro model as one differentiable log density; the only module that touches handlers and param sites."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pyro
import torch
from pyro import poutine
from pyro.infer.enum import config_enumerate
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_evidence import contraction
from pyro_evidence.checks import (
    check_module_parameters,
    check_parameter,
    check_trace,
    describe,
    is_discrete,
    is_observation,
    sample_nodes,
)
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.ops.coordinates import Coordinates

Model = Callable[..., Any]
Trace = Any


class _Enumerate(EnumMessenger):
    """Pyro's enumeration, which reads ``value.data.shape``; here of a stand-in that ``vmap`` can see through."""

    def _pyro_post_sample(self, msg: Any) -> None:
        value = msg["value"]
        if isinstance(value, Tensor):
            msg["value"] = torch.empty(value.shape, device="meta")
        super()._pyro_post_sample(msg)
        msg["value"] = value


@contextmanager
def quiet() -> Iterator[None]:
    """Validation off, an empty param store inside, everything as it was outside."""
    with pyro.validation_enabled(False), pyro.get_param_store().scope():
        yield


class LogJoint:
    """``log p(D, w | hyperparameters)`` of a Pyro model as a function of flat unconstrained vectors.

    Latent sites are in MCMC's order (sorted by name) and in NUTS's unconstrained space, Jacobian included, so this
    is minus the potential that NUTS would use; discrete sites are summed out.  The global param store is read once,
    for starting values, and never written.

    :param model: a Pyro model.
    :param args: its positional arguments, data included.
    :param kwargs: its keyword arguments.
    :param integrate: names of the latent sites to integrate; default all continuous ones.  Those left out are
        maximised with the hyperparameters.
    :param hyper: names of latent sites to maximise together with all params, their prior counted in
        :meth:`log_hyperprior`; ``()`` holds the params fixed; default: maximise the params.
    :raises BadInput: for data that cannot be used.
    :raises UnsupportedModel: for a model that is not a fixed, finite, differentiable density.
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        integrate: Sequence[str] | None = None,
        hyper: Sequence[str] | None = None,
    ) -> None:
        self.model, self.args, self.kwargs = model, tuple(args), dict(kwargs or {})
        trace, params, self.param_constraints = self._prototype()
        check_trace(trace, self.args, self.kwargs)
        nodes = sample_nodes(trace)
        latent = {n: s for n, s in nodes.items() if not s["is_observed"]}
        self.discrete = tuple(n for n, s in latent.items() if is_discrete(s))
        self.observed = tuple(n for n, s in nodes.items() if is_observation(s))
        continuous = {n: s for n, s in latent.items() if n not in self.discrete}
        self.hyper_sites = _hyper_sites(tuple(continuous), integrate, hyper, tuple(params))
        self._enumerated = self._summing(trace)
        self._choose(params, continuous, hold=hyper is not None and len(hyper) == 0)
        self._check_density()

    def _prototype(self) -> tuple[Trace, dict[str, Tensor], dict[str, Any]]:
        """A validated run, the params it declares (at their stored values if there are any), their constraints."""
        store = pyro.get_param_store()
        stored = {n: store[n].detach().clone() for n in store}
        with torch.random.fork_rng(), store.scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trace = poutine.trace(self.model).get_trace(*self.args, **self.kwargs)
                declared = {n: _declared(trace, n) for n in trace.param_nodes}
                trace.compute_log_prob(lambda _, site: not is_observation(site) or site["value"].numel() > 0)
            except (RuntimeError, ValueError, IndexError) as error:
                raise self._run_failed(error) from error
            limits = store.get_state()["constraints"]
        params = {n: _start(n, v, stored.get(n, v)) for n, v in declared.items()}
        return trace, params, {n: limits.get(n, constraints.real) for n in params}

    def _run_failed(self, error: Exception) -> Exception:
        return BadInput(
            f"the model cannot be run on these arguments ({describe(self.args, self.kwargs)}): "
            f"{' '.join(str(error).split())[:600]}. Shapes must broadcast, all floating tensors must have one dtype "
            f"(build priors with X.new_ones(...), or set torch's default dtype), and data must lie in the support."
        )

    def _summing(self, trace: Trace) -> Model:
        """The model with its discrete sites enumerated beyond its plates."""
        if not self.discrete:
            return self.model
        dims = [f.dim for s in sample_nodes(trace).values() for f in s["cond_indep_stack"] if f.vectorized]
        return cast(Model, _Enumerate(min(dims, default=0) - 1)(config_enumerate(self.model, "parallel")))

    def _choose(self, params: dict[str, Tensor], continuous: Mapping[str, Any], hold: bool) -> None:
        """Which tensors are integrated, maximised, held."""
        if not hold:
            check_module_parameters(tuple(params))
        self.held = params if hold else {}
        free = {} if hold else params
        for name, value in free.items():
            check_parameter(name, value, self.param_constraints[name])
        inner = {n: s for n, s in continuous.items() if n not in self.hyper_sites}
        outer = {n: continuous[n] for n in self.hyper_sites}
        self.latents = Coordinates({n: (biject_to(s["fn"].support), s["value"].shape) for n, s in inner.items()})
        parts = {n: (biject_to(self.param_constraints[n]), v.shape) for n, v in free.items()}
        parts |= {n: (biject_to(s["fn"].support), s["value"].shape) for n, s in outer.items()}
        self.hypers = Coordinates(parts)
        start = free | {n: _central(s["fn"]) for n, s in outer.items()}
        values = [s["value"] for s in continuous.values()] + list(params.values())
        floating = [v for v in values if v.is_floating_point()]
        self.device = floating[0].device
        self.dtype = torch.float32 if {v.dtype for v in floating} == {torch.float32} else torch.float64
        self.initial_theta = self.hypers.flat(start).detach().double().to(self.device)

    def _check_density(self) -> None:
        """Finite somewhere, the same twice.

        :raises BadInput: not finite at any of 100 random starts.
        :raises UnsupportedModel: the log joint is random, or a maximised site's prior depends on an integrated one.
        """
        u = self.initial(1, seed=0)[0]
        values = []
        for seed in (0, 1):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                values.append(float(self.log_joint(u, self.initial_theta)))
        if values[0] != values[1]:
            raise UnsupportedModel(
                f"the log joint density is not a fixed function: {values[0]!r} and then {values[1]!r} at the same point. "
                f"Look for unnamed sampling (torch.randn, dist.Normal(...).sample()), dropout, or a subsampled plate; "
                f"every random number must come from a named pyro.sample site."
            )
        self._check_hyperprior(u)

    def _check_hyperprior(self, u: Tensor) -> None:
        u = u.clone().requires_grad_()
        prior = self.log_hyperprior(self.initial_theta, u)
        gradient = torch.autograd.grad(prior, u, allow_unused=True)[0] if prior.requires_grad else None
        if gradient is not None and bool((gradient != 0).any()):
            raise UnsupportedModel(
                f"the prior of {', '.join(self.hyper_sites)} depends on "
                f"{self.latents.label(int(gradient.abs().argmax()))}, which is integrated: p(D | hyperparameters) is "
                f"then not defined. Maximise that site too, or integrate both."
            )

    def initial(self, num: int, seed: int) -> Tensor:
        """Starting points, uniform on (-2, 2) in unconstrained space as NUTS draws them, shape ``(num, D)``.

        :raises BadInput: when the log joint density is not finite at any of 100 draws for one of them.
        """
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.rand, self.latents.size, generator=generator, dtype=torch.float64)
        return torch.stack([self._finite_start(draw) for _ in range(num)])

    def _finite_start(self, draw: Callable[[], Tensor]) -> Tensor:
        for _ in range(100):
            u = (4.0 * draw() - 2.0).to(self.device)
            if bool(torch.isfinite(self.log_joint(u, self.initial_theta))):
                return u
        raise BadInput(self._not_finite(u))

    def _not_finite(self, u: Tensor) -> str:
        trace = self.trace(u, self.initial_theta)
        trace.compute_log_prob()
        bad = [n for n, s in sample_nodes(trace).items() if not bool(torch.isfinite(s["log_prob_sum"]))]
        held = {n: _extent(trace.nodes[n]["value"]) for n in bad if trace.nodes[n]["value"] is not None}
        return (
            f"the log joint density is not finite at any of 100 random starts; first seen at site(s) {held or bad}. "
            f"Arguments: {describe(self.args, self.kwargs)}. Remove or mask rows with nan or inf, and check that the "
            f"data lie in the support of their distribution."
        )

    def trace(self, u: Tensor, theta: Tensor) -> Trace:
        """The model run at one point, shapes ``(D,)`` and ``(T,)``; discrete sites enumerated."""
        latents = self.latents.constrained(u.to(self.dtype))
        return self._trace(latents, self.hypers.constrained(theta.to(self.dtype)))

    def _trace(self, latents: dict[str, Tensor], hypers: dict[str, Tensor]) -> Trace:
        sites = latents | {n: hypers[n] for n in self.hyper_sites}
        params = self.held | {n: v for n, v in hypers.items() if n not in self.hyper_sites}
        model = poutine.condition(poutine.substitute(self._enumerated, data=params), data=sites)
        with quiet():
            trace = poutine.trace(model).get_trace(*self.args, **self.kwargs)
        for name in self.discrete:
            _exact_logits(trace.nodes[name]["fn"])
        return trace

    def _one(self, u: Tensor, theta: Tensor) -> Tensor:
        values, log_det = self.latents.constrained_with_log_det(u.to(self.dtype))
        trace = self._trace(values, self.hypers.constrained(theta.to(self.dtype)))
        with pyro.validation_enabled(False):
            if not self.discrete:
                return cast(Tensor, trace.log_prob_sum(lambda name, _: name not in self.hyper_sites) + log_det)
            trace.compute_log_prob()
        return contraction.total(trace, self.hyper_sites) + log_det

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)`` in nats, all constants and the Jacobian of ``u`` included, float64.

        :param u: unconstrained latents, ``(D,)`` or ``(R, D)``.
        :param theta: unconstrained hyperparameters, ``(T,)`` or ``(R, T)``.
        :return: ``()`` or ``(R,)``.
        """
        if u.dim() == 1:
            return self._one(u, theta).double()
        theta = theta.expand(len(u), -1)
        if len(u) == 1:
            return self._one(u[0], theta[0]).double().unsqueeze(0)
        return self._rows(u, theta)

    def _rows(self, u: Tensor, theta: Tensor) -> Tensor:
        """All rows at once; one by one where the model's own Python cannot be vectorised."""
        if getattr(self, "_vectorises", True):
            try:
                return cast(Tensor, torch.vmap(self._one, chunk_size=self._chunk)(u, theta)).double()
            except RuntimeError:
                self._vectorises = False
        return torch.stack([self._one(*row) for row in zip(u, theta, strict=True)]).double()

    @property
    def _chunk(self) -> int:
        """Rows per batch: about 32 MB of a tensor as long as the data."""
        longest = max((t.shape[0] for t in self.args if isinstance(t, Tensor) and t.dim()), default=1)
        return max(1, 2**22 // max(longest, self.latents.size, 1))

    def log_hyperprior(self, theta: Tensor, u: Tensor | None = None) -> Tensor:
        """Log prior density of the maximised latent sites in their own (constrained) space, nats, shape ``()``."""
        if not self.hyper_sites:
            return theta.new_zeros(())
        u = self.initial_u if u is None else u
        trace = self.trace(u, theta)
        with pyro.validation_enabled(False):
            return cast(Tensor, trace.log_prob_sum(lambda name, _: name in self.hyper_sites)).double()

    @property
    def initial_u(self) -> Tensor:
        """The origin of the unconstrained latent space, shape ``(D,)``."""
        return torch.zeros(self.latents.size, dtype=torch.float64, device=self.device)

    def pointwise(self, u: Tensor, theta: Tensor) -> dict[str, Tensor]:
        """Log likelihood of every observed site, one number per datum, discrete sites summed out.

        :return: site name -> the site's plate shape; sites that share a discrete site are joined by ``+``.
        """
        return pointwise(self.trace(u, theta), self.observed, self.discrete)

    def table(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(x_n, z_n = k | w)`` of the one local discrete site, shape ``plate_shape + (K,)``.

        :raises UnsupportedModel: when the model has no discrete site, or several.
        """
        if len(self.discrete) != 1:
            raise UnsupportedModel(
                f"a table of components needs exactly one discrete latent site; this model has {len(self.discrete)}"
                f" ({', '.join(self.discrete) or 'none'})."
            )
        trace = self.trace(u, theta)
        with pyro.validation_enabled(False):
            trace.compute_log_prob()
        return contraction.component_table(trace, self.discrete[0], self.observed + self.discrete)

    def responsibilities(self, u: Tensor, theta: Tensor) -> Tensor:
        """``p(z_n = k | x_n, w)`` of the one local discrete site, shape ``plate_shape + (K,)``."""
        return self.table(u, theta).softmax(-1)

    def split_hypers(self, theta: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Constrained hyperparameters: the params (held ones included), and the maximised sites."""
        values = self.hypers.constrained(theta.to(self.dtype))
        sites = {n: values[n] for n in self.hyper_sites}
        return self.held | {n: v for n, v in values.items() if n not in sites}, sites

    def substituted(self, theta: Tensor) -> Model:
        """The user's model with the hyperparameters put in as constants; picklable if the model is."""
        params, sites = self.split_hypers(theta.detach())
        model = poutine.substitute(self.model, data=params) if params else self.model
        return cast(Model, poutine.condition(model, data=sites) if sites else model)


def pointwise(trace: Trace, observed: Sequence[str], discrete: Sequence[str]) -> dict[str, Tensor]:
    """Log likelihood of each observed site of a trace, per datum; see :meth:`LogJoint.pointwise`."""
    with pyro.validation_enabled(False):
        if discrete:
            trace.compute_log_prob()
            return contraction.pointwise(trace, (*observed, *discrete))
        return {name: _elementwise(trace.nodes[name]) for name in observed}


def _elementwise(node: Any) -> Tensor:
    """Log density per datum; ``to_event`` dims of an observed site are data too."""
    fn = node["fn"]
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    log_prob = fn.log_prob(node["value"])
    mask = node["mask"]
    log_prob = log_prob if mask is None else torch.where(torch.as_tensor(mask), log_prob, 0.0)
    return cast(Tensor, log_prob * node["scale"])


def _hyper_sites(
    continuous: tuple[str, ...], integrate: Sequence[str] | None, hyper: Sequence[str] | None, params: tuple[str, ...]
) -> tuple[str, ...]:
    """Names of the latent sites that are maximised."""
    for argument, names in (("integrate", integrate or ()), ("hyper", hyper or ())):
        allowed = continuous + (params if argument == "hyper" else ())
        unknown = [n for n in names if n not in allowed]
        if isinstance(names, str) or unknown:
            raise BadInput(f"{argument}={names!r}: no such site. The model has {', '.join(allowed)}; give a list of names.")
    left_out = [n for n in continuous if integrate is not None and n not in integrate]
    chosen = tuple(n for n in continuous if n in (hyper or ()) or n in left_out)
    if set(integrate or ()) & set(chosen):
        raise BadInput(f"sites {sorted(set(integrate or ()) & set(chosen))} are both in integrate and in hyper.")
    if left_out and hyper is not None and not len(hyper):
        raise BadInput(
            f"hyper=() holds the hyperparameters fixed, but {left_out} are not integrated and have no value to be "
            f"held at. Use poutine.condition(model, data={{...}}), or leave hyper out to maximise them."
        )
    if len(chosen) == len(continuous):
        raise BadInput(f"every latent site ({', '.join(chosen)}) is maximised; leave at least one to integrate.")
    return chosen


def _declared(trace: Trace, name: str) -> Tensor:
    """The value that the model declares for a param: the argument of ``pyro.param`` where there is one."""
    node = trace.nodes[name]
    given = node["args"][0] if node["args"] else node["value"]
    given = given() if callable(given) and not isinstance(given, Tensor) else given
    unusable = bool(torch.isnan(node["value"]).any()) if isinstance(node["value"], Tensor) else False
    return torch.as_tensor(given if unusable else node["value"]).detach().clone()


def _start(name: str, declared: Tensor, stored: Tensor) -> Tensor:
    if declared.shape != stored.shape:
        raise BadInput(
            f"hyperparameter '{name}' has shape {tuple(declared.shape)} in this model, but the param store holds one of "
            f"shape {tuple(stored.shape)} from another model. Call pyro.clear_param_store(), or rename one of them."
        )
    return stored.to(declared.dtype)


def _central(fn: Any) -> Tensor:
    """A finite interior value of a distribution: its transform's image of zero."""
    transform = biject_to(fn.support)
    shape = torch.Size(transform.inverse_shape(fn.batch_shape + fn.event_shape))
    return cast(Tensor, transform(torch.zeros(shape)))


def _exact_logits(fn: Any) -> None:
    """Logarithms of a Categorical's own ``probs``, where torch's would be of clamped ones."""
    if isinstance(fn, torch.distributions.Categorical) and "probs" in fn.__dict__ and "logits" not in fn.__dict__:
        empty = fn.probs == 0
        fn.__dict__["logits"] = torch.where(empty, -torch.inf, torch.where(empty, 1.0, fn.probs).log())


def _extent(value: Tensor) -> str:
    return f"shape {tuple(value.shape)}, {int((~torch.isfinite(value)).sum())} not finite"
