"""Between the caller's units and those in which every response has mean 0 and variance 1."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.mixture.expectation import Mixture, MixtureData, mixture_data
from pyro_evidence.mixture.updates import Ties


@dataclass(frozen=True)
class ResponseUnits:
    """``y = origin + unit * standardised y``; the origin is absorbed by the weight of a constant basis function."""

    origin: Tensor  # (m,) zeros when no basis function is constant
    unit: Tensor  # (m,)
    absorbed: Tensor  # (m, B) what the origin is as weights

    def data(self, Y: Tensor, G: Tensor | None, weight: Tensor, *, products: bool) -> MixtureData:
        """The data in standard units, with their features."""
        return mixture_data((Y - self.origin) / self.unit, G, weight=weight, products=products)

    def standard(self, mixture: Mixture) -> Mixture:
        """A mixture of the caller's units in standard ones."""
        return self._moved(mixture, self.unit, -self.absorbed / self.unit.unsqueeze(-1))

    def original(self, mixture: Mixture) -> Mixture:
        """A mixture of standard units in the caller's."""
        return self._moved(mixture, self.unit.reciprocal(), self.absorbed)

    def _moved(self, mixture: Mixture, factor: Tensor, shift: Tensor) -> Mixture:
        """Weights divided by ``factor`` and shifted, precisions to match."""
        each = factor.unsqueeze(-1)
        full = mixture.noise.dim() == 4
        noise = mixture.noise * factor * each if full else mixture.noise * factor.square()
        w, loc = mixture.w / each + shift, mixture.loc / each + shift
        return Mixture(w, noise, mixture.log_mixing, mixture.alpha * each.square(), loc)

    def ties(self, ties: Ties) -> Ties:
        """Ties with ratios in standard units, of geometric mean 1 within each group."""
        alpha = _centred(ties.alpha_ratio * self.unit.square().unsqueeze(-1), ties.alpha_group)
        return replace(
            ties,
            alpha_ratio=alpha,
            beta_ratio=_centred(ties.beta_ratio * self.unit.square(), ties.beta_group),
        )

    def log_jacobian(self, data: MixtureData) -> Tensor:
        """What the log density of all data loses by going from standard to the caller's units, nats, shape ``()``."""
        if data.observed is None:
            return data.num_data * self.unit.log().sum()
        return (data.weight @ data.observed.to(data.Y)) @ self.unit.log()


def _centred(ratio: Tensor, group: Tensor) -> Tensor:
    logs, size = ratio.log(), int(group.max()) + 1
    sums = logs.new_zeros(2, size).index_add(1, group.flatten(), torch.stack([logs, torch.ones_like(logs)]).flatten(1))
    return (logs - (sums[0] / sums[1])[group]).exp()


def response_units(Y: Tensor, G: Tensor | None, weight: Tensor) -> ResponseUnits:
    """Weighted mean and standard deviation of each response, missing ones left out; unit 1 where it does not vary."""
    seen = ~Y.isnan()
    share = weight.unsqueeze(-1) * seen
    filled = torch.where(seen, Y, 0.0)
    total = share.sum(0).clamp(min=torch.finfo(Y.dtype).tiny)  # a column without data has mean 0
    mean = (share * filled).sum(0) / total
    spread = ((share * (filled - mean).square()).sum(0) / total).sqrt()
    varies = spread > 1e-12 * mean.abs()  # a constant column keeps rounding errors about its mean
    unit = torch.where(varies, spread, 1.0)
    return _with_origin(mean, unit, G)


def _with_origin(mean: Tensor, unit: Tensor, G: Tensor | None) -> ResponseUnits:
    if G is None:
        return ResponseUnits(mean, unit, mean.unsqueeze(-1))
    constant = ((G == G[:1]).all(0) & (G[0] != 0)).nonzero().flatten()
    absorbed = torch.zeros(len(mean), G.shape[-1], dtype=mean.dtype, device=mean.device)
    if not len(constant):
        return ResponseUnits(torch.zeros_like(mean), unit, absorbed)
    absorbed[:, constant[0]] = mean / G[0, constant[0]]
    return ResponseUnits(mean, unit, absorbed)
