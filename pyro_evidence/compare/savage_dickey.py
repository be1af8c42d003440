"""The Bayes factor of a point against the model in which it is free, by the Savage-Dickey density ratio."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import own_random_numbers, without_validation
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.program.constants import at_point, prior_depends
from pyro_evidence.program.log_joint import LogJoint, Model


@dataclass(frozen=True)
class SavageDickey:
    """Bayes factor for a point in the space of some sites, against all other points.

    :ivar log_bayes_factor: ``log p(D | point) - log p(D)``, nats; above zero the data are for the point.
    :ivar log_posterior_density: at the point, in the sites' own units, nats.
    :ivar log_prior_density: the same before the data.
    :ivar standard_error: of the log Bayes factor, from the errors of the log evidences, nats.
    :ivar depends: sites whose prior depends on the point.  The Bayes factor is that against the model in which the
        point is put in and these have the prior given it; a model without the point needs that same prior.

    >>> print(SavageDickey(-3.807, -4.726, -0.919, 0.0, ()))
    log Bayes factor of the point -3.807 +- 0 nats
    """

    log_bayes_factor: float
    log_posterior_density: float
    log_prior_density: float
    standard_error: float
    depends: tuple[str, ...]

    def __str__(self) -> str:
        said = f"log Bayes factor of the point {self.log_bayes_factor:.3f} +- {self.standard_error:.2g} nats"
        given = f"; of {', '.join(self.depends)} the prior is that given the point" if self.depends else ""
        return said + given


def savage_dickey(posterior: LaplacePosterior, point: Mapping[str, Any]) -> SavageDickey:
    """The Bayes factor of a model with some sites at a point against the same model with these sites free.

    It is the ratio of posterior and prior density at the point: Dickey (1971), eq. 2.2; Verdinelli and Wasserman
    (1995), eq. 2.  The posterior density is exact up to the error of two log evidences, that of the posterior and
    that of a fit with the sites put at the point, so that it is as good twenty standard deviations out.
    Hyperparameters that were maximised are held.

    :param posterior: of the model with the sites free, from ``LaplaceEvidence``.
    :param point: site -> value; a number is taken for all of its elements.
    :raises BadInput: for names that are no latent sites, values outside of their support, and where the data of the
        fit were not kept.

    >>> from pyro import distributions as dist, sample
    >>> from pyro_evidence import savage_dickey
    >>> def heights(y):
    ...     mu = sample("mu", dist.Normal(0.0, 1.0))
    ...     sample("y", dist.Normal(mu, torch.ones(3)).to_event(1), obs=y)
    >>> found = savage_dickey(LaplaceEvidence(heights).run(torch.tensor([1.0, 2.0, 3.0])), {"mu": 0.0})
    >>> round(found.log_bayes_factor, 3)  # 0.5 log 4 - 36 / 8
    -3.807
    """
    posterior._needs_data("savage_dickey()")
    joint, (u, theta) = posterior._joint, posterior._mode_at
    values, free = _values(joint, point), joint.substituted(theta)
    nodes, depends = _at(joint, u, theta, values)
    inside = [site for site in joint.latents.names if site not in values]
    sites = [site for site in posterior.marginalised_sites if site in inside]
    settings: dict[str, Any] = {"maximise": (), "marginalise": sites if len(sites) < len(inside) else ()}

    def integral(model: Model) -> tuple[float, float]:
        """Log of the integral over the sites that are not at the point, and its error, nats."""
        if not inside:
            return float(joint.density(values, joint.hypers.constrained(theta.to(joint.dtype)))), 0.0
        found = LaplaceEvidence(model, **settings).run(*joint.args, **joint.kwargs)
        return float(found.log_evidence), float(found.log_evidence_error)

    given, error = integral(at_point(free, values))
    log_prior, prior_error = sum(value for value, _ in nodes.values()), 0.0
    if any(depends_on_others for _, depends_on_others in nodes.values()):
        log_prior, prior_error = integral(at_point(free, values, without=joint.observed))
    log_posterior = given - float(posterior.log_evidence)
    errors = error, prior_error, float(posterior.log_evidence_error)
    return SavageDickey(log_posterior - log_prior, log_posterior, log_prior, math.hypot(*errors), depends)


def _values(joint: LogJoint, point: Mapping[str, Any]) -> dict[str, Tensor]:
    """The point as tensors in the shapes of the sites.

    :raises BadInput: for other names, shapes, and places outside of the support.
    """
    parts = {part.name: part for part in joint.latents}
    if not point or set(point) - set(parts):
        raise BadInput(f"point names {sorted(point)}; expected latent sites, one or more of {list(parts)}.")
    values = {}
    for site, value in point.items():
        part, given = parts[site], torch.as_tensor(value, dtype=joint.dtype, device=joint.device)
        if given.dim() and given.shape != part.shape:
            raise BadInput(f"point[{site!r}] has shape {tuple(given.shape)}; expected {tuple(part.shape)} or a number.")
        values[site] = given.expand(part.shape)
        if not bool(part.transform.codomain.check(values[site]).all()):
            raise BadInput(f"point[{site!r}] = {value}; expected a value in the support, {part.transform.codomain}.")
    return values


def _at(
    joint: LogJoint, u: Tensor, theta: Tensor, values: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[float, bool]], tuple[str, ...]]:
    """Log prior density of each site of a point, nats, and whether others enter it; and what depends on the point."""
    with own_random_numbers(), without_validation():
        latents = joint.latents.constrained(u.to(joint.dtype)) | dict(values)
        latents = {name: value.detach().clone().requires_grad_() for name, value in latents.items()}
        trace = joint.trace_at(latents, joint.hypers.constrained(theta.to(joint.dtype)))
        trace.compute_log_prob()
    own, others = [latents[n] for n in values], [v for n, v in latents.items() if n not in values]
    with without_validation():
        nodes = {site: trace.nodes[site] for site in latents}
        found = {s: (float(nodes[s]["log_prob"].detach().sum()), prior_depends(nodes[s], others)) for s in values}
        depends = tuple(s for s in joint.latents.names if s not in values and prior_depends(nodes[s], own))
    return found, depends
