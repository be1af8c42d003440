"""Ranks of the truth among posterior draws, and whether they are uniform."""

import torch
from torch import Tensor


def rank(truth: Tensor, draws: Tensor) -> Tensor:
    """How many of the draws ``(L, ...)`` are below the truth ``(...)``: 0 to L."""
    return (draws < truth).sum(0)


def chi_square(ranks: Tensor, num_draws: int, num_bins: int) -> tuple[Tensor, Tensor]:
    """Pearson's statistic of ranks against uniform bins, and its p-value.

    :param ranks: whole numbers 0 to ``num_draws``, shape ``(S, Q)``; ``num_draws + 1`` a multiple of the
        bins.
    :return: two of shape ``(Q,)``; ``num_bins - 1`` degrees of freedom.
    """
    bins = ranks * num_bins // (num_draws + 1)
    counts = torch.stack([(bins == b).sum(0) for b in range(num_bins)]).double()
    expected = len(ranks) / num_bins
    statistic = ((counts - expected).square() / expected).sum(0)
    shape = torch.full_like(statistic, 0.5 * (num_bins - 1))
    return statistic, torch.special.gammaincc(shape, 0.5 * statistic)
