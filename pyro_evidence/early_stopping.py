"""The validation set that evidence does without, as a baseline: the round of lowest error on held-out data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.arguments import check_count
from pyro_evidence.errors import BadInput
from pyro_evidence.infer.evidence_em import EvidenceEM
from pyro_evidence.learning_curve import LearningCurve, learning_curve
from pyro_evidence.mixture_fit import FittedMixture
from pyro_evidence.mixture_structure import recognise_mixture
from pyro_evidence.ops import mixture_rows
from pyro_evidence.ops.mixture_density import MixtureDensity
from pyro_evidence.program import LogJoint

Arguments = tuple[Any, ...]
HoldOut = Callable[[Arguments], tuple[Arguments, Arguments]]  # the model's arguments to those to fit and to watch


@dataclass(frozen=True)
class RandomShare:
    """Hold out a random share of the data: real early stopping, which has fewer data to fit.

    :ivar share: of the rows, between 0 and 1.
    :ivar seed: of the choice.
    """

    share: float = 0.25
    seed: int = 0

    def __call__(self, args: Arguments) -> tuple[Arguments, Arguments]:
        """Rows of every tensor that is as long as the first one, at random.

        :raises BadInput: when that leaves nothing on one of the sides.
        """
        num = next((len(x) for x in args if isinstance(x, Tensor) and x.dim()), 0)
        num_out = round(self.share * num)
        if not 0 < num_out < num:
            raise BadInput(
                f"share={self.share} of {num} data holds out {num_out}; expected some, and some to fit. Choose "
                "another share."
            )
        order = torch.randperm(num, generator=torch.Generator().manual_seed(self.seed))
        return _rows(args, order[num_out:], num), _rows(args, order[:num_out], num)


def _rows(args: Arguments, rows: Tensor, num: int) -> Arguments:
    return tuple(x[rows.to(x.device)] if isinstance(x, Tensor) and x.dim() and len(x) == num else x for x in args)


@dataclass(frozen=True)
class Unseen:
    """Hold out nothing and watch these data: with the test set it is optimal early stopping, a yardstick and no method.

    :ivar args: the model's arguments, responses included.
    """

    args: Arguments

    def __call__(self, args: Arguments) -> tuple[Arguments, Arguments]:
        """All data to fit, and those to watch."""
        return args, self.args


@dataclass(frozen=True)
class EarlyStopped:
    """The mixture at the round of lowest error on the data that were watched.

    :ivar fitted: that mixture as a density: ``log_prob``, ``density``, ``responsibilities``.
    :ivar step: its round; 0 is the start.
    :ivar restart: its restart.
    :ivar curve: every round of every restart; ``curve.test`` are the data that were watched.
    """

    fitted: FittedMixture
    step: int
    restart: int
    curve: LearningCurve

    def log_prob(self, *args: Any, **kwargs: Any) -> Tensor:
        """Log density of each datum, nats, shape ``(N,)``."""
        return self.fitted.log_prob(*args, **kwargs)

    def density(self, *args: Any, **kwargs: Any) -> MixtureDensity:
        """The density, for a conditional model one for each row of the inputs."""
        return self.fitted.density(*args, **kwargs)

    def responsibilities(self, *args: Any, **kwargs: Any) -> Tensor:
        """``p(component | datum)``, shape ``(N, K)``."""
        return self.fitted.responsibilities(*args, **kwargs)


class EarlyStopping:
    """Takes the place of an ``EvidenceEM``: its rounds, stopped by the error on data that are held out.

    ``EarlyStopping(EvidenceEM(model, update=Unregularised(), start=Start(warm_up=0)))`` is the classical way to keep a
    mixture from overfitting; Husmeier (2000), sec. 4.

    :param engine: whose model, start, update and curvature are taken; its stop and deletion are not used.
    :param hold_out: :class:`RandomShare`, or :class:`Unseen` for the yardstick of optimal stopping.
    :param num_steps: rounds that are looked at.
    """

    def __init__(self, engine: EvidenceEM, *, hold_out: HoldOut = RandomShare(), num_steps: int = 100) -> None:
        check_count("num_steps", num_steps)
        self.engine, self.hold_out, self.num_steps = engine, hold_out, num_steps

    def run(self, *args: Any) -> EarlyStopped:
        """Fit to data, from scratch.

        :param args: the model's arguments.
        :raises UnsupportedModel: for a model that is not recognised as a mixture.
        :raises BadInput: when the density of the held-out data is never finite.
        """
        train, watched = self.hold_out(args)
        curve = learning_curve(self.engine, train, watched, num_steps=self.num_steps)
        error = torch.where(curve.test_nll.isfinite(), curve.test_nll, torch.inf)
        if not bool(error.isfinite().any()):
            raise BadInput(
                "the held-out data have no finite density in any round; expected data like the others. Hold out "
                "other rows, or more of them."
            )
        step, restart = divmod(int(error.argmin()), error.shape[1])
        structure = recognise_mixture(LogJoint(self.engine.model, train))
        mixture = mixture_rows.row(curve.mixtures[step], torch.tensor([restart]))
        return EarlyStopped(FittedMixture(structure, structure.consistent(mixture)), step, restart, curve)
