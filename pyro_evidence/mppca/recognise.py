"""A log joint recognised as a mixture of probabilistic PCA, by its values at random points, never by names."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.mixture.recognise import (
    ModelRun,
    NotRecognised,
    Scaling,
    close,
    held_mixing,
    holder,
    laid_out,
    observed_parts,
    require_known,
    scaling,
)
from pyro_evidence.mixture.updates import Pool, SharedParameters
from pyro_evidence.models.mppca import MPPCA
from pyro_evidence.models.wrappers import Marginalised
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.program import predictors
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.sites import Trace


def own_model(model: Model) -> MPPCA | None:
    """The mixture of probabilistic PCA that a user passed, also where gaps are allowed; None for another program."""
    model = model.model if isinstance(model, Marginalised) else model
    return model if isinstance(model, MPPCA) else None


@dataclass(frozen=True, eq=False)
class MPPCAStructure:
    """A recognised mixture of probabilistic PCA.  Built by :func:`recognise_mppca`."""

    joint: LogJoint
    Y: Tensor  # (N, m)
    mean: str | None  # the param that holds mu; None where it is fixed
    mixing: str | None
    alpha: Scaling  # (K, q)
    beta: Scaling  # (K, m)
    start: FactorAnalysers  # one row, at the model's own hyperparameters, W at zero

    def on(self, joint: LogJoint, rows: Any) -> "MPPCAStructure":
        """The same mixture on other rows."""
        return replace(self, joint=joint, Y=rows.Y)

    @property
    def num_components(self) -> int:
        """``K``."""
        return self.start.W.shape[1]

    @property
    def ties(self) -> SharedParameters:
        """Which hyperparameters are shared, and which are learned."""
        found = SharedParameters.of(self.alpha.group, self.beta.group)
        learned = replace(found, alpha_free=self.alpha.free, beta_free=self.beta.free)
        return replace(learned, mixing_free=self.mixing is not None, mean_free=self.mean is not None)

    def theta(self, analysers: FactorAnalysers) -> Tensor:
        """Unconstrained hyperparameters of the first row; those of what is pruned stay where the model has them."""
        theta = self.joint.initial_theta.clone()
        self.alpha.write(theta, analysers.alpha[0].log(), analysers.on[0])
        self.beta.write(theta, analysers.beta[0].log(), analysers.active[0].unsqueeze(-1))
        return theta

    def params(self, analysers: FactorAnalysers) -> dict[str, Tensor]:
        """The model's params at the first row; those of pruned components stay where the model has them."""
        params, _ = self.joint.split_hypers(self.theta(analysers))
        if self.mixing is not None:
            params[self.mixing] = analysers.log_mixing[0].exp()
        if self.mean is not None:
            params[self.mean] = analysers.mu[0]
        return {n: v.to(self.joint.dtype) for n, v in params.items()}


@dataclass(frozen=True, eq=False)
class Observed:
    """Observed site of one trace."""

    probs: Tensor  # (K,)
    loc: Tensor  # (K, m)
    factor: Tensor  # (K, m, q)
    precision: Tensor  # (K, m)
    value: Tensor  # (N, m)


def is_mppca(joint: LogJoint) -> bool:
    """Whether the observed site is a Gaussian of low rank, or a mixture of such."""
    node = joint.trace(joint.initial_u, joint.initial_theta).nodes[joint.observed[0]] if joint.observed else None
    return node is not None and isinstance(observed_parts(node)[0].base, LowRankMultivariateNormal)


