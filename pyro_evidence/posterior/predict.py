"""Predictions at new inputs: the likelihood's own means, probabilities and new data, averaged over a posterior."""

import copy
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal, OneHotCategorical

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import (
    entry_point,
    own_random_numbers,
    without_validation,
    without_validation_or_params,
)
from pyro_evidence.numerics.batched import HELD_NUMBERS
from pyro_evidence.numerics.linalg import require_memory
from pyro_evidence.posterior.base import NUM_DRAWS, Posterior, in_pairs
from pyro_evidence.posterior.effects import of_formula
from pyro_evidence.program.checks import Arguments, new_data
from pyro_evidence.program.constants import with_arguments
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.predictors import LikelihoodTerm, unwrapped
from pyro_evidence.program.simulate import NewLevels, Unobserved, vectorised
from pyro_evidence.program.sites import Values
from pyro_evidence.settings import check_count, check_seed, quantile_levels

KINDS = ("response", "link", "population")
TIMES_TOGETHER = 8  # of a curve: each holds as many numbers as the predictions of a mean


@dataclass(frozen=True, eq=False)
class PredictiveMoments:
    """Mean and variance of new data, averaged over draws; those of more draws are added.

    :ivar weight: of these draws among all.
    :ivar mean: shape ``(N,)``, or of class probabilities ``(N, C)``.
    :ivar variance: of the same shape.
    """

    weight: float
    mean: Tensor
    variance: Tensor

    @classmethod
    def over(cls, weights: Tensor, mean: Tensor, variance: Tensor) -> "PredictiveMoments":
        """Moments over rows of means and variances, by the laws of total expectation and variance.

        :param weights: of the rows, ``(S,)``, as many as are in front of ``mean`` and ``variance``.

        >>> rows = torch.tensor([[1.0], [3.0]])
        >>> PredictiveMoments.over(torch.ones(2), rows, torch.zeros(2, 1)).variance
        tensor([1.])
        """
        share = (weights / weights.sum()).to(mean)
        average = torch.tensordot(share, mean, 1)
        spread = torch.tensordot(share, (mean - average).square_(), 1)
        return cls(float(weights.sum()), average, torch.tensordot(share, variance, 1) + spread)

    def __add__(self, other: "PredictiveMoments") -> "PredictiveMoments":
        """Chan, Golub and LeVeque (1983), eq. 1.5."""
        weight = self.weight + other.weight
        away, share = other.mean - self.mean, other.weight / weight
        within = torch.lerp(self.variance, other.variance, share)
        return PredictiveMoments(weight, self.mean + share * away, within + share * (1.0 - share) * away.square())


