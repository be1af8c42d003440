"""All the modes one can find: from random starts, and from relabelling the components of those found."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.evidence_check.target import Target, laplace_posterior, target_of
from pyro_evidence.fitting.process_state import entry_point, without_validation
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.tour import all_modes
from pyro_evidence.posterior.base import Posterior
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.multimodal import ImportancePosterior
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import Start, check_random_start, seed_of
from pyro_evidence.structure.symmetries import axes_of_length, relabelled

AUTOMATIC = 16  # starts
MOST_PERMUTATIONS = math.factorial(5)  # of five components

Axes = Mapping[str, int]  # latent site -> which axis of its value counts components


@dataclass(frozen=True, repr=False)
class Modes:
    """The distinct modes of one posterior density at fixed hyperparameters, highest first.

    :ivar states: Laplace's approximation at each.
    :ivar num_components: number of mixture components whose labels were permuted, 1 without a mixture.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM, find_modes
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> posterior = EvidenceEM(gaussian_mixture(2)).run(Y)
    >>> len(find_modes(posterior).states) >= 2  # a mixture of two has two labellings
    True
    """

    posterior: LaplacePosterior
    states: tuple[LaplaceState, ...]
    num_components: int

    def __repr__(self) -> str:
        heights = [round(float(s.log_evidence), 3) for s in self.states]
        return f"Modes(num={len(self.states)}, log_evidences={heights[:8]}, num_components={self.num_components})"

    @property
    def target(self) -> Target:
        """The density they are modes of."""
        return target_of(self.posterior)

    @property
    def log_evidences(self) -> Tensor:
        """Laplace log evidence of each mode alone, nats, shape ``(M,)``."""
        return torch.stack([s.log_evidence for s in self.states])

    @property
    def log_evidence(self) -> Tensor:
        """Log of the sum of the modes' evidences, nats, shape ``()``; too high where modes overlap."""
        return self.log_evidences.logsumexp(0)


@entry_point
def find_modes(posterior: Posterior, *, start: Start = Start(), labels: Axes | None = None) -> Modes:
    """Modes at the posterior's hyperparameters, told apart by where they are, not by how high.

    Climbs from the posterior's own mode, from random starts, and from the relabellings of all modes found so
    far.

    :param posterior: whose density is searched.
    :param start: number of random starts, None: sixteen; and their seed.
    :param labels: latent site -> the axis of its value that counts mixture components; default: the first
        axis as long as the discrete site has states, in every site that has one.  ``{}`` relabels nothing.
    :raises BadInput: when an axis does not exist, or there are more than 120 relabellings.
    """
    posterior = posterior.at_mode(0) if isinstance(posterior, ImportancePosterior) else laplace_posterior(posterior)
    state, joint = posterior.state, posterior.state.problem.joint
    axes, num_components = component_axes(joint, labels)
    check_random_start(start)
    starts = joint.initial(start.number(AUTOMATIC), seed_of(start.seed))
    orders = permutations(num_components) if axes else [()]
    with without_validation():
        found = all_modes(state, starts, lambda mode: relabelled(joint, mode.u.unsqueeze(0), axes, orders)[:, 0])
    order = sorted(found, key=lambda s: -float(s.log_evidence))
    return Modes(posterior, tuple(order), num_components)


def component_axes(joint: LogJoint, labels: Axes | None) -> tuple[dict[str, int], int]:
    """Which axis of which latent site counts components, and how many there are."""
    shapes = {p.name: p.shape for p in joint.latents}
    if labels is None:
        num = joint.num_states
        return axes_of_length(joint, num), num
    for name, axis in labels.items():
        if name not in shapes or not 0 <= axis < len(shapes[name]):
            raise BadInput(
                f"labels={dict(labels)}: expected latent sites and axes of theirs; the sites are "
                f"{ {n: tuple(s) for n, s in shapes.items()} }."
            )
    sizes = {shapes[n][a] for n, a in labels.items()}
    if len(sizes) > 1:
        raise BadInput(
            f"labels={dict(labels)} name axes of different lengths, {sorted(sizes)}; expected one number of "
            "components. Name axes of one length."
        )
    return dict(labels), next(iter(sizes), 1)


def permutations(num_components: int) -> list[tuple[int, ...]]:
    """All relabellings, the identity first.

    :raises BadInput: when there are more than 120.
    """
    if math.factorial(num_components) > MOST_PERMUTATIONS:
        raise BadInput(
            f"{num_components} components have {math.factorial(num_components)} labellings; expected at most "
            f"{MOST_PERMUTATIONS} to be enumerated. If the hyperparameters are the same for all components and the "
            f"modes are apart, use labels={{}} and add log {num_components}!."
        )
    return list(itertools.permutations(range(num_components)))