def recognise_mppca(joint: LogJoint) -> MPPCAStructure:
    """The mixture of probabilistic PCA that ``joint`` is.

    :raises UnsupportedModel: with the reason why it is none.
    """
    try:
        points = [ModelRun.drawn(joint, _observed, seed) for seed in (1, 2)]
        alpha, precisions = _alpha(joint, points), [p.seen.precision for p in points]
        beta = _alike(scaling(precisions, points, "noise precision"), "noise precision", points)
        mean = holder([p.seen.loc for p in points], points, "its means")
        mixing = held_mixing(joint, points, [p.seen.probs for p in points])
        require_known(joint, [alpha, beta], {mean, mixing})
    except NotRecognised as reason:
        raise UnsupportedModel(
            f"the model is not a mixture of probabilistic PCA: {reason}. Expected one observed "
            f"LowRankMultivariateNormal, or MixtureSameFamily of such, in one plate, whose cov_factor is a site of "
            f"Normal loadings (K, m, q) about zero; see pyro_evidence.models.mppca."
        ) from None
    seen = Observed(*(x.detach() for x in vars(ModelRun.drawn(joint, _observed, None).seen).values()))
    shape = 1, *seen.factor.shape
    start = FactorAnalysers(
        W=seen.factor.new_zeros(shape),
        mu=seen.loc.unsqueeze(0),
        beta=seen.precision.unsqueeze(0),
        log_mixing=seen.probs.log().unsqueeze(0),
        alpha=alpha.read(joint.initial_theta).unsqueeze(0),
        columns=torch.ones(shape[:2] + shape[3:], dtype=torch.bool, device=seen.loc.device),
    )
    return MPPCAStructure(joint, seen.value.double(), mean, mixing, alpha, beta, start)


def _observed(joint: LogJoint, trace: Trace) -> Observed:
    """The parameters of the observed site.

    :raises NotRecognised: when it is something else.
    """
    if len(joint.observed) != 1 or joint.discrete or len(joint.latents.names) != 1:
        raise NotRecognised(f"it has {len(joint.observed)} observed sites and latent sites {list(joint.latents.names)}")
    node = trace.nodes[joint.observed[0]]
    parts, value, background = observed_parts(node)
    if background is not None:
        raise NotRecognised("a background of outliers stands beside its components")
    base = parts.base
    plain = node["mask"] is None and bool((torch.as_tensor(node["scale"]) == 1).all())
    if not isinstance(base, LowRankMultivariateNormal) or not plain or value.dim() != 2:
        raise NotRecognised(f"site '{joint.observed[0]}' is a {type(base).__name__}, masked or scaled, or not a matrix")
    alone = parts.mixing is None
    of_each = ((base.loc, 1), (base.cov_factor, 2), (base.cov_diag, 1))
    loc, factor, variance = (_common(x.unsqueeze(-1 - event) if alone else x, event) for x, event in of_each)
    probs = loc.new_ones(1) if parts.mixing is None else _common(parts.mixing.probs, 0)
    return Observed(probs, loc, factor, variance.reciprocal(), value.detach())


def _common(x: Tensor, event: int) -> Tensor:
    """``x`` as ``(K,) + event``, where it is the same for all data."""
    x = laid_out(x, -1, event)
    if bool((x != x[:, :1]).any()):
        raise NotRecognised("its parameters depend on the datum")
    return x[:, 0].double()


def _alpha(joint: LogJoint, points: list[ModelRun[Observed]]) -> Scaling:
    """Scaling of the prior precisions of the columns; the loadings are the latent site itself."""
    found, what, site = [], "prior precision of the loadings", joint.latents.names[0]
    for point in points:
        W, factor = joint.latents.constrained(point.u.to(joint.dtype))[site], point.seen.factor
        if W.numel() != factor.numel() or not close(W.reshape(factor.shape), factor, point.tolerance):
            raise NotRecognised(f"cov_factor is not the site '{site}' itself")
        loc, precision, known = predictors.gaussian_prior(joint, point.trace)
        if not bool(known.all()) or bool((loc != 0).any()):
            raise NotRecognised("its loadings are not Normal about zero")
        rows = precision.reshape(factor.shape)
        if not close(rows, rows[:, :1].expand_as(rows), point.tolerance):
            raise NotRecognised(f"the {what} differs from output to output")
        found.append(rows[:, 0])
    return _alike(scaling(found, points, what), what, points)


def _alike(found: Scaling, what: str, points: list[ModelRun[Observed]]) -> Scaling:
    """Refuse precisions of which some are learned and some fixed, or learned ones that are not one multiple."""
    if bool(found.free.any()) and not bool(found.free.all()):
        raise NotRecognised(f"the {what} is learned for some and fixed for others")
    pool, offset = Pool(found.group), found.offset.unsqueeze(0)
    if not close(pool(offset) / pool(torch.ones_like(offset)), offset, points[0].tolerance):
        raise NotRecognised(f"the {what} is not the same multiple of its param for all that share it")
    return found
