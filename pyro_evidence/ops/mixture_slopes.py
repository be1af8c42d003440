"""Exact derivatives of a mixture's Laplace evidence in its hyperparameters, the mode's own movement included."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.ops import mixture_evidence
from pyro_evidence.ops.mixture import Mixture, MixtureData, Statistics, e_step


@dataclass(frozen=True)
class Slopes:
    """Derivatives, one per restart in front."""

    noise: Tensor  # (R, K, m) in log beta; or (R, K, m, m) in the noise precision itself, symmetric
    alpha: Tensor  # (R, K, m, B) in log alpha
    logits: Tensor  # (R, K) in the logits of the mixing; sums to zero


def log_det_slopes(data: MixtureData, mixture: Mixture) -> Slopes:
    """Total derivatives of ``log |H|`` at the mode: c, d and e, dimensionless."""
    w, hypers, moved = _moving(mixture)
    H = _hessian(data, moved, e_step(data, mixture))
    # cholesky_inverse would refuse an indefinite H, which a point that is not yet a mode may have
    adjoint = torch.linalg.inv(H.detach())
    log_det = (adjoint * H).sum()
    by_w = torch.autograd.grad(log_det, w, retain_graph=True)[0]
    shift = (adjoint @ by_w.flatten(1).unsqueeze(-1)).reshape(w.shape)
    (slope,) = torch.autograd.grad(mixture_evidence.log_joint(data, moved).sum(), w, create_graph=True)
    total = log_det + (slope * shift).sum()
    return _slopes(torch.autograd.grad(total, hypers), mixture)


def log_evidence_slopes(data: MixtureData, mixture: Mixture) -> Slopes:
    """Total derivatives of the Laplace log evidence, nats, at the mode ``mixture.w``."""
    _, hypers, moved = _moving(mixture)
    partial = _slopes(torch.autograd.grad(mixture_evidence.log_joint(data, moved).sum(), hypers), mixture)
    log_det = log_det_slopes(data, mixture)
    pairs = ((getattr(partial, f), getattr(log_det, f)) for f in ("noise", "alpha", "logits"))
    return Slopes(*(a - 0.5 * b for a, b in pairs))


def _moving(mixture: Mixture) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Mixture]:
    """The weights, what the hyperparameters are differentiated in, and the mixture made of them."""
    w = mixture.w.detach().requires_grad_()
    diagonal = mixture.noise.dim() == 3
    noise = (mixture.noise.log() if diagonal else mixture.noise).detach().requires_grad_()
    log_alpha = mixture.alpha.log().detach().requires_grad_()
    logits = mixture.log_mixing.detach().requires_grad_()
    parts = (noise.exp() if diagonal else noise, logits.log_softmax(-1), log_alpha.exp())
    return w, (noise, log_alpha, logits), Mixture(w, *parts, mixture.loc)


def _hessian(data: MixtureData, mixture: Mixture, stats: Statistics) -> Tensor:
    A = mixture_evidence.full(data, mixture, stats).squeeze(1)
    return A + mixture.alpha.flatten(1).diag_embed()


def _slopes(found: tuple[Tensor, ...], mixture: Mixture) -> Slopes:
    noise, alpha, logits = (x.detach() for x in found)
    return Slopes(noise if noise.dim() == 3 else 0.5 * (noise + noise.mT), alpha, logits)


def at_mode(mixture: Mixture, w: Tensor) -> Mixture:
    """The same hyperparameters with other weights."""
    return replace(mixture, w=w)