@dataclass(frozen=True, eq=False)
class SitePrediction:
    """One observed site at new inputs, over draws of the latents; those over more draws are added.

    :ivar moments: of a new datum, its noise included; for classes of their indicators.
    :ivar values: what quantiles are of, parts ``(S,) + shape``: new data, for classes the probabilities; empty where
        nobody asks for quantiles.
    :ivar classes: whether the site has classes.
    """

    moments: PredictiveMoments
    values: tuple[Tensor, ...]
    classes: bool

    def quantiles(self, q: Tensor) -> Tensor:
        """Quantiles of a new datum; for classes of the probability; ``(len(q),) + shape``, or ``shape`` for one."""
        rows = torch.cat(self.values).to(self.moments.mean)
        flat = rows.reshape(len(rows), -1)
        found = [part.quantile(q.to(part), 0) for part in flat.split(max(1, HELD_NUMBERS // len(flat)), 1)]
        return torch.cat(found, -1).reshape(*q.shape, *rows.shape[1:])

    def statistics(self, return_std: bool, quantiles: float | Sequence[float] | None) -> Any:
        """Requested summaries of a prediction: the mean, with the standard deviation, or quantiles.

        :raises BadInput: for both, and for a distribution without a mean or variance.
        """
        if return_std and quantiles is not None:
            raise BadInput("predict(..., return_std=True, quantiles=...): expected one of the two. Call it twice.")
        if quantiles is not None:
            return self.quantiles(quantile_levels(quantiles))
        mean, variance = self.moments.mean, self.moments.variance
        for values in (mean, variance) if return_std else (mean,):
            if not bool(values.isfinite().all()):
                raise BadInput(
                    f"{int((~values.isfinite()).sum())} predictive means or variances are not finite; expected "
                    "inputs without nan and inf, and a likelihood with both (a StudentT needs more than two degrees of "
                    "freedom): else ask for quantiles=[0.05, 0.5, 0.95]."
                )
        return (mean, variance.sqrt()) if return_std else mean

    def __add__(self, other: "SitePrediction") -> "SitePrediction":
        """Over more draws."""
        return SitePrediction(self.moments + other.moments, self.values + other.values, self.classes)


class _Observed(Messenger):
    """Gives observed sites their values in a way that can be batched, where there is one.

    :param sites: the observed sites.
    :param drawn: whether they are drawn; zeros, which no other site sees, stand for their values otherwise.
    """

    def __init__(self, sites: Sequence[str], drawn: bool) -> None:
        super().__init__()
        self.sites, self.drawn = sites, drawn

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.sites or msg["value"] is not None:
            return
        fn = msg["fn"]
        if not self.drawn:
            msg["value"] = torch.zeros(fn.shape())
        elif isinstance(_base(fn), Normal):
            msg["value"] = fn.mean + fn.stddev * torch.randn(fn.shape(), dtype=fn.mean.dtype, device=fn.mean.device)


class _Survival(Messenger):
    """Has observed times stand for how sure it is that there is no event by each of some times, ``(T,) + data``.

    :param weights: of the times in a sum over them, which then stands in that place; None: no sum.
    """

    def __init__(self, sites: Sequence[str], times: Tensor, weights: Tensor | None = None) -> None:
        super().__init__()
        self.sites, self.times, self.weights = sites, times, weights

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.sites:
            fn = _base(msg["fn"])
            alive = (_survival(fn, t.expand(fn.batch_shape)) for t in self.times)
            if self.weights is None:
                msg["fn"] = dist.Delta(torch.stack(list(alive)))
            else:  # one after the other: nothing of times and data together is held
                msg["fn"] = dist.Delta(reduce(torch.add, map(torch.mul, self.weights, alive)))


def _survival(fn: Any, value: Tensor) -> Tensor:
    """Probability of more than ``value``.

    :raises UnsupportedModel: where it is not known.
    """
    try:
        own = getattr(fn, "log_survival", None)
        return 1.0 - fn.cdf(value) if own is None else own(value).exp()
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"{type(fn).__name__} has no survival function; expected Censored times, or a distribution with a cdf."
        ) from error


class _Tangents(Messenger):
    """Gives observed sites predictors that are linear in the latents: the tangents of their own ones.

    A Gauss-Newton matrix is the curvature of that model.  Immer, Korzepa and Bauer (2021).

    :param etas: the predictor of each of some terms.
    """

    def __init__(self, terms: Sequence[LikelihoodTerm], etas: Sequence[Tensor]) -> None:
        super().__init__()
        self.predictors = {term.site: (term, eta) for term, eta in zip(terms, etas, strict=True)}

    @classmethod
    def beside_modes(
        cls, nodes_at: Callable[[Values], Any], terms: Sequence[LikelihoodTerm], latents: Values
    ) -> "_Tangents | None":
        """Those at the modes ``name/mode`` beside the values of latents; None without terms."""
        if not terms:
            return None
        mode = {n: latents[f"{n}/mode"] for n in latents if f"{n}/mode" in latents}

        def predictors(values: Values) -> tuple[Tensor, ...]:
            nodes = nodes_at(values)
            return tuple(t.link.inverse(getattr(unwrapped(nodes[t.site]["fn"]).base, t.parameter)) for t in terms)

        etas, pull = torch.func.vjp(predictors, mode)[:2]
        along = torch.func.vjp(pull, tuple(map(torch.zeros_like, etas)))[1]  # forward derivatives are the pull's own
        (rises,) = along(({n: latents[n] - mode[n] for n in mode},))
        return cls(terms, [eta + rise for eta, rise in zip(etas, rises, strict=True)])

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.predictors:
            term, eta = self.predictors[msg["name"]]
            msg["fn"] = with_arguments(msg["fn"], {term.parameter: lambda _: term.link.forward(eta)})


@entry_point
class PredictionMixin:
    """Predictions of new data, by a posterior or by an average over posteriors."""

    def _site_prediction(
        self, new: Arguments, num_samples: int, seed: int, kept: bool, *, site: str | None, kind: str
    ) -> SitePrediction:
        """Prediction of an observed site at new inputs.

        :param kept: whether new data are kept, for quantiles.
        """
        raise NotImplementedError

    def _class_probabilities(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int, seed: int
    ) -> Tensor | None:
        """Averaged at each row by itself, without draws; None where there is no rule for that."""
        return None

    def predict(
        self,
        *args: Any,
        return_std: bool = False,
        quantiles: float | Sequence[float] | None = None,
        site: str | None = None,
        num_samples: int = NUM_DRAWS,
        seed: int = 0,
        kind: str = "response",
        **kwargs: Any,
    ) -> Any:
        """Means of new data, or class probabilities, averaged over the posterior at fixed hyperparameters.

        Means of the likelihood are averaged, not draws of it; a Gaussian process by itself is integrated by quadrature.
        A network, a user's own too, is replaced by its tangent at the mode: draws of its weights are far wilder than
        what it has learned.

        :param args: the model's arguments at new inputs; targets may be left out.  Without any, the training inputs.
            Of a formula's model also a ``pandas.DataFrame`` with the columns of its right-hand sides.
        :param return_std: with the predictive standard deviation, noise included.
        :param quantiles: return instead quantiles of new data, for classes those of the probability over the posterior.
        :param site: the observed site, where there are several.
        :param num_samples: draws of the latents, half of them mirror images of the others.
        :param seed: of the draws, fixed unless you change it: a prediction is a number to report.
        :param kind: of a formula's model, in place of the ``"response"``: the linear predictor, its ``"link"``, without
            noise, or the ``"population"``, a response whose group has no effects; a frame needs no groups then.
        :return: shape ``(N,)`` (for a Bernoulli site the probability of 1), ``(N, C)`` for a categorical one; a pair
            with ``return_std``; ``(Q,) + shape`` for quantiles.
        :raises BadInput: for ``return_std`` with ``quantiles``, when the model cannot be run on the arguments, and for
            a distribution without a mean.

        >>> mean, sd = posterior.predict(X_new, return_std=True)  # doctest: +SKIP
        """
        if kind == "response" and not return_std and quantiles is None and site is None:
            exact = self._class_probabilities(args, kwargs, num_samples, seed)
            if exact is not None:
                return exact
        found = self._site_prediction((args, kwargs), num_samples, seed, quantiles is not None, site=site, kind=kind)
        return found.statistics(return_std, quantiles)


class PredictivePosterior(PredictionMixin, Posterior):
    """A posterior whose model can be run on new inputs."""

    _is_normal: Any = False  # whether draws are linear in white noise

    def _site_prediction(
        self, new: Arguments, num_samples: int, seed: int, kept: bool, *, site: str | None, kind: str
    ) -> SitePrediction:
        """Prediction of a kind other than the response only where the model is that of a formula.

        :raises BadInput: for another model, or a kind that there is not.
        """
        args, kwargs = new
        if kind == "response":
            return prediction(self, self._with(args, kwargs), site, num_samples, seed, num_samples if kept else 0)
        if kind not in KINDS or kwargs or len(args) > 1:
            raise BadInput(
                f"predict(kind={kind!r}); expected one of {KINDS}, and a frame, or nothing for the fit's rows."
            )
        model, link = of_formula(self), kind == "link"
        joint = self._with(model.arguments(*args, groups=kind != "population"), {})
        joint.model = model.seen(lambda eta, _: eta) if link else model
        linear = link and self._is_normal and not kept
        return prediction(self, joint, None, num_samples, seed, num_samples if kept else 0, linear)

    def survival(
        self,
        times: Any,
        *args: Any,
        restricted_mean: bool = False,
        return_std: bool = False,
        quantiles: float | Sequence[float] | None = None,
        site: str | None = None,
        num_samples: int = NUM_DRAWS,
        seed: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Survival curves: probabilities that there is no event by each of some times, averaged over the posterior.

        :param times: one or more, increasing, 0 or above, ``(T,)``.
        :param args: the model's arguments at new inputs, or a frame, as for :meth:`predict`.
        :param restricted_mean: return instead the mean time without the event until the last of the times: the curve's
            integral from 0 by the trapezoidal rule, so that many times are needed.
        :param return_std: with the standard deviation over the posterior.
        :param quantiles: return instead quantiles over the posterior, a band.
        :return: ``(T, N)``; of restricted means ``(N,)``; a pair with ``return_std``, ``(Q,)`` in front for quantiles.
        :raises BadInput: for times that do not increase from 0 on, and as :meth:`predict`.
        :raises UnsupportedModel: for a site without a survival function.

        >>> curve = posterior.survival([1.0, 2.0, 5.0], frame)  # doctest: +SKIP
        """
        t = torch.as_tensor(times, dtype=self._joint.dtype)
        if t.dim() != 1 or not len(t) or not bool((t >= 0).all() and (t.diff() > 0).all()):
            raise BadInput(f"survival at times {t.tolist()}; expected one or more from 0 on, in ascending order.")
        weights = None
        if restricted_mean:
            t = torch.cat([t[:0] if t[0] == 0 else 0.0 * t[:1], t])
            step = torch.nn.functional.pad(t.diff(), (1, 1))
            weights = 0.5 * (step[1:] + step[:-1])
        parts, kept = [], 0 if quantiles is None else num_samples
        for part in t.split(TIMES_TOGETHER if weights is None else len(t)):
            joint = self._with(args, kwargs)
            joint.args, joint.kwargs = completed(joint.model, joint.args, joint.kwargs)
            joint.model = _Survival(joint.observed, part, weights)(joint.model)
            parts.append(prediction(self, joint, site, num_samples, seed, kept))
        mean, variance = (torch.cat([getattr(p.moments, n) for p in parts]) for n in ("mean", "variance"))
        values = (torch.cat([torch.cat(p.values) for p in parts], 1),) if kept else ()
        moments = PredictiveMoments(parts[0].moments.weight, mean, variance)
        return SitePrediction(moments, values, False).statistics(return_std, quantiles)

    def forecast(
        self,
        steps: int,
        *args: Any,
        return_std: bool = False,
        quantiles: float | Sequence[float] | None = None,
        site: str | None = None,
        num_samples: int = NUM_DRAWS,
        seed: int = 0,
        **kwargs: Any,
    ) -> Any:
        """The next values of a series: those that the model has on so many steps more than the fit.

        Plates have new elements from their prior, fields along a line (``RandomWalk``, ``Seasonal``, ``AR``,
        ``OrnsteinUhlenbeck``) go on from their last values.  Means and standard deviations are exact where the mean is
        linear in latents that are normal, and averages over draws elsewhere.

        :param steps: how many.
        :param args: the model's arguments over the steps of the fit and the new ones, targets left out.  Without any,
            those of the fit: lengths and targets grow.
        :param return_std: and all other settings, as for :meth:`predict`.
        :return: as :meth:`predict`, the last ``steps`` along the first dimension of the data.
        :raises BadInput: as :meth:`predict`, and without arguments where the model has inputs, whose next values are
            not known.

        >>> from pyro import distributions as dist, sample
        >>> from pyro_evidence import LaplaceEvidence
        >>> from pyro_evidence.models.gmrf import AR1
        >>> def model(y):
        ...     x = sample("x", AR1(1.0, 0.5, size=len(y)))
        ...     sample("y", dist.Normal(x, 0.01).to_event(1), obs=y)
        >>> posterior = LaplaceEvidence(model, marginalise=()).run(torch.tensor([0.3, -1.0, 0.5, 2.0]))
        >>> [round(float(x), 2) for x in posterior.forecast(2)]
        [1.0, 0.5]
        """
        steps = check_count("steps", steps)
        if not args and not kwargs:
            self._needs_data("forecast() without arguments")
            args, kwargs = longer(self._joint, *self._mode_at, steps)
        joint, kept = self._with(args, kwargs), 0 if quantiles is None else num_samples
        found = prediction(self, joint, site, num_samples, seed, kept, linear=self._is_normal and quantiles is None)
        moments, values = found.moments, tuple(value[:, -steps:] for value in found.values)
        seen = min(map(len, _seen(self._joint, *self._mode_at))) if self._joint.has_data else 0
        if len(moments.mean) < seen + steps:
            raise BadInput(
                f"forecast({steps}, ...): the model has {len(moments.mean)} values on these arguments, and the fit has "
                f"seen {seen}; expected arguments over all {seen + steps} steps, those of the fit and the new ones."
            )
        last = PredictiveMoments(moments.weight, moments.mean[-steps:], moments.variance[-steps:])
        return SitePrediction(last, values, found.classes).statistics(return_std, quantiles)


def _seen(joint: LogJoint, u: Tensor, theta: Tensor) -> list[Tensor]:
    """The values of the observed sites.

    :raises BadInput: where one is a single number, as in a loop over steps.
    """
    nodes = joint.trace(u, theta).nodes
    single = [name for name in joint.observed if not nodes[name]["value"].dim()]
    if single:
        raise BadInput(
            f"forecast: site {single[0]!r} observes a single number; expected a site with a value for each step. Leave "
            f"the loop to the states, and observe torch.stack(states) in one plate."
        )
    return [nodes[name]["value"] for name in joint.observed]


def longer(joint: LogJoint, u: Tensor, theta: Tensor, steps: int) -> Arguments:
    """The arguments of the fit with lengths and targets so many steps longer; new targets are nan.

    :raises BadInput: for inputs as long as the data: their next values are for the user to say.
    """
    seen = _seen(joint, u, theta)

    def grown(name: int | str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value + steps if isinstance(value, int) and any(value == len(y) for y in seen) else value
        if not value.dim() or all(len(value) != len(y) for y in seen):
            return value
        if not any(value.shape == y.shape and torch.equal(value.nan_to_num(), y.nan_to_num()) for y in seen):
            raise BadInput(
                f"forecast({steps}): argument {name!r} has {len(value)} values, as the data have; expected to be told "
                f"those that follow. Pass the model's arguments over all {len(value) + steps} steps."
            )
        return torch.cat([value, torch.full_like(value[:1], math.nan).expand(steps, *value.shape[1:])])

    return tuple(grown(i, x) for i, x in enumerate(joint.args)), {n: grown(n, x) for n, x in joint.kwargs.items()}


def _nodes_at(
    model: Model, new: Arguments, observed: Messenger, latents: Values, within: Messenger | None = None
) -> Mapping[str, Any]:
    """The sites of a model on new arguments with these latents."""
    inside = poutine.condition(observed(model if within is None else within(model)), data=latents)
    with without_validation_or_params():
        nodes: Any = poutine.trace(inside).get_trace(*new[0], **new[1]).nodes
    return nodes


def prediction(
    posterior: Posterior,
    joint: LogJoint,
    site: str | None,
    num_samples: int,
    seed: int,
    kept: int,
    linear: bool = False,
) -> SitePrediction:
    """An observed site at new inputs, levels of groups that the fit has not seen drawn from their prior.

    The likelihood's own means and variances are averaged, of a site alone without draws of it.

    :param joint: with the model's arguments at the new inputs; a required one that is missing is passed as None.
    :param site: None where there is one.
    :param seed: of the draws; the caller's random state is not touched.
    :param kept: how many rows of new data are kept for quantiles.
    :param linear: whether draws are linear in white noise, so that moments of what is linear in draws can be exact.
    :raises BadInput: when the model cannot be run on them, for what is no seed, and for a name that no site has.
    :raises TooLarge: when what is kept does not fit into memory.
    """
    num_samples = check_count("num_samples", num_samples)
    check_seed(seed)
    new = completed(joint.model, joint.args, joint.kwargs)
    alone, bare = len(joint.observed) == 1 and not kept, copy.copy(joint)
    bare.model = Unobserved()(joint.model)
    shapes = {part.name: part.shape for part in joint.latents}
    levels = NewLevels(shapes)
    model, observed = levels(bare.substituted(posterior._mode_at[1])), _Observed(joint.observed, not alone)
    nodes_at = partial(_nodes_at, model, new, observed)
    classes: dict[str, bool] = {}

    def run(latents: Values) -> Values:
        levels.noise = {n: latents[f"{n}/noise"] for n in levels.fresh if f"{n}/noise" in latents}
        nodes = nodes_at(latents, _Tangents.beside_modes(nodes_at, posterior._linear_terms, latents))
        found: Values = {}
        for name in (n for n in joint.observed if n in nodes):
            fn, value = nodes[name]["fn"], nodes[name]["value"]
            classes[name] = isinstance(_base(fn), Bernoulli | Categorical | OneHotCategorical)
            mean, variance = likelihood_moments(fn, value, required=not kept)  # quantiles want none
            found |= {f"{name}/mean": mean, f"{name}/variance": variance}
            found |= {f"{name}/value": mean if classes[name] else value} if kept else {}
        return found

    def over(latents: Values, weights: Tensor) -> dict[str, SitePrediction]:
        found = vectorised(run, latents)
        if levels.fresh and not kept:  # once more, in pairs of opposite effects: means linear in them are then exact
            fresh = {f"{n}/noise": torch.Size(shape) for n, shape in levels.fresh.items()}
            noise = {n: in_pairs(len(weights), shape.numel())[: len(weights)] for n, shape in fresh.items()}
            noise = {n: white.to(joint.initial_u).view(-1, *fresh[n]) for n, white in noise.items()}
            found = vectorised(run, latents | noise)
        parts = {}
        for name, has in classes.items():
            mean = found[f"{name}/mean"]
            if kept > len(mean):
                what = f"{kept:,} draws of new data {tuple(mean.shape[1:])}"
                remedy = "Ask for fewer, or for fewer data at a time."
                require_memory(16 * kept * mean[0].numel(), what, mean.device, remedy)
            values = (found[f"{name}/value"],) if kept else ()
            parts[name] = SitePrediction(PredictiveMoments.over(weights, mean, found[f"{name}/variance"]), values, has)
        return parts

    def along_axes() -> dict[str, SitePrediction] | None:
        """Moments by the change along each axis of white noise; None where means are not linear, or axes are many.

        One random place more tells: a function that is not linear agrees there with probability zero.
        """
        size, u = posterior._num_directions, posterior._mode_at[0]
        run(joint.latents.constrained(u.to(joint.dtype)))
        fresh = {n: torch.Size(shape) for n, shape in levels.fresh.items()}
        sizes = [size, *(shape.numel() for shape in fresh.values())]
        if any(classes.values()) or sum(sizes) > num_samples:
            return None
        axes = torch.eye(sum(sizes), dtype=torch.float64)
        white, *noise = torch.cat([0.0 * axes[:1], axes, torch.randn_like(axes[:1])]).split(sizes, -1)
        latents = dict(posterior._joint.latents.constrained(posterior._draws(white.to(u)).to(joint.dtype)))
        for (name, shape), part in zip(fresh.items(), noise, strict=True):
            latents[f"{name}/noise"] = part.to(u).view(-1, *shape)
        found, parts = vectorised(run, latents), {}
        place = torch.cat([white, *noise], -1)[-1]
        for name in classes:
            mean, variance = found[f"{name}/mean"], found[f"{name}/variance"]
            change = mean[1:-1] - mean[0]
            expected = mean[0] + torch.tensordot(place.to(mean), change, 1)
            if not (torch.allclose(mean[-1], expected, rtol=1e-8) and torch.allclose(variance[-1], variance[0])):
                return None
            moments = PredictiveMoments(float(num_samples), mean[0], variance[0] + change.square().sum(0))
            parts[name] = SitePrediction(moments, (), False)
        return parts

    with new_data(*new), own_random_numbers(), torch.no_grad():
        torch.manual_seed(operator.index(seed))
        found = along_axes() if linear else None
        if found is None:
            latents = posterior._latent_draws(joint, new, num_samples, seed, alone and not joint.discrete)
            with without_validation():
                parts = (over(*part) for part in latents)
                found = reduce(lambda found, more: {n: found[n] + more[n] for n in found}, parts)
    if site is None and len(found) == 1:
        return next(iter(found.values()))
    if not isinstance(site, str) or site not in found:
        expected = f"{', '.join(found)}, as in site='{next(iter(found))}'" if found else "there is none"
        raise BadInput(f"site={site!r}; expected one of the observed sites: {expected}.")
    return found[site]


def observed_at(joint: LogJoint, latents: Values, hypers: Values) -> Any:
    """The distribution of the observed site of ``joint.model`` on its arguments, differentiable in what it is given."""
    sites = {name: hypers[name] for name in joint.maximised_sites}
    params = {name: value for name, value in hypers.items() if name not in sites}
    model = poutine.condition(poutine.substitute(joint.model, data=params | joint.held), data=latents | sites)
    args, kwargs = completed(joint.model, joint.args, joint.kwargs)
    with without_validation_or_params():
        return poutine.trace(model).get_trace(*args, **kwargs).nodes[joint.observed[0]]["fn"]


def completed(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments with None for required ones that are missing, as the targets of a prediction are.

    >>> completed(lambda X, t: None, [1.0], {})
    ((1.0,), {'t': None})
    """
    try:
        signature = inspect.signature(model)
        given = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or arguments that do not fit, of which the model itself will tell
        return tuple(args), dict(kwargs)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = [n for n, p in signature.parameters.items() if p.kind in named and p.default is inspect.Parameter.empty]
    return tuple(args), dict(kwargs) | {n: None for n in wanted if n not in given}


def _base(fn: Any) -> Any:
    """A distribution without the shells around it, masks among them."""
    base = unwrapped(fn).base
    return _base(base.base_dist) if type(base).__name__ == "MaskedDistribution" else base


def likelihood_moments(fn: Any, value: Tensor, required: bool = True) -> tuple[Tensor, Tensor]:
    """Mean and variance of an observed site given all else; for a categorical one its probabilities, ``(N, C)``.

    :param required: where they are not known ``value`` stands for both else.
    :raises UnsupportedModel: where they are not known.
    """
    base = _base(fn)
    try:
        if isinstance(base, Categorical):
            probs = base.probs.expand(*value.shape, base.probs.shape[-1])
            mean, variance = probs, probs * (1.0 - probs)
        else:
            mean, variance = fn.mean.expand(value.shape), fn.variance.expand(value.shape)
    except NotImplementedError as error:
        if not required:
            return value.double(), value.double()
        raise UnsupportedModel(
            f"{type(base).__name__} has no mean or variance in closed form; expected a likelihood that has. Use "
            "Predictive(posterior.model, guide=posterior.guide, num_samples=1000), or ask for quantiles=[0.05, 0.5]."
        ) from error
    return mean.double(), variance.double()
