"""One Pyro model as one differentiable log density of rows of latent coordinates."""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import LowRankMultivariateNormal, MultivariateNormal, MultivariateStudentT, Unit
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import (
    empty_store,
    global_lock,
    own_random_numbers,
    own_warnings,
    without_validation,
    without_validation_or_params,
)
from pyro_evidence.numerics import batched
from pyro_evidence.numerics.coordinates import Coordinates, unconstrained_shape
from pyro_evidence.numerics.derivatives import takes_part
from pyro_evidence.program import checks, enumeration, parameters
from pyro_evidence.program.exact import Given, exact
from pyro_evidence.program.parameters import Constants, Declaration, FirstRun, WithParameters, in_place
from pyro_evidence.program.sites import (
    Node,
    Trace,
    bijection,
    innermost,
    is_discrete,
    is_empty,
    is_observation,
    is_plate,
    log_prob_sum,
    sample_nodes,
)
from pyro_evidence.settings import seeded

Model = Callable[..., Any]

PLACES = 20  # at which a model is run before it is said that it cannot be; NUTS tries a hundred
LAST_DIGITS = 16  # units of rounding between two runs, whose tensors stand elsewhere in memory; one or two were seen


class _Enumerate(EnumMessenger):
    """Pyro's enumeration, of every discrete latent site whatever its settings, with exact probabilities."""

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and getattr(msg["fn"], "has_enumerate_support", False):
            msg["fn"] = exact(msg["fn"])
            msg["infer"] |= {"enumerate": "parallel", "num_samples": None}
        super()._pyro_sample(msg)

    def _pyro_post_sample(self, msg: Any) -> None:
        value = msg["value"]
        if isinstance(value, Tensor):  # of whose ``data`` Pyro reads the shape, because ``vmap`` allows no ``data``
            msg["value"] = SimpleNamespace(dim=value.dim, shape=value.shape, data=SimpleNamespace(shape=value.shape))
        super()._pyro_post_sample(msg)
        msg["value"] = value


