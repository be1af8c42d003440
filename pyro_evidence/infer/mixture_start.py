"""Where evidence-regularised EM begins."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pyro_evidence.arguments import check_count
from pyro_evidence.infer.settings import check_positive
from pyro_evidence.ops.mixture import Mixture, MixtureData
from pyro_evidence.ops.mixture_updates import Ties

Starting = Callable[[MixtureData, Mixture, Ties], Mixture]


@dataclass(frozen=True)
class Start:
    """Random weights about their prior mean, equal mixing, one width for all kernels; in standardised units.

    Wide kernels find clusters that overlap, narrow ones find small clusters: restarts take turns.

    :ivar restarts: number of starts, run as one batch.
    :ivar seed: of the weights.
    :ivar width: standard deviation of the noise in every other restart, from the first on.
    :ivar narrower: the same in the other restarts, as a share of ``width``.
    :ivar spread: standard deviation of the weights.
    :ivar alpha: prior precision, where it is learned.
    :ivar warm_up: unregularised rounds before the first regularised one.
    """

    restarts: int = 5
    seed: int = 0
    width: float = 1.0
    narrower: float = 0.3
    spread: float = 1.0
    alpha: float = 0.01
    warm_up: int = 10

    def __post_init__(self) -> None:
        check_count("Start: restarts", self.restarts)
        check_count("Start: warm_up", self.warm_up, 0)
        for name in ("width", "narrower", "alpha"):
            check_positive(f"Start: {name}", getattr(self, name))

    def __call__(self, data: MixtureData, model: Mixture, ties: Ties) -> Mixture:
        """All restarts.

        :param model: one row, the model's own hyperparameters; those that are fixed are kept.
        """
        rows = self.restarts
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(rows, *model.loc.shape, generator=generator, dtype=torch.float64).to(model.loc)
        alpha = torch.where(ties.alpha_free, self.alpha * ties.alpha_ratio, model.alpha[0])
        flat = torch.zeros_like(model.log_mixing) if ties.mixing_free else model.log_mixing
        start = replace(model, alpha=alpha, log_mixing=flat.log_softmax(-1), noise=self._noise(model, ties), w=noise)
        wide = [v.expand(rows, *v.shape[-d:]) for v, d in ((start.alpha, 3), (start.log_mixing, 1))]
        return replace(start, w=model.loc + self.spread * noise, alpha=wide[0], log_mixing=wide[1])

    def _noise(self, model: Mixture, ties: Ties) -> torch.Tensor:
        narrow = torch.arange(self.restarts, device=model.w.device) % 2
        width = torch.where(narrow > 0, self.width * self.narrower, self.width).to(model.w)[:, None, None]
        diagonal = torch.where(ties.beta_free, width**-2 * ties.beta_ratio, model.noise_diagonal[0])
        return diagonal if model.noise.dim() == 3 else diagonal.diag_embed()
