"""Train and test densities, number of components and evidence of a mixture's fit, round by round."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.em import advance, repeated, warmed
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.infer.evidence_em import EvidenceEM
from pyro_evidence.mixture.density import MixtureDensity
from pyro_evidence.mixture.expectation import Mixture, natural_parameters, responsibilities
from pyro_evidence.mixture.fit import MixtureRestarts, begin, watched
from pyro_evidence.mixture.updates import padded
from pyro_evidence.program.distributions import Background
from pyro_evidence.program.log_joint import LogJoint

Look = tuple[Tensor, Tensor, Tensor, Mixture]  # log densities of seen and unseen data, log evidence, parameters


@dataclass(frozen=True)
class LearningCurve:
    """One engine's way, all restarts, at the weights of each round; round 0 is the start.  Model's units, nats.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM
    >>> from pyro_evidence.compare import learning_curve
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> curve = learning_curve(EvidenceEM(gaussian_mixture(3)), (Y[::2],), (Y[1::2],), num_steps=5)
    >>> len(curve.test_nll)  # the start and five rounds
    6
    """

    train: Tensor  # (S + 1, R, N)       log density of each training datum
    test: Tensor  # (S + 1, R, N_test)   log density of each test datum
    log_evidence: Tensor  # (S + 1, R)   Laplace, the engine's curvature, at the round's weights; -inf where undefined
    mixtures: tuple[Mixture, ...]  # S + 1 of R rows
    background: Background | None = None  # a uniform density beside them

    @property
    def train_nll(self) -> Tensor:
        """Minus the mean log density of the training data, nats per datum, shape ``(S + 1, R)``."""
        return -self.train.mean(-1)

    @property
    def test_nll(self) -> Tensor:
        """Minus the mean log density of the test data, nats per datum, shape ``(S + 1, R)``."""
        return -self.test.mean(-1)

    @property
    def num_components(self) -> Tensor:
        """Components that are left, shape ``(S + 1, R)``."""
        return torch.stack([m.active.sum(-1) for m in self.mixtures])

    def density(self, step: int, restart: int = 0) -> MixtureDensity:
        """The fitted unconditional density after ``step`` rounds.

        :raises BadInput: for a conditional density, which is another one for every input.
        """
        mixture = self.mixtures[step][torch.tensor([restart])]
        if mixture.w.shape[-1] != 1:
            raise BadInput(f"the model has {mixture.w.shape[-1]} basis functions; expected an unconditional density.")
        on = mixture.active[0]
        tril = torch.linalg.cholesky(torch.linalg.inv(mixture.noise_matrix[:, on]))
        return MixtureDensity(mixture.log_mixing[:, on], mixture.w[:, on, :, 0], tril, self.background)


@entry_point
def learning_curve(
    engine: EvidenceEM, train: tuple[Any, ...], test: tuple[Any, ...], *, num_steps: int
) -> LearningCurve:
    """Run the rounds of ``engine`` and look at every one of them; no stopping, no deletion.

    Of the ``num_steps`` rounds the first ``engine.initial.warm_up`` are unregularised, as in the engine.

    :param train: the model's arguments, responses included.
    :param test: the same for data that the engine does not see.
    :raises UnsupportedModel: for a model that is not recognised as a mixture.
    :raises BadInput: when the arguments are not in a tuple, one of data alone being ``(Y,)``.
    """
    if wrong := [type(args).__name__ for args in (train, test) if not isinstance(args, tuple)]:
        raise BadInput(f"train and test: got {wrong[0]}; expected a tuple of the model's arguments, such as (Y,).")
    task = begin(LogJoint(engine.model, train), engine)
    unseen = task.unseen(LogJoint(engine.model, test))

    def look(batch: MixtureRestarts) -> Look:
        """Log densities ``(R, N)`` in the model's units, nats."""
        mixture, log_unit, both = batch.expected.mixture, task.units.unit.log(), []
        for data in (batch.expected.data, unseen):
            natural = natural_parameters(mixture, data.layout)
            log_density = responsibilities(data.columns(natural.shape[-1]), natural, data.floor)[1] + data.log_share
            observed = None if data.observed is None else data.observed.to(log_unit)
            both.append(log_density - (log_unit.sum() if observed is None else observed @ log_unit))
        whole = padded(mixture, task.units.standard(task.structure.start))
        return both[0], both[1], batch.log_evidence - task.jacobian, task.units.original(whole)

    step, begun = watched(advance, look), replace(task.batch, seen=(look(task.batch),))
    num_warm = min(engine.initial.warm_up, num_steps)
    end = repeated(warmed(begun, num_warm, step), num_steps - num_warm, step)
    seen, new, evidence, mixtures = zip(*end.seen, strict=True)
    return LearningCurve(
        torch.stack(seen), torch.stack(new), torch.stack(evidence), mixtures, task.structure.background
    )