class LogJoint:
    """``log p(D, w | hyperparameters)`` of a Pyro model as a function of flat unconstrained vectors.

    Latent sites are in MCMC's order (sorted by name) and in NUTS's unconstrained space, Jacobian included, so
    this is minus the potential that NUTS would use; discrete sites are summed out, for which see
    :mod:`pyro_evidence.program.enumeration`.  The global param store is read once, for starting values, and never
    written.  A network's own ``nn.Parameter`` counts as a param, held where its ``requires_grad`` is False.

    :param model: a Pyro model.
    :param args: its positional arguments, data included.
    :param kwargs: its keyword arguments.
    :param integrate: names of the latent sites to integrate; default all continuous ones.  Those left out are
        maximised with the hyperparameters.
    :param maximise: names of latent sites to maximise together with all params, their prior counted in
        :meth:`log_hyperprior`; ``()`` holds the params fixed; default: maximise the params.
    :param values: of latent sites and params, constrained, at which a search begins; others begin at random, params
        where the model says.
    :param shapes: of sites and plates by name: a run with others is refused before anything is drawn for them.
    :raises BadInput: for data that cannot be used.
    :raises UnsupportedModel: for a model that is not a fixed, finite, differentiable density.

    >>> import torch
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> from pyro_evidence.program import LogJoint
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> joint = LogJoint(regression(Linear()), (X, t))
    >>> u = torch.zeros(3, joint.latents.size)  # three points of weight space
    >>> tuple(joint.log_joint(u, joint.initial_theta).shape)
    (3,)
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        integrate: Sequence[str] | None = None,
        maximise: Sequence[str] | None = None,
        values: Mapping[str, Tensor] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.model: Model = model
        self.values: Mapping[str, Tensor] = {**getattr(model, "begins", {}), **(values or {})}
        self.columns: dict[str, tuple[str, ...]]  # names, of arguments that are tables
        self.columns = checks.column_names(args, kwargs or {})
        self.args: tuple[Any, ...]
        self.kwargs: dict[str, Any]
        self.args, self.kwargs = checks.as_tensors(args, kwargs or {})
        self.seen: int | None = None  # of how many rows one was run on to know the model; None for all
        self.has_data = True  # whether the arguments are all data; not where these came in chunks
        checks.check_sizes(self.args, self.kwargs)
        parameters.check_kind("maximise", maximise)
        trace, declared = self._prototype(maximise is None or len(maximise) > 0, shapes)
        nodes = sample_nodes(trace)
        self.plates: dict[str, int] = {  # of all plates the number of cells
            n: s["fn"].size for n, s in trace.nodes.items() if s["type"] == "sample" and is_plate(s)
        }
        with global_lock(), own_random_numbers():
            self.left_out: dict[str, Tensor] = parameters.imputed(partial(self.model, *self.args, **self.kwargs), nodes)
        latent = {n: s for n, s in nodes.items() if not (s["is_observed"] or n in self.left_out)}
        continuous = {n: s for n, s in latent.items() if not is_discrete(s)}
        self.discrete: tuple[str, ...] = tuple(n for n in latent if n not in continuous)
        self.observed: tuple[str, ...] = tuple(n for n, s in nodes.items() if is_observation(s))
        self.factors: tuple[str, ...] = tuple(n for n in self.observed if isinstance(nodes[n]["fn"], Unit))
        self.unvalidated: tuple[str, ...] = tuple(n for n in self.observed if checks.unvalidated(nodes[n]["fn"]))
        self.maximised_sites: tuple[str, ...] = parameters.maximised_sites(
            tuple(continuous), tuple(declared), integrate, maximise
        )
        self._inexact = tuple(n for n, s in nodes.items() if n not in self.discrete and exact(s["fn"]) is not s["fn"])
        self._known = frozenset({*self.discrete, *self.observed, *self.left_out, *trace.param_nodes})
        self._enumerated = self.model  # with its discrete sites enumerated beyond its plates
        if self.discrete:
            dims = [f.dim for s in nodes.values() for f in s["cond_indep_stack"] if f.vectorized]
            self._enumerated = _Enumerate(min(dims, default=0) - 1)(self.model)
        free = self._hold(declared, everything=maximise is not None and len(maximise) == 0)
        self._choose(free, continuous)
        covariances = (MultivariateNormal, LowRankMultivariateNormal, MultivariateStudentT)
        self._check_density(continuous, any(isinstance(innermost(s["fn"]), covariances) for s in nodes.values()))

    def _prototype(self, maximise: bool, shapes: Any) -> tuple[Trace, dict[str, Declaration]]:
        """A validated run, and the params that it declares; a model of params alone gets a latent beside them."""
        with global_lock(), own_random_numbers(), own_warnings("ignore"):
            store = pyro.get_param_store()
            found = dict(store.items()), store.get_state()["constraints"]
            trace, statements = self._first_run(partial(FirstRun, *found, self.values, shapes))
            free = [d.value for d in statements.found.values() if not d.frozen]
            sites = sample_nodes(trace).values()
            may_lack = bool(maximise and free) or getattr(self.model, parameters.MAY_LACK, False)
            if may_lack and sites and all(s["is_observed"] or is_discrete(s) for s in sites):
                like = free[0] if free else next(iter(sites))["fn"].log_prob(next(iter(sites))["value"])
                self.model = parameters.with_dummy_site(self.model, like.new_zeros(()))
                trace, statements = self._first_run(partial(FirstRun, *found, self.values))
        checks.require_one_structure(trace)
        latents = [n for n in trace.stochastic_nodes if not is_plate(trace.nodes[n])]
        checks.check_begun(self.values, statements.begun, (*latents, *trace.param_nodes))
        checks.check_trace(trace, self.args, self.kwargs)
        params: dict[str, Declaration] = {}  # each parameter once, under the first of its names
        for name, declared in statements.found.items():
            if declared.source is None or all(d.source is not declared.source for d in params.values()):
                params[name] = declared
        return trace, {n: parameters.from_store(n, d, statements.stored.get(n)) for n, d in params.items()}

    def _first_run(self, statements: Callable[..., FirstRun]) -> tuple[Trace, FirstRun]:
        """A validated run at a random place; at others, near and far, where the model has no density there.

        Such as a simulation whose rates turn negative.  Not where the next place changes nothing of what is said.
        """
        said, places_left = "", PLACES
        while True:
            first, places_left = statements(width=_width(PLACES - places_left)), places_left - 1
            try:
                with empty_store():
                    return self._validated_run(first), first
            except BadInput as error:
                before, said, cause = said, str(error), error.__cause__
                # a parameter or a matrix that the values of the latents do not allow may be allowed elsewhere
                of_place = isinstance(cause, LinAlgError) or "to satisfy the constraint" in str(cause)
                if not places_left or said == before or not of_place:
                    raise

    def _validated_run(self, statements: FirstRun) -> Trace:
        try:
            with statements, Given({}, {}), checks.Levels(self.args, self.kwargs) as seen:
                trace = poutine.trace(self.model).get_trace(*self.args, **self.kwargs)
            trace.compute_log_prob(lambda _, s: not (is_observation(s) and is_empty(s)))
            self._adds = seen.adds
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError, TypeError, AttributeError) as error:
            if isinstance(error, TypeError | AttributeError) and not checks.arrays(self.args, self.kwargs):
                raise  # the model's own
            for name, declaration in statements.found.items():
                parameters.started(name, declaration)
            raise checks.run_failed(error, self.args, self.kwargs) from error
        finally:
            for declaration in statements.found.values():
                if declaration.source is not None and declaration.frozen:  # which the param store has undone
                    declaration.source.requires_grad_(False)
        return trace

    def _hold(self, declared: Mapping[str, Declaration], everything: bool) -> dict[str, Declaration]:
        """Set apart the params that are held; the others, which are maximised."""
        free = {n: d for n, d in declared.items() if not (everything or d.frozen)}
        checks.check_module_parameters(tuple(free))
        free = {name: parameters.started(name, declaration) for name, declaration in free.items()}
        own = {n: d.source for n, d in declared.items() if d.source is not None and "$$$" not in n}
        networks = parameters.modules(self.model, *self.args, *self.kwargs.values()) if own else []
        self.homes: dict[str, tuple[tuple[torch.nn.Module, str], ...]] = {
            n: parameters.homes(p, networks) for n, p in own.items()
        }
        self.held: dict[str, Tensor] = {n: d.value for n, d in declared.items() if n not in free and "$$$" not in n}
        self.param_constraints: dict[str, Any] = {n: d.constraint for n, d in declared.items()}
        return free

    def _choose(self, free: Mapping[str, Declaration], continuous: Mapping[str, Node]) -> None:
        """The coordinates of what is integrated and of what is maximised."""
        sites = {n: (bijection(n, s["fn"]), s["value"].shape) for n, s in continuous.items()}
        outer = {n: sites.pop(n) for n in self.maximised_sites}
        self.latents: Coordinates = Coordinates(sites)
        self._counted = (*self.latents.names, *self.discrete, *self.observed)
        self._scored = frozenset(self._counted)
        params = {n: (parameters.transform_of(d.constraint), d.value.shape) for n, d in free.items()}
        self.hypers: Coordinates = Coordinates(params | outer)
        like = next(iter(continuous.values()))["value"]
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device
        origin = {n: t(like.new_zeros(unconstrained_shape(t, shape))) for n, (t, shape) in outer.items()}
        origin |= {n: continuous[n]["value"].detach() for n in outer if n in self.values}
        flat = self.hypers.flat({n: d.value.to(self.device) for n, d in free.items()} | origin)
        self.initial_theta: Tensor = flat.detach().to(self.device, torch.float64)

    def _check_density(self, continuous: Mapping[str, Node], has_covariances: bool) -> None:
        """Finite somewhere, the same twice, of fixed structure, dependent on every param.

        :param has_covariances: whether matrices may have no factor at some places.
        :raises BadInput: not finite at any of 100 random starts.
        :raises UnsupportedModel: otherwise.
        """
        self._row_bytes: tuple[int | None, int] | None = None
        self._writes = self._adds  # into tensors that it makes, or calls what torch has wrong
        self._promotes = False  # single to double precision
        self._begins_at_origin = True
        try:
            with own_random_numbers():
                places, first = self._drawn(1, seed=0)
                self._first = places
                if has_covariances:
                    self._begins_at_origin = bool(self.log_joint(self.initial_u, self.initial_theta).isfinite())
                second = float(self.log_joint(places[0], self.initial_theta).detach())
                rounding = LAST_DIGITS * torch.finfo(self.dtype).eps * (1.0 + abs(second))
                if not abs(float(first) - second) <= rounding:
                    raise UnsupportedModel(
                        f"the log joint density is not a fixed function: {float(first)!r} and then {second!r} at the "
                        f"same point. Look for unnamed sampling (torch.randn, dist.Normal(...).sample()), dropout, or "
                        f"a subsampled plate; every random number must come from a named pyro.sample site."
                    )
                self._check_dependence(places[0], continuous)
        except (RuntimeError, IndexError) as error:
            raise checks.run_failed(error, self.args, self.kwargs) from error

    def _check_dependence(self, u: Tensor, continuous: Mapping[str, Node]) -> None:
        """Supports depend on nothing, the density on every param, and no hyperprior on what is integrated.

        :param u: a point where the density is finite.
        :param continuous: the continuous latent nodes of a plain run.
        :raises UnsupportedModel: otherwise.
        """
        theta = (self.initial_theta + 0.01).to(self.dtype)
        hypers = {n: v.detach().requires_grad_() for n, v in self.hypers.constrained(theta).items()}
        latents = {n: v.detach().requires_grad_() for n, v in self.latents.constrained(u.to(self.dtype)).items()}
        trace = self.trace_at(latents, hypers)
        gone = [n for n in self.observed if n not in trace.nodes]
        if gone:
            raise UnsupportedModel(
                f"observed site(s) {', '.join(gone)} were there in the model's first run and then no more. Expected "
                f"the same data in every run: pass tensors or lists, not a generator, which can be read only once."
            )
        checks.check_supports(continuous, trace.nodes)
        self.constant: checks.Constant | None = None  # the one number that all data are, where noise has a scale
        seen, given = ([trace.nodes[n][part] for n in self.observed] for part in ("fn", "value"))
        data, noises = torch.cat([torch.as_tensor(x).reshape(-1) for x in given]), [innermost(fn) for fn in seen]
        scaled = all(hasattr(fn, "loc") and hasattr(fn, "scale") for fn in noises)
        if scaled and len(data) > 1 and bool((data == data[0]).all()):
            self.constant = (self.observed[0], float(data[0]), len(data))
        scales = [fn.scale for fn in noises] if self.constant else []
        self.finds_noise = any(any(takes_part(scale, [*hypers.values()])) for scale in scales)
        self.has_latent_noise = any(any(takes_part(scale, [*latents.values()])) for scale in scales)
        params = [n for n in hypers if n not in self.maximised_sites]
        density = self.total(trace) if params else theta
        felt = takes_part(density, [hypers[n] for n in params])
        idle = [n for n, is_felt in zip(params, felt, strict=True) if not is_felt]
        if idle:
            raise UnsupportedModel(
                f"the log joint density does not depend on hyperparameter(s) {', '.join(idle)}, so nothing can "
                f"be maximised over them. Expected tensors that the model computes with: look for float(...), "
                f".item(), .detach() or torch.tensor(...) on them; declare a network's own nn.Parameter as "
                f"PyroParam; or drop them, or pass maximise=() to hold them fixed."
            )
        self._check_reads(trace, latents, hypers, u)
        if self.maximised_sites:
            self._check_hyperprior(u, continuous)

    def _check_reads(self, trace: Trace, latents: dict[str, Tensor], hypers: dict[str, Tensor], u: Tensor) -> None:
        """No observed site sees the value of a latent without its slope.

        :param trace: of a run at ``latents``, the values of ``u``.
        """

        def is_observed(name: str, _: Node) -> bool:
            return name in self.observed

        with without_validation():
            # some number in which the parameters of the observed sites take part, as far as they are plain tensors
            own = [x for n in self.observed for x in vars(innermost(trace.nodes[n]["fn"])).values()]
            parts = [x.sum() for x in own if isinstance(x, Tensor) and x.requires_grad]
            if parts and all(takes_part(torch.stack(parts).sum(), [*latents.values()])):
                return
            trace.compute_log_prob(is_observed)
            seen = torch.stack([trace.nodes[n]["log_prob"].sum() for n in self.observed]).sum()
            is_seen = takes_part(seen, [*latents.values()])
            elsewhere = self.latents.constrained((0.5 * u + 0.3).to(self.dtype))
            for name in (n for n, here in zip(latents, is_seen, strict=True) if not here):
                after = self.trace_at({n: v.detach() for n, v in latents.items()} | {name: elsewhere[name]}, hypers)
                after.compute_log_prob(is_observed)
                checks.check_reads(trace.nodes, after.nodes, self.observed, name)

    def _check_hyperprior(self, u: Tensor, continuous: Mapping[str, Node]) -> None:
        u = u.clone().requires_grad_()
        trace = self.trace(u, self.initial_theta)
        other: str | None = None  # what the prior depends on
        if any(trace.nodes[n]["fn"].batch_shape != continuous[n]["fn"].batch_shape for n in self.maximised_sites):
            other = ", ".join(self.discrete)
        else:
            prior = self.log_hyperprior(self.initial_theta, trace)
            slope = torch.autograd.grad(prior, u, allow_unused=True)[0] if prior.requires_grad else None
            if slope is not None and bool((slope != 0).any()):
                other = self.latents.label(int(slope.abs().argmax()))
        if other is not None:
            raise UnsupportedModel(
                f"the prior of {', '.join(self.maximised_sites)} depends on {other}, which is integrated: "
                f"p(D | hyperparameters) is then not defined. Maximise that site too, or integrate both."
            )

    def on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], times: int) -> "LogJoint":
        """This model on all the data of which the present ones are every ``times``-th row."""
        found = copy.copy(self)
        found.args, found.kwargs, found.seen, found.plates = tuple(args), dict(kwargs), times, {}
        found._row_bytes = None if self._row_bytes is None else (self._row_bytes[0], self._row_bytes[1] * times)
        return found

    def inside(self, handler: Callable[[Model], Model]) -> "LogJoint":
        """This density with another model in place of its own, such as this in a handler of Pyro's."""
        found = copy.copy(self)
        found._enumerated = handler(self._enumerated)
        return found

    @property
    def in_double(self) -> "LogJoint":
        """This density with the same numbers in double precision; itself where the model cannot be computed so."""
        if self.dtype is torch.float64:
            return self
        found, u = copy.copy(self), self._first[0]
        found.dtype, found._promotes, found._row_bytes = torch.float64, True, None
        with torch.no_grad(), own_random_numbers():
            value = self._one(u, self.initial_theta)
            try:
                exact = found._one(u, self.initial_theta)
            except Exception:  # it works in single precision, so whatever this is, it is double that it does not bear
                return self
        return found if bool(self.are_level(exact, value)) else self

    def initial(self, num: int, seed: int) -> Tensor:
        """Starting points, uniform on (-2, 2) in unconstrained space as NUTS draws them, shape ``(num, D)``.

        Where density or gradient are not finite at a draw, every other one is ever nearer to the origin.  Sites for
        which values were given begin at these in all of them.

        :raises BadInput: when density or gradient are not finite at any of 100 draws for one of them.
        """
        return self._first.clone() if (num, seed) == (1, 0) else self._drawn(num, seed)[0]

    def _drawn(self, num: int, seed: int) -> tuple[Tensor, Tensor]:
        """Starting points and their log joint ``(num,)``."""
        generator = seeded(seed)
        u = torch.zeros(num, self.latents.size, dtype=torch.float64, device=self.device)
        bad = torch.ones(num, dtype=torch.bool, device=self.device)
        for tried in range(100):
            draw = torch.rand(num, self.latents.size, generator=generator, dtype=torch.float64)
            u = self._at_values(torch.where(bad.unsqueeze(-1), _width(tried) * (2.0 * draw.to(self.device) - 1.0), u))
            point = u.clone().requires_grad_()
            value = self.log_joint(point, self.initial_theta)
            slope = torch.autograd.grad(value.sum(), point)[0]
            bad = bad & ~(torch.isfinite(value.detach()) & torch.isfinite(slope).all(-1))
            if not bool(bad.any()):
                return u, value.detach()
        arguments = checks.describe(self.args, self.kwargs)
        try:
            trace = self.trace(u[bad][0], self.initial_theta)
            trace.compute_log_prob()
        except LinAlgError as error:
            raise checks.not_finite({}, f"{arguments}; {error}") from None
        raise checks.not_finite(sample_nodes(trace), arguments)

    @property
    def row_bytes(self) -> int | None:
        """Bytes that autograd keeps for each row of a batch; None where rows are evaluated one by one."""
        if self._row_bytes is None:
            ways = self._adds, True
            with own_random_numbers(), torch.enable_grad(), own_warnings("error", batched.ROW_BY_ROW):
                for self._writes in ways:
                    kept = batched.bytes_per_row(self._one, self._first[0], self.initial_theta)
                    if kept is not None:
                        break
            self._row_bytes = kept, 1
        found, times = self._row_bytes
        return None if found is None else found * times

    @property
    def rounding(self) -> float:
        """Relative rounding error of a sum over data: 1e-10 in float64."""
        return float(torch.finfo(self.dtype).eps ** 0.64)

    def are_level(self, values: Tensor, other: Tensor) -> Tensor:
        """Which log densities are those of ``other``, up to rounding of the sums over data, bool."""
        return (values - other).abs() <= self.rounding * (1.0 + other.abs())

    @property
    def initial_u(self) -> Tensor:
        """The origin of the unconstrained latent space, shape ``(D,)``, but for sites with a value of their own.

        The first random start, where a covariance of the model's has no factor at the origin.
        """
        if not self._begins_at_origin:
            return self._first[0].clone()
        return self._at_values(torch.zeros(self.latents.size, dtype=torch.float64, device=self.device))

    def _at_values(self, u: Tensor) -> Tensor:
        """Places ``(..., D)`` with the sites for which values were given there."""
        for part in self.latents:
            if part.name in self.values:
                value = torch.as_tensor(self.values[part.name]).to(self.device, self.dtype)
                value = value.reshape(part.shape) if value.dim() else value.expand(part.shape)
                u[..., self.latents.slices[part.name]] = part.transform.inv(value).reshape(-1).to(u)
        return u

    def trace(self, u: Tensor, theta: Tensor) -> Trace:
        """The model run at one point, shapes ``(D,)`` and ``(T,)``; discrete sites enumerated."""
        latents = self.latents.constrained(u.to(self.dtype))
        return self.trace_at(latents, self.hypers.constrained(theta.to(self.dtype)))

    def trace_at(self, latents: dict[str, Tensor], hypers: dict[str, Tensor]) -> Trace:
        """The model run at constrained values; discrete sites enumerated."""
        sites = self.left_out | latents | {n: hypers[n] for n in self.maximised_sites}
        params = self.held | {n: v for n, v in hypers.items() if n not in self.maximised_sites}
        own = batched.WithOwnConstants(sites | params) if self._writes else nullcontext()
        with without_validation_or_params(), in_place(params, self.homes), Given(sites, params), own:
            try:
                trace = poutine.trace(self._enumerated).get_trace(*self.args, **self.kwargs)
            except OverflowError as error:  # of plain numbers alone: tensors have inf
                raise checks.out_of_range(error) from error
        checks.check_structure(trace, sites, self._known)
        for name in self._inexact:
            trace.nodes[name]["fn"] = exact(trace.nodes[name]["fn"])
        return trace

    def density(self, latents: dict[str, Tensor], hypers: dict[str, Tensor]) -> Tensor:
        """Log density of all sites but the maximised ones at constrained values, nats, shape ``()``."""
        return self.total(self.trace_at(latents, hypers))

    def total(self, trace: Trace, names: Sequence[str] = ()) -> Tensor:
        """The log density of all that counts, or of the named sites, as a trace shows it; discrete ones summed out."""
        if not self.discrete:
            return log_prob_sum(trace, names or self._scored)
        with without_validation():
            return enumeration.log_prob_total(trace, names or self._counted)

    def _one(self, u: Tensor, theta: Tensor) -> Tensor:
        with batched.InDouble() if self._promotes else nullcontext():
            values, log_det = self.latents.constrained_with_log_det(u.to(self.dtype))
            return (self.density(values, self.hypers.constrained(theta.to(self.dtype))) + log_det).double()

    def _point(self, u: Tensor, theta: Tensor) -> Tensor:
        """One row; nan where a matrix of the model is singular, as NUTS has it, and where an assertion of it fails."""
        try:
            return self._one(u, theta)
        except (LinAlgError, AssertionError):
            return (u.sum() + theta.sum()) * torch.nan

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)``, nats, float64; all constants and the Jacobian of ``u`` included.

        :param u: unconstrained latents, ``(D,)`` or ``(R, D)``.
        :param theta: unconstrained hyperparameters, ``(T,)`` or ``(R, T)``.
        :return: ``()`` or ``(R,)``.
        """
        if u.dim() == 1:
            return self._point(u, theta)
        if len(u) == 1:
            return self._point(u[0], theta if theta.dim() == 1 else theta[0]).unsqueeze(0)
        if theta.dim() == 1:
            return batched.apply(self._one, (u,), self.row_bytes, self._point, shared=(theta,))
        return batched.apply(self._one, (u, theta.expand(len(u), -1)), self.row_bytes, self._point)

    def log_hyperprior(self, theta: Tensor, trace: Trace | None = None) -> Tensor:
        """Log prior density of the maximised latent sites in their constrained space, nats, shape ``()``.

        :param trace: a run at ``theta``, where there is one.
        """
        if not self.maximised_sites:
            return theta.new_zeros(())
        trace = self.trace(self.initial_u, theta) if trace is None else trace
        return log_prob_sum(trace, self.maximised_sites).double()

    def pointwise(self, u: Tensor, theta: Tensor) -> dict[str, Tensor]:
        """Log likelihood of every observed site, one number per datum, discrete sites summed out.

        :return: site name -> one number per cell of its plates, or per data point of a ``to_event`` without
            plates; sites that share a discrete site have one entry, their names joined by ``+``.
        :raises UnsupportedModel: when a discrete site outside the plates couples the data points.
        """
        trace = self.trace(u, theta)
        with without_validation():
            return enumeration.pointwise(trace, self.observed + self.discrete)

    @property
    def num_states(self) -> int:
        """Number of states of the one discrete site, 1 where there is none or where there are several."""
        if len(self.discrete) != 1:
            return 1
        try:
            return int(self.table(self.initial_u, self.initial_theta).shape[-1])
        except (UnsupportedModel, RuntimeError, ValueError):
            return 1

    def data_hash(self, theta: Tensor) -> str:
        """SHA-256 of the values of all observed sites, whatever their names, order and floating type.

        And of how often each counts, by ``poutine.scale`` or ``poutine.mask``, where that is not once.
        """
        nodes, parts = self.trace(self.initial_u, theta).nodes, []
        for name in self.observed:
            node = nodes[name]
            times = torch.as_tensor(node["scale"]) * torch.as_tensor(True if node["mask"] is None else node["mask"])
            known = [node["value"], times] if bool((times != 1).any()) else [node["value"]]
            numbers = [x.detach().cpu().to(torch.float32).contiguous() for x in known]
            if numbers[0].numel():
                parts.append(b"".join(repr(tuple(x.shape)).encode() + x.numpy().tobytes() for x in numbers))
        return hashlib.sha256(b"|".join(sorted(parts))).hexdigest()

    def table(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(x_n, z_n = k | w)`` of the one discrete site, shape ``plate_shape + (K,)``.

        Latent sites that depend on ``z_n`` count with the data.

        :raises UnsupportedModel: when the model has no discrete site, or several.
        """
        if len(self.discrete) != 1:
            raise UnsupportedModel(
                f"a table of components needs exactly one discrete latent site; this model has "
                f"{len(self.discrete)} ({', '.join(self.discrete) or 'none'})."
            )
        trace = self.trace(u, theta)
        with without_validation():
            return enumeration.component_table(trace, self.discrete[0], self._counted)

    def responsibilities(self, u: Tensor, theta: Tensor) -> Tensor:
        """``p(z_n = k | x_n, w)`` of the one discrete site, shape ``plate_shape + (K,)``."""
        return self.table(u, theta).softmax(-1)

    def split_hypers(self, theta: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Constrained hyperparameters: the params (held ones included), and the maximised sites."""
        values = self.hypers.constrained(theta.to(self.dtype))
        sites = {n: values.pop(n) for n in self.maximised_sites}
        return self.held | values, sites

    def substituted(self, theta: Tensor) -> Model:
        """The user's model with the hyperparameters put in as constants; picklable if the model is."""
        params, sites = self.split_hypers(theta.detach())
        model = WithParameters(self.model, params, self.homes) if self.homes else self.model
        params = {n: v for n, v in params.items() if n not in self.homes}
        model = Constants(params)(model) if params else model
        return poutine.condition(model, data=sites) if sites else model


def _width(tried: int) -> float:
    """The next place's largest distance from the origin of unconstrained space: 2, as NUTS has it, 1, 2, 0.5, 2, ...

    The density may be far from the origin alone; or close to it alone, where a rate is a sum of many terms.
    """
    return 2.0 * 0.5 ** ((tried + 1) // 2 * (tried % 2))
