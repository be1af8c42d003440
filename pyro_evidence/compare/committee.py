"""Several modes, or several models, as one committee whose votes are weighted by the evidence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer import Predictive
from torch import Tensor

from pyro_evidence.compare.evidence import different_data
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import entry_point, own_random_numbers
from pyro_evidence.posterior.base import NUM_DRAWS
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.predict import PredictiveMoments
from pyro_evidence.settings import seed_of, seeded


@entry_point
@dataclass(frozen=True)
class Committee:
    """Posteriors of the same data, each with its share.  Built by :func:`committee`.

    :ivar members: the posteriors.
    :ivar log_weights: log of each one's share, shape ``(P,)``; the shares add up to one.
    :ivar log_evidence: of the members together, nats: ``log sum exp`` of their log evidences and log copies.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = LaplaceEvidence(regression(Linear())).run(X, t)
    >>> from pyro_evidence import committee
    >>> found = committee([posterior, posterior])
    >>> found.log_weights.exp().tolist()
    [0.5, 0.5]
    """

    members: tuple[LaplacePosterior, ...]
    log_weights: Tensor
    log_evidence: float

    @property
    def weights(self) -> Tensor:
        """Each member's share, shape ``(P,)``."""
        return self.log_weights.exp()

    def linearised(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of a network's outputs over weights and members, before noise, ``(N, C)`` each.

        The variance has the spread between the members in it; see :func:`linearised`.
        """
        parts = [linearised(member, X) for member in self.members]
        means, variances = (torch.stack(x) for x in zip(*parts, strict=True))
        found = PredictiveMoments.over(self.weights, means, variances)
        return found.mean, found.variance

    def predict(
        self, *args: Any, num_samples: int = NUM_DRAWS, seed: int | None = 0, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Draws of the observed sites at new inputs, ``(S,) + shape`` each, every member drawn by its share.

        The weights are drawn from each member's Gaussian.  For networks that are much larger than the data warrant
        such draws are wild, and :meth:`linearised` is the better prediction.

        :param args: the model's arguments without the targets, as ``model(X)``.
        """
        seed = seed_of(seed)
        generator = seeded(seed)
        chosen = torch.multinomial(self.weights.cpu(), num_samples, replacement=True, generator=generator)
        counts = torch.bincount(chosen, minlength=len(self.members)).tolist()
        with own_random_numbers():
            torch.manual_seed(seed)
            parts = [
                Predictive(member.model, guide=member.guide, num_samples=count)(*args, **kwargs)
                for member, count in zip(self.members, counts, strict=True)
                if count
            ]
        order = torch.randperm(num_samples, generator=generator)
        names = self.members[0].state.problem.joint.observed
        return {n: torch.cat([part[n].detach() for part in parts])[order] for n in names}


@entry_point
def committee(posteriors: Sequence[LaplacePosterior], *, log_copies: Sequence[float] | None = None) -> Committee:
    """A committee with shares in proportion to the evidence.  MacKay (1992); Thodberg (1996).

    Right where the members are different modes of one model (``engine.posteriors``), or different models.  One mode
    must not be there twice: it would count twice.

    :param posteriors: one or more, of the same observed data.
    :param log_copies: log number of equivalent modes that each stands for, as ``mlp.log_copies(posterior.mode)``; they
        matter between networks of different size, and where hidden units are zero or copies.  Default: 0 each.
    :raises BadInput: for no posteriors, for numbers that do not fit them, and for different data.
    """
    if not isinstance(posteriors, Sequence):
        raise BadInput(f"posteriors is a {type(posteriors).__name__}; expected a list, such as engine.posteriors.")
    if not posteriors or not all(isinstance(p, LaplacePosterior) for p in posteriors):
        raise BadInput(
            f"a committee needs posteriors as engine.run(...) returns them; got {len(posteriors)} things. "
            "Pass them in a list."
        )
    copies = [0.0] * len(posteriors) if log_copies is None else list(log_copies)
    if len(copies) != len(posteriors) or not all(map(math.isfinite, copies)):
        raise BadInput(f"log_copies={copies}; expected {len(posteriors)} finite numbers, one per posterior.")
    if doubts := different_data({str(i): p for i, p in enumerate(posteriors)}):
        raise BadInput(doubts[0])
    heights = torch.tensor([float(p.log_hyperposterior) + c for p, c in zip(posteriors, copies, strict=True)])
    heights = heights.double()
    return Committee(tuple(posteriors), heights.log_softmax(0), float(heights.logsumexp(0)))


def linearised(posterior: LaplacePosterior, X: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a network's outputs at ``X``, before noise, logistic function or softmax, ``(N, C)`` each.

    The network is replaced by its tangent at the mode, under which its outputs are Gaussian.  Bishop (2006), eq. 5.173;
    MacKay (1992), "A practical Bayesian framework for backpropagation networks".

    :raises UnsupportedModel: for the posterior of a model that is not a plain network.
    """
    state = posterior.state
    known = state.problem.structure.network
    if known is None:
        raise UnsupportedModel(
            "linearised needs a posterior of models.mlp.MLP, with nothing added to it and no site conditioned; use "
            "Predictive(posterior.model, guide=posterior.guide, num_samples=...) for other models."
        )
    eta, J = known.at_inputs(X, state.u.unsqueeze(0))
    J = torch.where(state.problem.active, J[0], 0.0)
    solved = torch.stack([state.precision.solve(row.unsqueeze(0))[0] for row in J.flatten(0, 1)]).reshape(J.shape)
    return eta[0].detach(), (J * solved).sum(-1).detach()
